// What the rings are made of, each alone: from these figures model.py foretells the rings' times.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "bench/async_ring/cells.h"
#include "bench/async_ring/measure.cuh"
#include "bench/async_ring/ranks.h"
#include "bench/async_ring/rings.cuh"

namespace async_ring {

struct Probe {
  std::string kind;
  std::size_t bytes = 0;
  std::vector<double> us;  // of rounds, at the slowest rank
};

inline std::string json_of(const Probe& p) {
  return "{\"kind\": " + quoted(p.kind) + ", \"bytes\": " + std::to_string(p.bytes) + ", " +
         samples_json("us", p.us) + "}";
}

// How long a step takes the hosts, whatever it moves: all of a step's work on one element.
inline void issue_small_steps(Ranks& ranks, Rank& me, int steps) {
  Rank& from = ranks.at(RingSteps{ranks.count(), 1}.previous(me.rank));
  float* const temporary = me.kept.as<float>();
  me.done[0]->record(me.streams[0]);
  ranks.meet();
  for (int step = 0; step < steps; ++step) {
    const unjam_gpu::Stream& stream = me.streams[step % kStreams];
    wait_for(stream, *from.done[0]);
    copy_in(stream, temporary, from.out(), 1);
    add_in(stream, me.out(), temporary, 1);
    me.done[1]->record(stream);
    ranks.meet();
  }
}

// most: bytes of the largest vector.
inline std::vector<Probe> measure_probes(Ranks& ranks, const Nccl& nccl, std::size_t most) {
  constexpr int kRounds = 7, kCalls = 8, kSteps = 64;
  constexpr std::size_t kLeast = std::size_t{64} << 10, kGrowth = 8;
  std::vector<Probe> probes;
  // us: of one round, by each rank's thread.
  const auto probe = [&](const std::string& kind, std::size_t bytes,
                         const std::function<double(Rank&)>& us) {
    Samples samples(ranks.count());
    ranks.each([&](int r) {
      unjam_gpu::Watchdog::instance().doing(r, "probe " + kind + " of " + std::to_string(bytes));
      us(ranks.at(r));  // warms up
      for (int i = 0; i < kRounds; ++i) samples.add(r, us(ranks.at(r)));
      ranks.meet();
    });
    probes.push_back({kind, bytes, samples.slowest()});
  };
  const auto queued = [&](const std::string& kind, std::size_t bytes,
                          const std::function<void(Rank&)>& f) {
    probe(kind, bytes, [&](Rank& me) { return queued_us(ranks, me, kCalls, [&](int) { f(me); }); });
  };
  const RingSteps ring{ranks.count(), 1};
  const std::size_t kept = most / static_cast<std::size_t>(ranks.count());
  for (std::size_t bytes = kLeast; bytes <= std::min(kept, std::size_t{512} << 20);
       bytes *= kGrowth) {
    const std::size_t n = bytes / sizeof(float);
    queued("copy_peer", bytes, [&](Rank& me) {
      copy_in(me.streams[0], me.kept.as<float>(), ranks.at(ring.previous(me.rank)).out(), n);
    });
    queued("copy_local", bytes, [&](Rank& me) { copy_in(me.streams[0], me.out(), me.in(), n); });
    queued("add", bytes,
           [&](Rank& me) { add_in(me.streams[0], me.out(), me.kept.as<float>(), n); });
    if (nccl.there()) {
      queued("send_receive", bytes, [&](Rank& me) {
        nccl.exchange(me.communicator, me.out(), n, ring.next(me.rank), me.kept.as<float>(), n,
                      ring.previous(me.rank), me.streams[0].get());
      });
    }
    probe("allocate", bytes, [&](Rank&) {
      ranks.meet();
      const std::uint64_t begin = unjam_gpu::now_ns();
      {
        const unjam_gpu::DeviceMemory memory(bytes);
      }
      return unjam_gpu::us_since(begin);
    });
  }
  probe("step", 0, [&](Rank& me) {
    ranks.meet();
    const std::uint64_t begin = unjam_gpu::now_ns();
    issue_small_steps(ranks, me, kSteps);
    for (const unjam_gpu::Stream& stream : me.streams) stream.synchronize();
    return unjam_gpu::us_since(begin) / kSteps;
  });
  probe("synchronize", 0, [&](Rank& me) {
    ranks.meet();
    const std::uint64_t begin = unjam_gpu::now_ns();
    add_in(me.streams[0], me.out(), me.kept.as<float>(), 1);
    me.streams[0].synchronize();
    return unjam_gpu::us_since(begin);
  });
  return probes;
}

}  // namespace async_ring
