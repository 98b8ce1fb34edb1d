// What a rank gives for a run of a plan of resharding, looked at before anything is done.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/host/boxes.h"
#include "reshard/plan.h"
#include "runtime/context.h"
#include "runtime/result.h"

namespace unjam {

// A rank's own part of a tensor, as the caller gives it.
struct LocalTensor {
  std::string name;
  BoxPlace place;
  std::vector<std::int64_t> shape;
};

// By the tensors' numbers in the plan; no data: the rank has no part.
using Places = std::vector<BoxPlace>;

// Where the rank's parts lie. An error names the tensor, the rank and the cure: a part that is
// missing, not in the plan or not as planned, a destination in the memory of a source, ranks that
// the group has not.
Result take_parts(const reshard::Plan& plan, const unjamGroup& group,
                  const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst,
                  Places* src_places, Places* dst_places);

}  // namespace unjam
