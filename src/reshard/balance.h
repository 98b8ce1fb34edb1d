// Work that several ports can do, shared so that the busiest port has least to do.
#pragma once

#include <cstdint>
#include <vector>

namespace unjam::reshard {

struct SharedWork {
  std::vector<int> ports;  // any of these, or several; ascending
  std::int64_t bytes = 0;
};

struct Balance {
  // What the busiest port has to do, rounded up to a byte. No sharing does better: some set X of
  // ports must do alone at least that times |X| (the dual of the linear programme).
  std::int64_t most = 0;
  std::vector<std::vector<std::int64_t>> bytes;  // of each work, by port as it lists them
};

// A flow from work to ports whose capacity is raised, by what a cut shows, until all flows.
Balance balance(int num_ports, const std::vector<SharedWork>& work);

}  // namespace unjam::reshard
