#include "device/cuda/host/cuda_daemon.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/json_writer.h"
#include "base/pause.h"
#include "base/unlocked.h"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/host/bind.h"
#include "device/cuda/host/call_in_front.h"
#include "device/cuda/host/copy_thread.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/first_launch.h"
#include "device/cuda/host/nvlink.h"
#include "device/cuda/host/rank_memory.h"
#include "device/cuda/host/recall.h"
#include "device/cuda/kernels/kernels.h"
#include "device/cuda/placement/lane_choice.h"

namespace unjam {
namespace {

constexpr std::uint32_t kMostReleases = 256;  // of one command

// Blocks of a call in a stream that the device begins together, in one GPC: large calls are up to
// 17 % faster so, less with 8 (2 H100s, lab/nccl-notes.md). SMs of those that have ended are free,
// whoever of the cluster goes on: what waits in a stream still holds one. Not a daemon's, which may
// find few SMs free, and those anywhere, and must begin all the same: lane_choice.h.
constexpr unsigned kCluster = 4;

cudaLaunchAttribute clusters_of(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}

// Waits a little longer each time: polls, lets others run, sleeps up to 100 us. (With the timers'
// slack, which is 50 us. Without it, the next daemon is there so soon that who makes the device
// synchronize waits for that one, too: paper's program 2 took 2,100 us, not 900,
// lab/benchmarks.md.)
class BackOff {
 public:
  void reset() { since_ns_ = monotonic_ns(); }
  std::uint64_t begun_ns() const { return since_ns_; }
  void pause() {
    const std::uint64_t waited = monotonic_ns() - since_ns_;
    if (waited < kPolls) {
      pause_core();
    } else if (waited < kYields) {
      sched_yield();
    } else {
      usleep(waited < kShort ? 10 : 50);
    }
  }

 private:
  static constexpr std::uint64_t kPolls = 30'000, kYields = 100'000, kShort = 1'000'000;
  std::uint64_t since_ns_ = monotonic_ns();
};

class CudaDaemon : public StreamDaemon {
 public:
  CudaDaemon(const CudaRankOptions& options, RankState& copy)
      : o_(options), copy_(copy), layout_(o_), besides_(options.slots), copied_in_(options.slots) {}

  ~CudaDaemon() override {
    stop();
    // (Its streams store into memory_.)
    copies_.reset();
    if (stream_ == nullptr && memory_ == nullptr) return;  // there may be no device
    const OnDevice on(o_.device);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (control_stream_ != nullptr) cudaStreamDestroy(control_stream_);
    if (copy_stream_ != nullptr) cudaStreamDestroy(copy_stream_);
    cudaFree(memory_);
    cudaFreeHost(pinned_);
  }

  bool start(std::string& error) {
    const OnDevice on(o_.device);
    if (!allocate(error) || !fill(error) || !make_streams(error) || !load_kernels(error)) {
      return false;
    }
    start_copies();
    return begin();
  }

  void stop() override {
    if (!launcher_.joinable()) return;
    attend(kAttentionStop);
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    launcher_.join();
    const OnDevice on(o_.device);
    cudaStreamSynchronize(stream_);
    if (copies_ != nullptr) copies_->stop();
  }

  // ---- submission ----

  void submit(const Invocation& inv, const KeyState* fresh) override {
    CudaSubmission& place = sq_[sq_written_ % o_.slots];
    if (inv.key == nullptr) {
      put_command(inv, place.sqe);
    } else {
      layout_.put(inv, fresh, place.sqe);
      prepare(inv, fresh != nullptr, place.call);
      place.sqe.inv.whole = whole_of(*inv.lowered, place.call);
    }
    ++pending_;
    ++beside_;
    besides_[place.sqe.inv.slot] = true;
    // Release: the entry.
    store_release(link_->sq_written, ++sq_written_);
  }

  void cancel(std::uint16_t slot) override {
    store_release<std::uint32_t>(copy_.cancelled[slot], 1);
    attend(2);
  }

  void peer_gone(int rank) override {
    mark_gone(static_cast<std::uint32_t>(rank));
    attend(2);
    post();
  }

  void ring(std::uint32_t) override { post(); }
  void ring_all() override { post(); }
  // By the thread that has submitted, which has just made other CUDA calls: a launch takes it 5 us,
  // where waking the launcher takes 100.
  void ring_and_attempt() override {
    post();
    const std::unique_lock lock(launch_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;  // somebody launches
    const OnDevice on(o_.device);
    launch_if_absent();
  }

  // ---- keys ----

  KeyState* take_key(LaneKey*& lanes) override {
    if (free_keys_.empty()) return nullptr;
    const std::uint32_t i = free_keys_.back();
    free_keys_.pop_back();
    lanes = layout_.keys().lane_keys + std::size_t{i} * o_.shape.lanes;
    return layout_.keys().states + i;
  }
  void return_key(KeyState* key) override {
    free_keys_.push_back(static_cast<std::uint32_t>(layout_.place_of(key)));
  }

  // ---- streams ----

  bool queue_mark(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                  std::uint64_t ticket, bool& queued, std::string& error) override {
    const Unlocked unlocked(lock);
    const OnDevice on(o_.device);
    bool idle = false;
    if (!check_stream(stream, error) || !is_idle(stream, idle, error)) return false;
    queued = !idle;
    if (idle) return true;
    std::uint32_t wide_slot = slot;
    void* arguments[] = {&rank_, &wide_slot, &ticket};
    return launch(mark_kernel(), 1, 1, arguments, as_stream(stream), "queueing a mark", error);
  }

  LowerLimits lower_limits() const override {
    return {o_.block_threads, o_.shape.lanes, o_.whole_lines, o_.solo_patience_us,
            o_.shape.escape_slot_bytes};
  }

  bool queue_call(std::unique_lock<std::mutex>& lock, void* stream, const Invocation& inv,
                  const KeyState* fresh, std::string& error) override {
    std::unique_ptr<CudaLaunch> taken = take_spare();
    CudaLaunch& l = *taken;
    l.slot = inv.slot;
    l.serial = inv.serial;
    layout_.put(inv, fresh, l.sqe);
    const Geometry& g = inv.geometry;
    prepare(inv, fresh != nullptr, l.solo);
    l.sqe.inv.whole = whole_of(*inv.lowered, l.solo);
    const unsigned threads = l.solo.lanes != 0 ? inv.lowered->threads : o_.block_threads;
    // With the engine, one more for the first lane, see unjam_call_kernel.
    const unsigned blocks = l.solo.lanes == 0 && g.first_lane != 0 ? g.lanes + 1u : g.lanes;
    // (Nobody asks for the stream of other calls, which would pay for that.)
    const bool overlaps = o_.solo_overlap && l.solo.by_slots;
    l.solo.follows = call_in_front_.next(inv, l.solo, overlaps ? number_of(stream) : 0);
    void* arguments[] = {&rank_, &l};
    // The blocks of such a call may come while what is in front of it ends: they wait for that.
    const bool early = early_ && l.solo.lanes != 0;
    bool queued = false;
    {
      const Unlocked unlocked(lock);
      const OnDevice on(o_.device);
      queued = check_stream(stream, error) &&
               launch(is_carried(l.solo) ? carried_call_kernel() : call_kernel(), blocks, threads,
                      arguments, as_stream(stream), "queueing a call", error, early,
                      blocks % kCluster == 0 ? cluster_ : 1);
    }
    spare_.push_back(std::move(taken));
    if (!queued) return false;
    ++pending_;
    wake_if_asleep();  // it looks whether a call lacks drivers
    return true;
  }

  bool queue_copy(std::unique_lock<std::mutex>& lock, void* stream, bool in_stream,
                  const Invocation& inv, std::uint64_t bytes, void* after,
                  std::string& error) override {
    cudaStream_t s = in_stream ? as_stream(stream) : copy_stream_;
    std::uint32_t slot = inv.slot;
    std::uint64_t serial = inv.serial;
    void* arguments[] = {&rank_, &slot, &serial};
    bool queued = false;
    {
      const Unlocked unlocked(lock);
      const OnDevice on(o_.device);
      if (check_stream(s, error) && note_stream(inv.slot, s, error)) {
        // Of both: a copy alone may not give the stream its queue.
        const std::unique_lock first = first_launch_.guard(s);
        queued =
            (after == nullptr ||
             cuda_ok(cudaStreamWaitEvent(s, static_cast<cudaEvent_t>(after), 0),
                     "queueing a wait for the other call of a rank's message to itself", error)) &&
            (bytes == 0 || copy(inv.output, inv.input, bytes, s, error)) &&
            launch(end_kernel(), 1, 1, arguments, s, "queueing a call's end", error);
      }
    }
    if (!queued) {
      copied_in_[inv.slot] = 0;  // the slot's next call is another's
      return false;
    }
    ++pending_;  // the launcher may sleep on: nothing is to be launched
    return true;
  }

  std::shared_ptr<void> note(std::unique_lock<std::mutex>& lock, void* stream,
                             std::string& error) override {
    const Unlocked unlocked(lock);
    const OnDevice on(o_.device);
    cudaEvent_t event = nullptr;
    if (!check_stream(stream, error) ||
        !cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event",
                 error)) {
      return nullptr;
    }
    std::shared_ptr<void> noted(event,
                                [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
    if (!cuda_ok(cudaEventRecord(event, as_stream(stream)), "recording an event", error)) {
      return nullptr;
    }
    return noted;
  }

  bool queue_wait(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                  std::uint64_t serial, std::string& error) override {
    const unsigned long long copied_in = copied_in_[slot];
    EngineLaunch l{EngineKind::kWait, slot, serial};
    void* arguments[] = {&rank_, &l};
    bool queued = false;
    {
      const Unlocked unlocked(lock);
      const OnDevice on(o_.device);
      // What is in that stream anyhow is not waited for.
      queued =
          check_stream(stream, error) &&
          (is_stream(stream, copied_in) || launch(engine_kernel(), 1, o_.block_threads, arguments,
                                                  as_stream(stream), "queueing a wait", error));
    }
    return queued;
  }

  // ---- completions ----

  void ended(std::uint16_t slot) override {
    if (besides_[slot]) --beside_;
    besides_[slot] = false;
    copied_in_[slot] = 0;
  }

  void wait(EventCount& completions, std::uint32_t epoch, std::int64_t timeout_us) override {
    const std::uint64_t deadline =
        timeout_us < 0 ? UINT64_MAX
                       : monotonic_ns() + static_cast<std::uint64_t>(timeout_us) * 1000;
    BackOff back_off;
    while (!completion_waits() && completions.epoch() == epoch && monotonic_ns() < deadline) {
      back_off.pause();
    }
  }

  bool synchronize(std::int64_t timeout_us) override {
    const std::uint64_t begun = monotonic_ns();
    BackOff back_off;
    while (load_acquire(link_->residency.resident) != 0 ||
           load_acquire(link_->residency.queued) != 0) {
      if (timeout_us >= 0 &&
          monotonic_ns() - begun > static_cast<std::uint64_t>(timeout_us) * 1000) {
        return false;
      }
      back_off.pause();
    }
    return true;
  }

  // ---- reports ----

  void refresh(RankState& copy) override {
    const OnDevice on(o_.device);
    const BesideCapture beside;
    std::lock_guard lock(refreshing_);
    // Lanes without a driver are as they were left. Which those are is looked at before their state
    // is, so that is what was left; and again behind the traces, with what they have counted since.
    // Whoever drove one meanwhile is still there, or has left it with another count.
    std::vector<LaneState> lanes(o_.shape.lanes), later(o_.shape.lanes);
    std::uint64_t driven = 0, driven_later = 0;
    const std::uint64_t places = TraceRing::places_for(o_.trace_events);
    std::vector<TraceEvent> events(places * o_.shape.lanes);
    bool read = true;  // what could not be read stays as it was: figures never fall
    const auto fetch = [&](void* to, const void* from, std::size_t bytes) {
      read = read &&
             cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, control_stream_) == cudaSuccess;
    };
    fetch(&driven, &rank_->lanes, sizeof(driven));
    fetch(lanes.data(), layout_.lanes(), lanes.size() * sizeof(LaneState));
    for (std::uint32_t l = 0; l < o_.shape.lanes && places != 0; ++l) {
      fetch(&events[l * places], layout_.trace(l), places * sizeof(TraceEvent));
    }
    if (places != 0) {
      fetch(&driven_later, &rank_->lanes, sizeof(driven_later));
      fetch(later.data(), layout_.lanes(), later.size() * sizeof(LaneState));
    }
    if (cudaStreamSynchronize(control_stream_) != cudaSuccess || !read) return;
    timespec real{};
    clock_gettime(CLOCK_REALTIME, &real);
    // The GPU's clock is the host's time of day.
    const std::uint64_t shift = static_cast<std::uint64_t>(real.tv_sec) * 1'000'000'000 +
                                static_cast<std::uint64_t>(real.tv_nsec) - monotonic_ns();
    for (std::uint32_t l = 0; l < o_.shape.lanes; ++l) {
      LaneState& to = copy.lanes[l];
      to.stats = lanes[l].stats;
      store_release(to.running, lanes[l].running);
      const std::uint64_t count = lanes[l].trace.written;
      const bool rests = ((driven | driven_later) >> l & 1) == 0 && later[l].trace.written == count;
      to.trace.keep(events.data() + l * places, count, rests);
      for (std::uint64_t i = 0; i < to.trace.written; ++i) to.trace.events[i].time_ns -= shift;
    }
  }

  std::string footprint() const override {
    JsonWriter w;
    w.begin_object();
    w.field("device", o_.device);
    w.field("name", name_);
    w.field("blocks", o_.shape.lanes);
    w.field("threads_per_block", o_.block_threads);
    w.field("blocks_per_cluster_of_calls", cluster_);
    w.field("blocks_of_a_daemon", daemon_blocks_);  // of which one a lane stays
    put_resources(engine_, w);
    w.field("sms", (static_cast<int>(o_.shape.lanes) + std::max(engine_.blocks_per_sm, 1) - 1) /
                       std::max(engine_.blocks_per_sm, 1));
    // (Small ones have fewer threads, and few of them all lanes.)
    w.key("calls_in_streams").begin_object();
    w.field("blocks_at_most", o_.shape.lanes);
    w.field("threads_per_block_at_most", o_.block_threads);
    put_resources(call_, w);
    w.end_object();
    w.field("engine_bytes", memory_bytes_);
    w.field("key_bytes", key_bytes());
    // The paper's measure: 1,000 collectives, a block. (Shared memory is as much for any number.)
    w.field("global_bytes_of_1000_keys", 1000 * key_bytes());
    w.field("global_bytes_of_1000_keys_per_block", 1000 * key_bytes() / o_.shape.lanes);
    w.field("keys_at_most", o_.keys);
    w.field("pinned_bytes", pinned_bytes_);
    w.field("launches", launches_.load());
    // Of those by the launcher: since peers had poked, and were looked at again a while later.
    w.field("launches_for_pokes", launches_for_pokes_.load());
    w.field("launches_for_recalls", launches_for_recalls_.load());
    w.field("lines", o_.lines);
    w.field("whole_lines", o_.whole_lines);
    w.field("links", nvlink_answer().why);
    if (const std::unique_ptr<const CudaRank> now = state()) {
      w.field("calls_without_engine", now->solo_calls);
      w.field("calls_begun_early", now->early_calls);
      put_copies(*now, w);
      put_reasons(w);
      describe(*now, w);
    }
    w.end_object();
    return w.text();
  }

 private:
  // What a kernel with the engine's shared memory takes.
  struct Resources {
    cudaFuncAttributes attributes{};
    int blocks_per_sm = 0;
  };
  // How many calls were handed to the engine, by why; those of no reason are the others.
  void put_reasons(JsonWriter& w) const {
    w.key("calls_by_engine").begin_object();
    for (int i = 1; i < kNumNeedsEngine; ++i) {
      const std::uint64_t calls = needs_engine_[i].load(std::memory_order_relaxed);
      if (calls != 0) w.field(to_string(static_cast<NeedsEngine>(i)), calls);
    }
    w.end_object();
  }
  // Slices that copy engines were asked for.
  void put_copies(const CudaRank& now, JsonWriter& w) const {
    w.key("copy_engines").begin_object();
    w.field("on", copies_ != nullptr);
    if (copies_ != nullptr) {
      const CopyThread::Figures figures = copies_->figures();
      w.field("dma_posts", figures.posts);
      w.field("dma_copies", figures.copies);
      w.field("dma_batches", figures.batches);
      w.field("dma_bytes", figures.bytes);
      w.field("dma_dropped", figures.dropped);
      w.field("dma_taken_back", now.copies.taken_back);
      const std::string failure = copies_failure_.empty() ? copies_->failure() : copies_failure_;
      if (!failure.empty()) w.field("failure", failure);
    }
    w.end_object();
  }
  static void put_resources(const Resources& kernel, JsonWriter& w) {
    w.field("registers_per_thread", kernel.attributes.numRegs);
    w.field("shared_bytes_per_block", kernel.attributes.sharedSizeBytes + kEngineSharedBytes);
    w.field("local_bytes_per_thread", kernel.attributes.localSizeBytes);
    w.field("blocks_per_sm", kernel.blocks_per_sm);
  }

  static cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

  // A copy, word by word of any time; null if the device does not answer.
  std::unique_ptr<const CudaRank> state() const {
    const OnDevice on(o_.device);
    const BesideCapture beside;
    std::lock_guard lock(refreshing_);
    auto now = std::make_unique<CudaRank>();
    if (cudaMemcpyAsync(now.get(), rank_, sizeof(CudaRank), cudaMemcpyDefault, control_stream_) !=
            cudaSuccess ||
        cudaStreamSynchronize(control_stream_) != cudaSuccess) {
      return nullptr;
    }
    return now;
  }

  // Who drives what, and what is under way: for whoever wonders why nothing moves.
  void describe(const CudaRank& now, JsonWriter& w) const {
    const auto bits = [&](const char* name, std::uint64_t word) {
      w.key(name);
      w.begin_array();
      for (int lane = 0; word != 0; ++lane, word >>= 1) {
        if ((word & 1) != 0) w.value(lane);
      }
      w.end_array();
    };
    w.key("now");
    w.begin_object();
    bits("lanes_driven", now.lanes & 0xffffffff);
    bits("lanes_left_with_work", now.lanes >> 32);
    bits("lanes_moving", now.moving);
    w.field("daemon", now.daemon != 0);
    w.field("streams_that_wait", now.waiters);
    // Calls in streams that the engine has got, and what was submitted beside streams.
    w.field("inbox_written", now.inbox_written);
    w.field("inbox_read", now.inbox_read);
    w.field("sq_written", load_acquire(link_->sq_written));
    w.field("sq_read", now.sq_read);
    w.field("cq_written", now.rank.cq.tail);  // of all, also without the engine
    HostLink& residency = link_->residency;
    w.field("resident", load_acquire(residency.resident) != 0);
    w.field("queued", load_acquire(residency.queued) != 0);
    w.field("rung", load_acquire(residency.rung) != 0);
    w.end_object();
  }

  // ---- set up ----

  std::size_t key_bytes() const {
    return sizeof(KeyState) +
           o_.shape.lanes *
               (sizeof(LaneKey) + o_.shape.ranks * (sizeof(OutEndpoint) + sizeof(InEndpoint)));
  }

  void lay_out_pinned(Layout& at) {
    sq_ = at.take<CudaSubmission>(o_.slots);
    cq_words_ = at.take<std::uint64_t>(o_.slots);
    cancelled_ = at.take<std::uint32_t>(o_.slots);
    releases_ = at.take<KeyRelease>(kMostReleases);
    release_members_ = at.take<std::uint16_t>(std::size_t{kMostReleases} * kMaxCudaRanks);
  }

  bool allocate(std::string& error) {
    memory_bytes_ = layout_.bytes();
    Layout pinned_size(nullptr);
    lay_out_pinned(pinned_size);
    pinned_bytes_ = pinned_size.used();
    if (!cuda_ok(cudaMalloc(&memory_, memory_bytes_), "allocating the engine's memory", error) ||
        !cuda_ok(cudaMemset(memory_, 0, memory_bytes_), "clearing the engine's memory", error) ||
        !cuda_ok(
            cudaHostAlloc(&pinned_, pinned_bytes_, cudaHostAllocPortable | cudaHostAllocMapped),
            "allocating pinned memory", error)) {
      return false;
    }
    std::memset(pinned_, 0, pinned_bytes_);
    Layout pinned(static_cast<unsigned char*>(pinned_));
    lay_out_pinned(pinned);
    copy_.cq.words = cq_words_;
    copy_.cq.capacity = o_.slots;
    copy_.cancelled = cancelled_;
    for (std::uint32_t i = o_.keys; i-- > 0;) free_keys_.push_back(i);
    return true;
  }

  bool fill(std::string& error) {
    link_ = static_cast<CudaLink*>(o_.links[o_.rank]);
    CopyRing* rings = nullptr;
    if (o_.copies) {
      copies_ = std::make_unique<CopyThread>(
          CopyThread::Options{o_.device, o_.rank, o_.shape.ranks, o_.shape.borrow_bytes(),
                              o_.copies_in_flight, o_.copies_stuck});
      rings = copies_->allocate(error);
      if (rings == nullptr) return false;
    }
    layout_.place(memory_, {link_, sq_, cq_words_, cancelled_, rings});
    rank_ = layout_.rank();
    return layout_.fill([&](void* to, const void* from, std::size_t bytes) {
      return cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice),
                     "filling the engine's memory", error);
    });
  }

  // Of memory that a kernel's threads have for themselves, before it is launched: a launch that
  // wants more than there is waits for all that runs, which may wait for it. (Compiled for H100s
  // kernels want less than CUDA has at first, see tools/ptxas_report.py.)
  static bool make_room(const cudaFuncAttributes& kernel, std::string& error) {
    std::size_t there = 0;
    return cuda_ok(cudaDeviceGetLimit(&there, cudaLimitStackSize), "the stack of threads", error) &&
           (there >= kernel.localSizeBytes ||
            cuda_ok(cudaDeviceSetLimit(cudaLimitStackSize, kernel.localSizeBytes),
                    "making room for the stack of threads", error));
  }
  static bool let_share(const void* kernel, std::string& error) {
    return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(kEngineSharedBytes)),
                   "loading kernels", error);
  }
  bool count_blocks(const void* kernel, Resources& of, std::string& error) const {
    return cuda_ok(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &of.blocks_per_sm, kernel, static_cast<int>(o_.block_threads), kEngineSharedBytes),
        "measuring the kernel", error);
  }
  // All kernels now: loading one while another spins would wait for that to end.
  bool load_kernels(std::string& error) {
    cudaFuncAttributes unused{};
    cudaDeviceProp properties{};
    if (!cuda_ok(cudaGetDeviceProperties(&properties, o_.device), "reading the device", error) ||
        !cuda_ok(cudaFuncGetAttributes(&engine_.attributes, engine_kernel()), "loading kernels",
                 error) ||
        !cuda_ok(cudaFuncGetAttributes(&call_.attributes, call_kernel()), "loading kernels",
                 error) ||
        !cuda_ok(cudaFuncGetAttributes(&unused, mark_kernel()), "loading kernels", error) ||
        !cuda_ok(cudaFuncGetAttributes(&unused, end_kernel()), "loading kernels", error) ||
        !make_room(engine_.attributes, error) || !make_room(call_.attributes, error) ||
        !let_share(engine_kernel(), error) || !let_share(call_kernel(), error) ||
        (copies_ != nullptr && !load_carried(error)) ||
        !count_blocks(engine_kernel(), engine_, error) ||
        !count_blocks(call_kernel(), call_, error)) {
      return false;
    }
    name_ = properties.name;
    // What was compiled for older devices has no instruction that waits for the stream, wherever it
    // runs.
    early_ = properties.major >= 9 && engine_.attributes.binaryVersion >= 90 &&
             engine_.attributes.ptxVersion >= 90;
    // (Ranks that share the device have lanes for which SMs are there, wherever they are free.)
    const bool by_place = !o_.shares_device && properties.major >= 9 && clusters_fit();
    if (by_place) cluster_ = kCluster;
    const bool chooses = by_place && properties.major == 9 && lanes_have_sms(o_.shape.lanes);
    daemon_blocks_ = chooses ? kChoosingBlocks : o_.shape.lanes;
    CudaKeys keys = layout_.keys();
    void* arguments[] = {&keys};
    return cuda_ok(cudaStreamSynchronize(nullptr), "filling the engine's memory", error) &&
           // In the daemon's stream, which has its queue from here on, see first_launch.h.
           launch(keys_kernel(), 64, 256, arguments, stream_, "setting up keys", error) &&
           cuda_ok(cudaStreamSynchronize(stream_), "setting up keys", error);
  }

  bool load_carried(std::string& error) const {
    cudaFuncAttributes attributes{};
    return cuda_ok(cudaFuncGetAttributes(&attributes, carried_call_kernel()), "loading kernels",
                   error) &&
           make_room(attributes, error) && let_share(carried_call_kernel(), error);
  }
  // Whether copy engines may have a part in it.
  bool is_carried(const SoloCall& solo) const {
    return copies_ != nullptr && copies_failure_.empty() && solo.lanes != 0 && solo.by_slots &&
           solo.steps.carried;
  }

  // Whether all blocks of a call may be there at once, in clusters, beside a daemon's and some that
  // wait. (Not on small devices, or partitions.)
  bool clusters_fit() {
    cudaLaunchAttribute attribute = clusters_of(kCluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(o_.block_threads);
    config.dynamicSmemBytes = kEngineSharedBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, call_kernel(), &config) != cudaSuccess) {
      cudaGetLastError();  // then without
      return false;
    }
    constexpr unsigned kWaits = 8;
    return kCluster * static_cast<unsigned>(clusters) >= 2 * o_.shape.lanes + kWaits;
  }

  bool make_streams(std::string& error) {
    int least = 0, greatest = 0;
    return cuda_ok(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities",
                   error) &&
           cuda_ok(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                   "creating a stream", error) &&
           cuda_ok(cudaStreamCreateWithPriority(&control_stream_, cudaStreamNonBlocking, greatest),
                   "creating a stream", error) &&
           cuda_ok(cudaStreamCreateWithPriority(&copy_stream_, cudaStreamNonBlocking, greatest),
                   "creating a stream", error);
  }

  // (What cannot be carried out blocks move: the rank starts all the same, and says why.)
  void start_copies() {
    if (copies_ == nullptr) return;
    try {
      copies_->start(layout_.copies_done(), copies_failure_);
    } catch (const std::system_error& e) {
      copies_failure_ = std::string("starting a thread: ") + e.what();
    }
  }

  bool begin() {
    launcher_ = std::thread([this] { run_launcher(); });
    return true;
  }

  // `early`: programmatic dependent launch, see wait_for_stream() in cuda_dev.cuh. `cluster`:
  // blocks that begin together, near each other.
  bool launch(const void* kernel, unsigned blocks, unsigned threads, void** arguments,
              cudaStream_t stream, const char* what, std::string& error, bool early = false,
              unsigned cluster = 1) {
    std::array<cudaLaunchAttribute, 2> attributes{};
    unsigned count = 0;
    if (early) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) attributes[count++] = clusters_of(cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    const bool is_engine =
        kernel == engine_kernel() || kernel == call_kernel() || kernel == carried_call_kernel();
    config.dynamicSmemBytes = is_engine ? kEngineSharedBytes : 0;
    config.stream = stream;
    config.attrs = attributes.data();
    config.numAttrs = count;
    const std::unique_lock first = first_launch_.guard(stream);
    return cuda_ok(cudaLaunchKernelExC(&config, kernel, arguments), what, error);
  }

  bool note_stream(std::uint16_t slot, cudaStream_t stream, std::string& error) {
    return cuda_ok(cudaStreamGetId(stream, &copied_in_[slot]), "the stream of a call", error);
  }
  // As CUDA numbers streams; 0: it is none.
  static unsigned long long number_of(void* stream) {
    unsigned long long id = 0;
    if (cudaStreamGetId(as_stream(stream), &id) == cudaSuccess) return id;
    cudaGetLastError();  // the launch will say it
    return 0;
  }
  // Whether it is the one that CUDA numbers so; 0: none.
  static bool is_stream(void* stream, unsigned long long number) {
    return number != 0 && number_of(stream) == number;
  }
  static bool copy(void* to, const void* from, std::uint64_t bytes, cudaStream_t stream,
                   std::string& error) {
    return cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream),
                   "queueing the copy that a group of one makes of a call", error);
  }

  std::unique_ptr<CudaLaunch> take_spare() {
    if (spare_.empty()) {
      auto made = std::make_unique<CudaLaunch>();
      spare_.reserve(++launches_made_);  // giving one back asks for no memory
      return made;
    }
    std::unique_ptr<CudaLaunch> taken = std::move(spare_.back());
    spare_.pop_back();
    return taken;
  }

  // Whether all work queued in the stream is done.
  static bool is_idle(void* stream, bool& idle, std::string& error) {
    const cudaError_t code = query_stream(as_stream(stream));
    idle = code == cudaSuccess;
    return code == cudaErrorNotReady || cuda_ok(code, "the stream of a call", error);
  }

  static bool check_stream(void* stream, std::string& error) {
    cudaStreamCaptureStatus status{};
    if (!cuda_ok(cudaStreamIsCapturing(as_stream(stream), &status), "the stream of a call",
                 error)) {
      return false;
    }
    if (status == cudaStreamCaptureStatusNone) return true;
    error =
        "the stream is being captured, and unjam's calls cannot be part of a CUDA graph yet: make "
        "the call, and let streams wait for it, outside of the capture";
    return false;
  }

  // ---- submission ----

  // Fills in what a call needs to run without the engine, if it can; else it has no lanes.
  void prepare(const Invocation& inv, bool fresh, SoloCall& solo) const {
    const Lowered& lowered = *inv.lowered;
    count_reason(lowered.why, fresh);
    if (lowered.why != NeedsEngine::kNo || fresh || !o_.solo) {
      solo = SoloCall{};
      return;
    }
    bind(lowered, inv, solo);
    layout_.address(inv, solo);
    if (is_carried(solo)) copies_->expect();
  }
  // What a plan is never fit for comes before what this call alone is not.
  void count_reason(NeedsEngine why, bool fresh) const {
    if (why == NeedsEngine::kNo && !o_.solo) why = NeedsEngine::kSwitchedOff;
    if (why == NeedsEngine::kNo && fresh) why = NeedsEngine::kNewKey;
    needs_engine_[static_cast<std::size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }
  // What the device reads of a command must be in memory that it reaches. One is under way at most.
  void put_command(const Invocation& inv, CudaSqe& place) {
    place.inv = inv;
    place.fresh = 0;
    if (clears_room(inv)) return;  // it is all in the invocation
    const auto* releases = static_cast<const KeyRelease*>(inv.input);
    for (std::uint64_t i = 0; i < inv.n; ++i) {
      releases_[i] = releases[i];
      std::uint16_t* members = release_members_ + i * kMaxCudaRanks;
      std::copy_n(releases[i].members, releases[i].group_size, members);
      releases_[i].members = members;
    }
    place.inv.input = releases_;
  }

  void attend(std::uint32_t what) {
    // Several threads may say something; each leaves another value.
    std::lock_guard lock(attention_mutex_);
    const std::uint32_t now = load_relaxed(link_->attention);
    store_release(link_->attention, what == kAttentionStop ? now | kAttentionStop : now + what);
  }
  void mark_gone(std::uint32_t rank) {
    std::lock_guard lock(attention_mutex_);
    std::uint64_t& word = link_->gone[rank / 64];
    store_release(word, load_relaxed(word) | std::uint64_t{1} << rank % 64);
  }

  void post() {
    bool wake = false;
    {
      std::lock_guard lock(post_mutex_);
      wake = ResidencySteps::post(link_->residency);
    }
    if (wake) work_.store(true, std::memory_order_release);
    // Also if a daemon is resident: it may leave what it finds for later.
    wake_if_asleep();
  }
  // The launcher says that it sleeps, then looks once more.
  void wake_if_asleep() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!asleep_.load(std::memory_order_seq_cst)) return;
    {
      std::lock_guard lock(mutex_);
    }
    changed_.notify_all();
  }

  // ---- completions ----

  bool completion_waits() {
    RingCq& cq = copy_.cq;
    const std::uint64_t h = load_relaxed(cq.head);
    return load_acquire(cq.words[h % cq.capacity]) >> 24 == ((h + 1) & 0xffffffffffull);
  }
  // Invocations and commands that the engine has yet to end.
  bool engine_has_work() {
    // The engine's count of what it has ended stands in the CQ itself: entries carry their number,
    // and those that were taken out are counted by the head.
    RingCq& cq = copy_.cq;
    std::uint64_t ended = load_relaxed(cq.head);
    while (load_acquire(cq.words[ended % cq.capacity]) >> 24 == ((ended + 1) & 0xffffffffffull)) {
      ++ended;
    }
    return pending_.load(std::memory_order_acquire) != ended;
  }

  // ---- the launcher ----

  std::uint64_t pokes() const {
    // Any change shows: each word only counts up.
    std::uint64_t sum = 0;
    for (std::uint32_t p = 0; p < o_.shape.ranks; ++p) {
      for (std::uint32_t l = 0; l < o_.shape.lanes; ++l) sum += load_relaxed(link_->pokes[p][l]);
    }
    return sum;
  }

  void run_launcher() {
    pthread_setname_np(pthread_self(), "unjam launcher");
    cudaSetDevice(o_.device);
    const BesideCapture beside;
    std::uint64_t poked = 0;
    Recall recall;
    BackOff back_off;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      lock.unlock();
      HostLink& h = link_->residency;
      const bool resident = load_acquire(h.resident) != 0 || load_acquire(h.queued) != 0;
      const bool has_work = engine_has_work();
      if (has_work && o_.look_at_wishes) o_.look_at_wishes();
      bool asked = false, is_poked = false, recalls = false;
      std::uint64_t now_poked = poked;
      if (!resident && has_work) {
        const bool posted = work_.exchange(false, std::memory_order_acq_rel);
        now_poked = pokes();
        // Calls in streams look themselves for what peers have sent.
        const bool beside = beside_.load(std::memory_order_acquire) != 0;
        asked = posted || load_acquire(h.rung) != 0;
        is_poked = !asked && beside && now_poked != poked;
        recalls = !asked && !is_poked && beside && recall.is_due(monotonic_ns());
        if (now_poked != poked) recall.begin(monotonic_ns());
      }
      bool failed = false;
      if (asked || is_poked || recalls) {
        const std::lock_guard launching(launch_mutex_);
        // (One that was resident after all may have looked before what the pokes announce came.)
        if (launch_if_absent()) {
          if (is_poked) launches_for_pokes_.fetch_add(1);
          if (recalls) launches_for_recalls_.fetch_add(1);
          poked = now_poked;
          back_off.reset();
        }
        failed = launch_failed_;
      }
      if (failed) usleep(kRetryUs);
      lock.lock();
      if (stopping_) break;
      if (!has_work) {
        // Asleep until something is submitted.
        asleep_.store(true, std::memory_order_seq_cst);
        // Work is counted before it is posted, and who posts looks at asleep_ afterwards.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!engine_has_work()) changed_.wait(lock);
        asleep_.store(false, std::memory_order_seq_cst);
        back_off.reset();
        continue;
      }
      lock.unlock();
      // A daemon is about to leave, and what it leaves waits for the next one.
      const std::uint64_t leaves_ns = leaves_ns_.load(std::memory_order_relaxed);
      if (back_off.begun_ns() < leaves_ns && monotonic_ns() >= leaves_ns) back_off.reset();
      back_off.pause();
      lock.lock();
    }
  }

  // With launch_mutex_. One that is resident looks at what was posted before it leaves, and rings
  // again if it leaves something behind. True: launched.
  bool launch_if_absent() {
    HostLink& h = link_->residency;
    if (load_seq_cst(h.resident) != 0) return false;
    // Before the launch: what is posted from here on is not erased. Acquire: what was posted
    // before, which the instance will see.
    work_.exchange(false, std::memory_order_acq_rel);
    if (!ResidencySteps::should_launch(h)) return false;
    return launch_daemon();
  }

  bool launch_daemon() {
    daemon_.kind = EngineKind::kDaemon;
    daemon_.serial = launches_.fetch_add(1) + 1;
    leaves_ns_.store(monotonic_ns() + std::uint64_t{o_.policy.residency_us} * 1000,
                     std::memory_order_relaxed);
    void* arguments[] = {&rank_, &daemon_};
    std::string error;
    if (launch(engine_kernel(), daemon_blocks_, o_.block_threads, arguments, stream_,
               "launching the daemon", error)) {
      launch_failed_ = false;
      daemon_.choice ^= 1;
      return true;
    }
    // Said once, not at each try.
    if (!launch_failed_) std::fprintf(stderr, "unjam: rank %u: %s\n", o_.rank, error.c_str());
    launch_failed_ = true;
    store_release(link_->residency.queued, std::uint32_t{0});
    // What asked for an instance was cleared, and has none: it asks again, of the launcher, which
    // is awake as long as there is work.
    work_.store(true, std::memory_order_release);
    return false;
  }

  const CudaRankOptions o_;
  RankState& copy_;

  // Device memory.
  void* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  RankMemory layout_;
  CudaRank* rank_ = nullptr;
  std::vector<std::uint32_t> free_keys_;
  // Pinned memory.
  void* pinned_ = nullptr;
  std::size_t pinned_bytes_ = 0;
  CudaLink* link_ = nullptr;
  CudaSubmission* sq_ = nullptr;
  std::uint64_t* cq_words_ = nullptr;
  std::uint32_t* cancelled_ = nullptr;
  KeyRelease* releases_ = nullptr;
  std::uint16_t* release_members_ = nullptr;

  Resources engine_, call_;
  bool early_ = false;    // calls without the engine are launched early
  unsigned cluster_ = 1;  // of calls' blocks that come in such
  // As many as there are lanes, or more that choose theirs, see lane_choice.h.
  unsigned daemon_blocks_ = 0;
  std::string name_;
  mutable std::mutex refreshing_;
  cudaStream_t stream_ = nullptr;          // of the daemon
  cudaStream_t control_stream_ = nullptr;  // of copies for reports
  cudaStream_t copy_stream_ = nullptr;     // of queue_copy(), where a call has none
  FirstLaunch first_launch_;
  std::unique_ptr<CopyThread> copies_;
  std::string copies_failure_;  // why nobody carries them out
  EngineLaunch daemon_;
  CallInFront call_in_front_;
  std::vector<std::unique_ptr<CudaLaunch>> spare_;  // each thread that launches takes one
  std::size_t launches_made_ = 0;
  std::uint64_t sq_written_ = 0;
  std::atomic<std::uint64_t> pending_{0};  // submissions and calls, ever
  // Submissions whose completion was not taken out: those that a daemon may be needed for. (Calls
  // in streams bring their engine.)
  std::atomic<std::uint64_t> beside_{0};
  std::vector<bool> besides_;  // by slot
  // By slot: the stream, as CUDA numbers them, that queue_copy() has put the call into; 0: none.
  std::vector<unsigned long long> copied_in_;
  std::atomic<std::uint64_t> launches_{0}, launches_for_pokes_{0}, launches_for_recalls_{0};
  mutable std::array<std::atomic<std::uint64_t>, kNumNeedsEngine> needs_engine_{};  // calls, by why
  std::atomic<std::uint64_t> leaves_ns_{0};  // when the daemon does, unless somebody waits

  std::mutex attention_mutex_, post_mutex_;
  std::mutex launch_mutex_;     // guards daemon_ and launch_failed_, and one launch at a time
  bool launch_failed_ = false;  // the last one; the launcher tries again
  static constexpr useconds_t kRetryUs = 10'000;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> asleep_{false};
  std::atomic<bool> work_{false};
  bool stopping_ = false;
  std::thread launcher_;
};

}  // namespace

std::uint64_t cuda_engine_bytes(const CudaRankOptions& options) {
  return RankMemory(options).bytes();
}

std::unique_ptr<StreamDaemon> start_cuda_rank(const CudaRankOptions& options, RankState& copy,
                                              std::string& error) {
  auto daemon = std::make_unique<CudaDaemon>(options, copy);
  if (!daemon->start(error)) return nullptr;
  return daemon;
}

}  // namespace unjam
