// What a primitive waits for of the others of its program, where primitives are moved independently
// of each other and whoever moves them may be interrupted. Why, and why it makes no deadlock:
// docs/internals/redo.md.
//
// The rule. Such a primitive moves a chunk only when all slices that come in front of its own, on
// all connectors that it uses, have been moved:
//   - one that receives and sends;
//   - one that reduces in place: moved again, a chunk would be reduced with what became of it;
//   - one with a set of whose connectors on one side some carry a step that others do not.
// Else what it has taken is given back, and what became of that is forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace unjam {

// Of a primitive, what the rule looks at. Neighbours, or places, have a bit each; those with whom
// it exchanges nothing, for their chunks are empty, have none.
struct OrderedStep {
  std::uint64_t from = 0, to = 0;
  bool reduces = false, stores = false;
};

// Why a primitive waits.
struct OrderReasons {
  bool passes_on = false;         // it receives and sends
  bool reduces_in_place = false;  // it reduces and stores
  bool has_uneven_sides = false;  // of connectors on one side some carry a step that others do not

  constexpr bool any() const { return passes_on || reduces_in_place || has_uneven_sides; }
};

// Which other primitives of the program one waits for, a bit each, before it moves chunk l: for
// those of their chunks that come in front of it in the program's order
// (SliceOrder::before_chunk()).
struct OrderWaits {
  std::uint64_t at_outs = 0;  // that send where it sends
  std::uint64_t at_ins = 0;   // that receive where it receives

  constexpr std::uint64_t all() const { return at_outs | at_ins; }
  bool operator==(const OrderWaits&) const = default;
};

constexpr OrderReasons order_reasons(std::span<const OrderedStep> program, std::size_t i) {
  const OrderedStep& own = program[i];
  OrderReasons reasons;
  reasons.passes_on = own.from != 0 && own.to != 0;
  reasons.reduces_in_place = own.reduces && own.stores;
  for (std::size_t j = 0; j < program.size(); ++j) {
    if (j == i) continue;
    const std::uint64_t outs = own.to & program[j].to, ins = own.from & program[j].from;
    reasons.has_uneven_sides =
        reasons.has_uneven_sides || (outs != 0 && outs != own.to) || (ins != 0 && ins != own.from);
  }
  return reasons;
}

// Of the i-th of at most 64 primitives.
constexpr OrderWaits order_waits(std::span<const OrderedStep> program, std::size_t i) {
  OrderWaits waits;
  if (!order_reasons(program, i).any()) return waits;
  for (std::size_t j = 0; j < program.size(); ++j) {
    if (j == i) continue;
    if ((program[i].to & program[j].to) != 0) waits.at_outs |= std::uint64_t{1} << j;
    if ((program[i].from & program[j].from) != 0) waits.at_ins |= std::uint64_t{1} << j;
  }
  return waits;
}

}  // namespace unjam
