// The second warp, of several calls: as publish.cuh; and a call that is done is ended at once.
#pragma once

#include "device/cuda/exec/slots/publish.cuh"
#include "device/cuda/exec/slots/several.cuh"

namespace unjam {
namespace in_stream {

// Behind all that is published of call i: whether it is done. If so, all of it is told.
__device__ __forceinline__ bool tell_if_done(const SlotCall& c, BatchSlotCall& of) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const std::uint32_t thread = threadIdx.x % 32, q = thread % kStreamCallRanks;
  bool done = true;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    // Acquire, by each thread: what it tells, and what ends behind it, comes after what was moved.
    done = done && (!c.has(hop) || CudaDev::load_block(of.done[hop]) == c.call.chunks_of_all());
  }
  if (thread < kStreamCallRanks && c.sends_to(q)) done = done && of.sent[q] == c.order().slices();
  if (__all_sync(kAll, done) == 0) return false;
  if (thread < kStreamCallRanks && c.receives_from(q)) of.taken[q] = c.order().slices();
  __syncwarp();
  tell_end(c, member_of(c.call, {nullptr, nullptr, 1, 1}, thread));
  __syncwarp();
  return true;
}

// What the second warp knows as it publishes several calls; most of it is each thread's own, which
// sees to the connector to a peer (`out`), or from it.
struct BatchPublishing {
  static constexpr std::uint32_t kAll = 0xffffffff;
  PipelinedBatch& x;
  SlotShared& s;
  const std::uint32_t thread, q, calls;
  const bool out;
  bool of_peer, went_on = false;
  std::uint32_t own_slots;
  std::uint32_t* poke_at;
  std::uint32_t poke, ended = 0;  // ended: calls, as bits

  __device__ __forceinline__ BatchPublishing(CudaRank& r, const LaneTransport& t)
      : x(pipelined_batch()),
        s(x.slots),
        thread(threadIdx.x % 32),
        q(thread % kStreamCallRanks),
        calls(x.num_calls),
        out(thread < kStreamCallRanks) {
    const SlotCall like = slot_call_of(t, x.entries[0]);
    of_peer = thread < 2 * kStreamCallRanks && (out ? like.sends_to(q) : like.receives_from(q));
    own_slots = like.call.shape.guaranteed_slots;
    poke_at = where_to_poke(r, like, q, out && (of_peer || like.receives_from(q)));
    poke = s.poke;
  }

  // Up to where this thread's connector of each call can be published. Whether that is news.
  __device__ __forceinline__ bool look(const LaneTransport& t, bool last) {
    bool news = false;
    for (std::uint32_t i = 0; i < calls; ++i) {
      const std::uint32_t entry = x.entries[i];
      const SlotCall c = slot_call_of(t, entry);
      std::uint32_t moved[kSlotSteps];
#pragma unroll
      for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
        moved[hop] = CudaDev::load_block(x.calls[entry].done[hop]);
      }
      std::uint32_t& done = (out ? c.of.sent : c.of.taken)[q];
      std::uint32_t to = out ? c.prefix_to(q, moved) : c.prefix_from(q, moved);
      went_on = went_on || to != done;
      // A credit is worth a fence where the peer has slices left that want room. (Others do not go
      // along, as they do in publish_call().)
      if (!out && !last && c.order().slices() - done <= own_slots) to = done;
      x.to[i][thread] = to;
      if (to == done) continue;
      if (out) store_headers(c, q, done, to);
      // (The last credits are told in the end.)
      if (!out && last) {
        done = to;
      } else {
        news = true;
      }
    }
    return news;
  }

  // Publishes it. As in publish_call(): each thread's fence is behind what it has seen of all
  // calls.
  __device__ __forceinline__ void publish(const LaneTransport& t, bool news) {
    fence_system();
    for (std::uint32_t i = 0; news && i < calls; ++i) {
      const SlotCall c = slot_call_of(t, x.entries[i]);
      std::uint32_t& done = (out ? c.of.sent : c.of.taken)[q];
      const std::uint32_t to = x.to[i][thread];
      if (to == done) continue;
      publish_news(c, out, q, done, to);
      done = to;
    }
  }

  // Ends calls that are done. Whether there were any.
  template <class EndEarly>
  __device__ __forceinline__ bool end_those_done(const LaneTransport& t, EndEarly& end_early) {
    bool any = false;
    for (std::uint32_t i = 0; i < calls; ++i) {
      const std::uint32_t entry = x.entries[i];
      if ((ended >> entry & 1) != 0 || !tell_if_done(slot_call_of(t, entry), x.calls[entry]))
        continue;
      ended |= 1u << entry;
      if (thread == 0) CudaDev::store_block(x.ended, ended);
      any = true;
      // What the thread has acquired, and the others' stores behind that: all of the call.
      if (thread == 0) end_early(entry);
      __syncwarp();
    }
    return any;
  }

  __device__ __forceinline__ void close() {
    if (thread == 0) s.poke = poke;
    if (thread >= calls) return;
    BatchSlotCall& of = x.calls[x.entries[thread]];
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) of.moved[hop] = of.done[hop];
  }
};

// As publish_call(). A call that is done, of several, is ended at once.
template <class EndEarly>
__device__ __forceinline__ void publish_several(CudaRank& r, const LaneTransport& t,
                                                EndEarly end_early) {
  constexpr std::uint32_t kAll = 0xffffffff;
  BatchPublishing all(r, t);
  PipelinedBatch& x = all.x;
  std::uint32_t idle = 0, seen = 0;
  bool told = true;
  for (std::uint32_t i = 0; i < all.calls; ++i) {
    if (x.calls[x.entries[i]].begins()) invite_members(slot_call_of(t, x.entries[i]));
  }
  for (;;) {
    // (Before what was moved.)
    const bool last = __shfl_sync(kAll, CudaDev::load_block(all.s.closed), 0) != 0;
    const std::uint32_t events = __shfl_sync(kAll, CudaDev::load_block(x.events), 0);
    const bool looks = events != seen;
    const bool news = all.of_peer && (last || looks) && all.look(t, last);
    seen = events;
    if (looks && __any_sync(kAll, all.went_on) != 0 && all.thread == 0) {
      CudaDev::store_block(x.went_on, 1u);
    }
    const bool news_told = __any_sync(kAll, news) != 0;
    if (news_told) {
      all.publish(t, news);
      told = false;
      idle = 0;
    }
    if (looks && all.calls > 1 && all.end_those_done(t, end_early)) told = false;
    if (news_told) continue;
    if (last) break;
    if (told || ++idle < kIdleRounds) continue;
    poke_peer(all.poke_at, ++all.poke);
    told = true;
  }
  all.close();
}

}  // namespace in_stream
}  // namespace unjam
