// Resharding between two GPUs, beside grouped sends and receives of NCCL and beside plain copies:
// docs/reshard.md has what it printed. Ranks are threads; all variants take turns, and each ends
// with a look at every element.
//
//
//   reshard_gpus [--gigabytes 16] [--tensors 300] [--repeats 7] [--nccl PATH] [--json PATH]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/async_ring/nccl_api.h"
#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"
#include "tests/gpu/support.h"
#include "unjam/reshard.h"

namespace {

using namespace unjam_gpu;

constexpr std::int64_t kColumns = 8192;
constexpr std::int64_t kSide = 32768;  // of the square of float32, 4 GiB

struct Tensor {
  std::string name;
  std::int64_t shape[2];
  std::size_t at = 0;  // in a rank's memory, of its source part and of its destination part
};

// Of bfloat16, so many bytes together.
std::vector<Tensor> state_dict(double bytes, int tensors) {
  std::vector<Tensor> list;
  const double rows = bytes / 2 / kColumns / tensors;
  std::size_t at = 0;
  for (int i = 0; i < tensors; ++i) {
    Tensor t;
    t.name = "layer " + std::to_string(i);
    t.shape[0] = static_cast<std::int64_t>(rows * (0.5 + (i * 37 % tensors) * 1.0 / tensors));
    t.shape[1] = kColumns;
    t.at = at;
    at += static_cast<std::size_t>(t.shape[0] * kColumns) * 2;
    list.push_back(t);
  }
  return list;
}

__global__ void fill_words(std::uint32_t* words, std::size_t n, std::uint32_t first) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    words[i] = static_cast<std::uint32_t>((i + first) * 2654435761u);
  }
}
// A part of `rows` by `columns` words, whose word (r, c) is number (row + r) * width + column + c.
__global__ void count_wrong(const std::uint32_t* words, std::size_t rows, std::size_t columns,
                            std::size_t row, std::size_t column, std::size_t width,
                            unsigned long long* wrong) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * columns;
       i += step) {
    const std::size_t number = (row + i / columns) * width + column + i % columns;
    if (words[i] != static_cast<std::uint32_t>(number * 2654435761u)) atomicAdd(wrong, 1ull);
  }
}

void look(const Member& me, const void* words, std::size_t rows, std::size_t columns,
          std::size_t row, std::size_t column, std::size_t width, const std::string& what) {
  const DeviceMemory wrong(8);
  check(cudaMemset(wrong.get(), 0, 8));
  count_wrong<<<512, 256>>>(static_cast<const std::uint32_t*>(words), rows, columns, row, column,
                            width, wrong.as<unsigned long long>());
  unsigned long long found = 0;
  check(cudaMemcpy(&found, wrong.get(), 8, cudaMemcpyDeviceToHost));
  if (found != 0) {
    fail("rank " + std::to_string(me.rank) + ", " + what + ": " + std::to_string(found) +
         " words are wrong");
  }
}

class Plan {
 public:
  Plan(const std::vector<std::int32_t>& src, const std::vector<std::int32_t>& dst, int src_shard,
       int dst_shard, const std::vector<Tensor>& tensors, unjamDataType_t type,
       std::uint64_t max_bytes, int window) {
    const std::int64_t dims[] = {static_cast<std::int64_t>(src.size()),
                                 static_cast<std::int64_t>(dst.size())};
    const unjamMesh_t from{sizeof(from), 1, &dims[0], src.data()};
    const unjamMesh_t to{sizeof(to), 1, &dims[1], dst.data()};
    const unjamPlacement_t placements[] = {placement(src_shard), placement(dst_shard)};
    // (nvcc takes no vector of these types, which are named by typedefs.)
    const auto all = std::make_unique<unjamReshardTensor_t[]>(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      unjamReshardTensor_t& t = all[i];
      t.size = sizeof(t);
      t.name = tensors[i].name.c_str();
      t.ndims = 2;
      t.shape = tensors[i].shape;
      t.src_dtype = t.dst_dtype = type;
      t.src = &placements[0];
      t.dst = &placements[1];
    }
    unjamReshardOptions_t options{};
    options.size = sizeof(options);
    options.max_bytes = max_bytes;
    options.window = window;
    check(unjamReshardPlan(&from, &to, all.get(), tensors.size(), nullptr, &options, &plan_));
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

// What takes turns: from the moment when all ranks have met to that when all have their part.
using Act = std::function<void(const Member&)>;
struct Variant {
  Variant(std::string named, Act runs, Act looks)
      : name(std::move(named)), run(std::move(runs)), look(std::move(looks)) {}
  std::string name;
  Act run, look;
  std::vector<double> ms;
};

void measure(const Job& job, std::vector<Variant>& variants, int repeats) {
  Barrier barrier(job.ranks());
  std::vector<double> took(static_cast<std::size_t>(job.ranks()));
  for (int i = 0; i <= repeats; ++i) {  // the first is not counted
    for (Variant& v : variants) {
      job.run([&](const Member& me) {
        me.doing(v.name);
        barrier.meet();
        const std::uint64_t begin = now_ns();
        v.run(me);
        took[static_cast<std::size_t>(me.rank)] = us_since(begin) * 1e-3;
        barrier.meet();
        if (i == 0 || i == repeats) v.look(me);
      });
      if (i != 0) v.ms.push_back(*std::max_element(took.begin(), took.end()));
    }
  }
}

std::string report(const std::string& what, const std::vector<Variant>& variants, double bytes) {
  std::string json;
  for (const Variant& v : variants) {
    const Spread ms = spread(v.ms);
    std::printf("%-34s %-40s %8.2f ms (%.2f to %.2f)  %7.1f GB/s\n", what.c_str(), v.name.c_str(),
                ms.median, ms.p10, ms.p90, bytes / ms.median * 1e-6);
    char line[512];
    std::snprintf(line, sizeof(line),
                  "%s    {\"what\": \"%s\", \"way\": \"%s\", \"bytes\": %.0f, \"median_ms\": %.3f, "
                  "\"p10_ms\": %.3f, \"p90_ms\": %.3f, \"gb_per_s\": %.1f, \"repeats\": %zu}",
                  json.empty() ? "" : ",\n", what.c_str(), v.name.c_str(), bytes, ms.median, ms.p10,
                  ms.p90, bytes / ms.median * 1e-6, v.ms.size());
    json += line;
  }
  return json;
}

struct Settings {
  const char* name;
  std::uint64_t max_bytes;
  int window;
};

}  // namespace

int main(int argc, char** argv) {
  load_eagerly();
  Options options(argc, argv);
  const double gigabytes = options.number("gigabytes", 16, "of the state_dict, in 10^9 bytes");
  const int count = options.integer("tensors", 300, "of the state_dict");
  const int repeats = options.integer("repeats", 7, "of each variant");
  const std::string path = options.text("nccl", "", "libnccl.so.2; none: as the loader finds it");
  const std::string json_path = options.text("json", "", "a file for the figures");
  options.done(300);
  const auto job = start_job(2);
  if (device_count() < 2) fail("it takes two GPUs");
  const async_ring::Nccl nccl(path);
  std::vector<async_ring::Nccl::Communicator> communicators;
  if (nccl.there()) communicators = nccl.communicators(2);
  if (!nccl.there()) std::printf("without NCCL: %s\n", nccl.missing().c_str());
  std::vector<Stream> streams;
  for (int r = 0; r < 2; ++r) {
    check(cudaSetDevice(r));
    streams.emplace_back();
  }
  const auto stream_of = [&](const Member& me) {
    return streams[static_cast<std::size_t>(me.rank)].get();
  };
  std::string json;

  // ---- a state_dict, from one GPU to the other ----
  {
    const std::vector<Tensor> tensors = state_dict(gigabytes * 1e9, count);
    const Tensor& last = tensors.back();
    const std::size_t bytes = last.at + static_cast<std::size_t>(last.shape[0] * kColumns) * 2;
    std::vector<DeviceMemory> memory;
    for (int r = 0; r < 2; ++r) {
      check(cudaSetDevice(r));
      memory.emplace_back(bytes);
    }
    const auto words = [&](const Member& me) {
      return memory[static_cast<std::size_t>(me.rank)].as<std::uint32_t>();
    };
    const auto reset = [&](const Member& me) {
      if (me.rank == 0) {
        fill_words<<<512, 256, 0>>>(words(me), bytes / 4, 0);
      } else {
        check(cudaMemset(memory[1].get(), 0, bytes));
      }
      check(cudaDeviceSynchronize());
    };
    const auto see = [&](const Member& me, const std::string& what) {
      if (me.rank == 1) look(me, words(me), 1, bytes / 4, 0, 0, bytes / 4, what);
      reset(me);
    };
    job->run(reset);
    const Settings settings[] = {{"unjam, 8 MiB pieces (default)", 0, 0},
                                 {"unjam, 64 MiB pieces", 1u << 30, 16},
                                 {"unjam, 256 MiB pieces", std::uint64_t{4} << 30, 16}};
    std::vector<std::unique_ptr<Plan>> plans;
    const auto variants_of = [&](const std::string& suffix) {
      std::vector<Variant> variants;
      for (const Settings& s : settings) {
        plans.push_back(std::make_unique<Plan>(std::vector<std::int32_t>{0},
                                               std::vector<std::int32_t>{1}, -1, -1, tensors,
                                               UNJAM_BFLOAT16, s.max_bytes, s.window));
        const unjamReshardPlan_t plan = plans.back()->get();
        const std::string name = s.name + suffix, key = s.name;
        const Act run = [&, plan, key](const Member& me) {
          const auto parts = std::make_unique<unjamReshardPart_t[]>(tensors.size());
          for (std::size_t i = 0; i < tensors.size(); ++i) {
            unjamReshardPart_t& part = parts[i];
            part.size = sizeof(part);
            part.name = tensors[i].name.c_str();
            part.data = reinterpret_cast<unsigned char*>(words(me)) + tensors[i].at;
            part.dtype = UNJAM_BFLOAT16;
            part.ndims = 2;
            part.shape = tensors[i].shape;
          }
          const bool sends = me.rank == 0;
          unjamRequest_t request = nullptr;
          check(unjamReshardRun(plan, me.all, key.c_str(), parts.get(), sends ? tensors.size() : 0,
                                parts.get(), sends ? 0 : tensors.size(), nullptr, &request));
          me.wait(request, key);
        };
        const Act sees = [&, name](const Member& me) { see(me, name); };
        variants.emplace_back(name, run, sees);
      }
      return variants;
    };
    std::vector<Variant> variants = variants_of("");
    if (nccl.there()) {
      const Act run = [&](const Member& me) {
        nccl.together([&] {
          for (const Tensor& t : tensors) {
            auto* const at =
                reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(words(me)) + t.at);
            const auto n = static_cast<std::size_t>(t.shape[0] * kColumns / 2);
            nccl.exchange(communicators[static_cast<std::size_t>(me.rank)], at,
                          me.rank == 0 ? n : 0, 1, at, me.rank == 1 ? n : 0, 0, stream_of(me));
          }
        });
        check(cudaStreamSynchronize(stream_of(me)));
      };
      const Act sees = [&](const Member& me) { see(me, "NCCL"); };
      variants.emplace_back("NCCL " + nccl.version() + ", grouped sends and receives", run, sees);
    }
    const Act copies = [&](const Member& me) {
      if (me.rank != 0) return;
      check(cudaMemcpyPeerAsync(memory[1].get(), 1, memory[0].get(), 0, bytes, stream_of(me)));
      check(cudaStreamSynchronize(stream_of(me)));
    };
    const Act sees_copy = [&](const Member& me) { see(me, "one copy"); };
    variants.emplace_back("one copy (cudaMemcpyPeer)", copies, sees_copy);
    measure(*job, variants, repeats);
    json += report("state_dict, 1 to 1", variants, static_cast<double>(bytes));
    // The same into memory that peers may store into.
    job->run([&](const Member& me) {
      if (me.rank == 1) check(unjamMemRegister(me.context, memory[1].get(), bytes));
    });
    usleep(300000);  // until it is mapped
    std::vector<Variant> registered = variants_of(", registered");
    measure(*job, registered, repeats);
    json += ",\n" + report("state_dict, 1 to 1", registered, static_cast<double>(bytes));
    job->run([&](const Member& me) {
      if (me.rank == 1) check(unjamMemDeregister(me.context, memory[1].get()));
    });
  }

  // ---- a square, from rows to columns on both ----
  {
    Tensor square{"w", {kSide, kSide}};
    const std::size_t half = static_cast<std::size_t>(kSide) * kSide / 2 * 4;
    std::vector<DeviceMemory> from, to;
    for (int r = 0; r < 2; ++r) {
      check(cudaSetDevice(r));
      from.emplace_back(half);
      to.emplace_back(half);
    }
    job->run([&](const Member& me) {
      const auto r = static_cast<std::size_t>(me.rank);
      fill_words<<<512, 256>>>(from[r].as<std::uint32_t>(), half / 4,
                               static_cast<std::uint32_t>(r * (half / 4)));
      check(cudaMemset(to[r].get(), 0, half));
      check(cudaDeviceSynchronize());
    });
    const std::int64_t rows[] = {kSide / 2, kSide}, columns[] = {kSide, kSide / 2};
    std::vector<Variant> variants;
    std::vector<std::unique_ptr<Plan>> plans;
    const Settings settings[] = {{"unjam, 8 MiB pieces (default)", 0, 0},
                                 {"unjam, 64 MiB pieces", 1u << 30, 16}};
    for (const Settings& s : settings) {
      plans.push_back(std::make_unique<Plan>(
          std::vector<std::int32_t>{0, 1}, std::vector<std::int32_t>{0, 1}, 0, 1,
          std::vector<Tensor>{square}, UNJAM_FLOAT32, s.max_bytes, s.window));
      const unjamReshardPlan_t plan = plans.back()->get();
      const std::string name = s.name;
      const Act run = [&, plan, name](const Member& me) {
        const auto r = static_cast<std::size_t>(me.rank);
        const unjamReshardPart_t src{sizeof(src), "w",  from[r].get(), UNJAM_FLOAT32,
                                     2,           rows, nullptr};
        const unjamReshardPart_t dst{sizeof(dst), "w",     to[r].get(), UNJAM_FLOAT32,
                                     2,           columns, nullptr};
        unjamRequest_t request = nullptr;
        check(unjamReshardRun(plan, me.all, ("square " + name).c_str(), &src, 1, &dst, 1, nullptr,
                              &request));
        me.wait(request, name);
      };
      const Act sees = [&](const Member& me) {
        const auto r = static_cast<std::size_t>(me.rank);
        look(me, to[r].get(), kSide, kSide / 2, 0, r * (kSide / 2), kSide, "a square");
        check(cudaMemset(to[r].get(), 0, half));
        check(cudaDeviceSynchronize());
      };
      variants.emplace_back(name, run, sees);
    }
    const Act nothing = [](const Member&) {};
    if (nccl.there()) {
      const Act run = [&](const Member& me) {
        const auto r = static_cast<std::size_t>(me.rank);
        nccl.exchange(communicators[r], from[r].as<float>(), half / 8, 1 - me.rank,
                      to[r].as<float>(), half / 8, 1 - me.rank, stream_of(me));
        check(cudaStreamSynchronize(stream_of(me)));
      };
      variants.emplace_back("NCCL " + nccl.version() + ", the exchange alone, without packing", run,
                            nothing);
    }
    const Act copies = [&](const Member& me) {
      const auto r = static_cast<std::size_t>(me.rank);
      check(cudaMemcpyPeerAsync(to[1 - r].get(), 1 - me.rank, from[r].get(), me.rank, half / 2,
                                stream_of(me)));
      check(cudaStreamSynchronize(stream_of(me)));
    };
    variants.emplace_back("copies both ways (cudaMemcpyPeer), without packing", copies, nothing);
    measure(*job, variants, repeats);
    json +=
        ",\n" + report("rows to columns, 4 GiB, each way", variants, static_cast<double>(half) / 2);
  }

  // ---- what that is made of: rows change places; and a copy with gaps on each GPU ----
  {
    const std::size_t half = static_cast<std::size_t>(kSide) * kSide / 2 * 4;
    std::vector<DeviceMemory> from, to;
    for (int r = 0; r < 2; ++r) {
      check(cudaSetDevice(r));
      from.emplace_back(half);
      to.emplace_back(half + kSide * 32);
    }
    const std::vector<Tensor> square{{"w", {kSide, kSide}}};
    const std::int64_t rows[] = {kSide / 2, kSide}, with_gaps[] = {kSide * 4 + 32, 4};
    std::vector<std::unique_ptr<Plan>> plans;
    const Act nothing = [](const Member&) {};
    for (const bool apart : {true, false}) {
      const std::vector<std::int32_t> here{0, 1}, there{apart ? 1 : 0, apart ? 0 : 1};
      plans.push_back(std::make_unique<Plan>(here, there, 0, 0, square, UNJAM_FLOAT32,
                                             std::uint64_t{1} << 30, 16));
      const unjamReshardPlan_t plan = plans.back()->get();
      const std::int64_t* const strides = apart ? nullptr : with_gaps;
      const std::string name = apart ? "unjam, 64 MiB pieces" : "unjam, nothing between GPUs";
      const Act run = [&, plan, strides, name](const Member& me) {
        const auto r = static_cast<std::size_t>(me.rank);
        const unjamReshardPart_t src{sizeof(src), "w",  from[r].get(), UNJAM_FLOAT32,
                                     2,           rows, nullptr};
        const unjamReshardPart_t dst{sizeof(dst), "w",  to[r].get(), UNJAM_FLOAT32,
                                     2,           rows, strides};
        unjamRequest_t request = nullptr;
        check(unjamReshardRun(plan, me.all, ("parts " + name).c_str(), &src, 1, &dst, 1, nullptr,
                              &request));
        me.wait(request, name);
      };
      std::vector<Variant> variants;
      variants.emplace_back(name, run, nothing);
      measure(*job, variants, repeats);
      json += ",\n" + report(apart ? "rows change places, each way" : "rows to rows with gaps",
                             variants, static_cast<double>(half));
    }
  }

  if (!json_path.empty()) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0));
    std::FILE* const file = std::fopen(json_path.c_str(), "w");
    if (file == nullptr) fail("cannot write " + json_path);
    std::fprintf(file,
                 "{\n  \"program\": \"bench/reshard_gpus.cu\",\n  \"gpus\": \"2 x %s\",\n"
                 "  \"tensors\": %d,\n  \"rows\": [\n%s\n  ]\n}\n",
                 properties.name, count, json.c_str());
    std::fclose(file);
  }
  for (auto* const c : communicators) nccl.destroy(c);
  return 0;
}
