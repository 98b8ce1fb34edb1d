// In which order bundles begin: only a priority, for what is under way together shares the ports.
#pragma once

#include <vector>

#include "reshard/bundles.h"

namespace unjam::reshard {

// Puts the bundles in rounds whose bundles meet at no port, the largest ones first (the greedy sets
// of the paper's section 3.2, without chance), and sorts them by round and size.
void set_order(const Ports& ports, std::vector<Bundle>* bundles);

}  // namespace unjam::reshard
