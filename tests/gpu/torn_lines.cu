// Whether lines of packets come whole (leaf_access.cuh): a warp of one GPU stores them again and
// again, with another number each time, while a warp of another GPU loads them, without waiting for
// each other. In whatever line is loaded all words must have one number. Ordered pairs of all GPUs
// that reach each other, and each GPU with itself. Pairs without atomics through their link (it is
// no NVLink) are shown, and may tear lines: there the library does not rely on it.
//
// Once with nothing but lines, and then with tails: behind each round of lines the first bytes of
// all of them are overwritten, as the last packets of a shorter message, or the end of a slice, are
// stored in a slot that lines use later. (Lines of 128 bytes were torn where such a tail had been;
// see docs/internals/packets.md.) And with tails while another kernel goes through
// more of the reader's memory than its cache holds. Each time it is counted, too, how often the two
// halves of 128 bytes, a writer's neighbouring lines stored in one instruction, had different
// numbers: that is no mistake, but says why lines are no longer.
//
//   torn_lines [--seconds S]   a pair and a way (default 1)
//              [--tail BYTES]  8 to 56: only tails of so many; 0: only lines
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "device/cuda/host/cuda_arena.h"
#include "device/cuda/leaves/leaf_access.cuh"

namespace {

using namespace unjam;
using namespace unjam::cuda_leaves;

constexpr int kBlocks = 32, kThreads = 512;
constexpr std::uint32_t kPlaces = 16 * 1024;  // of a block: 2,048 lines

void check(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e));
  std::exit(1);
}

// What word `place` of a line with this number is.
__device__ Raw<2> word_of(std::uint32_t number, std::uint32_t place) {
  if (bears_flags(place)) return line_flags(number | static_cast<std::uint64_t>(~number) << 32);
  return {{number * 0x9e3779b9u + place, number ^ place}};
}

// What a tail behind the lines with this number has there.
__device__ Raw<2> tail_word_of(std::uint32_t number, std::uint32_t place) {
  return {{number * 0x85ebca6bu + place, ~number}};
}

struct Counts {
  unsigned long long loaded, changed, torn, tails, apart;
};

// tail_words: of each line; 0: no tails.
__global__ void __launch_bounds__(kThreads)
    write_lines(char* lines, const volatile int* stop, std::uint32_t tail_words) {
  char* const mine = lines + blockIdx.x * std::size_t{kPlaces} * kWordBytes;
  for (std::uint32_t number = 1; __syncthreads_or(*stop) == 0; ++number) {
    for (std::uint32_t place = threadIdx.x; place < kPlaces; place += kThreads) {
      const Raw<2> word = word_of(number, place);
      __syncwarp();
      store_line_word(mine + kWordBytes * place, word);
    }
    if (tail_words == 0) continue;
    // The barrier orders stores of this block to one word; what the reader makes of lines and tails
    // of neighbouring rounds is told apart by their numbers. The pauses let lines, tails, or both,
    // come to the memory first, or leave the cache.
    __syncthreads();
    if (number % 4 == 0) __nanosleep(number % 64 * 1000);
    for (std::uint32_t place = threadIdx.x; place < kPlaces; place += kThreads) {
      if (place % kLineThreads < tail_words) {
        store_line_word(mine + kWordBytes * place, tail_word_of(number, place));
      }
    }
    __syncthreads();
    if (number % 4 == 1) __nanosleep(number % 64 * 1000);
  }
}

// Goes through memory until it is told to stop.
__global__ void __launch_bounds__(kThreads)
    churn(uint4* memory, std::size_t pieces, const volatile int* stop) {
  uint4 sum{};
  while (*stop == 0) {
    for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < pieces;
         i += gridDim.x * std::size_t{kThreads}) {
      const uint4 x = memory[i];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      if (i % 3 == 0) memory[i] = sum;
    }
  }
}

__global__ void __launch_bounds__(kThreads) read_lines(const char* lines, const volatile int* stop,
                                                       std::uint32_t tail_words, Counts* counts) {
  const char* const mine = lines + blockIdx.x * std::size_t{kPlaces} * kWordBytes;
  unsigned long long loaded = 0, changed = 0, torn = 0, tails = 0, apart = 0;
  std::uint32_t before[kPlaces / kThreads] = {};  // of each of this thread's lines
  while (__syncthreads_or(*stop) == 0) {
    for (std::uint32_t k = 0; k < kPlaces / kThreads; ++k) {
      const std::uint32_t place = k * kThreads + threadIdx.x;
      __syncwarp();
      const Raw<2> word = load_line_word(mine + kWordBytes * place);
      const int bearer = static_cast<int>(threadIdx.x % 32 | (kLineThreads - 1));
      const std::uint32_t number = __shfl_sync(0xffffffffu, word.w[0], bearer);
      const Raw<2> want = word_of(number, place);
      const Raw<2> tail = tail_word_of(number, place);
      const bool is_tail =
          place % kLineThreads < tail_words && word.w[0] == tail.w[0] && word.w[1] == tail.w[1];
      const bool whole =
          number == 0 || is_tail || (word.w[0] == want.w[0] && word.w[1] == want.w[1]);
      torn += whole ? 0 : 1;
      tails += is_tail ? 1 : 0;
      const int other = static_cast<int>((threadIdx.x % 32) ^ kLineThreads);
      const std::uint32_t neighbour = __shfl_sync(0xffffffffu, number, other);
      apart += bears_flags(place) && neighbour != number ? 1 : 0;
      loaded += bears_flags(place) ? 1 : 0;
      changed += bears_flags(place) && number != before[k] ? 1 : 0;
      before[k] = number;
    }
  }
  atomicAdd(&counts->loaded, loaded);
  atomicAdd(&counts->changed, changed);
  atomicAdd(&counts->torn, torn);
  atomicAdd(&counts->tails, tails);
  atomicAdd(&counts->apart, apart);
}

void must(bool ok, const std::string& error) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", error.c_str());
  std::exit(1);
}

struct Way {
  std::uint32_t tail_bytes;
  bool churns;
};

Counts run(int from, int to, double seconds, Way way) {
  constexpr std::size_t kChurned = std::size_t{256} << 20;  // an H200's cache has 50 MiB
  Counts* counts = nullptr;
  int *stop = nullptr, *stop_writer = nullptr;
  void* churned = nullptr;
  std::string error;
  const auto tail_words = static_cast<std::uint32_t>(way.tail_bytes / kWordBytes);
  // As the library's: mapped on both GPUs, and zero.
  constexpr std::uint64_t kBytes = kBlocks * std::uint64_t{kPlaces} * kWordBytes;
  const auto arena = create_cuda_arena(to, kBytes, kBytes, error);
  must(arena != nullptr && arena->map_for(from, 0, error), error);
  char* const lines = reinterpret_cast<char*>(arena->data());
  check(cudaSetDevice(to));
  check(cudaMalloc(&counts, sizeof(Counts)));
  if (way.churns) check(cudaMalloc(&churned, kChurned));
  check(cudaMemset(counts, 0, sizeof(Counts)));
  check(cudaHostAlloc(&stop, sizeof(int), cudaHostAllocPortable));
  check(cudaHostAlloc(&stop_writer, sizeof(int), cudaHostAllocPortable));
  *stop = *stop_writer = 0;
  cudaStream_t reads = nullptr, writes = nullptr;
  check(cudaStreamCreateWithFlags(&reads, cudaStreamNonBlocking));
  check(cudaDeviceSynchronize());
  read_lines<<<kBlocks, kThreads, 0, reads>>>(lines, stop, tail_words, counts);
  check(cudaGetLastError());
  cudaStream_t beside = nullptr;
  check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  if (way.churns) {
    churn<<<32, kThreads, 0, beside>>>(static_cast<uint4*>(churned), kChurned / sizeof(uint4),
                                       stop_writer);
    check(cudaGetLastError());
  }
  check(cudaSetDevice(from));
  if (from != to) {
    const cudaError_t e = cudaDeviceEnablePeerAccess(to, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check(e);
    }
  }
  check(cudaStreamCreateWithFlags(&writes, cudaStreamNonBlocking));
  write_lines<<<kBlocks, kThreads, 0, writes>>>(lines, stop_writer, tail_words);
  check(cudaGetLastError());
  usleep(static_cast<useconds_t>(seconds * 1e6));
  *static_cast<volatile int*>(stop) = 1;
  check(cudaSetDevice(to));
  check(cudaStreamSynchronize(reads));
  *static_cast<volatile int*>(stop_writer) = 1;
  check(cudaSetDevice(from));
  check(cudaStreamSynchronize(writes));
  check(cudaStreamDestroy(writes));
  check(cudaSetDevice(to));
  check(cudaStreamSynchronize(beside));
  check(cudaStreamDestroy(beside));
  check(cudaStreamDestroy(reads));
  Counts result{};
  check(cudaMemcpy(&result, counts, sizeof(result), cudaMemcpyDeviceToHost));
  check(cudaFree(churned));
  check(cudaFree(counts));
  check(cudaFreeHost(stop));
  check(cudaFreeHost(stop_writer));
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  // Of kernels that are loaded when they are first used, none could be while another one spins.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  double seconds = 1;
  int only = -8;  // no way
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--tail") == 0) only = std::atoi(argv[i + 1]);
  }
  constexpr Way kWays[] = {{0, false}, {8, false}, {8, true}, {32, true}, {56, true}};
  constexpr int kLongest = kLineDataBytes;
  must(only % static_cast<int>(kWordBytes) == 0 && only <= kLongest, "tails leave flags alone");
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus));
  bool ok = gpus > 0;
  for (int from = 0; from < gpus; ++from) {
    for (int to = 0; to < gpus; ++to) {
      int reached = 1, atomics = 1;
      if (from != to) {
        check(cudaDeviceCanAccessPeer(&reached, from, to));
        check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to));
      }
      if (reached == 0) {
        std::printf("GPU %d to %d: no peer access\n", from, to);
        continue;
      }
      for (const Way& way : kWays) {
        if (only >= 0 && way.tail_bytes != static_cast<std::uint32_t>(only)) continue;
        const Counts c = run(from, to, seconds, way);
        std::printf(
            "GPU %d to %d, tails of %2u bytes%s: %llu lines loaded, %llu of them new, %llu words "
            "of tails, %llu halves of 128 bytes apart, %llu words torn%s\n",
            from, to, way.tail_bytes, way.churns ? ", churning" : "          ", c.loaded, c.changed,
            c.tails, c.apart / 2, c.torn, atomics == 0 ? " (no NVLink: not relied on)" : "");
        std::fflush(stdout);
        ok = ok && (c.torn == 0 || atomics == 0) && c.changed > 1000;
      }
    }
  }
  std::printf(ok ? "passed\n" : "FAILED\n");
  return ok ? 0 : 1;
}
