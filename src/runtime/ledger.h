// The ledger of a rank (transport/ledger.h), written by it, and read by those that outlive it.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "transport/ledger.h"

namespace unjam {

// The rank's own side. Used with its context's lock, but for `done`, see Daemon::completes().
class Ledger {
 public:
  // memory: zeros at first. nullptr: nothing is written down.
  explicit Ledger(LedgerMemory* memory) : memory_(memory), held_(kLedgerPlaces, false) {}

  // A key's place. What it says of the key from an earlier time stays. nullptr: there is none; then
  // the rank's end ends all of the key's calls.
  LedgerEntry* open(std::uint64_t tag, std::uint64_t group, std::uint64_t done);
  // The key is forgotten: what stands there stays until another one takes the place.
  void close(LedgerEntry* entry);

 private:
  LedgerMemory* const memory_;
  std::vector<bool> held_;
};

// Whether a rank, which may go on, has completed use n of a key.
bool has_completed(LedgerMemory& ledger, std::uint64_t tag, std::uint64_t n);

// What can still be had of a rank that is gone: its part of the calls that it had completed.
class Legacy {
 public:
  // What the ledger says, and what the rank itself has said as it left (key -> uses; may be null).
  Legacy(LedgerMemory& ledger, const std::map<std::uint64_t, std::uint64_t>* said);

  bool covers(std::uint64_t tag, std::uint64_t n) const;
  // Whether the rank is known to have called something else.
  bool differs(std::uint64_t tag, std::uint64_t n, std::uint64_t signature) const;
  // f(tag, uses) for each key of the group, until it says true. Then, or if not all keys' groups
  // are known: true.
  template <class F>
  bool any_of(std::uint64_t group, F f) const {
    if (!all_known_) return true;
    for (const auto& [tag, key] : keys_) {
      if (key.group == group && f(tag, key.done)) return true;
    }
    return false;
  }

 private:
  struct OfKey {
    std::uint64_t group = 0;
    std::uint64_t done = 0;
    std::uint64_t calls[kLedgerCalls] = {};
  };
  std::unordered_map<std::uint64_t, OfKey> keys_;  // by tag
  bool all_known_ = true;
};

}  // namespace unjam
