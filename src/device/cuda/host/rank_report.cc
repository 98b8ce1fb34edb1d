#include "device/cuda/host/rank_report.h"

#include <time.h>

#include <algorithm>
#include <vector>

#include "base/atomics.h"
#include "base/clock.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/nvlink.h"
#include "device/cuda/kernels/kernels.h"

namespace unjam {
namespace {

// How many calls were handed to the engine, by why; those of no reason are the others.
void put_reasons(const std::array<std::atomic<std::uint64_t>, kNumNeedsEngine>& calls_by,
                 JsonWriter& w) {
  w.key("calls_by_engine").begin_object();
  for (int i = 1; i < kNumNeedsEngine; ++i) {
    const std::uint64_t calls =
        calls_by[static_cast<std::size_t>(i)].load(std::memory_order_relaxed);
    if (calls != 0) w.field(to_string(static_cast<NeedsEngine>(i)), calls);
  }
  w.end_object();
}
// Slices that copy engines were asked for.
void put_copies(const RankReport::Figures& of, const CudaRank& now, JsonWriter& w) {
  w.key("copy_engines").begin_object();
  w.field("on", of.copies != nullptr);
  if (of.copies != nullptr) {
    const CopyThread::Figures figures = of.copies->figures();
    w.field("dma_posts", figures.posts);
    w.field("dma_copies", figures.copies);
    w.field("dma_batches", figures.batches);
    w.field("dma_bytes", figures.bytes);
    w.field("dma_dropped", figures.dropped);
    w.field("dma_taken_back", now.copies.taken_back);
    const std::string failure =
        of.copies_failure.empty() ? of.copies->failure() : of.copies_failure;
    if (!failure.empty()) w.field("failure", failure);
  }
  w.end_object();
}
void put_resources(const KernelResources& kernel, JsonWriter& w) {
  w.field("registers_per_thread", kernel.attributes.numRegs);
  w.field("shared_bytes_per_block", kernel.attributes.sharedSizeBytes + kEngineSharedBytes);
  w.field("local_bytes_per_thread", kernel.attributes.localSizeBytes);
  w.field("blocks_per_sm", kernel.blocks_per_sm);
}

}  // namespace

void RankReport::refresh(RankState& copy) {
  const OnDevice on(of_.options.device);
  const BesideCapture beside;
  std::lock_guard lock(mutex_);
  // Lanes without a driver are as they were left. Which those are is looked at before their state
  // is, so that is what was left; and again behind the traces, with what they have counted since.
  // Whoever drove one meanwhile is still there, or has left it with another count.
  std::vector<LaneState> lanes(of_.options.shape.lanes), later(of_.options.shape.lanes);
  std::uint64_t driven = 0, driven_later = 0;
  const std::uint64_t places = TraceRing::places_for(of_.options.trace_events);
  std::vector<TraceEvent> events(places * of_.options.shape.lanes);
  bool read = true;  // what could not be read stays as it was: figures never fall
  const auto fetch = [&](void* to, const void* from, std::size_t bytes) {
    read = read && cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_) == cudaSuccess;
  };
  fetch(&driven, &rank_->lanes, sizeof(driven));
  fetch(lanes.data(), of_.memory.lanes(), lanes.size() * sizeof(LaneState));
  for (std::uint32_t l = 0; l < of_.options.shape.lanes && places != 0; ++l) {
    fetch(&events[l * places], of_.memory.trace(l), places * sizeof(TraceEvent));
  }
  if (places != 0) {
    fetch(&driven_later, &rank_->lanes, sizeof(driven_later));
    fetch(later.data(), of_.memory.lanes(), later.size() * sizeof(LaneState));
  }
  if (cudaStreamSynchronize(stream_) != cudaSuccess || !read) return;
  timespec real{};
  clock_gettime(CLOCK_REALTIME, &real);
  // The GPU's clock is the host's time of day.
  const std::uint64_t shift = static_cast<std::uint64_t>(real.tv_sec) * 1'000'000'000 +
                              static_cast<std::uint64_t>(real.tv_nsec) - monotonic_ns();
  for (std::uint32_t l = 0; l < of_.options.shape.lanes; ++l) {
    LaneState& to = copy.lanes[l];
    to.stats = lanes[l].stats;
    store_release(to.running, lanes[l].running);
    const std::uint64_t count = lanes[l].trace.written;
    const bool rests = ((driven | driven_later) >> l & 1) == 0 && later[l].trace.written == count;
    to.trace.keep(events.data() + l * places, count, rests);
    for (std::uint64_t i = 0; i < to.trace.written; ++i) to.trace.events[i].time_ns -= shift;
  }
}

std::string RankReport::footprint(const Figures& figures) const {
  const KernelResources& engine = of_.kernels.engine();
  JsonWriter w;
  w.begin_object();
  w.field("device", of_.options.device);
  w.field("name", of_.kernels.device_name());
  w.field("blocks", of_.options.shape.lanes);
  w.field("threads_per_block", of_.options.block_threads);
  w.field("blocks_per_cluster_of_calls", of_.kernels.cluster());
  w.field("blocks_of_a_daemon", of_.kernels.daemon_blocks());  // of which one a lane stays
  put_resources(engine, w);
  w.field("sms",
          (static_cast<int>(of_.options.shape.lanes) + std::max(engine.blocks_per_sm, 1) - 1) /
              std::max(engine.blocks_per_sm, 1));
  // (Small ones have fewer threads, and few of them all lanes.)
  w.key("calls_in_streams").begin_object();
  w.field("blocks_at_most", of_.options.shape.lanes);
  w.field("threads_per_block_at_most", of_.options.block_threads);
  put_resources(of_.kernels.call(), w);
  w.end_object();
  w.field("engine_bytes", figures.engine_bytes);
  w.field("key_bytes", key_bytes());
  // The paper's measure: 1,000 collectives, a block. (Shared memory is as much for any number.)
  w.field("global_bytes_of_1000_keys", 1000 * key_bytes());
  w.field("global_bytes_of_1000_keys_per_block", 1000 * key_bytes() / of_.options.shape.lanes);
  w.field("keys_at_most", of_.options.keys);
  w.field("pinned_bytes", figures.pinned_bytes);
  w.field("launches", of_.launcher.launches());
  // Of those by the launcher: since peers had poked, and were looked at again a while later.
  w.field("launches_for_pokes", of_.launcher.launches_for_pokes());
  w.field("launches_for_recalls", of_.launcher.launches_for_recalls());
  w.field("lines", of_.options.lines);
  w.field("whole_lines", of_.options.whole_lines);
  w.field("links", nvlink_answer().why);
  if (const std::unique_ptr<const CudaRank> now = state()) {
    w.field("calls_without_engine", now->calls_without_engine);
    w.field("calls_begun_early", now->early_calls);
    put_copies(figures, *now, w);
    put_reasons(*figures.needs_engine, w);
    describe(*now, w);
  }
  w.end_object();
  return w.text();
}

// A copy, word by word of any time; null if the device does not answer.
std::unique_ptr<const CudaRank> RankReport::state() const {
  const OnDevice on(of_.options.device);
  const BesideCapture beside;
  std::lock_guard lock(mutex_);
  auto now = std::make_unique<CudaRank>();
  if (cudaMemcpyAsync(now.get(), rank_, sizeof(CudaRank), cudaMemcpyDefault, stream_) !=
          cudaSuccess ||
      cudaStreamSynchronize(stream_) != cudaSuccess) {
    return nullptr;
  }
  return now;
}

// Who drives what, and what is under way: for whoever wonders why nothing moves.
void RankReport::describe(const CudaRank& now, JsonWriter& w) const {
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

std::size_t RankReport::key_bytes() const {
  return sizeof(KeyState) + of_.options.shape.lanes *
                                (sizeof(LaneKey) + of_.options.shape.ranks *
                                                       (sizeof(OutEndpoint) + sizeof(InEndpoint)));
}

}  // namespace unjam
