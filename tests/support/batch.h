// Many exchanges over one group at once, submitted by every rank in an order of its own.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"

namespace unjam_test {

// Runs all of them under the keys "k0", "k1", … and checks every result. Then runs them again, in
// other orders, and checks that the bits are the same. False after a failure.
inline bool run_batch(Job& job, std::vector<std::unique_ptr<Exchange>>& exchanges,
                      std::uint64_t seed, bool twice = true) {
  std::vector<std::uint64_t> digests;
  for (int round = 0; round < (twice ? 2 : 1); ++round) {
    if (round != 0) {
      for (auto& e : exchanges) e->fill();
    }
    const bool ok = job.run([&](Rank& me) {
      std::vector<std::size_t> order(exchanges.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::mt19937_64 random(mix(seed, static_cast<std::uint64_t>(2 * me.rank + round)));
      std::shuffle(order.begin(), order.end(), random);
      std::vector<unjamRequest_t> requests(exchanges.size());
      for (const std::size_t i : order) {
        const std::string key = "k" + std::to_string(i);
        const unjamResult_t code =
            exchanges[i]->submit(me.rank, me.all, key.c_str(), nullptr, &requests[i]);
        if (code != UNJAM_SUCCESS) {
          fail("submission of " + exchanges[i]->spec().text() + ": " + code_text(code) + ": " +
               unjamGetLastError());
        }
      }
      for (const std::size_t i : order) me.wait(requests[i], exchanges[i]->spec().text());
    });
    if (!ok) return false;
    for (std::size_t i = 0; i < exchanges.size(); ++i) {
      // Equal bits are right once they were, so the second time they are not computed again.
      const std::string error =
          round == 0 ? exchanges[i]->check() : exchanges[i]->check_surroundings();
      if (!error.empty()) {
        ADD_FAILURE() << error << job.where() << " batch seed " << seed << " round " << round;
        return false;
      }
      if (round == 0) {
        digests.push_back(exchanges[i]->digest());
      } else if (digests[i] != exchanges[i]->digest()) {
        ADD_FAILURE() << exchanges[i]->spec().text() << ": a second run gives other bits"
                      << job.where() << " batch seed " << seed;
        return false;
      }
    }
  }
  return true;
}

// Collects exchanges and runs them in batches of a bounded size.
class Batches {
 public:
  Batches(Job& job, std::uint64_t seed, bool twice = true, std::size_t most = 200,
          std::size_t most_bytes = std::size_t{48} << 20)
      : job_(job), seed_(seed), twice_(twice), most_(most), most_bytes_(most_bytes) {}

  // False after a failure.
  bool add(const Spec& spec) {
    if (!ok_) return false;
    exchanges_.push_back(std::make_unique<Exchange>(spec, job_.ranks()));
    bytes_ += exchanges_.back()->memory();
    ++total_;
    return exchanges_.size() < most_ && bytes_ < most_bytes_ ? true : flush();
  }
  bool flush() {
    if (ok_ && !exchanges_.empty()) ok_ = run_batch(job_, exchanges_, mix(seed_, total_), twice_);
    exchanges_.clear();
    bytes_ = 0;
    return ok_;
  }
  std::size_t total() const { return total_; }

 private:
  Job& job_;
  const std::uint64_t seed_;
  const bool twice_;
  const std::size_t most_, most_bytes_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::size_t bytes_ = 0, total_ = 0;
  bool ok_ = true;
};

}  // namespace unjam_test
