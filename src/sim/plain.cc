#include "sim/plain.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "sim/cycle.h"

namespace unjam::sim {

namespace {

// One GPU's list of what it has still to invoke.
class Remaining {
 public:
  Remaining(const Job& job, std::uint32_t gpu) {
    for (std::uint32_t i = 0; i < job.length(gpu); ++i) list_.push_back(job.at(gpu, i));
  }
  bool empty() const { return next_ == list_.size(); }
  // Passes over `skips` entries, which stay in front, and takes the one after them.
  Collective take(std::uint32_t skips) {
    const auto head = list_.begin() + static_cast<std::ptrdiff_t>(next_);
    std::rotate(head, head + skips, head + skips + 1);
    return list_[next_++];
  }

 private:
  std::vector<Collective> list_;
  std::size_t next_ = 0;
};

class Plain {
 public:
  Plain(const Job& job, const Draws& draws) : job_(job), skips_(job.gpus()), syncs_(job.gpus()) {
    for (std::uint32_t gpu = 0; gpu < job.gpus(); ++gpu) {
      remaining_.emplace_back(job, gpu);
      skips_[gpu].resize(job.length(gpu));
      syncs_[gpu].resize(job.length(gpu));
    }
    for (const Disorder& d : draws.disorders) skips_[d.gpu][d.at] = d.skips;
    for (const Sync& s : draws.syncs) syncs_[s.gpu][s.at] = s.count;
    taken_.resize(job.gpus());
  }

 protected:
  Collective take(std::uint32_t gpu) { return remaining_[gpu].take(skips_[gpu][taken_[gpu]++]); }
  // Whether the next turn goes to a synchronisation; takes it.
  bool take_sync(std::uint32_t gpu) {
    std::uint32_t& left = syncs_[gpu][taken_[gpu]];
    if (left == 0) return false;
    --left;
    return true;
  }
  bool finished(std::uint32_t gpu) const { return remaining_[gpu].empty(); }

  const Job& job_;

 private:
  std::vector<Remaining> remaining_;
  std::vector<std::vector<std::uint32_t>> skips_, syncs_;
  std::vector<std::uint32_t> taken_;
};

// A number for each collective, all members together.
class Tally {
 public:
  explicit Tally(const Job& job) {
    for (std::uint32_t g = 0; g < job.groups(); ++g) counts_.emplace_back(job.count(g));
  }
  std::uint32_t& operator[](Collective c) { return counts_[c.group][c.k]; }
  std::uint32_t operator[](Collective c) const { return counts_[c.group][c.k]; }

 private:
  std::vector<std::vector<std::uint32_t>> counts_;
};

// Each GPU offers one collective and stands until all members offer it.
class ExactSingle : Plain {
 public:
  using Plain::Plain;
  Verdict run() {
    Tally offers(job_);
    std::vector<std::optional<Collective>> offered(job_.gpus());
    for (bool moved = true; moved;) {
      moved = false;
      for (std::uint32_t gpu = 0; gpu < job_.gpus(); ++gpu) {
        if (offered[gpu]) {
          if (offers[*offered[gpu]] < job_.members(offered[gpu]->group).size()) continue;
          offered[gpu].reset();
        }
        if (finished(gpu)) continue;
        offered[gpu] = take(gpu);
        ++offers[*offered[gpu]];
        moved = true;
      }
    }
    // A GPU whose last offer has been accepted is done.
    for (auto& offer : offered) {
      if (offer && offers[*offer] == job_.members(offer->group).size()) offer.reset();
    }
    Verdict verdict;
    verdict.waits = cycle_of_offers(job_, 0, [&](std::uint32_t gpu) { return offered[gpu]; });
    verdict.deadlock = !verdict.waits.empty();
    return verdict;
  }
};

// For each group, a list of what members offered since the last completion.
class ReleasedSingle : Plain {
 public:
  using Plain::Plain;
  Verdict run(std::uint64_t* lost) {
    struct Offer {
      std::uint32_t gpu;
      std::uint32_t k;
    };
    std::vector<std::vector<Offer>> lists(job_.groups());
    bool moved = true;
    for (std::uint64_t step = 0; moved; ++step) {
      moved = false;
      for (std::uint32_t gpu = 0; gpu < job_.gpus(); ++gpu) {
        if (finished(gpu)) continue;
        moved = true;
        const Collective c = take(gpu);
        std::vector<Offer>& list = lists[c.group];
        const auto own = std::ranges::find(list, gpu, &Offer::gpu);
        if (own != list.end()) {
          ++*lost;
          continue;
        }
        if (!list.empty() && list[0].k != c.k) {
          const Offer& other = list[0];
          return {true, step, gpu, {{gpu, c, other.gpu}, {other.gpu, {c.group, other.k}, gpu}}};
        }
        list.push_back({gpu, c.k});
        if (list.size() == job_.members(c.group).size()) list.clear();
      }
    }
    return {};
  }
};

// Every invoked collective runs at once, but a synchronisation suspends its GPU until what it had
// invoked is successful.
class Synchronization : Plain {
 public:
  Synchronization(const Job& job, const Draws& draws)
      : Plain(job, draws), invoked_(job.gpus()), held_(job.gpus()), arrivals_(job) {
    for (std::uint32_t gpu = 0; gpu < job.gpus(); ++gpu) {
      for (const std::uint32_t g : job.slots(gpu)) invoked_[gpu].emplace_back(job.count(g));
    }
    history_.resize(job.gpus());
  }

  void run(Outcome* outcome) {
    bool moved = true;
    for (std::uint64_t step = 0; moved; ++step) {
      moved = false;
      for (std::uint32_t gpu = 0; gpu < job_.gpus(); ++gpu) {
        if (finished(gpu)) continue;
        moved = true;
        if (suspended(gpu)) continue;
        if (!take_sync(gpu)) {
          invoke(gpu, take(gpu));
          continue;
        }
        held_[gpu].clear();
        for (const Collective c : history_[gpu]) {
          if (!successful(c)) held_[gpu].push_back(c);
        }
        if (held_[gpu].empty()) continue;
        if (!outcome->released.deadlock) {
          outcome->released = found(step, gpu, released_witness(gpu));
        }
        outcome->exact = found(step, gpu, exact_cycle(gpu));
        if (outcome->exact.deadlock) return;
      }
    }
  }

 private:
  bool successful(Collective c) const { return arrivals_[c] == job_.members(c.group).size(); }
  bool suspended(std::uint32_t gpu) const {
    return std::ranges::any_of(held_[gpu], [&](Collective c) { return !successful(c); });
  }
  void invoke(std::uint32_t gpu, Collective c) {
    history_[gpu].push_back(c);
    invoked_[gpu][slot(gpu, c.group)][c.k] = 1;
    ++arrivals_[c];
  }
  std::size_t slot(std::uint32_t gpu, std::uint32_t group) const {
    const auto own = job_.slots(gpu);
    return static_cast<std::size_t>(std::ranges::lower_bound(own, group) - own.begin());
  }
  static Verdict found(std::uint64_t step, std::uint32_t gpu, std::vector<Wait> waits) {
    if (waits.empty()) return {};
    return {true, step, gpu, std::move(waits)};
  }

  // What suspended GPU a holds that b is in and has not invoked; the first in base order.
  std::optional<Collective> awaits(std::uint32_t a, std::uint32_t b) const {
    std::optional<Collective> first;
    for (const Collective c : held_[a]) {
      const auto own = job_.slots(b);
      if (!std::ranges::binary_search(own, c.group) || invoked_[b][slot(b, c.group)][c.k]) continue;
      if (!first || job_.rank(c) < job_.rank(*first)) first = c;
    }
    return first;
  }
  std::vector<std::uint32_t> suspended_others(std::uint32_t gpu) const {
    std::vector<std::uint32_t> others;
    for (std::uint32_t other = 0; other < job_.gpus(); ++other) {
      if (other != gpu && suspended(other)) others.push_back(other);
    }
    return others;
  }
  std::vector<Wait> exact_cycle(std::uint32_t gpu) const {
    std::vector<std::uint32_t> others = suspended_others(gpu);
    others.insert(std::ranges::lower_bound(others, gpu), gpu);
    return shortest_cycle(
        gpu, others, [&](std::uint32_t a, std::uint32_t b) { return a != b && awaits(a, b); },
        [&](std::uint32_t a, std::uint32_t b) { return *awaits(a, b); });
  }
  // The released code's condition: somebody suspended has not invoked what `gpu` waits for, and
  // `gpu` has not invoked what somebody suspended waits for.
  std::vector<Wait> released_witness(std::uint32_t gpu) const {
    std::optional<Wait> in, out;
    for (const std::uint32_t other : suspended_others(gpu)) {
      if (const auto c = awaits(other, gpu); c && !in) in = Wait{other, *c, gpu};
      if (const auto c = awaits(gpu, other); c && !out) out = Wait{gpu, *c, other};
    }
    if (!in || !out) return {};
    return {*in, *out};
  }

  std::vector<std::vector<std::vector<char>>> invoked_;  // [GPU][slot][k]
  std::vector<std::vector<Collective>> history_, held_;
  Tally arrivals_;
};

}  // namespace

PlainOutcome run_plain(const Job& job, const Draws& draws) {
  PlainOutcome outcome;
  if (job.spec().model == Model::kSynchronization) {
    Synchronization(job, draws).run(&outcome);
  } else {
    outcome.exact = ExactSingle(job, draws).run();
    outcome.released = ReleasedSingle(job, draws).run(&outcome.lost);
  }
  return outcome;
}

}  // namespace unjam::sim
