// The algorithms, a row each. Whoever needs to know which there are, and what they are called and
// serve, reads it here: the selector, the settings, the C API's ranges, the tests' sweeps; Python
// and its command line by way of UNJAM_ALGORITHM's description.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "plan/algorithms/chain.h"
#include "plan/algorithms/double_binary_tree.h"
#include "plan/algorithms/hierarchical.h"
#include "plan/algorithms/one_shot.h"
#include "plan/algorithms/pairwise.h"
#include "plan/algorithms/pat.h"
#include "plan/algorithms/ring.h"
#include "plan/algorithms/rsag.h"
#include "plan/algorithms/two_shot.h"
#include "plan/common.h"
#include "plan/plan.h"

namespace unjam {

struct AlgorithmRow {
  const char* name;  // as UNJAM_ALGORITHM takes it
  bool (*serves)(Kind kind);
  std::uint32_t fewest_slots;  // guaranteed ones of a connector
  // Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
  std::optional<Plan> (*plan)(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error);
  bool on_rails = false;  // the group's hosts must have as many ranks each (host_table.h)
};

// A row's place is its Algorithm, and its number in the C API: a new one comes last.
inline constexpr AlgorithmRow kAlgorithms[] = {
    {"ring", ring_serves, kMinRingSlots, plan_ring},
    {"one_shot", one_shot_serves, kMinOneShotSlots, plan_one_shot},
    {"rsag", rsag_serves, kMinRsagSlots, plan_rsag},
    {"pairwise", pairwise_serves, kMinPairwiseSlots, plan_pairwise},
    {"two_shot", two_shot_serves, kMinTwoShotSlots, plan_two_shot},
    {"chain", chain_serves, kMinChainSlots, plan_chain},
    {"double_binary_tree", double_binary_tree_serves, kMinDoubleTreeSlots, plan_double_binary_tree},
    {"hierarchical", hierarchical_serves, kMinHierarchicalSlots, plan_hierarchical, true},
    {"pat", pat_serves, kMinPatSlots, plan_pat, true},
};
inline constexpr int kNumAlgorithms = static_cast<int>(std::size(kAlgorithms));

// algorithm: one that there is.
constexpr const AlgorithmRow& row_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<std::uint8_t>(algorithm)];
}
constexpr const char* to_string(Algorithm algorithm) { return row_of(algorithm).name; }

// "auto|ring|one_shot|…": auto, and the rows' names in their order.
const char* algorithm_choices();
// The number that one of these names, or a former one, stands for, auto's being -1; nothing: it is
// none of them.
std::optional<int> algorithm_named(std::string_view name);
// What an algorithm is called now, where the name is a former one; else the name.
std::string_view name_today(std::string_view name);
// "ring|one_shot": the names of those that serve the kind.
std::string algorithms_for(Kind kind);

}  // namespace unjam
