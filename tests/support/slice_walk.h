// What each connector carries by a plan, slice by slice: a plain walk of the program, as
// program/primitive.h and program/geometry.h describe it. It stands beside the engine and the plan
// checker and shares no loop with either, so that it can say whether a change moved anything.
//
// A slice is what one guaranteed slot carries, or less. (The engine also sends several as one,
// where it gets a larger slot. It cuts at the same places.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "plan/plan.h"

namespace unjam_test {

struct Slice {
  std::uint32_t step = 0;  // index of the primitive
  std::uint32_t part = 0;
  std::uint64_t chunk = 0;
  std::uint64_t pass = 0;  // of the program: later than the chunk where the step lags
  std::uint64_t bytes = 0;
};

// One rank's end of a connector; or, as `kAlone`, what the rank does without any peer.
enum class End : std::uint8_t { kSends, kReceives, kAlone };
struct Connector {
  std::uint32_t lane = 0;
  int rank = 0;
  End end = End::kSends;
  int peer = 0;  // kAlone: the rank itself

  bool operator<(const Connector& o) const {
    return std::tie(lane, rank, end, peer) < std::tie(o.lane, o.rank, o.end, o.peer);
  }
};
using SliceSequences = std::map<Connector, std::vector<Slice>>;

namespace slice_walk {

struct Message {
  End end;
  int peer;
  std::uint32_t part;
};

// All that the i-th primitive moves of one chunk: to whom, from whom, and of which part.
inline std::vector<Message> messages(const unjam::Plan& plan, std::size_t i, int rank) {
  const unjam::Primitive& p = plan.primitives[i];
  std::vector<Message> all;
  for (const int q : unjam::ranks_received_from(plan, i)) {
    const bool of_peer = (p.flags & unjam::kCollect) != 0;
    all.push_back({End::kReceives, q, of_peer ? static_cast<std::uint32_t>(q) : p.part});
  }
  for (const int q : unjam::ranks_sent_to(plan, i)) {
    const bool of_peer = (p.flags & unjam::kScatter) != 0;
    all.push_back({End::kSends, q, of_peer ? static_cast<std::uint32_t>(q) : p.part});
  }
  if (all.empty()) all.push_back({End::kAlone, rank, p.part});
  return all;
}

}  // namespace slice_walk

// One rank's plan. slot_bytes: of a guaranteed slot.
inline void add_slices(const unjam::Plan& plan, int rank, std::uint32_t slot_bytes,
                       SliceSequences* sequences) {
  const unjam::Geometry& g = plan.geometry;
  if (plan.primitives.empty()) return;
  const std::uint64_t element = dtype_bytes(g.dtype);
  const std::uint64_t slice_bytes =
      unjam::payload_bytes(plan.protocol, slot_bytes) / element * element;
  std::vector<std::vector<slice_walk::Message>> messages;
  for (std::size_t i = 0; i < plan.primitives.size(); ++i) {
    messages.push_back(slice_walk::messages(plan, i, rank));
  }
  for (std::uint32_t i = 0; i < g.lanes; ++i) {
    const std::uint32_t lane = g.first_lane + i;
    const std::uint64_t passes = g.loops(lane) + plan.primitives.back().lag;
    for (std::uint64_t pass = 0; pass < passes; ++pass) {
      for (std::uint32_t step = 0; step < plan.primitives.size(); ++step) {
        const std::uint32_t lag = plan.primitives[step].lag;
        if (pass < lag) continue;
        const std::uint64_t chunk = pass - lag;
        for (const slice_walk::Message& m : messages[step]) {
          std::uint64_t left = g.chunk_range(m.part, lane, chunk).length * element;
          if (left == 0) continue;
          std::vector<Slice>& sequence = (*sequences)[{lane, rank, m.end, m.peer}];
          while (left != 0) {
            const std::uint64_t bytes = std::min(left, slice_bytes);
            sequence.push_back({step, m.part, chunk, pass, bytes});
            left -= bytes;
          }
        }
      }
    }
  }
}

// All ranks' plans.
inline SliceSequences slices_of(const std::vector<unjam::Plan>& plans, std::uint32_t slot_bytes) {
  SliceSequences sequences;
  for (std::size_t r = 0; r < plans.size(); ++r) {
    add_slices(plans[r], static_cast<int>(r), slot_bytes, &sequences);
  }
  return sequences;
}

// Of all of it, with the protocol. (By FNV-1a on whole words, and not by base/hash.h: what is
// written down in files is not to change with that.)
inline std::uint64_t hash_of(const SliceSequences& sequences, unjam::Protocol protocol) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const auto add = [&](std::uint64_t value) {
    hash = (hash ^ value) * 0x100000001b3ull;
    hash ^= hash >> 29;
  };
  add(static_cast<std::uint64_t>(protocol));
  for (const auto& [connector, slices] : sequences) {
    add(connector.lane);
    add(static_cast<std::uint64_t>(connector.rank));
    add(static_cast<std::uint64_t>(connector.end));
    add(static_cast<std::uint64_t>(connector.peer));
    add(slices.size());
    for (const Slice& s : slices) {
      add(s.step);
      add(s.part);
      add(s.chunk);
      add(s.pass);
      add(s.bytes);
    }
  }
  return hash;
}

// A line an end of a connector: "lane 0 rank 1 to 2 by slot: 0/1/0:16 …", a slice being
// step/part/chunk:bytes, or step/part/chunk@pass:bytes where the step lags.
inline std::string text_of(const SliceSequences& sequences, unjam::Protocol protocol) {
  std::string text;
  for (const auto& [connector, slices] : sequences) {
    text += "lane " + std::to_string(connector.lane) + " rank " + std::to_string(connector.rank);
    if (connector.end == End::kAlone) {
      text += " alone:";
    } else {
      text += connector.end == End::kSends ? " to " : " from ";
      text += std::to_string(connector.peer) + " by " + to_string(protocol) + ":";
    }
    for (const Slice& s : slices) {
      text += " " + std::to_string(s.step) + "/" + std::to_string(s.part) + "/" +
              std::to_string(s.chunk);
      if (s.pass != s.chunk) text += "@" + std::to_string(s.pass);
      text += ":" + std::to_string(s.bytes);
    }
    text += "\n";
  }
  return text;
}

}  // namespace unjam_test
