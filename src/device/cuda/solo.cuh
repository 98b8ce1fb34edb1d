// A short call in a stream without the engine: packets to and from peers, and nothing else. Most of
// the time of such a call is what an engine does to be able to leave it and come back; here it is
// tried straight from the kernel's arguments, with the same connectors, flags and credits, so peers
// cannot tell. One side may be here and the other in its engine, in each lane.
//
// Plan: one of plan/direct.cc whose lanes make one loop each. Block b does what lane b has to do:
//   takes the lane's lease, looks whether all that it needs is there, sends, copies the own data,
//   receives, publishes (endpoints, credits, pokes), gives the lease back, and reports.
// What a block cannot do soon it leaves to the engine: the lane is driven by another instance, a
// connector is not open, a former use of the key is not complete, a packet does not come.
//
// Reports. CudaRank::solo_reports has a word a slot, in it a Report a lane; 0: none yet. The block
// whose report completes the word decides for all. If every lane is done it ends the call, as the
// last lane does in the engine. Else it hands the call to the engine, each lane with the primitives
// that it has behind it (CudaRank::first_primitive), and serves until the call has ended; the
// others have left, and their lanes are driven as all that nobody drives. The word is zero again
// before the slot can be another call's: its completion comes after.
//
// Redo. A lane that gives up has done nothing, or all in front of the primitive that receives.
//   It has sent: the steps are posted, the engine does not send again. A peer that has read them
//   gives its credit as ever. Until the engine accepts the call nothing says that the key uses its
//   connectors (LaneKey::in_queue), so they may be taken over: those are drained, and no primitive
//   behind the first one sends.
//   It has copied its own data: where input and output overlap, these are the same bytes at the
//   same place, or the input is not read again (no primitive behind reads it but a reduction, which
//   has no copy).
//   It has received in part: `consumed` stands where it stood, so all packets are there for the
//   engine. A reduction has stored nothing, each thread keeps its results until the vote: in place
//   they would overwrite its input. Other kinds store what has come at once. Nobody reads the input
//   behind that (it was sent, and copied), and the engine stores the same bytes again.
#pragma once

#include "device/cuda/cuda_dev.cuh"
#include "device/cuda/rank_state.h"

namespace unjam {
namespace solo {

using cuda_leaves::kUnitBytes;
using cuda_leaves::Raw;

// How far a lane has come.
enum Report : std::uint32_t { kUntried = 1, kBegun = 2, kDone = 3 };
inline constexpr std::uint32_t kReportBits = 2;
static_assert(kReportBits * kMaxLanes <= 64);

// How long a block waits for its lane's lease where its holder has nothing to do.
inline constexpr std::uint64_t kLeaseNs = 20000;

// How often is looked for a packet, and for room. A look takes most of a microsecond.
inline constexpr std::uint32_t kPolls = 512, kRoomPolls = 128;

// What a thread has under way at once.
inline constexpr int kRow = 2;
static_assert(kSoloUnits % kRow == 0);

struct Kept {
  std::uint64_t count;  // posted, or consumed, before this call
  std::uint32_t connector;
};
struct Shared {
  char* from[kSoloRanks];
  char* to[kSoloRanks];
  Kept kept[2 * kSoloRanks];  // of the threads that see to members
  std::uint64_t lanes;        // CudaRank::lanes as the lease was given back
  std::uint64_t reports;      // that this block's has found
  std::uint32_t poke;
  std::uint32_t ok;
  std::uint32_t serves;
};

// This block's stretch of the messages. Threads have units of theirs, or of those of several
// messages one behind the other, `threads` apart.
struct Stretch {
  const char* input;
  char* output;
  std::uint32_t bytes;  // of each message
  std::uint32_t units;
};

__device__ __forceinline__ unsigned unit_bytes(const Stretch& w, std::uint32_t at) {
  const std::uint32_t left = w.bytes - at;
  return left < kUnitBytes ? left : kUnitBytes;
}
__device__ __forceinline__ std::uint32_t around(const SoloCall& call, std::uint32_t q) {
  return q >= call.group_size ? q - call.group_size : q;
}
__device__ __forceinline__ bool among(const SoloCall& call, std::uint32_t q, std::uint32_t first,
                                      std::uint32_t members) {
  if (q >= call.group_size) return false;
  return (q >= first ? q - first : q + call.group_size - first) < members;
}

// User memory. What is short of a unit, or not aligned to it, is rare: out of the way, for a call's
// time is also that of fetching its instructions.
__device__ __noinline__ std::uint64_t load_some(const char* from, unsigned bytes) {
  const Raw<2> raw = cuda_leaves::load_unit(from, bytes);
  return raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32;
}
__device__ __noinline__ void store_some(char* to, std::uint64_t x, unsigned bytes) {
  const Raw<2> raw{{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
  cuda_leaves::store_unit(to, raw, bytes);
}
__device__ __forceinline__ Raw<2> load_user(const char* from, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(from, kUnitBytes)) {
    return cuda_leaves::load_aligned<2>(from);
  }
  const std::uint64_t x = load_some(from, bytes);
  return {{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
}
__device__ __forceinline__ void store_user(char* to, const Raw<2>& raw, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(to, kUnitBytes)) {
    cuda_leaves::store_aligned(to, raw);
  } else {
    store_some(to, raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32, bytes);
  }
}

// Item `index` of several messages' units.
struct Item {
  std::uint32_t message;
  std::uint32_t at;  // its data begin there
};
__device__ __forceinline__ Item item_of(const Stretch& w, std::uint32_t index, bool several) {
  const std::uint32_t message = several ? index / w.units : 0;
  return {message, (index - message * w.units) * kUnitBytes};
}

// ---- sending ----

__device__ __forceinline__ std::uint32_t items_to_send(const SoloCall& call, const Stretch& w) {
  if (call.num_sent == 0) return 0;
  return call.scatters ? w.units * call.num_sent : w.units;
}

__device__ __forceinline__ void load_items(const SoloCall& call, const Stretch& w,
                                           std::uint32_t begin, Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + threadIdx.x + h * blockDim.x;
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t block =
        call.scatters ? around(call, call.first_sent + item.message) * call.block_bytes : 0;
    x[h] = load_user(w.input + call.sent_from + block + item.at, unit_bytes(w, item.at));
  }
}

__device__ __forceinline__ void send_items(const SoloCall& call, const Stretch& w, const Shared& s,
                                           std::uint32_t begin, const Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + threadIdx.x + h * blockDim.x;
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t end = call.scatters ? item.message + 1 : call.num_sent;
#pragma unroll 1
    for (std::uint32_t i = item.message; i < end; ++i) {
      const std::uint32_t q = around(call, call.first_sent + i);
      cuda_leaves::store_packet_unit(s.to[q] + 2 * item.at, x[h], w.bytes - item.at, call.flag);
    }
  }
}

// ---- the own data ----

__device__ __forceinline__ void load_own(const SoloCall& call, const Stretch& w,
                                         std::uint32_t begin, Raw<2> (&x)[kRow]) {
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t unit = begin + threadIdx.x + h * blockDim.x;
    x[h] = {};
    if (unit >= w.units) continue;
    const std::uint32_t at = unit * kUnitBytes;
    x[h] = load_user(w.input + call.own_from + at, unit_bytes(w, at));
  }
}

__device__ __forceinline__ void store_own(const Stretch& w, std::uint32_t to, std::uint32_t begin,
                                          const Raw<2> (&x)[kRow]) {
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t unit = begin + threadIdx.x + h * blockDim.x;
    if (unit >= w.units) break;
    const std::uint32_t at = unit * kUnitBytes;
    store_user(w.output + to + at, x[h], unit_bytes(w, at));
  }
}

// ---- receiving: what is copied ----

__device__ __forceinline__ bool receive_copies(const SoloCall& call, const Stretch& w,
                                               const Shared& s) {
  const std::uint32_t items = w.units * (call.collects ? call.num_received : 1);
#pragma unroll 1
  for (std::uint32_t begin = 0; begin + threadIdx.x < items; begin += kRow * blockDim.x) {
    const char* from[kRow];
    char* to[kRow];
    std::uint32_t left[kRow];
    Raw<2> x[kRow];
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      const std::uint32_t index = begin + threadIdx.x + h * blockDim.x;
      left[h] = 0;
      if (index >= items) break;
      const Item item = item_of(w, index, call.collects);
      const std::uint32_t q = around(call, call.first_received + item.message);
      from[h] = s.from[q] + 2 * item.at;
      to[h] = w.output + call.received_to + (call.collects ? q * call.block_bytes : 0) + item.at;
      left[h] = w.bytes - item.at;
    }
    bool all = false;
    for (std::uint32_t polls = 0; !all && polls < kPolls; ++polls) {
      all = true;
#pragma unroll
      for (int h = 0; h < kRow; ++h) {
        if (left[h] == 0) break;
        const cuda_leaves::PacketUnit p =
            cuda_leaves::load_packet_unit(from[h], left[h], call.flag);
        all &= p.word[0].flag == call.flag;
        all &= p.word[1].flag == call.flag;
        x[h] = {{p.word[0].data, p.word[1].data}};
      }
    }
    if (!all) return false;
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      if (left[h] == 0) break;
      store_user(to[h], x[h], left[h] < kUnitBytes ? left[h] : kUnitBytes);
    }
  }
  return true;
}

// ---- receiving: what is reduced ----

// A row's units of every member, by group rank. All members at once: their packets are looked for
// together.
struct Row {
  Raw<2> raw[kSoloRanks][kRow];
};

__device__ __forceinline__ bool collect_row(const SoloCall& call, const Stretch& w, const Shared& s,
                                            std::uint32_t begin, const Raw<2> (&own)[kRow],
                                            Row& row) {
  for (std::uint32_t polls = 0; polls < kPolls; ++polls) {
    bool all = true;
#pragma unroll
    for (int q = 0; q < static_cast<int>(kSoloRanks); ++q) {
      if (q >= call.group_size) break;
#pragma unroll
      for (int h = 0; h < kRow; ++h) {
        row.raw[q][h] = own[h];
        const std::uint32_t unit = begin + threadIdx.x + h * blockDim.x;
        if (q == call.group_rank || unit >= w.units) continue;
        const std::uint32_t at = unit * kUnitBytes;
        const cuda_leaves::PacketUnit p =
            cuda_leaves::load_packet_unit(s.from[q] + 2 * at, w.bytes - at, call.flag);
        all &= p.word[0].flag == call.flag;
        all &= p.word[1].flag == call.flag;
        row.raw[q][h] = {{p.word[0].data, p.word[1].data}};
      }
    }
    if (all) return true;
  }
  return false;
}

// For reduce_pieces() of the leaves, which makes the bits: the same as the engine's.
struct RowAccess {
  Row& row;
  Raw<2> (&result)[kRow];
  static constexpr int kBatch = cuda_leaves::kPacketBatch;
  static_assert(kSoloRanks == 2 * kBatch);
  __device__ __forceinline__ void load(int, Raw<2> (&x)[kBatch][kRow]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int h = 0; h < kRow; ++h) {
        x[i][h] = row.raw[i][h];
        row.raw[i][h] = row.raw[kBatch + i][h];
      }
    }
  }
  __device__ __forceinline__ void store(const Raw<2> (&x)[kRow]) {
#pragma unroll
    for (int h = 0; h < kRow; ++h) result[h] = x[h];
  }
};

template <DType dtype>
__device__ __forceinline__ void reduce_row(const cuda_leaves::Slice& slice, Row& row,
                                           Raw<2> (&result)[kRow]) {
  RowAccess access{row, result};
  cuda_leaves::reduce_pieces<dtype, 2, kRow, RowAccess::kBatch>(slice, access);
}

__device__ __forceinline__ void reduce_row_any(DType dtype, const cuda_leaves::Slice& slice,
                                               Row& row, Raw<2> (&result)[kRow]) {
  switch (dtype) {
    case DType::kInt8:
      return reduce_row<DType::kInt8>(slice, row, result);
    case DType::kUint8:
      return reduce_row<DType::kUint8>(slice, row, result);
    case DType::kInt32:
      return reduce_row<DType::kInt32>(slice, row, result);
    case DType::kUint32:
      return reduce_row<DType::kUint32>(slice, row, result);
    case DType::kInt64:
      return reduce_row<DType::kInt64>(slice, row, result);
    case DType::kUint64:
      return reduce_row<DType::kUint64>(slice, row, result);
    case DType::kFloat16:
      return reduce_row<DType::kFloat16>(slice, row, result);
    case DType::kBfloat16:
      return reduce_row<DType::kBfloat16>(slice, row, result);
    case DType::kFloat32:
      return reduce_row<DType::kFloat32>(slice, row, result);
    case DType::kFloat64:
      return reduce_row<DType::kFloat64>(slice, row, result);
    case DType::kFloat8E4M3:
      return reduce_row<DType::kFloat8E4M3>(slice, row, result);
    case DType::kFloat8E5M2:
      return reduce_row<DType::kFloat8E5M2>(slice, row, result);
  }
}

// As Engine::build_job() says it of a gather.
__device__ __forceinline__ cuda_leaves::Slice slice_of(const SoloCall& call,
                                                       const Invocation& inv) {
  const bool average = inv.op == Op::kAvg;
  const bool integer = is_integer(inv.geometry.dtype);
  cuda_leaves::Slice slice{};
  slice.num_src = call.group_size;
  slice.local_src = call.group_rank;
  slice.divisor = average && integer ? call.group_size : 1u;
  slice.scale_all = average && !integer;
  slice.scaled_src = -1;
  slice.op = inv.op;
  slice.scale = call.scale;
  return slice;
}

// Results of a thread that has more than one row, but the last. In memory of the thread: they are
// looked at once, and a loop over registers would be eight times the code.
struct HeldRows {
  Raw<2> rows[kSoloUnits / kRow - 1][kRow];
};

// Stores nothing: the last row's results are in `x` (before: the own data of the first one).
__device__ __forceinline__ bool receive_reduction(const SoloCall& call, const Invocation& inv,
                                                  const Stretch& w, const Shared& s, HeldRows& held,
                                                  Raw<2> (&x)[kRow]) {
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const std::uint32_t step = kRow * blockDim.x;
#pragma unroll 1
  for (std::uint32_t begin = 0, k = 0;; ++k) {
    Row row;
    if (!collect_row(call, w, s, begin, x, row)) return false;
    Raw<2> result[kRow];
    reduce_row_any(inv.geometry.dtype, slice, row, result);
    begin += step;
    if (begin >= w.units) {
#pragma unroll
      for (int h = 0; h < kRow; ++h) x[h] = result[h];
      return true;
    }
#pragma unroll
    for (int h = 0; h < kRow; ++h) held.rows[k][h] = result[h];
    load_own(call, w, begin, x);
  }
}

__device__ __forceinline__ void store_reduction(const SoloCall& call, const Stretch& w,
                                                const HeldRows& held, const Raw<2> (&x)[kRow]) {
  const std::uint32_t step = kRow * blockDim.x;
  std::uint32_t begin = 0;
#pragma unroll 1
  for (std::uint32_t k = 0; begin + step < w.units; begin += step, ++k) {
    store_own(w, call.received_to, begin, held.rows[k]);
  }
  store_own(w, call.received_to, begin, x);
}

// ---- leases and reports, by one thread ----

__device__ __forceinline__ void ring_launcher(CudaRank& r) {
  store_system(r.link->residency.rung, 1u);
}

// After the lane's lease was given back (`lanes`: what CudaRank::lanes was then): who waits in the
// lane, or was given to it meanwhile, was not announced, for the lane had a driver.
__device__ __forceinline__ void see_to_lane(CudaRank& r, std::uint32_t lane, std::uint64_t lanes) {
  bool needy = (lanes >> (lane + 32) & 1) != 0;
  if (lane != 0) {
    // Whoever fills the mailbox looks then who drives the lane, with such a fence between, see
    // CudaDev::settle(): one of us sees the other. (Nobody but its driver fills the first lane's.)
    fence_total_local();
    needy = needy || !r.rank.mailboxes[lane].empty();
  }
  if (needy) ring_launcher(r);
}

__device__ __forceinline__ std::uint64_t report_word(std::uint32_t lane, Report report) {
  return std::uint64_t{report} << (kReportBits * lane);
}

// What the reports are with this one, which found `before`. 0: some are missing.
__device__ __forceinline__ std::uint64_t all_reports(const SoloCall& call, std::uint64_t before,
                                                     std::uint64_t mine) {
  constexpr std::uint64_t kLow = 0x5555555555555555;
  const std::uint64_t word = before | mine;
  const auto come = static_cast<std::uint32_t>(__popcll((word | word >> 1) & kLow));
  return come == call.lanes ? word : 0;
}

// What the end of a call needs, read ahead.
struct Ending {
  std::uint64_t* completed = nullptr;
  std::uint64_t* cq_word = nullptr;
  std::uint64_t cq_entry = 0;
};

__device__ __forceinline__ void take_cq_place(CudaRank& r, std::uint32_t slot, Ending& ending) {
  RingCq& cq = r.rank.cq;
  const std::uint64_t at = LocalAtomicRef<std::uint64_t>(cq.tail).fetch_add(1, kRelaxed);
  ending.completed = &r.completed[slot];
  ending.cq_word = &cq.words[at % cq.capacity];
  ending.cq_entry = (at + 1) << 24 | static_cast<std::uint64_t>(Outcome::kDone) << 16 | slot;
}

// Behind a fence at system scope of this thread, which is behind all that the call has stored in
// any lane: each of these stores is a release with it.
__device__ __forceinline__ void end_call(CudaRank& r, const CudaLaunch& launch,
                                         const Ending& ending) {
  store_relaxed_local(launch.sqe.inv.key->done, launch.sqe.inv.n + 1);
  store_relaxed_local(*ending.completed, launch.serial);
  store_system(*ending.cq_word, ending.cq_entry);
  atomicAdd(&r.readied, 1u);
  atomicAdd(reinterpret_cast<unsigned long long*>(&r.solo_calls), 1ull);
}

// Decides for all blocks, if this one's report is the last. True: this block hands the call to the
// engine. Behind a fence of this thread, which is behind what the block has done, the report is a
// release.
__device__ __forceinline__ bool decide(CudaRank& r, const CudaLaunch& launch, std::uint64_t before,
                                       std::uint64_t mine) {
  const SoloCall& call = launch.solo;
  Ending ending;
  const std::uint64_t word = all_reports(call, before, mine);
  if (word == 0) return false;
  const std::uint64_t done = ~std::uint64_t{0} >> (64 - kReportBits * call.lanes);
  if (word == done) take_cq_place(r, launch.slot, ending);
  // All have reported, so the word is nobody's. Before the fence: who finds the slot free, behind
  // the completion, finds it zero.
  store_relaxed_local(r.solo_reports[launch.slot], std::uint64_t{0});
  // Acquire: what the other blocks have done, before their reports. And see end_call().
  fence_system();
  if (word == done) {
    end_call(r, launch, ending);
    // Others may wait for that in lanes that nobody drives. Who leaves a lane looks at `readied`
    // then, with such a fence between: one of us sees the other.
    fence_total_local();
    const std::uint64_t lanes = load_relaxed_local(r.lanes);
    if ((lanes >> 32 & ~lanes & 0xffffffff) != 0) ring_launcher(r);
    return false;
  }
  std::uint8_t* first = r.first_primitive + launch.slot * r.rank.num_lanes;
  for (std::uint32_t l = 0; l < call.lanes; ++l) {
    const auto report = static_cast<Report>(word >> (kReportBits * l) & 3);
    if (report == kBegun) first[l] = call.before;
    if (report == kDone) first[l] = static_cast<std::uint8_t>(launch.sqe.inv.num_primitives);
  }
  return true;
}

// Of a lane that nothing was done in.
__device__ __forceinline__ bool report(CudaRank& r, const CudaLaunch& launch, std::uint64_t mine) {
  fence_total_local();
  const std::uint64_t before =
      LocalAtomicRef<std::uint64_t>(r.solo_reports[launch.slot]).fetch_add(mine, kRelaxed);
  return decide(r, launch, before, mine);
}

// ---- the looks, by the first warp ----

// Thread 8 i + q sees to member q; i says in what. Whatever several threads look at, they do so in
// one instruction: branches of a warp would wait for memory one after the other.
enum Part : std::uint32_t {
  kIncoming,  // its packets to us
  kOutgoing,  // ours to it
  kBase,      // the step count at which the owner of its connector to us began
  kNobody,    // of which two are:
};
inline constexpr std::uint32_t kLeaser = 24, kEnder = 25;  // the lease; the end of the call

struct Member {
  std::uint32_t q, part, peer;
  bool to, from;  // whether it is sent to, or received from
};

// A lane without data, as in the engine, sends and receives nothing.
__device__ __forceinline__ Member member_of(const SoloCall& call, const Stretch& w) {
  Member m;
  m.q = threadIdx.x % kSoloRanks;
  m.part = threadIdx.x / kSoloRanks;
  m.to = w.bytes != 0 && among(call, m.q, call.first_sent, call.num_sent);
  m.from = w.bytes != 0 && among(call, m.q, call.first_received, call.num_received);
  m.peer = call.members[m.q];
  return m;
}

// An endpoint of either direction.
static_assert(offsetof(OutEndpoint, posted) == offsetof(InEndpoint, consumed) &&
              offsetof(OutEndpoint, connector) == offsetof(InEndpoint, connector) &&
              sizeof(OutEndpoint) == sizeof(InEndpoint));
__device__ __forceinline__ InEndpoint* endpoint_of(const SoloCall& call, const Member& m,
                                                   std::uint32_t lane) {
  InEndpoint* first = m.part == kOutgoing ? reinterpret_cast<InEndpoint*>(call.out) : call.in;
  return first + lane * call.shape.ranks + m.q;
}

// The lane's lease, which another instance has. If that has nothing to do (it is a daemon, or a
// block as this one that is just through), it soon lets go: a daemon's first lane sees that lanes
// are wanted, and all leave (CudaDev::in_the_way()). To wait for that is worth it, because a call
// that goes to the engine instead needs four times as long, and may leave a daemon behind that the
// next call finds. Not for long, so that whatever the holder is, nobody waits for us in vain.
__device__ __noinline__ bool await_lease(CudaRank& r, std::uint32_t lane) {
  const std::uint64_t begun = global_ns();
  const std::uint64_t bit = std::uint64_t{1} << lane;
  for (std::uint64_t now = begun; now - begun < kLeaseNs; now = global_ns()) {
    if (load_relaxed_local(r.holding) != 0) return false;
    store_relaxed_local(r.wanted_ns, now);
    __nanosleep(200);
    // Acquire: as below.
    if ((load_relaxed_local(r.lanes) & bit) == 0 && (or_lanes(r, bit) & bit) == 0) return true;
  }
  return false;
}

// All that the block needs, in two rounds of looks. Leaves what is found in `s`, and the lease
// taken if it was free (`leased`, of the thread that sees to it).
__device__ __forceinline__ bool look(CudaRank& r, const CudaLaunch& launch, const LaneTransport& t,
                                     const Stretch& w, bool& leased, Shared& s) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const SoloCall& call = launch.solo;
  const std::uint32_t lane = t.lane;
  const Member m = member_of(call, w);
  const bool looks = m.part == kOutgoing ? m.to : m.part != kNobody && m.from;
  InEndpoint* at = endpoint_of(call, m, lane);

  // First round. The endpoints are the lane's driver's, and we may not be that yet: they are read
  // now only to begin the second round with, which reads them again.
  std::uint64_t count = 0;
  std::uint32_t connector = kNoConnector;
  if (looks) {
    count = load_relaxed_local(at->consumed);
    connector = load_relaxed_local(at->connector);
  }
  bool ok = true;
  if (threadIdx.x == kLeaser || threadIdx.x == kEnder) {
    // Acquire: the lane's state, and with it the key's endpoints, as the last driver left them; and
    // (a read-modify-write that changes nothing) that the key's former invocation is complete on
    // all lanes, so its buffers are ours.
    const bool leaser = threadIdx.x == kLeaser;
    const std::uint64_t bit = leaser ? std::uint64_t{1} << lane : 0;
    std::uint64_t& word = leaser ? r.lanes : launch.sqe.inv.key->done;
    cuda_leaves::assume_global(&word);
    const std::uint64_t found = LocalAtomicRef<std::uint64_t>(word).fetch_or(bit, kAcquire);
    ok = leaser ? (found & bit) == 0 : found == launch.sqe.inv.n;
    if (leaser && !ok) ok = await_lease(r, lane);
    leased = leaser && ok;
  }
  ok = (!looks || connector != kNoConnector) && ok;
  if (__all_sync(kAll, ok) == 0) return false;
  __syncwarp();  // all are behind what was acquired

  // Second round.
  std::uint64_t again = 0, found = 0;
  std::uint32_t connector_again = kNoConnector;
  const std::uint32_t poke = load_relaxed_local(r.poke_counts[lane]) + 1;
  if (looks) {
    again = load_relaxed_local(at->consumed);
    connector_again = load_relaxed_local(at->connector);
    std::uint64_t& word = m.part == kIncoming   ? t.tag_word(m.peer, connector)
                          : m.part == kOutgoing ? t.credit_word(m.peer, connector)
                                                : t.base_word(m.peer, connector);
    // Acquire, see tag_word(), credit_word(): the base of this owner, if it is read behind that
    // (see publish()); the peer's reads of what we are to overwrite.
    found = load_acquire(word);
  }
  ok = again == count && connector_again == connector;
  if (!looks) ok = true;
  if (m.part == kIncoming && looks) ok = ok && found == call.tag;
  if (m.part == kOutgoing && looks && ok) {
    // Room may come soon: who sends only is often ahead.
    for (std::uint32_t polls = 1; count - found >= call.shape.escape_slots; ++polls) {
      if (polls == kRoomPolls) {
        ok = false;
        break;
      }
      found = load_acquire(t.credit_word(m.peer, connector));
    }
  }
  __syncwarp();
  const std::uint64_t base = __shfl_sync(kAll, found, kBase * kSoloRanks + m.q);
  // As LaneTransport::resolve() does, but for what publish() says.
  if (m.part == kIncoming && base > count) count = base;
  if (looks && m.part != kBase) {
    const bool in = m.part == kIncoming;
    unsigned char* place =
        t.packet_place(in ? call.rank : m.peer, in ? m.peer : call.rank, connector, count);
    (in ? s.from : s.to)[m.q] = reinterpret_cast<char*>(place);
    s.kept[threadIdx.x] = {count, connector};
  }
  if (threadIdx.x == 0) s.poke = poke;
  return __all_sync(kAll, ok) != 0;
}

// By the first warp, behind a barrier behind all that the block has stored: all that this lane
// tells others, and the report. (What that comes to, of a call of several lanes: decide().)
__device__ __forceinline__ void publish(CudaRank& r, const CudaLaunch& launch,
                                        const LaneTransport& t, const Stretch& w, bool done,
                                        Shared& s) {
  const SoloCall& call = launch.solo;
  const Invocation& inv = launch.sqe.inv;
  const std::uint32_t lane = t.lane;
  const Member m = member_of(call, w);
  const bool single = call.lanes == 1;
  const bool takes = done && m.part == kIncoming && m.from;
  const bool posts = m.part == kOutgoing && m.to;  // the data carried their flags
  const bool pokes = posts || (done && m.part == kOutgoing && m.from);
  // First all that the lane keeps, and what is needed later. Memory is asked for all of it before
  // any of it is used.
  std::uint64_t base = 0;
  std::uint32_t* poke_at = nullptr;
  if (takes) base = load_relaxed(t.base_word(m.peer, s.kept[threadIdx.x].connector));
  if (pokes) poke_at = &r.pokes[m.peer][lane];
  Ending ending;
  if (threadIdx.x == kEnder) {
    r.poke_counts[lane] = s.poke;  // whether or not somebody is poked
    if (done && single) take_cq_place(r, launch.slot, ending);
    if (!done && single) r.first_primitive[launch.slot * r.rank.num_lanes] = call.before;
    LaneStats& stats = r.rank.lanes[lane].stats;
    using Count = unsigned long long;
    const std::uint32_t slices = done ? inv.num_primitives : call.before;
    atomicAdd(reinterpret_cast<Count*>(&stats.slices), Count{slices});
    atomicAdd(reinterpret_cast<Count*>(&stats.bytes_sent), Count{w.bytes} * call.num_sent);
    if (done) atomicAdd(reinterpret_cast<Count*>(&stats.completed), Count{1});
  }
  std::uint64_t count = 0;
  if (takes || posts) {
    // As LaneTransport::resolve(): behind the acquire of the tag the base is this owner's. (What
    // was read beside the tag may have been an earlier one's. Then the packet was not found, or at
    // the place of a step that has the same: the flag says that it is this call's.)
    count = s.kept[threadIdx.x].count;
    if (base > count) count = base;
    ++count;
    endpoint_of(call, m, lane)->consumed = count;
  }
  __syncwarp();
  // One fence a thread is behind all that it publishes: what the block has stored is behind its
  // barrier, what the warp has, behind the one above. With it each relaxed access below is a
  // release, at system scope.
  fence_system();
  if (takes) {
    InEndpoint in;
    in.consumed = count;
    in.connector = s.kept[threadIdx.x].connector;
    const PublishedWord word = t.consumption(m.peer, in);
    store_system(*word.place, word.value);
  }
  if (pokes) store_system(*poke_at, s.poke);
  if (single) {
    if (threadIdx.x == kEnder && done) end_call(r, launch, ending);
    __syncwarp();
    if (threadIdx.x == kLeaser) {
      // Release: also the end of the call (behind the barrier above). Who leaves a lane with
      // something pending says so in the same word, then looks at `readied`: it sees the end, or we
      // what it leaves. (Of a call that has not ended this block goes on to serve the lanes.)
      const std::uint64_t lanes =
          LocalAtomicRef<std::uint64_t>(r.lanes).fetch_and(~(std::uint64_t{1} << lane), kRelease);
      const std::uint32_t driven = static_cast<std::uint32_t>(lanes) & ~(1u << lane);
      if (done && (static_cast<std::uint32_t>(lanes >> 32) & ~driven) != 0) ring_launcher(r);
    }
    return;
  }
  // The lease goes, and the report comes, in one instruction of two threads. (The lease's bit is
  // set, so a subtraction clears it.)
  const std::uint64_t mine = report_word(lane, done ? kDone : kBegun);
  std::uint64_t before = 0;
  if (threadIdx.x == kLeaser || threadIdx.x == kEnder) {
    const bool leaser = threadIdx.x == kLeaser;
    std::uint64_t& word = leaser ? r.lanes : r.solo_reports[launch.slot];
    cuda_leaves::assume_global(&word);
    const std::uint64_t by = leaser ? ~(std::uint64_t{1} << lane) + 1 : mine;
    before = LocalAtomicRef<std::uint64_t>(word).fetch_add(by, kRelaxed);
  }
  if (threadIdx.x == kLeaser) s.lanes = before;
  if (threadIdx.x == kEnder) s.reports = before;
}

}  // namespace solo

// By all threads of a call's block. True: the call is for the engine, and this block brings it.
// False: nothing is left to do for this block.
__device__ __forceinline__ bool run_solo(CudaRank& r, const CudaLaunch& launch) {
  using namespace solo;
  const SoloCall& call = launch.solo;
  const Invocation& inv = launch.sqe.inv;
  __shared__ Shared s;
  const std::uint32_t lane = blockIdx.x;

  // As Geometry::lane_part(), in bytes.
  const std::uint32_t longer = call.longer_lanes;
  const std::uint32_t first = lane * call.lane_pieces + (lane < longer ? lane : longer);
  const std::uint32_t last = first + call.lane_pieces + (lane < longer ? 1 : 0);
  const std::uint32_t begin = first * 16 < call.block_bytes ? first * 16 : call.block_bytes;
  const std::uint32_t end = last * 16 < call.block_bytes ? last * 16 : call.block_bytes;
  const Stretch w{static_cast<const char*>(inv.input) + begin,
                  static_cast<char*>(inv.output) + begin, end - begin,
                  (end - begin + kUnitBytes - 1) / kUnitBytes};

  // This thread's data, first: nothing else is needed for that.
  Raw<2> ahead[kRow] = {}, own[kRow] = {};
  load_items(call, w, 0, ahead);
  if (call.reduces) load_own(call, w, 0, own);

  LaneTransport t;
  t.shape = call.shape;
  t.bases = call.bases;
  t.rank = call.rank;
  t.lane = lane;
  bool leased = false;
  if (threadIdx.x < 32) {
    const bool ok = look(r, launch, t, w, leased, s);
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
  }
  sync_block();
  if (s.ok == 0) {
    if (threadIdx.x == kLeaser) {
      if (leased) {
        const std::uint64_t lanes = clear_lanes(r, std::uint64_t{1} << lane);
        // A single block serves the lane itself.
        if (call.lanes != 1) see_to_lane(r, lane, lanes);
      }
      bool serves = true;
      if (call.lanes != 1) serves = report(r, launch, report_word(lane, kUntried));
      s.serves = serves ? 1 : 0;
    }
    sync_block();
    return s.serves != 0;
  }

  const std::uint32_t items = items_to_send(call, w), step = kRow * blockDim.x;
#pragma unroll 1
  for (std::uint32_t k = 0; k < items; k += step) {
    if (k != 0) load_items(call, w, k, ahead);
    send_items(call, w, s, k, ahead);
  }
  if (call.copies && w.input + call.own_from != w.output + call.own_to) {
#pragma unroll 1
    for (std::uint32_t k = 0; k < w.units; k += step) {
      Raw<2> x[kRow];
      load_own(call, w, k, x);
      store_own(w, call.own_to, k, x);
    }
  }
  bool come = true;
  HeldRows held;
  if (call.reduces) {
    come = receive_reduction(call, inv, w, s, held, own);
  } else if (call.num_received != 0) {
    come = receive_copies(call, w, s);
  }
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;
  if (done && call.reduces) store_reduction(call, w, held, own);
  sync_block();
  if (threadIdx.x < 32) publish(r, launch, t, w, done, s);
  if (call.lanes == 1) return !done;
  sync_block();
  // What is left takes some looks each: in two warps, so that neither waits for the other.
  if (threadIdx.x == kEnder) {
    const std::uint64_t mine = report_word(lane, done ? kDone : kBegun);
    s.serves = decide(r, launch, s.reports, mine) ? 1 : 0;
  }
  if (threadIdx.x == blockDim.x - 1) see_to_lane(r, lane, s.lanes);
  sync_block();
  return s.serves != 0;
}

}  // namespace unjam
