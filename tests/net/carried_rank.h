// A rank with one lane whose peers are all elsewhere: its arena, their mirrors, and a courier over
// any fabric. A test drives it by hand.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/slices_by_hand.h"
#include "transport/connector.h"
#include "transport/network/courier.h"
#include "transport/network/fabric.h"

namespace unjam {

class CarriedRank {
 public:
  // `shape`: but for the ranks, and not derived.
  CarriedRank(ArenaShape shape, std::uint32_t ranks, std::uint32_t rank) : rank_(rank) {
    shape.ranks = ranks;
    shape.lanes = 1;
    shape.derive();
    shape_ = shape;
    for (std::uint32_t q = 0; q < ranks; ++q) {
      view_memory_.push_back(zeroed(shape.total_bytes()));
      views_.push_back(view_memory_.back().get());
      process_of_.push_back(static_cast<std::uint16_t>(q));
      owners_.emplace_back(shape.connectors);
      borrows_.emplace_back(shape.pool_slots);
      places_.emplace_back(shape.places());
    }
    peers_.resize(ranks);
    for (std::uint32_t q = 0; q < ranks; ++q) {
      peers_[q].owners = owners_[q].data();
      peers_[q].borrows = borrows_[q].data();
      peers_[q].places = places_[q].data();
      peers_[q].pool = std::min(shape.connectors, kFirstPool);
    }
    bases_.resize(ranks);
    bases_[rank] = views_.data();
  }

  // All that a fabric has to know of.
  std::vector<FabricMemory> memory() const {
    std::vector<FabricMemory> all;
    for (unsigned char* const v : views_) all.push_back({v, shape_.total_bytes()});
    return all;
  }
  std::uint32_t most_payload() const {
    return std::max(shape_.guaranteed_slot_bytes, shape_.pool_slot_bytes);
  }

  void begin(Fabric& fabric, std::uint64_t window = 512 << 10) {
    CourierSettings s;
    s.shape = shape_;
    s.processes = shape_.ranks;
    s.self = rank_;
    s.process_of = process_of_.data();
    s.bases = bases_.data();
    s.window = window;
    courier_memory_ = zeroed(Courier::memory_bytes(s));
    courier_ = std::make_unique<Courier>(s, courier_memory_.get(), fabric, home_);
    transport_.shape = shape_;
    transport_.bases = views_.data();
    transport_.peers = peers_.data();
    transport_.rank = rank_;
    transport_.groups = courier_->groups(rank_, 0);
  }

  std::uint32_t rank() const { return rank_; }
  Courier& courier() { return *courier_; }
  HomeThatCounts& home() { return home_; }
  LaneTransport& transport() { return transport_; }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<unsigned char, Free>;
  static Memory zeroed(std::size_t bytes) {
    bytes = (bytes + Carver::kAlignment) / Carver::kAlignment * Carver::kAlignment;
    Memory m(static_cast<unsigned char*>(std::aligned_alloc(Carver::kAlignment, bytes)));
    std::memset(m.get(), 0, bytes);
    return m;
  }

  const std::uint32_t rank_;
  ArenaShape shape_;
  std::vector<Memory> view_memory_;
  std::vector<unsigned char*> views_;
  std::vector<unsigned char* const*> bases_;
  std::vector<std::uint16_t> process_of_;
  std::vector<std::vector<ConnectorOwner>> owners_;
  std::vector<std::vector<PoolUse>> borrows_;
  std::vector<std::vector<std::uint16_t>> places_;
  std::vector<PeerSendState> peers_;
  LaneTransport transport_;
  HomeThatCounts home_;
  Memory courier_memory_;
  std::unique_ptr<Courier> courier_;
};

// A key's slices from a rank to another: what each end knows of them.
struct CarriedStream {
  std::uint64_t tag = 1, seed = 1;
  std::uint32_t bytes = 40;  // of the first; others are up to two shorter
  std::uint64_t sent = 0, received = 0;
  OutEndpoint out;
  InEndpoint in;

  bool send(CarriedRank& from, std::uint32_t to) {
    static constexpr std::uint32_t kNotInUse = 0;
    const auto n = static_cast<std::uint32_t>(bytes - sent % 3);
    if (!send_slice(from.transport(), from.courier(), to, tag, out, kNotInUse, seed, n, 3)) {
      return false;
    }
    ++sent;
    return true;
  }
  // As receive_slice().
  int receive(CarriedRank& to, std::uint32_t from) {
    const auto n = static_cast<std::uint32_t>(bytes - received % 3);
    const int got = receive_slice(to.transport(), to.courier(), from, tag, in, seed, n);
    if (got == 1) ++received;
    return got;
  }
};

}  // namespace unjam
