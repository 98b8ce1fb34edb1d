// Descriptors in bulk: at its start a job hands each process some for every other one. A message
// carries many of them, over a socket of its own (SOCK_SEQPACKET), so that a process is woken few
// times. (Frames of a Channel have few descriptors, for what a stranger sends is to be bounded.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "control/channel.h"
#include "control/messages.h"

namespace unjam {

inline constexpr std::size_t kMostHandedFds = 128;  // of a message; the kernel takes 253

// A connected pair of them. False: errno says why.
bool hand_out_pair(Fd& mine, Fd& theirs);

// Sends a message with these descriptors, which stay the caller's; waits until it is taken, for
// that time at most.
bool hand_out(const Fd& socket, MessageType type, std::string_view payload,
              const std::vector<int>& fds, std::int64_t timeout_ms, std::string& error);

enum class Handed { kFrame, kNothing, kOver };
// Takes one, if it is there. kOver: no more will come, `error` says why.
Handed take_handed(const Fd& socket, Frame& frame, std::string& error);

}  // namespace unjam
