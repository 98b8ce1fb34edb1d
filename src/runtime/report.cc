// What a context tells about itself: statistics, memory, traces, snapshots for diagnosis.
#include <algorithm>

#include "base/clock.h"
#include "base/json_writer.h"
#include "runtime/context.h"

namespace unjam {
namespace {

double ms_since(std::uint64_t ns) { return static_cast<double>(monotonic_ns() - ns) / 1e6; }

CallId call_id(const Submitted& s) {
  return {s.key->state.tag, s.n, s.key->group->name, s.key->name};
}

}  // namespace

std::vector<const Submitted*> Context::pending_in_order() const {
  std::vector<const Submitted*> all;
  for (const auto& s : slots_) {
    if (s != nullptr) all.push_back(s.get());
  }
  for (const auto& [tag, key] : keys_) {
    for (const auto& s : key->waiting) all.push_back(s.get());
  }
  std::sort(all.begin(), all.end(),
            [](const Submitted* a, const Submitted* b) { return a->order < b->order; });
  return all;
}

void Context::running_words(std::vector<std::uint64_t>& words) const {
  words.clear();
  if (memory_ == nullptr) return;
  for (std::uint32_t l = 0; l < memory_->rank().num_lanes; ++l) {
    words.push_back(load_acquire(memory_->lane(l).running));
  }
}

RankSnapshot Context::snapshot() const {
  RankSnapshot r;
  r.rank = rank_;
  r.holds = settings_.policy == UNJAM_POLICY_HOLD;
  std::lock_guard lock(mutex_);
  // The words first: a lane that has left since shows another word at the second look.
  running_words(r.words);
  r.running.assign(r.words.size(), -1);
  for (const Submitted* p : pending_in_order()) {
    const Submitted& s = *p;
    // Complete in the engine, only not yet taken out of the CQ. Whoever reads (acquire, above) that
    // a lane is inside of its next invocation sees that the former one is done.
    if (load_acquire(s.key->state.done) > s.n) continue;
    const std::size_t i = r.pending.size();
    r.pending.push_back({call_id(s), s.call.signature.text(), s.key->group->members,
                         ms_since(s.since_ns), !has_root(s.call.signature.kind)});
    for (std::size_t l = 0; l < r.words.size(); ++l) {
      const std::uint64_t slot = r.words[l] & 0xffff;
      if (slot != 0 && slots_[slot - 1].get() == &s) r.running[l] = static_cast<int>(i);
    }
  }
  for (const auto& [tag, key] : keys_) r.calls[tag] = key->submitted;
  return r;
}

std::vector<CallRecord> Context::pending_calls() const {
  std::lock_guard lock(mutex_);
  std::vector<CallRecord> calls;
  for (const Submitted* s : pending_in_order()) {
    calls.push_back(
        {call_id(*s), s->call.signature, s->key->group->members, ms_since(s->since_ns)});
  }
  return calls;
}

Context::Found Context::find_call(std::uint64_t tag, std::uint64_t n, Signature& signature) const {
  std::lock_guard lock(mutex_);
  const auto found = keys_.find(tag);
  if (found == keys_.end() || n >= found->second->submitted) return Found::kNotCalled;
  const Key& key = *found->second;
  if (key.submitted - n > key.history.size()) {
    for (const Submitted* s : pending_in_order()) {
      if (s->key != &key || s->n != n) continue;
      signature = s->call.signature;
      return Found::kKnown;
    }
    return Found::kCalled;
  }
  signature = key.history[n % key.history.size()];
  return Found::kKnown;
}

void Context::stats(unjamStats_t& out) const {
  std::lock_guard lock(mutex_);
  out.submitted = submitted_;
  out.completed = completed_;
  out.pending = submitted_ - completed_;
  if (memory_ == nullptr) return;
  out.lanes = memory_->rank().num_lanes;
  for (std::uint32_t l = 0; l < memory_->rank().num_lanes; ++l) {
    LaneStats& s = memory_->lane(l).stats;
    out.preemptions += load_relaxed(s.preemptions);
    out.quantum_switches += load_relaxed(s.quantum_switches);
    out.context_loads += load_relaxed(s.context_loads);
    out.context_saves += load_relaxed(s.context_saves);
    out.spins += load_relaxed(s.spins);
    out.slices += load_relaxed(s.slices);
    out.bytes_sent += load_relaxed(s.bytes_sent);
    out.borrowed += load_relaxed(s.borrowed);
    out.starts += load_relaxed(s.starts);
    out.quits += load_relaxed(s.quits);
    out.residency_quits += load_relaxed(s.residency_quits);
  }
}

std::string Context::info_json() const {
  std::lock_guard lock(mutex_);
  const ArenaShape& shape = world_->shape();
  JsonWriter w;
  w.begin_object();
  w.field("version", UNJAM_VERSION).field("device", "host").field("rank", rank_);
  w.field("ranks", world_->ranks());
  w.key("settings").begin_object();
  for (const Variable& v : variables()) w.field(v.name, settings_.*v.field);
  w.end_object();

  const std::uint64_t endpoint = sizeof(OutEndpoint) + sizeof(InEndpoint);
  w.key("memory").begin_object();
  w.field("connector_bytes", shape.connector_bytes());
  w.field("escape_bytes_per_key_peer_lane",
          shape.connector_bytes() + sizeof(CreditCell) + sizeof(DirectoryEntry));
  w.field("endpoint_bytes_per_key_peer_lane", endpoint);
  w.field("borrow_bytes_per_peer_lane", shape.borrow_bytes());
  w.field("context_bytes_per_invocation",
          std::uint64_t{sizeof(Invocation) + sizeof(Sqe) + sizeof(std::uint64_t) +
                        2 * sizeof(std::uint32_t)} +
              shape.lanes * (sizeof(DynamicContext) + sizeof(QueueLink) + sizeof(std::uint16_t)));
  w.field("engine_bytes_reserved", memory_ == nullptr ? 0 : memory_->bytes());
  w.field("arena_bytes_reserved", shape.total_bytes());
  w.field("arena_bytes_committed", world_->arena_committed(rank_));
  std::uint64_t keys_bytes = 0;
  for (const auto& [tag, key] : keys_) {
    keys_bytes += sizeof(Key) + key->lanes.size() * sizeof(LaneKey) +
                  key->out.size() * sizeof(OutEndpoint) + key->in.size() * sizeof(InEndpoint);
  }
  w.field("keys_bytes", keys_bytes);
  w.end_object();

  w.key("peers").begin_array();
  for (std::uint32_t p = 0; memory_ != nullptr && p < shape.ranks; ++p) {
    if (static_cast<int>(p) == rank_) continue;
    std::uint64_t opened = 0, reclaimed = 0;
    for (std::uint32_t l = 0; l < shape.lanes; ++l) {
      opened += load_relaxed(memory_->lane(l).transport.peers[p].opened);
      reclaimed += load_relaxed(memory_->lane(l).transport.peers[p].reclaimed);
    }
    w.begin_object()
        .field("rank", p)
        .field("connectors_held", opened)
        .field("connectors_taken_over", reclaimed)
        .field("connector_bytes_held", opened * shape.connector_bytes())
        .end_object();
  }
  w.end_array();

  w.key("lanes").begin_array();
  for (std::uint32_t l = 0; memory_ != nullptr && l < shape.lanes; ++l) {
    LaneStats& s = memory_->lane(l).stats;
    w.begin_object().field("lane", l);
    w.field("preemptions", load_relaxed(s.preemptions));
    w.field("quantum_switches", load_relaxed(s.quantum_switches));
    w.field("context_loads", load_relaxed(s.context_loads));
    w.field("context_saves", load_relaxed(s.context_saves));
    w.field("spins", load_relaxed(s.spins));
    w.field("slices", load_relaxed(s.slices));
    w.field("bytes_sent", load_relaxed(s.bytes_sent));
    w.field("borrowed", load_relaxed(s.borrowed));
    w.field("starts", load_relaxed(s.starts));
    w.field("quits", load_relaxed(s.quits));
    w.field("residency_quits", load_relaxed(s.residency_quits));
    w.field("passes", load_relaxed(s.passes));
    w.field("queue_peak", load_relaxed(s.queue_peak));
    w.field("no_connector", load_relaxed(s.no_connector));
    w.end_object();
  }
  w.end_array();

  w.key("keys").begin_array();
  for (const auto& group : groups_) {
    for (const auto& [name, key] : group->keys) {
      std::uint64_t preemptions = 0, spins = 0, slices = 0, time_ns = 0;
      for (LaneKey& lane : key->lanes) {
        preemptions += load_relaxed(lane.preemptions);
        spins += load_relaxed(lane.spins);
        slices += load_relaxed(lane.slices);
        time_ns += load_relaxed(lane.time_ns);
      }
      w.begin_object()
          .field("group", group->name)
          .field("key", name)
          .field("group_size", static_cast<std::uint64_t>(group->members.size()))
          .field("submitted", key->submitted)
          .field("completed", key->completed)
          .field("preemptions", preemptions)
          .field("spins", spins)
          .field("slices", slices)
          .field("time_ms", static_cast<double>(time_ns) / 1e6);
      w.field("algorithm", key->plan == nullptr ? "" : to_string(key->plan->algorithm));
      w.field("failed", key->failed.message);
      w.end_object();
    }
  }
  w.end_array().end_object();
  return w.text();
}

std::size_t Context::trace(unjamTraceEvent_t* events, std::size_t capacity) const {
  std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (std::uint32_t l = 0; memory_ != nullptr && l < memory_->rank().num_lanes; ++l) {
    LaneState& lane = memory_->lane(l);
    if (lane.trace_capacity == 0) continue;
    const std::uint64_t end = load_acquire(lane.trace_written);
    // Each lane may fill an equal share of what the caller holds.
    const std::uint64_t share = (capacity - count) / (memory_->rank().num_lanes - l);
    const std::uint64_t kept = std::min({end, lane.trace_capacity, share});
    const std::size_t first_count = count;
    for (std::uint64_t i = end - kept; i < end; ++i) {
      TraceEvent& e = lane.trace[i % lane.trace_capacity];
      unjamTraceEvent_t& out = events[count++];
      out.time_ns = load_acquire(e.time_ns);
      out.key_hash = load_acquire(e.tag);
      const std::uint64_t what = load_acquire(e.what);
      out.n = static_cast<std::uint32_t>(what >> 32);
      out.lane = static_cast<std::uint16_t>(what >> 16);
      out.type = static_cast<std::uint16_t>(what);
    }
    // The lane may have overwritten the oldest while we copied: drop those (and the one it may be
    // writing now).
    const std::uint64_t now = load_acquire(lane.trace_written);
    const std::uint64_t safe = now + 1 > lane.trace_capacity ? now + 1 - lane.trace_capacity : 0;
    const std::uint64_t begin = end - kept;
    if (now != end && safe > begin) {
      const auto drop = static_cast<std::size_t>(std::min(safe - begin, kept));
      std::copy(events + first_count + drop, events + count, events + first_count);
      count -= drop;
    }
  }
  return count;
}

}  // namespace unjam
