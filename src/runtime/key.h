// What a rank holds of a key: its numbering, its engine's state, and the calls that wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/daemon.h"
#include "plan/lower.h"
#include "plan/plan.h"
#include "runtime/call.h"
#include "runtime/ledger.h"
#include "runtime/result.h"
#include "runtime/signature.h"
#include "unjam/unjam.h"

namespace unjam {

// What a rank holds of a key, and why.
enum class KeyList : std::uint8_t {
  kBusy,        // has invocations under way: counts towards max_active_keys
  kLingering,   // has none, but peers may have slices of it to consume
  kIdle,        // may be forgotten, the longest idle first
  kRegistered,  // idle, but kept for its unjamCollective
  kDoomed,      // idle and never to be used again (failed, or its group destroyed)
};
inline constexpr std::size_t kKeyLists = 5;

struct Key {
  std::string name;
  unjamGroup* group = nullptr;
  // On the host the engine's; with CUDA what its state begins as, which it has elsewhere.
  KeyState state;
  std::vector<LaneKey> lanes;
  std::vector<OutEndpoint> out;
  std::vector<InEndpoint> in;
  KeyState* engine_state = nullptr;
  LaneKey* engine_lanes = nullptr;
  StreamDaemon* keeper = nullptr;  // of engine_state, with CUDA
  bool fresh = true;               // the engine has yet to set up its state
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::uint64_t first = 0;  // the use at which this rank has met the key, or met it again
  std::uint32_t in_engine = 0;
  std::uint32_t pins = 0;  // calls under way that hold a pointer: not to be forgotten
  bool launching = false;  // a thread queues its last use in a stream, see admit_in_stream()
  std::deque<std::unique_ptr<Submitted>> waiting;  // successors kept out of the engine
  // Of a channel to oneself: calls whose other one is still to come, all sends or all receives.
  std::deque<std::unique_ptr<Submitted>> halves;
  Result failed;                           // an invocation failed, and with it all from
  std::uint64_t failed_from = UINT64_MAX;  // this use on; earlier ones go on
  LedgerEntry* ledger = nullptr;           // of this rank's; nullptr: it had no place
  bool voided = false;  // peers know that this rank will never read the key again
  // While not busy: group ranks known to have no slices to consume, 64 in a word; none: nobody.
  std::vector<std::uint64_t> settled;
  KeyList list = KeyList::kIdle;
  std::list<Key*>::iterator at;  // in Context::key_lists_
  unjamCollective* registered = nullptr;
  // The last plan: most keys repeat one call.
  Signature planned_for;
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const Lowered> lowered;  // what the plan is without the engine, of GPUs
  bool met = false;                        // its neighbours, see Context::meet_neighbours()
  // Signatures of the latest kHistory uses since `first`, for ranks that disagree: use n stands at
  // (n - first) % kPlaces. One more than that, so that the last one can be taken back.
  static constexpr std::size_t kHistory = 32, kPlaces = kHistory + 1;
  std::vector<Signature> history;

  Key() = default;
  ~Key();
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  void remember(std::uint64_t n, const Signature& signature);
  void take_back(std::uint64_t n);  // the last one
  const Signature* recall(std::uint64_t n) const;
  // Every use from now on is refused.
  bool over() const { return submitted >= failed_from; }
  bool busy() const { return in_engine != 0 || !waiting.empty() || !halves.empty(); }
  std::uint64_t bytes() const;
};

// What stays of a key that was forgotten: it comes back with the same numbering.
struct KeyRecord {
  unjamGroup* group = nullptr;
  std::uint64_t uses = 0;
  std::uint32_t check = 0;  // of the name, beyond the tag
  bool voided = false;
  struct Failure {
    std::uint64_t from;
    Result why;
  };
  std::unique_ptr<Failure> failure;
};

// Keys that the engine has been told to let go of, until it has.
struct KeyDrop {
  std::vector<KeyRelease> releases;
  std::vector<std::unique_ptr<Key>> keys;
  std::vector<unjamGroup*> groups;  // that marks are about
};

// What peers and traces know a key by.
std::uint64_t key_tag(const unjamGroup& group, std::string_view key);

}  // namespace unjam
