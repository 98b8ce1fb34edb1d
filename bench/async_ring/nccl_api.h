// NCCL, opened when the program runs: machines that compile this need not have it.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstddef>
#include <source_location>
#include <string>
#include <vector>

#include "tests/gpu/support.h"

namespace async_ring {

class Nccl {
 public:
  using Communicator = void*;

  // path: the library; "": as the loader finds it. Where there is none, missing() says why.
  explicit Nccl(const std::string& path) {
    dll_ = dlopen(path.empty() ? "libnccl.so.2" : path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (dll_ == nullptr) {
      missing_ = dlerror();
      return;
    }
    load(&get_version_, "ncclGetVersion");
    load(&error_string_, "ncclGetErrorString");
    load(&init_all_, "ncclCommInitAll");
    load(&destroy_, "ncclCommDestroy");
    load(&group_start_, "ncclGroupStart");
    load(&group_end_, "ncclGroupEnd");
    load(&send_, "ncclSend");
    load(&recv_, "ncclRecv");
    load(&all_reduce_, "ncclAllReduce");
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  const std::string& missing() const { return missing_; }
  bool there() const { return missing_.empty(); }

  std::string version() const {
    int v = 0;
    check(get_version_(&v), "ncclGetVersion");
    return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
           std::to_string(v % 100);
  }

  // One communicator a device, rank r on device r.
  std::vector<Communicator> communicators(int ranks) const {
    std::vector<Communicator> all(static_cast<std::size_t>(ranks));
    check(init_all_(all.data(), ranks, nullptr), "ncclCommInitAll");
    return all;
  }
  void destroy(Communicator c) const { check(destroy_(c), "ncclCommDestroy"); }

  // Of floats. given, taken: nothing is sent or received where the count is 0.
  void exchange(Communicator c, const float* given, std::size_t given_count, int to, float* taken,
                std::size_t taken_count, int from, cudaStream_t stream) const {
    check(group_start_(), "ncclGroupStart");
    if (given_count != 0) check(send_(given, given_count, kFloat, to, c, stream), "ncclSend");
    if (taken_count != 0) check(recv_(taken, taken_count, kFloat, from, c, stream), "ncclRecv");
    check(group_end_(), "ncclGroupEnd");
  }
  // What f() begins is begun together.
  template <class F>
  void together(F f) const {
    check(group_start_(), "ncclGroupStart");
    f();
    check(group_end_(), "ncclGroupEnd");
  }
  void all_reduce(Communicator c, const float* input, float* output, std::size_t count,
                  cudaStream_t stream) const {
    check(all_reduce_(input, output, count, kFloat, kSum, c, stream), "ncclAllReduce");
  }

 private:
  static constexpr int kFloat = 7, kSum = 0;  // ncclFloat32, ncclSum

  template <class F>
  void load(F** function, const char* name) {
    if (!there()) return;
    *function = reinterpret_cast<F*>(dlsym(dll_, name));
    if (*function == nullptr) missing_ = std::string("NCCL has no ") + name;
  }

  void check(int code, const char* what,
             const std::source_location at = std::source_location::current()) const {
    if (code == 0) return;
    unjam_gpu::fail(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " + what +
                    ": " + error_string_(code) + " (code " + std::to_string(code) +
                    "; NCCL_DEBUG=WARN says more)");
  }

  void* dll_ = nullptr;  // open until the process ends: NCCL has threads
  std::string missing_;
  int (*get_version_)(int*) = nullptr;
  const char* (*error_string_)(int) = nullptr;
  int (*init_all_)(Communicator*, int, const int*) = nullptr;
  int (*destroy_)(Communicator) = nullptr;
  int (*group_start_)() = nullptr;
  int (*group_end_)() = nullptr;
  int (*send_)(const void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
  int (*recv_)(void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
  int (*all_reduce_)(const void*, void*, std::size_t, int, int, Communicator,
                     cudaStream_t) = nullptr;
};

}  // namespace async_ring
