// Ranks that move the hops of a mesh plan independently (a stream, device/cuda/solo_stream.cuh),
// ranks that run its program pass by pass (an engine), and ranks that begin as the former and are
// interrupted anywhere, all in one group: a model under a random schedule, over the real HopOrder
// and the planner's real programs. It checks that all ends, that both ends of a connector mean the
// same slice, and that nothing is read after it was overwritten, in place.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/hop_order.h"
#include "tests/support/mesh_plan.h"

namespace unjam {
namespace {

struct Setting {
  Kind kind = Kind::kAllReduce;
  int ranks = 2;
  std::uint32_t slots = 4;
  std::uint32_t chunks = 4;
  std::uint32_t seed = 1;
  bool gathers_in_order = true;  // false: a mistake, which must be found
};

// What a slice is: chunk of the first hop (0) or the second (1).
struct Slice {
  std::uint32_t hop, chunk;
  bool operator==(const Slice&) const = default;
};

struct Connector {
  std::vector<Slice> published;
  std::uint32_t consumed = 0;
};

class Model {
 public:
  explicit Model(const Setting& s)
      : s_(s),
        plan_(mesh_plan(s.kind, s.slots, s.ranks)),
        order_{s.chunks, plan_.primitives[1].lag, s.kind == Kind::kAllReduce},
        random_(s.seed) {
    const auto n = static_cast<std::size_t>(s.ranks);
    connectors_.assign(n, std::vector<Connector>(n));
    for (std::size_t r = 0; r < n; ++r) {
      Rank rank;
      rank.streams = random_() % 4 != 0;
      rank.patience = random_() % 3 == 0 ? 1'000'000 : random_() % (20 * s.chunks);
      rank.slots = two_hops() && random_() % 2 == 0 ? 2 * s.slots : s.slots;
      rank.is_result.assign(n, std::vector<bool>(s.chunks, false));
      ranks_.push_back(rank);
    }
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
  struct Rank {
    bool streams = false, done = false;
    std::uint64_t patience = 0;  // steps until a stream is interrupted
    std::uint32_t slots = 0;     // that it uses of each connector
    // A stream's: chunks of each hop that were moved. An engine's: that are behind it.
    std::uint32_t moved[kHops] = {};
    std::uint32_t sent = 0, taken = 0;  // slices of each connector, published and given back
    std::uint32_t pass = 0, primitive = 0;
    std::vector<std::vector<bool>> is_result;  // [part][chunk] of the buffer, in place
  };

  bool two_hops() const { return s_.kind == Kind::kAllReduce; }
  bool reduces() const { return s_.kind != Kind::kAllGather; }
  bool collects() const { return s_.kind != Kind::kReduceScatter; }
  bool has(std::uint32_t hop) const {
    return hop == kSends || (hop == kGathers ? reduces() : collects());
  }

  void fail(std::size_t r, const std::string& what) {
    if (problem_.empty()) problem_ = "rank " + std::to_string(r) + ": " + what;
  }

  template <class Body>
  bool all_peers(std::size_t r, Body body) const {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      if (q != r && !body(q)) return false;
    }
    return true;
  }
  bool room(std::size_t r, std::uint32_t slice, std::uint32_t slots) const {
    return all_peers(r, [&](std::size_t q) { return slice < connectors_[r][q].consumed + slots; });
  }
  bool has_come(std::size_t r, std::uint32_t slice) const {
    return all_peers(r, [&](std::size_t q) { return slice < connectors_[q][r].published.size(); });
  }
  void publish(std::size_t r, const Slice& slice) {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      if (q != r) connectors_[r][q].published.push_back(slice);
    }
    ++ranks_[r].sent;
  }
  void give_back(std::size_t r, std::uint32_t to) {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      if (q != r) connectors_[q][r].consumed = to;
    }
    ranks_[r].taken = to;
  }
  void expect(std::size_t r, std::uint32_t number, const Slice& wanted) {
    all_peers(r, [&](std::size_t q) {
      if (connectors_[q][r].published[number] == wanted) return true;
      fail(r, "slice " + std::to_string(number) + " of rank " + std::to_string(q) +
                  " is another than is wanted");
      return false;
    });
  }

  // ---- what hops do to the buffer ----

  void read_to_send(std::size_t r, std::uint32_t chunk) {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      // (An all-gather sends its own part, which nothing overwrites.)
      if (q != r && reduces() && ranks_[r].is_result[q][chunk]) {
        fail(r, "a contribution is sent that was overwritten");
      }
    }
  }
  void gather(std::size_t r, std::uint32_t chunk) {
    if (ranks_[r].is_result[r][chunk]) fail(r, "a chunk is reduced twice");
    ranks_[r].is_result[r][chunk] = true;
  }
  void collect(std::size_t r, std::uint32_t chunk) {
    for (std::size_t q = 0; q < ranks_.size(); ++q) {
      if (q != r) ranks_[r].is_result[q][chunk] = true;
    }
  }

  // ---- a stream ----

  Slice slice_numbered(std::uint32_t number) const {
    const std::uint32_t firsts = order_.firsts_in(number);
    const bool first = firsts < s_.chunks && order_.first(firsts) == number;
    return first ? Slice{0, firsts} : Slice{1, number - firsts};
  }
  std::uint32_t incoming(std::uint32_t hop, std::uint32_t chunk) const {
    return hop == kCollects && two_hops() ? order_.second(chunk) : order_.first(chunk);
  }

  bool move(std::size_t r, std::uint32_t hop) {
    Rank& rank = ranks_[r];
    const std::uint32_t n = rank.moved[hop];
    if (!has(hop) || n == s_.chunks) return false;
    if (hop == kSends) {
      if (!room(r, order_.first(n), rank.slots)) return false;
      read_to_send(r, n);
    } else {
      if (!has_come(r, incoming(hop, n))) return false;
      if (hop == kGathers && two_hops()) {
        if (!room(r, order_.second(n), rank.slots)) return false;
        if (s_.gathers_in_order && (rank.moved[kSends] < order_.sent_before_gather(n) ||
                                    rank.moved[kCollects] < order_.collected_before_gather(n))) {
          return false;
        }
      }
      expect(r, incoming(hop, n), {hop == kCollects && two_hops() ? 1u : 0u, n});
      hop == kGathers ? gather(r, n) : collect(r, n);
    }
    ++rank.moved[hop];
    return true;
  }
  std::uint32_t sent_prefix(const Rank& rank) const {
    return order_.prefix(rank.moved[kSends], rank.moved[kGathers]);
  }
  std::uint32_t taken_prefix(const Rank& rank) const {
    return reduces() ? order_.prefix(rank.moved[kGathers], rank.moved[kCollects])
                     : order_.prefix(rank.moved[kCollects], 0);
  }
  bool tell(std::size_t r, bool all) {
    Rank& rank = ranks_[r];
    const std::uint32_t sent = sent_prefix(rank), taken = taken_prefix(rank);
    const bool news = rank.sent != sent || rank.taken != taken;
    while (rank.sent < sent && (all || random_() % 4 != 0)) {
      publish(r, slice_numbered(rank.sent));
    }
    if (rank.taken < taken && (all || random_() % 2 == 0)) give_back(r, taken);
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
      if (what < kHops ? move(r, what) : tell(r, false)) return true;
    }
    rank.done = true;
    for (std::uint32_t hop = 0; hop < kHops; ++hop) {
      rank.done = rank.done && (!has(hop) || rank.moved[hop] == s_.chunks);
    }
    return rank.done;
  }
  // What the engine is told is behind it: as Stream::hops_behind().
  void interrupt(std::size_t r) {
    Rank& rank = ranks_[r];
    tell(r, true);
    rank.moved[kSends] = order_.firsts_in(rank.sent);
    if (collects()) {
      rank.moved[kCollects] = two_hops() ? rank.taken - order_.firsts_in(rank.taken) : rank.taken;
    }
    rank.streams = false;
    rank.slots = s_.slots;
  }

  // ---- an engine ----

  bool step_engine(std::size_t r) {
    Rank& rank = ranks_[r];
    const std::uint32_t passes = s_.chunks + plan_.primitives.back().lag;
    for (; rank.pass < passes; ++rank.pass, rank.primitive = 0) {
      for (; rank.primitive < plan_.primitives.size(); ++rank.primitive) {
        const Primitive& p = plan_.primitives[rank.primitive];
        const Hop hop = hop_of(p);
        if (rank.pass < p.lag || rank.pass - p.lag >= s_.chunks ||
            rank.pass - p.lag < rank.moved[hop]) {
          continue;
        }
        const std::uint32_t chunk = rank.pass - p.lag;
        const bool sends = hop == kSends || (hop == kGathers && two_hops());
        if (sends && !room(r, rank.sent, rank.slots)) return false;
        if (hop != kSends) {
          if (!has_come(r, rank.taken)) return false;
          expect(r, rank.taken, {hop == kCollects && two_hops() ? 1u : 0u, chunk});
          hop == kGathers ? gather(r, chunk) : collect(r, chunk);
          give_back(r, rank.taken + 1);
        } else {
          read_to_send(r, chunk);
        }
        if (sends) publish(r, {hop == kSends ? 0u : 1u, chunk});
        ++rank.primitive;
        return true;
      }
    }
    rank.done = true;
    return true;
  }

  std::string complete() const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].sent != order_.slices() || ranks_[r].taken != order_.slices()) {
        return "rank " + std::to_string(r) + " has left slices behind";
      }
      for (std::size_t q = 0; q < ranks_.size(); ++q) {
        if (q == r ? !reduces() : !collects()) continue;
        for (std::uint32_t l = 0; l < s_.chunks; ++l) {
          if (!ranks_[r].is_result[q][l]) return "rank " + std::to_string(r) + " lacks a result";
        }
      }
    }
    return "";
  }

  const Setting s_;
  const Plan plan_;
  const HopOrder order_;
  std::mt19937 random_;
  std::vector<std::vector<Connector>> connectors_;  // [from][to]
  std::vector<Rank> ranks_;
  std::string problem_;
};

std::string text(const Setting& s) {
  return std::string(to_string(s.kind)) + ", " + std::to_string(s.ranks) + " ranks, " +
         std::to_string(s.slots) + " slots, " + std::to_string(s.chunks) + " chunks, seed " +
         std::to_string(s.seed);
}

TEST(HopMix, StreamsEnginesAndWhoIsInterruptedEndTogether) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
    for (const int ranks : {2, 3, 4}) {
      for (const std::uint32_t slots : {2u, 3u, 4u, 6u, 8u}) {
        for (std::uint32_t seed = 1; seed <= 600; ++seed) {
          const Setting s{kind, ranks, slots, 1 + seed % 11, seed, true};
          ASSERT_EQ(Model(s).run(), "") << text(s);
        }
      }
    }
  }
}

// Why a result that is sent waits for its turn (HopOrder::sent_before_gather()): else who is
// interrupted has reduced what is in no prefix, and the engine would reduce it again.
TEST(HopMix, GathersOutOfTurnAreFound) {
  int found = 0;
  for (std::uint32_t seed = 1; seed <= 2000; ++seed) {
    found += Model({Kind::kAllReduce, 3, 4, 8, seed, false}).run().empty() ? 0 : 1;
  }
  EXPECT_GT(found, 10);
}

}  // namespace
}  // namespace unjam
