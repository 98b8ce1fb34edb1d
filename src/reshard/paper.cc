#include "reshard/paper.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "base/hash.h"
#include "reshard/simulate.h"

namespace unjam::reshard {
namespace {

std::vector<std::size_t> in_order(const Tasks& tasks) {
  std::vector<std::size_t> order(tasks.tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

std::size_t index(int port) { return static_cast<std::size_t>(port); }

// Numbers that are the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix64(seed)) {}
  // Below n. (The bias is n / 2^64.)
  std::uint64_t below(std::uint64_t n) { return (state_ = mix64(state_)) % n; }

 private:
  std::uint64_t state_;
};

class DepthFirst {
 public:
  DepthFirst(const Tasks& tasks, std::uint64_t most_nodes)
      : tasks_(tasks),
        nodes_left_(most_nodes),
        busy_(index(tasks.ports), 0),
        rest_(index(tasks.ports), 0) {
    done_.assign(tasks.tasks.size(), false);
    best_ = plan_naive(tasks);
    best_time_ = time_in_order(tasks, best_);
    now_.sender.assign(tasks.tasks.size(), 0);
    for (const Task& task : tasks.tasks) add_rest(task, task.bytes);
  }

  Schedule run() {
    search();
    return best_;
  }

 private:
  void add_rest(const Task& task, std::int64_t bytes) {
    for (const int port : task.receivers) rest_[index(port)] += bytes;
    if (task.senders.size() == 1) rest_[index(task.senders[0])] += bytes;
  }
  double bound() const {
    double most = 0;
    for (std::size_t p = 0; p < busy_.size(); ++p) {
      most = std::max(most, busy_[p] + static_cast<double>(rest_[p]));
    }
    return most;
  }

  void search() {
    if (now_.order.size() == tasks_.tasks.size()) {
      best_time_ = *std::max_element(busy_.begin(), busy_.end());
      best_ = now_;
      return;
    }
    for (std::size_t t = 0; t < tasks_.tasks.size(); ++t) {
      if (done_[t]) continue;
      const Task& task = tasks_.tasks[t];
      for (const int sender : task.senders) {
        if (nodes_left_ == 0) return;
        --nodes_left_;
        begin(t, sender);
      }
    }
  }

  void begin(std::size_t t, int sender) {
    const Task& task = tasks_.tasks[t];
    std::vector<std::pair<std::size_t, double>> before{{index(sender), busy_[index(sender)]}};
    double start = busy_[index(sender)];
    for (const int port : task.receivers) {
      before.emplace_back(index(port), busy_[index(port)]);
      start = std::max(start, busy_[index(port)]);
    }
    for (const auto& [port, time] : before) busy_[port] = start + static_cast<double>(task.bytes);
    add_rest(task, -task.bytes);
    done_[t] = true;
    now_.sender[t] = sender;
    now_.order.push_back(t);
    if (bound() < best_time_) search();
    now_.order.pop_back();
    done_[t] = false;
    add_rest(task, task.bytes);
    for (const auto& [port, time] : before) busy_[port] = time;
  }

  const Tasks& tasks_;
  std::uint64_t nodes_left_;
  std::vector<double> busy_;
  std::vector<std::int64_t> rest_;
  std::vector<bool> done_;
  Schedule now_, best_;
  double best_time_ = 0;
};

}  // namespace

Schedule plan_naive(const Tasks& tasks) {
  Schedule schedule;
  for (const Task& task : tasks.tasks) schedule.sender.push_back(task.senders[0]);
  schedule.order = in_order(tasks);
  return schedule;
}

Schedule plan_by_size(const Tasks& tasks, bool sorted) {
  Schedule schedule;
  schedule.order = in_order(tasks);
  if (sorted) {
    std::stable_sort(
        schedule.order.begin(), schedule.order.end(),
        [&](std::size_t a, std::size_t b) { return tasks.tasks[a].bytes > tasks.tasks[b].bytes; });
  }
  schedule.sender.resize(tasks.tasks.size());
  std::vector<std::int64_t> load(index(tasks.ports), 0);
  for (const std::size_t t : schedule.order) {
    const Task& task = tasks.tasks[t];
    const int sender =
        *std::min_element(task.senders.begin(), task.senders.end(),
                          [&](int a, int b) { return load[index(a)] < load[index(b)]; });
    schedule.sender[t] = sender;
    load[index(sender)] += task.bytes;
  }
  return schedule;
}

Schedule plan_depth_first(const Tasks& tasks, std::uint64_t most_nodes) {
  return DepthFirst(tasks, most_nodes).run();
}

Schedule plan_greedy(const Tasks& tasks, int tries, std::uint64_t seed) {
  Random random(seed);
  Schedule schedule;
  schedule.sender.resize(tasks.tasks.size());
  std::vector<std::size_t> left = in_order(tasks);
  std::vector<std::int64_t> load(index(tasks.ports), 0);
  struct Chosen {
    std::size_t task = 0;
    int sender = 0;
  };
  while (!left.empty()) {
    std::vector<Chosen> best;
    std::size_t best_devices = 0;
    double best_spread = 0;
    for (int i = 0; i < tries; ++i) {
      for (std::size_t k = left.size(); k > 1; --k) std::swap(left[k - 1], left[random.below(k)]);
      std::vector<bool> used(index(tasks.ports), false);
      std::vector<std::int64_t> sums = load;
      std::vector<Chosen> set;
      std::size_t devices = 0;
      for (const std::size_t t : left) {
        const Task& task = tasks.tasks[t];
        const auto is_used = [&](int port) { return static_cast<bool>(used[index(port)]); };
        if (std::any_of(task.receivers.begin(), task.receivers.end(), is_used)) continue;
        // A sender that has less to send than others is drawn rather.
        std::int64_t most = 0, weights = 0;
        for (const int port : task.senders) most = std::max(most, sums[index(port)]);
        // Shifted, so that the sum over many ports fits.
        const int shift = std::bit_width(task.senders.size());
        const auto weight = [&](int port) { return ((most - sums[index(port)]) >> shift) + 1; };
        for (const int port : task.senders) {
          if (!is_used(port)) weights += weight(port);
        }
        if (weights == 0) continue;
        auto drawn = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(weights)));
        int sender = -1;
        for (const int port : task.senders) {
          if (is_used(port)) continue;
          sender = port;
          if ((drawn -= weight(port)) < 0) break;
        }
        used[index(sender)] = true;
        for (const int port : task.receivers) used[index(port)] = true;
        sums[index(sender)] += task.bytes;
        devices += 1 + task.receivers.size();
        set.push_back({t, sender});
      }
      double mean = 0, spread = 0;
      for (const std::int64_t sum : sums) mean += static_cast<double>(sum);
      mean /= static_cast<double>(sums.size());
      for (const std::int64_t sum : sums) {
        spread += (static_cast<double>(sum) - mean) * (static_cast<double>(sum) - mean);
      }
      if (best.empty() || devices > best_devices ||
          (devices == best_devices && spread < best_spread)) {
        best = std::move(set);
        best_devices = devices;
        best_spread = spread;
      }
    }
    for (const Chosen& chosen : best) {
      schedule.order.push_back(chosen.task);
      schedule.sender[chosen.task] = chosen.sender;
      load[index(chosen.sender)] += tasks.tasks[chosen.task].bytes;
      std::erase(left, chosen.task);
    }
  }
  return schedule;
}

Schedule plan_paper(const Tasks& tasks, std::uint64_t most_nodes, int tries, std::uint64_t seed) {
  Schedule deep = plan_depth_first(tasks, most_nodes), greedy = plan_greedy(tasks, tries, seed);
  return time_in_order(tasks, deep) < time_in_order(tasks, greedy) ? deep : greedy;
}

}  // namespace unjam::reshard
