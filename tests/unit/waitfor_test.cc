// Wait-for graphs from snapshots: true cycles are named, everything less certain is not.
#include "control/waitfor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace unjam {
namespace {

PendingCall call(std::uint64_t tag, const std::string& key, std::vector<int> members,
                 std::uint64_t n = 0) {
  return {{tag, n, "", key}, "all_reduce", std::move(members), 1.0};
}

// A rank under the hold policy that has submitted `pending` in this order and runs the first.
RankSnapshot holder(int rank, std::vector<PendingCall> pending) {
  RankSnapshot r;
  r.rank = rank;
  r.holds = true;
  r.running = {pending.empty() ? -1 : 0};
  r.words = {1};
  for (const PendingCall& p : pending) r.calls[p.call.tag] = p.call.n + 1;
  r.pending = std::move(pending);
  return r;
}

TEST(WaitFor, TwoRanksInOppositeOrders) {
  const auto a = call(10, "A", {0, 1}), b = call(11, "B", {0, 1});
  const auto cycles = find_cycles(certain_edges({holder(0, {a, b}), holder(1, {b, a})}));
  ASSERT_EQ(cycles.size(), 1u);
  EXPECT_EQ(cycles[0].text(),
            "rank 0 runs 'A' and waits for rank 1, which runs 'B' and waits for rank 0");
}

TEST(WaitFor, PeerThatHasNotCalledYetButHoldsAnother) {
  // Program 2: rank 1 is inside a device synchronisation behind B and has not called A.
  const auto a = call(10, "A", {0, 1}), b = call(11, "B", {0, 1});
  EXPECT_EQ(find_cycles(certain_edges({holder(0, {a}), holder(1, {b})})).size(), 1u);
}

TEST(WaitFor, ThreeRanksInARing) {
  const auto a = call(1, "A", {0, 1}), b = call(2, "B", {1, 2}), c = call(3, "C", {2, 0});
  const auto cycles =
      find_cycles(certain_edges({holder(0, {a, c}), holder(1, {b, a}), holder(2, {c, b})}));
  ASSERT_EQ(cycles.size(), 1u);
  EXPECT_EQ(cycles[0].edges.size(), 3u);
}

TEST(WaitFor, SameCollectiveIsNoCycle) {
  const auto a = call(10, "A", {0, 1}), b = call(11, "B", {0, 1});
  EXPECT_TRUE(certain_edges({holder(0, {a, b}), holder(1, {a, b})}).empty());
}

TEST(WaitFor, PeerThatIsDoneWithOursIsNoEdge) {
  // Rank 1 has run A already (a broadcast's root, say) and holds B, which rank 0 has not called.
  const auto a = call(10, "A", {0, 1}), b = call(11, "B", {0, 1});
  RankSnapshot one = holder(1, {b});
  one.calls[10] = 1;
  const auto edges = certain_edges({holder(0, {a}), one});
  ASSERT_EQ(edges.size(), 1u);
  EXPECT_EQ(edges[0].rank, 1);
  EXPECT_TRUE(find_cycles(edges).empty());
}

TEST(WaitFor, DifferentUsesOfOneKeyAreDifferentCalls) {
  const auto a0 = call(10, "A", {0, 1}, 0), a1 = call(10, "A", {0, 1}, 1);
  const auto edges = certain_edges({holder(0, {a1}), holder(1, {a0})});
  // Rank 0 is at use 2, rank 1 still at use 1 and has not called use 2; rank 0 has called (and
  // passed) use 1.
  ASSERT_EQ(edges.size(), 1u);
  EXPECT_EQ(edges[0].rank, 0);
}

TEST(WaitFor, PreemptingRanksHoldNothing) {
  const auto a = call(10, "A", {0, 1}), b = call(11, "B", {0, 1});
  RankSnapshot zero = holder(0, {a, b}), one = holder(1, {b, a});
  zero.holds = one.holds = false;
  EXPECT_TRUE(certain_edges({zero, one}).empty());
}

TEST(WaitFor, MissingRanksAndJson) {
  const auto a = call(10, "A", {0, 1, 2});
  RankSnapshot two;
  two.rank = 2;
  const std::vector<RankSnapshot> ranks = {holder(0, {a}), holder(1, {a}), two};
  EXPECT_EQ(missing_ranks(a, ranks), (std::vector<int>{2}));
  const std::string json = explain_json(ranks, certain_edges(ranks), {});
  EXPECT_NE(json.find("\"not_called_by\":[2]"), std::string::npos) << json;
  EXPECT_NE(json.find("\"cycles\":[]"), std::string::npos) << json;
}

TEST(Explain, NamesMemoryThatIsMissing) {
  RankSnapshot lacking, fine;
  lacking.rank = 3, lacking.lacks = "2 MiB for rank 5: no memory is left on the GPU";
  fine.rank = 4;
  const std::string json = explain_json({lacking, fine}, {}, {});
  EXPECT_NE(json.find("\"lacks_memory\":\"2 MiB for rank 5: no memory is left on the GPU\""),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("\"lacks_memory\":null"), std::string::npos) << json;
  const std::string text = explain_text({lacking, fine}, {}, {});
  EXPECT_NE(text.find("2 MiB for rank 5: no memory is left on the GPU. Calls that have use for it "
                      "wait until it is"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("memory", text.find("rank 4")), std::string::npos) << text;
}

TEST(WaitFor, WhatEnginesWaitFor) {
  auto a = call(10, "A", {0, 1});
  a.engines = {{0, EngineWait::kData, 1, 0, 1500.0}, {2, EngineWait::kRoom, -1, 0, 20.0}};
  auto b = call(10, "A", {0, 1}, 3);
  b.engines = {{1, EngineWait::kTurn, -1, 2, 0.0}};
  const std::vector<RankSnapshot> ranks = {holder(0, {a, b})};
  const std::string json = explain_json(ranks, {}, {});
  EXPECT_NE(json.find("{\"lane\":0,\"waits_for\":\"data\",\"rank\":1,\"since_ms\":1500}"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("\"waits_for\":\"room\",\"rank\":null"), std::string::npos) << json;
  EXPECT_NE(json.find("{\"lane\":1,\"waits_for\":\"turn\",\"n\":2}"), std::string::npos) << json;
  const std::string text = explain_text(ranks, {}, {{1, "gone: test"}});
  EXPECT_NE(text.find("engine of lane 0 waits for data from rank 1 since 1.500 s; engine of lane 2 "
                      "waits for room towards others since 0.020 s"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("its turn: use 3 of the key is not complete"), std::string::npos) << text;
  EXPECT_NE(text.find("unjam: rank 1: gone: test"), std::string::npos) << text;
}

TEST(WaitFor, WhatOthersHaveCalledInstead) {
  const auto waits = call(1, "tag 2", {0, 1});
  const RankSnapshot here = holder(1, {waits});
  const auto wrong = call(2, "tag 1", {0, 1});
  auto another = call(3, "all", {0, 1});
  another.signature = "barrier()";
  RankSnapshot there = holder(0, {another});
  there.untaken = {wrong};
  there.calls[2] = 1;
  const std::string other = "rank 0 has called barrier(), key 'all', which rank 1 has not";
  const std::string likely = "rank 0 has called all_reduce, key 'tag 1', which rank 1 has not";
  EXPECT_EQ(called_instead(1, waits, {there, here}), likely + "; " + other);
  const std::string json = explain_json({there, here}, {}, {});
  EXPECT_NE(json.find("\"instead\":\"rank 0 has called"), std::string::npos) << json;
  const std::string text = explain_text({there, here}, {}, {});
  EXPECT_NE(text.find("not called by: 0; " + likely), std::string::npos) << text;

  // What this rank has called too is no hint; nor is a rank that has called, or a stranger.
  RankSnapshot knows = here;
  knows.calls[2] = 1;
  EXPECT_EQ(called_instead(1, waits, {there, knows}), other);
  RankSnapshot called = there;
  called.calls[1] = 1;
  EXPECT_EQ(called_instead(1, waits, {called, here}), "");
  RankSnapshot stranger = there;
  stranger.rank = 2;
  EXPECT_EQ(called_instead(1, waits, {stranger, here}), "");
  // Not what has nothing to do with this rank, or is another group's.
  RankSnapshot elsewhere = holder(0, {call(4, "tag 1", {0, 2})});
  elsewhere.untaken = {wrong};
  elsewhere.untaken[0].call.group = "another";
  EXPECT_EQ(called_instead(1, waits, {elsewhere, here}), "");
  // A few are named, the others counted.
  for (std::uint64_t tag = 10; tag < 14; ++tag) there.untaken.push_back(call(tag, "t", {0, 1}));
  const std::string many = called_instead(1, waits, {there, here});
  EXPECT_NE(many.find("; and 3 more"), std::string::npos) << many;
}

TEST(WaitFor, ThoseWhoHaveLeftAreAbsentOnly) {
  const auto a = call(10, "A", {0, 1});
  RankSnapshot left;  // what it has called still counts
  left.rank = 1;
  left.calls[10] = 1;
  const std::string json = explain_json({left, holder(0, {a})}, {}, {}, {{1, "has left"}});
  EXPECT_NE(json.find("\"called_by\":[0,1]"), std::string::npos) << json;
  EXPECT_EQ(json.find("{\"rank\":1,\"holds\""), std::string::npos) << json;
}

// Of many ranks 64 are named, those that others wait for among them, and the others counted.
TEST(WaitFor, OfManyRanksSomeAreNamed) {
  constexpr int kRanks = 257;
  std::vector<int> members;
  for (int r = 0; r < kRanks; ++r) members.push_back(r);
  const auto a = call(10, "A", members);
  std::vector<RankSnapshot> ranks;
  for (int r = 0; r < kRanks - 1; ++r) ranks.push_back(holder(r, {a}));
  RankSnapshot last;
  last.rank = kRanks - 1;
  ranks.push_back(last);
  std::reverse(ranks.begin(), ranks.end());  // in whatever order they have answered
  EXPECT_EQ(missing_ranks(a, ranks), (std::vector<int>{kRanks - 1}));
  const std::vector<AbsentRank> absent(70, {300, "gone: test"});
  const std::string json = explain_json(ranks, {}, {}, absent);
  EXPECT_NE(json.find("\"ranks_more\":193"), std::string::npos);
  EXPECT_NE(json.find("\"called_by_more\":192"), std::string::npos);
  EXPECT_NE(json.find("\"absent_more\":6"), std::string::npos);
  EXPECT_EQ(json.find("\"not_called_by_more\""), std::string::npos);
  EXPECT_NE(json.find("{\"rank\":256,\"holds\""), std::string::npos);
  EXPECT_NE(json.find("{\"rank\":62,\"holds\""), std::string::npos);
  EXPECT_EQ(json.find("{\"rank\":63,\"holds\""), std::string::npos);
  const std::string text = explain_text(ranks, {}, absent);
  EXPECT_NE(text.find("62, 63, … (192 more); not called by: 256"), std::string::npos) << text;
  EXPECT_NE(text.find("unjam: … (193 more ranks)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("unjam: … (6 more that are absent)\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace unjam
