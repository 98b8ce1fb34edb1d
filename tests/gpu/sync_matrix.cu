// The synchronisation matrix: with a collective pending on rank 0 that rank 1 has not called and
// nobody waits for, everything that synchronises GPU 0 must return as if it were not there. Beside
// that: streams that wait for other collectives, somebody else's kernels on all SMs, a queue that
// never runs dry. What blocks all the same is diagnosed after a time limit by unjamExplain, then
// rank 1 calls: it must not hang the test.
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

// An all-reduce under one key of ranks 0 and 1, again and again.
class Pair {
 public:
  Pair(const Job& job, std::string key, std::size_t count) : job_(job), key_(std::move(key)) {
    for (int r = 0; r < 2; ++r) {
      const OnDevice on(r);
      spec_[r].count = count;
      spec_[r].size = 2;
      spec_[r].at = r;
      memory_[r] = DeviceMemory(memory_of(spec_[r]));
      place_[r] = place_in(memory_[r].get(), spec_[r]);
      reports_[r] = std::make_unique<Reports>(1);
      streams_[r] = std::make_unique<Stream>();
    }
  }

  void start_prepare(std::uint64_t seed) {
    called_[0] = called_[1] = false;
    for (int r = 0; r < 2; ++r) {
      const OnDevice on(r);
      spec_[r].seed = seed;
      start_fill(spec_[r], place_[r], streams_[r]->get());
    }
  }
  void synchronize() {
    for (int r = 0; r < 2; ++r) {
      const OnDevice on(r);
      streams_[r]->synchronize();
    }
  }

  void call_on_0(const Stream& stream) {
    const unjamCallOptions_t options = ordered(UNJAM_STREAM_ASYNC, stream);
    check(call(job_.member(0).all, key_.c_str(), spec_[0], place_[0], &options, &request_[0]));
    called_[0] = true;
  }
  // Once, from any thread.
  void call_on_1() {
    if (called_[1].exchange(true)) return;
    const OnDevice on(1);
    check(call(job_.member(1).all, key_.c_str(), spec_[1], place_[1], nullptr, &request_[1]));
    ready_[1] = true;
  }
  void stream_waits(const Stream& stream) { check(unjamStreamWait(request_[0], stream.get())); }

  void start_finish() {
    while (!ready_[1]) usleep(10);  // the other thread that calls is about to have done so
    ready_[1] = false;
    for (int r = 0; r < 2; ++r) {
      const OnDevice on(r);
      job_.member(r).wait(request_[r], key_);
      start_check(spec_[r], place_[r], reports_[r]->on_device(0), streams_[r]->get());
      reports_[r]->start_fetch(streams_[r]->get());
    }
  }
  void finish() {
    synchronize();
    for (int r = 0; r < 2; ++r) {
      finish_check(spec_[r], (*reports_[r])[0], "rank " + std::to_string(r) + ", key " + key_);
    }
  }

 private:
  const Job& job_;
  const std::string key_;
  Spec spec_[2];
  DeviceMemory memory_[2];
  Place place_[2];
  std::unique_ptr<Reports> reports_[2];
  std::unique_ptr<Stream> streams_[2];
  unjamRequest_t request_[2] = {};
  std::atomic<bool> called_[2] = {};
  std::atomic<bool> ready_[2] = {};
};

// Watches one operation: after the limit it says who waits for whom, and lets rank 1 call.
class Rescuer {
 public:
  Rescuer(unjamContext_t context, Pair& late) : context_(context), late_(late) {
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
      late_.call_on_1();
      lock.lock();
      busy_ = false;
      wake_.notify_all();
    }
  }

  const unjamContext_t context_;
  Pair& late_;
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
  bool foreign = false;    // somebody else's kernels on all SMs
  bool busy = false;       // a queue that never runs dry
  bool late_wait = false;  // a stream waits for the late collective itself: nothing is promised
};

struct Settings {
  int repeats = 0, lazy_repeats = 0, rescue_ms = 0, foreign_kernels = 0;
  std::uint64_t seed = 0;
  unsigned stream_flags = 0;
};

struct Row {
  const char* variant;
  const char* operation;
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
        late_(job, "late", 65536),
        late_stream_(settings.stream_flags),
        counter_(sizeof(int)),
        random_(settings.seed) {
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    check(cudaMemset(counter_.get(), 0, sizeof(int)));
    for (int i = 0; i < 40; ++i) streams_.emplace_back(settings.stream_flags);
    rescuer_ = std::make_unique<Rescuer>(job.member(1).context, late_);
  }

  void run(const Variant& v) {
    ready_.clear();
    for (int k = 0; k < v.waiting; ++k) {
      ready_.emplace_back(job_, "ready " + std::to_string(k), v.ready_bytes / sizeof(float));
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
    Row row{v.name, op.name, {}, {}, {}, 0, !v.late_wait};
    const int repeats = v.late_wait ? 1 : op.lazy ? settings_.lazy_repeats : settings_.repeats;
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
    if (pending) late_.start_prepare(random_());
    for (Pair& p : ready_) p.start_prepare(random_());
    if (pending) late_.synchronize();
    for (Pair& p : ready_) p.synchronize();

    if (v.foreign) start_foreign();
    if (pending) {
      late_.call_on_0(late_stream_);
      if (v.late_wait) late_.stream_waits(late_stream_);
      usleep(static_cast<useconds_t>(random_() % 3000));  // resident, stuck, gone: all of them
    }
    for (Pair& p : ready_) p.call_on_1();
    for (std::size_t k = 0; k < ready_.size(); ++k) {
      ready_[k].call_on_0(streams_[k]);
      ready_[k].stream_waits(streams_[k]);
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

    for (Pair& p : ready_) p.start_finish();
    if (pending) {
      late_.call_on_1();
      late_stream_.synchronize();
      late_.start_finish();
      late_.finish();
    }
    for (Pair& p : ready_) p.finish();
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
    const bool names = packed.find("\"late\"") != packed.npos &&
                       packed.find("\"not_called_by\":[1]") != packed.npos;
    if (!v.late_wait || !names) {
      std::printf("BLOCKED: %s, %s. unjamExplain (%.1f ms): %s\n", v.name, op.name,
                  rescuer_->explanation_ms(), text.c_str());
    } else {
      std::printf(
          "  %s, %s: blocks, as it must; unjamExplain (%.1f ms) names key \"late\" and "
          "rank 1\n",
          v.name, op.name, rescuer_->explanation_ms());
    }
    if (!names) fail("unjamExplain does not name the late collective and rank 1");
  }

  const Job& job_;
  const Settings settings_;
  Operations operations_;
  Pair late_;
  std::deque<Pair> ready_;
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
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  std::printf("sync_matrix: 2 ranks, seed %llu, CUDA_DEVICE_MAX_CONNECTIONS %s, %s streams\n",
              static_cast<unsigned long long>(settings.seed),
              connections == nullptr ? "unset" : connections,
              settings.stream_flags == cudaStreamDefault ? "blocking" : "non-blocking");

  const Variant variants[] = {
      {"nothing"},
      {"1 stream waits", 1, std::size_t{16} << 20},
      {"7 streams wait", 7},
      {"40 streams wait", 40},
      {"foreign kernels", 0, 0, true},
      {"busy queue", 0, 0, false, true},
      {"a wait for itself", 0, 0, false, false, true},
  };
  Job job(2, cuda_config());
  check(cudaSetDevice(0));
  bool ok = false;
  {
    // Loads what is not the lazy kernels' matter.
    Settings once = settings;
    once.repeats = 1;
    once.lazy_repeats = 0;
    Matrix warm(job, once);
    for (const Variant& v : variants) {
      if (!v.late_wait && v.waiting <= 1) warm.run(v);
    }
    std::printf("  (warm)\n");
    Matrix matrix(job, settings);
    for (const Variant& v : variants) {
      if (std::string(v.name).find(only) != std::string::npos) matrix.run(v);
    }
    ok = print_rows(matrix.rows(), goal, strict);
  }
  print_stats(job);
  std::printf("sync_matrix: %s\n", ok ? "PASS" : "FAIL");
  return ok ? 0 : 1;
}
