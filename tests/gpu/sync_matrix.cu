// The synchronisation matrix: with a collective pending on rank 0 that rank 1 has not called and
// nobody waits for, everything that synchronises GPU 0 must return as if it were not there: a small
// one, one that stands half-way, many. Beside that: streams that wait for other collectives,
// somebody else's kernels on all SMs, a queue that never runs dry. What blocks all the same is
// diagnosed after a time limit by unjamExplain, then rank 1 calls: it must not hang the test. A
// table for people, CSV lines ("csv,…") for the record.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"
#include "tests/gpu/sync_operations.cuh"

namespace {

using namespace unjam_gpu;

// Makes a rank's device current for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_));
    if (device != before_) check(cudaSetDevice(device));
    device_ = device;
  }
  ~OnDevice() {
    if (device_ != before_) check(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0, device_ = 0;
};

// A collective of all ranks under one key, again and again. Rank 1 is the one that may be late.
class Collective {
 public:
  Collective(const Job& job, std::string key, unjamKind_t kind, std::size_t count)
      : job_(job), key_(std::move(key)) {
    for (const Member& m : job.members()) {
      const OnDevice on(m.device);
      Side& s = sides_.emplace_back();
      s.spec.kind = kind;
      s.spec.count = count;
      s.spec.size = m.ranks;
      s.spec.at = m.rank;
      s.memory = DeviceMemory(memory_of(s.spec));
      s.place = place_in(s.memory.get(), s.spec);
      s.reports = std::make_unique<Reports>(1);
      s.stream = std::make_unique<Stream>();
    }
  }

  void start_prepare(std::uint64_t seed) {
    called_by_1_ = false;
    for (std::size_t r = 0; r < sides_.size(); ++r) {
      const OnDevice on(device(r));
      Side& s = sides_[r];
      s.spec.seed = seed;
      // The late rank is the root, or rank 0 is, and waits for what has to come from there.
      if (s.spec.kind == UNJAM_REDUCE) s.spec.root = static_cast<int>(seed % 2);
      start_fill(s.spec, s.place, s.stream->get());
    }
  }
  void synchronize() {
    for (std::size_t r = 0; r < sides_.size(); ++r) {
      const OnDevice on(device(r));
      sides_[r].stream->synchronize();
    }
  }

  // Rank 0 in a stream or beside it, and who is neither it nor rank 1.
  void call_but_on_1(const Stream& stream, unjamStreamOrder_t order) {
    const unjamCallOptions_t options = ordered(order, stream);
    for (std::size_t r = 0; r < sides_.size(); ++r) {
      if (r != 1) call_on(r, r == 0 ? &options : nullptr);
    }
  }
  // Once, from any thread.
  void call_on_1() {
    if (called_by_1_.exchange(true)) return;
    call_on(1, nullptr);
    ready_ = true;
  }
  void stream_waits(const Stream& stream) {
    check(unjamStreamWait(sides_[0].request, stream.get()));
  }
  // Before rank 1 has called. What rank 0 only sends may have found room.
  void expect_pending() const {
    int done = 0;
    check(unjamTest(sides_[0].request, &done));
    if (done != 0 && sides_[0].spec.receives()) {
      fail("key " + key_ + ": complete on rank 0, though rank 1 has not called it");
    }
  }

  void start_finish() {
    while (!ready_) usleep(10);  // the other thread that calls is about to have done so
    ready_ = false;
    for (std::size_t r = 0; r < sides_.size(); ++r) {
      const OnDevice on(device(r));
      Side& s = sides_[r];
      job_.member(static_cast<int>(r)).wait(s.request, key_);
      start_check(s.spec, s.place, s.reports->on_device(0), s.stream->get());
      s.reports->start_fetch(s.stream->get());
    }
  }
  void finish() {
    synchronize();
    for (const Side& s : sides_) {
      finish_check(s.spec, (*s.reports)[0], "rank " + std::to_string(s.spec.at) + ", key " + key_);
    }
  }

 private:
  struct Side {
    Spec spec;
    DeviceMemory memory;
    Place place;
    std::unique_ptr<Reports> reports;
    std::unique_ptr<Stream> stream;
    unjamRequest_t request = nullptr;
  };

  int device(std::size_t rank) const { return job_.member(static_cast<int>(rank)).device; }
  void call_on(std::size_t rank, const unjamCallOptions_t* options) {
    const OnDevice on(device(rank));
    Side& s = sides_[rank];
    check(call(job_.member(static_cast<int>(rank)).all, key_.c_str(), s.spec, s.place, options,
               &s.request));
  }

  const Job& job_;
  const std::string key_;
  std::vector<Side> sides_;  // of rank 0, 1, …
  std::atomic<bool> called_by_1_{false};
  std::atomic<bool> ready_{false};
};

// Watches one operation: after the limit it says who waits for whom, and lets rank 1 call.
class Rescuer {
 public:
  // late: may change while it is not armed.
  Rescuer(unjamContext_t context, std::deque<Collective>& late) : context_(context), late_(late) {
    thread_ = std::thread([this] { watch(); });
  }
  ~Rescuer() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void arm(int limit_ms) {
    std::lock_guard lock(mutex_);
    deadline_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    armed_ = true;
    fired_ = false;
    wake_.notify_all();
  }
  // True if it had to help.
  bool disarm() {
    std::unique_lock lock(mutex_);
    armed_ = false;
    wake_.wait(lock, [this] { return !busy_; });
    return fired_;
  }
  const std::string& explanation() const { return text_; }
  double explanation_ms() const { return explain_ms_; }

 private:
  void watch() {
    check(cudaSetDevice(1));  // not the device that the operation may hold
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (!armed_) {
        wake_.wait(lock);
        continue;
      }
      if (wake_.wait_until(lock, deadline_) != std::cv_status::timeout || !armed_ ||
          std::chrono::steady_clock::now() < deadline_) {
        continue;
      }
      armed_ = false;
      fired_ = busy_ = true;
      lock.unlock();
      const std::uint64_t begin = now_ns();
      text_ = explain(context_);
      explain_ms_ = us_since(begin) * 1e-3;
      for (Collective& c : late_) c.call_on_1();
      lock.lock();
      busy_ = false;
      wake_.notify_all();
    }
  }

  const unjamContext_t context_;
  std::deque<Collective>& late_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::chrono::steady_clock::time_point deadline_;
  bool armed_ = false, fired_ = false, busy_ = false, stop_ = false;
  std::string text_;
  double explain_ms_ = 0;
};

// Small collectives of both ranks, 16 in flight, until it is destroyed.
class Traffic {
 public:
  explicit Traffic(const Job& job) {
    for (int r = 0; r < 2; ++r) {
      const OnDevice on(r);
      memory_[r] = DeviceMemory(kKeys * kBytes);
      check(cudaMemset(memory_[r].get(), 0, kKeys * kBytes));
      check(cudaDeviceSynchronize());
    }
    for (int r = 0; r < 2; ++r) {
      threads_[r] = std::thread([this, &job, r] { run(job.member(r)); });
    }
  }
  ~Traffic() {
    {
      std::lock_guard lock(mutex_);
      end_ = std::max(next_[0], next_[1]);
    }
    for (std::thread& t : threads_) t.join();
  }
  std::uint64_t rounds() const { return next_[0]; }

 private:
  static constexpr std::size_t kKeys = 16, kBytes = 1024;

  // Rounds begin under the lock, so that both ranks end after the same one.
  bool begin_round(int rank) {
    std::lock_guard lock(mutex_);
    if (next_[rank] >= end_) return false;
    ++next_[rank];
    return true;
  }

  void run(const Member& me) {
    check(cudaSetDevice(me.device));
    unjamRequest_t requests[kKeys] = {};
    while (begin_round(me.rank)) {
      for (std::size_t k = 0; k < kKeys; ++k) {
        if (requests[k] != nullptr) me.wait(requests[k], "traffic");
        auto* data = memory_[me.rank].as<unsigned char>() + k * kBytes;
        check(unjamAllReduce(me.all, ("traffic " + std::to_string(k)).c_str(), data, data,
                             kBytes / sizeof(float), UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                             &requests[k]));
      }
    }
    for (const unjamRequest_t q : requests) {
      if (q != nullptr) me.wait(q, "traffic");
    }
  }

  DeviceMemory memory_[2];
  std::thread threads_[2];
  std::mutex mutex_;
  std::uint64_t next_[2] = {0, 0}, end_ = ~std::uint64_t{0};
};

struct Variant {
  const char* name;
  int waiting = 0;  // streams that wait for collectives whose peers are ready
  std::size_t ready_bytes = std::size_t{1} << 20;
  // They wait in calls of their own (UNJAM_STREAM_SYNC), which end as their peers are ready. The
  // first has so many bytes, each of the others a quarter of the one before.
  bool in_stream = false;
  bool foreign = false;    // somebody else's kernels on all SMs
  bool busy = false;       // a queue that never runs dry
  bool late_wait = false;  // a stream waits for the late collective itself: nothing is promised
  unjamKind_t kind = UNJAM_ALL_REDUCE;  // of what is late
  std::size_t bytes = 256 << 10;
  int late = 1;           // how many are; several are of 4 KiB to 2 MiB
  bool all_gpus = false;  // four at most; else of two ranks
  int part = 1;           // one in so many of the repeats is enough
};
constexpr Variant kVariants[] = {
    {.name = "nothing"},
    {.name = "1 stream waits", .waiting = 1, .ready_bytes = std::size_t{16} << 20},
    {.name = "7 streams wait", .waiting = 7},
    {.name = "40 streams wait", .waiting = 40},
    {.name = "7 in-stream calls",
     .waiting = 7,
     .ready_bytes = std::size_t{16} << 20,
     .in_stream = true,
     .part = 2},
    {.name = "foreign kernels", .foreign = true},
    {.name = "busy queue", .busy = true},
    // More than slots have room for: it stands half-way.
    {.name = "large", .bytes = std::size_t{64} << 20, .part = 2},
    {.name = "20 late", .late = 20, .part = 2},
    // Among three and four ranks a reduce of this size goes down a chain, which rank 0 ends, or in
    // which it comes just before the late root. (Between two it goes straight.)
    {.name = "chain",
     .kind = UNJAM_REDUCE,
     .bytes = std::size_t{64} << 20,
     .all_gpus = true,
     .part = 2},
    {.name = "a wait for itself", .late_wait = true},
};
constexpr double kMostExplainMs = 5000;  // five times what unjamExplain may wait for others

struct Settings {
  int repeats = 0, lazy_repeats = 0, rescue_ms = 0, foreign_kernels = 0;
  std::uint64_t seed = 0;
  unsigned stream_flags = 0;
};

struct Row {
  const char* variant;
  const char* operation;
  int ranks;
  Spread without, with;
  std::vector<double> added;
  int rescued = 0;
  bool promised = true;
};

class Matrix {
 public:
  Matrix(const Job& job, const Settings& settings)
      : job_(job),
        settings_(settings),
        late_stream_(settings.stream_flags),
        counter_(sizeof(int)),
        random_(settings.seed) {
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    check(cudaMemset(counter_.get(), 0, sizeof(int)));
    for (int i = 0; i < 40; ++i) streams_.emplace_back(settings.stream_flags);
    rescuer_ = std::make_unique<Rescuer>(job.member(1).context, late_);
  }

  void run(const Variant& v) {
    late_.clear();
    ready_.clear();
    for (int k = 0; k < v.late; ++k) {
      const std::size_t bytes = v.late == 1 ? v.bytes : std::size_t{4096} << k % 10;
      late_.emplace_back(job_, late_key(v, k), v.kind, bytes / sizeof(float));
    }
    for (int k = 0; k < v.waiting; ++k) {
      const std::size_t bytes = v.in_stream ? v.ready_bytes >> 2 * k : v.ready_bytes;
      ready_.emplace_back(job_, "ready " + std::to_string(k), UNJAM_ALL_REDUCE,
                          bytes / sizeof(float));
    }
    std::unique_ptr<Traffic> traffic;
    if (v.busy) traffic = std::make_unique<Traffic>(job_);
    for (const auto& op : operations_.list()) run(v, op);
    if (v.late_wait) return;
    if (traffic != nullptr) {
      std::printf("  (%s: %llu rounds of 16 collectives went on beside)\n", v.name,
                  static_cast<unsigned long long>(traffic->rounds()));
    }
  }

  const std::vector<Row>& rows() const { return rows_; }

 private:
  void run(const Variant& v, const Operations::Operation& op) {
    Row row{v.name, op.name, job_.ranks(), {}, {}, {}, 0, !v.late_wait};
    const int whole = op.lazy ? settings_.lazy_repeats : settings_.repeats;
    const int repeats = v.late_wait ? 1 : (whole + v.part - 1) / v.part;
    std::vector<double> without, with;
    for (int i = 0; i < repeats; ++i) {
      job_.member(0).doing(std::string(v.name) + ", " + op.name + ", without, " +
                           std::to_string(i));
      // What is resident of the last round has nothing to do with this one.
      if (!v.busy) check(unjamDeviceSynchronize(job_.member(0).context, -1));
      bool rescued = false;
      if (!v.late_wait) without.push_back(once(v, op, false, rescued));
      job_.member(0).doing(std::string(v.name) + ", " + op.name + ", with, " + std::to_string(i));
      with.push_back(once(v, op, true, rescued));
      if (!rescued) continue;
      ++row.rescued;
      report_rescue(v, op);
    }
    row.without = spread(without);
    row.with = spread(with);
    for (const double us : with) row.added.push_back(us - row.without.median);
    rows_.push_back(row);
  }

  // One round; returns the operation's microseconds.
  double once(const Variant& v, const Operations::Operation& op, bool pending, bool& rescued) {
    op.before();
    if (pending) {
      for (Collective& c : late_) c.start_prepare(random_());
    }
    for (Collective& c : ready_) c.start_prepare(random_());
    if (pending) {
      for (Collective& c : late_) c.synchronize();
    }
    for (Collective& c : ready_) c.synchronize();

    if (v.foreign) start_foreign();
    if (pending) {
      for (Collective& c : late_) c.call_but_on_1(late_stream_, UNJAM_STREAM_ASYNC);
      if (v.late_wait) late_.front().stream_waits(late_stream_);
      usleep(static_cast<useconds_t>(random_() % 3000));  // resident, stuck, gone: all of them
    }
    for (Collective& c : ready_) c.call_on_1();
    for (std::size_t k = 0; k < ready_.size(); ++k) {
      ready_[k].call_but_on_1(streams_[k], v.in_stream ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC);
      if (!v.in_stream) ready_[k].stream_waits(streams_[k]);
      count_kernel<><<<1, 1, 0, streams_[k].get()>>>(counter_.as<int>());
      check(cudaGetLastError());
    }

    // Until all that goes on beside the late collective has ended: it must not wait for that.
    if (pending)
      rescuer_->arm(v.late_wait ? std::min(400, settings_.rescue_ms) : settings_.rescue_ms);
    const std::uint64_t begin = now_ns();
    op.run();
    const double us = us_since(begin);
    for (std::size_t k = 0; k < ready_.size(); ++k) streams_[k].synchronize();
    if (pending) rescued = rescuer_->disarm();

    for (Collective& c : ready_) c.start_finish();
    if (pending) {
      for (Collective& c : late_) {
        if (!rescued) c.expect_pending();
      }
      for (Collective& c : late_) c.call_on_1();
      late_stream_.synchronize();
      for (Collective& c : late_) c.start_finish();
      for (Collective& c : late_) c.finish();
    }
    for (Collective& c : ready_) c.finish();
    if (v.foreign) foreign_.synchronize();
    check_counter();
    op.after();
    return us;
  }

  void start_foreign() {
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, spin_kernel<>, 1024, 0));
    for (int i = 0; i < settings_.foreign_kernels; ++i) {
      spin_kernel<><<<static_cast<unsigned>(sms_ * blocks), 1024, 0, foreign_.get()>>>(2000000);
    }
    check(cudaGetLastError());
  }

  // What was queued behind the waits has run.
  void check_counter() {
    counted_ += static_cast<int>(ready_.size());
    if (ready_.empty()) return;
    int got = 0;
    check(cudaMemcpyAsync(&got, counter_.get(), sizeof(int), cudaMemcpyDeviceToHost,
                          streams_[0].get()));
    streams_[0].synchronize();
    if (got < counted_) fail("a kernel behind a wait has not run");
    counted_ = got;
  }

  void report_rescue(const Variant& v, const Operations::Operation& op) {
    std::string text = rescuer_->explanation();
    std::string packed;
    std::remove_copy_if(text.begin(), text.end(), std::back_inserter(packed),
                        [](char c) { return c == ' ' || c == '\n'; });
    bool names = packed.find("\"not_called_by\":[1]") != packed.npos;
    for (int k = 0; k < v.late; ++k) {
      names = names && packed.find('"' + late_key(v, k) + '"') != packed.npos;
    }
    if (!v.late_wait || !names) {
      std::printf("BLOCKED: %s, %s. unjamExplain (%.1f ms): %s\n", v.name, op.name,
                  rescuer_->explanation_ms(), text.c_str());
    } else {
      std::printf(
          "  %s, %s: blocks, as it must; unjamExplain (%.1f ms) names key \"late\" and "
          "rank 1\n",
          v.name, op.name, rescuer_->explanation_ms());
    }
    const std::string where = std::string(v.name) + ", " + op.name + ", seed " +
                              std::to_string(settings_.seed) + ": unjamExplain ";
    if (!names) fail(where + "does not name what is late and rank 1");
    if (rescuer_->explanation_ms() > kMostExplainMs) fail(where + "took too long");
  }

  static std::string late_key(const Variant& v, int k) {
    return v.late == 1 ? "late" : "late-" + std::to_string(k);
  }

  const Job& job_;
  const Settings settings_;
  Operations operations_;
  std::deque<Collective> late_, ready_;
  std::vector<Stream> streams_;
  Stream late_stream_, foreign_;
  DeviceMemory counter_;
  int counted_ = 0;
  int sms_ = 0;
  std::mt19937_64 random_;
  std::unique_ptr<Rescuer> rescuer_;
  std::vector<Row> rows_;
};

bool print_rows(const std::vector<Row>& rows, double goal_us, bool strict) {
  bool ok = true;
  std::printf("\n%-22s %-22s %4s %10s %10s %10s %10s %8s  %s\n", "beside the pending one",
              "operation", "n", "without", "with", "added med", "added max", "rescued", "");
  for (const Row& r : rows) {
    const Spread added = spread(r.added);
    const char* verdict = "ok";
    if (!r.promised) {
      verdict = r.rescued != 0 ? "not promised: diagnosed" : "not promised: returned";
    } else if (r.rescued != 0) {
      verdict = "BLOCKED";
      ok = false;
    } else if (added.median > goal_us) {
      verdict = "over the goal";
      ok = ok && !strict;
    }
    if (!r.promised) {
      std::printf("%-22s %-22s %4zu %10s %10.1f %10s %10s %8d  %s\n", r.variant, r.operation,
                  r.added.size(), "-", r.with.median, "-", "-", r.rescued, verdict);
      continue;
    }
    std::printf("%-22s %-22s %4zu %10.1f %10.1f %10.1f %10.1f %8d  %s\n", r.variant, r.operation,
                r.added.size(), r.without.median, r.with.median, added.median, added.max, r.rescued,
                verdict);
  }
  return ok;
}

// All rows, for those who draw or count them. Of an operation, `alone` is without what is late and
// `with` beside it, in `rescued` of the `repeats` only until rank 1 was made to call. Where nothing
// is promised (`promised` is 0), it is not done without: `alone` and `added` are empty.
void print_csv(const std::vector<Row>& rows, const std::string& connections) {
  std::printf(
      "\ncsv,operation,variant,connections,ranks,median_us_alone,median_us_added,p90_us_added,"
      "repeats,median_us_with,promised,rescued\n");
  for (const Row& r : rows) {
    if (r.added.empty()) continue;
    std::printf("csv,%s,%s,%s,%d,", r.operation, r.variant, connections.c_str(), r.ranks);
    if (r.promised) {
      const Spread added = spread(r.added);
      std::printf("%.2f,%.2f,%.2f,", r.without.median, added.median, added.p90);
    } else {
      std::printf(",,,");
    }
    std::printf("%zu,%.2f,%d,%d\n", r.added.size(), r.with.median, r.promised ? 1 : 0, r.rescued);
  }
}

// The variants of two ranks or those of all GPUs, with a job of their own.
std::vector<Row> measure(int ranks, bool all_gpus, const std::string& only,
                         const Settings& settings) {
  std::vector<const Variant*> chosen;
  for (const Variant& v : kVariants) {
    if (v.all_gpus != all_gpus || std::string(v.name).find(only) == std::string::npos) continue;
    chosen.push_back(&v);
  }
  if (chosen.empty()) return {};
  const Job job(ranks, cuda_config());
  check(cudaSetDevice(0));
  std::vector<Row> rows;
  {
    // Loads what is not the lazy kernels' matter.
    Settings once = settings;
    once.repeats = 1;
    once.lazy_repeats = 0;
    Matrix warm(job, once);
    for (const Variant& v : kVariants) {
      if (v.all_gpus == all_gpus && !v.late_wait && v.waiting <= 1) warm.run(v);
    }
    std::printf("  (warm, %d ranks)\n", ranks);
    Matrix matrix(job, settings);
    for (const Variant* v : chosen) matrix.run(*v);
    rows = matrix.rows();
  }
  print_stats(job);
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);
  Options options(argc, argv);
  Settings settings;
  settings.repeats = options.integer("repeats", 20, "of each operation, with and without");
  settings.lazy_repeats = options.integer("lazy-repeats", 8, "of the lazily loaded kernel");
  settings.rescue_ms = options.integer("rescue-ms", 2000, "after which rank 1 calls all the same");
  settings.foreign_kernels = options.integer("foreign", 10, "kernels of 2 ms queued beside");
  settings.seed = options.seed();
  settings.stream_flags = options.flag("blocking-streams", "streams that the default one waits for")
                              ? cudaStreamDefault
                              : cudaStreamNonBlocking;
  const std::string only = options.text("only", "", "only variants with this in their names");
  const double goal = options.number("goal-us", 50, "most that may be added");
  const bool strict = options.flag("strict", "fail where more than the goal is added");
  options.done(240, 30);
  if (device_count() < 2) fail("needs two GPUs");
  const char* const variable = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const std::string connections = variable == nullptr ? "unset" : variable;  // unjam may set it
  std::printf("sync_matrix: seed %llu, CUDA_DEVICE_MAX_CONNECTIONS %s, %s streams\n",
              static_cast<unsigned long long>(settings.seed), connections.c_str(),
              settings.stream_flags == cudaStreamDefault ? "blocking" : "non-blocking");

  std::vector<Row> rows = measure(2, false, only, settings);
  const std::vector<Row> more = measure(std::min(4, device_count()), true, only, settings);
  rows.insert(rows.end(), more.begin(), more.end());
  const bool ok = print_rows(rows, goal, strict);
  print_csv(rows, connections);
  std::printf("sync_matrix: %s\n", ok ? "PASS" : "FAIL");
  return ok ? 0 : 1;
}
