// A signal that makes a process print what it waits for.
#pragma once

#include <cstdint>

namespace unjam {

// Counts arrivals of the signal from now on. 0: no signal. A handler that the program has installed
// is left alone.
void explain_on_signal(int signal);
// How often it has arrived. Control threads, which look around a few times a second anyway, look
// here too: a handler that wrote to a descriptor could meet one that was closed and is another's.
std::uint32_t explain_signals();

}  // namespace unjam
