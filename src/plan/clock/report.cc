// What the clock found, as JSON.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include "base/json_writer.h"
#include "plan/clock/timing.h"
#include "plan/common.h"

namespace unjam {
namespace {

constexpr std::size_t kMostPathSlices = 1000;  // shown of a path; the first ones and the last ones

// With more digits than the writer's own: a ring of many ranks takes a second.
void number(JsonWriter* json, const char* name, double value) {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), "%.10g", value);
  json->key(name).json(text.data());
}
void time(JsonWriter* json, const char* name, Picoseconds value) {
  number(json, name, static_cast<double>(value) / kPicosecondsAUs);
}

std::string step_name(std::uint16_t flags) {
  std::string name;
  const auto add = [&](unsigned flag, const char* word) {
    if ((flags & flag) != 0) name.append(name.empty() ? "" : "_").append(word);
  };
  add(kRecv, "recv");
  add(kReduce, "reduce");
  add(kCopy, "copy");
  add(kSend, "send");
  return name.empty() ? "nothing" : name;
}

const char* cause_name(Cause cause) {
  constexpr std::array<const char*, 4> kNames = {"start", "own", "data", "room"};
  return kNames[static_cast<std::size_t>(cause)];
}

// Where the time of a path goes.
struct PathTotals {
  std::array<Picoseconds, 10> us = {};
  static constexpr std::array<const char*, 10> kNames = {
      "late start",      "lanes' slices",   "waiting for a processor", "room that comes back",
      "links, queueing", "links, bytes",    "links, latency",          "network, queueing",
      "network, bytes",  "network, latency"};

  explicit PathTotals(const std::vector<PathSlice>& path) {
    for (const PathSlice& s : path) {
      us[1] += s.end - s.start;
      us[2] += s.core;
      if (s.cause == Cause::kStart) us[0] += s.start - s.core;
      if (s.cause == Cause::kRoom) us[3] += s.latency;
      if (s.cause != Cause::kData) continue;
      const std::size_t first = s.between_nodes ? 7 : 4;
      us[first] += s.queue;
      us[first + 1] += s.transmit;
      us[first + 2] += s.latency;
    }
  }
};

void write_slice(JsonWriter* json, const PathSlice& s) {
  json->begin_object().field("rank", s.rank).field("lane", s.lane).field("step", s.step);
  json->field("does", step_name(s.flags)).field("loop", s.loop);
  json->field("cause", cause_name(s.cause));
  if (s.cause == Cause::kData || s.cause == Cause::kRoom) {
    json->field("peer", s.peer).field("way", s.between_nodes ? "network" : "link");
    time(json, "latency_us", s.latency);
  }
  if (s.cause == Cause::kData) {
    json->field("port", to_string(s.port));
    time(json, "queue_us", s.queue);
    time(json, "bytes_us", s.transmit);
  }
  time(json, "processor_us", s.core);
  time(json, "start_us", s.start);
  time(json, "end_us", s.end);
  json->end_object();
}

void write_path(JsonWriter* json, const RunResult& run) {
  json->key("path").begin_object();
  time(json, "us", run.end);
  const PathTotals totals(run.path);
  json->key("shares").begin_array();
  for (std::size_t i = 0; i < totals.us.size(); ++i) {
    if (totals.us[i] == 0) continue;
    json->begin_object().field("what", PathTotals::kNames[i]);
    time(json, "us", totals.us[i]);
    number(json, "share", static_cast<double>(totals.us[i]) / static_cast<double>(run.end));
    json->end_object();
  }
  json->end_array();
  const std::size_t all = run.path.size(), half = kMostPathSlices / 2;
  json->field("left_out", static_cast<std::uint64_t>(all - std::min(all, kMostPathSlices)));
  json->key("slices").begin_array();
  for (std::size_t i = 0; i < all; ++i) {
    if (all > kMostPathSlices && i >= half && i < all - half) continue;
    write_slice(json, run.path[i]);
  }
  json->end_array().end_object();
}

}  // namespace

std::string timing_json(const ClockRequest& request, const Machine& machine, const Timing& timing,
                        bool path) {
  const PlanRequest& r = request.request;
  const std::uint64_t bytes = vector_elements(r) * dtype_bytes(r.dtype);
  const std::int64_t gpus = machine.gpus_per_node;
  JsonWriter json;
  json.begin_object().field("algorithm", timing.algorithm).field("kind", to_string(r.kind));
  json.field("dtype", to_string(r.dtype)).field("count", r.count).field("bytes", bytes);
  json.field("ranks", timing.ranks).field("nodes", (timing.ranks + gpus - 1) / gpus);
  number(&json, "us", timing.us);
  number(&json, "gb_per_s", timing.us > 0 ? static_cast<double>(bytes) / timing.us / 1e3 : 0);
  json.field("ranks_run", timing.ranks_run).field("exact", timing.exact);
  json.field("lanes", timing.lanes).field("chunk_bytes", timing.chunk_bytes);
  json.field("loops", timing.loops).field("loops_run", timing.loops_run);
  number(&json, "loop_us", timing.period_us);
  number(&json, "loop_spread", timing.period_spread);
  json.field("repeats", timing.repeats).field("repeats_run", timing.repeats_run);
  json.field("slices", timing.run.slices).field("messages", timing.run.messages);
  json.field("waits_for_room", timing.run.waits_for_room);
  json.key("busiest").begin_array();
  for (std::size_t c = 0; c < timing.run.use.size(); ++c) {
    const PortUse& use = timing.run.use[c];
    if (use.busy == 0) continue;
    json.begin_object().field("class", to_string(static_cast<PortClass>(c)));
    json.field("port", use.port).field("of", use.ports);
    number(&json, "share", static_cast<double>(use.busy) / static_cast<double>(timing.run.end));
    json.end_object();
  }
  json.end_array();
  if (path) write_path(&json, timing.run);
  json.end_object();
  return json.text();
}

}  // namespace unjam
