// What is left of a request without some ranks, and without some tensors.
//
// With a rank its whole replica goes: all ranks that have one place in the mesh dimensions in which
// every tensor is replicated. If there are several of these, what is left of their places need be
// no grid, so they become one dimension.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reshard/request.h"

namespace unjam::reshard {

// renumber: ranks behind those that are gone move up, as in a group without them. A request whose
// ranks are all hosts of their own stays one. BadRequest: a rank has parts that no other rank has,
// a name is not there, or nothing is left.
Request without(const Request& request, const std::vector<std::int32_t>& ranks,
                const std::vector<std::string>& tensors, bool renumber);

}  // namespace unjam::reshard
