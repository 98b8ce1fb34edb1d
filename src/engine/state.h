// What an engine owns in device memory: it survives every quit. Pointers are set by the runtime.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "device/leaf.h"
#include "engine/agreed_order.h"
#include "engine/cq.h"
#include "engine/invocation.h"
#include "engine/policy.h"
#include "engine/queues.h"
#include "engine/task_queue.h"
#include "engine/trace_ring.h"
#include "transport/connector.h"

namespace unjam {

// Active context slots of a block, a direct-mapped cache (paper Sec. 5).
inline constexpr std::uint32_t kActiveContexts = 8;

inline constexpr std::uint32_t kCachedPrimitives = 8;

// What an active context, or a block, has at hand of as many ranks or parts. A plan whose
// primitives name more neighbours (kWidePeer) has two of them there at a time, see
// Contexts::bring(); parts beyond are computed.
inline constexpr std::uint32_t kAtHand = 72;
static_assert(kMostNeighbours < kAtHand && kFirstSet <= kAtHand && kMaxCudaRanks <= kAtHand);

struct alignas(16) ActiveContext {
  Invocation inv;
  DynamicContext dyn;
  // What the key's state says that does not change while an invocation runs.
  LaneKey* key = nullptr;
  OutEndpoint* out = nullptr;  // the key's, at this lane
  InEndpoint* in = nullptr;
  std::uint64_t tag = 0;
  std::uint64_t group = 0;
  std::uint64_t passes = 0;  // of the program: how many chunks this lane makes, and the lag
  Primitive program[kCachedPrimitives];  // the first of them
  // By neighbour, as the program names them: group ranks, and ranks in the job.
  std::uint16_t neighbours[kAtHand] = {};
  std::uint16_t members[kAtHand] = {};
  PeerSet sets[kMostSets];
  Range parts[kAtHand] = {};  // what this lane carries of each part
  // The key's endpoints at neighbours, which every slice looks at. Nobody else changes them while
  // the lane has the invocation in its queue; what changes here is stored there, too.
  Wire outs[kAtHand];
  Wire ins[kAtHand];
  // The outputs of neighbours that have invited to store into them, as
  // LaneTransport::invited_output() found them.
  unsigned char* invited[kAtHand] = {};
  std::uint16_t slot = kNoSlot;  // which invocation is cached here
  std::uint16_t dirty = 0;       // dyn has changed since it was loaded: save before eviction
};

// Why an engine leaves its lane.
enum class QuitFor : std::uint8_t { kCalledAway, kIdle, kStuck, kResidency };

// What an engine does about an invocation besides moving its data (the paper's Fig. 7): timed while
// traces are kept, by the lane's leading thread, for its own part of it.
enum class Step : std::uint8_t { kReadSqe, kPrepare, kLoadContext, kSaveContext, kWriteCqe };
inline constexpr std::size_t kSteps = 5;
struct StepTime {
  std::uint64_t count = 0;
  std::uint64_t ns = 0;
};

// One writer (the lane's leading thread), read by anybody at any time with relaxed loads. They only
// grow.
struct LaneStats {
  std::uint64_t preemptions = 0;
  std::uint64_t quantum_switches = 0;
  std::uint64_t context_loads = 0;
  std::uint64_t context_saves = 0;
  std::uint64_t spins = 0;
  std::uint64_t slices = 0;
  std::uint64_t received = 0;  // of them, with something from a peer
  std::uint64_t bytes_sent = 0;
  std::uint64_t borrowed = 0;
  std::uint64_t into_outputs = 0;  // slices that were stored straight into a peer's output
  std::uint64_t batched = 0;       // invocations whose part here was done in a batch
  std::uint64_t starts = 0;
  std::uint64_t quits = 0;
  std::uint64_t idle_quits = 0;   // of them, with nothing in the queue
  std::uint64_t stuck_quits = 0;  // with something, none of which could move
  std::uint64_t residency_quits = 0;
  std::uint64_t completed = 0;
  std::uint64_t passes = 0;
  std::uint64_t no_connector = 0;  // attempts that found every connector in use
  std::uint64_t orderings = 0;     // times that the queue was put in order, see agreed_order.h
  std::uint64_t queue_peak = 0;
  StepTime steps[kSteps];
};

// The driver's alone (but for the figures), so a device may keep it in faster memory meanwhile.
struct alignas(16) LaneState {
  LaneTransport transport;
  TaskQueue queue;
  DynamicContext* contexts = nullptr;  // [slots]: the context buffer
  LaneStats stats;
  // Of the invocations in the queue, those that are in `stats.completed` already: the lane had done
  // them by itself before the engine saw them.
  std::uint64_t counted = 0;
  std::uint64_t open_since_ns =
      0;  // what is put in order together was first put so: agreed_order.h
  Disorder disorder;
  // Of those in the queue, how many are short, see LaneView::is_short().
  std::uint64_t shorts = 0;
  std::uint64_t urgent_taken = 0;  // see Mailbox
  // What runs now, for diagnosis: (count of changes) << 16 | (slot + 1, 0: nothing).
  std::uint64_t running = 0;
  TraceRing trace;
};

struct Mailbox : SpscRing<std::uint16_t> {
  // The producer's: how many of the entries so far want to be looked at soon
  // (LaneView::is_urgent()). A hint for the consumer, which counts those that it has taken
  // (LaneState::urgent_taken): relaxed, for one that is seen before its entry is found with it, or
  // a moment later.
  alignas(kFalseSharingBytes) std::uint64_t urgent = 0;
};

struct Sqe {
  Invocation inv;  // inv.slot says which slot
};

struct RankState {
  SpscRing<Sqe> sq;
  RingCq cq;
  Invocation* invocations = nullptr;   // [slots]: static contexts
  std::uint32_t* remaining = nullptr;  // [slots]: lanes that have yet to finish
  std::uint32_t* cancelled = nullptr;  // [slots]: set by the host to end an invocation
  LaneState* lanes = nullptr;          // [num_lanes]
  Mailbox* mailboxes = nullptr;        // [num_lanes]: from the first lane
  std::uint32_t num_lanes = 1;
  std::uint32_t num_slots = 0;
  std::uint32_t stop = 0;  // set by the host: leave and do not come back
  EnginePolicy policy;
};

// Slices of a turn that are under way at once, see slice_pipeline.h.
inline constexpr std::uint32_t kPipelineDepth = 4;
inline constexpr std::uint32_t kMoverGroups = 2;  // at most
// How long an element of a slice takes the movers, in no unit: what they load, and what they store,
// which takes kLinkCost times as long where it goes through a link.
inline constexpr std::uint32_t kLinkCost = 5;
UNJAM_HD constexpr std::uint32_t cost_of_element(std::uint32_t loads, std::uint32_t through_links,
                                                 std::uint32_t stores) {
  return loads + kLinkCost * through_links + stores;
}
// What orders control threads, movers and posters of a pipeline (slice_pipeline.h). A place is a
// slice's number modulo kPipelineDepth.
struct PipelineState {
  // By the lead; release: what publishing the slice takes, and `expected`. A poster that reads more
  // than n (acquire) publishes slice n.
  std::uint32_t counted = 0;
  // By the posters; release: they have read all about the slice. The lead that reads more than n
  // (acquire) may use the place of slice n again.
  std::uint32_t posted = 0;
  // By the lead: how many slices there were, when the pipeline has ended; before, 0.
  std::uint32_t total = 0;
  // By each mover, by place: jobs done there, of this slice and all before it; release: its loads
  // and stores of a job. A poster that reads as many as are expected (acquire), and then fences,
  // publishes behind all of them. (One that has nothing to publish does not fence.)
  std::uint32_t stored[kPipelineDepth] = {};
  std::uint32_t expected[kPipelineDepth] = {};
  // By the lead, to each group of movers: how many jobs it was given; release: the job, and which
  // it is. A mover that reads more than k (acquire) does its group's job k.
  std::uint32_t given[kMoverGroups] = {};
  std::uint32_t turns[kMoverGroups][2 * kPipelineDepth] =
      {};                                 // which job, by number of the group's
  std::uint64_t cost[kMoverGroups] = {};  // of all its jobs, see SlicePipeline::cost_of()
};

// What publishing a slice takes, of one peer and in one direction.
struct Posting {
  enum What : std::uint32_t {
    kNothing,
    kSlice,   // that it is there; the word is nowhere if its data carry flags
    kCredit,  // that the incoming one was read
  };
  PublishedWord word;
  std::uint32_t peer = 0;
  What what = kNothing;
};

// A batch of invocations, see batches.h.
inline constexpr std::uint32_t kMostInBatch = 8;
enum class BatchWay : std::uint16_t {
  kNot,    // slice by slice
  kLater,  // it may not begin yet
  kAll,
  kReceiving,   // what it sends at first was sent before
  kCollecting,  // of two hops: what comes of the first was sent, too
  kPipelined,   // chunk after chunk, see kPipelined; together with its like alone
};
enum class BatchEnd : std::uint32_t {
  kDone,
  kWaits,        // what it sends was sent (pipelined: some, or none, as of the rest); what it
                 // receives has not come in time
  kElsewhere,    // the same, and it may come by another way than was looked at
  kInterrupted,  // pipelined: others may want to go on, or this engine is to leave soon
  kCutShort,     // pipelined: the host has said something, which may be about any invocation, or
                 // this engine leaves; whether it could go on was not found out
  kUnable,       // nothing was done
};
struct BatchEntry {
  std::uint16_t slot = kNoSlot;
  BatchWay how = BatchWay::kNot;
  std::uint32_t polls = 0;  // granted
  BatchEnd end = BatchEnd::kUnable;
  std::uint16_t sends = 0;  // primitives that are done if it waits
  bool receives = false;
  bool is_short = false;
  // Of a pipelined call, or one of two hops, that is not done: it has come further than it was.
  bool moved = false;
  // Of a pipelined call:
  bool ended = false;     // Batches::end_early() was called
  bool patient = false;   // worth more of a wait than others, see Passes::is_patient()
  bool is_rival = false;  // it may begin, or has begun, and is long
  bool left_out = false;  // it may go on, but not beside the others: not looked at
  std::uint32_t done[kMostSteps] = {};  // as HandOver::done, before and behind the try
};

// Out of a lane's mailbox, on its way into the task queue.
struct Newcomer {
  std::uint16_t slot = kNoSlot;
  bool command = false;  // without a key
  bool clears = false;   // of those, one to clear a room
  bool counted = false;  // the lane has done it before, and counted it
  bool is_short = false;
  std::uint32_t alike = 0;  // see TaskQueue
  std::int32_t priority = 0;
};

// Whom a slice comes from, or goes to: a set of neighbours, or one, or (0, kNoPeer) nobody.
struct SlicePeers {
  std::uint64_t set = 0;
  std::uint16_t one = kNoPeer;  // its place among the neighbours
};
static_assert(kMostNeighbours < kMaxLeafSources, "a slice has one more: the rank's own");

// Shared by the threads of a block while its engine runs: fast memory, lost with the block. Who may
// touch what, and when: see docs/internals/engine.md.
struct BlockShared {
  // Of a slice, or a pipeline's slices by number: two each, the second for slices that have two.
  SliceJob jobs[2 * kPipelineDepth];
  PipelineState pipeline;
  ActiveContext active[kActiveContexts];
  // Copies of what is constant, so that no look at a peer begins in slow memory.
  LaneTransport transport;  // with `bases`, if they are all there
  unsigned char* bases[kAtHand] = {};
  EnginePolicy policy;
  bool traces = false;
  LaneState lane;  // where Dev::kLaneInShared

  // ---- read by all control threads ----
  std::uint32_t told = 0;                                     // see LaneView::tell()
  bool quits = false;                                         // the block leaves
  std::uint32_t which = 0;                                    // the place of the slice being made
  Posting postings[kPipelineDepth][2 * kMostNeighbours + 2];  // by place
  std::uint32_t num_postings[kPipelineDepth] = {};
  bool packets = false;  // jobs[0] is of packets with flags inside
  bool carried = false;  // it is a carrier's, see is_carried()
  Newcomer newcomers[kActiveContexts];
  std::uint32_t num_in_batch = 0;
  BatchEntry batch[kMostInBatch];
  AgreedOrder agreed_order;
  bool in_turn = false;  // `slot` has its turn
  std::uint16_t slot = kNoSlot;
  std::uint32_t threshold = 0;
  Primitive primitive;  // of the slice under way
  Range chunk;          // its chunk (of kScatter, kCollect: a longest one)
  bool pair = false;    // another primitive is in the slice, which does its receiving
  Primitive second;     // that one
  Range second_chunk;
  SlicePeers from, to;      // of the slice: a pair's are its second's, and its first's
  std::uint32_t elems = 0;  // its length; of slices with several peers: of each
  // By neighbour: whose slice, or room, the slice with several peers does not wait for (any more).
  bool has_come[kMostNeighbours] = {};
  bool has_room[kMostNeighbours] = {};
  // Of slices that were counted since the lead last added these to the lane's figures.
  std::uint32_t sent_bytes = 0, sent_borrowed = 0, sent_into_outputs = 0;
  // Where each slice goes, by place in job.dst_slot: see SendGrant.
  std::uint32_t location[kMostNeighbours] = {};

  // ---- the lead's own ----
  // The pass over the task queue.
  std::uint16_t cursor = kNoSlot;
  std::uint16_t tried_head = kNoSlot;  // the latest head of the queue that has had its turn in it
  std::uint32_t position = 0;
  std::uint64_t front = 0;  // the seed of its first
  std::uint32_t epoch = 0;  // of the doorbell, before the pass
  QuitFor quit_for = QuitFor::kCalledAway;
  std::uint32_t idle = 0;           // passes without progress; saturates
  std::uint32_t late = 0;           // passes since it was called away
  std::uint64_t late_since_ns = 0;  // when it was seen to be; 0: it was not
  std::uint32_t quantum = 0;        // slices left of this collective's quantum
  std::uint32_t next_look = 0;      // slices left when it looks for others
  std::uint32_t turn = 0;           // slices from one such look to the next, see EnginePolicy
  bool moved = false;               // the pass has moved data, or ended an invocation
  bool heard = false;               // the pass has moved something that came from a peer
  bool long_waits = false;          // something long has had its turn in the pass, and waits
  bool received = false;            // the turn has moved something that came from a peer
  bool waited = false;              // the slice that was prepared last lacked something at first
  bool wants_room = false;          // some invocation waits for room only
  bool pass_begun = false;
  bool fetching = false;         // the pass ends when newcomers were taken in,
  bool fetched = false;          // if there are any
  bool ran = false;              // the pass has given somebody a turn
  bool quantum_over = false;     // the pass has ended a turn that could have gone on
  bool shorts_only = false;      // until the pass ends: what is long goes on in the next one
  bool ended = false;            // nothing is left of the invocation that has its turn
  bool loaded = false;           // its context was not there
  std::uint32_t primitives = 1;  // of the program, that the slice under way stands for
  std::uint64_t started_ns = 0;
  std::uint64_t unheard_since_ns = 0;  // in disorder: when it was first seen that passes hear
                                       // nothing from peers; 0: the last one did
  bool unordered = false;              // something has come to the queue since it was put in order
  bool was_ordered = false;            // in this pass
  RecvView view;                       // of the slice from one peer
};

}  // namespace unjam
