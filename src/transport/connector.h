// Connectors: in-order, lock-free, one-way streams of slices between two ranks, one per
// (group, key, peer, lane). Called by one thread a lane (the block's leader).
//
// Who publishes what. A step is one slice. The sender publishes it through its slot header's flag,
// the receiver publishes that it has consumed it through the credit cell. Both keep their own count
// (posted, consumed) in the endpoint and derive the other's on each look: an attempt that finds
// nothing has changed nothing, so it can be repeated at will (design.md Sec. 5, "redo safety").
//
// Room. Of the steps under way, step s may use escape slot s % escape_slots if fewer than
// escape_slots steps are outstanding (then the slot's last user was consumed, steps being consumed
// in order), or any borrowed slot that is free. A borrowed slot is free once the step that used it
// was consumed: a look at that connector's credit cell tells, so nothing is ever given back
// explicitly, and nobody ever waits for one.
//
// Self-deadlock. Slices are cut at multiples of the escape slot's size from the chunk's start, so a
// chunk has at most escape_slots - 1 outstanding slices. In a ring each rank injects at most one
// chunk before it consumes one, so the outstanding slices of all N connectors sum to at most
// N * (escape_slots - 1): some connector always has a free escape slot (a bubble), and the ring
// moves. The plan checker proves the same for every plan by execution.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/hash.h"
#include "base/portability.h"
#include "transport/arena.h"

namespace unjam {

inline constexpr std::uint32_t kNoConnector = 0xffffffff;
inline constexpr std::uint64_t kTagUnused = 0;

struct OutEndpoint {
  std::uint64_t posted = 0;  // steps of the connector, over all its owners
  std::uint32_t connector = kNoConnector;
  std::uint32_t pad = 0;
};

struct InEndpoint {
  std::uint64_t consumed = 0;
  std::uint32_t connector = kNoConnector;
  std::uint32_t pad = 0;
};

// Two invocations, or two steps of one, never share a flag (but with probability 2^-64), and
// untouched memory (0) never matches.
UNJAM_HD inline std::uint64_t step_flag(std::uint64_t seed, std::uint64_t step) {
  return mix64(seed + step * 0xd1342543de82ef95ull) | 1;
}

// The 32-bit flag beside every data word of a packet: of the chunk, not the step, so that all
// sources of a gather carry the same one (a packet plan sends one packet a peer and chunk).
UNJAM_HD inline std::uint32_t packet_flag(std::uint64_t seed, std::uint64_t chunk) {
  return static_cast<std::uint32_t>(step_flag(seed, chunk) >> 32) | 1;
}

// What a sender may write into next.
struct SendGrant {
  unsigned char* data = nullptr;
  std::uint32_t capacity = 0;  // bytes; 0: no room now
  std::uint32_t location = 0;
};

// The slice that is next to be read.
struct RecvView {
  const unsigned char* data = nullptr;
  std::uint32_t bytes = 0;
};

// Sender-local bookkeeping for one (peer, lane): who owns which connector, who used which borrowed
// slot last.
struct ConnectorOwner {
  OutEndpoint* endpoint = nullptr;
  std::uint32_t* in_use = nullptr;  // invocations of the owning key in this lane's queue
};
struct BorrowUse {
  std::uint64_t step_end = 0;  // free once the connector's credit has reached this
  std::uint32_t connector = 0;
  std::uint32_t pad = 0;
};
struct PeerSendState {
  ConnectorOwner* owners = nullptr;  // [connectors]
  BorrowUse* borrows = nullptr;      // [borrow_slots]
  std::uint32_t borrow_next = 0;
  std::uint32_t opened = 0;     // connectors held now
  std::uint32_t reclaimed = 0;  // times that an idle key's connector was taken over
};

// One lane's view of all arenas. `bases` maps world ranks to where their arenas are mapped here.
class LaneTransport {
 public:
  ArenaShape shape;
  unsigned char* const* bases = nullptr;
  PeerSendState* peers = nullptr;  // [ranks]
  std::uint32_t rank = 0;          // world rank
  std::uint32_t lane = 0;

  // ---- sender ----

  // Gives `out` a connector to `peer` and announces it under `tag`. False if every connector
  // belongs to a key in use (or holds slices that the peer has yet to consume).
  UNJAM_HD bool open(std::uint32_t peer, std::uint64_t tag, OutEndpoint& out,
                     std::uint32_t* in_use) {
    PeerSendState& state = peers[peer];
    const std::uint32_t i = find_free(peer, tag);
    if (i == kNoConnector) return false;
    if (state.owners[i].endpoint != nullptr) {  // an idle key's: it will open another when needed
      store_relaxed(state.owners[i].endpoint->connector, kNoConnector);
      bump(state.reclaimed);
    } else {
      bump(state.opened);
    }
    out.posted = credit(peer, i);
    store_relaxed(out.connector, i);
    state.owners[i] = {&out, in_use};
    DirectoryEntry& entry = directory(peer, rank)[i];
    // A reader that still sees the former tag may take this base for the former owner's: it only
    // raises that reader's count, which is set anew when it finds its key elsewhere or here again.
    store_relaxed(entry.base, out.posted);
    // Release: a reader that sees the tag sees the base.
    store_release(entry.tag, tag);
    return true;
  }

  // Whether the peer has consumed all that was posted. Also from outside the lane, while the owning
  // key has no invocation in it: then only a take-over by another key writes the endpoint, which
  // happens to drained ones alone, and credits only grow.
  UNJAM_HD bool drained(std::uint32_t peer, OutEndpoint& out) const {
    const std::uint32_t i = load_relaxed(out.connector);
    return i == kNoConnector || credit(peer, i) >= out.posted;
  }

  // Room for up to `want` bytes of step out.posted.
  UNJAM_HD SendGrant grant(std::uint32_t peer, const OutEndpoint& out, std::uint32_t want) {
    const std::uint64_t outstanding = out.posted - credit(peer, out.connector);
    SendGrant g;
    if (outstanding >= kSlotHeaders) return g;
    const bool escape_free = outstanding < shape.escape_slots;
    if (want > shape.escape_slot_bytes || !escape_free) {
      g = borrow(peer);
      if (g.capacity != 0) return g;
    }
    if (escape_free) {
      g.data = escape_slot(peer, rank, out.connector, out.posted);
      g.capacity = shape.escape_slot_bytes;
      g.location = 0;
    }
    return g;
  }

  // Publishes the slice that was written into the grant.
  UNJAM_HD void post(std::uint32_t peer, OutEndpoint& out, const SendGrant& g, std::uint32_t bytes,
                     std::uint64_t seed) {
    SlotHeader& h = header(peer, rank, out.connector, out.posted);
    if (g.location != 0) {
      PeerSendState& state = peers[peer];
      state.borrows[g.location - 1] = {out.posted + 1, out.connector, 0};
      state.borrow_next = g.location == shape.borrow_slots ? 0 : g.location;
    }
    store_relaxed(h.bytes, bytes);
    store_relaxed(h.location, g.location);
    // Release: orders the payload (written by the whole block, which has synchronised since) and
    // the header's fields before the flag. Pairs with the acquire in poll().
    store_release(h.flag, step_flag(seed, out.posted));
    ++out.posted;
  }

  // ---- receiver ----

  // Finds the connector that `peer` announced under `tag`; false if there is none yet. Called at
  // each attempt: the sender may have given the connector back since, and opened another.
  UNJAM_HD bool resolve(std::uint32_t peer, std::uint64_t tag, InEndpoint& in) const {
    DirectoryEntry* entries = directory(rank, peer);
    std::uint32_t i = in.connector;
    // Acquire: pairs with the release in open(), so that base is this owner's or a later one's.
    if (i == kNoConnector || load_acquire(entries[i].tag) != tag) {
      in.connector = kNoConnector;
      i = first_probe(tag);
      for (std::uint32_t k = 0; k < shape.connectors; ++k) {
        const std::uint64_t t = load_acquire(entries[i].tag);
        if (t == tag) break;
        if (t == kTagUnused) return false;
        i = next_probe(i);
      }
      if (load_acquire(entries[i].tag) != tag) return false;
    }
    const std::uint64_t base = load_relaxed(entries[i].base);
    // Same connector: steps only grow over its owners, and all that was consumed lies before a new
    // base. Another connector: begin where its owner began.
    if (i == in.connector) {
      if (base > in.consumed) in.consumed = base;
    } else {
      in.connector = i;
      in.consumed = base;
    }
    return true;
  }

  // True if the next slice of the invocation with this seed has arrived.
  UNJAM_HD bool poll(std::uint32_t peer, const InEndpoint& in, std::uint64_t seed,
                     RecvView& view) const {
    SlotHeader& h = header(rank, peer, in.connector, in.consumed);
    // Acquire: the payload and the other fields are read after the flag.
    if (load_acquire(h.flag) != step_flag(seed, in.consumed)) return false;
    const std::uint32_t location = load_relaxed(h.location);
    view.bytes = load_relaxed(h.bytes);
    view.data = location == 0 ? escape_slot(rank, peer, in.connector, in.consumed)
                              : borrow_slot(rank, peer, location - 1);
    return true;
  }

  // The slot may be written again. Release: the block's reads of the payload come before.
  UNJAM_HD void consume(std::uint32_t peer, InEndpoint& in) {
    ++in.consumed;
    CreditCell* cells = reinterpret_cast<CreditCell*>(bases[peer] + shape.credits(rank, lane));
    store_release(cells[in.connector].consumed, in.consumed);
  }

  // ---- packets with flags inside (GPUs): escape slots only, both ends know the length ----

  UNJAM_HD SendGrant packet_grant(std::uint32_t peer, const OutEndpoint& out) const {
    SendGrant g;
    if (out.posted - credit(peer, out.connector) >= shape.escape_slots) return g;
    g.data = escape_slot(peer, rank, out.connector, out.posted);
    g.capacity = shape.escape_slot_bytes;
    return g;
  }
  UNJAM_HD RecvView packet_view(std::uint32_t peer, const InEndpoint& in,
                                std::uint32_t bytes) const {
    return {escape_slot(rank, peer, in.connector, in.consumed), bytes};
  }

  UNJAM_HD LaneCell& lane_cell(std::uint32_t of_rank, std::uint32_t of_lane) const {
    return *reinterpret_cast<LaneCell*>(bases[of_rank] + shape.lane_cell(of_lane));
  }

 private:
  // Steps that `peer` has consumed of our connector i. Acquire: its reads of the slots came before,
  // so that we may overwrite them.
  UNJAM_HD std::uint64_t credit(std::uint32_t peer, std::uint32_t i) const {
    CreditCell* cells = reinterpret_cast<CreditCell*>(bases[rank] + shape.credits(peer, lane));
    return load_acquire(cells[i].consumed);
  }
  UNJAM_HD unsigned char* partition(std::uint32_t receiver, std::uint32_t sender) const {
    return bases[receiver] + shape.partition(sender, lane);
  }
  UNJAM_HD DirectoryEntry* directory(std::uint32_t receiver, std::uint32_t sender) const {
    return reinterpret_cast<DirectoryEntry*>(partition(receiver, sender));
  }
  UNJAM_HD unsigned char* connector(std::uint32_t receiver, std::uint32_t sender,
                                    std::uint32_t i) const {
    return partition(receiver, sender) + shape.directory_bytes() + i * shape.connector_bytes();
  }
  UNJAM_HD SlotHeader& header(std::uint32_t receiver, std::uint32_t sender, std::uint32_t i,
                              std::uint64_t step) const {
    return reinterpret_cast<SlotHeader*>(connector(receiver, sender, i))[step % kSlotHeaders];
  }
  UNJAM_HD unsigned char* escape_slot(std::uint32_t receiver, std::uint32_t sender, std::uint32_t i,
                                      std::uint64_t step) const {
    return connector(receiver, sender, i) + kSlotHeaders * sizeof(SlotHeader) +
           (step % shape.escape_slots) * shape.escape_slot_bytes;
  }
  UNJAM_HD unsigned char* borrow_slot(std::uint32_t receiver, std::uint32_t sender,
                                      std::uint32_t i) const {
    return partition(receiver, sender) + shape.directory_bytes() +
           shape.connectors * shape.connector_bytes() +
           static_cast<std::uint64_t>(i) * shape.borrow_slot_bytes;
  }
  UNJAM_HD std::uint32_t first_probe(std::uint64_t tag) const {
    return static_cast<std::uint32_t>(tag >> 32) % shape.connectors;
  }
  UNJAM_HD std::uint32_t next_probe(std::uint32_t i) const {
    return i + 1 == shape.connectors ? 0 : i + 1;
  }

  // A few looks only: a borrowed slot is a convenience.
  UNJAM_HD SendGrant borrow(std::uint32_t peer) const {
    constexpr std::uint32_t kLooks = 4;
    SendGrant g;
    PeerSendState& state = peers[peer];
    std::uint32_t i = state.borrow_next;
    for (std::uint32_t k = 0; k < kLooks && k < shape.borrow_slots; ++k) {
      const BorrowUse& use = state.borrows[i];
      if (use.step_end == 0 || credit(peer, use.connector) >= use.step_end) {
        g.data = borrow_slot(peer, rank, i);
        g.capacity = shape.borrow_slot_bytes;
        g.location = i + 1;
        break;
      }
      i = i + 1 == shape.borrow_slots ? 0 : i + 1;
    }
    return g;
  }

  // The first connector in probe order that is unused, or else owned by an idle key all of whose
  // slices were consumed.
  UNJAM_HD std::uint32_t find_free(std::uint32_t peer, std::uint64_t tag) const {
    const ConnectorOwner* owners = peers[peer].owners;
    std::uint32_t i = first_probe(tag), idle = kNoConnector;
    for (std::uint32_t k = 0; k < shape.connectors; ++k, i = next_probe(i)) {
      if (owners[i].endpoint == nullptr) return i;
      if (idle == kNoConnector && *owners[i].in_use == 0 &&
          credit(peer, i) == owners[i].endpoint->posted) {
        idle = i;
      }
    }
    return idle;
  }
};

}  // namespace unjam
