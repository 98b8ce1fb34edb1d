// What executors of both kinds (packets/, slots/) know of a call: its members and their endpoints,
// this block's stretch of the data, and what its threads tell each other.
//
// The first warp sees to members, the lease and the call; the others move data.
#pragma once

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/dev/rank_state.h"

namespace unjam {
namespace in_stream {

using cuda_leaves::kUnitBytes;
using cuda_leaves::Raw;

struct Shared {
  char* from[kStreamCallRanks];
  char* to[kStreamCallRanks];
  char* later_from[kStreamCallRanks];  // of the connectors' next steps, where a call makes two
  char* later_to[kStreamCallRanks];
  std::uint32_t poke;        // a value for peers' words; so are the next ones
  std::uint32_t later_poke;  // of the second hop
  std::uint32_t ok;
  std::uint32_t hopeless;  // no use in waiting for packets. Stored once, read while polling
  std::uint32_t waited;    // it is the stream's turn. The same
  std::uint32_t serves;
  std::uint32_t close;  // nothing in front is waited for but leases, see OverlapRule
};

// The first warp sees to members, the lease and the call; the others move data, each thread units
// `hands()` apart. (If the first warp did, too, its loads would wait for what it looks at.)
__device__ __forceinline__ bool is_mover() { return threadIdx.x >= kStreamCallControl; }
__device__ __forceinline__ std::uint32_t hand() { return threadIdx.x - kStreamCallControl; }
__device__ __forceinline__ std::uint32_t hands() { return blockDim.x - kStreamCallControl; }

// Packets are looked for in rounds; true: not again.
__device__ __forceinline__ bool is_hopeless(const Shared& s) {
  return *static_cast<const volatile std::uint32_t*>(&s.hopeless) != 0;
}

// This block's stretch of the messages. Threads have places of theirs, or of those of several
// messages one behind the other, `threads` apart.
struct Stretch {
  const char* input;
  char* output;
  std::uint32_t bytes;  // of each message
  std::uint32_t places;
};

__device__ __forceinline__ std::uint32_t around(const StreamCall& call, std::uint32_t q) {
  return q >= call.places ? q - call.places : q;
}
__device__ __forceinline__ bool among(const StreamCall& call, std::uint32_t q, std::uint32_t first,
                                      std::uint32_t members) {
  if (q >= call.places) return false;
  return (q >= first ? q - first : q + call.places - first) < members;
}

// ---- members, each seen to by threads of the first warp ----

// Thread 8 i + q sees to member q; i says in what. Whatever several threads look at, they do so in
// one instruction: branches of a warp would wait for memory one after the other.
enum Part : std::uint32_t {
  kIncoming,  // its packets to us
  kOutgoing,  // ours to it
  kNobody,    // of which two are:
};
inline constexpr std::uint32_t kLeaser = 16, kFormer = 17;  // the lease; the key's former use

struct Member {
  std::uint32_t q, part, peer;
  bool to, from;  // whether it is sent to, or received from
};

// A lane without data, as in the engine, sends and receives nothing.
__device__ __forceinline__ Member member_of(const StreamCall& call, const Stretch& w,
                                            std::uint32_t thread = threadIdx.x) {
  Member m;
  m.q = thread % kStreamCallRanks;
  m.part = thread / kStreamCallRanks;
  m.to = w.bytes != 0 && among(call, m.q, call.first_sent, call.num_sent);
  m.from = w.bytes != 0 && among(call, m.q, call.first_received, call.num_received);
  m.peer = call.members[m.q];
  return m;
}

// An endpoint of either direction: they begin alike.
static_assert(offsetof(OutEndpoint, posted) == offsetof(InEndpoint, consumed) &&
              offsetof(OutEndpoint, connector) == offsetof(InEndpoint, connector) &&
              offsetof(OutEndpoint, steps) == offsetof(InEndpoint, steps) &&
              offsetof(OutEndpoint, cell) == offsetof(InEndpoint, cell));
__device__ __forceinline__ OutEndpoint* out_endpoint(const StreamCall& call, const Member& m,
                                                     std::uint32_t lane) {
  return call.out + lane * call.shape.ranks + call.ranks[m.q];
}
__device__ __forceinline__ InEndpoint* endpoint_of(const StreamCall& call, const Member& m,
                                                   std::uint32_t lane) {
  if (m.part == kOutgoing) return reinterpret_cast<InEndpoint*>(out_endpoint(call, m, lane));
  return call.in + lane * call.shape.ranks + call.ranks[m.q];
}

// As Slices::build_job() says it of a gather.
__device__ __forceinline__ cuda_leaves::Slice slice_of(const StreamCall& call,
                                                       const Invocation& inv) {
  const bool average = inv.op == Op::kAvg;
  const bool integer = is_integer(inv.geometry.dtype);
  cuda_leaves::Slice slice{};
  slice.num_src = call.places;
  slice.local_src = call.place;
  slice.divisor = average && integer ? inv.group_size : 1u;
  slice.scale_all = average && !integer;
  slice.scaled_src = -1;
  slice.op = inv.op;
  slice.scale = call.scale;
  return slice;
}

__device__ __forceinline__ LaneTransport transport_of(const StreamCall& call, std::uint32_t lane) {
  LaneTransport t;
  t.shape = call.shape;
  t.bases = call.all_bases != nullptr ? call.all_bases : call.bases;
  t.windows = call.windows;
  t.noted_windows = call.noted_windows;
  t.rooms = call.rooms;
  t.rank = call.rank;
  t.lane = lane;
  return t;
}

}  // namespace in_stream
}  // namespace unjam
