// Whether all that a call of packets needs is there: connectors, room, the key's own incoming ones.
// By the first warp, with the lane's lease.
#pragma once

#include "device/cuda/exec/call.cuh"

namespace unjam {
namespace in_stream {

// How often is looked for room: as often as for packets, since who only sends runs ahead, and then
// waits for the same late rank as who waits for its packets; and ahead of the stream's turn.
inline constexpr std::uint32_t kRoomPolls = kStreamCallPolls, kRoomPollsAhead = 2;

// What a thread of the first warp knows of the connector that it sees to: from look(), and from
// look_again() what follows.
struct Known {
  std::uint64_t count;   // posted, or consumed, before this call
  std::uint64_t credit;  // of outgoing ones: what the peer has consumed at least; again later
  CreditCell* cell;
  InEndpoint* at;          // the endpoint
  std::uint32_t* poke_at;  // of who sends, or is sent to
  std::uint32_t connector;
};

// A thread's part of look(). Of a call that has made a part of its steps the others are so many
// packets each way.
template <std::uint32_t kSteps>
__device__ __forceinline__ bool look_at_member(const StreamCall& call, const LaneTransport& t,
                                               const Member& m, bool patient, Known& known,
                                               Shared& s, std::uint32_t to_send = kSteps,
                                               std::uint32_t to_take = kSteps) {
  if (!(m.part == kOutgoing ? m.to : m.part == kIncoming && m.from)) return true;
  // The endpoints are the lane's driver's: any driver may take an idle key's connector for another
  // key. So they cannot be read beside the lease.
  const bool in = m.part == kIncoming;
  const InEndpoint& at = *endpoint_of(call, m, t.lane);
  unsigned char* const steps = at.steps;
  known.at = endpoint_of(call, m, t.lane);
  known.count = at.consumed;
  known.connector = at.connector;
  known.cell = at.cell;
  known.credit = *(in ? &at.consumed : &out_endpoint(call, m, t.lane)->credit);
  bool ok = known.connector != kNoConnector;
  // Of the peer's reads of what we are to overwrite it is enough to know those that an earlier
  // driver has acquired. Else: room may come soon, who sends only is often ahead.
#pragma unroll 1
  for (std::uint32_t polls = 0;
       !in && ok && known.count + to_send - known.credit > call.shape.guaranteed_slots; ++polls) {
    ok = polls != (patient ? kRoomPolls : kRoomPollsAhead);
    known.credit = load_acquire(known.cell->consumed);
  }
  if (!ok) return false;
  // Of what comes in, that is where it was last expected. Whether the peer has that connector
  // yet is looked at while it is awaited, see look_again(): a flag is one step's of one
  // invocation, so what carries it is the slice.
  unsigned char* place = t.guaranteed_slot_of(steps, known.count);
  (in ? s.from : s.to)[m.q] = reinterpret_cast<char*>(place);
  if constexpr (kSteps == 2) {
    place = t.guaranteed_slot_of(steps, known.count + (in ? to_take : to_send) - 1);
    (in ? s.later_from : s.later_to)[m.q] = reinterpret_cast<char*>(place);
  }
  return true;
}

// Behind take_lane(), by the first warp: what the lease covers, the connectors. Leaves places in
// `s`. kSteps: packets that the call sends each peer. `patient`: waits for room.
template <std::uint32_t kSteps>
__device__ __forceinline__ bool look(CudaRank& r, const StreamCall& call, const LaneTransport& t,
                                     const Stretch& w, bool patient, Known& known, Shared& s) {
  std::uint32_t poke = 0;
  if (threadIdx.x == 0) poke = load_relaxed_local(r.poke_counts[t.lane]) + 1;
  const bool ok = look_at_member<kSteps>(call, t, member_of(call, w), patient, known, s);
  if (threadIdx.x == 0) {
    s.poke = poke;
    if constexpr (kSteps == 2) s.later_poke = poke + 1;
  }
  return __all_sync(0xffffffffu, ok) != 0;
}

// A thread's part of look_again().
__device__ __forceinline__ bool look_at_member_again(const StreamCall& call, const LaneTransport& t,
                                                     const Member& m, Known& known, Shared& s) {
  if (m.part == kOutgoing && m.to) known.credit = load_relaxed(known.cell->consumed);
  if (m.part != kIncoming || !m.from) return true;
  // Acquire, see tag_word(): for a look at the base behind this.
  const std::uint64_t tag = load_acquire(t.tag_word(m.peer, known.connector));
  const std::uint64_t base = load_relaxed(t.base_word(m.peer, known.connector));
  // (Of the second only a hint: if a new owner, the same key, sends to another place, the engine
  // will look there.)
  if (tag == call.tag && base <= known.count) return true;
  *static_cast<volatile std::uint32_t*>(&s.hopeless) = 1;
  return false;
}

// By the first warp, while packets are under way. Whether incoming connectors are the key's, and
// began no later than is known; false: do not wait. (If the tag was this key's from an earlier time
// the packet is not found, or at the place of a step that has the same: the flag says that it is
// this call's, and tell_peers() looks which step it was.) Of outgoing ones: what was consumed by
// now, for a later call. And where to poke whom.
__device__ __forceinline__ bool look_again(CudaRank& r, const StreamCall& call,
                                           const LaneTransport& t, const Stretch& w, Known& known,
                                           Shared& s) {
  const Member m = member_of(call, w);
  if (m.part == kOutgoing && (m.to || m.from)) known.poke_at = &r.pokes[m.peer][t.lane];
  return look_at_member_again(call, t, m, known, s);
}

}  // namespace in_stream
}  // namespace unjam
