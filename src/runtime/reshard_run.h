// Carries a plan of cross-mesh resharding out, as the part of it that one rank does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "reshard/plan.h"
#include "reshard/rank_plan.h"
#include "runtime/context.h"
#include "runtime/reshard_arguments.h"
#include "runtime/result.h"

namespace unjam {

// A plan, and what ranks of this process do of it, found once each.
class ReshardPlan {
 public:
  explicit ReshardPlan(reshard::Plan plan) : plan_(std::move(plan)) {}

  const reshard::Plan& plan() const { return plan_; }
  std::shared_ptr<const reshard::RankPlan> of(std::int32_t rank) const;

 private:
  const reshard::Plan plan_;
  mutable std::mutex mutex_;
  mutable std::map<std::int32_t, std::shared_ptr<const reshard::RankPlan>> ranks_;
};

struct ReshardCall {
  std::vector<LocalTensor> src, dst;
  std::string key;
  std::int32_t priority = 0;
  std::string match_text;
  // On a GPU: UNJAM_STREAM_ASYNC behind what the stream has, UNJAM_STREAM_NONE at once.
  unjamStreamOrder_t stream_order = UNJAM_STREAM_NONE;
  void* stream = nullptr;
  unjamCallback_t callback = nullptr;
  void* user = nullptr;
};

// Ranks of the plan are ranks of the group; all members call it. Returns at once. What the caller
// gives is looked at first: then nothing was submitted. The request ends with the first error, and
// has the names of this rank's tensors that are not complete.
Result run_reshard(std::shared_ptr<const ReshardPlan> plan, unjamGroup& group, ReshardCall call,
                   unjamRequest** request);

}  // namespace unjam
