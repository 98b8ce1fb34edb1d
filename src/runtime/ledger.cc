#include "runtime/ledger.h"

#include <algorithm>
#include <cstddef>

#include "base/hash.h"

namespace unjam {
namespace {

constexpr std::uint32_t kLooks = 16;  // places that a key may have

}  // namespace

LedgerEntry* Ledger::open(std::uint64_t tag, std::uint64_t group, std::uint64_t done) {
  if (memory_ == nullptr) return nullptr;
  const std::uint64_t home = mix64(tag);
  std::size_t empty = kLedgerPlaces, left = kLedgerPlaces;
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    const std::size_t at = (home + i) % kLedgerPlaces;
    LedgerEntry& e = memory_->entries[at];
    if (load_relaxed(e.tag) == tag) {
      held_[at] = true;
      return &e;
    }
    if (load_relaxed(e.tag) == 0) {
      if (empty == kLedgerPlaces) empty = at;
    } else if (!held_[at] && left == kLedgerPlaces) {
      left = at;
    }
  }
  const std::size_t at = empty != kLedgerPlaces ? empty : left;
  if (at == kLedgerPlaces) return nullptr;
  LedgerEntry& e = memory_->entries[at];
  // The order is argued in transport/ledger.h. (Each of these releases: what comes first here is
  // seen first.)
  store_release<std::uint64_t>(e.tag, 0);
  store_release(e.group, group);
  store_release(e.done, done);
  for (std::uint64_t& call : e.calls) store_release<std::uint64_t>(call, 0);
  store_release(e.tag, tag);
  held_[at] = true;
  return &e;
}

void Ledger::close(LedgerEntry* entry) {
  if (entry != nullptr) held_[static_cast<std::size_t>(entry - memory_->entries)] = false;
}

bool has_completed(LedgerMemory& ledger, std::uint64_t tag, std::uint64_t n) {
  const std::uint64_t home = mix64(tag);
  for (std::uint32_t i = 0; i < kLooks; ++i) {
    LedgerEntry& e = ledger.entries[(home + i) % kLedgerPlaces];
    if (load_acquire(e.tag) != tag) continue;
    const std::uint64_t done = load_acquire(e.done);
    return load_acquire(e.tag) == tag && done > n;
  }
  return false;
}

Legacy::Legacy(LedgerMemory& ledger, const std::map<std::uint64_t, std::uint64_t>* said) {
  for (LedgerEntry& e : ledger.entries) {
    const std::uint64_t tag = load_acquire(e.tag);
    if (tag == 0) continue;
    OfKey key;
    // Acquire: what the tag is looked at behind, below.
    key.group = load_acquire(e.group);
    key.done = load_acquire(e.done);
    for (std::uint32_t i = 0; i < kLedgerCalls; ++i) key.calls[i] = load_acquire(e.calls[i]);
    if (load_acquire(e.tag) == tag && key.done != 0) keys_[tag] = key;
  }
  if (said == nullptr) return;
  for (const auto& [tag, uses] : *said) {
    if (uses == 0) continue;
    const auto [at, unknown] = keys_.try_emplace(tag);
    if (unknown) all_known_ = false;
    at->second.done = std::max(at->second.done, uses);
  }
}

bool Legacy::covers(std::uint64_t tag, std::uint64_t n) const {
  const auto found = keys_.find(tag);
  return found != keys_.end() && found->second.done > n;
}

bool Legacy::differs(std::uint64_t tag, std::uint64_t n, std::uint64_t signature) const {
  const auto found = keys_.find(tag);
  if (found == keys_.end()) return false;
  const std::uint64_t call = found->second.calls[n % kLedgerCalls];
  return call != 0 && (call & 0xffff) == (n & 0xffff) && call != ledger_call(n, signature);
}

}  // namespace unjam
