// bench/async_ring without GPUs. Both rings give every chunk every rank's input exactly once, in
// whatever order streams go on; and waits that wait for too little are found.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench/async_ring/cells.h"
#include "bench/async_ring/overlap.h"
#include "bench/async_ring/ring_steps.h"

namespace async_ring {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// How often each rank's input is in a value. More than once is as wrong as never.
using Inputs = std::vector<int>;

struct Work {
  enum Kind { kCopyInput, kWait, kPull, kAdd, kDone } kind = kWait;
  int chunk = 0;
  bool temporary = false;
  int rank = 0, step = 0;  // whose step it waits for
};

// Streams of all ranks, and what lies in their memory: a value a chunk.
class Machine {
 public:
  explicit Machine(const RingSteps& ring)
      : ring_(ring),
        output_(at(ring.ranks), std::vector<Inputs>(at(ring.chunks()), nothing())),
        temporary_(at(ring.ranks)),
        streams_(at(ring.ranks)),
        done_(at(ring.ranks)) {}

  void issue(int rank, int stream, const Work& work) {
    streams_[at(rank)][at(stream)].push_back(work);
  }

  // Until nothing is left, in an order that is drawn. False: something waits for ever.
  bool run(std::mt19937& random) {
    for (;;) {
      std::vector<std::array<int, 2>> able;
      bool left = false;
      for (int r = 0; r < ring_.ranks; ++r) {
        for (int s = 0; s < kStreams; ++s) {
          left = left || !streams_[at(r)][at(s)].empty();
          if (ready(r, s)) able.push_back({r, s});
        }
      }
      if (able.empty()) return !left;
      // Now and then a stream runs far ahead of the others.
      const auto [rank, stream] = able[random() % able.size()];
      for (auto runs = 1 + random() % 12; runs > 0 && ready(rank, stream); --runs) {
        run_one(rank, stream);
      }
    }
  }

  // Values that do not hold each rank's input once.
  int wrong() const {
    const Inputs right(at(ring_.ranks), 1);
    int count = 0;
    for (const auto& chunks : output_) {
      for (const Inputs& value : chunks) count += value != right ? 1 : 0;
    }
    return count;
  }

  // For the classic ring, whose exchanges all ranks make together.
  void copy_input(int rank) {
    for (Inputs& value : output_[at(rank)]) {
      value = nothing();
      value[at(rank)] = 1;
    }
  }
  const Inputs& output(int rank, int chunk) const { return output_[at(rank)][at(chunk)]; }
  void store(int rank, int chunk, bool temporary, const Inputs& value, int stream = 0) {
    (temporary ? temporary_[at(rank)][at(stream)] : output_[at(rank)][at(chunk)]) = value;
  }
  void add(int rank, int chunk, int stream = 0) {
    for (int r = 0; r < ring_.ranks; ++r) {
      output_[at(rank)][at(chunk)][at(r)] += temporary_[at(rank)][at(stream)][at(r)];
    }
  }

 private:
  Inputs nothing() const { return Inputs(at(ring_.ranks), 0); }

  bool ready(int rank, int stream) const {
    const auto& queue = streams_[at(rank)][at(stream)];
    if (queue.empty()) return false;
    const Work& w = queue.front();
    return w.kind != Work::kWait || done_[at(w.rank)].count(w.step) != 0;
  }

  void run_one(int rank, int stream) {
    auto& queue = streams_[at(rank)][at(stream)];
    const Work w = queue.front();
    queue.pop_front();
    switch (w.kind) {
      case Work::kCopyInput:
        copy_input(rank);
        break;
      case Work::kWait:
        break;
      case Work::kPull:
        store(rank, w.chunk, w.temporary, output(ring_.previous(rank), w.chunk), stream);
        break;
      case Work::kAdd:
        add(rank, w.chunk, stream);
        break;
      case Work::kDone:
        done_[at(rank)].insert(w.step);
        break;
    }
  }

  RingSteps ring_;
  std::vector<std::vector<Inputs>> output_;
  std::vector<std::array<Inputs, kStreams>> temporary_;
  std::vector<std::array<std::deque<Work>, kStreams>> streams_;
  std::vector<std::set<int>> done_;  // steps; -1: its input is copied
};

enum class Mistake {
  kNone,
  kWaitsForTheStepBefore,
  kDoneInTheOtherStream,
  kDoneBeforeTheAddition,
  kOneStreamSeesTheInput
};

struct ModelActs {
  Machine& machine;
  int rank;
  Mistake mistake = Mistake::kNone;
  Work later = {};

  void copy_input() {
    machine.issue(rank, 0, {.kind = Work::kCopyInput});
    machine.issue(rank, 0, {.kind = Work::kDone, .step = -1});
    if (mistake == Mistake::kOneStreamSeesTheInput) return;
    machine.issue(rank, 1, {.kind = Work::kWait, .rank = rank, .step = -1});
  }
  void wait(int stream, int whose, int step) {
    if (mistake == Mistake::kWaitsForTheStepBefore) --step;
    machine.issue(rank, stream, {.kind = Work::kWait, .rank = whose, .step = std::max(step, -1)});
  }
  void pull(int stream, int chunk, bool temporary) {
    machine.issue(rank, stream, {.kind = Work::kPull, .chunk = chunk, .temporary = temporary});
  }
  void add(int stream, int chunk) {
    const Work work{.kind = Work::kAdd, .chunk = chunk};
    if (mistake == Mistake::kDoneBeforeTheAddition) {
      later = work;
    } else {
      machine.issue(rank, stream, work);
    }
  }
  void done(int stream, int step) {
    if (mistake == Mistake::kDoneInTheOtherStream) stream = 1 - stream;
    machine.issue(rank, stream, {.kind = Work::kDone, .step = step});
    if (later.kind == Work::kAdd) machine.issue(rank, stream, std::exchange(later, {}));
  }
  void meet() {}
};

int wrong_values(const RingSteps& ring, Mistake mistake, unsigned seed) {
  std::mt19937 random(seed);
  Machine machine(ring);
  for (int r = 0; r < ring.ranks; ++r) {
    ModelActs acts{machine, r, mistake, {}};
    issue_async_ring(ring, r, acts);
  }
  EXPECT_TRUE(machine.run(random)) << "waits for ever, seed " << seed;
  return machine.wrong();
}

TEST(AsyncRing, EveryOrderOfTheStreamsIsRight) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const int batches : {2, 3, 4, 8}) {
      for (unsigned seed = 0; seed < 12; ++seed) {
        EXPECT_EQ(wrong_values({ranks, batches}, Mistake::kNone, seed), 0)
            << ranks << " ranks, " << batches << " batches, seed " << seed;
      }
    }
  }
}

TEST(AsyncRing, MistakesAreFound) {
  for (const Mistake mistake : {Mistake::kWaitsForTheStepBefore, Mistake::kDoneInTheOtherStream,
                                Mistake::kDoneBeforeTheAddition, Mistake::kOneStreamSeesTheInput}) {
    for (const int batches : {2, 4, 8}) {
      int found = 0;
      for (unsigned seed = 0; seed < 60; ++seed) {
        found += wrong_values({4, batches}, mistake, seed) != 0 ? 1 : 0;
      }
      EXPECT_GT(found, 0) << static_cast<int>(mistake) << ", " << batches << " batches";
    }
  }
}

TEST(AsyncRing, AWaitIsForAStepThatMadeTheChunk) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const int batches : {1, 2, 4, 8}) {
      const RingSteps ring{ranks, batches};
      for (int r = 0; r < ranks; ++r) {
        for (int step = 0; step < ring.steps(); ++step) {
          EXPECT_EQ(ring.taken_chunk(ring.next(r), step), ring.given_chunk(r, step));
          const int source = ring.source_step(step);
          if (source >= 0) {
            EXPECT_EQ(ring.taken_chunk(r, source), ring.given_chunk(r, step));
          }
        }
      }
    }
  }
}

// All ranks' acts of a step are made together, as a group of sends and receives is.
struct Exchange {
  int given = 0, taken = 0;
  bool temporary = false;
  int added = -1;
};
struct ListActs {
  std::vector<Exchange> list;
  void copy_input() {}
  void exchange(int given, int taken, bool temporary) { list.push_back({given, taken, temporary}); }
  void add(int chunk) { list.back().added = chunk; }
};

TEST(ClassicRing, IsRight) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const RingSteps ring{ranks, 1};
    Machine machine(ring);
    std::vector<ListActs> lists(at(ranks));
    for (int r = 0; r < ranks; ++r) {
      machine.copy_input(r);
      issue_classic_ring(ring, r, lists[at(r)]);
      ASSERT_EQ(lists[at(r)].list.size(), at(ring.steps()));
    }
    for (int step = 0; step < ring.steps(); ++step) {
      std::vector<Inputs> under_way;
      for (int r = 0; r < ranks; ++r) {
        under_way.push_back(machine.output(r, lists[at(r)].list[at(step)].given));
      }
      for (int r = 0; r < ranks; ++r) {
        const Exchange& e = lists[at(r)].list[at(step)];
        EXPECT_EQ(e.taken, lists[at(ring.previous(r))].list[at(step)].given);
        machine.store(r, e.taken, e.temporary, under_way[at(ring.previous(r))]);
        if (e.added >= 0) machine.add(r, e.added);
      }
    }
    EXPECT_EQ(machine.wrong(), 0) << ranks << " ranks";
  }
}

TEST(Parts, CoverEveryCountOnce) {
  for (int chunks = 2; chunks <= 64; ++chunks) {
    for (const std::size_t count : {0ul, 1ul, 7ul, 63ul, 64ul, 65ul, 1000003ul, 1ul << 31}) {
      std::size_t next = 0;
      for (int k = 0; k < chunks; ++k) {
        const Part part = part_of(count, chunks, k);
        EXPECT_EQ(part.first, next);
        EXPECT_LE(part.count, largest_part(count, chunks));
        EXPECT_LE(largest_part(count, chunks), part.count + 1);
        next += part.count;
      }
      EXPECT_EQ(next, count) << chunks << " chunks";
    }
  }
}

TEST(Overlap, CountsWhatBothDo) {
  const std::vector<Span> copies = {{0, 4}, {3, 6}, {10, 12}};
  const std::vector<Span> sums = {{5, 11}, {20, 21}, {7, 7}};
  EXPECT_DOUBLE_EQ(length(copies), 8);
  EXPECT_DOUBLE_EQ(length(sums), 7);
  EXPECT_DOUBLE_EQ(length_of_both(copies, sums), 2);
  EXPECT_DOUBLE_EQ(length_of_both(sums, copies), 2);
  EXPECT_DOUBLE_EQ(length_of_both(copies, {}), 0);
}

TEST(Cells, ALineGivesTheCellBack) {
  Cell cell;
  cell.column = "unjam";
  cell.bytes = std::size_t{1} << 33;
  cell.us = {3.25, 1, 2};
  cell.stream_us = {0.5};
  cell.checked = 3;
  cell.wrong = 7;
  Cell read;
  ASSERT_TRUE(read_cell(line_of(cell), &read));
  EXPECT_EQ(json_of(read), json_of(cell));
  EXPECT_NE(json_of(read).find("\"us_median\": 2.0000"), std::string::npos);
  EXPECT_FALSE(read_cell("a word of the library's log", &read));
  EXPECT_FALSE(read_cell(line_of(cell).substr(0, 30), &read));
  EXPECT_EQ(quartiles({1, 2, 3, 4}).low, 1.75);
}

}  // namespace
}  // namespace async_ring
