// One greedy, symbolic execution of all ranks' programs on one lane, for the plan checker (the
// model and what it proves: checker.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/check/symbolic.h"
#include "plan/plan.h"

namespace unjam {

class LaneRun {
 public:
  // A loop to run, and how many loops it stands for in the byte counts.
  struct Loop {
    std::uint64_t number = 0;
    std::uint64_t weight = 1;
  };

  // The plans must have passed validate_plans. values: null to look at deadlocks only.
  LaneRun(const PlanRequest& request, const std::vector<Plan>& plans, std::uint32_t lane, int slots,
          std::uint32_t slot_bytes, std::vector<Loop> loops, ValuePool* values);

  // Whether the programs complete, with the right results.
  bool run();

  const std::string& error() const { return error_; }
  std::uint64_t bytes_sent(int rank) const { return ranks_[static_cast<std::size_t>(rank)].bytes; }
  bool sends_anything() const { return sends_anything_; }
  // The time, in slices, at which the i-th of the loops given is complete on all ranks.
  std::uint64_t loop_end(std::size_t i) const { return loop_end_[i]; }

 private:
  enum class Step { kMoved, kBlocked, kFailed };

  struct Message {
    ValueId value = kNoValue;
    std::uint32_t part = 0;
    std::uint32_t slice = 0;
    std::uint32_t loop = 0;  // index into loops_
    std::uint32_t primitive = 0;
    std::uint32_t hop = 0;     // see hop_sent()
    std::uint64_t length = 0;  // elements
    std::uint64_t time = 0;    // when it was posted; once consumed: when its slot was freed
    bool into_output = false;  // the sender may store it into the receiver's output
  };
  struct Connector {
    int from = 0, to = 0;
    std::uint64_t posted = 0, consumed = 0;
    std::vector<Message> slots;
  };
  struct Rank {
    std::uint32_t pass = 0, primitive = 0, slice = 0;
    std::uint32_t loop = 0;  // index into loops_, that the primitive works on
    std::uint32_t lag = 0;   // the most of its program
    std::uint64_t time = 0, bytes = 0;
    int waiting_on = -1;  // connector
    bool waiting_to_send = false, queued = false;
  };

  bool done(const Rank& rank) const { return rank.pass == loops_.size() + rank.lag; }
  // The ranks that a primitive moves a slice from, or to, ascending.
  using Ranks = std::span<const std::uint16_t>;

  std::uint64_t chunk_length(std::uint32_t part, std::uint64_t loop) const;
  // Elements that the primitive works on in this loop, in as many slices as they need. Of a scatter
  // or collect the longest slice: all its slices are moved at once.
  std::uint64_t work_length(int rank, std::uint32_t primitive, std::uint64_t loop) const;
  Ranks sources(int rank, std::uint32_t primitive) const;
  Ranks targets(int rank, std::uint32_t primitive) const;
  Ranks ranks_of(int rank, Peers peers, std::uint16_t wide) const;
  // Elements, of the primitive's slice of `length`, from or to a peer among them; 0: none.
  std::uint64_t length_from(int rank, const Primitive& p, int from, std::uint64_t length) const;
  std::uint64_t length_to(int rank, const Primitive& p, int to, std::uint64_t length) const;
  // Whose slice it is that travels.
  static std::uint32_t part_from(const Primitive& p, int from);
  static std::uint32_t part_to(const Primitive& p, int to);
  // Of the loop that the rank's primitive works on.
  std::size_t cell(int rank, std::uint32_t part, std::uint32_t slice) const {
    const std::uint32_t loop = ranks_[static_cast<std::size_t>(rank)].loop;
    return (std::size_t{loop} * part_length_.size() + part) * slices_ + slice;
  }
  Connector& connector(int from, int to);
  const Message* front(int from, int to);
  void wake(int rank);
  bool advance(int rank);
  std::uint64_t slice_length(int rank, std::uint32_t primitive) const;
  const Primitive& enter(int rank, std::uint32_t primitive);
  Step ready(int rank, std::uint32_t primitive, std::uint64_t length);
  // A slice that is ready.
  Step move(int rank, std::uint32_t primitive, std::uint64_t length);
  void note_alike(int rank, const Primitive& p, const Connector& c);
  bool fits(int rank, const Primitive& p, const Message& m, int from, std::uint64_t length);
  ValueId evaluate(int rank, std::uint32_t primitive, std::size_t cell);
  ValueId load_local(int rank, const Primitive& p, std::size_t cell);
  ValueId gather(int rank, std::uint32_t primitive, ValueId local);
  void note_read(int rank, std::size_t cell, const Primitive& p, int times);
  bool may_store(int rank, std::size_t cell, ValueId value, ValueId received);
  bool is_first(int rank, std::size_t cell, const Message& m);
  bool may_store_there(int rank, const Primitive& p, int to, ValueId value);
  bool finish_loop(int rank);
  std::string result_defect(int rank, std::uint32_t part, std::uint32_t slice, ValueId v);
  std::string where(int rank) const;
  std::string wait_text(int rank) const;
  std::string deadlock_text() const;
  std::string leftover_text() const;
  ValueId fail(std::string text);

  const PlanRequest& request_;
  const std::vector<Plan>& plans_;
  const std::vector<Loop> loops_;
  ValuePool* const values_;
  const std::uint64_t capacity_;
  const std::uint64_t chunk_;
  const std::uint64_t slice_elements_;
  const std::uint32_t slices_;  // most of a chunk
  std::vector<std::uint64_t> part_length_;
  std::vector<Rank> ranks_;
  // Of each rank, its sets' members; and the connectors that come in, by neighbour. -1: not used
  // yet. From who is no neighbour, in `strange_` (a plan that sends to who does not know).
  std::vector<std::vector<std::vector<std::uint16_t>>> sets_;
  std::vector<std::vector<int>> connectors_into_;
  std::unordered_map<std::uint64_t, int> strange_;
  std::vector<Connector> connectors_;
  std::vector<int> runnable_;
  // What each rank has written to its output: by cell().
  std::vector<std::vector<ValueId>> output_;
  // How often earlier primitives of the rank read that of its input, to 2, and whether a carrier
  // does: by cell().
  static constexpr std::uint8_t kReads = 3, kCarried = 4;
  std::vector<std::vector<std::uint8_t>> read_;
  // The result as the first rank to finish it has it: [(loop * parts + part) * slices_ + slice].
  std::vector<ValueId> result_;
  std::vector<std::uint64_t> loop_end_;
  bool sends_anything_ = false;
  std::string error_;
  std::string alike_;  // two packets that are, if there are such
};

}  // namespace unjam
