// What a rank has behind it, for peers that outlive it: a table in the memory that it shares with
// them, of how many uses of each key it has completed.
//
// A rank that has completed its part of a call has posted all that it contributes, into memory of
// the receivers', and has taken all that it was sent. So nobody needs it any more for that call,
// and its end ends the call for nobody. Of any other call nobody can say how far it came.
//
// A death cannot tear what the table says. `done` is one word, stored (release) behind all that
// the last of the uses has posted: by the thread that completes it, which has acquired what other
// lanes have posted. Who reads it (acquire) finds the slices in their connectors. A place changes
// hands with `tag` 0 in between: a reader takes what stands there only if it finds the same tag
// before and after, and one that is 0 says nothing, which is as if the rank had not made the call.
#pragma once

#include <cstdint>

#include "base/atomics.h"

namespace unjam {

inline constexpr std::uint32_t kLedgerPlaces = 4096;
inline constexpr std::uint32_t kLedgerCalls = 5;

struct alignas(64) LedgerEntry {
  std::uint64_t tag;    // the key's; 0: nobody's
  std::uint64_t group;  // the tag of its group
  std::uint64_t done;   // uses that were completed with success: 0 to done - 1
  // Signatures of the latest uses, by number: who differs in them never finds the other's data.
  std::uint64_t calls[kLedgerCalls];
};
static_assert(sizeof(LedgerEntry) == 64);

struct alignas(64) LedgerMemory {
  std::uint64_t exits;  // not 0: the process ends by itself (exit(), the end of main())
  alignas(64) LedgerEntry entries[kLedgerPlaces];
};

// Where the ledger is in a rank's shared memory, behind so many bytes of other things; and how many
// bytes there are with it.
constexpr std::uint64_t ledger_offset(std::uint64_t before) {
  return (before + alignof(LedgerMemory) - 1) / alignof(LedgerMemory) * alignof(LedgerMemory);
}
constexpr std::uint64_t bytes_with_ledger(std::uint64_t before) {
  return ledger_offset(before) + sizeof(LedgerMemory);
}

// Of use n: its signature's hash, and n, by which a reader knows whether it stands there still.
inline std::uint64_t ledger_call(std::uint64_t n, std::uint64_t signature) {
  return (signature & ~std::uint64_t{0xffff}) | (n & 0xffff);
}

}  // namespace unjam
