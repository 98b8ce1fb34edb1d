// What is asked of a stream that a caller has given.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "device/cuda/host/cuda_error.h"

namespace unjam {

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// As CUDA numbers streams; 0: it is none.
inline unsigned long long number_of(void* stream) {
  unsigned long long id = 0;
  if (cudaStreamGetId(as_stream(stream), &id) == cudaSuccess) return id;
  cudaGetLastError();  // the launch will say it
  return 0;
}
// Whether it is the one that CUDA numbers so; 0: none.
inline bool is_stream(void* stream, unsigned long long number) {
  return number != 0 && number_of(stream) == number;
}

// Whether all work queued in the stream is done.
inline bool is_idle(void* stream, bool& idle, std::string& error) {
  const cudaError_t code = query_stream(as_stream(stream));
  idle = code == cudaSuccess;
  return code == cudaErrorNotReady || cuda_ok(code, "the stream of a call", error);
}

inline bool check_stream(void* stream, std::string& error) {
  cudaStreamCaptureStatus status{};
  if (!cuda_ok(cudaStreamIsCapturing(as_stream(stream), &status), "the stream of a call", error)) {
    return false;
  }
  if (status == cudaStreamCaptureStatusNone) return true;
  error =
      "the stream is being captured, and unjam's calls cannot be part of a CUDA graph yet: make "
      "the call, and let streams wait for it, outside of the capture";
  return false;
}

}  // namespace unjam
