// Runs of plans of resharding on tensors of a device: what the runtime queues behind what, with a
// device whose memory is the host's (tests/support/device_on_host.h). The kernel that copies boxes:
// tests/simt/boxes_kernel_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "reshard/plan.h"
#include "runtime/cuda_library.h"
#include "runtime/reshard_run.h"
#include "tests/support/device_on_host.h"
#include "tests/support/job.h"
#include "tests/support/reshard_cases.h"
#include "tests/support/reshard_mover.h"
#include "unjam/reshard.h"

namespace unjam_test {
namespace {

using unjam::ReshardPlan;
namespace reshard = unjam::reshard;

unjamConfig_t device_config() {
  unjamConfig_t config = default_config();
  config.device = UNJAM_DEVICE_CUDA;
  config.lanes = 2;
  config.max_active_keys = 64;
  config.guaranteed_slot_bytes = 4096;
  config.pool_slots = 4;
  return config;
}

class ReshardDevice : public testing::Test {
 protected:
  ReshardDevice() { unjam::replace_cuda_driver(&device_); }
  ~ReshardDevice() override { unjam::replace_cuda_driver(nullptr); }

  DeviceOnHost device_;
};

// Each rank begins two plans in another order, forth and back, some twice.
TEST_F(ReshardDevice, RandomRequestsInCrossedOrder) {
  move_random_requests(kThreadSanitized ? 2 : 4, device_config());
  EXPECT_GT(device_.copied(), 0u);
}

// From rows on ranks 0 and 1 to columns on the same, `rows` by `rows`.
std::shared_ptr<const ReshardPlan> turned(std::int64_t rows) {
  const std::vector<Placement> by_rows{{reshard::PlacementKind::kShard, 0, 1}};
  const std::vector<Placement> by_columns{{reshard::PlacementKind::kShard, 1, 1}};
  Request request;
  request.src = request.dst = Mesh{{2}, {0, 1}};
  Tensor tensor;
  tensor.name = "w";
  tensor.shape = {rows, rows};
  tensor.src_dtype = tensor.dst_dtype = unjam::DType::kInt32;
  tensor.src = by_rows;
  tensor.dst = by_columns;
  request.tensors.push_back(tensor);
  request.topology = reshard::ranks_alone(2);
  return std::make_shared<const ReshardPlan>(reshard::make_plan(std::move(request)));
}

TEST_F(ReshardDevice, ItReadsBehindTheCallersStream) {
  const auto plan = turned(8);
  DeviceOnHost::Stream streams[2];
  Job job(2, device_config());
  job.run([&](Rank& rank) {
    Mover mover(plan, rank.rank);
    DeviceOnHost::Stream& stream = streams[rank.rank];
    mover.blank_sources();
    unjamRequest_t request = mover.begin(rank.all, "w", [&](unjam::ReshardCall& call) {
      call.stream_order = UNJAM_STREAM_ASYNC;
      call.stream = &stream;
    });
    UNJAM_CHECK(unjamStreamWait(request, &stream));
    if (stream.goes_on()) fail("the stream does not wait");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    int done = 0;
    UNJAM_CHECK(unjamTest(request, &done));
    if (done != 0) fail("it did not wait for the caller's stream");
    mover.fill_sources();  // what the stream's work does
    stream.past = true;
    rank.wait(request, "a run");
    mover.check_numbers();
    if (!stream.goes_on()) fail("the stream waits on");
  });
}

// A wait that a stream comes to late is over, whoever has the word by then.
TEST_F(ReshardDevice, WordsOfEndsOnlyGrow) {
  const auto plan = turned(4);
  DeviceOnHost::Stream streams[2];
  Job job(2, device_config());
  job.run([&](Rank& rank) {
    Mover first(plan, rank.rank), second(plan, rank.rank);
    unjamRequest_t request = first.begin(rank.all, "w");
    UNJAM_CHECK(unjamStreamWait(request, &streams[rank.rank]));
    rank.wait(request, "the first run");
    for (int i = 0; i < 3; ++i) rank.wait(second.begin(rank.all, "w"), "another run");
    if (!streams[rank.rank].goes_on()) fail("a wait for the first run is not over");
  });
}

TEST_F(ReshardDevice, StagingIsKeptAndBounded) {
  const auto plan = turned(64);
  Job job(2, device_config());
  std::atomic<std::uint64_t> after_first{0};
  job.run([&](Rank& rank) {
    Mover mover(plan, rank.rank);
    rank.wait(mover.begin(rank.all, "w"), "the first run");
    mover.check_numbers();
  });
  after_first = device_.added();
  EXPECT_GT(after_first, 0u);
  job.run([&](Rank& rank) {
    Mover mover(plan, rank.rank);
    for (int i = 0; i < 5; ++i) rank.wait(mover.begin(rank.all, "w"), "another run");
  });
  EXPECT_EQ(device_.added(), after_first);
}

TEST_F(ReshardDevice, HostMemoryAndStreamsThatWaitAreRefused) {
  const auto plan = turned(4);
  Job job(1, device_config());
  job.run([&](Rank& rank) {
    const unjamMesh_t mesh{sizeof(unjamMesh_t), 0, nullptr, &rank.rank};
    const std::int64_t shape[] = {4};
    const unjamReshardTensor_t tensor{sizeof(tensor), "w",           1,       shape,
                                      UNJAM_INT32,    UNJAM_FLOAT32, nullptr, nullptr};
    unjamReshardPlan_t made = nullptr;
    UNJAM_CHECK(unjamReshardPlan(&mesh, &mesh, &tensor, 1, nullptr, nullptr, &made));
    std::int32_t from[] = {1, 2, 3, 4};
    float to[4] = {};
    const unjamReshardPart_t src{sizeof(src), "w", from, UNJAM_INT32, 1, shape, nullptr};
    const unjamReshardPart_t dst{sizeof(dst), "w", to, UNJAM_FLOAT32, 1, shape, nullptr};
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    unjamRequest_t request = nullptr;
    options.stream_order = UNJAM_STREAM_SYNC;
    const auto run = [&] {
      return unjamReshardRun(made, rank.all, "w", &src, 1, &dst, 1, &options, &request);
    };
    EXPECT_EQ(run(), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(unjamGetLastError()).find("unjamStreamWait"), std::string::npos);
    options.stream_order = UNJAM_STREAM_NONE;
    device_.unreachable(to);
    EXPECT_EQ(run(), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(unjamGetLastError()).find("tensor \"w\" of the destination on rank 0"),
              std::string::npos)
        << unjamGetLastError();
    device_.unreachable(nullptr);
    UNJAM_CHECK(run());
    rank.wait(request, "a run on one rank");
    EXPECT_EQ(to[3], 4.0f);
    UNJAM_CHECK(unjamReshardDestroy(made));
  });
}

// A chain of three, whose ranks go on when one of them is gone: what they have is right, or is
// named.
TEST_F(ReshardDevice, WhatHasNotComeIsNamed) {
  std::uint64_t incomplete = 0;
  for (std::uint64_t round = 0; round < 6; ++round) {
    Request request;
    request.src = Mesh{{1}, {0}};
    request.dst = Mesh{{2}, {1, 2}};
    for (const char* const name : {"a", "b", "c"}) {
      Tensor tensor;
      tensor.name = name;
      tensor.shape = {64, 64};
      tensor.src_dtype = unjam::DType::kInt32;
      tensor.dst_dtype = unjam::DType::kBfloat16;  // so that all is staged
      tensor.src = {{reshard::PlacementKind::kReplicate, 0, 1}};
      tensor.dst = {{reshard::PlacementKind::kReplicate, 0, 1}};
      request.tensors.push_back(tensor);
    }
    request.topology = reshard::ranks_alone(3);
    request.options.window = 2;
    request.options.max_bytes = 2 * 4096;
    const auto plan = std::make_shared<const ReshardPlan>(reshard::make_plan(std::move(request)));
    const int gone = static_cast<int>(round % 3);
    Job job(3, device_config());
    std::atomic<std::uint64_t> named{0};
    std::atomic<int> begun{0};
    job.run([&](Rank& rank) {
      Mover mover(plan, rank.rank);
      unjamRequest_t request = mover.begin(rank.all, "w");
      ++begun;
      if (rank.rank == gone) {
        if (!eventually([&] { return begun == 3; })) fail("others do not begin");
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round * round));
        UNJAM_CHECK(unjamAbort(rank.context));
      }
      const unjamResult_t code = unjamWait(request, kPatienceUs);
      if (code == UNJAM_ERROR_TIMEOUT) fail("it hangs");
      char text[256];
      UNJAM_CHECK(unjamReshardIncomplete(request, text, sizeof(text), nullptr));
      std::vector<std::string> left;
      for (const char* const name : {"a", "b", "c"}) {
        if (std::string(text).find(std::string("\"") + name + "\"") == std::string::npos) {
          left.emplace_back(name);
        } else {
          ++named;
        }
      }
      if (code == UNJAM_SUCCESS && left.size() != 3) fail("complete, and " + std::string(text));
      mover.check_numbers(left);
      UNJAM_CHECK(unjamRequestFree(request));
    });
    incomplete += named;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(incomplete, 0u);
}

// Many bundles of a pair share its keys, from two sources, with delays in the engines.
TEST_F(ReshardDevice, ManyBundlesShareKeys) {
  Request request;
  request.src = Mesh{{2}, {0, 3}};
  request.dst = Mesh{{2}, {1, 2}};
  Tensor tensor;
  tensor.name = "w";
  tensor.shape = {200, 1024};
  tensor.src_dtype = tensor.dst_dtype = unjam::DType::kInt32;
  tensor.src = {{reshard::PlacementKind::kShard, 0, 1}};
  tensor.dst = {{reshard::PlacementKind::kReplicate, 0, 1}};
  request.tensors.push_back(tensor);
  request.topology.host = {0, 1, 1, 2};  // so that one rank hands on what both sources have
  request.topology.nic = {0, 0, 0, 0};
  request.options.window = 128;
  request.options.max_bytes = 128 * 4096;  // a bundle a row
  const auto plan = std::make_shared<const ReshardPlan>(reshard::make_plan(std::move(request)));
  ASSERT_GT(plan->plan().bundles.size(), 100u);
  for (const reshard::Bundle& bundle : plan->plan().bundles) {
    ASSERT_EQ(bundle.hops[2].parent, bundle.hops[1].rank);
    ASSERT_EQ(bundle.hops[1].rank, plan->plan().bundles[0].hops[1].rank);
  }
  for (const bool on_device : {false, true}) {
    unjamConfig_t config = on_device ? device_config() : default_config();
    config.delay_seed = on_device ? 0 : base_seed();
    config.delay_max_us = 500;
    Job job(4, config);
    job.run([&](Rank& rank) {
      Mover mover(plan, rank.rank);
      for (int i = 0; i < 2; ++i) {
        rank.wait(mover.begin(rank.all, "w"), "a run");
        mover.check_numbers();
      }
    });
  }
}

}  // namespace
}  // namespace unjam_test
