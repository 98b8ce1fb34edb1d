// What peers are told of packets that were sent and taken: endpoints, credits, pokes. By the first
// warp.
#pragma once

#include "device/cuda/exec/packets/look.cuh"

namespace unjam {
namespace in_stream {

// `taken`: packets that were received of each peer; `posted`: sent. No fence is in front of what is
// stored at peers (it would take a good part of a short call's time):
//   Credits say that packets were read. Each thread that has read some has seen their flags in what
//   its loads have brought, or (of lines) has used what they brought when its warp had seen them,
//   and came to the block's barrier behind that; nothing that is stored now can be in those loads.
//   (So do GPUs work: a value that was branched on has come. To PTX's model loads in front of a
//   store are ordered by a fence only. The other side, who reads a credit and overwrites, relies on
//   the same.) Pokes say that packets were stored, and on their way to the host they may overtake
//   those. So a launcher that was poked looks more than once, see DaemonLauncher::run().
// A thread's part. Returns whether the member is to be poked.
__device__ __forceinline__ bool tell_member(const StreamCall& call, const LaneTransport& t,
                                            const Member& m, std::uint32_t taken,
                                            std::uint32_t posted, const Known& known) {
  const bool takes = taken != 0 && m.part == kIncoming && m.from;
  // (The data carried their flags.)
  const bool posts = posted != 0 && m.part == kOutgoing && m.to;
  std::uint64_t count = known.count;
  // As LaneTransport::resolve(). The packet has come (the barrier), and with it where its owner
  // began: while it was awaited the connector may have been another key's, which was void.
  if (takes) {
    const std::uint64_t base = load_relaxed(t.base_word(m.peer, known.connector));
    if (base > count) count = base;
  }
  count += takes ? taken : posted;
  if (takes) store_system(known.cell->consumed, count);
  if (takes || posts) known.at->consumed = count;
  // (Behind the fence with which the lease is given back, which makes an acquire of that look, and
  // the lease, a release: as look() wants it. The engine keeps the lease: to it the above applies,
  // a branch on the credit is in front of what is then overwritten.)
  if (posts) out_endpoint(call, m, t.lane)->credit = known.credit;
  return posts || (taken != 0 && m.part == kOutgoing && m.from);
}

// kSteps: as in look().
template <std::uint32_t kSteps>
__device__ __forceinline__ void tell_peers(CudaRank& r, const StreamCall& call,
                                           const LaneTransport& t, const Stretch& w,
                                           std::uint32_t taken, std::uint32_t posted,
                                           const Known& known, const Shared& s) {
  const std::uint32_t poke = s.poke + kSteps;  // poke_early() has had those before
  const bool pokes = tell_member(call, t, member_of(call, w), taken, posted, known);
  if (pokes) store_system(*known.poke_at, poke);
  if (threadIdx.x == 0) r.poke_counts[t.lane] = poke;  // whether or not somebody is poked
}

}  // namespace in_stream
}  // namespace unjam
