// SendWindow, played: ranks that have the same all-reduces, all-gathers and broadcasts in orders
// of their own, a lane each, with the connectors, hops, looks, and sets of calls watched in turn
// that device/cuda/exec/slots/steer_several.cuh has. Data move at once, and a round of one rank is
// a step of the schedule, which is random.
#include "device/cuda/exec/slots/send_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "program/schedule.h"
#include "tests/support/job.h"

namespace unjam {
namespace {

constexpr std::uint32_t kWindow = 16;  // rounds from a look at whether something moves to the next
constexpr std::uint32_t kTurn = 2 * kWindow;
constexpr int kMostRounds = 100000;  // those that end take a tenth of it

// What may be left out, to see that it is missed.
struct Rules {
  bool unlocks = true;
  bool waits_until_sent = true;
  bool goes_to_all_sets = true;  // since it last gave anything, before it leaves
  // Not left out: something short, whose peers are not there, interrupts each run behind its turn.
  bool interrupted = false;
  bool stays_until_sent = true;  // also then, if it has moved nothing
};

enum class Kind : char { kAllReduce = 'r', kAllGather = 'g', kBroadcast = 'b' };

struct Job {
  std::uint32_t ranks, calls, chunks, lag, slots;
  std::uint32_t tries;           // calls that are looked at together, if they are alike
  std::string_view kinds = "r";  // of the first call, the next one, …, and from the front again
  // That are watched at a time: a set. See in_stream::steer_several().
  std::size_t at_once() const { return ranks <= 2 ? 8 : ranks <= 3 ? 4 : ranks <= 5 ? 2 : 1; }
};

class Play {
 public:
  Play(const Job& job, Rules rules, std::uint64_t seed) : job_(job), rules_(rules), random_(seed) {
    ranks_.resize(job.ranks);
    for (std::uint32_t who = 0; who < job.ranks; ++who) {
      Rank& r = ranks_[who];
      r.calls.resize(job.calls);
      for (std::uint32_t c = 0; c < job.calls; ++c) {
        Call& call = r.calls[c];
        // Of a hop that it has no part in, all is done.
        if (!has(who, c, kSends)) call.sent = job.chunks;
        if (!has(who, c, kGathers)) call.gathered = job.chunks;
        if (!has(who, c, kCollects)) call.collected = job.chunks;
      }
      r.queue.resize(job.calls);
      std::iota(r.queue.begin(), r.queue.end(), 0u);
      std::shuffle(r.queue.begin(), r.queue.end(), random_);
    }
    for (std::uint32_t r = 0; r < job.ranks; ++r) begin_run(r);
  }

  // How often somebody left, and, of these, while something had room to be sent.
  int leaves = 0, early_leaves = 0;

  // Whether all calls end.
  bool ends() {
    for (int i = 0; i < kMostRounds; ++i) {
      if (std::all_of(ranks_.begin(), ranks_.end(),
                      [](const Rank& r) { return r.queue.empty(); })) {
        return true;
      }
      const auto who = static_cast<std::uint32_t>(random_() % job_.ranks);
      if (!ranks_[who].queue.empty()) round(who);
    }
    return false;
  }

 private:
  struct Call {
    std::uint32_t sent = 0, gathered = 0, collected = 0;  // chunks
    bool operator==(const Call&) const = default;
  };
  // What was there when a call was looked at: for so many chunks room, or so many had come.
  struct Seen {
    std::uint32_t to_send = 0, to_gather = 0, for_result = 0, to_collect = 0;
    bool operator==(const Seen&) const = default;
  };
  struct Rank {
    std::vector<Call> calls;
    std::vector<std::uint32_t> queue;  // calls that have not ended here
    std::size_t cursor = 0;
    // The run.
    std::vector<std::uint32_t> tries, set;  // what was looked at, and goes
    std::vector<Call> before;               // calls, as they were
    std::vector<Seen> seen;                 // of `set`
    std::size_t watched = 0;                // which set is
    std::uint32_t ahead = 0, rounds = 0;
    bool moved = false, gave = false, still = false;
  };
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  Kind kind(std::uint32_t c) const { return static_cast<Kind>(job_.kinds[c % job_.kinds.size()]); }
  // Broadcasts are from each rank in turn.
  std::uint32_t root(std::uint32_t c) const {
    return c / static_cast<std::uint32_t>(job_.kinds.size()) % job_.ranks;
  }
  HopOrder order(std::uint32_t c) const {
    const bool two_hops = kind(c) == Kind::kAllReduce;
    return {job_.chunks, two_hops ? job_.lag : 0, two_hops};
  }
  // Whether the call's data go from one to the other.
  bool goes(std::uint32_t c, std::uint32_t from, std::uint32_t to) const {
    return from != to && (kind(c) != Kind::kBroadcast || from == root(c));
  }
  bool has(std::uint32_t who, std::uint32_t c, SlotStep hop) const {
    const bool sends = goes(c, who, (who + 1) % job_.ranks);
    switch (hop) {
      case kSends:
        return sends;
      case kGathers:
        return kind(c) != Kind::kBroadcast || !sends;
      default:
        return kind(c) == Kind::kAllReduce;
    }
  }
  // As go_together(): data go from and to the same ranks, through the same hops.
  bool are_alike(std::uint32_t c, std::uint32_t d) const {
    return kind(c) == kind(d) && (kind(c) != Kind::kBroadcast || root(c) == root(d));
  }

  // Slices of the call's connectors from this rank that are published, and to it that are consumed:
  // the same from, and to, all others that it has one with.
  std::uint32_t posted(const Rank& r, std::uint32_t c) const {
    return order(c).prefix(r.calls[c].sent, r.calls[c].gathered);
  }
  std::uint32_t consumed(const Rank& r, std::uint32_t c) const {
    return order(c).prefix(r.calls[c].gathered, r.calls[c].collected);
  }
  bool has_room(std::uint32_t who, std::uint32_t c, std::uint32_t slice) const {
    for (std::uint32_t q = 0; q < job_.ranks; ++q) {
      if (goes(c, who, q) && slice >= consumed(ranks_[q], c) + job_.slots) return false;
    }
    return true;
  }
  bool has_come(std::uint32_t who, std::uint32_t c, std::uint32_t slice) const {
    for (std::uint32_t q = 0; q < job_.ranks; ++q) {
      if (goes(c, q, who) && slice >= posted(ranks_[q], c)) return false;
    }
    return true;
  }

  bool is_over(const Rank& r, std::uint32_t c) const {
    const Call& call = r.calls[c];
    return std::min({call.sent, call.gathered, call.collected}) == job_.chunks;
  }

  // As look_at_slot_call(): whether it seems that the call can go on.
  bool is_ready(std::uint32_t who, std::uint32_t c) const {
    const Rank& r = ranks_[who];
    const Call& call = r.calls[c];
    const auto left = [&](std::uint32_t chunks) { return chunks != job_.chunks; };
    const HopOrder order = this->order(c);
    const std::uint32_t first = order.first(call.sent), second = order.second(call.collected);
    const bool sends = left(call.sent) && first == posted(r, c) && has_room(who, c, first);
    const bool gathers = left(call.gathered) && has_come(who, c, order.first(call.gathered)) &&
                         (!order.two_hops || has_room(who, c, order.second(call.gathered)));
    const bool collects =
        left(call.collected) && second == consumed(r, c) && has_come(who, c, second);
    return sends || gathers || collects;
  }
  void begin_run(std::uint32_t who) {
    Rank& r = ranks_[who];
    if (r.cursor >= r.queue.size()) r.cursor = 0;
    const auto from = r.queue.begin() + static_cast<std::ptrdiff_t>(r.cursor);
    const std::size_t most = std::min<std::size_t>(job_.tries, r.queue.size() - r.cursor);
    const auto end = std::find_if_not(from, from + static_cast<std::ptrdiff_t>(most),
                                      [&](std::uint32_t c) { return are_alike(*from, c); });
    r.tries.assign(from, end);
    r.set.clear();
    r.before = r.calls;
    // All, if there is anything to be done.
    if (std::any_of(r.tries.begin(), r.tries.end(),
                    [&](std::uint32_t c) { return is_ready(who, c); })) {
      r.set = r.tries;
    }
    r.seen.assign(r.set.size(), {});
    r.ahead = r.rounds = 0;
    r.watched = 0;
    for (const std::uint32_t c : r.set) r.ahead += r.calls[c].sent - r.calls[c].gathered;
    r.moved = r.gave = r.still = false;
  }
  // Whether it has moved something that is not forgotten.
  bool went_on(const Rank& r) const {
    return std::any_of(r.set.begin(), r.set.end(), [&](std::uint32_t c) {
      const Call& was = r.before[c];
      return posted(r, c) != order(c).prefix(was.sent, was.gathered) ||
             consumed(r, c) != order(c).prefix(was.gathered, was.collected);
    });
  }
  void end_run(std::uint32_t who) {
    Rank& r = ranks_[who];
    // What was moved out of turn is forgotten.
    bool moved = false;
    for (const std::uint32_t c : r.set) {
      Call& call = r.calls[c];
      if (is_over(r, c)) continue;
      const HopOrder order = this->order(c);
      const std::uint32_t sent = posted(r, c), taken = consumed(r, c);
      call.sent = order.firsts_in(sent);
      if (order.two_hops) call.collected = taken - order.firsts_in(taken);
      moved = moved || !(call == r.before[c]);
    }
    const auto place = [&](std::uint32_t c) {
      return static_cast<std::size_t>(std::find(r.queue.begin(), r.queue.end(), c) -
                                      r.queue.begin());
    };
    // Where something has moved it goes on at the first; else at what stands behind all that was
    // looked at.
    std::uint32_t next = kNone;
    if (!moved) {
      const std::size_t behind = r.cursor + r.tries.size();
      if (behind < r.queue.size()) next = r.queue[behind];
    }
    r.queue.erase(std::remove_if(r.queue.begin(), r.queue.end(),
                                 [&](std::uint32_t c) { return is_over(r, c); }),
                  r.queue.end());
    r.cursor = next == kNone ? 0 : place(next);
    if (!r.queue.empty()) begin_run(who);
  }

  void round(std::uint32_t who) {
    Rank& r = ranks_[who];
    if (r.set.empty()) return end_run(who);
    const SendWindow sending(static_cast<std::uint32_t>(r.set.size()), has(who, r.set[0], kGathers),
                             order(r.set[0]).lag);
    const std::size_t begin = r.watched * job_.at_once(),
                      end = std::min(begin + job_.at_once(), r.set.size());
    for (std::size_t i = begin; i < end; ++i) {
      const Seen seen = look(who, r.set[i]);
      r.moved = r.moved || !(seen == r.seen[i]);
      r.seen[i] = seen;
    }
    bool gave = false;
    for (const SlotStep hop : {kSends, kGathers, kCollects}) {
      for (std::size_t i = begin; i < end; ++i) {
        if (!moves(who, r.set[i], hop, sending)) continue;
        gave = true;
        break;
      }
    }
    r.gave = r.gave || gave;
    if (std::all_of(r.set.begin(), r.set.end(), [&](std::uint32_t c) { return is_over(r, c); })) {
      return end_run(who);
    }
    watch_next(r, gave);
    if (++r.rounds % kWindow != 0) return;
    const bool may_leave = !rules_.waits_until_sent ||
                           (sending.may_leave(r.still) && !(rules_.goes_to_all_sets && r.gave));
    r.still = !r.moved && !gave;  // (what was given just now would be in movers' hands)
    r.moved = r.gave = false;
    if (rules_.interrupted && r.rounds >= kTurn && !(r.still && may_leave)) {
      if (!rules_.stays_until_sent || may_leave || went_on(r)) end_run(who);
      return;
    }
    if (!r.still || !may_leave) return;
    ++leaves;
    if (std::any_of(r.set.begin(), r.set.end(), [&](std::uint32_t c) {
          const std::uint32_t sent = r.calls[c].sent;
          return sent != job_.chunks && has_room(who, c, order(c).first(sent));
        })) {
      ++early_leaves;
    }
    end_run(who);
  }
  // To the first set that is not over, or, where nothing was given, to the next.
  void watch_next(Rank& r, bool gave) const {
    const std::size_t sets = (r.set.size() + job_.at_once() - 1) / job_.at_once();
    const auto is_left = [&](std::size_t set) {
      const std::size_t from = set * job_.at_once(),
                        to = std::min(from + job_.at_once(), r.set.size());
      return std::any_of(r.set.begin() + static_cast<std::ptrdiff_t>(from),
                         r.set.begin() + static_cast<std::ptrdiff_t>(to),
                         [&](std::uint32_t c) { return !is_over(r, c); });
    };
    std::size_t next = gave ? 0 : r.watched + 1;
    while (next >= sets || !is_left(next)) next = next + 1 < sets ? next + 1 : 0;
    r.watched = next;
  }
  Seen look(std::uint32_t who, std::uint32_t c) const {
    const HopOrder order = this->order(c);
    const auto count = [&](SlotStep hop, auto is_there) {
      std::uint32_t chunks = 0;
      if (!has(who, c, hop)) return chunks;
      while (chunks != job_.chunks && is_there(chunks)) ++chunks;
      return chunks;
    };
    return {count(kSends, [&](std::uint32_t k) { return has_room(who, c, order.first(k)); }),
            count(kGathers, [&](std::uint32_t k) { return has_come(who, c, order.first(k)); }),
            count(kCollects, [&](std::uint32_t k) { return has_room(who, c, order.second(k)); }),
            count(kCollects, [&](std::uint32_t k) { return has_come(who, c, order.second(k)); })};
  }
  bool moves(std::uint32_t who, std::uint32_t c, SlotStep hop, const SendWindow& sending) {
    Rank& r = ranks_[who];
    Call& call = r.calls[c];
    const HopOrder order = this->order(c);
    if (hop == kSends) {
      if (call.sent == job_.chunks || !has_room(who, c, order.first(call.sent))) return false;
      const bool come =
          call.gathered != job_.chunks && has_come(who, c, order.first(call.gathered));
      const bool unlocks =
          rules_.unlocks && SendWindow::unlocks(order, call.sent, call.gathered, come);
      if (!sending.may_send(r.ahead, r.still, unlocks)) return false;
      ++call.sent;
      ++r.ahead;
    } else if (hop == kGathers) {
      const std::uint32_t k = call.gathered;
      if (k == job_.chunks || !has_come(who, c, order.first(k))) return false;
      if (order.two_hops &&
          (!has_room(who, c, order.second(k)) || call.sent < order.sent_before_gather(k) ||
           call.collected < order.collected_before_gather(k))) {
        return false;
      }
      ++call.gathered;
      --r.ahead;
    } else {
      if (call.collected == job_.chunks || !has_come(who, c, order.second(call.collected))) {
        return false;
      }
      ++call.collected;
    }
    return true;
  }

  const Job job_;
  const Rules rules_;
  std::mt19937_64 random_;
  std::vector<Rank> ranks_;
};

constexpr Job kJobs[] = {
    {2, 32, 2, 1, 4, 8},        {2, 32, 7, 1, 4, 5},       {2, 32, 16, 1, 4, 2},
    {3, 32, 4, 1, 4, 8},        {3, 16, 9, 2, 8, 5},       {4, 24, 3, 1, 4, 8},
    {8, 12, 4, 1, 4, 8},        {2, 9, 1, 1, 4, 8},        {2, 32, 7, 1, 4, 8, "g"},
    {3, 16, 9, 1, 4, 5, "g"},   {4, 24, 6, 1, 4, 8, "g"},  {2, 32, 7, 1, 4, 5, "rgb"},
    {3, 32, 9, 1, 4, 8, "rgb"}, {4, 30, 5, 1, 4, 8, "rgb"}};
constexpr int kPlays = 40;
// The sanitizers judge the steps of a play, and not its end: a few of each kind are enough.
constexpr int kFewer = unjam_test::kSanitized ? 5 : kPlays;

// The seed of a play in which somebody is stuck; 0: nobody is in any.
std::uint64_t stuck(const Job& job, Rules rules, int plays) {
  for (int i = 0; i < plays; ++i) {
    const std::uint64_t seed = mix64(unjam_test::base_seed() + static_cast<std::uint64_t>(i)) | 1;
    if (!Play(job, rules, seed).ends()) return seed;
  }
  return 0;
}
bool anybody_stuck(Rules rules) {
  return std::any_of(std::begin(kJobs), std::end(kJobs),
                     [&](const Job& job) { return stuck(job, rules, kPlays) != 0; });
}

void expect_that_nobody_is_stuck(Rules rules) {
  for (const Job& job : kJobs) {
    EXPECT_EQ(stuck(job, rules, kFewer), 0u)
        << job.kinds << ", " << job.ranks << " ranks, " << job.calls << " calls of " << job.chunks
        << " chunks: the play's seed";
  }
}

TEST(SendWindow, NobodyIsStuck) { expect_that_nobody_is_stuck({}); }
TEST(SendWindow, NobodyIsStuckThoughTheyAreInterrupted) {
  expect_that_nobody_is_stuck({.interrupted = true});
}
// As it was: two GPUs hung.
TEST(SendWindow, WithoutItsRulesRanksAreStuck) {
  EXPECT_TRUE(anybody_stuck({.unlocks = false, .waits_until_sent = false}));
}
// As it was: four GPUs hung, at all-gathers. (In all plays of those of three and four ranks.)
TEST(SendWindow, WhoIsInterruptedBeforeAllIsSentIsStuck) {
  const Rules rules{.interrupted = true, .stays_until_sent = false};
  EXPECT_TRUE(anybody_stuck(rules));
  EXPECT_NE(stuck({4, 24, 6, 1, 4, 8, "g"}, rules, kPlays), 0u);
}
// What share of those who leave do so though something has room to be sent, in percent. (Where it
// has come just now, they have not seen it.)
double early_leaves(const Job& job, Rules rules) {
  double leaves = 0, early = 0;
  for (int i = 0; i < 2 * kFewer && i < kPlays; ++i) {
    Play play(job, rules, mix64(unjam_test::base_seed() + static_cast<std::uint64_t>(i)) | 1);
    play.ends();
    leaves += play.leaves;
    early += play.early_leaves;
  }
  EXPECT_GT(leaves, 100);
  return 100 * early / leaves;
}
// (2 and 10 percent; without it 40 and 79, and of eight ranks some are stuck.)
TEST(SendWindow, NobodyLeavesBeforeItHasBeenToAllSets) {
  for (const Job& job : {Job{4, 24, 8, 1, 4, 8}, Job{8, 16, 12, 1, 5, 8}}) {
    EXPECT_LT(early_leaves(job, {}), 20) << job.ranks << " ranks";
    EXPECT_GT(early_leaves(job, {.goes_to_all_sets = false}), 25) << job.ranks << " ranks";
  }
}

TEST(SendWindow, IsLimitedWhereOthersCanGoOn) {
  const SendWindow several(2, true, 1);
  EXPECT_TRUE(several.may_send(SendWindow::kMost, false, false));
  EXPECT_FALSE(several.may_send(SendWindow::kMost + 1, false, false));
  EXPECT_TRUE(several.may_send(SendWindow::kMost + 1, true, false));
  EXPECT_TRUE(several.may_send(SendWindow::kMost + 1, false, true));
  EXPECT_TRUE(several.may_send(0u - 3u, false, false)) << "more was received than sent";
  EXPECT_FALSE(several.may_leave(false));
  EXPECT_TRUE(several.may_leave(true));
  const SendWindow root(2, true, 0, 2);  // of a reduction
  EXPECT_TRUE(root.may_send(2 * SendWindow::kMost - 1, false, false));
  EXPECT_FALSE(root.may_send(2 * SendWindow::kMost, false, false));
  for (const SendWindow alone : {SendWindow(1, true, 1), SendWindow(3, false, 1)}) {
    EXPECT_TRUE(alone.may_send(1000, false, false));
    EXPECT_TRUE(alone.may_leave(false));
  }
}

TEST(SendWindow, UnlocksWhatHasCome) {
  const HopOrder order{8, 1, true};
  EXPECT_TRUE(SendWindow::unlocks(order, 3, 2, true)) << "chunk 2 is gathered behind four";
  EXPECT_FALSE(SendWindow::unlocks(order, 4, 2, true));
  EXPECT_FALSE(SendWindow::unlocks(order, 3, 2, false));
  EXPECT_FALSE(SendWindow::unlocks({8, 1, false}, 3, 2, true)) << "one hop waits for nothing";
}

}  // namespace
}  // namespace unjam
