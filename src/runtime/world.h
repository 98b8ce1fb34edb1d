// A job: the ranks that joined under one unique id, their arenas, and the watcher of their stalls.
// Ranks are contexts of this process in this version.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/waitfor.h"
#include "device/host/host_memory.h"
#include "runtime/settings.h"
#include "transport/arena.h"
#include "unjam/unjam.h"

namespace unjam {

class Context;
struct Signature;

// "key 'k' of group 'g', use 3"
std::string call_text(const std::string& key, const std::string& group, std::uint64_t n);

class World {
 public:
  World(int ranks, const Settings& first_settings);
  ~World();

  // Makes and looks up ids; an unknown or foreign id gives null and an error.
  static unjamUniqueId_t create_id();
  static std::shared_ptr<World> by_id(const unjamUniqueId_t& id, int ranks,
                                      const Settings& settings, unjamResult_t& code,
                                      std::string& error);

  int ranks() const { return ranks_; }
  const ArenaShape& shape() const { return shape_; }
  unsigned char* const* bases() const { return bases_.data(); }
  std::uint64_t arena_committed(int rank) const;
  // Where the members of a group announce their calls of a key, see transport/announcement.h.
  std::uint64_t* announcements(const std::vector<int>& members, std::uint64_t tag) const;

  // Contributes rank's arena; `settings` must agree with those of the ranks before.
  unjamResult_t join(int rank, const Settings& settings, std::string& error);
  // Waits until all ranks have joined.
  unjamResult_t wait_joined(std::int64_t timeout_ms, std::string& error);

  void attach(Context* context);
  // `calls`: how often the rank has called each key.
  void detach(Context* context, std::map<std::uint64_t, std::uint64_t> calls);
  // Ends other ranks' invocations in groups with `rank`. Not while holding a context's lock.
  void tell_peers_gone(int rank, const std::string& why);
  // Of `members`, the first that is gone in that way, and why; -1: none.
  int first_gone(const std::vector<int>& members, std::string& why) const;

  // Compares what `caller` is about to call as use n of a key with what other members have called.
  // If they differ: says how, and ends it on all of them. Not while holding a context's lock.
  std::string compare(const Context& caller, std::uint64_t tag, std::uint64_t n,
                      const Signature& signature, const std::vector<int>& members,
                      const std::string& what);

  std::string explain();

 private:
  void watch();
  void look_for_disagreement();
  void fail_everywhere(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
                       const std::string& text);

  const int ranks_;
  const Settings first_settings_;
  const ArenaShape shape_;
  std::vector<SharedMemory> arenas_;
  std::vector<unsigned char*> bases_;

  // Order of locks: a world's, then a context's.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> joined_;
  std::string first_agreed_;
  int first_rank_ = -1;
  int num_joined_ = 0;
  std::string failure_;
  std::vector<Context*> contexts_;  // by rank; null: not attached
  std::map<int, std::map<std::uint64_t, std::uint64_t>> departed_;
  std::map<int, std::string> gone_;  // aborted: rank -> why
  // Disagreements found, by tag: the first use, and how ranks disagree. For ranks that call later.
  std::map<std::uint64_t, std::pair<std::uint64_t, std::string>> disagreements_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace unjam
