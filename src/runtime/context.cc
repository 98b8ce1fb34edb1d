#include "runtime/context.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "base/hash.h"
#include "plan/selector.h"
#include "transport/announcement.h"

namespace unjam {
namespace {

Result gone_result(int rank, const std::string& why) {
  return {UNJAM_ERROR_PEER, "rank " + std::to_string(rank) + " is gone: " + why};
}

std::string name_text(const std::string& key, const std::string& group) {
  return "key '" + key + "' of group '" + group + "'";
}

}  // namespace

std::uint64_t key_tag(const unjamGroup& group, std::string_view key) {
  return hash_combine(group.tag, hash_bytes(key)) | 2;  // neither 0 nor 1, see arena.h
}

std::uint64_t Signature::hash() const {
  std::uint64_t h = mix64(static_cast<std::uint64_t>(kind));
  h = hash_combine(h, static_cast<std::uint64_t>(dtype));
  h = hash_combine(h, static_cast<std::uint64_t>(op));
  h = hash_combine(h, static_cast<std::uint64_t>(root));
  return hash_combine(h, count);
}

std::string Signature::text() const {
  std::string t =
      std::string(to_string(kind)) + "(count=" + std::to_string(count) + ", " + to_string(dtype);
  if (reduces(kind)) t += std::string(", ") + to_string(op);
  if (has_root(kind)) t += ", root=" + std::to_string(root);
  return t + ")";
}

Context::Context(std::shared_ptr<World> world, int rank, const Settings& settings)
    : world_(std::move(world)), rank_(rank), settings_(settings) {}

Context::~Context() {
  // After shutdown() this finds nothing; a context that failed to start must not stay attached.
  world_->detach(this, {});
}

void Context::start() {
  memory_ = std::make_unique<EngineMemory>(settings_, world_->shape(), world_->bases(), rank_);
  const std::uint32_t slots = memory_->rank().num_slots;
  slots_.resize(slots);
  for (std::uint32_t i = slots; i-- > 0;) free_slots_.push_back(static_cast<std::uint16_t>(i));
  HostDaemonOptions options;
  options.block_threads = static_cast<unsigned>(settings_.block_threads);
  options.delay_seed = static_cast<std::uint64_t>(settings_.delay_seed);
  options.delay_max_us = static_cast<std::uint32_t>(settings_.delay_max_us);
  daemon_ = std::make_unique<HostDaemon>(memory_->rank(), completions_, options);
  world_->attach(this);
}

Result Context::pending_error(const char* what, std::size_t pending) const {
  std::string text = std::string(what) + " with " + std::to_string(pending) +
                     " invocation(s) pending, among them ";
  std::size_t named = 0;
  for (const Submitted* s : pending_in_order()) {
    if (named == 3) break;
    text += (named == 0 ? "" : ", ") + name_text(s->key->name, s->key->group->name);
    ++named;
  }
  return {UNJAM_ERROR_INVALID_USAGE, text + ": wait for them, or abort the context first"};
}

Result Context::shutdown() {
  std::map<std::uint64_t, std::uint64_t> calls;
  {
    std::unique_lock lock(mutex_);
    if (background_.get_id() == std::this_thread::get_id()) {
      return {UNJAM_ERROR_INVALID_USAGE,
              "a callback cannot destroy its own context: do it in another thread"};
    }
    reap_locked();
    const std::size_t pending = submitted_ - completed_;
    if (closed_) {
      // Aborted: the engine is dropping what is left; wait for that (it waits for nobody).
      while (submitted_ != completed_) {
        const std::uint32_t epoch = completions_.epoch();
        reap_locked();
        if (submitted_ == completed_) break;
        lock.unlock();
        completions_.wait(epoch, 100000);
        lock.lock();
      }
    } else if (pending != 0) {
      return pending_error("the context was to be destroyed", pending);
    }
    closed_ = true;
    closed_why_ = {UNJAM_ERROR_INVALID_USAGE, "the context was destroyed"};
    for (const auto& [tag, key] : keys_) calls[tag] = key->submitted;
  }
  world_->detach(this, std::move(calls));
  daemon_.reset();  // joins the engine's threads: nobody touches the arenas on our behalf any more
  {
    std::lock_guard lock(mutex_);
    background_stop_ = true;
  }
  background_changed_.notify_all();
  completions_.notify();
  if (background_.joinable()) background_.join();
  std::lock_guard lock(mutex_);
  collectives_.clear();
  keys_.clear();
  groups_.clear();
  return {};
}

void Context::abort(unjamResult_t code, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    reap_locked();
    closed_ = true;
    closed_why_ = {code, why};
    if (first_error_.ok()) first_error_ = closed_why_;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] != nullptr) cancel_locked(i, closed_why_);
    }
    for (auto& [tag, key] : keys_) fail_waiting(*key, 0, closed_why_);
    daemon_->ring_all();
  }
  completions_.notify();
  world_->tell_peers_gone(rank_, why);
}

// ---- groups and keys ----

Result Context::create_group(const int* ranks, int size, const char* name, unjamGroup** out) {
  auto group = std::make_unique<unjamGroup>();
  if (ranks == nullptr) {
    size = world_->ranks();
    for (int r = 0; r < size; ++r) group->members.push_back(r);
  } else {
    if (size < 1 || size > world_->ranks()) {
      return {UNJAM_ERROR_INVALID_ARGUMENT, "a group of " + std::to_string(size) +
                                                " ranks: give 1 to " +
                                                std::to_string(world_->ranks())};
    }
    group->members.assign(ranks, ranks + size);
  }
  std::vector<bool> seen(static_cast<std::size_t>(world_->ranks()), false);
  std::uint64_t tag = hash_bytes(name == nullptr ? "" : name, 0x67726f7570ull);
  group->rank = -1;
  for (int i = 0; i < size; ++i) {
    const int r = group->members[static_cast<std::size_t>(i)];
    if (r < 0 || r >= world_->ranks()) {
      return {UNJAM_ERROR_INVALID_ARGUMENT, "rank " + std::to_string(r) +
                                                " in the group's list: the job has ranks 0 to " +
                                                std::to_string(world_->ranks() - 1)};
    }
    if (seen[static_cast<std::size_t>(r)]) {
      return {UNJAM_ERROR_INVALID_ARGUMENT,
              "rank " + std::to_string(r) + " stands twice in the group's list"};
    }
    seen[static_cast<std::size_t>(r)] = true;
    if (r == rank_) group->rank = i;
    group->members16.push_back(static_cast<std::uint16_t>(r));
    tag = hash_combine(tag, static_cast<std::uint64_t>(r));
  }
  if (group->rank < 0) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            "rank " + std::to_string(rank_) +
                " creates a group that it is not in: only members create a group"};
  }
  unjamGroup& made = *group;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return closed_why_;
    const std::uint32_t instance = group_instances_[tag]++;
    group->tag = hash_combine(tag, instance);
    group->name = name == nullptr ? "" : name;
    group->context = shared_from_this();
    groups_.push_back(std::move(group));
  }
  // Members that went before the group was there; those that go later find it.
  std::string why;
  if (const int gone = world_->first_gone(made.members, why); gone >= 0) {
    std::lock_guard lock(mutex_);
    if (made.failed.ok()) made.failed = gone_result(gone, why);
  }
  *out = &made;
  return {};
}

Result Context::destroy_group(unjamGroup* group) {
  std::shared_ptr<Context> keep = group->context;  // the group may hold the last reference
  std::lock_guard lock(mutex_);
  reap_locked();
  if (group->pending != 0) return pending_error("the group was to be destroyed", group->pending);
  // The engine may still know the group's keys (their connectors), so its memory stays with the
  // context; only the handle dies.
  group->destroyed = true;
  group->context.reset();
  return {};
}

Key* Context::find_or_create_key(unjamGroup& group, const char* name, Result& result) {
  const std::string text = name == nullptr ? "" : name;
  const auto found = group.keys.find(text);
  if (found != group.keys.end()) return found->second.get();
  auto key = std::make_unique<Key>();
  key->name = text;
  key->group = &group;
  key->state.tag = key_tag(group, text);
  if (const auto other = keys_.find(key->state.tag); other != keys_.end()) {
    result = {UNJAM_ERROR_RESOURCES,
              name_text(text, group.name) + " and " +
                  name_text(other->second->name, other->second->group->name) +
                  " have the same 64-bit hash: rename one of them"};
    return nullptr;
  }
  const std::size_t lanes = memory_->rank().num_lanes, n = group.members.size();
  key->lanes.resize(lanes);
  key->out.resize(lanes * n);
  key->in.resize(lanes * n);
  for (std::size_t l = 0; l < lanes; ++l) {
    key->lanes[l].out = &key->out[l * n];
    key->lanes[l].in = &key->in[l * n];
  }
  key->state.lanes = key->lanes.data();
  Key* p = key.get();
  keys_.reserve(keys_.size() + 1);
  group.keys.emplace(text, std::move(key));
  keys_.emplace(p->state.tag, p);
  return p;
}

Result Context::register_collective(unjamGroup* group, const char* name, const Signature& signature,
                                    std::int32_t priority, unjamCollective** out) {
  Call probe;
  probe.signature = signature;
  if (Result r = validate(*group, probe); !r.ok()) return r;
  std::lock_guard lock(mutex_);
  if (closed_) return closed_why_;
  Result result;
  Key* key = find_or_create_key(*group, name, result);
  if (key == nullptr) return result;
  if (key->registered != nullptr) {
    return {UNJAM_ERROR_INVALID_USAGE,
            name_text(key->name, group->name) + " is registered already (as " +
                key->registered->signature.text() + "): deregister it first, or use another key"};
  }
  auto collective = std::make_unique<unjamCollective>();
  collective->group = group;
  collective->key = key;
  collective->signature = signature;
  collective->priority = priority;
  key->registered = *out = collective.get();
  collectives_.push_back(std::move(collective));
  return {};
}

Result Context::deregister(unjamCollective* collective) {
  std::lock_guard lock(mutex_);
  reap_locked();
  Key& key = *collective->key;
  if (key.submitted != key.completed) {
    return pending_error("a collective was to be deregistered", key.submitted - key.completed);
  }
  key.registered = nullptr;
  std::erase_if(collectives_, [&](const auto& c) { return c.get() == collective; });
  return {};
}

// ---- submission ----

Result Context::validate(const unjamGroup& group, const Call& call) const {
  const auto bad = [](std::string text) {
    return Result{UNJAM_ERROR_INVALID_ARGUMENT, std::move(text)};
  };
  const Signature& s = call.signature;
  const auto outside = [](auto value, int n) {
    return static_cast<int>(value) < 0 || static_cast<int>(value) >= n;
  };
  if (outside(s.kind, kNumKinds)) return bad("unknown kind of collective");
  if (outside(s.dtype, kNumDTypes)) return bad("unknown data type");
  if (outside(s.op, kNumOps)) return bad("unknown reduction operator");
  const auto n = static_cast<std::uint64_t>(group.members.size());
  if (has_root(s.kind) && (s.root < 0 || static_cast<std::uint64_t>(s.root) >= n)) {
    return bad("root " + std::to_string(s.root) + ": the group has ranks 0 to " +
               std::to_string(n - 1));
  }
  const std::uint64_t size = dtype_bytes(s.dtype);
  const bool blocked = s.kind == Kind::kAllGather || s.kind == Kind::kReduceScatter;
  const std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  if (s.count > most / size / (blocked ? n : 1)) {
    return bad("count " + std::to_string(s.count) + " of " + to_string(s.dtype) +
               " overflows the address space" + (blocked ? " (count is per rank)" : ""));
  }
  return {};
}

namespace {

// Buffers of one call: who needs which, and how they may overlap.
Result check_buffers(const unjamGroup& group, const Call& call) {
  const Signature& s = call.signature;
  if (s.count == 0) return {};
  const auto bad = [](std::string text) {
    return Result{UNJAM_ERROR_INVALID_ARGUMENT, std::move(text)};
  };
  const bool root = group.rank == s.root;
  const bool needs_send = s.kind != Kind::kBroadcast || root;
  const bool needs_recv = s.kind != Kind::kReduce || root;
  if (needs_send && call.send == nullptr) return bad("the send buffer is NULL");
  if (needs_recv && call.recv == nullptr) return bad("the recv buffer is NULL");
  const std::uint64_t size = dtype_bytes(s.dtype);
  const auto send = reinterpret_cast<std::uintptr_t>(call.send);
  const auto recv = reinterpret_cast<std::uintptr_t>(call.recv);
  if ((needs_send && send % size != 0) || (needs_recv && recv % size != 0)) {
    return bad("a buffer is not aligned to its element type (" + std::string(to_string(s.dtype)) +
               ", " + std::to_string(size) + " bytes)");
  }
  if (!needs_send || !needs_recv) return {};
  const std::uint64_t block = s.count * size, n = group.members.size();
  const std::uint64_t send_bytes = s.kind == Kind::kReduceScatter ? n * block : block;
  const std::uint64_t recv_bytes = s.kind == Kind::kAllGather ? n * block : block;
  const std::uint64_t own = static_cast<std::uint64_t>(group.rank) * block;
  const bool in_place = s.kind == Kind::kAllGather       ? send == recv + own
                        : s.kind == Kind::kReduceScatter ? recv == send + own
                                                         : send == recv;
  const bool apart = send + send_bytes <= recv || recv + recv_bytes <= send;
  if (!apart && !in_place) {
    return bad(
        "the send and recv buffers overlap, and not in the way that in-place calls do "
        "(all-gather: send == recv + rank*count; reduce-scatter: recv == send + rank*count; "
        "otherwise send == recv)");
  }
  return {};
}

}  // namespace

Result Context::submit(unjamGroup& group, const char* name, const Call& call,
                       unjamRequest** request) {
  if (Result r = validate(group, call); !r.ok()) return r;
  if (Result r = check_buffers(group, call); !r.ok()) return r;
  std::unique_lock lock(mutex_);
  if (closed_) return closed_why_;
  Result result;
  Key* key = find_or_create_key(group, name, result);
  if (key == nullptr) return result;
  if (key->registered != nullptr) {
    return {UNJAM_ERROR_INVALID_USAGE, name_text(key->name, group.name) + " is registered (as " +
                                           key->registered->signature.text() +
                                           "): run the registered collective, or use another key"};
  }
  return submit_locked(lock, group, *key, call, request);
}

Result Context::submit(unjamCollective& collective, const Call& call, unjamRequest** request) {
  if (Result r = validate(*collective.group, call); !r.ok()) return r;
  if (Result r = check_buffers(*collective.group, call); !r.ok()) return r;
  std::unique_lock lock(mutex_);
  if (closed_) return closed_why_;
  return submit_locked(lock, *collective.group, *collective.key, call, request);
}

// Whether another rank is known to have called something else as the key's next use; then it is
// ended on all ranks. Lets go of the lock to look at the other ranks.
Result Context::check_agreement(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                                const Signature& signature) {
  const std::uint64_t n = key.submitted;
  if (group.members.size() == 1 || announce(world_->announcements(group.members, key.state.tag),
                                            key.state.tag, n, signature.hash())) {
    return {};
  }
  lock.unlock();
  const std::string text = world_->compare(*this, key.state.tag, n, signature, group.members,
                                           call_text(key.name, group.name, n));
  lock.lock();
  if (closed_) return closed_why_;
  return text.empty() ? Result{} : Result{UNJAM_ERROR_MISMATCH, text};
}

Result Context::submit_locked(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                              const Call& call, unjamRequest** request) {
  // First, since it may let go of the lock for a while; then nothing does until the call is made.
  Result disagreement;
  for (std::uint64_t n = key.submitted;; n = key.submitted) {
    disagreement = check_agreement(lock, group, key, call.signature);
    if (closed_) return closed_why_;
    if (n == key.submitted) break;  // no other thread has made this use meanwhile
  }
  if (!group.failed.ok()) return group.failed;
  if (key.submitted >= key.failed_from && disagreement.ok()) {
    return {key.failed.code, name_text(key.name, group.name) +
                                 " is out of use since an earlier invocation failed (" +
                                 key.failed.message + "): use another key"};
  }
  const auto limit = static_cast<std::size_t>(settings_.max_active_keys);
  if (!key.active && active_keys_ >= limit) {
    reap_locked();
    if (active_keys_ >= limit) {
      return {UNJAM_ERROR_RESOURCES,
              std::to_string(limit) +
                  " keys of this rank have invocations under way, as many as are allowed: wait for "
                  "some, or raise UNJAM_MAX_ACTIVE_KEYS (max_active_keys) on all ranks"};
    }
  }
  // Both kinds hold connectors, of which there are twice the limit.
  const auto held = [&] { return active_keys_ + lingering_keys_ - (key.lingering ? 1 : 0); };
  if (!key.active && held() >= 2 * limit) {
    reap_locked();
    retire_lingering();
    if (held() >= 2 * limit) {
      return {UNJAM_ERROR_RESOURCES,
              std::to_string(2 * limit) +
                  " keys of this rank have invocations under way or data that peers have yet to "
                  "take, as many as there is room for (twice the limit): let the peers call them, "
                  "or raise UNJAM_MAX_ACTIVE_KEYS (max_active_keys) on all ranks"};
    }
  }
  const Signature& signature = call.signature;
  if (key.plan == nullptr || !(key.planned_for == signature)) {
    PlanRequest r;
    r.kind = signature.kind;
    r.dtype = signature.dtype;
    r.op = signature.op;
    r.count = signature.count;
    r.ranks = static_cast<int>(group.members.size());
    r.rank = group.rank;
    r.root = signature.root;
    PlanLimits limits;
    limits.escape_slots = world_->shape().escape_slots;
    limits.escape_slot_bytes = world_->shape().escape_slot_bytes;
    limits.lanes = static_cast<std::uint16_t>(world_->shape().lanes);
    std::optional<Algorithm> algorithm;
    if (settings_.algorithm >= 0) algorithm = static_cast<Algorithm>(settings_.algorithm);
    std::string error;
    std::optional<Plan> plan = make_plan(r, limits, algorithm, &error);
    if (!plan) {
      return {UNJAM_ERROR_INVALID_ARGUMENT, "no plan for " + signature.text() + ": " + error};
    }
    key.plan = std::make_shared<const Plan>(std::move(*plan));
    key.planned_for = signature;
  }

  // What can fail for want of memory or threads comes before anything is counted.
  auto s = std::make_unique<Submitted>();
  s->call = call;
  s->key = &key;
  s->plan = key.plan;
  s->since_ns = monotonic_ns();
  // A successor of a pending invocation cannot start before that ends, so it may wait here without
  // harm; a key's first must not wait for anything but its peers.
  const bool starts_key = key.in_engine == 0 && key.waiting.empty();
  const std::size_t in_engine = slots_.size() - free_slots_.size();
  const bool waits = !key.waiting.empty() || (!starts_key && in_engine >= slots_.size() / 2);
  if (call.callback != nullptr || waits) need_background();
  if (request != nullptr) {
    s->request = new unjamRequest;
    s->request->context = shared_from_this();
    s->request->retain();  // one for the caller, one for us
  }

  if (request != nullptr) *request = s->request;
  s->n = key.submitted++;
  s->order = submitted_++;
  key.history[s->n % key.history.size()] = signature;
  ++group.pending;
  if (call.callback != nullptr) ++callbacks_;
  if (!disagreement.ok()) {
    // Ends as every invocation does that fails after its call, only at once.
    complete(*s, disagreement);
    completions_.notify();
    return {};
  }
  if (!key.active) ++active_keys_;
  if (key.lingering) --lingering_keys_;
  key.active = true;
  key.lingering = false;
  if (waits) {
    key.waiting.push_back(std::move(s));
    ++waiting_;
  } else {
    admit(std::move(s));
  }
  return {};
}

// All slices that the key has sent were consumed. Only while it has nothing in the engine.
bool Context::key_drained(Key& key) const {
  const std::size_t size = key.group->members.size();
  for (std::size_t l = 0; l < key.lanes.size(); ++l) {
    const LaneTransport& t = memory_->lane(static_cast<std::uint32_t>(l)).transport;
    for (std::size_t q = 0; q < size; ++q) {
      const auto peer = static_cast<std::uint32_t>(key.group->members[q]);
      if (peer != t.rank && !t.drained(peer, key.lanes[l].out[q])) return false;
    }
  }
  return true;
}

// Keys whose invocations are complete hold connectors while peers have to take their slices. Looked
// at only when connectors may run out.
void Context::retire_lingering() {
  std::erase_if(lingering_, [this](Key* key) {
    if (key->lingering) {
      if (!key_drained(*key)) return false;
      key->lingering = false;
      --lingering_keys_;
    }  // else it is in use again
    key->listed = false;
    return true;
  });
}

void Context::admit(std::unique_ptr<Submitted> s) {
  const std::uint16_t slot = free_slots_.back();
  free_slots_.pop_back();
  Key& key = *s->key;
  const unjamGroup& group = *key.group;
  const Plan& plan = *s->plan;
  const Signature& signature = s->call.signature;
  RankState& rank = memory_->rank();
  Sqe sqe;
  Invocation& inv = sqe.inv;
  inv.program = plan.primitives.data();
  inv.num_primitives = static_cast<std::uint32_t>(plan.primitives.size());
  inv.members = group.members16.data();
  inv.key = &key.state;
  // Where a rank's plan does not use a buffer the pointer may be null; it is not touched.
  inv.input = s->call.send;
  inv.output = s->call.recv;
  inv.n = s->n;
  inv.geometry = plan.geometry;
  inv.group_size = static_cast<std::uint16_t>(group.members.size());
  inv.group_rank = static_cast<std::uint16_t>(group.rank);
  inv.priority = s->call.priority;
  inv.op = signature.op;
  inv.protocol = plan.protocol;
  inv.slot = slot;
  std::uint64_t seed = hash_combine(key.state.tag, s->n);
  seed = hash_combine(seed, signature.hash());
  seed = hash_combine(seed, static_cast<std::uint64_t>(plan.algorithm) << 8 |
                                static_cast<std::uint64_t>(plan.protocol));
  seed =
      hash_combine(seed, std::uint64_t{plan.geometry.chunk} << 32 |
                             std::uint64_t{plan.geometry.lanes} << 16 | plan.geometry.first_lane);
  inv.seed = seed;
  s->in_engine = true;
  ++key.in_engine;
  store_release<std::uint32_t>(rank.cancelled[slot], 0);
  slots_[slot] = std::move(s);
  rank.sq.push(sqe);
  daemon_->ring(0);
}

// ---- completion ----

void Context::complete(Submitted& s, const Result& result) {
  Key& key = *s.key;
  --key.group->pending;
  ++key.completed;
  ++completed_;
  if (!result.ok()) fail_key(key, s.n, result);
  if (s.call.callback != nullptr) {
    --callbacks_;
    finished_.push_back({s.call.callback, s.call.user, result.code});
    background_changed_.notify_one();
  }
  if (s.request != nullptr) {
    s.request->result = result.code;
    s.request->message = result.message;
    s.request->done.store(true, std::memory_order_release);
    s.request->release();
    s.request = nullptr;
  }
}

void Context::fail_key(Key& key, std::uint64_t from, const Result& why) {
  if (first_error_.ok()) first_error_ = why;
  if (from >= key.failed_from) return;
  key.failed_from = from;
  key.failed = why;
}

// Ends the uses from `from` on that wait outside of the engine.
void Context::fail_waiting(Key& key, std::uint64_t from, const Result& why) {
  while (!key.waiting.empty() && key.waiting.back()->n >= from) {
    complete(*key.waiting.back(), why);
    key.waiting.pop_back();
    --waiting_;
  }
}

void Context::reap_locked() {
  if (memory_ == nullptr) return;
  Cqe e;
  bool any = false;
  while (memory_->rank().cq.pop(e)) {
    any = true;
    std::unique_ptr<Submitted> s = std::move(slots_[e.slot]);
    free_slots_.push_back(e.slot);
    Key& key = *s->key;
    --key.in_engine;
    complete(*s, e.outcome == Outcome::kDone ? Result{} : s->cancel);
    if (key.failed_from != UINT64_MAX) fail_waiting(key, key.failed_from, key.failed);
    if (!key.waiting.empty()) {
      std::unique_ptr<Submitted> next = std::move(key.waiting.front());
      key.waiting.pop_front();
      --waiting_;
      admit(std::move(next));
    } else if (key.in_engine == 0) {
      --active_keys_;
      ++lingering_keys_;
      key.active = false;
      key.lingering = true;
      if (!key.listed) lingering_.push_back(&key);
      key.listed = true;
    }
  }
  // Threads that wait for requests which we have completed on their behalf.
  if (any) completions_.notify();
}

void Context::reap() {
  std::lock_guard lock(mutex_);
  reap_locked();
}

bool Context::wait(unjamRequest& request, std::int64_t timeout_us) {
  if (timeout_us > kLongestTimeoutUs) timeout_us = -1;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  for (;;) {
    if (request.done.load(std::memory_order_acquire)) return true;
    const std::uint32_t epoch = completions_.epoch();
    reap();
    if (request.done.load(std::memory_order_acquire)) return true;
    std::int64_t left = -1;
    if (timeout_us >= 0) {
      left = std::chrono::duration_cast<std::chrono::microseconds>(deadline -
                                                                   std::chrono::steady_clock::now())
                 .count();
      if (left <= 0) return false;
    }
    completions_.wait(epoch, left);
  }
}

void Context::need_background() {
  if (!background_.joinable()) background_ = std::thread([this] { background(); });
  background_changed_.notify_one();
}

void Context::background() {
  std::unique_lock lock(mutex_);
  while (!background_stop_ || !finished_.empty()) {
    if (!finished_.empty()) {
      const Finished f = finished_.front();
      finished_.pop_front();
      lock.unlock();
      f.callback(f.result, f.user);
      lock.lock();
      continue;
    }
    if (callbacks_ == 0 && waiting_ == 0) {
      background_changed_.wait(lock);
      continue;
    }
    const std::uint32_t epoch = completions_.epoch();
    reap_locked();
    if (!finished_.empty() || (callbacks_ == 0 && waiting_ == 0)) continue;
    lock.unlock();
    completions_.wait(epoch, -1);
    lock.lock();
  }
}

bool Context::synchronize(std::int64_t timeout_us) {
  HostDaemon* daemon = nullptr;
  {
    std::lock_guard lock(mutex_);
    daemon = daemon_.get();
  }
  return daemon == nullptr || daemon->synchronize(timeout_us);
}

// ---- failures ----

Result Context::async_error() const {
  std::lock_guard lock(mutex_);
  return first_error_;
}

void Context::cancel_locked(std::size_t slot, const Result& why) {
  Submitted& s = *slots_[slot];
  if (!s.cancel.ok()) return;
  s.cancel = why;
  store_release<std::uint32_t>(memory_->rank().cancelled[slot], 1);
}

void Context::peer_gone(int peer, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    reap_locked();
    const Result result = gone_result(peer, why);
    for (auto& group : groups_) {
      if (std::find(group->members.begin(), group->members.end(), peer) == group->members.end()) {
        continue;
      }
      if (group->failed.ok()) group->failed = result;
      for (auto& [name, key] : group->keys) fail_waiting(*key, 0, result);
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] != nullptr && !slots_[i]->key->group->failed.ok()) {
        cancel_locked(i, slots_[i]->key->group->failed);
      }
    }
    daemon_->ring_all();
  }
  completions_.notify();
}

void Context::fail_call(std::uint64_t tag, std::uint64_t n, const Result& why) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  const auto found = keys_.find(tag);
  if (found == keys_.end()) return;
  fail_key(*found->second, n, why);
  fail_waiting(*found->second, n, why);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    // Later uses of the key cannot start any more; earlier ones go on.
    const Submitted* s = slots_[i].get();
    if (s != nullptr && s->key == found->second && s->n >= n) cancel_locked(i, why);
  }
  completions_.notify();
  daemon_->ring_all();
}

}  // namespace unjam
