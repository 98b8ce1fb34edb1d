// Windows: memory of a rank's user, outside of its arena, that peers may store results into
// (unjamMemRegister()), as its peers see it (docs/internals/windows.md).
//
// A window has a serial number that its rank gives once only. Each rank has a table of where its
// peers' windows are mapped for it; a window's place there is the low bits of its number. The host
// writes tables, engines look a window up once for each invocation that invites into it
// (connector.h). What is not in the table is not stored into: the slices go through slots.
//
// A table is the host's memory, which a GPU's lanes read slowly. What they find they note in a
// table in their own memory. That is never stale: a window's mapping stays as it is until its owner
// takes the window back, and then nobody invites into it.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

inline constexpr std::uint32_t kWindows = 64;  // of a rank at a time

// Where an output is, in 64 bits: so many bytes behind the beginning of its rank's arena; or, with
// the top bit, a window's number and so many units behind the window's beginning, which is rounded
// down to a unit. (What does not begin on a unit is not invited to: peers do not store where they
// cannot do so in wide accesses.) 0: where no peer may store.
inline constexpr std::uint64_t kPlaceInWindow = std::uint64_t{1} << 63;
inline constexpr unsigned kPlaceUnitBits = 4, kPlaceOffsetBits = 36;
inline constexpr std::uint64_t kPlaceUnit = std::uint64_t{1} << kPlaceUnitBits;
inline constexpr std::uint64_t kMostWindowBytes = std::uint64_t{1}
                                                  << (kPlaceOffsetBits + kPlaceUnitBits);
inline constexpr std::uint64_t kLastWindowSerial =
    (std::uint64_t{1} << (63 - kPlaceOffsetBits)) - 1;

UNJAM_HD constexpr bool in_window(std::uint64_t place) { return (place & kPlaceInWindow) != 0; }
// offset: a multiple of kPlaceUnit.
UNJAM_HD constexpr std::uint64_t place_in_window(std::uint64_t serial, std::uint64_t offset) {
  return kPlaceInWindow | serial << kPlaceOffsetBits | offset >> kPlaceUnitBits;
}
UNJAM_HD constexpr std::uint64_t window_of(std::uint64_t place) {
  return (place & ~kPlaceInWindow) >> kPlaceOffsetBits;
}
UNJAM_HD constexpr std::uint64_t offset_in_window(std::uint64_t place) {
  return (place & ((std::uint64_t{1} << kPlaceOffsetBits) - 1)) << kPlaceUnitBits;
}

// Of one window, in a rank's table: [rank of the owner][serial % kWindows].
struct alignas(16) WindowEntry {
  static constexpr std::uint64_t kBeingWritten = ~std::uint64_t{0};
  std::uint64_t serial = 0;       // 0: nobody's
  unsigned char* base = nullptr;  // the window's beginning, rounded down to a unit, as mapped here

  // Host's tables: by one thread at a time.
  void clear() { store_relaxed(serial, std::uint64_t{0}); }
  void set(std::uint64_t of, unsigned char* at) {
    clear();
    // Release: who sees this base sees that the entry is no longer the former window's.
    store_release(base, at);
    // Release: who sees the number sees the base.
    store_release(serial, of);
  }
  // What a GPU's lanes have found: by any number of threads. An entry's numbers only grow, so that
  // a reader who finds the same one twice has read its base in between.
  UNJAM_HD void note(std::uint64_t of, unsigned char* at) {
    const std::uint64_t was = load_relaxed(serial);
    if (was >= of || !compare_exchange(serial, was, kBeingWritten)) return;
    // Both as in set(); the exchange stands for clear().
    store_release(base, at);
    store_release(serial, of);
  }
  // Of the window with this number; nullptr: it is not in here.
  UNJAM_HD unsigned char* find(std::uint64_t of) {
    // Acquire: the base is this window's, or a later one's.
    if (load_acquire(serial) != of) return nullptr;
    // Acquire: if it is a later one's, that the entry was cleared before is seen below.
    unsigned char* const at = load_acquire(base);
    return load_relaxed(serial) == of ? at : nullptr;
  }
};

// Where that is, of `peer`'s output; nullptr: this rank cannot store there. `noted`: a table in the
// GPU's memory, if there is one.
UNJAM_HD inline unsigned char* find_in_window(WindowEntry* table, WindowEntry* noted,
                                              std::uint32_t peer, std::uint64_t place) {
  if (table == nullptr) return nullptr;
  const std::uint64_t serial = window_of(place);
  const std::uint64_t at = std::uint64_t{peer} * kWindows + serial % kWindows;
  unsigned char* base = noted != nullptr ? noted[at].find(serial) : nullptr;
  if (base == nullptr) {
    base = table[at].find(serial);
    if (base == nullptr) return nullptr;
    if (noted != nullptr) noted[at].note(serial, base);
  }
  return base + offset_in_window(place);
}

}  // namespace unjam
