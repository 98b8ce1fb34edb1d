#include "plan/describe.h"

#include <algorithm>
#include <utility>

#include "plan/host_table.h"
#include "plan/registry.h"
#include "plan/selector.h"

namespace unjam {
namespace {

// A JSON string. Nothing but our own words comes here, but an error text must never break the JSON.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string field(const char* name, const std::string& json) {
  return ", \"" + std::string(name) + "\": " + json;
}
std::string field(const char* name, std::uint64_t value) {
  return field(name, std::to_string(value));
}

// The request can be what the planners have refused.
template <typename Enum>
std::string name_of(Enum value, int values) {
  const int i = static_cast<int>(value);
  return i < values ? quoted(to_string(value)) : std::to_string(i);
}

std::string head(const PlanRequest& request, bool ok, const std::string& error) {
  std::string json = std::string("{\"ok\": ") + (ok ? "true" : "false");
  json += field("error", quoted(error));
  json += field("kind", name_of(request.kind, kNumKinds));
  json += field("dtype", name_of(request.dtype, kNumDTypes));
  json += field("op", name_of(request.op, kNumOps));
  json += field("count", request.count);
  json += field("ranks", std::to_string(request.ranks));
  if (request.hosts != nullptr) json += field("hosts", std::to_string(request.hosts->hosts()));
  json += field("root", std::to_string(request.root));
  return json;
}

std::string list_json(const std::vector<int>& ranks) {
  std::string json = "[";
  for (const int q : ranks) json += (json.size() > 1 ? ", " : "") + std::to_string(q);
  return json + "]";
}

std::string primitive_json(const Plan& plan, std::size_t i, int ranks) {
  const Primitive& p = plan.primitives[i];
  const auto flag = [&](unsigned f) { return (p.flags & f) != 0 ? "true" : "false"; };
  std::string json = "{\"text\": " + quoted(describe(plan, i, ranks));
  json += field("op", quoted(primitive_name(plan, i, ranks)));
  json += field("part", p.part);
  json += field("lag", p.lag);
  json += field("with_next", flag(kWithNext));
  json += field("recv_peers", list_json(ranks_received_from(plan, i)));
  json += field("send_peers", list_json(ranks_sent_to(plan, i)));
  json += field("contribute", flag(kContribute));
  json += field("partials", flag(kPartials));
  json += field("finish", flag(kFinish));
  return json + "}";
}

// Whether a set is all that it can be: all others, or all but the one that a slice came from.
bool is_all(const Plan& plan, std::size_t i, int ranks) {
  const Primitive& p = plan.primitives[i];
  const std::size_t others = static_cast<std::size_t>(ranks) - 1;
  const bool from_one = (p.flags & kRecv) != 0 && !from_set(p);
  return ranks_sent_to(plan, i).size() == others - (from_one ? 1 : 0);
}

// "all", "3" or "2, 5".
std::string text_of(const std::vector<int>& peers, bool set, std::size_t all) {
  if (set && peers.size() == all) return "all";
  std::string text;
  for (const int q : peers) text += (text.empty() ? "" : ", ") + std::to_string(q);
  return text;
}

}  // namespace

std::string primitive_name(const Plan& plan, std::size_t i, int ranks) {
  const Primitive& p = plan.primitives[i];
  const auto has = [&](unsigned flag) { return (p.flags & flag) != 0; };
  std::string name;
  const auto add = [&](bool is_so, const char* word) {
    if (!is_so) return;
    if (!name.empty()) name += '_';
    name += word;
  };
  add(has(kRecv), has(kCollect) ? "collect" : from_set(p) ? "gather" : "recv");
  add(has(kReduce), "reduce");
  add(has(kCopy), "copy");
  add(has(kSend), has(kScatter)            ? "scatter"
                  : !to_set(p)             ? "send"
                  : is_all(plan, i, ranks) ? "send_all"
                                           : "send_several");
  return name.empty() ? "nothing" : name;
}

std::string describe(const Plan& plan, std::size_t i, int ranks) {
  const Primitive& p = plan.primitives[i];
  const auto others = static_cast<std::size_t>(ranks) - 1;
  const std::vector<int> from = ranks_received_from(plan, i), to = ranks_sent_to(plan, i);
  std::string text = primitive_name(plan, i, ranks);
  if ((p.flags & (kScatter | kCollect)) != 0) {
    const bool scatters = (p.flags & kScatter) != 0;
    text += scatters ? " every part to its rank" : " every part from its rank";
    const std::vector<int>& peers = scatters ? to : from;
    return peers.size() == others ? text : text + ", of " + text_of(peers, true, others);
  }
  text += " part " + std::to_string(p.part);
  if ((p.flags & kRecv) != 0) text += " from " + text_of(from, from_set(p), others);
  if ((p.flags & kSend) == 0) return text;
  const bool from_one = (p.flags & kRecv) != 0 && !from_set(p);
  if (to_set(p) && from_one && is_all(plan, i, ranks)) return text + " to all others";
  return text + " to " + text_of(to, to_set(p), others);
}

std::string check_json(const PlanRequest& request, const std::vector<Plan>& plans,
                       const CheckResult& result, bool list) {
  std::string json = head(request, result.ok, result.error);
  if (!plans.empty()) {
    const Plan& plan = plans.front();
    std::size_t longest = 0;
    for (const Plan& p : plans) longest = std::max(longest, p.primitives.size());
    json += field("algorithm", quoted(to_string(plan.algorithm)));
    json += field("protocol", quoted(to_string(plan.protocol)));
    json += field("parts", plan.geometry.parts);
    const std::uint16_t empty = plan.geometry.empty_part;
    json += field("empty_part", empty == kNoPart ? "null" : std::to_string(empty));
    json += field("by_lane", plan.geometry.by_lane ? "true" : "false");
    json += field("chunk", plan.geometry.chunk);
    json += field("first_lane", plan.geometry.first_lane);
    json += field("lanes", plan.geometry.lanes);
    json += field("primitives_max", longest);
  }
  json += field("loops", result.loops);
  json += field("bytes_sent_max", result.bytes_sent_max);
  json += field("bytes_sent_total", result.bytes_sent_total);
  json += field("steps", result.steps);
  json += field("slots_needed", static_cast<std::uint64_t>(result.slots_needed));
  json += field("slots", std::to_string(result.slots));
  json += field("slot_bytes", result.slot_bytes);
  if (list) {
    json += ", \"programs\": [";
    for (std::size_t r = 0; r < plans.size(); ++r) {
      json += std::string(r > 0 ? ", " : "") + "{\"rank\": " + std::to_string(r) +
              ", \"primitives\": [";
      for (std::size_t i = 0; i < plans[r].primitives.size(); ++i) {
        if (i > 0) json += ", ";
        json += primitive_json(plans[r], i, request.ranks);
      }
      json += "]}";
    }
    json += "]";
  }
  return json + "}";
}

std::string plan_check_json(const PlanRequest& request, const PlanLimits& limits,
                            std::optional<Algorithm> algorithm, int slots, bool list, bool* ok) {
  std::vector<Plan> plans;
  CheckResult result;
  PlanRequest own = request;
  own.rank = 0;
  do {  // also with no ranks at all: the planner says what is wrong with that
    std::optional<Plan> plan = make_plan(own, limits, algorithm, &result.error);
    if (!plan) {
      if (ok != nullptr) *ok = false;
      return head(request, false, result.error) + "}";
    }
    plans.push_back(*std::move(plan));
  } while (++own.rank < request.ranks);
  CheckOptions options;
  options.slots = slots > 0 ? slots : static_cast<int>(limits.guaranteed_slots);
  options.slot_bytes = limits.guaranteed_slot_bytes;
  result = check_plans(request, plans, options);
  if (ok != nullptr) *ok = result.ok;
  return check_json(request, plans, result, list);
}

}  // namespace unjam
