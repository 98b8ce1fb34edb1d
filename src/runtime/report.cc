// What a context tells about itself: statistics, traces, snapshots for diagnosis.
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "runtime/context.h"

namespace unjam {
namespace {

double ms_since(std::uint64_t ns) { return static_cast<double>(monotonic_ns() - ns) / 1e6; }

CallId call_id(const Submitted& s) {
  return {s.key->state.tag, s.n, s.key->group->name, s.key->name};
}

}  // namespace

namespace {

// How long the control thread waits for a context's lock.
constexpr std::uint64_t kPatienceNs = 200'000'000;
// Who has just waited in vain waits no longer than this for a while: a peer may ask of many calls.
constexpr std::uint64_t kLittlePatienceNs = 1'000'000;
constexpr std::uint64_t kInVainNs = 1'000'000'000;

// What each lane's engine waits for, with the context's lock; none waits longer than the call is
// old.
std::vector<EngineWait> engine_waits(const Submitted& s, double age_ms) {
  std::vector<EngineWait> waits;
  if (s.lacks() != nullptr) return waits;  // no engine knows of it
  const Key& key = *s.key;
  const Geometry& g = s.plan->geometry;
  const std::uint64_t done = load_acquire(key.state.done);
  for (std::uint32_t l = g.first_lane; l < std::uint32_t{g.first_lane} + g.lanes; ++l) {
    EngineWait& w = waits.emplace_back();
    w.lane = static_cast<int>(l);
    if (done < s.n) {
      w.what = EngineWait::kTurn;
      w.n = done;
      continue;
    }
    const std::uint64_t word = load_relaxed(key.lanes[l].lack);
    const auto what = static_cast<Lack>(word & 3);
    const auto peer = static_cast<std::uint32_t>(word >> 2) & kSomePeer;
    if (what == Lack::kUnknown || (word >> 18 & kLackUses) != (s.n & kLackUses)) {
      continue;  // not begun
    }
    if (what == Lack::kNothing) {
      w.what = EngineWait::kNothing;
      continue;
    }
    w.what = what == Lack::kData ? EngineWait::kData : EngineWait::kRoom;
    if (peer < key.group->members.size()) w.rank = key.group->members[peer];
    const std::uint64_t now = monotonic_ns() >> 20;
    const auto passed = static_cast<std::uint32_t>(now) - static_cast<std::uint32_t>(word >> 32);
    // Not finer than 2^20 ns.
    w.since_ms = std::min(static_cast<double>(std::uint64_t{passed} << 20) / 1e6, age_ms);
  }
  return waits;
}

}  // namespace

std::vector<const Submitted*> Context::pending_in_order() const {
  std::vector<const Submitted*> all;
  for (const auto& s : slots_) {
    if (s != nullptr) all.push_back(s.get());
  }
  for (const auto& [tag, key] : keys_) {
    for (const auto& s : key->waiting) all.push_back(s.get());
    for (const auto& s : key->halves) all.push_back(s.get());
  }
  std::sort(all.begin(), all.end(),
            [](const Submitted* a, const Submitted* b) { return a->order < b->order; });
  return all;
}

void Context::running_words(std::vector<std::uint64_t>& words) const {
  words.clear();
  // On CUDA the host's copy is as old as the last refreshed(): no word is better than an old one.
  if (memory_ == nullptr || cuda()) return;
  for (std::uint32_t l = 0; l < memory_->rank().num_lanes; ++l) {
    words.push_back(load_acquire(memory_->lane(l).running));
  }
}

// The lock, for the control thread, which must go on to hear peers, and to answer who asks why
// nothing moves, whoever has the lock and why. (Nobody is to wait for a device or a peer with it.)
// False: not got in a while.
std::unique_lock<std::mutex> Context::look() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  const std::uint64_t begun = monotonic_ns();
  // Relaxed: a hint.
  const std::uint64_t in_vain = in_vain_ns_.load(std::memory_order_relaxed);
  const std::uint64_t patience = begun - in_vain < kInVainNs ? kLittlePatienceNs : kPatienceNs;
  while (!lock && monotonic_ns() - begun < patience) {
    usleep(50);
    static_cast<void>(lock.try_lock());  // the loop asks
  }
  if (!lock && patience == kPatienceNs) {
    in_vain_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  }
  return lock;
}

// That an invocation is over is seen in the CQ only, which nobody may have looked at since: what is
// in there is neither pending nor late. (On the host a key's `done` tells, too, but not of what was
// cancelled: an abort may be over before the engine has heard of it.)
std::unique_lock<std::mutex> Context::look_and_reap() {
  std::unique_lock lock = look();
  if (lock) reap_locked();
  return lock;
}

RankSnapshot Context::snapshot() {
  RankSnapshot r;
  r.rank = rank_;
  r.holds = settings_.policy == UNJAM_POLICY_HOLD;
  if (const Rooms* const rooms = world_->rooms()) r.lacks = rooms->usage(rank_).lacks;
  const std::unique_lock lock = look_and_reap();
  if (!lock) {
    r.busy = true;
    return r;
  }
  // The words first: a lane that has left since shows another word at the second look.
  running_words(r.words);
  r.running.assign(r.words.size(), -1);
  for (const Submitted* p : pending_in_order()) {
    const Submitted& s = *p;
    // Complete in the engine, only not yet taken out of the CQ. Whoever reads (acquire, above) that
    // a lane is inside of its next invocation sees that the former one is done.
    if (load_acquire(s.key->state.done) > s.n) continue;
    const std::size_t i = r.pending.size();
    const double age_ms = ms_since(s.since_ns);
    std::string text = s.call.signature.text();
    if (s.lacks() != nullptr) text += std::string(" without its ") + s.lacks();
    r.pending.push_back({call_id(s), std::move(text), s.key->group->members, age_ms,
                         !has_root(s.call.signature.kind),
                         // CUDA's engine keeps it in the device's memory.
                         cuda() ? std::vector<EngineWait>{} : engine_waits(s, age_ms)});
    for (std::size_t l = 0; l < r.words.size(); ++l) {
      const std::uint64_t slot = r.words[l] & 0xffff;
      if (slot != 0 && slots_[slot - 1].get() == &s) r.running[l] = static_cast<int>(i);
    }
  }
  r.untaken = untaken();
  r.calls = call_counts();
  return r;
}

// Of keys that have nothing under way. On CUDA it is not known here what peers have taken.
std::vector<PendingCall> Context::untaken() const {
  constexpr std::uint64_t kUses = 8;  // the latest of a key: a peer may be behind by some
  std::vector<PendingCall> calls;
  const auto& lingering = key_lists_[static_cast<std::size_t>(KeyList::kLingering)];
  for (auto it = lingering.rbegin(); it != lingering.rend(); ++it) {
    const Key& key = **it;
    if (key.group->members.size() == 1 || (!cuda() && undelivered_to(key).empty())) continue;
    const std::uint64_t first = key.submitted - std::min(key.submitted, kUses);
    for (std::uint64_t n = first; n < key.submitted; ++n) {
      const Signature* s = key.recall(n);
      if (s == nullptr) continue;
      if (calls.size() == kMostUntaken) return calls;
      calls.push_back({{key.state.tag, n, key.group->name, key.name},
                       s->text(),
                       key.group->members,
                       0,
                       !has_root(s->kind)});
    }
  }
  return calls;
}

std::vector<CallRecord> Context::pending_calls() {
  std::vector<CallRecord> calls;
  const std::unique_lock lock = look_and_reap();
  if (!lock) return calls;  // the next time
  for (const Submitted* s : pending_in_order()) {
    // As above: only nobody has asked for its completion yet.
    if (load_acquire(s->key->state.done) > s->n) continue;
    calls.push_back({call_id(*s), s->call.signature, s->key->group->members, ms_since(s->since_ns),
                     s->lacks()});
  }
  return calls;
}

Context::Found Context::find_call(std::uint64_t tag, std::uint64_t n, Signature& signature) const {
  const std::unique_lock lock = look();
  if (!lock) return Found::kBusy;
  if (n >= uses_of(tag)) return Found::kNotCalled;
  const auto found = keys_.find(tag);
  if (found == keys_.end()) return Found::kCalled;
  const Key& key = *found->second;
  if (const Signature* latest = key.recall(n); latest != nullptr) {
    signature = *latest;
    return Found::kKnown;
  }
  for (const Submitted* s : pending_in_order()) {
    if (s->key != &key || s->n != n) continue;
    signature = s->call.signature;
    return Found::kKnown;
  }
  return Found::kCalled;
}

void Context::stats(unjamStats_t& out) const {
  const std::unique_lock fresh = refreshed();
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
    // A part before its whole: lanes go on meanwhile. (Acquire: the next is read later.)
    out.residency_quits += load_acquire(s.residency_quits);
    out.idle_quits += load_acquire(s.idle_quits);
    out.stuck_quits += load_acquire(s.stuck_quits);
    out.quits += load_acquire(s.quits);
    out.starts += load_relaxed(s.starts);
  }
}

// Not with mutex_: it may wait for the device, which may wait for a peer.
std::unique_lock<std::mutex> Context::refreshed() const {
  std::unique_lock fresh(refreshing_);
  if (streams_ != nullptr) streams_->refresh(memory_->rank());
  return fresh;
}

std::size_t Context::trace(unjamTraceEvent_t* events, std::size_t capacity) const {
  const std::unique_lock fresh = refreshed();
  std::lock_guard lock(mutex_);
  std::size_t count = 0;
  std::vector<TraceEvent> copied;
  for (std::uint32_t l = 0; memory_ != nullptr && l < memory_->rank().num_lanes; ++l) {
    TraceRing& trace = memory_->lane(l).trace;
    // Each lane may fill an equal share of what the caller holds.
    const std::size_t share = (capacity - count) / (memory_->rank().num_lanes - l);
    copied.resize(std::min<std::size_t>(share, trace.places));
    copied.resize(trace.newest(copied.data(), copied.size()));
    for (const TraceEvent& e : copied) {
      unjamTraceEvent_t& out = events[count++];
      out.time_ns = e.time_ns;
      out.key_hash = e.tag;
      out.n = static_cast<std::uint32_t>(e.what >> 32);
      out.lane = static_cast<std::uint16_t>(e.what >> 16);
      out.type = static_cast<std::uint16_t>(e.what);
    }
  }
  return count;
}

}  // namespace unjam
