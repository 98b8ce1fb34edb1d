// The paper's two optimised completion queues against each other: cost of a push and of a pop on
// this machine, with 1, 2 and 4 producers (lanes) and one consumer. Prints medians of repetitions.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "engine/cq.h"
#include "tests/support/scan_cq.h"

namespace {

using unjam::Cqe;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kSlots = 1024;  // a rank's default
constexpr std::uint64_t kEntries = 200000;

struct Cost {
  double push_ns;
  double pop_ns;
};

// Producers push in bursts of at most kSlots entries under way, as invocations are.
template <class Push, class Pop>
Cost measure(unsigned producers, Push push, Pop pop) {
  std::atomic<std::uint64_t> under_way{0};
  std::atomic<std::uint64_t> push_ns{0};
  std::vector<std::thread> threads;
  for (unsigned p = 0; p < producers; ++p) {
    threads.emplace_back([&, p] {
      std::uint64_t ns = 0;
      for (std::uint64_t i = 0; i < kEntries / producers; ++i) {
        while (under_way.load(std::memory_order_acquire) > kSlots - 64) std::this_thread::yield();
        under_way.fetch_add(1, std::memory_order_acq_rel);
        const auto t = Clock::now();
        push(Cqe{static_cast<std::uint16_t>(i % kSlots), unjam::Outcome::kDone}, p);
        ns += static_cast<std::uint64_t>((Clock::now() - t).count());
      }
      push_ns += ns;
    });
  }
  std::uint64_t pop_ns = 0;
  for (std::uint64_t got = 0; got < kEntries / producers * producers;) {
    Cqe e;
    const auto t = Clock::now();
    const bool popped = pop(e);
    pop_ns += static_cast<std::uint64_t>((Clock::now() - t).count());
    if (popped) {
      ++got;
      under_way.fetch_sub(1, std::memory_order_acq_rel);
    } else {
      std::this_thread::yield();
    }
  }
  for (auto& t : threads) t.join();
  const double n = static_cast<double>(kEntries);
  return {static_cast<double>(push_ns.load()) / n, static_cast<double>(pop_ns) / n};
}

void report(const char* name, unsigned producers, std::vector<Cost> costs) {
  const auto by = [&](double Cost::* field) {
    std::sort(costs.begin(), costs.end(),
              [&](const Cost& a, const Cost& b) { return a.*field < b.*field; });
    std::printf("  %8.1f [%7.1f, %7.1f]", costs[costs.size() / 2].*field, costs.front().*field,
                costs.back().*field);
  };
  std::printf("%-20s %9u", name, producers);
  by(&Cost::push_ns);
  by(&Cost::pop_ns);
  std::printf("\n");
}

}  // namespace

int main() {
  std::printf("%-20s %9s  %-27s  %s\n", "queue", "producers", "ns a push [min, max]",
              "ns of polling an entry [min, max]");
  for (const unsigned producers : {1u, 2u, 4u}) {
    std::vector<Cost> ring, scan8, scan_all;
    for (int repetition = 0; repetition < 7; ++repetition) {
      {
        std::vector<std::uint64_t> words(kSlots, 0);
        unjam::RingCq cq;
        cq.words = words.data();
        cq.capacity = kSlots;
        ring.push_back(measure(
            producers, [&](Cqe e, unsigned) { cq.push(e); }, [&](Cqe& e) { return cq.pop(e); }));
      }
      for (const std::uint32_t capacity : {8u, kSlots}) {
        std::vector<std::uint64_t> words(capacity, 0);
        unjam::ScanCq cq;
        cq.words = words.data();
        cq.capacity = capacity;
        std::uint32_t cursor = 0;
        (capacity == 8 ? scan8 : scan_all)
            .push_back(measure(
                producers,
                [&](Cqe e, unsigned p) {
                  while (!cq.push(e, capacity == 8 ? p : e.slot)) std::this_thread::yield();
                },
                [&](Cqe& e) { return cq.pop(e, cursor); }));
      }
    }
    report("ring", producers, ring);
    report("scan, 8 words", producers, scan8);
    report("scan, a word a slot", producers, scan_all);
  }
}
