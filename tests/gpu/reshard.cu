// Resharding of tensors on GPUs: every element of every rank's part, and nothing beside it. Ranks
// are threads; with --ranks 4 on two GPUs two share each.
//
// First placements, shapes, types and strides by hand and by seed; then runs behind streams that
// are late, beside collectives in another order on each rank.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"
#include "tests/gpu/support.h"
#include "unjam/reshard.h"

namespace {

using namespace unjam_gpu;

constexpr int kReplicated = -1;
constexpr unsigned char kUntouched = 0xa5;

// One tensor from a line of ranks to another one.
struct Case {
  std::string name;
  std::vector<std::int32_t> src, dst;                    // ranks
  int src_shard = kReplicated, dst_shard = kReplicated;  // the dimension
  std::vector<std::int64_t> shape;
  unjamDataType_t from = UNJAM_FLOAT32, to = UNJAM_FLOAT32;
  int src_layout = 0, dst_layout = 0;  // 0: row-major, 1: dimensions turned round, 2: with gaps
  std::uint64_t max_bytes = 0;
  int window = 0;
};

std::size_t bytes_of(unjamDataType_t t) {
  switch (t) {
    case UNJAM_INT8:
    case UNJAM_UINT8:
      return 1;
    case UNJAM_FLOAT16:
    case UNJAM_BFLOAT16:
      return 2;
    case UNJAM_INT64:
    case UNJAM_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

// Numbers up to 100, which all types hold.
void put(unjamDataType_t t, unsigned char* at, int n) {
  const auto store = [&](auto x) { std::memcpy(at, &x, sizeof(x)); };
  const auto value = static_cast<float>(n);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  switch (t) {
    case UNJAM_INT8:
      return store(static_cast<std::int8_t>(n));
    case UNJAM_UINT8:
      return store(static_cast<std::uint8_t>(n));
    case UNJAM_INT32:
      return store(static_cast<std::int32_t>(n));
    case UNJAM_INT64:
      return store(static_cast<std::int64_t>(n));
    case UNJAM_FLOAT64:
      return store(static_cast<double>(n));
    case UNJAM_BFLOAT16:
      return store(static_cast<std::uint16_t>(bits >> 16));
    case UNJAM_FLOAT16:  // whole numbers up to 100 are exact
      return store(static_cast<std::uint16_t>(
          n == 0 ? 0 : ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff)));
    default:
      return store(value);
  }
}

// A rank's part: where it begins in the whole tensor, and how it lies in memory.
struct Part {
  std::vector<std::int64_t> start, shape, strides;
  std::size_t bytes = 0;

  bool empty() const { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }
  template <class F>
  void each(const std::vector<std::int64_t>& whole, F f) const {
    if (empty()) return;
    std::vector<std::int64_t> at(shape.size(), 0);
    for (;;) {
      std::int64_t number = 0, offset = 0;
      for (std::size_t d = 0; d < at.size(); ++d) {
        number = number * whole[d] + start[d] + at[d];
        offset += at[d] * strides[d];
      }
      f(static_cast<int>(number % 101), static_cast<std::size_t>(offset));
      std::size_t d = at.size();
      for (; d > 0; --d) {
        if (++at[d - 1] < shape[d - 1]) break;
        at[d - 1] = 0;
      }
      if (d == 0) return;
    }
  }
};

bool part_of(const Case& c, bool src, int rank, Part& part) {
  const std::vector<std::int32_t>& ranks = src ? c.src : c.dst;
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end()) return false;
  const int shard = src ? c.src_shard : c.dst_shard;
  const int layout = src ? c.src_layout : c.dst_layout;
  part.start.assign(c.shape.size(), 0);
  part.shape = c.shape;
  if (shard >= 0) {
    const auto d = static_cast<std::size_t>(shard);
    const auto n = static_cast<std::int64_t>(ranks.size());
    const std::int64_t chunk = (c.shape[d] + n - 1) / n;
    part.start[d] = std::min(c.shape[d], (found - ranks.begin()) * chunk);
    part.shape[d] = std::min(c.shape[d], part.start[d] + chunk) - part.start[d];
  }
  part.strides.assign(c.shape.size(), 0);
  auto step = static_cast<std::int64_t>(bytes_of(src ? c.from : c.to));
  for (std::size_t i = 0; i < c.shape.size(); ++i) {
    const std::size_t d = layout == 1 ? i : c.shape.size() - 1 - i;
    part.strides[d] = step;
    step *= part.shape[d] + (layout == 2 ? 1 : 0);
  }
  part.bytes = static_cast<std::size_t>(std::max<std::int64_t>(step, 1));
  return true;
}

class Plan {
 public:
  explicit Plan(const Case& c) {
    const std::int64_t dims[] = {static_cast<std::int64_t>(c.src.size()),
                                 static_cast<std::int64_t>(c.dst.size())};
    const unjamMesh_t src{sizeof(src), 1, &dims[0], c.src.data()};
    const unjamMesh_t dst{sizeof(dst), 1, &dims[1], c.dst.data()};
    const unjamPlacement_t placements[] = {placement(c.src_shard), placement(c.dst_shard)};
    const unjamReshardTensor_t tensor{
        sizeof(tensor), "w",           static_cast<std::int32_t>(c.shape.size()),
        c.shape.data(), c.from,        c.to,
        &placements[0], &placements[1]};
    unjamReshardOptions_t options{};
    options.size = sizeof(options);
    options.max_bytes = c.max_bytes;
    options.window = c.window;
    check(unjamReshardPlan(&src, &dst, &tensor, 1, nullptr, &options, &plan_));
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { check(unjamReshardDestroy(plan_)); }
  unjamReshardPlan_t get() const { return plan_; }

 private:
  static unjamPlacement_t placement(int shard) {
    if (shard < 0) return {UNJAM_REPLICATE, 0, 0};
    return {UNJAM_SHARD, shard, 0};
  }
  unjamReshardPlan_t plan_ = nullptr;
};

// One rank's tensors of a case, on its device.
class Tensors {
 public:
  Tensors(const Case& c, int rank) : c_(c) {
    for (const bool src : {true, false}) {
      Side& side = src ? src_ : dst_;
      side.there = part_of(c, src, rank, side.part);
      if (!side.there) continue;
      side.host.assign(side.part.bytes, kUntouched);
      if (src) {
        side.part.each(c.shape, [&](int n, std::size_t at) { put(c.from, &side.host[at], n); });
      }
      side.memory = DeviceMemory(side.part.bytes);
      check(
          cudaMemcpy(side.memory.get(), side.host.data(), side.part.bytes, cudaMemcpyHostToDevice));
    }
  }

  unjamRequest_t begin(const Member& me, unjamReshardPlan_t plan, const std::string& key,
                       const Stream* stream) {
    const unjamReshardPart_t src = of(src_, c_.from), dst = of(dst_, c_.to);
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    if (stream != nullptr) {
      options.stream_order = UNJAM_STREAM_ASYNC;
      options.stream = stream->get();
    }
    unjamRequest_t request = nullptr;
    check(unjamReshardRun(plan, me.all, key.c_str(), &src, src_.there ? 1 : 0, &dst,
                          dst_.there ? 1 : 0, &options, &request));
    return request;
  }

  void clear_source(const Stream& stream) {
    if (src_.there) check(cudaMemsetAsync(src_.memory.get(), 0, src_.part.bytes, stream.get()));
  }
  // The source's numbers, from pinned memory that stays until the stream has it.
  void fill_source(const Stream& stream) {
    if (!src_.there) return;
    if (pinned_ == nullptr) pinned_ = std::make_unique<PinnedMemory>(src_.part.bytes);
    std::memcpy(pinned_->as<unsigned char>(), src_.host.data(), src_.part.bytes);
    check(cudaMemcpyAsync(src_.memory.get(), pinned_->as<unsigned char>(), src_.part.bytes,
                          cudaMemcpyHostToDevice, stream.get()));
  }

  void look(const std::string& what) {
    if (!dst_.there) return;
    std::vector<unsigned char> found(dst_.part.bytes), expected(dst_.part.bytes, kUntouched);
    check(cudaMemcpy(found.data(), dst_.memory.get(), found.size(), cudaMemcpyDeviceToHost));
    dst_.part.each(c_.shape, [&](int n, std::size_t at) { put(c_.to, &expected[at], n); });
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] == expected[i]) continue;
      fail(what + ": byte " + std::to_string(i) + " of " + std::to_string(found.size()) + " is " +
           std::to_string(found[i]) + ", not " + std::to_string(expected[i]));
    }
    std::fill(found.begin(), found.end(), kUntouched);
    check(cudaMemcpy(dst_.memory.get(), found.data(), found.size(), cudaMemcpyHostToDevice));
  }

 private:
  struct Side {
    bool there = false;
    Part part;
    std::vector<unsigned char> host;
    DeviceMemory memory;
  };
  static unjamReshardPart_t of(const Side& side, unjamDataType_t type) {
    return {sizeof(unjamReshardPart_t),
            "w",
            side.memory.get(),
            type,
            static_cast<std::int32_t>(side.part.shape.size()),
            side.part.shape.data(),
            side.part.strides.data()};
  }

  const Case& c_;
  Side src_, dst_;
  std::unique_ptr<PinnedMemory> pinned_;
};

std::vector<Case> cases_by_hand(int ranks) {
  std::vector<Case> all;
  const auto add = [&](Case c) { all.push_back(std::move(c)); };
  add({"1 to 1, replicated", {0}, {1}, kReplicated, kReplicated, {1000, 37}});
  add({"1 to 1, large", {0}, {1}, kReplicated, kReplicated, {3000, 3001}});
  add({"Shard(0) to Shard(1)", {0, 1}, {0, 1}, 0, 1, {64, 64}});
  add({"Shard(0) to Shard(1), uneven", {0, 1}, {0, 1}, 0, 1, {33, 77}});
  add({"Shard(1) to Shard(0), turned ranks", {0, 1}, {1, 0}, 1, 0, {513, 1026}});
  add({"Shard(2) to Shard(0), four dimensions", {0, 1}, {0, 1}, 2, 0, {5, 7, 9, 11}});
  add({"float32 to bfloat16", {0, 1}, {0, 1}, 0, 1, {200, 300}, UNJAM_FLOAT32, UNJAM_BFLOAT16});
  add({"bfloat16 to float32", {0, 1}, {0, 1}, 0, 1, {200, 300}, UNJAM_BFLOAT16, UNJAM_FLOAT32});
  add({"int64 to float16", {0, 1}, {0, 1}, 1, 0, {101, 99}, UNJAM_INT64, UNJAM_FLOAT16});
  add({"float64 to int8", {0}, {1}, kReplicated, kReplicated, {77}, UNJAM_FLOAT64, UNJAM_INT8});
  add({"turned tensors", {0, 1}, {0, 1}, 0, 1, {65, 129}, UNJAM_INT32, UNJAM_INT32, 1, 0});
  add({"into turned tensors", {0, 1}, {0, 1}, 0, 1, {65, 129}, UNJAM_INT32, UNJAM_INT32, 0, 1});
  add({"gaps, cast", {0, 1}, {0, 1}, 0, 1, {65, 129}, UNJAM_INT32, UNJAM_BFLOAT16, 2, 2});
  add({"fewer rows than ranks", {0, 1}, {0, 1}, 0, kReplicated, {1, 40}});
  add({"many bundles",
       {0, 1},
       {0, 1},
       0,
       1,
       {1024, 1024},
       UNJAM_INT32,
       UNJAM_INT32,
       0,
       0,
       64 << 10,
       8});
  if (ranks >= 4) {
    add({"2 to 2", {0, 1}, {2, 3}, 0, 1, {64, 66}});
    add({"2 to 2, uneven", {0, 2}, {3, 1}, 1, 0, {1001, 999}});
    add({"1 to 3, a chain", {0}, {1, 2, 3}, kReplicated, kReplicated, {2000, 513}});
    add({"1 to 3, a chain of casts",
         {0},
         {3, 1, 2},
         kReplicated,
         kReplicated,
         {2000, 513},
         UNJAM_FLOAT32,
         UNJAM_BFLOAT16,
         0,
         2,
         1 << 20,
         4});
    add({"4 to 4", {0, 1, 2, 3}, {3, 2, 1, 0}, 0, 1, {130, 70}});
    add({"4 to 2 replicas", {0, 1, 2, 3}, {0, 3}, 1, kReplicated, {130, 70}});
  }
  return all;
}

Case drawn(std::uint64_t seed, int ranks) {
  std::mt19937_64 random(seed);
  const auto between = [&](int a, int b) {
    return std::uniform_int_distribution<int>(a, b)(random);
  };
  const unjamDataType_t types[] = {UNJAM_INT8,    UNJAM_UINT8,    UNJAM_INT32,   UNJAM_INT64,
                                   UNJAM_FLOAT16, UNJAM_BFLOAT16, UNJAM_FLOAT32, UNJAM_FLOAT64};
  Case c;
  c.name = "drawn with seed " + std::to_string(seed);
  const int dims = between(1, 4);
  for (int d = 0; d < dims; ++d) c.shape.push_back(between(1, dims > 2 ? 23 : 300));
  for (auto* const side : {&c.src, &c.dst}) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) order[static_cast<std::size_t>(r)] = r;
    std::shuffle(order.begin(), order.end(), random);
    side->assign(order.begin(), order.begin() + between(1, ranks));
  }
  c.src_shard = between(kReplicated, dims - 1);
  c.dst_shard = between(kReplicated, dims - 1);
  c.from = types[between(0, 7)];
  c.to = between(0, 1) == 0 ? c.from : types[between(0, 7)];
  c.src_layout = between(0, 2);
  c.dst_layout = between(0, 2);
  c.window = between(1, 6);
  c.max_bytes = static_cast<std::uint64_t>(c.window) * static_cast<std::uint64_t>(between(4, 64))
                << 10;
  return c;
}

__global__ void wait_a_while(std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now < begin + ns);
}

// The source is there late; the thread does not wait, its stream does. Where each rank has a GPU,
// the device is synchronised meanwhile. (Where two share one, that would wait for the other's
// stream, which may wait for this rank's next call.)
void behind_streams(const Job& job, const Case& c) {
  const Plan plan(c);
  const bool alone = job.ranks() <= device_count();
  Barrier end(job.ranks());
  job.run([&](const Member& me) {
    const Stream stream;
    Tensors tensors(c, me.rank);
    for (int round = 0; round < 5; ++round) {
      me.doing(c.name + ", behind a stream, round " + std::to_string(round));
      tensors.clear_source(stream);
      wait_a_while<<<1, 1, 0, stream.get()>>>(2'000'000 * static_cast<std::uint64_t>(me.rank + 1));
      tensors.fill_source(stream);
      const unjamRequest_t request = tensors.begin(me, plan.get(), "behind", &stream);
      check(unjamStreamWait(request, stream.get()));
      check(alone ? cudaDeviceSynchronize() : cudaStreamSynchronize(stream.get()));
      tensors.look("rank " + std::to_string(me.rank) + ", " + c.name + ", behind a stream");
      me.wait(request, c.name);
    }
    end.meet();  // before memory is freed, which waits for all streams
  });
}

// Runs and sums, in another order on each rank.
void beside_collectives(const Job& job, const Case& c, int rounds) {
  const Plan plan(c);
  job.run([&](const Member& me) {
    Tensors tensors(c, me.rank);
    const Stream stream;
    constexpr std::size_t kCount = 1 << 16;
    const DeviceMemory in(kCount * 4), out(kCount * 4);
    std::vector<float> ones(kCount, 1.0f), found(kCount);
    check(cudaMemcpy(in.get(), ones.data(), kCount * 4, cudaMemcpyHostToDevice));
    for (int round = 0; round < rounds; ++round) {
      me.doing(c.name + ", beside collectives, round " + std::to_string(round));
      unjamRequest_t run = nullptr, sum = nullptr;
      const auto begin_run = [&] { run = tensors.begin(me, plan.get(), "beside", nullptr); };
      const auto begin_sum = [&] {
        unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
        options.stream_order = UNJAM_STREAM_SYNC;
        options.stream = stream.get();
        check(unjamAllReduce(me.all, "sum", in.get(), out.get(), kCount, UNJAM_FLOAT32, UNJAM_SUM,
                             &options, &sum));
      };
      if ((me.rank + round) % 2 == 0) {
        begin_run();
        begin_sum();
      } else {
        begin_sum();
        begin_run();
      }
      me.wait(sum, "a sum");
      me.wait(run, c.name);
      tensors.look("rank " + std::to_string(me.rank) + ", " + c.name + ", beside collectives");
      check(cudaMemcpy(found.data(), out.get(), kCount * 4, cudaMemcpyDeviceToHost));
      for (const float x : found) {
        if (x != static_cast<float>(me.ranks)) fail("a sum is " + std::to_string(x));
      }
    }
  });
}

void run_case(const Job& job, const Case& c) {
  const Plan plan(c);
  job.run([&](const Member& me) {
    me.doing(c.name);
    Tensors tensors(c, me.rank);
    for (int round = 0; round < 2; ++round) {
      me.wait(tensors.begin(me, plan.get(), "w", nullptr), c.name);
      tensors.look("rank " + std::to_string(me.rank) + ", " + c.name);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  load_eagerly();
  take_many_queues();
  Options options(argc, argv);
  const int ranks = options.integer("ranks", 2, "as threads; two a GPU where there are too few");
  const int draws = options.integer("cases", 40, "cases that are drawn");
  const std::uint64_t seed = options.seed();
  options.done(120);
  const auto job = start_job(ranks);
  const std::vector<Case> cases = cases_by_hand(ranks);
  for (const Case& c : cases) {
    run_case(*job, c);
    std::printf("right: %s\n", c.name.c_str());
  }
  for (int i = 0; i < draws; ++i) {
    run_case(*job, drawn(mix(seed, static_cast<std::uint64_t>(i)), ranks));
  }
  std::printf("right: %d cases drawn with seed %llu\n", draws,
              static_cast<unsigned long long>(seed));
  for (const Case& c : cases) {
    if (c.name.find("turned ranks") != std::string::npos || c.name == "2 to 2") {
      behind_streams(*job, c);
      std::printf("right: %s, behind streams that are late\n", c.name.c_str());
      beside_collectives(*job, c, 20);
      std::printf("right: %s, beside collectives in crossed order\n", c.name.c_str());
    }
  }
  print_stats(*job);
  std::printf("all is right\n");
  return 0;
}
