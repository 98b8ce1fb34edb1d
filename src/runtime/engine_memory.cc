#include "runtime/engine_memory.h"

#include <algorithm>
#include <bit>

namespace unjam {

std::uint32_t invocation_slots(const Settings& settings) {
  // Twice the keys that may be active: room for successors of the same keys, which keep a stream of
  // calls under one key from going through the host each time.
  // On CUDA calls are queued in streams, a thousand and more.
  if (settings.device == UNJAM_DEVICE_CUDA) return 4096;
  return static_cast<std::uint32_t>(2 * settings.max_active_keys);
}

std::uint32_t engine_slots(const Settings& settings) {
  return invocation_slots(settings) + kRoomSlots;
}

std::uint32_t device_keys(const Settings& settings) {
  return static_cast<std::uint32_t>(settings.idle_keys + settings.max_active_keys);
}

ArenaShape arena_shape(const Settings& settings, int ranks) {
  ArenaShape shape;
  shape.ranks = static_cast<std::uint32_t>(ranks);
  shape.lanes = static_cast<std::uint32_t>(settings.lanes);
  // Twice the keys that may be active: a key that is complete here may have slices that a peer has
  // yet to consume. The context counts both, so open() always finds one.
  shape.connectors = static_cast<std::uint32_t>(2 * settings.max_active_keys);
  // The host's come with their pages: nothing is gained by asking for fewer at first.
  const auto first = static_cast<std::uint32_t>(settings.first_connectors);
  shape.first_connectors_log2 = static_cast<std::uint32_t>(std::countr_zero(
      std::bit_ceil(first == 0 ? shape.connectors : std::min(first, shape.connectors))));
  if (settings.device == UNJAM_DEVICE_CUDA) shape.page_bytes = 2 << 20;
  shape.guaranteed_slots = static_cast<std::uint32_t>(settings.guaranteed_slots);
  shape.guaranteed_slot_bytes = static_cast<std::uint32_t>(settings.guaranteed_slot_bytes);
  shape.pool_slots = static_cast<std::uint32_t>(settings.pool_slots);
  // One holds a whole chunk of a ring plan, unless said otherwise.
  shape.pool_slot_bytes = static_cast<std::uint32_t>(settings.pool_slot_bytes != 0
                                                         ? settings.pool_slot_bytes
                                                         : (settings.guaranteed_slots - 1) *
                                                               settings.guaranteed_slot_bytes);
  // Whole pages, as all of an arena.
  shape.heap_bytes = (static_cast<std::uint64_t>(settings.heap_bytes) + 4095) / 4096 * 4096;
  shape.derive();
  return shape;
}

template <class T>
T* EngineMemory::take(std::size_t n) {
  auto array = std::make_shared<ZeroedArray<T>>(n);
  T* p = array->get();
  storage_.push_back(std::move(array));
  bytes_ += n * sizeof(T);
  return p;
}

EngineMemory::EngineMemory(const Settings& settings, const ArenaShape& shape,
                           unsigned char* const* bases, int rank, WindowEntry* windows,
                           Room* rooms) {
  const std::uint32_t slots = engine_slots(settings);
  rank_.num_slots = slots;
  rank_.num_lanes = shape.lanes;
  rank_.sq.places = take<Sqe>(slots);
  rank_.sq.capacity = slots;
  rank_.cq.words = take<std::uint64_t>(slots);
  rank_.cq.capacity = slots;
  rank_.invocations = take<Invocation>(slots);
  rank_.remaining = take<std::uint32_t>(slots);
  rank_.cancelled = take<std::uint32_t>(slots);

  EnginePolicy& policy = rank_.policy;
  const auto u32 = [](std::int64_t v) { return static_cast<std::uint32_t>(v); };
  policy.stickiness = static_cast<StickinessPolicy>(settings.policy);
  policy.order = static_cast<OrderPolicy>(settings.order);
  policy.spin_head = u32(settings.spin_head);
  policy.spin_base = u32(settings.spin_base);
  policy.spin_boost = u32(settings.spin_boost);
  policy.spin_cap = u32(settings.spin_cap);
  policy.quantum_slices = u32(settings.quantum_slices);
  policy.residency_us = u32(settings.residency_us);
  policy.order_after_us = u32(settings.order_after_us);

  lanes_ = std::make_unique<LaneState[]>(shape.lanes);
  bytes_ += shape.lanes * sizeof(LaneState);
  rank_.lanes = lanes_.get();
  mailboxes_ = std::make_unique<Mailbox[]>(shape.lanes);
  bytes_ += shape.lanes * sizeof(Mailbox);
  rank_.mailboxes = mailboxes_.get();
  for (std::uint32_t l = 0; l < shape.lanes; ++l) {
    LaneState& lane = lanes_[l];
    lane.queue.attach(take<QueueLink>(slots));
    lane.contexts = take<DynamicContext>(slots);
    mailboxes_[l].places = take<std::uint16_t>(slots);
    mailboxes_[l].capacity = slots;
    lane.trace.places = TraceRing::places_for(static_cast<std::uint64_t>(settings.trace_events));
    lane.trace.events = take<TraceEvent>(lane.trace.places);
    LaneTransport& t = lane.transport;
    t.shape = shape;
    t.bases = bases;
    t.windows = windows;
    t.rooms = rooms;
    t.rank = u32(rank);
    t.lane = l;
    t.peers = take<PeerSendState>(shape.ranks);
    // In one piece, of which only what belongs to neighbours is ever touched.
    ConnectorOwner* const owners =
        take<ConnectorOwner>(std::size_t{shape.ranks} * shape.connectors);
    PoolUse* const borrows = take<PoolUse>(std::size_t{shape.ranks} * shape.pool_slots);
    std::uint16_t* const places = take<std::uint16_t>(std::size_t{shape.ranks} * shape.places());
    for (std::uint32_t p = 0; p < shape.ranks; ++p) {
      if (p == t.rank) continue;
      t.peers[p].owners = owners + std::size_t{p} * shape.connectors;
      t.peers[p].borrows = borrows + std::size_t{p} * shape.pool_slots;
      t.peers[p].places = places + std::size_t{p} * shape.places();
      t.peers[p].given_back = kNoConnector;
      t.peers[p].pool = shape.connectors < kFirstPool ? shape.connectors : kFirstPool;
    }
  }
}

}  // namespace unjam
