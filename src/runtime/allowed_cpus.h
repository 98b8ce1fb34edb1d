// On which CPUs threads may run.
#pragma once

#include "base/cpu_set.h"

namespace unjam {

// Those of the calling thread, and of threads that it makes. Nothing if the kernel does not say.
CpuSet allowed_cpus();

}  // namespace unjam
