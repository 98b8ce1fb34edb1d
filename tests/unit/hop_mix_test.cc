// Ranks that move the steps ("hops") of an rsag plan independently (a stream,
// device/cuda/exec/slots), ranks that run its program pass by pass (an engine), and
// ranks that begin as the former and are interrupted anywhere, all in one group: a model under a
// random schedule, over the real HopOrder, the planner's real programs, and what they are lowered
// to. It checks that all ends, that both ends of a connector mean the same slice, and that nothing
// is read after it was overwritten, in place.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "program/hop_order.h"
#include "tests/support/rsag_plan.h"

namespace unjam {
namespace {

enum class Mistake {
  kNone,
  kGathersOutOfTurn,  // a stream, see SlotSteps::gather_waits_for_sent
  kForgetsAChunk,     // of what it has moved, who is interrupted
};

struct Setting {
  Kind kind = Kind::kAllReduce;
  int ranks = 2;
  int root = 0;
  std::uint32_t slots = 4;
  std::uint32_t chunks = 4;
  std::uint32_t seed = 1;
  Mistake mistake = Mistake::kNone;  // must be found
};

// What a slice is: which hop of its sender's, and of which part and chunk.
struct Slice {
  std::uint32_t hop, part, chunk;
  bool operator==(const Slice&) const = default;
};

struct Connector {
  std::vector<Slice> published;
  std::uint32_t consumed = 0;
};

class Model {
 public:
  explicit Model(const Setting& s) : s_(s), random_(s.seed) {
    const auto n = static_cast<std::size_t>(s.ranks);
    connectors_.assign(n, std::vector<Connector>(n));
    for (std::size_t r = 0; r < n; ++r) {
      Rank rank;
      rank.streams = random_() % 4 != 0;
      rank.patience = random_() % 3 == 0 ? 1'000'000 : random_() % (20 * s.chunks);
      rank.slots = two_hops() && random_() % 2 == 0 ? 2 * s.slots : s.slots;
      rank.is_result.assign(n, std::vector<bool>(s.chunks, false));
      plan(r, rank);
      ranks_.push_back(rank);
    }
    order_ = {s.chunks, ranks_[0].steps.lag, two_hops()};
  }

  // What went wrong; "": nothing.
  std::string run() {
    while (problem_.empty()) {
      std::vector<std::size_t> going;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (!ranks_[r].done) going.push_back(r);
      }
      if (going.empty()) return complete();
      // A random one first, then the others: if none can, none ever will.
      const std::size_t from = random_() % going.size();
      bool moved = false;
      for (std::size_t i = 0; !moved && problem_.empty() && i < going.size(); ++i) {
        const std::size_t r = going[(from + i) % going.size()];
        moved = ranks_[r].streams ? step_stream(r) : step_engine(r);
      }
      if (!moved && problem_.empty()) return "nobody can go on";
    }
    return problem_;
  }

 private:
  using Ranks = std::uint32_t;  // a bit each
  // A primitive that has something to do.
  struct Step {
    Primitive p;
    SlotStep hop = kSends;
    Ranks to = 0, from = 0;
  };
  struct Rank {
    std::vector<Step> program;
    std::uint32_t lag = 0;  // the last primitive's
    // For a stream: what the program is lowered to, and of its sets the ranks.
    SlotSteps steps;
    Ranks to[kSlotSteps] = {}, from[kSlotSteps] = {};
    bool has[kSlotSteps] = {};
    bool streams = false, done = false;
    std::uint64_t patience = 0;  // steps until a stream is interrupted
    std::uint32_t slots = 0;     // that it uses of each connector
    // A stream's: chunks of each hop that were moved. An engine's: that are behind it.
    std::uint32_t moved[kSlotSteps] = {};
    std::uint32_t pass = 0, primitive = 0;
    std::vector<std::vector<bool>> is_result;  // [part][chunk] of the buffer, in place
  };

  bool two_hops() const { return s_.kind == Kind::kAllReduce; }
  bool scatters() const { return s_.kind != Kind::kAllGather; }
  static bool has(Ranks ranks, std::size_t q) { return (ranks >> q & 1) != 0; }

  void plan(std::size_t r, Rank& rank) {
    const int me = static_cast<int>(r);
    const Plan plan = mesh_plan(s_.kind, s_.slots, s_.ranks, me, s_.root);
    empty_part_ = plan.geometry.empty_part;
    rank.lag = plan.primitives.back().lag;
    const Schedule schedule = mesh_schedule(plan, s_.ranks, me);
    rank.steps = schedule.steps;
    const auto ranks_at = [&](unsigned places) {
      Ranks ranks = 0;
      for (std::uint32_t place = 0; place < schedule.places; ++place) {
        if ((places >> place & 1) != 0) ranks |= 1u << schedule.ranks[place];
      }
      return ranks;
    };
    rank.to[kSends] = ranks_at(rank.steps.sends_to);
    rank.from[kGathers] = ranks_at(rank.steps.gathers_from);
    rank.to[kGathers] = ranks_at(rank.steps.results_to);
    rank.from[kCollects] = ranks_at(rank.steps.collects_from);
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      rank.has[hop] = (rank.to[hop] | rank.from[hop]) != 0;
    }
    for (std::size_t i = 0; i < plan.primitives.size(); ++i) {
      Step step{plan.primitives[i]};
      for (int q = 0; q < s_.ranks; ++q) {
        if (sends_to(plan, step.p, me, q)) step.to |= 1u << q;
        if (receives_from(plan, step.p, me, q)) step.from |= 1u << q;
      }
      while (!rank.has[step.hop] || rank.steps.primitives[step.hop] != i) {
        if (step.hop == kCollects) return fail(r, "a primitive is no step");
        step.hop = static_cast<SlotStep>(step.hop + 1);
      }
      if (step.to != rank.to[step.hop] || step.from != rank.from[step.hop]) {
        fail(r, "a step is with others than the primitive that it is");
      }
      rank.program.push_back(step);
    }
    // What HopOrder takes for granted.
    const Ranks both =
        (rank.to[kSends] & rank.to[kGathers]) | (rank.from[kGathers] & rank.from[kCollects]);
    if (!two_hops() && both != 0) fail(r, "a connector carries two hops");
    if (two_hops() != rank.steps.two_hops()) fail(r, "its steps are of another kind");
  }

  void fail(std::size_t r, const std::string& what) {
    if (problem_.empty()) problem_ = "rank " + std::to_string(r) + ": " + what;
  }

  // ---- connectors ----

  template <class Body>
  bool all_of(Ranks ranks, Body body) const {
    for (std::size_t q = 0; q < connectors_.size(); ++q) {
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
  std::uint32_t sent(std::size_t r, std::size_t q) const {
    return static_cast<std::uint32_t>(connectors_[r][q].published.size());
  }
  std::uint32_t taken(std::size_t r, std::size_t q) const { return connectors_[q][r].consumed; }
  bool room(std::size_t r, std::size_t q, std::uint32_t number) const {
    return number < connectors_[r][q].consumed + ranks_[r].slots;
  }
  bool has_come(std::size_t r, std::size_t q, std::uint32_t number) const {
    return number < connectors_[q][r].published.size();
  }
  // What a hop sends q, of a chunk.
  Slice slice_to(std::size_t r, std::size_t q, std::uint32_t hop, std::uint32_t chunk) const {
    const bool scattered = hop == kSends && scatters();
    return {hop, static_cast<std::uint32_t>(scattered ? q : r), chunk};
  }
  // The same of what a hop wants from q: a contribution (or what a root has sent) to its own part,
  // or q's part.
  void expect(std::size_t r, std::size_t q, std::uint32_t number, std::uint32_t hop,
              std::uint32_t chunk) {
    const bool gathers = hop == kGathers;
    const Slice wanted{gathers || !scatters() ? kSends : kGathers,
                       static_cast<std::uint32_t>(gathers ? r : q), chunk};
    if (connectors_[q][r].published[number] == wanted) return;
    fail(r, "slice " + std::to_string(number) + " of rank " + std::to_string(q) +
                " is another than is wanted");
  }

  // ---- what hops do to the buffer ----

  // Of what a primitive reads only contributions may have been overwritten by anything else.
  void read_and_store(std::size_t r, const Step& step, std::uint32_t chunk) {
    const std::uint16_t flags = step.p.flags;
    std::vector<std::vector<bool>>& is_result = ranks_[r].is_result;
    if (reduces(s_.kind) && (flags & kScatter) != 0) {
      each_of(step.to, [&](std::size_t q) {
        if (is_result[q][chunk]) fail(r, "a contribution is sent that was overwritten");
      });
    }
    if ((flags & kReduce) != 0 && is_result[r][chunk]) fail(r, "a chunk is reduced twice");
    if ((flags & kCopy) == 0) return;
    if ((flags & (kScatter | kCollect)) != 0) {
      each_of(step.to | step.from, [&](std::size_t q) { is_result[q][chunk] = true; });
    } else {
      is_result[step.p.part][chunk] = true;
    }
  }

  // ---- a stream ----

  std::uint32_t number_sent(std::uint32_t hop, std::uint32_t chunk) const {
    return hop == kGathers ? order_.second(chunk) : order_.first(chunk);
  }
  std::uint32_t number_received(std::uint32_t hop, std::uint32_t chunk) const {
    return hop == kCollects ? order_.second(chunk) : order_.first(chunk);
  }
  Slice slice_numbered(std::size_t r, std::size_t q, std::uint32_t number) const {
    if (!two_hops())
      return slice_to(r, q, has(ranks_[r].to[kSends], q) ? kSends : kGathers, number);
    const std::uint32_t firsts = order_.firsts_in(number);
    const bool first = firsts < s_.chunks && order_.first(firsts) == number;
    return first ? slice_to(r, q, kSends, firsts) : slice_to(r, q, kGathers, number - firsts);
  }
  // How many slices of a connector may be published, or given back.
  std::uint32_t sent_prefix(std::size_t r, std::size_t q) const {
    const Rank& rank = ranks_[r];
    if (two_hops()) return order_.prefix(rank.moved[kSends], rank.moved[kGathers]);
    if (has(rank.to[kSends], q)) return order_.prefix(rank.moved[kSends], 0);
    return has(rank.to[kGathers], q) ? order_.prefix(rank.moved[kGathers], 0) : 0;
  }
  std::uint32_t taken_prefix(std::size_t r, std::size_t q) const {
    const Rank& rank = ranks_[r];
    if (two_hops()) return order_.prefix(rank.moved[kGathers], rank.moved[kCollects]);
    if (has(rank.from[kGathers], q)) return order_.prefix(rank.moved[kGathers], 0);
    return has(rank.from[kCollects], q) ? order_.prefix(rank.moved[kCollects], 0) : 0;
  }

  bool move(std::size_t r, std::uint32_t hop) {
    Rank& rank = ranks_[r];
    const std::uint32_t n = rank.moved[hop];
    if (!rank.has[hop] || n == s_.chunks) return false;
    const std::uint32_t out = number_sent(hop, n), in = number_received(hop, n);
    if (!all_of(rank.to[hop], [&](std::size_t q) { return room(r, q, out); }) ||
        !all_of(rank.from[hop], [&](std::size_t q) { return has_come(r, q, in); })) {
      return false;
    }
    if (hop == kGathers && s_.mistake != Mistake::kGathersOutOfTurn &&
        ((rank.steps.gather_waits_for_sent && rank.moved[kSends] < order_.sent_before_gather(n)) ||
         (rank.steps.gather_waits_for_collected &&
          rank.moved[kCollects] < order_.collected_before_gather(n)))) {
      return false;
    }
    each_of(rank.from[hop], [&](std::size_t q) { expect(r, q, in, hop, n); });
    for (const Step& step : rank.program) {
      if (step.hop == hop) read_and_store(r, step, n);
    }
    ++rank.moved[hop];
    return true;
  }
  bool tell(std::size_t r, bool all) {
    bool news = false;
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      const std::uint32_t sends = sent_prefix(r, q), takes = taken_prefix(r, q);
      if (q == r) continue;
      news = news || sent(r, q) != sends || taken(r, q) != takes;
      while (sent(r, q) < sends && (all || random_() % 4 != 0)) {
        connectors_[r][q].published.push_back(slice_numbered(r, q, sent(r, q)));
      }
      if (all || random_() % 2 == 0) connectors_[q][r].consumed = takes;
    }
    return news;
  }
  bool step_stream(std::size_t r) {
    Rank& rank = ranks_[r];
    if (rank.patience-- == 0) {
      interrupt(r);
      return true;
    }
    const std::uint32_t first = random_() % 4;
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t what = (first + i) % 4;
      if (what < kSlotSteps ? move(r, what) : tell(r, false)) return true;
    }
    rank.done = true;
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      rank.done = rank.done && (!rank.has[hop] || rank.moved[hop] == s_.chunks);
    }
    return rank.done;
  }
  // What the engine is told is behind it: as Stream::hops_behind(). Where a connector carries one
  // hop that is all that was moved.
  void interrupt(std::size_t r) {
    Rank& rank = ranks_[r];
    tell(r, true);
    if (two_hops()) {
      const std::size_t q = r == 0 ? 1 : 0;  // any
      rank.moved[kSends] = order_.firsts_in(sent(r, q));
      rank.moved[kCollects] = taken(r, q) - order_.firsts_in(taken(r, q));
    }
    if (s_.mistake == Mistake::kForgetsAChunk) {
      auto hop = static_cast<std::uint32_t>(random_() % kSlotSteps);
      while (!rank.has[hop]) hop = (hop + 1) % kSlotSteps;
      if (rank.moved[hop] != 0) --rank.moved[hop];
    }
    rank.streams = false;
    rank.slots = s_.slots;
  }

  // ---- an engine ----

  bool step_engine(std::size_t r) {
    Rank& rank = ranks_[r];
    for (; rank.pass < s_.chunks + rank.lag; ++rank.pass, rank.primitive = 0) {
      for (; rank.primitive < rank.program.size(); ++rank.primitive) {
        const Step& step = rank.program[rank.primitive];
        const std::uint32_t lag = step.p.lag;
        if (rank.pass < lag || rank.pass - lag >= s_.chunks ||
            rank.pass - lag < rank.moved[step.hop]) {
          continue;
        }
        const std::uint32_t chunk = rank.pass - lag;
        if (!all_of(step.to, [&](std::size_t q) { return room(r, q, sent(r, q)); }) ||
            !all_of(step.from, [&](std::size_t q) { return has_come(r, q, taken(r, q)); })) {
          return false;
        }
        each_of(step.from, [&](std::size_t q) { expect(r, q, taken(r, q), step.hop, chunk); });
        read_and_store(r, step, chunk);
        each_of(step.from, [&](std::size_t q) { ++connectors_[q][r].consumed; });
        each_of(step.to, [&](std::size_t q) {
          connectors_[r][q].published.push_back(slice_to(r, q, step.hop, chunk));
        });
        ++rank.primitive;
        return true;
      }
    }
    rank.done = true;
    return true;
  }

  // ---- the end ----

  bool has_output(std::size_t r, std::size_t part) const {
    if (part == empty_part_) return false;
    if (s_.kind == Kind::kReduceScatter) return part == r;
    return s_.kind != Kind::kReduce || r == static_cast<std::size_t>(s_.root);
  }
  std::string complete() const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const std::string rank = "rank " + std::to_string(r);
      for (std::size_t q = 0; q < ranks_.size(); ++q) {
        const bool carries = has(ranks_[r].to[kSends] | ranks_[r].to[kGathers], q);
        const std::uint32_t slices = carries ? order_.slices() : 0;
        if (sent(r, q) != slices || taken(q, r) != slices) return rank + " has left slices behind";
        for (std::uint32_t l = 0; l < s_.chunks; ++l) {
          const bool is_result = ranks_[r].is_result[q][l], wanted = has_output(r, q);
          if (wanted && !is_result) return rank + " lacks a result";
          if (!wanted && is_result) return rank + " has stored what it has no place for";
        }
      }
    }
    return "";
  }

  const Setting s_;
  HopOrder order_;
  std::mt19937 random_;
  std::vector<std::vector<Connector>> connectors_;  // [from][to]
  std::vector<Rank> ranks_;
  std::uint32_t empty_part_ = kNoPart;
  std::string problem_;
};

std::string text(const Setting& s) {
  return std::string(to_string(s.kind)) + ", " + std::to_string(s.ranks) + " ranks, root " +
         std::to_string(s.root) + ", " + std::to_string(s.slots) + " slots, " +
         std::to_string(s.chunks) + " chunks, seed " + std::to_string(s.seed);
}

// (The sanitizers judge the steps of a model, and not its end.)
#if defined(__SANITIZE_ADDRESS__)
constexpr std::uint32_t kSeeds = 60;
#else
constexpr std::uint32_t kSeeds = 600;
#endif

TEST(HopMix, StreamsEnginesAndWhoIsInterruptedEndTogether) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                          Kind::kBroadcast, Kind::kReduce}) {
    for (const int ranks : {2, 3, 4}) {
      for (const std::uint32_t slots : {2u, 3u, 4u, 6u, 8u}) {
        for (std::uint32_t seed = 1; seed <= kSeeds; ++seed) {
          const int root = has_root(kind) ? static_cast<int>(seed / 11) % ranks : 0;
          const Setting s{kind, ranks, root, slots, 1 + seed % 11, seed};
          ASSERT_EQ(Model(s).run(), "") << text(s);
        }
      }
    }
  }
}

// Why a result that is sent waits for its turn (plan/order_rule.h): else who is
// interrupted has reduced what is in no prefix, and the engine would reduce it again.
TEST(HopMix, GathersOutOfTurnAreFound) {
  int found = 0;
  for (std::uint32_t seed = 1; seed <= 2000; ++seed) {
    const Setting s{Kind::kAllReduce, 3, 0, 4, 8, seed, Mistake::kGathersOutOfTurn};
    found += Model(s).run().empty() ? 0 : 1;
  }
  EXPECT_GT(found, 10);
}

// What was moved is sent and taken, and must not be again.
TEST(HopMix, ForgottenChunksAreFound) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                          Kind::kBroadcast, Kind::kReduce}) {
    for (const int ranks : {2, 3, 4}) {
      int found = 0;
      for (std::uint32_t seed = 1; seed <= 200; ++seed) {
        const Setting s{kind, ranks, 1, 4, 8, seed, Mistake::kForgetsAChunk};
        found += Model(s).run().empty() ? 0 : 1;
      }
      EXPECT_GT(found, 10) << to_string(kind) << ", " << ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace unjam
