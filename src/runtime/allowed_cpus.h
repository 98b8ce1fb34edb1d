// On which CPUs threads may run.
#pragma once

#include <cstdint>
#include <vector>

namespace unjam {

// Those of the calling thread, and of threads that it makes: a bit each, CPU 0 the lowest bit of
// the first word. Nothing if the kernel does not say.
std::vector<std::uint64_t> allowed_cpus();

}  // namespace unjam
