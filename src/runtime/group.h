// A group of ranks, and a collective that is registered in one: what the C API's handles point to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/host_table.h"
#include "runtime/ending.h"
#include "runtime/key.h"
#include "runtime/result.h"
#include "runtime/signature.h"
#include "unjam/unjam.h"

namespace unjam {
class Context;
}  // namespace unjam

struct unjamGroup {
  std::shared_ptr<unjam::Context> context;
  std::string name;
  std::uint64_t tag = 0;
  int rank = 0;
  std::vector<int> members;              // world ranks
  std::vector<std::uint16_t> members16;  // the same, for the engine
  // Which host each member is on; nothing: all are on one, or it is a channel.
  std::optional<unjam::HostTable> hosts;
  std::unordered_map<std::string, std::unique_ptr<unjam::Key>> keys;
  std::size_t pending = 0;
  bool destroyed = false;
  unjam::Result failed;  // a member is gone
  // Members that are gone, and what can still be had of them; see ending.h.
  struct Gone {
    int rank = 0;
    unjam::Result why;
    std::shared_ptr<const unjam::Legacy> legacy;
    std::vector<int> given_up;  // members who have met that, see Context::give_up()
  };
  std::vector<Gone> gone;
  bool voids = false;  // to be marked as never read again, once nothing is pending
  // What the engine may still look at: keys, and marks that are under way.
  std::size_t in_use = 0;
  // Sends and receives use channels: groups of two, the sender first, one for each direction
  // between two members, made at the first use (locally, with a tag that both compute alike) and
  // destroyed with their group. So they are matched, fail, and are forgotten as collectives are,
  // and apart from those of the group.
  std::map<std::pair<int, int>, unjamGroup*> channels;  // by (sender, receiver), group ranks
  unjamGroup* parent = nullptr;                         // a channel's group
  int source = 0, destination = 0;                      // a channel's, in the parent's ranks

  // The channel of a rank's messages to itself: of one member.
  bool is_own() const { return parent != nullptr && source == destination; }
};

struct unjamCollective {
  unjamGroup* group = nullptr;
  unjam::Key* key = nullptr;   // nullptr: the group was destroyed
  unjam::Signature signature;  // count unused
  std::int32_t priority = 0;
};
