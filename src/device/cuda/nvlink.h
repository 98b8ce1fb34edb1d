// How the GPUs of this machine reach each other's memory.
#pragma once

#include <string>

namespace unjam {

// Whether lines of packets come whole (leaf_access.cuh) between all GPUs of the machine, and why
// (not), in words.
struct NvlinkAnswer {
  bool whole_lines = false;
  std::string why;
};

// By NVML, which is asked once in a process: CUDA alone cannot tell, for a process may see one GPU
// only, while its peers have others. They do if each GPU has NVLinks to all others, and all are
// such as they have been seen to come whole on (tests/gpu/long_packets.cu, tests/gpu/torn_lines.cu:
// H100 and H200). False also where NVML cannot be asked, or there is one GPU only.
const NvlinkAnswer& nvlink_answer();

}  // namespace unjam
