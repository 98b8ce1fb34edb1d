// Where everything of a rank lies in its GPU's memory, what is there at first, and how invocations
// name it: for CudaDaemon, which allocates the memory, and for the kernels' tests on the CPU. Makes
// no CUDA calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/cuda/dev/rank_state.h"
#include "device/cuda/kernels/kernels.h"
#include "engine/cuda_driver.h"
#include "engine/invocation.h"
#include "transport/arena.h"

namespace unjam {

// Hands out places of one allocation; first without it, to learn its size.
class Layout {
 public:
  explicit Layout(unsigned char* base) : base_(base) {}
  template <class T>
  T* take(std::size_t n) {
    used_ = (used_ + 127) / 128 * 128;
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += n * sizeof(T);
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  unsigned char* base_;
  std::size_t used_ = 0;
};

class RankMemory {
 public:
  // `options` outlives this.
  explicit RankMemory(const CudaRankOptions& options)
      : o_(options),
        held_keys_(options.keys),
        mailboxes_now_(options.shape.lanes),
        lanes_now_(options.shape.lanes),
        peers_now_(options.shape.lanes, std::vector<PeerSendState>(options.shape.ranks)),
        peers_(options.shape.lanes),
        traces_(options.shape.lanes) {}

  // Of memory, aligned to 128 bytes, that place() takes.
  std::size_t bytes() {
    lay_out(nullptr);
    return used_;
  }

  // Says where all is. `pinned`: what the rank has in memory of the host.
  struct Pinned {
    CudaLink* link = nullptr;
    const CudaSubmission* sq = nullptr;  // [slots]
    std::uint64_t* cq_words = nullptr;   // [slots]
    std::uint32_t* cancelled = nullptr;  // [slots]
    CopyRing* copies = nullptr;          // [ranks], or nullptr
  };
  void place(void* zeroed, const Pinned& pinned) {
    lay_out(static_cast<unsigned char*>(zeroed));
    pinned_ = pinned;
    rank_now_.link = pinned.link;
    rank_now_.sq = pinned.sq;
    rank_now_.rank.cq.words = pinned.cq_words;
    rank_now_.rank.cq.capacity = o_.slots;
    rank_now_.rank.cancelled = pinned.cancelled;
    rank_now_.whole_lines = o_.whole_lines ? 1 : 0;
    rank_now_.copies.rings = pinned.copies;
    for (std::uint32_t p = 0; p < o_.shape.ranks; ++p) {
      rank_now_.pokes[p] = static_cast<CudaLink*>(o_.links[p])->pokes[o_.rank];
    }
  }
  // Stores what is there at first, but for keys, which keys_kernel() sets up. upload(to, from,
  // bytes): false: it could not; nor can this.
  template <class Upload>
  bool fill(Upload upload) const {
    for (std::uint32_t l = 0; l < o_.shape.lanes; ++l) {
      const std::vector<PeerSendState>& peers = peers_now_[l];
      if (!upload(peers_[l], peers.data(), peers.size() * sizeof(PeerSendState))) return false;
    }
    return upload(lanes_, lanes_now_.data(), lanes_now_.size() * sizeof(LaneState)) &&
           upload(mailboxes_, mailboxes_now_.data(), mailboxes_now_.size() * sizeof(Mailbox)) &&
           upload(bases_, o_.bases.data(), o_.bases.size() * sizeof(unsigned char*)) &&
           upload(rank_, &rank_now_, sizeof(rank_now_));
  }

  CudaRank* rank() const { return rank_; }
  const LaneState* lanes() const { return lanes_; }
  // Of the rank's copies: where the GPU looks for how many are done.
  std::uint64_t* copies_done() const { return rank_now_.copies.done; }
  const TraceEvent* trace(std::uint32_t lane) const { return traces_[lane]; }
  const CudaKeys& keys() const { return keys_; }
  std::size_t place_of(const KeyState* key) const {
    return static_cast<std::size_t>(key - keys_.states);
  }

  // What goes along with an invocation. `fresh`: its key's first state, if it has not begun.
  void put(const Invocation& inv, const KeyState* fresh, CudaSqe& place) {
    HeldKey& key = held_keys_[place_of(inv.key)];
    if (fresh != nullptr) {
      // Turns of its own, see Invocation::turn.
      constexpr int kUseBits = 36;
      key = {fresh->tag, ++keys_begun_ << kUseBits};
    }
    place.inv = inv;
    place.inv.use = key.first_use + inv.n;
    std::copy_n(inv.program, inv.num_primitives, place.program);
    std::copy_n(inv.members, inv.group_size, place.members);
    std::copy_n(inv.neighbours, inv.num_neighbours, place.neighbours);
    std::copy_n(inv.sets, inv.num_sets, place.sets);
    place.fresh = fresh != nullptr ? 1 : 0;
    if (fresh == nullptr) return;
    place.key_tag = fresh->tag;
    place.key_group = fresh->group;
    place.key_done = key.first_use + fresh->done;
  }

  // Fills in where everything is, of a call that was bound and whose key has begun.
  void address(const Invocation& inv, StreamCall& call) const {
    call.lines = inv.protocol == Protocol::kLine;
    call.lanes = inv.geometry.lanes;
    call.first_lane = inv.geometry.first_lane;
    // Chunk 0 is a lane's only one.
    call.flag = packet_flag(inv.seed, 0, 0);
    call.later_flag = packet_flag(inv.seed, 0, 1);
    call.rank = o_.rank;
    for (std::uint32_t p = 0; p < call.places; ++p) call.members[p] = inv.members[call.ranks[p]];
    call.scale = 1.0 / inv.group_size;
    call.shape = o_.shape;
    if (o_.bases.size() <= kStreamCallRanks) {
      std::copy(o_.bases.begin(), o_.bases.end(), call.bases);
    } else {
      call.all_bases = bases_;
    }
    call.windows = o_.windows;
    call.rooms = o_.rooms;
    call.noted_windows = noted_windows_;
    call.attention = &pinned_.link->attention;
    call.reports = reports_ + inv.slot;
    call.stored = stored_ + inv.slot;
    call.mailboxes = mailboxes_;
    const std::size_t key = place_of(inv.key);
    call.tag = held_keys_[key].tag;
    call.out = keys_.out + key * o_.shape.lanes * o_.shape.ranks;
    call.in = keys_.in + key * o_.shape.lanes * o_.shape.ranks;
  }

 private:
  struct HeldKey {
    std::uint64_t tag = 0, first_use = 0;
  };

  void lay_out(unsigned char* base) {
    Layout at(base);
    const ArenaShape& shape = o_.shape;
    rank_ = at.take<CudaRank>(1);
    lanes_ = at.take<LaneState>(shape.lanes);
    mailboxes_ = at.take<Mailbox>(shape.lanes);
    bases_ = at.take<unsigned char*>(shape.ranks);
    noted_windows_ = at.take<WindowEntry>(std::size_t{shape.ranks} * kWindows);
    CudaRank& rank = rank_now_;
    RankState& r = rank.rank;
    r.policy = o_.policy;
    r.num_lanes = shape.lanes;
    r.num_slots = o_.slots;
    r.lanes = lanes_;
    r.mailboxes = mailboxes_;
    r.invocations = at.take<Invocation>(o_.slots);
    r.remaining = at.take<std::uint32_t>(o_.slots);
    rank.inbox = at.take<std::uint64_t>(o_.slots);
    rank.marks = at.take<std::uint64_t>(o_.slots);
    rank.completed = at.take<std::uint64_t>(o_.slots);
    rank.calls = at.take<StreamCall>(o_.slots);
    rank.handed = at.take<HandOver>(std::size_t{o_.slots} * shape.lanes);
    rank.paces = at.take<std::uint64_t>(std::size_t{o_.slots} * shape.lanes);
    rank.copies.done = at.take<std::uint64_t>(shape.ranks);
    rank.copies.drawn = at.take<std::uint64_t>(shape.ranks);
    rank.copies.posted = at.take<std::uint64_t>(std::size_t{shape.lanes} * shape.ranks);
    reports_ = at.take<std::uint64_t>(o_.slots);
    stored_ = at.take<std::uint64_t>(o_.slots);
    rank.programs = at.take<Primitive>(std::size_t{o_.slots} * kMaxProgram);
    rank.tables = at.take<CudaTables>(o_.slots);
    for (std::uint32_t l = 0; l < shape.lanes; ++l) lay_out_lane(at, l);
    keys_.count = o_.keys;
    keys_.lanes = shape.lanes;
    keys_.ranks = shape.ranks;
    const std::size_t lane_keys = std::size_t{o_.keys} * shape.lanes;
    keys_.states = at.take<KeyState>(o_.keys);
    keys_.lane_keys = at.take<LaneKey>(lane_keys);
    keys_.out = at.take<OutEndpoint>(lane_keys * shape.ranks);
    keys_.in = at.take<InEndpoint>(lane_keys * shape.ranks);
    used_ = at.used();
  }
  void lay_out_lane(Layout& at, std::uint32_t l) {
    const ArenaShape& shape = o_.shape;
    LaneState& lane = lanes_now_[l];
    lane.queue.attach(at.take<QueueLink>(o_.slots));
    lane.contexts = at.take<DynamicContext>(o_.slots);
    mailboxes_now_[l].places = at.take<std::uint16_t>(o_.slots);
    mailboxes_now_[l].capacity = o_.slots;
    lane.trace.places = TraceRing::places_for(o_.trace_events);
    lane.trace.events = traces_[l] = at.take<TraceEvent>(lane.trace.places);
    LaneTransport& t = lane.transport;
    t.shape = shape;
    t.bases = bases_;
    t.windows = o_.windows;
    t.rooms = o_.rooms;
    t.noted_windows = noted_windows_;
    t.rank = o_.rank;
    t.lane = l;
    t.peers = peers_[l] = at.take<PeerSendState>(shape.ranks);
    for (std::uint32_t p = 0; p < shape.ranks; ++p) {
      if (p == o_.rank) continue;
      PeerSendState& peer = peers_now_[l][p];
      peer.owners = at.take<ConnectorOwner>(shape.connectors);
      peer.borrows = at.take<PoolUse>(shape.pool_slots);
      peer.places = at.take<std::uint16_t>(shape.places());
      peer.given_back = kNoConnector;
      peer.pool = std::min(shape.connectors, kFirstPool);
    }
  }

  const CudaRankOptions& o_;
  Pinned pinned_;
  std::size_t used_ = 0;
  std::vector<HeldKey> held_keys_;  // by place
  std::uint64_t keys_begun_ = 0;
  // In the GPU's memory.
  CudaRank* rank_ = nullptr;
  LaneState* lanes_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  std::uint64_t *reports_ = nullptr, *stored_ = nullptr;  // [slots], see StreamCall
  unsigned char** bases_ = nullptr;
  WindowEntry* noted_windows_ = nullptr;
  CudaKeys keys_;
  // And what is there at first.
  CudaRank rank_now_;
  std::vector<Mailbox> mailboxes_now_;
  std::vector<LaneState> lanes_now_;
  std::vector<std::vector<PeerSendState>> peers_now_;
  std::vector<PeerSendState*> peers_;
  std::vector<TraceEvent*> traces_;
};

}  // namespace unjam
