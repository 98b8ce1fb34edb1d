// What programs_test and stress_test run, with ranks as processes, and as threads of several
// processes: the same bits on all ranks, and the same as with all ranks in one process. And what a
// collective costs that never runs.
#include "tests/support/processes.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/programs.h"
#include "tests/support/stress.h"

namespace unjam_test {
namespace {

const Layout kThreads = layout({8});
const Layout kEach = layout({1, 1, 1, 1, 1, 1, 1, 1});
const Layout kMixed = layout({3, 3, 2});

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

// ---- the harness itself ----

// What this process and its children print on stderr, to be read while they do.
class StderrInFile {
 public:
  StderrInFile() : file_(std::tmpfile()), before_(dup(STDERR_FILENO)) {
    std::fflush(stderr);
    dup2(fileno(file_), STDERR_FILENO);
  }
  ~StderrInFile() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  StderrInFile(const StderrInFile&) = delete;
  StderrInFile& operator=(const StderrInFile&) = delete;

  std::string text() const {
    std::string all;
    char piece[4096];
    for (ssize_t n = 0;
         (n = pread(fileno(file_), piece, sizeof(piece), static_cast<off_t>(all.size()))) > 0;) {
      all.append(piece, static_cast<std::size_t>(n));
    }
    return all;
  }

 private:
  std::FILE* file_;
  int before_;
};

TEST(Processes, AChildThatHangsIsReportedWithWhatItWaitsFor) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  const StderrInFile printed;
  Processes all(2, "", [&](Child& me) {
    Job job(id, 2, {me.index()}, default_config(), base_seed());
    job.run([&](Rank& rank) {
      float x = 0;
      unjamRequest_t request = nullptr;
      if (rank.rank == 0) {
        UNJAM_CHECK(unjamAllReduce(rank.all, "never", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                                   &request));
      }
      me.say("up");
      sleep_ms(3600 * 1000);
    });
  });
  ASSERT_TRUE(all.wait_until([&] { return !all.said(0).empty() && !all.said(1).empty(); }));
  const auto explained = [&] {
    const std::string text = printed.text();
    return text.find("never") != std::string::npos && text.find("rank 1") != std::string::npos;
  };
  EXPECT_NONFATAL_FAILURE(EXPECT_FALSE(all.finish(1000, explained)), "processes 0, 1 did not end");
  const std::string text = printed.text();
  EXPECT_NE(text.find("never"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
}

TEST(Processes, AChildThatFailsIsReported) {
  Processes all(1, "", [](Child&) { _exit(1); });
  EXPECT_NONFATAL_FAILURE(EXPECT_FALSE(all.finish()), "process 0 failed");
}

// ---- programs 1 and 2 ----

struct ProgramResult {
  std::vector<std::uint64_t> digests;  // of every iteration; empty after a failure
  double median_ms = 0;
};

ProgramResult run_program_as(const Layout& processes, const unjamConfig_t& config,
                             const programs::Inputs& inputs, const programs::Program& program,
                             std::uint64_t seed, std::uint64_t order_seed) {
  const std::vector<std::string> said = run_layout(
      processes, config, seed,
      [&](Job& job) {
        const programs::Outcome o = run_program(job, inputs, program, order_seed);
        return Packer().put(o.digests).put(o.ms_each).put(programs::sum_of_stats(job)).text();
      },
      2 * kPatienceUs + program.iterations * std::int64_t{300000});
  ProgramResult result;
  std::vector<double> ms(static_cast<std::size_t>(program.iterations), 0);
  unjamStats_t sum{};
  for (std::size_t p = 0; p < said.size(); ++p) {
    Unpacker u(said[p]);
    const auto digests = u.get_all<std::uint64_t>();
    const auto each = u.get_all<double>();
    const auto stats = u.get<unjamStats_t>();
    if (p == 0) result.digests = digests;
    if (digests != result.digests || digests.empty()) {
      ADD_FAILURE() << "process " << p << " has other bits than process 0, " << text_of(processes)
                    << ", seed " << seed;
      return {};
    }
    for (std::size_t i = 0; i < ms.size(); ++i) {
      ms[i] += each[i] * static_cast<double>(processes[p].size()) / programs::kRanks;
    }
    sum.preemptions += stats.preemptions;
    sum.quits += stats.quits;
    sum.context_loads += stats.context_loads;
    sum.context_saves += stats.context_saves;
    sum.lanes += stats.lanes;
  }
  if (said.empty()) return {};
  result.median_ms = median(ms);
  const std::string name =
      std::string(program.synchronize ? "program 2, " : "program 1, ") + text_of(processes) + ",";
  programs::print_counters(name.c_str(), seed, sum, program.iterations, result.median_ms);
  return result;
}

unjamConfig_t with_delays(std::uint64_t seed, std::uint32_t max_us) {
  unjamConfig_t c = default_config();
  c.delay_seed = seed | 1;
  c.delay_max_us = max_us;
  return c;
}

void same_as_threads(const Layout& processes, bool synchronize) {
  const std::uint64_t seed = mix(base_seed(), synchronize ? 1 : 0);
  const programs::Inputs inputs(seed);  // the children share its pages
  programs::Program program;
  program.iterations = kSanitized ? 2 : 20;
  program.synchronize = synchronize;
  const auto threads =
      run_program_as(kThreads, default_config(), inputs, program, seed, mix(seed, 1));
  ASSERT_FALSE(threads.digests.empty());
  // In other orders, without and with delays.
  for (int delayed = 0; delayed < 2; ++delayed) {
    const auto apart =
        run_program_as(processes, delayed ? with_delays(seed, 20) : default_config(), inputs,
                       program, seed, mix(seed, static_cast<unsigned>(2 + delayed)));
    ASSERT_FALSE(apart.digests.empty());
    EXPECT_EQ(apart.digests, threads.digests) << "seed " << seed;
  }
}

TEST(Processes, Program1) { same_as_threads(kEach, false); }
TEST(Processes, Program1Mixed) { same_as_threads(kMixed, false); }
TEST(Processes, Program2) { same_as_threads(kEach, true); }
TEST(Processes, Program2Mixed) { same_as_threads(kMixed, true); }

// Every second seed with delays; the beginning is compared with ranks as threads.
void soak(const Layout& processes, bool synchronize) {
  std::vector<double> medians;
  for (unsigned i = 0; i < 20; ++i) {
    const std::uint64_t seed = mix(base_seed(), 1000 + i);
    const programs::Inputs inputs(seed);
    programs::Program program;
    program.synchronize = synchronize;
    program.iterations = 20;
    const auto threads =
        run_program_as(kThreads, default_config(), inputs, program, seed, mix(seed, 1));
    program.iterations = 1000;
    const auto apart =
        run_program_as(processes, i % 2 != 0 ? with_delays(seed, 20) : default_config(), inputs,
                       program, seed, mix(seed, 2));
    if (testing::Test::HasFailure()) return;
    ASSERT_TRUE(std::equal(threads.digests.begin(), threads.digests.end(), apart.digests.begin()))
        << "other bits than with ranks as threads, seed " << seed;
    if (i % 2 == 0) medians.push_back(apart.median_ms);
  }
  std::printf("  %s: median of the medians without delays %.2f ms an iteration\n",
              text_of(processes).c_str(), median(medians));
}

TEST(ProcessesSoak, Program1ThousandIterationsTwentySeeds) { soak(kEach, false); }
TEST(ProcessesSoak, Program1MixedThousandIterationsTwentySeeds) { soak(kMixed, false); }
TEST(ProcessesSoak, Program2ThousandIterationsTwentySeeds) { soak(kEach, true); }
TEST(ProcessesSoak, Program2MixedThousandIterationsTwentySeeds) { soak(kMixed, true); }

// ---- a thousand keys ----

struct Received {
  std::uint64_t call = 0;
  std::int64_t rank = 0;
  std::uint64_t digest = 0;
};

// Digests by (call, rank); empty after a failure.
std::map<std::pair<std::uint64_t, std::int64_t>, std::uint64_t> run_stress_as(
    const Layout& processes, const stress::Shape& shape, const unjamConfig_t& config,
    std::uint64_t seed) {
  const std::vector<std::string> said = run_layout(
      processes, config, seed,
      [&](Job& job) {
        const stress::Outcome o = run_stress(job, shape, seed);
        std::vector<Received> received;
        for (const auto& [where, digest] : o.digests) {
          received.push_back({where.first, where.second, digest});
        }
        return Packer()
            .put(received)
            .put(o.calls)
            .put(o.peak)
            .put(programs::sum_of_stats(job))
            .text();
      },
      4 * kPatienceUs);
  std::map<std::pair<std::uint64_t, std::int64_t>, std::uint64_t> digests;
  std::size_t calls = 0, peak = 0;
  std::uint64_t preemptions = 0, quits = 0;
  for (const std::string& text : said) {
    Unpacker u(text);
    for (const Received& r : u.get_all<Received>()) digests[{r.call, r.rank}] = r.digest;
    calls = u.get<std::size_t>();
    peak = std::max(peak, u.get<std::size_t>());
    const auto stats = u.get<unjamStats_t>();
    preemptions += stats.preemptions;
    quits += stats.quits;
  }
  std::printf(
      "  %s, seed %llu: %zu calls, at most %zu pending on a rank, %zu results; %llu preemptions, "
      "%llu quits\n",
      text_of(processes).c_str(), static_cast<unsigned long long>(seed), calls, peak,
      digests.size(), static_cast<unsigned long long>(preemptions),
      static_cast<unsigned long long>(quits));
  return digests;
}

void stress_same_as_threads(const Layout& processes, const stress::Shape& shape,
                            const unjamConfig_t& config, std::uint64_t seed) {
  const auto threads = run_stress_as(kThreads, shape, config, seed);
  ASSERT_FALSE(threads.empty());
  const auto apart = run_stress_as(processes, shape, config, seed);
  ASSERT_EQ(apart.size(), threads.size()) << "seed " << seed;
  for (const auto& [where, digest] : threads) {
    const auto found = apart.find(where);
    ASSERT_TRUE(found != apart.end() && found->second == digest)
        << "call " << where.first << ": rank " << where.second
        << " has other bits than with ranks as threads, seed " << seed;
  }
}

stress::Shape short_shape() {
  stress::Shape s = stress::default_shape();
  s.rounds = kSanitized ? 1 : 2;
  return s;
}

TEST(Processes, ThousandKeys) {
  stress_same_as_threads(kEach, short_shape(), stress::delays(base_seed()), base_seed());
}

TEST(Processes, ThousandKeysMixed) {
  const std::uint64_t seed = mix(base_seed(), 1);
  stress_same_as_threads(kMixed, short_shape(), stress::delays(seed), seed);
}

TEST(Processes, ScarceSlotsThreeLanesSeveralThreads) {
  const std::uint64_t seed = mix(base_seed(), 2);
  stress::Shape s = short_shape();
  s.rounds = 1;
  s.threads = 3;
  s.most_bytes = std::size_t{1} << 20;
  unjamConfig_t c = stress::delays(seed);
  c.lanes = 3;
  c.guaranteed_slots = 2;
  c.guaranteed_slot_bytes = 1024;
  c.pool_slots = 2;
  c.residency_us = 200;
  stress_same_as_threads(layout({2, 1, 3, 1, 1}), s, c, seed);
}

TEST(ProcessesSoak, ThousandKeysTwentySeeds) {
  for (unsigned i = 0; i < 20; ++i) {
    const std::uint64_t seed = mix(base_seed(), 100 + i);
    stress::Shape s;
    s.rounds = 5;
    s.threads = i % 3 == 2 ? 3 : 1;
    unjamConfig_t c = stress::delays(seed);
    c.delay_max_us = 10u << (i % 5);
    c.lanes = 1 + i % 3;
    if (i % 4 == 3) c.residency_us = 100;
    stress_same_as_threads(i % 2 == 0 ? kEach : kMixed, s, c, seed);
    if (HasFailure()) return;
  }
}

// ---- what a collective costs that never runs ----

// The contract is 1 %.
constexpr double kMostOfACpu = 0.05;

// Rank 0 calls, rank 1 does not for so long. In one of two ways a thread waits for it.
void pending_costs_nothing(int seconds, bool waits, int keys) {
  int measured[2];  // rank 0 tells rank 1 that it may call
  ASSERT_EQ(pipe(measured), 0);
  const std::vector<std::string> said =
      run_layout(layout({1, 1}), default_config(), base_seed(), [&](Job& job) {
        double share = 0;
        job.run([&](Rank& me) {
          std::vector<std::vector<float>> buffers(static_cast<std::size_t>(keys));
          std::vector<unjamRequest_t> requests(buffers.size());
          const auto call = [&] {
            for (std::size_t k = 0; k < buffers.size(); ++k) {
              // Some that complete in one slice, some in many.
              buffers[k].assign(k % 2 == 0 ? 16 : 100000, 1.0f);
              UNJAM_CHECK(unjamAllReduce(me.all, ("k" + std::to_string(k)).c_str(),
                                         buffers[k].data(), buffers[k].data(), buffers[k].size(),
                                         UNJAM_FLOAT32, UNJAM_SUM, nullptr, &requests[k]));
            }
          };
          if (me.rank == 0) call();
          // What has a reason is over: starting, and the first attempts.
          UNJAM_CHECK(unjamDeviceSynchronize(me.context, kPatienceUs));
          sleep_ms(100);
          const double before = cpu_seconds();
          if (me.rank == 0 && waits) {
            const unjamResult_t code = unjamWait(requests[0], seconds * std::int64_t{1000000});
            if (code != UNJAM_ERROR_TIMEOUT) fail("the wait ended: " + code_text(code));
          } else {
            sleep_ms(seconds * 1000);
          }
          share = (cpu_seconds() - before) / seconds;
          char byte = 0;
          if (me.rank == 0) {
            if (write(measured[1], &byte, 1) != 1) fail("write");
          } else {
            if (read(measured[0], &byte, 1) != 1) fail("read");
            call();
          }
          for (std::size_t k = 0; k < buffers.size(); ++k) {
            me.wait(requests[k], "k" + std::to_string(k));
            for (const float x : buffers[k]) {
              if (x != 2.0f) fail("a wrong sum");
            }
          }
        });
        return Packer().put(share).text();
      });
  close(measured[0]);
  close(measured[1]);
  ASSERT_EQ(said.size(), 2u);
  const auto share0 = Unpacker(said[0]).get<double>(), share1 = Unpacker(said[1]).get<double>();
  std::printf(
      "  %d pending for %d s, %s: %.3f %% of a CPU; the rank that has not called: %.3f %%\n", keys,
      seconds, waits ? "one thread waits" : "nobody waits", share0 * 100, share1 * 100);
  if (kSanitized) return;
  EXPECT_LT(share0, kMostOfACpu);
  EXPECT_LT(share1, kMostOfACpu);
}

TEST(Processes, PendingCostsNothing) { pending_costs_nothing(kSanitized ? 1 : 3, false, 1); }
TEST(Processes, PendingWithAWaiterCostsNothing) {
  pending_costs_nothing(kSanitized ? 1 : 3, true, 100);
}

TEST(ProcessesSoak, PendingForTenSecondsCostsNothing) {
  for (const int keys : {1, 100}) {
    pending_costs_nothing(10, false, keys);
    pending_costs_nothing(10, true, keys);
  }
}

}  // namespace
}  // namespace unjam_test
