// Runs a program of unjam.loop on tests/simt's machine: all ranks' grids at once, launch after
// launch. It is compiled with the program by tests/python/test_loop_kernels.py, which writes the
// file that it reads, and reads what it prints: a line for each rank and step, or a report.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "frame.cuh"

void unjam_loop_step(const unjam_loop::Parameters& p);

namespace {

using unjam_loop::Instruction;
using unjam_loop::Parameters;
using unjam_loop::Report;
using unjam_loop::Wait;

// As the test writes them.
struct Header {
  u64 seed, most_steps, limit_ns, ranks, blocks, batch, launches;
  u64 instructions, waits, counters, finish;
  u64 page_bytes, state_bytes, mail_half, weight_bytes;
  u64 tokens_at, positions_at;
  u64 dropped;  // a rank that does not come; its number + 1
};

template <class T>
std::vector<T> read(std::ifstream& in, u64 count) {
  std::vector<T> found(count);
  in.read(reinterpret_cast<char*>(found.data()), static_cast<std::streamsize>(count * sizeof(T)));
  if (!in) {
    std::fprintf(stderr, "the file is too short\n");
    std::exit(2);
  }
  return found;
}

// Warps that stand still: how many of a rank in a launch, at which of their block's steps at the
// latest, for how many of all steps at most.
constexpr u32 kHolds = 4;
constexpr u64 kLatest = 300'000, kLongest = 1'500'000;

struct Aligned {
  explicit Aligned(u64 bytes, unsigned char fill = 0)
      : data(static_cast<u8*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128 + 128))) {
    std::memset(data, fill, bytes);
  }
  Aligned(Aligned&& other) noexcept : data(other.data) { other.data = nullptr; }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  Aligned& operator=(Aligned&&) = delete;
  ~Aligned() { std::free(data); }
  u8* data;
};

struct Rank {
  Aligned pages, state, mail, weights;
  std::vector<u32> counters, history;
  Report report{};
  u32 stop = 0;
};

}  // namespace

int main(int, char** arguments) {
  std::ifstream in(arguments[1], std::ios::binary);
  const Header h = read<Header>(in, 1)[0];
  const auto instructions = read<Instruction>(in, h.instructions);
  const auto streams = read<u32>(in, h.blocks + 1);
  const auto waits = read<Wait>(in, h.waits);
  const auto programs = read<u64>(in, h.ranks);
  std::vector<Rank> ranks;
  for (u64 r = 0; r < h.ranks; ++r) {
    // Pages of a fresh launch are no numbers.
    ranks.push_back({Aligned(h.page_bytes, 0xff),
                     Aligned(h.state_bytes),
                     Aligned(unjam_loop::kHelloBytes + 2 * h.mail_half),
                     Aligned(h.weight_bytes),
                     std::vector<u32>(h.counters),
                     {}});
    const auto blob = read<u8>(in, h.weight_bytes);
    std::memcpy(ranks.back().weights.data, blob.data(), blob.size());
  }
  u32 epoch = 0;
  std::mt19937_64 random(h.seed);
  for (u64 launch = 0; launch < h.launches; ++launch) {
    const auto given = read<u32>(in, 1 + 2 * h.batch);  // steps, positions, tokens or ~0
    const u32 steps = given[0];
    std::vector<Parameters> parameters(h.ranks);
    for (u64 r = 0; r < h.ranks; ++r) {
      Rank& rank = ranks[r];
      for (u64 b = 0; b < h.batch; ++b) {
        std::memcpy(rank.state.data + h.positions_at + 4 * b, &given[1 + b], 4);
        if (given[1 + h.batch + b] != ~0u) {
          std::memcpy(rank.state.data + h.tokens_at + 4 * b, &given[1 + h.batch + b], 4);
        }
      }
      rank.history.assign(steps * h.batch, ~0u);
      Parameters& p = parameters[r];
      p = {};
      p.instructions = instructions.data();
      p.streams = streams.data();
      p.waits = waits.data();
      p.counters = rank.counters.data();
      p.pages = rank.pages.data;
      p.state = rank.state.data;
      p.mail = rank.mail.data;
      for (u64 peer = 0; peer < h.ranks; ++peer) p.peers[peer] = ranks[peer].mail.data;
      p.weights = rank.weights.data;
      p.history = rank.history.data();
      p.report = &rank.report;
      p.stop = &rank.stop;
      p.program = programs[r];
      p.limit_ns = h.limit_ns;
      p.mail_half = h.mail_half;
      p.rank = static_cast<u32>(r);
      p.ranks = static_cast<u32>(h.ranks);
      p.epoch = epoch;
      p.steps = steps;
      p.finish = static_cast<u32>(h.finish);
    }
    unjam_simt::Machine::Limits limits;
    limits.most_steps = h.most_steps;
    unjam_simt::Machine machine(h.seed + launch, limits);
    for (u64 r = 0; r < h.ranks; ++r) {
      const Parameters& p = parameters[r];
      const auto* grid = machine.launch(static_cast<u32>(h.blocks), unjam_loop::kThreads,
                                        [&p] { unjam_loop_step(p); });
      if (h.dropped == r + 1) machine.drop(grid);
      // Some warps, among them those that load pages, stand still for a while.
      for (u32 n = 0; n < kHolds; ++n) {
        unjam_simt::Hold hold;
        hold.block = static_cast<u32>(random() % h.blocks);
        hold.warp = n % 2 == 0 ? unjam_loop::kComputingWarps
                               : static_cast<u32>(random() % unjam_loop::kComputingWarps);
        hold.at = random() % kLatest;
        hold.steps = random() % kLongest;
        machine.hold(grid, hold);
      }
    }
    const std::string error = machine.run();
    if (!error.empty()) {
      std::printf("error %s\n", error.c_str());
      return 1;
    }
    epoch += steps;
    for (u64 r = 0; r < h.ranks; ++r) {
      if (ranks[r].stop != 0 || ranks[r].report.written != 0) {
        std::printf("report");
        const auto* bytes = reinterpret_cast<const u8*>(&ranks[r].report);
        for (u64 n = 0; n < sizeof(Report); ++n) std::printf(" %u", bytes[n]);
        std::printf("\n");
        continue;
      }
      for (u32 s = 0; s < steps; ++s) {
        std::printf("tokens %llu", r);
        for (u64 b = 0; b < h.batch; ++b) std::printf(" %u", ranks[r].history[s * h.batch + b]);
        std::printf("\n");
      }
    }
  }
  return 0;
}
