// The instruction set between planners and the engine: what one rank does for a collective.
//
// A program is a list of primitives, executed once per chunk ("loop" l = 0, 1, …): the l-th pass
// works on chunk l of every part (but see the lag below). A part is a contiguous piece of the
// user's data (see geometry.h); a primitive whose chunk is empty in this loop is skipped, on every
// rank alike. Primitives are fusions of send, recv, reduce, copy (paper Sec. 4.1). Between two
// ranks everything travels in order through one connector per (group, key, lane), so the k-th send
// to a peer is matched with that peer's k-th receive from us; the plan checker proves that they
// fit.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr std::uint16_t kNoPeer = 0xffff;
inline constexpr int kMaxGroupRanks = 1024;  // for ring plans
inline constexpr int kMaxDirectRanks = 64;   // for direct plans (sources of one gather)

// What a primitive does. Sources: the received slice (kRecv), the local slice (kLocal), or both
// combined with the operator when kReduce is set. Destinations: the user's output (kCopy), the
// send connector (kSend), or both.
enum PrimitiveFlags : std::uint16_t {
  kRecv = 1 << 0,    // waits for a slice from recv_peer
  kSend = 1 << 1,    // waits for room towards send_peer, posts the result
  kLocal = 1 << 2,   // reads the local slice (input, or output when kFromOutput)
  kReduce = 1 << 3,  // combines received and local slices (needs kRecv|kLocal, or kGather)
  kCopy = 1 << 4,    // stores the result into the user's output
  // The local slice is read from the output buffer (a value that an earlier primitive stored).
  kFromOutput = 1 << 5,
  // The local slice is this rank's own contribution and enters the reduction here: a floating-point
  // average scales it by 1/ranks.
  kContribute = 1 << 6,
  // The result is complete: an integer average divides by the number of ranks.
  kFinish = 1 << 7,
  // Receives one slice from every other group member at once and reduces them with the local slice
  // in ascending order of group rank, this rank's own at its place (so all ranks get the same
  // bits). The received slices are raw contributions. recv_peer is kNoPeer.
  kGather = 1 << 8,
  // The three with several peers move exactly one slice a peer (planners keep a chunk within one
  // guaranteed slot), all of them at once or none.
  // The result goes to every other group member, but to whom it was received from (kRecv).
  // send_peer is kNoPeer.
  kSendAll = 1 << 9,
  // Every other member q is sent the local slice of part q, which, with kCopy, goes into the own
  // output, too (not so the own part); `part` is not looked at. Members whose chunk is empty in
  // this loop are left out, on both sides. send_peer is kNoPeer.
  kScatter = 1 << 10,
  // The counterpart: receives from every other member q the slice of part q, into the output.
  // recv_peer is kNoPeer; `part` is not looked at.
  kCollect = 1 << 11,
  // Goes together with the next primitive, see below.
  kWithNext = 1 << 12,
  // Packets: what the primitive receives was sent by one that had received itself, of the same
  // chunk. Such packets carry another flag, see packet_flag().
  kSecondHop = 1 << 14,
  // Whoever is sent the result stores it, unchanged, at the same place of its output. So it may be
  // put there at once if that rank invites to (see connector.h).
  kIntoOutput = 1 << 15,
};

// A primitive that lags works, in pass l, on chunk l - lag; a program with lags makes as many
// passes more. So a chunk's hops lie passes apart, and what a hop waits for was sent that long ago
// (software pipelining). A program's last primitive lags as much as any.
// Two primitives that go together (kWithNext) are one slice: what both wait for is looked for at
// once, they move at the same time, and what they have done is published at once. The first only
// sends and the second only receives, both with several peers, and the second lags behind by at
// least a pass, so that it wants nothing that peers send in the same slice. In a pass in which one
// has no chunk the other goes alone.
struct Primitive {
  std::uint16_t flags = 0;            // PrimitiveFlags
  std::uint16_t recv_peer = kNoPeer;  // group rank
  std::uint16_t send_peer = kNoPeer;  // group rank
  std::uint16_t part : 12 = 0;        // which part of the data, see geometry.h
  std::uint16_t lag : 4 = 0;
};
static_assert(kMaxGroupRanks <= 1 << 12, "a part fits");
// Which hop of its chunk a packet makes: one that the primitive receives, and one that it sends.
UNJAM_HD constexpr std::uint32_t hop_received(Primitive p) {
  return (p.flags & kSecondHop) != 0 ? 1 : 0;
}
UNJAM_HD constexpr std::uint32_t hop_sent(Primitive p) {
  return (p.flags & (kRecv | kGather | kCollect)) != 0 ? hop_received(p) + 1 : 0;
}
static_assert(sizeof(Primitive) == 8, "primitives are fetched as one 8-byte word");

}  // namespace unjam
