// The paper's nine cases of resharding between two meshes (table 2), as far as they are known: the
// table itself is lost, the cases are those of alpa-projects/alpa, branch mlsys23-artifact. Case 8
// repeats case 7 there; here it is the one broadcast that the paper's text tells of.
#pragma once

#include "reshard/request.h"

namespace unjam::reshard {

inline constexpr int kNumNineCases = 9;

// number: 1 to 9. Hosts of as many devices as the meshes' second dimension says, each with one NIC;
// the source mesh first. A tensor "w" of float32.
Request nine_case(int number);

}  // namespace unjam::reshard
