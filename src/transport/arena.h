// The layout of a rank's arena: the shared memory in which its peers write to it. The arena of rank
// R begins with what all ranks may look at: lane cells, by which others wake R's engines;
// announcements (announcement.h); and the heap (unjamMemAlloc()). Behind that is a block for every
// other rank P, which P alone writes, and R reads, by lane:
//   credits      of connectors R -> P: what P has consumed, where its output is, and what it will
//                never read again
//   directory    which key owns which connector P -> R
//   a pool of larger slots that P borrows, and connectors: slot headers and guaranteed slots
// Memory stands behind a block when R and P have met (rooms.h). The sender picks the connector in
// its own block and announces it under the key's tag; the receiver looks the tag up. Connectors are
// taken from the lowest on, so pages that no key touches are never committed on the host. Every
// address is an offset, so that processes and devices may map an arena anywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr std::uint32_t kSlotHeaders = 16;   // steps under way in one connector
inline constexpr std::uint32_t kMaxRanks = 65'535;  // ranks of one job: 16 bits name each
// Of one on CUDA devices: as many GPUs as one NVLink domain has. Kernels carry lists of that
// length.
inline constexpr std::uint32_t kMaxCudaRanks = 72;
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
  // 0: guaranteed slot step % guaranteed_slots; i + 1: pool slot i; kInOutput: see connector.h.
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

// All sizes that ranks must agree on. Who has set them calls derive(): what addresses are made of
// is worked out once, not by each lane for each slice.
struct ArenaShape {
  std::uint64_t heap_bytes = 0;  // of each rank
  std::uint32_t ranks = 1;
  std::uint32_t lanes = 1;
  std::uint32_t connectors = 1024;  // a (peer, lane)
  // Memory comes for so many connectors of each lane, and twice, four, … times as many: 2 to the
  // power of this.
  std::uint32_t first_connectors_log2 = 10;
  std::uint32_t guaranteed_slots = 5;
  std::uint32_t guaranteed_slot_bytes = 8192;
  std::uint32_t pool_slots = 64;  // a (peer, lane)
  std::uint32_t pool_slot_bytes = 32768;
  std::uint32_t page_bytes = 4096;  // a power of two: what memory comes in

  UNJAM_HD constexpr std::uint64_t connector_bytes() const {
    return std::uint64_t{kSlotHeaders} * sizeof(SlotHeader) +
           std::uint64_t{guaranteed_slots} * guaranteed_slot_bytes;
  }
  UNJAM_HD constexpr std::uint32_t first_connectors() const { return 1u << first_connectors_log2; }
  // Half empty when every connector is held: probes stay short.
  UNJAM_HD constexpr std::uint32_t places() const { return 2 * connectors; }

  // ---- within a (peer, lane)'s part of the head ----
  UNJAM_HD constexpr std::uint64_t void_offset() const {
    return std::uint64_t{connectors} * sizeof(CreditCell);
  }
  UNJAM_HD constexpr std::uint64_t directory_offset() const {
    return void_offset() + kVoidMarks * sizeof(std::uint64_t);
  }
  UNJAM_HD constexpr std::uint64_t places_offset() const {
    return directory_offset() + sizeof(DirectoryHead);
  }
  UNJAM_HD constexpr std::uint64_t entries_offset() const {
    return places_offset() + std::uint64_t{places()} * sizeof(std::uint64_t);
  }
  UNJAM_HD constexpr std::uint64_t head_bytes() const { return bytes_of(head_); }
  UNJAM_HD constexpr std::uint64_t pool_bytes() const {
    return std::uint64_t{pool_slots} * pool_slot_bytes;
  }

  // ---- offsets into the arena ----
  UNJAM_HD constexpr std::uint64_t lane_cell(std::uint32_t lane) const {
    return std::uint64_t{lane} * sizeof(LaneCell);
  }
  // Memory of the rank's device that its lane 0 alone touches: where a barrier's element lies.
  UNJAM_HD constexpr std::uint64_t scratch() const { return announcements() - kScratchBytes; }
  UNJAM_HD constexpr std::uint64_t announcements() const { return kHeaderBytes / 2; }
  // On a boundary that any device's pages have.
  UNJAM_HD constexpr std::uint64_t heap() const { return std::uint64_t{2} << 20; }
  // What is there from the beginning.
  UNJAM_HD constexpr std::uint64_t base_bytes() const { return bytes_of(base_); }
  // The block of rank `owner`'s arena that is for `peer`.
  UNJAM_HD constexpr std::uint64_t block(std::uint32_t owner, std::uint32_t peer) const {
    // The owner itself has none.
    const std::uint32_t place = peer > owner ? peer - 1 : peer;
    return base_bytes() + place * block_bytes();
  }
  UNJAM_HD constexpr std::uint64_t block_bytes() const { return bytes_of(block_); }
  // How many connectors a room has next: twice as many as now, or a good deal more.
  UNJAM_HD constexpr std::uint32_t next_connectors(std::uint32_t now) const {
    constexpr std::uint32_t kMostStages = 4;  // at once: memory is cleared by one lane
    const std::uint32_t most = kMostStages << first_connectors_log2;
    const std::uint32_t more = now == 0 ? first_connectors() : now < most ? now : most;
    return now + more < connectors ? now + more : connectors;
  }
  UNJAM_HD constexpr std::uint64_t total_bytes() const {
    return base_bytes() + std::uint64_t{ranks - 1} * block_bytes();
  }

  // ---- offsets into a block ----
  UNJAM_HD constexpr std::uint64_t head(std::uint32_t lane) const { return lane * head_bytes(); }
  UNJAM_HD constexpr std::uint64_t heads_bytes() const { return lanes * head_bytes(); }
  UNJAM_HD constexpr std::uint64_t borrowed(std::uint32_t lane) const {
    return heads_bytes() + lane * pool_bytes();
  }
  UNJAM_HD constexpr std::uint64_t stages_offset() const { return bytes_of(stages_offset_); }
  // (As many of each lane as come at first lie together, so that what comes is in one piece.)
  UNJAM_HD constexpr std::uint64_t connector(std::uint32_t lane, std::uint32_t i) const {
    const std::uint32_t stage = i >> first_connectors_log2;
    const std::uint32_t place = lane << first_connectors_log2 | (i & (first_connectors() - 1));
    return bytes_of(stages_offset_ + stage * stage_) + place * connector_bytes();
  }
  // Of a block, with so many connectors of each lane.
  UNJAM_HD constexpr std::uint64_t room_bytes(std::uint32_t count) const {
    const std::uint32_t stages = (count + first_connectors() - 1) >> first_connectors_log2;
    return bytes_of(stages_offset_ + stages * stage_);
  }

  constexpr void derive() {
    head_ = pages_of(entries_offset() + std::uint64_t{connectors} * sizeof(DirectoryEntry), 1);
    const std::uint32_t unit = page_bytes / kSmallPage;
    base_ = heap_bytes == 0 ? pages_of(kHeaderBytes, unit) : pages_of(heap() + heap_bytes, unit);
    stages_offset_ = pages_of(heads_bytes() + lanes * pool_bytes(), unit);
    stage_ = pages_of((std::uint64_t{lanes} << first_connectors_log2) * connector_bytes(), unit);
    const std::uint32_t stages = (connectors + first_connectors() - 1) >> first_connectors_log2;
    block_ = stages_offset_ + stages * stage_;
  }

 private:
  static constexpr std::uint64_t kHeaderBytes = 16384, kSmallPage = 4096;
  // In pages, of which 32 bits count 16 TiB: kernels keep shapes in memory of each thread.
  UNJAM_HD static constexpr std::uint64_t bytes_of(std::uint32_t pages) {
    return std::uint64_t{pages} * kSmallPage;
  }
  // A multiple of so many.
  static constexpr std::uint32_t pages_of(std::uint64_t bytes, std::uint32_t unit) {
    const std::uint64_t pages = (bytes + kSmallPage - 1) / kSmallPage;
    return static_cast<std::uint32_t>((pages + unit - 1) / unit * unit);
  }
  static constexpr std::uint64_t kScratchBytes = kFalseSharingBytes;
  std::uint32_t head_ = 0, base_ = 0, stages_offset_ = 0, stage_ = 0, block_ = 0;
  static_assert(kMaxLanes * sizeof(LaneCell) + kScratchBytes <= kHeaderBytes / 2);
  static_assert(kAnnouncements * sizeof(std::uint64_t) <= kHeaderBytes / 2);
  // Slots begin with a line.
  static_assert(kSlotHeaders * sizeof(SlotHeader) % kLineBytes == 0);
};

}  // namespace unjam
