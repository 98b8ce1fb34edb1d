// What goes between ranks: packets of 4 bytes of data and 4 of a flag, which are stored at once, so
// data that have their flag are there. Rules: python/unjam/loop/ops/exchange.py.
//
// The mail has two halves, for steps in turn: a peer that sends for the next step has received all
// of this one from us, which we sent behind all that we received in the step before.
#pragma once

#include "block.cuh"

namespace unjam_loop {

// A value's first packet in somebody's mail, of this step.
LOOP_DEVICE u64* packets_of(const Task& t, u8* mail, u32 units) {
  u8* const half = mail + kHelloBytes + (t.epoch & 1) * t.p.mail_half;
  return reinterpret_cast<u64*>(half) + u64{units} * (kUnit / 4);
}

template <class L, class T, u32 kBatch, u32 kCols, u32 kTile>
LOOP_DEVICE void send(const Task& t) {
  constexpr u32 kWords = kCols / kOfWord<T>, kTileWords = kTile / kOfWord<T>;
  const auto* x = reinterpret_cast<const u32*>(at_pages(t, t.i.in0));
  const u64 flag = u64{flag_of(t)} << 32;
  for (u32 n = thread_here(); n < kBatch * kTileWords; n += kComputing) {
    const u32 at = n / kTileWords * kWords + t.i.a * kTileWords + n % kTileWords;
    const u64 packet = flag | x[at];
    for (u32 hop = 1; hop < t.p.ranks; ++hop) {  // not all to the same peer at once
      const u32 peer = (t.p.rank + hop) % t.p.ranks;
      u64* const there = packets_of(t, t.p.peers[peer], t.i.out);
      store_word_system(there + t.p.rank * kBatch * kWords + at, packet);
    }
  }
}

// A peer's word, when it is there.
LOOP_DEVICE u32 receive(const Task& t, const u64* packet, u32 peer) {
  Patience patience(t.p, kForPeers);
  const u32 flag = flag_of(t);
  u64 word;
  while (static_cast<u32>((word = load_word_system(packet)) >> 32) != flag) {
    if (*t.failed == 0 && patience.goes_on()) continue;
    report(t.p, patience, kPackets, t.i.task, t.step, peer, static_cast<u32>(word >> 32), flag);
    *t.failed = 1;
    break;
  }
  return static_cast<u32>(word);
}

LOOP_DEVICE u32 word_of(const F32*, const float (&x)[1]) { return bits_of(x[0]); }
LOOP_DEVICE u32 word_of(const Bf16*, const float (&x)[2]) {
  return Bf16::store(x[0]) | u32{Bf16::store(x[1])} << 16;
}

// Added in the order of ranks, so that all have the same bits.
template <class L, class T, u32 kBatch, u32 kCols, u32 kTile, u32 kRanks, bool kResidual>
LOOP_DEVICE void sum(const Task& t) {
  constexpr u32 kPer = kOfWord<T>, kWords = kCols / kPer, kTileWords = kTile / kPer;
  const auto* x = reinterpret_cast<const u32*>(at_pages(t, t.i.in0));
  const auto* residual = reinterpret_cast<const u32*>(at_pages(t, t.i.in1));
  auto* out = reinterpret_cast<u32*>(at_pages(t, t.i.out));
  const u64* const mail = packets_of(t, t.p.mail, t.i.out2);
  for (u32 n = thread_here(); n < kBatch * kTileWords; n += kComputing) {
    const u32 at = n / kTileWords * kWords + t.i.a * kTileWords + n % kTileWords;
    float total[kPer];
    LOOP_UNROLL
    for (u32 rank = 0; rank < kRanks; ++rank) {
      const u32 word =
          rank == t.p.rank ? x[at] : receive(t, mail + rank * kBatch * kWords + at, rank);
      LOOP_UNROLL
      for (u32 k = 0; k < kPer; ++k) {
        total[k] = rank == 0 ? T::of_word(word, k) : total[k] + T::of_word(word, k);
      }
    }
    if constexpr (kResidual) {
      LOOP_UNROLL
      for (u32 k = 0; k < kPer; ++k) total[k] += T::of_word(residual[at], k);
    }
    out[at] = word_of(static_cast<const T*>(nullptr), total);
  }
}

template <class L, class T, u32 kBatch, u32 kCols, u32 kTile, u32 kRanks>
LOOP_DEVICE void gather(const Task& t) {
  constexpr u32 kWords = kCols / kOfWord<T>, kTileWords = kTile / kOfWord<T>;
  const auto* x = reinterpret_cast<const u32*>(at_pages(t, t.i.in0));
  auto* out = reinterpret_cast<u32*>(at_pages(t, t.i.out));
  const u64* const mail = packets_of(t, t.p.mail, t.i.out2);
  for (u32 n = thread_here(); n < kRanks * kBatch * kTileWords; n += kComputing) {
    const u32 rank = n / (kBatch * kTileWords), row = n / kTileWords % kBatch;
    const u32 col = t.i.a * kTileWords + n % kTileWords, at = row * kWords + col;
    out[(row * kRanks + rank) * kWords + col] =
        rank == t.p.rank ? x[at] : receive(t, mail + rank * kBatch * kWords + at, rank);
  }
}

}  // namespace unjam_loop
