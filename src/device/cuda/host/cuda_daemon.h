// The runtime's way to a rank on a CUDA device: submissions, kernels in streams, completions. Its
// parts: rank_memory.h, kernel_launcher.h, daemon_launcher.h, rank_report.h, copy_thread.h.
#pragma once

#include <memory>
#include <string>

#include "engine/cuda_driver.h"

namespace unjam {

// As CudaDriver::engine_bytes(), and CudaDriver::start().
std::uint64_t cuda_engine_bytes(const CudaRankOptions& options);
std::unique_ptr<StreamDaemon> start_cuda_rank(const CudaRankOptions& options, RankState& copy,
                                              std::string& error);

}  // namespace unjam
