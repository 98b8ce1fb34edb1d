// Some ranks with a lane each, in processes of which each has a courier, over a loop fabric:
// arenas, mirrors and LaneTransports that a test drives by hand. All in one piece of memory, so
// that the schedule explorer can copy it. (No rank shares a process with another one here.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "tests/support/slices_by_hand.h"
#include "transport/connector.h"
#include "transport/network/courier.h"
#include "transport/network/loop_fabric.h"

namespace unjam {

struct WorldOptions {
  std::uint32_t ranks = 2;
  ArenaShape shape;  // but for the ranks, and not derived
  LoopOptions loop;
  std::uint64_t window = 512 << 10;
  bool announces = true;  // otherwise arenas and mirrors have no memory in front of their blocks
};

// A shape of small arenas.
inline ArenaShape small_network_shape() {
  ArenaShape s;
  s.connectors = 2;
  s.first_connectors_log2 = 1;
  s.guaranteed_slots = 2;
  s.guaranteed_slot_bytes = 64;
  s.pool_slots = 0;
  return s;
}

class NetworkWorld {
 public:
  static constexpr std::uint32_t kMostRanks = 4;

  using Home = HomeThatCounts;

  static std::size_t memory_bytes(const WorldOptions& o) {
    Carver count(nullptr);
    build(o, count, nullptr);
    return count.bytes();
  }
  // `memory`: zeroed.
  NetworkWorld(const WorldOptions& o, unsigned char* memory) {
    Carver carver(memory);
    build(o, carver, this);
  }

  LaneTransport& transport(std::uint32_t r) { return transports_[r]; }
  Courier& courier(std::uint32_t r) { return *couriers_[r]; }
  LoopNet& net() { return *net_; }
  LoopFabric& fabric(std::uint32_t r) { return *fabrics_[r]; }
  Home& home(std::uint32_t r) { return homes_[r]; }
  const ArenaShape& shape() const { return shape_; }
  std::uint32_t ranks() const { return shape_.ranks; }
  // Of rank r's arena, what its peer is to write.
  unsigned char* block(std::uint32_t r, std::uint32_t peer) {
    return views_[r][r] + shape_.block(r, peer);
  }
  unsigned char* view(std::uint32_t r, std::uint32_t of) { return views_[r][of]; }

  // ---- as an engine does it ----

  // False: no connector, or no room.
  bool send(std::uint32_t from, std::uint32_t to, std::uint64_t tag, OutEndpoint& out,
            const std::uint32_t& in_use, std::uint64_t seed, std::uint32_t bytes,
            std::uint64_t group = 3) {
    return send_slice(transports_[from], *couriers_[from], to, tag, out, in_use, seed, bytes,
                      group);
  }
  // 0: nothing has come; 1: a slice; -1: a wrong one.
  int receive(std::uint32_t at, std::uint32_t from, std::uint64_t tag, InEndpoint& in,
              std::uint64_t seed, std::uint32_t bytes) {
    return receive_slice(transports_[at], *couriers_[at], from, tag, in, seed, bytes);
  }

 private:
  static void build(const WorldOptions& o, Carver& c, NetworkWorld* w) {
    ArenaShape shape = o.shape;
    shape.ranks = o.ranks;
    shape.lanes = 1;
    shape.derive();
    LoopOptions loop = o.loop;
    loop.processes = o.ranks;
    if (w != nullptr) w->shape_ = shape;
    const auto bytes = [&](std::uint64_t n) { return c.take<unsigned char>(n); };
    for (std::uint32_t r = 0; r < o.ranks; ++r) {
      const std::uint64_t missing = o.announces ? 0 : shape.base_bytes();
      for (std::uint32_t q = 0; q < o.ranks; ++q) {
        unsigned char* const arena = bytes(shape.total_bytes() - missing);
        if (w != nullptr) w->views_[r][q] = arena - missing;
      }
      if (w != nullptr) w->bases_[r] = w->views_[r], w->process_of_[r] = static_cast<uint16_t>(r);
      for (std::uint32_t q = 0; q < o.ranks; ++q) {
        auto* const owners = c.take<ConnectorOwner>(shape.connectors);
        auto* const borrows = c.take<PoolUse>(shape.pool_slots);
        auto* const places = c.take<std::uint16_t>(shape.places());
        if (w == nullptr) continue;
        PeerSendState& p = w->peers_[r][q];
        p.owners = owners, p.borrows = borrows, p.places = places;
        p.pool = std::min(shape.connectors, kFirstPool);
      }
    }
    unsigned char* const net = bytes(LoopNet::memory_bytes(loop));
    if (w != nullptr) w->net_ = new (w->net_room_) LoopNet(loop, net);
    CourierSettings settings;
    settings.shape = shape;
    settings.processes = o.ranks;
    settings.window = o.window;
    std::uint16_t counted[kMostRanks] = {0, 1, 2, 3};
    settings.process_of = w == nullptr ? counted : w->process_of_;
    settings.bases = w == nullptr ? nullptr : w->bases_;
    for (std::uint32_t r = 0; r < o.ranks; ++r) {
      settings.self = r;
      unsigned char* const memory = bytes(Courier::memory_bytes(settings));
      if (w == nullptr) continue;
      w->fabrics_[r] = new (w->fabric_room_[r]) LoopFabric(*w->net_, r);
      w->couriers_[r] =
          new (w->courier_room_[r]) Courier(settings, memory, *w->fabrics_[r], w->homes_[r]);
      LaneTransport& t = w->transports_[r];
      t.shape = shape;
      t.bases = w->views_[r];
      t.peers = w->peers_[r];
      t.rank = r;
      t.groups = w->couriers_[r]->groups(r, 0);
    }
  }

  ArenaShape shape_;
  unsigned char* views_[kMostRanks][kMostRanks] = {};
  unsigned char* const* bases_[kMostRanks] = {};
  std::uint16_t process_of_[kMostRanks] = {};
  PeerSendState peers_[kMostRanks][kMostRanks];
  LaneTransport transports_[kMostRanks];
  Home homes_[kMostRanks];
  LoopNet* net_ = nullptr;
  LoopFabric* fabrics_[kMostRanks] = {};
  Courier* couriers_[kMostRanks] = {};
  alignas(64) unsigned char net_room_[sizeof(LoopNet)];
  alignas(64) unsigned char fabric_room_[kMostRanks][sizeof(LoopFabric)];
  alignas(64) unsigned char courier_room_[kMostRanks][(sizeof(Courier) + 63) / 64 * 64];
};

}  // namespace unjam
