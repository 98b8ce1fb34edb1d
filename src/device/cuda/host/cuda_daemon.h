// A rank on a CUDA device: its device memory, and the thread that launches its daemon kernel when
// there is work and nobody is there (device/cuda/dev/residency.h, engine.cu).
#pragma once

#include <memory>
#include <string>

#include "engine/cuda_driver.h"

namespace unjam {

// As CudaDriver::start.
// As CudaDriver::engine_bytes().
std::uint64_t cuda_engine_bytes(const CudaRankOptions& options);
std::unique_ptr<StreamDaemon> start_cuda_rank(const CudaRankOptions& options, RankState& copy,
                                              std::string& error);

}  // namespace unjam
