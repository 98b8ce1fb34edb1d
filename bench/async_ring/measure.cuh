// Measures an all-reduce at one size, and compares every call's result with a separate sum.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/async_ring/cells.h"
#include "bench/async_ring/data.cuh"
#include "bench/async_ring/ranks.h"
#include "tests/gpu/support.h"

namespace async_ring {

struct Column {
  std::string name, label;
  // By each rank's thread, of in() to out(): until the output is there.
  std::function<void(Rank&, std::size_t count)> call;
  // Only queues it in the rank's first stream. Empty: it cannot.
  std::function<void(Rank&, std::size_t count)> queue;
  std::function<void(Rank&)> leave;  // behind the column's last call of a size; may be empty
  std::string not_measured;          // why, if so
};

struct Effort {
  double seconds = 0.2;         // for the calls of a cell, checks included
  int least = 5, most = 60;     // calls of a cell
  double queue_seconds = 0.02;  // for calls that are queued in a row
  int rounds = 5;               // of these
};

// Samples of all ranks, of which the slowest counts.
class Samples {
 public:
  explicit Samples(int ranks) : of_(static_cast<std::size_t>(ranks)) {}
  void add(int rank, double us) { of_[static_cast<std::size_t>(rank)].push_back(us); }
  std::vector<double> slowest() const {
    std::vector<double> all = of_.front();
    for (const auto& v : of_) {
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], v[i]);
    }
    return all;
  }

 private:
  std::vector<std::vector<double>> of_;
};

// f(k) `calls` times in the rank's first stream, which all ranks begin together: µs a call until
// all are done, and, if issue is not nullptr, until the host has queued them.
template <class F>
double queued_us(Ranks& ranks, Rank& me, int calls, const F& f, double* issue = nullptr) {
  ranks.meet();
  const std::uint64_t begin = unjam_gpu::now_ns();
  me.begin.record(me.streams[0]);
  for (int i = 0; i < calls; ++i) f(i);
  me.end.record(me.streams[0]);
  if (issue != nullptr) *issue = unjam_gpu::us_since(begin) / calls;
  me.streams[0].synchronize();
  return unjam_gpu::us_between(me.begin, me.end) / calls;
}

inline Cell measure(Ranks& ranks, const Column& column, std::size_t bytes, const Effort& effort) {
  constexpr int kWarm = 2;
  const std::size_t count = bytes / sizeof(float);
  Samples us(ranks.count()), stream_us(ranks.count()), issue_us(ranks.count());
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<int> repeats{0}, queued{0};
  std::uint64_t checked = 0;  // rank 0's
  ranks.each([&](int r) {
    Rank& me = ranks.at(r);
    unjam_gpu::Watchdog::instance().doing(r, column.name + " of " + std::to_string(bytes));
    auto* const verdict = me.verdict.as<unsigned long long>();
    // Every call has other inputs: what a call before has left is wrong in this one.
    const auto seed_of = [&](int call) {
      return static_cast<std::uint32_t>(unjam_gpu::mix(bytes, static_cast<std::uint64_t>(call)));
    };
    const auto check_output = [&](int call) {
      wrong +=
          wrong_elements(me.out(), count, ranks.count(), seed_of(call), verdict, me.streams[0]);
      if (r == 0) ++checked;
    };
    const auto once = [&](int call) {
      prepare(me.in(), me.out(), count, r, seed_of(call), me.streams[0]);
      ranks.meet();
      const std::uint64_t begin = unjam_gpu::now_ns();
      column.call(me, count);
      const double took = unjam_gpu::us_since(begin);
      check_output(call);
      return took;
    };

    double alone = 0;
    for (int i = 0; i < kWarm; ++i) {
      const std::uint64_t begin = unjam_gpu::now_ns();
      const double took = once(i);
      if (r != 0 || i + 1 < kWarm) continue;
      const double with_checks = unjam_gpu::us_since(begin);
      alone = std::max(took, 1.0);
      repeats = std::clamp(static_cast<int>(effort.seconds * 1e6 / std::max(with_checks, 1.0)),
                           effort.least, effort.most);
      queued = std::clamp(static_cast<int>(effort.queue_seconds * 1e6 / alone), 3, 100);
    }
    ranks.meet();
    for (int i = 0; i < repeats; ++i) us.add(r, once(kWarm + i));

    if (column.queue) {
      const int call = kWarm + repeats;
      prepare(me.in(), me.out(), count, r, seed_of(call), me.streams[0]);
      for (int round = 0; round < effort.rounds; ++round) {
        double issue = 0;
        const double took =
            queued_us(ranks, me, queued, [&](int) { column.queue(me, count); }, &issue);
        stream_us.add(r, took);
        issue_us.add(r, issue);
      }
      check_output(call);
    }
    if (column.leave) column.leave(me);
    ranks.meet();
  });
  Cell cell;
  cell.column = column.name;
  cell.bytes = bytes;
  cell.us = us.slowest();
  cell.stream_us = stream_us.slowest();
  cell.issue_us = issue_us.slowest();
  cell.checked = checked * static_cast<std::uint64_t>(ranks.count());
  cell.wrong = wrong;
  return cell;
}

}  // namespace async_ring
