// What tests let couriers carry: in one process, between two, and until one of two is killed.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include "base/hash.h"
#include "tests/net/carried_rank.h"
#include "tests/support/job.h"

namespace unjam {

class Patience {
 public:
  bool lost() const { return std::chrono::steady_clock::now() > end_; }

 private:
  const std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::microseconds(unjam_test::kPatienceUs);
};

// Short slices go with their heads, long ones by themselves.
inline ArenaShape shape_of_slots(std::uint32_t escape, std::uint32_t borrow = 0) {
  ArenaShape s;
  s.connectors = 3;
  s.first_connectors_log2 = 1;
  s.guaranteed_slots = 3;
  s.guaranteed_slot_bytes = (escape + 63) / 64 * 64;
  s.pool_slots = borrow == 0 ? 0 : 3;
  s.pool_slot_bytes = (borrow + 63) / 64 * 64;
  return s;
}

// Slices of several keys between all ranks, in any order.
struct Traffic {
  struct Way {
    std::uint32_t from, to;
    CarriedStream stream;
  };
  std::vector<Way> ways;
  std::uint64_t each = 0;
  std::uint64_t drives = 6;  // turns of a courier for each of a sender; with few, frames queue up

  Traffic(std::uint32_t ranks, std::uint64_t keys, std::uint64_t of_each,
          const std::vector<std::uint32_t>& bytes)
      : each(of_each) {
    for (std::uint32_t a = 0; a < ranks; ++a) {
      for (std::uint32_t b = 0; b < ranks; ++b) {
        for (std::uint64_t key = 0; a != b && key < keys; ++key) {
          CarriedStream s;
          s.tag = mix64(key + 1) | 1;
          s.seed = hash_combine(s.tag, a * 10 + b);
          s.bytes = bytes[key % bytes.size()];
          ways.push_back({a, b, s});
        }
      }
    }
  }
  // A turn of whoever it is. False: a wrong slice.
  template <class Hosts>
  bool turn(Hosts& hosts, std::mt19937_64& random) {
    Way& w = ways[random() % ways.size()];
    CarriedStream& s = w.stream;
    const std::uint64_t what = random() % (2 + drives);
    if (what == 0) {
      if (s.sent != each) s.send(hosts[w.from], w.to);
      LaneTransport& t = hosts[w.from].transport();
      // Keys are forgotten when all was consumed, and come again.
      if (random() % 8 == 0 && t.drained(w.to, s.out)) t.release(w.to, s.out);
    } else if (what == 1) {
      return s.receive(hosts[w.to], w.from) >= 0;
    } else {
      hosts[static_cast<std::uint32_t>(random() % hosts.size())].courier().drive();
    }
    return true;
  }
  bool all_here() const {
    for (const Way& w : ways) {
      if (w.stream.received != each) return false;
    }
    return true;
  }
};

inline void write_all(int fd, const void* from, std::size_t bytes) {
  ASSERT_EQ(write(fd, from, bytes), static_cast<ssize_t>(bytes));
}
inline void read_all(int fd, void* to, std::size_t bytes) {
  ASSERT_EQ(recv(fd, to, bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
}

// Of a rank of two, keys of both lengths.
inline std::vector<CarriedStream> some_streams(std::uint32_t from) {
  std::vector<CarriedStream> all(6);
  for (std::uint64_t k = 0; k < all.size(); ++k) {
    all[k].tag = mix64(k + 1) | 1;
    all[k].seed = hash_combine(all[k].tag, from);
    all[k].bytes = k % 2 == 0 ? 60 : 5000;
  }
  return all;
}

// What is sent and received by a rank whose only peer is in another process, at the other end of a
// socket, too. Both say good-bye when all is there.
inline void exchange_and_leave(CarriedRank& rank, int to_other) {
  const std::uint32_t self = rank.rank();
  std::vector<CarriedStream> to = some_streams(self), from = some_streams(1 - self);
  constexpr std::uint64_t kEach = 200;
  std::uint64_t left = from.size() * kEach, unsent = to.size() * kEach;
  HomeThatCounts& home = rank.home();
  const Patience patience;
  bool leaving = false;
  while (home.left_count == 0 || !leaving) {
    if (patience.lost()) unjam_test::fail("somebody waits for ever");
    if (home.gone_count != 0) unjam_test::fail(home.why);
    if (!rank.courier().drive()) usleep(50);
    for (CarriedStream& s : to) {
      if (s.sent != kEach && s.send(rank, 1 - self)) --unsent;
    }
    for (CarriedStream& s : from) {
      const int got = s.receive(rank, 1 - self);
      if (got < 0) unjam_test::fail("a wrong slice");
      if (got == 1) --left;
    }
    if (left == 0 && unsent == 0 && !leaving) {
      rank.courier().leave(1 - self);
      leaving = true;
    }
  }
  EXPECT_EQ(left, 0u);
  // Until the other one has heard of it, too.
  char byte = 0;
  write_all(to_other, &byte, 1);
  while (recv(to_other, &byte, 1, MSG_DONTWAIT) != 1) {
    if (patience.lost()) unjam_test::fail("the other one does not end");
    if (!rank.courier().drive()) usleep(50);
  }
}

// The same without an end, until the peer is gone; one of the two kills itself.
inline void exchange_until_killed(CarriedRank& rank, bool kills, std::uint64_t seed) {
  const std::uint32_t self = rank.rank();
  std::vector<CarriedStream> to = some_streams(self), from = some_streams(1 - self);
  std::mt19937_64 random(seed);
  const std::uint64_t last = 1 + random() % 3000;
  std::uint64_t received = 0;
  HomeThatCounts& home = rank.home();
  const Patience patience;
  while (home.gone_count == 0) {
    if (patience.lost()) unjam_test::fail("a death was not seen");
    if (!rank.courier().drive()) usleep(50);
    for (CarriedStream& s : to) s.send(rank, 1 - self);
    for (CarriedStream& s : from) {
      const int got = s.receive(rank, 1 - self);
      if (got < 0) unjam_test::fail("a wrong slice");
      if (got == 1) ++received;
    }
    if (kills && received >= last) ::kill(getpid(), SIGKILL);
  }
}

}  // namespace unjam
