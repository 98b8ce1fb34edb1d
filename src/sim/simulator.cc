#include "sim/simulator.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/json_writer.h"

namespace unjam::sim {

EventEngine::EventEngine(const Job& job) : orders_(job) {
  if (job.spec().model == Model::kSynchronization) {
    synchronization_ = std::make_unique<SynchronizationEvents>(job);
  } else {
    exact_ = std::make_unique<ExactSingleQueue>(job);
    released_ = std::make_unique<ReleasedSingleQueue>(job);
  }
}

Outcome EventEngine::run(const Draws& draws, const Wanted& wanted) {
  Outcome outcome;
  orders_.build(draws.disorders);
  if (synchronization_) {
    synchronization_->run(draws, orders_, wanted, &outcome);
    return outcome;
  }
  if (wanted.exact && exact_->deadlocks(orders_)) {
    outcome.exact.deadlock = true;
    if (wanted.waits) outcome.exact.waits = exact_->cycle(orders_);
  }
  if (wanted.released) outcome.released = released_->decide(orders_, wanted.waits);
  return outcome;
}

Simulator::Simulator(JobSpec spec) : job_(std::move(spec)), drawer_(job_) {}

Counts Simulator::run(std::uint64_t first, std::uint64_t rounds, unsigned threads, Wanted wanted,
                      bool plain) {
  wanted.waits = false;
  threads = static_cast<unsigned>(
      std::clamp<std::uint64_t>(threads, 1, std::max<std::uint64_t>(1, rounds)));
  while (!plain && engines_.size() < threads) {
    engines_.push_back(std::make_unique<EventEngine>(job_));
  }
  // Small enough to share evenly, large enough to make the shared counter cheap.
  const std::uint64_t portion = std::clamp<std::uint64_t>(rounds / (threads * 16ull), 1, 256);
  std::atomic<std::uint64_t> next{0};
  std::mutex mutex;
  Counts total;
  std::exception_ptr failure;
  const auto work = [&](unsigned thread) {
    Counts own;
    Draws draws;
    try {
      for (;;) {
        const std::uint64_t begin = next.fetch_add(portion, std::memory_order_relaxed);
        if (begin >= rounds) break;
        for (std::uint64_t i = begin; i < std::min(rounds, begin + portion); ++i) {
          const std::uint64_t round = first + i;
          drawer_.draw(round, &draws);
          const Outcome outcome =
              plain ? run_plain(job_, draws) : engines_[thread]->run(draws, wanted);
          const bool exact = wanted.exact && outcome.exact.deadlock;
          const bool released = wanted.released && outcome.released.deadlock;
          ++own.rounds;
          own.exact += exact;
          own.released += released;
          own.exact_only += exact && !released;
          own.released_only += released && !exact;
          if (exact) own.first_exact = std::min(own.first_exact, round);
          if (released) own.first_released = std::min(own.first_released, round);
          own.disorders += draws.disorders.size();
          own.syncs += draws.syncs.size();
        }
      }
    } catch (...) {
      const std::scoped_lock lock(mutex);
      failure = std::current_exception();
    }
    const std::scoped_lock lock(mutex);
    total.rounds += own.rounds;
    total.exact += own.exact;
    total.released += own.released;
    total.exact_only += own.exact_only;
    total.released_only += own.released_only;
    total.first_exact = std::min(total.first_exact, own.first_exact);
    total.first_released = std::min(total.first_released, own.first_released);
    total.disorders += own.disorders;
    total.syncs += own.syncs;
  };
  {
    std::vector<std::jthread> others;
    for (unsigned t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
  }
  if (failure) std::rethrow_exception(failure);
  return total;
}

namespace {

void write_verdict(JsonWriter& json, const char* name, const Verdict& verdict) {
  json.key(name).begin_object();
  json.field("deadlock", verdict.deadlock);
  if (verdict.deadlock) {
    json.field("step", verdict.step).field("gpu", verdict.gpu);
    json.key("waits").begin_array();
    for (const Wait& w : verdict.waits) {
      json.begin_object();
      json.field("gpu", w.gpu).field("group", w.what.group).field("index", w.what.k);
      json.field("on", w.on);
      json.end_object();
    }
    json.end_array();
  }
  json.end_object();
}

}  // namespace

std::string Simulator::describe(std::uint64_t round, bool plain) const {
  Draws draws;
  drawer_.draw(round, &draws);
  JsonWriter json;
  json.begin_object();
  json.field("round", round);
  json.field("disorders", static_cast<std::uint64_t>(draws.disorders.size()));
  json.field("syncs", static_cast<std::uint64_t>(draws.syncs.size()));
  Outcome outcome;
  if (plain) {
    const PlainOutcome all = run_plain(job_, draws);
    outcome = all;
    json.field("lost", all.lost);
  } else {
    outcome = EventEngine(job_).run(draws, {true, true, true});
  }
  write_verdict(json, "exact", outcome.exact);
  write_verdict(json, "released", outcome.released);
  json.end_object();
  return json.text();
}

}  // namespace unjam::sim
