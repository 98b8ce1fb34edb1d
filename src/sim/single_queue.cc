#include "sim/single_queue.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "sim/cycle.h"

namespace unjam::sim {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;
constexpr std::uint64_t kFree = UINT64_MAX;

std::uint64_t code(Collective c) { return std::uint64_t{c.group} << 32 | c.k; }

}  // namespace

bool ExactSingleQueue::mark(std::uint64_t code) {
  if (entered_.size() * 2 >= table_.size()) {
    table_.assign(std::max<std::size_t>(64, table_.size() * 4), kFree);
    const std::vector<std::uint64_t> old = std::move(entered_);
    entered_.clear();
    for (const std::uint64_t c : old) mark(c);
  }
  std::size_t at = mix64(code) & (table_.size() - 1);
  while (table_[at] != kFree) {
    if (table_[at] == code) return false;
    at = (at + 1) & (table_.size() - 1);
  }
  table_[at] = code;
  entered_.push_back(code);
  return true;
}

// Whether the orders lead from `from` to `to` through collectives before `to` in base order.
bool ExactSingleQueue::returns(const SparseOrders& orders, Collective from, Collective to) {
  // Clears by entry while that is little, which keeps a search as short as what it sees.
  if (entered_.size() * 8 > table_.size()) {
    std::ranges::fill(table_, kFree);
  } else {
    for (const std::uint64_t c : entered_) {
      std::size_t at = mix64(c) & (table_.size() - 1);
      while (table_[at] != kFree) {
        table_[at] = kFree;
        at = (at + 1) & (table_.size() - 1);
      }
    }
  }
  entered_.clear();
  const std::uint64_t limit = job_.rank(to);
  stack_.assign(1, from);
  mark(code(from));
  while (!stack_.empty()) {
    const Collective c = stack_.back();
    stack_.pop_back();
    for (const Member& m : job_.members(c.group)) {
      const std::uint32_t base = job_.shape(m.gpu).position(m.slot, c.k);
      const bool ordered = orders.segments(m.gpu) == 0;
      const std::uint32_t next = (ordered ? base : orders.actual(m.gpu, base)) + 1;
      if (next == job_.length(m.gpu)) continue;
      const Collective follower = job_.at(m.gpu, ordered ? next : orders.base(m.gpu, next));
      if (follower == to) return true;
      if (job_.rank(follower) < limit && mark(code(follower))) stack_.push_back(follower);
    }
  }
  return false;
}

bool ExactSingleQueue::deadlocks(const SparseOrders& orders) {
  // The largest collective of a cycle, in base order, is followed on some GPU by a smaller one; so
  // every cycle is found from one of the places where an order descends.
  for (const std::uint32_t gpu : orders.disordered()) {
    for (const Segment* s = orders.begin(gpu); s != orders.end(gpu); ++s) {
      for (std::uint32_t p = s->lo; p + 1 < s->end; ++p) {
        const std::uint32_t here = orders.base(*s, p), after = orders.base(*s, p + 1);
        if (after < here && returns(orders, job_.at(gpu, after), job_.at(gpu, here))) return true;
      }
    }
  }
  return false;
}

// Lets one component run until nobody moves. Collectives before all disorders in base order are
// taken as done.
void ExactSingleQueue::stuck_offers(const SparseOrders& orders, std::uint32_t component,
                                    std::unordered_map<std::uint32_t, Collective>* offers) const {
  const auto gpus = job_.component_gpus(component);
  std::uint64_t least = UINT64_MAX;
  for (const std::uint32_t gpu : gpus) {
    if (orders.segments(gpu) == 0) continue;
    least = std::min(least, job_.rank(job_.at(gpu, orders.begin(gpu)->lo)));
  }
  std::unordered_map<std::uint32_t, std::uint32_t> done;  // invocations of each GPU
  std::unordered_map<std::uint64_t, std::uint32_t> arrived;
  std::vector<std::uint32_t> movable(gpus.begin(), gpus.end());
  for (const std::uint32_t gpu : gpus) {
    std::uint32_t low = 0, high = job_.length(gpu);
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (job_.rank(job_.at(gpu, middle)) < least) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    done[gpu] = low;
  }
  while (!movable.empty()) {
    const std::uint32_t gpu = movable.back();
    movable.pop_back();
    if (done[gpu] == job_.length(gpu)) {
      offers->erase(gpu);
      continue;
    }
    const Collective c = job_.at(gpu, orders.base(gpu, done[gpu]));
    (*offers)[gpu] = c;
    const auto members = job_.members(c.group);
    if (++arrived[code(c)] < members.size()) continue;
    arrived.erase(code(c));
    for (const Member& m : members) {
      ++done[m.gpu];
      movable.push_back(m.gpu);
    }
  }
}

std::vector<Wait> ExactSingleQueue::cycle(const SparseOrders& orders) {
  std::vector<std::uint32_t> components;
  for (const std::uint32_t gpu : orders.disordered()) {
    if (components.empty() || components.back() != job_.component(gpu)) {
      components.push_back(job_.component(gpu));
    }
  }
  std::unordered_map<std::uint32_t, Collective> offers;
  for (const std::uint32_t component : components) stuck_offers(orders, component, &offers);
  if (offers.empty()) return {};
  std::uint32_t least = kNone;
  for (const auto& [gpu, c] : offers) least = std::min(least, gpu);
  return cycle_of_offers(job_, least, [&](std::uint32_t gpu) -> std::optional<Collective> {
    const auto found = offers.find(gpu);
    if (found == offers.end()) return std::nullopt;
    return found->second;
  });
}

ReleasedSingleQueue::ReleasedSingleQueue(const Job& job)
    : job_(job), class_of_(job.groups()), touch_of_(job.groups(), kNone) {
  std::map<std::vector<std::uint32_t>, std::uint32_t> known;
  for (std::uint32_t g = 0; g < job.groups(); ++g) {
    std::vector<std::uint32_t> signature;
    for (const Member& m : job.members(g)) {
      signature.push_back(job.shape_id(m.gpu));
      signature.push_back(m.slot);
    }
    const auto [place, fresh] =
        known.try_emplace(std::move(signature), static_cast<std::uint32_t>(classes_.size()));
    class_of_[g] = place->second;
    if (fresh) {
      Dull dull;
      cursors_.clear();
      for (const Member& m : job.members(g)) {
        const auto positions = job.shape(m.gpu).positions(m.slot);
        cursors_.push_back(
            {positions.data(), nullptr, static_cast<std::uint32_t>(positions.size()), 0, false});
      }
      dull.verdict = replay(g, 0, kNone, &dull, nullptr);
      classes_.push_back(std::move(dull));
    }
    if (classes_[place->second].verdict.deadlock) deadlocking_.push_back(g);
  }
}

// Plays one group from a step before which no offer is outstanding. With `dull`, ends as soon as
// the disturbance is over and the group is again as it would be without; the verdict speaks of
// places among the members.
Verdict ReleasedSingleQueue::replay(std::uint32_t group, std::uint32_t from,
                                    std::uint32_t disturbed_until, Dull* record, const Dull* dull) {
  const auto members = job_.members(group);
  std::uint32_t outstanding = 0, first = 0, k = 0;
  if (record != nullptr) record->empty_before.assign(from + 1, 1);
  for (;;) {
    std::uint32_t step = kNone;
    for (const Cursor& c : cursors_) {
      if (c.next < c.size) step = std::min(step, c.position[c.next]);
    }
    if (step == kNone) return {};
    if (record != nullptr) record->empty_before.resize(step + 1, outstanding == 0);
    if (dull != nullptr && outstanding == 0 && step >= disturbed_until &&
        step < dull->empty_before.size() && dull->empty_before[step] != 0) {
      return dull->verdict;  // what is recorded before its deadlock ends no later than that
    }
    for (std::uint32_t i = 0; i < cursors_.size(); ++i) {
      Cursor& c = cursors_[i];
      if (c.next == c.size || c.position[c.next] != step) continue;
      const std::uint32_t pick = c.k == nullptr ? c.next : c.k[c.next];
      ++c.next;
      if (c.offered) continue;  // lost
      if (outstanding > 0 && pick != k) {
        return {true, step, i, {{i, {0, pick}, first}, {first, {0, k}, i}}};
      }
      if (outstanding == 0) {
        k = pick;
        first = i;
      }
      c.offered = true;
      if (++outstanding == members.size()) {
        outstanding = 0;
        for (Cursor& other : cursors_) other.offered = false;
      }
    }
    if (record != nullptr) record->empty_before.resize(step + 2, outstanding == 0);
  }
}

Verdict ReleasedSingleQueue::in_terms_of(std::uint32_t group, const Verdict& verdict) const {
  const auto members = job_.members(group);
  Verdict out = verdict;
  out.gpu = members[out.gpu].gpu;
  for (Wait& w : out.waits) {
    w.gpu = members[w.gpu].gpu;
    w.on = members[w.on].gpu;
    w.what.group = group;
  }
  return out;
}

Verdict ReleasedSingleQueue::decide(const SparseOrders& orders, bool waits) {
  for (const Touch& t : touched_) touch_of_[t.group] = kNone;
  touched_.clear();
  for (const std::uint32_t gpu : orders.disordered()) {
    const auto slots = job_.slots(gpu);
    for (const Segment* s = orders.begin(gpu); s != orders.end(gpu); ++s) {
      for (std::uint32_t p = s->lo; p < s->end; ++p) {
        const std::uint32_t group = slots[job_.shape(gpu).slot(p)];
        if (touch_of_[group] == kNone) {
          touch_of_[group] = static_cast<std::uint32_t>(touched_.size());
          touched_.push_back({group, s->lo, s->end});
        }
        Touch& touch = touched_[touch_of_[group]];
        touch.from = std::min(touch.from, s->lo);
        touch.until = std::max(touch.until, s->end);
      }
    }
  }
  Verdict first;
  const auto consider = [&](std::uint32_t group, const Verdict& found) {
    const Verdict verdict = in_terms_of(group, found);
    if (!first.deadlock || earlier(verdict, first)) first = verdict;
  };
  for (const std::uint32_t group : deadlocking_) {
    if (touch_of_[group] == kNone) consider(group, classes_[class_of_[group]].verdict);
    if (first.deadlock && !waits) return first;
  }
  for (const Touch& touch : touched_) {
    const Dull& dull = classes_[class_of_[touch.group]];
    std::uint32_t from =
        std::min(touch.from, static_cast<std::uint32_t>(dull.empty_before.size() - 1));
    while (dull.empty_before[from] == 0) --from;
    if (dull.verdict.deadlock && dull.verdict.step < from) {
      consider(touch.group, dull.verdict);
      continue;
    }
    const auto members = job_.members(touch.group);
    cursors_.clear();
    picks_.clear();
    // Two passes, as picks_ moves while it grows.
    std::vector<std::pair<std::size_t, std::size_t>> own;
    for (const Member& m : members) {
      const auto positions = job_.shape(m.gpu).positions(m.slot);
      auto next =
          static_cast<std::uint32_t>(std::ranges::lower_bound(positions, from) - positions.begin());
      const auto size = static_cast<std::uint32_t>(positions.size());
      own.emplace_back(picks_.size(), 0);
      if (orders.segments(m.gpu) > 0) {
        // `from` may lie inside a segment of a member that the group does not mind; a segment that
        // matters begins at touch.from or later.
        std::vector<std::pair<std::uint32_t, std::uint32_t>> sorted;
        while (next > 0 && orders.find(m.gpu, positions[next - 1]) != nullptr) --next;
        for (std::uint32_t k = next; k < size; ++k) {
          sorted.emplace_back(orders.actual(m.gpu, positions[k]), k);
        }
        std::ranges::sort(sorted);
        std::erase_if(sorted, [&](const auto& pick) { return pick.first < from; });
        for (const auto& [position, k] : sorted) picks_.push_back(position);
        for (const auto& [position, k] : sorted) picks_.push_back(k);
        own.back().second = sorted.size();
        cursors_.push_back({nullptr, nullptr, static_cast<std::uint32_t>(sorted.size()), 0, false});
      } else {
        cursors_.push_back({positions.data(), nullptr, size, next, false});
      }
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (cursors_[i].position != nullptr) continue;
      cursors_[i].position = picks_.data() + own[i].first;
      cursors_[i].k = cursors_[i].position + own[i].second;
    }
    const Verdict verdict = replay(touch.group, from, touch.until, nullptr, &dull);
    if (verdict.deadlock) consider(touch.group, verdict);
    if (first.deadlock && !waits) return first;
  }
  return first;
}

}  // namespace unjam::sim
