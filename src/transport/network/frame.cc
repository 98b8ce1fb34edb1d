#include "transport/network/frame.h"

#include "transport/connector.h"

namespace unjam {
namespace {

constexpr unsigned char kMagic = 0xd7;
constexpr std::uint32_t kWords = 5, kFirstWord = 24, kFirstConnector = 16;
static_assert(kFirstWord + kWords * 8 == kFrameBytes);

template <class T>
void put(FrameBytes& to, std::uint32_t at, T value) {
  for (std::uint32_t i = 0; i < sizeof(T); ++i) {
    to.bytes[at + i] = static_cast<unsigned char>(value >> 8 * i);
  }
}
template <class T>
T get(const FrameBytes& from, std::uint32_t at) {
  T value = 0;
  for (std::uint32_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(from.bytes[at + i]) << 8 * i);
  }
  return value;
}

const char* check_data(const CourierFrame& f, const ArenaShape& shape) {
  if (f.tag == kTagUnused) return "a slice of no key";
  if (f.step < f.base) return "a slice from before its key";
  const bool borrowed = f.location != 0;
  if (f.location > shape.pool_slots) return "a slice in a slot that is not there";
  if (f.bytes > (borrowed ? shape.pool_slot_bytes : shape.guaranteed_slot_bytes)) {
    return "a slice longer than its slot";
  }
  // step_flag() sets the lowest bit; the others of kFlagPlaces say where the slice lies.
  const std::uint64_t places = borrowed ? kFlagBorrowed : 0;
  if ((f.flag & 1) == 0 || (f.flag & kFlagPlaces) != places) return "a flag that is none";
  return nullptr;
}

}  // namespace

FrameBytes encode(const CourierFrame& f) {
  FrameBytes out;
  put(out, 0, kMagic);
  put(out, 1, static_cast<std::uint8_t>(f.type));
  put(out, 2, f.lane);
  put(out, 3, f.count);
  put(out, 4, f.src);
  put(out, 6, f.dst);
  put(out, 8, f.bytes);
  put(out, 12, f.location);
  for (std::uint32_t i = 0; i < CourierFrame::kMostCredits; ++i) {
    put(out, kFirstConnector + 2 * i, f.connectors[i]);
  }
  const bool credits = f.type == FrameType::kCredits;
  const std::uint64_t words[kWords] = {
      credits ? f.consumed[0] : f.step, credits ? f.consumed[1] : f.flag,
      credits ? f.consumed[2] : f.tag, credits ? f.consumed[3] : f.base, f.group};
  for (std::uint32_t i = 0; i < kWords; ++i) put(out, kFirstWord + 8 * i, words[i]);
  return out;
}

const char* decode(const FrameBytes& bytes, const ArenaShape& shape, CourierFrame* frame) {
  CourierFrame& f = *frame;
  f = {};
  if (bytes.bytes[0] != kMagic) return "something that is no frame";
  const auto type = get<std::uint8_t>(bytes, 1);
  if (type < static_cast<std::uint8_t>(FrameType::kData) ||
      type > static_cast<std::uint8_t>(FrameType::kBye)) {
    return "a frame of no type";
  }
  f.type = static_cast<FrameType>(type);
  f.lane = get<std::uint8_t>(bytes, 2);
  f.count = get<std::uint8_t>(bytes, 3);
  f.src = get<std::uint16_t>(bytes, 4);
  f.dst = get<std::uint16_t>(bytes, 6);
  f.bytes = get<std::uint32_t>(bytes, 8);
  f.location = get<std::uint32_t>(bytes, 12);
  for (std::uint32_t i = 0; i < CourierFrame::kMostCredits; ++i) {
    f.connectors[i] = get<std::uint16_t>(bytes, kFirstConnector + 2 * i);
  }
  std::uint64_t words[kWords];
  for (std::uint32_t i = 0; i < kWords; ++i) {
    words[i] = get<std::uint64_t>(bytes, kFirstWord + 8 * i);
  }
  if (f.type == FrameType::kCredits) {
    for (std::uint32_t i = 0; i < CourierFrame::kMostCredits; ++i) f.consumed[i] = words[i];
  } else {
    f.step = words[0], f.flag = words[1], f.tag = words[2], f.base = words[3];
  }
  f.group = words[4];

  // What the type does not use is 0: encode() makes the same bytes of what was read, so no bit of a
  // frame goes unread.
  CourierFrame used;
  used.type = f.type;
  if (f.type != FrameType::kBye) used.dst = f.dst;
  switch (f.type) {
    case FrameType::kData:
      used = f;
      used.count = 0;
      for (std::uint32_t i = 1; i < CourierFrame::kMostCredits; ++i) used.connectors[i] = 0;
      break;
    case FrameType::kCredits:
      used.lane = f.lane, used.src = f.src, used.count = f.count;
      if (f.count == 0 || f.count > CourierFrame::kMostCredits) return "credits of a wrong number";
      for (std::uint32_t i = 0; i < f.count; ++i) {
        used.connectors[i] = f.connectors[i], used.consumed[i] = f.consumed[i];
      }
      break;
    case FrameType::kUnlist:
      used.lane = f.lane, used.src = f.src, used.connectors[0] = f.connectors[0];
      used.tag = f.tag, used.base = f.base;
      break;
    case FrameType::kAnnounce:
      used.location = f.location, used.step = f.step;
      break;
    case FrameType::kBye:
      used.step = f.step;
      break;
  }
  const FrameBytes again = encode(used);
  for (std::uint32_t i = 0; i < kFrameBytes; ++i) {
    if (again.bytes[i] != bytes.bytes[i]) return "a frame that says more than its type can";
  }

  if (f.type == FrameType::kBye) return nullptr;
  if (f.dst >= shape.ranks) return "a frame for no rank";
  if (f.type == FrameType::kAnnounce) {
    return f.location < kAnnouncements ? nullptr : "an announcement of no place";
  }
  if (f.src >= shape.ranks || f.src == f.dst) return "a frame of no rank";
  if (f.lane >= shape.lanes) return "a frame for no lane";
  for (std::uint32_t i = 0; i < CourierFrame::kMostCredits; ++i) {
    if (f.connectors[i] >= shape.connectors) return "a frame for no connector";
  }
  if (f.type == FrameType::kUnlist && f.tag == kTagUnused) return "a frame of no key";
  return f.type == FrameType::kData ? check_data(f, shape) : nullptr;
}

}  // namespace unjam
