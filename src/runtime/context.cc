#include "runtime/context.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/hash.h"
#include "device/host/host_daemon.h"
#include "runtime/ending.h"
#include "runtime/heap_owners.h"
#include "runtime/texts.h"
#include "transport/network/courier_driver.h"

namespace unjam {

Context::Context(std::shared_ptr<World> world, int rank, const Settings& settings)
    : world_(std::move(world)),
      rank_(rank),
      settings_(settings),
      notices_([this](int peer, std::uint64_t tag, std::uint64_t n) {
        return has_completed(world_->ledger(peer), tag, n);
      }),
      gone_(static_cast<std::size_t>(world_->ranks())),
      given_up_(static_cast<std::size_t>(world_->ranks())) {}

Context::~Context() {
  // After shutdown() this finds nothing; a context that failed to start must not stay attached.
  world_->detach(this, {}, {});
}

void Context::start() {
  std::string error;
  WindowEntry* const windows = world_->windows_of(rank_, error);
  if (windows == nullptr) throw std::runtime_error(error);
  Room* rooms = nullptr;
  if (world_->rooms() != nullptr && (rooms = world_->rooms()->table(rank_, error)) == nullptr) {
    throw std::runtime_error(error);
  }
  memory_ = std::make_unique<EngineMemory>(settings_, world_->shape(), world_->bases(), rank_,
                                           windows, rooms);
  const ArenaShape& shape = world_->shape();
  heap_ = std::make_unique<Heap>(world_->bases()[rank_] + shape.heap(), shape.heap_bytes);
  ledger_ = std::make_unique<Ledger>(&world_->ledger(rank_));
  const std::uint32_t slots = invocation_slots(settings_);
  slots_.resize(slots);
  notices_.set_slots(slots);
  met_.resize(static_cast<std::size_t>(world_->ranks()));
  for (std::uint32_t i = 0; i < kRoomSlots; ++i) {
    free_room_slots_.push_back(static_cast<std::uint16_t>(slots + i));
  }
  for (std::uint32_t i = slots; i-- > 0;) free_slots_.push_back(static_cast<std::uint16_t>(i));
  if (world_->cuda() != nullptr) {
    start_cuda(rooms);
  } else {
    HostDaemonOptions options;
    options.block_threads = static_cast<unsigned>(settings_.block_threads);
    options.delay_seed = static_cast<std::uint64_t>(settings_.delay_seed);
    options.delay_max_us = static_cast<std::uint32_t>(settings_.delay_max_us);
    options.help = settings_.help != 0;
    options.network = world_->network();
    for (std::uint32_t l = 0; options.network != nullptr && l < shape.lanes; ++l) {
      memory_->set_groups(l, options.network->groups(static_cast<std::uint32_t>(rank_), l));
    }
    if (rooms != nullptr) options.look_at_wishes = [this, rooms] { look_at_wishes(rooms); };
    daemon_ = std::make_unique<HostDaemon>(memory_->rank(), completions_, options);
  }
  world_->attach(this);
  end_with_process(shared_from_this());
  log_start();
  if (shape.heap_bytes != 0) own_heap(shared_from_this());
}

void Context::start_cuda(Room* rooms) {
  std::string error;
  if (!world_->enter_device(rank_, error)) throw std::runtime_error(error);
  CudaRankOptions options;
  options.device = world_->device_of(rank_);
  options.rank = static_cast<std::uint32_t>(rank_);
  options.shape = world_->shape();
  options.policy = memory_->rank().policy;
  options.slots = memory_->rank().num_slots;
  options.keys = device_keys(settings_);
  options.block_threads = static_cast<std::uint32_t>(settings_.block_threads);
  options.in_stream = settings_.in_stream != 0;
  options.lines = settings_.lines > 0;
  options.whole_lines = settings_.whole_lines > 0;
  options.in_stream_patience_us = static_cast<std::uint32_t>(settings_.in_stream_patience_us);
  options.in_stream_overlap = settings_.in_stream_overlap != 0;
  options.copies = settings_.dma != 0;
  options.copies_stuck = settings_.dma == 2;
  options.copies_in_flight = static_cast<std::uint64_t>(settings_.dma_flight);
  options.trace_events = static_cast<std::uint64_t>(settings_.trace_events);
  options.windows = world_->windows_of(rank_, error);
  options.rooms = rooms;
  options.look_at_wishes = [this, rooms] { look_at_wishes(rooms); };
  for (int r = 0; r < world_->ranks(); ++r) {
    options.bases.push_back(world_->bases()[r]);
    options.links.push_back(world_->link(r));
    if (r != rank_ && world_->is_local(r) && world_->device_of(r) == options.device) {
      options.shares_device = true;
    }
  }
  std::unique_ptr<StreamDaemon> daemon = world_->cuda()->start(options, memory_->rank(), error);
  if (daemon == nullptr) throw std::runtime_error(error);
  streams_ = daemon.get();
  daemon_ = std::move(daemon);
  if (BoxMover* const boxes = streams_->boxes(no_boxes_because_); boxes != nullptr) {
    boxes_ = std::make_unique<BoxMemory>(*boxes);
  }
}

std::string Context::calls_text(std::size_t count, const std::vector<const Submitted*>& pending) {
  std::string text = std::to_string(count) + " invocation(s) pending";
  if (pending.empty()) return text + ", of a resharding that is under way";
  text += ", among them ";
  std::size_t named = 0;
  for (const Submitted* s : pending) {
    if (named == 3) break;
    text += (named == 0 ? "" : ", ") + name_text(*s->key);
    ++named;
  }
  return text;
}

Result Context::pending_error(const char* what, std::size_t pending) const {
  return pending_error(what, pending, pending_in_order(),
                       "wait for them, or abort the context first");
}

Result Context::pending_error(const char* what, std::size_t count,
                              const std::vector<const Submitted*>& pending, const char* cure) {
  return {UNJAM_ERROR_INVALID_USAGE,
          std::string(what) + " with " + calls_text(count, pending) + ": " + cure};
}

Result Context::shutdown(bool frees) {
  std::map<std::uint64_t, std::uint64_t> calls;
  std::vector<PendingCall> left;
  {
    const std::lock_guard lock(mutex_);
    if (background_.get_id() == std::this_thread::get_id()) {
      return {UNJAM_ERROR_INVALID_USAGE,
              "a callback cannot destroy its own context: do it in another thread"};
    }
  }
  // The end of a process may come upon a thread that closes the context: both join its threads.
  const std::lock_guard alone(shutting_down_);
  {
    std::unique_lock lock(mutex_);
    if (destroyed_ && !frees) return closed_why_;  // by that thread
    while (called()) {
      lock.unlock();
      usleep(200);
      lock.lock();
    }
    reap_locked();
    const std::size_t pending = submitted_ - completed_;
    if (closed_) {
      // Aborted: the engine is dropping what is left; wait for that (it waits for nobody).
      // And for streams' waits that are being queued.
      const auto over = [this] { return submitted_ == completed_ && launching_ == 0; };
      while (!over()) {
        const std::uint32_t epoch = completions_.epoch();
        reap_locked();
        if (over()) break;
        lock.unlock();
        daemon_->wait(completions_, epoch, 100000);
        lock.lock();
      }
    } else if (pending != 0) {
      return pending_error("the context was to be destroyed", pending);
    }
    ends_.store(true);
    if (!destroyed_) log_end();
    closed_ = destroyed_ = true;
    closed_why_ = {UNJAM_ERROR_INVALID_USAGE, "the context was destroyed"};
    calls = call_counts();
    left = untaken();
  }
  {
    // Before peers hear that this rank leaves: of what is left they would close all mappings.
    const std::lock_guard registering(registering_);
    std::vector<World::ClosedWindow> closed;
    for (const Windows::Registered& w : windows_.all()) {
      closed.push_back({w.serial, w.retired});
      windows_.remove(w.serial);
    }
    if (!closed.empty()) world_->close_windows(rank_, closed);
  }
  world_->detach(this, std::move(calls), std::move(left));
  // Joins the engine's threads: nobody touches the arenas on our behalf any more. (One that could
  // not start has none.)
  if (daemon_ != nullptr) daemon_->stop();
  {
    std::lock_guard lock(mutex_);
    background_stop_ = true;
  }
  background_changed_.notify_all();
  completions_.notify();
  if (background_.joinable()) background_.join();
  if (!frees) return {};
  std::lock_guard lock(mutex_);
  collectives_.clear();
  keys_.clear();
  dropping_.reset();
  records_.clear();
  groups_.clear();
  if (heap_ != nullptr) keep_heap(shared_from_this());
  return {};
}

// Calls of other threads that have let go of the lock to look at other ranks, or to queue something
// in a stream: soon back, or as soon as what fills the stream has ended.
bool Context::called() const {
  return launching_ != 0 ||
         std::any_of(keys_.begin(), keys_.end(), [](const auto& k) { return k.second->pins != 0; });
}

Context::Motion Context::motion() {
  const std::lock_guard lock(mutex_);
  reap_locked();
  Motion m;
  m.pending = submitted_ - completed_ + (called() ? 1 : 0);
  m.moved = completed_;
  // (Of a device only it knows, and it may wait for a peer before it says so.)
  for (std::uint32_t l = 0; !cuda() && memory_ != nullptr && l < memory_->rank().num_lanes; ++l) {
    m.moved += load_relaxed(memory_->lane(l).stats.slices);
  }
  return m;
}

std::string Context::abort_at_end(const std::string& how) {
  std::string what;
  {
    const std::lock_guard lock(mutex_);
    if (destroyed_) return "";
    reap_locked();
    const std::size_t pending = submitted_ - completed_;
    if (pending == 0 && !called()) return "";
    what = pending == 0 ? " in a call" : " with " + calls_text(pending, pending_in_order());
  }
  if (!ends_.exchange(true)) {
    FailureNotice notice;
    notice.what = FailureNotice::kAbort;
    notice.why = {UNJAM_ERROR_ABORTED, how + what};
    post_notice(std::move(notice));
  }
  return how + what;
}

std::string Context::leave_at_end(const std::string& how, std::string what) {
  // (Other threads may be in calls: what they hold stays.)
  while (what.empty()) {
    {
      const std::lock_guard lock(mutex_);
      if (destroyed_) return "";
    }
    if (shutdown(/*frees=*/false).ok()) {
      // (On GPUs that would end what it has completed: peers hear of its farewell alone.)
      if (!cuda()) world_->tell_peers_gone(rank_, how, /*ended=*/true);
      return "";
    }
    what = abort_at_end(how);  // a call has come, or was complete a moment later
  }
  {
    // The engine drops what is left, and waits for nobody. Then the ledger stays as it is.
    std::unique_lock lock(mutex_);
    while (submitted_ != completed_ && !destroyed_) {
      const std::uint32_t epoch = completions_.epoch();
      reap_locked();
      if (submitted_ == completed_) break;
      lock.unlock();
      daemon_->wait(completions_, epoch, 100000);
      lock.lock();
    }
  }
  // Before the rank's farewell, which says that it has called them.
  world_->tell_peers_gone(rank_, what, /*ended=*/true);
  static_cast<void>(shutdown(/*frees=*/false));  // nothing is pending
  return what;
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
              "rank " + std::to_string(r) +
                  " stands twice in the group's list: give every member once"};
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
  group->hosts = world_->host_table(group->members);
  unjamGroup& made = *group;
  {
    std::lock_guard lock(mutex_);
    if (closed()) return closed_why_;
    const std::uint32_t instance = group_instances_[tag]++;
    group->tag = hash_combine(tag, instance);
    group->name = name == nullptr ? "" : name;
    group->context = shared_from_this();
    groups_.push_back(std::move(group));
  }
  log_group(made);
  lose_members(made);  // those that go later find it
  *out = &made;
  return {};
}

// The channel between this rank and `peer`, in the direction asked for.
Result Context::open_channel(unjamGroup& group, int peer, bool sends, unjamGroup*& channel) {
  const int size = static_cast<int>(group.members.size());
  if (peer < 0 || peer >= size) {
    return {
        UNJAM_ERROR_INVALID_ARGUMENT,
        "peer " + std::to_string(peer) + ": the group has ranks 0 to " + std::to_string(size - 1)};
  }
  const int source = sends ? group.rank : peer, destination = sends ? peer : group.rank;
  {
    std::lock_guard lock(mutex_);
    if (closed()) return closed_why_;
    if (group.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    if (const auto found = group.channels.find({source, destination});
        found != group.channels.end()) {
      channel = found->second;
      return {};
    }
    auto made = std::make_unique<unjamGroup>();
    made->parent = &group;
    made->source = source;
    made->destination = destination;
    made->name = group.name;
    made->rank = sends || peer == group.rank ? 0 : 1;
    made->tag = hash_combine(group.tag, 0x6368616e6e656cull);
    for (const int end : {source, destination}) {
      made->tag = hash_combine(made->tag, static_cast<std::uint64_t>(end));
      const int member = group.members[static_cast<std::size_t>(end)];
      if (!made->members.empty() && made->members.front() == member) continue;  // to itself
      made->members.push_back(member);
      made->members16.push_back(static_cast<std::uint16_t>(member));
    }
    channel = made.get();
    groups_.push_back(std::move(made));
    group.channels.emplace(std::pair{source, destination}, channel);
  }
  lose_members(*channel);  // one that goes later finds it
  return {};
}

Result Context::shrink_group(const unjamGroup& group, const char* name, unjamGroup** survivors) {
  const std::vector<int> absent = world_->absent();
  for (const int rank : absent) give_up(rank);  // who shrinks a group makes no more calls in it
  std::vector<int> members;
  for (const int m : group.members) {
    if (std::find(absent.begin(), absent.end(), m) == absent.end()) members.push_back(m);
  }
  return create_group(members.data(), static_cast<int>(members.size()), name, survivors);
}

Result Context::destroy_group(unjamGroup* group) {
  std::shared_ptr<Context> keep = group->context;  // the group may hold the last reference
  std::lock_guard lock(mutex_);
  reap_locked();
  std::size_t pending = group->pending;
  for (const auto& [ends, channel] : group->channels) pending += channel->pending;
  if (pending != 0) return pending_error("the group was to be destroyed", pending);
  // The engine may still know the group's keys: they go as it lets go of them. The handle stays
  // good for refusals until the context goes.
  const auto end = [this](unjamGroup& g) {
    g.destroyed = true;
    release_group(g);
  };
  end(*group);
  for (const auto& [ends, channel] : group->channels) end(*channel);
  tidy();
  group->context.reset();
  return {};
}

}  // namespace unjam
