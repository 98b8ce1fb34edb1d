// A thousand registered collectives over twelve overlapping groups, up to 200 pending on every
// rank, in an order of its own, messages from 4 bytes to several MiB.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"

namespace unjam_test::stress {

inline constexpr int kRanks = 8;
inline constexpr int kGroups = 12;

struct Plan {
  std::vector<std::vector<int>> groups;  // members, in group order
  struct Key {
    std::size_t group = 0;
    std::string name;
    Spec spec;  // count and seed: per use
  };
  std::vector<Key> keys;
};

// Twelve groups of two to eight ranks, each rank in one to five of them.
inline std::vector<std::vector<int>> make_groups(std::mt19937_64& random) {
  const std::vector<int> sizes = {8, 4, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2};
  for (;;) {
    std::vector<int> room = {5, 5, 5, 5, 5, 5, 5, 5};
    // One rank is in the large group only.
    room[random() % kRanks] = 1;
    std::vector<std::vector<int>> groups;
    for (const int size : sizes) {
      std::vector<int> candidates;
      for (int r = 0; r < kRanks; ++r) {
        if (room[static_cast<std::size_t>(r)] > 0) candidates.push_back(r);
      }
      if (static_cast<int>(candidates.size()) < size) break;
      std::shuffle(candidates.begin(), candidates.end(), random);
      candidates.resize(static_cast<std::size_t>(size));
      for (const int r : candidates) --room[static_cast<std::size_t>(r)];
      groups.push_back(candidates);
    }
    if (groups.size() == kGroups) return groups;
  }
}

inline Plan make_plan(std::size_t num_keys, std::mt19937_64& random) {
  Plan plan;
  plan.groups = make_groups(random);
  for (std::size_t k = 0; k < num_keys; ++k) {
    Plan::Key key;
    key.group = random() % kGroups;
    key.name = "key " + std::to_string(k);
    do {  // barriers are not registered
      key.spec.kind = static_cast<unjamKind_t>(random() % kNumKinds);
    } while (key.spec.kind == UNJAM_BARRIER);
    key.spec.dtype = static_cast<unjamDataType_t>(random() % kNumDTypes);
    key.spec.op = static_cast<unjamOp_t>(random() % kNumOps);
    key.spec.root = static_cast<int>(random() % plan.groups[key.group].size());
    plan.keys.push_back(key);
  }
  return plan;
}

// 4 bytes to `most`, mostly small; a few that no connector's slots can hold together.
inline std::size_t message_bytes(std::mt19937_64& random, std::size_t most) {
  const std::uint64_t kind = random() % 100;
  const double lo = 4, hi = kind < 85 ? 32768 : kind < 98 ? 262144 : static_cast<double>(most);
  const double u = static_cast<double>(random() % 100000) / 100000;
  return static_cast<std::size_t>(lo * std::pow(hi / lo, u));
}

struct Use {
  std::size_t key = 0;
  std::unique_ptr<Exchange> exchange;
};

struct Shape {
  std::size_t keys = 1000;
  std::size_t pending = 200;
  std::size_t most_bytes = std::size_t{8} << 20;
  int rounds = 8;
  int threads = 1;  // that submit, a rank
  bool registered = true;
};

struct Outcome {
  bool ok = false;
  std::size_t calls = 0, bytes = 0;  // of the whole job; of this process's buffers
  std::size_t peak = 0;              // pending on a rank
  // Of what each rank of this process received: (call, rank) -> hash.
  std::map<std::pair<std::uint64_t, int>, std::uint64_t> digests;
};

// Where all ranks are in this process, every result is checked.
inline Outcome run_stress(Job& job, const Shape& shape, std::uint64_t seed) {
  Outcome outcome;
  std::mt19937_64 random(seed);
  const Plan plan = make_plan(shape.keys, random);

  // Groups and registrations, on every rank in its own order.
  std::vector<std::vector<unjamGroup_t>> groups(kRanks, std::vector<unjamGroup_t>(kGroups));
  std::vector<std::vector<unjamCollective_t>> collectives(
      kRanks, std::vector<unjamCollective_t>(plan.keys.size()));
  bool ok = job.run([&](Rank& me) {
    const auto r = static_cast<std::size_t>(me.rank);
    std::mt19937_64 mine(mix(seed, r));
    std::vector<std::size_t> order(kGroups);
    for (std::size_t g = 0; g < kGroups; ++g) order[g] = g;
    std::shuffle(order.begin(), order.end(), mine);
    for (const std::size_t g : order) {
      const std::vector<int>& m = plan.groups[g];
      if (std::find(m.begin(), m.end(), me.rank) == m.end()) continue;
      const std::string name = "group " + std::to_string(g);
      UNJAM_CHECK(unjamGroupCreate(me.context, m.data(), static_cast<int>(m.size()), name.c_str(),
                                   &groups[r][g]));
    }
    for (std::size_t k = 0; k < plan.keys.size() && shape.registered; ++k) {
      const Plan::Key& key = plan.keys[k];
      if (groups[r][key.group] == nullptr) continue;
      UNJAM_CHECK(unjamRegister(groups[r][key.group], key.name.c_str(), key.spec.kind,
                                key.spec.dtype, key.spec.op, key.spec.root, 0, &collectives[r][k]));
    }
  });
  if (!ok) return outcome;

  for (int round = 0; round < shape.rounds; ++round) {
    // Random uses of random keys (some twice), until no rank has room for one more.
    std::vector<Use> uses;
    std::vector<std::size_t> pending(kRanks, 0);
    for (std::size_t misses = 0; misses < 200;) {
      const std::size_t k = random() % plan.keys.size();
      const std::vector<int>& m = plan.groups[plan.keys[k].group];
      if (std::any_of(m.begin(), m.end(), [&](int r) {
            return pending[static_cast<std::size_t>(r)] >= shape.pending;
          })) {
        ++misses;
        continue;
      }
      for (const int r : m) ++pending[static_cast<std::size_t>(r)];
      Spec s = plan.keys[k].spec;
      const bool blocked = s.kind == UNJAM_ALL_GATHER || s.kind == UNJAM_REDUCE_SCATTER;
      const std::size_t total = message_bytes(random, shape.most_bytes);
      s.count =
          total / static_cast<std::size_t>(type_info(s.dtype).bytes) / (blocked ? m.size() : 1);
      s.in_place = random() % 2 == 0;
      s.data = random() % 2 == 0 ? Data::kExact : Data::kRandom;
      s.seed = random();
      std::vector<bool> present;
      for (const int r : m) present.push_back(job.is_local(r));
      const bool any = std::find(present.begin(), present.end(), true) != present.end();
      uses.push_back(
          {k, any ? std::make_unique<Exchange>(s, static_cast<int>(m.size()), present) : nullptr});
      if (any) outcome.bytes += uses.back().exchange->memory();
    }
    for (const int r : job.local()) {
      outcome.peak = std::max(outcome.peak, pending[static_cast<std::size_t>(r)]);
    }

    // A key's uses keep their order on every rank and come from one thread; the rest is shuffled.
    std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
    for (const int rank : job.local()) {
      for (int thread = 0; thread < shape.threads; ++thread) {
        bodies.emplace_back(rank, [&, thread, round](Rank& me) {
          const auto r = static_cast<std::size_t>(me.rank);
          std::mt19937_64 mine(mix(seed, r * 1000 + static_cast<std::uint64_t>(thread * 100) +
                                             static_cast<std::uint64_t>(round)));
          std::vector<std::pair<std::uint64_t, std::size_t>> order;  // by a number a key
          std::vector<std::uint64_t> place(plan.keys.size());
          for (std::uint64_t& p : place) p = mine();
          for (std::size_t u = 0; u < uses.size(); ++u) {
            const std::size_t k = uses[u].key;
            if (groups[r][plan.keys[k].group] == nullptr) continue;
            if (static_cast<int>(k % static_cast<std::size_t>(shape.threads)) != thread) continue;
            order.emplace_back(place[k], u);
          }
          std::sort(order.begin(), order.end());
          std::vector<unjamRequest_t> requests(order.size());
          for (std::size_t i = 0; i < order.size(); ++i) {
            Use& use = uses[order[i].second];
            const Plan::Key& key = plan.keys[use.key];
            const std::vector<int>& m = plan.groups[key.group];
            const auto at = static_cast<int>(std::find(m.begin(), m.end(), me.rank) - m.begin());
            if (shape.registered) {
              UNJAM_CHECK(unjamRun(collectives[r][use.key], use.exchange->send(at),
                                   use.exchange->recv(at), use.exchange->spec().count, nullptr,
                                   nullptr, &requests[i]));
            } else {
              UNJAM_CHECK(use.exchange->submit(at, groups[r][key.group], key.name.c_str(), nullptr,
                                               &requests[i]));
            }
          }
          for (std::size_t i = 0; i < order.size(); ++i) {
            me.wait(requests[i], uses[order[i].second].exchange->spec().text());
          }
        });
      }
    }
    if (!job.run_threads(bodies)) return outcome;
    for (std::size_t u = 0; u < uses.size(); ++u) {
      if (uses[u].exchange == nullptr) continue;
      const Exchange& exchange = *uses[u].exchange;
      const std::string error = exchange.check();
      if (!error.empty()) {
        ADD_FAILURE() << error << job.where() << " round " << round;
        return outcome;
      }
      const std::vector<int>& m = plan.groups[plan.keys[uses[u].key].group];
      for (std::size_t i = 0; i < m.size(); ++i) {
        const auto at = static_cast<int>(i);
        if (exchange.receives(at)) {
          outcome.digests[{outcome.calls + u, m[i]}] = exchange.digest(at);
        }
      }
    }
    outcome.calls += uses.size();
  }
  outcome.ok = true;
  return outcome;
}

inline Shape default_shape() {
  Shape s;
  if (kSanitized) {
    s.keys = 200;
    s.pending = 40;
    s.most_bytes = std::size_t{1} << 20;
    s.rounds = 1;
  }
  return s;
}

inline unjamConfig_t delays(std::uint64_t seed) {
  unjamConfig_t c = default_config();
  c.delay_seed = seed | 1;
  c.delay_max_us = 50;
  return c;
}

}  // namespace unjam_test::stress
