#include "sim/synchronization.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "sim/cycle.h"

namespace unjam::sim {

SynchronizationEvents::SynchronizationEvents(const Job& job)
    : job_(job), gpus_(job.gpus()), targets_(job.gpus()) {}

void SynchronizationEvents::run(const Draws& draws, const SparseOrders& orders,
                                const Wanted& wanted, Outcome* outcome) {
  draws_ = &draws;
  orders_ = &orders;
  wanted_ = wanted;
  const auto& disordered = orders.disordered();
  std::size_t next_disordered = 0;
  const std::vector<Sync>& syncs = draws.syncs;
  for (std::size_t begin = 0, end = 0; begin < syncs.size(); begin = end) {
    const std::uint32_t component = job_.component(syncs[begin].gpu);
    while (end < syncs.size() && job_.component(syncs[end].gpu) == component) ++end;
    if (!wanted.released || (outcome->released.deadlock && !wanted.waits)) {
      // Without disorder there is no cycle: everybody has invoked a beginning of one global order.
      while (next_disordered < disordered.size() &&
             job_.component(disordered[next_disordered]) < component) {
        ++next_disordered;
      }
      if (next_disordered == disordered.size()) return;
      if (job_.component(disordered[next_disordered]) != component) continue;
    }
    Outcome own;
    if (!wanted.waits) own = *outcome;
    run_component(begin, end, &own);
    const auto merge = [](const Verdict& from, Verdict* into) {
      if (!from.deadlock) return;
      const bool first = !into->deadlock || Turn{from.step, from.gpu} < Turn{into->step, into->gpu};
      if (first) *into = from;
    };
    merge(own.released, &outcome->released);
    merge(own.exact, &outcome->exact);
    if (!wanted.waits && (outcome->exact.deadlock || !wanted.exact) &&
        (outcome->released.deadlock || !wanted.released)) {
      return;
    }
  }
}

void SynchronizationEvents::run_component(std::size_t begin, std::size_t end, Outcome* outcome) {
  const std::vector<Sync>& syncs = draws_->syncs;
  heap_.clear();
  suspended_.clear();
  over_ = false;
  for (std::size_t i = begin, j = i; i < end; i = j) {
    const std::uint32_t gpu = syncs[i].gpu;
    while (j < end && syncs[j].gpu == gpu) ++j;
    gpus_[gpu].sync = i;
    gpus_[gpu].sync_end = j;
    heap_.push_back({{syncs[i].at, gpu}, false, gpu});
  }
  std::ranges::make_heap(heap_, std::greater<>());
  while (!heap_.empty() && !over_) {
    std::ranges::pop_heap(heap_, std::greater<>());
    const Event event = heap_.back();
    heap_.pop_back();
    if (event.check) {
      check(event);
    } else {
      synchronize(event.when, outcome);
    }
  }
  for (std::size_t i = begin; i < end; ++i) gpus_[syncs[i].gpu] = Gpu{};
}

void SynchronizationEvents::push(const Event& event) {
  heap_.push_back(event);
  std::ranges::push_heap(heap_, std::greater<>());
}

void SynchronizationEvents::schedule_sync(std::uint32_t gpu) {
  Gpu& g = gpus_[gpu];
  if (++g.sync == g.sync_end) return;
  const auto step = static_cast<std::uint64_t>(g.offset + draws_->syncs[g.sync].at);
  push({{step, gpu}, false, gpu});
}

std::uint32_t SynchronizationEvents::progress(std::uint32_t gpu, Turn now, bool including) const {
  const Gpu& g = gpus_[gpu];
  if (g.suspended) return g.invoked;
  const bool had_turn = gpu < now.gpu || (including && gpu == now.gpu);
  const std::int64_t made = static_cast<std::int64_t>(now.step) - g.offset + (had_turn ? 1 : 0);
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(made, g.invoked, job_.length(gpu)));
}

std::uint32_t SynchronizationEvents::last_of(std::uint32_t gpu, std::uint32_t slot,
                                             std::uint32_t count) const {
  const Shape& shape = job_.shape(gpu);
  const std::uint32_t base = shape.position(slot, count - 1);
  if (orders_->segments(gpu) == 0) return base;
  const Segment* s = orders_->find(gpu, base);
  if (s == nullptr) return base;
  std::uint32_t last = 0;
  for (std::uint32_t k = count; k > 0; --k) {
    const std::uint32_t position = shape.position(slot, k - 1);
    if (position < s->lo) break;
    last = std::max(last, orders_->actual(*s, position));
  }
  return last;
}

// What GPU `now.gpu`, which synchronises, has invoked and others have not.
void SynchronizationEvents::find_targets(Turn now) {
  const std::uint32_t gpu = now.gpu;
  const std::uint32_t invoked = gpus_[gpu].invoked;
  std::vector<Target>& targets = targets_[gpu];
  targets.clear();
  if (invoked == 0) return;
  // It has invoked a beginning of its base order, and perhaps some of a segment.
  const Shape& shape = job_.shape(gpu);
  const Segment* inside = orders_->segments(gpu) == 0 ? nullptr : orders_->find(gpu, invoked);
  const std::uint32_t whole = inside == nullptr ? invoked : inside->lo;
  const auto slots = job_.slots(gpu);
  for (std::uint32_t slot = 0; slot < slots.size(); ++slot) {
    const std::uint32_t count = shape.count_before(slot, whole);
    for (const Member& m : job_.members(slots[slot])) {
      if (m.gpu == gpu) continue;
      const std::uint32_t done = progress(m.gpu, now, false);
      std::uint32_t needed = 0;  // invocations
      if (count > 0) needed = last_of(m.gpu, m.slot, count) + 1;
      for (std::uint32_t p = whole; p < invoked; ++p) {
        const std::uint32_t base = orders_->base(*inside, p);
        if (shape.slot(base) != slot) continue;
        const std::uint32_t there = job_.shape(m.gpu).position(m.slot, shape.k(base));
        needed = std::max(needed, orders_->actual(m.gpu, there) + 1);
      }
      if (needed > done) targets.push_back({m.gpu, needed - 1});
    }
  }
}

SynchronizationEvents::Turn SynchronizationEvents::earliest_end(std::uint32_t gpu) const {
  Turn last;
  for (const Target& t : targets_[gpu]) {
    const Gpu& g = gpus_[t.gpu];
    Turn turn{0, t.gpu};
    if (g.suspended) {
      // Its first turn after its own check, if that lets it go on.
      const std::uint64_t first = g.check.step + (t.gpu > g.check.gpu ? 0 : 1);
      turn.step = first + g.turns_lost + (t.position - g.invoked);
    } else {
      turn.step = static_cast<std::uint64_t>(g.offset + t.position);
    }
    last = std::max(last, turn);
  }
  return last;
}

void SynchronizationEvents::synchronize(Turn now, Outcome* outcome) {
  Gpu& g = gpus_[now.gpu];
  const Sync& sync = draws_->syncs[g.sync];
  g.invoked = sync.at;
  find_targets(now);
  if (targets_[now.gpu].empty()) {
    g.offset += sync.count;
    schedule_sync(now.gpu);
    return;
  }
  g.suspended = true;
  g.turns_lost = sync.count - 1;
  suspended_.push_back(now.gpu);
  decide(now, outcome);
  if (over_) return;
  g.check = earliest_end(now.gpu);
  push({g.check, true, now.gpu});
}

void SynchronizationEvents::check(const Event& event) {
  Gpu& g = gpus_[event.gpu];
  std::erase_if(targets_[event.gpu],
                [&](const Target& t) { return progress(t.gpu, event.when, true) > t.position; });
  if (!targets_[event.gpu].empty()) {
    g.check = earliest_end(event.gpu);
    push({g.check, true, event.gpu});
    return;
  }
  g.suspended = false;
  suspended_.erase(std::ranges::find(suspended_, event.gpu));
  const std::uint64_t first = event.when.step + (event.gpu > event.when.gpu ? 0 : 1);
  g.offset = static_cast<std::int64_t>(first) - g.invoked + g.turns_lost;
  schedule_sync(event.gpu);
}

// Whether suspended GPU a waits for suspended GPU b.
bool SynchronizationEvents::awaits(std::uint32_t a, std::uint32_t b) const {
  return std::ranges::any_of(
      targets_[a], [&](const Target& t) { return t.gpu == b && t.position >= gpus_[b].invoked; });
}

bool SynchronizationEvents::reaches_itself(std::uint32_t gpu) {
  stack_.assign(1, gpu);
  seen_.clear();
  while (!stack_.empty()) {
    const std::uint32_t at = stack_.back();
    stack_.pop_back();
    for (const Target& t : targets_[at]) {
      if (!gpus_[t.gpu].suspended || t.position < gpus_[t.gpu].invoked) continue;
      if (t.gpu == gpu) return true;
      if (std::ranges::find(seen_, t.gpu) != seen_.end()) continue;
      seen_.push_back(t.gpu);
      stack_.push_back(t.gpu);
    }
  }
  return false;
}

bool SynchronizationEvents::has_invoked(std::uint32_t gpu, std::uint32_t slot,
                                        std::uint32_t k) const {
  return orders_->actual(gpu, job_.shape(gpu).position(slot, k)) < gpus_[gpu].invoked;
}

// The first in base order that a has invoked and b, being a member, has not.
Collective SynchronizationEvents::awaited(std::uint32_t a, std::uint32_t b) const {
  std::optional<Collective> first;
  const auto slots_a = job_.slots(a), slots_b = job_.slots(b);
  for (std::uint32_t i = 0; i < slots_a.size(); ++i) {
    const auto j = std::ranges::lower_bound(slots_b, slots_a[i]);
    if (j == slots_b.end() || *j != slots_a[i]) continue;
    const auto slot_b = static_cast<std::uint32_t>(j - slots_b.begin());
    for (std::uint32_t k = 0; k < job_.count(slots_a[i]); ++k) {
      if (!has_invoked(a, i, k) || has_invoked(b, slot_b, k)) continue;
      const Collective c{slots_a[i], k};
      if (!first || job_.rank(c) < job_.rank(*first)) first = c;
      break;
    }
  }
  return *first;
}

void SynchronizationEvents::decide(Turn now, Outcome* outcome) {
  const std::uint32_t gpu = now.gpu;
  if (suspended_.size() > 1) {
    if (wanted_.released && !outcome->released.deadlock) {
      std::uint32_t in = UINT32_MAX, out = UINT32_MAX;
      for (const std::uint32_t other : suspended_) {
        if (other == gpu) continue;
        if (awaits(other, gpu)) in = std::min(in, other);
        if (awaits(gpu, other)) out = std::min(out, other);
      }
      if (in != UINT32_MAX && out != UINT32_MAX) {
        outcome->released = {true, now.step, gpu, {}};
        if (wanted_.waits) {
          outcome->released.waits = {{in, awaited(in, gpu), gpu}, {gpu, awaited(gpu, out), out}};
        }
      }
    }
    // Released comes first: a cycle is always also what it counts.
    if (wanted_.exact && !outcome->exact.deadlock && reaches_itself(gpu)) {
      outcome->exact = {true, now.step, gpu, {}};
      if (wanted_.waits) {
        std::vector<std::uint32_t> nodes = suspended_;
        std::ranges::sort(nodes);
        outcome->exact.waits = shortest_cycle(
            gpu, nodes, [&](std::uint32_t a, std::uint32_t b) { return awaits(a, b); },
            [&](std::uint32_t a, std::uint32_t b) { return awaited(a, b); });
      }
    }
  }
  over_ = (outcome->exact.deadlock || !wanted_.exact) &&
          (outcome->released.deadlock || !wanted_.released);
  // Who is in a cycle never goes on, and checks of it would never end.
  if (!over_ && reaches_itself(gpu)) over_ = true;
}

}  // namespace unjam::sim
