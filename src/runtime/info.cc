// What a context holds, and why: the text of unjamInfo.
#include <algorithm>

#include "base/json_writer.h"
#include "plan/registry.h"
#include "runtime/context.h"

namespace unjam {
namespace {

// By Step.
constexpr const char* kStepNames[kSteps] = {"read_sqe", "prepare", "load_context", "save_context",
                                            "write_cqe"};

const char* to_string(KeyList list) {
  switch (list) {
    case KeyList::kBusy:
      return "busy";
    case KeyList::kLingering:
      return "lingering";
    case KeyList::kIdle:
      return "idle";
    case KeyList::kRegistered:
      return "registered";
    case KeyList::kDoomed:
      return "doomed";
  }
  return "";
}

void put_lane(JsonWriter& w, std::uint32_t l, LaneStats& s) {
  w.begin_object().field("lane", l);
  w.field("preemptions", load_relaxed(s.preemptions));
  w.field("quantum_switches", load_relaxed(s.quantum_switches));
  w.field("context_loads", load_relaxed(s.context_loads));
  w.field("context_saves", load_relaxed(s.context_saves));
  w.field("spins", load_relaxed(s.spins));
  w.field("slices", load_relaxed(s.slices));
  w.field("bytes_sent", load_relaxed(s.bytes_sent));
  w.field("borrowed", load_relaxed(s.borrowed));
  w.field("into_outputs", load_relaxed(s.into_outputs));
  w.field("whole_calls", load_relaxed(s.batched));
  w.field("starts", load_relaxed(s.starts));
  w.field("quits", load_relaxed(s.quits));
  w.field("idle_quits", load_relaxed(s.idle_quits));
  w.field("stuck_quits", load_relaxed(s.stuck_quits));
  w.field("residency_quits", load_relaxed(s.residency_quits));
  w.field("passes", load_relaxed(s.passes));
  w.field("queue_peak", load_relaxed(s.queue_peak));
  w.field("no_connector", load_relaxed(s.no_connector));
  w.field("orderings", load_relaxed(s.orderings));
  w.key("steps").begin_object();
  for (std::size_t i = 0; i < kSteps; ++i) {
    w.key(kStepNames[i]).begin_object();
    w.field("count", load_relaxed(s.steps[i].count)).field("ns", load_relaxed(s.steps[i].ns));
    w.end_object();
  }
  w.end_object();
  w.end_object();
}

}  // namespace

// Connectors by what their keys do, and bytes of keys.
struct Context::Held {
  struct Peer {
    std::uint64_t busy = 0;         // of keys with invocations under way
    std::uint64_t undelivered = 0;  // of others, with slices that the peer has yet to take
    std::uint64_t idle = 0;
  };
  std::vector<Peer> peers;  // by rank
  std::uint64_t key_bytes = 0;
  std::uint64_t record_bytes = 0;
};

Context::Held Context::what_is_held() const {
  Held held;
  held.peers.resize(static_cast<std::size_t>(world_->ranks()));
  for (const auto& [tag, key] : keys_) {
    held.key_bytes += key->bytes();
    const unjamGroup& group = *key->group;
    for (std::size_t l = 0; l < key->lanes.size(); ++l) {
      const LaneTransport& t = memory_->lane(static_cast<std::uint32_t>(l)).transport;
      for (std::size_t q = 0; q < group.members.size(); ++q) {
        OutEndpoint& out = key->lanes[l].out[q];
        if (load_relaxed(out.connector) == kNoConnector) continue;
        const auto rank = static_cast<std::uint32_t>(group.members[q]);
        Held::Peer& peer = held.peers[rank];
        // A lane may be writing to the endpoint of a busy key.
        if (key->list == KeyList::kBusy) {
          ++peer.busy;
        } else if (t.drained(rank, out)) {
          ++peer.idle;
        } else {
          ++peer.undelivered;
        }
      }
    }
  }
  if (dropping_ != nullptr) {
    for (const auto& key : dropping_->keys) held.key_bytes += key->bytes();
  }
  // Nodes and buckets of the table, roughly.
  held.record_bytes = records_.size() * (sizeof(std::uint64_t) + sizeof(KeyRecord) + 32) +
                      former_.size() * sizeof(former_.front());
  for (const auto& [tag, record] : records_) {
    if (record.failure == nullptr) continue;
    held.record_bytes += sizeof(KeyRecord::Failure) + record.failure->why.message.capacity();
  }
  return held;
}

// Group ranks' world ranks that have slices of a key to take, which has nothing under way.
std::vector<int> Context::undelivered_to(const Key& key) const {
  std::vector<int> peers;
  if (key.list == KeyList::kBusy) return peers;
  for (std::size_t q = 0; q < key.group->members.size(); ++q) {
    const int rank = key.group->members[q];
    for (std::size_t l = 0; l < key.lanes.size(); ++l) {
      const LaneTransport& t = memory_->lane(static_cast<std::uint32_t>(l)).transport;
      if (rank == rank_ || t.drained(static_cast<std::uint32_t>(rank), key.lanes[l].out[q]))
        continue;
      peers.push_back(rank);
      break;
    }
  }
  return peers;
}

void Context::put_settings(JsonWriter& w) const {
  w.key("settings").begin_object();
  for (const Variable& v : variables()) {
    const std::int64_t value = settings_.*v.field;
    if (v.choices != nullptr) {
      w.field(v.name, value_text(v, value));
    } else {
      w.field(v.name, value);
    }
  }
  w.end_object();
}

void Context::put_memory(JsonWriter& w, const Held& held) const {
  const ArenaShape& shape = world_->shape();
  const std::uint64_t endpoint = sizeof(OutEndpoint) + sizeof(InEndpoint);
  w.key("memory").begin_object();
  w.field("connector_bytes", shape.connector_bytes());
  w.field("guaranteed_bytes_per_key_peer_lane",
          shape.connector_bytes() + sizeof(CreditCell) + sizeof(DirectoryEntry));
  w.field("endpoint_bytes_per_key_peer_lane", endpoint);
  w.field("pool_bytes_per_peer_lane", shape.pool_bytes());
  w.field("context_bytes_per_invocation",
          std::uint64_t{sizeof(Invocation) + sizeof(Sqe) + sizeof(std::uint64_t) +
                        2 * sizeof(std::uint32_t)} +
              shape.lanes * (sizeof(DynamicContext) + sizeof(QueueLink) + sizeof(std::uint16_t)));
  w.field("engine_bytes_reserved", memory_ == nullptr ? 0 : memory_->bytes());
  w.field("arena_bytes_reserved", shape.total_bytes());
  w.field("arena_bytes_committed", world_->arena_committed(rank_));
  if (world_->rooms() != nullptr) {
    const Rooms::Usage rooms = world_->rooms()->usage(rank_);
    w.field("neighbours_met", rooms.met);
    w.field("neighbours_bytes", rooms.bytes);
    w.field("neighbours_lack", rooms.lacks);
  }
  w.field("neighbour_first_bytes", shape.room_bytes(shape.next_connectors(0)));
  w.field("neighbour_most_bytes", shape.block_bytes());
  w.field("keys_bytes", held.key_bytes);
  w.field("key_records_bytes", held.record_bytes);
  w.end_object();
}

void Context::put_heap(JsonWriter& w) const {
  const Heap::Usage heap = heap_->usage();
  w.key("heap").begin_object();
  w.field("bytes", heap.bytes);
  w.field("used", heap.used);
  w.field("largest_free", heap.largest_free);
  w.field("allocations", heap.allocations);
  w.end_object();
}

void Context::put_windows(JsonWriter& w, std::uint64_t windows_left) const {
  const Windows::Usage windows = windows_.usage();
  const WindowMaps::Usage mapped = world_->windows_mapped(rank_);
  w.key("windows").begin_object();
  w.field("registered", windows.windows);
  w.field("bytes", windows.bytes);
  w.field("retired", windows.retired + windows.left);
  w.field("left", windows_left);
  w.field("not_shared", not_shared_);
  w.field("not_shared_because", not_shared_because_);
  w.field("peers_mapped", mapped.mapped);
  w.field("peers_awaited", mapped.awaited);
  w.field("peers_unreachable", mapped.unreachable);
  w.field("peers_unreachable_because", mapped.why);
  w.end_object();
}

void Context::put_held(JsonWriter& w) const {
  const auto groups_held = static_cast<std::uint64_t>(
      std::count_if(groups_.begin(), groups_.end(), [](const auto& group) {
        return group->parent == nullptr && (!group->destroyed || group->in_use != 0);
      }));
  const auto channels_held = static_cast<std::uint64_t>(
      std::count_if(groups_.begin(), groups_.end(), [](const auto& group) {
        return group->parent != nullptr && (!group->destroyed || group->in_use != 0);
      }));
  w.key("held").begin_object();
  w.field("keys_busy", keys_at(KeyList::kBusy));
  w.field("keys_lingering", keys_at(KeyList::kLingering));
  w.field("keys_idle", keys_at(KeyList::kIdle));
  w.field("keys_registered", keys_at(KeyList::kRegistered));
  w.field("keys_doomed", keys_at(KeyList::kDoomed));
  w.field("keys_leaving", dropping_ == nullptr ? std::uint64_t{0} : dropping_->keys.size());
  w.field("key_records", records_.size());
  w.field("keys_forgotten", forgotten_);
  w.field("groups", groups_held);
  w.field("channels", channels_held);
  w.field("group_handles", groups_.size());
  w.end_object();
}

void Context::put_peers(JsonWriter& w, const Held& held) const {
  const ArenaShape& shape = world_->shape();
  w.key("peers").begin_array();
  for (std::uint32_t p = 0; memory_ != nullptr && p < shape.ranks; ++p) {
    if (static_cast<int>(p) == rank_) continue;
    std::uint64_t touched = 0, pool = 0, opened = 0, reclaimed = 0, abandoned = 0;
    for (std::uint32_t l = 0; l < shape.lanes; ++l) {
      PeerSendState& peer = memory_->lane(l).transport.peers[p];
      touched += load_relaxed(peer.touched);
      pool += load_relaxed(peer.pool);
      opened += load_relaxed(peer.opened);
      reclaimed += load_relaxed(peer.reclaimed);
      abandoned += load_relaxed(peer.abandoned);
    }
    const Held::Peer& of_keys = held.peers[p];
    w.begin_object().field("rank", p);
    w.field("host", world_->host_name(static_cast<int>(p)));
    w.field("carrier", world_->is_remote_rank(static_cast<int>(p)) ? world_->carrier() : "");
    w.field("connectors_there", world_->rooms() == nullptr
                                    ? shape.connectors
                                    : world_->rooms()->connectors(rank_, static_cast<int>(p)));
    w.field("connectors_touched", touched);
    w.field("connectors_pool", pool);
    w.field("connectors_held", opened);
    w.field("connectors_busy", of_keys.busy);
    w.field("connectors_undelivered", of_keys.undelivered);
    w.field("connectors_idle", of_keys.idle);
    w.field("connectors_taken_over", reclaimed);
    w.field("connectors_abandoned", abandoned);
    w.field("connector_bytes_touched", touched * shape.connector_bytes());
    w.field("connector_bytes_held", opened * shape.connector_bytes());
    w.end_object();
  }
  w.end_array();
}

void Context::put_key(JsonWriter& w, Key& key) const {
  const unjamGroup& group = *key.group;
  std::uint64_t preemptions = 0, spins = 0, slices = 0, time_ns = 0;
  for (LaneKey& lane : key.lanes) {
    preemptions += load_relaxed(lane.preemptions);
    spins += load_relaxed(lane.spins);
    slices += load_relaxed(lane.slices);
    time_ns += load_relaxed(lane.time_ns);
  }
  w.begin_object().field("group", group.name).field("key", key.name);
  if (group.parent != nullptr) {
    w.field("source", group.source).field("destination", group.destination);
  }
  w.field("group_size", static_cast<std::uint64_t>(group.members.size()))
      .field("submitted", key.submitted)
      .field("completed", key.completed)
      .field("preemptions", preemptions)
      .field("spins", spins)
      .field("slices", slices)
      .field("time_ms", static_cast<double>(time_ns) / 1e6)
      .field("state", to_string(key.list));
  w.key("undelivered_to").begin_array();
  for (const int peer : undelivered_to(key)) w.value(peer);
  w.end_array();
  w.field("algorithm", key.plan == nullptr ? "" : to_string(key.plan->algorithm));
  w.field("protocol", key.plan == nullptr ? "" : to_string(key.plan->protocol));
  w.field("lanes",
          std::uint32_t{key.plan == nullptr ? std::uint16_t{0} : key.plan->geometry.lanes});
  w.field("failed", key.failed.message);
  w.end_object();
}

std::string Context::info_json() const {
  const std::unique_lock fresh = refreshed();
  const std::string kernel = cuda() ? streams_->footprint() : "";  // asks the device
  const std::uint64_t windows_left = world_->windows_left(rank_);  // a world's lock comes first
  std::lock_guard lock(mutex_);
  JsonWriter w;
  w.begin_object();
  w.field("version", UNJAM_VERSION).field("device", cuda() ? "cuda" : "host");
  w.field("rank", rank_);
  w.field("ranks", world_->ranks());
  w.field("ranks_a_core", world_->ranks_a_core());
  if (!world_->hosts().empty()) {  // as which hosts ranks count, by rank
    w.key("hosts").begin_array();
    for (const int host : world_->host_of()) {
      w.value(world_->hosts()[static_cast<std::size_t>(host)]);
    }
    w.end_array();
  }
  put_settings(w);
  if (cuda()) w.key("kernel").json(kernel);
  const Held held = what_is_held();
  put_memory(w, held);
  put_heap(w);
  put_windows(w, windows_left);
  put_held(w);
  put_peers(w, held);
  w.key("lanes").begin_array();
  for (std::uint32_t l = 0; memory_ != nullptr && l < world_->shape().lanes; ++l) {
    put_lane(w, l, memory_->lane(l).stats);
  }
  w.end_array();
  w.key("keys").begin_array();
  for (const auto& group : groups_) {
    for (const auto& [name, key] : group->keys) put_key(w, *key);
  }
  w.end_array().end_object();
  return w.text();
}

}  // namespace unjam
