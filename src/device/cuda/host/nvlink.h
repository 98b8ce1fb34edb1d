// How the GPUs of this machine reach each other's memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace unjam {

// Whether lines of packets come whole (leaf_access.cuh) between all GPUs of the machine, and why
// (not), in words.
struct NvlinkAnswer {
  bool whole_lines = false;
  std::string why;
};

// A GPU of the machine: its name, and to which of those in front of it it has NVLinks.
struct SeenGpu {
  std::string name;
  std::vector<bool> linked;
};

// They do if there are several GPUs, each has NVLinks to all others, and all are such as lines have
// been seen to come whole on (tests/gpu/long_packets.cu, tests/gpu/torn_lines.cu).
inline NvlinkAnswer judge_links(const std::vector<SeenGpu>& gpus) {
  if (gpus.size() < 2) return {false, "NVML knows of no two GPUs"};
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    const std::string name = "GPU " + std::to_string(i);
    // (A GH200 is another thing, with another link.)
    const std::string padded = " " + gpus[i].name + " ";
    if (padded.find(" H100 ") == std::string::npos && padded.find(" H200 ") == std::string::npos) {
      return {false, name + " is " + (gpus[i].name.empty() ? "unknown" : gpus[i].name) +
                         ": only H100 and H200 were tested"};
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (j < gpus[i].linked.size() && gpus[i].linked[j]) continue;
      return {false, name + " has no NVLink to GPU " + std::to_string(j)};
    }
  }
  return {true, "NVLink between all " + std::to_string(gpus.size()) + " GPUs"};
}

// By NVML, which is asked once in a process: CUDA alone cannot tell, for a process may see one GPU
// only, while its peers have others. False also where NVML cannot be asked.
const NvlinkAnswer& nvlink_answer();

}  // namespace unjam
