// How a process ends that has ranks, and what of that its peers see. The one place that decides it.
//
// Properly: every context is destroyed, with nothing pending. The rank has left.
// By itself (exit(), the end of main(), of a Python program), contexts open: end_contexts() ends
//   them, where the language has somebody to call it (Python's packages do). A context with
//   nothing pending leaves as if it were destroyed. What is pending gets the time to end, as long
//   as something moves and for a while after that; the rest is aborted.
// Otherwise (_exit(), a signal, exec(), a crash; or by itself where nobody called that): it is just
//   gone. Others notice it by its pidfd and sockets.
//
// In both latter cases all peers are told at once, and one rule holds for what the rank was to do
// with them: of a call of which it had *completed* its part, all that others need is where they
// find it, so such a call goes on, and can be made later too. Every other call of its groups, and
// every later one, ends with an error that names the rank, and how it ended. What was completed
// stands in the rank's ledger (transport/ledger.h), which outlives it. unjamAbort() is not an end
// of a process: it ends all. On GPUs a process that is just gone ends all, too, and one that leaves
// in good order is missed when a call is found to wait for it (World::watch()).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace unjam {

class Context;
class World;

inline constexpr const char* kEndedText = "ended without close() (unjamDestroy)";
// How long end_contexts() waits while nothing moves, unless it is told.
inline constexpr std::int64_t kPatienceUs = 2'000'000;

// A world is there, or about to go: until then the end of the process by itself is written into its
// ranks' ledgers.
void end_with_process(World* world);
void ended_before_process(World* world);
// A context has started.
void end_with_process(const std::shared_ptr<Context>& context);

// Ends all contexts of this process as said above. patience_us < 0: kPatienceUs. "": nothing was
// aborted; else what.
std::string end_contexts(std::int64_t patience_us);

}  // namespace unjam
