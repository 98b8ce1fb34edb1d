// NCCL's functions with unjam's names for their types, and ranks that are threads with "devices".
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "api/nccl/host_machine.h"
#include "api/nccl/types.h"
#include "tests/support/job.h"

extern "C" {
using unjam::nccl::Code;
using NcclId = unjam::nccl::UniqueId;
using NcclConfig = unjam::nccl::Config;
Code ncclGetVersion(int* version);
Code ncclGetUniqueId(NcclId* id);
const char* ncclGetErrorString(Code code);
const char* ncclGetLastError(ncclComm_t comm);
Code ncclCommInitRank(ncclComm_t* comm, int ranks, NcclId id, int rank);
Code ncclCommInitRankConfig(ncclComm_t* comm, int ranks, NcclId id, int rank, NcclConfig* config);
Code ncclCommInitAll(ncclComm_t* comms, int devices, const int* device);
Code ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, NcclConfig* config);
Code ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* child,
                    NcclConfig* config, int flags);
Code ncclCommFinalize(ncclComm_t comm);
Code ncclCommDestroy(ncclComm_t comm);
Code ncclCommAbort(ncclComm_t comm);
Code ncclCommRevoke(ncclComm_t comm, int flags);
Code ncclCommGetAsyncError(ncclComm_t comm, Code* error);
Code ncclCommCount(ncclComm_t comm, int* count);
Code ncclCommCuDevice(ncclComm_t comm, int* device);
Code ncclCommUserRank(ncclComm_t comm, int* rank);
Code ncclMemAlloc(void** memory, std::size_t bytes);
Code ncclMemFree(void* memory);
Code ncclCommRegister(ncclComm_t comm, void* memory, std::size_t bytes, void** handle);
Code ncclCommDeregister(ncclComm_t comm, void* handle);
Code ncclCommWindowRegister(ncclComm_t comm, void* memory, std::size_t bytes, void** window,
                            int flags);
Code ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm_t comm);
Code ncclRedOpDestroy(int op, ncclComm_t comm);
Code ncclAllReduce(const void* send, void* recv, std::size_t count, int dtype, int op,
                   ncclComm_t comm, void* stream);
Code ncclBroadcast(const void* send, void* recv, std::size_t count, int dtype, int root,
                   ncclComm_t comm, void* stream);
Code ncclBcast(void* buffer, std::size_t count, int dtype, int root, ncclComm_t comm, void* stream);
Code ncclReduce(const void* send, void* recv, std::size_t count, int dtype, int op, int root,
                ncclComm_t comm, void* stream);
Code ncclAllGather(const void* send, void* recv, std::size_t count, int dtype, ncclComm_t comm,
                   void* stream);
Code ncclReduceScatter(const void* send, void* recv, std::size_t count, int dtype, int op,
                       ncclComm_t comm, void* stream);
Code ncclAlltoAll(const void* send, void* recv, std::size_t count, int dtype, ncclComm_t comm,
                  void* stream);
Code ncclGather(const void* send, void* recv, std::size_t count, int dtype, int root,
                ncclComm_t comm, void* stream);
Code ncclScatter(const void* send, void* recv, std::size_t count, int dtype, int root,
                 ncclComm_t comm, void* stream);
Code ncclSend(const void* send, std::size_t count, int dtype, int peer, ncclComm_t comm,
              void* stream);
Code ncclRecv(void* recv, std::size_t count, int dtype, int peer, ncclComm_t comm, void* stream);
Code ncclGroupStart();
Code ncclGroupEnd();
Code ncclGroupSimulateEnd(void* info);
}

namespace unjam_test {

// What the layer's enumerators are to a program in C.
inline constexpr int kNcclInt8 = 0, kNcclUint8 = 1, kNcclInt32 = 2, kNcclInt64 = 4,
                     kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclFloat64 = 8, kNcclBfloat16 = 9;
inline constexpr int kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4;

#define NCCL_CHECK(call)                                                                \
  do {                                                                                  \
    const Code code_ = (call);                                                          \
    if (code_ != Code::kSuccess) {                                                      \
      ::unjam_test::fail(std::string(#call) + ": " + ncclGetErrorString(code_) + ": " + \
                         ncclGetLastError(nullptr));                                    \
    }                                                                                   \
  } while (false)

// Streams are known by any address: one of a rank's own.
inline void* stream_named(int number) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number));
}

inline void synchronize(int number = 0) {
  unjam::nccl::synchronize_host_stream(stream_named(number));
}

// Runs f(rank) in a thread each, with a device each; fails the test with what they threw.
inline void run_nccl_ranks(int ranks, const std::function<void(int)>& f) {
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      unjam::nccl::set_host_device(r);
      try {
        f(r);
      } catch (const std::exception& e) {
        said[static_cast<std::size_t>(r)] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < ranks; ++r) {
    const std::string& text = said[static_cast<std::size_t>(r)];
    if (!text.empty()) ADD_FAILURE() << "rank " << r << ": " << text;
  }
}

inline ncclComm_t init_nccl(int ranks, const NcclId& id, int rank) {
  ncclComm_t comm = nullptr;
  NCCL_CHECK(ncclCommInitRank(&comm, ranks, id, rank));
  return comm;
}

inline NcclId new_nccl_id() {
  NcclId id;
  NCCL_CHECK(ncclGetUniqueId(&id));
  return id;
}

// Tests run on host memory: before anything asks where.
class OnHost : public testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("UNJAM_DEVICE", "host", 1); }
};

}  // namespace unjam_test
