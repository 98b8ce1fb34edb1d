// The order rule (plan/order_rule.h), played: ranks that move the primitives of a program
// independently of each other, as executors do, publish prefixes (program/slice_order.h), are
// interrupted anywhere, hand over how many chunks of each primitive are done (engine/hand_over.h),
// and go on, pass by pass as engines or once more as executors. Programs are proved by the plan
// checker: planners', written ones, and random trees for each part, so that steps share connectors
// in many ways. What each slice is, and what each rank ends with, is what the same program gives
// pass by pass. Values are symbolic, and all is in place.
#include "plan/order_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/algorithms/chain.h"
#include "plan/algorithms/rsag.h"
#include "plan/check/checker.h"
#include "plan/check/validate.h"
#include "plan/common.h"
#include "plan/program_builder.h"
#include "program/slice_order.h"
#include "tests/support/written_programs.h"

namespace unjam {
namespace {

constexpr std::uint32_t kMostTerms = 16;

enum class Mistake {
  kNone,
  // What an executor leaves out of the rule.
  kNoWaitAtOuts,
  kNoWaitAtIns,
  kPassesOnAtOnce,
  kReducesInPlaceAtOnce,
  kUnevenAtOnce,
  // What who is interrupted does.
  kForgetsAChunk,
};
constexpr Mistake kMistakes[] = {Mistake::kNoWaitAtOuts,   Mistake::kNoWaitAtIns,
                                 Mistake::kPassesOnAtOnce, Mistake::kReducesInPlaceAtOnce,
                                 Mistake::kUnevenAtOnce,   Mistake::kForgetsAChunk};

const char* to_string(Mistake mistake) {
  switch (mistake) {
    case Mistake::kNone:
      return "no mistake";
    case Mistake::kNoWaitAtOuts:
      return "nobody waits for what is sent";
    case Mistake::kNoWaitAtIns:
      return "nobody waits for what is received";
    case Mistake::kPassesOnAtOnce:
      return "what receives and sends does not wait";
    case Mistake::kReducesInPlaceAtOnce:
      return "what reduces in place does not wait";
    case Mistake::kUnevenAtOnce:
      return "what has uneven sides does not wait";
    case Mistake::kForgetsAChunk:
      return "a chunk is forgotten";
  }
  return "?";
}

OrderWaits waits_of(const std::vector<OrderedStep>& program, std::size_t i, Mistake mistake) {
  OrderReasons reasons = order_reasons(program, i);
  if (mistake == Mistake::kPassesOnAtOnce) reasons.passes_on = false;
  if (mistake == Mistake::kReducesInPlaceAtOnce) reasons.reduces_in_place = false;
  if (mistake == Mistake::kUnevenAtOnce) reasons.has_uneven_sides = false;
  if (!reasons.any()) return {};
  OrderWaits waits = order_waits(program, i);
  if (mistake == Mistake::kNoWaitAtOuts) waits.at_outs = 0;
  if (mistake == Mistake::kNoWaitAtIns) waits.at_ins = 0;
  return waits;
}

// ---- programs ----

using Ranks = std::uint32_t;  // a bit each
bool has(std::uint64_t bits, std::size_t i) { return (bits >> i & 1) != 0; }

struct Step {
  std::uint32_t flags = 0, part = 0, lag = 0;
  Ranks from = 0, to = 0;
  bool is_empty = false;  // it has no chunks
};

struct Programs {
  PlanRequest request;
  std::vector<Plan> plans;
  std::uint32_t slots = 4;
  bool proved = false;

  std::size_t parts() const { return plans[0].geometry.parts; }
  // Of each part that is not empty; 0: they differ.
  std::uint32_t chunks() const {
    const Geometry& g = plans[0].geometry;
    const std::uint64_t all = g.loops(g.first_lane);
    for (std::uint32_t p = 0; p < g.parts; ++p) {
      if (p != g.empty_part && g.loops_of(g.lane_part(p, g.first_lane)) != all) return 0;
    }
    return static_cast<std::uint32_t>(all);
  }
  std::string text() const {
    std::string text = std::string(unjam::to_string(request.kind)) + ", root " +
                       std::to_string(request.root) + ", " + std::to_string(slots) + " slots";
    for (std::size_t r = 0; r < plans.size(); ++r) {
      for (std::size_t i = 0; i < plans[r].primitives.size(); ++i) {
        text += "\n  " + primitive_text(static_cast<int>(r), i, plans[r], request.ranks) +
                ", lag " + std::to_string(plans[r].primitives[i].lag);
      }
    }
    return text;
  }
};

std::vector<Step> steps_of(const Plan& plan) {
  std::vector<Step> steps;
  const std::uint32_t empty = plan.geometry.empty_part;
  for (std::size_t i = 0; i < plan.primitives.size(); ++i) {
    const Primitive& p = plan.primitives[i];
    Step step{p.flags, p.part, p.lag};
    const bool scatters = (p.flags & kScatter) != 0, collects = (p.flags & kCollect) != 0;
    step.is_empty = !scatters && !collects && p.part == empty;
    for (const int q : ranks_received_from(plan, i)) step.from |= 1u << q;
    for (const int q : ranks_sent_to(plan, i)) step.to |= 1u << q;
    if (empty != kNoPart && scatters) step.to &= ~(1u << empty);
    if (empty != kNoPart && collects) step.from &= ~(1u << empty);
    if (step.is_empty) step.from = step.to = 0;
    steps.push_back(step);
  }
  return steps;
}

std::vector<OrderedStep> ordered(const std::vector<Step>& steps) {
  std::vector<OrderedStep> all;
  for (const Step& s : steps) {
    all.push_back({s.from, s.to, (s.flags & kReduce) != 0, (s.flags & kCopy) != 0});
  }
  return all;
}

// ---- the model ----

// How often each rank's contribution is in it, 4 bits each, and how often it was finished.
using Value = std::uint64_t;
constexpr Value contribution(std::size_t rank) { return Value{1} << 4 * rank; }
constexpr Value kOneFinish = Value{1} << 32;

struct Slice {
  std::size_t sent_by = 0, received_by = 0;  // steps
  std::uint32_t part = 0, chunk = 0;
  Value value = 0;

  bool is_as_sent(const Slice& o) const {
    return sent_by == o.sent_by && part == o.part && chunk == o.chunk && value == o.value;
  }
};

// What the programs do pass by pass.
struct Outcome {
  std::vector<std::vector<std::vector<Slice>>> slices;   // [from][to][number]
  std::vector<std::vector<std::vector<Value>>> buffers;  // [rank][part][chunk]
};

class Model {
 public:
  // Pass by pass, unless `right` says what that gives.
  Model(const Programs& programs, const Outcome* right, std::uint32_t seed,
        Mistake mistake = Mistake::kNone)
      : chunks_(programs.chunks()),
        slots_(programs.slots),
        right_(right),
        mistake_(mistake),
        random_(seed) {
    const std::size_t n = programs.plans.size();
    connectors_.assign(n, std::vector<Connector>(n));
    for (std::size_t r = 0; r < n; ++r) {
      Rank& rank = ranks_.emplace_back();
      rank.steps = steps_of(programs.plans[r]);
      rank.last_lag = programs.plans[r].primitives.back().lag;
      rank.moved.assign(rank.steps.size(), 0);
      rank.outs.resize(n), rank.ins.resize(n);
      const std::vector<OrderedStep> all = ordered(rank.steps);
      for (std::size_t i = 0; i < rank.steps.size(); ++i) {
        const Step& step = rank.steps[i];
        rank.waits.push_back(waits_of(all, i, mistake).all());
        const SliceTerm term{chunks_of(step), step.lag};
        rank.program.add(term);
        for (std::size_t q = 0; q < n; ++q) {
          if (has(step.to, q)) rank.outs[q].add(i, term);
          if (has(step.from, q)) rank.ins[q].add(i, term);
        }
      }
      for (std::uint32_t p = 0; p < programs.parts(); ++p) {
        const bool has_data = has_input(programs.request, static_cast<int>(r), static_cast<int>(p));
        rank.buffer.emplace_back(chunks_, has_data ? contribution(r) : 0);
      }
      if (right_ != nullptr) become_executor(rank, below(4) != 0);
    }
  }

  // What went wrong; "": nothing.
  std::string run() {
    while (problem_.empty()) {
      std::vector<std::size_t> going;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (!ranks_[r].done) going.push_back(r);
      }
      if (going.empty()) break;
      // A random one first, then the others. Executors move only their favourite steps if anybody
      // can go on so; if none can at all, none ever will.
      const std::size_t first = below(going.size());
      bool moved = false;
      for (std::size_t i = 0; !moved && problem_.empty() && i < 2 * going.size(); ++i) {
        const std::size_t r = going[(first + i) % going.size()];
        const bool any = i >= going.size() || below(16) == 0;
        moved = ranks_[r].executes ? execute(r, any) : interpret(r);
      }
      if (!moved && problem_.empty()) return "nobody can go on";
    }
    if (problem_.empty()) look_at_end();
    return problem_;
  }
  // Pass by pass.
  Outcome outcome() const {
    Outcome o;
    for (const auto& row : connectors_) {
      auto& slices = o.slices.emplace_back();
      for (const Connector& c : row) slices.push_back(c.slices);
    }
    for (const Rank& rank : ranks_) o.buffers.push_back(rank.buffer);
    return o;
  }

 private:
  struct Connector {
    std::vector<Slice> slices;  // moved there, or not yet
    std::uint32_t published = 0, consumed = 0;
  };
  // A connector's order, as one of its ends knows it.
  struct Order {
    SliceOrder<kMostTerms> order;
    std::vector<std::size_t> steps;  // of the terms

    void add(std::size_t step, SliceTerm term) {
      order.add(term);
      steps.push_back(step);
    }
    std::uint32_t term(std::size_t step) const {
      const auto at = std::find(steps.begin(), steps.end(), step);
      return static_cast<std::uint32_t>(at - steps.begin());
    }
    std::uint32_t number(std::size_t step, std::uint32_t chunk) const {
      return order.number(term(step), chunk);
    }
    std::uint32_t count_in(std::size_t step, std::uint32_t prefix) const {
      return order.count_in(term(step), prefix);
    }
    std::uint32_t prefix(const std::vector<std::uint32_t>& moved) const {
      std::uint32_t done[kMostTerms] = {};
      for (std::size_t i = 0; i < steps.size(); ++i) done[i] = moved[steps[i]];
      return order.prefix(done);
    }
  };
  struct Rank {
    std::vector<Step> steps;
    std::vector<std::uint64_t> waits;  // of each step, for which others
    std::vector<Order> outs, ins;      // by rank
    SliceOrder<kMostTerms> program;    // all steps
    std::uint32_t last_lag = 0;
    std::vector<std::vector<Value>> buffer;  // [part][chunk]
    bool executes = false, done = false;
    std::uint64_t patience = 0;        // of an executor, until it is interrupted
    std::size_t favourite = 0;         // step, for a while
    std::vector<std::uint32_t> moved;  // chunks of each step; an interpreter's: behind it
    std::uint32_t pass = 0;            // an interpreter's
    std::size_t step = 0;
  };

  std::size_t below(std::size_t end) { return random_() % end; }
  std::uint32_t chunks_of(const Step& step) const { return step.is_empty ? 0 : chunks_; }
  void fail(std::size_t r, const std::string& what) {
    if (problem_.empty()) problem_ = "rank " + std::to_string(r) + " " + what;
  }

  template <class Body>
  bool all_of(Ranks ranks, Body body) const {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      if (has(ranks, q) && !body(q)) return false;
    }
    return true;
  }
  template <class Body>
  void each_of(Ranks ranks, Body body) const {
    all_of(ranks, [&](std::size_t q) {
      body(q);
      return true;
    });
  }

  // ---- slices ----

  bool can_go(std::size_t r, std::size_t i, const auto& number_to, const auto& number_from) const {
    const Step& step = ranks_[r].steps[i];
    return all_of(
               step.to,
               [&](std::size_t q) { return number_to(q) < connectors_[r][q].consumed + slots_; }) &&
           all_of(step.from,
                  [&](std::size_t q) { return number_from(q) < connectors_[q][r].published; });
  }
  Value take(std::size_t r, std::size_t q, std::size_t i, std::uint32_t chunk,
             std::uint32_t number) {
    Connector& c = connectors_[q][r];
    Slice& slice = c.slices[number];
    if (right_ == nullptr) {
      slice.received_by = i;
      return slice.value;
    }
    if (number < c.consumed) fail(r, "needs a slice that it has given back");
    const std::vector<Slice>& right = right_->slices[q][r];
    if (number >= right.size() || right[number].received_by != i || right[number].chunk != chunk ||
        !slice.is_as_sent(right[number])) {
      fail(r, "takes another slice than the program says");
    }
    return slice.value;
  }
  void put(std::size_t r, std::size_t q, std::uint32_t number, Slice slice) {
    Connector& c = connectors_[r][q];
    if (c.slices.size() <= number) c.slices.resize(number + 1);
    c.slices[number] = slice;
    if (right_ == nullptr) return;
    if (number < c.published) fail(r, "sends a slice again");
    const std::vector<Slice>& right = right_->slices[r][q];
    if (number >= right.size() || !slice.is_as_sent(right[number])) {
      fail(r, "sends another slice than the program says");
    }
  }
  // A step's chunk, at once.
  void move(std::size_t r, std::size_t i, std::uint32_t chunk, const auto& number_to,
            const auto& number_from) {
    Rank& rank = ranks_[r];
    const Step& step = rank.steps[i];
    const bool scatters = (step.flags & kScatter) != 0, collects = (step.flags & kCollect) != 0;
    Value value = 0;
    each_of(step.from, [&](std::size_t q) {
      const Value received = take(r, q, i, chunk, number_from(q));
      if (collects) rank.buffer[q][chunk] = received;
      value += received;
    });
    if (!scatters && !collects) {
      Value& local = rank.buffer[step.part][chunk];
      if ((step.flags & kLocal) != 0) value += local;
      if ((step.flags & kFinish) != 0) value += kOneFinish;
      if ((step.flags & kCopy) != 0) local = value;
    }
    each_of(step.to, [&](std::size_t q) {
      const auto part = scatters ? static_cast<std::uint32_t>(q) : step.part;
      put(r, q, number_to(q), {i, 0, part, chunk, scatters ? rank.buffer[q][chunk] : value});
    });
  }

  // ---- an executor ----

  void become_executor(Rank& rank, bool executes) {
    rank.executes = executes;
    rank.patience = below(3) == 0 ? 1'000'000 : below(6 * chunks_ * rank.steps.size());
    rank.favourite = below(rank.steps.size());
  }
  bool may_move(const Rank& rank, std::size_t i, std::uint32_t chunk) const {
    for (std::size_t j = 0; j < rank.steps.size(); ++j) {
      if (!has(rank.waits[i], j)) continue;
      const auto before = rank.program.before_chunk(static_cast<std::uint32_t>(i), chunk,
                                                    static_cast<std::uint32_t>(j));
      if (rank.moved[j] < before) return false;
    }
    return true;
  }
  bool move_next(std::size_t r, std::size_t i) {
    Rank& rank = ranks_[r];
    const std::uint32_t chunk = rank.moved[i];
    if (chunk == chunks_of(rank.steps[i]) || !may_move(rank, i, chunk)) return false;
    const auto number_to = [&](std::size_t q) { return rank.outs[q].number(i, chunk); };
    const auto number_from = [&](std::size_t q) { return rank.ins[q].number(i, chunk); };
    if (!can_go(r, i, number_to, number_from)) return false;
    move(r, i, chunk, number_to, number_from);
    ++rank.moved[i];
    return true;
  }
  // Publishes some of what it may, or all.
  bool tell(std::size_t r, bool all) {
    Rank& rank = ranks_[r];
    bool news = false;
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      const auto tell = [&](std::uint32_t& told, std::uint32_t prefix) {
        if (prefix <= told) return;
        if (all || below(2) == 0) told += static_cast<std::uint32_t>(1 + below(prefix - told));
        if (all) told = prefix;
        news = true;
      };
      tell(connectors_[r][q].published, rank.outs[q].prefix(rank.moved));
      tell(connectors_[q][r].consumed, rank.ins[q].prefix(rank.moved));
    }
    return news;
  }
  bool execute(std::size_t r, bool any_step) {
    Rank& rank = ranks_[r];
    if (rank.patience-- == 0) {
      interrupt(r);
      return true;
    }
    if (below(16) == 0) rank.favourite = below(rank.steps.size());
    if (below(2) == 0 && tell(r, false)) return true;
    if (move_next(r, rank.favourite)) return true;
    if (!any_step) return tell(r, false);
    const std::size_t first = below(rank.steps.size());
    for (std::size_t k = 0; k < rank.steps.size(); ++k) {
      if (move_next(r, (first + k) % rank.steps.size())) return true;
    }
    if (tell(r, false)) return true;
    rank.done = true;
    for (std::size_t i = 0; i < rank.steps.size(); ++i) {
      rank.done = rank.done && rank.moved[i] == chunks_of(rank.steps[i]);
    }
    return rank.done;
  }
  // What is handed over is what all connectors of a step say.
  void interrupt(std::size_t r) {
    Rank& rank = ranks_[r];
    tell(r, true);
    std::vector<std::uint32_t> done = rank.moved;
    for (std::size_t i = 0; i < done.size(); ++i) {
      const Step& step = rank.steps[i];
      each_of(step.to, [&](std::size_t q) {
        const Order& order = rank.outs[q];
        done[i] = std::min(done[i], order.count_in(i, order.prefix(rank.moved)));
      });
      each_of(step.from, [&](std::size_t q) {
        const Order& order = rank.ins[q];
        done[i] = std::min(done[i], order.count_in(i, order.prefix(rank.moved)));
      });
    }
    rank.moved = done;
    if (mistake_ == Mistake::kForgetsAChunk) {
      std::uint32_t& forgotten = rank.moved[below(done.size())];
      if (forgotten != 0) --forgotten;
    }
    become_executor(rank, below(2) == 0);
  }

  // ---- an interpreter ----

  bool interpret(std::size_t r) {
    Rank& rank = ranks_[r];
    for (; rank.pass < chunks_ + rank.last_lag; ++rank.pass, rank.step = 0) {
      for (; rank.step < rank.steps.size(); ++rank.step) {
        const std::size_t i = rank.step;
        const Step& step = rank.steps[i];
        if (rank.pass < step.lag || rank.pass - step.lag >= chunks_of(step)) continue;
        const std::uint32_t chunk = rank.pass - step.lag;
        if (chunk < rank.moved[i]) continue;
        const auto number_to = [&](std::size_t q) { return connectors_[r][q].published; };
        const auto number_from = [&](std::size_t q) { return connectors_[q][r].consumed; };
        if (!can_go(r, i, number_to, number_from)) return false;
        move(r, i, chunk, number_to, number_from);
        each_of(step.to, [&](std::size_t q) { ++connectors_[r][q].published; });
        each_of(step.from, [&](std::size_t q) { ++connectors_[q][r].consumed; });
        ++rank.step;
        return true;
      }
    }
    rank.done = true;
    return true;
  }

  // ---- the end ----

  void look_at_end() {
    if (right_ == nullptr) return;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      for (std::size_t q = 0; q < ranks_.size(); ++q) {
        const Connector& c = connectors_[r][q];
        const std::size_t all = right_->slices[r][q].size();
        if (c.published != all || c.consumed != all) fail(r, "has left slices behind");
      }
      if (ranks_[r].buffer != right_->buffers[r]) fail(r, "ends with other values");
    }
  }

  const std::uint32_t chunks_, slots_;
  const Outcome* const right_;
  const Mistake mistake_;
  std::mt19937 random_;
  std::vector<std::vector<Connector>> connectors_;  // [from][to]
  std::vector<Rank> ranks_;
  std::string problem_;
};

// ---- where programs come from ----

class Source {
 public:
  static constexpr std::uint32_t kSlotBytes = 64;

  explicit Source(std::uint32_t seed) : random_(seed) {}

  // Programs that are not proved: of random ones some.
  Programs programs() {
    Programs made;
    made.slots = 2 + below(5);
    limits_.guaranteed_slots = made.slots;
    limits_.guaranteed_slot_bytes = kSlotBytes;
    limits_.device = Device::kCuda;
    limits_.overlap = below(4) != 0;
    PlanRequest& r = made.request;
    r.dtype = DType::kInt8;
    r.ranks = static_cast<int>(2 + below(3));
    chunks_ = 1 + below(8);
    switch (below(8)) {
      case 0:
        plan_by(made, plan_rsag, rsag_serves);
        break;
      case 1:
        plan_by(made, plan_chain, chain_serves);
        break;
      case 2:
        write(made);
        break;
      default:
        grow(made);
        break;
    }
    CheckOptions options;
    options.slots = static_cast<int>(made.slots);
    options.slot_bytes = limits_.guaranteed_slot_bytes;
    options.find_slots_needed = false;
    made.proved = made.chunks() != 0 && check_plans(r, made.plans, options).ok;
    return made;
  }

 private:
  std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_() % end); }
  template <class T>
  void shuffle(std::vector<T>& all) {
    for (std::size_t i = all.size(); i > 1; --i) {
      std::swap(all[i - 1], all[below(static_cast<std::uint32_t>(i))]);
    }
  }
  // So that each of so many parts has the chunks that are wanted.
  void choose_count(PlanRequest& r, int parts) {
    const auto blocks = static_cast<std::uint32_t>(blocked(r.kind) ? 1 : parts);
    r.count = kSlotBytes * std::uint64_t{chunks_} * blocks;
  }
  void choose_root(PlanRequest& r) {
    r.root = has_root(r.kind) ? static_cast<int>(below(static_cast<std::uint32_t>(r.ranks))) : 0;
  }

  void plan_by(Programs& made, const auto& plan, const auto& serves) {
    PlanRequest& r = made.request;
    do {
      r.kind = static_cast<Kind>(below(kNumKinds));
    } while (!serves(r.kind) || exchanges(r.kind) || r.kind == Kind::kBarrier);
    choose_root(r);
    choose_count(r, r.ranks * std::max(r.ranks - 1, 1));
    for (r.rank = 0; r.rank < r.ranks; ++r.rank) {
      made.plans.push_back(plan(r, limits_, nullptr).value());
    }
  }

  void write(Programs& made) {
    PlanRequest& r = made.request;
    const std::uint32_t which = below(4);
    r.kind = which == 1 ? Kind::kReduce : which == 2 ? Kind::kAllReduce : Kind::kBroadcast;
    if (which == 2) r.ranks = 4;
    if (which == 3) r.ranks = static_cast<int>(3 + below(2));
    choose_root(r);
    choose_count(r, which == 2 ? r.ranks : which == 3 ? r.ranks - 1 : 1);
    const int children = static_cast<int>(1 + below(3));
    switch (which) {
      case 0:
        made.plans = unjam_test::tree_broadcast(r, limits_, children, below(2));
        break;
      case 1:
        made.plans = unjam_test::tree_reduce(r, limits_, children);
        break;
      case 2:
        made.plans = unjam_test::two_level_all_reduce(r, limits_, 2, below(3));
        break;
      default:
        made.plans = unjam_test::broadcast_in_halves(r, limits_);
        break;
    }
  }

  // A random tree for each part, up which it is reduced, and another one down which it is spread;
  // their steps in a random order of parts. Each hop is as many passes long as any, so that both
  // ends of a connector go through its slices in one order.
  struct Tree {
    std::vector<int> parent, depth;
    int deepest = 0;

    std::vector<int> children(int rank) const {
      std::vector<int> all;
      for (int q = 0; q < static_cast<int>(parent.size()); ++q) {
        if (parent[static_cast<std::size_t>(q)] == rank) all.push_back(q);
      }
      return all;
    }
  };
  Tree tree(int ranks, int root) {
    Tree t;
    t.parent.assign(static_cast<std::size_t>(ranks), -1);
    t.depth.assign(static_cast<std::size_t>(ranks), 0);
    std::vector<int> in = {root}, out;
    for (int q = 0; q < ranks; ++q) {
      if (q != root) out.push_back(q);
    }
    shuffle(out);
    for (const int q : out) {
      const int parent = in[below(static_cast<std::uint32_t>(in.size()))];
      const auto at = static_cast<std::size_t>(q);
      t.parent[at] = parent;
      t.depth[at] = t.depth[static_cast<std::size_t>(parent)] + 1;
      t.deepest = std::max(t.deepest, t.depth[at]);
      in.push_back(q);
    }
    return t;
  }
  struct Planned {
    std::uint32_t lag, place;  // place: of the part among parts, and of the phase in it
    unsigned flags;
    int part;
    PeerRanks from, to;
  };
  PeerRanks peers(const std::vector<int>& ranks) {
    if (ranks.size() == 1 && below(2) == 0) return PeerRanks::one(ranks[0]);
    return PeerRanks::set(ranks);
  }

  void grow(Programs& made) {
    constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllReduce, Kind::kBroadcast,
                               Kind::kReduce,    Kind::kAllGather, Kind::kReduceScatter};
    PlanRequest& r = made.request;
    r.kind = kKinds[below(6)];
    choose_root(r);
    const int parts = blocked(r.kind) ? r.ranks : static_cast<int>(1 + below(3));
    choose_count(r, parts);
    const std::uint32_t distance = below(3);
    const bool by_lag = below(2) == 0;
    std::vector<std::uint32_t> places;
    for (int p = 0; p < parts; ++p) places.push_back(static_cast<std::uint32_t>(p));
    shuffle(places);
    std::vector<std::vector<Planned>> all(static_cast<std::size_t>(r.ranks));
    for (int p = 0; p < parts; ++p) {
      const int root = blocked(r.kind) ? p
                       : has_root(r.kind)
                           ? r.root
                           : static_cast<int>(below(static_cast<std::uint32_t>(r.ranks)));
      const Tree up = tree(r.ranks, root), down = tree(r.ranks, root);
      const std::uint32_t later = below(2) == 0 ? 0 : below(3);
      const std::uint32_t place = 3 * places[static_cast<std::size_t>(p)];
      for (int rank = 0; rank < r.ranks; ++rank) {
        add_steps(r, p, rank, root, up, down, distance, later, place,
                  &all[static_cast<std::size_t>(rank)]);
      }
    }
    const Plan empty = unjam_test::written::empty_plan(r, limits_, parts);
    made.plans = unjam_test::written::plans_of_all(r.ranks, empty, [&](int rank, auto& program) {
      std::vector<Planned>& steps = all[static_cast<std::size_t>(rank)];
      std::stable_sort(steps.begin(), steps.end(), [&](const Planned& a, const Planned& b) {
        if (by_lag && a.lag != b.lag) return a.lag < b.lag;
        return a.place < b.place;
      });
      for (const Planned& s : steps) program.add(s.flags, s.part, s.from, s.to, s.lag);
    });
  }
  void add_steps(const PlanRequest& r, int part, int rank, int root, const Tree& up,
                 const Tree& down, std::uint32_t distance, std::uint32_t later, std::uint32_t place,
                 std::vector<Planned>* steps) {
    const auto at = static_cast<std::size_t>(rank);
    const auto nobody = PeerRanks::nobody();
    const bool sums = reduces(r.kind),
               spreads = r.kind != Kind::kReduce && r.kind != Kind::kReduceScatter;
    const std::uint32_t top = sums ? static_cast<std::uint32_t>(up.deepest) : 0;
    const bool is_root = rank == root;
    const std::vector<int> below_it = down.children(rank);
    if (sums) {
      const std::vector<int> children = up.children(rank);
      const PeerRanks from = peers(children);
      unsigned flags = kLocal | kContribute;
      if (!children.empty()) flags |= kReduce;
      if (!children.empty() && from.is_set()) flags |= kPartials;
      if (is_root) flags |= kFinish | kCopy;
      const PeerRanks to = !is_root  ? PeerRanks::one(up.parent[at])
                           : spreads ? peers(below_it)
                                     : nobody;
      const std::uint32_t level = top - static_cast<std::uint32_t>(up.depth[at]);
      steps->push_back(
          {distance * level + later, place + (is_root ? 1 : 0), flags, part, from, to});
    }
    if (!spreads || (sums && is_root)) return;
    const std::uint32_t lag = distance * (top + static_cast<std::uint32_t>(down.depth[at])) + later;
    if (!is_root) {
      steps->push_back(
          {lag, place + 2, kCopy, part, PeerRanks::one(down.parent[at]), peers(below_it)});
    } else if (below(2) == 0) {
      steps->push_back({lag, place + 1, kLocal | kCopy, part, nobody, peers(below_it)});
    } else {
      for (const int q : below_it) {
        steps->push_back({lag, place + 1, kLocal | kCopy, part, nobody, PeerRanks::one(q)});
      }
    }
  }

  std::mt19937 random_;
  PlanLimits limits_;
  std::uint32_t chunks_ = 1;  // a part
};

// ---- tests ----

// "": it went well, as it would pass by pass.
std::string play(const Programs& programs, std::uint32_t seed, Mistake mistake) {
  Model model(programs, nullptr, seed);
  const std::string problem = model.run();
  if (!problem.empty()) return "pass by pass: " + problem;
  const Outcome right = model.outcome();
  return Model(programs, &right, seed, mistake).run();
}

// Proved programs of a request, of so many chunks; write(rank, builder) as for written programs.
Programs by_hand(Kind kind, int ranks, int root, std::uint32_t chunks, const auto& write) {
  Programs made;
  PlanRequest& r = made.request;
  r.kind = kind;
  r.dtype = DType::kInt8;
  r.ranks = ranks;
  r.root = root;
  r.count = Source::kSlotBytes * std::uint64_t{chunks};
  PlanLimits limits;
  limits.guaranteed_slot_bytes = Source::kSlotBytes;
  const Plan empty = unjam_test::written::empty_plan(r, limits, blocked(kind) ? ranks : 1);
  made.plans = unjam_test::written::plans_of_all(ranks, empty, write);
  CheckOptions options;
  options.slots = static_cast<int>(made.slots);
  options.slot_bytes = Source::kSlotBytes;
  const CheckResult result = check_plans(r, made.plans, options);
  made.proved = result.ok;
  EXPECT_TRUE(result.ok) << result.error;
  EXPECT_EQ(made.chunks(), chunks);
  return made;
}
const auto kNoRank = PeerRanks::nobody();
PeerRanks one(int rank) { return PeerRanks::one(rank); }

// A gather to rank 2 by way of rank 1, which sends its own part, and behind it passes on rank 0's.
Programs gather_through_one() {
  return by_hand(Kind::kGather, 3, 2, 6, [](int rank, ProgramBuilder& program) {
    if (rank == 0) return program.add(kLocal, 0, kNoRank, one(1));
    if (rank == 1) {
      program.add(kLocal, 1, kNoRank, one(2));
      return program.add(0, 0, one(0), one(2));
    }
    program.add(kCopy, 1, one(1));
    program.add(kCopy, 0, one(1));
    program.add(kLocal | kCopy, 2);
  });
}
// A scatter by rank 0 by way of rank 1, which keeps its own part, and passes on rank 2's.
Programs scatter_through_one() {
  return by_hand(Kind::kScatter, 3, 0, 6, [](int rank, ProgramBuilder& program) {
    if (rank == 0) {
      program.add(kLocal, 1, kNoRank, one(1));
      program.add(kLocal, 2, kNoRank, one(1));
      return program.add(kLocal | kCopy, 0);
    }
    if (rank == 2) return program.add(kCopy, 2, one(1));
    program.add(kCopy, 1, one(0));
    program.add(0, 2, one(0), one(2));
  });
}

// The waits of a rank's steps.
std::vector<OrderWaits> waits_of(const Plan& plan) {
  const std::vector<OrderedStep> steps = ordered(steps_of(plan));
  std::vector<OrderWaits> all;
  for (std::size_t i = 0; i < steps.size(); ++i) all.push_back(order_waits(steps, i));
  return all;
}

// By so many seeds: how many find something, and what the first one does.
struct Found {
  std::uint32_t seeds = 0, first = 0;
  std::string problem;
};
Found search(const Programs& programs, Mistake mistake, std::uint32_t seeds) {
  Found found;
  for (std::uint32_t seed = 1; seed <= seeds; ++seed) {
    const std::string problem = play(programs, seed, mistake);
    if (problem.empty() || ++found.seeds > 1) continue;
    found.first = seed;
    found.problem = problem;
  }
  return found;
}

// (The sanitizers judge the steps of a model, and not its end.)
#if defined(__SANITIZE_ADDRESS__)
constexpr std::uint32_t kSeeds = 500;
#else
constexpr std::uint32_t kSeeds = 8000;
#endif
constexpr std::uint32_t kPlays = 4;  // of each seed's programs

TEST(OrderRule, InterruptedProgramsEndAsTheyWould) {
  std::uint32_t proved = 0, waiting = 0;
  for (std::uint32_t seed = 1; seed <= kSeeds; ++seed) {
    const Programs programs = Source(seed).programs();
    if (!programs.proved) continue;
    ++proved;
    bool waits = false;
    for (const Plan& plan : programs.plans) {
      for (const OrderWaits& w : waits_of(plan)) waits = waits || w.all() != 0;
    }
    waiting += waits ? 1 : 0;
    for (std::uint32_t k = 0; k < kPlays; ++k) {
      const std::uint32_t its = kPlays * seed + k;
      ASSERT_EQ(play(programs, its, Mistake::kNone), "")
          << "seed " << seed << ", played by " << its << ": " << programs.text();
    }
  }
  EXPECT_GT(proved, kSeeds / 2) << "the checker proves too few programs";
  EXPECT_GT(waiting, kSeeds / 5) << "too few programs wait for anything";
}

TEST(OrderRule, MistakesAreFound) {
  constexpr std::uint32_t kBound = 2000, kEnough = 8;
  for (const Mistake mistake : kMistakes) {
    std::uint32_t found = 0;
    for (std::uint32_t seed = 1; found < kEnough && seed <= kBound; ++seed) {
      const Programs programs = Source(seed).programs();
      if (!programs.proved) continue;
      bool wrong = false;
      for (std::uint32_t k = 0; k < kPlays; ++k) {
        wrong = wrong || !play(programs, kPlays * seed + k, mistake).empty();
      }
      if (wrong) ++found;
    }
    EXPECT_EQ(found, kEnough) << to_string(mistake) << ": by seeds 1 to " << kBound;
  }
}

TEST(OrderRule, WhatWaits) {
  using Steps = std::vector<OrderedStep>;
  const auto waits = [](const Steps& steps) {
    std::vector<OrderWaits> all;
    for (std::size_t i = 0; i < steps.size(); ++i) all.push_back(order_waits(steps, i));
    return all;
  };
  using Waits = std::vector<OrderWaits>;
  // A scatter, what is gathered and sent to all, a collect: of two hops.
  EXPECT_EQ(waits({{0, 6}, {6, 6, true, true}, {6, 0, false, true}}), (Waits{{}, {1, 4}, {}}));
  // Over different connectors, or alone, nothing waits.
  EXPECT_EQ(waits({{0, 6}, {6, 0, true, true}}), (Waits{{}, {}}));
  EXPECT_EQ(waits({{2, 4, true, true}}), (Waits{{}}));
  EXPECT_EQ(waits({{0, 2}, {8, 4, false, true}, {16, 0, false, true}}), (Waits{{}, {}, {}}));
  // Two that only send, or only receive, over the same.
  EXPECT_EQ(waits({{0, 6}, {0, 6}, {6, 0, false, true}, {6, 0, false, true}}),
            (Waits{{}, {}, {}, {}}));
  // But reductions in place do, and sets that share some of their connectors.
  EXPECT_EQ(waits({{6, 0, true, true}, {6, 0, false, true}}), (Waits{{0, 2}, {}}));
  EXPECT_EQ(waits({{0, 6}, {0, 2}}), (Waits{{2, 0}, {}}));
  EXPECT_EQ(waits({{2, 0, false, true}, {6, 0, false, true}}), (Waits{{}, {0, 1}}));
}

// Why what passes on waits for what is sent in front of it: else its source is given back, and its
// result forgotten.
TEST(OrderRule, AResultThatIsForgottenIsLost) {
  const Programs programs = gather_through_one();
  EXPECT_EQ(waits_of(programs.plans[1]), (std::vector<OrderWaits>{{}, {1, 0}}));
  for (const Mistake mistake : {Mistake::kNoWaitAtOuts, Mistake::kPassesOnAtOnce}) {
    const Found found = search(programs, mistake, 300);
    EXPECT_GT(found.seeds, 5u) << to_string(mistake) << ": by seeds 1 to 300";
  }
  for (const Mistake mistake : {Mistake::kNone, Mistake::kNoWaitAtIns, Mistake::kUnevenAtOnce,
                                Mistake::kReducesInPlaceAtOnce}) {
    const Found found = search(programs, mistake, 300);
    EXPECT_EQ(found.problem, "") << to_string(mistake) << ": seed " << found.first;
  }
}

// The same turned round: else its result is published, and its source not given back.
TEST(OrderRule, ASourceThatIsForgottenComesAgain) {
  const Programs programs = scatter_through_one();
  EXPECT_EQ(waits_of(programs.plans[1]), (std::vector<OrderWaits>{{}, {0, 1}}));
  for (const Mistake mistake : {Mistake::kNoWaitAtIns, Mistake::kPassesOnAtOnce}) {
    const Found found = search(programs, mistake, 300);
    EXPECT_GT(found.seeds, 5u) << to_string(mistake) << ": by seeds 1 to 300";
  }
  for (const Mistake mistake : {Mistake::kNone, Mistake::kNoWaitAtOuts, Mistake::kUnevenAtOnce,
                                Mistake::kReducesInPlaceAtOnce}) {
    const Found found = search(programs, mistake, 300);
    EXPECT_EQ(found.problem, "") << to_string(mistake) << ": seed " << found.first;
  }
}

}  // namespace
}  // namespace unjam
