// Groups that span hosts, as UNJAM_HOST_ID says, in real jobs of several processes: that calls give
// the same as on one host, by which algorithms, and what goes wrong where hosts do not fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"
#include "tests/support/json.h"
#include "tests/support/processes.h"

namespace unjam_test {
namespace {

// Processes of a job, and as which host each counts; "": it says nothing.
struct Hosts {
  Layout processes;
  std::vector<std::string> ids;

  int ranks() const {
    int n = 0;
    for (const auto& p : processes) n += static_cast<int>(p.size());
    return n;
  }
  // The same ranks in one process, on one host.
  Hosts on_one() const { return {layout({ranks()}), {""}}; }
  std::string text() const {
    std::string t;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      t += (i == 0 ? "" : " ") + std::to_string(processes[i].size()) + "@" + ids[i];
    }
    return t;
  }
};

void claim_host(const std::string& id) {
  if (id.empty()) {
    unsetenv("UNJAM_HOST_ID");
  } else {
    setenv("UNJAM_HOST_ID", id.c_str(), 1);
  }
}

// Runs a function in each process, and hands back what each says; empty after a failure, which is
// reported.
std::vector<std::string> run_on(const Hosts& hosts, const unjamConfig_t& config,
                                const std::function<std::string(Job&)>& body) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(static_cast<int>(hosts.ids.size()), "\n  [" + hosts.text() + "]", [&](Child& me) {
    const auto i = static_cast<std::size_t>(me.index());
    claim_host(hosts.ids[i]);
    Job job(id, hosts.ranks(), hosts.processes[i], config, base_seed());
    me.say(body(job));
  });
  if (!all.finish()) return {};
  std::vector<std::string> said;
  for (int i = 0; i < all.count(); ++i) said.push_back(all.said(i).empty() ? "" : all.said(i)[0]);
  return said;
}

// ---- calls ----

struct Called {
  Spec spec;
  const char* algorithm;  // nullptr: as the configuration says
};

// All calls at once, each rank's in an order of its own, twice. By rank and call, digests.
std::map<int, std::vector<std::uint64_t>> digests_on(const Hosts& hosts,
                                                     const unjamConfig_t& config,
                                                     const std::vector<Called>& calls) {
  const std::vector<std::string> said = run_on(hosts, config, [&](Job& job) {
    std::vector<bool> present;
    for (int r = 0; r < job.ranks(); ++r) present.push_back(job.is_local(r));
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (const Called& c : calls) {
      exchanges.push_back(std::make_unique<Exchange>(c.spec, job.ranks(), present));
    }
    Packer result;
    for (int round = 0; round < 2; ++round) {
      if (round != 0) {
        for (const auto& e : exchanges) e->fill();
      }
      const bool ok = job.run([&](Rank& me) {
        std::vector<std::size_t> order(calls.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::mt19937_64 random(mix(mix(job.seed(), static_cast<std::uint64_t>(me.rank)),
                                   static_cast<std::uint64_t>(round)));
        std::shuffle(order.begin(), order.end(), random);
        std::vector<unjamRequest_t> requests(calls.size());
        for (const std::size_t i : order) {
          unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
          options.algorithm = calls[i].algorithm;
          check(exchanges[i]->submit(me.rank, me.all, ("k" + std::to_string(i)).c_str(), &options,
                                     &requests[i]),
                calls[i].spec.text().c_str());
        }
        for (const std::size_t i : order) me.wait(requests[i], calls[i].spec.text());
      });
      if (!ok) fail("a rank failed");
      for (std::size_t i = 0; i < calls.size(); ++i) {
        const std::string error = exchanges[i]->check();
        if (!error.empty()) fail(error);
      }
      for (const int r : job.local()) {
        for (const auto& e : exchanges) result.put(e->receives(r) ? e->digest(r) : 0);
      }
    }
    return result.text();
  });
  std::map<int, std::vector<std::uint64_t>> digests;
  for (std::size_t p = 0; p < said.size(); ++p) {
    Unpacker text(said[p]);
    for (int round = 0; round < 2; ++round) {
      for (const int r : hosts.processes[p]) {
        std::vector<std::uint64_t> its;
        for (std::size_t i = 0; i < calls.size(); ++i) its.push_back(text.get<std::uint64_t>());
        if (round == 0) {
          digests[r] = its;
        } else {
          EXPECT_EQ(digests[r], its) << "rank " << r << ": a second run gives other bits";
        }
      }
    }
  }
  return digests;
}

// Of one kind by an algorithm: all types, operators, counts, in place and not.
void add_calls(std::vector<Called>* calls, unjamKind_t kind, const char* algorithm, int ranks,
               Data data) {
  constexpr std::size_t kCounts[] = {1, 7, 33, 1000, 4097};
  const bool halves = (ranks & (ranks - 1)) == 0;  // averages are exact
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < (reduces(kind) ? kNumOps : 1); ++o) {
      const std::size_t c = calls->size();
      Spec s;
      s.kind = kind;
      s.dtype = static_cast<unjamDataType_t>(t);
      s.op = static_cast<unjamOp_t>(o);
      if (s.op == UNJAM_AVG && !halves && data == Data::kExact) continue;
      // Of 0 and -0 either is the least; short formats have many of them.
      const TypeInfo& type = type_info(s.dtype);
      const bool short_float = type.family == 'f' && type.bytes <= 2;
      if (reduces(kind) && short_float && (s.op == UNJAM_MIN || s.op == UNJAM_MAX)) continue;
      s.count = kCounts[(c + static_cast<std::size_t>(t)) % std::size(kCounts)];
      s.in_place = c % 2 == 0;
      s.data = data;
      s.seed = mix(base_seed(), c);
      calls->push_back({s, algorithm});
    }
  }
}

std::vector<Called> calls_of_levels(int ranks, Data data) {
  std::vector<Called> calls;
  for (const char* algorithm : {"hierarchical", "pat"}) {
    add_calls(&calls, UNJAM_ALL_REDUCE, algorithm, ranks, data);
    Spec barrier;
    barrier.kind = UNJAM_BARRIER;
    calls.push_back({barrier, algorithm});
  }
  add_calls(&calls, UNJAM_ALL_GATHER, "pat", ranks, data);
  add_calls(&calls, UNJAM_REDUCE_SCATTER, "pat", ranks, data);
  // Beside others.
  add_calls(&calls, UNJAM_ALL_REDUCE, "ring", ranks, data);
  add_calls(&calls, UNJAM_ALL_GATHER, nullptr, ranks, data);
  return calls;
}

std::vector<Hosts> layouts() {
  return {
      {layout({2, 2}), {"a", "b"}},
      {layout({2, 2, 2}), {"a", "b", "c"}},
      // A host's ranks in processes of their own, and not one after the other.
      {layout({1, 1, 1, 1, 1, 1, 1, 1}), {"x", "y", "x", "y", "z", "z", "w.1", "w.1"}},
      {layout({1, 1, 1, 1, 1}), {"a", "b", "c", "d", "e"}},
      {layout({3, 3, 1, 2}), {"h0", "h1", "h2", "h2"}},
  };
}

TEST(Levels, SameAsOnOneHost) {
  for (const Hosts& hosts : layouts()) {
    for (const std::uint32_t lanes : {1u, 3u}) {
      if (kSanitized && (lanes != 1 || hosts.ranks() > 6)) continue;
      unjamConfig_t config = default_config();
      config.lanes = lanes;
      config.guaranteed_slot_bytes = 512;  // so that there are loops
      config.guaranteed_slots = lanes == 3 ? 2 : 0;
      const std::vector<Called> calls = calls_of_levels(hosts.ranks(), Data::kExact);
      const auto there = digests_on(hosts, config, calls);
      const auto here = digests_on(hosts.on_one(), config, calls);
      ASSERT_EQ(there.size(), static_cast<std::size_t>(hosts.ranks())) << hosts.text();
      for (const auto& [rank, digests] : there) {
        for (std::size_t i = 0; i < calls.size(); ++i) {
          ASSERT_EQ(digests[i], here.at(rank)[i])
              << hosts.text() << ", rank " << rank << ": " << calls[i].spec.text() << " by "
              << (calls[i].algorithm == nullptr ? "auto" : calls[i].algorithm);
        }
      }
      if (HasFailure()) return;
    }
  }
}

// Sums that round: all ranks have the same bits.
TEST(Levels, AllRanksHaveTheSameBits) {
  for (const Hosts& hosts : layouts()) {
    if (kSanitized && hosts.ranks() > 6) continue;
    std::vector<Called> calls;
    for (const char* algorithm : {"hierarchical", "pat"}) {
      add_calls(&calls, UNJAM_ALL_REDUCE, algorithm, hosts.ranks(), Data::kRandom);
    }
    const auto digests = digests_on(hosts, default_config(), calls);
    ASSERT_EQ(digests.size(), static_cast<std::size_t>(hosts.ranks())) << hosts.text();
    for (const auto& [rank, its] : digests) {
      EXPECT_EQ(its, digests.at(0)) << hosts.text() << ", rank " << rank;
    }
  }
}

// ---- who chooses ----

std::string algorithm_of(unjamContext_t context, const std::string& key) {
  const Json all = JsonReader::parse(info(context));
  for (const Json& k : all["keys"].array) {
    if (k["key"].string == key) return k["algorithm"].string;
  }
  return "no such key";
}

// An all-reduce in a group of these ranks: by which algorithm, or the error.
std::string tried(const Hosts& hosts, const unjamConfig_t& config, const std::vector<int>& members,
                  const char* algorithm) {
  const std::vector<std::string> said = run_on(hosts, config, [&](Job& job) {
    std::string text;
    std::mutex mutex;
    job.run([&](Rank& me) {
      if (std::find(members.begin(), members.end(), me.rank) == members.end()) return;
      unjamGroup_t group = nullptr;
      UNJAM_CHECK(unjamGroupCreate(me.context, members.data(), static_cast<int>(members.size()),
                                   "some", &group));
      unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
      options.algorithm = algorithm;
      float x = 1;
      unjamRequest_t request = nullptr;
      std::string outcome;
      if (unjamAllReduce(group, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, &options, &request) !=
          UNJAM_SUCCESS) {
        outcome = unjamGetLastError();
      } else {
        me.wait(request, "all-reduce");
        outcome = algorithm_of(me.context, "k");
        if (x != static_cast<float>(members.size())) fail("a wrong sum");
      }
      std::lock_guard lock(mutex);
      if (!text.empty() && text != outcome) fail("ranks differ: " + text + ", " + outcome);
      text = outcome;
    });
    return text;
  });
  std::string text;
  for (const std::string& t : said) {
    if (t.empty()) continue;
    EXPECT_TRUE(text.empty() || t == text) << "processes differ: " << text << ", " << t;
    text = t;
  }
  return text;
}

TEST(Levels, GroupsHaveTablesOfTheirOwn) {
  const Hosts hosts{layout({2, 2, 2}), {"a", "b", "c"}};
  unjamConfig_t forced = default_config();
  forced.algorithm = 7;  // hierarchical, among the names of UNJAM_ALGORITHM
  EXPECT_EQ(tried(hosts, forced, {0, 1, 2, 3, 4, 5}, nullptr), "hierarchical");
  EXPECT_EQ(tried(hosts, forced, {4, 2, 3, 5}, nullptr), "hierarchical");
  // Asked for in all calls, it serves where it can; asked for in one, it says why it cannot.
  EXPECT_EQ(tried(hosts, forced, {0, 1, 2}, nullptr), "one_shot");
  EXPECT_EQ(tried(hosts, default_config(), {0, 1, 2}, "pat"),
            "no plan for all_reduce(count=1, float32, sum, algorithm=pat): pat plans need as many "
            "ranks on each host: rank 0's host has 2 of them, rank 2's has 1: use ring");
  // Within one host there are no levels.
  EXPECT_EQ(tried(hosts, default_config(), {0, 1}, "pat"), "pat");
}

TEST(Levels, InfoSaysAsWhichHostsRanksCount) {
  const auto hosts_in_info = [](const Hosts& hosts) {
    return run_on(hosts, default_config(), [](Job& job) {
      std::string ids;
      const Json all = JsonReader::parse(info(job.context(job.local().front())));
      if (!all.has("hosts")) return std::string("none");
      for (const Json& id : all["hosts"].array) ids += id.string + " ";
      return ids;
    });
  };
  EXPECT_EQ(hosts_in_info({layout({2, 1, 1}), {"a", "b.1", "a"}}),
            (std::vector<std::string>(3, "a a b.1 a ")));
  EXPECT_EQ(hosts_in_info({layout({1, 1}), {"", ""}}), (std::vector<std::string>(2, "none")));
}

// ---- what goes wrong ----

// Nobody has the result without the contribution of all, so the call ends on all, also on hosts
// that have nothing to do with the rank that is gone.
TEST(Levels, ARankThatAbortsEndsTheCallOnAllHosts) {
  const Hosts hosts{layout({2, 2, 2, 2}), {"a", "b", "c", "d"}};
  for (const char* algorithm : {"hierarchical", "pat"}) {
    for (const int gone : {0, 3}) {
      const auto said = run_on(hosts, default_config(), [&](Job& job) {
        job.run([&](Rank& me) {
          if (me.rank == gone) {
            sleep_ms(50);
            UNJAM_CHECK(unjamAbort(me.context));
            return;
          }
          std::vector<float> x(100'000, 1.0f);
          unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
          options.algorithm = algorithm;
          unjamRequest_t request = nullptr;
          const unjamResult_t code = unjamAllReduce(me.all, "k", x.data(), x.data(), x.size(),
                                                    UNJAM_FLOAT32, UNJAM_SUM, &options, &request);
          if (code == UNJAM_ERROR_PEER) return;  // it has heard of it already
          UNJAM_CHECK(code);
          wait_error(me.context, request, UNJAM_ERROR_PEER, "an all-reduce without a rank");
        });
        return std::string("over");
      });
      EXPECT_EQ(said, std::vector<std::string>(4, "over")) << algorithm << ", rank " << gone;
    }
  }
}

// What unjamInit says in each process, of one rank each.
std::vector<std::string> joined(const std::vector<std::string>& ids) {
  const Layout one_each = layout(std::vector<int>(ids.size(), 1));
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(static_cast<int>(ids.size()), "", [&](Child& me) {
    claim_host(ids[static_cast<std::size_t>(me.index())]);
    setenv("UNJAM_INIT_TIMEOUT_MS", kSanitized ? "20000" : "3000", 1);
    unjamContext_t context = nullptr;
    const unjamResult_t code =
        unjamInit(&context, static_cast<int>(ids.size()), id, me.index(), nullptr);
    me.say(code == UNJAM_SUCCESS ? "joined" : code_text(code) + ": " + unjamGetLastError());
    if (context != nullptr) unjamDestroy(context);
  });
  EXPECT_TRUE(all.finish());
  std::vector<std::string> said;
  for (int i = 0; i < all.count(); ++i) said.push_back(all.said(i).empty() ? "" : all.said(i)[0]);
  return said;
}

TEST(Levels, AllRanksSayItOrNone) {
  for (const auto& ids : {std::vector<std::string>{"a", ""}, {"", "a"}, {"a", "", "b"}}) {
    // Whoever comes after two that differ meets nobody.
    int told = 0;
    for (const std::string& text : joined(ids)) {
      const bool is_told = text.find("has UNJAM_HOST_ID=") != text.npos &&
                           text.find("has none: set it on all ranks, or on none") != text.npos;
      EXPECT_TRUE(is_told || text.find("did not join") != text.npos) << text;
      told += is_told ? 1 : 0;
    }
    EXPECT_GE(told, 2);
  }
  EXPECT_EQ(joined({"a", "a", "b"}), (std::vector<std::string>{"joined", "joined", "joined"}));
}

TEST(Levels, AMalformedHostIsNamed) {
  for (const std::string& bad : {std::string("a b"), std::string("a,b"), std::string(65, 'x')}) {
    const std::vector<std::string> said = joined({"a", bad});
    EXPECT_NE(said[1].find("UNJAM_HOST_ID=" + bad + " is not valid: give 1 to 64 letters"),
              said[1].npos)
        << said[1];
    // If it came, and went, in front of all others, they do not meet it.
    EXPECT_TRUE(said[0].find("rank 1: UNJAM_HOST_ID=" + bad) != said[0].npos ||
                said[0].find("rank 1 did not join") != said[0].npos)
        << said[0];
  }
  EXPECT_EQ(joined({std::string(64, 'x'), "a-b_c.d:0"}),
            (std::vector<std::string>{"joined", "joined"}));
}

}  // namespace
}  // namespace unjam_test
