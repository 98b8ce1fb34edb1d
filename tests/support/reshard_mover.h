// Ranks that carry plans of resharding out, and know which element is to be where.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/host/boxes.h"
#include "reshard/plan.h"
#include "runtime/reshard_run.h"
#include "tests/support/job.h"
#include "tests/support/reshard_cases.h"

namespace unjam_test {

// A rank's part of a tensor, whose elements are their numbers in the whole one, modulo 100, which
// all types hold.
struct Part {
  std::vector<std::int64_t> shape, numbers;
  std::vector<std::uint8_t> bytes;  // as the type has them
  DType dtype = DType::kInt64;

  unjam::LocalTensor local(const std::string& name) {
    return {name, {bytes.data(), dtype, unjam::row_major(shape, dtype)}, shape};
  }
  void fill() { unjam::copy_box(as_numbers(&numbers), local("").place, shape); }
  unjam::BoxPlace as_numbers(std::vector<std::int64_t>* list) const {
    return {reinterpret_cast<std::uint8_t*>(list->data()), DType::kInt64,
            unjam::row_major(shape, DType::kInt64)};
  }
};

// False: the rank is not in the mesh.
inline bool part_of(const Tensor& tensor, const Mesh& mesh,
                    const std::vector<Placement>& placements, DType dtype, std::int32_t rank,
                    bool filled, Part* part) {
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
  if (filled) part->fill();
  return true;
}

// One rank's part in a run.
class Mover {
 public:
  Mover(std::shared_ptr<const unjam::ReshardPlan> plan, std::int32_t rank)
      : plan_(std::move(plan)) {
    for (const Tensor& tensor : plan_->plan().request.tensors) {
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

  unjamRequest_t begin(
      unjamGroup_t group, const std::string& key,
      const std::function<void(unjam::ReshardCall&)>& change = [](unjam::ReshardCall&) {}) {
    unjam::ReshardCall call;
    call.key = key;
    for (auto& [name, part] : src_) call.src.push_back(part.local(name));
    for (auto& [name, part] : dst_) call.dst.push_back(part.local(name));
    change(call);
    unjamRequest_t request = nullptr;
    const unjam::Result result = unjam::run_reshard(plan_, *group, std::move(call), &request);
    if (!result.ok()) fail(result.message);
    return request;
  }

  void blank_sources() {
    for (auto& [name, part] : src_) std::fill(part.bytes.begin(), part.bytes.end(), 0x5a);
  }
  void fill_sources() {
    for (auto& [name, part] : src_) part.fill();
  }

  void check_numbers() { check_numbers(nullptr); }
  void check_numbers(const std::vector<std::string>& names) { check_numbers(&names); }

 private:
  void check_numbers(const std::vector<std::string>* names) {
    for (auto& [name, part] : dst_) {
      if (names != nullptr && std::find(names->begin(), names->end(), name) == names->end()) {
        continue;
      }
      std::vector<std::int64_t> found(part.numbers.size());
      unjam::copy_box(part.local(name).place, part.as_numbers(&found), part.shape);
      if (found != part.numbers) fail("tensor " + name + " has not what it should have");
    }
  }

  const std::shared_ptr<const unjam::ReshardPlan> plan_;
  std::vector<std::pair<std::string, Part>> src_, dst_;
};

// A request of few bundles, and the same way back, so that every rank has to do with both.
inline std::pair<Request, Request> there_and_back(Cases& random) {
  Request first = random.request(random.chance(50), 1);
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
  return {std::move(first), std::move(second)};
}

// Ranks begin the two in another order each.
inline void move_in_crossed_order(Rank& rank,
                                  const std::shared_ptr<const unjam::ReshardPlan>& there,
                                  const std::shared_ptr<const unjam::ReshardPlan>& back) {
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
}

// Drawn cases, each on a job of its own, on the device of `config`: each rank begins two plans in
// another order, forth and back. Ends with the first that fails, whose text is told.
inline void move_random_requests(int cases, const unjamConfig_t& config = default_config()) {
  for (int i = 0; i < cases; ++i) {
    Cases random(mix(base_seed(), static_cast<std::uint64_t>(i)));
    auto [first, second] = there_and_back(random);
    const std::string text = text_of(first);
    const auto ranks = static_cast<int>(first.topology.host.size());
    const auto there =
        std::make_shared<const unjam::ReshardPlan>(unjam::reshard::make_plan(std::move(first)));
    const auto back =
        std::make_shared<const unjam::ReshardPlan>(unjam::reshard::make_plan(std::move(second)));
    Job job(ranks, config);
    job.run([&](Rank& rank) { move_in_crossed_order(rank, there, back); });
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "case " << i << ": " << text;
      return;
    }
  }
}

}  // namespace unjam_test
