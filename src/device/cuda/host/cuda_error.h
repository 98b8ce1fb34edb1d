// CUDA's errors as text: every call is checked, none is passed over.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace unjam {

// True: success. Else `error` says which call failed and how; the runtime's sticky copy is cleared.
inline bool cuda_ok(cudaError_t code, const char* what, std::string& error) {
  if (code == cudaSuccess) return true;
  error = std::string(what) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")";
  cudaGetLastError();
  return false;
}

// Makes a device the calling thread's current one, and takes it back.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess || before_ == device) {
      before_ = -1;
    }
    if (before_ >= 0) cudaSetDevice(device);
  }
  ~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // -1: it was the current one already
};

// CUDA calls in the scope do not break a stream capture that another thread has begun.
class BesideCapture {
 public:
  BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// cudaStreamQuery() beside captures; that there is work left is an answer, and leaves no error.
inline cudaError_t query_stream(cudaStream_t stream) {
  const BesideCapture beside;
  const cudaError_t code = cudaStreamQuery(stream);
  if (code == cudaErrorNotReady) cudaGetLastError();
  return code;
}

}  // namespace unjam
