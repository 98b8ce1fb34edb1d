// Symbolic values for the plan checker: what a slice holds, exactly. A value is either one rank's
// raw input, or an expression over contributions. Values are interned by structure: slices with
// equal ids were reduced in the same order and hold the same bits, however the operator rounds.
// Where in the vector a slice lies is not part of a value: the checker sees to it that no value
// moves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace unjam {

using ValueId = std::uint32_t;
inline constexpr ValueId kNoValue = 0;

enum class ValueState : std::uint8_t {
  kRaw,       // one rank's input, untouched
  kPartial,   // contributions, reduced so far
  kFinished,  // kFinish has been applied
};

class ValuePool {
 public:
  explicit ValuePool(int ranks);

  ValueId raw(int rank) const { return 1 + static_cast<ValueId>(rank); }
  // A raw input that has entered the reduction (kContribute).
  ValueId contribute(ValueId raw_value) const { return raw_value + static_cast<ValueId>(ranks_); }
  // Left operand first; both partial.
  ValueId combine(ValueId left, ValueId right);
  ValueId finish(ValueId partial);

  ValueState state(ValueId v) const { return nodes_[v].state; }
  // Whether the rank's input is in it.
  bool has(ValueId v, int rank) const;
  // Whether every rank's contribution is in it exactly once.
  bool complete(ValueId v) const;
  // "the contributions of ranks 0-3,5" / "the raw input of rank 2" / "nothing".
  std::string describe(ValueId v) const;
  // "lacks ranks 4,6-7 and has ranks 2 (2 times)"; "" if complete.
  std::string defect(ValueId v) const;

 private:
  // How often the ranks [first, last] have contributed.
  struct Interval {
    std::uint16_t first, last;
    std::uint32_t times;
  };
  struct Node {
    std::uint32_t begin = 0, size = 0;  // intervals, ascending and disjoint
    ValueId finished = kNoValue;        // this value with kFinish applied, once it was asked for
    ValueState state = ValueState::kRaw;
  };
  struct Entry {
    std::uint64_t key = 0;
    ValueId value = kNoValue;
  };

  Entry* find(std::uint64_t key);
  void grow();
  void append(int first, int last, std::uint32_t times, std::size_t begin);

  int ranks_;
  std::vector<Node> nodes_;
  std::vector<Interval> intervals_;
  std::vector<Entry> table_;  // (left, right) → combined; open addressing, size a power of two
  std::size_t used_ = 0;
};

}  // namespace unjam
