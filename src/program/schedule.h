// A plan as executors run it that know no slices' order but this (device/cuda/exec): made once a
// plan by plan/lower.h, of one rank, without addresses. What each call adds is in
// device/cuda/dev/stream_call.h. Nothing here says which algorithm a plan is of. Ranks are known by
// *places*: the rank itself and its neighbours, in ascending order of group rank.
//
// Two movements are known. Packets: one loop a lane, at most one primitive that sends and one that
// receives, or two hops. Slots: chunk after chunk, by at most three steps, each a primitive: one
// that only sends; one that receives this rank's own part, and may send what becomes of it; and one
// that receives other parts. A connector carries one step's slices, or two steps' in the order of
// program/hop_order.h.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "program/primitive.h"

namespace unjam {

// The rank itself among them.
inline constexpr std::uint32_t kMostPlaces = 8;

// What executors are like. Of a block: one warp controls, one publishes, others move data in two
// groups, so the warps are even in number.
inline constexpr std::uint32_t kLeastThreads = 128;
inline constexpr std::uint32_t kStreamCallUnitBytes = 8;  // what a thread moves of packets at once
inline constexpr unsigned kStreamCallControl = 32;        // threads of a block that move no packets
inline constexpr int kStreamCallUnits = 40;               // that each of the others reduces at most
inline constexpr std::uint32_t kLeastSlotThreads = 224;   // of a block that moves slots

// What an executor of slots does otherwise for one plan than for another.
struct SlotTuning {
  // So many times the guaranteed slots of a connector are to be had, with borrowed ones.
  std::uint8_t slots = 1;
  // Slices in movers' hands at most, of the step that only sends, and of each other.
  std::uint8_t sent_in_hand = 2, others_in_hand = 2;
  // Movers have a group for each direction, whose warps begin each slice together; else each of two
  // groups takes the next slice of any step.
  bool in_step = false;
  // Lanes keep together, see device/cuda/exec/slots/lane_pacing.h.
  bool paced = false;
  // Blocks keep their SMs for those of the next call, if there are chunks enough.
  bool keeps_places = false;
  // Hops from what this rank sends to what comes back for it.
  std::uint8_t hops_back = 1;

  bool operator==(const SlotTuning&) const = default;
};

// What executors of slots move: what only sends; what receives the own part, and may send it on;
// what receives other parts.
inline constexpr std::uint32_t kSlotSteps = 3;
enum SlotStep : std::uint32_t { kSends, kGathers, kCollects };

// Sets are of places, a bit each.
struct SlotSteps {
  std::uint8_t sends_to = 0;
  std::uint8_t gathers_from = 0;   // whose slices of the own part are received
  std::uint8_t results_to = 0;     // whom what becomes of these is sent to
  std::uint8_t collects_from = 0;  // whose parts are received
  bool scatters = false;           // what is sent: each its part; else all the own one
  bool copies = false;             // what is scattered goes into the own output, too
  bool stores_sent = false;        // what is sent of the own part does
  bool stores_result = false;      // what the own part becomes does
  bool contributes = false;        // what is sent of the own part is scaled, as a contribution
  bool reduces = false;            // what is gathered, with the own contribution:
  bool sums = false;               // it comes as sums, and the own contribution alone is scaled
  bool finishes = false;           // an integer average divides here
  bool sent_into_outputs = false, results_into_outputs = false;  // see kIntoOutput
  bool carried = false;          // what is only sent is marked for copy engines (Carrier)
  std::uint8_t own_source = 0;   // the own contribution's place among what is reduced
  std::uint8_t num_sources = 0;  // so many it is
  std::uint16_t lag = 0;         // passes from a step to the next, if a connector carries two
  // Before the step that gathers moves a chunk, all that the step that only sends, or the one that
  // collects, has in front of it on a connector that they share is moved: else what it has made of
  // the chunk, or has taken for it, could be lost (plan/order_rule.h). Other steps do not wait.
  bool gather_waits_for_sent = false, gather_waits_for_collected = false;
  // Which primitives the three steps are: what only sends, what gathers, what collects.
  std::uint8_t primitives[kSlotSteps] = {};
  // Of each place, the part that is sent there, or comes from there; of this rank the own part.
  std::uint16_t parts[kMostPlaces] = {};
  SlotTuning tuning;

  bool operator==(const SlotSteps&) const = default;
  // Whether connectors carry two steps' slices.
  UNJAM_HD constexpr bool two_hops() const { return (sends_to & results_to) != 0; }
};

// Messages of packets are what one rank sends another: a block of the input, or of the output, of
// `block_bytes`, of which each lane carries a stretch. Offsets are in bytes, from the beginning of
// the user's buffer. Of places that are sent to, or received from, there is one, or all others:
// those from `first` on, around.
struct Schedule {
  std::uint8_t places = 0, place = 0;     // how many, and this rank's
  std::uint16_t ranks[kMostPlaces] = {};  // of each place the group rank

  // Packets.
  std::uint32_t block_bytes = 0;   // of which lanes carry pieces of 16 bytes:
  std::uint32_t lane_pieces = 0;   // so many each,
  std::uint32_t longer_lanes = 0;  // and so many first lanes one more
  std::uint32_t sent_from = 0;     // input: what is sent; where it scatters, the first place's
  std::uint32_t own_from = 0;      // input: the own contribution, or what is copied
  std::uint32_t own_to = 0;        // output: where it is copied to
  std::uint32_t received_to = 0;   // output: where one message is copied to
  std::uint8_t num_sent = 0, first_sent = 0;          // places
  std::uint8_t num_received = 0, first_received = 0;  // places
  bool scatters = false;                              // place q is sent block q
  bool collects = false;                              // place q's message becomes block q
  bool reduces = false;                               // the messages, with the own contribution
  bool copies = false;                                // the own data, into the output
  // Primitives in front of the one that receives. (Of two hops lanes say it themselves.)
  std::uint8_t before = 0;
  // Contributions are scattered, what becomes of each part is sent to all, and collected. If the
  // call is not plain `block_bytes` is the whole vector, of whose pieces each part has so many, and
  // so many first parts one more. Of a shorter part lanes have pieces as above; of a longer one the
  // next lane has one more.
  bool two_hops = false;
  std::uint32_t part_pieces = 0;
  std::uint32_t longer_parts = 0;

  // Slots. (What is said of packets is not looked at.)
  bool by_slots = false;
  SlotSteps steps;
  // Of each step, in each lane. Executors run only what has as many of all steps, also of those
  // that it has not; so a step of which a lane has fewer, as where parts lie on lanes in turn,
  // needs the engine (NeedsEngine::kUnevenSteps). Whoever runs others too may not use
  // chunks_of_all().
  std::uint32_t chunks[kSlotSteps] = {};
  std::uint32_t patience_ns = 0;

  UNJAM_HD constexpr std::uint32_t chunks_of_all() const { return chunks[0]; }
};

}  // namespace unjam
