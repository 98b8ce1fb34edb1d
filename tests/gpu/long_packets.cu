// long_packets: whether lines (packets of 32 or 64 KiB and more, see docs/internals/packets.md)
// come whole. Collectives of random lengths, most of them lines, follow each other in a stream,
// behind a kernel that fills the input and in front of one that checks every element of the output,
// with other numbers in every call: so whatever a slot held before is not what is expected. Lengths
// are any, so that lines lie where shorter packets and slices have ended before.
//
// Lines of 128 bytes were torn so within seconds on H100s (see the same page); those of 64
// bytes, which are what there is, must never be.
//
//   --lengths: of the longest, in bytes; on two GPUs all up to 4 MiB go in one piece
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr int kCalls = 400;  // of a batch
constexpr int kKept = 4096;  // wrong elements of which it is known where they are

__host__ __device__ std::uint32_t word(std::uint64_t seed, int rank, std::uint64_t i) {
  std::uint64_t z =
      seed + static_cast<std::uint64_t>(rank) * 0x9e3779b97f4a7c15u + (i + 1) * 0xd1342543de82ef95u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  return static_cast<std::uint32_t>(z >> 32);
}

__global__ void fill(std::uint32_t* data, std::size_t n, std::uint64_t seed, int rank) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    data[i] = word(seed, rank, i);
  }
}

struct Wrong {
  std::uint64_t call, at;
};
struct Verdict {
  unsigned long long checked, wrong;
  Wrong kept[kKept];
};

__device__ std::uint32_t wanted(const Expect& e, std::size_t i) {
  switch (e.kind) {
    case UNJAM_BROADCAST:
      return word(e.seed, e.root, i);
    case UNJAM_SCATTER:
      return word(e.seed, e.root, static_cast<std::size_t>(e.at) * e.count + i);
    case UNJAM_ALL_GATHER:
      return word(e.seed, static_cast<int>(i / e.count), i % e.count);
    default: {
      std::uint32_t sum = 0;
      for (int r = 0; r < e.size; ++r) sum += word(e.seed, r, i);
      return sum;
    }
  }
}

__global__ void judge(const std::uint32_t* data, std::size_t n, Expect expect, std::uint64_t number,
                      Verdict* verdict) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    if (data[i] == wanted(expect, i)) continue;
    const unsigned long long at = atomicAdd(&verdict->wrong, 1ull);
    if (at < kKept) verdict->kept[at] = {number, i};
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) verdict->checked += n;
}

struct Settings {
  std::uint64_t seed = 0;
  std::size_t most = 0;
  int ranks = 0;
};

// Of all ranks alike, but for `rank`.
Spec make_call(const Settings& s, std::uint64_t number, int rank) {
  // Those most in which one rank runs ahead of the others: there lines were torn.
  constexpr unjamKind_t kKinds[] = {UNJAM_SCATTER,   UNJAM_SCATTER,    UNJAM_BROADCAST,
                                    UNJAM_BROADCAST, UNJAM_ALL_GATHER, UNJAM_ALL_REDUCE};
  std::mt19937_64 random(mix(s.seed, number));
  Spec c;
  c.dtype = UNJAM_UINT32;
  c.size = s.ranks;
  c.at = rank;
  c.kind = kKinds[random() % std::size(kKinds)];
  c.root = static_cast<int>(random() % static_cast<std::uint64_t>(s.ranks));
  c.seed = random();
  constexpr std::size_t kLeastLines = 65536, kShortest = 4;
  const bool is_short = random() % 5 == 0;
  const std::size_t least = is_short ? kShortest : std::min(kLeastLines, s.most);
  const std::size_t most = is_short ? kLeastLines : s.most;
  c.count = (least + random() % (most - least + 1)) / sizeof(std::uint32_t);
  return c;
}

class Worker {
 public:
  Worker(const Member& me, const Settings& s)
      : me_(me),
        settings_(s),
        from_(s.most * static_cast<std::size_t>(s.ranks)),
        to_(s.most * static_cast<std::size_t>(s.ranks)),
        verdict_(sizeof(Verdict)) {
    check(cudaMemset(verdict_.get(), 0, sizeof(Verdict)));
    check(cudaStreamSynchronize(nullptr));
  }

  void batch(std::uint64_t first) {
    me_.doing("calls from " + std::to_string(first) + " on");
    for (std::uint64_t k = first; k < first + kCalls; ++k) one(k);
    stream_.synchronize();
  }

  Verdict verdict() const {
    Verdict v;
    check(cudaMemcpyAsync(&v, verdict_.get(), sizeof(v), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return v;
  }

 private:
  void one(std::uint64_t number) {
    const Spec c = make_call(settings_, number, me_.rank);
    auto* const from = from_.as<std::uint32_t>();
    auto* const to = to_.as<std::uint32_t>();
    if (c.sends()) {
      fill<<<132, 512, 0, stream_.get()>>>(from, c.send_elems(), c.seed, me_.rank);
      check(cudaGetLastError());
    }
    const unjamCallOptions_t options = ordered(UNJAM_STREAM_SYNC, stream_);
    const Place place{from_.as<unsigned char>(), to_.as<unsigned char>()};
    const std::string key = "long " + std::to_string(number % 3);
    check(call(me_.all, key.c_str(), c, place, &options, nullptr));
    const Expect expect{c.seed, c.count, c.kind, c.op, c.size, c.at, c.root};
    judge<<<132, 512, 0, stream_.get()>>>(to, c.recv_elems(), expect, number,
                                          verdict_.as<Verdict>());
    check(cudaGetLastError());
  }

  const Member& me_;
  const Settings& settings_;
  const Stream stream_;
  const DeviceMemory from_, to_, verdict_;
};

// What unjamInfo says: `lines`, and prints why, or why not.
bool has_lines(unjamContext_t context) {
  const std::string text = info(context);
  for (const char* name : {"\"lines\":", "\"whole_lines\":", "\"links\":"}) {
    const std::size_t at = text.find(name);
    if (at == std::string::npos) fail(std::string("unjamInfo does not have ") + name);
    std::printf("%s\n", text.substr(at, text.find_first_of(",}", at) - at).c_str());
  }
  return text.find("\"lines\":true") != std::string::npos;
}

// Which elements were wrong, as stretches. True if none.
bool tell(const Settings& s, int rank, const Verdict& v) {
  std::printf("rank %d: %llu numbers checked, %llu wrong\n", rank, v.checked, v.wrong);
  if (v.wrong == 0) return true;
  std::vector<Wrong> kept(v.kept, v.kept + std::min<unsigned long long>(v.wrong, kKept));
  std::sort(kept.begin(), kept.end(), [](const Wrong& a, const Wrong& b) {
    return a.call != b.call ? a.call < b.call : a.at < b.at;
  });
  int stretches = 0;
  for (std::size_t i = 0; i < kept.size();) {
    std::size_t n = 1;
    while (i + n < kept.size() && kept[i + n].call == kept[i].call &&
           kept[i + n].at == kept[i].at + n) {
      ++n;
    }
    const Spec c = make_call(s, kept[i].call, rank);
    if (++stretches <= 20) {
      std::printf("  call %llu, %s of %zu, root %d: %zu from %llu on\n",
                  static_cast<unsigned long long>(kept[i].call), kKindNames[c.kind], c.count,
                  c.root, n, static_cast<unsigned long long>(kept[i].at));
    }
    i += n;
  }
  std::printf("  %d stretches in all\n", stretches);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  Settings s;
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all");
  const double seconds = options.number("seconds", 20, "how long");
  s.most = static_cast<std::size_t>(options.number("lengths", 4 << 20, "bytes, of the longest"));
  s.seed = options.seed();
  options.done(static_cast<unsigned>(seconds) + 60, 30);
  if (s.most < 65536) fail("--lengths: at least 65536, where lines begin");
  load_eagerly();
  s.ranks = wanted > 0 ? wanted : device_count();
  std::printf("long_packets: %d ranks, seed %llu\n", s.ranks,
              static_cast<unsigned long long>(s.seed));
  const Job job(s.ranks, cuda_config());
  if (!has_lines(job.member(0).context)) {
    std::printf("long_packets: SKIPPED, packets are no lines here (UNJAM_LINES=1 makes them)\n");
    return 0;
  }
  std::vector<std::unique_ptr<Worker>> workers(static_cast<std::size_t>(s.ranks));
  job.run([&](const Member& me) {
    workers[static_cast<std::size_t>(me.rank)] = std::make_unique<Worker>(me, s);
  });
  const std::uint64_t begun = now_ns();
  std::uint64_t calls = 0;
  for (; us_since(begun) < seconds * 1e6; calls += kCalls) {
    job.run([&](const Member& me) { workers[static_cast<std::size_t>(me.rank)]->batch(calls); });
  }
  std::vector<Verdict> verdicts(workers.size());
  job.run([&](const Member& me) {
    const auto r = static_cast<std::size_t>(me.rank);
    verdicts[r] = workers[r]->verdict();
    workers[r].reset();
  });
  bool ok = calls != 0;
  for (int r = 0; r < s.ranks; ++r) ok = tell(s, r, verdicts[static_cast<std::size_t>(r)]) && ok;
  std::printf("long_packets: %s, %llu calls\n", ok ? "PASS" : "FAIL",
              static_cast<unsigned long long>(calls));
  return ok ? 0 : 1;
}
