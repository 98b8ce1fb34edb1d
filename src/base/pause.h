// What a loop that polls does between two looks.
#pragma once

namespace unjam {

// Tells the core that it polls: the other thread of the core goes on, and leaving the loop is
// cheap. (A processor without such an instruction only polls harder.)
inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace unjam
