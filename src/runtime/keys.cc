// Keys of groups: found, made, registered, drained.
#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {

std::uint64_t key_tag(const unjamGroup& group, std::string_view key) {
  return hash_combine(group.tag, hash_bytes(key)) | 2;  // neither 0 nor 1, see arena.h
}

Key* Context::find_or_create_key(unjamGroup& group, const char* name, Result& result) {
  const std::string text = name == nullptr ? "" : name;
  const auto found = group.keys.find(text);
  if (found != group.keys.end()) return found->second.get();
  auto key = std::make_unique<Key>();
  key->name = text;
  key->group = &group;
  key->state.tag = key_tag(group, text);
  if (const auto other = keys_.find(key->state.tag); other != keys_.end()) {
    result = {UNJAM_ERROR_RESOURCES,
              name_text(text, group.name) + " and " +
                  name_text(other->second->name, other->second->group->name) +
                  " have the same 64-bit hash: rename one of them"};
    return nullptr;
  }
  const std::size_t lanes = memory_->rank().num_lanes, n = group.members.size();
  key->lanes.resize(lanes);
  key->out.resize(lanes * n);
  key->in.resize(lanes * n);
  for (std::size_t l = 0; l < lanes; ++l) {
    key->lanes[l].out = &key->out[l * n];
    key->lanes[l].in = &key->in[l * n];
  }
  key->state.lanes = key->lanes.data();
  Key* p = key.get();
  keys_.reserve(keys_.size() + 1);
  group.keys.emplace(text, std::move(key));
  keys_.emplace(p->state.tag, p);
  return p;
}

Result Context::register_collective(unjamGroup* group, const char* name, const Signature& signature,
                                    std::int32_t priority, unjamCollective** out) {
  Call probe;
  probe.signature = signature;
  if (Result r = validate(*group, probe); !r.ok()) return r;
  std::lock_guard lock(mutex_);
  if (closed_) return closed_why_;
  Result result;
  Key* key = find_or_create_key(*group, name, result);
  if (key == nullptr) return result;
  if (key->registered != nullptr) {
    return {UNJAM_ERROR_INVALID_USAGE,
            name_text(key->name, group->name) + " is registered already (as " +
                key->registered->signature.text() + "): deregister it first, or use another key"};
  }
  auto collective = std::make_unique<unjamCollective>();
  collective->group = group;
  collective->key = key;
  collective->signature = signature;
  collective->priority = priority;
  key->registered = *out = collective.get();
  collectives_.push_back(std::move(collective));
  return {};
}

Result Context::deregister(unjamCollective* collective) {
  std::lock_guard lock(mutex_);
  reap_locked();
  Key& key = *collective->key;
  if (key.submitted != key.completed) {
    return pending_error("a collective was to be deregistered", key.submitted - key.completed);
  }
  key.registered = nullptr;
  std::erase_if(collectives_, [&](const auto& c) { return c.get() == collective; });
  return {};
}

// All slices that the key has sent were consumed. Only while it has nothing in the engine.
bool Context::key_drained(Key& key) const {
  const std::size_t size = key.group->members.size();
  for (std::size_t l = 0; l < key.lanes.size(); ++l) {
    const LaneTransport& t = memory_->lane(static_cast<std::uint32_t>(l)).transport;
    for (std::size_t q = 0; q < size; ++q) {
      const auto peer = static_cast<std::uint32_t>(key.group->members[q]);
      if (peer != t.rank && !t.drained(peer, key.lanes[l].out[q])) return false;
    }
  }
  return true;
}

// Keys whose invocations are complete hold connectors while peers have to take their slices. Looked
// at only when connectors may run out.
void Context::retire_lingering() {
  std::erase_if(lingering_, [this](Key* key) {
    if (key->lingering) {
      if (!key_drained(*key)) return false;
      key->lingering = false;
      --lingering_keys_;
    }  // else it is in use again
    key->listed = false;
    return true;
  });
}

}  // namespace unjam
