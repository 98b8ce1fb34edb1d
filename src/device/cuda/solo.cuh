// A short all-reduce in a stream, alone: one lane, one packet to and from every peer, nobody else
// at the lane. Most of the time of such a call is what an engine does to be able to leave it and
// come back; here it is tried straight from the kernel's arguments, with the same connectors, flags
// and credits, so peers cannot tell. What cannot be done at once (the lane is driven by another
// instance, a connector is not open, a former use of the key is not complete, a packet does not
// come for long) is left to the engine: where nothing was sent, as if nothing had been tried; else
// with the program's first primitive done.
//
// Plan: {kLocal|kSendAll, gather} with one chunk (plan/direct.cc).
#pragma once

#include "device/cuda/cuda_dev.cuh"
#include "device/cuda/rank_state.h"

namespace unjam {

enum class Solo : std::uint32_t { kUntried, kSent, kDone };

namespace solo {

using cuda_leaves::Format;
using cuda_leaves::Raw;

struct Shared {
  const void* from[kSoloRanks];
  void* to[kSoloRanks];
  std::uint32_t ok;
};

// Waits for the packets of this thread's unit from all peers. False: too long.
__device__ __forceinline__ bool collect(const SoloCall& call, const Shared& s, std::uint32_t unit,
                                        std::uint64_t left, const Raw<2>& mine,
                                        Raw<2> (&raw)[kSoloRanks]) {
  for (std::uint32_t polls = 0; polls < 512; ++polls) {
    bool all = true;
#pragma unroll
    for (int q = 0; q < static_cast<int>(kSoloRanks); ++q) {
      if (q >= call.group_size) break;
      if (q == call.group_rank) {
        raw[q] = mine;
        continue;
      }
      const cuda_leaves::PacketUnit p = cuda_leaves::load_packet_unit(
          static_cast<const char*>(s.from[q]) + std::size_t{unit} * 16, left, call.flag);
      all &= p.word[0].flag == call.flag;
      all &= p.word[1].flag == call.flag;
      raw[q] = {{p.word[0].data, p.word[1].data}};
    }
    if (all) return true;
  }
  return false;
}

template <DType dtype>
__device__ __forceinline__ bool gather(const CudaLaunch& launch, const Shared& s,
                                       const Raw<2> (&mine)[kSoloUnits],
                                       Raw<2> (&result)[kSoloUnits]) {
  using F = Format<dtype>;
  using Acc = typename F::Acc;
  constexpr int kCount = F::template kCount<2>;
  const SoloCall& call = launch.solo;
  const Op op = launch.sqe.inv.op;
  bool come = true;
#pragma unroll
  for (int k = 0; k < kSoloUnits; ++k) {
    const std::uint32_t unit = threadIdx.x + k * blockDim.x;
    if (unit >= call.units) break;
    Raw<2> raw[kSoloRanks];
    if (!collect(call, s, unit, 8, mine[k], raw)) {
      come = false;
      break;
    }
    Acc acc[kCount];
#pragma unroll
    for (int q = 0; q < static_cast<int>(kSoloRanks); ++q) {
      if (q >= call.group_size) break;
      Acc x[kCount];
      F::template decode<2>(raw[q], x);
      if constexpr (F::kIsFloat) {
        if (op == Op::kAvg) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            x[i] = cuda_leaves::multiply(x[i], static_cast<Acc>(call.scale));
          }
        }
      }
      if (q == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) acc[i] = x[i];
      } else {
        cuda_leaves::combine_piece<F, kCount>(op, acc, x);
      }
    }
    if constexpr (!F::kIsFloat) {
      if (op == Op::kAvg) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) acc[i] = F::divide(acc[i], call.group_size);
      }
    }
    F::template encode<2>(acc, result[k]);
  }
  return come;
}

__device__ __forceinline__ bool gather_any(const CudaLaunch& launch, const Shared& s,
                                           const Raw<2> (&mine)[kSoloUnits],
                                           Raw<2> (&result)[kSoloUnits]) {
  switch (launch.sqe.inv.geometry.dtype) {
    case DType::kInt8:
      return gather<DType::kInt8>(launch, s, mine, result);
    case DType::kUint8:
      return gather<DType::kUint8>(launch, s, mine, result);
    case DType::kInt32:
      return gather<DType::kInt32>(launch, s, mine, result);
    case DType::kUint32:
      return gather<DType::kUint32>(launch, s, mine, result);
    case DType::kInt64:
      return gather<DType::kInt64>(launch, s, mine, result);
    case DType::kUint64:
      return gather<DType::kUint64>(launch, s, mine, result);
    case DType::kFloat16:
      return gather<DType::kFloat16>(launch, s, mine, result);
    case DType::kBfloat16:
      return gather<DType::kBfloat16>(launch, s, mine, result);
    case DType::kFloat32:
      return gather<DType::kFloat32>(launch, s, mine, result);
    case DType::kFloat64:
      return gather<DType::kFloat64>(launch, s, mine, result);
    case DType::kFloat8E4M3:
      return gather<DType::kFloat8E4M3>(launch, s, mine, result);
    case DType::kFloat8E5M2:
      return gather<DType::kFloat8E5M2>(launch, s, mine, result);
  }
  return false;
}

}  // namespace solo

// By all threads of a call's only block.
__device__ __forceinline__ Solo run_solo(CudaRank& r, const CudaLaunch& launch) {
  const SoloCall& call = launch.solo;
  __shared__ solo::Shared s;
  using cuda_leaves::Raw;
  const std::uint32_t q = threadIdx.x;  // thread q sees to member q
  const bool sees = q < call.group_size && q != call.group_rank;
  // This thread's data, first: nothing else is needed for that.
  Raw<2> mine[kSoloUnits];
#pragma unroll
  for (int k = 0; k < kSoloUnits; ++k) {
    const std::uint32_t unit = threadIdx.x + k * blockDim.x;
    if (unit >= call.units) break;
    mine[k] = cuda_leaves::load_aligned<2>(static_cast<const char*>(launch.sqe.inv.input) +
                                           std::size_t{unit} * 8);
  }
  LaneTransport t;
  t.shape = call.shape;
  t.bases = call.bases;
  t.rank = call.rank;
  t.lane = 0;
  OutEndpoint out;
  InEndpoint in;
  std::uint32_t peer = 0, poke = 0, readied = 0;
  bool leased = false;
  if (threadIdx.x < 32) {
    bool ok = launch.sqe.fresh == 0;
    if (ok && threadIdx.x == kSoloRanks) {
      // Acquire: the lane's state, and with it the key's endpoints, as the last driver left them.
      leased = (or_lanes(r, 1) & 1) == 0;
      ok = leased;
    }
    ok = __all_sync(0xffffffffu, ok) != 0;
    if (ok) poke = r.poke_counts[0] + 1;
    if (ok && threadIdx.x == kSoloRanks) {
      readied = load_acquire_local(r.readied);
      ok = load_acquire_local(launch.sqe.inv.key->done) == launch.sqe.inv.n;
    }
    if (ok && sees) {
      peer = call.members[q];
      out = call.out[q];
      in = call.in[q];
      ok = out.connector != kNoConnector && in.connector != kNoConnector;
      if (ok) {
        // Both looks at once.
        const SendGrant g = t.packet_grant(peer, out);
        ok = t.resolve(peer, call.tag, in) && g.capacity != 0;
        s.to[q] = g.data;
        s.from[q] = const_cast<unsigned char*>(t.packet_view(peer, in, 0).data);
      }
    }
    ok = __all_sync(0xffffffffu, ok) != 0;
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
    if (!ok && leased) clear_lanes(r, 1);
  }
  sync_block();
  if (s.ok == 0) return Solo::kUntried;

#pragma unroll
  for (int k = 0; k < kSoloUnits; ++k) {
    const std::uint32_t unit = threadIdx.x + k * blockDim.x;
    if (unit >= call.units) break;
    for (std::uint32_t p = 0; p < call.group_size; ++p) {
      if (p == call.group_rank) continue;
      cuda_leaves::store_packet_unit(static_cast<char*>(s.to[p]) + std::size_t{unit} * 16, mine[k],
                                     8, call.flag);
    }
  }
  Raw<2> result[kSoloUnits];
  const bool come = solo::gather_any(launch, s, mine, result);
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;
  if (done) {
#pragma unroll
    for (int k = 0; k < kSoloUnits; ++k) {
      const std::uint32_t unit = threadIdx.x + k * blockDim.x;
      if (unit >= call.units) break;
      cuda_leaves::store_aligned(static_cast<char*>(launch.sqe.inv.output) + std::size_t{unit} * 8,
                                 result[k]);
    }
    sync_block();
  }
  if (threadIdx.x >= 32) return done ? Solo::kDone : Solo::kSent;

  if (sees) {
    ++out.posted;  // the data carried their flags
    call.out[q].posted = out.posted;
    if (done) {
      ++in.consumed;
      call.in[q] = in;
    }
  }
  if (threadIdx.x == 0) r.poke_counts[0] = poke;
  if (done && threadIdx.x == 0) {
    // Inside of the device; what follows releases it.
    store_relaxed_local(launch.sqe.inv.key->done, launch.sqe.inv.n + 1);
    store_relaxed_local(r.completed[launch.slot], launch.serial);
    atomicAdd(&r.readied, 1u);
    LaneStats& stats = r.rank.lanes[0].stats;
    using Count = unsigned long long;
    atomicAdd(reinterpret_cast<Count*>(&stats.slices), Count{2});
    atomicAdd(reinterpret_cast<Count*>(&stats.completed), Count{1});
  }
  __syncwarp();
  // One fence a thread is behind all that it publishes; the block's stores are behind the barrier.
  if (done && (sees || threadIdx.x == 0)) fence_system();
  if (sees && done) t.template consume<CudaDev>(peer, in);
  if (done && threadIdx.x == 0) push_cqe(r, launch.slot, Outcome::kDone);
  if (sees) store_system(r.pokes[peer][0], poke);
  __syncwarp();
  if (threadIdx.x == kSoloRanks) {
    // Who is pending in a queue of a lane that nobody drives may wait for this; and in our own for
    // what others have readied since we have the lane.
    const std::uint64_t lanes = clear_lanes(r, 1);
    const auto pending = static_cast<std::uint32_t>(lanes >> 32);
    const std::uint32_t needy = pending & ~(static_cast<std::uint32_t>(lanes) & ~1u);
    if (needy != 0 && load_acquire_local(r.readied) != readied) {
      store_system(r.link->residency.rung, 1u);
    }
  }
  return done ? Solo::kDone : Solo::kSent;
}

}  // namespace unjam
