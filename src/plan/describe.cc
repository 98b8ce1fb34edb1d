#include "plan/describe.h"

#include <algorithm>
#include <utility>

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
  json += field("root", std::to_string(request.root));
  return json;
}

std::string primitive_json(const Primitive& p) {
  std::string json = "{\"text\": " + quoted(describe(p));
  json += field("op", quoted(primitive_name(p)));
  json += field("part", p.part);
  json += field("lag", p.lag);
  json += field("with_next", (p.flags & kWithNext) != 0 ? "true" : "false");
  json += field("recv_peer", (p.flags & kRecv) != 0 ? std::to_string(p.recv_peer) : "null");
  json += field("send_peer", (p.flags & kSend) != 0 ? std::to_string(p.send_peer) : "null");
  json += field("contribute", (p.flags & kContribute) != 0 ? "true" : "false");
  json += field("finish", (p.flags & kFinish) != 0 ? "true" : "false");
  return json + "}";
}

}  // namespace

std::string primitive_name(const Primitive& primitive) {
  constexpr struct {
    unsigned flag;
    const char* word;
  } kWords[] = {{kRecv, "recv"},        {kGather, "gather"},  {kCollect, "collect"},
                {kReduce, "reduce"},    {kCopy, "copy"},      {kSend, "send"},
                {kSendAll, "send_all"}, {kScatter, "scatter"}};
  std::string name;
  for (const auto& [flag, word] : kWords) {
    if ((primitive.flags & flag) == 0) continue;
    if (!name.empty()) name += '_';
    name += word;
  }
  return name.empty() ? "nothing" : name;
}

std::string describe(const Primitive& primitive) {
  std::string text = primitive_name(primitive);
  if ((primitive.flags & kScatter) != 0) return text + " every part to its rank";
  if ((primitive.flags & kCollect) != 0) return text + " every part from its rank";
  text += " part " + std::to_string(primitive.part);
  if ((primitive.flags & kGather) != 0) text += " from all";
  if ((primitive.flags & kRecv) != 0) text += " from " + std::to_string(primitive.recv_peer);
  if ((primitive.flags & kSend) != 0) text += " to " + std::to_string(primitive.send_peer);
  if ((primitive.flags & kSendAll) != 0) text += " to all";
  if ((primitive.flags & kSendAll) != 0 && (primitive.flags & kRecv) != 0) text += " others";
  return text;
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
      const std::vector<Primitive>& program = plans[r].primitives;
      for (std::size_t i = 0; i < program.size(); ++i) {
        if (i > 0) json += ", ";
        json += primitive_json(program[i]);
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
  options.slots = slots > 0 ? slots : static_cast<int>(limits.escape_slots);
  options.slot_bytes = limits.escape_slot_bytes;
  result = check_plans(request, plans, options);
  if (ok != nullptr) *ok = result.ok;
  return check_json(request, plans, result, list);
}

}  // namespace unjam
