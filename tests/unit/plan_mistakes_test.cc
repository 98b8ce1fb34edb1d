// The checker finds what is wrong: each test plants one mistake in correct plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plan/check/checker.h"
#include "plan/check/symbolic.h"
#include "plan/program_builder.h"
#include "plan/registry.h"
#include "plan/selector.h"

namespace unjam {
namespace {

constexpr int kRanks = 5;
constexpr int kSlots = 5;
constexpr std::uint32_t kSlotBytes = 64;  // 16 floats

PeerRanks nobody() { return PeerRanks::nobody(); }
PeerRanks one(int rank) { return PeerRanks::one(rank); }
PeerRanks all_but(int rank, int other = -1) {
  return ProgramBuilder(kRanks, rank).all_others(other);
}

// Adds a rank to a plan's neighbours. What the codes and sets say stays.
void add_neighbour(Plan* plan, int rank) {
  const auto q = static_cast<std::uint16_t>(rank);
  std::vector<std::uint16_t>& all = plan->neighbours;
  const auto at = std::lower_bound(all.begin(), all.end(), q);
  if (at != all.end() && *at == q) return;
  const auto k = static_cast<std::uint32_t>(at - all.begin());
  all.insert(at, q);
  for (Primitive& p : plan->primitives) {
    if (p.from < kFirstSet && p.from >= k) ++p.from;
    if (p.to < kFirstSet && p.to >= k) ++p.to;
  }
  for (PeerSet& set : plan->sets) {
    const std::uint64_t below = set.neighbours & ((std::uint64_t{1} << k) - 1);
    set.neighbours = below | (set.neighbours - below) << 1;
  }
}

// The code of these peers in a plan, which gets what it lacks of them.
Peers code_of(Plan* plan, const PeerRanks& peers) {
  if (peers.ranks().empty()) return kNobody;
  for (const int q : peers.ranks()) add_neighbour(plan, q);
  const auto place = [plan](int q) {
    const auto at = std::lower_bound(plan->neighbours.begin(), plan->neighbours.end(), q);
    return static_cast<std::uint32_t>(at - plan->neighbours.begin());
  };
  if (!peers.is_set()) return static_cast<Peers>(place(peers.ranks().front()));
  PeerSet set;
  std::uint64_t most = 0;
  for (const int q : peers.ranks()) {
    set.neighbours |= std::uint64_t{1} << place(q);
    const auto part = static_cast<std::uint32_t>(q);
    if (part >= plan->geometry.parts || plan->geometry.part(part).length <= most) continue;
    most = plan->geometry.part(part).length;
    set.longest_part = part;
  }
  plan->sets.push_back(set);
  return static_cast<Peers>(kFirstSet + plan->sets.size() - 1);
}

struct Planted {
  PlanRequest request;
  std::vector<Plan> plans;
  int slots = kSlots;

  std::vector<Primitive>& program(std::size_t rank) { return plans[rank].primitives; }
  // The peers' code at that rank; and a primitive of its. flags: without kRecv and kSend, which are
  // set where there are peers.
  Peers code(std::size_t rank, const PeerRanks& peers) { return code_of(&plans[rank], peers); }
  Primitive primitive(std::size_t rank, unsigned flags, std::uint32_t part,
                      const PeerRanks& from = nobody(), const PeerRanks& to = nobody()) {
    Primitive p;
    // (A neighbour that is new moves the codes of others.)
    for (const int q : to.ranks()) add_neighbour(&plans[rank], q);
    p.from = code(rank, from);
    p.to = code(rank, to);
    if (p.from != kNobody) flags |= kRecv;
    if (p.to != kNobody) flags |= kSend;
    p.flags = static_cast<std::uint16_t>(flags);
    p.part = part & (kMostParts - 1);
    return p;
  }
  // The i-th primitive of a rank receives from others, or sends to others.
  void set_from(std::size_t rank, std::size_t i, const PeerRanks& from) {
    const Peers code = this->code(rank, from);
    program(rank)[i].from = code;
  }
  void set_to(std::size_t rank, std::size_t i, const PeerRanks& to) {
    const Peers code = this->code(rank, to);
    program(rank)[i].to = code;
  }
  CheckResult check() const {
    CheckOptions options;
    options.slots = slots;
    options.slot_bytes = kSlotBytes;
    return check_plans(request, plans, options);
  }
};

Planted make(Kind kind, Algorithm algorithm, std::uint64_t count = 1000, std::uint16_t lanes = 1) {
  Planted p;
  p.request.kind = kind;
  p.request.count = count;
  p.request.ranks = kRanks;
  p.request.root = 2;
  PlanLimits limits;
  limits.guaranteed_slots = kSlots;
  limits.guaranteed_slot_bytes = kSlotBytes;
  limits.lanes = lanes;
  for (p.request.rank = 0; p.request.rank < kRanks; ++p.request.rank) {
    p.plans.push_back(*make_plan(p.request, limits, algorithm));
  }
  EXPECT_TRUE(p.check().ok) << p.check().error;
  return p;
}

// Two trees, of two lanes.
Planted make_trees(Kind kind, std::uint64_t count = 1000) {
  Planted p = make(kind, Algorithm::kDoubleBinaryTree, count, 3);
  EXPECT_TRUE(p.plans[0].geometry.by_lane);
  return p;
}

// Every word must be in the error.
void expect_error(const Planted& p, const std::vector<std::string>& words) {
  const CheckResult result = p.check();
  EXPECT_FALSE(result.ok);
  for (const std::string& word : words) {
    EXPECT_NE(result.error.find(word), std::string::npos)
        << "no '" << word << "' in: " << result.error;
  }
}

void send_nothing(Primitive& p) {
  p.flags &= static_cast<std::uint16_t>(~(kSend | kIntoOutput));
  p.to = kNobody;
}

void swap_parts(std::vector<Primitive>& program, std::size_t i, std::size_t j) {
  const std::uint32_t part = program[i].part;
  program[i].part = program[j].part;
  program[j].part = part;
}

// Ring all-reduce of 5 ranks, rank r: 0 send r-1; 1-3 recv_reduce_send r-2…r-4;
// 4 recv_reduce_copy_send r; 5-7 recv_copy_send r-1…r-3; 8 recv_copy r-4.

TEST(PlanMistakes, SwappedPartsOfTwoPrimitives) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  swap_parts(p.program(3), 1, 2);
  expect_error(p, {"rank 3 primitive 1 (recv_reduce_send part 0 from 2 to 4) loop 0", "of part 0",
                   "rank 2 primitive 0 has sent", "of part 1"});
}

TEST(PlanMistakes, SwappedPartsWithOtherLengths) {
  // 9 floats: parts of 4, 4, 1, 0, 0.
  Planted p = make(Kind::kReduceScatter, Algorithm::kRing, 9);
  swap_parts(p.program(3), 0, 1);
  expect_error(p, {"rank 3 primitive 1", "expects", "has sent"});
  Planted q = make(Kind::kAllReduce, Algorithm::kRing, 9);
  q.program(1)[0].part = 2;  // should send part 0
  expect_error(q, {"rank 2 primitive 1", "expects 4 elements of part 0",
                   "has sent 1 elements of part 2", "the lengths differ"});
}

TEST(PlanMistakes, BlocksSwappedOnAllRanksAlike) {
  // Sends and receives match, but blocks 0 and 1 change places. What rank 0 has as its own block is
  // then not at its place in the input.
  Planted p = make(Kind::kAllGather, Algorithm::kOneShot, 8);
  for (Plan& plan : p.plans) {
    for (Primitive& q : plan.primitives) {
      if (q.part < 2) q.part ^= 1;
    }
  }
  expect_error(p, {"rank 0 primitive 0", "no input there"});
}

TEST(PlanMistakes, WrongSendPeer) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  p.set_to(1, 3, one(4));  // instead of 2
  expect_error(p, {"rank 2", "of part 2", "rank 1 primitive 4 has sent", "of part 1"});
  Planted q = make(Kind::kAllGather, Algorithm::kOneShot, 8);
  q.set_to(1, 0, one(2));  // only
  expect_error(q, {"rank 0 primitive 1", "waits for rank 1 to send", "finished its program"});
}

TEST(PlanMistakes, WrongReceivePeer) {
  Planted p = make(Kind::kReduce, Algorithm::kChain);
  p.set_from(1, 0, one(4));  // instead of 0
  expect_error(p, {"rank 1 primitive 0", "waits for rank 4 to send"});
}

TEST(PlanMistakes, MissingFinish) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  p.program(2)[4].flags &= static_cast<std::uint16_t>(~kFinish);
  expect_error(p, {"output part 2 loop 0", "not finished", "kFinish"});
  Planted q = make(Kind::kReduce, Algorithm::kOneShot, 8);
  q.program(2)[0].flags &= static_cast<std::uint16_t>(~kFinish);
  expect_error(q, {"rank 2's output", "not finished"});
}

TEST(PlanMistakes, DoubleFinish) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  p.program(3)[6].flags |= kFinish;
  // (What may be in the output already cannot be finished at all.)
  for (Plan& plan : p.plans) {
    for (Primitive& q : plan.primitives) q.flags &= static_cast<std::uint16_t>(~kIntoOutput);
  }
  expect_error(p, {"rank 3 primitive 6 (recv_copy_send part 1", "finished twice"});
}

TEST(PlanMistakes, EarlyFinish) {
  Planted p = make(Kind::kReduceScatter, Algorithm::kRing);
  p.program(4)[2].flags |= kFinish;  // part 1, which rank 2 began
  expect_error(p, {"rank 4 primitive 2", "incomplete", "lacks ranks 0-1"});
}

TEST(PlanMistakes, FinishOfARawValue) {
  Planted p = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  p.program(0)[0].flags |= kFinish;
  expect_error(p, {"rank 0 primitive 0", "kFinish on the raw input of rank 0"});
}

TEST(PlanMistakes, MissingContribute) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  p.program(1)[0].flags &= static_cast<std::uint16_t>(~kContribute);
  expect_error(
      p, {"rank 2 primitive 1", "the raw input of rank 1 (the received slice)", "kContribute"});
  Planted q = make(Kind::kReduce, Algorithm::kChain);
  q.program(2)[0].flags &= static_cast<std::uint16_t>(~kContribute);
  expect_error(q, {"rank 2 primitive 0", "raw input of rank 2 (the local slice)"});
  Planted r = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  r.program(3)[1].flags &= static_cast<std::uint16_t>(~kContribute);
  expect_error(r, {"rank 3 primitive 1 (gather_reduce_copy", "without kContribute"});
}

TEST(PlanMistakes, DoubleContribute) {
  // A gather contributes what it receives; the sender must not.
  Planted p = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  p.program(1)[0].flags |= kContribute;
  expect_error(p, {"contributions of ranks 1 from rank 1", "contributed twice"});
}

TEST(PlanMistakes, ContributionMissing) {
  // Rank 0 of a chain passes on without adding its own.
  Planted p = make(Kind::kReduce, Algorithm::kChain);
  p.program(0)[0].flags = kRecv | kSend;
  expect_error(p, {"rank 2 primitive 0", "incomplete", "lacks ranks 0"});
}

TEST(PlanMistakes, ContributionTwice) {
  // The chain goes round an extra time through one rank: 4 -> 3 -> 4.
  Planted p = make(Kind::kReduce, Algorithm::kChain);
  // Order of the chain is 3, 4, 0, 1, 2. Rank 3 sends to 4, 4 back to 3, 3 again to 4.
  const unsigned flags = p.program(4)[0].flags;
  const Primitive back = p.primitive(4, flags, 0, one(3), one(3));
  const Primitive again = p.primitive(3, flags, 0, one(4), one(4));
  p.program(3).push_back(again);
  p.program(4).insert(p.program(4).begin(), back);
  expect_error(p, {"rank 2", "has ranks 3-4 (2 times)"});
}

TEST(PlanMistakes, ChunkTooLargeForTheSlots) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
    Planted p = make(kind, Algorithm::kRing);
    for (Plan& plan : p.plans) plan.geometry.chunk = kSlots * kSlotBytes / 4;
    expect_error(
        p, {"with 5 slots", "rank 0 primitive 1", "to make room", "a cycle of 5 ranks", " -> "});
    for (Plan& plan : p.plans) plan.geometry.chunk = (kSlots + 1) * kSlotBytes / 4;
    expect_error(p, {"with 5 slots", "to make room", "a cycle of 5 ranks"});
    p.slots = kSlots + 2;
    EXPECT_TRUE(p.check().ok) << p.check().error;
    EXPECT_EQ(p.check().slots_needed, kSlots + 2);
  }
  // A chain has no cycle, whatever the chunk.
  Planted chain = make(Kind::kBroadcast, Algorithm::kChain);
  for (Plan& plan : chain.plans) plan.geometry.chunk = 512;
  EXPECT_TRUE(chain.check().ok) << chain.check().error;
  // A packet is one slice.
  Planted packets = make(Kind::kAllReduce, Algorithm::kOneShot);
  for (Plan& plan : packets.plans) plan.geometry.chunk *= 2;
  expect_error(packets, {"packet chunk", "at most 8 elements"});
}

TEST(PlanMistakes, ReceivesInACycle) {
  // Everybody receives before it sends.
  Planted p = make(Kind::kAllGather, Algorithm::kOneShot, 8);
  for (std::size_t r = 0; r < kRanks; ++r) {
    std::vector<Primitive>& program = p.program(r);
    std::swap(program[0], program[1]);
  }
  expect_error(p, {"to send", "a cycle of 2 ranks", "0 -> 1 -> 0"});
  Planted q = make(Kind::kAllReduce, Algorithm::kRsag);
  for (std::size_t r = 0; r < kRanks; ++r) std::swap(q.program(r)[0], q.program(r)[1]);
  expect_error(q, {"to send", "a cycle of 2 ranks"});
}

TEST(PlanMistakes, APrimitiveTooMany) {
  Planted p = make(Kind::kBroadcast, Algorithm::kOneShot, 8);
  p.program(2).push_back(p.primitive(2, kLocal, 0, nobody(), one(4)));  // to rank 4 twice
  expect_error(p, {"rank 2 primitive 1", "1 slices sent to rank 4 are left over"});
}

TEST(PlanMistakes, APrimitiveTooFew) {
  // The reader's end is missing.
  Planted p = make(Kind::kReduce, Algorithm::kOneShot, 8);
  p.program(2)[0] = p.primitive(2, kLocal | kCopy | kContribute, 0);
  expect_error(p, {"lacks ranks 0-1,3-4"});
  Planted q = make(Kind::kAllReduce, Algorithm::kRing);
  q.program(3).pop_back();
  expect_error(q, {"rank 3's output part 4 loop 0", "never written"});
  // The writer's end is missing.
  Planted r = make(Kind::kBroadcast, Algorithm::kOneShot, 8);
  r.program(2)[0] = r.primitive(2, kLocal | kCopy, 0);
  expect_error(r, {"rank 0 primitive 0", "waits for rank 2 to send", "finished its program"});
  // A reduction that nobody's output depends on.
  Planted s = make(Kind::kReduce, Algorithm::kChain, 8);
  s.program(3).insert(s.program(3).begin(), s.program(3)[0]);
  expect_error(s, {"rank 3 primitive 1 (send part 0 to 4)", "left over"});
  // A whole program.
  Planted t = make(Kind::kAllReduce, Algorithm::kRing);
  t.program(1).clear();
  expect_error(t, {"rank 1's program is empty"});
}

TEST(PlanMistakes, InPlaceOverwrittenBeforeSend) {
  Planted p = make(Kind::kReduceScatter, Algorithm::kRing, 40);
  // Rank 1 stores the others' sum of part 1 into its output, which in place is its input, and adds
  // its own input afterwards.
  std::vector<Primitive>& program = p.program(1);
  Primitive last = program.back();
  Primitive store = last;
  store.flags = kRecv | kCopy;
  Primitive add = last;
  add.flags = kLocal | kContribute | kFinish | kCopy;
  add.from = kNobody;
  program.back() = store;
  program.push_back(add);
  expect_error(p, {"rank 1 primitive 5 (copy part 1)", "in place, is overwritten",
                   "the contributions of ranks 0,2-4"});
}

TEST(PlanMistakes, InPlaceGatherBeforeSend) {
  Planted p = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  // Right out of place: rank 0 gathers before it sends to rank 4, for which nobody waits in turn.
  std::vector<Primitive>& program = p.program(0);
  const Primitive gather = program[1];
  program.clear();
  for (int to = 1; to < kRanks; ++to) {
    program.push_back(p.primitive(0, kLocal, 0, nobody(), one(to)));
  }
  program.insert(program.begin() + 3, gather);
  expect_error(p, {"rank 0 primitive 4 (send part 0 to 4)", "in place, is overwritten",
                   "the finished result of ranks 0-4"});
}

TEST(PlanMistakes, OverwritesWhatASliceUnderWayMayRead) {
  // Two ranks exchange their inputs and add: right one slice after the other, but in place the sum
  // may be stored while the slice before still reads what it is to send.
  Planted p;
  p.request.count = 40;
  p.request.ranks = 2;
  PlanLimits limits;
  limits.guaranteed_slot_bytes = kSlotBytes;
  for (p.request.rank = 0; p.request.rank < 2; ++p.request.rank) {
    p.plans.push_back(*make_plan(p.request, limits, Algorithm::kRsag));
    Plan& plan = p.plans.back();
    const PeerRanks peer = one(1 - p.request.rank);
    plan.geometry.parts = 1;
    ProgramBuilder program(2, p.request.rank);
    program.add(kLocal | kContribute, 0, nobody(), peer);
    program.add(kLocal | kReduce | kCopy | kContribute | kFinish, 0, peer);
    program.write(&plan);
  }
  expect_error(p, {"primitive 1", "an earlier primitive may still be reading"});
}

// The primitives with several peers.

TEST(PlanMistakes, AMeshWithOneSlot) {
  // Each result wants the slot in which the contribution lies that its peer consumes in the same
  // step.
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
  p.slots = 1;
  expect_error(
      p, {"with 1 slots", "gather_reduce_copy_send_all", "to make room", "a cycle of 2 ranks"});
  for (const Kind kind :
       {Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce}) {
    Planted q = make(kind, Algorithm::kRsag);
    q.slots = 1;
    EXPECT_TRUE(q.check().ok) << q.check().error;
  }
}

TEST(PlanMistakes, AChunkOfSeveralSlicesForSeveralPeers) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                          Kind::kBroadcast, Kind::kReduce}) {
    Planted p = make(kind, Algorithm::kRsag);
    for (Plan& plan : p.plans) plan.geometry.chunk *= 2;
    expect_error(p, {"rank 0 primitive 0", "one slice a peer"});
  }
}

TEST(PlanMistakes, MissingSendAll) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
  send_nothing(p.program(3)[1]);
  expect_error(p, {"of part 3", "rank 3 primitive 0 has sent"});
  // With one loop nothing else comes from there.
  Planted q = make(Kind::kAllReduce, Algorithm::kRsag, 40);
  send_nothing(q.program(3)[1]);
  expect_error(q, {"collect_copy", "waits for rank 3 to send"});
}

TEST(PlanMistakes, SendAllOfWhatIsNotFinished) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
  p.program(3)[1].flags &= static_cast<std::uint16_t>(~kFinish);
  expect_error(p, {"output part 3 loop 0", "not finished"});
  Planted q = make(Kind::kAllGather, Algorithm::kRsag, 8);
  q.program(3)[0].part = 2;
  expect_error(q, {"rank 3 primitive 0", "no input there"});
}

TEST(PlanMistakes, SendAllWithoutAReader) {
  Planted p = make(Kind::kReduceScatter, Algorithm::kRsag, 8);
  p.program(3)[1].flags |= kSend;
  p.set_to(3, 1, all_but(3));
  expect_error(p, {"rank 3 primitive 1", "left over"});
}

TEST(PlanMistakes, GatherOfAnotherPart) {
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
  p.program(3)[1].part = 2;
  expect_error(p, {"rank 3 primitive 1", "expects", "of part 2", "of part 3"});
}

TEST(PlanMistakes, ScatterMissingOrTwice) {
  Planted p = make(Kind::kReduceScatter, Algorithm::kRsag, 8);
  p.program(3).erase(p.program(3).begin());
  expect_error(p, {"waits for rank 3 to send"});
  Planted q = make(Kind::kReduceScatter, Algorithm::kRsag, 8);
  q.program(3).insert(q.program(3).begin(), q.program(3)[0]);
  expect_error(q, {"rank 3 primitive 1 (scatter", "left over"});
  // Somebody whose chunk is empty is not waited for, and gets nothing.
  Planted r = make(Kind::kAllReduce, Algorithm::kRsag, 9);  // parts of 4, 4, 1, 0, 0
  r.program(0)[0] = r.primitive(0, kLocal, 1, nobody(), one(4));
  expect_error(r, {"of part 0", "rank 0 primitive 0 has sent", "of part 1"});
}

TEST(PlanMistakes, CollectMissingOrTwice) {
  Planted p = make(Kind::kAllGather, Algorithm::kRsag, 8);
  p.program(3).pop_back();
  expect_error(p, {"rank 3's output part 0 loop 0", "never written"});
  Planted q = make(Kind::kAllGather, Algorithm::kRsag, 8);
  q.program(3).push_back(q.program(3)[1]);
  expect_error(q, {"rank 3 primitive 2 (collect_copy", "waits for rank 0 to send", "finished"});
}

TEST(PlanMistakes, ScatterAfterTheInputIsOverwritten) {
  // Ranks 0 and 1 first exchange part 0 as it is: rank 1 stores it, which in place is its input.
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag, 40);
  p.program(0).insert(p.program(0).begin(), p.primitive(0, kLocal, 0, nobody(), one(1)));
  p.program(1).insert(p.program(1).begin(), p.primitive(1, kCopy, 0, one(0)));
  expect_error(
      p, {"rank 1 primitive 1 (scatter", "in place, is overwritten", "the raw input of rank 0"});
}

TEST(PlanMistakes, MeaninglessPrimitivesWithSeveralPeers) {
  // Flags of rank 1's first primitive, with whom it receives from and sends to.
  const auto all = all_but(1);
  const struct {
    std::string word;
    unsigned flags;  // and kRecv, kSend
    PeerRanks from = nobody(), to = nobody();
  } mistakes[] = {
      {"no source", kScatter, nobody(), all},
      {"a scatter sends local slices", kLocal | kScatter | kFromOutput, nobody(), all},
      {"a scatter sends local slices", kLocal | kScatter | kContribute, nobody(), all},
      {"a scatter sends local slices", kLocal | kScatter | kCopy},
      {"a scatter sends local slices", kScatter | kCopy, all, all},
      {"a scatter sends local slices", kLocal | kScatter | kReduce | kContribute, all, all},
      {"a scatter sends local slices", kLocal | kScatter | kCollect | kCopy, all, all},
      {"no destination", kLocal | kScatter},
      {"no destination", kCollect, all},
      {"a collect copies", kCollect, all, all},
      {"a collect copies", kCollect | kCopy, all, all},
      {"a collect copies", kCollect | kCopy | kLocal | kReduce, all},
      {"a collect copies", kCollect | kCopy | kFinish, all},
      {"a collect copies", kCollect | kCopy | kLocal},
      {"no source", 0, nobody(), all},
      {"a gather reduces", kCopy, all},
      {"a gather reduces", kLocal | kReduce | kFromOutput | kCopy, all},
      {"a scatter or collect needs a set", kLocal | kScatter, nobody(), one(2)},
      {"a scatter or collect needs a set", kCollect | kCopy, one(2)},
      {"only what a set sends can be its sums", kLocal | kPartials, nobody(), all},
      {"only what a set sends can be its sums", kLocal | kReduce | kPartials | kCopy, one(2)},
      {"a collect copies", kCollect | kCopy | kPartials, all},
  };
  for (const auto& m : mistakes) {
    Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
    p.program(1)[0] = p.primitive(1, m.flags, 1, m.from, m.to);
    expect_error(p, {"rank 1 primitive 0", m.word});
  }
  // One part per rank, and input or output in all of them.
  Planted p = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  p.program(1)[0].flags = kLocal | kScatter | kSend;
  expect_error(p, {"rank 1 primitive 0", "one part per rank, the plan has 1"});
  Planted q = make(Kind::kAllGather, Algorithm::kRsag);
  q.program(1)[0].flags = kLocal | kScatter | kSend;
  expect_error(q, {"rank 1 primitive 0", "no input in part 0"});
  Planted r = make(Kind::kReduceScatter, Algorithm::kRsag);
  r.program(1)[0] = r.primitive(1, kCollect | kCopy, 0, all_but(1));
  expect_error(r, {"rank 1 primitive 0", "no output in part 0"});
  r.program(1)[0] = r.primitive(1, kLocal | kScatter | kCopy, 0, nobody(), all_but(1));
  expect_error(r, {"rank 1 primitive 0", "no output in part 0"});
  // A scatter that copies what results will take the place of, or should be elsewhere.
  Planted s = make(Kind::kAllReduce, Algorithm::kRsag);
  s.program(1)[0].flags |= kCopy;
  expect_error(s, {"rank 1 primitive 2 (collect_copy", "has stored something itself"});
  Planted t = make(Kind::kAllToAll, Algorithm::kRsag);
  t.program(1)[0].flags |= kCopy;
  expect_error(t, {"rank 1 primitive 0", "another place in the output"});
  Planted u = make(Kind::kAllReduce, Algorithm::kTwoShot);
  u.program(1)[0].flags |= kCopy;
  expect_error(u, {"rank 1 primitive 0", "packets that are scattered are not copied"});
}

// Rsag plans with a root (rank 2), whose part is empty; the others own one each. Broadcast: the
// root 0 copy_scatter; the others 0 recv_copy_send_all from 2, 1 collect. Reduce: the root 0
// scatter, 1 collect; the others 0 scatter, 1 gather_reduce_send to 2.

TEST(PlanMistakes, AnotherEmptyPart) {
  for (const Kind kind : {Kind::kBroadcast, Kind::kReduce}) {
    for (const std::uint16_t part : {std::uint16_t{3}, kNoPart}) {
      // On one rank.
      Planted p = make(kind, Algorithm::kRsag);
      p.plans[3].geometry.empty_part = part;
      expect_error(p, {"rank 3's plan disagrees", "lengths differ",
                       "empty part " + std::to_string(part) + ", rank 0's has 2"});
      // On all ranks alike: then there are data of part 2, which nobody sees to.
      Planted q = make(kind, Algorithm::kRsag, 40);
      for (Plan& plan : q.plans) plan.geometry.empty_part = part;
      if (kind == Kind::kBroadcast) {
        expect_error(q, {"rank 2's output part 2 loop 0", "never written"});
      } else {
        expect_error(q, {"rank 2 primitive 1 (collect_copy", "of part 0",
                         "rank 0 primitive 0 has sent", "of part 2"});
      }
    }
  }
}

TEST(PlanMistakes, APartThatCannotBeEmpty) {
  for (const std::uint16_t part : {5, 6, 1000}) {
    Planted p = make(Kind::kReduce, Algorithm::kRsag);
    for (Plan& plan : p.plans) plan.geometry.empty_part = part;
    expect_error(p, {"part " + std::to_string(part) + " cannot be empty"});
  }
  // The only one.
  Planted q = make(Kind::kBroadcast, Algorithm::kChain);
  for (Plan& plan : q.plans) plan.geometry.empty_part = 0;
  expect_error(q, {"part 0 cannot be empty"});
  // A block.
  for (const Kind kind :
       {Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll, Kind::kGather, Kind::kScatter}) {
    Planted r = make(kind, Algorithm::kRsag);
    for (Plan& plan : r.plans) plan.geometry.empty_part = 2;
    expect_error(r, {"part 2 cannot be empty"});
  }
}

TEST(PlanMistakes, ABroadcastWhoseOwnerPassesNothingOn) {
  Planted p = make(Kind::kBroadcast, Algorithm::kRsag);
  send_nothing(p.program(3)[0]);
  expect_error(p, {"primitive 1 (collect_copy", "waits for rank 3 to send", "a cycle of 2 ranks"});
  p = make(Kind::kBroadcast, Algorithm::kRsag, 40);  // one loop
  send_nothing(p.program(3)[0]);
  expect_error(p, {"primitive 1 (collect_copy", "waits for rank 3 to send", "finished"});
  // To one only.
  Planted q = make(Kind::kBroadcast, Algorithm::kRsag);
  q.set_to(3, 0, one(4));
  expect_error(q, {"primitive 1 (collect_copy", "waits for rank 3 to send"});
  // Instead of what it got, what is in its input: it has none.
  Planted r = make(Kind::kBroadcast, Algorithm::kRsag);
  r.program(3)[0] = r.primitive(3, kLocal | kCopy | kIntoOutput, 3, nobody(), all_but(3));
  expect_error(r, {"rank 3 primitive 0", "no input there"});
  // Only after it has collected, as all others do.
  Planted s = make(Kind::kBroadcast, Algorithm::kRsag);
  for (const std::size_t rank : {0, 1, 3, 4}) std::swap(s.program(rank)[0], s.program(rank)[1]);
  expect_error(s, {"(collect_copy", "to send", "a cycle of"});
  // It passes on what it does not keep (and what nobody may have stored there, either).
  Planted t = make(Kind::kBroadcast, Algorithm::kRsag, 40);
  t.program(2)[0].flags &= static_cast<std::uint16_t>(~kIntoOutput);
  t.program(3)[0].flags &= static_cast<std::uint16_t>(~kCopy);
  expect_error(t, {"rank 3's output part 3 loop 0", "never written"});
}

TEST(PlanMistakes, ABroadcastThatMixesUpItsRoot) {
  // An owner takes its part from another one.
  Planted p = make(Kind::kBroadcast, Algorithm::kRsag);
  p.set_from(3, 0, one(1));
  p.set_to(3, 0, all_but(3, 1));
  expect_error(p, {"rank 3 primitive 0", "of part 3", "rank 1 primitive 0 has sent", "of part 1"});
  // The root keeps nothing.
  Planted q = make(Kind::kBroadcast, Algorithm::kRsag);
  q.program(2)[0].flags &= static_cast<std::uint16_t>(~kCopy);
  expect_error(q, {"rank 2's output part 0 loop 0", "never written"});
  // It collects, although nobody sends it anything.
  Planted r = make(Kind::kBroadcast, Algorithm::kRsag, 40);
  r.program(2).push_back(r.primitive(2, kCollect | kCopy, 0, all_but(2)));
  expect_error(r, {"rank 2 primitive 1 (collect_copy", "waits for rank 0 to send"});
}

TEST(PlanMistakes, AReduceWhoseOwnerSendsToAnother) {
  for (const std::uint64_t count : {40, 1000}) {
    Planted p = make(Kind::kReduce, Algorithm::kRsag, count);
    p.set_to(3, 1, one(4));  // instead of the root
    expect_error(p, {"rank 2 primitive 1 (collect_copy", "waits for rank 3 to send"});
  }
  // To all.
  Planted q = make(Kind::kReduce, Algorithm::kRsag, 40);
  q.set_to(3, 1, all_but(3));
  expect_error(q, {"rank 3 primitive 1", "left over"});
  // To nobody.
  Planted r = make(Kind::kReduce, Algorithm::kRsag);
  r.program(3).pop_back();
  expect_error(r, {"rank 2 primitive 1 (collect_copy", "waits for rank 3 to send"});
}

TEST(PlanMistakes, AReduceThatStoresWhereThereIsNoOutput) {
  Planted p = make(Kind::kReduce, Algorithm::kRsag);
  p.program(3)[1].flags |= kCopy;
  expect_error(p, {"rank 3 primitive 1", "no output there"});
  Planted q = make(Kind::kReduce, Algorithm::kRsag);
  q.program(3).push_back(q.primitive(3, kCollect | kCopy, 0, all_but(3)));
  expect_error(q, {"rank 3 primitive 2", "no output in part 0"});
  // A contribution does not go straight into an output.
  Planted r = make(Kind::kReduce, Algorithm::kRsag);
  r.program(3)[0].flags |= kIntoOutput;
  expect_error(r, {"rank 3 primitive 0", "into the output of rank 0"});
}

TEST(PlanMistakes, AReduceWhoseRootOverwritesItsInput) {
  // Part 0's result is stored before the root's contribution to it is read a second time.
  Planted p = make(Kind::kReduce, Algorithm::kRsag, 40);
  p.program(2).push_back(p.primitive(2, kLocal, 0, nobody(), one(1)));
  expect_error(
      p, {"rank 2 primitive 2", "in place, is overwritten", "the finished result of ranks 0-4"});
  // The root collects before it scatters.
  Planted q = make(Kind::kReduce, Algorithm::kRsag);
  std::swap(q.program(2)[0], q.program(2)[1]);
  expect_error(q, {"to send", "a cycle of 2 ranks"});
}

// All-to-all, gather, scatter, send/recv. Pairwise all-to-all, rank r: 0 own part; then for k = 1 …
// 4 send part r+k to r+k, receive part r-k from r-k.

TEST(PlanMistakes, AnAllToAllThatMixesUpBlocks) {
  // The wrong block goes to the right rank.
  Planted p = make(Kind::kAllToAll, Algorithm::kPairwise, 8);
  p.program(1)[1].part = 3;  // to 2
  expect_error(p, {"rank 2 primitive 2 (recv_copy part 1 from 1)", "expects 8 elements of part 2",
                   "rank 1 primitive 1 has sent 8 elements of part 3"});
  // The right block goes to the wrong place.
  Planted q = make(Kind::kAllToAll, Algorithm::kPairwise, 8);
  q.program(2)[2].part = 4;  // from 1
  expect_error(q, {"rank 2 primitive 2", "puts a slice from rank 1 into part 4"});
  // The own block.
  Planted r = make(Kind::kAllToAll, Algorithm::kOneShot, 8);
  r.program(3)[1].part = 2;
  expect_error(r, {"rank 3's output part 3 loop 0", "never written"});
  r.program(3)[1].part = 3;
  r.program(3).push_back(r.primitive(3, kLocal | kCopy, 2));
  expect_error(r, {"rank 3's output part 2", "the raw input of rank 3 instead of",
                   "the raw input of rank 2"});
  Planted s = make(Kind::kAllToAll, Algorithm::kOneShot, 8);
  s.program(3).erase(s.program(3).begin() + 1);
  expect_error(s, {"rank 3's output part 3 loop 0", "never written"});
  // Two blocks to one rank, in each other's place.
  Planted t = make(Kind::kAllToAll, Algorithm::kPairwise, 8);
  swap_parts(t.program(1), 1, 3);
  std::swap(t.program(1)[1].to, t.program(1)[3].to);
  EXPECT_TRUE(t.check().ok) << "another order is not a mistake: " << t.check().error;
  swap_parts(t.program(1), 1, 3);
  expect_error(t, {"rank 1 primitive", "has sent", "of part"});
  // Everybody sends block r+k, but keeps it at r+k as if it had not moved.
  Planted u = make(Kind::kAllToAll, Algorithm::kPairwise, 8);
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    for (Primitive& receive : u.program(rank)) {
      if ((receive.flags & kRecv) != 0) receive.part = static_cast<std::uint32_t>(rank) % kRanks;
    }
  }
  expect_error(u, {"puts a slice from rank"});
}

TEST(PlanMistakes, AnAllToAllThatForwards) {
  const struct {
    unsigned flags;
    PeerRanks from, to;
  } mistakes[] = {{kCopy, one(0), one(2)},
                  {kCopy, one(0), all_but(1, 0)},
                  {kLocal | kFromOutput, nobody(), one(2)},
                  {kLocal, nobody(), all_but(1)},
                  {kLocal, nobody(), PeerRanks::set({2, 3})}};
  for (const auto& m : mistakes) {
    Planted p = make(Kind::kAllToAll, Algorithm::kRsag, 8);
    p.program(1).push_back(p.primitive(1, m.flags, 0, m.from, m.to));
    expect_error(p, {"rank 1 primitive 3", "goes straight from one rank's input"});
  }
}

TEST(PlanMistakes, AnAllToAllThatReceivesFirst) {
  Planted p = make(Kind::kAllToAll, Algorithm::kPairwise);
  for (std::size_t r = 0; r < kRanks; ++r) std::swap(p.program(r)[1], p.program(r)[2]);
  expect_error(p, {"to send", "a cycle of 5 ranks"});
  Planted q = make(Kind::kAllToAll, Algorithm::kPairwise);
  for (Plan& plan : q.plans) plan.geometry.chunk = (kSlots + 1) * kSlotBytes / 4;
  expect_error(q, {"with 5 slots", "to make room", "a cycle of 5 ranks"});
  q.slots = kSlots + 1;
  EXPECT_TRUE(q.check().ok) << q.check().error;
}

TEST(PlanMistakes, GatherAndScatter) {
  for (const Algorithm a : {Algorithm::kOneShot, Algorithm::kRsag, Algorithm::kPairwise}) {
    // The root is rank 2.
    Planted p = make(Kind::kGather, a, 8);
    p.program(2).erase(p.program(2).begin());
    expect_error(p, {"rank 2's output part 2 loop 0", "never written"});
    Planted q = make(Kind::kGather, a, 8);
    q.program(1)[0].part = 0;
    expect_error(q, {"rank 1 primitive 0", "no input there"});
    Planted r = make(Kind::kGather, a, 8);
    r.program(1).clear();
    expect_error(r, {"rank 1's program is empty"});
    Planted s = make(Kind::kScatter, a, 8);
    s.program(1)[0].part = 0;
    expect_error(s, {"rank 1 primitive 0", "no output there"});
    Planted t = make(Kind::kScatter, a, 8);
    t.program(1).clear();
    expect_error(t, {"rank 1's program is empty"});
    Planted u = make(Kind::kScatter, a, 8);
    u.program(2).pop_back();
    expect_error(u, {"rank 2's output part 2 loop 0", "never written"});
    Planted v = make(Kind::kScatter, a, 8);
    v.program(2).push_back(v.primitive(2, kLocal, 1, nobody(), one(1)));
    expect_error(v, {"slices sent to rank 1 are left over"});
  }
  // Blocks of two ranks change places, alike at both ends.
  Planted p = make(Kind::kScatter, Algorithm::kPairwise, 8);
  for (Primitive& send : p.program(2)) {
    if (send.part == 0 || send.part == 1) send.part ^= 1;
  }
  expect_error(p, {"has sent 8 elements of part"});
}

TEST(PlanMistakes, SendRecv) {
  const auto plan_pair = [] {
    Planted p;
    p.request.kind = Kind::kSendRecv;
    p.request.count = 100;
    p.request.ranks = 2;
    p.request.root = 1;
    PlanLimits limits;
    limits.guaranteed_slots = kSlots;
    limits.guaranteed_slot_bytes = kSlotBytes;
    for (p.request.rank = 0; p.request.rank < 2; ++p.request.rank) {
      p.plans.push_back(*make_plan(p.request, limits, Algorithm::kPairwise));
    }
    EXPECT_TRUE(p.check().ok) << p.check().error;
    return p;
  };
  Planted p = plan_pair();
  p.program(0).clear();
  expect_error(p, {"rank 0's program is empty"});
  Planted q = plan_pair();
  q.program(1).clear();
  expect_error(q, {"rank 1's program is empty"});
  Planted r = plan_pair();
  r.program(1)[0].flags |= kCopy;
  expect_error(r, {"rank 1 primitive 0", "no output there"});
  Planted s = plan_pair();
  s.request.root = 0;
  expect_error(s, {"no output there"});
}

TEST(PlanMistakes, ABarrierThatForgetsARank) {
  // Rank 3 is not waited for by anybody: its element is in no sum.
  Planted p = make(Kind::kBarrier, Algorithm::kRing, 1);
  for (Primitive& q : p.program(3)) {
    if ((q.flags & kContribute) != 0 && (q.flags & kSend) != 0 && (q.flags & kRecv) != 0) {
      q.flags = kRecv | kSend;
    }
  }
  expect_error(p, {"incomplete", "lacks ranks 3"});
  Planted q = make(Kind::kBarrier, Algorithm::kOneShot, 1);
  q.program(3).pop_back();
  expect_error(q, {"rank 3's output part 0 loop 0", "never written"});
}

TEST(PlanMistakes, OutputReadBeforeItIsWritten) {
  Planted p = make(Kind::kAllGather, Algorithm::kRing);
  p.program(0)[0].flags |= kFromOutput;
  expect_error(p, {"rank 0 primitive 0", "output not yet written"});
}

TEST(PlanMistakes, OutputAsASourceIsUnderstood) {
  // A copy to the output, then a send from there: longer than need be, but right.
  Planted p = make(Kind::kAllGather, Algorithm::kRing);
  std::vector<Primitive>& program = p.program(0);
  Primitive copy = program[0];
  copy.flags = kLocal | kCopy;
  copy.to = kNobody;
  program[0].flags = kLocal | kFromOutput | kSend;
  program.insert(program.begin(), copy);
  EXPECT_TRUE(p.check().ok) << p.check().error;
}

TEST(PlanMistakes, AnotherOrderOnOneRank) {
  // Rank 0 adds up by itself, around the ring the other way: 1 + 0 instead of 0 + 1.
  PlanRequest request;
  request.kind = Kind::kAllReduce;
  request.count = 8;
  request.ranks = 2;
  Plan plan;
  plan.algorithm = Algorithm::kOneShot;
  plan.protocol = Protocol::kPacket;
  plan.geometry.kind = Kind::kAllReduce;
  plan.geometry.dtype = DType::kFloat32;
  plan.geometry.count = 8;
  plan.geometry.chunk = 8;
  Planted p{request, {plan, plan}};
  for (int r = 0; r < 2; ++r) {
    const PeerRanks peer = one(1 - r);
    ProgramBuilder program(2, r);
    program.add(kLocal | kContribute, 0, nobody(), peer);
    program.add(kLocal | kReduce | kCopy | kContribute | kFinish, 0, peer);
    program.write(&p.plans[static_cast<std::size_t>(r)]);
  }
  expect_error(p, {"reduced in another order", "bits can differ"});
}

TEST(PlanMistakes, MismatchedGeometry) {
  const std::vector<std::pair<std::string, std::function<void(Plan*)>>> mistakes = {
      {"chunk", [](Plan* plan) { plan->geometry.chunk /= 2; }},
      {"parts", [](Plan* plan) { plan->geometry.parts = 3; }},
      {"lanes", [](Plan* plan) { plan->geometry.lanes = 2; }},
      {"first lane", [](Plan* plan) { plan->geometry.first_lane = 1; }},
      {"empty part 4", [](Plan* plan) { plan->geometry.empty_part = 4; }},
      {"count", [](Plan* plan) { plan->geometry.count -= 1; }},
      {"protocol", [](Plan* plan) { plan->protocol = Protocol::kPacket; }},
      {"algorithm", [](Plan* plan) { plan->algorithm = Algorithm::kOneShot; }},
  };
  for (const auto& [word, plant] : mistakes) {
    Planted p = make(Kind::kAllReduce, Algorithm::kRing);
    plant(&p.plans[3]);
    expect_error(p, {"rank 3's plan disagrees", "lengths differ", word});
  }
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  for (Plan& plan : p.plans) plan.geometry.chunk -= 1;
  expect_error(p, {"not a multiple of the alignment"});
  Planted q = make(Kind::kAllGather, Algorithm::kRing);
  for (Plan& plan : q.plans) plan.geometry.parts = 4;
  expect_error(q, {"one part per rank", "has 4"});
  Planted r = make(Kind::kAllGather, Algorithm::kRing);
  r.plans.pop_back();
  expect_error(r, {"there are 4 for 5 ranks"});
}

TEST(PlanMistakes, MeaninglessPrimitives) {
  using Plant = std::function<void(Primitive*)>;
  const auto flags = [](unsigned f) -> Plant {
    return [f](Primitive* p) { p->flags = static_cast<std::uint16_t>(f); };
  };
  const std::vector<std::pair<std::string, Plant>> mistakes = {
      {"no source", flags(kSend)},
      {"no destination", flags(kRecv)},
      {"nothing that could go into an output", flags(kRecv | kCopy | kIntoOutput)},
      {"need kReduce", flags(kRecv | kLocal | kSend)},
      {"need kReduce", flags(kRecv | kReduce | kSend)},
      {"need a local slice", flags(kRecv | kContribute | kSend)},
      {"a receive peer without a receive", flags(kLocal | kContribute | kSend)},
      {"a send peer without a send", flags(kRecv | kCopy)},
      {"a receive without a peer", [](Primitive* p) { p->from = kNobody; }},
      {"a send without a peer", [](Primitive* p) { p->to = kNobody; }},
      {"no such part", [](Primitive* p) { p->part = 5; }},
      {"only sent", [](Primitive* p) { p->flags |= 1 << 14; }},
      {"no such carrier", [](Primitive* p) { p->flags |= 2 << 14; }},
      {"no such carrier", [](Primitive* p) { p->flags |= 3 << 14; }},
  };
  static_assert(static_cast<unsigned>(Carrier::kCopyEngine) == 1 << 14);
  static_assert(static_cast<unsigned>(Carrier::kNetwork) == 2 << 14);
  for (const auto& [word, plant] : mistakes) {
    Planted p = make(Kind::kAllReduce, Algorithm::kRing);
    plant(&p.program(1)[2]);
    expect_error(p, {"rank 1 primitive 2", word});
  }
  Planted p = make(Kind::kBroadcast, Algorithm::kChain);
  p.program(1)[0].flags |= kFinish;
  expect_error(p, {"broadcast reduces nothing"});
  Planted q = make(Kind::kReduce, Algorithm::kChain);
  q.program(1)[0].flags |= kCopy;
  expect_error(q, {"rank 1 primitive 0", "no output there"});
}

// A plan's own tables: its neighbours, and its sets of them.

TEST(PlanMistakes, NeighboursThatAreNone) {
  using Plant = std::function<void(Plan*)>;
  const std::vector<std::pair<std::string, Plant>> mistakes = {
      {"not in ascending order", [](Plan* p) { std::swap(p->neighbours[1], p->neighbours[2]); }},
      {"not in ascending order", [](Plan* p) { p->neighbours[1] = p->neighbours[2]; }},
      {"neighbour 5 is not in the group", [](Plan* p) { p->neighbours[3] = 5; }},
      {"neighbour 3 is the rank itself", [](Plan* p) { p->neighbours[2] = 3; }},
      // Even where no primitive has to do with them.
      {"neighbour 5 is not in the group", [](Plan* p) { p->neighbours.push_back(5); }},
      {"neighbour 65535 is not in the group", [](Plan* p) { p->neighbours.push_back(kNoPeer); }},
      {"neighbour 3 is the rank itself",
       [](Plan* p) { p->neighbours.insert(p->neighbours.begin() + 3, 3); }},
      {"is empty", [](Plan* p) { p->neighbours.clear(); }},
      {"wide peers for few neighbours",
       [](Plan* p) { p->wide_peers.resize(p->primitives.size()); }},
      {"wide peers for few neighbours", [](Plan* p) { p->wide_peers.resize(1); }},
  };
  for (const auto& [word, plant] : mistakes) {
    Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
    plant(&p.plans[3]);
    expect_error(p, {"rank 3", word});
  }
  Planted p = make(Kind::kAllReduce, Algorithm::kRing);
  p.plans[3].neighbours.pop_back();
  expect_error(p, {"rank 3's plan", "not in its tables"});
}

TEST(PlanMistakes, CodesBeyondTheTables) {
  // Four neighbours and one set.
  for (const int code : {4, 63, kFirstSet + 1, kFirstSet + kMostSets - 1, kFirstSet + kMostSets,
                         0x80, 0xfd, int{kWidePeer}}) {
    for (const std::size_t i : {0, 1, 2}) {
      Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
      ASSERT_EQ(p.plans[3].neighbours.size(), 4u);
      ASSERT_EQ(p.plans[3].sets.size(), 1u);
      Primitive& q = p.program(3)[i];
      (q.from == kNobody ? q.to : q.from) = static_cast<Peers>(code);
      expect_error(p, {"rank 3's plan", "a primitive's peer is not in its tables"});
    }
  }
}

TEST(PlanMistakes, SetsThatAreNone) {
  using Plant = std::function<void(Plan*)>;
  const std::vector<std::pair<std::string, Plant>> mistakes = {
      {"the set that it has to send with is empty", [](Plan* p) { p->sets[0].neighbours = 0; }},
      {"has more than the plan's neighbours", [](Plan* p) { p->sets[0].neighbours |= 1 << 4; }},
      {"has more than the plan's neighbours",
       [](Plan* p) { p->sets[0].neighbours |= std::uint64_t{1} << 63; }},
      {"the set that it has to send with is empty",
       [](Plan* p) { p->sets[0].neighbours = 1 << 4; }},
      // Parts of 4, 4, 1, 0 and 0 elements.
      {"part 2 is not as long as the longest", [](Plan* p) { p->sets[0].longest_part = 2; }},
      {"part 4 is not as long as the longest", [](Plan* p) { p->sets[0].longest_part = 4; }},
      {"part 5 is not as long as the longest", [](Plan* p) { p->sets[0].longest_part = 5; }},
      {"part 4294967295 is not as long", [](Plan* p) { p->sets[0].longest_part = ~0u; }},
  };
  for (const auto& [word, plant] : mistakes) {
    Planted p = make(Kind::kAllReduce, Algorithm::kRsag, 9);
    plant(&p.plans[3]);
    expect_error(p, {"rank 3 primitive 0 (", word});
  }
  // One as long as the longest is as good.
  Planted right = make(Kind::kAllReduce, Algorithm::kRsag, 9);
  right.plans[3].sets[0].longest_part = 1;
  EXPECT_TRUE(right.check().ok) << right.check().error;
  // A set that is received from.
  Planted p = make(Kind::kAllGather, Algorithm::kRsag, 8);
  p.plans[3].sets.push_back({});
  p.program(3)[1].from = kFirstSet + 1;
  expect_error(p, {"rank 3 primitive 1", "the set that it has to receive with is empty"});
  p.plans[3].sets.back() = {0x1f, 0};
  expect_error(p, {"rank 3 primitive 1", "has more than the plan's neighbours"});
  p.plans[3].sets.resize(kMostSets + 1);
  expect_error(p, {"rank 3's plan", "it has more than 8 sets"});
}

// Of two trees each has lanes of its own.
std::vector<std::uint16_t> lanes_to_try(Algorithm algorithm) {
  if (algorithm == Algorithm::kDoubleBinaryTree) return {1, 3};
  return {1};
}

// Whichever member is taken out of a set.
TEST(PlanMistakes, EveryMemberOfASetMatters) {
  int sets = 0;
  for (int a = 0; a < kNumAlgorithms; ++a) {
    const auto algorithm = static_cast<Algorithm>(a);
    for (int k = 0; k < kNumKinds; ++k) {
      const auto kind = static_cast<Kind>(k);
      if (kind == Kind::kSendRecv || !row_of(algorithm).serves(kind)) continue;
      for (const std::uint16_t lanes : lanes_to_try(algorithm)) {
        const Planted right = make(kind, algorithm, 200, lanes);
        for (std::size_t r = 0; r < kRanks; ++r) {
          for (std::size_t s = 0; s < right.plans[r].sets.size(); ++s, ++sets) {
            for (std::size_t q = 0; q < kRanks; ++q) {
              Planted p = right;
              const std::vector<std::uint16_t>& neighbours = p.plans[r].neighbours;
              // (Of what is empty nobody waits for anything.)
              if (q < neighbours.size() && neighbours[q] == p.plans[r].geometry.empty_part) {
                continue;
              }
              p.plans[r].sets[s].neighbours ^= std::uint64_t{1} << q;
              EXPECT_FALSE(p.check().ok) << to_string(kind) << " " << to_string(algorithm)
                                         << " neighbour " << q << " of rank " << r;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(sets, 50);
}

TEST(PlanMistakes, SumsAndContributions) {
  // What comes is raw.
  Planted p = make(Kind::kAllReduce, Algorithm::kRsag);
  p.program(1)[1].flags |= kPartials;
  expect_error(p, {"rank 1 primitive 1", "the raw input of rank 0 from rank 0",
                   "not a sum that others go into"});
  // What comes is contributed already.
  Planted q = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  for (std::size_t r = 0; r < kRanks; ++r) q.program(r)[0].flags |= kContribute;
  expect_error(q, {"the contributions of ranks", "contributed twice"});
  // All look at sums, so each has its own contribution behind the others'.
  for (std::size_t r = 0; r < kRanks; ++r) q.program(r)[1].flags |= kPartials;
  expect_error(q, {"reduced in another order than on other ranks"});
  // Of a reduce only the root adds up.
  Planted s = make(Kind::kReduce, Algorithm::kOneShot, 8);
  for (std::size_t r = 0; r < kRanks; ++r) s.program(r)[0].flags |= kContribute;
  expect_error(s, {"rank 2 primitive 0", "contributed twice"});
  s.program(2)[0].flags |= kPartials;
  EXPECT_TRUE(s.check().ok) << s.check().error;
  s.program(2)[0].flags &= static_cast<std::uint16_t>(~kContribute);
  expect_error(s, {"rank 2 primitive 0", "without kContribute"});
}

// More neighbours than there are codes.
TEST(PlanMistakes, WidePeers) {
  constexpr int kMany = 67;
  const auto plan_many = [] {
    Planted p;
    p.request.kind = Kind::kAllToAll;
    p.request.count = 8;
    p.request.ranks = kMany;
    PlanLimits limits;
    limits.guaranteed_slots = kSlots;
    limits.guaranteed_slot_bytes = kSlotBytes;
    for (p.request.rank = 0; p.request.rank < kMany; ++p.request.rank) {
      p.plans.push_back(*make_plan(p.request, limits, Algorithm::kPairwise));
    }
    return p;
  };
  const Planted right = plan_many();
  ASSERT_TRUE(right.check().ok) << right.check().error;
  // Rank 3: 0 own part, 1 to 4, 2 from 2, 3 to 5, …
  ASSERT_EQ(ranks_sent_to(right.plans[3], 1), std::vector<int>{4});
  using Plant = std::function<void(Plan*)>;
  const std::vector<std::pair<std::vector<std::string>, Plant>> mistakes = {
      {{"rank 3's plan", "more than 63 neighbours need wide peers of each primitive"},
       [](Plan* p) { p->wide_peers.clear(); }},
      {{"rank 3's plan", "need wide peers of each primitive"},
       [](Plan* p) { p->wide_peers.pop_back(); }},
      {{"rank 3's plan", "a plan with wide peers has no sets"},
       [](Plan* p) { p->sets.push_back({1, 0}); }},
      {{"rank 3's plan", "not in its tables"}, [](Plan* p) { p->primitives[1].to = 3; }},
      {{"rank 3's plan", "not in its tables"}, [](Plan* p) { p->primitives[1].to = kFirstSet; }},
      {{"rank 3's plan", "neighbour 67 is not in the group"},
       [](Plan* p) { p->neighbours.push_back(kMany); }},
      {{"rank 3 primitive 1", "its send peer is no neighbour of the plan"},
       [](Plan* p) { p->wide_peers[1].to = kMany - 1; }},
      {{"rank 3 primitive 2", "its receive peer is no neighbour of the plan"},
       [](Plan* p) { p->wide_peers[2].from = kNoPeer; }},
      {{"rank 3 primitive 1", "a send without a peer"},
       [](Plan* p) { p->primitives[1].to = kNobody; }},
      {{"rank 3 primitive 2", "a send peer without a send"},
       [](Plan* p) { p->primitives[2].to = kWidePeer; }},
      // The place of 4 is 3.
      {{"rank 5", "of part 5", "rank 3 primitive 1 has sent", "of part 4"},
       [](Plan* p) { p->wide_peers[1].to = 4; }},
      {{"rank 3 primitive 2", "puts a slice from rank 1 into part 2"},
       [](Plan* p) { p->wide_peers[2].from = 1; }},
  };
  for (const auto& [words, plant] : mistakes) {
    Planted p = right;
    plant(&p.plans[3]);
    expect_error(p, words);
  }
}

// So many that, with the rank itself, they are more than a slice has sources.
TEST(PlanMistakes, ASetOfTooMany) {
  for (const int ranks : {kMostNeighbours + 1, kMostNeighbours + 2}) {
    Planted p;
    p.request.kind = Kind::kReduce;
    p.request.count = 8;
    p.request.ranks = ranks;
    for (int r = 0; r < ranks; ++r) {
      Plan plan;
      plan.geometry.kind = Kind::kReduce;
      plan.geometry.dtype = DType::kFloat32;
      plan.geometry.count = 8;
      plan.geometry.chunk = 8;
      Primitive& only = plan.primitives.emplace_back();
      if (r != 0) {
        plan.neighbours = {0};
        only.flags = kLocal | kSend;
        only.to = 0;
      } else {
        for (int q = 1; q < ranks; ++q) plan.neighbours.push_back(static_cast<std::uint16_t>(q));
        plan.sets = {{~std::uint64_t{0} >> (65 - ranks), 1}};
        only.flags = kRecv | kLocal | kReduce | kCopy | kContribute | kFinish;
        only.from = kFirstSet;
      }
      p.plans.push_back(plan);
    }
    if (ranks == kMostNeighbours + 1) {
      EXPECT_TRUE(p.check().ok) << p.check().error;
    } else {
      expect_error(p, {"rank 0's plan", "more than 63 neighbours need wide peers"});
    }
  }
}

// What a sender may store straight into the receiver's output.
TEST(PlanMistakes, IntoOutputsThatAreNotJustCopiedTo) {
  // A contribution, which the receiver reduces; and what it passes on without keeping it.
  Planted p = make(Kind::kReduce, Algorithm::kChain);
  p.program(1)[0].flags |= kIntoOutput;
  expect_error(p, {"rank 1 primitive 0", "into the output of rank 2"});
  Planted q = make(Kind::kReduceScatter, Algorithm::kRsag);
  q.program(1)[0].flags |= kIntoOutput;
  expect_error(q, {"rank 1 primitive 0", "into the output of rank 0"});
  Planted t = make(Kind::kAllToAll, Algorithm::kRsag);
  t.program(1)[0].flags |= kIntoOutput;
  expect_error(t, {"rank 1 primitive 0", "another place in the output"});
  Planted w = make(Kind::kBroadcast, Algorithm::kRsag);
  w.program(4)[0].flags &= static_cast<std::uint16_t>(~kCopy);
  expect_error(w, {"rank 4 primitive 0", "does not just copy into its output", "rank 2"});
  // A receiver that passes on what it does not keep.
  Planted r = make(Kind::kBroadcast, Algorithm::kChain);
  r.program(4)[0].flags &= static_cast<std::uint16_t>(~kCopy);
  expect_error(r, {"rank 4 primitive 0", "does not just copy into its output", "rank 3"});
  // A receiver that finishes what has come, and one that stores something itself, first.
  Planted u = make(Kind::kAllReduce, Algorithm::kRing);
  Primitive& last = u.program(1).back();
  ASSERT_EQ(last.flags & (kRecv | kCopy | kReduce), kRecv | kCopy);
  last.flags |= kFinish;
  expect_error(u, {"rank 1 primitive", "does not just copy into its output"});
  Planted v = make(Kind::kAllReduce, Algorithm::kRing);
  Primitive preliminary;
  preliminary.flags = kLocal | kCopy;
  preliminary.part = v.program(1).back().part;
  v.program(1).insert(v.program(1).begin(), preliminary);
  expect_error(v, {"rank 1 primitive", "has stored something itself"});
  // Packets are not laid out as an output is.
  Planted s = make(Kind::kAllGather, Algorithm::kOneShot);
  s.program(1)[0].flags |= kIntoOutput;
  expect_error(s, {"rank 1 primitive 0", "into an output"});
}

// Even where nothing is to be moved: the engine runs a program's first primitive before it looks.
TEST(PlanMistakes, AnEmptyProgram) {
  for (const std::uint64_t count : {0u, 8u}) {
    Planted p = make(Kind::kBroadcast, Algorithm::kOneShot, count);
    p.program(3).clear();
    expect_error(p, {"rank 3's program is empty"});
    for (Plan& plan : p.plans) plan.primitives.clear();
    expect_error(p, {"rank 0's program is empty"});
  }
}

TEST(PlanMistakes, PacketsOfOneChunkThatLookAlike) {
  // Who collects looks for the flag of the first hop, which is the contribution's.
  Planted p = make(Kind::kAllReduce, Algorithm::kTwoShot, 40);
  p.program(3)[2].flags &= static_cast<std::uint16_t>(~kSecondHop);
  expect_error(p, {"rank 3 primitive 2", "expects a packet of hop 0", "has sent one of hop 1"});
  // The same where its packet comes from one that only sends.
  Planted q = make(Kind::kAllReduce, Algorithm::kOneShot, 8);
  q.program(1)[1].flags |= kSecondHop;
  expect_error(q, {"rank 1 primitive 1", "expects a packet of hop 1", "has sent one of hop 0"});
  // Two packets of one chunk and hop.
  Planted r = make(Kind::kAllGather, Algorithm::kOneShot, 8);
  for (Plan& plan : r.plans) {
    plan.primitives.push_back(plan.primitives[0]);
    plan.primitives.push_back(plan.primitives[1]);
  }
  expect_error(r, {"with the flag of one before"});
  // Hops where there are none.
  Planted s = make(Kind::kAllReduce, Algorithm::kRsag, 40);
  s.program(1)[2].flags |= kSecondHop;
  expect_error(s, {"only packets have hops"});
  Planted t = make(Kind::kAllReduce, Algorithm::kTwoShot, 40);
  t.program(1)[0].flags |= kSecondHop;
  expect_error(t, {"a second hop without a receive"});
  Planted u = make(Kind::kAllReduce, Algorithm::kTwoShot, 40);
  u.program(1)[1].flags |= kSecondHop;
  expect_error(u, {"two hops at most"});
}

TEST(PlanMistakes, EverySinglePrimitiveMatters) {
  // Whatever primitive of whatever rank is dropped or doubled: found.
  for (int a = 0; a < kNumAlgorithms; ++a) {
    const auto algorithm = static_cast<Algorithm>(a);
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kReduce,
                            Kind::kBroadcast}) {
      if (!row_of(algorithm).serves(kind)) continue;
      for (const std::uint16_t lanes : lanes_to_try(algorithm)) {
        const Planted right = make(kind, algorithm, 40, lanes);
        for (std::size_t r = 0; r < kRanks; ++r) {
          for (std::size_t i = 0; i < right.plans[r].primitives.size(); ++i) {
            Planted p = right;
            std::vector<Primitive>& program = p.program(r);
            const auto at = program.begin() + static_cast<std::ptrdiff_t>(i);
            const bool local = (at->flags & ~(kLocal | kCopy | kContribute | kFinish)) == 0;
            program.erase(at);
            EXPECT_FALSE(p.check().ok) << "dropped " << i << " of rank " << r;
            if (local) continue;  // doing a local copy twice is harmless
            p = right;
            p.program(r).insert(p.program(r).begin() + static_cast<std::ptrdiff_t>(i),
                                right.plans[r].primitives[i]);
            EXPECT_FALSE(p.check().ok) << "doubled " << i << " of rank " << r;
          }
        }
      }
    }
  }
}

TEST(PlanMistakes, EverySingleFlagMatters) {
  // Whatever flag of whatever primitive is flipped: found.
  for (int a = 0; a < kNumAlgorithms; ++a) {
    const auto algorithm = static_cast<Algorithm>(a);
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kReduce,
                            Kind::kBroadcast}) {
      if (!row_of(algorithm).serves(kind)) continue;
      for (const std::uint16_t lanes : lanes_to_try(algorithm)) {
        const Planted right = make(kind, algorithm, 200, lanes);
        for (std::size_t r = 0; r < kRanks; ++r) {
          for (std::size_t i = 0; i < right.plans[r].primitives.size(); ++i) {
            for (const unsigned bit : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15}) {
              static_assert(kIntoOutput == 1 << 13);  // which may be left out
              Planted p = right;
              p.program(r)[i].flags ^= static_cast<std::uint16_t>(1u << bit);
              // Harmless: storing a preliminary value that the right one overwrites later,
              // reading the own data from the output where they have been copied to, and marking
              // what is only sent for a carrier.
              const unsigned flag = 1u << bit;
              const bool only_sends =
                  (right.plans[r].primitives[i].flags & (kRecv | kSend)) == kSend;
              if (flag == static_cast<unsigned>(Carrier::kCopyEngine) && only_sends) continue;
              if (flag == kCopy && (right.plans[r].primitives[i].flags & kCopy) == 0) continue;
              const bool root = static_cast<int>(r) == right.request.root;
              const bool own = kind == Kind::kAllGather || (kind == Kind::kBroadcast && root);
              if (flag == kFromOutput && own && i > 0) continue;
              EXPECT_FALSE(p.check().ok)
                  << to_string(kind) << " " << to_string(algorithm) << " flag " << bit
                  << " of rank " << r << " primitive " << i;
            }
          }
        }
      }
    }
  }
}

// Double binary trees. All-reduce of 5 ranks: on top of tree 0 is rank 3, with 1 and 4 below it,
// and 0 and 2 below 1; on top of tree 1 is rank 4, with 0 and 2, and 1 and 3 below 2. Rank 1: 0
// gather_reduce_send part 0 to 3; 1 send part 1 to 2; 2 recv_copy_send_several part 0 from 3, lag
// 1; 3 recv_copy part 1 from 2, lag 2. A reduce and a broadcast have the root, rank 2, outside.

TEST(PlanMistakes, ATreeThatForgetsAChild) {
  Planted p = make_trees(Kind::kAllReduce);
  p.set_from(1, 0, PeerRanks::set({0}));  // and not 2
  expect_error(p, {"rank 3 primitive 0", "incomplete", "lacks ranks 2"});
  Planted q = make_trees(Kind::kAllReduce);
  q.set_to(1, 2, PeerRanks::set({2}));  // and not 0
  expect_error(q, {"rank 0 primitive 3", "waits for rank 1 to send"});
  Planted r = make_trees(Kind::kReduce);
  const std::vector<int> fed = ranks_received_from(r.plans[2], 0);
  ASSERT_EQ(fed.size(), 1u);
  r.program(2)[0] = r.primitive(2, kLocal | kCopy | kContribute | kFinish, 0);
  expect_error(r, {"rank 2 primitive 0", "lacks ranks 0-1,3-4"});
}

TEST(PlanMistakes, ATreeWithAChildOfAnother) {
  // Rank 2 is below rank 1 in tree 0; rank 4 thinks so, too.
  Planted p = make_trees(Kind::kAllReduce);
  p.set_to(2, 0, one(4));
  expect_error(p, {"rank 1 primitive 0", "waits for rank 2 to send"});
  // A leaf's parent is that of the other tree.
  Planted q = make_trees(Kind::kAllReduce);
  ASSERT_EQ(ranks_received_from(q.plans[0], 3), std::vector<int>{1});
  q.set_from(0, 3, one(4));
  expect_error(q, {"rank 0 primitive 3", "waits for rank 4 to send"});
  Planted r = make_trees(Kind::kBroadcast);
  for (std::size_t i = 0; i < 2; ++i) {
    const std::vector<int> parent = ranks_received_from(r.plans[3], 1 - i);
    Planted s = r;
    s.set_from(3, i, one(parent[0]));
    EXPECT_FALSE(s.check().ok);
  }
}

TEST(PlanMistakes, ATreeWhoseWayDownComesFirst) {
  // Without lags it is right as well, only slower.
  Planted p = make_trees(Kind::kAllReduce);
  for (Plan& plan : p.plans) {
    for (Primitive& q : plan.primitives) q.lag = 0;
  }
  EXPECT_TRUE(p.check().ok) << p.check().error;
  for (const std::size_t rank : {0, 1, 2}) {
    Planted q = p;
    std::vector<Primitive>& program = q.program(rank);
    std::rotate(program.begin(), program.begin() + 2, program.end());
    expect_error(q, {"to send", "a cycle of"});
  }
  // With lags the last one is to lag most.
  Planted r = make_trees(Kind::kAllReduce);
  std::rotate(r.program(1).begin(), r.program(1).begin() + 2, r.program(1).end());
  expect_error(r, {"rank 1 primitive", "lags more than the last one"});
}

TEST(PlanMistakes, ATreeWithOtherLags) {
  Planted p = make_trees(Kind::kAllReduce);
  std::vector<Primitive>& program = p.program(1);
  ASSERT_EQ(program[2].lag, 1u);
  ASSERT_EQ(program[3].lag, 2u);
  program[2].lag = 2, program[3].lag = 1;
  expect_error(p, {"rank 1 primitive 2", "lags more than the last one"});
  // Later is only slower, up to what both ways have slots for.
  for (const std::uint32_t more : {1u, 2u * kSlots - 1, 2u * kSlots}) {
    Planted q = make_trees(Kind::kAllReduce);
    q.program(1)[3].lag += more;
    if (more < 2 * kSlots) {
      EXPECT_TRUE(q.check().ok) << q.check().error;
    } else {
      expect_error(q, {"with 5 slots", "to make room", "a cycle of 2 ranks"});
    }
  }
}

// Between two ranks one tree's way up and the other's way down meet, by other lags at either end.
TEST(PlanMistakes, BothTreesOnEachLane) {
  Planted p = make_trees(Kind::kAllReduce);
  for (Plan& plan : p.plans) plan.geometry.by_lane = false;
  expect_error(p, {"rank 2 primitive 1", "expects 16 elements of part 1", "has sent", "of part 0"});
  // Of one rank alone.
  Planted q = make_trees(Kind::kReduce);
  q.plans[3].geometry.by_lane = false;
  expect_error(q, {"rank 3's plan disagrees", "parts by lanes"});
}

TEST(PlanMistakes, PartsByTooFewLanes) {
  const std::vector<std::function<void(Geometry*)>> mistakes = {
      [](Geometry* g) { g->lanes = 1; },
      [](Geometry* g) { g->parts = 3; },
      [](Geometry* g) { g->empty_part = 1; },
  };
  for (const auto& plant : mistakes) {
    Planted p = make_trees(Kind::kBroadcast);
    for (Plan& plan : p.plans) plant(&plan.geometry);
    expect_error(p, {"parts by lanes need as many lanes"});
  }
  Planted p = make(Kind::kAllGather, Algorithm::kRsag);
  for (Plan& plan : p.plans) plan.geometry.lanes = kRanks, plan.geometry.by_lane = true;
  expect_error(p, {"parts by lanes need", "no block for each rank"});
  Planted q = make(Kind::kAllReduce, Algorithm::kRsag);
  for (Plan& plan : q.plans) plan.geometry.lanes = kRanks, plan.geometry.by_lane = true;
  expect_error(q, {"rank 0 primitive 0", "each rank's part on each lane"});
}

TEST(PlanMistakes, ATreeThatFinishesBelowItsTop) {
  Planted p = make_trees(Kind::kAllReduce);
  p.program(1)[0].flags |= kFinish;
  expect_error(p, {"rank 1 primitive 0", "incomplete", "lacks ranks 3-4"});
  Planted q = make_trees(Kind::kAllReduce);
  q.program(3)[0].flags &= static_cast<std::uint16_t>(~kFinish);
  expect_error(q, {"output part 0 loop 0", "not finished"});
  // Both on top and on the way down.
  Planted r = make_trees(Kind::kAllReduce);
  r.program(3)[0].flags &= static_cast<std::uint16_t>(~kIntoOutput);
  r.program(1)[2].flags &= static_cast<std::uint16_t>(~kIntoOutput);
  r.program(1)[2].flags |= kFinish;
  expect_error(r, {"rank 1 primitive 2", "finished twice"});
}

TEST(PlanMistakes, ATreeThatTakesSumsForContributions) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBarrier}) {
    Planted right =
        kind == Kind::kBarrier ? make(kind, Algorithm::kDoubleBinaryTree, 1) : make_trees(kind);
    int sums = 0;
    for (std::size_t r = 0; r < kRanks; ++r) {
      for (std::size_t i = 0; i < right.plans[r].primitives.size(); ++i) {
        if ((right.program(r)[i].flags & kPartials) == 0) continue;
        Planted p = right;
        p.program(r)[i].flags &= static_cast<std::uint16_t>(~kPartials);
        expect_error(p, {"rank " + std::to_string(r) + " primitive " + std::to_string(i),
                         "contributed twice"});
        ++sums;
      }
    }
    EXPECT_GT(sums, 1);
  }
}

// Rsag plans whose chunks lie passes apart; `together`: slices that send and receive.
Planted make_overlapping(Kind kind, bool together) {
  Planted p;
  p.request.kind = kind;
  p.request.count = 2000;
  p.request.ranks = kRanks;
  PlanLimits limits;
  limits.guaranteed_slots = kSlots;
  limits.guaranteed_slot_bytes = kSlotBytes;
  limits.overlap = true;
  limits.together = together;
  for (p.request.rank = 0; p.request.rank < kRanks; ++p.request.rank) {
    p.plans.push_back(*make_plan(p.request, limits, Algorithm::kRsag));
  }
  EXPECT_TRUE(p.check().ok) << p.check().error;
  return p;
}

TEST(PlanMistakes, LastDoesNotLagAsMuchAsAny) {
  Planted p = make_overlapping(Kind::kAllReduce, false);
  p.program(2)[1].lag = 7;
  expect_error(p, {"rank 2 primitive 1", "lags more than the last one"});
}

TEST(PlanMistakes, GoesTogetherWithWhatItCannot) {
  // 0 gather and send to all, 1 scatter, together with 2 collect.
  const Planted right = make_overlapping(Kind::kAllReduce, true);
  ASSERT_EQ(right.plans[0].primitives[1].flags, kLocal | kScatter | kSend | kWithNext);
  Planted p = right;
  p.program(3)[2].flags |= kWithNext;
  expect_error(p, {"rank 3 primitive 1", "is to receive from several, and nothing else"});
  Planted q = right;
  q.program(1)[0].flags |= kWithNext;
  expect_error(q, {"rank 1 primitive 0", "is to send the input to several, and nothing else"});
  Planted r = right;
  r.program(4)[2].lag = 0;
  r.program(4)[0].lag = 0;
  expect_error(r, {"rank 4 primitive 1", "is to lag behind it"});
  Planted s = make_overlapping(Kind::kAllGather, true);
  s.program(0)[1].flags |= kWithNext;
  s.program(0)[0].flags &= static_cast<std::uint16_t>(~kWithNext);
  expect_error(s, {"rank 0 primitive 1", "there is none after it"});
}

// What one rank takes in one slice must be what all others have sent, in that order.
TEST(PlanMistakes, PairLagsByAnotherNumberOfPasses) {
  for (const std::uint16_t lag : {2, 4}) {
    Planted p = make_overlapping(Kind::kAllReduce, true);
    p.program(3)[2].lag = lag;
    expect_error(p, {"rank 3", "expects", "has sent"});
  }
}

// With a slot less two ranks wait for each other's room: both sides of a pair are looked for.
TEST(PlanMistakes, PairsWithASlotTooFew) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather}) {
    Planted p = make_overlapping(kind, true);
    p.slots = 3;
    expect_error(p, {"with 3 slots", "to make room", "a cycle of"});
  }
}

TEST(PlanSymbolic, CountsContributionsExactly) {
  ValuePool pool(10);
  const auto c = [&](int r) { return pool.contribute(pool.raw(r)); };
  const ValueId a = pool.combine(c(3), c(4)), b = pool.combine(c(6), c(5));
  EXPECT_EQ(pool.combine(c(3), c(4)), a);
  EXPECT_NE(pool.combine(c(4), c(3)), a);  // another order
  const ValueId ab = pool.combine(a, b);
  EXPECT_EQ(pool.describe(ab), "the contributions of ranks 3-6");
  const ValueId twice = pool.combine(ab, pool.combine(c(5), c(9)));
  EXPECT_EQ(pool.describe(twice), "the contributions of ranks 3-4,5 (2 times),6,9");
  EXPECT_EQ(pool.defect(twice), "lacks ranks 0-2,7-8 and has ranks 5 (2 times)");
  EXPECT_FALSE(pool.complete(twice));
  ValueId all = c(7);
  for (const int r : {1, 9, 0, 4, 8, 2, 3, 6, 5}) all = pool.combine(all, c(r));
  EXPECT_TRUE(pool.complete(all));
  EXPECT_EQ(pool.defect(all), "");
  EXPECT_FALSE(pool.complete(pool.combine(all, c(0))));
  EXPECT_EQ(pool.describe(pool.combine(all, all)), "the contributions of ranks 0-9 (2 times)");
  EXPECT_EQ(pool.describe(pool.finish(all)), "the finished result of ranks 0-9");
}

}  // namespace
}  // namespace unjam
