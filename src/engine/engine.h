// The engine: picks an invocation, runs its primitives in two phases (spin up to a threshold, then
// give way), saves its context, runs another, and comes back (paper Sec. 4, Algorithm 1).
//
// One engine drives one lane and is executed by all threads of a block. A few of them, the control
// threads (on a GPU the first warp, on the host one thread), decide what the block does next; all,
// or others, move the data.
//
// The block. Control threads run all of the engine but the leaf, together: their branches depend
// only on what all of them see alike. What one thread is to do, the lead does (`leads()`); what
// concerns several peers is shared out among them, either direction of peer q to one and the same
// thread throughout a slice. So of the state in BlockShared, the contexts, the lane and its keys
// each word is at each moment either (1) constant, and read by all control threads, (2) the lead's,
// or (3) that of the thread whose peer (and direction) it is about, or whose place among newcomers,
// wholes or those that are put in order: a thread sees to each of these, and to its invocation (and
// its link of the queue); and between a write and a read (or write) by another control thread there
// is always a sync_control(), a barrier that orders memory. Words that all read are written by the
// lead only in front of a tell(), load()'s or publish()'s barrier, or a barrier of the block, and
// behind another: tell() is a barrier in front of the reading and one behind it. What several add
// to at once (`sent_…`, by atomics, and some of the lane's figures) the lead reads behind such a
// barrier. Threads that are not in control read `quits`, `num_wholes`, `wholes`, `packets`,
// `carried`, `threshold` and, where there is no stream, `pair` and the first two jobs between two
// barriers of the block, during which no control thread writes.
//
// Streams of slices. Where a device has threads enough, those of a block have three parts, so that
// moving data and all that is done about it overlap: control threads look for the slices of a turn
// that are ready, and hand them on, up to kStreamDepth at a time; movers move them, each going from
// job to job on its own, without a barrier between; posters publish each slice when its movers are
// through with it, in order. A slice has one job, or, if two primitives go together (kWithNext),
// two. Movers are in groups, each with jobs of its own, so that one that waits for a link and one
// that only copies are under way together; a job goes to the group that has had less to do. Words
// that count slices or jobs order the three (StreamOfSlices):
//   given    by the lead, to each group of movers; release: the job, and where it is. A mover that
//            reads more than k (acquire) does its group's job k.
//   counted  by the lead; release: what publishing the slice takes, and how many movers it has
//            (expected).
//   stored   by each mover, for each slice's place; release: its loads and stores of a job. A
//            poster that reads as many as are expected (acquire), and then fences, publishes behind
//            all of them. (One that has nothing to publish does not fence.)
//   posted   by the posters; release: they have read all about the slice. The lead that reads more
//            than n (acquire) may use the place of slice n again.
//   total    by the lead: how many slices the stream has had, when it has ended; before, 0.
// What the engine keeps about a slice (counts, contexts) is advanced as soon as it is handed on:
// nothing can stop it any more. A stream ends, at a barrier, when the turn does, or when the next
// slice is not ready by the time that all before are published: what is blocked waits in
// wait_ready(). Slices of one stream may overlap in time, so none reads what an earlier one stores
// here (but through a peer, who has it only when it is published): one that does (kFromOutput)
// waits until all before are published. Nor may one overwrite, in place, what an earlier
// one reads: plans overwrite a part only with a result that this rank has contributed to, from a
// peer who had that when the slice that read it was published (or in the primitive that reads it).
// The plan checker sees to that.
//
// Whole calls. Looking, describing and publishing slice by slice costs more than moving what is
// short, and to choose what is next costs as much again. So a device may have a way to do all that
// a lane does for short invocations at once (Invocation::whole: they send, then receive, in one
// loop; of packets that make two hops, twice), with the same flags and credits, so that peers
// cannot tell; of several that stand in the queue together it sends all, then receives all,
// whatever their order at peers is. For each it polls as often as its turn's threshold says. What
// has not come by then is received by a later turn, whole again; whatever is not as expected (a
// connector that is not open, or was given up; no room) is left to slices. Nothing of it is ever in
// a context at hand (ActiveContext): that is there for slices alone, and the progress of what is
// whole is one of two states, nothing done or all sent (of two hops one of three, by the hops that
// were sent).
//
// What is lowered to slots (plan/lower.h), chunk after chunk, goes so as well (kWholeStream;
// kWholeCrowd only where another one of some length is in the queue), several of the same kind and
// group together: until all are done, or peers do not keep up, or they have had their turn and
// something short could go on (if they have moved nothing, only when all is sent that has room, see
// sending_ahead.h), or half of them are done and others wait. One that is done meanwhile
// ends at once (end_early()). What is left of the others is how much of each primitive is done
// (hand_over.h), from which a later turn goes on; and those that have moved go on before
// what stands behind them is begun, so that ranks come to be at the same ones. To slices it is left
// only if its data may come by another way than was looked at.
//
// Gates. What remote peers send may come into memory that is slow to look at. Then whoever puts it
// there counts, behind it (release), a word up that is fast to look at: the gate of that peer and
// lane. A wait looks at its peers' flags and credits once, and again only when a gate of theirs has
// changed since before the last look (acquire). So nothing is missed: what came behind that look
// has yet to be counted. A wait for a peer without a gate looks each time, and so does a stream of
// slices, which waits no longer than for itself.
//
// Carried slices. A primitive may be marked for a carrier (Carrier), which is worth it where blocks
// have better to do than to copy. Only a sender's device knows whether it has one; receivers cannot
// tell. (A device with streams of slices cannot have any: its posters would have to hand them on.)
// A slice goes that way if it lies in a borrowed slot, which its carrier then holds; it may not
// write into a peer's output, for the peer's call may be over. So a marked primitive looks for
// borrowed slots first (SlotClass), and where there are none blocks move the slice as any other.
// Slices behind it in the connector wait for it at the receiver; so a carrier waits for nobody. The
// program goes on at once. Its end does not: the invocation ends here, done or cancelled, when its
// slices are drained, for the carrier reads the user's input until then. (In place a part that a
// carrier reads is overwritten only with what has come by way of that slice: the plan checker sees
// to that.) That wait gives way like any other.
//
// `Dev` is what differs between devices (see device/host/). By any thread of the block:
//   controls()                           whether this is a control thread
//   sync()                               barrier of the block, orders memory
//   leaf(job)                            the data leaf of a slice, by all threads together, or, if
//                                        streams(), by a group of movers
//   streams()                            only if kStreams, as the next ones: whether the block has
//                                        the three parts, see above
//   posts()                              whether this thread is a poster
//   groups(), group()                    of movers: how many there are, 1 or 2; this one's
//   movers()                             by how many of a group the end of a leaf is counted
//   stored(count)                        by movers: this thread's part of the leaf is through. Adds
//                                        to the count, releases at the block's scope
//   posters_first(), sync_posters()      by posters: one thread's answer is yes; their barrier
//   load_block(x), store_block(x, v)     acquire, release at the block's scope
//   packet_leaf(job, polls)              only if kInlinePacketFlags, for packets: polls the flags
//                                        of the incoming slices (a combine's sources but local_src;
//                                        of copies those without dst_slot, copy_elems long) so
//                                        often, votes, and if all are there is the leaf. False:
//                                        something is missing, nothing was stored, nobody reads the
//                                        job any more
//   whole_calls(tries, n, turn, end_early)  only if kWholeCalls: see above. Fills in WholeTry::end,
//                                        receives, done, and, of two hops, sends and moved;
//                                        adds to the lane's figures of slices and bytes, ends with
//                                        a barrier. Of different keys. Streams look for others
//                                        behind about so many slices (EnginePolicy). Of those that
//                                        are done one of its threads at a time may call
//                                        end_early(which), behind all that they have stored
//   carry(slot, job, word, rank)         only if kCarries: a carrier of the device's copies the
//                                        slice of the invocation in that slot, at its own pace,
//                                        then publishes the word, which is for that rank, and tells
//                                        it as the engine would: posted(), or ring() for data. By
//                                        the lead
//   drained(slot)                        only if kCarries: whether all that this lane gave to
//                                        carriers for that invocation is copied and published.
//                                        Acquire. When it comes to be, this lane is rung, for work.
//                                        By the lead
// Constants: kInlinePacketFlags, kStreams, kWholeCalls, kCarries (above); kLaneInShared: the lane's
// state lies in BlockShared while its engine runs; kHostWatches: the host reads figures of keys and
// what runs at any time; kWide, if there is one: one control thread, and any number of neighbours
// and parts, else kAtHand at most. By all control threads, together:
//   leads()                              one thread's answer is yes
//   first(), stride()                    this one's part of a loop over peers (also by those that
//                                        post, among themselves)
//   all(x)                               a vote: whether all say so. Orders nothing
//   sync_control()                       barrier of the control threads, orders memory
//   relax(polls), delay()                between failed polls; fault injection before waits
//   next_submission(slot)                takes one submission, if there is one: leaves it in
//                                        rank.invocations[slot]. Only lane 0 asks. Instead of it,
//                                        next_submissions(): a batch of them (slot_batch.h)
// By any control thread:
//   fence(), static publish(x, v)        publish() stores a word; behind a fence() of this thread
//                                        it releases what came before the fence (host: publish()
//                                        does)
//   fence_lanes()                        if there is one: as fence(), for this rank's lanes alone
//   ring(rank, lane, RingFor)            tells a lane that there is something for it; for each cell
//                                        by one thread at a time, after what it tells of
//   posted(rank, lane, word)             if there is one: this thread has published the word, which
//                                        is for that rank. True: the device takes it there, and
//                                        rings then; nobody rings now
//   ring_own_lanes()                     tells this rank's other lanes that something may be ready
//   cancelled(slot)                      whether the host wants that
//   cancelled_by_any(slot)               the same, behind what any lane has seen of it
//   handed_over(slot)                    what of a new invocation is done (HandOver); once for each
//   ready(invocation)                    whether its input is there (Invocation::ticket)
//   complete(slot, outcome)              writes the CQE, tells the host. A fence() of the thread is
//                                        behind all that the invocation has stored
//   now_ns()                             for residency and traces
// By the lead:
//   epoch()                              of this lane's doorbell, before a look (doorbell.h)
//   look_at_submissions()                if there is one: within long turns, for what
//                                        submissions_wait() says then; else epoch() is called
//   try_quit(epoch, interest)            true: this engine is no longer resident, leave
//   hold_sleep(epoch)                    hold policy: sleep without leaving
//   attend()                             at the beginning of each pass, behind epoch(): slow looks
//   submissions_wait()                   whether next_submission() would find one
//   stopped()                            whether the host wants it to leave
//   called_away()                        leave soon: whoever runs this engine has something to do
//   kLateNs                              if there is one: how soon at the latest, in nanoseconds
//   ended(slot), is_over()               the lane is through with an invocation; whether that was
//                                        all that this engine is there for: it leaves as soon as
//                                        the queue is empty
//   threshold(polls)                     polls to grant where the policy grants so many
//   residency_matters()                  whether to leave after EnginePolicy::residency_us
//   gate(rank)                           if there is one: see "Gates". A word, or nullptr
// A device whose ready(), cancelled(), stopped() or submissions change without a ring must not let
// try_quit() succeed before it has looked at them itself.
//
// No wait for a peer is without a threshold: every poll loop is in wait_ready(), which counts
// polls, or in prepare_next(), which ends when this block's slices are published. (Within a stream
// threads of the block wait for each other, as at a barrier.) A wait that fails has changed nothing
// (connector.h), so preemption needs no undo. "Progress" is data moved or an invocation ended,
// never a wait that succeeded in part.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/bits.h"
#include "base/portability.h"
#include "engine/doorbell.h"
#include "engine/slot_batch.h"
#include "engine/state.h"

namespace unjam {

template <class Dev>
class Engine {
 public:
  // A reference or a value, as the device likes.
  using DevHandle = typename Dev::Handle;

  // Runs until the lane can do nothing (or was told to stop, or has stayed its time). By all
  // threads of the block. Nothing but the arguments lives across the leaf, so that it has the
  // registers to itself: what the control threads need is in `shared`. (Inlined: of a function that
  // is called, a part of the registers would be its caller's.)
  UNJAM_HD_INLINE static void run(DevHandle dev, RankState& rank, std::uint32_t lane,
                                  BlockShared& shared) {
    const bool control = dev.controls();
    if (control) phase<&Engine::start>(dev, rank, lane, shared);
    for (;;) {
      if (control) phase<&Engine::decide>(dev, rank, lane, shared);
      dev.sync();
      if (shared.quits) break;
      if constexpr (kWholeCalls) {
        const std::uint32_t wholes = shared.num_wholes;
        if (wholes != 0) {
          dev.whole_calls(shared.wholes, wholes, shared.turn, [&](std::uint32_t i) {
            phase<&Engine::end_early>(dev, rank, lane, shared, i);
          });
          if (control) phase<&Engine::end_wholes>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (Dev::kInlinePacketFlags) {
        if (shared.packets) {
          if (!dev.packet_leaf(shared.jobs[0], shared.threshold)) {
            if (control) phase<&Engine::packets_missing>(dev, rank, lane, shared);
            continue;
          }
          dev.sync();  // as below
          if (control) phase<&Engine::publish>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (kCarries) {
        if (shared.carried) {
          dev.sync();  // all have seen it, before the next slice is looked for
          if (control) phase<&Engine::carry>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (Dev::kStreams) {
        if (dev.streams()) {
          if (control) {
            phase<&Engine::stream>(dev, rank, lane, shared);
          } else if (dev.posts()) {
            post_stream(dev, shared);
          } else {
            move_stream(dev, shared);
          }
          dev.sync();
          if (control) phase<&Engine::end_stream>(dev, rank, lane, shared);
          continue;
        }
      }
      dev.leaf(shared.jobs[0]);
      if (shared.pair) dev.leaf(shared.jobs[1]);
      dev.sync();  // the whole slice is stored before it is published
      if (control) phase<&Engine::publish>(dev, rank, lane, shared);
    }
    if (control) phase<&Engine::leave>(dev, rank, lane, shared);
    dev.sync();
  }

 private:
  UNJAM_HD Engine(DevHandle dev, RankState& rank, std::uint32_t lane, BlockShared& shared)
      : dev_(dev),
        rank_(rank),
        lane_(Dev::kLaneInShared ? here(shared).lane : rank.lanes[lane]),
        mailbox_(rank.mailboxes[lane]),
        lane_index_(lane),
        s_(here(shared)) {}

  // Of shared memory the compiler is to know that it is (if the device can say so).
  UNJAM_HD static BlockShared& here(BlockShared& shared) {
    if constexpr (requires { Dev::here(shared); }) {
      return Dev::here(shared);
    } else {
      return shared;
    }
  }

  // A phase of the control threads, as a function of its own: each has the registers to itself, and
  // its caller keeps nothing but these arguments across it.
  template <auto kPhase, class... Args>
  UNJAM_HD_NOINLINE static auto phase(DevHandle dev, RankState& rank, std::uint32_t lane,
                                      BlockShared& shared, Args... args) {
    return (Engine(dev, rank, lane, shared).*kPhase)(args...);
  }
  // The same, from within another one; also of what is rare. (A member function that is not inlined
  // would want this object in memory, and all that it refers to be loaded from there.)
  template <auto kPhase, class... Args>
  UNJAM_HD auto call(Args... args) {
    return phase<kPhase>(dev_, rank_, lane_index_, s_, args...);
  }

  static constexpr bool kWholeCalls = [] {
    if constexpr (requires { Dev::kWholeCalls; }) return Dev::kWholeCalls;
    return false;
  }();
  static constexpr bool kCarries = [] {
    if constexpr (requires { Dev::kCarries; }) return Dev::kCarries;
    return false;
  }();
  static_assert(!(kCarries && Dev::kStreams), "posters would have to hand slices to carriers");
  static constexpr bool kGates = requires(Dev& dev) { dev.gate(0u); };
  static constexpr bool kWide = [] {
    if constexpr (requires { Dev::kWide; }) return Dev::kWide;
    return false;
  }();
  enum Command : std::uint32_t { kAgain, kFetch, kOrder, kRun, kQuit };
  static constexpr std::uint32_t kLatePasses = 6;
  enum Status : std::uint32_t { kMove, kBlocked, kFinished, kCancelledNow, kQuantumOver };
  static constexpr std::uint16_t kCopies = kScatter | kCollect;

  // What the lead says, to all.
  UNJAM_HD std::uint32_t tell(std::uint32_t value) {
    if (dev_.leads()) s_.told = value;
    dev_.sync_control();
    const std::uint32_t told = s_.told;
    dev_.sync_control();
    return told;
  }

  UNJAM_HD void start() {
    if constexpr (Dev::kLaneInShared) {
      copy_vectors(&s_.lane, &rank_.lanes[lane_index_], sizeof(LaneState));
      dev_.sync_control();
    }
    const std::uint32_t ranks = lane_.transport.shape.ranks;
    const bool copied = !kWide || ranks <= kAtHand;
    for (std::uint32_t r = dev_.first(); copied && r < ranks; r += dev_.stride()) {
      s_.bases[r] = lane_.transport.bases[r];
    }
    if (dev_.leads()) {
      s_.transport = lane_.transport;
      if (copied) s_.transport.bases = s_.bases;
      s_.policy = rank_.policy;
      s_.traces = lane_.trace.places != 0;
      for (ActiveContext& a : s_.active) a.slot = kNoSlot;
      s_.slot = s_.cursor = kNoSlot;
      s_.idle = s_.late = 0;
      s_.turn = s_.policy.shortest_turn();
      s_.sent_bytes = s_.sent_borrowed = s_.sent_into_outputs = 0;
      s_.moved = s_.heard = s_.wants_room = s_.pass_begun = s_.in_turn = s_.quits = false;
      s_.ran = s_.quantum_over = s_.shorts_only = s_.ended = s_.fetching = s_.fetched = false;
      s_.quit_for = QuitFor::kCalledAway;
      s_.num_wholes = 0;
      s_.which = 0;
      s_.loaded = false;
      s_.late_since_ns = s_.unheard_since_ns = 0;
      s_.unordered = true;
      s_.started_ns = dev_.now_ns();
      count(lane_.stats.starts);
      record(TraceType::kRestart, nullptr);
    }
    dev_.sync_control();
  }

  // Saves every active context: nothing of the progress may be lost with the block.
  UNJAM_HD void leave() {
    for (const ActiveContext& a : s_.active) save(a);
    if (dev_.leads()) {
      count(lane_.stats.quits);
      if (s_.quit_for == QuitFor::kIdle) count_part(lane_.stats.idle_quits);
      if (s_.quit_for == QuitFor::kStuck) count_part(lane_.stats.stuck_quits);
      if (s_.quit_for == QuitFor::kResidency) count_part(lane_.stats.residency_quits);
      record(TraceType::kQuit, nullptr);
    }
    if constexpr (Dev::kLaneInShared) {
      dev_.sync_control();
      copy_vectors(&rank_.lanes[lane_index_], &s_.lane, sizeof(LaneState));
    }
  }

  // Finds the next slice that can be moved, across invocations; or that there is none, and quits.
  UNJAM_HD void decide() {
    bool in_turn = s_.in_turn;
    for (;;) {
      if (!in_turn) {
        if (next_command() == kQuit) {
          if (dev_.leads()) s_.quits = true;
          return;
        }
        if constexpr (kWholeCalls) {
          if (s_.num_wholes != 0) {
            call<&Engine::add_wholes>();
            if (s_.num_wholes != 0) return;
          }
        }
        call<&Engine::begin_turn>();
        in_turn = true;
      }
      const std::uint32_t status = call<&Engine::prepare>();
      if (status == kMove) return;
      if (status == kCancelledNow) dev_.sync_control();  // the lead sees to all endpoints
      call<&Engine::end_turn>(status, false);
      dev_.sync_control();
      in_turn = false;
    }
  }

  // ---- scheduling ----

  UNJAM_HD std::uint32_t next_command() {
    for (;;) {
      if (lane_index_ == 0) call<&Engine::hand_on_submissions>();
      const std::uint32_t command = tell(call<&Engine::schedule>());
      if (command == kFetch) {
        call<&Engine::fetch_several>();
      } else if (command == kOrder) {
        call<&Engine::put_in_order>();
      } else if (command != kAgain) {
        return command;
      }
    }
  }

  // The first lane takes submissions and hands them on through device memory, some at a time: each
  // of the threads fills mailboxes of its own, and fences once.
  UNJAM_HD void hand_on_submissions() {
    SlotBatch taken;
    do {
      const std::uint64_t begun_ns = begin_step();
      taken = next_submissions();
      if (dev_.leads() && taken.size() != 0) end_step(Step::kReadSqe, begun_ns, taken.size());
      for (std::uint32_t i = dev_.first(); i < taken.size(); i += dev_.stride()) {
        store_relaxed<std::uint32_t>(rank_.remaining[taken[i]],
                                     rank_.invocations[taken[i]].geometry.lanes);
      }
      dev_.sync_control();
      if (taken.size() == 1 && is_own(taken[0])) {
        dev_.sync_control();  // all have looked at the queue before the lead changes it
        // Nobody is in front of it, and nobody else takes part: no mail to oneself.
        if (dev_.leads()) {
          const std::uint64_t accepted_ns = begin_step();
          accept(taken[0]);
          end_step(Step::kPrepare, accepted_ns);
        }
        dev_.sync_control();
      } else if (taken.size() != 0) {
        mail(taken);
      }
    } while (taken.full());
  }
  UNJAM_HD SlotBatch next_submissions() {
    if constexpr (requires { dev_.next_submissions(); }) {
      return dev_.next_submissions();
    } else {
      SlotBatch taken;
      std::uint16_t slot = kNoSlot;
      while (!taken.full() && dev_.next_submission(slot)) taken.push_back(slot);
      return taken;
    }
  }
  UNJAM_HD bool is_own(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    return inv.key != nullptr && inv.geometry.first_lane == lane_index_ &&
           inv.geometry.lanes == 1 && lane_.queue.empty() && mailbox_.empty();
  }
  UNJAM_HD void mail(const SlotBatch& slots) {
    for (std::uint32_t begin = 0; begin < rank_.num_lanes; begin += dev_.stride()) {
      const std::uint32_t l = begin + dev_.first();
      std::uint32_t letters = 0, urgent = 0;
      for (std::uint32_t i = 0; l < rank_.num_lanes && i < slots.size(); ++i) {
        const Invocation& inv = rank_.invocations[slots[i]];
        if (l - inv.geometry.first_lane >= inv.geometry.lanes) continue;
        rank_.mailboxes[l].put(slots[i], letters++);
        if (is_urgent(inv)) ++urgent;
      }
      // Lanes that are told may soon end it, and a stream's call have its slot: all have read which
      // lanes are its. (Where that may be there are as many threads as lanes.)
      dev_.sync_control();
      if (letters == 0) continue;
      if (urgent != 0) bump<std::uint64_t>(rank_.mailboxes[l].urgent, urgent);
      if constexpr (requires { dev_.fence_lanes(); }) {
        dev_.fence_lanes();
      } else {
        dev_.fence();
      }
      // Publishes the invocations, their countdowns, and the places.
      rank_.mailboxes[l].template show<Dev>(letters);
      if (l != lane_index_) dev_.ring(s_.transport.rank, l, RingFor::kWork);
    }
    dev_.sync_control();
  }

  // The lead's, up to accept(): one step through the task queue.
  UNJAM_HD std::uint32_t schedule() {
    if (!dev_.leads()) return kAgain;
    if (dev_.stopped()) return kQuit;
    if (dev_.is_over() && lane_.queue.empty()) return kQuit;
    // Only if something has moved: the next stay begins at the head again, so who stands behind
    // what does not move would never get a turn.
    if (s_.moved && too_late()) return kQuit;
    if (s_.cursor == kNoSlot || !s_.pass_begun) {
      bool for_newcomers = false;
      if (s_.pass_begun) {
        if (wants_newcomers()) return kFetch;
        if (wants_one_order()) return kOrder;
        // What is long gave way for them before it was known what they are.
        for_newcomers = s_.quantum_over && s_.fetched && lane_.shorts != 0 && !holds() &&
                        s_.policy.order == OrderPolicy::kFifo;
        if (!end_pass()) return kQuit;
      }
      begin_pass();
      s_.shorts_only = for_newcomers;
    }
    // Those that cannot begin yet are passed over here: there may be many, each use of a key behind
    // the one before.
    while (s_.cursor != kNoSlot) {
      const std::uint16_t slot = s_.cursor;
      s_.cursor = lane_.queue.next(slot);
      if (dev_.cancelled(slot)) {
        if (!drained(slot)) {
          if (!holds()) continue;
          s_.cursor = kNoSlot;  // nobody else's turn, who might hold it for long
          return kAgain;
        }
        finish(slot, Outcome::kCancelled, false);
        return kAgain;
      }
      const ActiveContext& a = s_.active[slot % kActiveContexts];
      const bool cached = a.slot == slot;
      const Invocation& inv = cached ? a.inv : rank_.invocations[slot];
      if (s_.shorts_only && !is_short(inv)) continue;
      // What is cached was found to be ready before.
      if (!cached) {
        // Acquire: the key's former invocation is complete on all lanes. (Of one without the engine
        // all has come, see KeyState::done.)
        if (load_acquire_local(inv.key->done) != inv.turn || !dev_.ready(inv)) continue;
      }
      s_.slot = slot;
      s_.ran = true;
      if (slot == lane_.queue.head()) s_.tried_head = slot;
      if (holds()) s_.cursor = kNoSlot;  // one at a time: the first that may run
      if (s_.position == 0) s_.front = inv.seed;
      s_.threshold = dev_.threshold(s_.policy.initial_threshold(s_.position++));
      if constexpr (kWholeCalls) {
        const Whole how = cached || holds() ? Whole::kNot : how_whole(inv);
        if (how != Whole::kNot) {
          if (how == Whole::kAll && is_worth_a_wait(inv)) {
            s_.threshold = dev_.threshold(s_.policy.beside_long(s_.threshold));
          }
          s_.wholes[0] = {slot, how, s_.threshold};
          s_.wholes[0].patient = is_patient(inv);
          note_done(s_.wholes[0]);
          s_.num_wholes = 1;
        }
      }
      return kRun;
    }
    // Nobody: the pass is over at once.
    return kAgain;
  }

  UNJAM_HD static bool is_stream(const Invocation& inv) {
    return inv.whole == kWholeStream || inv.whole == kWholeCrowd;
  }

  // The first try of what is short while something long waits for it. Peers, if they have made the
  // call, leave their long ones for it at about the same time. But once, for they may not have: not
  // if there is nothing to send, by which later tries are told.
  UNJAM_HD bool is_worth_a_wait(const Invocation& inv) const {
    return lane_.queue.size() != lane_.shorts && inv.whole != 1;
  }

  // How an invocation is tried that may begin and is not among the contexts at hand.
  UNJAM_HD Whole how_whole(const Invocation& inv) const {
    if (inv.whole == 0) return Whole::kNot;
    const DynamicContext& dyn = lane_.contexts[inv.slot];
    // Done before the engine saw it, or begun in another way.
    if (dyn.handed.stage >= Stage::kSlices) return Whole::kNot;
    if (is_stream(inv)) return Whole::kStream;
    const std::uint32_t done = dyn.handed.primitives_done();
    if (done == 0) return Whole::kAll;
    if (inv.whole == kWholeTwoHops) return done == 1 ? Whole::kReceiving : Whole::kCollecting;
    return done + 1 == inv.whole ? Whole::kReceiving : Whole::kNot;
  }

  // By the control threads: what stands behind the first one in the queue, up to what is not tried
  // with it. A thread looks at each. None are left (num_wholes) if the first is for crowds and is
  // in none: it goes by slices.
  UNJAM_HD void add_wholes() {
    const Invocation& first = rank_.invocations[s_.wholes[0].slot];
    const bool streams = s_.wholes[0].how == Whole::kStream;
    if (dev_.leads()) {
      std::uint32_t n = 1;
      for (std::uint16_t slot = s_.cursor; slot != kNoSlot && n < kMostWholes; ++n) {
        s_.wholes[n].slot = slot;
        slot = lane_.queue.next(slot);
      }
      s_.num_wholes = n;
    }
    dev_.sync_control();
    const std::uint32_t n = s_.num_wholes;
    for (std::uint32_t i = 1 + dev_.first(); i < n; i += dev_.stride()) {
      WholeTry& t = s_.wholes[i];
      const Invocation& inv = rank_.invocations[t.slot];
      t.patient = is_patient(inv);
      t.is_rival = false;
      if (s_.active[t.slot % kActiveContexts].slot == t.slot || dev_.cancelled(t.slot)) {
        t.is_rival = !is_short(inv);
        t.how = Whole::kNot;
      } else if (load_acquire_local(inv.key->done) != inv.turn || !dev_.ready(inv)) {
        t.how = Whole::kLater;
      } else {
        t.is_rival = !is_short(inv);
        t.how = how_whole(inv);
        const bool alike =
            (t.how == Whole::kStream) == streams && (!streams || stream_together(first, inv));
        if (!alike) t.how = Whole::kNot;
      }
    }
    dev_.sync_control();  // with what the threads have acquired
    if (dev_.leads() && first.whole == kWholeCrowd && streams && !has_rivals(n)) {
      // For good: what slices have begun is theirs.
      lane_.contexts[s_.slot].handed.stage = Stage::kSlices;
      s_.num_wholes = 0;
    } else if (dev_.leads()) {
      record(TraceType::kStart, &first);
      std::uint32_t taken = 1;
      for (std::uint32_t i = 1; i < n; ++i) {
        const WholeTry t = s_.wholes[i];
        if (t.how == Whole::kNot) break;
        if (streams && taken == s_.policy.most_streams) break;
        s_.cursor = i + 1 < n ? s_.wholes[i + 1].slot : lane_.queue.next(t.slot);
        if (t.how == Whole::kLater) continue;
        record(TraceType::kStart, &rank_.invocations[t.slot]);
        const std::uint32_t polls = dev_.threshold(s_.policy.initial_threshold(s_.position++));
        s_.wholes[taken] = {t.slot, t.how, polls};
        s_.wholes[taken].patient = t.patient;
        if (streams) note_done(s_.wholes[taken]);
        ++taken;
      }
      s_.num_wholes = taken;
    }
    dev_.sync_control();
  }
  // By the lead: whether something long could go on beside the one that is tried first: it has had
  // its turn in this pass, and waits, or was looked at behind that one. (Later uses of its key
  // cannot.)
  UNJAM_HD bool has_rivals(std::uint32_t n) const {
    if (s_.long_waits) return true;
    for (std::uint32_t i = 1; i < n; ++i) {
      if (s_.wholes[i].is_rival) return true;
    }
    return false;
  }
  // Ranks that are at different streams find what the others have sent ahead there, and change
  // places with them, again and again, a few chunks each time. So who has something begun waits
  // long for peers only at the first of the pass, or at one with a smaller seed, which is the same
  // on all ranks: of two that are at each other's first one stays, and the other comes back.
  UNJAM_HD bool is_patient(const Invocation& inv) const { return inv.seed <= s_.front; }
  // Streams: the same steps, among the same ranks. (Those whose neighbours differ, as with other
  // roots they may, are left out when they are looked at, whole_stream.cuh.)
  UNJAM_HD static bool stream_together(const Invocation& a, const Invocation& b) {
    return a.geometry.kind == b.geometry.kind && a.geometry.empty_part == b.geometry.empty_part &&
           a.key->group == b.key->group;
  }
  UNJAM_HD void note_done(WholeTry& t) const {
    const HandOver& handed = lane_.contexts[t.slot].handed;
    for (std::uint32_t i = 0; i < kMostSteps; ++i) t.done[i] = handed.done[i];
  }

  // By the control threads, behind whole_calls()' barrier. What concerns an invocation, a thread
  // does; in another lane it may end, and its slot be another's, as soon as it was counted down.
  UNJAM_HD void end_wholes() {
    const std::uint32_t n = s_.num_wholes;
    if (s_.traces && dev_.leads()) {
      for (std::uint32_t i = 0; i < n; ++i) {
        const bool done = s_.wholes[i].end == WholeEnd::kDone;
        if (s_.wholes[i].ended) continue;
        record(done ? TraceType::kFinish : TraceType::kPreempt,
               &rank_.invocations[s_.wholes[i].slot]);
      }
    }
    dev_.sync_control();
    for (std::uint32_t i = dev_.first(); i < n; i += dev_.stride()) end_whole(s_.wholes[i]);
    dev_.sync_control();
    if (dev_.leads()) {
      // Among those that were tried together nobody overtakes.
      const bool overtook = lane_.queue.follows_its_like(s_.wholes[0].slot);
      const bool interrupted = resolve_interruption(s_.wholes, n);
      for (std::uint32_t i = 0; i < n; ++i) note_whole(s_.wholes[i], overtook);
      // As may_go_on().
      if (interrupted) {
        s_.turn = s_.policy.longer_turn(s_.turn);
        if (lane_index_ == 0) look_at_submissions();
      } else if (s_.wholes[0].how == Whole::kStream) {
        s_.turn = s_.policy.shortest_turn();
      }
      // Streams that move are gone on with before others are begun, so that ranks come to be at the
      // same ones. Where none has moved, those that were left out are next: else who is in front,
      // and has nothing to do after all, would keep them from it in each pass. (Not before what is
      // short, for which the others were interrupted.)
      if (streams_moved(s_.wholes, n)) {
        s_.cursor = kNoSlot;
      } else if (!s_.shorts_only && !s_.quantum_over) {
        go_back_for(s_.wholes, n);
      }
      s_.num_wholes = 0;
    }
    dev_.sync_control();
  }
  // By one thread, while others are still tried: one that is done, with all that peers are told.
  // Its slot may be another invocation's from here on. (What concerns the queue comes in the end,
  // and other lanes' waking.)
  UNJAM_HD void end_early(std::uint32_t i) {
    WholeTry& t = s_.wholes[i];
    const Invocation& inv = rank_.invocations[t.slot];
    record(TraceType::kFinish, &inv);
    t.ended = true;
    --inv.key->lanes[lane_index_].in_queue;
    end_part(inv, t.slot, false);
  }
  // Streams of which none has moved are not interrupted by others: they wait, and whoever stands
  // behind them is next. Else, where each turn ends so, for something short whose peers are not
  // there, those behind would never get one, and the lane would never rest (four GPUs hung).
  // Returns whether there is an interruption.
  UNJAM_HD static bool resolve_interruption(WholeTry* tries, std::uint32_t n) {
    bool interrupted = false, moved = false;
    for (std::uint32_t i = 0; i < n; ++i) {
      interrupted = interrupted || tries[i].end == WholeEnd::kInterrupted;
      moved = moved || tries[i].moved || tries[i].end == WholeEnd::kDone;
    }
    for (std::uint32_t i = 0; interrupted && !moved && i < n; ++i) {
      if (tries[i].end == WholeEnd::kInterrupted) tries[i].end = WholeEnd::kWaits;
    }
    return interrupted && moved;
  }
  UNJAM_HD static bool streams_moved(const WholeTry* tries, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      const WholeTry& t = tries[i];
      if (t.how == Whole::kStream && t.end == WholeEnd::kWaits && t.moved) return true;
    }
    return false;
  }
  UNJAM_HD void go_back_for(const WholeTry* tries, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      if (!tries[i].left_out || tries[i].end != WholeEnd::kWaits) continue;
      s_.cursor = tries[i].slot;
      return;
    }
  }
  UNJAM_HD void end_whole(WholeTry& t) {
    if (t.ended) return;
    const Invocation& inv = rank_.invocations[t.slot];
    const bool streams = t.how == Whole::kStream;
    if (inv.whole != kWholeTwoHops) {
      t.sends = streams ? std::uint16_t{0} : static_cast<std::uint16_t>(inv.whole - 1u);
    }
    t.is_short = is_short(inv);
    if (t.end == WholeEnd::kDone) {
      --inv.key->lanes[lane_index_].in_queue;
      end_part(inv, t.slot, false);
      return;
    }
    DynamicContext& dyn = lane_.contexts[t.slot];
    if (streams) {
      for (std::uint32_t i = 0; i < kMostSteps; ++i) {
        t.moved = t.moved || dyn.handed.done[i] != t.done[i];
        dyn.handed.done[i] = t.done[i];
      }
      const bool slices = t.end == WholeEnd::kUnable || t.end == WholeEnd::kElsewhere;
      dyn.handed.stage = slices ? Stage::kSlices : Stage::kLeft;
      return;
    }
    if (t.end != WholeEnd::kUnable) dyn.handed.set_primitives_done(t.sends);
    dyn.handed.stage = t.end == WholeEnd::kWaits ? Stage::kLeft : Stage::kSlices;
  }
  // By the lead, which reads nothing of the invocation.
  UNJAM_HD void note_whole(const WholeTry& t, bool overtook) {
    const bool done = t.end == WholeEnd::kDone;
    const bool streams = t.how == Whole::kStream;
    // (What is left to slices is to be looked at before the lane may rest.)
    if (done || t.end != WholeEnd::kWaits || t.moved || (t.how == Whole::kAll && t.sends != 0)) {
      s_.moved = true;
    }
    if (t.receives && (done || streams || t.moved)) s_.heard = true;
    if (done) {
      count(lane_.stats.wholes);
      leave_queue(t.slot, overtook);
      if (t.is_short) note_short_end();
    } else if (t.end != WholeEnd::kUnable) {
      s_.long_waits = s_.long_waits || !t.is_short;
      count(lane_.stats.spins, t.polls);
      count(lane_.stats.preemptions);
      if (t.end == WholeEnd::kInterrupted || t.end == WholeEnd::kCutShort) give_way_to_shorts();
    }
  }

  // Also between two turns of a pass, which may be long: whether this engine was called away too
  // long ago, and still is. Contexts are kept, so nothing is lost.
  UNJAM_HD bool too_late() {
    if constexpr (requires { Dev::kLateNs; }) {
      if (s_.late_since_ns == 0) {
        if (dev_.called_away()) s_.late_since_ns = dev_.now_ns();
        return false;
      }
      if (dev_.now_ns() - s_.late_since_ns <= Dev::kLateNs) return false;
      if (dev_.called_away()) return true;
      s_.late_since_ns = 0;
    }
    return false;
  }

  UNJAM_HD void begin_pass() {
    s_.pass_begun = true;
    s_.moved = s_.heard = s_.wants_room = s_.ran = s_.quantum_over = s_.shorts_only = false;
    s_.was_ordered = s_.long_waits = false;
    s_.position = 0;
    s_.tried_head = kNoSlot;
    // Before the look that the pass is, see doorbell.h.
    s_.epoch = dev_.epoch();
    dev_.attend();
    if (s_.policy.order == OrderPolicy::kPriority) {
      while (fetch()) {
      }
    }
    s_.cursor = lane_.queue.head();
    count(lane_.stats.passes);
  }

  // FIFO order aims to empty the queue: it fetches only when nothing has come for what is in it,
  // or when what moves has given way (a small newcomer does not sit behind a gigabyte).
  // Then as many as there is room for contexts at hand, for peers may be at any of them: with one
  // a pass, each pass with its waits, eight all-reduces in random orders took 2.7 times as long
  // as in one order on 4 GPUs. Where ranks are in disorder all are taken in, for an order that all
  // have is one of all of them (one_order.h).
  UNJAM_HD bool wants_newcomers() {
    s_.fetching = !s_.fetching &&
                  (lane_.queue.empty() || !s_.heard || s_.quantum_over || in_disorder() || digs());
    if (s_.fetching) s_.fetched = false;
    return s_.fetching;
  }

  // Something urgent is in the mailbox, maybe behind many letters, and all that is in the queue is
  // long: letters are taken in until it is found.
  UNJAM_HD bool digs() const {
    return lane_.shorts == 0 && load_relaxed_local(mailbox_.urgent) != lane_.urgent_taken;
  }

  // See one_order.h. The fixed policy is a queue in the order of calls, and nothing else.
  UNJAM_HD bool in_disorder() const {
    return s_.policy.stickiness == StickinessPolicy::kAdaptive &&
           s_.policy.order == OrderPolicy::kFifo && lane_.disorder.expected();
  }
  UNJAM_HD bool wants_one_order() {
    const bool may = in_disorder() && !s_.heard;
    if (!may) s_.unheard_since_ns = 0;
    if (!may || !s_.unordered || s_.was_ordered) return false;
    const std::uint64_t now = dev_.now_ns();
    if (s_.unheard_since_ns == 0) s_.unheard_since_ns = now;
    if (now - s_.unheard_since_ns < std::uint64_t{s_.policy.order_after_us} * 1000) return false;
    if (now - lane_.open_since_ns > kOpenNs) {
      lane_.queue.close();
      lane_.open_since_ns = now;
    }
    s_.unordered = false;
    return s_.was_ordered = s_.one_order.take(lane_.queue);
  }
  UNJAM_HD void put_in_order() {
    OneOrder& o = s_.one_order;
    const auto each = [&](auto step) {
      for (std::uint32_t i = dev_.first(); i < o.n; i += dev_.stride()) step(i);
      dev_.sync_control();
    };
    each([&](std::uint32_t i) {
      const Invocation& inv = rank_.invocations[o.slots[i]];
      o.uses[i] = inv.n;
      o.seeds[i] = inv.seed;
    });
    each([&](std::uint32_t i) { o.sort(i); });
    each([&](std::uint32_t i) { lane_.queue.place(o.sorted, o.n, i, o.after); });
    if (dev_.leads()) {
      lane_.queue.settle(o.sorted, o.n, o.after);
      count(lane_.stats.orderings);
    }
    dev_.sync_control();
  }

  // False: quit.
  UNJAM_HD bool end_pass() {
    const bool fetched = s_.fetched;
    s_.fetched = false;
    if (s_.moved || fetched) {
      s_.idle = 0;
    } else if (s_.idle < 0xffff) {
      ++s_.idle;
    }
    if (holds() && !lane_.queue.empty()) {
      // Other lanes are not yet as far. (Not if something has moved: what was accepted since the
      // pass began is moved, and its ring may have come before the epoch.)
      if (!s_.ran && !fetched && !s_.moved) dev_.hold_sleep(s_.epoch);
      return true;
    }
    if (dev_.called_away()) {
      if (s_.quantum_over) return false;  // what moves could go on for long
      // A few passes more often end in a rest, which needs nobody to take over.
      const bool nothing_left = lane_.queue.empty() && !fetched;
      if (((!s_.moved && !fetched) || nothing_left) && rest()) {
        s_.quit_for = QuitFor::kCalledAway;
        return false;
      }
      return s_.late++ < kLatePasses && !too_late();
    }
    // Only here: a stay that ended within a pass would begin the next one at the head again, and
    // who stands behind what takes all the time would never get a turn. (As to who was called away,
    // see schedule().)
    if (over_residency()) {
      s_.quit_for = QuitFor::kResidency;
      return false;
    }
    return s_.idle < s_.policy.idle_passes || !rest();
  }

  // True: asleep. What peers do concerns a lane only if it has something pending.
  UNJAM_HD bool rest() {
    if (!mailbox_.empty()) return false;
    // What is long has not been looked at.
    if (s_.shorts_only && !lane_.queue.empty()) return false;
    std::uint32_t interest = 0;
    if (!lane_.queue.empty()) interest = kAsleepForData | (s_.wants_room ? kAsleepForRoom : 0u);
    if (!dev_.try_quit(s_.epoch, interest)) return false;
    s_.quit_for = lane_.queue.empty() ? QuitFor::kIdle : QuitFor::kStuck;
    return true;
  }

  // By the control threads: each looks at newcomers of its own, the lead lines them up.
  UNJAM_HD void fetch_several() {
    bool more = true;
    while (more) {
      std::uint32_t n = 0;
      if (dev_.leads()) {
        const std::uint32_t size = lane_.queue.size();
        const std::uint32_t room = size < kActiveContexts ? kActiveContexts - size : 1;
        n = mailbox_.count(in_disorder() || digs() ? kActiveContexts : room);
      }
      n = tell(n);
      const std::uint64_t begun_ns = begin_step();
      for (std::uint32_t i = dev_.first(); i < n; i += dev_.stride()) {
        s_.newcomers[i] = receive(mailbox_.at(i));
      }
      dev_.sync_control();
      for (std::uint32_t i = 0; i < n; ++i) {
        if (s_.newcomers[i].clears) clear_room(s_.newcomers[i].slot, dev_.first(), dev_.stride());
      }
      dev_.sync_control();
      if (dev_.leads() && n != 0) {
        for (std::uint32_t i = 0; i < n; ++i) take_letter(s_.newcomers[i]);
        mailbox_.take(n);
        s_.fetched = true;
        end_step(Step::kPrepare, begun_ns, n);
      }
      dev_.sync_control();
      more = tell(dev_.leads() && n == kActiveContexts && digs() ? 1 : 0) != 0;
    }
  }
  // By the lead.
  UNJAM_HD bool fetch() {
    std::uint16_t slot = kNoSlot;
    const std::uint64_t begun_ns = begin_step();
    if (mailbox_.count(1) == 0) return false;
    slot = mailbox_.at(0);
    // It takes one thread too long: left to fetch_several().
    if (clears_room(rank_.invocations[slot])) return false;
    mailbox_.take(1);
    take_letter(receive(slot));
    end_step(Step::kPrepare, begun_ns);
    return true;
  }
  // By the lead.
  UNJAM_HD void take_letter(const Newcomer& found) {
    if (found.command || found.is_short) ++lane_.urgent_taken;  // as is_urgent() says
    line_up(found);
  }
  UNJAM_HD void accept(std::uint16_t slot) { line_up(receive(slot)); }

  // By any control thread.
  UNJAM_HD Newcomer receive(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    Newcomer found{slot};
    found.command = inv.key == nullptr;
    found.clears = clears_room(inv);
    if (found.command) return found;
    DynamicContext dyn;
    dyn.handed = dev_.handed_over(slot);
    const bool is_done = dyn.handed.stage == Stage::kDone;
    if (is_done) dyn.loop = ~std::uint64_t{0};
    dyn.started_ns = dev_.now_ns();
    lane_.contexts[slot] = dyn;
    ActiveContext& a = s_.active[slot % kActiveContexts];
    if (a.slot == slot) a.slot = kNoSlot;  // of the slot's former user
    // Others of these may be of the same key. (Relaxed: barriers order it.)
    LocalAtomicRef<std::uint32_t>(inv.key->lanes[lane_index_].in_queue).fetch_add(1, kRelaxed);
    found.counted = is_done;
    found.is_short = is_short(inv);
    found.alike = likeness(inv, found.is_short);
    found.priority = inv.priority;
    return found;
  }
  // What invocations whose order may say something have in common, see one_order.h; else 0. (Not
  // the group: the key's state may be another's yet. Among more than 4,095 ranks others may look
  // alike, which costs a moment of order.)
  UNJAM_HD static std::uint32_t likeness(const Invocation& inv, bool is_short) {
    const Kind kind = inv.geometry.kind;
    if (has_root(kind)) return 0;
    return (std::uint32_t{inv.group_size} << 20 ^ std::uint32_t{inv.group_rank} << 8) |
           static_cast<std::uint32_t>(kind) << 1 | static_cast<std::uint32_t>(is_short);
  }
  // By the lead: into the task queue.
  UNJAM_HD void line_up(const Newcomer& found) {
    const std::uint16_t slot = found.slot;
    if (found.command) {
      if (!found.clears) release_keys(s_.transport, rank_.invocations[slot]);
      if (fetch_add<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) == 1) {
        dev_.fence();
        dev_.complete(slot, Outcome::kDone);
      }
      return;
    }
    s_.moved = true;  // it is to be looked at before the lane may rest
    if (found.counted) ++lane_.counted;
    if (found.is_short) ++lane_.shorts;
    if (s_.policy.order == OrderPolicy::kPriority) {
      lane_.queue.push_by_priority(slot, found.priority);
    } else {
      lane_.queue.push_back(slot, found.alike);
      s_.unordered = true;
    }
    if (lane_.queue.size() > lane_.stats.queue_peak) {
      store_relaxed<std::uint64_t>(lane_.stats.queue_peak, lane_.queue.size());
    }
  }

  // Lets go of keys that the runtime forgets: of their endpoints (ConnectorOwner is the one place
  // where pointers into a key outlast its invocations) and of what peers have sent under them.
  UNJAM_HD static void release_keys(LaneTransport& t, const Invocation& inv) {
    for (std::uint64_t i = 0; i < inv.n; ++i) {
      const KeyRelease& r = static_cast<const KeyRelease*>(inv.input)[i];
      for (std::uint32_t q = 0; q < r.group_size; ++q) {
        const std::uint32_t peer = r.members[q];
        if (peer == t.rank) continue;
        if (r.void_tag != 0) t.mark_void(peer, r.void_tag);
        if (r.lanes != nullptr) {
          const bool settled = r.settled != nullptr && (r.settled[q / 64] >> q % 64 & 1) != 0;
          t.release(peer, r.lanes[t.lane].out[q], settled);
        }
      }
    }
  }

  // What a command to clear a room says, by each of so many threads.
  UNJAM_HD void clear_room(std::uint16_t slot, std::uint32_t first, std::uint32_t stride) {
    const ClearRoom room = room_of(rank_.invocations[slot]);
    s_.transport.clear_room(room.peer, room.from, room.to, first, stride);
  }

  // ---- contexts (all control threads) ----

  UNJAM_HD ActiveContext& active() { return s_.active[s_.slot % kActiveContexts]; }

  // The context of s_.slot. Complete for all control threads, the lead too, behind the next barrier
  // of theirs.
  UNJAM_HD ActiveContext& load() {
    const std::uint16_t slot = s_.slot;
    ActiveContext& a = s_.active[slot % kActiveContexts];
    const bool cached = a.slot == slot;
    if (dev_.leads()) s_.loaded = !cached;
    if (!cached) {
      save(a);
      const std::uint64_t begun_ns = begin_step();
      copy_vectors(&a.inv, &rank_.invocations[slot], sizeof(a.inv));
      copy_vectors(&a.dyn, &lane_.contexts[slot], sizeof(a.dyn));
      dev_.sync_control();
      for (std::uint32_t i = dev_.first(); i < kCachedPrimitives; i += dev_.stride()) {
        if (i < a.inv.num_primitives) a.program[i] = a.inv.program[i];
      }
      const LaneKey& key_of_lane = a.inv.key->lanes[lane_index_];
      if (is_wide(a.inv)) {
        if (dev_.leads()) a.neighbours[kFromPlace] = a.neighbours[kToPlace] = kNoPeer;
      } else {
        for (std::uint32_t k = dev_.first(); k < a.inv.num_neighbours; k += dev_.stride()) {
          bring(a, k, a.inv.neighbours[k], key_of_lane);
        }
      }
      for (std::uint32_t i = dev_.first(); i < a.inv.num_sets; i += dev_.stride()) {
        a.sets[i] = a.inv.sets[i];
      }
      // (There are no more parts than members.)
      const std::uint32_t parts = a.inv.geometry.parts;
      const std::uint32_t here = kWide && parts > kAtHand ? kAtHand : parts;
      for (std::uint32_t p = dev_.first(); p < here; p += dev_.stride()) {
        a.parts[p] = a.inv.geometry.lane_part(p, lane_index_);
      }
      if (dev_.leads()) {
        const KeyState& key = *a.inv.key;
        a.key = &key.lanes[lane_index_];
        a.out = a.key->out;
        a.in = a.key->in;
        a.tag = key.tag;
        a.group = key.group;
        a.slot = slot;
        a.dirty = 0;
        count(lane_.stats.context_loads);
        end_step(Step::kLoadContext, begun_ns);
      }
    }
    if (dev_.leads() && a.dyn.attempts != 0xffffffffu) ++a.dyn.attempts;
    return a;
  }

  // ---- wide plans: more neighbours than are at hand (plan/plan.h) ----

  // Whom a primitive receives from, and whom it sends to, are at one place each.
  static constexpr std::uint16_t kFromPlace = 0, kToPlace = 1;
  UNJAM_HD static bool is_wide(const Invocation& inv) { return kWide && inv.wide_peers != nullptr; }
  // Group rank q to place k among the neighbours. Its endpoints are the key's, with all that has
  // changed while it was there before.
  UNJAM_HD void bring(ActiveContext& a, std::uint32_t k, std::uint16_t q,
                      const LaneKey& key) const {
    a.neighbours[k] = q;
    a.members[k] = a.inv.members[q];
    a.outs[k] = s_.transport.wire(key.out[q]);
    a.ins[k] = s_.transport.wire(key.in[q]);
    a.invited[k] = nullptr;
  }
  // By the lead: the plan's neighbour `which`, kNoPeer: nobody.
  UNJAM_HD std::uint16_t bring_wide(ActiveContext& a, std::uint16_t place,
                                    std::uint16_t which) const {
    if (which == kNoPeer) return kNoPeer;
    const std::uint16_t q = a.inv.neighbours[which];
    if (a.neighbours[place] != q) bring(a, place, q, a.inv.key->lanes[lane_index_]);
    return place;
  }

  // Lazy: only what has progressed. Each thread copies the vectors that it also loads.
  UNJAM_HD void save(const ActiveContext& a) {
    if (a.slot == kNoSlot || a.dirty == 0) return;
    const std::uint64_t begun_ns = begin_step();
    copy_vectors(&lane_.contexts[a.slot], &a.dyn, sizeof(a.dyn));
    if (!dev_.leads()) return;
    count(lane_.stats.context_saves);
    end_step(Step::kSaveContext, begun_ns);
  }

  UNJAM_HD void copy_vectors(void* to, const void* from, std::size_t bytes) const {
    struct alignas(kVectorBytes) [[gnu::may_alias]] Vector {
      std::uint32_t words[kVectorBytes / sizeof(std::uint32_t)];
    };
    for (std::size_t i = dev_.first(); i < bytes / kVectorBytes; i += dev_.stride()) {
      static_cast<Vector*>(to)[i] = static_cast<const Vector*>(from)[i];
    }
  }

  // ---- turns ----

  UNJAM_HD void begin_turn() {
    ActiveContext& a = load();
    dev_.sync_control();  // the lead reads primitives that others have fetched
    if (s_.loaded && a.dyn.attempts == 1 && invites(a.inv)) {
      call<&Engine::invite_known>();
      if (dev_.leads()) a.dirty = 1;  // not at each entry of one that does not get on
    }
    if (!dev_.leads()) return;
    if (s_.loaded) {
      const std::uint32_t last = a.inv.num_primitives - 1;
      a.passes = a.inv.geometry.loops_of(part_at(a, a.inv.geometry.longest_part_of(lane_index_)));
      a.passes += (last < kCachedPrimitives ? a.program[last] : a.inv.program[last]).lag;
    }
    set_running(s_.slot);
    record(TraceType::kStart, &a.inv);
    s_.quantum = s_.policy.quantum_slices;
    s_.next_look = is_short(a.inv) ? 0 : s_.quantum - s_.turn;
    s_.in_turn = true;
    s_.received = false;
    s_.ended = !seek(a);
  }

  UNJAM_HD void packets_missing() {
    if (dev_.leads()) {
      ActiveContext& a = active();
      note_lack(a, Lack::kData);
      end_turn(give_way(a, s_.threshold), false);
    }
    dev_.sync_control();
  }

  // `fenced`: see finish().
  UNJAM_HD void end_turn(std::uint32_t status, bool fenced) {
    if (!dev_.leads()) return;
    ActiveContext& a = active();
    s_.in_turn = false;
    set_running(kNoSlot);
    const bool ends = status == kFinished || status == kCancelledNow;
    if (ends && !drained(a.slot)) {
      status = give_way(a, 1);
      if (holds()) dev_.hold_sleep(s_.epoch);  // from before drained() was asked
    }
    switch (status) {
      case kFinished:
        finish(a.slot, Outcome::kDone, fenced);
        break;
      case kCancelledNow:
        finish(a.slot, Outcome::kCancelled, false);
        break;
      case kQuantumOver:
        count(lane_.stats.quantum_switches);
        s_.turn = s_.policy.longer_turn(s_.turn);
        record(TraceType::kYield, &a.inv);
        give_way_to_shorts();
        break;
      default:
        record(TraceType::kPreempt, &a.inv);
        s_.long_waits = s_.long_waits || !is_short(a.inv);
        if (is_late_for_head(a)) s_.shorts_only = true;
        break;
    }
  }

  // By the lead: whether what is long waits for the next pass, behind one that has waited for peers
  // in vain. If something had come for it, they have been here, and are elsewhere. Where calls are
  // long each rank then found what others had sent ahead, one call after the other, and all went
  // around the queue behind each other (lab/nccl-notes.md, "By slices"). The head of the queue is
  // what they have in common, mostly; so there they wait for each other. (If it is among others, it
  // is not, and may be slow. And if it has not had its turn it cannot go on; whose key it has may
  // not be said yet, either.)
  UNJAM_HD bool is_late_for_head(const ActiveContext& a) const {
    const bool adapts = s_.policy.stickiness == StickinessPolicy::kAdaptive;
    if (!s_.received || !adapts || is_short(a.inv)) return false;
    const std::uint16_t head = lane_.queue.head();
    if (head == kNoSlot || head == a.slot || head != s_.tried_head) return false;
    return rank_.invocations[head].key->group == a.group;
  }
  // By the lead: of a turn that has ended, but could have gone on.
  UNJAM_HD void give_way_to_shorts() {
    s_.quantum_over = true;
    if (s_.policy.order == OrderPolicy::kPriority || holds()) {
      s_.cursor = kNoSlot;  // a new pass begins: it fetches, and starts at the head
    } else {
      s_.shorts_only = true;
      s_.cursor = lane_.queue.head();
    }
  }

  // By the lead: goes on to the next primitive that has something to do. False: there is none.
  UNJAM_HD bool seek(ActiveContext& a) {
    for (; a.dyn.loop < a.passes; advance(a)) {
      const Primitive p = primitive_at(a, a.dyn.primitive);
      s_.primitive = p;
      s_.chunk = chunk_of(a, p, a.dyn.primitive);
      s_.from = peers_of(a, p.from, a.dyn.primitive, true);
      s_.to = peers_of(a, p.to, a.dyn.primitive, false);
      s_.pair = false;
      s_.primitives = 1;
      if ((p.flags & kWithNext) != 0) {
        s_.primitives = 2;
        s_.second = primitive_at(a, a.dyn.primitive + 1);
        s_.second_chunk = chunk_of(a, s_.second, a.dyn.primitive + 1);
        // (What the first one does not, the second does: see Primitive.)
        s_.from = peers_of(a, s_.second.from, a.dyn.primitive + 1, true);
        if (s_.chunk.length == 0) {
          s_.to = {};
          s_.primitive = s_.second;
          s_.chunk = s_.second_chunk;
        } else {
          s_.pair = s_.second_chunk.length != 0;
          if (!s_.pair) s_.from = {};
        }
      }
      if (s_.chunk.length != 0) return true;
    }
    return false;
  }
  UNJAM_HD static Primitive primitive_at(const ActiveContext& a, std::uint32_t i) {
    return i < kCachedPrimitives ? a.program[i] : a.inv.program[i];
  }

  // Whom the i-th primitive receives from, or sends to.
  UNJAM_HD SlicePeers peers_of(ActiveContext& a, Peers peers, std::uint32_t i,
                               bool receives) const {
    if (peers == kNobody) return {};
    if (is_set(peers)) return {a.sets[set_of(peers)].neighbours, kNoPeer};
    if (!is_wide(a.inv)) return {0, peers};
    const WidePeers wide = a.inv.wide_peers[i];
    return {0, receives ? bring_wide(a, kFromPlace, wide.from) : bring_wide(a, kToPlace, wide.to)};
  }

  // The i-th primitive's chunk in this pass, empty if it was done by others: of copies a longest.
  UNJAM_HD Range chunk_of(const ActiveContext& a, Primitive p, std::uint32_t i) const {
    if (a.dyn.loop < p.lag || a.dyn.loop - p.lag < a.dyn.handed.done_of(i)) return {};
    if ((p.flags & kCopies) == 0) return chunk(a, p, p.part);
    const Peers peers = (p.flags & kScatter) != 0 ? p.to : p.from;
    return chunk(a, p, a.sets[set_of(peers)].longest_part);
  }
  // The same of a part.
  UNJAM_HD Range chunk(const ActiveContext& a, Primitive p, std::uint32_t part) const {
    const Geometry& g = a.inv.geometry;
    const Range all = part_at(a, part);
    if (a.dyn.loop < p.lag) return {all.offset, 0};
    return g.chunk_of(all, a.dyn.loop - p.lag);
  }

  // What this lane carries of a part.
  UNJAM_HD Range part_at(const ActiveContext& a, std::uint32_t part) const {
    if (!kWide || part < kAtHand) return a.parts[part];
    return a.inv.geometry.lane_part(part, lane_index_);
  }

  // The slice under way, by direction: a pair's first primitive sends and its second receives,
  // any other's only one does both.
  UNJAM_HD Primitive side(bool in) const { return in && s_.pair ? s_.second : s_.primitive; }
  UNJAM_HD Range chunk(bool in) const { return in && s_.pair ? s_.second_chunk : s_.chunk; }
  UNJAM_HD SliceJob& job(bool in) const { return s_.jobs[2 * s_.which + (in && s_.pair ? 1 : 0)]; }
  UNJAM_HD std::uint16_t slice_flags() const {
    return static_cast<std::uint16_t>(s_.primitive.flags | (s_.pair ? s_.second.flags : 0));
  }
  UNJAM_HD bool has_sets() const { return (s_.from.set | s_.to.set) != 0; }

  UNJAM_HD void advance(ActiveContext& a) {
    if ((a.dyn.primitive += s_.primitives) == a.inv.num_primitives) {
      a.dyn.primitive = 0;
      ++a.dyn.loop;
    }
    a.dirty = 1;
  }

  // Waits for the slice that is next; fills job().
  UNJAM_HD std::uint32_t prepare() {
    if (dev_.leads()) {
      s_.which = 0;
      s_.stream = {};
    }
    const std::uint32_t goes_on = tell(dev_.leads() ? may_go_on() : std::uint32_t{kMove});
    if (goes_on != kMove) return goes_on;
    ActiveContext& a = active();
    const std::uint32_t status = wait_ready(a);
    if (status == kMove && dev_.leads()) {
      build_jobs(a);
      give_to_movers(0);
      s_.packets = inline_flags(a);
      if constexpr (kCarries) s_.carried = is_carried();
    }
    return status;
  }

  // Others are looked for behind each turn, all else behind a quantum. (It may be asked again when
  // it has said that somebody waits.)
  UNJAM_HD std::uint32_t may_go_on() {
    if (s_.ended) return kFinished;
    if (s_.quantum > s_.next_look) return kMove;
    // A device may see what was submitted since the pass began only behind such a look; passes
    // are long where gigabytes move.
    if (lane_index_ == 0) look_at_submissions();
    if (others_wait()) return kQuantumOver;
    s_.turn = s_.policy.shortest_turn();
    if (s_.quantum == 0) {
      if (over_residency() || dev_.called_away()) return kQuantumOver;
      s_.quantum = s_.policy.quantum_slices;
    }
    s_.next_look = s_.quantum > s_.turn ? s_.quantum - s_.turn : 0;
    return kMove;
  }
  UNJAM_HD void look_at_submissions() {
    if constexpr (requires { dev_.look_at_submissions(); }) {
      dev_.look_at_submissions();
    } else {
      dev_.epoch();
    }
  }

  // Whether who has had its turn gives way, in FIFO order only to what is short; newcomers are
  // taken in to see what they are, some at a time, behind a quantum in any case. Others that are as
  // long would only change places with it. The peers, which change places at moments of their own,
  // would then rarely be at the same ones, and none would come to its flow: 32 all-reduces of 256
  // MiB beside streams took five times as long on 2 GPUs as one behind the other.
  UNJAM_HD bool others_wait() {
    if (lane_index_ == 0 && dev_.submissions_wait()) return true;
    if (s_.policy.order == OrderPolicy::kPriority) {
      return lane_.queue.size() > 1 || !mailbox_.empty();
    }
    if (lane_.shorts != 0) return true;
    const bool takes_in =
        s_.quantum == 0 || load_relaxed_local(mailbox_.urgent) != lane_.urgent_taken;
    return takes_in && call<&Engine::shorts_wait>();
  }
  UNJAM_HD bool shorts_wait() {
    constexpr int kTakenIn = 4;
    for (int i = 0; i < kTakenIn && fetch(); ++i) {
    }
    return lane_.shorts != 0;
  }
  // Whether a lane's part is some quantum's slices at most, roughly: without a division, which
  // takes a GPU a microsecond, and alike whenever it is asked. (Packets of GPUs are one loop.)
  UNJAM_HD bool is_short(const Invocation& inv) const {
    // (A stream is as long as a quantum, however few its slices are: of another that would be
    // interrupted as well, each rank at a moment of its own. So it is for a device that does none
    // whole, too: lanes, and what counts such as are short, go from one to another.)
    if (is_stream(inv)) return false;
    if constexpr (Dev::kInlinePacketFlags) {
      if (has_inline_flags(inv.protocol)) return true;
    }
    const Geometry& g = inv.geometry;
    const float slices = static_cast<float>(g.count) * static_cast<float>(inv.num_primitives);
    const float quantum = static_cast<float>(s_.policy.quantum_slices) *
                          static_cast<float>(g.chunk) * static_cast<float>(g.lanes);
    return slices <= quantum * (g.blocked() ? 1.0f : static_cast<float>(g.parts));
  }
  // What is not to wait until calls that are long have ended. The same for who mails it and for who
  // takes it out.
  UNJAM_HD bool is_urgent(const Invocation& inv) const {
    return inv.key == nullptr || is_short(inv);
  }
  UNJAM_HD bool over_residency() const {
    return dev_.residency_matters() &&
           dev_.now_ns() - s_.started_ns > std::uint64_t{s_.policy.residency_us} * 1000;
  }

  // The two phases: poll up to the threshold, then give way.
  UNJAM_HD std::uint32_t wait_ready(ActiveContext& a) {
    dev_.delay();
    if (has_sets()) begin_peers(a);
    std::uint32_t polls = 0;
    [[maybe_unused]] Gates gates;
    [[maybe_unused]] Lack last = Lack::kNothing;
    for (;;) {
      const std::uint32_t epoch = holds() && dev_.leads() ? dev_.epoch() : 0;
      Lack lack;
      if constexpr (kGates) {
        // (Before the look. Where somebody has no gate it is looked again.)
        const Gates now = look_at_gates(a);
        const bool again = polls == 0 || !now.all || now.count != gates.count;
        gates = now;
        // (With the lead's acquire, behind which all look.)
        lack = tell(again ? 1 : 0) != 0 ? look(a) : last;
        last = lack;
      } else {
        lack = look(a);
      }
      if (lack == Lack::kNothing) break;
      ++polls;
      if (holds()) {
        dev_.sync_control();  // what others found, for note_lack()
        const std::uint32_t told =
            tell(dev_.leads() ? hold(a, lack, polls, epoch) : std::uint32_t{kMove});
        if (told != kMove) return told;
        continue;
      }
      if (polls >= s_.threshold) {
        dev_.sync_control();  // as above
        if (dev_.leads()) {
          if (lack == Lack::kRoom) s_.wants_room = true;
          note_lack(a, lack);
          give_way(a, polls);
        }
        return kBlocked;
      }
      if (polls % 32 == 0 && !dev_.all(!dev_.leads() || !dev_.cancelled(a.slot))) {
        return kCancelledNow;
      }
      dev_.relax(polls);
    }
    if (dev_.leads()) {
      s_.waited = polls != 0;
      if (polls != 0) count_spins(a, polls);
    }
    return kMove;
  }

  // By the lead: a failed poll under the hold policy. kMove: go on.
  UNJAM_HD std::uint32_t hold(ActiveContext& a, Lack lack, std::uint32_t polls,
                              std::uint32_t epoch) {
    if (dev_.cancelled(a.slot)) return kCancelledNow;
    if (dev_.stopped()) return give_way(a, polls);
    if (polls >= s_.policy.spin_head) {
      note_lack(a, lack);
      dev_.hold_sleep(epoch);
    }
    return kMove;
  }

  UNJAM_HD std::uint32_t give_way(ActiveContext& a, std::uint32_t polls) {
    count_spins(a, polls);
    count(lane_.stats.preemptions);
    if constexpr (Dev::kHostWatches) bump(a.key->preemptions);
    return kBlocked;
  }

  // By the lead. Only if it is news, so that its time is that of the first wait since something
  // moved.
  UNJAM_HD void note_lack(ActiveContext& a, Lack lack) {
    const bool room = lack == Lack::kRoom;
    const SlicePeers& peers = room ? s_.to : s_.from;
    std::uint32_t k = peers.one;
    if (peers.set != 0) {
      const bool* has = room ? s_.has_room : s_.has_come;
      for (k = 0; k < a.inv.num_neighbours && has[k]; ++k) {
      }
    }
    // (The block's vote does not tell.)
    const std::uint32_t peer = k < a.inv.num_neighbours ? a.neighbours[k] : kSomePeer;
    const std::uint32_t word = lack_word(lack, peer, a.inv.n);
    if constexpr (!Dev::kHostWatches) return;
    std::uint64_t& place = a.key->lack;
    if (static_cast<std::uint32_t>(load_relaxed(place)) == word) return;
    store_relaxed(place, dev_.now_ns() >> 20 << 32 | word);
  }

  // ---- streams of slices, see above ----

  // By the control threads. The first slice's job was made before the barrier.
  UNJAM_HD void stream() {
    ActiveContext& a = active();
    StreamOfSlices& stream = s_.stream;
    for (std::uint32_t n = 0;; ++n) {
      // Slice n is on its way.
      count_slice(a);
      dev_.sync_control();
      bool goes_on = false;
      if (dev_.leads()) {
        dev_.store_block(stream.counted, n + 1);
        move_on(a);
        goes_on = !s_.ended && !holds() && may_go_on() == kMove;
        s_.which = (n + 1) % kStreamDepth;
      }
      if (tell(goes_on ? 1 : 0) == 0 || !prepare_next(a, n)) {
        if (dev_.leads()) dev_.store_block(stream.total, n + 1);
        return;
      }
    }
  }

  // Hands slice n + 1 on. False: it is not ready although all before are published.
  UNJAM_HD bool prepare_next(ActiveContext& a, std::uint32_t n) {
    std::uint32_t& posted = s_.stream.posted;
    // Whose place it takes; or what it may read.
    std::uint32_t before = n + 2 > kStreamDepth ? n + 2 - kStreamDepth : 0;
    if (slice_flags() & kFromOutput) before = n + 1;
    // (Here the block waits for itself alone.)
    while (!dev_.all(!dev_.leads() || dev_.load_block(posted) >= before)) dev_.relax(1);
    dev_.sync_control();  // what the lead has acquired, for all
    if (has_sets()) begin_peers(a);
    if (dev_.leads()) s_.waited = false;
    while (look(a) != Lack::kNothing) {
      if (dev_.leads()) s_.waited = true;
      if (dev_.all(!dev_.leads() || dev_.load_block(posted) == n + 1)) return false;
      dev_.relax(1);
    }
    if (dev_.leads()) build_jobs(a);
    dev_.sync_control();
    if (dev_.leads()) give_to_movers(n + 1);
    return true;
  }

  // By the lead: each job of slice n is for the group of movers that has had less.
  UNJAM_HD void give_to_movers(std::uint32_t n) {
    if constexpr (Dev::kStreams) {
      StreamOfSlices& stream = s_.stream;
      const std::uint32_t place = n % kStreamDepth;
      for (std::uint32_t in = 0; in < (s_.pair ? 2u : 1u); ++in) {
        std::uint32_t group = 0;
        for (std::uint32_t g = 1; g < dev_.groups(); ++g) {
          if (stream.cost[g] < stream.cost[group]) group = g;
        }
        stream.cost[group] += cost_of(in != 0);
        const std::uint32_t k = stream.given[group];
        stream.turns[group][k % (2 * kStreamDepth)] = 2 * place + in;
        stream.expected[place] += dev_.movers();
        dev_.store_block(stream.given[group], k + 1);
      }
    }
  }
  // How long a slice takes the movers, see cost_of_element().
  UNJAM_HD std::uint64_t cost_of(bool in) const {
    const SliceJob& job = this->job(in);
    if (job.copies) {
      const std::uint16_t flags = side(in).flags;
      const std::uint32_t stores = (flags & kCopy) != 0 ? 1 : 0;
      const Invocation& inv = s_.active[s_.slot % kActiveContexts].inv;
      const std::uint16_t empty = inv.geometry.empty_part;
      const std::uint32_t copies = count_bits(in ? s_.from.set : s_.to.set) -
                                   (empty == kNoPart || empty == inv.group_rank ? 0u : 1u);
      return chunk(in).length * copies *
             cost_of_element(1, (flags & kScatter) != 0 ? 1 : 0, stores);
    }
    return job.elems * cost_of_element(job.num_src, job.num_dst, job.dst_user != nullptr ? 1 : 0);
  }

  UNJAM_HD static void move_stream(DevHandle dev, BlockShared& block) {
    BlockShared& shared = here(block);
    StreamOfSlices& stream = shared.stream;
    const std::uint32_t g = dev.group();
    for (std::uint32_t k = 0;; ++k) {
      while (dev.load_block(stream.given[g]) <= k) {
        // (The latest is given before the stream ends.)
        if (dev.load_block(stream.total) != 0 && dev.load_block(stream.given[g]) <= k) return;
        dev.relax(1);
      }
      // Overwritten when the group is given number k + 2 * kStreamDepth, which is of a slice that
      // takes this one's place, or a later one's.
      const std::uint32_t j = stream.turns[g][k % (2 * kStreamDepth)];
      dev.leaf(shared.jobs[j]);
      dev.stored(stream.stored[j / 2]);
    }
  }

  UNJAM_HD static void post_stream(DevHandle dev, BlockShared& block) {
    BlockShared& shared = here(block);
    StreamOfSlices& stream = shared.stream;
    for (std::uint32_t n = 0;; ++n) {
      while (dev.load_block(stream.counted) <= n) {
        const std::uint32_t total = dev.load_block(stream.total);
        if (total != 0 && total <= n) return;
        dev.relax(1);
      }
      const std::uint32_t place = n % kStreamDepth;
      // (Written before the slice was counted, and next when this one is posted.)
      const std::uint32_t all = stream.expected[place];
      while (dev.load_block(stream.stored[place]) != all) dev.relax(1);
      post_slice(dev, shared, place);
      dev.sync_posters();
      if (dev.posters_first()) dev.store_block(stream.posted, n + 1);
    }
  }

  // Behind the barrier: all slices are published.
  UNJAM_HD void end_stream() {
    if (dev_.leads() && s_.ended) call<&Engine::end_turn>(std::uint32_t{kFinished}, false);
    dev_.sync_control();
  }

  // ---- readiness ----

  // By the lead: the gates of all whom the slice waits for, see "Gates".
  struct Gates {
    std::uint64_t count = 0;  // of all together: each only grows
    bool all = true;          // everyone has one
  };
  UNJAM_HD Gates look_at_gates(const ActiveContext& a) {
    Gates gates;
    if constexpr (kGates) {
      if (!dev_.leads()) return gates;
      const std::uint64_t sets = s_.from.set | s_.to.set;
      const std::uint32_t n = is_wide(a.inv) ? kAtHand : std::uint32_t{a.inv.num_neighbours};
      for (std::uint32_t k = 0; k < n; ++k) {
        if ((sets >> k & 1) == 0 && k != s_.from.one && k != s_.to.one) continue;
        const std::uint64_t* const gate = dev_.gate(member(a, k));
        if (gate == nullptr) return {0, false};
        gates.count += load_acquire(*gate);
      }
    }
    return gates;
  }

  // What the slice lacks. Changes nothing that outlives the wait.
  UNJAM_HD Lack look(ActiveContext& a) {
    if (dev_.leads()) s_.elems = static_cast<std::uint32_t>(s_.chunk.length - a.dyn.through);
    if (s_.from.one != kNoPeer) {
      if (!dev_.all(!dev_.leads() || slice_there(a))) return Lack::kData;
    }
    if (has_sets()) {
      const Lack lack = look_at_peers(a);
      if (lack != Lack::kNothing) return lack;
    }
    if (s_.to.one != kNoPeer) {
      if (!dev_.all(!dev_.leads() || room_there(a))) return Lack::kRoom;
    }
    return Lack::kNothing;
  }

  // Whether flags come with the data (then the block votes on them, and both ends know the
  // length) instead of in slot headers.
  UNJAM_HD static bool inline_flags([[maybe_unused]] const ActiveContext& a) {
    if constexpr (Dev::kInlinePacketFlags) return has_inline_flags(a.inv.protocol);
    return false;
  }

  // See LaneTransport::open() and resolve(), of neighbour k. The endpoints are the key's.
  UNJAM_HD bool open(ActiveContext& a, std::uint32_t k) {
    OutEndpoint& out = a.out[a.neighbours[k]];
    if (!s_.transport.open(member(a, k), a.tag, a.group, out, &a.key->in_queue)) {
      // Several threads may count here.
      fetch_add<std::uint64_t>(lane_.stats.no_connector, 1);
      return false;
    }
    a.outs[k] = s_.transport.wire(out);
    return true;
  }
  UNJAM_HD bool resolve(std::uint32_t k) {
    ActiveContext& a = active();
    InEndpoint& in = a.in[a.neighbours[k]];
    const bool found = s_.transport.resolve(member(a, k), a.tag, in);
    const Wire was = a.ins[k];
    if (in.connector != was.connector || in.consumed != was.count || in.steps != was.steps) {
      if (was.connector != kNoConnector && in.connector != was.connector && invites(a.inv)) {
        LaneTransport::withdraw(*was.cell, a.inv.seed, a.inv.output_place);
      }
      a.ins[k] = s_.transport.wire(in);
      if (found && invites(a.inv)) invite(a, k);
    }
    return found;
  }

  // ---- outputs that peers store into (connector.h) ----

  // Whether this rank lets peers store into its output.
  UNJAM_HD static bool invites(const Invocation& inv) {
    return inv.output_place != 0 && inv.protocol == Protocol::kSlot;
  }
  UNJAM_HD void invite(ActiveContext& a, std::uint32_t k) {
    LaneTransport::invite(a.ins[k], a.inv.seed, a.inv.output_place);
  }
  // On connectors that are known as the invocation begins; on others as they are found.
  UNJAM_HD void invite_known() {
    ActiveContext& a = active();
    const bool wide = is_wide(a.inv);
    for (std::uint32_t i = dev_.first(); i < a.inv.num_neighbours; i += dev_.stride()) {
      const std::uint32_t k = wide ? kFromPlace : i;
      if (wide) bring(a, k, a.inv.neighbours[i], *a.key);
      if (a.ins[k].connector == kNoConnector) continue;
      if (resolve(k)) invite(a, k);
    }
  }
  // Of an invocation that has failed here.
  UNJAM_HD void withdraw(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    const LaneKey& key = inv.key->lanes[lane_index_];
    for (std::uint32_t k = 0; k < inv.num_neighbours; ++k) {
      const InEndpoint& in = key.in[inv.neighbours[k]];
      if (in.connector == kNoConnector) continue;
      LaneTransport::withdraw(*in.cell, inv.seed, inv.output_place);
    }
  }
  // Whether the slice may go straight to where neighbour k's output has it. Looked for until it is
  // found, from its first slice on that could use it; whatever this rank knows of heaps and
  // windows, for the words are in the line of the credits, which every slice looks at.
  UNJAM_HD bool asks(const ActiveContext& a, std::uint32_t k) const {
    return (s_.primitive.flags & kIntoOutput) != 0 && a.invited[k] == nullptr;
  }
  UNJAM_HD void note_invitation(ActiveContext& a, std::uint32_t k, const Invitation& seen) {
    a.invited[k] = s_.transport.invited_output(member(a, k), a.outs[k], a.inv.seed, seen);
  }
  // Where neighbour k has the slice in its output; nullptr: it goes through a slot.
  UNJAM_HD unsigned char* place_in_output(const ActiveContext& a, std::uint32_t k) const {
    if ((s_.primitive.flags & kIntoOutput) == 0) return nullptr;
    unsigned char* output = a.invited[k];
    if (output == nullptr || output == LaneTransport::unreachable()) return nullptr;
    const Geometry& g = a.inv.geometry;
    const std::uint32_t q = a.neighbours[k];
    const bool scatters = (s_.primitive.flags & kScatter) != 0;
    const std::uint64_t offset =
        scatters ? chunk(a, s_.primitive, q).offset : s_.chunk.offset + a.dyn.through;
    output += (offset - g.output_shift(q)) * dtype_bytes(g.dtype);
    // What is not aligned is not moved in wide accesses, which slots are worth.
    const bool aligned = (reinterpret_cast<std::uintptr_t>(output) & 15) == 0;
    return aligned ? output : nullptr;
  }

  UNJAM_HD bool arrived(ActiveContext& a, std::uint32_t k, std::uint32_t elems, RecvView& view) {
    LaneTransport& t = s_.transport;
    const std::uint32_t peer = member(a, k);
    const Wire& in = a.ins[k];
    const bool packets = inline_flags(a);
    // Where the slice was last expected, first: a flag is one step's of one invocation, so what
    // carries it is the slice, whoever has the connector now. That spares looking the key up.
    if (!packets && in.connector != kNoConnector && t.poll(peer, in, a.inv.seed, view)) return true;
    if (!call<&Engine::resolve>(k)) return false;
    if (packets) {
      view = t.packet_view(in, elems * dtype_bytes(a.inv.geometry.dtype));
      return true;
    }
    return t.poll(peer, in, a.inv.seed, view);
  }

  // Capacity 0: there is none.
  UNJAM_HD SendGrant room(ActiveContext& a, std::uint32_t k, std::uint32_t elems) {
    const Wire& out = a.outs[k];
    if (out.connector == kNoConnector && !open(a, k)) return {};
    const bool asking = asks(a, k);
    Invitation seen;
    if (asking) seen = LaneTransport::glimpse(out);
    const std::uint64_t credit = load_acquire(out.cell->consumed);
    if (asking) note_invitation(a, k, seen);
    return room(a, k, elems, credit);
  }
  UNJAM_HD SendGrant room(ActiveContext& a, std::uint32_t k, std::uint32_t elems,
                          std::uint64_t credit) {
    LaneTransport& t = s_.transport;
    const std::uint32_t peer = member(a, k);
    const Wire& out = a.outs[k];
    if (inline_flags(a)) return t.packet_grant(out, credit);
    if (unsigned char* place = place_in_output(a, k)) return t.output_grant(place, out, credit);
    return t.grant(peer, out, elems * dtype_bytes(a.inv.geometry.dtype), credit, slot_class());
  }

  // ---- carried slices, see above ----

  // Whether it is a mark that counts: what is several peers', or more than a copy, is the blocks'.
  UNJAM_HD bool is_marked() const {
    if (!kCarries || carrier_of(s_.primitive) == Carrier::kBlocks) return false;
    const bool only_sends = (s_.primitive.flags & (kRecv | kCopy | kCopies)) == 0;
    return only_sends && !s_.pair && s_.to.one != kNoPeer;
  }
  UNJAM_HD SlotClass slot_class() const {
    return is_marked() ? SlotClass::kBorrowedFirst : SlotClass::kGuaranteedFirst;
  }
  // By the lead: of the slice that is described.
  UNJAM_HD bool is_carried() const {
    if (!is_marked()) return false;
    const SliceJob& job = this->job(false);
    const bool is_copy = job.scale_sources == ScaleSources::kNone && job.divisor == 1;
    return is_copy && s_.location[0] != 0 && s_.location[0] != kInOutput;
  }
  // Instead of the leaf and publish().
  UNJAM_HD void carry() {
    if constexpr (kCarries) {
      ActiveContext& a = active();
      dev_.delay();
      count_slice(a);
      dev_.sync_control();
      if (dev_.leads()) {
        const Posting& out = s_.postings[s_.which][s_.num_postings[s_.which] - 2];
        dev_.fence();  // what the slice's header says, before whoever publishes the word
        dev_.carry(a.slot, job(false), out.word, out.peer);
        move_on(a);
        if (s_.ended) call<&Engine::end_turn>(std::uint32_t{kFinished}, false);
      }
      dev_.sync_control();
    }
  }
  UNJAM_HD bool drained([[maybe_unused]] std::uint16_t slot) {
    if constexpr (kCarries) return dev_.drained(slot);
    return true;
  }

  // One peer, by the lead.
  UNJAM_HD bool slice_there(ActiveContext& a) {
    if (!arrived(a, s_.from.one, s_.elems, s_.view)) return false;
    if (inline_flags(a)) return true;
    const std::uint32_t come = (s_.view.bytes - a.dyn.taken) / dtype_bytes(a.inv.geometry.dtype);
    if (come < s_.elems) s_.elems = come;
    return true;
  }
  UNJAM_HD bool room_there(ActiveContext& a) {
    const SendGrant g = room(a, s_.to.one, s_.elems);
    if (g.capacity == 0) return false;
    const std::uint32_t elems = g.capacity / dtype_bytes(a.inv.geometry.dtype);
    if (elems < s_.elems && !inline_flags(a)) {
      if (s_.from.set != 0) return false;  // what it receives is one slice
      s_.elems = elems;
    }
    job(false).dst_slot[0] = g.data;
    s_.location[0] = g.location;
    return true;
  }

  // Several peers, this thread's share. What a slice with several peers has found once stays so:
  // slices do not go, and room only grows, until this lane itself takes or fills them.
  //
  // There are two parts a neighbour: of n neighbours, number i is what comes from the i-th, number
  // n + i is room at it. All parts are looked at together, each by one thread, so that a slice
  // takes one round trip to memory, not two. (Copies have one of the two: who sees to that
  // describes the copy.)
  struct Part {
    std::uint32_t k;
    bool in;
  };
  UNJAM_HD static Part part_of(const ActiveContext& a, std::uint32_t i) {
    const std::uint32_t n = a.inv.num_neighbours;
    return i < n ? Part{i, true} : Part{i - n, false};
  }
  UNJAM_HD bool& has(Part part) { return part.in ? s_.has_come[part.k] : s_.has_room[part.k]; }

  // The rank in the job of neighbour k.
  UNJAM_HD static std::uint32_t member(const ActiveContext& a, std::uint32_t k) {
    return a.members[k];
  }

  UNJAM_HD std::uint64_t set(bool in) const { return in ? s_.from.set : s_.to.set; }
  UNJAM_HD bool copies(bool in) const { return (side(in).flags & kCopies) != 0; }
  UNJAM_HD bool takes_part(Part part) const {
    if ((set(part.in) >> part.k & 1) == 0) return false;
    return !copies(part.in) || job(part.in).copy_elems[part.k] != 0;
  }
  // Elements of the slice from or to a neighbour.
  UNJAM_HD std::uint32_t elems_of(Part part) const {
    if (copies(part.in)) return job(part.in).copy_elems[part.k];
    return static_cast<std::uint32_t>(chunk(part.in).length);
  }
  UNJAM_HD static std::uint32_t place_in(std::uint64_t set, std::uint32_t k) {
    return count_bits(set & ((std::uint64_t{1} << k) - 1));
  }
  // Neighbour k's place in dst_slot, of what is sent. A combine's result goes to num_dst places,
  // without a gap; copies are at their neighbours' places.
  UNJAM_HD std::uint32_t place_of(std::uint32_t k) const {
    return copies(false) ? k : place_in(s_.to.set, k);
  }
  // And in src, of what is received. What is combined has this rank's own among them: of
  // contributions where its rank comes, of sums behind them.
  UNJAM_HD std::uint32_t source_of(const ActiveContext& a, std::uint32_t k) const {
    const Primitive p = side(true);
    if ((p.flags & kCopies) != 0) return k;
    const bool behind_own = (p.flags & kPartials) == 0 && k >= a.inv.neighbours_below;
    return place_in(s_.from.set, k) + (behind_own ? 1 : 0);
  }
  UNJAM_HD std::uint32_t own_source(const ActiveContext& a) const {
    const bool last = (side(true).flags & kPartials) != 0;
    return last ? count_bits(s_.from.set) : place_in(s_.from.set, a.inv.neighbours_below);
  }

  UNJAM_HD void begin_peers(const ActiveContext& a) {
    for (std::uint32_t i = dev_.first(); i < 2 * std::uint32_t{a.inv.num_neighbours};
         i += dev_.stride()) {
      const Part part = part_of(a, i);
      // (A set of the other direction is the other primitive's, of two that go together.)
      if (set(part.in) != 0 && copies(part.in)) place_copy(a, part);
      has(part) = !takes_part(part);
    }
  }

  // The user's side of the copy for a neighbour.
  UNJAM_HD void place_copy(const ActiveContext& a, Part part) {
    const std::uint32_t k = part.k;
    const Primitive p = side(part.in);
    SliceJob& job = this->job(part.in);
    const bool is_in_set = (set(part.in) >> k & 1) != 0;
    const Range c = chunk(a, p, a.neighbours[k]);
    job.copy_elems[k] = is_in_set ? static_cast<std::uint32_t>(c.length) : std::uint32_t{0};
    if (p.flags & kScatter) {
      job.src[k] = local_at(a.inv, p, c.offset);
      const bool copies = (p.flags & kCopy) != 0 && a.inv.input != a.inv.output;
      job.dst_copy[k] = copies ? a.inv.output_at(c.offset) : nullptr;
    } else {
      job.dst_slot[k] = nullptr;
      job.dst_copy[k] = a.inv.output_at(c.offset);
    }
  }

  UNJAM_HD Lack look_at_peers(ActiveContext& a) {
    bool come = true, room = true;
    for (std::uint32_t i = dev_.first(); i < 2 * std::uint32_t{a.inv.num_neighbours};
         i += dev_.stride()) {
      const Part part = part_of(a, i);
      if (has(part) || look_at_peer(a, part)) continue;
      (part.in ? come : room) = false;
    }
    if (!dev_.all(come)) return Lack::kData;
    return dev_.all(room) ? Lack::kNothing : Lack::kRoom;
  }
  UNJAM_HD bool look_at_peer(ActiveContext& a, Part part) {
    const std::uint32_t k = part.k, peer = member(a, k);
    LaneTransport& t = s_.transport;
    if (inline_flags(a) && part.in) {
      RecvView view;
      if (!arrived(a, k, elems_of(part), view)) return false;
      return note_slice(k, view.data);
    }
    const Wire& wire = part.in ? a.ins[k] : a.outs[k];
    if (wire.connector == kNoConnector && !(part.in ? call<&Engine::resolve>(k) : open(a, k))) {
      return false;
    }
    // Before the acquire, so that all are under way together.
    const bool asking = !part.in && asks(a, k);
    Invitation seen;
    if (asking) seen = LaneTransport::glimpse(wire);
    // One look for both kinds of parts: branches would wait for memory one after the other.
    std::uint64_t& word = part.in ? LaneTransport::flag_word(wire) : wire.cell->consumed;
    const std::uint64_t found = load_acquire(word);
    if (asking) note_invitation(a, k, seen);
    if (part.in) {
      if (LaneTransport::is_next(found, wire, a.inv.seed)) {
        return note_slice(k, t.slice_at(peer, wire, found));
      }
      return call<&Engine::comes_elsewhere>(k);
    }
    const SendGrant g = room(a, k, elems_of(part), found);
    if (g.capacity == 0) return false;
    if (!inline_flags(a) && g.capacity < elems_of(part) * dtype_bytes(a.inv.geometry.dtype)) {
      return false;
    }
    const std::uint32_t at = place_of(k);
    job(false).dst_slot[at] = g.data;
    s_.location[at] = g.location;
    return s_.has_room[k] = true;
  }
  // The sender may have opened another connector, and all of a look must be in one look: who sleeps
  // behind it has not been rung for what came before its epoch (doorbell.h).
  UNJAM_HD bool comes_elsewhere(std::uint32_t k) {
    ActiveContext& a = active();
    const Wire was = a.ins[k];
    if (!resolve(k)) return false;
    const Wire& in = a.ins[k];
    if (in.steps == was.steps && in.count == was.count) return false;
    RecvView view;
    return s_.transport.poll(member(a, k), in, a.inv.seed, view) && note_slice(k, view.data);
  }
  UNJAM_HD bool note_slice(std::uint32_t k, const unsigned char* data) {
    job(true).src[source_of(active(), k)] = data;
    return s_.has_come[k] = true;
  }

  // ---- the slice ----

  UNJAM_HD static const void* local_at(const Invocation& inv, Primitive p, std::uint64_t offset) {
    return (p.flags & kFromOutput) != 0 ? inv.output_at(offset) : inv.input_at(offset);
  }

  // By the lead: all of the slice's jobs that the waits have not filled in.
  UNJAM_HD void build_jobs(const ActiveContext& a) {
    for (std::uint32_t in = 0; in < (s_.pair ? 2u : 1u); ++in) build_job(a, in != 0);
  }
  UNJAM_HD void build_job(const ActiveContext& a, bool in) {
    const Invocation& inv = a.inv;
    const Geometry& g = inv.geometry;
    const Primitive p = side(in);
    const std::uint16_t flags = p.flags;
    SliceJob& job = this->job(in);
    job.copies = (flags & kCopies) != 0;
    job.dtype = g.dtype;
    job.op = inv.op;
    job.protocol = inv.protocol;
    if constexpr (Dev::kInlinePacketFlags) {
      if (has_inline_flags(inv.protocol)) {
        // (Packets do not lag: the pass is the chunk. What only sends makes the first hop, and
        // nothing received is looked at.)
        const std::uint32_t hop = hop_received(p);
        job.flag = job.sent_flag = packet_flag(inv.seed, a.dyn.loop, hop);
        if (hop_sent(p) != hop && (flags & kSend) != 0) {
          job.sent_flag = packet_flag(inv.seed, a.dyn.loop, hop_sent(p));
        }
      }
    }
    if (job.copies) {
      // (And one more, without data: movers share copies out by how many there are, of a group's
      // size.)
      job.copy_elems[inv.num_neighbours] = 0;
      job.num_src = static_cast<std::uint16_t>(inv.num_neighbours + 1);
      job.num_dst = 0;
      job.local_src = -1;
      job.elems = 0;
      job.dst_user = nullptr;
      return;
    }
    const std::uint64_t offset = chunk(in).offset + a.dyn.through;
    const void* local = local_at(inv, p, offset);
    job.elems = s_.pair ? static_cast<std::uint32_t>(chunk(in).length) : s_.elems;
    job.dst_user = flags & kCopy ? inv.output_at(offset) : nullptr;
    job.num_dst = 0;
    if ((flags & kSend) != 0) {
      job.num_dst = static_cast<std::uint16_t>(to_set(p) ? count_bits(s_.to.set) : 1);
    }
    const bool gathers = from_set(p);
    const bool average = inv.op == Op::kAvg && inv.group_size > 1;
    const bool scales = average && !is_integer(g.dtype) && (flags & kContribute);
    if ((flags & kRecv) != 0 && !gathers && s_.view.data == nullptr) {
      // It is in the output already. From there it goes on, if it does.
      job.dst_user = nullptr;
      if (job.num_dst == 0) job.elems = 0;
      s_.view.data = inv.output_at(offset) - a.dyn.taken;
    }
    if (gathers) {
      const std::uint32_t own = own_source(a);
      job.src[own] = local;
      job.num_src = static_cast<std::uint16_t>(count_bits(s_.from.set) + 1);
      job.local_src = static_cast<std::int16_t>(own);
      const bool sums = (flags & kPartials) != 0;
      job.scale_sources = !scales ? ScaleSources::kNone
                          : sums  ? ScaleSources::kLocal
                                  : ScaleSources::kAll;
    } else {
      std::uint16_t n = 0;
      if (flags & kRecv) job.src[n++] = s_.view.data + a.dyn.taken;
      job.local_src = flags & kLocal ? static_cast<std::int16_t>(n) : std::int16_t{-1};
      if (flags & kLocal) job.src[n++] = local;
      job.num_src = n;
      job.scale_sources = scales ? ScaleSources::kLocal : ScaleSources::kNone;
    }
    job.divisor =
        average && is_integer(g.dtype) && (flags & kFinish) ? inv.group_size : std::uint32_t{1};
    if (scales) job.scale = 1.0 / inv.group_size;
  }

  UNJAM_HD std::uint32_t slice_bytes(const ActiveContext& a) const {
    return s_.elems * dtype_bytes(a.inv.geometry.dtype);
  }

  // Counts the slice that is described at its connectors, writes what peers are to read about
  // it, and down what publishing it takes. In front of move_on().
  UNJAM_HD void count_slice(ActiveContext& a) {
    Posting* postings = s_.postings[s_.which];
    std::uint32_t several = 0;
    if (has_sets()) {
      several = 2 * std::uint32_t{a.inv.num_neighbours};
      for (std::uint32_t i = dev_.first(); i < several; i += dev_.stride()) {
        const Part part = part_of(a, i);
        Posting& w = postings[i];
        w.what = Posting::kNothing;
        if (!takes_part(part)) continue;
        if (part.in) {
          count_in(a, part.k, w);
        } else {
          count_out(a, part.k, place_of(part.k), elems_of(part), w);
        }
      }
    }
    if (!dev_.leads()) return;
    // One peer to send to, one to receive from: two places.
    s_.num_postings[s_.which] = several + 2;
    Posting& out = postings[several];
    Posting& in = postings[several + 1];
    out.what = in.what = Posting::kNothing;
    if (s_.to.one != kNoPeer) count_out(a, s_.to.one, 0, s_.elems, out);
    if (s_.from.one != kNoPeer && a.dyn.taken + slice_bytes(a) == s_.view.bytes) {
      count_in(a, s_.from.one, in);
    }
  }
  UNJAM_HD void count_out(ActiveContext& a, std::uint32_t k, std::uint32_t at, std::uint32_t elems,
                          Posting& w) {
    Wire& out = a.outs[k];
    w.peer = member(a, k);
    w.what = Posting::kSlice;
    const std::uint32_t bytes = elems * dtype_bytes(a.inv.geometry.dtype);
    const std::uint32_t location = s_.location[at];
    if (inline_flags(a)) {
      s_.transport.advance(out);
      w.word.place = nullptr;  // the data carried their flags
    } else {
      w.word = s_.transport.post(w.peer, out, a.inv.seed, location, bytes);
    }
    a.out[a.neighbours[k]].posted = out.count;
    count_shared(s_.sent_bytes, bytes);
    if (location == kInOutput) {
      count_shared(s_.sent_into_outputs, 1);
    } else if (location != 0) {
      count_shared(s_.sent_borrowed, 1);
    }
  }
  UNJAM_HD void count_in(ActiveContext& a, std::uint32_t k, Posting& w) {
    w.peer = member(a, k);
    w.what = Posting::kCredit;
    w.word = s_.transport.take(a.ins[k]);
    a.in[a.neighbours[k]].consumed = a.ins[k].count;
  }

  // Makes the slice visible to the peers. First all that is to be visible is written, then one
  // fence of each thread that publishes is behind it, then it is published. (What was sent as
  // packets needs neither.) Whether this thread has fenced.
  UNJAM_HD static bool post_slice(DevHandle dev, BlockShared& shared, std::uint32_t which) {
    const std::uint32_t n = shared.num_postings[which];
    const std::uint32_t lane = shared.transport.lane;
    bool fenced = false;
    for (std::uint32_t i = dev.first(); i < n; i += dev.stride()) {
      const Posting& w = shared.postings[which][i];
      if (w.what == Posting::kNothing) continue;
      if (w.word.place != nullptr) {
        if (!fenced) dev.fence();
        fenced = true;
        Dev::publish(*w.word.place, w.word.value);
        if constexpr (requires { dev.posted(w.peer, lane, w.word); }) {
          if (dev.posted(w.peer, lane, w.word)) continue;
        }
      }
      dev.ring(w.peer, lane, w.what == Posting::kSlice ? RingFor::kData : RingFor::kRoom);
    }
    return fenced;
  }

  // Publishes the slice that the block has stored, and, by the lead, the end of the invocation with
  // it: the lead's fence, if it had one, covers also what the others have written, which is behind
  // the barrier.
  UNJAM_HD void publish() {
    ActiveContext& a = active();
    dev_.delay();
    count_slice(a);
    dev_.sync_control();
    const bool fenced = post_slice(dev_, s_, 0);
    dev_.sync_control();  // nobody reads the slice's description any more
    if (dev_.leads()) {
      move_on(a);
      if (s_.ended) call<&Engine::end_turn>(std::uint32_t{kFinished}, fenced);
    }
    dev_.sync_control();
  }

  UNJAM_HD void move_on(ActiveContext& a) {
    count(lane_.stats.slices);
    add_sent();
    if constexpr (Dev::kHostWatches) {
      bump(a.key->slices);
      store_relaxed<std::uint64_t>(a.key->lack, lack_word(Lack::kNothing, 0, a.inv.n));
    }
    a.dirty = 1;
    a.dyn.handed.stage = Stage::kSlices;  // what slices have begun is theirs
    s_.moved = true;
    --s_.quantum;
    const std::uint16_t flags = slice_flags();
    if (flags & kRecv) {
      count(lane_.stats.received);
      s_.heard = true;
      s_.received = true;
      // Peers are at it. (What is sent says nothing about them: it goes to who is not there, too,
      // and who stuck to its collective then would miss them where they are. In disorder nor does
      // what was there before this lane: they may have been here, and gone on; but for the front.
      // For packets with flags inside their leaf waits.)
      if (s_.waited || !in_disorder() || is_patient(a.inv) || inline_flags(a)) {
        s_.threshold = dev_.threshold(s_.policy.after_success(s_.threshold));
      }
    }
    if (s_.from.one != kNoPeer && (a.dyn.taken += slice_bytes(a)) == s_.view.bytes) {
      a.dyn.taken = 0;
    }
    if ((flags & kCopies) == 0 && !s_.pair) {  // the others' slices are their chunks
      a.dyn.through += s_.elems;
      if (a.dyn.through != s_.chunk.length) return;
      a.dyn.through = 0;
    }
    advance(a);
    s_.ended = !seek(a);
  }

  // By the lead: the invocation has ended at this lane. `fenced`: a fence of this thread is behind
  // all that the lane has stored for it.
  UNJAM_HD void finish(std::uint16_t slot, Outcome outcome, bool fenced) {
    ActiveContext& a = s_.active[slot % kActiveContexts];
    const bool cached = a.slot == slot;
    const Invocation& inv = cached ? a.inv : rank_.invocations[slot];
    LaneKey& key = cached ? *a.key : inv.key->lanes[lane_index_];
    if (cached) a.slot = kNoSlot;
    record(outcome == Outcome::kDone ? TraceType::kFinish : TraceType::kPreempt, &inv);
    // (One that has not begun has invited nobody, and the endpoints may not be the key's yet.)
    if (outcome != Outcome::kDone && invites(inv) &&
        load_acquire_local(inv.key->done) == inv.turn) {
      call<&Engine::withdraw>(slot);
    }
    leave_queue(slot, lane_.queue.follows_its_like(slot));
    --key.in_queue;
    if (is_short(inv)) note_short_end();
    if constexpr (Dev::kHostWatches) {
      bump<std::uint64_t>(key.time_ns, dev_.now_ns() - lane_.contexts[slot].started_ns);
    }
    s_.moved = true;
    end_part(inv, slot, fenced);
  }
  UNJAM_HD void note_short_end() {
    --lane_.shorts;
    s_.turn = s_.policy.shorter_turn(s_.turn);
  }
  // By the lead: of an invocation that ends. overtook: see one_order.h.
  UNJAM_HD void leave_queue(std::uint16_t slot, bool overtook) {
    lane_.disorder.note_end(overtook);
    if (s_.cursor == slot) s_.cursor = lane_.queue.next(slot);
    lane_.queue.remove(slot);
    // Somebody may come to be among the first, who are put in order together.
    if (lane_.queue.size() >= kMostInOrder) s_.unordered = true;
    if (lane_.counted != 0) {
      --lane_.counted;
    } else {
      count(lane_.stats.completed);
    }
    dev_.ended(slot);
  }
  // By one control thread: this lane's part is done; if all are, the invocation has ended.
  // `fenced`: see finish().
  UNJAM_HD void end_part(const Invocation& inv, std::uint16_t slot, bool fenced) {
    if (inv.geometry.lanes > 1) {
      // Acquire-release: the last lane sees, and passes on, what all lanes have stored.
      if (fetch_add_local<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) != 1) return;
      fenced = false;
    }
    if (!fenced) dev_.fence();
    const bool cancelled = dev_.cancelled_by_any(slot);
    // A key with a cancelled invocation is finished for good: the runtime refuses further ones.
    if (!cancelled) Dev::publish(inv.key->done, inv.turn + 1);
    const std::uint64_t begun_ns = begin_step();
    dev_.complete(slot, cancelled ? Outcome::kCancelled : Outcome::kDone);
    // (Of calls that were done whole each thread ends some.)
    if (dev_.leads()) end_step(Step::kWriteCqe, begun_ns);
    // Other lanes may sleep on the key's next invocation. (After the completion: whoever holds the
    // lane and sleeps may wait for that.)
    if (rank_.num_lanes > 1) dev_.ring_own_lanes();
  }

  // ---- small things ----

  UNJAM_HD bool holds() const { return s_.policy.stickiness == StickinessPolicy::kHold; }

  // A figure of the lane's. In the block's own memory nobody else looks at it.
  UNJAM_HD static void count(std::uint64_t& figure, std::uint64_t by = 1) {
    if constexpr (Dev::kLaneInShared) {
      figure += by;
    } else {
      bump(figure, by);
    }
  }

  // A part of what was counted before. Release: whoever reads parts first finds no more of them
  // than there are in all.
  UNJAM_HD static void count_part(std::uint64_t& figure) {
    if constexpr (Dev::kLaneInShared) {
      ++figure;
    } else {
      store_release<std::uint64_t>(figure, load_relaxed(figure) + 1);
    }
  }

  // What several control threads count, until the lead adds it to the lane's figures. (Memory of a
  // block on a GPU adds 32 bits at once, and 64 in a loop.)
  UNJAM_HD static void count_shared(std::uint32_t& figure, std::uint32_t by) {
    if constexpr (requires { Dev::add(figure, by); }) {
      Dev::add(figure, by);
    } else {
      fetch_add<std::uint32_t>(figure, by);
    }
  }
  UNJAM_HD void add_sent() {
    if (s_.sent_bytes == 0) return;
    count(lane_.stats.bytes_sent, s_.sent_bytes);
    if (s_.sent_borrowed != 0) count(lane_.stats.borrowed, s_.sent_borrowed);
    if (s_.sent_into_outputs != 0) count(lane_.stats.into_outputs, s_.sent_into_outputs);
    s_.sent_bytes = s_.sent_borrowed = s_.sent_into_outputs = 0;
  }

  UNJAM_HD void count_spins(ActiveContext& a, std::uint32_t polls) {
    count(lane_.stats.spins, polls);
    if constexpr (Dev::kHostWatches) bump<std::uint64_t>(a.key->spins, polls);
  }

  // For diagnosis. On devices where publish() needs a fence there is none: the word may be seen
  // before what the lane did.
  UNJAM_HD void set_running(std::uint16_t slot) {
    if constexpr (!Dev::kHostWatches) return;
    const std::uint64_t changes = (load_relaxed(lane_.running) >> 16) + 1;
    Dev::publish(lane_.running, changes << 16 | static_cast<std::uint16_t>(slot + 1));
  }

  UNJAM_HD std::uint64_t begin_step() { return s_.traces ? dev_.now_ns() : 0; }
  // By the lead. `times`: for how many invocations.
  UNJAM_HD void end_step(Step step, std::uint64_t begun_ns, std::uint32_t times = 1) {
    if (!s_.traces) return;
    StepTime& time = lane_.stats.steps[static_cast<std::size_t>(step)];
    count(time.count, times);
    count(time.ns, dev_.now_ns() - begun_ns);
  }

  UNJAM_HD void record(TraceType type, const Invocation* inv) {
    if (!s_.traces) return;
    lane_.trace.template record<Dev::kHostWatches>(
        {dev_.now_ns(), inv == nullptr ? std::uint64_t{0} : inv->key->tag,
         (inv == nullptr ? std::uint64_t{0} : inv->n << 32) | std::uint64_t{lane_index_} << 16 |
             static_cast<std::uint64_t>(type)});
  }

  DevHandle dev_;
  RankState& rank_;
  LaneState& lane_;
  Mailbox& mailbox_;
  const std::uint32_t lane_index_;
  BlockShared& s_;
};

}  // namespace unjam
