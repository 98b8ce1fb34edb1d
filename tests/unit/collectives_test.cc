// Every collective, type, operator, count, root and way to place the buffers, against the reference
// in tests/support/exchange.h. All calls of a batch are under way at once, each rank in its own
// order, and every batch runs twice: the bits must be the same.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/batch.h"
#include "tests/support/exchange.h"
#include "tests/support/job.h"

namespace unjam_test {
namespace {

const std::vector<unjamKind_t> kKinds = {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER,
                                         UNJAM_REDUCE,     UNJAM_BROADCAST,  UNJAM_ALL_TO_ALL,
                                         UNJAM_GATHER,     UNJAM_SCATTER,    UNJAM_BARRIER};

// Odd counts, counts around the sizes of vectors and slots, and some larger than a slot; the last
// ones are larger than all guaranteed slots of a connector for all but the one-byte types.
const std::vector<std::size_t> kLadder = {0, 1, 2, 3, 7, 16, 33, 255, 1000, 4097, 20011};

struct Sweep {
  std::vector<unjamKind_t> kinds = kKinds;
  std::vector<std::size_t> counts = kLadder;
  bool all_roots = true;                 // for every count, not only small ones
  bool both_places = true;               // in and out of place, else in turn
  bool both_data = true;                 // exact and random data, else in turn
  std::size_t all_ops_up_to = SIZE_MAX;  // above this count one operator for each type, in turn
  bool twice = true;
  std::size_t types_apart = 1;  // 3: every third type with each operator, all of them by turns
};

// Runs the sweep over all kinds, types and operators; returns the number of calls.
std::size_t run_sweep(Job& job, const Sweep& sweep, std::uint64_t seed) {
  Batches batches(job, seed, sweep.twice);
  const int n = job.ranks();
  std::uint64_t turn = 0;
  for (const unjamKind_t kind : sweep.kinds) {
    for (int t = 0; t < (kind == UNJAM_BARRIER ? 1 : kNumDTypes); ++t) {
      for (int o = 0; o < (reduces(kind) ? kNumOps : 1); ++o) {
        if (kind != UNJAM_BARRIER && static_cast<std::size_t>(t + o) % sweep.types_apart != 0) {
          continue;
        }
        for (std::size_t c = 0; c < sweep.counts.size(); ++c) {
          const std::size_t count = sweep.counts[c];
          if (reduces(kind) && count > sweep.all_ops_up_to &&
              o != static_cast<int>((c + static_cast<std::size_t>(t) + seed) % kNumOps)) {
            continue;
          }
          for (int root = 0; root < (has_root(kind) ? n : 1); ++root) {
            // All roots for two counts, one by turns for the others.
            if (has_root(kind) && !sweep.all_roots && count != 1 && count != 33 &&
                root != static_cast<int>((turn + c) % static_cast<std::uint64_t>(n))) {
              continue;
            }
            for (int place = 0; place < 2; ++place) {
              if (!sweep.both_places && place != static_cast<int>(turn % 2)) continue;
              for (int data = 0; data < 2; ++data) {
                const bool one_kind_of_data =
                    !reduces(kind) || type_info(static_cast<unjamDataType_t>(t)).family != 'f' ||
                    o == UNJAM_MIN || o == UNJAM_MAX;
                if (one_kind_of_data && data == 1) continue;
                if (!one_kind_of_data && !sweep.both_data &&
                    data != static_cast<int>((turn / 2) % 2)) {
                  continue;
                }
                Spec s;
                s.kind = kind;
                s.dtype = static_cast<unjamDataType_t>(t);
                s.op = static_cast<unjamOp_t>(o);
                s.count = count;
                s.root = root;
                s.in_place = place == 1;
                s.data = data == 0 ? Data::kExact : Data::kRandom;
                s.seed = mix(seed, batches.total());
                if (!batches.add(s)) return batches.total();
              }
              ++turn;
            }
          }
        }
      }
    }
  }
  batches.flush();
  return batches.total();
}

void report(const char* what, const Job& job, std::size_t calls) {
  std::printf("  %s: %d ranks, %zu calls a rank, all checked\n", what, job.ranks(), calls);
}

Sweep default_sweep() {
  Sweep s;
  s.all_roots = false;
  s.both_places = false;
  s.both_data = false;
  s.all_ops_up_to = 1000;
  if (kSanitized) {
    s.counts = {0, 7, 20011};
    s.all_ops_up_to = 0;
    s.twice = false;
  }
  // Which thread does what does not depend on the type: every rank count has all types by turns.
  if (kThreadSanitized) s.types_apart = 3;
  return s;
}

class EveryRankCount : public testing::TestWithParam<int> {};

TEST_P(EveryRankCount, AllKindsTypesOpsCounts) {
  Job job(GetParam());
  report("default settings", job, run_sweep(job, default_sweep(), job.seed()));
}

std::vector<int> rank_counts() {
  if (kSanitized) return {1, 2, 3, 5};
  return {1, 2, 3, 4, 5, 6, 7, 8, 9};
}

INSTANTIATE_TEST_SUITE_P(Collectives, EveryRankCount, testing::ValuesIn(rank_counts()));

class EveryRankCountSoak : public testing::TestWithParam<int> {};

TEST_P(EveryRankCountSoak, TheWholeCrossProduct) {
  Job job(GetParam());
  report("whole cross product", job, run_sweep(job, Sweep{}, mix(job.seed(), 1)));
}

INSTANTIATE_TEST_SUITE_P(CollectivesSoak, EveryRankCountSoak, testing::Range(1, 10));

// Larger than all slots of a connector together, guaranteed and borrowed, in every kind.
TEST(Collectives, LargerThanAllSlots) {
  for (const int ranks : {2, 3, 5}) {
    if (kSanitized && ranks != 3) continue;
    unjamConfig_t config = default_config();
    config.pool_slots = ranks == 3 ? UINT32_MAX : 4;
    Job job(ranks, config);
    Batches batches(job, job.seed());
    for (const unjamKind_t kind : kKinds) {
      for (const unjamDataType_t t :
           {UNJAM_UINT8, UNJAM_FLOAT16, UNJAM_FLOAT32, UNJAM_INT64, UNJAM_FLOAT8_E4M3}) {
        Spec s;
        s.kind = kind;
        s.dtype = t;
        s.count = (kSanitized ? 60003 : 300007) / (receives_blocks(kind) ? 2u : 1u);
        s.root = ranks - 1;
        s.in_place = t == UNJAM_FLOAT32;
        s.seed = mix(job.seed(), batches.total());
        if (!batches.add(s)) return;
      }
    }
    batches.flush();
  }
}

// ---- other settings, the same answers ----

// Among the names of UNJAM_ALGORITHM.
constexpr std::int32_t kDoubleBinaryTree = 6, kHierarchical = 7, kPat = 8;

struct Setting {
  const char* name;
  void (*apply)(unjamConfig_t&);
};

void PrintTo(const Setting& s, std::ostream* out) { *out << s.name; }

// The configuration has no field for it.
void set_overlap(const char* value) { setenv("UNJAM_OVERLAP", value, 1); }

const std::vector<Setting> kSettings = {
    {"Ring", [](unjamConfig_t& c) { c.algorithm = 0; }},
    {"Direct", [](unjamConfig_t& c) { c.algorithm = 1; }},
    {"Mesh", [](unjamConfig_t& c) { c.algorithm = 2; }},
    {"MeshOverlapping", [](unjamConfig_t& c) { c.algorithm = 2, set_overlap("1"); }},
    {"MeshTogether", [](unjamConfig_t& c) { c.algorithm = 2, set_overlap("2"); }},
    {"Pairwise", [](unjamConfig_t& c) { c.algorithm = 3; }},
    {"TwoShot", [](unjamConfig_t& c) { c.algorithm = 4; }},
    {"Chain", [](unjamConfig_t& c) { c.algorithm = 5; }},
    {"DoubleBinaryTree", [](unjamConfig_t& c) { c.algorithm = kDoubleBinaryTree; }},
    // (On one host. levels_run_test has several.)
    {"Hierarchical", [](unjamConfig_t& c) { c.algorithm = kHierarchical; }},
    {"Pat", [](unjamConfig_t& c) { c.algorithm = kPat; }},
    {"ThreeLanesPat", [](unjamConfig_t& c) { c.lanes = 3, c.algorithm = kPat; }},
    {"ThreeLanes", [](unjamConfig_t& c) { c.lanes = 3; }},
    {"ThreeLanesDirect", [](unjamConfig_t& c) { c.lanes = 3, c.algorithm = 1; }},
    {"ThreeLanesMesh", [](unjamConfig_t& c) { c.lanes = 3, c.algorithm = 2; }},
    {"ThreeLanesRing", [](unjamConfig_t& c) { c.lanes = 3, c.algorithm = 0; }},
    {"FourThreads", [](unjamConfig_t& c) { c.block_threads = 4; }},
    {"FixedPolicy", [](unjamConfig_t& c) { c.policy = UNJAM_POLICY_FIXED; }},
    {"AdaptivePolicy", [](unjamConfig_t& c) { c.policy = UNJAM_POLICY_ADAPTIVE; }},
    {"PriorityOrder", [](unjamConfig_t& c) { c.order = UNJAM_ORDER_PRIORITY; }},
    {"TinySlots",
     [](unjamConfig_t& c) {
       c.guaranteed_slots = 2, c.guaranteed_slot_bytes = 256, c.pool_slots = UINT32_MAX;
     }},
    {"ManyLanesThreadsDelays",
     [](unjamConfig_t& c) {
       c.lanes = 2, c.block_threads = 2, c.delay_seed = 77, c.delay_max_us = 20;
       c.quantum_slices = 1, c.residency_us = 50;
     }},
};

class EverySetting : public testing::TestWithParam<Setting> {
 protected:
  ~EverySetting() override { unsetenv("UNJAM_OVERLAP"); }
};

TEST_P(EverySetting, AllKindsTypesOps) {
  for (const int ranks : {2, 5}) {
    if (kSanitized && ranks == 2) continue;
    unjamConfig_t config = default_config();
    GetParam().apply(config);
    // A block's threads meet at a barrier for each slice, which costs much on few cores.
    const bool slow = config.block_threads > 1 || kSanitized;
    Job job(ranks, config);
    Sweep sweep = default_sweep();
    sweep.counts = {0, 1, 7, 33, 1000, 20011};
    if (slow) sweep.counts = {1, 33, 4097};
    // What a setting changes does not depend on the type, and EveryRankCount has all types.
    if (kSanitized) sweep.counts = {7, 4097}, sweep.types_apart = kThreadSanitized ? 6 : 3;
    sweep.all_ops_up_to = 0;
    sweep.twice = !slow && config.guaranteed_slot_bytes == 0;
    report(GetParam().name, job, run_sweep(job, sweep, mix(job.seed(), 2)));
    if (job.failed() || HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Collectives, EverySetting, testing::ValuesIn(kSettings),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- trees: one, or one a lane ----

class DoubleBinaryTrees : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(DoubleBinaryTrees, AllTypesOpsCounts) {
  const auto [ranks, lanes] = GetParam();
  if (kSanitized && ranks > 5) GTEST_SKIP() << "too many threads for a sanitizer";
  unjamConfig_t config = default_config();
  config.algorithm = kDoubleBinaryTree;
  config.lanes = static_cast<std::uint32_t>(lanes);
  config.guaranteed_slot_bytes = 1024;  // so that there are loops
  Job job(ranks, config);
  Sweep sweep = default_sweep();
  sweep.kinds = {UNJAM_ALL_REDUCE, UNJAM_REDUCE, UNJAM_BROADCAST, UNJAM_BARRIER};
  sweep.counts = {0, 1, 33, 1000, 4097, 20011};
  if (kSanitized) sweep.counts = {7, 4097}, sweep.types_apart = 3;
  sweep.all_ops_up_to = 33;
  sweep.twice = ranks <= 5 && !kSanitized;
  report("trees", job, run_sweep(job, sweep, mix(job.seed(), 4)));
  if (job.failed() || HasFailure()) return;
  // Every rank is the root.
  Batches batches(job, job.seed());
  for (const unjamKind_t kind : {UNJAM_REDUCE, UNJAM_BROADCAST}) {
    for (int root = 0; root < ranks; ++root) {
      Spec s;
      s.kind = kind;
      s.dtype = root % 2 == 0 ? UNJAM_FLOAT32 : UNJAM_INT64;
      s.op = UNJAM_AVG;
      s.count = 3001;
      s.root = root;
      s.in_place = root % 3 == 0;
      s.seed = mix(job.seed(), static_cast<std::uint64_t>(root));
      if (!batches.add(s)) return;
    }
  }
  batches.flush();
}

// (Of two lanes one is for what is short.)
INSTANTIATE_TEST_SUITE_P(Collectives, DoubleBinaryTrees,
                         testing::Combine(testing::Values(2, 3, 5, 8, 13),
                                          testing::Values(1, 3, 6)));

// ---- large groups ----

class ManyRanks : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ManyRanks, AFewOfEach) {
  const auto [ranks, algorithm] = GetParam();
  if (kSanitized && ranks > 33) GTEST_SKIP() << "too many threads for a sanitizer";
  unjamConfig_t config = default_config();
  config.algorithm = algorithm;
  Job job(ranks, config);
  Batches batches(job, job.seed(), !kSanitized);
  std::uint64_t turn = 0;
  for (const unjamKind_t kind : kKinds) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{63},
                                    std::size_t{65}, std::size_t{1000}, std::size_t{9001}}) {
      if (count > 1000 && (receives_blocks(kind) || sends_blocks(kind))) continue;
      static constexpr unjamDataType_t kTypes[] = {UNJAM_FLOAT32, UNJAM_BFLOAT16, UNJAM_INT8,
                                                   UNJAM_UINT64, UNJAM_FLOAT8_E5M2};
      Spec s;
      s.kind = kind;
      s.dtype = kTypes[turn % 5];
      s.op = static_cast<unjamOp_t>((turn / 2) % kNumOps);
      s.count = count;
      s.root = static_cast<int>(turn * 7 % static_cast<std::uint64_t>(ranks));
      s.in_place = turn % 3 == 0;
      s.data = turn % 2 == 0 ? Data::kExact : Data::kRandom;
      s.seed = mix(job.seed(), turn++);
      if (!batches.add(s)) return;
    }
  }
  batches.flush();
}

INSTANTIATE_TEST_SUITE_P(Collectives, ManyRanks,
                         testing::Combine(testing::Values(16, 33, 64), testing::Values(-1, 0)));

// Sums of 16 bits are rounded at each hop: along a ring n - 1 times, in a tree log n times. The
// figure is an error's mean over what the sums should be. (None can be less than what rounding the
// right sum costs.)
TEST(Collectives, SixteenBitSumsOfManyAreCloserThanARings) {
  if (kSanitized) GTEST_SKIP() << "too many threads for a sanitizer";
  constexpr int kRanks = 64;
  constexpr double kTimesCloser = 2, kTimesBest = 2;
  const auto bits_of = [](double x) {  // the nearest; ties to even
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x));
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  };
  const auto value_of = [](std::uint16_t x) {
    return double{std::bit_cast<float>(std::uint32_t{x} << 16)};
  };
  Job job(kRanks);
  for (const std::size_t count : {std::size_t{512}, std::size_t{4096}, std::size_t{32768}}) {
    std::vector<std::vector<std::uint16_t>> inputs(kRanks, std::vector<std::uint16_t>(count));
    std::vector<double> sums(count);
    std::mt19937_64 random(mix(job.seed(), count));
    std::normal_distribution<double> normal(1, 1);
    for (auto& input : inputs) {
      for (std::size_t i = 0; i < count; ++i)
        sums[i] += value_of(input[i] = bits_of(normal(random)));
    }
    const auto error_of = [&](const char* algorithm) {
      std::vector<std::vector<std::uint16_t>> outputs(kRanks, std::vector<std::uint16_t>(count));
      job.run([&](Rank& me) {
        const auto r = static_cast<std::size_t>(me.rank);
        unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
        options.algorithm = algorithm;
        unjamRequest_t request = nullptr;
        UNJAM_CHECK(unjamAllReduce(me.all, algorithm, inputs[r].data(), outputs[r].data(), count,
                                   UNJAM_BFLOAT16, UNJAM_SUM, &options, &request));
        me.wait(request, algorithm);
      });
      double error = 0;
      for (std::size_t i = 0; i < count; ++i) error += std::abs(value_of(outputs[0][i]) - sums[i]);
      for (const auto& output : outputs) EXPECT_EQ(output, outputs[0]) << algorithm;
      return error;
    };
    const double ring = error_of("ring"), chosen = error_of("auto");
    double best = 0;
    for (const double sum : sums) best += std::abs(value_of(bits_of(sum)) - sum);
    EXPECT_LT(chosen, kTimesBest * best) << count << " elements" << job.where();
    RecordProperty("times_closer_" + std::to_string(2 * count) + "_bytes",
                   std::to_string(ring / chosen));
    EXPECT_LT(kTimesCloser * chosen, ring) << count << " elements" << job.where();
  }
}

// ---- groups ----

// Groups whose order is not the job's, of every size and with the ranks reversed.
TEST(Collectives, SubgroupsInAnyOrder) {
  constexpr int kRanks = 6;
  Job job(kRanks);
  std::vector<std::vector<int>> members;
  for (int size = 1; size <= kRanks; ++size) {
    for (int first = 0; first < kRanks; ++first) {
      std::vector<int> m;
      for (int i = 0; i < size; ++i) m.push_back((first + 5 * i) % kRanks);
      members.push_back(m);
    }
  }
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (std::size_t g = 0; g < members.size(); ++g) {
    for (const unjamKind_t kind : kKinds) {
      Spec s;
      s.kind = kind;
      s.dtype = static_cast<unjamDataType_t>((g + kind) % kNumDTypes);
      s.op = static_cast<unjamOp_t>((g + 2 * kind) % kNumOps);
      s.count = 97 * g + static_cast<std::size_t>(kind);
      s.root = static_cast<int>(members[g].size()) - 1;
      s.seed = mix(job.seed(), g * kNumKinds + kind);
      exchanges.push_back(std::make_unique<Exchange>(s, static_cast<int>(members[g].size())));
    }
  }
  const bool ok = job.run([&](Rank& me) {
    std::vector<std::tuple<std::size_t, int, unjamGroup_t>> mine;
    for (std::size_t g = 0; g < members.size(); ++g) {
      const auto place = std::find(members[g].begin(), members[g].end(), me.rank);
      if (place == members[g].end()) continue;
      unjamGroup_t group = nullptr;
      UNJAM_CHECK(unjamGroupCreate(me.context, members[g].data(),
                                   static_cast<int>(members[g].size()), "sub", &group));
      int rank = -1, size = -1;
      UNJAM_CHECK(unjamGroupRank(group, &rank));
      UNJAM_CHECK(unjamGroupSize(group, &size));
      if (rank != place - members[g].begin() || size != static_cast<int>(members[g].size())) {
        fail("wrong group rank or size");
      }
      for (std::size_t k = 0; k < kKinds.size(); ++k) {
        mine.emplace_back(g * kKinds.size() + k, rank, group);
      }
    }
    std::mt19937_64 random(mix(job.seed(), static_cast<std::uint64_t>(me.rank)));
    std::shuffle(mine.begin(), mine.end(), random);
    std::vector<unjamRequest_t> requests;
    for (const auto& [e, rank, group] : mine) {
      const std::string key = "k" + std::to_string(e % kKinds.size());
      requests.emplace_back();
      UNJAM_CHECK(exchanges[e]->submit(rank, group, key.c_str(), nullptr, &requests.back()));
    }
    for (std::size_t i = 0; i < mine.size(); ++i) {
      me.wait(requests[i], exchanges[std::get<0>(mine[i])]->spec().text());
    }
  });
  if (!ok) return;
  for (const auto& e : exchanges) EXPECT_EQ(e->check(), "") << job.where();
}

// ---- numbers at the edges of their types ----

std::uint64_t reduce_two(unjamDataType_t t, unjamOp_t op, std::uint64_t a, std::uint64_t b) {
  Job job(2);
  std::uint64_t in[2] = {a, b}, out[2] = {0, 0};
  job.run([&](Rank& me) {
    unjamRequest_t request = nullptr;
    UNJAM_CHECK(
        unjamAllReduce(me.all, "edge", &in[me.rank], &out[me.rank], 1, t, op, nullptr, &request));
    me.wait(request, "edge");
  });
  EXPECT_EQ(out[0], out[1]) << type_info(t).name << " " << name_of(op);
  return out[0];
}

TEST(Numbers, OverflowOfNarrowFloats) {
  const auto sum = [](unjamDataType_t t, double a, double b) {
    return decode(t, reduce_two(t, UNJAM_SUM, encode(t, a), encode(t, b)));
  };
  EXPECT_EQ(sum(UNJAM_FLOAT8_E4M3, 448, 448), 448) << "fp8 saturates";
  EXPECT_EQ(sum(UNJAM_FLOAT8_E4M3, -448, -448), -448);
  EXPECT_EQ(sum(UNJAM_FLOAT8_E5M2, 57344, 57344), 57344);
  EXPECT_EQ(sum(UNJAM_FLOAT16, 65504, 65504), std::numeric_limits<double>::infinity());
  EXPECT_EQ(sum(UNJAM_FLOAT16, -65504, -65504), -std::numeric_limits<double>::infinity());
}

TEST(Numbers, MinAndMaxPropagateNaN) {
  for (const unjamDataType_t t : {UNJAM_FLOAT16, UNJAM_BFLOAT16, UNJAM_FLOAT32, UNJAM_FLOAT64,
                                  UNJAM_FLOAT8_E4M3, UNJAM_FLOAT8_E5M2}) {
    const TypeInfo& f = type_info(t);
    const std::uint64_t nan = low_bits(f.mantissa + f.exponent);
    const std::uint64_t one = encode(t, 1);
    for (const unjamOp_t op : {UNJAM_MIN, UNJAM_MAX}) {
      EXPECT_TRUE(std::isnan(decode(t, reduce_two(t, op, nan, one)))) << f.name;
      EXPECT_TRUE(std::isnan(decode(t, reduce_two(t, op, one, nan)))) << f.name;
      EXPECT_EQ(decode(t, reduce_two(t, op, one, one)), 1) << f.name;
    }
  }
}

TEST(Numbers, IntegersWrapAndAveragesDivideTowardsZero) {
  EXPECT_EQ(reduce_two(UNJAM_INT8, UNJAM_SUM, 127, 1), 0x80u);
  EXPECT_EQ(reduce_two(UNJAM_UINT8, UNJAM_SUM, 255, 2), 1u);
  EXPECT_EQ(reduce_two(UNJAM_UINT64, UNJAM_PROD, ~std::uint64_t{0}, 2), ~std::uint64_t{1});
  EXPECT_EQ(reduce_two(UNJAM_INT8, UNJAM_AVG, 0xfe, 0xff), 0xffu) << "-3 / 2 is -1";
  EXPECT_EQ(reduce_two(UNJAM_INT32, UNJAM_AVG, 3, 4), 3u);
  EXPECT_EQ(static_cast<std::int64_t>(
                reduce_two(UNJAM_INT64, UNJAM_AVG, static_cast<std::uint64_t>(-5), 0)),
            -2);
}

}  // namespace
}  // namespace unjam_test
