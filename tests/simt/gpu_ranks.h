// Ranks whose GPUs are tests/simt's machine: their memory is CudaDaemon's RankMemory, and calls are
// launched as there. Of one group, in which group ranks are ranks. For a translation unit that has
// included kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/host/bind.h"
#include "device/cuda/host/rank_memory.h"
#include "engine/copy_server.h"
#include "engine/set_plan.h"
#include "plan/lower.h"
#include "plan/registry.h"
#include "plan/selector.h"
#include "tests/simt/machine.h"

namespace unjam {

// As the other tests' seeds.
inline std::uint64_t base_seed() {
  const char* const text = std::getenv("UNJAM_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

// Zeroed, and freed with the object. What nobody touches costs nothing, which arenas need: they are
// large.
class Memory {
 public:
  template <class T>
  T* take(std::size_t count) {
    constexpr std::size_t kAlign = 4096;
    const std::size_t bytes = std::max<std::size_t>(count, 1) * sizeof(T);
    auto* const block = static_cast<unsigned char*>(std::calloc(bytes + kAlign, 1));
    if (block == nullptr) std::abort();
    blocks_.emplace_back(block, &std::free);
    const std::size_t over = reinterpret_cast<std::uintptr_t>(block) % kAlign;
    return reinterpret_cast<T*>(block + (over == 0 ? 0 : kAlign - over));
  }

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};

// What in truth is memory of the host, which a GPU reads over PCIe: kernels may look at it now and
// then, no more (with some that did so all the time everything else on the GPU waited).
struct HostMemory {
  struct Stretch {
    const unsigned char *begin, *end;
  };
  std::vector<Stretch> stretches;
  std::uint64_t looks = 0;
  void look(const void* at) {
    const auto* const p = static_cast<const unsigned char*>(at);
    for (const Stretch& x : stretches) looks += p >= x.begin && p < x.end ? 1 : 0;
  }
};
inline HostMemory host_memory;

// Who carries out copies that lanes ask for, see CopyRing.
enum class Copies {
  kNone,    // plans are not marked
  kPrompt,  // as soon as it can
  kSlow,    // one after the other, each some time after it was claimed
  kStalls,  // now and then for longer than lanes wait: what it has claimed comes late
  kStuck,   // never
};

struct GpuShape {
  std::uint32_t ranks = 2, lanes = 1;
  std::uint32_t slots = 8, keys = 8;
  std::uint32_t connectors = 8, guaranteed_slots = 4, guaranteed_slot_bytes = 1024;
  std::uint32_t pool_slots = 16;
  std::uint32_t patience_us = 1000;
  std::uint32_t overlap = 1;  // as UNJAM_OVERLAP
  Copies copies = Copies::kNone;
  std::uint32_t copy_patience_us = 200;
  unsigned threads = 256;  // as UNJAM_BLOCK_THREADS: a multiple of 64
};

// A collective, and what all ranks are about to find.
struct GpuCall {
  std::uint32_t key = 0;
  std::uint64_t n = 0;  // use of the key
  Kind kind = Kind::kAllReduce;
  std::uint64_t count = 0;
  DType dtype = DType::kInt32;
  Op op = Op::kSum;
  int root = 0;
  std::optional<Algorithm> algorithm;
  bool in_place = false;
  std::vector<Plan> plans;
  std::vector<std::shared_ptr<const Lowered>> lowered;
  std::vector<std::vector<std::int32_t>> inputs, outputs;  // as words, of whichever type
};

// Copy engines as a host's thread has them, whose copies come to be done when the test says: each
// in the order in which it was given, and nothing of it before.
class FakeCopyEngines : public CopyEngines {
 public:
  FakeCopyEngines(std::uint64_t* done, std::uint32_t ranks) : done_(done), queues_(ranks) {}
  bool issue(std::uint32_t peer, const std::vector<CopyRows>& copies, std::uint64_t done) override {
    for (const CopyRows& c : copies) {
      for (std::uint32_t i = 0; i < c.rows; ++i) {
        const CopyPost row{c.source + i * c.source_pitch, c.target + i * c.target_pitch, c.bytes};
        queues_[peer].push_back({row, 0, false});
      }
    }
    queues_[peer].push_back({{}, done, true});
    return true;
  }
  std::uint64_t in_flight(std::uint32_t peer) override { return queues_[peer].size() / 4; }
  // The next thing, to the peer. False: there is none.
  bool step(std::uint32_t peer) {
    if (queues_[peer].empty()) return false;
    const Thing x = queues_[peer].front();
    queues_[peer].pop_front();
    if (x.counts) {
      done_[peer] = x.done;
    } else {
      std::memcpy(reinterpret_cast<void*>(x.copy.target),
                  reinterpret_cast<const void*>(x.copy.source), x.copy.bytes);
    }
    return true;
  }

 private:
  struct Thing {
    CopyPost copy;
    std::uint64_t done;
    bool counts;
  };
  std::uint64_t* const done_;
  std::vector<std::deque<Thing>> queues_;
};

class GpuRanks {
 public:
  explicit GpuRanks(const GpuShape& shape) : shape_(shape) {
    host_memory.stretches.clear();
    ArenaShape arena;
    arena.ranks = shape.ranks;
    arena.lanes = shape.lanes;
    arena.connectors = shape.connectors;
    arena.guaranteed_slots = shape.guaranteed_slots;
    arena.guaranteed_slot_bytes = shape.guaranteed_slot_bytes;
    arena.pool_slots = shape.pool_slots;
    arena.pool_slot_bytes = shape.guaranteed_slot_bytes;
    arena.derive();
    CudaRankOptions options;
    options.shape = arena;
    options.slots = shape.slots;
    options.keys = shape.keys;
    options.trace_events = 0;
    for (std::uint32_t r = 0; r < shape.ranks; ++r) {
      options.bases.push_back(memory_.take<unsigned char>(arena.total_bytes()));
      auto* const link = new (memory_.take<CudaLink>(1)) CudaLink;
      options.links.push_back(link);
      const auto* const bytes = reinterpret_cast<const unsigned char*>(link);
      host_memory.stretches.push_back({bytes, bytes + sizeof(CudaLink)});
      members_.push_back(static_cast<std::uint16_t>(r));
    }
    for (std::uint32_t r = 0; r < shape.ranks; ++r) {
      options.rank = r;
      options.windows = memory_.take<WindowEntry>(std::size_t{shape.ranks} * kWindows);
      make(options);
    }
  }

  CudaRank& rank(std::uint32_t r) { return *ranks_[r]->rank; }
  const GpuShape& shape() const { return shape_; }
  const LaneStats& stats(std::uint32_t r, std::uint32_t lane) {
    return rank(r).rank.lanes[lane].stats;
  }

  // Plans and data. "" or what is wrong.
  std::string prepare(GpuCall& call) const {
    PlanRequest request;
    request.kind = call.kind;
    request.dtype = call.dtype;
    request.op = call.op;
    request.count = call.count;
    request.ranks = static_cast<int>(shape_.ranks);
    request.root = call.root;
    PlanLimits limits;
    limits.device = Device::kCuda;
    limits.lanes = static_cast<std::uint16_t>(shape_.lanes);
    limits.guaranteed_slots = shape_.guaranteed_slots;
    limits.guaranteed_slot_bytes = shape_.guaranteed_slot_bytes;
    limits.pool_slot_bytes = shape_.guaranteed_slot_bytes;
    limits.lines = true;
    limits.overlap = shape_.overlap != 0;
    limits.together = shape_.overlap == 2;
    if (shape_.copies != Copies::kNone) {
      limits.carried_lanes = static_cast<std::uint16_t>(shape_.lanes);
    }
    for (std::uint32_t r = 0; r < shape_.ranks; ++r) {
      request.rank = static_cast<int>(r);
      std::string error;
      std::optional<Plan> plan = make_plan(request, limits, call.algorithm, &error);
      if (!plan) return error;
      call.plans.push_back(*std::move(plan));
      const LowerLimits lower_limits{shape_.threads, shape_.lanes, true, shape_.patience_us,
                                     shape_.guaranteed_slot_bytes};
      call.lowered.push_back(std::make_shared<const Lowered>(
          lower(call.plans[r], request.ranks, request.rank, lower_limits)));
      const std::size_t blocks = shape_.ranks;
      const bool wide_input = call.kind == Kind::kReduceScatter || call.kind == Kind::kAllToAll;
      const bool wide_output = call.kind == Kind::kAllGather || call.kind == Kind::kAllToAll;
      const auto words = [&](std::size_t elements) {
        return (elements * dtype_bytes(call.dtype) + 3) / 4;
      };
      std::vector<std::int32_t>& input =
          call.inputs.emplace_back(words((wide_input ? blocks : 1) * call.count));
      for (std::size_t i = 0; i < input.size(); ++i) {
        input[i] = word_of(call.dtype, mix64(hash_combine(call.key * 7919 + r, i)));
      }
      call.outputs.emplace_back(words((wide_output ? blocks : 1) * call.count), -1);
      if (call.in_place && has_input(request, request.rank)) {
        std::copy(input.begin(), input.end(), call.outputs.back().begin() + own_words(call, r));
      }
    }
    return "";
  }

  using CallKernel = void (*)(CudaRank*, CudaLaunch);
  using EngineKernel = void (*)(CudaRank*, EngineLaunch);

  // The rank's kernel of the call, behind another one. `without_engine`: it tries it without the
  // engine; `carried` is the kernel then if copy engines move some of it.
  const unjam_simt::Launch* launch(unjam_simt::Machine& machine, CallKernel kernel,
                                   const GpuCall& call, const unjam_simt::Launch* behind,
                                   std::uint32_t r, bool without_engine,
                                   CallKernel carried = nullptr) {
    Rank& of = *ranks_[r];
    auto launched = std::make_unique<CudaLaunch>();
    CudaLaunch& l = *launched;
    const Invocation inv = invocation(call, r);
    put(inv, of, call.n == 0, l.sqe);
    l.slot = inv.slot;
    l.serial = inv.serial;
    if (without_engine) {
      bind(*call.lowered[r], inv, l.call);
      of.memory.address(inv, l.call);
      l.sqe.inv.batch = batch_of(*call.lowered[r], l.call);
      if (l.call.by_slots && l.call.steps.carried) kernel = carried;
    }
    const Geometry& g = inv.geometry;
    const unsigned threads = l.call.lanes != 0 ? call.lowered[r]->threads : shape_.threads;
    const unsigned blocks = l.call.lanes == 0 && g.first_lane != 0 ? g.lanes + 1u : g.lanes;
    const CudaLaunch* const arguments = launched.get();
    launches_.push_back(std::move(launched));
    return machine.launch(
        blocks, threads, [=, rank = of.rank] { kernel(rank, *arguments); }, behind);
  }

  // ---- beside streams, as CudaDaemon has it ----

  bool has_room(std::uint32_t r) const { return !ranks_[r]->free_slots.empty(); }
  void submit(const GpuCall& call, std::uint32_t r) {
    Rank& of = *ranks_[r];
    const Invocation inv = invocation(call, r);
    CudaSubmission& place = of.submissions[of.sq_written % shape_.slots];
    place = CudaSubmission{};
    put(inv, of, call.n == 0, place.sqe);
    if (call.n != 0 && call.lowered[r]->why == NeedsEngine::kNo) {
      bind(*call.lowered[r], inv, place.call);
      of.memory.address(inv, place.call);
    }
    place.sqe.inv.batch = batch_of(*call.lowered[r], place.call);
    CudaLink& link = *of.rank->link;
    link.sq_written = ++of.sq_written;
    if (ResidencySteps::post(link.residency)) of.posted = true;
  }
  // What its launcher does in one round.
  void launcher(unjam_simt::Machine& machine, EngineKernel kernel, std::uint32_t r) {
    Rank& of = *ranks_[r];
    HostLink& h = of.rank->link->residency;
    if (h.resident != 0 || h.queued != 0) return;
    std::uint64_t pokes = 0;
    for (std::uint32_t p = 0; p < shape_.ranks; ++p) {
      for (std::uint32_t l = 0; l < shape_.lanes; ++l) pokes += of.rank->link->pokes[p][l];
    }
    const bool waits = of.sq_written != of.cq_read;
    const bool asked = of.posted || h.rung != 0 || (waits && pokes != of.poked);
    if (!asked || !ResidencySteps::should_launch(h)) return;
    of.posted = false;
    of.poked = pokes;
    const EngineLaunch launch{EngineKind::kDaemon, 0, ++of.daemons,
                              static_cast<std::uint32_t>(of.daemons % 2)};
    of.daemon = machine.launch(
        shape_.lanes, shape_.threads, [=, rank = of.rank] { kernel(rank, launch); }, of.daemon);
  }

  // The host takes what has ended. How many.
  std::uint32_t take_ended(std::uint32_t r) {
    Rank& of = *ranks_[r];
    std::uint32_t ended = 0;
    for (;; ++ended) {
      const std::uint64_t word = of.rank->rank.cq.words[of.cq_read % shape_.slots];
      if (word >> 24 != of.cq_read + 1) return ended;
      const auto slot = static_cast<std::uint16_t>(word);
      of.outcomes[of.calls[slot]] = static_cast<Outcome>(word >> 16 & 0xff);
      of.free_slots.push_back(slot);
      ++of.cq_read;
    }
  }
  std::uint64_t daemons(std::uint32_t r) const { return ranks_[r]->daemons; }
  // Of a call that was taken.
  Outcome outcome(const GpuCall& call, std::uint32_t r) const {
    return ranks_[r]->outcomes.at(&call);
  }

  // What the thread of rank r that carries out copies does next.
  void carry_out(std::uint32_t r, std::uint64_t draw) {
    Rank& of = *ranks_[r];
    // (It is called at steps, and makes such: others' go on between its own.)
    if (shape_.copies == Copies::kNone || shape_.copies == Copies::kStuck || of.serves) return;
    of.serves = true;
    carry_some(of, draw);
    of.serves = false;
  }
  // Posts that were carried out so far, and that were not.
  std::uint64_t copies(std::uint32_t r) const { return ranks_[r]->server->posts(); }
  std::uint64_t taken_back(std::uint32_t r) const { return ranks_[r]->rank->copies.taken_back; }

  // ---- what a host says, as CudaDaemon has it ----

  void say_gone(std::uint32_t r, std::uint32_t gone) {
    CudaLink& link = *rank(r).link;
    link.gone[gone / 64] |= std::uint64_t{1} << gone % 64;
    link.attention += 2;
  }
  void cancel(const GpuCall& call, std::uint32_t r) {
    const std::vector<const GpuCall*>& calls = ranks_[r]->calls;
    const auto at = std::find(calls.begin(), calls.end(), &call);
    rank(r).rank.cancelled[at - calls.begin()] = 1;
    rank(r).link->attention += 2;
  }

  // What rank r must find, of sums of integers, or their maxima; "": that.
  std::string check(const GpuCall& call, std::uint32_t r) const {
    const auto sum = [&](std::size_t i) {
      std::int32_t x = call.inputs[0][i];
      for (std::size_t q = 1; q < call.inputs.size(); ++q) {
        const std::int32_t next = call.inputs[q][i];
        x = call.op == Op::kMax ? std::max(x, next) : x + next;
      }
      return x;
    };
    const std::vector<std::int32_t>& out = call.outputs[r];
    const std::size_t n = call.count;
    for (std::size_t i = 0; i < out.size(); ++i) {
      std::int32_t expected = out[i];
      switch (call.kind) {
        case Kind::kAllReduce:
          expected = sum(i);
          break;
        case Kind::kReduce:
          if (static_cast<int>(r) == call.root) expected = sum(i);
          break;
        case Kind::kBroadcast:
          expected = call.inputs[static_cast<std::size_t>(call.root)][i];
          break;
        case Kind::kAllGather:
          expected = call.inputs[i / n][i % n];
          break;
        case Kind::kReduceScatter:
          expected = sum(r * n + i);
          break;
        case Kind::kAllToAll:
          expected = call.inputs[i / n][r * n + i % n];
          break;
        default:
          return "no such kind here";
      }
      if (out[i] != expected) {
        return "rank " + std::to_string(r) + ", element " + std::to_string(i) + ": " +
               std::to_string(out[i]) + " instead of " + std::to_string(expected);
      }
    }
    return "";
  }

 private:
  // Numbers of that type, so that what is added up is rounded, and differently in another order.
  static std::int32_t word_of(DType dtype, std::uint64_t draw) {
    if (dtype == DType::kInt32) return static_cast<std::int32_t>(draw % 100'000);
    const auto bits = [](std::uint64_t x) {
      return std::bit_cast<std::uint32_t>(static_cast<float>(x % 20'011) / 7 - 1000);
    };
    if (dtype == DType::kFloat32) return static_cast<std::int32_t>(bits(draw));
    return static_cast<std::int32_t>(bits(draw) >> 16 | (bits(draw >> 32) & 0xffff0000));  // bf16
  }

  struct Rank;
  void carry_some(Rank& of, std::uint64_t draw) const {
    const auto peer = static_cast<std::uint32_t>(draw >> 8) % shape_.ranks;
    if (of.stalls != 0) {
      --of.stalls;
      return;
    }
    const bool is_slow = shape_.copies != Copies::kPrompt;
    if (!is_slow || draw % 4 == 0) of.server->sweep(*of.engines);
    if (shape_.copies == Copies::kStalls && draw % 64 == 1) of.stalls = draw >> 32 & 0x3ff;
    if (of.stalls != 0 || (is_slow && draw % 3 != 0)) return;
    while (of.engines->step(peer) && !is_slow) {
    }
  }

  struct Rank {
    explicit Rank(const CudaRankOptions& o) : options(o), memory(options) {}
    const CudaRankOptions options;
    RankMemory memory;
    CudaRank* rank = nullptr;
    std::vector<std::uint16_t> free_slots;
    std::vector<const GpuCall*> calls;  // by slot
    std::map<const GpuCall*, Outcome> outcomes;
    std::uint64_t serials = 0, cq_read = 0;
    CudaSubmission* submissions = nullptr;
    std::uint64_t sq_written = 0, poked = 0, daemons = 0;
    bool posted = false;
    const unjam_simt::Launch* daemon = nullptr;
    std::unique_ptr<CopyServer> server;
    std::unique_ptr<FakeCopyEngines> engines;
    std::uint64_t stalls = 0;  // so many steps more
    bool serves = false;
  };

  void make(const CudaRankOptions& options) {
    Rank& of = *ranks_.emplace_back(std::make_unique<Rank>(options));
    of.submissions = memory_.take<CudaSubmission>(shape_.slots);
    void* const bytes = memory_.take<unsigned char>(of.memory.bytes());
    auto* const copies = memory_.take<CopyRing>(shape_.ranks);
    const auto* const begin = reinterpret_cast<const unsigned char*>(copies);
    host_memory.stretches.push_back({begin, begin + shape_.ranks * sizeof(CopyRing)});
    of.memory.place(bytes, {static_cast<CudaLink*>(options.links[options.rank]), of.submissions,
                            memory_.take<std::uint64_t>(shape_.slots),
                            memory_.take<std::uint32_t>(shape_.slots), copies});
    of.memory.fill([](void* to, const void* from, std::size_t n) {
      std::memcpy(to, from, n);
      return true;
    });
    const CudaKeys& keys = of.memory.keys();
    for (std::uint64_t i = 0; i < std::uint64_t{keys.count} * keys.lanes; ++i) set_up_key(keys, i);
    of.rank = of.memory.rank();
    of.rank->copies.patience_ns = std::uint64_t{shape_.copy_patience_us} * 1000;
    of.server =
        std::make_unique<CopyServer>(copies, shape_.ranks, options.shape.pool_bytes(), 8192);
    of.engines = std::make_unique<FakeCopyEngines>(of.memory.copies_done(), shape_.ranks);
    of.calls.resize(shape_.slots);
    for (std::uint32_t s = shape_.slots; s-- > 0;) {
      of.free_slots.push_back(static_cast<std::uint16_t>(s));
    }
  }

  // In place: from the beginning of the output, where the rank's input lies.
  static std::ptrdiff_t own_words(const GpuCall& call, std::uint32_t r) {
    const std::uint64_t elements = call.kind == Kind::kAllGather ? r * call.count : 0;
    return static_cast<std::ptrdiff_t>(elements * dtype_bytes(call.dtype) / 4);
  }
  // Of whom the call reads something.
  static bool has_input(const PlanRequest& request, int rank) {
    return request.kind != Kind::kBroadcast || rank == request.root;
  }

  std::uint64_t tag(std::uint32_t key) const { return mix64(key + 17) | 1; }

  Invocation invocation(const GpuCall& call, std::uint32_t r) {
    Rank& of = *ranks_[r];
    Invocation inv;
    set_plan(call.plans[r], static_cast<std::uint16_t>(r), &inv);
    inv.members = members_.data();
    inv.key = &of.memory.keys().states[call.key];
    inv.lowered = call.lowered[r].get();
    auto& output = const_cast<std::vector<std::int32_t>&>(call.outputs[r]);
    inv.output = output.data();
    inv.input = call.in_place ? output.data() + own_words(call, r) : call.inputs[r].data();
    inv.n = call.n;
    inv.seed = hash_combine(tag(call.key), call.n);
    inv.serial = ++of.serials;
    inv.group_size = static_cast<std::uint16_t>(shape_.ranks);
    inv.op = call.op;
    inv.slot = of.free_slots.back();
    of.free_slots.pop_back();
    of.calls[inv.slot] = &call;
    return inv;
  }
  void put(const Invocation& inv, Rank& of, bool fresh, CudaSqe& place) const {
    KeyState state;
    state.tag = tag(static_cast<std::uint32_t>(of.memory.place_of(inv.key)));
    state.group = mix64(1) | 1;
    of.memory.put(inv, fresh ? &state : nullptr, place);
  }

  GpuShape shape_;
  Memory memory_;
  std::vector<std::uint16_t> members_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<CudaLaunch>> launches_;
};

}  // namespace unjam
