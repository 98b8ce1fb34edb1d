// The ranks of a job that live in this process: all of them, the one that the environment names, or
// some from that one on.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/support.h"

namespace unjam_gpu {

inline unjamConfig_t cuda_config() {
  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  config.device = UNJAM_DEVICE_CUDA;
  return config;
}

struct Member {
  int rank = 0, ranks = 1, device = 0;
  unjamContext_t context = nullptr;
  unjamGroup_t all = nullptr;

  void doing(std::string what) const { Watchdog::instance().doing(rank, std::move(what)); }

  // Waits on the host; what goes wrong ends the program.
  void wait(unjamRequest_t request, const std::string& what) const {
    const unjamResult_t code = unjamWait(request, -1);
    if (code != UNJAM_SUCCESS) {
      fail("rank " + std::to_string(rank) + ", " + what + ": " + unjamGetErrorString(code) + ": " +
           unjamRequestError(request));
    }
    check(unjamRequestFree(request));
  }
};

inline unjamStats_t stats_of(unjamContext_t context) {
  unjamStats_t stats{};
  stats.size = sizeof(stats);
  check(unjamGetStats(context, &stats));
  return stats;
}

inline std::string explain(unjamContext_t context) {
  std::string text(1 << 20, '\0');
  unjamExplain(context, text.data(), text.size(), nullptr);
  text.resize(text.find('\0'));
  return text;
}

// JSON.
inline std::string info(unjamContext_t context) {
  std::string text(std::size_t{4} << 20, '\0');
  check(unjamInfo(context, text.data(), text.size(), nullptr));
  text.resize(text.find('\0'));
  return text;
}

// The sum of a figure in what unjamInfo says.
inline std::uint64_t figure(unjamContext_t context, const std::string& what) {
  const std::string text = info(context);
  const std::string name = "\"" + what + "\":";
  std::size_t at = text.find(name);
  if (at == std::string::npos) fail("unjamInfo does not say " + what);
  std::uint64_t sum = 0;
  for (; at != std::string::npos; at = text.find(name, at + 1)) {
    sum += std::strtoull(text.c_str() + at + name.size(), nullptr, 10);
  }
  return sum;
}
// Of this rank's calls, those that ran without the engine.
inline std::uint64_t without_engine(unjamContext_t context) {
  return figure(context, "calls_without_engine");
}

// Of the k-th of calls that differ in their keys.
inline std::string key_of(int k) {
  std::string key = "k";  // (g++ 12 warns of an operator+ here)
  key += std::to_string(k);
  return key;
}

inline const char* from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) fail(std::string(name) + " is not set");
  return text;
}

// What is no id is left to unjamInit to refuse.
inline unjamUniqueId_t from_hex(const std::string& text) {
  unjamUniqueId_t id{};
  for (std::size_t i = 0; i < sizeof(id.internal) && 2 * i < text.size(); ++i) {
    id.internal[i] = static_cast<char>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  return id;
}

class Job {
 public:
  // All ranks here, rank r on device r, or, where there are fewer, with others on one.
  Job(int ranks, const unjamConfig_t& config) {
    std::vector<unjamContext_t> contexts(static_cast<std::size_t>(ranks));
    Watchdog::instance().doing(0, "unjamInitAll");
    check(unjamInitAll(contexts.data(), ranks, &config));
    for (int r = 0; r < ranks; ++r) {
      add(contexts[static_cast<std::size_t>(r)], r % device_count());
    }
  }

  // This process's one rank, on the device of its number.
  explicit Job(unjamConfig_t config) {
    const char* rank = from_environment("UNJAM_RANK");
    const int device = std::atoi(rank) % device_count();
    config.device_index = device;
    Watchdog::instance().doing(std::atoi(rank), "unjamInitFromEnvironment");
    unjamContext_t context = nullptr;
    check(unjamInitFromEnvironment(&context, &config));
    add(context, device);
  }

  // Of a job in several processes: the rank that the environment names and those after it,
  // `per_process` in all, or fewer where the job ends; each on the device of its number.
  Job(const unjamConfig_t& config, int per_process) {
    const int first = std::atoi(from_environment("UNJAM_RANK"));
    const int ranks = std::atoi(from_environment("UNJAM_RANKS"));
    const unjamUniqueId_t id = from_hex(from_environment("UNJAM_ID"));
    const int here = std::min(per_process, ranks - first);
    if (here < 1) {
      fail("no rank " + std::to_string(first) + " in a job of " + std::to_string(ranks));
    }
    const int devices = device_count();
    // All processes alike, for lanes are a setting of the whole job.
    if (std::min(per_process, ranks) > devices && std::getenv("UNJAM_LANES") == nullptr) {
      fail("ranks of a process share a GPU: set UNJAM_LANES, as only unjamInitAll does it itself");
    }
    std::vector<unjamContext_t> contexts(static_cast<std::size_t>(here));
    each(here, [&](int i) {  // in threads, for each waits until all have joined
      unjamConfig_t own = config;
      own.device_index = (first + i) % devices;
      Watchdog::instance().doing(first + i, "unjamInit");
      check(unjamInit(&contexts[static_cast<std::size_t>(i)], ranks, id, first + i, &own));
    });
    for (int i = 0; i < here; ++i) {
      add(contexts[static_cast<std::size_t>(i)], (first + i) % devices);
    }
  }

  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  ~Job() {
    for (const Member& m : members_) {
      m.doing("unjamDestroy");
      Watchdog::instance().explain_without(m.context);
      check(unjamDestroy(m.context));
    }
  }

  int ranks() const { return members_.front().ranks; }
  const std::vector<Member>& members() const { return members_; }
  const Member& member(int i) const { return members_[static_cast<std::size_t>(i)]; }

  // f(member) for each rank of this process in a thread with its device current.
  template <class F>
  void run(const F& f) const {
    each(static_cast<int>(members_.size()), [&](int i) {
      check(cudaSetDevice(member(i).device));
      f(member(i));
    });
  }

 private:
  void add(unjamContext_t context, int device) {
    Member m;
    m.context = context;
    m.device = device;
    check(unjamContextRank(context, &m.rank));
    check(unjamContextSize(context, &m.ranks));
    check(unjamGroupCreate(context, nullptr, m.ranks, nullptr, &m.all));
    Watchdog::instance().explain_with(context);
    members_.push_back(m);
  }

  std::vector<Member> members_;
};

// All ranks here; or those of a child of Children (per_process: see ranks_per_process()).
inline std::unique_ptr<Job> start_job(int ranks) {
  return std::make_unique<Job>(ranks, cuda_config());
}
inline std::unique_ptr<Job> join_job(int per_process) {
  return per_process > 1 ? std::make_unique<Job>(cuda_config(), per_process)
                         : std::make_unique<Job>(cuda_config());
}

inline void print_stats(const Job& job) {
  std::printf("%4s %10s %10s %9s %9s %9s %9s %11s %10s %8s %8s %9s\n", "rank", "submitted",
              "completed", "preempt", "quantum", "loads", "saves", "spins", "slices", "starts",
              "quits", "residency");
  for (const Member& m : job.members()) {
    const unjamStats_t s = stats_of(m.context);
    const auto n = [](std::uint64_t v) { return static_cast<unsigned long long>(v); };
    std::printf("%4d %10llu %10llu %9llu %9llu %9llu %9llu %11llu %10llu %8llu %8llu %9llu\n",
                m.rank, n(s.submitted), n(s.completed), n(s.preemptions), n(s.quantum_switches),
                n(s.context_loads), n(s.context_saves), n(s.spins), n(s.slices), n(s.starts),
                n(s.quits), n(s.residency_quits));
  }
}

}  // namespace unjam_gpu
