// The single-queue model, decided from the disorders alone.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sim/job.h"
#include "sim/outcome.h"
#include "sim/sparse_orders.h"

namespace unjam::sim {

// Exact: the orders of the GPUs, each a chain, form a graph of collectives; the round deadlocks if
// and only if it has a cycle. A cycle must turn back somewhere, and only disorders turn back.
class ExactSingleQueue {
 public:
  explicit ExactSingleQueue(const Job& job) : job_(job) {}
  bool deadlocks(const SparseOrders& orders);
  // The cycle at which everything comes to stand; for a round that deadlocks.
  std::vector<Wait> cycle(const SparseOrders& orders);

 private:
  bool returns(const SparseOrders& orders, Collective from, Collective to);
  bool mark(std::uint64_t code);
  void stuck_offers(const SparseOrders& orders, std::uint32_t component,
                    std::unordered_map<std::uint32_t, Collective>* offers) const;

  const Job& job_;
  std::vector<Collective> stack_;
  // The set of collectives seen by one search: open addressing, cleared by what was entered.
  std::vector<std::uint64_t> table_;
  std::vector<std::uint64_t> entered_;
};

// Released: groups do not influence each other and a GPU's n-th turn is its n-th invocation, so
// only groups whose members' orders are changed have to be replayed.
class ReleasedSingleQueue {
 public:
  explicit ReleasedSingleQueue(const Job& job);
  Verdict decide(const SparseOrders& orders, bool waits);

 private:
  // What a group without disorder does; equal for groups whose members have equal orders.
  struct Dull {
    Verdict verdict;                 // GPUs as places among the members, groups as 0
    std::vector<char> empty_before;  // [step] whether no offer is outstanding
  };
  struct Cursor {
    const std::uint32_t* position;  // of the pick; sorted
    const std::uint32_t* k;         // its collective; nullptr: its place in the list
    std::uint32_t size;
    std::uint32_t next;
    bool offered;
  };
  Verdict replay(std::uint32_t group, std::uint32_t from, std::uint32_t disturbed_until,
                 Dull* record, const Dull* dull);
  Verdict in_terms_of(std::uint32_t group, const Verdict& verdict) const;
  static bool earlier(const Verdict& a, const Verdict& b) {
    return a.step != b.step ? a.step < b.step : a.gpu < b.gpu;
  }

  const Job& job_;
  std::vector<std::uint32_t> class_of_;  // [group]
  std::vector<Dull> classes_;
  std::vector<std::uint32_t> deadlocking_;  // groups that do so without any disorder

  std::vector<Cursor> cursors_;
  std::vector<std::uint32_t> picks_;  // positions and collectives of disordered members
  struct Touch {
    std::uint32_t group, from, until;
  };
  std::vector<Touch> touched_;
  std::vector<std::uint32_t> touch_of_;  // [group] index in touched_, or none
};

}  // namespace unjam::sim
