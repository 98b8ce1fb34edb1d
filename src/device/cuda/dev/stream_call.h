// A call as the kernels see it that do it without the engine's slices (call_in_stream.cuh,
// packet_batch.cuh, pipelined_batch.cuh): its plan's schedule, and what host/bind.h and
// RankMemory::address() add. Submissions beside streams have one, too: for batches.
#pragma once

#include <cstdint>

#include "engine/state.h"
#include "program/schedule.h"

namespace unjam {

inline constexpr std::uint32_t kStreamCallRanks = kMostPlaces;
// For a packet, or room; each takes most of a microsecond.
inline constexpr std::uint32_t kStreamCallPolls = 512;
struct alignas(16) StreamCall : Schedule {
  std::uint32_t lanes = 0;       // a block each; 0: the call needs the engine
  std::uint32_t first_lane = 0;  // they are those from this one on
  std::uint32_t rank = 0;        // in the job
  // Packets: whole units, all aligned; what is reduced are sums or averages of common formats. (Of
  // two hops: parts are alike as well, and `block_bytes` long: scattered, reduced, collected.)
  bool plain = false;
  bool lines = false;  // Protocol::kLine
  std::uint32_t most_polls = kStreamCallPolls;
  std::uint32_t follows = 0;  // the low half of a serial, see OverlapRule; 0: of none
  std::uint16_t members[kStreamCallRanks] = {};  // of each place, the rank in the job
  std::uint64_t tag = 0;
  std::uint64_t flag = 0;        // of the packets, see packet_flag()
  std::uint64_t later_flag = 0;  // of the second hop's packets
  double scale = 1;
  ArenaShape shape;
  unsigned char* bases[kStreamCallRanks] = {};  // of the job's ranks; of a larger job's:
  unsigned char* const* all_bases = nullptr;    // in device memory; else nullptr
  WindowEntry* windows = nullptr;               // as in LaneTransport
  WindowEntry* noted_windows = nullptr;
  Room* rooms = nullptr;
  OutEndpoint* out = nullptr;  // the key's, at the first lane, by group rank; others' are behind
  InEndpoint* in = nullptr;
  std::uint32_t* attention = nullptr;  // CudaLink::attention
  // Arguments, since behind a fence what is none comes from the device's memory again. (With the
  // CQ's words as well calls of one lane are slower.)
  std::uint64_t* reports = nullptr;  // of the slot: how far the lanes have come, and how many
  std::uint64_t* stored = nullptr;   // have stored all, stream_call_reports.h
  Mailbox* mailboxes = nullptr;      // of all lanes
};

}  // namespace unjam
