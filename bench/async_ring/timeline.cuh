// One asynchronous call, piece by piece: how much of its sums goes on beside transfers, and a trace
// for Chrome's viewer (chrome://tracing, Perfetto).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/async_ring/cells.h"
#include "bench/async_ring/data.cuh"
#include "bench/async_ring/overlap.h"
#include "bench/async_ring/ranks.h"
#include "bench/async_ring/rings.cuh"
#include "bench/async_ring/step_times.h"

namespace async_ring {

struct Timeline {
  int batches = 0;
  std::size_t bytes = 0;
  std::vector<std::vector<StepTimes::Piece>> ranks;  // times of all count from one moment, to µs
  std::uint64_t wrong = 0;

  std::vector<Span> spans(std::size_t rank, StepTimes::Kind kind) const {
    std::vector<Span> all;
    for (const StepTimes::Piece& p : ranks[rank]) {
      if (p.kind == kind) all.push_back(p.us);
    }
    return all;
  }
};

// The second of two calls: the first one warms up.
inline Timeline record_timeline(Ranks& ranks, std::size_t bytes, int batches) {
  const std::size_t count = bytes / sizeof(float);
  const int pieces = 2 * RingSteps{ranks.count(), batches}.steps();
  Timeline timeline;
  timeline.batches = batches;
  timeline.bytes = bytes;
  timeline.ranks.resize(static_cast<std::size_t>(ranks.count()));
  std::vector<std::uint64_t> origin_ns(timeline.ranks.size());
  std::vector<std::uint64_t> wrong(timeline.ranks.size());
  ranks.each([&](int r) {
    Rank& me = ranks.at(r);
    unjam_gpu::Watchdog::instance().doing(r, "timeline of " + std::to_string(batches) + " batches");
    StepTimes times(pieces);
    const auto at = static_cast<std::size_t>(r);
    for (std::uint32_t call = 0; call < 2; ++call) {
      prepare(me.in(), me.out(), count, r, call, me.streams[0]);
      ranks.meet();
      times.origin(me.streams[0]);
      origin_ns[at] = unjam_gpu::now_ns();
      ranks.meet();
      async_all_reduce(ranks, me, count, batches, Memory::kKept, &times);
      wrong[at] += wrong_elements(me.out(), count, ranks.count(), call,
                                  me.verdict.as<unsigned long long>(), me.streams[0]);
    }
    timeline.ranks[at] = times.pieces();
    ranks.meet();
  });
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r) {
    const double later =
        (static_cast<double>(origin_ns[r]) - static_cast<double>(origin_ns[0])) * 1e-3;
    for (StepTimes::Piece& p : timeline.ranks[r]) {
      p.us.begin += later;
      p.us.end += later;
    }
    timeline.wrong += wrong[r];
  }
  return timeline;
}

// Of the time in which sums are under way, the share in which a transfer of the same rank is, too:
// of all ranks together.
inline double overlap_share(const Timeline& t) {
  double both = 0, sums = 0;
  for (std::size_t r = 0; r < t.ranks.size(); ++r) {
    const std::vector<Span> copy = t.spans(r, StepTimes::kCopy), sum = t.spans(r, StepTimes::kSum);
    both += length_of_both(copy, sum);
    sums += length(sum);
  }
  return sums > 0 ? both / sums : 0;
}

inline std::string overlap_json(const Timeline& t) {
  double copies = 0, sums = 0;
  for (std::size_t r = 0; r < t.ranks.size(); ++r) {
    copies += length(t.spans(r, StepTimes::kCopy));
    sums += length(t.spans(r, StepTimes::kSum));
  }
  const auto n = static_cast<double>(t.ranks.size());
  return "{\"batches\": " + std::to_string(t.batches) + ", \"bytes\": " + std::to_string(t.bytes) +
         ", \"share\": " + number(overlap_share(t)) + ", \"copy_us\": " + number(copies / n) +
         ", \"sum_us\": " + number(sums / n) + ", \"wrong\": " + std::to_string(t.wrong) + "}";
}

// A process a rank, a thread a stream.
inline std::string chrome_trace(const Timeline& t) {
  std::string events;
  const auto add = [&](const std::string& event) {
    events += (events.empty() ? "\n" : ",\n") + event;
  };
  for (std::size_t r = 0; r < t.ranks.size(); ++r) {
    const std::string pid = "\"pid\": " + std::to_string(r);
    add("{\"ph\": \"M\", \"name\": \"process_name\", " + pid + ", \"args\": {\"name\": \"GPU " +
        std::to_string(r) + "\"}}");
    for (int s = 0; s < kStreams; ++s) {
      add("{\"ph\": \"M\", \"name\": \"thread_name\", " + pid + ", \"tid\": " + std::to_string(s) +
          ", \"args\": {\"name\": \"stream " + std::to_string(s) + "\"}}");
    }
    for (const StepTimes::Piece& p : t.ranks[r]) {
      const bool copy = p.kind == StepTimes::kCopy;
      add(std::string("{\"ph\": \"X\", \"cat\": \"") + (copy ? "transfer" : "sum") +
          "\", \"name\": \"" + (copy ? "transfer" : "sum") + " of chunk " +
          std::to_string(p.chunk) + "\", " + pid + ", \"tid\": " + std::to_string(p.stream) +
          ", \"ts\": " + number(p.us.begin) + ", \"dur\": " + number(p.us.end - p.us.begin) + "}");
    }
  }
  return "{\"displayTimeUnit\": \"ns\", \"otherData\": {\"batches\": " + std::to_string(t.batches) +
         ", \"bytes\": " + std::to_string(t.bytes) +
         ", \"overlap_share\": " + number(overlap_share(t)) + "},\n\"traceEvents\": [" + events +
         "\n]}\n";
}

}  // namespace async_ring
