// How long the agents of a job (src/control/agent.h) take to meet, and to learn of a death: all of
// them in this process, over TCP on loopback, without arenas.
//   agents_bench [--agents 4096] [--ranks 1] [--threads 1] [--rounds 3] [--json FILE]
// --ranks: of each agent. --threads: which drive them; agents are dealt out in turn.
//
// A round starts all agents, asks all of them a question from the last one, lets a rank of the last
// end, and then an agent in the middle of the tree. Prints the medians, and a line a round. --json
// adds a line a round to the file.
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/json_writer.h"
#include "base/random_bytes.h"
#include "control/agent.h"
#include "control/poller.h"

namespace {

using unjam::Agent;
using unjam::monotonic_ns;
using unjam::Poller;

struct Options {
  std::uint32_t agents = 4096, ranks = 1;
  int threads = 1, rounds = 3;
  std::string json;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "agents_bench: %s\n", what.c_str());
  std::exit(1);
}

Options options_of(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (i + 1 == argc) fail(name + ": see the head of bench/agents_bench.cc");
    const char* value = argv[++i];
    const int number = std::atoi(value);
    if (name == "--json") {
      o.json = value;
    } else if (number < 1) {
      fail(name + " needs a positive number");
    } else if (name == "--agents") {
      o.agents = static_cast<std::uint32_t>(number);
    } else if (name == "--ranks") {
      o.ranks = static_cast<std::uint32_t>(number);
    } else if (name == "--threads") {
      o.threads = number;
    } else if (name == "--rounds") {
      o.rounds = number;
    } else {
      fail("no option " + name + ": see the head of bench/agents_bench.cc");
    }
  }
  if (std::uint64_t{o.agents} * o.ranks > unjam::kMostAgentRanks || o.agents < 2) {
    fail("2 agents at least, and " + std::to_string(unjam::kMostAgentRanks) + " ranks at most");
  }
  return o;
}

// A door an agent, both ends of a connection to its parent, and, while they meet, of one to the
// root; and what the process has anyhow.
void allow_descriptors(const Options& o) {
  const rlim_t needed = rlim_t{o.agents} * 4 + 1024;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < needed) {
    fail(std::to_string(o.agents) + " agents need " + std::to_string(needed) +
         " descriptors, and the hard limit is " + std::to_string(limit.rlim_max) +
         ": raise it (ulimit -Hn as root, or LimitNOFILE of the service), or give --agents " +
         std::to_string((limit.rlim_max - std::min<rlim_t>(limit.rlim_max, 1024)) / 4));
  }
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) fail(std::string("RLIMIT_NOFILE: ") + strerror(errno));
}

struct Figures {
  double start_s = 0, question_ms = 0, rank_death_ms = 0, host_death_ms = 0;
  std::uint64_t frames = 0, bytes = 0, most_connections = 0;
  std::uint64_t death_frames = 0;
};

// What all threads count.
struct Counters {
  std::atomic<std::uint32_t> started{0}, failed{0}, answers{0}, knew_rank{0}, knew_host{0};
  std::atomic<bool> settled{false};
};

void wait_for(const char* what, int seconds, const Counters& counters, const auto& reached) {
  const std::uint64_t deadline = monotonic_ns() + std::uint64_t(seconds) * 1'000'000'000;
  while (!reached()) {
    if (counters.failed.load() != 0) std::exit(1);
    if (monotonic_ns() > deadline) fail(std::string("not within a minute: ") + what);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Figures run_round(const Options& o) {
  unjam::SocketAddress local;
  std::string error;
  if (!unjam::resolve_address("127.0.0.1:0", local, error)) fail(error);
  const std::uint32_t last = o.agents - 1;
  std::vector<std::unique_ptr<Poller>> pollers;
  std::vector<std::unique_ptr<Agent>> agents(o.agents);
  Counters counters;
  for (int t = 0; t < o.threads; ++t) pollers.push_back(std::make_unique<Poller>());
  const auto poller_of = [&](std::uint32_t i) -> Poller& {
    return *pollers[i % static_cast<std::uint32_t>(o.threads)];
  };
  unjam::AgentConfig config;
  unjam::fill_random(config.secret.data(), config.secret.size());
  config.root_address = config.door = local;
  config.job_ranks = o.agents * o.ranks;
  config.settings = "UNJAM_LANES=2, UNJAM_GUARANTEED_SLOTS=5";
  std::atomic<std::uint32_t> asker{unjam::kNoAgent};
  const auto make = [&](std::uint32_t i) {
    config.root = i == 0;
    config.host = "host-" + std::to_string(i);
    config.ranks.clear();
    for (std::uint32_t r = 0; r < o.ranks; ++r) config.ranks.push_back({i * o.ranks + r, i});
    unjam::AgentEvents events;
    events.started = [&counters] { counters.started.fetch_add(1); };
    events.failed = [&counters](const std::string& why) {
      if (counters.failed.fetch_add(1) == 0) std::fprintf(stderr, "failed: %s\n", why.c_str());
    };
    events.cut_off = events.failed;
    events.gone = [&counters](const unjam::AgentNews& news) {
      (news.agent == unjam::kNoAgent ? counters.knew_rank : counters.knew_host).fetch_add(1);
    };
    events.asked = [&agents, i](std::uint32_t from, std::uint64_t number, const std::string&) {
      agents[i]->answer(from, number, "yes");
    };
    events.answer = [&counters](std::uint64_t, std::uint32_t, const std::string&) {
      counters.answers.fetch_add(1);
    };
    events.settled = [&counters](std::uint64_t, const unjam::NumberList&) {
      counters.settled.store(true);
    };
    agents[i] = std::make_unique<Agent>(poller_of(i), config, events);
    if (!agents[i]->start(error)) fail(error);
  };

  Figures figures;
  const std::uint64_t begin = monotonic_ns();
  make(0);
  config.root_address = agents[0]->door();
  for (std::uint32_t i = 1; i < o.agents; ++i) make(i);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (auto& p : pollers) {
    threads.emplace_back([&stop, poller = p.get()] {
      while (!stop.load()) poller->run_once(100);
    });
  }
  const auto ms_since = [](std::uint64_t t) {
    return static_cast<double>(monotonic_ns() - t) / 1e6;
  };
  wait_for("the start", 60, counters, [&] { return counters.started.load() == o.agents; });
  figures.start_s = ms_since(begin) / 1e3;

  // In the agent's own thread, and waited for.
  const auto in_thread_of = [&](std::uint32_t i, const auto& what) {
    std::atomic<bool> done{false};
    poller_of(i).post([&] {
      what(*agents[i]);
      done.store(true);
    });
    while (!done.load()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  };
  const auto sum = [&](const auto& what) {
    std::uint64_t total = 0;
    for (std::uint32_t t = 0; t < static_cast<std::uint32_t>(o.threads) && t < o.agents; ++t) {
      in_thread_of(t, [&](Agent&) {
        for (std::uint32_t i = t; i < o.agents; i += static_cast<std::uint32_t>(o.threads)) {
          if (agents[i] != nullptr) total += what(*agents[i]);
        }
      });
    }
    return total;
  };
  figures.frames = sum([](Agent& a) { return a.counts().frames; });
  figures.bytes = sum([](Agent& a) { return a.counts().bytes; });
  sum([&](Agent& a) {
    figures.most_connections =
        std::max<std::uint64_t>(figures.most_connections, a.counts().connections);
    return 0;
  });

  unjam::NumberList all;
  for (std::uint32_t i = 0; i < o.agents; ++i) all.push_back(i);
  std::uint64_t at = monotonic_ns();
  in_thread_of(last, [&](Agent& a) {
    if (a.ask(all, "are you there?", 60'000) == 0) fail("the question was refused");
  });
  wait_for("all answers", 60, counters, [&] { return counters.settled.load(); });
  figures.question_ms = ms_since(at);
  if (counters.answers.load() != o.agents) fail("an agent has not answered");

  at = monotonic_ns();
  in_thread_of(last, [&](Agent& a) {
    a.report_gone({config.ranks.front().rank}, "a rank of the last host was killed");
  });
  wait_for("a rank's death known to all", 60, counters,
           [&] { return counters.knew_rank.load() == o.agents; });
  figures.rank_death_ms = ms_since(at);

  // Agent 1 of the tree, which has most below it but the root.
  std::atomic<std::uint32_t> victim{o.agents};
  sum([&](Agent& a) {
    if (a.number() != 1) return 0;
    for (std::uint32_t i = 0; i < o.agents; ++i) {
      if (agents[i].get() == &a) victim.store(i);
    }
    return 0;
  });
  const std::uint64_t before = sum([](Agent& a) { return a.counts().frames; });
  at = monotonic_ns();
  in_thread_of(victim.load(), [&](Agent&) { agents[victim.load()].reset(); });
  wait_for("a host's death known to all", 60, counters,
           [&] { return counters.knew_host.load() >= o.agents - 1; });
  figures.host_death_ms = ms_since(at);
  figures.death_frames = sum([](Agent& a) { return a.counts().frames; }) - before;
  if (counters.knew_host.load() != o.agents - 1) fail("somebody else was declared gone");
  stop.store(true);
  for (auto& t : threads) t.join();
  agents.clear();
  return figures;
}

double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

void print(const char* what, const Options& o, const Figures& f) {
  std::printf("%-7s %6u %6u %8.2f %12.1f %14.1f %14.1f %10llu %10.1f %6llu %9.0f\n", what, o.agents,
              o.agents * o.ranks, f.start_s, f.question_ms, f.rank_death_ms, f.host_death_ms,
              static_cast<unsigned long long>(f.frames), static_cast<double>(f.bytes) / 1048576,
              static_cast<unsigned long long>(f.most_connections), peak_mib());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = options_of(argc, argv);
  allow_descriptors(o);
  std::printf("%-7s %6s %6s %8s %12s %14s %14s %10s %10s %6s %9s\n", "", "agents", "ranks",
              "start s", "question ms", "rank death ms", "host death ms", "messages", "MiB sent",
              "links", "peak MiB");
  std::vector<Figures> all;
  for (int round = 0; round < o.rounds; ++round) {
    const Figures f = run_round(o);
    all.push_back(f);
    print(std::to_string(round + 1).c_str(), o, f);
    if (o.json.empty()) continue;
    double load[3] = {};
    getloadavg(load, 3);
    unjam::JsonWriter w;
    w.begin_object().field("agents", o.agents).field("ranks", o.agents * o.ranks);
    w.field("threads", o.threads).field("start_s", f.start_s).field("question_ms", f.question_ms);
    w.field("rank_death_ms", f.rank_death_ms).field("host_death_ms", f.host_death_ms);
    w.field("frames_of_start", f.frames).field("bytes_of_start", f.bytes);
    w.field("frames_of_host_death", f.death_frames).field("most_links", f.most_connections);
    w.field("peak_mib", peak_mib()).field("load", load[0]).end_object();
    std::ofstream(o.json, std::ios::app) << w.text() << "\n";
  }
  const auto median = [&](double Figures::* of) {
    std::vector<double> values;
    for (const Figures& f : all) values.push_back(f.*of);
    std::nth_element(values.begin(),
                     values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  };
  Figures m = all.back();
  m.start_s = median(&Figures::start_s);
  m.question_ms = median(&Figures::question_ms);
  m.rank_death_ms = median(&Figures::rank_death_ms);
  m.host_death_ms = median(&Figures::host_death_ms);
  print("median", o, m);
}
