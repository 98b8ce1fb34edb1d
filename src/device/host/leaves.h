// The host's data leaves. A connector's payload is linear on the host, whatever the protocol, so
// both protocols share one function per (dtype, op). The functions exist once per instruction set;
// all of them give the same bits. The best one that the processor has is picked at first use.
#pragma once

#include <array>
#include <cstdint>

#include "base/types.h"
#include "device/leaf.h"

namespace unjam {

// Reduces elements [begin, end) of the slice.
using HostLeaf = void (*)(const SliceJob& job, std::uint64_t begin, std::uint64_t end);
using HostLeafTable = std::array<std::array<HostLeaf, kNumOps>, kNumDTypes>;

enum class HostIsa : std::uint8_t { kBase, kAvx2, kAvx512 };
inline constexpr int kNumHostIsas = 3;
constexpr const char* to_string(HostIsa isa) {
  constexpr const char* kNames[kNumHostIsas] = {"base", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

// Whether this build has leaves for it and this processor can run them.
bool host_isa_available(HostIsa isa);
HostIsa best_host_isa();

// Executes this thread's part of the slice: a contiguous piece that begins at a multiple of 64
// bytes from the slice's start, so that pieces are disjoint; several may be empty. Every thread of
// the block calls it with the same job; nothing orders them here.
void run_leaf_host(const SliceJob& job, unsigned thread, unsigned threads);

// The same with a chosen instruction set, which must be available: for tests and benchmarks.
void run_leaf_host_with(HostIsa isa, const SliceJob& job, unsigned thread, unsigned threads);

}  // namespace unjam
