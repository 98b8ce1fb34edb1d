#include "api/nccl/operation.h"

#include <map>
#include <utility>

#include "api/nccl/communicator.h"

namespace unjam::nccl {

bool Operation::is_to_itself() const { return transfers() && peer == comm->rank(); }

std::size_t Operation::reduced_elements() const {
  return what == What::kReduceScatter ? count * static_cast<std::size_t>(comm->size()) : count;
}

unjamResult_t call(const Operation& o, const void* input, unjamStreamOrder_t order,
                   unjamRequest_t* request) {
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.stream = o.stream;
  options.stream_order = order;
  unjamGroup* const group = o.comm->group();
  const void* const in = input;
  // Ranks need not give one number for the scalar, but all multiply or none does.
  if (o.scale != nullptr) options.match_text = "ncclRedOpCreatePreMulSum";
  switch (o.what) {
    case What::kAllReduce:
      return unjamAllReduce(group, nullptr, in, o.recv, o.count, o.dtype, o.op, &options, request);
    case What::kBroadcast:
      return unjamBroadcast(group, nullptr, in, o.recv, o.count, o.dtype, o.peer, &options,
                            request);
    case What::kReduce:
      return unjamReduce(group, nullptr, in, o.recv, o.count, o.dtype, o.op, o.peer, &options,
                         request);
    case What::kAllGather:
      return unjamAllGather(group, nullptr, in, o.recv, o.count, o.dtype, &options, request);
    case What::kReduceScatter:
      return unjamReduceScatter(group, nullptr, in, o.recv, o.count, o.dtype, o.op, &options,
                                request);
    case What::kAllToAll:
      return unjamAllToAll(group, nullptr, in, o.recv, o.count, o.dtype, &options, request);
    case What::kGather:
      return unjamGather(group, nullptr, in, o.recv, o.count, o.dtype, o.peer, &options, request);
    case What::kScatter:
      return unjamScatter(group, nullptr, in, o.recv, o.count, o.dtype, o.peer, &options, request);
    case What::kSend:
      return unjamSend(group, nullptr, in, o.count, o.dtype, o.peer, &options, request);
    case What::kRecv:
      return unjamRecv(group, nullptr, o.recv, o.count, o.dtype, o.peer, &options, request);
  }
  return UNJAM_ERROR_INTERNAL;
}

namespace {

// Grows while anything of the communicator's job moves.
std::uint64_t moved(const Communicator& comm) {
  unjamStats_t stats{};
  stats.size = sizeof(stats);
  if (unjamGetStats(comm.job()->data(), &stats) != UNJAM_SUCCESS) return 0;
  return stats.completed + stats.slices;
}

}  // namespace

Status submit(const Operation& o, const void* input, unjamStreamOrder_t order,
              unjamRequest_t* request, std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point since{}, looked{};
  std::uint64_t before = 0;
  o.comm->job()->remove_unused();
  for (;;) {
    const unjamResult_t result = call(o, input, order, request);
    if (result == UNJAM_SUCCESS) return {};
    // As where CUDA's queue is full: whoever calls waits until something has ended.
    const bool transient = result == UNJAM_ERROR_RESOURCES && unjamLastErrorIsTransient() != 0;
    Status status = from_unjam(result);
    if (!transient || o.comm->aborted()) return status;
    // Where ranks call more communicators in different orders than there is room for, each waits
    // for what the other cannot call: nothing would ever move again.
    const Clock::time_point now = Clock::now();
    if (now - looked > patience / 16) {
      looked = now;
      const std::uint64_t at = moved(*o.comm);
      if (since == Clock::time_point{} || at != before) since = now;
      before = at;
      if (now - since > patience) {
        status.text += " (nothing has moved for " + std::to_string(patience.count()) +
                       " ms: ranks may call more communicators, or sends and receives of pairs, "
                       "in different orders than may be under way)";
        return status;
      }
    }
    o.comm->wait_for_room();
  }
}

// A call in its stream's order is the fastest, and what stands behind it there waits. So it is for
// calls whose order all ranks agree on: collectives of one communicator. Others of the same group
// and stream may wait for each other in any order: they go beside the stream, which waits for all.
bool may_go_in_order(const std::vector<Operation>& operations, std::size_t which) {
  const Operation& o = operations[which];
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Operation& other = operations[i];
    if (i == which || other.stream != o.stream || other.comm->device() != o.comm->device()) {
      continue;
    }
    if (other.comm != o.comm || other.transfers() || o.transfers()) return false;
  }
  return true;
}

Status take_own_copies(std::vector<Operation>& operations, std::vector<OwnCopy>& copies) {
  std::map<const Communicator*, std::pair<std::vector<Operation>, std::vector<Operation>>> own;
  std::vector<Operation> others;
  for (Operation& o : operations) {
    if (!o.is_to_itself()) {
      others.push_back(std::move(o));
      continue;
    }
    auto& [sends, receives] = own[o.comm.get()];
    (o.what == What::kSend ? sends : receives).push_back(std::move(o));
  }
  for (auto& [comm, calls] : own) {
    auto& [sends, receives] = calls;
    bool equal = sends.size() == receives.size();
    for (std::size_t i = 0; i < sends.size() && equal; ++i) {
      copies.push_back({std::move(sends[i]), std::move(receives[i])});
      equal =
          copies.back().send.count * bytes_of(copies.back().send.dtype) == copies.back().bytes();
    }
    if (!equal) {
      return invalid_usage("rank " + std::to_string(comm->rank()) +
                           " sends to itself what it does not receive in the same group: call "
                           "ncclSend and ncclRecv between one ncclGroupStart and ncclGroupEnd, "
                           "with equal sizes");
    }
  }
  operations = std::move(others);
  return {};
}

}  // namespace unjam::nccl
