// A short call in a stream without the engine: packets to and from peers, and nothing else. Most of
// the time of such a call is what an engine does to be able to leave it and come back; here it is
// tried straight from the kernel's arguments, with the same connectors, flags and credits, so peers
// cannot tell. One side may be here and the other in its engine, in each lane.
//
// Block b does what the call's lane b, from SoloCall::first_lane on, has to do. "lane" is one of
// the rank's below; reports are by the call's.
//
// Plan: one that plan/lower.cc gives to packets of one hop (solo_one_shot.cuh) or two
// (solo_two_shot.cuh), or to slots (solo_stream.cuh), all built of what is here. Each block does
// what its lane has to do:
//   takes the lane's lease, looks whether all that it needs is there, sends, copies the own data,
//   receives, tells peers (credits, pokes), reports, and gives the lease back.
// What a block cannot do soon it leaves to the engine: the lane is driven by another instance, a
// connector is not open, a former use of the key is not complete, a packet does not come.
//
// Reports: solo_reports.h. What is not done is handed to the engine, each lane with the primitives
// that it has behind it (CudaRank::handed); one block serves until the call has ended, the
// others have left, and their lanes are driven as all that nobody drives.
//
// Redo (of one hop; two shots: solo_two_shot.cuh). A lane that gives up has done nothing, or all in
// front of the primitive that receives.
//   It has sent: the steps are posted, the engine does not send again. A peer that has read them
//   gives its credit as ever. Until the engine accepts the call nothing says that the key uses its
//   connectors (LaneKey::in_queue), so they may be taken over: those are drained, and no primitive
//   behind the first one sends (of packets; slices that follow do so on the next connector).
//   It has copied its own data: where input and output overlap, these are the same bytes at the
//   same place, or the input is not read again (no primitive behind reads it but a reduction, which
//   has no copy).
//   It has received in part: `consumed` stands where it stood, so all packets are there for the
//   engine. A reduction has stored nothing, each thread keeps its results until the vote: in place
//   they would overwrite its input. Other kinds store what has come at once. Nobody reads the input
//   behind that (it was sent, and copied), and the engine stores the same bytes again.
#pragma once

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/kernels/solo_reports.h"

namespace unjam {
namespace solo {

using cuda_leaves::kUnitBytes;
using cuda_leaves::Raw;

// How long a block waits for its lane's lease where its holder has nothing to do. (A daemon that is
// in the way takes 20 us and more to leave. A call that does not wait for that long goes to the
// engine, which asks for the daemon that the next call finds: lab/nccl-notes.md, "Four GPUs".)
inline constexpr std::uint64_t kLeaseNs = 60000;
// CudaRank::holding is a hint, and late: a driver clears its bit a pass or two behind the last
// invocation's end, which is when the next call comes. For so long it is not believed.
inline constexpr std::uint64_t kHintNs = 6000;

// How often is looked for room, and for a packet before a peer is poked. (Room as often as packets:
// who only sends runs ahead, and then waits for the same late rank as who waits for its packets.)
inline constexpr std::uint32_t kRoomPolls = kSoloPolls, kPokePolls = 32;

// Ahead of the stream's turn, see look_in_time(): how long what the call needs is waited for (who
// has the lease may be a call that has yet to move its last slices, four of 18 us each among four
// ranks), and how long it is held, in the first place the lease: for less than others wait for it.
inline constexpr std::uint64_t kAheadNs = 80000, kHeldAheadNs = 40000;
static_assert(kHeldAheadNs < kLeaseNs);
inline constexpr std::uint32_t kRoomPollsAhead = 2;

// What a thread has under way at once.
inline constexpr int kRow = 2;
static_assert(kSoloUnits % kRow == 0 && kSoloUnitBytes == kUnitBytes);

struct Shared {
  char* from[kSoloRanks];
  char* to[kSoloRanks];
  char* later_from[kSoloRanks];  // of the connectors' next steps, where a call makes two
  char* later_to[kSoloRanks];
  std::uint32_t poke;        // a value for peers' words; so are the next ones
  std::uint32_t later_poke;  // of the second hop
  std::uint32_t ok;
  std::uint32_t hopeless;  // no use in waiting for packets. Stored once, read while polling
  std::uint32_t waited;    // it is the stream's turn. The same
  std::uint32_t serves;
  std::uint32_t close;  // nothing in front is waited for but leases, see CallInFront
};

// The first warp sees to members, the lease and the call; the others move data, each thread units
// `hands()` apart. (If the first warp did, too, its loads would wait for what it looks at.)
__device__ __forceinline__ bool is_mover() { return threadIdx.x >= kSoloControl; }
__device__ __forceinline__ std::uint32_t hand() { return threadIdx.x - kSoloControl; }
__device__ __forceinline__ std::uint32_t hands() { return blockDim.x - kSoloControl; }

// Packets are looked for in rounds; true: not again.
__device__ __forceinline__ bool is_hopeless(const Shared& s) {
  return *static_cast<const volatile std::uint32_t*>(&s.hopeless) != 0;
}

// By movers: it is the stream's turn from here on.
__device__ __forceinline__ void wait_and_say_so(Shared& s) {
  wait_for_stream();
  if (hand() == 0) *static_cast<volatile std::uint32_t*>(&s.waited) = 1;
}
// By the first warp.
__device__ __forceinline__ bool has_waited(const Shared& s) {
  return __any_sync(0xffffffffu, *static_cast<const volatile std::uint32_t*>(&s.waited) != 0) != 0;
}

// A place of a message is what a thread has of it at once: of packets a unit, of lines a word (see
// leaf_access.cuh), which is a unit, or the line's flags.
__device__ __forceinline__ std::uint32_t places_of(const SoloCall& call, std::uint32_t bytes) {
  return call.lines ? line_places(bytes) : (bytes + kUnitBytes - 1) / kUnitBytes;
}

// This block's stretch of the messages. Threads have places of theirs, or of those of several
// messages one behind the other, `threads` apart.
struct Stretch {
  const char* input;
  char* output;
  std::uint32_t bytes;  // of each message
  std::uint32_t places;
};

// A place's data, in a stretch of so many bytes.
struct Unit {
  std::uint32_t at;
  std::uint32_t bytes;  // 0: flags, or behind the end
};
__device__ __forceinline__ Unit unit_of(const SoloCall& call, std::uint32_t bytes,
                                        std::uint32_t place) {
  if (call.lines) {
    return {cuda_leaves::line_data_at(place), cuda_leaves::line_data_bytes(place, bytes)};
  }
  const std::uint32_t at = place * kUnitBytes;
  return {at, at >= bytes ? 0 : bytes - at < kUnitBytes ? bytes - at : kUnitBytes};
}
__device__ __forceinline__ std::uint32_t around(const SoloCall& call, std::uint32_t q) {
  return q >= call.places ? q - call.places : q;
}
__device__ __forceinline__ bool among(const SoloCall& call, std::uint32_t q, std::uint32_t first,
                                      std::uint32_t members) {
  if (q >= call.places) return false;
  return (q >= first ? q - first : q + call.places - first) < members;
}

// User memory. What is short of a unit, or not aligned to it, is rare: out of the way, for a call's
// time is also that of fetching its instructions.
inline __device__ __noinline__ std::uint64_t load_some(const char* from, unsigned bytes) {
  const Raw<2> raw = cuda_leaves::load_unit(from, bytes);
  return raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32;
}
inline __device__ __noinline__ void store_some(char* to, std::uint64_t x, unsigned bytes) {
  const Raw<2> raw{{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
  cuda_leaves::store_unit(to, raw, bytes);
}
__device__ __forceinline__ Raw<2> load_user(const char* from, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(from, kUnitBytes)) {
    return cuda_leaves::load_aligned<2>(from);
  }
  if (bytes == 0) return {};
  const std::uint64_t x = load_some(from, bytes);
  return {{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
}
__device__ __forceinline__ void store_user(char* to, const Raw<2>& raw, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(to, kUnitBytes)) {
    cuda_leaves::store_aligned(to, raw);
  } else if (bytes != 0) {
    store_some(to, raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32, bytes);
  }
}

// Place `index` of those of several messages.
struct Item {
  std::uint32_t message;
  std::uint32_t place;
};
__device__ __forceinline__ Item item_of(const Stretch& w, std::uint32_t index, bool several) {
  const std::uint32_t message = several ? index / w.places : 0;
  return {message, index - message * w.places};
}

// ---- packets and lines, at their slot ----

// The threads that have a line, of which this is one. Wherever they decide something they do so
// together: places are whole lines, and movers whole warps.
__device__ __forceinline__ std::uint32_t line_mask() {
  constexpr std::uint32_t kThreads = cuda_leaves::kLineThreads;
  return ((1u << kThreads) - 1) << (threadIdx.x & 31 & ~(kThreads - 1));
}
__device__ __forceinline__ bool all_of(const SoloCall& call, bool x) {
  return call.lines ? __all_sync(line_mask(), x) != 0 : x;
}
__device__ __forceinline__ bool any_of(const SoloCall& call, bool x) {
  return call.lines ? __any_sync(line_mask(), x) != 0 : x;
}

__device__ __forceinline__ void store_place(const SoloCall& call, char* slot, std::uint32_t place,
                                            const Raw<2>& x, std::uint64_t flag) {
  if (!call.lines) {
    return cuda_leaves::store_packet_unit(slot + 2 * kUnitBytes * place, x, flag);
  }
  const Raw<2> word = cuda_leaves::bears_flags(place) ? cuda_leaves::line_flags(flag) : x;
  __syncwarp(line_mask());  // lines are stored in one instruction
  cuda_leaves::store_line_word(slot + kWordBytes * place, word);
}
// In front of load_place()s: lines are loaded in one instruction, as they are stored.
__device__ __forceinline__ void load_together(const SoloCall& call) {
  if (call.lines) __syncwarp(line_mask());
}
// What is there, to be looked at by has_come(): behind the loads of all other places, for who looks
// at what one brings waits for it, and so does the next.
__device__ __forceinline__ cuda_leaves::PacketUnit load_place(const SoloCall& call,
                                                              const char* slot,
                                                              std::uint32_t place) {
  if (!call.lines) return cuda_leaves::load_packet_unit(slot + 2 * kUnitBytes * place);
  return {{cuda_leaves::load_packet_word(slot + kWordBytes * place), {}}};
}
// Whether it has come, as far as this thread can tell, and what.
__device__ __forceinline__ bool has_come(const SoloCall& call, const cuda_leaves::PacketUnit& found,
                                         std::uint32_t place, std::uint64_t flag, Raw<2>& x) {
  if (!call.lines) {
    x = cuda_leaves::data_of(found);
    return cuda_leaves::has_flag(found, flag);
  }
  x = {{found.word[0].data, found.word[0].flag}};
  return !cuda_leaves::bears_flags(place) || cuda_leaves::is_flags(x, flag);
}

// What of a call movers do in one go: those of the engine send of several calls, then receive.
enum class Half { kBoth, kSends, kReceives };

// ---- sending ----

__device__ __forceinline__ std::uint32_t items_to_send(const SoloCall& call, const Stretch& w) {
  if (call.num_sent == 0) return 0;
  return call.scatters ? w.places * call.num_sent : w.places;
}

__device__ __forceinline__ void load_items(const SoloCall& call, const Stretch& w,
                                           std::uint32_t begin, Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + hand() + h * hands();
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t block =
        call.scatters ? around(call, call.first_sent + item.message) * call.block_bytes : 0;
    const Unit unit = unit_of(call, w.bytes, item.place);
    x[h] = load_user(w.input + call.sent_from + block + unit.at, unit.bytes);
  }
}

__device__ __forceinline__ void send_items(const SoloCall& call, const Stretch& w, const Shared& s,
                                           std::uint32_t begin, const Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + hand() + h * hands();
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t end = call.scatters ? item.message + 1 : call.num_sent;
#pragma unroll 1
    for (std::uint32_t i = item.message; i < end; ++i) {
      const std::uint32_t q = around(call, call.first_sent + i);
      store_place(call, s.to[q], item.place, x[h], call.flag);
    }
  }
}

// `first`: the first row, loaded before. The next one is under way while one is sent.
__device__ __forceinline__ void send_all(const SoloCall& call, const Stretch& w, const Shared& s,
                                         Raw<2> (&first)[kRow]) {
  const std::uint32_t items = items_to_send(call, w), step = kRow * hands();
#pragma unroll 1
  for (std::uint32_t begin = 0; begin < items; begin += step) {
    Raw<2> next[kRow];
    load_items(call, w, begin + step, next);
    send_items(call, w, s, begin, first);
#pragma unroll
    for (int h = 0; h < kRow; ++h) first[h] = next[h];
  }
}

// ---- the own data ----

template <int kUnits>
__device__ __forceinline__ void load_own(const SoloCall& call, const Stretch& w,
                                         std::uint32_t begin, Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    const Unit unit = unit_of(call, w.bytes, begin + hand() + h * hands());
    x[h] = {};
    if (unit.bytes == 0) continue;
    x[h] = load_user(w.input + call.own_from + unit.at, unit.bytes);
  }
}

template <int kUnits>
__device__ __forceinline__ void store_own(const SoloCall& call, const Stretch& w, std::uint32_t to,
                                          std::uint32_t begin, const Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    const Unit unit = unit_of(call, w.bytes, begin + hand() + h * hands());
    if (unit.bytes != 0) store_user(w.output + to + unit.at, x[h], unit.bytes);
  }
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
__device__ __forceinline__ Member member_of(const SoloCall& call, const Stretch& w,
                                            std::uint32_t thread = threadIdx.x) {
  Member m;
  m.q = thread % kSoloRanks;
  m.part = thread / kSoloRanks;
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
__device__ __forceinline__ OutEndpoint* out_endpoint(const SoloCall& call, const Member& m,
                                                     std::uint32_t lane) {
  return call.out + lane * call.shape.ranks + call.ranks[m.q];
}
__device__ __forceinline__ InEndpoint* endpoint_of(const SoloCall& call, const Member& m,
                                                   std::uint32_t lane) {
  if (m.part == kOutgoing) return reinterpret_cast<InEndpoint*>(out_endpoint(call, m, lane));
  return call.in + lane * call.shape.ranks + call.ranks[m.q];
}

// Of a peer whose packet has not come for a while: it may have been called beside its streams, and
// be asleep until it hears that something has come for it. By the first mover, whose units are
// awaited if any are. It has not seen what the others have sent; as of the last pokes,
// tell_peers(), peers look again. `value`: another one each time.
__device__ __forceinline__ void poke_early(CudaRank& r, const SoloCall& call, std::uint32_t lane,
                                           std::uint32_t value) {
  if (hand() != 0 || call.num_sent == 0) return;
  fence_system();
  for (std::uint32_t i = 0; i < call.num_sent; ++i) {
    const std::uint32_t peer = call.members[around(call, call.first_sent + i)];
    store_system(r.pokes[peer][lane], value);
  }
}

// ---- receiving: what is copied ----

__device__ __forceinline__ bool receive_copies(CudaRank& r, const SoloCall& call, const Stretch& w,
                                               std::uint32_t lane, const Shared& s) {
  const std::uint32_t items = w.places * (call.collects ? call.num_received : 1);
#pragma unroll 1
  for (std::uint32_t begin = 0; begin + hand() < items; begin += kRow * hands()) {
    const char* from[kRow];
    char* to[kRow];
    std::uint32_t place[kRow], bytes[kRow];
    Raw<2> x[kRow];
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      const std::uint32_t index = begin + hand() + h * hands();
      from[h] = nullptr;
      bytes[h] = 0;
      if (index >= items) break;
      const Item item = item_of(w, index, call.collects);
      const std::uint32_t q = around(call, call.first_received + item.message);
      const Unit unit = unit_of(call, w.bytes, item.place);
      from[h] = s.from[q];
      place[h] = item.place;
      to[h] = w.output + call.received_to + (call.collects ? q * call.block_bytes : 0) + unit.at;
      bytes[h] = unit.bytes;
    }
    bool all = false;
    for (std::uint32_t polls = 0; !all && polls < call.most_polls; ++polls) {
      if (polls == kPokePolls) poke_early(r, call, lane, s.poke);
      if (any_of(call, is_hopeless(s))) break;
      cuda_leaves::PacketUnit found[kRow];
      load_together(call);
#pragma unroll
      for (int h = 0; h < kRow; ++h) {
        if (from[h] != nullptr) found[h] = load_place(call, from[h], place[h]);
      }
      all = true;
#pragma unroll
      for (int h = 0; h < kRow; ++h) {
        if (from[h] != nullptr) all &= has_come(call, found[h], place[h], call.flag, x[h]);
      }
      all = all_of(call, all);
    }
    if (!all) return false;
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      if (bytes[h] != 0) store_user(to[h], x[h], bytes[h]);
    }
  }
  return true;
}

// ---- receiving: what is reduced ----

// A row's units of every member, by group rank. All members at once: their packets are looked for
// together.
template <int kUnits>
struct Row {
  Raw<2> raw[kSoloRanks][kUnits];
};

template <int kUnits>
__device__ __forceinline__ bool collect_row(CudaRank& r, const SoloCall& call, const Stretch& w,
                                            std::uint32_t lane, const Shared& s,
                                            std::uint32_t begin, const Raw<2> (&own)[kUnits],
                                            Row<kUnits>& row) {
  for (std::uint32_t polls = 0; polls < call.most_polls; ++polls) {
    if (polls == kPokePolls) poke_early(r, call, lane, s.poke);
    if (any_of(call, is_hopeless(s))) break;
    bool all = true;
#pragma unroll
    for (int h = 0; h < kUnits; ++h) {
      const std::uint32_t place = begin + hand() + h * hands();
      const bool there = place < w.places;
      cuda_leaves::PacketUnit found[kSoloRanks];
      load_together(call);
#pragma unroll
      for (int q = 0; q < static_cast<int>(kSoloRanks); ++q) {
        if (q >= call.places || q == call.place || !there) continue;
        found[q] = load_place(call, s.from[q], place);
      }
#pragma unroll
      for (int q = 0; q < static_cast<int>(kSoloRanks); ++q) {
        row.raw[q][h] = own[h];
        if (q >= call.places || q == call.place || !there) continue;
        all &= has_come(call, found[q], place, call.flag, row.raw[q][h]);
      }
    }
    if (all_of(call, all)) return true;
  }
  return false;
}

// For reduce_pieces() of the leaves, which makes the bits: the same as the engine's.
template <int kUnits>
struct RowAccess {
  Row<kUnits>& row;
  Raw<2> (&result)[kUnits];
  static constexpr int kBatch = cuda_leaves::kPacketBatch;
  static_assert(kSoloRanks == 2 * kBatch);
  __device__ __forceinline__ void load(int, Raw<2> (&x)[kBatch][kUnits]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int h = 0; h < kUnits; ++h) {
        x[i][h] = row.raw[i][h];
        row.raw[i][h] = row.raw[kBatch + i][h];
      }
    }
  }
  __device__ __forceinline__ void store(const Raw<2> (&x)[kUnits]) {
#pragma unroll
    for (int h = 0; h < kUnits; ++h) result[h] = x[h];
  }
};

template <DType dtype, int kUnits>
__device__ __forceinline__ void reduce_row(const cuda_leaves::Slice& slice, Row<kUnits>& row,
                                           Raw<2> (&result)[kUnits]) {
  RowAccess<kUnits> access{row, result};
  cuda_leaves::reduce_pieces<dtype, 2, kUnits, RowAccess<kUnits>::kBatch>(slice, access);
}

template <int kUnits>
__device__ __forceinline__ void reduce_row_any(DType dtype, const cuda_leaves::Slice& slice,
                                               Row<kUnits>& row, Raw<2> (&result)[kUnits]) {
  cuda_leaves::with_dtype(dtype, [&](auto type) __attribute__((always_inline)) {
    reduce_row<decltype(type)::value>(slice, row, result);
  });
}

// As Engine::build_job() says it of a gather.
__device__ __forceinline__ cuda_leaves::Slice slice_of(const SoloCall& call,
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

// A thread's results: of its j-th place. In memory of the thread: they are looked at once, and a
// loop over registers would be eight times the code.
struct Held {
  Raw<2> unit[kSoloUnits];
};

// Stores nothing. `own`: the own data of the first row. each(begin, results) is told of every
// row's.
template <int kUnits, class Each>
__device__ __forceinline__ bool receive_reduction(CudaRank& r, const SoloCall& call,
                                                  const Invocation& inv, const Stretch& w,
                                                  std::uint32_t lane, const Shared& s,
                                                  Raw<2> (&own)[kUnits], Held& held, Each each) {
  static_assert(kSoloUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const std::uint32_t step = kUnits * hands();
#pragma unroll 1
  for (std::uint32_t begin = 0, k = 0; begin < w.places; begin += step, ++k) {
    // Under way while packets are looked for.
    Raw<2> next[kUnits];
    load_own(call, w, begin + step, next);
    Row<kUnits> row;
    if (!collect_row(r, call, w, lane, s, begin, own, row)) return false;
    Raw<2> result[kUnits];
    reduce_row_any(inv.geometry.dtype, slice, row, result);
    each(begin, result);
#pragma unroll
    for (int h = 0; h < kUnits; ++h) held.unit[k * kUnits + h] = result[h], own[h] = next[h];
  }
  return true;
}

__device__ __forceinline__ void store_reduction(const SoloCall& call, const Stretch& w,
                                                const Held& held) {
#pragma unroll 1
  for (std::uint32_t place = hand(), j = 0; place < w.places; place += hands(), ++j) {
    const Unit unit = unit_of(call, w.bytes, place);
    if (unit.bytes != 0) {
      store_user(w.output + call.received_to + unit.at, held.unit[j], unit.bytes);
    }
  }
}

// ---- leases and reports, by one thread ----

__device__ __forceinline__ void ring_launcher(CudaRank& r) {
  store_system(r.link->residency.rung, 1u);
}

// After the lane's lease was given back, by a read-modify-write that acquires (`lanes`: what
// CudaRank::lanes was then): who waits in the lane, or was given to it meanwhile, was not
// announced, for the lane had a driver.
__device__ __forceinline__ void see_to_lane(CudaRank& r, const SoloCall& call, std::uint32_t lane,
                                            std::uint64_t lanes) {
  bool needy = (lanes >> (lane + 32) & 1) != 0;
  if (lane != 0) {
    // Whoever fills the mailbox then looks who drives the lane, see CudaDev::settle(): before we
    // gave it back, so this sees the mail, or behind that. (Nobody but its driver fills the first
    // lane's.)
    needy = needy || !call.mailboxes[lane].looks_empty();
  }
  if (needy) ring_launcher(r);
}

// The key may be used again, once all lanes have what they waited for. This says nothing of the
// results, which may not be stored yet: what the lanes have stored for later drivers is released
// with their leases, the call's buffers belong to its stream, and who asks for its end looks at
// `completed` or the CQ.
__device__ __forceinline__ void free_key(const CudaLaunch& launch) {
  store_relaxed_local(launch.sqe.inv.key->done, launch.sqe.inv.turn + 1);
}

// Behind a fence of this thread, which is behind all that the call has stored in any lane: each of
// these is a release with it, for this device. (A fence at system scope would take 1 us more. What
// comes of the entry on the host is work for this device, or a look at memory of the host that the
// kernel has stored to, for which a host waits for the stream.) The entry may be seen before the
// rest; so `completed`, which belongs to the slot, and with the entry to whoever gets it next, only
// grows. `at`: place in the CQ, which is ours.
__device__ __forceinline__ void end_call(CudaRank& r, const CudaLaunch& launch, std::uint64_t at) {
  max_relaxed(r.completed[launch.slot], launch.serial);
  add_relaxed(r.solo_calls, 1);
  RingCq& cq = r.rank.cq;
  // As in LaneTransport::slot_of().
  const std::uint64_t i =
      at >> 32 == 0 ? static_cast<std::uint32_t>(at) % cq.capacity : at % cq.capacity;
  store_system(cq.words[i],
               (at + 1) << 24 | static_cast<std::uint64_t>(Outcome::kDone) << 16 | launch.slot);
}

// Says for the engine which lanes have how much behind them.
__device__ __forceinline__ void hand_over(CudaRank& r, const CudaLaunch& launch,
                                          std::uint64_t word) {
  const SoloCall& call = launch.solo;
  HandOver* handed = r.handed + launch.slot * r.rank.num_lanes + call.first_lane;
  for (std::uint32_t l = 0; l < call.lanes; ++l) {
    const auto report = static_cast<Report>(word >> (kReportBits * l) & 3);
    // (None, or, of calls of several stages, what each lane has said itself.)
    if (report == kBegun && call.before != 0) {
      handed[l].set_primitives_done(call.before);
      handed[l].stage = Stage::kLeft;
    }
    if (report == kDone) handed[l].stage = Stage::kDone;
  }
}

// A block's call, for ReportSteps.
struct ReportingCall {
  CudaRank& r;
  const CudaLaunch& launch;
  const bool keeps = false;  // the next call's blocks from coming before this block's end
  const std::uint32_t lanes = launch.solo.lanes, lane = blockIdx.x;

  __device__ __forceinline__ std::uint64_t add_report(std::uint64_t by) const {
    return fetch_add_relaxed(*launch.solo.reports, by);
  }
  __device__ __forceinline__ std::uint64_t add_last_report(std::uint64_t by) const {
    return fetch_add_acq_rel(*launch.solo.reports, by);
  }
  __device__ __forceinline__ std::uint64_t add_stored(std::uint64_t by) const {
    return fetch_add_relaxed(*launch.solo.stored, by);
  }
  __device__ __forceinline__ void say_place(std::uint64_t by) const {
    add_relaxed(*launch.solo.stored, by);
  }
  __device__ __forceinline__ void await_stored(std::uint64_t n) const {
    while (load_acquire_local(*launch.solo.stored) != n) {
    }
  }
  __device__ __forceinline__ void clear() const {
    store_relaxed_local(*launch.solo.reports, std::uint64_t{0});
    store_relaxed_local(*launch.solo.stored, std::uint64_t{0});
  }
  __device__ __forceinline__ void fence() const { fence_local(); }
  __device__ __forceinline__ std::uint64_t take_place() const {
    return fetch_add_relaxed(r.rank.cq.tail, 1);
  }
  __device__ __forceinline__ void free_key() const { solo::free_key(launch); }
  __device__ __forceinline__ void let_next_begin() const {
    if (!keeps) unjam::let_next_begin();
  }
  // Others may wait for this end in their queues: whoever drives a lane looks at `readied`, and
  // with it sees that the key is free (decide(), and the fences; its acquire). Who leaves one with
  // something in it says so in CudaRank::lanes, then looks once more. So it sees this, or we see
  // that, whoever comes second in that word (both acquire and release), see CudaDev::settle().
  __device__ __forceinline__ void end(std::uint64_t at) const {
    add_relaxed(r.readied, 1);
    end_call(r, launch, at);
    const std::uint64_t word = or_lanes(r, 0);
    if ((word >> 32 & ~word) != 0) ring_launcher(r);
  }
  __device__ __forceinline__ void end_lane(std::uint64_t at) const {
    end_call(r, launch, at);  // give_back() says the rest
  }
  __device__ __forceinline__ void hand_over(std::uint64_t word) const {
    solo::hand_over(r, launch, word);
  }
};

// The lane's lease, which another instance has. If that has nothing to do (it is a daemon, or a
// block as this one that is just through), it soon lets go: a daemon's first lane sees that lanes
// are wanted, and all leave (CudaDev::in_the_way()). To wait for that is worth it, because a call
// that goes to the engine instead needs four times as long, and may leave a daemon behind that the
// next call finds. Not for long, so that whatever the holder is, nobody waits for us in vain.
inline __device__ __noinline__ bool await_lease(CudaRank& r, std::uint32_t lane) {
  const std::uint64_t begun = global_ns();
  const std::uint64_t bit = std::uint64_t{1} << lane;
  for (std::uint64_t now = begun; now - begun < kLeaseNs; now = global_ns()) {
    const bool held = load_relaxed_local(r.holding) != 0 && now - begun > kHintNs;
    if (held || CudaDev::submissions_go_on(r, now)) return false;
    store_relaxed_local(r.wanted_ns, now);
    __nanosleep(200);
    // Acquire: as below.
    if ((load_relaxed_local(r.lanes) & bit) == 0 && (or_lanes(r, bit) & bit) == 0) return true;
  }
  return false;
}

// By the first warp: the lane's lease (`leased`, of the thread that sees to it: it was taken), and
// whether the key's former invocation is complete. `patient`: waits for the lease.
__device__ __forceinline__ bool take_lane(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                          bool patient, bool& leased) {
  bool ok = true;
  if (threadIdx.x == kLeaser || threadIdx.x == kFormer) {
    // Acquire: the lane's state, and with it the key's endpoints, as the last driver left them; and
    // (a read-modify-write that changes nothing) that the key's former invocation is complete on
    // all lanes (KeyState::done).
    const bool leaser = threadIdx.x == kLeaser;
    const std::uint64_t bit = leaser ? std::uint64_t{1} << lane : 0;
    std::uint64_t& word = leaser ? r.lanes : launch.sqe.inv.key->done;
    const std::uint64_t found = fetch_or_acquire(word, bit);
    ok = leaser ? (found & bit) == 0 : found == launch.sqe.inv.turn;
    if (leaser && !ok && patient) ok = await_lease(r, lane);
    leased = leaser && ok;
  }
  const bool all = __all_sync(0xffffffffu, ok) != 0;
  __syncwarp();  // all are behind what was acquired
  return all;
}

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
__device__ __forceinline__ bool look_at_member(const SoloCall& call, const LaneTransport& t,
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
       !in && ok && known.count + to_send - known.credit > call.shape.escape_slots; ++polls) {
    ok = polls != (patient ? kRoomPolls : kRoomPollsAhead);
    known.credit = load_acquire(known.cell->consumed);
  }
  if (!ok) return false;
  // Of what comes in, that is where it was last expected. Whether the peer has that connector
  // yet is looked at while it is awaited, see look_again(): a flag is one step's of one
  // invocation, so what carries it is the slice.
  unsigned char* place = t.escape_slot_of(steps, known.count);
  (in ? s.from : s.to)[m.q] = reinterpret_cast<char*>(place);
  if constexpr (kSteps == 2) {
    place = t.escape_slot_of(steps, known.count + (in ? to_take : to_send) - 1);
    (in ? s.later_from : s.later_to)[m.q] = reinterpret_cast<char*>(place);
  }
  return true;
}

// Behind take_lane(), by the first warp: what the lease covers, the connectors. Leaves places in
// `s`. kSteps: packets that the call sends each peer. `patient`: waits for room.
template <std::uint32_t kSteps>
__device__ __forceinline__ bool look(CudaRank& r, const SoloCall& call, const LaneTransport& t,
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
__device__ __forceinline__ bool look_at_member_again(const SoloCall& call, const LaneTransport& t,
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
__device__ __forceinline__ bool look_again(CudaRank& r, const SoloCall& call,
                                           const LaneTransport& t, const Stretch& w, Known& known,
                                           Shared& s) {
  const Member m = member_of(call, w);
  if (m.part == kOutgoing && (m.to || m.from)) known.poke_at = &r.pokes[m.peer][t.lane];
  return look_at_member_again(call, t, m, known, s);
}

// The host has said something since the rank began: whether it was about this call. If so the
// engine must know, too: of a call that has nothing left to do it looks once only.
inline __device__ __noinline__ bool is_cancelled(CudaRank& r, const CudaLaunch& launch,
                                                 std::uint32_t attention) {
  LeavingSteps::tell_lanes(r, attention);
  if (load_relaxed(r.rank.cancelled[launch.slot]) != 0) return true;
  return is_any_gone(*r.link, launch.sqe.members, launch.sqe.inv.group_size);
}

// What a lane of a call does last. When all its threads have what they waited for:
//   first warp   tell_peers(): endpoints, credits, pokes
//   the others   store what they have kept; kCounter counts; kCaller reports, and decides
// and behind the next barrier, each behind a fence of its own:
//   kCaller      say_how_far(): what follows from the reports
//   kLast        give_back(): the lease
// (A stream's lane that is done: its first warp reports, decides, tells and counts, and who
// publishes pokes, in front of one barrier, see run_solo_stream().) A driver that has the lease
// behind us is behind our credits, too: it stores later ones to the same words later.
inline constexpr std::uint32_t kCaller = 32, kLast = 64, kCounter = 96, kListener = 96;
static_assert(kLeastThreads > kCounter);

// `taken`: packets that were received of each peer; `posted`: sent. No fence is in front of what is
// stored at peers (one takes a microsecond or two):
//   Credits say that packets were read. Each thread that has read some has seen their flags in what
//   its loads have brought, or (of lines) has used what they brought when its warp had seen them,
//   and came to the block's barrier behind that; nothing that is stored now can be in those loads.
//   (So do GPUs work: a value that was branched on has come. To PTX's model loads in front of a
//   store are ordered by a fence only. The other side, who reads a credit and overwrites, relies on
//   the same.) Pokes say that packets were stored, and on their way to the host they may overtake
//   those. So a launcher that was poked looks more than once, see CudaDaemon::run_launcher().
// A thread's part. Returns whether the member is to be poked.
__device__ __forceinline__ bool tell_member(const SoloCall& call, const LaneTransport& t,
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
__device__ __forceinline__ void tell_peers(CudaRank& r, const SoloCall& call,
                                           const LaneTransport& t, const Stretch& w,
                                           std::uint32_t taken, std::uint32_t posted,
                                           const Known& known, const Shared& s) {
  const std::uint32_t poke = s.poke + kSteps;  // poke_early() has had those before
  const bool pokes = tell_member(call, t, member_of(call, w), taken, posted, known);
  if (pokes) store_system(*known.poke_at, poke);
  if (threadIdx.x == 0) r.poke_counts[t.lane] = poke;  // whether or not somebody is poked
}

// By one thread, behind a barrier behind all that the block has done in the lane. `done`: so is the
// lane.
__device__ __forceinline__ void give_back(CudaRank& r, const SoloCall& call, std::uint32_t lane,
                                          bool done) {
  const std::uint64_t bit = std::uint64_t{1} << lane;
  const bool single = call.lanes == 1;
  // Release, with what follows: the lane's state, also what peers are told; and, of a call of one
  // lane, that its key may be used again. Acquire: see_to_lane().
  fence_local();
  std::uint64_t lanes = fetch_and_acquire(r.lanes, ~bit);
  if (!single || !done) return see_to_lane(r, call, lane, lanes);
  // Others may wait for the call's end in their queues. Who leaves a lane with something in it says
  // so in CudaRank::lanes, then looks at `readied`; who takes one acquires that word. So if nobody
  // drives another lane and nothing was left in one as this one is given back, nobody needs to hear
  // of it: who comes later sees the end.
  if ((lanes & ~bit) != 0) {
    // As ReportingCall::end().
    add_relaxed(r.readied, 1);
    lanes = or_lanes(r, 0);
  }
  // Left with something, with nobody there; or so while we drove it.
  const std::uint32_t driven = static_cast<std::uint32_t>(lanes) & ~static_cast<std::uint32_t>(bit);
  if ((static_cast<std::uint32_t>(lanes >> 32) & ~driven) != 0) return ring_launcher(r);
  see_to_lane(r, call, lane, lanes);
}

// By all threads, as run_solo_one_shot() returns: something that the block needs is not there.
__device__ __forceinline__ bool leave_untried(CudaRank& r, const CudaLaunch& launch,
                                              std::uint32_t lane, bool leased, Shared& s) {
  const SoloCall& call = launch.solo;
  if (threadIdx.x == kLeaser) {
    if (leased) see_to_lane(r, call, lane, clear_lanes(r, std::uint64_t{1} << lane));
    const ReportingCall reporting{r, launch};
    const std::uint64_t word = ReportSteps::give_up(reporting, kUntried);
    if (word != 0) ReportSteps::bring_to_engine(reporting, word, false);
    s.serves = word != 0 ? 1 : 0;
  }
  sync_block();
  return s.serves != 0;
}

// By all threads, as soon as it is known whether the lane is done. For finish(), which it is told.
__device__ __forceinline__ Ending begin_end(CudaRank& r, const CudaLaunch& launch, bool done) {
  if (threadIdx.x != kCaller || !done) return {};
  return ReportSteps::begin_end(ReportingCall{r, launch});
}

// The same, and what finish() decides, by one thread of a lane that waits for no peer any more,
// while the block is still busy with its end. So the next call's blocks come meanwhile, unless it
// keeps them. keeps(): is looked at while the report is under way; of a call of one lane it is not.
template <class Keeps>
__device__ __forceinline__ Ending report_early(CudaRank& r, const CudaLaunch& launch, Shared& s,
                                               Keeps keeps) {
  Ending ending = ReportSteps::begin_end(ReportingCall{r, launch});
  const ReportingCall reporting{r, launch, keeps()};
  s.serves = ReportSteps::decide(reporting, ending) ? 1 : 0;
  return ending;
}

// By one thread, behind a barrier behind all that the block has done. `serves`: decide()'s. True:
// this block serves.
__device__ __forceinline__ bool say_how_far(const ReportingCall& call, bool done, Ending ending,
                                            bool serves) {
  if (!done) {
    ending.reports = ReportSteps::give_up(call, kBegun);
    serves = ending.reports != 0;
  }
  if (serves) {
    ReportSteps::bring_to_engine(call, ending.reports, done);
  } else if (done) {
    ReportSteps::finish_lane(call, ending);
  }
  return serves;
}

// The last of it, by all threads, behind a barrier behind all that the block has done. True: it
// goes on to serve.
__device__ __forceinline__ bool leave(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                      bool done, Ending& ending, Shared& s) {
  // Of a lane that is done it is known here. A block that does not serve leaves, each of its
  // threads when it is through.
  const bool serves = done && s.serves != 0;
  if (threadIdx.x == kCaller) {
    const bool says = say_how_far(ReportingCall{r, launch}, done, ending, serves);
    if (!done) s.serves = says ? 1 : 0;
  }
  if (threadIdx.x == kLast) give_back(r, launch.solo, lane, done);
  if (done && !serves) return false;
  sync_block();
  return s.serves != 0;
}

// The end of a block's part of a call, by all threads, behind all that each has done.
// count(stats): adds to the lane's figures, which are its driver's. True: it goes on to serve.
template <class Count>
__device__ __forceinline__ bool finish(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                       bool done, Ending& ending, Shared& s, Count count) {
  if (threadIdx.x == kCounter) count(r.rank.lanes[lane].stats);
  if (threadIdx.x == kCaller && done) {
    s.serves = ReportSteps::decide(ReportingCall{r, launch}, ending) ? 1 : 0;
  }
  sync_block();
  return leave(r, launch, lane, done, ending, s);
}

__device__ __forceinline__ LaneTransport transport_of(const SoloCall& call, std::uint32_t lane) {
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

// By the first warp: take_lane() and look(), and the wait for the stream's turn, in which most of
// that passes: what the call needs is usually held by the call in front of it, which lets go of it
// as it ends. Touched are unjam's own words alone, each with the acquire that it wants anyhow.
// What is in front may also be anybody's kernel, which has let us begin early and then runs on, or
// even waits for something that wants this lane. So ahead of its turn this call waits for nothing
// for long, and holds the lease only with all else that it needs, and not for long either. (A
// `close` one, see CallInFront, begins as soon as it has both.)
// looks(patient): look(), or what another kind of call looks at.
enum class Looked : std::uint32_t { kInVain, kAhead, kAtItsTurn };
template <class Looks>
__device__ __forceinline__ Looked look_in_time(CudaRank& r, const CudaLaunch& launch,
                                               std::uint32_t lane, bool& leased, const Shared& s,
                                               bool close, Looks looks) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const std::uint64_t begun = global_ns();
  const auto let_go = [&] {
    if (leased) see_to_lane(r, launch.solo, lane, clear_lanes(r, std::uint64_t{1} << lane));
    leased = false;
    __syncwarp();
  };
  for (bool ahead = true;;) {
    const bool taken = take_lane(r, launch, lane, !ahead, leased);
    const bool ok = taken && looks(!ahead);
    if (!ahead) return ok ? Looked::kAtItsTurn : Looked::kInVain;
    if (ok && close) return Looked::kAhead;
    if (!ok) let_go();
    const std::uint64_t since = ok ? global_ns() : begun, longest = ok ? kHeldAheadNs : kAheadNs;
    bool turn = has_waited(s), again = false;
    // (Of a close call nobody says that its turn has come.)
    const bool waits_there = close && taken;
    while (!turn && !again && !waits_there) {
      if (__any_sync(kAll, global_ns() - since > longest) != 0) break;
      if (!taken) {
        // Whether another try is worth it.
        __nanosleep(50);
        bool there = true;
        if (threadIdx.x == kLeaser) {
          there = (load_relaxed_local(r.lanes) >> lane & 1) == 0;
        } else if (threadIdx.x == kFormer) {
          there = load_relaxed_local(launch.sqe.inv.key->done) == launch.sqe.inv.turn;
        }
        again = __all_sync(kAll, there) != 0;
      }
      turn = has_waited(s);
    }
    if (again) continue;
    if (ok && !turn) let_go();
    wait_for_stream();
    if (ok && turn) return Looked::kAtItsTurn;
    ahead = false;
  }
}

// By all threads, first: what owes nothing to the stream. Ends with a barrier; the wait for the
// stream's turn comes behind it. Returns, to kListener, what the host has said
// (CudaLink::attention), for one lane: that is enough to send a call to the engine, which knows
// what to do about cancellations. (It takes a while, over PCIe.)
__device__ __forceinline__ std::uint32_t approach(CudaRank& r, const CudaLaunch& launch,
                                                  const Stretch& w, std::uint32_t lane, Shared& s) {
  const SoloCall& call = launch.solo;
  std::uint32_t attention = 0;
  if (threadIdx.x == 0) s.hopeless = s.serves = s.waited = 0;
  if (threadIdx.x < 2 * kSoloRanks) {
    const Member m = member_of(call, w);
    if (m.q < call.places) find_way(endpoint_of(call, m, lane));
  }
  if (threadIdx.x == kListener && blockIdx.x == 0) attention = load_relaxed(*call.attention);
  if (threadIdx.x == kLeaser) find_way(&r.lanes);
  if (threadIdx.x == kFormer) find_way(&launch.sqe.inv.key->done);
  sync_block();
  return attention;
}

}  // namespace solo
}  // namespace unjam
