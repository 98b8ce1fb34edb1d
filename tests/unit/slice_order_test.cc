// SliceOrder against a plain walk through programs, pass by pass: random ones whose terms have
// unequal chunks, all plans of today, and the closed forms that served rsag plans alone.
#include "program/slice_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "plan/registry.h"
#include "plan/selector.h"
#include "program/hop_order.h"
#include "tests/support/slice_walk.h"

namespace unjam {
namespace {

constexpr std::uint32_t kMany = 8;

std::uint32_t below(std::mt19937& random, std::uint32_t end) {
  return static_cast<std::uint32_t>(random() % end);
}

struct Moved {
  std::uint32_t term, chunk;
};

// What goes through the connector, in order, by the definition: pass by pass, term by term.
std::vector<Moved> walk(const std::vector<SliceTerm>& terms) {
  std::uint32_t passes = 0;
  for (const SliceTerm& t : terms) passes = std::max(passes, t.chunks + t.lag);
  std::vector<Moved> all;
  for (std::uint32_t pass = 0; pass < passes; ++pass) {
    for (std::uint32_t i = 0; i < terms.size(); ++i) {
      const SliceTerm& t = terms[i];
      if (pass >= t.lag && pass - t.lag < t.chunks) all.push_back({i, pass - t.lag});
    }
  }
  return all;
}

template <std::uint32_t kMost>
SliceOrder<kMost> order_of(const std::vector<SliceTerm>& terms) {
  SliceOrder<kMost> order;
  for (const SliceTerm& t : terms) order.add(t);
  return order;
}

std::string text_of(const std::vector<SliceTerm>& terms) {
  std::string text = "terms (chunks, lag):";
  for (const SliceTerm& t : terms) {
    text += " (" + std::to_string(t.chunks) + ", " + std::to_string(t.lag) + ")";
  }
  return text;
}

// `seed`: of what is done when somebody asks.
template <std::uint32_t kMost>
void expect_walk(const std::vector<SliceTerm>& terms, std::uint32_t seed) {
  SCOPED_TRACE(text_of(terms) + ", seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const SliceOrder<kMost> order = order_of<kMost>(terms);
  const std::vector<Moved> all = walk(terms);
  ASSERT_EQ(order.slices(), all.size());
  ASSERT_EQ(order.terms(), terms.size());
  std::vector<std::uint32_t> done(terms.size());
  for (std::uint32_t n = 0; n < all.size(); ++n) {
    const Moved& m = all[n];
    ASSERT_EQ(order.next(done.data()), m.term) << "slice " << n;
    ASSERT_EQ(order.number(m.term, m.chunk), n);
    ASSERT_EQ(order.prefix(done.data()), n);
    for (std::uint32_t i = 0; i < terms.size(); ++i) {
      ASSERT_EQ(order.count_in(i, n), done[i]) << "term " << i << " of " << n;
      ASSERT_EQ(order.before_chunk(m.term, m.chunk, i), done[i]) << "term " << i;
    }
    ++done[m.term];
  }
  ASSERT_EQ(order.next(done.data()), order.terms());
  ASSERT_EQ(order.prefix(done.data()), all.size());
  // Any numbers of chunks done: in front of all that are missing.
  for (int k = 0; k < 20; ++k) {
    for (std::uint32_t i = 0; i < terms.size(); ++i) done[i] = below(random, terms[i].chunks + 1);
    std::uint32_t in_front = 0;
    while (in_front < all.size() && all[in_front].chunk < done[all[in_front].term]) ++in_front;
    ASSERT_EQ(order.prefix(done.data()), in_front);
  }
}

TEST(SliceOrder, IsThatOfRandomPrograms) {
  for (std::uint32_t seed = 0; seed < 4000; ++seed) {
    std::mt19937 random(seed);
    std::vector<SliceTerm> terms(1 + below(random, 6));
    for (SliceTerm& t : terms) t = {below(random, 14), below(random, 7)};
    expect_walk<kMany>(terms, seed);
    if (terms.size() <= 2) expect_walk<2>(terms, seed);
    if (terms.size() == 1) expect_walk<1>(terms, seed);
    if (HasFatalFailure()) return;
  }
}

TEST(SliceOrder, TakesLongLags) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<SliceTerm> terms(1 + below(random, kMany));
    for (SliceTerm& t : terms)
      t = {below(random, 40), below(random, 3) == 0 ? 0 : below(random, 4096)};
    expect_walk<kMany>(terms, seed);
    if (HasFatalFailure()) return;
  }
  // As many chunks as a lane can have.
  constexpr std::uint32_t kChunks = 1u << 30;
  SliceOrder<2> order;
  order.add({kChunks, 0});
  order.add({kChunks, 4095});
  EXPECT_EQ(order.slices(), 2 * kChunks);
  EXPECT_EQ(order.number(1, kChunks - 1), 2 * kChunks - 1);
  EXPECT_EQ(order.number(0, kChunks - 1), 2 * kChunks - 1 - 4096);
  EXPECT_EQ(order.count_in(0, 2 * kChunks), kChunks);
}

// A formula that forgets which term comes first within a pass, or the lags, is another order: the
// programs above would tell.
TEST(SliceOrder, IsNoSimplerOne) {
  bool places_count = false, lags_count = false;
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    std::vector<SliceTerm> terms(3);
    for (SliceTerm& t : terms) t = {1 + below(random, 8), below(random, 7)};
    const auto order = order_of<kMany>(terms);
    std::vector<SliceTerm> other(terms.rbegin(), terms.rend());
    const auto turned = order_of<kMany>(other);
    places_count = places_count || turned.number(2, 0) != order.number(0, 0);
    for (SliceTerm& t : terms) t.lag = 0;
    lags_count = lags_count || order_of<kMany>(terms).number(2, 0) != order.number(2, 0);
  }
  EXPECT_TRUE(places_count);
  EXPECT_TRUE(lags_count);
}

TEST(SliceOrder, HasTheClosedFormsOfTwoHops) {
  for (std::uint32_t chunks = 1; chunks < 30; ++chunks) {
    for (std::uint32_t lag = 0; lag < 6; ++lag) {
      SCOPED_TRACE(std::to_string(chunks) + " chunks, lag " + std::to_string(lag));
      const HopOrder hops{chunks, lag, true};
      SliceOrder<2> order;
      order.add({chunks, 0});
      order.add({chunks, lag});
      ASSERT_EQ(order.slices(), hops.slices());
      for (std::uint32_t l = 0; l < chunks; ++l) {
        ASSERT_EQ(order.number(0, l), hops.first(l));
        ASSERT_EQ(order.number(1, l), hops.second(l));
        ASSERT_EQ(order.before_chunk(1, l, 0), hops.sent_before_gather(l));
      }
      for (std::uint32_t a = 0; a <= chunks; ++a) {
        for (std::uint32_t b = 0; b <= chunks; ++b) {
          const std::uint32_t done[2] = {a, b};
          ASSERT_EQ(order.prefix(done), hops.prefix(a, b)) << a << " and " << b;
        }
      }
      for (std::uint32_t n = 0; n <= order.slices(); ++n) {
        ASSERT_EQ(order.count_in(0, n), hops.firsts_in(n)) << n;
      }
    }
  }
}

// ---- plans ----

using unjam_test::End;

// Larger than any chunk, so that each is one slice.
constexpr std::uint32_t kBatchChunks = 0xffffffc0;

// The steps that send something to `to` in this lane, as terms.
struct Terms {
  std::vector<SliceTerm> terms;
  std::vector<std::uint32_t> steps;
};
Terms terms_of(const Plan& plan, int rank, std::uint32_t lane, int to) {
  const Geometry& g = plan.geometry;
  Terms found;
  for (std::uint32_t step = 0; step < plan.primitives.size(); ++step) {
    const std::uint32_t lag = plan.primitives[step].lag;
    for (const auto& m : unjam_test::slice_walk::messages(plan, step, rank)) {
      if (m.end != End::kSends || m.peer != to) continue;
      const std::uint64_t chunks = g.loops_of(g.lane_part(m.part, lane));
      found.terms.push_back({static_cast<std::uint32_t>(chunks), lag});
      found.steps.push_back(step);
    }
  }
  return found;
}

TEST(SliceOrder, IsThatOfAllPlans) {
  std::uint64_t connectors = 0;
  std::uint32_t most_terms = 0;
  for (int number = 0; number < kNumAlgorithms; ++number) {
    for (int k = 0; k < kNumKinds; ++k) {
      const auto kind = static_cast<Kind>(k);
      if (!kAlgorithms[number].serves(kind)) continue;
      for (const Device device : {Device::kHost, Device::kCuda}) {
        for (int ranks = 2; ranks <= (kind == Kind::kSendRecv ? 2 : 8); ++ranks) {
          for (const std::uint64_t count : {1ull, 100ull, 5003ull, 70001ull, 400000ull}) {
            for (int rank = 0; rank < ranks; ++rank) {
              PlanRequest r;
              r.kind = kind;
              r.dtype = DType::kFloat32;
              r.count = count;
              r.ranks = ranks;
              r.rank = rank;
              r.root = has_root(kind) ? ranks / 2 : 0;
              PlanLimits limits;
              limits.device = device;
              limits.lanes = 3;
              limits.guaranteed_slots = 4;
              limits.guaranteed_slot_bytes = 8192;
              limits.overlap = true;
              const auto plan = make_plan(r, limits, static_cast<Algorithm>(number));
              ASSERT_TRUE(plan.has_value());
              unjam_test::SliceSequences sequences;
              unjam_test::add_slices(*plan, rank, kBatchChunks, &sequences);
              for (int to = 0; to < ranks; ++to) {
                if (to == rank) continue;
                for (std::uint32_t i = 0; i < plan->geometry.lanes; ++i) {
                  const std::uint32_t lane = plan->geometry.first_lane + i;
                  const auto [terms, steps] = terms_of(*plan, rank, lane, to);
                  if (terms.empty()) continue;
                  SCOPED_TRACE(std::string(kAlgorithms[number].name) + " " + to_string(kind) + " " +
                               std::to_string(ranks) + " ranks, count " + std::to_string(count) +
                               ", " + std::to_string(rank) + " to " + std::to_string(to));
                  ++connectors;
                  const auto size = static_cast<std::uint32_t>(terms.size());
                  most_terms = std::max(most_terms, size);
                  ASSERT_LE(size, 2 * kMany);
                  const auto order = order_of<2 * kMany>(terms);
                  const std::vector<unjam_test::Slice>& all =
                      sequences[{lane, rank, End::kSends, to}];
                  ASSERT_EQ(order.slices(), all.size());
                  for (std::uint32_t n = 0; n < all.size(); ++n) {
                    const auto term = static_cast<std::uint32_t>(
                        std::find(steps.begin(), steps.end(), all[n].step) - steps.begin());
                    ASSERT_EQ(order.number(term, static_cast<std::uint32_t>(all[n].chunk)), n);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(connectors, 10000u);
  RecordProperty("connectors", std::to_string(connectors));
  std::printf("  %llu connectors, %u terms at most\n", static_cast<unsigned long long>(connectors),
              most_terms);
}

}  // namespace
}  // namespace unjam
