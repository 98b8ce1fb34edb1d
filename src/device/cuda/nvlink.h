// How a GPU's memory is reached by the others.
#pragma once

#include <string>

namespace unjam {

// Whether the GPU at this PCI address ("0000:1b:00.0") is connected through NVLink with every other
// GPU of the machine that NVML knows of, and there is another one. False also where NVML cannot be
// asked; `why` says what was found, in words. CUDA alone cannot tell: a process may see one GPU
// only, while its peers have others.
bool nvlink_everywhere(const std::string& pci_address, std::string& why);

}  // namespace unjam
