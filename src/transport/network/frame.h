// Frames: what couriers of two processes say to each other. 64 bytes, little-endian, and behind
// those of kData so many bytes of payload.
//
// Each frame says all that its receiver needs: none relies on an earlier one, so that a carrier may
// bring frames in any order. But each comes once, or the connection is over.
//
//   kData      a step of a connector, and whose that is: enough to open it at the receiver
//   kCredits   how many steps of up to four connectors were consumed; the latest values
//   kUnlist    a key has another connector now: whoever has this one cached has to look again
//   kAnnounce  a word for an arena's announcements (announcement.h)
//   kBye       nothing more comes: so many frames came before it
#pragma once

#include <cstdint>

#include "transport/arena.h"

namespace unjam {

inline constexpr std::uint32_t kFrameBytes = 64;
struct FrameBytes {
  unsigned char bytes[kFrameBytes] = {};
};

enum class FrameType : std::uint8_t { kData = 1, kCredits, kUnlist, kAnnounce, kBye };

struct CourierFrame {
  static constexpr std::uint32_t kMostCredits = 4;

  FrameType type = FrameType::kData;
  std::uint8_t lane = 0;
  std::uint8_t count = 0;  // kCredits: how many
  std::uint16_t src = 0;   // ranks; but of kAnnounce and kBye dst alone, or none
  std::uint16_t dst = 0;
  std::uint32_t bytes = 0;     // kData: of the payload
  std::uint32_t location = 0;  // kData: as in SlotHeader; kAnnounce: the word's place
  std::uint16_t connectors[kMostCredits] = {};  // but for kCredits the first alone
  std::uint64_t step = 0;                       // kData; kAnnounce: the word; kBye: the count
  std::uint64_t flag = 0;                       // kData: as in SlotHeader
  std::uint64_t tag = 0;                        // kData, kUnlist: the owner's,
  std::uint64_t base = 0;                       // the step at which it began,
  std::uint64_t group = 0;                      // kData: and its group's
  std::uint64_t consumed[kMostCredits] = {};    // kCredits
};

FrameBytes encode(const CourierFrame& frame);

// What the bytes say, and what is wrong with that as far as the shape alone tells: nullptr, or a
// text. Whoever gets a text must not look at the frame.
const char* decode(const FrameBytes& bytes, const ArenaShape& shape, CourierFrame* frame);

inline std::uint32_t payload_bytes(const CourierFrame& frame) {
  return frame.type == FrameType::kData ? frame.bytes : 0;
}

}  // namespace unjam
