#include "sim/job.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "sim/draws.h"

namespace unjam::sim {

namespace {

constexpr std::uint64_t kMostGpus = 1u << 30;  // so that (step, GPU) fits a 64-bit time
constexpr std::uint64_t kMostInvocations = 1u << 30;
constexpr double kLeastProbability = 1e-12;  // far above the grain of a 53-bit random number

std::string group_field(std::size_t g) { return "groups[" + std::to_string(g) + "]"; }

void check_probability(const char* name, double p) {
  if (!(p >= 0 && p <= 1)) {
    throw BadJob(std::string(name) + ": " + std::to_string(p) + " is no probability (0 to 1)");
  }
  if (p > 0 && p < kLeastProbability) {
    throw BadJob(std::string(name) + ": must be 0 or at least 1e-12");
  }
}

}  // namespace

Shape::Shape(std::uint32_t slots, const std::vector<std::uint32_t>& sequence)
    : slots_(slots), slot_(sequence), k_(sequence.size()), first_(slots + 1) {
  for (const std::uint32_t s : sequence) ++first_[s + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  positions_.resize(sequence.size());
  std::vector<std::uint32_t> seen(slots);
  const bool counted = slots <= kMostCounted;
  if (counted) before_.reserve((sequence.size() + 1) * slots);
  for (std::uint32_t i = 0; i < sequence.size(); ++i) {
    if (counted) before_.insert(before_.end(), seen.begin(), seen.end());
    const std::uint32_t s = sequence[i];
    k_[i] = seen[s];
    positions_[first_[s] + seen[s]] = i;
    ++seen[s];
  }
  if (counted) before_.insert(before_.end(), seen.begin(), seen.end());
}

std::uint32_t Shape::count_before(std::uint32_t slot, std::uint32_t position) const {
  if (!before_.empty()) return before_[std::size_t{position} * slots_ + slot];
  const auto all = positions(slot);
  return static_cast<std::uint32_t>(std::ranges::lower_bound(all, position) - all.begin());
}

std::uint64_t Shape::bytes(std::uint64_t slots, std::uint64_t length) {
  return sizeof(Shape) + 4 * (3 * length + slots) +
         (slots <= kMostCounted ? 4 * slots * length : 0);
}

Job::Job(JobSpec spec) : spec_(std::move(spec)) {
  check();
  // The fixed part: what this class, the draws and one thread's engines keep for each GPU and
  // membership.
  charge(std::uint64_t{spec_.gpus} * 256 + spec_.members.size() * 24 + spec_.counts.size() * 64,
         "GPUs and groups");
  index_members();
  find_components();
  make_shapes();
  charge_rounds();
}

void Job::charge(std::uint64_t bytes, const char* what) {
  memory_ += bytes;
  if (spec_.memory_limit == 0 || memory_ <= spec_.memory_limit) return;
  const auto mib = [](std::uint64_t b) {
    return std::to_string((b + (1 << 20) - 1) >> 20) + " MiB";
  };
  throw TooLarge("this job takes at least " + mib(memory_) + " (" + what + "), more than the " +
                 mib(spec_.memory_limit) + " allowed");
}

void Job::check() const {
  if (spec_.gpus == 0) throw BadJob("gpus: there are none");
  if (spec_.gpus > kMostGpus) throw BadJob("gpus: more than 2^30");
  const std::size_t groups = spec_.counts.size();
  if (groups == 0) throw BadJob("groups: there are none");
  if (groups > kMostGpus) throw BadJob("groups: more than 2^30");
  if (spec_.group_begin.size() != groups + 1 || spec_.group_begin[0] != 0 ||
      spec_.group_begin[groups] != spec_.members.size()) {
    throw BadJob("groups: the offsets do not fit the members");
  }
  std::vector<std::uint32_t> last_seen(spec_.gpus, UINT32_MAX);
  for (std::size_t g = 0; g < groups; ++g) {
    if (spec_.group_begin[g + 1] < spec_.group_begin[g]) {
      throw BadJob("groups: the offsets do not ascend");
    }
    if (spec_.group_begin[g + 1] == spec_.group_begin[g]) {
      throw BadJob(group_field(g) + ".gpus: the group is empty");
    }
    if (spec_.counts[g] == 0) throw BadJob(group_field(g) + ".collectives: there are none");
    for (std::uint64_t i = spec_.group_begin[g]; i < spec_.group_begin[g + 1]; ++i) {
      const std::uint32_t gpu = spec_.members[i];
      if (gpu >= spec_.gpus) {
        throw BadJob(group_field(g) + ".gpus: GPU " + std::to_string(gpu) +
                     " is unknown (there are " + std::to_string(spec_.gpus) + ")");
      }
      if (last_seen[gpu] == g) {
        throw BadJob(group_field(g) + ".gpus: GPU " + std::to_string(gpu) + " is there twice");
      }
      last_seen[gpu] = static_cast<std::uint32_t>(g);
    }
  }
  check_probability("disorder", spec_.disorder);
  check_probability("sync", spec_.sync);
  if (spec_.model == Model::kSingleQueue && spec_.sync != 0) {
    throw BadJob("sync: means nothing in the single-queue model");
  }
  if (spec_.sync > 0.999) {
    throw BadJob("sync: must be at most 0.999, or GPUs would do nothing but synchronise");
  }
  if (spec_.order == Order::kExplicit) {
    std::vector<std::uint32_t> seen(groups);
    for (const std::uint32_t g : spec_.sequence) {
      if (g >= groups) throw BadJob("sequence: names an unknown group " + std::to_string(g));
      ++seen[g];
    }
    for (std::size_t g = 0; g < groups; ++g) {
      if (seen[g] != spec_.counts[g]) {
        throw BadJob("sequence: names group " + std::to_string(g) + " " + std::to_string(seen[g]) +
                     " times, but it has " + std::to_string(spec_.counts[g]) + " collectives");
      }
    }
  }
}

// What one round holds on one thread: its draws, the orders that they make, and in the single-queue
// model the undisturbed runs of groups (ReleasedSingleQueue).
void Job::charge_rounds() {
  const double p = spec_.disorder, n = static_cast<double>(invocations_);
  const double permuted = 8 * std::min(1.0, 2 * p);  // positions in segments, both ways
  const double drawn = sizeof(Disorder) * p + sizeof(Sync) * spec_.sync;
  charge(static_cast<std::uint64_t>(n * (permuted + drawn)), "disorders of a round");
  if (spec_.model != Model::kSingleQueue) return;
  std::set<std::pair<std::uint32_t, std::uint32_t>> known;
  for (std::uint32_t g = 0; g < groups(); ++g) {
    const Member& m = members(g).front();
    if (!known.emplace(shape_id(m.gpu), m.slot).second) continue;
    charge(std::uint64_t{shape(m.gpu).positions(m.slot).back()} + 1, "steps of the groups");
  }
}

void Job::index_members() {
  for (std::uint32_t g = 0; g < groups(); ++g) {
    std::sort(spec_.members.begin() + static_cast<std::ptrdiff_t>(spec_.group_begin[g]),
              spec_.members.begin() + static_cast<std::ptrdiff_t>(spec_.group_begin[g + 1]));
  }
  slot_begin_.assign(spec_.gpus + 1, 0);
  for (const std::uint32_t gpu : spec_.members) ++slot_begin_[gpu + 1];
  std::partial_sum(slot_begin_.begin(), slot_begin_.end(), slot_begin_.begin());
  slots_.resize(spec_.members.size());
  members_.resize(spec_.members.size());
  std::vector<std::uint32_t> filled(spec_.gpus);
  for (std::uint32_t g = 0; g < groups(); ++g) {
    for (std::uint64_t i = spec_.group_begin[g]; i < spec_.group_begin[g + 1]; ++i) {
      const std::uint32_t gpu = spec_.members[i];
      slots_[slot_begin_[gpu] + filled[gpu]] = g;
      members_[i] = {gpu, filled[gpu]++};
    }
  }
}

void Job::find_components() {
  // Union-find over GPUs; the smallest GPU is the root.
  std::vector<std::uint32_t> root(spec_.gpus);
  std::iota(root.begin(), root.end(), 0u);
  const auto find = [&](std::uint32_t x) {
    while (root[x] != x) x = root[x] = root[root[x]];
    return x;
  };
  for (std::uint32_t g = 0; g < groups(); ++g) {
    std::uint32_t first = find(members(g)[0].gpu);
    for (const Member& m : members(g)) {
      const std::uint32_t other = find(m.gpu);
      root[std::max(first, other)] = std::min(first, other);
      first = std::min(first, other);
    }
  }
  component_.resize(spec_.gpus);
  std::uint32_t components = 0;
  for (std::uint32_t gpu = 0; gpu < spec_.gpus; ++gpu) {
    const std::uint32_t r = find(gpu);
    component_[gpu] = r == gpu ? components++ : component_[r];
  }
  component_begin_.assign(components + 1, 0);
  for (const std::uint32_t c : component_) ++component_begin_[c + 1];
  std::partial_sum(component_begin_.begin(), component_begin_.end(), component_begin_.begin());
  drawing_order_.resize(spec_.gpus);
  std::vector<std::uint32_t> next(component_begin_.begin(), component_begin_.end() - 1);
  for (std::uint32_t gpu = 0; gpu < spec_.gpus; ++gpu) {
    drawing_order_[next[component_[gpu]]++] = gpu;
  }
}

std::vector<std::uint32_t> Job::order_of(std::uint32_t gpu) const {
  const auto own = slots(gpu);
  std::vector<std::uint32_t> sequence;
  if (spec_.order == Order::kConcatenated) {
    for (std::uint32_t s = 0; s < own.size(); ++s)
      sequence.insert(sequence.end(), count(own[s]), s);
  } else {
    std::uint32_t most = 0;
    for (const std::uint32_t g : own) most = std::max(most, count(g));
    for (std::uint32_t k = 0; k < most; ++k) {
      for (std::uint32_t s = 0; s < own.size(); ++s) {
        if (k < count(own[s])) sequence.push_back(s);
      }
    }
  }
  return sequence;
}

void Job::make_shapes() {
  std::vector<std::vector<std::uint32_t>> explicit_orders;
  if (spec_.order == Order::kExplicit) {
    explicit_begin_.assign(groups() + 1, 0);
    for (std::uint32_t g = 0; g < groups(); ++g)
      explicit_begin_[g + 1] = explicit_begin_[g] + count(g);
    std::uint64_t total = 0;
    for (const std::uint32_t g : spec_.sequence) total += members(g).size();
    charge(total * 16 + spec_.sequence.size() * 8, "invocations in an explicit order");
    explicit_rank_.resize(spec_.sequence.size());
    explicit_orders.resize(spec_.gpus);
    std::vector<std::uint64_t> next(explicit_begin_.begin(), explicit_begin_.end() - 1);
    for (std::uint64_t i = 0; i < spec_.sequence.size(); ++i) {
      const std::uint32_t g = spec_.sequence[i];
      explicit_rank_[next[g]++] = i;
      for (const Member& m : members(g)) explicit_orders[m.gpu].push_back(m.slot);
    }
  }
  // Interleaved and concatenated orders follow from the counts alone.
  std::map<std::vector<std::uint32_t>, std::uint32_t> known;
  shape_of_.resize(spec_.gpus);
  for (std::uint32_t gpu = 0; gpu < spec_.gpus; ++gpu) {
    const auto own = slots(gpu);
    std::uint64_t length = 0;
    std::vector<std::uint32_t> signature;
    for (const std::uint32_t g : own) {
      length += count(g);
      signature.push_back(count(g));
    }
    if (length >= kMostInvocations) {
      throw BadJob("groups: GPU " + std::to_string(gpu) + " has more than 2^30 collectives");
    }
    if (spec_.order == Order::kExplicit) {
      signature.push_back(UINT32_MAX);
      signature.insert(signature.end(), explicit_orders[gpu].begin(), explicit_orders[gpu].end());
    }
    const auto [place, fresh] =
        known.try_emplace(std::move(signature), static_cast<std::uint32_t>(shapes_.size()));
    if (fresh) {
      charge(Shape::bytes(own.size(), length), "orders of the GPUs");
      const auto slots = static_cast<std::uint32_t>(own.size());
      shapes_.push_back(std::make_unique<Shape>(
          slots, spec_.order == Order::kExplicit ? explicit_orders[gpu] : order_of(gpu)));
    }
    shape_of_[gpu] = place->second;
    invocations_ += length;
  }
}

}  // namespace unjam::sim
