#include "device/cuda/host/daemon_launcher.h"

#include <pthread.h>

#include <cstdio>

#include "base/atomics.h"
#include "base/clock.h"
#include "device/cuda/dev/residency.h"
#include "device/cuda/host/back_off.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/recall.h"
#include "device/cuda/kernels/kernels.h"

namespace unjam {

void DaemonLauncher::start(CudaLink* link, CudaRank* rank, cudaStream_t stream) {
  link_ = link;
  rank_ = rank;
  stream_ = stream;
  thread_ = std::thread([this] { run(); });
}

void DaemonLauncher::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DaemonLauncher::post() {
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
void DaemonLauncher::wake_if_asleep() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  {
    std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

// By the thread that has submitted, which has just made other CUDA calls: a launch takes it a
// twentieth of what waking the launcher takes.
void DaemonLauncher::post_and_attempt() {
  post();
  const std::unique_lock lock(launch_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // somebody launches
  const OnDevice on(o_.device);
  launch_if_absent();
}

bool DaemonLauncher::completion_waits() const {
  const std::uint64_t h = load_relaxed(cq_.head);
  return load_acquire(cq_.words[h % cq_.capacity]) >> 24 == ((h + 1) & 0xffffffffffull);
}

// Invocations and commands that the engine has yet to end.
bool DaemonLauncher::engine_has_work() const {
  // The engine's count of what it has ended stands in the CQ itself: entries carry their number,
  // and those that were taken out are counted by the head.
  std::uint64_t ended = load_relaxed(cq_.head);
  while (load_acquire(cq_.words[ended % cq_.capacity]) >> 24 == ((ended + 1) & 0xffffffffffull)) {
    ++ended;
  }
  return pending_.load(std::memory_order_acquire) != ended;
}

std::uint64_t DaemonLauncher::pokes() const {
  // Any change shows: each word only counts up.
  std::uint64_t sum = 0;
  for (std::uint32_t p = 0; p < o_.shape.ranks; ++p) {
    for (std::uint32_t l = 0; l < o_.shape.lanes; ++l) sum += load_relaxed(link_->pokes[p][l]);
  }
  return sum;
}

void DaemonLauncher::run() {
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
bool DaemonLauncher::launch_if_absent() {
  HostLink& h = link_->residency;
  if (load_seq_cst(h.resident) != 0) return false;
  // Before the launch: what is posted from here on is not erased. Acquire: what was posted
  // before, which the instance will see.
  work_.exchange(false, std::memory_order_acq_rel);
  if (!ResidencySteps::should_launch(h)) return false;
  return launch_daemon();
}

bool DaemonLauncher::launch_daemon() {
  daemon_.kind = EngineKind::kDaemon;
  daemon_.serial = launches_.fetch_add(1) + 1;
  leaves_ns_.store(monotonic_ns() + std::uint64_t{o_.policy.residency_us} * 1000,
                   std::memory_order_relaxed);
  void* arguments[] = {&rank_, &daemon_};
  std::string error;
  if (kernels_.launch(engine_kernel(), kernels_.daemon_blocks(), o_.block_threads, arguments,
                      stream_, "launching the daemon", error)) {
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

}  // namespace unjam
