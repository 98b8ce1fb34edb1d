// Which calls in a stream may begin before the one in front of them has ended (of those that go
// through slots).
//
// A stream's order is kept for whoever can tell. A call that neither writes what the one in front
// of it reads or writes, nor reads what that writes, cannot be told from one that began later; nor
// can the same call once more, whose lanes read and write the same bytes. Such a call is close to
// the one in front, and each of its lanes begins as soon as that one's has given back its lease.
// For that all of this must hold:
//   The two are this rank's, in one stream, one behind the other, and buffers are so: next(), which
//   the host asks in the order of its calls. (Threads that call at the same time may launch in
//   another order; then the next does not hold.)
//   The later one has all the lanes that the other has. So who has what all of its lanes bring (a
//   peer, for which an all-reduce is a barrier, too) is behind all of the other.
//   No kernel is between them, nor of anybody's in another stream: launch_sequence.cuh, by the
//   kernels themselves, for a kernel between them could let us begin early, too. (Anything else in
//   a stream, copies, graphs, events, host functions, CUDA ends before it begins a kernel behind
//   it, and the call in front before that. tests/gpu/back_to_back.cu asks whether it does.)
//
//   The one in front waits for nobody, will end, and has had its turn: it lets the next call's
//   blocks come only then (stream_call_reports.h; end(), in run_by_slots()). So what was in front
//   of it has ended as we begin, and at most two calls overlap.
//
// (Addresses are compared, so memory that is mapped twice, by cuMemMap say, is taken for two.)
// A close call ends behind the one in front: it waits for its stream before it lets others come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "base/types.h"
#include "device/cuda/dev/stream_call.h"
#include "engine/invocation.h"

namespace unjam {

class OverlapRule {
 public:
  // Of a rank's next call in a stream: what its StreamCall::follows is to be. `stream`: its number,
  // unlike any other's; 0: it may overlap with none.
  std::uint32_t next(const Invocation& inv, const StreamCall& call, std::uint64_t stream) {
    const Seen seen = look(inv, call, stream);
    const bool follows = stream != 0 && stream == last_.stream && call.by_slots && last_.by_slots &&
                         seen.geometry.lanes >= last_.geometry.lanes &&
                         (are_same(seen, last_) || are_apart(seen, last_));
    const std::uint32_t serial = last_.serial;
    last_ = seen;
    return follows ? serial : 0;
  }

 private:
  struct Bytes {
    std::uintptr_t begin = 0, end = 0;
    bool operator==(const Bytes&) const = default;
    bool meets(const Bytes& other) const { return begin < other.end && other.begin < end; }
  };
  struct Seen {
    std::uint64_t stream = 0;
    std::uint32_t serial = 0;
    Bytes input, output;  // (more than are used, where a rank has none of a root's)
    Geometry geometry;
    bool by_slots = false;
    std::uint16_t parts[kMostPlaces] = {};
  };

  static Seen look(const Invocation& inv, const StreamCall& call, std::uint64_t stream) {
    const Geometry& g = inv.geometry;
    const std::uint64_t block = g.count * dtype_bytes(g.dtype);
    const std::uint64_t all = g.blocked() ? block * inv.group_size : block;
    const auto bytes = [](const void* at, std::uint64_t length) {
      const auto begin = reinterpret_cast<std::uintptr_t>(at);
      return Bytes{begin, begin + length};
    };
    Seen seen;
    seen.stream = stream;
    seen.serial = static_cast<std::uint32_t>(inv.serial);
    seen.input = bytes(inv.input, input_is_block(g.kind) ? block : all);
    seen.output = bytes(inv.output, output_is_block(g.kind) ? block : all);
    seen.geometry = g;
    seen.by_slots = call.by_slots;
    std::copy(std::begin(call.steps.parts), std::end(call.steps.parts), seen.parts);
    return seen;
  }
  // What lanes read and write depends on nothing else (SlotCall::stretch_of()): on the geometry, and
  // on whose part is where.
  static bool are_same(const Seen& a, const Seen& b) {
    return a.input == b.input && a.output == b.output && a.geometry == b.geometry &&
           std::equal(std::begin(a.parts), std::end(a.parts), b.parts);
  }
  static bool are_apart(const Seen& a, const Seen& b) {
    return !a.output.meets(b.output) && !a.output.meets(b.input) && !a.input.meets(b.output);
  }

  Seen last_;
};

}  // namespace unjam
