#include "reshard/info.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "base/json_writer.h"
#include "reshard/multicast.h"
#include "reshard/paper.h"
#include "reshard/rank_plan.h"
#include "reshard/simulate.h"

namespace unjam::reshard {
namespace {

constexpr std::size_t kMostComparedTasks = 1024;

// Of a rank at most: the largest bundles that can be under way with it at once.
std::int64_t staging_most(const Plan& plan) {
  std::vector<std::vector<std::int64_t>> bytes(plan.ports.port_of.size());
  for (const Bundle& bundle : plan.bundles) {
    for (const Hop& hop : bundle.hops) {
      bytes[static_cast<std::size_t>(hop.rank)].push_back(bundle.bytes);
    }
  }
  std::int64_t most = 0;
  for (std::vector<std::int64_t>& mine : bytes) {
    std::sort(mine.begin(), mine.end(), std::greater<>());
    mine.resize(std::min(mine.size(), static_cast<std::size_t>(plan.request.options.window)));
    std::int64_t sum = 0;
    for (const std::int64_t b : mine) sum += b;
    most = std::max(most, sum);
  }
  return most;
}

void write_bundles(const Plan& plan, JsonWriter* json) {
  json->key("bundle_list").begin_array();
  for (const Bundle& bundle : plan.bundles) {
    json->begin_object();
    json->field("round", bundle.round).field("bytes", bundle.bytes);
    json->field("stripes", bundle.num_stripes);
    json->key("hops").begin_array();
    for (const Hop& hop : bundle.hops) {
      json->begin_object().field("rank", hop.rank).field("parent", hop.parent).end_object();
    }
    json->end_array().end_object();
  }
  json->end_array();
}

template <class T>
void write_list(const char* name, const std::vector<T>& values, JsonWriter* json) {
  json->key(name).begin_array();
  for (const T value : values) json->value(value);
  json->end_array();
}

void write_shape(const char* name, bool there, const std::vector<std::int64_t>& shape,
                 JsonWriter* json) {
  if (there) {
    write_list(name, shape, json);
  } else {
    json->key(name).null();
  }
}

void write_segments(const char* name, const std::vector<Segment>& segments, JsonWriter* json) {
  json->key(name).begin_array();
  for (const Segment& segment : segments) {
    json->begin_object().field("tensor", segment.tensor).field("at", segment.at);
    write_list("start", segment.start, json);
    write_list("size", segment.size, json);
    json->end_object();
  }
  json->end_array();
}

}  // namespace

std::string hex(std::uint64_t digest) {
  char buffer[17];
  std::snprintf(buffer, sizeof(buffer), "%016llx", static_cast<unsigned long long>(digest));
  return buffer;
}

std::string plan_json(const Plan& plan, bool list) {
  std::uint32_t rounds = 0;
  for (const Bundle& bundle : plan.bundles) rounds = std::max(rounds, bundle.round + 1);
  std::uint64_t cells = 0;
  for (const std::uint32_t of : plan.class_of) cells += plan.classes[of].cells.count();
  JsonWriter json;
  json.begin_object();
  json.field("digest", hex(plan.digest));
  json.field("tensors", static_cast<std::uint64_t>(plan.request.tensors.size()));
  json.field("classes", static_cast<std::uint64_t>(plan.classes.size()));
  json.field("bound", plan.bound).field("busiest", plan.busiest());
  json.field("received", plan.received());
  json.field("cells", cells);
  json.field("stripes", static_cast<std::uint64_t>(plan.stripes.size()));
  json.field("copies", static_cast<std::uint64_t>(plan.copies.size()));
  json.field("bundles", static_cast<std::uint64_t>(plan.bundles.size()));
  json.field("rounds", rounds);
  json.field("window", plan.request.options.window);
  json.field("max_bytes", plan.request.options.max_bytes);
  json.field("staging_most", staging_most(plan));
  json.key("ports").begin_array();
  for (std::size_t p = 0; p < plan.loads.out.size(); ++p) {
    json.begin_object().field("host", plan.ports.host[p]).field("nic", plan.ports.nic[p]);
    json.field("out", plan.loads.out[p]).field("in", plan.loads.in[p]).end_object();
  }
  json.end_array();
  if (list) write_bundles(plan, &json);
  json.end_object();
  return json.text();
}

std::string rank_json(const Plan& plan, std::int32_t rank) {
  const RankPlan mine = rank_plan(plan, rank);
  JsonWriter json;
  json.begin_object().field("rank", rank);
  json.key("tensors").begin_array();
  for (std::uint32_t t = 0; t < plan.request.tensors.size(); ++t) {
    const LocalShapes shapes = local_shapes(plan, t, rank);
    json.begin_object().field("name", plan.request.tensors[t].name);
    write_shape("src", shapes.in_src, shapes.src, &json);
    write_shape("dst", shapes.in_dst, shapes.dst, &json);
    json.end_object();
  }
  json.end_array().key("steps").begin_array();
  for (const Step& step : mine.steps) {
    json.begin_object().field("bundle", step.bundle);
    json.field("bytes", plan.bundles[step.bundle].bytes).field("parent", step.parent);
    write_list("children", step.children, &json);
    write_segments("pack", step.pack, &json);
    write_segments("unpack", step.unpack, &json);
    json.end_object();
  }
  json.end_array().key("copies").begin_array();
  for (const CopyBox& copy : mine.copies) {
    json.begin_object().field("tensor", copy.tensor);
    write_list("src_start", copy.box.src_start, &json);
    write_list("dst_start", copy.box.dst_start, &json);
    write_list("size", copy.box.size, &json);
    json.end_object();
  }
  json.end_array().end_object();
  return json.text();
}

std::string check_json(const CheckReport& report) {
  JsonWriter json;
  json.begin_object().field("ok", report.ok).field("error", report.error);
  json.field("elements", report.elements).end_object();
  return json.text();
}

std::string comparison_json(const Plan& plan, const Effort& effort) {
  const Tasks tasks = tasks_of(plan);
  if (tasks.tasks.size() > kMostComparedTasks) {
    throw BadRequest("there are " + std::to_string(tasks.tasks.size()) +
                     " pairs of tiles that meet, and the paper's planners take too long for more "
                     "than " +
                     std::to_string(kMostComparedTasks) + ": compare fewer tensors or ranks");
  }
  const Tasks copies = copies_of(plan), bundles = bundles_as_tasks(plan);
  std::vector<int> senders;
  for (const Task& task : bundles.tasks) senders.push_back(task.senders[0]);
  const auto in_order = [&](const Schedule& schedule) {
    return std::llround(time_in_order(tasks, schedule));
  };
  const std::int64_t deep = in_order(plan_depth_first(tasks, effort.nodes));
  const std::int64_t greedy = in_order(plan_greedy(tasks, effort.tries, effort.seed));
  JsonWriter json;
  json.begin_object();
  json.field("tasks", static_cast<std::uint64_t>(tasks.tasks.size()));
  json.field("bound", plan.bound);
  json.field("naive", std::int64_t{in_order(plan_naive(tasks))});
  json.field("size", std::int64_t{in_order(plan_by_size(tasks, true))});
  json.field("depth_first", deep).field("greedy", greedy);
  json.field("paper", std::min(deep, greedy));
  json.field("copies", busiest_port(copies, plan_by_size(copies, true).sender));
  json.field("plan", std::int64_t{std::llround(time_all_in_flight(bundles, senders, 0, true))});
  json.end_object();
  return json.text();
}

}  // namespace unjam::reshard
