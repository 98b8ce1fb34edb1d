// What can be said of a call before any lock is taken: whether its arguments make sense, and which
// bytes it reads and writes.
#pragma once

#include <cstdint>

#include "runtime/call.h"
#include "runtime/group.h"
#include "runtime/result.h"

namespace unjam {

// Kind, data type, operator, root, algorithm and count.
Result check_call(const unjamGroup& group, const Call& call);
// Who needs which buffer, its alignment, and how the two may overlap.
Result check_buffers(const unjamGroup& group, const Call& call);

// Bytes of the buffers that the calling rank's part of a call uses; 0: that it does not use.
struct BufferBytes {
  std::uint64_t send = 0, recv = 0;
};
BufferBytes buffer_bytes(const unjamGroup& group, const Call& call);
// What a call comes to in a group of one. Sums, averages and extrema of one are that one.
std::uint64_t copied_alone(const unjamGroup& group, const Call& call);
// Whether a call's output has bytes in common with that memory.
bool writes_into(const Submitted& s, const void* memory, std::uint64_t bytes);

}  // namespace unjam
