// Connectors: in-order, lock-free, one-way streams of slices between two ranks, one for each group,
// key, peer and lane. Called by a lane's control threads: for one peer and direction by one thread
// at a time, for others by several at once (what a sender keeps, it keeps for each peer apart).
//
// A step is one slice. Its sender publishes it through its header's flag, its receiver that it is
// consumed through the credit cell. Step s may use guaranteed slot s % guaranteed_slots if fewer
// than guaranteed_slots steps are outstanding, or any pool slot that is free: whose step was
// consumed. An attempt that finds nothing has changed nothing.
//
// docs/internals/connectors.md: why a ring cannot block itself, who takes a connector over, slices
// that nobody has read, and slices that go straight into a receiver's output.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/hash.h"
#include "base/portability.h"
#include "transport/arena.h"
#include "transport/rooms.h"
#include "transport/windows.h"

namespace unjam {

inline constexpr std::uint32_t kNoConnector = 0xffffffff;
inline constexpr std::uint64_t kTagUnused = 0;

struct OutEndpoint {
  std::uint64_t posted = 0;  // steps of the connector, over all its owners
  std::uint32_t connector = kNoConnector;
  std::uint32_t lost_at = 0;  // PeerSendState::opens when another key took it over; 0: never
  // Of the connector, see Wire.
  unsigned char* steps = nullptr;
  CreditCell* cell = nullptr;
  // Steps that the peer has consumed at least, as somebody has seen who had the lane since, for who
  // has no time to look.
  std::uint64_t credit = 0;
};

struct InEndpoint {
  std::uint64_t consumed = 0;
  std::uint32_t connector = kNoConnector;
  std::uint32_t pad = 0;
  unsigned char* steps = nullptr;
  CreditCell* cell = nullptr;
};

// An endpoint of either direction as who moves slice after slice has it at hand: with nothing left
// to work out about where things are. (On a GPU a thread alone takes a microsecond for two of these
// addresses, and a slice needs a dozen.)
struct Wire {
  unsigned char* steps = nullptr;  // the headers of its steps, and behind them its guaranteed slots
  CreditCell* cell = nullptr;
  std::uint64_t count = 0;  // posted, or consumed
  std::uint32_t connector = kNoConnector;
  std::uint32_t slot = 0;  // the step's guaranteed slot: count modulo their number
};

// A word that is to be published: stored with all that the thread did before, and saw others do (in
// the block: behind a barrier). That is a release, or, where releases are dear, a relaxed store
// behind a fence of the same thread, one for any number of stores.
struct PublishedWord {
  std::uint64_t* place = nullptr;
  std::uint64_t value = 0;
};

// Two invocations, or two steps of one, never share a flag (but with probability 2^-61), and
// untouched memory (0) never matches.
UNJAM_HD inline std::uint64_t step_flag(std::uint64_t seed, std::uint64_t step) {
  return (mix64(seed + step * 0xd1342543de82ef95ull) | 1) & ~std::uint64_t{6};
}
// In the flag of a slice that lies in a pool slot: its header says in which; and of one that is
// in the receiver's output already. Others lie in their step's guaranteed slot. So whoever sees the
// flag knows where the slice is, without another look.
inline constexpr std::uint64_t kFlagBorrowed = 2, kFlagInOutput = 4;
inline constexpr std::uint64_t kFlagPlaces = kFlagBorrowed | kFlagInOutput;
// SendGrant::location of such a slice.
inline constexpr std::uint32_t kInOutput = 0xffffffff;

// The flag in every unit of a packet, or in every line: of the chunk, not the step, so that all
// sources of a gather carry the same one. A chunk's packets between two ranks, of which there is
// one a hop at most, lie in slots that follow each other. Hops have flags of their own all the
// same: a reader that does not know yet that its connector has begun anew looks where another hop's
// packet may be, and must not take it for the one that it wants. `hop`: 0 or 1, see hop_sent().
// As long as a slice's, half of it beside each of a unit's two words, for 32 bits are too few where
// ten thousand calls a second follow each other in a slot: every few days two of them would be
// alike, and what the former has left would be taken for the latter's. (The words of a unit, stored
// and loaded in one instruction, need not come together. Then 29 bits tell, at the very moment when
// one has come and the other has not.)
UNJAM_HD inline std::uint64_t packet_flag(std::uint64_t seed, std::uint64_t chunk,
                                          std::uint32_t hop) {
  return step_flag(seed, 2 * chunk + hop);
}

// What invites the invocation with this seed to an output (where: windows.h).
struct Invitation {
  std::uint64_t output = 0;
  std::uint64_t word = 0;
};
UNJAM_HD inline std::uint64_t invitation_word(std::uint64_t seed, std::uint64_t output) {
  return mix64(mix64(seed) + output) | 1;
}

// Which of a connector's slots a sender would rather have.
enum class SlotClass : std::uint8_t {
  kGuaranteedFirst,  // a borrowed one for what is too long for it, or where all are taken
  kBorrowedFirst,    // a guaranteed one where no other is free
};

// What a sender may write into next.
struct SendGrant {
  unsigned char* data = nullptr;
  std::uint32_t capacity = 0;  // bytes; 0: no room now
  std::uint32_t location = 0;
};

// The slice that is next to be read. No data: it is in the output.
struct RecvView {
  const unsigned char* data = nullptr;
  std::uint32_t bytes = 0;
};

// Sender-local bookkeeping for one (peer, lane): who owns which connector, who used which borrowed
// slot last.
struct ConnectorOwner {
  OutEndpoint* endpoint = nullptr;        // nullptr: nobody's
  const std::uint32_t* in_use = nullptr;  // invocations of the owning key in this lane's queue
  std::uint64_t tag = 0;                  // of the owning key
  std::uint64_t group = 0;                // of its group
  // endpoint->posted when the hand last passed; of an abandoned connector, all that was posted.
  std::uint64_t seen = 0;
  std::uint32_t place = 0;  // in the directory
  std::uint32_t next = 0;   // in the list of those given back
};
struct PoolUse {
  // In place of a connector: a copy that was taken back has the slot (engine/copy_ring.h) until so
  // many of the lane's copies to the peer are done.
  static constexpr std::uint32_t kCopied = 0xffffffff;
  std::uint64_t step_end = 0;  // free once the connector's credit has reached this
  std::uint32_t connector = 0;
  std::uint32_t pad = 0;
};
struct PeerSendState {
  ConnectorOwner* owners = nullptr;  // [connectors]
  PoolUse* borrows = nullptr;        // [pool_slots]
  std::uint16_t* places = nullptr;   // [places]: connector + 1 that stands there
  std::uint32_t pool_next = 0;
  std::uint32_t pool = 0;  // connectors that keys, idle ones too, are meant to share
  std::uint32_t hand = 0;  // where the search for an idle one goes on
  std::uint32_t given_back = kNoConnector;  // the first in the list of those
  std::uint32_t longest_probe = 0;
  std::uint32_t opens = 0;
  std::uint32_t returns = 0;  // see learn()
  std::uint32_t usable = 0;   // Room::usable, as of the latest look
  // Written by who receives from the peer, not by who sends to it: whether the two have met.
  std::uint32_t met = 0;
  // Readable at any time.
  std::uint32_t touched = 0;    // connectors that were ever used: the lowest ones
  std::uint32_t opened = 0;     // connectors held now
  std::uint32_t reclaimed = 0;  // times that an idle key's connector was taken over
  std::uint32_t abandoned = 0;  // connectors of forgotten keys with slices that the peer may read
};

// Connectors that a (peer, lane) uses before it looks for idle ones.
inline constexpr std::uint32_t kFirstPool = 64;

// One lane's view of all arenas. `bases` maps world ranks to where their arenas are mapped here.
class LaneTransport {
 public:
  ArenaShape shape;
  unsigned char* const* bases = nullptr;
  WindowEntry* windows = nullptr;  // [ranks][kWindows], see windows.h; nullptr: there are none
  WindowEntry* noted_windows = nullptr;  // the same in a GPU's memory
  PeerSendState* peers = nullptr;        // [ranks]; nullptr: this one only receives
  Room* rooms = nullptr;                 // [ranks]; nullptr: all memory is there
  // [ranks], of those on other hosts: for the courier, the tag of each connector's owner's group
  // (network/mirror.h); nullptr: no rank is on another host.
  std::uint64_t* const* groups = nullptr;
  std::uint32_t rank = 0;  // world rank
  std::uint32_t lane = 0;

  // ---- sender ----

  // Gives `out` a connector to `peer` and announces it under `tag`. False if every connector
  // belongs to a key in use (or holds slices that the peer has yet to consume). `group`: the tag of
  // the key's group.
  UNJAM_HD_NOINLINE bool open(std::uint32_t peer, std::uint64_t tag, std::uint64_t group,
                              OutEndpoint& out, const std::uint32_t* in_use) {
    PeerSendState& state = peers[peer];
    const std::uint32_t i = pick(peer);
    if (i == kNoConnector) return false;
    ++state.opens;
    learn(state, out);
    ConnectorOwner& owner = state.owners[i];
    if (owner.endpoint != nullptr) {  // an idle key's: it will open another when needed
      owner.endpoint->lost_at = state.opens;
      store_relaxed(owner.endpoint->connector, kNoConnector);
      leave_place(peer, i);
      bump(state.reclaimed);
    } else {
      bump(state.opened);
    }
    out.posted = out.credit = credit(peer, i);
    out.steps = connector(peer, rank, i);
    out.cell = &cell(rank, peer, i);
    store_relaxed(out.connector, i);
    owner.endpoint = &out;
    owner.in_use = in_use;
    owner.tag = tag;
    owner.group = group;
    owner.seen = ~std::uint64_t{0};  // the hand passes once
    DirectoryEntry& entry = entries(peer, rank)[i];
    // A reader that still sees the former tag may take this base for the former owner's: it only
    // raises that reader's count, which is set anew when it finds its key elsewhere or here again.
    store_relaxed(entry.base, out.posted);
    if (groups != nullptr && groups[peer] != nullptr) store_relaxed(groups[peer][i], group);
    // Release: a reader that sees the tag sees the base.
    store_release(entry.tag, tag);
    take_place(peer, i, tag);
    return true;
  }

  // Takes the connector from a key that the runtime forgets; in the lane, while the key has no
  // invocation in it. Slices that the peer has yet to consume, if they are not void (`known_void`:
  // the caller has seen that they are), stay where they are, and where the peer will look for them:
  // under the key's tag. The connector is nobody's ("abandoned") until they are consumed, or void,
  // see reclaim().
  UNJAM_HD void release(std::uint32_t peer, OutEndpoint& out, bool known_void = false) {
    const std::uint32_t i = out.connector;
    if (i == kNoConnector) return;
    PeerSendState& state = peers[peer];
    const bool clean = settle(peer, i, known_void);
    ConnectorOwner& owner = state.owners[i];
    owner.seen = owner.endpoint->posted;
    owner.endpoint = nullptr;
    owner.in_use = nullptr;
    store_relaxed(out.connector, kNoConnector);
    store_relaxed(state.opened, state.opened - 1);
    if (!clean) {
      bump(state.abandoned);
      return;
    }
    unlist(peer, i);
    owner.next = state.given_back;
    state.given_back = i;
  }

  // Whether the peer has consumed all that was posted. Also from outside the lane, while the owning
  // key has no invocation in it: then only a take-over by another key writes the endpoint, which
  // happens to drained ones alone, and credits only grow.
  UNJAM_HD bool drained(std::uint32_t peer, OutEndpoint& out) const {
    const std::uint32_t i = load_relaxed(out.connector);
    return i == kNoConnector || credit(peer, i) >= out.posted;
  }

  // Whether the peer's lane will never read this key or group again. From anywhere.
  UNJAM_HD bool voided(std::uint32_t peer, std::uint64_t tag) const {
    // Acquire: pairs with the release in mark_void(): the peer's last reads of our slots and its
    // last credits came before.
    return load_acquire(void_mark(rank, peer, tag)) == tag;
  }

  // The endpoint's, if it has a connector.
  UNJAM_HD Wire wire(const OutEndpoint& out) const {
    return {out.steps, out.cell, out.posted, out.connector, slot_of(out.posted)};
  }
  UNJAM_HD Wire wire(const InEndpoint& in) const {
    return {in.steps, in.cell, in.consumed, in.connector, slot_of(in.consumed)};
  }

  // Whether a step's own, guaranteed slot may be written, with so many steps before it that were
  // not consumed: its last user was, for steps are consumed in order.
  UNJAM_HD bool own_slot_is_free(std::uint64_t outstanding) const {
    return outstanding < shape.guaranteed_slots;
  }

  // Room for up to `want` bytes of the wire's next step. `credit`: what its cell says (acquired).
  UNJAM_HD SendGrant grant(std::uint32_t peer, const Wire& out, std::uint32_t want,
                           std::uint64_t credit,
                           SlotClass slots = SlotClass::kGuaranteedFirst) const {
    const std::uint64_t outstanding = out.count - credit;
    SendGrant g;
    if (outstanding >= kSlotHeaders) return g;
    const bool guaranteed_free = own_slot_is_free(outstanding);
    const bool fits = want <= shape.guaranteed_slot_bytes && slots == SlotClass::kGuaranteedFirst;
    if (!fits || !guaranteed_free) {
      g = borrow(peer);
      if (g.capacity != 0) return g;
    }
    if (guaranteed_free) {
      g.data = guaranteed_slot(out);
      g.capacity = shape.guaranteed_slot_bytes;
      g.location = 0;
    }
    return g;
  }

  // Says where the slice is that was written into a grant with this location, and counts it. What
  // publishes it orders the payload (written by threads of the block, which have synchronised
  // since) and the header's fields before the flag. Pairs with the acquire in poll().
  UNJAM_HD PublishedWord post(std::uint32_t peer, Wire& out, std::uint64_t seed,
                              std::uint32_t location, std::uint32_t bytes) {
    SlotHeader& h = header(out);
    std::uint64_t place = 0;
    if (location == kInOutput) {
      place = kFlagInOutput;
    } else if (location != 0) {
      place = kFlagBorrowed;
      PeerSendState& state = peers[peer];
      state.borrows[location - 1] = {out.count + 1, out.connector, 0};
      state.pool_next = location == shape.pool_slots ? 0 : location;
    }
    store_relaxed(h.bytes, bytes);
    store_relaxed(h.location, location);
    const PublishedWord word{&h.flag, step_flag(seed, out.count) | place};
    advance(out);
    return word;
  }
  // Counts a step.
  UNJAM_HD void advance(Wire& w) const {
    ++w.count;
    if (++w.slot == shape.guaranteed_slots) w.slot = 0;
  }

  // ---- straight into the output, see the head ----

  // Receiver: the invocation with this seed has its output there. Called when the invocation may
  // run here: the output is ours to overwrite. Release: so it is to who finds the word.
  UNJAM_HD static void invite(const Wire& in, std::uint64_t seed, std::uint64_t output) {
    store_relaxed(in.cell->output, output);
    store_release(in.cell->output_word, invitation_word(seed, output));
  }
  // Nobody who has not seen the invitation yet will. (What another key has written there since
  // stays but for an unlucky moment, in which its slices go through slots.)
  UNJAM_HD static void withdraw(CreditCell& cell, std::uint64_t seed, std::uint64_t output) {
    if (load_relaxed(cell.output_word) != invitation_word(seed, output)) return;
    store_relaxed(cell.output_word, std::uint64_t{0});
  }
  // Sender: what the cell says now, without order.
  UNJAM_HD static Invitation glimpse(const Wire& out) {
    return {load_relaxed(out.cell->output), load_relaxed(out.cell->output_word)};
  }
  // The peer's output, as it is mapped here; nullptr: the invocation with this seed was not invited
  // by what was seen there; unreachable(): it was, to where this rank cannot store.
  UNJAM_HD unsigned char* invited_output(std::uint32_t peer, const Wire& out, std::uint64_t seed,
                                         const Invitation& seen) const {
    if (seen.word == 0) return nullptr;  // nobody ever was, which spares the hash
    if (seen.word != invitation_word(seed, seen.output)) return nullptr;
    // Acquire: pairs with the release in invite().
    if (load_acquire(out.cell->output_word) != seen.word) return nullptr;
    if (!in_window(seen.output)) return bases[peer] + seen.output;
    unsigned char* const output = find_in_window(windows, noted_windows, peer, seen.output);
    return output == nullptr ? unreachable() : output;
  }
  // An address that is none.
  UNJAM_HD static unsigned char* unreachable() {
    constexpr std::uintptr_t kNowhere = 1;
    return reinterpret_cast<unsigned char*>(kNowhere);  // NOLINT(performance-no-int-to-ptr)
  }
  // Room for a slice in the output. Its step has a header all the same.
  UNJAM_HD static SendGrant output_grant(unsigned char* place, const Wire& out,
                                         std::uint64_t credit) {
    SendGrant g;
    if (out.count - credit >= kSlotHeaders) return g;
    g.data = place;
    g.capacity = 0xffffffff;
    g.location = kInOutput;
    return g;
  }

  // ---- receiver ----

  // Finds the connector that `peer` announced under `tag`; false if there is none yet. Called at
  // each attempt: the sender may have given the connector back since, and opened another.
  UNJAM_HD bool resolve(std::uint32_t peer, std::uint64_t tag, InEndpoint& in) const {
    const std::uint32_t i = in.connector;
    if (i == kNoConnector) return find(peer, tag, in);
    DirectoryEntry& entry = entries(rank, peer)[i];
    // Acquire: pairs with the release in open(), so that base is this owner's or a later one's.
    if (load_acquire(entry.tag) != tag) return find(peer, tag, in);
    // Steps only grow over a connector's owners, and all that was consumed lies before a new base.
    const std::uint64_t base = load_relaxed(entry.base);
    if (base > in.consumed) in.consumed = base;
    // (An endpoint that was another key's may have been another peer's.)
    in.steps = connector(rank, peer, i);
    in.cell = &cell(peer, rank, i);
    return true;
  }

  // What resolve() and packet_grant() look at, for who makes several looks at once: the tag under
  // which the peer announces connector i (acquire, as there), the step count at which its owner
  // began, and the steps of our connector i that the peer has consumed (acquire).
  UNJAM_HD std::uint64_t& tag_word(std::uint32_t peer, std::uint32_t i) const {
    return entries(rank, peer)[i].tag;
  }
  UNJAM_HD std::uint64_t& base_word(std::uint32_t peer, std::uint32_t i) const {
    return entries(rank, peer)[i].base;
  }
  UNJAM_HD std::uint64_t& credit_word(std::uint32_t peer, std::uint32_t i) const {
    return cell(rank, peer, i).consumed;
  }

  // True if the next slice of the invocation with this seed has arrived.
  UNJAM_HD bool poll(std::uint32_t peer, const Wire& in, std::uint64_t seed, RecvView& view) const {
    // Acquire: the payload and the other fields are read after the flag.
    const std::uint64_t flag = load_acquire(flag_word(in));
    if (!is_next(flag, in, seed)) return false;
    view.bytes = load_relaxed(header(in).bytes);
    view.data = slice_at(peer, in, flag);
    return true;
  }

  // The same in steps, for who makes several looks at once: the word (to be read with acquire);
  // whether it is that slice's flag; and if it is, where the slice lies (nullptr: in the output).
  UNJAM_HD static std::uint64_t& flag_word(const Wire& in) { return header(in).flag; }
  UNJAM_HD static bool is_next(std::uint64_t flag, const Wire& in, std::uint64_t seed) {
    return (flag & ~kFlagPlaces) == step_flag(seed, in.count);
  }
  UNJAM_HD const unsigned char* slice_at(std::uint32_t peer, const Wire& in,
                                         std::uint64_t flag) const {
    if ((flag & kFlagPlaces) == 0) return guaranteed_slot(in);
    if ((flag & kFlagInOutput) != 0) return nullptr;
    return pool_slot(rank, peer, load_relaxed(header(in).location) - 1);
  }

  // Counts the slice that was read. What says that its slot may be written again: the block's reads
  // of the payload come before.
  UNJAM_HD PublishedWord take(Wire& in) const {
    advance(in);
    return {&in.cell->consumed, in.count};
  }
  UNJAM_HD PublishedWord consumption(std::uint32_t peer, const InEndpoint& in) const {
    return {&cell(peer, rank, in.connector).consumed, in.consumed};
  }

  // Says that this lane will never again read anything that `peer` sends under a key's tag, or
  // under any key of a group's. Release: the lane's reads and credits come before.
  UNJAM_HD void mark_void(std::uint32_t peer, std::uint64_t tag) {
    if (!has_met(peer)) return;  // (Nor has it sent anything, or the runtime waits with the mark.)
    store_release(void_mark(peer, rank, tag), tag);
  }

  // ---- packets with flags inside (GPUs): guaranteed slots only, both ends know the length ----

  UNJAM_HD SendGrant packet_grant(const Wire& out, std::uint64_t credit) const {
    SendGrant g;
    if (!own_slot_is_free(out.count - credit)) return g;
    g.data = guaranteed_slot(out);
    g.capacity = shape.guaranteed_slot_bytes;
    return g;
  }
  UNJAM_HD RecvView packet_view(const Wire& in, std::uint32_t bytes) const {
    return {guaranteed_slot(in), bytes};
  }

  // ---- for who has several steps of a connector under way at once (`steps`: see Wire) ----

  UNJAM_HD static SlotHeader& header_of(unsigned char* steps, std::uint64_t step) {
    return reinterpret_cast<SlotHeader*>(steps)[step % kSlotHeaders];
  }
  UNJAM_HD unsigned char* guaranteed_slot_of(unsigned char* steps, std::uint64_t step) const {
    return steps + kHeaderBytes + slot_of(step) * shape.guaranteed_slot_bytes;
  }
  UNJAM_HD unsigned char* pool_slot_to(std::uint32_t peer, std::uint32_t i) const {
    return pool_slot(peer, rank, i);
  }

  UNJAM_HD LaneCell& lane_cell(std::uint32_t of_rank, std::uint32_t of_lane) const {
    return *reinterpret_cast<LaneCell*>(bases[of_rank] + shape.lane_cell(of_lane));
  }

  // ---- rooms ----

  // Whether what the peer sends may be looked at. (Who has met the peer is spared the look,
  // which a GPU has into the host's memory. Relaxed, for the lane has seen it before.)
  UNJAM_HD bool has_met(std::uint32_t peer) const {
    if (rooms == nullptr) return true;
    if (peers != nullptr && load_relaxed(peers[peer].met) != 0) return true;
    // Acquire: pairs with the runtime's release. The memory is there.
    if (load_acquire(rooms[peer].usable) == 0) return false;
    if (peers != nullptr) store_relaxed(peers[peer].met, 1u);
    return true;
  }
  // Of this rank's block for the peer: all but the pool slots, of which nothing is read that
  // was not written. By thread `first` of `stride`.
  UNJAM_HD void clear_room(std::uint32_t peer, std::uint32_t from, std::uint32_t to,
                           std::uint32_t first, std::uint32_t stride) {
    unsigned char* const begin = block(rank, peer);
    if (from == 0) clear(begin, shape.heads_bytes(), first, stride);
    const std::uint64_t behind = from == 0 ? shape.stages_offset() : shape.room_bytes(from);
    clear(begin + behind, shape.room_bytes(to) - behind, first, stride);
  }

 private:
  // Steps that `peer` has consumed of our connector i. Acquire: its reads of the slots came before,
  // so that we may overwrite them.
  UNJAM_HD std::uint64_t credit(std::uint32_t peer, std::uint32_t i) const {
    return load_acquire(cell(rank, peer, i).consumed);
  }
  UNJAM_HD CreditCell& cell(std::uint32_t sender, std::uint32_t receiver, std::uint32_t i) const {
    return reinterpret_cast<CreditCell*>(head(sender, receiver))[i];
  }
  UNJAM_HD std::uint64_t& void_mark(std::uint32_t sender, std::uint32_t receiver,
                                    std::uint64_t tag) const {
    unsigned char* marks = head(sender, receiver) + shape.void_offset();
    return reinterpret_cast<std::uint64_t*>(marks)[(tag >> 8) % kVoidMarks];
  }
  // The block of a rank's arena that is for `peer`; of the two one is this rank.
  UNJAM_HD unsigned char* block(std::uint32_t owner, std::uint32_t peer) const {
    return bases[owner] + shape.block(owner, peer);
  }
  UNJAM_HD unsigned char* head(std::uint32_t owner, std::uint32_t peer) const {
    return block(owner, peer) + shape.head(lane);
  }
  UNJAM_HD std::uint32_t& longest_probe(std::uint32_t receiver, std::uint32_t sender) const {
    return reinterpret_cast<DirectoryHead*>(head(receiver, sender) + shape.directory_offset())
        ->longest_probe;
  }
  UNJAM_HD std::uint64_t* places(std::uint32_t receiver, std::uint32_t sender) const {
    return reinterpret_cast<std::uint64_t*>(head(receiver, sender) + shape.places_offset());
  }
  UNJAM_HD DirectoryEntry* entries(std::uint32_t receiver, std::uint32_t sender) const {
    return reinterpret_cast<DirectoryEntry*>(head(receiver, sender) + shape.entries_offset());
  }
  UNJAM_HD unsigned char* connector(std::uint32_t receiver, std::uint32_t sender,
                                    std::uint32_t i) const {
    return block(receiver, sender) + shape.connector(lane, i);
  }
  UNJAM_HD static SlotHeader& header(const Wire& w) { return header_of(w.steps, w.count); }
  static constexpr std::uint32_t kHeaderBytes = kSlotHeaders * sizeof(SlotHeader);
  // (So many bytes have a connector's slots that 32 bits count them.)
  UNJAM_HD unsigned char* guaranteed_slot(const Wire& w) const {
    return w.steps + kHeaderBytes + w.slot * shape.guaranteed_slot_bytes;
  }
  UNJAM_HD std::uint32_t slot_of(std::uint64_t step) const {
    // Steps hardly ever need 64 bits, whose division takes a GPU a hundred cycles.
    if (step >> 32 == 0) return static_cast<std::uint32_t>(step) % shape.guaranteed_slots;
    return static_cast<std::uint32_t>(step % shape.guaranteed_slots);
  }
  UNJAM_HD unsigned char* pool_slot(std::uint32_t receiver, std::uint32_t sender,
                                    std::uint32_t i) const {
    return block(receiver, sender) + shape.borrowed(lane) +
           static_cast<std::uint64_t>(i) * shape.pool_slot_bytes;
  }
  UNJAM_HD std::uint32_t first_probe(std::uint64_t tag) const {
    return static_cast<std::uint32_t>(tag >> 32) % shape.places();
  }
  UNJAM_HD std::uint32_t next_probe(std::uint32_t i) const {
    return i + 1 == shape.places() ? 0 : i + 1;
  }

  // ---- the directory ----

  UNJAM_HD void take_place(std::uint32_t peer, std::uint32_t i, std::uint64_t tag) {
    PeerSendState& state = peers[peer];
    std::uint32_t at = first_probe(tag), probes = 1;
    // There are more places than connectors, and each connector has one at most.
    for (; state.places[at] != 0; ++probes) at = next_probe(at);
    state.places[at] = static_cast<std::uint16_t>(i + 1);
    state.owners[i].place = at;
    if (probes > state.longest_probe) {
      state.longest_probe = probes;
      // Release, and before the place: see find().
      store_release(longest_probe(peer, rank), probes);
    }
    // Release: the entry's tag comes before.
    store_release(places(peer, rank)[at], (tag & ~kPlaceConnector) | (i + 1));
  }
  // Nobody minds who still reads the word: it leads to an entry, and that has the whole tag.
  UNJAM_HD void leave_place(std::uint32_t peer, std::uint32_t i) {
    PeerSendState& state = peers[peer];
    const std::uint32_t at = state.owners[i].place;
    state.places[at] = 0;
    store_relaxed(places(peer, rank)[at], std::uint64_t{0});
  }

  // Looks at as many places as the sender has ever probed. A reader that sees too small a number
  // looks at too few and finds nothing, as if it had come before the key was announced: every post
  // rings the reader's doorbell (a read-modify-write that releases) after the number was stored,
  // and the lane reads the doorbell (acquire) before the pass that it would sleep after.
  UNJAM_HD_NOINLINE bool find(std::uint32_t peer, std::uint64_t tag, InEndpoint& in) const {
    in.connector = kNoConnector;
    if (!has_met(peer)) return false;
    const std::uint32_t probes = load_acquire(longest_probe(rank, peer));
    std::uint64_t* words = places(rank, peer);
    std::uint32_t at = first_probe(tag);
    for (std::uint32_t k = 0; k < probes; ++k, at = next_probe(at)) {
      const std::uint64_t word = load_acquire(words[at]);
      if (((word ^ tag) & ~kPlaceConnector) != 0 || (word & kPlaceConnector) == 0) continue;
      const auto i = static_cast<std::uint32_t>(word & kPlaceConnector) - 1;
      if (i >= shape.connectors) continue;
      DirectoryEntry& entry = entries(rank, peer)[i];
      if (load_acquire(entry.tag) != tag) continue;
      // All that this rank has consumed of the connector lies before the key's next slice: for its
      // former owners by the base, for this key by our own credits, which nobody else stores while
      // the key is not void here. (This rank may have forgotten the key meanwhile, and with it its
      // count, while the sender kept the connector.)
      const std::uint64_t base = load_relaxed(entry.base);
      const std::uint64_t mine = load_relaxed(cell(peer, rank, i).consumed);
      in.connector = i;
      in.consumed = base > mine ? base : mine;
      in.steps = connector(rank, peer, i);
      in.cell = &cell(peer, rank, i);
      return true;
    }
    return false;
  }

  // A few looks only: a pool slot is a convenience.
  UNJAM_HD SendGrant borrow(std::uint32_t peer) const {
    constexpr std::uint32_t kLooks = 4;
    SendGrant g;
    PeerSendState& state = peers[peer];
    std::uint32_t i = state.pool_next;
    for (std::uint32_t k = 0; k < kLooks && k < shape.pool_slots; ++k) {
      const PoolUse& use = state.borrows[i];
      if (use.step_end == 0 ||
          (use.connector != PoolUse::kCopied && credit(peer, use.connector) >= use.step_end)) {
        g.data = pool_slot(peer, rank, i);
        g.capacity = shape.pool_slot_bytes;
        g.location = i + 1;
        break;
      }
      i = i + 1 == shape.pool_slots ? 0 : i + 1;
    }
    return g;
  }

  // ---- how much of rooms is there ----

  UNJAM_HD static void clear(unsigned char* begin, std::uint64_t bytes, std::uint32_t first,
                             std::uint32_t stride) {
    struct alignas(kVectorBytes) Vector {
      std::uint64_t words[2];
    };
    static_assert(sizeof(Vector) == kVectorBytes);
    Vector* const vectors = reinterpret_cast<Vector*>(begin);
    for (std::uint64_t i = first; i < bytes / kVectorBytes; i += stride) vectors[i] = {};
  }
  // Connectors to the peer that memory stands behind.
  UNJAM_HD std::uint32_t usable(std::uint32_t peer) {
    PeerSendState& state = peers[peer];
    if (state.usable < shape.connectors && state.touched >= state.usable) {
      state.usable = rooms == nullptr ? shape.connectors : load_acquire(rooms[peer].usable);
    }
    return state.usable;
  }
  // (Who has not met the peer is about to.)
  UNJAM_HD void want_more(std::uint32_t peer) const {
    const std::uint32_t now = peers[peer].usable;
    if (now == 0 || now == shape.connectors) return;
    const std::uint32_t more = shape.next_connectors(now);
    std::uint32_t& wanted = rooms[peer].wanted;
    // It never shrinks: else what one lane wants would be lost by what another has wanted before.
#ifdef __CUDA_ARCH__
    // The host's memory may know no atomics of a GPU's. Its lanes stop, if at all, together.
    if (load_relaxed(wanted) < more) store_relaxed(wanted, more);
#else
    for (std::uint32_t seen = load_relaxed(wanted); seen < more; seen = load_relaxed(wanted)) {
      if (compare_exchange(wanted, seen, more)) break;
    }
#endif
  }

  // ---- which connector a key gets ----

  // A connector that no key in use has, and whose slices were all consumed; if it has an owner,
  // that is an idle key.
  UNJAM_HD std::uint32_t pick(std::uint32_t peer) {
    constexpr std::uint32_t kLooks = 64;
    PeerSendState& state = peers[peer];
    if (state.given_back != kNoConnector) {
      const std::uint32_t i = state.given_back;
      state.given_back = state.owners[i].next;
      return i;
    }
    const std::uint32_t there = usable(peer);
    if (state.touched < state.pool) {
      if (state.touched < there) return touch(state);
      want_more(peer);
    }
    std::uint32_t used_lately = kNoConnector;  // an idle key's all the same
    for (std::uint32_t k = 0; k < kLooks && k < state.touched; ++k) {
      const std::uint32_t i = pass(state);
      ConnectorOwner& owner = state.owners[i];
      if (owner.endpoint == nullptr) {
        if (reclaim(peer, i)) return i;
        continue;
      }
      const bool lately = owner.seen != owner.endpoint->posted;
      owner.seen = owner.endpoint->posted;
      if (lately && used_lately != kNoConnector) continue;
      if (*owner.in_use != 0 || !settle(peer, i)) continue;
      if (!lately) return i;
      used_lately = i;
    }
    if (used_lately != kNoConnector) return used_lately;
    // Hardly a key is idle: the pool is what those are to share.
    if (state.touched < there) return touch(state);
    want_more(peer);
    for (std::uint32_t k = 0; k < state.touched; ++k) {
      const std::uint32_t i = pass(state);
      const ConnectorOwner& owner = state.owners[i];
      if (owner.endpoint == nullptr) {
        if (reclaim(peer, i)) return i;
      } else if (*owner.in_use == 0 && settle(peer, i)) {
        return i;
      }
    }
    return kNoConnector;
  }
  // Of a connector without an owner, none of which was given back: whether its slices are done
  // with.
  UNJAM_HD bool reclaim(std::uint32_t peer, std::uint32_t i) {
    PeerSendState& state = peers[peer];
    if (!settle(peer, i, state.owners[i].seen, false)) return false;
    unlist(peer, i);
    store_relaxed(state.abandoned, state.abandoned - 1);
    return true;
  }
  // The tag goes: a reader that has it cached looks for the key anew, and will find it where it
  // opens next. Relaxed: a reader that still sees the tag polls for steps that do not come.
  UNJAM_HD void unlist(std::uint32_t peer, std::uint32_t i) {
    leave_place(peer, i);
    store_relaxed(entries(peer, rank)[i].tag, kTagUnused);
  }
  UNJAM_HD std::uint32_t touch(PeerSendState& state) {
    bump(state.touched);
    return state.touched - 1;
  }
  UNJAM_HD std::uint32_t pass(PeerSendState& state) {
    const std::uint32_t i = state.hand;
    state.hand = i + 1 == state.touched ? 0 : i + 1;
    return i;
  }

  // Grows the pool where it is too small for what the keys do: most of the keys that open had a
  // connector that a pool of all connectors would have kept for them. Keys that are new, or come
  // back after longer than that, would gain nothing.
  UNJAM_HD void learn(PeerSendState& state, const OutEndpoint& out) {
    constexpr std::uint32_t kConvinced = 16;
    const bool missed =
        out.lost_at != 0 && state.touched + (state.opens - out.lost_at) <= shape.connectors;
    if (!missed) {
      if (state.returns != 0) --state.returns;
    } else if (++state.returns == kConvinced) {
      state.returns = 0;
      const std::uint32_t twice = 2 * state.pool;
      store_relaxed(state.pool, twice < shape.connectors ? twice : shape.connectors);
    }
  }

  // Whether the connector of a key that is not in use here can serve another key.
  UNJAM_HD bool settle(std::uint32_t peer, std::uint32_t i, bool known_void = false) {
    return settle(peer, i, peers[peer].owners[i].endpoint->posted, known_void);
  }
  UNJAM_HD bool settle(std::uint32_t peer, std::uint32_t i, std::uint64_t posted, bool known_void) {
    const ConnectorOwner& owner = peers[peer].owners[i];
    if (credit(peer, i) >= posted) return true;
    if (!known_void && !voided(peer, owner.tag) && !voided(peer, owner.group)) return false;
    // The peer's credits for this owner are over (its last came before the mark, which we have
    // acquired), and those for the next come after that one is announced (a release, later in this
    // lane): between the two the cell is ours. So counts go on as if all had been consumed, also
    // those of the pool slots.
    store_relaxed(cell(rank, peer, i).consumed, posted);
    return true;
  }
};

}  // namespace unjam
