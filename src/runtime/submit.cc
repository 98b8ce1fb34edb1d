// Submission: checks, agreement, and the way into the engine.
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/hash.h"
#include "engine/set_plan.h"
#include "plan/common.h"
#include "plan/registry.h"
#include "plan/selector.h"
#include "runtime/call_checks.h"
#include "runtime/context.h"
#include "runtime/texts.h"
#include "transport/announcement.h"

namespace unjam {

// The largest call (count, in bytes) of which the submitting thread makes the first attempt: what
// it copies at most takes less time than waking another thread.
constexpr std::uint64_t kAttemptBytes = 128 * 1024;

Result Context::submit(unjamGroup& group, const char* name, const Call& call,
                       unjamRequest** request) {
  if (Result r = check_call(group, call); !r.ok()) return r;
  if (Result r = check_buffers(group, call); !r.ok()) return r;
  std::unique_lock lock(mutex_);
  if (closed()) return closed_why_;
  Result result;
  Key* key = find_or_create_key(group, name, result);
  if (key == nullptr) return result;
  if (key->registered != nullptr) {
    return {UNJAM_ERROR_INVALID_USAGE, name_text(*key) + " is registered (as " +
                                           key->registered->signature.text(false) +
                                           "): run the registered collective, or use another key"};
  }
  return submit_locked(lock, group, *key, call, request);
}

Result Context::submit(unjamCollective& collective, const Call& call, unjamRequest** request) {
  if (Result r = check_call(*collective.group, call); !r.ok()) return r;
  if (Result r = check_buffers(*collective.group, call); !r.ok()) return r;
  std::unique_lock lock(mutex_);
  if (closed()) return closed_why_;
  return submit_locked(lock, *collective.group, *collective.key, call, request);
}

Result Context::transfer(unjamGroup& group, const char* name, Call call, int peer, bool sends,
                         unjamRequest** request) {
  unjamGroup* channel = nullptr;
  if (Result r = open_channel(group, peer, sends, channel); !r.ok()) return r;
  call.signature.root = channel->source;
  call.signature.peer = channel->destination;
  if (channel->is_own()) {
    call.half = sends ? Half::kSend : Half::kRecv;
    return submit_half(*channel, name, call, request);
  }
  return submit(*channel, name, call, request);
}

Result Context::probe(unjamGroup& group, const char* name, int peer, bool& ready) {
  unjamGroup* channel = nullptr;
  if (Result r = open_channel(group, peer, false, channel); !r.ok()) return r;
  const std::uint64_t tag = key_tag(*channel, name == nullptr ? "" : name);
  std::uint64_t n = 0;
  {
    std::lock_guard lock(mutex_);
    if (closed()) return closed_why_;
    if (channel->destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    n = uses_of(tag);
    if (Result r = past_the_end(*channel, tag, n); !r.ok()) return r;
    const Result* failure = nullptr;
    if (const auto key = keys_.find(tag); key != keys_.end()) {
      if (key->second->over()) failure = &key->second->failed;
    } else if (const auto record = records_.find(tag);
               record != records_.end() && record->second.failure != nullptr) {
      if (n >= record->second.failure->from) failure = &record->second.failure->why;
    }
    if (failure != nullptr) return *failure;
    if (channel->is_own()) {
      const auto key = keys_.find(tag);
      ready = key != keys_.end() && !key->second->halves.empty() &&
              key->second->halves.front()->call.half == Half::kSend;
      return {};
    }
  }
  ready = world_->called(tag, n, group.members[static_cast<std::size_t>(peer)]);
  return {};
}

// Whether another rank is known to have called something else as the key's next use, or that use
// has failed already; then it is ended on all ranks. Lets go of the lock to look at the other
// ranks.
Result Context::check_agreement(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                                const Signature& signature) {
  const std::uint64_t n = key.submitted;
  if (group.members.size() == 1) return {};
  if (differs(group, key.state.tag, n, signature)) {
    const Result why = differs_result(signature, key.name, group.name, n, group.gone.front().why);
    lock.unlock();
    world_->refuse(key.state.tag, n, group.members, why.message);
    lock.lock();
    return closed() ? closed_why_ : why;
  }
  const Announced others = announce(world_->announcements(group.members, key.state.tag),
                                    key.state.tag, n, signature.hash());
  world_->announced(group.members, key.state.tag);
  if (others == Announced::kAgreed) return {};
  lock.unlock();
  World::Verdict verdict =
      world_->compare(*this, key.state.tag, n, signature, group.members,
                      use_text(signature, key.name, group.name, n), others == Announced::kEnded);
  lock.lock();
  if (closed()) return closed_why_;
  return {verdict.code, std::move(verdict.text)};
}

Result Context::submit_locked(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                              const Call& call, unjamRequest** request) {
  std::optional<Pin> pin(key);
  // First, since it may let go of the lock for a while; then nothing does until the call is made,
  // and counted.
  Result disagreement;
  for (bool settled = false; !settled;) {
    // A key's uses come to the device in their order: the first brings what is set up.
    while (key.launching && !closed_) launched_.wait(lock);
    // Before peers hear of the call: one that is refused must end nothing on them.
    if (closed()) return closed_why_;
    const std::uint64_t n = key.submitted;
    if (Result r = past_the_end(group, key.state.tag, n); !r.ok()) return r;
    if (group.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    disagreement = check_agreement(lock, group, key, call.signature);
    if (closed()) return closed_why_;
    settled = n == key.submitted;  // no other thread has made this use meanwhile
  }
  if (Result r = past_the_end(group, key.state.tag, key.submitted); !r.ok()) return r;
  if (group.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
  // It has failed on the others before it was called here: as if it failed after its call.
  if (key.submitted == key.failed_from && disagreement.ok()) disagreement = key.failed;
  if (key.submitted >= key.failed_from && disagreement.ok()) {
    return {key.failed.code, name_text(key) +
                                 " is out of use since an earlier invocation failed (" +
                                 key.failed.message + "): use another key"};
  }
  // (What fails at once needs no room.)
  if (disagreement.ok()) {
    if (Result r = room_for(key); !r.ok()) return r;
  }
  if (call.stream_order != UNJAM_STREAM_NONE && !cuda()) return no_streams();
  if (Result r = plan_call(group, key, call.signature); !r.ok()) return r;
  if (Result r = meet_neighbours(key); !r.ok()) return r;
  auto s = std::make_unique<Submitted>();
  s->call = call;
  s->key = &key;
  s->since_ns = monotonic_ns();
  return enter(lock, pin, s, request, disagreement);
}

Result Context::no_streams() {
  return {UNJAM_ERROR_INVALID_USAGE,
          "the host device has no streams: make the call with UNJAM_STREAM_NONE"};
}

Result Context::room_for(const Key& key) {
  if (key.list == KeyList::kBusy) return {};
  const auto limit = static_cast<std::size_t>(settings_.max_active_keys);
  if (keys_at(KeyList::kBusy) >= limit) {
    take_completions();
    if (keys_at(KeyList::kBusy) >= limit) {
      return {UNJAM_ERROR_RESOURCES,
              std::to_string(limit) +
                  " keys of this rank have invocations under way, as many as are allowed: wait for "
                  "some, or raise UNJAM_MAX_ACTIVE_KEYS (max_active_keys) on all ranks",
              /*transient=*/true};
    }
  }
  // Both kinds hold connectors, of which there are twice the limit.
  const auto held = [&] {
    return keys_at(KeyList::kBusy) + keys_at(KeyList::kLingering) -
           (key.list == KeyList::kLingering ? 1 : 0);
  };
  if (held() >= 2 * limit) {
    take_completions();
    retire_lingering(keys_at(KeyList::kLingering));
    if (held() >= 2 * limit) {
      return {UNJAM_ERROR_RESOURCES,
              std::to_string(2 * limit) +
                  " keys of this rank have invocations under way or data that peers have yet to "
                  "take, as many as there is room for (twice the limit): let the peers call them, "
                  "or raise UNJAM_MAX_ACTIVE_KEYS (max_active_keys) on all ranks",
              /*transient=*/true};
    }
  }
  return {};
}

// Of the call: the key's plan, made where it is for another one.
Result Context::plan_call(const unjamGroup& group, Key& key, const Signature& signature) {
  Signature planned_for = signature;
  planned_for.match_text = {};  // nothing to the plan
  if (key.plan == nullptr || !(key.planned_for == planned_for)) {
    PlanRequest r;
    // A message to oneself is a copy, as a broadcast in a group of one.
    r.kind = group.is_own() ? Kind::kBroadcast : signature.kind;
    r.dtype = signature.dtype;
    r.op = signature.op;
    r.count = signature.count;
    r.ranks = static_cast<int>(group.members.size());
    r.rank = group.rank;
    r.root = signature.kind == Kind::kSendRecv ? 0 : signature.root;  // as in the channel
    r.hosts = group.hosts ? &*group.hosts : nullptr;
    PlanLimits limits;
    limits.guaranteed_slots = world_->shape().guaranteed_slots;
    limits.guaranteed_slot_bytes = world_->shape().guaranteed_slot_bytes;
    limits.lanes = static_cast<std::uint16_t>(world_->shape().lanes);
    limits.device = static_cast<Device>(settings_.device);
    limits.lines = settings_.lines > 0;
    limits.packet_slot_bytes = packet_slot_bytes(settings_, world_->ranks());
    limits.pool_slot_bytes = world_->shape().pool_slot_bytes;
    limits.overlap = settings_.overlap != 0;
    limits.together = settings_.overlap == 2;
    if (settings_.dma != 0) {
      limits.carried_from = static_cast<std::uint64_t>(settings_.dma_from);
      limits.carried_lanes = static_cast<std::uint16_t>(settings_.dma_lanes);
    }
    limits.ranks_a_core = static_cast<std::uint16_t>(world_->ranks_a_core());
    std::optional<Algorithm> algorithm;
    if (settings_.algorithm >= 0) algorithm = static_cast<Algorithm>(settings_.algorithm);
    // What is asked for in all calls serves where it can, and others choose themselves.
    if (algorithm && !suits_hosts(*algorithm, r)) algorithm.reset();
    if (signature.algorithm >= 0) algorithm = static_cast<Algorithm>(signature.algorithm);
    std::string error;
    std::optional<Plan> plan = make_plan(r, limits, algorithm, &error);
    if (!plan) {
      return {UNJAM_ERROR_INVALID_ARGUMENT, "no plan for " + signature.text() + ": " + error};
    }
    // Both are made before either is the key's: what fails for want of memory changes nothing.
    auto made = std::make_shared<const Plan>(std::move(*plan));
    std::shared_ptr<const Lowered> lowered;
    if (streams_ != nullptr) {
      lowered =
          std::make_shared<const Lowered>(lower(*made, r.ranks, r.rank, streams_->lower_limits()));
    }
    key.plan = std::move(made);
    key.met = false;
    key.lowered = std::move(lowered);
    key.planned_for = planned_for;
  }
  return {};
}

unjamRequest* Context::make_request(Submitted& s) {
  s.request = new unjamRequest;
  s.request->context = shared_from_this();
  s.request->submitted = &s;
  s.request->retain();  // one for the caller, one for us
  return s.request;
}

Result Context::enter(std::unique_lock<std::mutex>& lock, std::optional<Pin>& pin,
                      std::unique_ptr<Submitted>& s, unjamRequest** request,
                      const Result& disagreement) {
  const Call& call = s->call;  // (until it is complete)
  Key& key = *s->key;
  const unjamGroup& group = *key.group;
  s->plan = key.plan;
  s->lowered = key.lowered;
  // What can fail for want of memory or threads comes before anything is counted, or is taken back.
  if (key.history.size() < Key::kPlaces) key.history.reserve(key.history.size() + 1);
  // A successor of a pending invocation cannot start before that ends, so it may wait here without
  // harm; a key's first must not wait for anything but its peers.
  const bool starts_key = key.in_engine == 0 && key.waiting.empty();
  const std::size_t in_engine = slots_.size() - free_slots_.size();
  // With streams nothing may wait here: its place in the stream is now.
  if (cuda() && disagreement.ok() && free_slots_.empty()) {
    take_completions();
    if (free_slots_.empty()) {
      return {UNJAM_ERROR_RESOURCES,
              std::to_string(slots_.size()) +
                  " invocations of this rank are under way, as many as there "
                  "is room for: wait for some",
              /*transient=*/true};
    }
  }
  const bool waits =
      !cuda() && (!key.waiting.empty() || (!starts_key && in_engine >= slots_.size() / 2));
  if (call.callback != nullptr || waits) need_background();
  if (request != nullptr) make_request(*s);

  s->n = key.submitted;
  // A group of one needs no engine on a GPU: its calls are copies in streams.
  const bool alone = cuda() && group.members.size() == 1;
  const bool sync = call.stream_order == UNJAM_STREAM_SYNC;
  const bool in_stream = call.stream_order != UNJAM_STREAM_NONE || alone;
  unjamRequest* const handle = s->request;
  if (request != nullptr) *request = handle;  // before a callback may want it
  if (in_stream && disagreement.ok()) {
    Result result = admit_in_stream(lock, std::move(s));
    if (!result.ok()) {
      if (handle != nullptr) handle->release();
      if (request != nullptr) *request = nullptr;
      return result;
    }
    if (sync || alone) return {};
    pin.reset();  // what is busy stays
    const std::shared_ptr<Context> keep = shared_from_this();
    lock.unlock();  // a launch may wait for the device
    streams_->ring_and_attempt();
    return {};
  }
  count(*s);
  if (!disagreement.ok()) {
    // Ends as every invocation does that fails after its call, only at once.
    complete(*s, disagreement);
    s = nullptr;
    completions_.notify();
    return {};
  }
  move_key(key, KeyList::kBusy);
  pin.reset();  // what is busy stays
  if (waits) {
    key.waiting.push_back(std::move(s));
    ++waiting_;
    return {};
  }
  // Small, and nothing else under way: the first attempt costs this thread less than waking another
  // one would, and often completes the call or leaves all that is missing to the peers.
  const bool attempts = in_engine == 0 && daemon_->can_help() &&
                        call.signature.count * dtype_bytes(call.signature.dtype) <= kAttemptBytes;
  admit(std::move(s));
  if (!attempts) {
    daemon_->ring(0);
    return {};
  }
  const std::shared_ptr<Context> keep = shared_from_this();  // the call may complete, and we end
  lock.unlock();
  daemon_->ring_and_attempt();
  return {};
}

std::uint64_t Context::output_place(const unjamGroup& group, const Call& call) const {
  const std::uint64_t bytes = buffer_bytes(group, call).recv;
  if (bytes == 0) return 0;
  if (!heap_->holds(call.recv, bytes)) return windows_.place(call.recv, bytes);
  return static_cast<std::uint64_t>(static_cast<const unsigned char*>(call.recv) -
                                    world_->bases()[rank_]);
}

Invocation Context::make_invocation(const Submitted& s, std::uint16_t slot) const {
  const Key& key = *s.key;
  const unjamGroup& group = *key.group;
  const Plan& plan = *s.plan;
  const Signature& signature = s.call.signature;
  Invocation inv;
  set_plan(plan, static_cast<std::uint16_t>(group.rank), &inv);
  inv.lowered = s.lowered.get();
  inv.members = group.members16.data();
  inv.key = key.engine_state;
  // Where a rank's plan does not use a buffer the pointer may be null; it is not touched.
  inv.input = s.call.send;
  inv.output = s.call.recv;
  inv.output_place = output_place(group, s.call);
  if (!row_of(signature.kind).buffers) {
    // Any element will do: what counts is that nobody has the sum before all have given theirs.
    inv.input = inv.output = world_->bases()[rank_] + world_->shape().scratch();
  }
  inv.n = inv.use = s.n;
  // (The library's own element is in memory that the first lane alone touches.)
  if (cuda() && has_inline_flags(plan.protocol) && row_of(signature.kind).buffers) {
    inv.geometry.first_lane =
        spread_lanes(key.state.tag, plan.geometry.lanes, world_->shape().lanes);
  }
  inv.group_size = static_cast<std::uint16_t>(group.members.size());
  inv.priority = s.call.priority;
  inv.op = signature.op;
  inv.slot = slot;
  inv.serial = s.serial;
  std::uint64_t seed = hash_combine(key.state.tag, s.n);
  seed = hash_combine(seed, signature.hash());
  seed = hash_combine(seed, static_cast<std::uint64_t>(plan.algorithm) << 8 |
                                static_cast<std::uint64_t>(plan.protocol) |
                                static_cast<std::uint64_t>(settings_.overlap) << 16);
  seed =
      hash_combine(seed, std::uint64_t{plan.geometry.chunk} << 32 |
                             std::uint64_t{plan.geometry.lanes} << 16 | plan.geometry.first_lane);
  inv.seed = seed;
  return inv;
}

void Context::admit(std::unique_ptr<Submitted> s) {
  const std::uint16_t slot = free_slots_.back();
  free_slots_.pop_back();
  Key& key = *s->key;
  s->in_engine = true;
  s->slot = slot;
  s->serial = ++serials_;
  const Invocation inv = make_invocation(*s, slot);
  ++key.in_engine;
  enter_slot(slot, *s);
  slots_[slot] = std::move(s);
  daemon_->completes(slot, key.ledger == nullptr ? nullptr : &key.ledger->done, inv.n + 1);
  daemon_->submit(inv, key.fresh ? &key.state : nullptr);  // the caller rings
  key.fresh = false;
}

// Into the engine by way of a stream, or beside it; a group of one's, which the engine has nothing
// to do with, into a stream alone. The stream may be full, for as long as what it waits for does
// not come: other threads make their calls meanwhile. So all is counted before: the invocation may
// be complete before this thread has the lock again, and is not looked at any more. On failure
// nothing has happened.
Result Context::admit_in_stream(std::unique_lock<std::mutex>& lock, std::unique_ptr<Submitted> s) {
  const std::uint16_t slot = free_slots_.back();
  free_slots_.pop_back();
  Key& key = *s->key;
  void* const stream = s->call.stream;
  const std::shared_ptr<void> called = s->called;
  const auto order = s->call.stream_order;
  const bool alone = key.group->members.size() == 1;
  const std::uint64_t copied = alone ? copied_alone(*key.group, s->call) : 0;
  s->slot = slot;
  s->serial = ++serials_;
  s->in_engine = true;
  if (s->other != nullptr) {  // whoever waits for that one waits for this one
    s->other->slot = slot;
    s->other->serial = s->serial;
    s->other->in_engine = true;
  }
  Invocation inv = make_invocation(*s, slot);
  // First: what follows may wait until this call is cancelled, see post_notice().
  enter_slot(slot, *s);
  count(*s);
  ++key.in_engine;
  move_key(key, KeyList::kBusy);
  const bool is_fresh = key.fresh;
  if (!alone) key.fresh = false;  // else the engine never hears of it
  const KeyState* const fresh = is_fresh ? &key.state : nullptr;
  slots_[slot] = std::move(s);

  std::string error;
  bool queued = false;
  try {
    const Launching launching(*this, &key);
    if (alone) {
      queued = streams_->queue_copy(lock, stream, order != UNJAM_STREAM_NONE, inv, copied,
                                    called.get(), error);
    } else if (order == UNJAM_STREAM_SYNC) {
      queued = streams_->queue_call(lock, stream, inv, fresh, error);
    } else {
      bool marked = false;
      inv.ticket = inv.serial;
      queued = streams_->queue_mark(lock, stream, slot, inv.ticket, marked, error);
      if (!marked) inv.ticket = 0;
      if (queued) streams_->submit(inv, fresh);  // the caller rings
    }
  } catch (const std::bad_alloc&) {  // nothing was queued
    error = "out of memory";
  }
  return queued ? Result{} : take_back(slot, is_fresh, error);
}

void Context::count(Submitted& s) {
  Key& key = *s.key;
  s.order = orders_++;
  ++submitted_;
  ++key.submitted;
  key.remember(s.n, s.call.signature);
  if (key.ledger != nullptr) {
    store_release(key.ledger->calls[s.n % kLedgerCalls], ledger_call(s.n, s.call.signature.hash()));
  }
  ++key.group->pending;
  end_if_over(*key.group);
  if (s.call.callback != nullptr) ++callbacks_;
  log_called(s);
}

// What count() and admit_in_stream() counted of an invocation that the stream has refused. Nobody
// else has used its key since (Key::launching), and the engine does not know it.
Result Context::take_back(std::uint16_t slot, bool fresh, const std::string& error) {
  const std::unique_ptr<Submitted> s = std::move(slots_[slot]);
  log_ended(*s, {UNJAM_ERROR_SYSTEM, "its stream has refused it: " + error});
  Key& key = *s->key;
  notices_.leave(slot);
  free_slots_.push_back(slot);
  if (s->request != nullptr) {
    s->request->submitted = nullptr;
    s->request->release();
  }
  if (s->call.callback != nullptr) --callbacks_;
  --submitted_;
  --key.group->pending;
  key.take_back(s->n);
  --key.submitted;
  key.fresh = fresh;
  --key.in_engine;
  if (s->other != nullptr) {  // goes on waiting
    s->other->in_engine = false;
    key.halves.push_front(std::move(s->other));
  }
  if (!key.busy()) rest(key);
  tidy();
  completions_.notify();  // a thread that takes completions for the callback
  return {UNJAM_ERROR_SYSTEM, error};
}

Result Context::stream_wait(unjamRequest& request, void* stream) {
  if (!cuda()) {
    return {UNJAM_ERROR_INVALID_USAGE,
            "the host device has no streams: wait for the request with unjamWait"};
  }
  std::unique_lock lock(mutex_);
  reap_locked();
  if (request.several) {
    // What it waits for is the host's: no other call of this rank is served meanwhile.
    lock.unlock();
    if (request.done.load(std::memory_order_acquire)) return {};
    std::string error;
    return boxes_->mover().wait_in(stream, request.end.word, request.end.value, error)
               ? Result{}
               : Result{UNJAM_ERROR_SYSTEM, error};
  }
  const Submitted* s = request.submitted;
  if (s == nullptr) return {};  // it is complete: what is queued from now on comes after
  // (Or the other one's stream has yet to take the copy.)
  if (s->key->group->is_own() && (!s->in_engine || s->key->launching)) return lacks_half(*s);
  std::string error;
  const Launching launching(*this);
  const bool queued = streams_->queue_wait(lock, stream, s->slot, s->serial, error);
  return queued ? Result{} : Result{UNJAM_ERROR_SYSTEM, error};
}

}  // namespace unjam
