// What every part of the engine works on: a lane of a rank, and the memory of the block that drives
// it. The parts stand one on another, each in a file of its own, from here up to engine.h; each
// names what it takes from those below it.
//
// All control threads run the parts together. Who may touch which word of BlockShared, and when, is
// said in docs/internals/engine.md; what is "by the lead" below is one thread's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/atomics.h"
#include "base/bits.h"
#include "base/portability.h"
#include "engine/device_contract.h"
#include "engine/doorbell.h"
#include "engine/state.h"

namespace unjam {

// The part of the engine that a member function belongs to.
template <class Function>
struct PartOfFunction;
template <class Part, class Result, class... Args>
struct PartOfFunction<Result (Part::*)(Args...)> {
  using Type = Part;
};
template <class Function>
using PartOf = typename PartOfFunction<Function>::Type;

template <class Dev>
class LaneView {
 public:
  // A reference or a value, as the device likes.
  using DevHandle = typename Dev::Handle;

  UNJAM_HD LaneView(DevHandle dev, RankState& rank, std::uint32_t lane, BlockShared& shared)
      : dev_(dev),
        rank_(rank),
        lane_(Dev::kLaneInShared ? here(shared).lane : rank.lanes[lane]),
        mailbox_(rank.mailboxes[lane]),
        lane_index_(lane),
        s_(here(shared)) {}

 protected:
  // Of shared memory the compiler is to know that it is (if the device can say so).
  UNJAM_HD static BlockShared& here(BlockShared& shared) {
    if constexpr (requires { Dev::here(shared); }) {
      return Dev::here(shared);
    } else {
      return shared;
    }
  }

  static constexpr bool kBatches = kDoesBatches<Dev>;
  static constexpr bool kCarries = kHasCarriers<Dev>;
  static constexpr bool kGates = kHasGates<Dev>;
  static constexpr bool kWide = kIsWide<Dev>;

  // What the lead says, to all.
  UNJAM_HD std::uint32_t tell(std::uint32_t value) {
    if (dev_.leads()) s_.told = value;
    dev_.sync_control();
    const std::uint32_t told = s_.told;
    dev_.sync_control();
    return told;
  }

  // ---- the invocation ----
  UNJAM_HD ActiveContext& active() { return s_.active[s_.slot % kActiveContexts]; }

  // The rank in the job of neighbour k.
  UNJAM_HD static std::uint32_t member(const ActiveContext& a, std::uint32_t k) {
    return a.members[k];
  }

  UNJAM_HD static bool is_wide(const Invocation& inv) { return kWide && inv.wide_peers != nullptr; }

  // Whether flags come with the data (then the block votes on them, and both ends know the
  // length) instead of in slot headers.
  UNJAM_HD static bool inline_flags([[maybe_unused]] const ActiveContext& a) {
    if constexpr (Dev::kInlinePacketFlags) return has_inline_flags(a.inv.protocol);
    return false;
  }

  // Whether this rank lets peers store into its output.
  UNJAM_HD static bool invites(const Invocation& inv) {
    return inv.output_place != 0 && inv.protocol == Protocol::kSlot;
  }

  UNJAM_HD static bool is_pipelined(const Invocation& inv) {
    return inv.batch == kPipelined || inv.batch == kPipelinedIfContended;
  }

  // Whether a lane's part is some quantum's slices at most, roughly: without a division, which
  // takes a GPU a microsecond, and alike whenever it is asked. (Packets of GPUs are one loop.)
  UNJAM_HD bool is_short(const Invocation& inv) const {
    // (A stream is as long as a quantum, however few its slices are: of another that would be
    // interrupted as well, each rank at a moment of its own. So it is for a device that has no
    // batches, too: lanes, and what counts such as are short, go from one to another.)
    if (is_pipelined(inv)) return false;
    if constexpr (Dev::kInlinePacketFlags) {
      if (has_inline_flags(inv.protocol)) return true;
    }
    const Geometry& g = inv.geometry;
    const float slices = static_cast<float>(g.count) * static_cast<float>(inv.num_primitives);
    const float quantum = static_cast<float>(s_.policy.quantum_slices) *
                          static_cast<float>(g.chunk) * static_cast<float>(g.lanes);
    return slices <= quantum * (g.blocked() ? 1.0f : static_cast<float>(g.parts));
  }

  // What is not to wait until calls that are long have ended. The same for who mails it and for who
  // takes it out.
  UNJAM_HD bool is_urgent(const Invocation& inv) const {
    return inv.key == nullptr || is_short(inv);
  }

  UNJAM_HD bool drained([[maybe_unused]] std::uint16_t slot) {
    if constexpr (kCarries) return dev_.drained(slot);
    return true;
  }

  UNJAM_HD bool holds() const { return s_.policy.stickiness == StickinessPolicy::kHold; }

  // ---- memory ----

  UNJAM_HD void copy_vectors(void* to, const void* from, std::size_t bytes) const {
    struct alignas(kVectorBytes) [[gnu::may_alias]] Vector {
      std::uint32_t words[kVectorBytes / sizeof(std::uint32_t)];
    };
    for (std::size_t i = dev_.first(); i < bytes / kVectorBytes; i += dev_.stride()) {
      static_cast<Vector*>(to)[i] = static_cast<const Vector*>(from)[i];
    }
  }

  // ---- figures and traces ----

  // A figure of the lane's. In the block's own memory nobody else looks at it.
  UNJAM_HD static void count(std::uint64_t& figure, std::uint64_t by = 1) {
    if constexpr (Dev::kLaneInShared) {
      figure += by;
    } else {
      bump(figure, by);
    }
  }

  // A part of what was counted before. Release: whoever reads parts first finds no more of them
  // than there are in all.
  UNJAM_HD static void count_part(std::uint64_t& figure) {
    if constexpr (Dev::kLaneInShared) {
      ++figure;
    } else {
      store_release<std::uint64_t>(figure, load_relaxed(figure) + 1);
    }
  }

  // What several control threads count, until the lead adds it to the lane's figures. (Memory of a
  // block on a GPU adds 32 bits at once, and 64 in a loop.)
  UNJAM_HD static void count_shared(std::uint32_t& figure, std::uint32_t by) {
    if constexpr (requires { Dev::add(figure, by); }) {
      Dev::add(figure, by);
    } else {
      fetch_add<std::uint32_t>(figure, by);
    }
  }

  UNJAM_HD void add_sent() {
    if (s_.sent_bytes == 0) return;
    count(lane_.stats.bytes_sent, s_.sent_bytes);
    if (s_.sent_borrowed != 0) count(lane_.stats.borrowed, s_.sent_borrowed);
    if (s_.sent_into_outputs != 0) count(lane_.stats.into_outputs, s_.sent_into_outputs);
    s_.sent_bytes = s_.sent_borrowed = s_.sent_into_outputs = 0;
  }

  UNJAM_HD void count_spins(ActiveContext& a, std::uint32_t polls) {
    count(lane_.stats.spins, polls);
    if constexpr (Dev::kHostWatches) bump<std::uint64_t>(a.key->spins, polls);
  }

  // For diagnosis. On devices where publish() needs a fence there is none: the word may be seen
  // before what the lane did.
  UNJAM_HD void set_running(std::uint16_t slot) {
    if constexpr (!Dev::kHostWatches) return;
    const std::uint64_t changes = (load_relaxed(lane_.running) >> 16) + 1;
    Dev::publish(lane_.running, changes << 16 | static_cast<std::uint16_t>(slot + 1));
  }

  UNJAM_HD std::uint64_t begin_step() { return s_.traces ? dev_.now_ns() : 0; }

  // By the lead. `times`: for how many invocations.
  UNJAM_HD void end_step(Step step, std::uint64_t begun_ns, std::uint32_t times = 1) {
    if (!s_.traces) return;
    StepTime& time = lane_.stats.steps[static_cast<std::size_t>(step)];
    count(time.count, times);
    count(time.ns, dev_.now_ns() - begun_ns);
  }

  UNJAM_HD void record(TraceType type, const Invocation* inv) {
    if (!s_.traces) return;
    lane_.trace.template record<Dev::kHostWatches>(
        {dev_.now_ns(), inv == nullptr ? std::uint64_t{0} : inv->key->tag,
         (inv == nullptr ? std::uint64_t{0} : inv->n << 32) | std::uint64_t{lane_index_} << 16 |
             static_cast<std::uint64_t>(type)});
  }

  DevHandle dev_;
  RankState& rank_;
  LaneState& lane_;
  Mailbox& mailbox_;
  const std::uint32_t lane_index_;
  BlockShared& s_;
};

// A phase of the control threads, as a function of its own: each has the registers to itself, and
// its caller keeps nothing but these arguments across it. Parts call what is rare, or large, in the
// same way. (A member function that is not inlined would want its object in memory, and all that it
// refers to be loaded from there.)
template <auto kPhase, class... Args>
UNJAM_HD_NOINLINE auto phase(typename PartOf<decltype(kPhase)>::DevHandle dev, RankState& rank,
                             std::uint32_t lane, BlockShared& shared, Args... args) {
  using Part = PartOf<decltype(kPhase)>;
  return (Part(dev, rank, lane, shared).*kPhase)(args...);
}

}  // namespace unjam
