// Arenas in device memory that other devices and processes can map, part by part: CUDA's virtual
// memory management, handles as file descriptors. Making and mapping memory waits for nothing that
// devices do, nor for what other threads wait for in CUDA (a cudaFree(), say); clearing it would.
// Other processes' memory stays as long as it is mapped here, also after its owner's death.
#pragma once

#include <memory>
#include <string>

#include "engine/cuda_driver.h"

namespace unjam {

std::unique_ptr<DeviceArena> create_cuda_arena(int device, std::uint64_t bytes, std::uint64_t base,
                                               std::string& error);
// Addresses alone, to be added to.
std::unique_ptr<DeviceArena> reserve_cuda_arena(int device, std::uint64_t bytes,
                                                std::string& error);
std::unique_ptr<DeviceArena> adopt_cuda_arena(int device, int fd, std::uint64_t bytes,
                                              std::uint64_t base, std::string& error);

}  // namespace unjam
