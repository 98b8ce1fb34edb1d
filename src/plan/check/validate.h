// What can be said about plans without executing them.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace unjam {

// "" if all ranks' plans agree on everything but the program, the geometry covers the data exactly
// once, its slices fit the slots, and each primitive is meaningful by itself; else what is wrong.
std::string validate_plans(const PlanRequest& request, const std::vector<Plan>& plans,
                           std::uint32_t slot_bytes);

// Elements of a slice: what one guaranteed slot carries.
std::uint64_t slice_elements(const Plan& plan, std::uint32_t slot_bytes);

// Whether rank `rank` has input at part `part`, or must fill the output there.
bool has_input(const PlanRequest& request, int rank, int part);
bool has_output(const PlanRequest& request, int rank, int part);

// "rank 3 primitive 5 (recv_reduce_send part 2 from 2 to 4)"
std::string primitive_text(int rank, std::size_t index, const Plan& plan, int ranks);

}  // namespace unjam
