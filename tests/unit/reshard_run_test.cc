// Runs of plans of cross-mesh resharding: every element at every rank that wants it, whatever the
// ranks' order. Who holds what is told index by index (tests/support/reshard_cases.h). What is
// refused, and ranks that die: tests/python/test_reshard_run.py.
#include "runtime/reshard_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/host/boxes.h"
#include "reshard/plan.h"
#include "tests/support/job.h"
#include "tests/support/reshard_cases.h"

namespace unjam_test {
namespace {

using unjam::BoxPlace;
using unjam::LocalTensor;
using unjam::ReshardCall;
using unjam::ReshardPlan;
namespace reshard = unjam::reshard;

// ---- boxes ----

TEST(Boxes, StridesOfEitherSignAreCopied) {
  std::vector<std::int32_t> from(4 * 6), to(3 * 4, -1);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::int32_t>(i);
  // Rows 3, 2, 1 and columns 0, 2, 4, transposed.
  const BoxPlace source{reinterpret_cast<std::uint8_t*>(&from[18]), DType::kInt32, {8, -24}};
  const BoxPlace target{reinterpret_cast<std::uint8_t*>(&to[1]), DType::kInt32, {16, 4}};
  unjam::copy_box(source, target, {3, 3});
  EXPECT_EQ(to, (std::vector<std::int32_t>{-1, 18, 12, 6, -1, 20, 14, 8, -1, 22, 16, 10}));
}

TEST(Boxes, NothingAndOneElementAreBoxes) {
  std::int64_t from = 7, to = 0;
  const BoxPlace source{reinterpret_cast<std::uint8_t*>(&from), DType::kInt64, {}};
  const BoxPlace target{reinterpret_cast<std::uint8_t*>(&to), DType::kInt64, {}};
  unjam::copy_box(source, target, {});
  EXPECT_EQ(to, 7);
  const BoxPlace nowhere{nullptr, DType::kInt64, {8, 8}};
  unjam::copy_box(nowhere, nowhere, {0, 5});
}

template <class From, class To>
To cast(From value, DType from, DType to) {
  To result{};
  unjam::copy_box({reinterpret_cast<std::uint8_t*>(&value), from, {}},
                  {reinterpret_cast<std::uint8_t*>(&result), to, {}}, {});
  return result;
}

TEST(Boxes, WhatATypeCannotHoldBecomesItsNearestValue) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ((cast<float, std::int8_t>(-7.9f, DType::kFloat32, DType::kInt8)), -7);
  EXPECT_EQ((cast<float, std::int8_t>(1e9f, DType::kFloat32, DType::kInt8)), 127);
  EXPECT_EQ((cast<float, std::uint8_t>(-3.0f, DType::kFloat32, DType::kUint8)), 0);
  EXPECT_EQ((cast<float, std::int64_t>(nan, DType::kFloat32, DType::kInt64)), 0);
  EXPECT_EQ((cast<double, std::int64_t>(1e300, DType::kFloat64, DType::kInt64)), INT64_MAX);
  EXPECT_EQ((cast<double, std::uint64_t>(0x1p63, DType::kFloat64, DType::kUint64)),
            std::uint64_t{1} << 63);
  EXPECT_EQ((cast<std::int64_t, double>(-5, DType::kInt64, DType::kFloat64)), -5.0);
  EXPECT_EQ((cast<float, std::uint16_t>(1.0f, DType::kFloat32, DType::kBfloat16)), 0x3f80);
  EXPECT_EQ((cast<std::uint16_t, double>(0x3c00, DType::kFloat16, DType::kFloat64)), 1.0);
}

// ---- runs ----

// A rank's part of a tensor, whose elements are their numbers in the whole one, modulo 100, which
// all types hold.
struct Part {
  std::vector<std::int64_t> shape, numbers;
  std::vector<std::uint8_t> bytes;  // as the type has them
  DType dtype = DType::kInt64;

  LocalTensor local(const std::string& name) {
    return {name, {bytes.data(), dtype, unjam::row_major(shape, dtype)}, shape};
  }
  BoxPlace as_numbers(std::vector<std::int64_t>* list) const {
    return {reinterpret_cast<std::uint8_t*>(list->data()), DType::kInt64,
            unjam::row_major(shape, DType::kInt64)};
  }
};

// False: the rank is not in the mesh.
bool part_of(const reshard::Tensor& tensor, const Mesh& mesh,
             const std::vector<Placement>& placements, DType dtype, std::int32_t rank, bool filled,
             Part* part) {
  const auto at = std::find(mesh.ranks.begin(), mesh.ranks.end(), rank);
  if (at == mesh.ranks.end()) return false;
  const auto position = static_cast<std::size_t>(at - mesh.ranks.begin());
  part->numbers.assign(1, 0);
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    std::vector<std::int64_t> mine;
    for (std::int64_t i = 0; i < tensor.shape[d]; ++i) {
      if (holds_index(mesh, placements, position, static_cast<std::int32_t>(d), tensor.shape[d],
                      i)) {
        mine.push_back(i);
      }
    }
    std::vector<std::int64_t> longer;
    for (const std::int64_t number : part->numbers) {
      for (const std::int64_t i : mine) longer.push_back(number * tensor.shape[d] + i);
    }
    part->numbers = std::move(longer);
    part->shape.push_back(static_cast<std::int64_t>(mine.size()));
  }
  for (std::int64_t& number : part->numbers) number %= 100;
  part->dtype = dtype;
  part->bytes.assign(part->numbers.size() * unjam::dtype_bytes(dtype), 0x5a);
  if (filled) {
    unjam::copy_box(part->as_numbers(&part->numbers), part->local("").place, part->shape);
  }
  return true;
}

// One rank's part in a run.
class Mover {
 public:
  Mover(std::shared_ptr<const ReshardPlan> plan, std::int32_t rank) : plan_(std::move(plan)) {
    for (const reshard::Tensor& tensor : plan_->plan().request.tensors) {
      Part part;
      const Request& request = plan_->plan().request;
      if (part_of(tensor, request.src, tensor.src, tensor.src_dtype, rank, true, &part)) {
        src_.emplace_back(tensor.name, std::move(part));
      }
      part = {};
      if (part_of(tensor, request.dst, tensor.dst, tensor.dst_dtype, rank, false, &part)) {
        dst_.emplace_back(tensor.name, std::move(part));
      }
    }
  }

  unjamRequest_t begin(unjamGroup_t group, const std::string& key) {
    ReshardCall call;
    call.key = key;
    for (auto& [name, part] : src_) call.src.push_back(part.local(name));
    for (auto& [name, part] : dst_) call.dst.push_back(part.local(name));
    unjamRequest_t request = nullptr;
    const unjam::Result result = unjam::run_reshard(plan_, *group, std::move(call), &request);
    if (!result.ok()) fail(result.message);
    return request;
  }

  void check_numbers() {
    for (auto& [name, part] : dst_) {
      std::vector<std::int64_t> found(part.numbers.size());
      unjam::copy_box(part.local(name).place, part.as_numbers(&found), part.shape);
      if (found != part.numbers) fail("tensor " + name + " has not what it should have");
    }
  }

 private:
  const std::shared_ptr<const ReshardPlan> plan_;
  std::vector<std::pair<std::string, Part>> src_, dst_;
};

TEST(ReshardRun, RandomRequestsInCrossedOrder) {
  const int cases = kThreadSanitized ? 4 : 12;
  for (int i = 0; i < cases; ++i) {
    Cases random(mix(base_seed(), static_cast<std::uint64_t>(i)));
    Request first = random.request(random.chance(50), 1);
    // The same way back, so that every rank has to do with both.
    Request second = first;
    std::swap(second.src, second.dst);
    for (Tensor& tensor : second.tensors) {
      std::swap(tensor.src, tensor.dst);
      std::swap(tensor.src_dtype, tensor.dst_dtype);
    }
    for (Request* request : {&first, &second}) {
      request->options.window = static_cast<std::int32_t>(random.between(1, 4));
      request->options.max_bytes = 4096 * request->options.window;
    }
    const std::string text = text_of(first);
    const auto ranks = static_cast<int>(first.topology.host.size());
    const auto there = std::make_shared<const ReshardPlan>(reshard::make_plan(std::move(first)));
    const auto back = std::make_shared<const ReshardPlan>(reshard::make_plan(std::move(second)));
    Job job(ranks);
    job.run([&](Rank& rank) {
      Mover movers[] = {Mover(there, rank.rank), Mover(back, rank.rank)};
      for (int round = 0; round < 2; ++round) {
        unjamRequest_t requests[2];
        const int begins = (rank.rank + round) % 2;
        for (const int which : {begins, 1 - begins}) {
          requests[which] = movers[which].begin(rank.all, which == 0 ? "there" : "back");
        }
        for (const int which : {0, 1}) {
          rank.wait(requests[which], "a run");
          movers[which].check_numbers();
        }
      }
    });
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "case " << i << ": " << text;
      return;
    }
  }
}

}  // namespace
}  // namespace unjam_test
