// Slices that copy engines move (engine/copy_ring.h): what a call only sends, if its plan says that
// this is worth it (SlotSteps::carried). The first warp posts them, a thread for each peer, where
// else it describes them to movers; and counts them as moved when the last peer's copy is done.
// Who publishes cannot tell. Receivers cannot, either.
//
// The first warp waits but a while for copies. Then it takes back what is posted, and from there on
// this call's blocks move the slices, through the connectors' own slots; the borrowed ones that the
// copies had stay out of use until these are done after all (PoolUse::kCopied). While there are
// such, no call of the lane is carried.
#pragma once

#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

// Of copies for member q: how many are done, of all lanes' posts; and this lane's latest, + 1.
template <class S>
__device__ __forceinline__ std::uint64_t& copies_done(CudaRank& r, const S& c, std::uint32_t q) {
  return r.copies.done[c.call.members[q]];
}
template <class S>
__device__ __forceinline__ std::uint64_t& latest_copy(CudaRank& r, const S& c, std::uint32_t q) {
  return r.copies.posted[std::size_t{c.transport.lane} * c.call.shape.ranks + c.call.members[q]];
}

// By one thread of who sets a call up.
template <class S>
__device__ __forceinline__ void set_up_carried(const S& c, bool may_carry) {
  c.s.carried = c.s.posted = 0;
  c.s.blocks_from = may_carry && c.is_carried() ? kNoSlice : 0;
}

// What the first warp's threads know of it; those that watch for room for what is sent see to a
// peer each.
struct Carrying {
  bool on = false;             // alike in all of them
  bool posts = false;          // this one does
  std::uint32_t done = 0;      // chunks, at all peers, at `since`
  std::uint64_t since = 0;     // when there were not as many, or nothing was posted beyond
  std::uint32_t posted = 0;    // chunks, to this peer;
  std::uint32_t finished = 0;  // and those that are done

  // `sees`: this thread sees to member q.
  template <class S>
  __device__ __forceinline__ void begin(CudaRank& r, const S& c, std::uint32_t q, bool sees,
                                        bool rehearses) {
    on = !rehearses && CudaDev::load_block(c.s.blocks_from) != 0;
    if (!on) return;
    posts = sees;
    bool stuck = r.copies.rings == nullptr;
    if (posts && !stuck) {
      stuck = load_relaxed_local(copies_done(r, c, q)) < load_relaxed_local(latest_copy(r, c, q)) ||
              !can_be_posted(c, q);
    }
    if (__any_sync(0xffffffff, stuck) == 0) return;
    on = false;
    if (threadIdx.x % 32 == 0) CudaDev::store_block(c.s.blocks_from, 0u);
    __syncwarp();
  }

  // Whether addresses of the call's data, and of slots, are such as posts have.
  template <class S>
  __device__ __forceinline__ static bool can_be_posted(const S& c, std::uint32_t q) {
    const Range& part = c.of.parts[c.part_for(kSends, q)];
    CopyPost last;
    last.source = reinterpret_cast<std::uintptr_t>(c.inv.input_at(part.offset + part.length));
    last.target = reinterpret_cast<std::uintptr_t>(
        c.transport.pool_slot_to(c.call.members[q], c.call.shape.pool_slots));
    return fits_post(last);
  }

  // Chunk n, to this thread's peer.
  template <class S>
  __device__ __forceinline__ void post(CudaRank& r, const S& c, std::uint32_t q, std::uint32_t n) {
    if (!posts) return;
    const Range chunk = c.chunk(c.part_for(kSends, q), n);
    CopyPost post;
    post.source = reinterpret_cast<std::uintptr_t>(c.inv.input_at(chunk.offset));
    post.target = reinterpret_cast<std::uintptr_t>(c.slot_to(q, c.order().first(n)));
    post.bytes = chunk.length * dtype_bytes(c.inv.geometry.dtype);
    const std::uint32_t peer = c.call.members[q];
    const std::uint64_t number = fetch_add_relaxed(r.copies.drawn[peer], 1);
    post_copy(r.copies.rings[peer], number, post);
    c.s.posts[q][n % kCopyPostsOfLane] = number;
    store_relaxed_local(latest_copy(r, c, q), number + 1);
    posted = n + 1;
  }

  // How many chunks are done at all peers.
  template <class S>
  __device__ __forceinline__ std::uint32_t look(CudaRank& r, const S& c, std::uint32_t q) {
    if (posts && finished != posted) {
      const std::uint64_t done = load_relaxed_local(copies_done(r, c, q));
      if (done > c.s.posts[q][finished % kCopyPostsOfLane]) {
        // Who publishes the slices does so behind this.
        load_acquire(copies_done(r, c, q));
        do {
          ++finished;
        } while (finished != posted && done > c.s.posts[q][finished % kCopyPostsOfLane]);
      }
    }
    return __reduce_min_sync(0xffffffff, posts ? finished : kNoSlice);
  }

  // By one thread: whether it has waited long enough for what is posted. `done`: chunks now.
  __device__ __forceinline__ bool is_late(CudaRank& r, std::uint32_t now_done,
                                          std::uint32_t all_posted) {
    const std::uint64_t now = global_ns();
    if (now_done != done || all_posted == now_done) {
      done = now_done;
      since = now;
    }
    return now - since > r.copies.patience_ns;
  }

  // Blocks move what is left, from chunk `from` on. So many were posted.
  template <class S>
  __device__ __forceinline__ void take_back(CudaRank& r, const S& c, std::uint32_t q,
                                            std::uint32_t from, std::uint32_t all_posted) {
    on = false;
    for (std::uint32_t n = from; posts && n != all_posted; ++n) {
      take_back_copy(r.copies.rings[c.call.members[q]], c.s.posts[q][n % kCopyPostsOfLane]);
    }
    if (threadIdx.x % 32 == 0) {
      if (all_posted != from) {
        add_relaxed(r.copies.taken_back, std::uint64_t{all_posted - from});
      }
      c.s.posted = all_posted;
      CudaDev::store_block(c.s.blocks_from, from);
    }
    __syncwarp();
  }
};

// By several threads a peer: which slices were the last in the slots that were borrowed, of which
// this thread sees to every fourth; or which copies are.
template <class S>
__device__ __forceinline__ void note_carried(const S& c, PoolUse* uses, std::uint32_t q,
                                             std::uint32_t begin, std::uint32_t borrowed) {
  const SlotShared& s = c.s;
  const HopOrder order = c.order();
  const std::uint32_t from = CudaDev::load_block(s.blocks_from), sent = c.of.sent[q];
  const std::uint32_t first = c.slots_carried(borrowed);
  std::uint32_t firsts = c.two_hops() ? order.firsts_in(sent) : sent;
  const std::uint32_t seconds = c.two_hops() ? sent - firsts : 0;
  if (!has_member(c.call.steps.sends_to, q)) firsts = 0;
  if (firsts > from) firsts = from;
  for (std::uint32_t i = begin; i < borrowed; i += 4) {
    const bool is_first = i < first;
    const std::uint32_t slots = is_first ? first : borrowed - first;
    const std::uint32_t at = is_first ? i : i - first, all = is_first ? firsts : seconds;
    if (at < all) {
      const std::uint32_t last = at + (all - 1 - at) / slots * slots;
      const std::uint32_t slice = is_first ? order.first(last) : order.second(last);
      uses[s.pool[q][i]] = {c.of.outs[q].count + slice + 1, c.of.outs[q].connector, 0};
    }
    // (Slots that are free, or whose slices peers have taken, may be a copy's that came back.)
    for (std::uint32_t n = from; is_first && from != kNoSlice && n < s.posted; ++n) {
      if (n % slots != i) continue;
      uses[s.pool[q][i]] = {s.posts[q][n % kCopyPostsOfLane] + 1, PoolUse::kCopied, 0};
    }
  }
}

}  // namespace in_stream
}  // namespace unjam
