#include "plan/lower.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/bits.h"
#include "base/kinds.h"
#include "plan/order_rule.h"

namespace unjam {
namespace {

// For so many bytes of a vector, or of what a rank has from the others, a call is patient once
// more; at most so often.
constexpr std::uint64_t kMorePatienceBytes = 100 << 20, kMostPatience = 24;
// From so many lanes on they share links so finely that less in hand is more (bench: gate rows of
// 64 MiB).
constexpr std::uint32_t kFewLanes = 16;

class Lowering {
 public:
  Lowering(const Plan& plan, int group_size, int group_rank, const LowerLimits& limits)
      : plan_(plan),
        g_(plan.geometry),
        group_size_(static_cast<std::uint32_t>(group_size)),
        rank_(static_cast<std::uint32_t>(group_rank)),
        limits_(limits) {}

  Lowered run() {
    lowered_.why = plan_.protocol == Protocol::kSlot ? slots() : packets();
    return lowered_;
  }

 private:
  const Primitive& primitive(std::size_t i) const { return plan_.primitives[i]; }
  std::size_t num_primitives() const { return plan_.primitives.size(); }
  std::uint64_t element() const { return dtype_bytes(g_.dtype); }

  // ---- places ----

  // The rank itself and these, ascending. False: they are too many, or none.
  bool find_places(std::vector<std::uint16_t> ranks) {
    Schedule& s = lowered_.schedule;
    if (group_size_ < 2 || ranks.empty() || ranks.size() >= kMostPlaces) return false;
    const auto own = static_cast<std::uint16_t>(rank_);
    const auto at = ranks.insert(std::lower_bound(ranks.begin(), ranks.end(), own), own);
    s.places = static_cast<std::uint8_t>(ranks.size());
    s.place = static_cast<std::uint8_t>(at - ranks.begin());
    std::copy(ranks.begin(), ranks.end(), s.ranks);
    return true;
  }
  std::vector<std::uint16_t> all_other_ranks() const {
    std::vector<std::uint16_t> ranks;
    for (std::uint32_t q = 0; q < group_size_; ++q) {
      if (q != rank_) ranks.push_back(static_cast<std::uint16_t>(q));
    }
    return ranks;
  }
  NeedsEngine ranks_reason() const {
    return group_size_ < 2 ? NeedsEngine::kOneRank : NeedsEngine::kManyRanks;
  }
  std::uint8_t places_of(const std::vector<int>& ranks) const {
    const Schedule& s = lowered_.schedule;
    unsigned places = 0;
    for (const int q : ranks) {
      for (std::uint32_t p = 0; p < s.places; ++p) {
        if (s.ranks[p] == q) places |= 1u << p;
      }
    }
    return static_cast<std::uint8_t>(places);
  }
  std::uint8_t received_from(std::size_t i) const {
    return places_of(ranks_received_from(plan_, i));
  }
  std::uint8_t sent_to(std::size_t i) const { return places_of(ranks_sent_to(plan_, i)); }
  std::uint8_t others() const {
    const Schedule& s = lowered_.schedule;
    return static_cast<std::uint8_t>((1u << s.places) - 1 - (1u << s.place));
  }
  std::uint8_t next_place() const {
    const Schedule& s = lowered_.schedule;
    return static_cast<std::uint8_t>(s.place + 1u == s.places ? 0 : s.place + 1u);
  }

  // ---- packets ----

  NeedsEngine packets() {
    // The engine alone knows how to send lines that may not come whole.
    if (plan_.protocol == Protocol::kLine && !limits_.whole_lines) return NeedsEngine::kSplitLines;
    const bool two_hops = makes_two_hops();
    // (Blocks and parts are told by places, so all ranks of the group have one.)
    if (!find_places(all_other_ranks())) return ranks_reason();
    return two_hops ? two_hop_packets() : one_hop_packets();
  }

  std::uint64_t units_of(std::uint64_t bytes) const {
    if (plan_.protocol == Protocol::kLine) return line_places(bytes);
    return (bytes + kStreamCallUnitBytes - 1) / kStreamCallUnitBytes;
  }
  // Of a lane, without the engine: what is reduced is kept until all of it has come.
  std::uint64_t most_reduced_units() const {
    return std::uint64_t{kStreamCallUnits} * (limits_.block_threads - kStreamCallControl);
  }
  // Of a block whose movers have so many units, one each if there are enough threads.
  unsigned threads_for(std::uint64_t units) const {
    return static_cast<unsigned>(std::clamp<std::uint64_t>(
        (units + kStreamCallControl + 63) / 64 * 64, kLeastThreads, limits_.block_threads));
  }

  struct Messages {
    std::uint8_t number = 0, first = 0;
  };
  // Of all others, or one.
  Messages messages(std::uint8_t places, bool set) const {
    if (!set) return {1, static_cast<std::uint8_t>(__builtin_ctz(places))};
    return {static_cast<std::uint8_t>(count_bits(places)), next_place()};
  }

  // A part as it lies in the input, or in the output.
  std::uint32_t in_input(std::uint32_t part) const {
    return static_cast<std::uint32_t>((g_.part(part).offset - g_.input_shift(rank_)) * element());
  }
  std::uint32_t in_output(std::uint32_t part) const {
    return static_cast<std::uint32_t>((g_.part(part).offset - g_.output_shift(rank_)) * element());
  }

  NeedsEngine one_hop_packets() {
    Schedule& s = lowered_.schedule;
    if (g_.count == 0) return NeedsEngine::kNoData;
    if (!g_.blocked() && g_.parts != 1) return NeedsEngine::kOtherProgram;
    const std::uint64_t longest = g_.lane_part(0, g_.first_lane).length;  // of lanes' stretches
    const std::uint64_t block_bytes = g_.part(0).length * element();
    if (longest > g_.chunk || block_bytes * group_size_ > UINT32_MAX) {
      return NeedsEngine::kManyLoops;
    }
    s.block_bytes = static_cast<std::uint32_t>(block_bytes);
    const std::uint32_t pieces = (s.block_bytes + 15) / 16;
    s.lane_pieces = pieces / g_.lanes;
    s.longer_lanes = pieces % g_.lanes;
    s.before = static_cast<std::uint8_t>(num_primitives());
    for (std::size_t i = 0; i < num_primitives(); ++i) {
      if (!take_packets(i)) return NeedsEngine::kOtherProgram;
    }
    const std::uint64_t units = units_of(longest * element());
    if (s.reduces && units > most_reduced_units()) return NeedsEngine::kManyReduced;
    lowered_.threads = threads_for(std::max(s.scatters ? units * s.num_sent : units,
                                            s.collects ? units * s.num_received : units));
    lowered_.is_even = (s.block_bytes | s.sent_from | s.own_from | s.own_to | s.received_to) %
                           kStreamCallUnitBytes ==
                       0;
    return NeedsEngine::kNo;
  }

  // One primitive more of a program that sends first, once, and receives last, once.
  bool take_packets(std::size_t i) {
    Schedule& s = lowered_.schedule;
    const Primitive& p = primitive(i);
    const auto has = [&](unsigned flag) { return (p.flags & flag) != 0; };
    if (s.num_received != 0 || has(kFromOutput | kSecondHop | kPartials)) return false;
    const bool sends = has(kSend), receives = has(kRecv);
    if (sends && (receives || i != 0 || has(kReduce | kContribute | kFinish))) return false;
    if (to_set(p) && sent_to(i) != others()) return false;
    if (from_set(p) && received_from(i) != others()) return false;
    if (sends) {
      const Messages m = messages(sent_to(i), to_set(p));
      s.num_sent = m.number;
      s.first_sent = m.first;
      s.scatters = has(kScatter);
      s.sent_from = in_input(s.scatters ? 0 : p.part);
    }
    if (receives) {
      const bool sums = from_set(p) && !has(kCollect);
      if (!has(kCopy) || has(kReduce) != sums) return false;
      if (sums && !(has(kContribute) && has(kFinish))) return false;
      const Messages m = messages(received_from(i), from_set(p));
      s.num_received = m.number;
      s.first_received = m.first;
      s.collects = has(kCollect);
      s.reduces = has(kReduce);
      s.received_to = s.collects ? 0 : in_output(p.part);
      if (s.reduces) s.own_from = in_input(p.part);
      s.before = static_cast<std::uint8_t>(i);
      return true;
    }
    if (!has(kCopy)) return true;
    // The own data, once; what is scattered is not copied.
    if (s.copies || has(kScatter | kContribute | kFinish)) return false;
    s.copies = true;
    s.own_from = in_input(p.part);
    s.own_to = in_output(p.part);
    return true;
  }

  // Whether each other is scattered its part, the own part is reduced and sent to all, and the
  // others' results are collected.
  bool makes_two_hops() const {
    if (g_.blocked() || g_.parts != group_size_ || num_primitives() != 3) return false;
    const Primitive &first = primitive(0), &second = primitive(1), &third = primitive(2);
    const auto has = [](const Primitive& p, unsigned flags) { return (p.flags & flags) == flags; };
    const auto is_all = [&](Peers peers) {
      return is_set(peers) && plan_.neighbours.size() == group_size_ - 1 &&
             count_bits(plan_.sets[set_of(peers)].neighbours) == group_size_ - 1;
    };
    return has(first, kScatter) && is_all(first.to) && has(second, kReduce | kFinish | kCopy) &&
           is_all(second.from) && is_all(second.to) && second.part == rank_ &&
           has(third, kCollect | kSecondHop) && is_all(third.from);
  }
  NeedsEngine two_hop_packets() {
    Schedule& s = lowered_.schedule;
    // The first lane's stretch of the first part is a longest one, the last lane's of the last part
    // a shortest one: all lanes have something of every part. A thread keeps what it reduces.
    const std::uint64_t longest = g_.lane_part(0, g_.first_lane).length;
    const std::uint64_t shortest =
        g_.lane_part(group_size_ - 1, g_.first_lane + g_.lanes - 1u).length;
    if (longest > g_.chunk || g_.count * element() > UINT32_MAX / 2) {
      return NeedsEngine::kManyLoops;
    }
    if (shortest == 0) return NeedsEngine::kUnevenLanes;
    const std::uint64_t units = units_of(longest * element());
    if (units > most_reduced_units()) return NeedsEngine::kManyReduced;
    s.two_hops = s.reduces = true;
    s.block_bytes = static_cast<std::uint32_t>(g_.count * element());
    const std::uint32_t pieces = (s.block_bytes + 15) / 16;
    s.part_pieces = pieces / group_size_;
    s.longer_parts = pieces % group_size_;
    s.lane_pieces = s.part_pieces / g_.lanes;
    s.longer_lanes = s.part_pieces % g_.lanes;
    s.num_sent = s.num_received = static_cast<std::uint8_t>(group_size_ - 1);
    s.first_sent = s.first_received = next_place();
    // (Parts that are alike are whole pieces, so all their places are aligned if the buffers are.)
    lowered_.is_even = s.block_bytes % (16 * group_size_) == 0;
    lowered_.threads = threads_for(units * (group_size_ - 1));
    return NeedsEngine::kNo;
  }

  // ---- slots ----

  NeedsEngine slots() {
    Schedule& s = lowered_.schedule;
    if (group_size_ > 1 && plan_.neighbours.empty()) return NeedsEngine::kOtherProgram;
    if (!find_places(plan_.neighbours)) return ranks_reason();
    if (g_.by_lane) return NeedsEngine::kUnevenSteps;
    if (!take_steps()) return NeedsEngine::kOtherProgram;
    if (g_.first_lane != 0 || g_.lanes < 2) return NeedsEngine::kOtherLanes;
    if (limits_.block_threads < kLeastSlotThreads) return NeedsEngine::kFewThreads;
    if (g_.chunk * element() > limits_.slot_bytes) return NeedsEngine::kLongChunks;
    // The first lane's stretch of the first part is a longest one, the last lane's of the last part
    // a shortest one: all have as many chunks.
    const std::uint32_t last = g_.empty_part == g_.parts - 1 ? g_.parts - 2 : g_.parts - 1;
    const std::uint64_t chunks = g_.loops_of(g_.lane_part(g_.longest_part(), 0));
    if (chunks == 0) return NeedsEngine::kNoData;
    if (chunks > INT32_MAX / 2 || chunks != g_.loops_of(g_.lane_part(last, g_.lanes - 1u))) {
      return NeedsEngine::kUnevenLanes;
    }
    s.by_slots = true;
    for (std::uint32_t& n : s.chunks) n = static_cast<std::uint32_t>(chunks);
    s.patience_ns = patience_ns();
    tune();
    lowered_.threads = limits_.block_threads;
    lowered_.if_contended = is_if_contended();
    return NeedsEngine::kNo;
  }

  // The three steps. False: the program is none of those.
  bool take_steps() {
    SlotSteps& steps = lowered_.schedule.steps;
    // Of these, input and output are at other places; but for the two of which each rank's block is
    // its part.
    if (g_.blocked() && g_.kind != Kind::kAllGather && g_.kind != Kind::kReduceScatter) {
      return false;
    }
    if (!plan_.wide_peers.empty()) return false;
    std::optional<std::size_t> sends, gathers, collects;
    for (std::size_t i = 0; i < num_primitives(); ++i) {
      const Primitive& p = primitive(i);
      constexpr unsigned kNotKnown = kWithNext | kFromOutput | kSecondHop;
      if ((p.flags & kNotKnown) != 0 || (p.flags & (kRecv | kSend)) == 0) return false;
      auto& role = (p.flags & kRecv) == 0 ? sends : (p.flags & kCollect) != 0 ? collects : gathers;
      if (role) return false;
      role = i;
      // (Connectors would carry less than they are numbered by.)
      const bool own_part = (p.flags & (kScatter | kCollect)) == 0;
      if (own_part && g_.empty_part != kNoPart && p.part == g_.empty_part) return false;
    }
    if (sends && !take_sends(*sends)) return false;
    if (gathers && !take_gathers(*gathers)) return false;
    if (collects) steps.collects_from = with_data(received_from(*collects));
    const auto index = [](std::optional<std::size_t> i) { return static_cast<std::uint8_t>(*i); };
    if (sends) steps.primitives[kSends] = index(sends);
    if (gathers) steps.primitives[kGathers] = index(gathers);
    if (collects) steps.primitives[kCollects] = index(collects);
    take_parts(sends, gathers);
    return are_in_order(sends, gathers, collects) && take_waits();
  }
  // Which steps wait for which (plan/order_rule.h). False: another than the one that gathers has
  // to.
  bool take_waits() {
    SlotSteps& s = lowered_.schedule.steps;
    OrderedStep steps[kSlotSteps];
    steps[kSends] = {0, s.sends_to, false, s.copies || s.stores_sent};
    steps[kGathers] = {s.gathers_from, s.results_to, s.reduces, s.stores_result};
    steps[kCollects] = {s.collects_from, 0, false, true};
    const OrderWaits waits = order_waits(steps, kGathers);
    s.gather_waits_for_sent = (waits.at_outs >> kSends & 1) != 0;
    s.gather_waits_for_collected = (waits.at_ins >> kCollects & 1) != 0;
    return order_waits(steps, kSends).all() == 0 && order_waits(steps, kCollects).all() == 0;
  }
  // Of a scatter or collect, those whose part is not the empty one.
  std::uint8_t with_data(std::uint8_t places) const {
    const Schedule& s = lowered_.schedule;
    unsigned some = places;
    for (std::uint32_t p = 0; p < s.places; ++p) {
      if (g_.empty_part != kNoPart && s.ranks[p] == g_.empty_part) some &= ~(1u << p);
    }
    return static_cast<std::uint8_t>(some);
  }
  bool take_sends(std::size_t i) {
    SlotSteps& steps = lowered_.schedule.steps;
    const Primitive& p = primitive(i);
    const bool copies = (p.flags & kCopy) != 0;
    if ((p.flags & kFinish) != 0) return false;
    steps.scatters = (p.flags & kScatter) != 0;
    steps.sends_to = steps.scatters ? with_data(sent_to(i)) : sent_to(i);
    steps.copies = steps.scatters && copies;
    steps.stores_sent = !steps.scatters && copies;
    steps.contributes = (p.flags & kContribute) != 0;
    steps.sent_into_outputs = (p.flags & kIntoOutput) != 0;
    // (What is stored here as well, blocks move; unless the call is in place, which host/bind.h
    // sees.)
    steps.carried = carrier_of(p) == Carrier::kCopyEngine;
    return true;
  }
  bool take_gathers(std::size_t i) {
    SlotSteps& steps = lowered_.schedule.steps;
    const Primitive& p = primitive(i);
    steps.gathers_from = received_from(i);
    steps.results_to = sent_to(i);
    steps.reduces = (p.flags & kReduce) != 0;
    steps.stores_result = (p.flags & kCopy) != 0;
    steps.finishes = (p.flags & kFinish) != 0;
    steps.results_into_outputs = (p.flags & kIntoOutput) != 0;
    if (!steps.reduces) return steps.stores_result && (p.flags & (kLocal | kFinish)) == 0;
    if ((p.flags & kContribute) == 0) return false;
    steps.sums = !from_set(p) || (p.flags & kPartials) != 0;
    const std::uint32_t come = count_bits(steps.gathers_from);
    const unsigned below = (1u << lowered_.schedule.place) - 1;
    steps.num_sources = static_cast<std::uint8_t>(come + 1);
    steps.own_source =
        static_cast<std::uint8_t>(steps.sums ? come : count_bits(steps.gathers_from & below));
    return true;
  }
  void take_parts(std::optional<std::size_t> sends, std::optional<std::size_t> gathers) {
    Schedule& s = lowered_.schedule;
    for (std::uint32_t p = 0; p < s.places; ++p) s.steps.parts[p] = g_.parts == 1 ? 0 : s.ranks[p];
    if (gathers) {
      s.steps.parts[s.place] = static_cast<std::uint16_t>(primitive(*gathers).part);
    } else if (sends && !s.steps.scatters) {
      s.steps.parts[s.place] = static_cast<std::uint16_t>(primitive(*sends).part);
    }
  }
  // Whether each connector's slices come as executors number them (program/hop_order.h): of two
  // steps those of the first, and `lag` passes later, behind it, those of the second.
  bool are_in_order(std::optional<std::size_t> sends, std::optional<std::size_t> gathers,
                    std::optional<std::size_t> collects) {
    SlotSteps& steps = lowered_.schedule.steps;
    // What two steps do with the own part is of the same part.
    if (sends && gathers && !steps.scatters && primitive(*sends).part != primitive(*gathers).part) {
      return false;
    }
    if (sends && primitive(*sends).lag != 0) return false;
    const bool two_out = (steps.sends_to & steps.results_to) != 0;
    const bool two_in = (steps.gathers_from & steps.collects_from) != 0;
    steps.lag = static_cast<std::uint16_t>(gathers ? primitive(*gathers).lag : 0);
    if (!two_out && !two_in) return true;
    return steps.sends_to == steps.results_to && steps.gathers_from == steps.collects_from &&
           steps.sends_to == steps.gathers_from && *sends < *gathers && *gathers < *collects &&
           primitive(*collects).lag == 2 * steps.lag;
  }

  // Of a large call longer, about half as long as it takes where nothing holds it up. For what it
  // waits for may be that the blocks of a peer's call have no SMs yet, beside somebody's kernel;
  // and an engine, which begins with twice as many blocks as the call has, is not to be had for
  // nothing, either.
  std::uint32_t patience_ns() const {
    const std::uint64_t blocks = g_.blocked() ? group_size_ - 1u : 1u;
    const std::uint64_t bytes = g_.count * element() * blocks;
    const std::uint64_t times = 1 + std::min(bytes / kMorePatienceBytes, kMostPatience);
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(limits_.patience_us * times * 1000, UINT32_MAX));
  }

  // How movers share the work, by what is fastest (bench/gate.cu has rows of each).
  void tune() {
    SlotSteps& s = lowered_.schedule.steps;
    SlotTuning& t = s.tuning;
    const bool sends = s.sends_to != 0, gathers = s.gathers_from != 0;
    const bool collects = s.collects_from != 0, many_lanes = limits_.lanes > kFewLanes;
    // The whole vector goes from rank to rank: each has one step, and lanes that are late stay so.
    const bool pipelined = g_.parts == 1;
    t.paced = t.keeps_places = pipelined;
    // Steps that wait for each other, and data that go one way only, want more slots; what goes
    // both ways at once fills a link with the connector's own.
    t.slots = pipelined ? 3 : s.two_hops() || has_root(g_.kind) ? 2 : 1;
    t.in_step = s.scatters ? many_lanes && gathers && s.results_to == 0 : sends && collects;
    // Two in hand, so that movers never wait for who watches. By many lanes one, where what peers
    // store had better be read while it is in the cache; and one of what is sent by who receives as
    // well, so that what has come goes first, if slices go to several or are reduced there.
    const bool one_sent = (gathers || collects) && (s.scatters || group_size_ > 2);
    t.sent_in_hand = many_lanes && (s.two_hops() || one_sent) ? 1 : 2;
    t.others_in_hand = many_lanes && s.two_hops() && !s.carried ? 1 : 2;
    t.hops_back = s.scatters && !gathers && collects ? 2 : 1;
  }

  // What takes longer than some turns goes by slices where nothing else of some length is there: it
  // then gives way sooner to what is short, and when it comes back it still borrows slots.
  bool is_if_contended() const {
    constexpr std::uint32_t kMostChunks = 32;
    constexpr std::uint64_t kMostReduced = std::uint64_t{192} << 20;
    const Schedule& s = lowered_.schedule;
    // (Where the whole vector is each chunk's way, that goes to one peer, not to all.)
    const std::uint32_t most = g_.parts == 1 ? kMostChunks * (group_size_ - 1) : kMostChunks;
    return s.chunks_of_all() > most || (s.steps.two_hops() && g_.count * element() > kMostReduced);
  }

  const Plan& plan_;
  const Geometry& g_;
  const std::uint32_t group_size_, rank_;
  const LowerLimits limits_;
  Lowered lowered_;
};

}  // namespace

Lowered lower(const Plan& plan, int group_size, int group_rank, const LowerLimits& limits) {
  Lowering lowering(plan, group_size, group_rank, limits);
  Lowered lowered = lowering.run();
  // Of what is not lowered nothing else is said.
  if (lowered.why != NeedsEngine::kNo) return {lowered.why, {}, 0, false, false};
  return lowered;
}

}  // namespace unjam
