// What a call is to the kernels that do it without the engine's slices: from its invocation, what
// moves from where to where (SoloCall), and whether that can be said at all. By the host; where the
// ranks' memory is, CudaDaemon fills in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "base/types.h"
#include "device/cuda/dev/solo_call.h"
#include "device/cuda/host/needs_engine.h"
#include "engine/invocation.h"
#include "program/hop_peers.h"

namespace unjam {

struct SoloLimits {
  unsigned block_threads = 0;     // a block's
  std::uint32_t ranks = 0;        // of the job
  bool whole_lines = false;       // lines come whole, so that lines can be sent without the engine
  std::uint32_t patience_us = 0;  // of lanes that stream with their peers, at least
  std::uint32_t slot_bytes = 0;   // of a guaranteed one
};

// For so many bytes of a vector, or of what a rank has from the others, a call is patient once
// more; at most so often.
inline constexpr std::uint64_t kMorePatienceBytes = 100 << 20, kMostPatience = 24;

class SoloDescription {
 public:
  SoloDescription(const Invocation& inv, const SoloLimits& limits, SoloCall& call)
      : inv_(inv), g_(inv.geometry), limits_(limits), call_(call) {}

  // For a call in a stream: one of a direct or two-shot plan whose lanes make one loop each, or of
  // a mesh plan, or a chain. Returns a block's threads; 0: it needs the engine.
  unsigned in_stream() {
    call_ = SoloCall{};  // of the call before
    if (inv_.protocol == Protocol::kSlot) {
      call_.streams = streams();
      return call_.streams ? limits_.block_threads : 0;
    }
    if (is_two_shot()) return two_shot() ? two_shot_threads() : 0;
    return one_shot();
  }
  // For the engine, which may try it whole (whole_call.cuh, whole_stream.cuh). False: it cannot.
  bool beside_streams() { return in_stream() != 0; }

  // After either of them: why it needs the engine.
  NeedsEngine why() const { return why_; }

  // Invocation::whole, of one that has lanes. (Reductions of rare types want more memory of a
  // thread than kernels have, see tools/ptxas_report.py.)
  static std::uint8_t whole_of(const SoloCall& call, const Geometry& g) {
    if (call.lanes == 0) return 0;
    if (call.two_shot) return call.plain ? kWholeTwoShot : std::uint8_t{0};
    if (call.streams) return is_for_crowds(call, g) ? kWholeCrowd : kWholeStream;
    const bool common = call.plain || !call.reduces;
    return common ? static_cast<std::uint8_t>(call.before + 1) : std::uint8_t{0};
  }

 private:
  // What takes longer than some turns goes by slices where nothing else of some length is there: it
  // then gives way sooner to what is short, and when it comes back it still borrows slots. (1 GiB
  // between two H100s, 8 KiB behind it: 3,300 us and 1.0 ms, whole 3,600 and 1.7 ms. 16 at once:
  // 58 ms each by slices, 4.0 ms whole.)
  static bool is_for_crowds(const SoloCall& call, const Geometry& g) {
    constexpr std::uint32_t kMostChunks = 32;
    constexpr std::uint64_t kMostReduced = std::uint64_t{192} << 20;
    // (A chain's go to one peer, not to all.)
    const std::uint32_t most = call.hops.chain ? kMostChunks * (call.group_size - 1u) : kMostChunks;
    return call.chunks > most ||
           (call.hops.two_hops() && g.count * dtype_bytes(g.dtype) > kMostReduced);
  }

  bool cannot(NeedsEngine why) {
    why_ = why;
    return false;
  }

  // Whether solo.cuh has room for the group.
  bool few_ranks() const {
    return inv_.group_size >= 2 && inv_.group_size <= kSoloRanks && limits_.ranks <= kSoloRanks;
  }
  NeedsEngine ranks_reason() const {
    return inv_.group_size < 2 ? NeedsEngine::kOneRank : NeedsEngine::kManyRanks;
  }
  std::uint8_t next() const {
    const unsigned next = inv_.group_rank + 1u;
    return static_cast<std::uint8_t>(next == inv_.group_size ? 0 : next);
  }
  // Each member sends to all others, and receives from them.
  void among_all() {
    call_.num_sent = call_.num_received = static_cast<std::uint8_t>(inv_.group_size - 1u);
    call_.first_sent = call_.first_received = next();
  }
  std::uint64_t element() const { return dtype_bytes(g_.dtype); }

  // What moves from where to where, from the program of a direct plan. Returns a block's threads;
  // 0: it is not for solo.cuh.
  unsigned one_shot() {
    const std::uint32_t size = inv_.group_size;
    if (!packets_serve()) return cannot(NeedsEngine::kSplitLines);
    if (!few_ranks()) return cannot(ranks_reason());
    if (g_.count == 0) return cannot(NeedsEngine::kNoData);
    if (!g_.blocked() && g_.parts != 1) return cannot(NeedsEngine::kOtherProgram);
    const Range longest = g_.lane_part(0, g_.first_lane);  // of the lanes' stretches of a message
    const std::uint64_t block_bytes = g_.part(0).length * element();
    if (longest.length > g_.chunk || block_bytes * size > UINT32_MAX) {
      return cannot(NeedsEngine::kManyLoops);
    }
    call_.block_bytes = static_cast<std::uint32_t>(block_bytes);
    const std::uint32_t pieces = (call_.block_bytes + 15) / 16;
    call_.lane_pieces = pieces / g_.lanes;
    call_.longer_lanes = pieces % g_.lanes;

    const auto others = static_cast<std::uint8_t>(size - 1);
    // A part as it lies in the input, or in the output.
    const auto in_input = [&](std::uint32_t part) {
      return static_cast<std::uint32_t>((g_.part(part).offset - g_.input_shift(inv_.group_rank)) *
                                        element());
    };
    const auto in_output = [&](std::uint32_t part) {
      return static_cast<std::uint32_t>((g_.part(part).offset - g_.output_shift(inv_.group_rank)) *
                                        element());
    };
    call_.before = static_cast<std::uint8_t>(inv_.num_primitives);
    for (std::uint32_t i = 0; i < inv_.num_primitives; ++i) {
      // Receives last, once.
      if (call_.num_received != 0) return cannot(NeedsEngine::kOtherProgram);
      const Primitive& p = inv_.program[i];
      switch (p.flags) {
        case kLocal | kSendAll:
        case kLocal | kSendAll | kCopy:
        case kLocal | kScatter:
        case kLocal | kSend:
          if (i != 0) return cannot(NeedsEngine::kOtherProgram);  // sends first, once
          call_.scatters = (p.flags & kScatter) != 0;
          call_.num_sent = p.flags & kSend ? std::uint8_t{1} : others;
          call_.first_sent = p.flags & kSend ? static_cast<std::uint8_t>(p.send_peer) : next();
          call_.sent_from = in_input(call_.scatters ? 0 : p.part);
          break;
        case kLocal | kCopy:
          break;
        case kCollect | kCopy:
        case kRecv | kCopy:
          call_.collects = (p.flags & kCollect) != 0;
          call_.num_received = p.flags & kRecv ? std::uint8_t{1} : others;
          call_.first_received = p.flags & kRecv ? static_cast<std::uint8_t>(p.recv_peer) : next();
          call_.received_to = call_.collects ? 0 : in_output(p.part);
          call_.before = static_cast<std::uint8_t>(i);
          break;
        case kLocal | kCopy | kContribute | kFinish | kGather | kReduce:
          call_.reduces = true;
          call_.num_received = others;
          call_.first_received = next();
          call_.own_from = in_input(p.part);
          call_.received_to = in_output(p.part);
          call_.before = static_cast<std::uint8_t>(i);
          break;
        default:
          return cannot(NeedsEngine::kOtherProgram);
      }
      if ((p.flags & (kLocal | kCopy | kGather)) == (kLocal | kCopy)) {
        if (call_.copies) return cannot(NeedsEngine::kOtherProgram);
        call_.copies = true;
        call_.own_from = in_input(p.part);
        call_.own_to = in_output(p.part);
      }
    }
    // A place a thread, of each message that is another; what is reduced is kept until all of it
    // has come.
    const std::uint64_t places = places_of(longest.length * element());
    if (call_.reduces && places > most_reduced_places()) return cannot(NeedsEngine::kManyReduced);
    call_.plain = is_plain();
    return threads_for(std::max(call_.scatters ? places * call_.num_sent : places,
                                call_.collects ? places * call_.num_received : places));
  }
  // Every address in the call is a sum of these (lanes' stretches begin on pieces of 16 bytes).
  bool is_plain() const {
    const auto bits = reinterpret_cast<std::uintptr_t>(inv_.input) |
                      reinterpret_cast<std::uintptr_t>(inv_.output) | call_.block_bytes |
                      call_.sent_from | call_.own_from | call_.own_to | call_.received_to;
    return bits % kSoloUnitBytes == 0 && (!call_.reduces || is_common_sum(g_.dtype, inv_.op));
  }
  // As in solo.cuh.
  std::uint64_t places_of(std::uint64_t bytes) const {
    if (inv_.protocol == Protocol::kLine) return line_places(bytes);
    return (bytes + kSoloUnitBytes - 1) / kSoloUnitBytes;
  }
  // Of a lane, without the engine.
  std::uint32_t most_reduced_places() const {
    return kSoloUnits * (limits_.block_threads - kSoloControl);
  }
  // Packets that can be sent without the engine, which alone knows how to send lines that may not
  // come whole.
  bool packets_serve() const {
    return inv_.protocol == Protocol::kPacket ||
           (inv_.protocol == Protocol::kLine && limits_.whole_lines);
  }
  // Of a block whose movers have so many places, one each if there are enough threads.
  unsigned threads_for(std::uint64_t places) const {
    return static_cast<unsigned>(std::clamp<std::uint64_t>((places + kSoloControl + 63) / 64 * 64,
                                                           kLeastThreads, limits_.block_threads));
  }

  // The same of a plan of plan/algorithms/mesh.cc, or a chain's, see solo_stream.cuh.
  bool streams() {
    const std::uint32_t size = inv_.group_size;
    if (!few_ranks()) return cannot(ranks_reason());
    const std::optional<HopPeers> hops =
        hop_peers(g_, inv_.program, inv_.num_primitives, size, inv_.group_rank);
    if (!hops) return cannot(NeedsEngine::kOtherProgram);
    if (g_.first_lane != 0 || g_.lanes < 2) return cannot(NeedsEngine::kOtherLanes);
    if (limits_.block_threads < kLeastStreamThreads) return cannot(NeedsEngine::kFewThreads);
    // (Mesh plans see to it.)
    if (hops->chain && g_.chunk * element() > limits_.slot_bytes) {
      return cannot(NeedsEngine::kLongChunks);
    }
    // The first lane's stretch of the first part is a longest one, the last lane's of the last part
    // a shortest one: all have as many chunks.
    const std::uint32_t last = g_.empty_part == g_.parts - 1 ? g_.parts - 2 : g_.parts - 1;
    const std::uint64_t chunks = g_.loops_of(g_.lane_part(g_.longest_part(), 0));
    if (chunks == 0) return cannot(NeedsEngine::kNoData);
    if (chunks > INT32_MAX / 2 || chunks != g_.loops_of(g_.lane_part(last, g_.lanes - 1u))) {
      return cannot(NeedsEngine::kUnevenLanes);
    }
    call_.hops = *hops;
    // In place there is nothing to copy.
    call_.hops.copies = hops->copies && inv_.input != inv_.output;
    call_.chunks = static_cast<std::uint32_t>(chunks);
    call_.patience_ns = patience_ns();
    return true;
  }
  // Of a large call longer, about half as long as it takes where nothing holds it up. For what it
  // waits for may be that the blocks of a peer's call have no SMs yet, beside somebody's kernel;
  // and an engine, which begins with twice as many blocks as the call has, is not to be had for
  // nothing, either. (A product of 8192^3 keeps 1 GiB's blocks waiting for up to 1.2 ms.)
  std::uint32_t patience_ns() const {
    const std::uint64_t blocks = g_.blocked() ? inv_.group_size - 1u : 1u;
    const std::uint64_t bytes = g_.count * element() * blocks;
    const std::uint64_t times = 1 + std::min(bytes / kMorePatienceBytes, kMostPatience);
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(limits_.patience_us * times * 1000, UINT32_MAX));
  }

  // The same of a plan of plan/algorithms/two_shot.cc, see solo_two_shot.cuh.
  bool is_two_shot() const {
    constexpr unsigned kProgram[] = {
        kLocal | kScatter, kLocal | kCopy | kContribute | kFinish | kGather | kReduce | kSendAll,
        kCollect | kCopy | kSecondHop};
    if (g_.blocked() || g_.parts != inv_.group_size || inv_.num_primitives != std::size(kProgram)) {
      return false;
    }
    for (std::size_t i = 0; i < std::size(kProgram); ++i) {
      if (inv_.program[i].flags != kProgram[i]) return false;
    }
    return inv_.program[1].part == inv_.group_rank;
  }
  bool two_shot() {
    if (!packets_serve()) return cannot(NeedsEngine::kSplitLines);
    if (!few_ranks()) return cannot(ranks_reason());
    const std::uint32_t size = inv_.group_size;
    // The first lane's stretch of the first part is a longest one, the last lane's of the last part
    // a shortest one: all lanes have something of every part. A thread keeps what it reduces.
    const std::uint64_t longest = g_.lane_part(0, g_.first_lane).length;
    const std::uint64_t shortest = g_.lane_part(size - 1, g_.first_lane + g_.lanes - 1u).length;
    if (longest > g_.chunk || g_.count * element() > UINT32_MAX / 2) {
      return cannot(NeedsEngine::kManyLoops);
    }
    if (shortest == 0) return cannot(NeedsEngine::kUnevenLanes);
    if (places_of(longest * element()) > most_reduced_places()) {
      return cannot(NeedsEngine::kManyReduced);
    }
    call_.two_shot = true;
    call_.block_bytes = static_cast<std::uint32_t>(g_.count * element());
    const std::uint32_t pieces = (call_.block_bytes + 15) / 16;
    call_.part_pieces = pieces / size;
    call_.longer_parts = pieces % size;
    call_.lane_pieces = call_.part_pieces / g_.lanes;
    call_.longer_lanes = call_.part_pieces % g_.lanes;
    among_all();
    call_.reduces = true;
    // (Parts that are alike are whole pieces, so all their places are aligned if the buffers are.)
    call_.plain = call_.block_bytes % (16 * size) == 0 && is_plain();
    if (!call_.plain) return true;
    call_.block_bytes /= size;
    call_.own_from = call_.received_to = inv_.group_rank * call_.block_bytes;
    call_.scatters = call_.collects = true;
    return true;
  }
  // A place a thread, of each peer's part.
  unsigned two_shot_threads() const {
    const std::uint64_t bytes = g_.lane_part(0, g_.first_lane).length * element();
    return threads_for(places_of(bytes) * (inv_.group_size - 1u));
  }

  const Invocation& inv_;
  const Geometry& g_;
  const SoloLimits limits_;
  SoloCall& call_;
  NeedsEngine why_ = NeedsEngine::kNo;
};

}  // namespace unjam
