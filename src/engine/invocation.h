// The contexts of an invocation: what is constant while it runs (static), what changes (dynamic),
// and the state of its key that outlives it (paper Sec. 4.2).
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/types.h"
#include "engine/hand_over.h"
#include "program/geometry.h"
#include "program/primitive.h"
#include "transport/connector.h"

namespace unjam {

// What a lane lacked when it last left an invocation without having moved anything: one word, for
// diagnosis. Time (2^20 ns) << 32 | low bits of n << 18 | group rank << 2 | what.
enum class Lack : std::uint32_t {
  kUnknown = 0,  // it has not begun
  kNothing = 1,  // it has moved data since it last waited
  kData = 2,     // of that rank
  kRoom = 3,     // towards that rank
};
inline constexpr std::uint32_t kSomePeer = 0xffff;
inline constexpr std::uint32_t kLackUses = 0x3fff;  // bits of n
UNJAM_HD constexpr std::uint32_t lack_word(Lack what, std::uint32_t peer, std::uint64_t n) {
  return static_cast<std::uint32_t>(n & kLackUses) << 18 | peer << 2 |
         static_cast<std::uint32_t>(what);
}

// One lane's part of a key. Only that lane touches it.
struct LaneKey {
  OutEndpoint* out = nullptr;  // [group size], by group rank
  InEndpoint* in = nullptr;    // [group size]
  std::uint32_t in_queue = 0;  // invocations of the key in this lane's task queue
  std::uint32_t pad = 0;
  // Statistics, readable at any time.
  std::uint64_t preemptions = 0;
  std::uint64_t spins = 0;
  std::uint64_t slices = 0;
  std::uint64_t time_ns = 0;  // from fetch to finish, over all invocations
  std::uint64_t lack = 0;     // see lack_word
};

// A key of a group at one rank. Lives until the engine was told to forget it (KeyRelease).
struct KeyState {
  std::uint64_t tag = 0;    // hash of (group, key): what peers and traces know it by
  std::uint64_t group = 0;  // hash of the group: what peers know all its keys by
  // Invocations completed by all lanes of this rank: one starts when this is its turn. Written by
  // the lane that finishes last (release: its and, through the countdown, the others' stores come
  // before), read by all lanes (acquire). Of a call that runs in a stream without the
  // engine nothing is said of its results: all that it waits for has come, and what follows it in
  // its stream is behind its stores.
  std::uint64_t done = 0;
  LaneKey* lanes = nullptr;  // [lanes]
};

inline constexpr std::uint8_t kPipelined = 0xff, kPipelinedIfContended = 0xfe, kBatchTwoHops = 0xfd;

struct Lowered;  // plan/lower.h

// Static context. 16-byte multiples: saved and loaded in 16-byte vectors.
struct alignas(16) Invocation {
  const Primitive* program = nullptr;
  const std::uint16_t* members = nullptr;  // group rank -> world rank
  // As in the plan (plan/plan.h). wide_peers: nullptr, unless primitives name those.
  const std::uint16_t* neighbours = nullptr;
  const PeerSet* sets = nullptr;
  const WidePeers* wide_peers = nullptr;
  KeyState* key = nullptr;
  const void* input = nullptr;
  void* output = nullptr;
  std::uint64_t seed = 0;  // of the flags: hash of group, key, n, signature and plan
  std::uint64_t n = 0;     // which use of the key
  // The same as KeyState::done counts it. Of a state that was another key's before, no number that
  // this has counted: the first use of a key, which sets its state up, may lie in a stream that has
  // not come there yet when the second one is looked at, by way of another.
  std::uint64_t use = 0;
  // The host's: what the plan was lowered to, nullptr where the device has no use for it.
  const Lowered* lowered = nullptr;
  // When the input is there: a number that the device's marks have to reach; 0: it is.
  std::uint64_t ticket = 0;
  std::uint64_t serial = 0;  // unique at its rank: what a device's waiters look for
  // Where `output` is for peers that may store there, see transport/windows.h. 0: they may not.
  std::uint64_t output_place = 0;
  Geometry geometry;
  std::uint32_t num_primitives = 0;
  std::uint16_t num_neighbours = 0;
  std::uint16_t neighbours_below = 0;  // of them, those in front of this rank
  std::uint8_t num_sets = 0;
  std::uint16_t group_size = 1;
  std::uint16_t group_rank = 0;
  std::int32_t priority = 0;
  Op op = Op::kSum;
  Protocol protocol = Protocol::kSlot;
  std::uint16_t slot = 0;  // index of the invocation's slot at this rank
  // The device may try a lane's part in a batch (docs/internals/batches.md). 0: no;
  // kPipelined: chunk after chunk; kPipelinedIfContended: such a one where others of some length
  // are in the queue as well; kBatchTwoHops: of packets that make two hops, by three primitives;
  // else the primitives in front of the one that receives, which is the last, and 1.
  std::uint8_t batch = 0;

  // offset: elements from the beginning of the whole vector.
  UNJAM_HD const unsigned char* input_at(std::uint64_t offset) const {
    return static_cast<const unsigned char*>(input) +
           (offset - geometry.input_shift(group_rank)) * dtype_bytes(geometry.dtype);
  }
  UNJAM_HD unsigned char* output_at(std::uint64_t offset) const {
    return static_cast<unsigned char*>(output) +
           (offset - geometry.output_shift(group_rank)) * dtype_bytes(geometry.dtype);
  }
};
static_assert(sizeof(Invocation) % kVectorBytes == 0);

// Dynamic context of one lane.
struct alignas(16) DynamicContext {
  std::uint64_t loop = 0;       // which pass of the program: which chunk, but for the lag
  std::uint32_t primitive = 0;  // which primitive of the program
  std::uint32_t through = 0;    // elements of its chunk that are through
  std::uint32_t taken = 0;      // bytes of the incoming slice that are through
  std::uint32_t attempts = 0;   // entries so far; saturates
  std::uint64_t started_ns = 0;
  HandOver handed;  // what executors have done of it, and whether they may go on
};
static_assert(sizeof(DynamicContext) % kVectorBytes == 0);

// What each lane is to do about a key that has no invocation under way, or about a whole group.
// Comes by the way of invocations: an Invocation without a key, `input` its first KeyRelease and
// `n` how many; so it finds every lane after it has finished what was submitted before.
struct KeyRelease {
  LaneKey* lanes = nullptr;  // [lanes]: give their connectors back; nullptr: keep them
  const std::uint16_t* members = nullptr;  // group rank -> world rank
  // By group rank, 64 in a word: who has consumed all, or will never read the rest. nullptr:
  // nobody.
  const std::uint64_t* settled = nullptr;
  std::uint64_t void_tag = 0;  // a key's or group's that this rank will never read again; 0: none
  std::uint32_t group_size = 0;
};

// Another command, without releases (`input` nullptr), of the first lane alone: memory has come
// behind this rank's block for a peer, for connectors from one number up to another, and is to be
// cleared. By an engine, for it is there, or soon, whenever calls wait; a copy or a kernel of its
// own that is to clear it would wait behind whatever else the device is asked for (a cudaFree(),
// say, that waits for a stream which waits for this very memory).
struct ClearRoom {
  std::uint32_t peer = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
};
UNJAM_HD constexpr bool clears_room(const Invocation& inv) {
  return inv.key == nullptr && inv.input == nullptr;
}
UNJAM_HD constexpr ClearRoom room_of(const Invocation& command) {
  return {static_cast<std::uint32_t>(command.n), static_cast<std::uint32_t>(command.seed),
          static_cast<std::uint32_t>(command.seed >> 32)};
}
UNJAM_HD constexpr void set_room(const ClearRoom& room, Invocation* command) {
  command->n = room.peer;
  command->seed = std::uint64_t{room.to} << 32 | room.from;
}

// How an invocation ended, in its CQE.
enum class Outcome : std::uint8_t { kDone = 0, kCancelled = 1 };

}  // namespace unjam
