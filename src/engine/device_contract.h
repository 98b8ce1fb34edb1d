// What the engine asks of a device, as concepts: each requirement has its meaning beside it. A host
// of threads, a GPU's block and the tests' made-up devices all satisfy EngineDevice; what a device
// may have besides is found by the traits at the end.
//
// "Of the lead" is called by one thread, "of control threads" by all of them together unless it
// says "by any", and the rest by any thread of the block. The block's parts and its barriers are
// explained in docs/internals/engine.md.
#pragma once

#include <concepts>
#include <cstdint>

#include "base/types.h"
#include "device/leaf.h"
#include "engine/cq.h"
#include "engine/doorbell.h"
#include "engine/hand_over.h"
#include "engine/invocation.h"
#include "engine/slot_batch.h"
#include "transport/connector.h"

namespace unjam {

// The threads of a block, their barriers, and the leaf that moves a slice.
template <class Dev>
concept DrivesABlock = requires(Dev& dev, const SliceJob& job, bool x, std::uint32_t polls) {
  typename Dev::Handle;                              // how the engine holds it: reference or value
  { Dev::kPipelines } -> std::convertible_to<bool>;  // satisfies MovesSlicesInAPipeline
  { Dev::kInlinePacketFlags } -> std::convertible_to<bool>;  // has packet_leaf(), see below
  { Dev::kLaneInShared } -> std::convertible_to<bool>;  // LaneState lies in BlockShared meanwhile
  { Dev::kHostWatches } -> std::convertible_to<bool>;   // the host reads keys' figures at any time
  { dev.controls() } -> std::convertible_to<bool>;      // whether this is a control thread
  dev.sync();                                           // barrier of the block; orders memory
  dev.leaf(job);  // moves a slice: by all threads together, or by a group of movers
  // Of control threads:
  { dev.leads() } -> std::convertible_to<bool>;            // one thread's answer is yes
  { dev.first() } -> std::convertible_to<std::uint32_t>;   // this one's part of a loop over peers,
  { dev.stride() } -> std::convertible_to<std::uint32_t>;  // also by posters among themselves
  { dev.all(x) } -> std::convertible_to<bool>;  // a vote: whether all say so. Orders nothing
  dev.sync_control();                           // barrier of the control threads; orders memory
  dev.relax(polls);                             // between failed polls
  dev.delay();                                  // fault injection, before waits
};

// What peers, other lanes and the host are told, and tell. By any control thread.
template <class Dev>
concept SpeaksToOthers =
    requires(Dev& dev, std::uint32_t rank, std::uint32_t lane, RingFor what, std::uint16_t slot,
             Outcome outcome, const Invocation& inv, std::uint64_t& word, std::uint64_t value) {
      // publish() stores a word. Behind a fence() of this thread it releases what came before the
      // fence; on a host publish() does so by itself. If there is a fence_lanes(), that is a
      // fence() for this rank's lanes alone.
      dev.fence();
      Dev::publish(word, value);
      // Tells a lane that there is something for it; for each lane by one thread at a time, after
      // what it tells of. If there is a posted(rank, lane, word), it comes first: true says that
      // the device takes the word there, which this thread has published, and rings then.
      dev.ring(rank, lane, what);
      dev.ring_own_lanes();  // this rank's other lanes: something may be ready
      { dev.cancelled(slot) } -> std::convertible_to<bool>;  // whether the host wants that
      {
        dev.cancelled_by_any(slot)
      } -> std::convertible_to<bool>;                       // behind what any lane saw of it
      { dev.handed_over(slot) } -> std::same_as<HandOver>;  // what is done of it; once for each
      { dev.ready(inv) } -> std::convertible_to<bool>;  // its input is there (Invocation::ticket)
      // Writes the completion and tells the host. A fence() of the thread is behind all that the
      // invocation has stored.
      dev.complete(slot, outcome);
    };

// How long the engine stays, and what it is submitted. A device whose ready(), cancelled(),
// stopped() or submissions change without a ring must not let try_quit() succeed before it has
// looked at them itself: what came meanwhile would wait for ever.
template <class Dev>
concept HostsALane = requires(Dev& dev, std::uint32_t epoch, std::uint16_t slot) {
  { dev.now_ns() } -> std::convertible_to<std::uint64_t>;
  // Of the lead:
  { dev.epoch() } -> std::convertible_to<std::uint32_t>;        // of the doorbell, before a look
  { dev.try_quit(epoch, epoch) } -> std::convertible_to<bool>;  // no longer resident: leave
  dev.hold_sleep(epoch);  // hold policy: sleep without leaving
  dev.attend();           // at the beginning of each pass, behind epoch(): slow looks
  { dev.submissions_wait() } -> std::convertible_to<bool>;
  { dev.stopped() } -> std::convertible_to<bool>;      // the host wants it to leave
  { dev.called_away() } -> std::convertible_to<bool>;  // leave soon: its driver has else to do
  dev.ended(slot);                                     // the lane is through with an invocation
  { dev.is_over() } -> std::convertible_to<bool>;      // it leaves as soon as the queue is empty
  { dev.threshold(epoch) } -> std::convertible_to<std::uint32_t>;  // polls, where the policy has n
  { dev.residency_matters() } -> std::convertible_to<bool>;        // it leaves after residency_us
};

// Submissions, which lane 0 alone takes: one, left in rank.invocations[slot], or a batch of them by
// all control threads together.
template <class Dev>
concept TakesSubmissions = requires(Dev& dev, std::uint16_t& slot) {
  { dev.next_submission(slot) } -> std::convertible_to<bool>;
} || requires(Dev& dev) {
  { dev.next_submissions() } -> std::same_as<SlotBatch>;
};

// Movers and posters of a pipeline of slices (slice_pipeline.h).
template <class Dev>
concept MovesSlicesInAPipeline = requires(Dev& dev, std::uint32_t& count, std::uint32_t value) {
  { dev.pipelines() } -> std::convertible_to<bool>;        // whether this block has the three parts
  { dev.posts() } -> std::convertible_to<bool>;            // whether this thread is a poster
  { dev.groups() } -> std::convertible_to<std::uint32_t>;  // of movers: 1 or 2
  { dev.group() } -> std::convertible_to<std::uint32_t>;   // this one's
  { dev.movers() } -> std::convertible_to<std::uint32_t>;  // by how many a group's end is counted
  dev.stored(count);  // by movers: this thread's part is done. Adds; releases at the block's scope
  { dev.posters_first() } -> std::convertible_to<bool>;             // one poster's answer is yes
  dev.sync_posters();                                               // the posters' barrier
  { dev.load_block(count) } -> std::convertible_to<std::uint32_t>;  // acquire at the block's scope
  dev.store_block(count, value);                                    // release
};

// Batches of calls (batches.h; docs/internals/batches.md). run_batch(tries, n, turn,
// end_early) fills in the ends of the tries and ends with a barrier.
template <class Dev>
inline constexpr bool kDoesBatches = [] {
  if constexpr (requires { Dev::kBatches; }) return Dev::kBatches;
  return false;
}();

// Slices by a carrier, such as a copy engine. carry(slot, job, word, rank), of the lead: a carrier
// copies the slice of the invocation in that slot at its own pace, publishes the word, which is for
// that rank, and tells it as the engine would. drained(slot), of the lead: whether all that this
// lane gave to carriers for that invocation is copied and published (acquire); when it comes to be,
// this lane is rung.
template <class Dev>
inline constexpr bool kHasCarriers = [] {
  if constexpr (requires { Dev::kCarries; }) return Dev::kCarries;
  return false;
}();

// One control thread, and any number of neighbours and parts; else kAtHand at most.
template <class Dev>
inline constexpr bool kIsWide = [] {
  if constexpr (requires { Dev::kWide; }) return Dev::kWide;
  return false;
}();

// gate(rank): a word that counts what came from a remote rank, or nullptr (readiness.h).
template <class Dev>
inline constexpr bool kHasGates = requires(Dev& dev) { dev.gate(0u); };

// packet_leaf(job, polls), for packets with flags inside: polls the flags of the incoming slices so
// often (a combine's sources but local_src; of copies those without dst_slot, copy_elems long),
// votes, and if all are there moves the slice. False: something is missing, nothing was stored, and
// nobody reads the job any more.
template <class Dev>
concept MovesPackets = requires(Dev& dev, const SliceJob& job, std::uint32_t polls) {
  { dev.packet_leaf(job, polls) } -> std::convertible_to<bool>;
};

// Hooks that a device may have, each found by its name: a misspelt one is silently left out, so
// devices assert that theirs are found.
//   here(shared)            static: the block's memory as the device wants it named
//   add(figure, by)         static: adds to a figure that control threads share
//   fence_lanes()           as fence(), for this rank's lanes alone
//   posted(rank, lane, word)  true: the device takes the word to that rank, and rings then
//   marked(rank, lane)      behind LaneTransport::mark_void() for that rank, by the same thread
//   look_at_submissions()   of the lead, within long turns, for what submissions_wait() says then;
//                           else epoch() is called
//   kLateNs                 how soon at the latest it leaves when called away, in nanoseconds

template <class Dev>
concept EngineDevice = DrivesABlock<Dev> && SpeaksToOthers<Dev> && HostsALane<Dev> &&
                       TakesSubmissions<Dev> && (!Dev::kPipelines || MovesSlicesInAPipeline<Dev>) &&
                       (!Dev::kInlinePacketFlags || MovesPackets<Dev>) &&
                       // Posters would have to hand slices to carriers.
                       !(Dev::kPipelines && kHasCarriers<Dev>);

}  // namespace unjam
