#include "device/cuda/host/cuda_daemon.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/unlocked.h"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/host/back_off.h"
#include "device/cuda/host/bind.h"
#include "device/cuda/host/copy_thread.h"
#include "device/cuda/host/cuda_boxes.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/daemon_launcher.h"
#include "device/cuda/host/event_pool.h"
#include "device/cuda/host/kernel_launcher.h"
#include "device/cuda/host/overlap_rule.h"
#include "device/cuda/host/rank_memory.h"
#include "device/cuda/host/rank_report.h"
#include "device/cuda/host/streams.h"
#include "device/cuda/kernels/kernels.h"

namespace unjam {
namespace {

constexpr std::uint32_t kMostReleases = 256;  // of one command

class CudaDaemon : public StreamDaemon {
 public:
  CudaDaemon(const CudaRankOptions& options, RankState& copy)
      : o_(options),
        copy_(copy),
        layout_(o_),
        kernels_(o_),
        launcher_(o_, kernels_, copy.cq),
        report_({o_, layout_, kernels_, launcher_}),
        boxes_(o_.device),
        besides_(options.slots),
        copied_in_(options.slots) {}

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
    if (!allocate(error) || !fill(error) || !make_streams(error) || !kernels_.load(error) ||
        !set_up_keys(error)) {
      return false;
    }
    // (Without, the rank starts all the same, and cannot reshard.)
    if (!boxes_.start(boxes_failure_) && boxes_failure_.empty()) boxes_failure_ = "unknown error";
    start_copies();
    report_.start(link_, rank_, control_stream_);
    launcher_.start(link_, rank_, stream_);
    return true;
  }

  void stop() override {
    if (!launcher_.runs()) return;
    attend(kAttentionStop);
    launcher_.stop();
    const OnDevice on(o_.device);
    cudaStreamSynchronize(stream_);
    if (copies_ != nullptr) copies_->stop();
    boxes_.stop();
  }

  BoxMover* boxes(std::string& why) override {
    why = boxes_failure_;
    return boxes_failure_.empty() ? &boxes_ : nullptr;
  }

  // ---- submission ----

  void submit(const Invocation& inv, const KeyState* fresh) override {
    CudaSubmission& place = sq_[sq_written_ % o_.slots];
    if (inv.key == nullptr) {
      put_command(inv, place.sqe);
    } else {
      layout_.put(inv, fresh, place.sqe);
      prepare(inv, fresh != nullptr, place.call);
      place.sqe.inv.batch = batch_of(*inv.lowered, place.call);
    }
    launcher_.count_submission();
    launcher_.count_beside();
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
    launcher_.post();
  }

  void ring(std::uint32_t) override { launcher_.post(); }
  void ring_all() override { launcher_.post(); }
  void ring_and_attempt() override { launcher_.post_and_attempt(); }

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
    return kernels_.launch(mark_kernel(), 1, 1, arguments, as_stream(stream), "queueing a mark",
                           error);
  }

  LowerLimits lower_limits() const override {
    return {o_.block_threads, o_.shape.lanes, o_.whole_lines, o_.in_stream_patience_us,
            o_.shape.guaranteed_slot_bytes};
  }

  bool queue_call(std::unique_lock<std::mutex>& lock, void* stream, const Invocation& inv,
                  const KeyState* fresh, std::string& error) override {
    std::unique_ptr<CudaLaunch> taken = take_spare();
    CudaLaunch& l = *taken;
    l.slot = inv.slot;
    l.serial = inv.serial;
    layout_.put(inv, fresh, l.sqe);
    const Geometry& g = inv.geometry;
    prepare(inv, fresh != nullptr, l.call);
    l.sqe.inv.batch = batch_of(*inv.lowered, l.call);
    const unsigned threads = l.call.lanes != 0 ? inv.lowered->threads : o_.block_threads;
    // With the engine, one more for the first lane, see call_by_engine.cuh.
    const unsigned blocks = l.call.lanes == 0 && g.first_lane != 0 ? g.lanes + 1u : g.lanes;
    // (Nobody asks for the stream of other calls, which would pay for that.)
    const bool overlaps = o_.in_stream_overlap && l.call.by_slots;
    l.call.follows = overlap_rule_.next(inv, l.call, overlaps ? number_of(stream) : 0);
    void* arguments[] = {&rank_, &l};
    // The blocks of such a call may come while what is in front of it ends: they wait for that.
    const bool early = kernels_.early() && l.call.lanes != 0;
    bool queued = false;
    {
      const Unlocked unlocked(lock);
      const OnDevice on(o_.device);
      queued = check_stream(stream, error) &&
               kernels_.launch(is_carried(l.call) ? carried_call_kernel() : call_kernel(), blocks,
                               threads, arguments, as_stream(stream), "queueing a call", error,
                               early, kernels_.cluster_of(blocks));
    }
    spare_.push_back(std::move(taken));
    if (!queued) return false;
    launcher_.count_submission();
    launcher_.wake_if_asleep();  // it looks whether a call lacks drivers
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
        const std::unique_lock first = kernels_.guard(s);
        queued =
            (after == nullptr ||
             cuda_ok(cudaStreamWaitEvent(s, static_cast<cudaEvent_t>(after), 0),
                     "queueing a wait for the other call of a rank's message to itself", error)) &&
            (bytes == 0 || copy(inv.output, inv.input, bytes, s, error)) &&
            kernels_.launch(end_kernel(), 1, 1, arguments, s, "queueing a call's end", error);
      }
    }
    if (!queued) {
      copied_in_[inv.slot] = 0;  // the slot's next call is another's
      return false;
    }
    launcher_.count_submission();
    // Nothing is to be launched. But the copy's end may have been counted before it was, so that
    // the launcher has taken a call of the engine's for it, and sleeps.
    launcher_.wake_if_asleep();
    return true;
  }

  std::shared_ptr<void> note(std::unique_lock<std::mutex>& lock, void* stream,
                             std::string& error) override {
    const Unlocked unlocked(lock);
    const OnDevice on(o_.device);
    return check_stream(stream, error) ? events_.record(as_stream(stream), error) : nullptr;
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
      queued = check_stream(stream, error) &&
               (is_stream(stream, copied_in) ||
                kernels_.launch(engine_kernel(), 1, o_.block_threads, arguments, as_stream(stream),
                                "queueing a wait", error));
    }
    return queued;
  }

  // ---- completions ----

  void ended(std::uint16_t slot) override {
    if (besides_[slot]) launcher_.end_beside();
    besides_[slot] = false;
    copied_in_[slot] = 0;
  }

  void wait(EventCount& completions, std::uint32_t epoch, std::int64_t timeout_us) override {
    const std::uint64_t deadline =
        timeout_us < 0 ? UINT64_MAX
                       : monotonic_ns() + static_cast<std::uint64_t>(timeout_us) * 1000;
    BackOff back_off;
    while (!launcher_.completion_waits() && completions.epoch() == epoch &&
           monotonic_ns() < deadline) {
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

  void refresh(RankState& copy) override { report_.refresh(copy); }
  std::string footprint() const override {
    return report_.footprint({memory_bytes_ + boxes_.bytes(),
                              pinned_bytes_ + BoxMover::kPinnedBytes, copies_.get(),
                              copies_failure_, &needs_engine_});
  }

 private:
  // ---- set up ----

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
          CopyThread::Options{o_.device, o_.rank, o_.shape.ranks, o_.shape.pool_bytes(),
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

  // Whether copy engines may have a part in it.
  bool is_carried(const StreamCall& call) const {
    return copies_ != nullptr && copies_failure_.empty() && call.lanes != 0 && call.by_slots &&
           call.steps.carried;
  }

  bool set_up_keys(std::string& error) {
    CudaKeys keys = layout_.keys();
    void* arguments[] = {&keys};
    return cuda_ok(cudaStreamSynchronize(nullptr), "filling the engine's memory", error) &&
           // In the daemon's stream, which has its queue from here on, see first_launch.h.
           kernels_.launch(keys_kernel(), 64, 256, arguments, stream_, "setting up keys", error) &&
           cuda_ok(cudaStreamSynchronize(stream_), "setting up keys", error);
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

  bool note_stream(std::uint16_t slot, cudaStream_t stream, std::string& error) {
    return cuda_ok(cudaStreamGetId(stream, &copied_in_[slot]), "the stream of a call", error);
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

  // ---- submission ----

  // Fills in what a call needs to run without the engine, if it can; else it has no lanes.
  void prepare(const Invocation& inv, bool fresh, StreamCall& call) const {
    const Lowered& lowered = *inv.lowered;
    count_reason(lowered.why, fresh);
    if (lowered.why != NeedsEngine::kNo || fresh || !o_.in_stream) {
      call = StreamCall{};
      return;
    }
    bind(lowered, inv, call);
    layout_.address(inv, call);
    if (is_carried(call)) copies_->expect();
  }
  // What a plan is never fit for comes before what this call alone is not.
  void count_reason(NeedsEngine why, bool fresh) const {
    if (why == NeedsEngine::kNo && !o_.in_stream) why = NeedsEngine::kSwitchedOff;
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

  const CudaRankOptions o_;
  RankState& copy_;

  // Device memory.
  void* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  RankMemory layout_;
  KernelLauncher kernels_;
  DaemonLauncher launcher_;
  RankReport report_;
  EventPool events_;
  CudaBoxes boxes_;
  std::string boxes_failure_;  // why it did not start
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

  cudaStream_t stream_ = nullptr;          // of the daemon
  cudaStream_t control_stream_ = nullptr;  // of copies for reports
  cudaStream_t copy_stream_ = nullptr;     // of queue_copy(), where a call has none
  std::unique_ptr<CopyThread> copies_;
  std::string copies_failure_;  // why nobody carries them out
  OverlapRule overlap_rule_;
  std::vector<std::unique_ptr<CudaLaunch>> spare_;  // each thread that launches takes one
  std::size_t launches_made_ = 0;
  std::uint64_t sq_written_ = 0;
  std::vector<bool> besides_;  // by slot
  // By slot: the stream, as CUDA numbers them, that queue_copy() has put the call into; 0: none.
  std::vector<unsigned long long> copied_in_;
  mutable std::array<std::atomic<std::uint64_t>, kNumNeedsEngine> needs_engine_{};  // calls, by why
  std::mutex attention_mutex_;
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
