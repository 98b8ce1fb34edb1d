// A call as the kernels see it that do it without the engine's slices (solo.cuh, whole_call.cuh,
// whole_stream.cuh). What stands in it: solo_description.h.
#pragma once

#include <cstdint>

#include "engine/state.h"
#include "program/hop_peers.h"

namespace unjam {

// Of a block: one warp controls, one publishes, others move data in two groups (CudaDev), so the
// warps are even in number.
inline constexpr std::uint32_t kLeastThreads = 128;

// What a call needs to run without the engine, see solo.cuh. A message is what one member sends
// another: a block of the input, or of the output, of `block_bytes`, of which each lane carries a
// stretch. Offsets are in bytes, from the beginning of the user's buffer. Of members that are sent
// to, or received from, there is one, or all others: those from `first` on, around the group.
inline constexpr std::uint32_t kSoloRanks = kMostHopRanks;
inline constexpr std::uint32_t kSoloUnitBytes = 8;  // what a thread moves at once
inline constexpr unsigned kSoloControl = 32;        // threads of a block that move nothing
inline constexpr std::uint32_t kSoloPolls = 512;  // for a packet, or room; each takes most of 1 us
inline constexpr int kSoloUnits = 40;             // that each of the others reduces at most
inline constexpr std::uint32_t kLeastStreamThreads = 224;  // of a block in solo_stream.cuh
struct alignas(16) SoloCall {
  std::uint32_t lanes = 0;         // a block each; 0: the call needs the engine
  std::uint32_t first_lane = 0;    // they are those from this one on
  std::uint32_t rank = 0;          // in the job
  std::uint32_t block_bytes = 0;   // of which lanes carry pieces of 16 bytes:
  std::uint32_t lane_pieces = 0;   // so many each,
  std::uint32_t longer_lanes = 0;  // and so many first lanes one more
  std::uint32_t sent_from = 0;     // input: what is sent; where it scatters, the first member's
  std::uint32_t own_from = 0;      // input: the own contribution, or what is copied
  std::uint32_t own_to = 0;        // output: where it is copied to
  std::uint32_t received_to = 0;   // output: where one member's message is copied to
  std::uint16_t group_size = 0;
  std::uint16_t group_rank = 0;
  std::uint8_t num_sent = 0, first_sent = 0;          // members
  std::uint8_t num_received = 0, first_received = 0;  // members
  bool scatters = false;                              // member q is sent block q
  bool collects = false;                              // member q's message becomes block q
  bool reduces = false;                               // the messages, with the own contribution
  bool copies = false;                                // the own data, into the output
  // Whole units, all aligned; what is reduced are sums or averages of common formats. (Two-shot:
  // parts are alike as well, and `block_bytes` long: scattered, reduced, collected.)
  bool plain = false;
  bool lines = false;  // Protocol::kLine
  std::uint32_t most_polls = kSoloPolls;
  // Primitives in front of the one that receives. (Two-shot: lanes say it themselves.)
  std::uint8_t before = 0;
  // A plan of plan/algorithms/two_shot.cc. If it is not plain `block_bytes` is the whole vector, of
  // whose pieces each part has so many, and so many first parts one more. Of a shorter part lanes
  // have pieces as above; of a longer one the next lane has one more.
  bool two_shot = false;
  // A plan of plan/algorithms/mesh.cc in several loops, or a chain's, see solo_stream.cuh: with so
  // many chunks in each lane, of each part. (What is in bytes above is not looked at.)
  bool streams = false;
  HopPeers hops;
  std::uint32_t chunks = 0;
  std::uint32_t patience_ns = 0;
  std::uint32_t follows = 0;  // the low half of a serial, see CallInFront; 0: of none
  std::uint32_t part_pieces = 0;
  std::uint32_t longer_parts = 0;
  std::uint16_t members[kSoloRanks] = {};
  std::uint64_t tag = 0;
  std::uint64_t flag = 0;        // of the packets, see packet_flag()
  std::uint64_t later_flag = 0;  // of the second hop's packets
  double scale = 1;
  ArenaShape shape;
  unsigned char* bases[kSoloRanks] = {};  // of the job's ranks
  WindowEntry* windows = nullptr;         // as in LaneTransport
  WindowEntry* noted_windows = nullptr;
  OutEndpoint* out = nullptr;  // the key's, at the first lane; others' are behind
  InEndpoint* in = nullptr;
  std::uint32_t* attention = nullptr;  // CudaLink::attention
  // Arguments, since behind a fence what is none comes from the device's memory again: 0.3 us. (The
  // CQ's words as well made calls of one lane 0.5 us slower.)
  std::uint64_t* reports = nullptr;  // of the slot: how far the lanes have come, and how many
  std::uint64_t* stored = nullptr;   // have stored all, solo_reports.h
  Mailbox* mailboxes = nullptr;      // of all lanes
};

}  // namespace unjam
