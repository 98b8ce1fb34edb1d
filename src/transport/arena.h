// The layout of a rank's arena: the shared memory in which its peers write to it.
//
// The arena of rank R holds, for every other rank S and lane L, one partition that S alone writes
// (and R reads), and, for every receiver D and lane L, credit cells that D alone writes (and R
// reads).
//   partition: a directory (which key owns which connector), the connectors (slot headers and
//              guaranteed "escape" slots), and a pool of larger slots that S borrows.
//   announcements: what members called, see announcement.h.
//   credits:   one counter a connector R -> D: how many of its steps D has consumed, and where D's
//              output is if R may store into it itself; and which keys and groups D will
//              never read again.
//   heap:      R's user's buffers, where R's user has asked for such (unjamMemAlloc()): outputs
//              there are what peers may store into.
// The sender picks the connector in its own partition and announces it under the key's tag; the
// receiver looks the tag up. Neither waits for the other, and a new key needs no system call.
// Connectors are taken from the lowest on (connector.h says when one is used again), whatever the
// keys' tags: pages that no key touches are never committed on the host.
// Every address is an offset, so that processes and devices may map an arena anywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr std::uint32_t kSlotHeaders = 16;   // steps under way in one connector
inline constexpr std::uint32_t kMaxRanks = 65'535;  // ranks of one job: 16 bits name each
inline constexpr std::uint32_t kMaxCudaRanks = 64;  // of one on CUDA devices
inline constexpr std::uint32_t kMaxLanes = 32;
inline constexpr std::uint32_t kAnnouncements = 1024;  // places a rank, see announcement.h

// The directory has two parts, both written by the sender alone. Places are a hash table (linear
// probing) from tags to connectors: a word holds the high bits of a tag and a connector's number
// plus one; 0: nobody. A key that gives its connector back leaves its place, and no mark stays: a
// reader does not stop at an empty place but after as many as the sender has ever probed.
struct DirectoryHead {
  alignas(64) std::uint32_t longest_probe;
};
inline constexpr std::uint64_t kPlaceConnector = 0xffff;  // the word's bits that hold the number
// One for each connector. tag: 0 nobody's, else its owner's. base: the step count at which the
// present owner began; stored before tag (release).
struct DirectoryEntry {
  std::uint64_t tag;
  std::uint64_t base;
};

// One step of a connector, written by the sender. flag (release, last) covers the rest and the
// payload: it equals step_flag(seed, step) of the invocation and step to which the payload belongs,
// so whatever does not belong to the reader's own invocation is not read as data.
struct alignas(64) SlotHeader {
  std::uint64_t flag;
  std::uint32_t bytes;
  // 0: escape slot step % escape_slots; i + 1: borrowed slot i; kInOutput: see connector.h.
  std::uint32_t location;
};

// consumed: steps of the connector. The others invite its sender to store into an output, see
// connector.h. (In one line: who looks at the credits has them all.)
struct alignas(64) CreditCell {
  std::uint64_t consumed;
  std::uint64_t output;
  std::uint64_t output_word;
};

// Tags of keys and groups from which the receiver will never read again, at the place that the tag
// says; a later one may replace an earlier one (which costs its sender a connector, no more).
inline constexpr std::uint32_t kVoidMarks = 1024;

// Per rank and lane: how others wake its engine. See engine/doorbell.h.
struct alignas(kFalseSharingBytes) LaneCell {
  std::uint32_t doorbell;
  std::uint32_t pad;
};

// All sizes that ranks must agree on.
struct ArenaShape {
  std::uint32_t ranks = 1;
  std::uint32_t lanes = 1;
  std::uint32_t connectors = 1024;  // a (peer, lane)
  std::uint32_t escape_slots = 5;
  std::uint32_t escape_slot_bytes = 8192;
  std::uint32_t borrow_slots = 64;  // a (peer, lane)
  std::uint32_t borrow_slot_bytes = 32768;
  std::uint64_t heap_bytes = 0;  // of each rank

  UNJAM_HD constexpr std::uint64_t connector_bytes() const {
    return std::uint64_t{kSlotHeaders} * sizeof(SlotHeader) +
           std::uint64_t{escape_slots} * escape_slot_bytes;
  }
  // Half empty when every connector is held: probes stay short.
  UNJAM_HD constexpr std::uint32_t places() const { return 2 * connectors; }
  UNJAM_HD constexpr std::uint64_t entries_offset() const {
    return sizeof(DirectoryHead) + std::uint64_t{places()} * sizeof(std::uint64_t);
  }
  UNJAM_HD constexpr std::uint64_t directory_bytes() const {
    // Slots begin with a line.
    static_assert(kSlotHeaders * sizeof(SlotHeader) % kLineBytes == 0);
    return (entries_offset() + std::uint64_t{connectors} * sizeof(DirectoryEntry) + kLineBytes -
            1) /
           kLineBytes * kLineBytes;
  }
  UNJAM_HD constexpr std::uint64_t borrow_bytes() const {
    return std::uint64_t{borrow_slots} * borrow_slot_bytes;
  }
  UNJAM_HD constexpr std::uint64_t partition_bytes() const {
    return round_up(directory_bytes() + connectors * connector_bytes() + borrow_bytes());
  }
  UNJAM_HD constexpr std::uint64_t void_offset() const {
    return std::uint64_t{connectors} * sizeof(CreditCell);
  }
  UNJAM_HD constexpr std::uint64_t credit_bytes() const {
    return round_up(void_offset() + kVoidMarks * sizeof(std::uint64_t));
  }
  // Offsets into the arena.
  UNJAM_HD constexpr std::uint64_t lane_cell(std::uint32_t lane) const {
    return std::uint64_t{lane} * sizeof(LaneCell);
  }
  // Memory of the rank's device that its lane 0 alone touches: where a barrier's element lies.
  UNJAM_HD constexpr std::uint64_t scratch() const { return announcements() - kScratchBytes; }
  UNJAM_HD constexpr std::uint64_t announcements() const { return kHeaderBytes / 2; }
  UNJAM_HD constexpr std::uint64_t credits(std::uint32_t receiver, std::uint32_t lane) const {
    return kHeaderBytes + (std::uint64_t{receiver} * lanes + lane) * credit_bytes();
  }
  UNJAM_HD constexpr std::uint64_t partition(std::uint32_t receiver, std::uint32_t sender,
                                             std::uint32_t lane) const {
    // The receiver itself has none.
    const std::uint32_t place = sender > receiver ? sender - 1 : sender;
    return partitions() + (std::uint64_t{place} * lanes + lane) * partition_bytes();
  }
  // On a boundary that any device's pages have.
  UNJAM_HD constexpr std::uint64_t heap() const {
    constexpr std::uint64_t kBoundary = std::uint64_t{2} << 20;
    return (partitions_end() + kBoundary - 1) / kBoundary * kBoundary;
  }
  UNJAM_HD constexpr std::uint64_t total_bytes() const {
    return heap_bytes == 0 ? partitions_end() : heap() + heap_bytes;
  }

 private:
  static constexpr std::uint64_t kHeaderBytes = 16384;
  UNJAM_HD constexpr std::uint64_t partitions() const {
    return kHeaderBytes + std::uint64_t{ranks} * lanes * credit_bytes();
  }
  UNJAM_HD constexpr std::uint64_t partitions_end() const {
    return partitions() + std::uint64_t{ranks - 1} * lanes * partition_bytes();
  }
  UNJAM_HD static constexpr std::uint64_t round_up(std::uint64_t n) {
    return (n + 4095) / 4096 * 4096;
  }
  static constexpr std::uint64_t kScratchBytes = kFalseSharingBytes;
  static_assert(kMaxLanes * sizeof(LaneCell) + kScratchBytes <= kHeaderBytes / 2);
  static_assert(kAnnouncements * sizeof(std::uint64_t) <= kHeaderBytes / 2);
};

}  // namespace unjam
