// What a rank of a job would hold, computed without one: the text of unjamJobMemory().
#pragma once

#include <string>

#include "runtime/settings.h"

namespace unjam {

std::string job_memory_json(int ranks, const Settings& settings);

}  // namespace unjam
