#include "tests/gpu/written_plans.h"

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "plan/lower.h"
#include "plan/selector.h"
#include "tests/support/written_programs.h"

namespace {

std::atomic<Written> written{Written::kNone};
std::mutex mutex;
std::map<std::pair<Written, std::string>, int> reasons;

std::vector<unjam::Plan> plans_of(Written which, const unjam::PlanRequest& request,
                                  const unjam::PlanLimits& limits) {
  switch (which) {
    case Written::kTreeBroadcast:
      return unjam_test::tree_broadcast(request, limits);
    case Written::kLaggingTreeBroadcast:
      return unjam_test::tree_broadcast(request, limits, 2, 1);
    case Written::kTreeReduce:
      return unjam_test::tree_reduce(request, limits);
    case Written::kTwoLevels:
      return unjam_test::two_level_all_reduce(request, limits);
    case Written::kTwoLevelsApart:
      return unjam_test::two_level_all_reduce(request, limits, 2, 1);
    default:
      return unjam_test::broadcast_in_halves(request, limits);
  }
}

const char* name_of(Written which) {
  constexpr const char* kNames[] = {"none",        "tree broadcast", "lagging tree broadcast",
                                    "tree reduce", "two levels",     "two levels apart",
                                    "halves"};
  return kNames[static_cast<int>(which)];
}

}  // namespace

void set_written(Written which) { written = which; }

std::string lowering_reasons() {
  const std::lock_guard lock(mutex);
  std::string text;
  for (const auto& [which, number] : reasons) {
    text += (text.empty() ? "" : "; ") + std::string(name_of(which.first)) + ", " + which.second +
            ": " + std::to_string(number);
  }
  return text.empty() ? "none" : text;
}

// The linker gives the library's calls of unjam::make_plan() to the former, and its own to the
// latter (--wrap).
std::optional<unjam::Plan> wrapped(const unjam::PlanRequest& request,
                                   const unjam::PlanLimits& limits,
                                   std::optional<unjam::Algorithm> algorithm,
                                   std::string* error) __asm__("__wrap_" UNJAM_MAKE_PLAN);
std::optional<unjam::Plan> real(const unjam::PlanRequest& request, const unjam::PlanLimits& limits,
                                std::optional<unjam::Algorithm> algorithm,
                                std::string* error) __asm__("__real_" UNJAM_MAKE_PLAN);

std::optional<unjam::Plan> wrapped(const unjam::PlanRequest& request,
                                   const unjam::PlanLimits& limits,
                                   std::optional<unjam::Algorithm> algorithm, std::string* error) {
  const Written which = written;
  if (which == Written::kNone || request.ranks < 4) return real(request, limits, algorithm, error);
  unjam::Plan plan = plans_of(which, request, limits)[static_cast<std::size_t>(request.rank)];
  const unjam::LowerLimits executors{512, limits.lanes, true, 20, limits.guaranteed_slot_bytes};
  const unjam::Lowered lowered = unjam::lower(plan, request.ranks, request.rank, executors);
  if (lowered.why != unjam::NeedsEngine::kNo) {
    const std::lock_guard lock(mutex);
    ++reasons[{which, unjam::to_string(lowered.why)}];
  }
  return plan;
}
