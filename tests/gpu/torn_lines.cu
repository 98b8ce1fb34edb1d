// Whether lines of packets come whole (leaf_access.cuh): a warp of one GPU stores them again and
// again, with another number each time, while a warp of another GPU loads them, without waiting for
// each other. In whatever line is loaded all words must have one number. Ordered pairs of all GPUs
// that reach each other, and each GPU with itself. Pairs without atomics through their link (it is
// no NVLink) are shown, and may tear lines: there the library does not rely on it.
//
//   torn_lines [--seconds S]   a pair (default 1)
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device/cuda/leaf_access.cuh"

namespace {

using namespace unjam;
using namespace unjam::cuda_leaves;

constexpr int kBlocks = 32, kThreads = 512;
constexpr std::uint32_t kPlaces = 16 * 1024;  // of a block: 1,024 lines

void check(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e));
  std::exit(1);
}

// What word `place` of a line with this number is.
__device__ Raw<2> word_of(std::uint32_t number, std::uint32_t place) {
  if (bears_flags(place)) return line_flags(number);
  return {{number * 0x9e3779b9u + place, number ^ place}};
}

struct Counts {
  unsigned long long loaded, changed, torn;
};

__global__ void __launch_bounds__(kThreads) write_lines(char* lines, const volatile int* stop) {
  char* const mine = lines + blockIdx.x * std::size_t{kPlaces} * kWordBytes;
  for (std::uint32_t number = 1; __syncthreads_or(*stop) == 0; ++number) {
    for (std::uint32_t place = threadIdx.x; place < kPlaces; place += kThreads) {
      const Raw<2> word = word_of(number, place);
      __syncwarp();
      store_line_word(mine + kWordBytes * place, word);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    read_lines(const char* lines, const volatile int* stop, Counts* counts) {
  const char* const mine = lines + blockIdx.x * std::size_t{kPlaces} * kWordBytes;
  unsigned long long loaded = 0, changed = 0, torn = 0;
  std::uint32_t before[kPlaces / kThreads] = {};  // of each of this thread's lines
  while (__syncthreads_or(*stop) == 0) {
    for (std::uint32_t k = 0; k < kPlaces / kThreads; ++k) {
      const std::uint32_t place = k * kThreads + threadIdx.x;
      __syncwarp();
      const Raw<2> word = load_line_word(mine + kWordBytes * place);
      const int bearer = static_cast<int>(threadIdx.x % 32 | 15);
      const std::uint32_t number = __shfl_sync(0xffffffffu, word.w[0], bearer);
      const Raw<2> want = word_of(number, place);
      const bool whole = number == 0 || (word.w[0] == want.w[0] && word.w[1] == want.w[1]);
      torn += whole ? 0 : 1;
      loaded += bears_flags(place) ? 1 : 0;
      changed += bears_flags(place) && number != before[k] ? 1 : 0;
      before[k] = number;
    }
  }
  atomicAdd(&counts->loaded, loaded);
  atomicAdd(&counts->changed, changed);
  atomicAdd(&counts->torn, torn);
}

Counts run(int from, int to, double seconds) {
  char* lines = nullptr;
  Counts* counts = nullptr;
  int *stop = nullptr, *stop_writer = nullptr;
  check(cudaSetDevice(to));
  check(cudaMalloc(&lines, kBlocks * std::size_t{kPlaces} * kWordBytes));
  check(cudaMemset(lines, 0, kBlocks * std::size_t{kPlaces} * kWordBytes));
  check(cudaMalloc(&counts, sizeof(Counts)));
  check(cudaMemset(counts, 0, sizeof(Counts)));
  check(cudaHostAlloc(&stop, sizeof(int), cudaHostAllocPortable));
  check(cudaHostAlloc(&stop_writer, sizeof(int), cudaHostAllocPortable));
  *stop = *stop_writer = 0;
  cudaStream_t reads = nullptr, writes = nullptr;
  check(cudaStreamCreateWithFlags(&reads, cudaStreamNonBlocking));
  check(cudaDeviceSynchronize());
  read_lines<<<kBlocks, kThreads, 0, reads>>>(lines, stop, counts);
  check(cudaGetLastError());
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
  write_lines<<<kBlocks, kThreads, 0, writes>>>(lines, stop_writer);
  check(cudaGetLastError());
  usleep(static_cast<useconds_t>(seconds * 1e6));
  *static_cast<volatile int*>(stop) = 1;
  check(cudaSetDevice(to));
  check(cudaStreamSynchronize(reads));
  *static_cast<volatile int*>(stop_writer) = 1;
  check(cudaSetDevice(from));
  check(cudaStreamSynchronize(writes));
  check(cudaSetDevice(to));
  Counts result{};
  check(cudaMemcpy(&result, counts, sizeof(result), cudaMemcpyDeviceToHost));
  check(cudaFree(lines));
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
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
  }
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
      const Counts c = run(from, to, seconds);
      std::printf("GPU %d to %d: %llu lines loaded, %llu of them new, %llu words torn%s\n", from,
                  to, c.loaded, c.changed, c.torn,
                  atomics == 0 ? " (no NVLink: not relied on)" : "");
      ok = ok && (c.torn == 0 || atomics == 0) && c.changed > 1000;
    }
  }
  std::printf(ok ? "passed\n" : "FAILED\n");
  return ok ? 0 : 1;
}
