// The CUDA leaves of packets: units of 8 data bytes; user memory is linear, connector memory is
// packets.
#pragma once

#include <cstdint>

#include "device/cuda/leaves/leaf_copies.cuh"
#include "device/cuda/leaves/leaf_reduce.cuh"

namespace unjam::cuda_leaves {

// Which units a thread has must be the same wherever they are looked at.
template <class Body>
__device__ __forceinline__ void for_units(std::uint32_t bytes, unsigned thread, unsigned threads,
                                          Body body) {
#pragma unroll 1
  for (std::uint32_t at = thread * kUnitBytes; at < bytes; at += threads * kUnitBytes) {
    if (!body(at, bytes - at)) return;
  }
}

// Data read while their flags were polled: of a combine, this thread's only unit from every source;
// of copies, its first pieces. Indices are constants, so that they are registers.
inline constexpr int kHeldUnits = 8;
struct Held {
  bool valid = false;
  Raw<2> raw[kHeldUnits];
};

static_assert(kHeldUnits == 2 * kPacketBatch);

template <int kElement>
struct PacketAccess {
  const Slice& slice;
  std::uint32_t at;    // data bytes
  std::uint32_t left;  // data bytes, from `at`
  Held& held;
  __device__ __forceinline__ unsigned bytes() const {
    return left < kUnitBytes ? static_cast<unsigned>(left) : kUnitBytes;
  }
  __device__ __forceinline__ void load(int first, Raw<2> (&raw)[kPacketBatch][1]) {
    if (held.valid) {
#pragma unroll
      for (int i = 0; i < kPacketBatch; ++i) {
        raw[i][0] = held.raw[i];
        held.raw[i] = held.raw[kPacketBatch + i];
      }
      return;
    }
    load_batch<kPacketBatch>(slice, first, [&](int i, const char* src) {
      if (first + i == slice.local_src) {
        raw[i][0] = load_linear<2, kElement>(src + at, bytes());
      } else {
        raw[i][0] = data_of(load_packet_unit(src + 2 * at));
      }
    });
  }
  __device__ __forceinline__ void store(const Raw<2> (&raw)[1]) const {
    for_slots(slice, [&](char* dst) { store_packet_unit(dst + 2 * at, raw[0], slice.sent_flag); });
    if (slice.dst_user != nullptr) {
      store_linear<2, kElement>(slice.dst_user + at, raw[0], bytes());
    }
  }
};

template <DType dtype>
__device__ __forceinline__ void reduce_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
    PacketAccess<kElement> access{slice, at, left, held};
    reduce_pieces<dtype, 2, 1, kPacketBatch>(slice, access);
    return true;
  });
}

template <int kElement>
__device__ __forceinline__ void spread_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  const Slice slice = make_slice(job);
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
    PacketAccess<kElement> access{slice, at, left, held};
    Raw<2> raw[kPacketBatch][1];
    access.load(0, raw);
    access.store(raw[0]);
    return true;
  });
}

// Whether the units that this thread will read of a combine's packet sources all have the flag.
// kHold: the thread has at most one unit, and as many sources as Held has room for: keeps what it
// reads.
template <bool kHold>
__device__ __forceinline__ bool combine_ready(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held* held) {
  constexpr int kBatch = kHold ? kHeldUnits : kPacketBatch;
  const Slice slice = make_slice(job);
  bool ready = true;
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
#pragma unroll 1
    for (int first = 0; ready && first < slice.num_src; first += kBatch) {
      load_batch<kBatch>(slice, first, [&](int i, const char* src) {
        if (first + i == slice.local_src) {
          // One byte at a time where it is not aligned: this code is not one per element size.
          if constexpr (kHold) {
            held->raw[i] = load_linear<2, 1>(
                src + at, left < kUnitBytes ? static_cast<unsigned>(left) : kUnitBytes);
          }
          return;
        }
        const PacketUnit unit = load_packet_unit(src + 2 * at);
        ready &= has_flag(unit, slice.flag);
        if constexpr (kHold) held->raw[i] = data_of(unit);
      });
    }
    return ready;
  });
  return ready;
}

// Whether a thread's share is so small that its packets are kept when they are polled for. (Copies
// with more pieces are polled for and read again from the first on.)
__device__ __forceinline__ bool holds_packets(const SliceJob& job, unsigned threads) {
  if (job.copies) return true;
  return job.num_src <= kHeldUnits &&
         job.elems * dtype_bytes(job.dtype) <= std::uint64_t{threads} * kUnitBytes;
}

// ---- Copies ----

using PacketWalk = CopyWalk<kUnitBytes, EvenLayout<2>>;

__device__ __forceinline__ void copies_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  const std::uint64_t sent_flag = job.sent_flag;
  PacketWalk walk(job, thread, threads);
#pragma unroll 1
  while (!walk.done()) {
    CopyPiece piece[kCopyPieces];
    Raw<2> raw[kCopyPieces];
    walk.fill(piece);
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0) continue;
      if (piece[p].to_slot) {
        raw[p] = load_unit(piece[p].from, piece[p].bytes);
      } else if (held.valid) {
        raw[p] = held.raw[p];
      } else {
        raw[p] = data_of(load_packet_unit(piece[p].from));
      }
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0) continue;
      if (piece[p].to_slot) {
        store_packet_unit(piece[p].to, raw[p], sent_flag);
      } else {
        store_unit(piece[p].to, raw[p], piece[p].bytes);
      }
    }
    held.valid = false;  // only the first pieces were held
  }
}

// As combine_ready. kHold keeps the thread's first pieces.
template <bool kHold>
__device__ __forceinline__ bool copies_ready(const SliceJob& job, unsigned thread, unsigned threads,
                                             Held* held) {
  const std::uint64_t flag = job.flag;
  bool ready = true;
  PacketWalk walk(job, thread, threads);
#pragma unroll 1
  for (bool first = true; ready && !walk.done(); first = false) {
    CopyPiece piece[kCopyPieces];
    walk.fill(piece);
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0 || piece[p].to_slot) continue;
      const PacketUnit unit = load_packet_unit(piece[p].from);
      ready &= has_flag(unit, flag);
      if constexpr (kHold) {
        if (first) held->raw[p] = data_of(unit);
      }
    }
  }
  return ready;
}

}  // namespace unjam::cuda_leaves
