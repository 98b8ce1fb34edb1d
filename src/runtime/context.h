// A rank: its groups and keys, the submission and completion of invocations.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "base/futex.h"
#include "control/waitfor.h"
#include "engine/daemon.h"
#include "plan/plan.h"
#include "runtime/box_memory.h"
#include "runtime/call.h"
#include "runtime/engine_memory.h"
#include "runtime/failure_notices.h"
#include "runtime/given_up.h"
#include "runtime/group.h"
#include "runtime/heap.h"
#include "runtime/key.h"
#include "runtime/ledger.h"
#include "runtime/request.h"
#include "runtime/result.h"
#include "runtime/settings.h"
#include "runtime/windows.h"
#include "runtime/world.h"
#include "unjam/unjam.h"

namespace unjam {

class JsonWriter;

class Context : public std::enable_shared_from_this<Context>, private Rooms::User {
 public:
  Context(std::shared_ptr<World> world, int rank, const Settings& settings);
  ~Context() override;

  int rank() const { return rank_; }
  int size() const { return world_->ranks(); }
  bool on_host() const { return streams_ == nullptr; }
  // What resharding has of the rank's GPU; nullptr on the host.
  BoxMemory* boxes() const { return boxes_.get(); }
  const std::string& no_boxes_because() const { return no_boxes_because_; }
  // Made by a process of which this one is a forked child: not to be touched.
  bool inherited() const { return generation_ != process_generation(); }

  // Builds the engine; all arenas must be there.
  void start();
  // unjamDestroy. frees: also what handles of groups, collectives and requests point to.
  Result shutdown(bool frees = true);
  void abort(unjamResult_t code, const std::string& why);
  // The end of the process, see ending.h. "": nothing was pending; else what was, and is aborted.
  std::string abort_at_end(const std::string& how);
  // Behind that: the rank leaves. what: what abort_at_end() gave; what is returned likewise, as
  // calls may have come in between.
  std::string leave_at_end(const std::string& how, std::string what);
  // Behind that: what the rank has sent to other hosts is there, or its receivers are lost.
  void flush_network() { world_->flush_network(); }
  // How many invocations are pending, or being made by other threads; and a number that grows while
  // something moves. Waits for no device.
  struct Motion {
    std::uint64_t pending = 0;
    std::uint64_t moved = 0;
  };
  Motion motion();

  Result create_group(const int* ranks, int size, const char* name, unjamGroup** group);
  // Of the members that are still there.
  Result shrink_group(const unjamGroup& group, const char* name, unjamGroup** survivors);
  Result destroy_group(unjamGroup* group);
  // unjamGroupAbort.
  Result abort_group(unjamGroup& group, const std::string& why);
  Result register_collective(unjamGroup* group, const char* key, const Signature& signature,
                             std::int32_t priority, unjamCollective** collective);
  Result deregister(unjamCollective* collective);

  Result submit(unjamGroup& group, const char* key, const Call& call, unjamRequest** request);
  Result submit(unjamCollective& collective, const Call& call, unjamRequest** request);

  // unjamSend (`sends`) and unjamRecv.
  Result transfer(unjamGroup& group, const char* key, Call call, int peer, bool sends,
                  unjamRequest** request);
  // Whether `peer` has called what the next receive from it would meet. Waits for nobody.
  Result probe(unjamGroup& group, const char* key, int peer, bool& ready);

  // Memory for buffers, in this rank's arena.
  Heap& heap() { return *heap_; }
  // Memory of the user's that peers may store into, see windows.h.
  Result register_memory(void* pointer, std::uint64_t bytes);
  Result deregister_memory(void* pointer);
  // Invocation::output_place of a call: not 0 only of a buffer that this rank's part writes, and
  // all of which is in the heap or in one window.
  std::uint64_t output_place(const unjamGroup& group, const Call& call) const;

  // A request for what takes several invocations of a group, one after the other: it counts as one
  // that is pending. The caller has a reference, and whoever will call end_request() another one.
  Result begin_request(unjamGroup& group, unjamCallback_t callback, void* user,
                       unjamRequest** request);
  // callback: whether it is called.
  void end_request(unjamGroup& group, unjamRequest* request, const Result& result,
                   std::vector<std::string> incomplete, bool callback = true);

  // True once the request is done; false on timeout.
  bool wait(unjamRequest& request, std::int64_t timeout_us);
  // Whether the calling thread runs callbacks: what it waits for might wait for it.
  static bool in_callback();
  // Gives a pending request its callback; calls it at once if the request is done.
  Result on_complete(unjamRequest& request, unjamCallback_t callback, void* user);
  // Work queued in the stream from now on sees the invocation's results.
  Result stream_wait(unjamRequest& request, void* stream);
  // Takes completions out of the CQ.
  void reap();
  bool synchronize(std::int64_t timeout_us);

  Result async_error();
  // Of a context that was aborted, or destroyed.
  Result why_closed();
  // Ranks that are gone or have left.
  std::vector<int> absent() const { return world_->absent(); }
  // Ends pending invocations of groups with `peer`, and refuses further ones; but for those of
  // which the peer had completed its part (legacy; null: none).
  void peer_gone(int peer, const std::string& why, std::shared_ptr<const Legacy> legacy);
  // `peer` has met the end of `gone`, see give_up().
  void peer_gave_up(int peer, int gone, const std::string& why);
  // On whose account this rank has given up calls, behind the first `known` of them.
  std::vector<int> given_up(std::size_t known) const { return given_up_.since(known); }
  // `peer` has left with all its calls complete: it takes no data any more.
  void peer_left(int peer);
  // Ends one invocation, if it is pending, and its key. `speakers`: the ranks of the process that
  // says so, one of which is to be a member of the key's group; none: this process, which knows.
  void fail_call(std::uint64_t tag, std::uint64_t n, const Result& why,
                 const std::vector<int>& speakers = {});

  // ---- reports ----
  RankSnapshot snapshot();
  void running_words(std::vector<std::uint64_t>& words) const;
  void stats(unjamStats_t& stats) const;
  std::string info_json() const;
  std::size_t trace(unjamTraceEvent_t* events, std::size_t capacity) const;
  std::string explain() { return world_->explain(); }
  std::vector<CallRecord> pending_calls();
  // Whether this rank has called use n of a key. kKnown: and what it called (it is pending, or
  // among the latest); kCalled: too long ago to know; kBusy: could not look, see look().
  enum class Found { kNotCalled, kCalled, kKnown, kBusy };
  Found find_call(std::uint64_t tag, std::uint64_t n, Signature& signature) const;
  std::int64_t stall_ms() const { return settings_.stall_ms; }

 private:
  friend class World;
  friend class StuckCall;  // tests/unit/news_test.cc
  void start_cuda(Room* rooms);
  // What is read of lanes is up to date, and stays as it is while the lock is held (before mutex_).
  std::unique_lock<std::mutex> refreshed() const;
  std::unique_lock<std::mutex> look() const;
  std::unique_lock<std::mutex> look_and_reap();
  Key* find_or_create_key(unjamGroup& group, const char* name, Result& result);
  // A key as find_or_create_key() adds it; nullptr: there cannot be one, and why is in `result`.
  std::unique_ptr<Key> make_key(unjamGroup& group, const std::string& text, Result& result);
  bool take_device_key(Key& key, Result& result);
  // Another key that has the same tag, as text; "": there is none.
  std::string same_tag(const Key& key) const;
  Key& add_key(unjamGroup& group, std::unique_ptr<Key> key);
  void open_ledger(Key& key, std::uint64_t done);
  // Goes on where the key was when it was forgotten. What failed then moves out of the record.
  void resume(Key& key, KeyRecord& record);
  // A key that stays for as long as this does, also without the lock.
  class Pin {
   public:
    explicit Pin(Key& key) : key_(key) { ++key_.pins; }
    ~Pin() { --key_.pins; }  // with the lock; taking completions tidies up
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;

   private:
    Key& key_;
  };
  Result submit_locked(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                       const Call& call, unjamRequest** request);
  // Whether one more key may have invocations under way.
  Result room_for(const Key& key);
  Result plan_call(const unjamGroup& group, Key& key, const Signature& signature);
  unjamRequest* make_request(Submitted& s);
  // The way into the engine of a call that is planned. Unpins the key when it is busy. Takes the
  // call, or, where it throws or has no room for it, leaves it as it is.
  Result enter(std::unique_lock<std::mutex>& lock, std::optional<Pin>& pin,
               std::unique_ptr<Submitted>& s, unjamRequest** request, const Result& disagreement);
  // A rank's messages to itself, see own_messages.cc.
  Result submit_half(unjamGroup& channel, const char* name, const Call& call,
                     unjamRequest** request);
  Result leave_half(std::unique_ptr<Submitted> s, unjamRequest** request);
  Result join_halves(std::unique_lock<std::mutex>& lock, std::optional<Pin>& pin,
                     std::unique_ptr<Submitted> s, unjamRequest** request);
  Result check_agreement(std::unique_lock<std::mutex>& lock, unjamGroup& group, Key& key,
                         const Signature& signature);
  static Result no_streams();
  static Result lacks_half(const Submitted& s);
  // ---- rooms (runtime/rooms.h), meetings.cc ----
  Result meet_neighbours(Key& key);
  void clear_rooms();
  void look_at_wishes(const Room* rooms);
  bool hears_marks(const unjamGroup& group) const;
  void room_is_cleared(std::uint16_t slot);  // the completion of a command
  bool clear_room(const ClearRoom& room) override;
  void take_in_cleared() override;
  void room_came() override;
  void admit(std::unique_ptr<Submitted> s);
  Invocation make_invocation(const Submitted& s, std::uint16_t slot) const;
  Result admit_in_stream(std::unique_lock<std::mutex>& lock, std::unique_ptr<Submitted> s);
  void count(Submitted& s);  // an invocation that is made
  Result take_back(std::uint16_t slot, bool fresh, const std::string& error);
  bool cuda() const { return streams_ != nullptr; }
  void complete(Submitted& s, const Result& result);
  void end_call(Submitted& s, const Result& result);  // what its caller sees of that
  // What UNJAM_LOG shows, see log_texts.cc. Of calls and groups with the lock.
  void log_start() const;
  void log_end() const;
  void log_group(const unjamGroup& group) const;
  void log_called(const Submitted& s) const;
  void log_ended(const Submitted& s, const Result& result) const;
  std::string log_text(const Submitted& s) const;
  void reap_locked();
  void take_completions();
  void cancel_locked(std::size_t slot, const Result& why);
  Result open_channel(unjamGroup& group, int peer, bool sends, unjamGroup*& channel);
  // With the lock: a group has lost a member. Ends what is pending and cannot be completed any
  // more.
  void lose_member(unjamGroup& group, unjamGroup::Gone gone);
  void lose_reach(unjamGroup& group);    // of what unreachable() says now
  void lose_members(unjamGroup& group);  // those that went before the group was there
  // Why use n of a key can never be complete: of a member that is gone and had not completed it, or
  // somebody has met that who has not.
  Result unreachable(const unjamGroup& group, std::uint64_t tag, std::uint64_t n) const;
  // Why it is not to be made, which the user is about to be told.
  Result past_the_end(const unjamGroup& group, std::uint64_t tag, std::uint64_t n);
  // The user of this rank is told that `rank` is gone. With that he may leave its groups alone, and
  // go on with those that are left. Others of such a group may be in a call of which the one that
  // is gone had completed its part, and this rank has not: they must not wait for it.
  void give_up(int rank);
  void give_up(const unjamGroup& group);  // all that are gone
  static bool differs(const unjamGroup& group, std::uint64_t tag, std::uint64_t n,
                      const Signature& signature);
  // Of a group that has lost members: whether this rank could still make some call.
  void end_if_over(unjamGroup& group);
  void fail_key(Key& key, std::uint64_t from, const Result& why);
  void fail_waiting(Key& key, std::uint64_t from, const Result& why);
  // ---- failures.cc ----
  void post_notice(FailureNotice notice);
  // With the lock: what was posted and not applied yet. Groups and keys may have failed then, and
  // the context may be closed.
  void apply_notices();
  void apply_notice(const FailureNotice& notice);
  bool closed() {
    apply_notices();
    return closed_;
  }
  void enter_slot(std::uint16_t slot, const Submitted& s);
  // ---- keys.cc: what is held, and given back ----
  std::size_t keys_at(KeyList which) const {
    return key_lists_[static_cast<std::size_t>(which)].size();
  }
  void move_key(Key& key, KeyList which, bool front = false);
  // A key's last invocation under way has ended.
  void rest(Key& key);
  bool settled(Key& key) const;
  KeyList resting_place(const Key& key) const;
  // Looks at that many lingering keys, the longest first, whether they still are.
  void retire_lingering(std::size_t looks);
  // Forgets what is too much. Any key that is not pinned may be gone afterwards.
  void tidy();
  void collect_marks(KeyDrop& drop);
  void collect_keys(KeyDrop& drop);
  bool forget(KeyDrop& drop, Key& key);
  void dropped();
  void release_group(unjamGroup& group);
  void fail_record(const FailureNotice& notice);
  std::uint64_t uses_of(std::uint64_t tag) const;
  std::map<std::uint64_t, std::uint64_t> call_counts() const;
  struct Held;
  Held what_is_held() const;
  // ---- info.cc: the parts of info_json(), with the lock ----
  void put_settings(JsonWriter& w) const;
  void put_memory(JsonWriter& w, const Held& held) const;
  void put_heap(JsonWriter& w) const;
  void put_windows(JsonWriter& w, std::uint64_t windows_left) const;
  void put_held(JsonWriter& w) const;
  void put_peers(JsonWriter& w, const Held& held) const;
  void put_key(JsonWriter& w, Key& key) const;
  std::vector<int> undelivered_to(const Key& key) const;
  std::vector<PendingCall> untaken() const;
  void need_background();
  void background();
  Result pending_error(const char* what, std::size_t pending) const;
  static Result pending_error(const char* what, std::size_t count,
                              const std::vector<const Submitted*>& pending, const char* cure);
  static std::string calls_text(std::size_t count, const std::vector<const Submitted*>& pending);
  bool called() const;  // with the lock: other threads are in the middle of calls
  std::vector<const Submitted*> pending_in_order() const;

  const std::uint32_t generation_ = process_generation();
  const std::shared_ptr<World> world_;
  const int rank_;
  const Settings settings_;
  EventCount completions_;
  std::unique_ptr<EngineMemory> memory_;
  std::unique_ptr<Heap> heap_;
  std::unique_ptr<Ledger> ledger_;
  Windows windows_;
  std::mutex registering_;          // one thread registers or deregisters; before mutex_
  std::uint64_t not_shared_ = 0;    // registrations that other processes were not told of,
  std::string not_shared_because_;  // and why, of the latest
  std::unique_ptr<Daemon> daemon_;
  StreamDaemon* streams_ = nullptr;  // the daemon, if it is one; for good
  std::unique_ptr<BoxMemory> boxes_;
  std::string no_boxes_because_;  // on a GPU

  std::mutex shutting_down_;       // one thread at a time does; before mutex_
  mutable std::mutex refreshing_;  // see refreshed()
  mutable std::mutex mutex_;
  mutable std::atomic<std::uint64_t> in_vain_ns_{0};  // when look() last gave up
  std::vector<std::unique_ptr<unjamGroup>> groups_;
  std::vector<std::unique_ptr<unjamCollective>> collectives_;
  std::map<std::uint64_t, std::uint32_t> group_instances_;
  std::unordered_map<std::uint64_t, Key*> keys_;   // by tag
  std::vector<std::unique_ptr<Submitted>> slots_;  // in the engine, by slot
  std::vector<std::uint16_t> free_slots_;
  // Of the engine's slots the last ones, which no call takes: calls may wait for what they do.
  std::vector<std::uint16_t> free_room_slots_;
  std::array<ClearRoom, kRoomSlots> being_cleared_{};  // by slot, from the first of them
  std::deque<ClearRoom> to_clear_;
  std::vector<bool> met_;                 // by rank
  std::list<Key*> key_lists_[kKeyLists];  // every key is in one, the longest there first
  std::unordered_map<std::uint64_t, KeyRecord> records_;  // of forgotten keys, by tag
  // Of destroyed groups' keys, the latest: how often they were called, for ranks that still wait.
  std::deque<std::pair<std::uint64_t, std::uint64_t>> former_;
  FailureNotices notices_;
  std::deque<Key*> failing_;  // failed, and peers do not know yet that this rank is through
  std::vector<std::uint64_t> failing_records_;  // the same, of forgotten ones
  std::vector<unjamGroup*> voiding_;            // groups with `voids`
  std::vector<std::atomic<bool>> gone_;         // peers, by rank
  std::unique_ptr<KeyDrop> dropping_;           // at most one is under way
  std::uint64_t forgotten_ = 0;                 // keys, so far
  std::size_t waiting_ = 0;                     // successors kept out of the engine
  std::size_t callbacks_ = 0;                   // invocations under way that have a callback
  // Threads that queue something in a stream, without the lock (StreamDaemon); and that one of them
  // is through with its key, or the context is closed.
  std::size_t launching_ = 0;
  std::condition_variable launched_;
  // Made and destroyed with the lock; a use of a key has it to itself meanwhile.
  class Launching {
   public:
    explicit Launching(Context& context, Key* key = nullptr) : context_(context), key_(key) {
      ++context_.launching_;
      if (key_ != nullptr) key_->launching = true;
    }
    ~Launching() {
      --context_.launching_;
      if (key_ == nullptr) return;
      key_->launching = false;
      context_.launched_.notify_all();
    }
    Launching(const Launching&) = delete;
    Launching& operator=(const Launching&) = delete;

   private:
    Context& context_;
    Key* const key_;
  };
  std::uint64_t orders_ = 0;  // Submitted::order, so far
  std::uint64_t submitted_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t serials_ = 0;
  bool closed_ = false;     // aborted or destroyed
  bool destroyed_ = false;  // the latter
  GivenUpRanks given_up_;
  std::atomic<bool> ends_{false};  // it is closed, or about to be
  bool helping_ = false;           // see wait()
  Result first_error_;
  Result closed_why_;

  // Callbacks run here, and completions that nobody waits for are taken here.
  struct Finished {
    unjamCallback_t callback;
    void* user;
    unjamResult_t result;
  };
  std::deque<Finished> finished_;
  std::condition_variable background_changed_;
  std::thread background_;
  bool background_stop_ = false;
};

}  // namespace unjam
