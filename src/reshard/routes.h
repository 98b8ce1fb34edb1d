// By which hosts in turn a bundle goes, and how it spreads inside them: a chain over the hosts'
// entries, and a chain from each entry. A host that hands on receives as much, so where meshes have
// no NIC in common that costs nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/bundles.h"

namespace unjam::reshard {

// What goes through each port.
struct Loads {
  std::vector<std::int64_t> out, in;
};

// Sets the hops of all bundles. Who has most to send hands nothing on.
Loads set_hops(const Ports& ports, const Assignment& assignment, std::vector<Bundle>* bundles);

}  // namespace unjam::reshard
