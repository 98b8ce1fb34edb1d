// The types of NCCL's interface as its version 2.28.9 documents them: what programs that were
// compiled against its nccl.h pass. (tests/nccl/abi_check.cc compares them with such a header.)
#pragma once

#include <climits>
#include <cstddef>

namespace unjam::nccl {

inline constexpr int kVersion = 22809;

// ncclResult_t.
enum class Code : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

// ncclDataType_t.
enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 11
};

// ncclRedOp_t: from kNumOps on, what ncclRedOpCreatePreMulSum has made.
enum class Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kNumOps = 5 };

// ncclScalarResidence_t.
enum class Residence : int { kDevice = 0, kHostImmediate = 1 };

inline constexpr int kUndefined = INT_MIN;  // NCCL_CONFIG_UNDEF_INT
inline constexpr int kNoColor = -1;         // NCCL_SPLIT_NOCOLOR
inline constexpr int kShrinkAbort = 1;      // NCCL_SHRINK_ABORT
inline constexpr unsigned kConfigMagic = 0xcafebeef;

struct UniqueId {  // ncclUniqueId
  char internal[128];
};

struct Config {  // ncclConfig_t
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char* net_name;
  int split_share;
  int traffic_class;
  const char* comm_name;
  int collnet_enable;
  int cta_policy;
  int shrink_share;
  int nvls_ctas;
  int channels_per_net_peer;
  int nvlink_centric_sched;
};

struct SimInfo;  // ncclSimInfo_t

struct Team {  // ncclTeam_t
  int ranks, rank, stride;
};

}  // namespace unjam::nccl

struct ncclComm;
using ncclComm_t = ncclComm*;
