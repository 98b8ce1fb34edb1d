// libunjam_cuda.so: found beside libunjam.so and opened when the first CUDA rank joins a job.
#pragma once

#include <string>

#include "engine/cuda_driver.h"

namespace unjam {

// Null: `error` says what is missing and what to do. The same one each time, for good.
CudaDriver* cuda_driver(std::string& error);
// The same also where there is no device: for what needs none.
CudaDriver* cuda_driver_alone(std::string& error);
// For tests, which bring devices of their own: what the former finds from now on.
void replace_cuda_driver(CudaDriver* driver);

}  // namespace unjam
