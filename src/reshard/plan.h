// A plan of cross-mesh resharding ("On Optimizing the Communication of Model Parallelism", section
// 3): every rank makes the same one from the same request, without a word to another rank.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "reshard/bundles.h"
#include "reshard/request.h"
#include "reshard/routes.h"
#include "reshard/senders.h"

namespace unjam::reshard {

struct Plan {
  Request request;  // its tensors sorted by name
  Ports ports;
  std::vector<TensorClass> classes;
  std::vector<std::uint32_t> class_of;  // of each tensor
  std::vector<Stripe> stripes;          // those of a bundle one behind the other
  std::vector<Bundle> bundles;          // in the order in which they should begin
  std::vector<LocalCopy> copies;
  Loads loads;
  // The bytes that the busiest port must carry in one direction, whoever plans.
  std::int64_t bound = 0;
  // Of all that ranks must agree on and of what came out: ranks with equal ones have equal plans.
  std::uint64_t digest = 0;

  std::int64_t busiest() const;   // the bytes that the busiest port does carry
  std::int64_t received() const;  // bytes that go through NICs, once for each host that gets them
};

// The request cannot be planned; what() names the cause and the cure.
class BadRequest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

Plan make_plan(Request request);

}  // namespace unjam::reshard
