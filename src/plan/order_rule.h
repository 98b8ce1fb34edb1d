// What a primitive waits for of the others of its program, where primitives are moved independently
// of each other (executors, program/schedule.h) and whoever moves them may be interrupted.
//
// What is moved is published, and given back, on each connector by itself: what comes there in
// front of all that is missing, a prefix in the connector's order (program/slice_order.h). Whatever
// was moved and is in no prefix is forgotten, and is moved again by whoever goes on, to whom is
// handed over how many chunks of each primitive are done (engine/hand_over.h). So of a chunk all
// connectors that its primitive uses must say the same, moved or not, and what is forgotten must be
// such that it can be moved again.
//
// Why that does not come by itself. Say that of one rank an out-connector carries two primitives,
// one that sends the own part and, behind it in the program, one that receives and sends on; and
// that the latter alone uses its in-connector. If the second moves first, what it has received is
// given back, for nothing is in front of that there; and its result waits for the first one's, in
// no prefix. An interruption then forgets the result, and the slice that it was made of is gone.
// Turned round, with two primitives at the in-connector, a result is published whose source is not
// given back: whoever goes on receives it once more, and sends it once more.
//
// The rule. Such a primitive moves a chunk only when all slices that come in front of its own, on
// all connectors that it uses, have been moved. Then its own are in prefixes at once, all of them.
// These are such primitives:
//   - one that receives and sends;
//   - one that reduces in place, as it reduces and stores: moved again, a chunk would be reduced
//     with what became of it, so that it may never be forgotten;
//   - one with a set of whose connectors on one side some carry a step that others do not: there
//     prefixes differ.
// Of any other primitive all connectors carry the same steps, in the same order, so that they have
// the same prefix; and what it forgets is sent again from the input, which is not overwritten
// before peers have had it, or is received again, for it has not been given back.
//
// All that is waited for comes in front in the program's order, in which all ranks' programs end
// (plan/check/checker.h); so waiting makes no deadlock. A primitive has as many chunks as any other
// that shares a connector with it, or none, and then uses none.
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
