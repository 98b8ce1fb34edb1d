// Compiles only where the layer's types are those of NVIDIA's nccl.h of NCCL 2.28.
#include <nccl.h>
#include <nccl_device.h>

#include <cstddef>

#include "api/nccl/types.h"

namespace ours = unjam::nccl;

#define SAME_FIELD(mine, theirs)                                                 \
  static_assert(offsetof(ours::Config, mine) == offsetof(ncclConfig_t, theirs)); \
  static_assert(sizeof(ours::Config::mine) == sizeof(ncclConfig_t::theirs))
#define SAME_NUMBER(mine, theirs) static_assert(static_cast<int>(mine) == static_cast<int>(theirs))

static_assert(NCCL_VERSION_CODE == ours::kVersion);
static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(ours::Config) == sizeof(ncclConfig_t));
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
SAME_FIELD(traffic_class, trafficClass);
SAME_FIELD(comm_name, commName);
SAME_FIELD(collnet_enable, collnetEnable);
SAME_FIELD(cta_policy, CTAPolicy);
SAME_FIELD(shrink_share, shrinkShare);
SAME_FIELD(nvls_ctas, nvlsCTAs);
SAME_FIELD(channels_per_net_peer, nChannelsPerNetPeer);
SAME_FIELD(nvlink_centric_sched, nvlinkCentricSched);
static_assert(sizeof(ours::Team) == sizeof(ncclTeam_t));
static_assert(sizeof(ncclRedOp_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(sizeof(ncclResult_t) == sizeof(ours::Code));

SAME_NUMBER(ours::Code::kUnhandledCudaError, ncclUnhandledCudaError);
SAME_NUMBER(ours::Code::kSystemError, ncclSystemError);
SAME_NUMBER(ours::Code::kInternalError, ncclInternalError);
SAME_NUMBER(ours::Code::kInvalidArgument, ncclInvalidArgument);
SAME_NUMBER(ours::Code::kInvalidUsage, ncclInvalidUsage);
SAME_NUMBER(ours::Code::kRemoteError, ncclRemoteError);
SAME_NUMBER(ours::Code::kInProgress, ncclInProgress);
SAME_NUMBER(ours::DataType::kInt8, ncclInt8);
SAME_NUMBER(ours::DataType::kUint8, ncclUint8);
SAME_NUMBER(ours::DataType::kInt32, ncclInt32);
SAME_NUMBER(ours::DataType::kUint32, ncclUint32);
SAME_NUMBER(ours::DataType::kInt64, ncclInt64);
SAME_NUMBER(ours::DataType::kUint64, ncclUint64);
SAME_NUMBER(ours::DataType::kFloat16, ncclFloat16);
SAME_NUMBER(ours::DataType::kFloat32, ncclFloat32);
SAME_NUMBER(ours::DataType::kFloat64, ncclFloat64);
SAME_NUMBER(ours::DataType::kBfloat16, ncclBfloat16);
SAME_NUMBER(ours::DataType::kFloat8E4M3, ncclFloat8e4m3);
SAME_NUMBER(ours::DataType::kFloat8E5M2, ncclFloat8e5m2);
SAME_NUMBER(12, ncclNumTypes);
SAME_NUMBER(ours::Op::kSum, ncclSum);
SAME_NUMBER(ours::Op::kProd, ncclProd);
SAME_NUMBER(ours::Op::kMax, ncclMax);
SAME_NUMBER(ours::Op::kMin, ncclMin);
SAME_NUMBER(ours::Op::kAvg, ncclAvg);
SAME_NUMBER(ours::Op::kNumOps, ncclNumOps);
SAME_NUMBER(ours::Residence::kDevice, ncclScalarDevice);
SAME_NUMBER(ours::Residence::kHostImmediate, ncclScalarHostImmediate);
SAME_NUMBER(ours::kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME_NUMBER(ours::kNoColor, NCCL_SPLIT_NOCOLOR);
SAME_NUMBER(ours::kShrinkAbort, NCCL_SHRINK_ABORT);
