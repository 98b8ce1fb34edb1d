// The instruction set between planners and the engine: what one rank does for a collective. A
// program is a list of primitives, executed once per chunk ("loop" l = 0, 1, …): the l-th pass
// works on chunk l of every part (but see the lag below). A part is a contiguous piece of the
// user's data (geometry.h); a primitive whose chunk is empty in this loop is skipped, on every rank
// alike. Primitives are fusions of send, recv, reduce, copy (paper Sec. 4.1). The k-th send to a
// peer is matched with that peer's k-th receive from us, which the plan checker proves to fit.
//
// A plan lists the rank's neighbours, the members that it has anything to do with, and sets of
// them. A primitive receives from one neighbour, or from a set, and sends to one, or to a set. All
// of a primitive's slices with a set, even of one, move at once, or none does.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr std::uint16_t kNoPeer = 0xffff;
inline constexpr int kMaxGroupRanks = 65'000;  // that 16 bits say
// Of plans whose programs, or whose values as the checker follows them, grow with the group.
inline constexpr int kMaxLinearRanks = 1024;
inline constexpr int kMaxRanksInSets = 64;  // for plans with sets of all others
// Of a rank, in a plan with sets: with the rank itself, sources of one slice. And sets of a plan.
inline constexpr int kMostNeighbours = 63, kMostSets = 8;

// Primitive::from and to: which neighbour, or which set.
using Peers = std::uint8_t;
inline constexpr Peers kFirstSet = 64;  // less is a neighbour, by its place in the plan's list
// One neighbour, which Plan::wide_peers says: of plans with more neighbours than there are codes.
// No such plan has sets, and no GPU runs one.
inline constexpr Peers kWidePeer = 0xfe;
inline constexpr Peers kNobody = 0xff;
UNJAM_HD constexpr bool is_set(Peers peers) {
  return peers >= kFirstSet && peers < kFirstSet + kMostSets;
}
UNJAM_HD constexpr std::uint32_t set_of(Peers peers) { return peers - std::uint32_t{kFirstSet}; }

// A set of neighbours: bit k is the k-th of the plan's list.
struct PeerSet {
  std::uint64_t neighbours = 0;
  // The part of that one of them whose part is longest (a part per rank; else 0): if its chunk is
  // empty all of theirs are.
  std::uint32_t longest_part = 0;
  std::uint32_t pad = 0;

  bool operator==(const PeerSet&) const = default;
};

// What a primitive does. Sources: what is received (kRecv), the local slice (kLocal), or both
// combined with the operator when kReduce is set. Destinations: the user's output (kCopy), the
// send connectors (kSend), or both.
enum PrimitiveFlags : std::uint16_t {
  kRecv = 1 << 0,    // waits for a slice from `from`, of a set from each
  kSend = 1 << 1,    // waits for room towards `to`, of a set at each, posts the result
  kLocal = 1 << 2,   // reads the local slice (input, or output when kFromOutput)
  kReduce = 1 << 3,  // combines received and local slices (needs kRecv|kLocal)
  kCopy = 1 << 4,    // stores the result into the user's output
  // The local slice is read from the output buffer (a value that an earlier primitive stored).
  kFromOutput = 1 << 5,
  // The local slice is this rank's own contribution and enters the reduction here: a floating-point
  // average scales it by 1/ranks.
  kContribute = 1 << 6,
  // The result is complete: an integer average divides by the number of ranks.
  kFinish = 1 << 7,
  // What is received from a set and reduced are raw contributions, unless this says that they are
  // sums. Contributions are combined with the local slice in ascending order of group rank, this
  // rank's own at its place, so that all ranks get the same bits. Sums are combined in that order,
  // the local slice, a contribution, behind them.
  kPartials = 1 << 8,
  // With a set, which part travels. Without these it is `part`, the same for all. Of a rule each
  // member q of the set has its own, part q, and `part` is not looked at; members whose chunk is
  // empty in this loop are left out, on both sides.
  // Sent: the local slice of part q, which, with kCopy, goes into the own output, too.
  kScatter = 1 << 9,
  // Received: the slice of part q, into the output.
  kCollect = 1 << 10,
  // Goes together with the next primitive, see below.
  kWithNext = 1 << 11,
  // Packets: what the primitive receives was sent by one that had received itself, of the same
  // chunk. Such packets carry another flag, see packet_flag().
  kSecondHop = 1 << 12,
  // Whoever is sent the result stores it, unchanged, at the same place of its output. So it may be
  // put there at once if that rank invites to (see connector.h).
  kIntoOutput = 1 << 13,
  // By what the result is carried, see Carrier.
  kCarrierBits = 3 << 14,
};
// Others than blocks may carry a slice that is a mere copy of local data, by slots: the mark says
// that it is worth that, and the sender's device decides. Calls in streams of CUDA devices have
// copy engines (device/cuda/exec/slots/carry.cuh); an engine may have carriers (Engine: "Carried
// slices"), but on neither device has any, so there marks change nothing. The checker refuses
// kNetwork.
enum class Carrier : std::uint16_t {
  kBlocks = 0 << 14,  // loads and stores of the rank's own threads
  kCopyEngine = 1 << 14,
  kNetwork = 2 << 14,
};

// A primitive that lags works, in pass l, on chunk l - lag; a program with lags makes as many
// passes more. So a chunk's hops lie passes apart, and what a hop waits for was sent that long ago
// (software pipelining). A program's last primitive lags as much as any.
// Two primitives that go together (kWithNext) are one slice: what both wait for is looked for at
// once, they move at the same time, and what they have done is published at once. The first only
// sends and the second only receives, both with sets, and the second lags behind by at least a
// pass, so that it wants nothing that peers send in the same slice. In a pass in which one has no
// chunk the other goes alone. With a set a primitive moves exactly one slice a peer (planners keep
// a chunk within one guaranteed slot).
struct Primitive {
  std::uint16_t flags = 0;      // PrimitiveFlags
  Peers from = kNobody;         // kRecv
  Peers to = kNobody;           // kSend
  std::uint32_t part : 20 = 0;  // which part of the data, see geometry.h
  std::uint32_t lag : 12 = 0;
};
inline constexpr std::uint32_t kMostParts = 1 << 20, kMostLag = (1 << 12) - 1;
static_assert(sizeof(Primitive) == 8, "primitives are fetched as one 8-byte word");

// The only neighbours of a primitive of kWidePeer, by their places in the plan's list.
struct WidePeers {
  std::uint16_t from = kNoPeer;
  std::uint16_t to = kNoPeer;
};

UNJAM_HD constexpr bool from_set(Primitive p) { return is_set(p.from); }
UNJAM_HD constexpr bool to_set(Primitive p) { return is_set(p.to); }
UNJAM_HD constexpr Carrier carrier_of(Primitive p) {
  return static_cast<Carrier>(p.flags & kCarrierBits);
}

// Which hop of its chunk a packet makes: one that the primitive receives, and one that it sends.
UNJAM_HD constexpr std::uint32_t hop_received(Primitive p) {
  return (p.flags & kSecondHop) != 0 ? 1 : 0;
}
UNJAM_HD constexpr std::uint32_t hop_sent(Primitive p) {
  return (p.flags & kRecv) != 0 ? hop_received(p) + 1 : 0;
}

}  // namespace unjam
