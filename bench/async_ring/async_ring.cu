// async_ring: a ring all-reduce of asynchronous copies beside a classic ring of sends and receives,
// NCCL's all-reduce and unjam's, from 1 KiB to 8 GiB. All ranks are of this process, rank r on GPU
// r. bench/async_ring/README.md says what the columns are.
//
// A library without what --dma names has that column "not measured". The column is of a child
// process, whose environment has the setting; it writes its cells to stdout, a line each.
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "bench/async_ring/cells.h"
#include "bench/async_ring/measure.cuh"
#include "bench/async_ring/nccl_api.h"
#include "bench/async_ring/probes.cuh"
#include "bench/async_ring/ranks.h"
#include "bench/async_ring/rings.cuh"
#include "bench/async_ring/timeline.cuh"
#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"
#include "tests/gpu/support.h"

extern char** environ;

namespace async_ring {
namespace {

using unjam_gpu::check;
using unjam_gpu::fail;
using unjam_gpu::Job;

constexpr std::size_t kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024;
constexpr int kBatches[] = {2, 4, 8};
constexpr char kDmaColumn[] = "unjam_dma", kDmaLabel[] = "unjam by copy engines";
// What a child says beside its cells.
constexpr char kMissingWord[] = "not_measured ", kNoteWord[] = "note ";

// "64K", "8G", or bytes.
std::size_t size_of(const std::string& text) {
  char* end = nullptr;
  const auto n = static_cast<std::size_t>(std::strtoull(text.c_str(), &end, 10));
  const std::string unit = end;
  const std::size_t factor = unit == "K"    ? kKiB
                             : unit == "M"  ? kMiB
                             : unit == "G"  ? kGiB
                             : unit.empty() ? 1
                                            : 0;
  if (n == 0 || factor == 0) fail("no size: " + text + " (such as 1K, 64M, 8G)");
  return n * factor;
}
std::string size_text(std::size_t bytes) {
  return bytes >= kGiB   ? std::to_string(bytes / kGiB) + "G"
         : bytes >= kMiB ? std::to_string(bytes / kMiB) + "M"
                         : std::to_string(bytes / kKiB) + "K";
}

struct Plan {
  int ranks = 2;
  std::size_t smallest = kKiB, largest = 8 * kGiB;
  Effort effort;

  std::vector<std::size_t> sizes() const {
    std::vector<std::size_t> all;
    for (std::size_t bytes = smallest; bytes <= largest; bytes *= 2) all.push_back(bytes);
    return all;
  }
};

struct Report {
  std::vector<Column> columns;
  std::vector<Cell> cells;
  std::vector<Probe> probes;
  std::vector<Timeline> timelines;
  std::vector<std::string> notes;
  std::string nccl_version, dma;
};

// ---- what is measured ----

Column unjam_column(const Job& job, const std::string& name, const std::string& label) {
  Column c;
  c.name = name;
  c.label = label;
  c.queue = [&job](Rank& me, std::size_t count) {
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.stream = me.streams[0].get();
    options.stream_order = UNJAM_STREAM_SYNC;
    check(unjamAllReduce(job.member(me.rank).all, "ring", me.in(), me.out(), count, UNJAM_FLOAT32,
                         UNJAM_SUM, &options, nullptr));
  };
  c.call = [queue = c.queue](Rank& me, std::size_t count) {
    queue(me, count);
    me.streams[0].synchronize();
  };
  // No engine is left on the GPUs when others are measured.
  c.leave = [&job](Rank& me) {
    check(unjamDeviceSynchronize(job.member(me.rank).context, 10'000'000));
  };
  return c;
}

std::vector<Column> ring_columns(Ranks& ranks, const Nccl& nccl) {
  std::vector<Column> columns;
  const auto add = [&](const std::string& name, const std::string& label) -> Column& {
    columns.emplace_back();
    columns.back().name = name;
    columns.back().label = label;
    return columns.back();
  };
  for (const Memory memory : {Memory::kEachCall, Memory::kKept}) {
    const bool kept = memory == Memory::kKept;
    const std::string ending = kept ? "_kept" : "", words = kept ? ", memory kept" : "";
    Column& classic = add("classic" + ending, "classic ring" + words);
    classic.not_measured = nccl.missing();
    classic.call = [&ranks, &nccl, memory](Rank& me, std::size_t count) {
      classic_all_reduce(nccl, ranks, me, count, memory);
    };
    for (const int batches : kBatches) {
      add("async_" + std::to_string(batches) + ending,
          "async ring, " + std::to_string(batches) + " batches" + words)
          .call = [&ranks, batches, memory](Rank& me, std::size_t count) {
        async_all_reduce(ranks, me, count, batches, memory);
      };
    }
  }
  Column& own = add("nccl", "NCCL's all-reduce");
  own.not_measured = nccl.missing();
  own.queue = [&nccl](Rank& me, std::size_t count) {
    nccl.all_reduce(me.communicator, me.in(), me.out(), count, me.streams[0].get());
  };
  own.call = [queue = own.queue](Rank& me, std::size_t count) {
    queue(me, count);
    me.streams[0].synchronize();
  };
  return columns;
}

// Bytes of a rank for vectors of so many: input, output, temporaries kept and in each call.
std::size_t memory_for(std::size_t bytes, int ranks) {
  return 2 * bytes + 2 * kept_floats(bytes / sizeof(float), ranks) * sizeof(float) + kGiB;
}

// The plan, with as large vectors as the GPUs have room for.
void fit(Plan* plan, std::vector<std::string>* notes) {
  std::size_t room = ~std::size_t{0};
  for (int r = 0; r < plan->ranks; ++r) {
    std::size_t free = 0, total = 0;
    check(cudaSetDevice(r));
    check(cudaMemGetInfo(&free, &total));
    room = std::min(room, free);
  }
  const std::size_t wanted = plan->largest;
  while (plan->largest > plan->smallest && memory_for(plan->largest, plan->ranks) > room) {
    plan->largest /= 2;
  }
  if (plan->largest != wanted) {
    notes->push_back("the GPUs have " + size_text(room) + " free: vectors to " +
                     size_text(plan->largest) + " only");
    std::printf("%s\n", notes->back().c_str());
  }
}

void make_ranks(Ranks& ranks, const Plan& plan) {
  const RingSteps most{plan.ranks, *std::max_element(std::begin(kBatches), std::end(kBatches))};
  ranks.make(plan.largest, kept_floats(plan.largest / sizeof(float), plan.ranks) * sizeof(float),
             most.steps());
}

// ---- the child with the setting ----

// What is not unjam's is for others to know.
bool library_has(const std::string& setting) {
  const std::string name = setting.substr(0, setting.find('='));
  if (name.rfind("UNJAM_", 0) != 0) return true;
  std::string text(std::size_t{4} << 20, '\0');
  check(unjamEnvironment(text.data(), text.size(), nullptr));
  return text.find("\"name\":\"" + name + "\",\"read_by\":\"library\"") != std::string::npos;
}

std::vector<std::string> settings_of(const std::string& list) {
  std::vector<std::string> all;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    if (end > begin) all.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return all;
}

// figure: of unjamInfo, which counts what copy engines have moved.
int run_child(Plan plan, const std::string& dma, const std::string& figure) {
  for (const std::string& setting : settings_of(dma)) {
    if (!library_has(setting)) {
      std::printf("%sthe library does not know %s\n", kMissingWord, setting.c_str());
      return 0;
    }
  }
  const Job job(plan.ranks, unjam_gpu::cuda_config());
  std::vector<std::string> notes;
  fit(&plan, &notes);
  Ranks ranks(plan.ranks);
  make_ranks(ranks, plan);
  const Column column = unjam_column(job, kDmaColumn, kDmaLabel);
  for (const std::size_t bytes : plan.sizes()) {
    std::printf("%s\n", line_of(measure(ranks, column, bytes, plan.effort)).c_str());
  }
  const std::string told = unjam_gpu::info(job.member(0).context);
  if (told.find("\"" + figure + "\":") == std::string::npos) {
    std::printf("%sunjamInfo does not say %s: what copy engines have moved is not known\n",
                kNoteWord, figure.c_str());
  } else {
    const std::uint64_t moved = unjam_gpu::figure(job.member(0).context, figure);
    std::printf("%s%s of rank 0: %llu%s\n", kNoteWord, figure.c_str(),
                static_cast<unsigned long long>(moved),
                moved == 0 ? ": copy engines have moved nothing" : "");
  }
  ranks.free();
  return 0;
}

// Starts this program again. Its cells go into the report.
void measure_in_child(const Plan& plan, const std::string& dma, const std::string& figure,
                      Report* report) {
  Column column;
  column.name = kDmaColumn;
  column.label = kDmaLabel;
  const std::string words[] = {"async_ring",   "--child",
                               "--ranks",      std::to_string(plan.ranks),
                               "--dma",        dma,
                               "--dma-figure", figure,
                               "--smallest",   std::to_string(plan.smallest),
                               "--largest",    std::to_string(plan.largest),
                               "--seconds",    number(plan.effort.seconds),
                               "--limit",      "120",
                               "--stall",      "30"};
  std::vector<char*> arguments, environment;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  // The first of two of the same name would count.
  const std::vector<std::string> settings = settings_of(dma);
  for (char** e = environ; *e != nullptr; ++e) {
    const bool replaced = std::any_of(settings.begin(), settings.end(), [&](const auto& s) {
      return std::strncmp(*e, s.c_str(), s.find('=') + 1) == 0;
    });
    if (!replaced) environment.push_back(*e);
  }
  for (const std::string& s : settings) environment.push_back(const_cast<char*>(s.c_str()));
  environment.push_back(nullptr);

  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) fail(std::string("pipe: ") + std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  posix_spawn_file_actions_addclose(&actions, pipe_ends[1]);
  pid_t child = 0;
  const int code = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments.data(),
                               environment.data());
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  if (code != 0) fail(std::string("starting the program again: ") + std::strerror(code));

  FILE* const lines = fdopen(pipe_ends[0], "r");
  std::string line;
  for (int c = std::fgetc(lines); c != EOF; c = std::fgetc(lines)) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    unjam_gpu::Watchdog::instance().alive();
    Cell cell;
    if (read_cell(line, &cell)) {
      report->cells.push_back(cell);
      std::printf("%-6s %s %10.1f us\n", size_text(cell.bytes).c_str(), kDmaLabel,
                  quartiles(cell.us).median);
    } else if (line.rfind(kMissingWord, 0) == 0) {
      column.not_measured = line.substr(std::strlen(kMissingWord));
    } else if (line.rfind(kNoteWord, 0) == 0) {
      report->notes.push_back(dma + ": " + line.substr(std::strlen(kNoteWord)));
      std::printf("%s\n", report->notes.back().c_str());
    } else {
      std::printf("with %s: %s\n", dma.c_str(), line.c_str());
    }
    line.clear();
  }
  std::fclose(lines);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) {
    const std::string how = WIFEXITED(status)
                                ? "the process ended with " + std::to_string(WEXITSTATUS(status))
                                : "the process ended by signal " + std::to_string(WTERMSIG(status));
    report->notes.push_back(dma + ": " + how);
    std::printf("%s\n", report->notes.back().c_str());
    if (report->cells.empty() || report->cells.back().column != kDmaColumn) {
      column.not_measured = how;
    }
  }
  if (!column.not_measured.empty()) {
    std::printf("%s: not measured: %s\n", kDmaLabel, column.not_measured.c_str());
  }
  report->columns.push_back(column);
}

// ---- what is told ----

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& p : parts) text += (text.empty() ? "\n  " : ",\n  ") + p;
  return "[" + text + "\n ]";
}

void write(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) fail("cannot write " + path);
}

std::string report_json(const Plan& plan, const Report& report) {
  std::vector<std::string> devices, columns, cells, probes, overlaps, notes;
  for (int r = 0; r < plan.ranks; ++r) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, r));
    devices.push_back(quoted(properties.name));
  }
  for (const Column& c : report.columns) {
    columns.push_back(
        "{\"name\": " + quoted(c.name) + ", \"label\": " + quoted(c.label) +
        ", \"not_measured\": " + (c.not_measured.empty() ? "null" : quoted(c.not_measured)) + "}");
  }
  for (const Cell& c : report.cells) cells.push_back(json_of(c));
  for (const Probe& p : report.probes) probes.push_back(json_of(p));
  for (const Timeline& t : report.timelines) overlaps.push_back(overlap_json(t));
  for (const std::string& n : report.notes) notes.push_back(quoted(n));
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver));
  check(cudaRuntimeGetVersion(&runtime));
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  const char* const commit = std::getenv("UNJAM_COMMIT");
  return "{\n \"program\": \"async_ring\",\n \"date\": " + quoted(date) +
         ",\n \"commit\": " + (commit == nullptr ? "null" : quoted(commit)) +
         ",\n \"ranks\": " + std::to_string(plan.ranks) + ",\n \"dtype\": \"float32\"" +
         ",\n \"devices\": " + joined(devices) + ",\n \"cuda_driver\": " + std::to_string(driver) +
         ",\n \"cuda_runtime\": " + std::to_string(runtime) +
         ",\n \"nccl\": " + (report.nccl_version.empty() ? "null" : quoted(report.nccl_version)) +
         ",\n \"dma_setting\": " + quoted(report.dma) + ",\n \"notes\": " + joined(notes) +
         ",\n \"columns\": " + joined(columns) + ",\n \"cells\": " + joined(cells) +
         ",\n \"probes\": " + joined(probes) + ",\n \"overlaps\": " + joined(overlaps) + "\n}\n";
}

void print_head(const std::vector<Column>& columns) {
  std::printf("medians in us, a call until its stream is done, at the slowest rank\n%-6s", "bytes");
  for (const Column& c : columns) std::printf(" %13s", c.name.c_str());
  std::printf("\n");
}

int run(Plan plan, const std::string& nccl_path, const std::string& dma, const std::string& figure,
        const std::string& json, const std::string& trace, std::size_t timeline_bytes,
        int timeline_batches, bool with_unjam) {
  Report report;
  report.dma = dma;
  const Nccl nccl(nccl_path);
  if (nccl.there()) report.nccl_version = nccl.version();
  std::printf("NCCL: %s\n", nccl.there() ? report.nccl_version.c_str() : nccl.missing().c_str());
  std::unique_ptr<Job> job;
  if (with_unjam) job = std::make_unique<Job>(plan.ranks, unjam_gpu::cuda_config());
  fit(&plan, &report.notes);
  {
    Ranks ranks(plan.ranks);
    make_ranks(ranks, plan);
    if (nccl.there()) {
      const std::vector<Nccl::Communicator> all = nccl.communicators(plan.ranks);
      for (int r = 0; r < plan.ranks; ++r) {
        ranks.at(r).communicator = all[static_cast<std::size_t>(r)];
      }
    }
    report.columns = ring_columns(ranks, nccl);
    if (job) report.columns.push_back(unjam_column(*job, "unjam", "unjam by SMs"));

    print_head(report.columns);
    for (const std::size_t bytes : plan.sizes()) {
      std::printf("%-6s", size_text(bytes).c_str());
      for (const Column& column : report.columns) {
        if (!column.not_measured.empty()) {
          std::printf(" %13s", "-");
          continue;
        }
        report.cells.push_back(measure(ranks, column, bytes, plan.effort));
        const Cell& cell = report.cells.back();
        std::printf(" %12.1f%s", quartiles(cell.us).median, cell.wrong == 0 ? " " : "!");
      }
      std::printf("\n");
      write(json, report_json(plan, report));  // whatever comes of the larger sizes
    }
    report.probes = measure_probes(ranks, nccl, plan.largest);
    timeline_bytes = std::min(timeline_bytes, plan.largest);
    for (const int batches : kBatches) {
      report.timelines.push_back(record_timeline(ranks, timeline_bytes, batches));
      const Timeline& t = report.timelines.back();
      std::printf("%d batches, %s: %.0f %% of the sums' time is beside a transfer%s\n", batches,
                  size_text(timeline_bytes).c_str(), 100 * overlap_share(t),
                  t.wrong == 0 ? "" : "; RESULTS ARE WRONG");
      if (batches == timeline_batches) write(trace, chrome_trace(t));
    }
    if (nccl.there()) {
      ranks.each([&](int r) { nccl.destroy(ranks.at(r).communicator); });
    }
    ranks.free();
  }
  job.reset();
  write(json, report_json(plan, report));  // whatever comes of the child
  if (with_unjam && !dma.empty()) {
    measure_in_child(plan, dma, figure, &report);
    write(json, report_json(plan, report));
  }
  for (const std::string& path : {json, trace}) {
    if (!path.empty()) std::printf("wrote %s\n", path.c_str());
  }

  std::uint64_t checked = 0;
  int wrong = 0;
  for (const Cell& c : report.cells) {
    checked += c.checked;
    if (c.wrong == 0) continue;
    ++wrong;
    std::printf("WRONG: %s of %s: %llu elements\n", c.column.c_str(), size_text(c.bytes).c_str(),
                static_cast<unsigned long long>(c.wrong));
  }
  for (const Timeline& t : report.timelines) wrong += t.wrong != 0 ? 1 : 0;
  std::printf("%llu results checked; %d measurements with wrong ones\n",
              static_cast<unsigned long long>(checked), wrong);
  return wrong == 0 ? 0 : unjam_gpu::kExitFailed;
}

}  // namespace
}  // namespace async_ring

int main(int argc, char** argv) {
  using namespace async_ring;
  unjam_gpu::load_eagerly();
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  unjam_gpu::Options options(argc, argv);
  Plan plan;
  plan.ranks = options.integer("ranks", unjam_gpu::device_count(), "one a GPU");
  plan.smallest = size_of(options.text("smallest", "1K", "bytes of the smallest vector"));
  plan.largest = size_of(options.text("largest", "8G", "bytes of the largest vector"));
  plan.effort.seconds =
      options.number("seconds", plan.effort.seconds, "for a column at one size, about");
  const std::string nccl =
      options.text("nccl", "", "NCCL's library; none: as the loader finds libnccl.so.2");
  const std::string dma =
      options.text("dma", "UNJAM_DMA=on", "settings under which unjam uses copy engines; none: no");
  const std::string figure = options.text("dma-figure", "dma_bytes", "of unjam's info, what moved");
  const std::string json = options.text("json", "", "a file for all figures");
  const std::string trace = options.text("trace-json", "", "a file for the timeline");
  const std::size_t timeline_bytes =
      size_of(options.text("timeline-bytes", "256M", "of the call in the timeline"));
  const int timeline_batches = options.integer("timeline-batches", 4, "of that call: 2, 4 or 8");
  const bool no_unjam = options.flag("no-unjam", "leave unjam's columns out");
  const bool child = options.flag("child", "measure unjam alone, for this program's own use");
  options.done(280, 60);
  if (std::find(std::begin(kBatches), std::end(kBatches), timeline_batches) == std::end(kBatches)) {
    fail("--timeline-batches is 2, 4 or 8");
  }
  if (plan.ranks < 2 || plan.ranks > unjam_gpu::device_count()) {
    fail(std::to_string(plan.ranks) + " ranks on " + std::to_string(unjam_gpu::device_count()) +
         " GPUs: at least two, and a GPU each, are needed");
  }
  if (plan.smallest % sizeof(float) != 0 || plan.largest < plan.smallest) {
    fail("sizes are multiples of 4, the largest no smaller than the smallest");
  }
  if (child) return run_child(plan, dma, figure);
  return run(plan, nccl, dma, figure, json, trace, timeline_bytes, timeline_batches, !no_unjam);
}
