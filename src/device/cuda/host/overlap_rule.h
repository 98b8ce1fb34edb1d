// Which calls in a stream may begin before the one in front of them has ended, of those that go
// through slots: docs/internals/neighbouring-calls.md. A call that neither writes what the one in
// front reads or writes, nor reads what that writes, is *close* to it; so is the same call once
// more. Each lane of a close call begins as soon as that one's has given back its lease.
//
// Asked here: that the two are this rank's, one behind the other in one stream, with such buffers,
// and that the later one has all the lanes that the other has. Kernels themselves find whether
// another one is between them (launch_sequence.cuh), and let the next call's blocks come only when
// the stream has come to their own. So at most two calls overlap. (Addresses are compared, so
// memory that is mapped twice, by cuMemMap say, is taken for two.)
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
  // What lanes read and write depends on nothing else (SlotCall::stretch_of()): on the geometry,
  // and on whose part is where.
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
