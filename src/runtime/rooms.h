// The rooms of this process's ranks (transport/rooms.h): when two ranks meet, and when one has use
// for more connectors.
//
// Between rank R of this process and peer P there are two rooms: R's block for P, whose memory is
// R's, and P's block for R. Each goes the same way, in portions (ArenaShape::next_connectors()):
//   added:   memory stands behind it at its owner. By the thread that makes the first call with a
//            new neighbour, or by this object's thread, where the peer was first, or wants more.
//   cleared: the owner's engine has cleared it (ClearRoom).
//   offered: the peer has been told, and has mapped it. What is offered to a rank makes it add and
//            offer the first portion of its own block: the other way there are credits to write.
// A rank may use a peer's block as far as that was offered, once it has offered the first portion
// of its own: whoever has sent something has told the receiver before of all that this needs,
// whatever becomes of the sender. Nothing in here waits for a device: engines go on meanwhile, and
// are rung when there is more. Where memory is short, who makes the first call with a neighbour
// gets an error; all else that fails is tried again until it works.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "control/messages.h"
#include "engine/invocation.h"
#include "runtime/shared_pages.h"
#include "transport/arena.h"
#include "transport/rooms.h"

namespace unjam {

class Rooms {
 public:
  // A rank of this process, while its engine is there. Any thread; without a lock of this object.
  class User {
   public:
    virtual ~User() = default;
    // Has the engine do it, in the order of these calls, and calls cleared() when it has. False: it
    // never will.
    virtual bool clear_room(const ClearRoom& room) = 0;
    // Takes in what the engine has done.
    virtual void take_in_cleared() = 0;
    // Lanes that lacked room may find it.
    virtual void room_came() = 0;
  };
  // What stands behind arenas. Offsets and sizes are of whole pages of the arena's shape. Called
  // without a lock of this object, but for is_local().
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual bool is_local(int rank) const = 0;
    // Of a rank of this process. (Not cleared.)
    virtual bool add_memory(int owner, std::uint64_t offset, std::uint64_t bytes,
                            std::string& error) = 0;
    // For another process; none is needed where `fd` stays empty.
    virtual bool share_memory(int owner, std::uint64_t offset, Fd& fd, std::string& error) = 0;
    // Lets another rank of this process reach what was added there.
    virtual bool let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) = 0;
    // Maps what another process has shared.
    virtual bool adopt_memory(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd,
                              int viewer, std::string& error) = 0;
    // To the process of a rank.
    virtual void tell_of_room(int rank, const RoomMessage& message, Fd fd) = 0;
    virtual void warn(const std::string& text) = 0;
  };

  Rooms(int ranks, const ArenaShape& shape, Memory& memory);
  ~Rooms();  // as stop()
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;

  // The table of a rank of this process: whole pages of zeroes at first. Null: `error`. The first
  // one also starts this object's thread.
  Room* table(int rank, std::string& error);
  std::uint64_t table_bytes() const;

  void attach(int rank, User* user);
  // No call of the user's is under way any more. Not while holding a lock that those take.
  void detach(int rank, const User* user);

  // `rank` makes a call with `peer`. If memory was added, `room` is what the rank's engine is to
  // clear, in front of what clear_room() brings: so the caller holds the lock that this takes.
  // False: there was none, `error`.
  bool meet(int rank, int peer, ClearRoom& room, std::string& error);
  void cleared(int rank, const ClearRoom& room);
  // Whether lanes may want something, by their table; without a lock. Then look() sees to it.
  static bool any_wanted(const Room* table, std::uint32_t ranks);
  void look(int rank);
  // What another process says to a rank of this one. Any nonsense is passed over.
  void hear(const RoomMessage& message, Fd fd);
  // Nothing is under way any more.
  void stop();

  struct Usage {
    std::uint64_t met = 0;         // peers
    std::uint64_t connectors = 0;  // of all peers' blocks, that the rank may use
    std::uint64_t bytes = 0;       // behind the rank's blocks
    std::string lacks;             // why memory that peers want has yet to come; "": it has
  };
  Usage usage(int rank) const;
  // Connectors of a peer's block that a rank may use.
  std::uint32_t connectors(int rank, int peer) const;

 private:
  using Pair = std::pair<int, int>;  // a rank of this process, and a peer
  struct State {
    // Connectors of the rank's block for the peer: with memory, and of those that was offered.
    std::uint32_t added = 0, offered = 0;
    std::uint32_t theirs = 0;  // of the peer's block for the rank: those that this may use
    std::uint32_t asked = 0;   // of the peer, at most
    std::string lacks;         // why the last try of something has failed
  };
  struct Job {
    enum What { kAdd, kOffer, kAdopt } what = kAdd;
    Pair pair;
    std::uint32_t to = 0;
    std::shared_ptr<Fd> fd;
  };

  std::uint64_t offset_of(int owner, int peer, std::uint32_t from) const;
  std::uint64_t bytes_of(std::uint32_t from, std::uint32_t to) const;
  void queue(Job job);            // with the lock
  void try_again();               // likewise: what was postponed
  void publish(const Pair& who);  // with the lock
  bool add_next(const Pair& who, ClearRoom& room, std::string& error);
  void work();
  void add(const Job& job);
  void offer(const Job& job);
  void adopt(const Job& job);
  // False: there is none.
  bool with_user(int rank, const std::function<void(User&)>& call);
  void tried(const Job& job, const std::string& error);  // again, if there is an error
  // With the lock. Whether the portion is the next one; if one in front of it is to be tried again,
  // so is this.
  bool is_next(const Job& job, std::uint32_t now);
  void uncount(int rank);  // with the lock

  const int ranks_;
  const ArenaShape shape_;
  Memory& memory_;
  std::mutex adding_;  // in front of mutex_: one thread adds at a time
  std::mutex using_;   // in front of all others: a user is called, or goes
  mutable std::mutex mutex_;
  std::map<int, SharedPages<Room>> tables_;
  std::map<int, User*> users_;
  std::map<Pair, State> states_;
  std::map<int, int> uncleared_;  // by rank: how much its engine has yet to clear
  std::set<int> left_;            // ranks whose engine was there, and has gone
  std::deque<Job> jobs_;
  std::vector<Job> postponed_;  // no memory, or no engine yet
  std::vector<int> came_;       // ranks to be rung
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace unjam
