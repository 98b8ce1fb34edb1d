// Whom the slices of a mesh plan's hops (plan/algorithms/mesh.cc, program/hop_order.h) go to and
// come from, read off a rank's program: for who moves the hops of such a plan independently of each
// other. And those of a chain (plan/algorithms/chain.cc), of which each rank makes one.
// Groups of at most kMostHopRanks ranks; a bit a group rank.
#pragma once

#include <cstdint>
#include <optional>

#include "program/geometry.h"
#include "program/primitive.h"

namespace unjam {

inline constexpr std::uint32_t kMostHopRanks = 8;

struct HopPeers {
  std::uint8_t sends_to = 0;       // the first hop
  std::uint8_t gathers_from = 0;   // of whom the own part is received, from one or from all,
  std::uint8_t results_to = 0;     // and whom it is sent on to
  std::uint8_t collects_from = 0;  // whose parts are received
  bool scatters = false;           // the first hop sends each its part, else all the own one
  bool copies = false;             // what is scattered goes into the own output, too,
  bool places = false;             // and is stored at the same place of the members' outputs
  bool reduces = false;            // what is gathered, with the own contribution
  bool stores = false;             // what the own part becomes goes into the own output, too
  bool chain = false;              // the own part is all there is, of every rank
  std::uint8_t lag = 0;            // HopOrder::lag, if a connector carries two hops

  UNJAM_HD constexpr bool two_hops() const { return (sends_to & results_to) != 0; }
};

// Of a chain: what a rank's only primitive says. Nothing if it is another plan's.
inline std::optional<HopPeers> chain_peers(const Primitive& p) {
  constexpr unsigned kAdds = kRecv | kLocal | kReduce | kContribute;
  const auto bit = [](std::uint32_t q) { return static_cast<std::uint8_t>(1u << q); };
  if (p.part != 0 || p.lag != 0) return {};
  HopPeers hops;
  hops.chain = true;
  switch (p.flags) {
    case kLocal | kContribute | kSend:
    case kLocal | kCopy | kSend | kIntoOutput:
    case kAdds | kSend:
    case kAdds | kFinish | kCopy:
    case kRecv | kCopy | kSend | kIntoOutput:
    case kRecv | kCopy:
      break;
    default:
      return {};
  }
  if ((p.flags & kRecv) != 0) hops.gathers_from = bit(p.recv_peer);
  if ((p.flags & kSend) != 0) {
    ((p.flags & kRecv) != 0 ? hops.results_to : hops.sends_to) = bit(p.send_peer);
  }
  hops.reduces = (p.flags & kReduce) != 0;
  hops.stores = (p.flags & kCopy) != 0;
  return hops;
}

// Nothing if the program is not one that is known here: a mesh plan's of an all-reduce, all-gather,
// reduce-scatter, broadcast or reduce, whose slices are not "together"; or a chain's.
inline std::optional<HopPeers> hop_peers(const Geometry& g, const Primitive* program,
                                         std::uint32_t primitives, std::uint32_t group_size,
                                         std::uint32_t group_rank) {
  constexpr unsigned kSum = kLocal | kContribute | kFinish | kGather | kReduce;
  constexpr unsigned kShared = kSendAll | kIntoOutput;
  if (group_size < 2 || group_size > kMostHopRanks) return {};
  if (g.parts == 1) {
    return whole_at_root(g.kind) && primitives == 1 ? chain_peers(program[0]) : std::nullopt;
  }
  if (g.parts != group_size) return {};
  // (Of an all-to-all input and output differ.)
  if (g.blocked() && g.kind != Kind::kAllGather && g.kind != Kind::kReduceScatter) return {};
  const auto bit = [](std::uint32_t q) { return static_cast<std::uint8_t>(1u << q); };
  const auto others = static_cast<std::uint8_t>((1u << group_size) - 1 - (1u << group_rank));
  // Who has a part.
  const std::uint8_t owners =
      g.empty_part == kNoPart ? others : static_cast<std::uint8_t>(others & ~bit(g.empty_part));
  HopPeers hops;
  std::uint32_t collect_lag = 0;
  for (std::uint32_t i = 0; i < primitives; ++i) {
    const Primitive& p = program[i];
    const bool own = p.part == group_rank;
    switch (p.flags) {
      case kLocal | kScatter:
      case kLocal | kScatter | kCopy | kIntoOutput:
        if (p.lag != 0) return {};
        hops.sends_to = owners;
        hops.scatters = true;
        hops.copies = (p.flags & kCopy) != 0;
        hops.places = (p.flags & kIntoOutput) != 0;
        break;
      case kLocal | kCopy | kShared:
        if (!own || p.lag != 0) return {};
        hops.sends_to = others;
        hops.stores = true;
        break;
      case kSum | kCopy:
      case kSum | kCopy | kShared:
      case kSum | kSend | kIntoOutput:
        if (!own) return {};
        hops.gathers_from = others;
        if (p.flags & kSendAll) hops.results_to = others;
        if (p.flags & kSend) hops.results_to = bit(p.send_peer);
        hops.reduces = true;
        hops.stores = (p.flags & kCopy) != 0;
        hops.lag = p.lag;
        break;
      case kRecv | kCopy:
      case kRecv | kCopy | kShared:
        if (!own || p.lag != 0) return {};
        hops.gathers_from = bit(p.recv_peer);
        if (p.flags & kSendAll) {
          hops.results_to = static_cast<std::uint8_t>(others & ~hops.gathers_from);
        }
        hops.stores = true;
        break;
      case kCollect | kCopy:
        hops.collects_from = owners;
        collect_lag = p.lag;
        break;
      default:
        return {};
    }
  }
  // The order in which a connector carries two hops, see HopOrder.
  if (hops.two_hops() && collect_lag != 2u * hops.lag) return {};
  return hops;
}

}  // namespace unjam
