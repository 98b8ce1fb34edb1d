// Keys of groups: found, made, registered; held while they must be, and forgotten.
//
// A key is an object of some kilobytes, of which the engine holds pointers, and connectors at its
// peers. Of keys that were not used for long only a record stays: the number of their uses, so that
// the next one is matched with the peers' next one. What the way back needs beyond that is in the
// arenas: a reader that has forgotten how far it was reads its own credits (LaneTransport::find).
//
// The engine lets go of a key by a command that goes the way of invocations (KeyRelease): it is
// fetched by each lane after all that was submitted before, and before all that is submitted later.
// So the key may be used again at once, as a new object: a lane that meets that one has released
// the former one's connectors already. The former object lives until the command's completion.
#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "runtime/call_checks.h"
#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {
namespace {

constexpr std::size_t kBatch = 64;          // keys that one command is about
constexpr std::size_t kFew = 16;            // too few to send a command for
constexpr std::size_t kFormerKeys = 65536;  // of destroyed groups, remembered

// Of the name, independent of the tag: tells a key that comes back from one with the same tag.
std::uint32_t name_check(std::string_view name) {
  return static_cast<std::uint32_t>(hash_bytes(name, 0x636865636bull));
}

}  // namespace

std::uint64_t key_tag(const unjamGroup& group, std::string_view key) {
  return hash_combine(group.tag, hash_bytes(key)) | 2;  // neither 0 nor 1, see arena.h
}

Key::~Key() {
  if (keeper != nullptr) keeper->return_key(engine_state);
}

void Key::remember(std::uint64_t n, const Signature& signature) {
  if (history.size() < kPlaces) {
    history.push_back(signature);
  } else {
    history[(n - first) % kPlaces] = signature;
  }
}

void Key::take_back(std::uint64_t n) {
  if (history.size() == n - first + 1) history.pop_back();
}

const Signature* Key::recall(std::uint64_t n) const {
  if (n < first || n >= submitted || submitted - n > std::min(history.size(), kHistory)) {
    return nullptr;
  }
  return &history[(n - first) % kPlaces];
}

std::uint64_t Key::bytes() const {
  // Nodes of the containers that find it, roughly.
  constexpr std::uint64_t kNodes = 128;
  return sizeof(Key) + kNodes + 2 * name.capacity() + lanes.capacity() * sizeof(LaneKey) +
         out.capacity() * sizeof(OutEndpoint) + in.capacity() * sizeof(InEndpoint) +
         settled.capacity() * sizeof(std::uint64_t) + history.capacity() * sizeof(Signature) +
         (plan == nullptr ? 0 : sizeof(Plan) + plan->primitives.capacity() * sizeof(Primitive));
}

// CUDA: the place on the device that the key's state has. May take completions.
bool Context::take_device_key(Key& key, Result& result) {
  KeyState* state = streams_->take_key(key.engine_lanes);
  if (state == nullptr) {
    take_completions();  // of the command, perhaps, that lets go of keys
    state = streams_->take_key(key.engine_lanes);
  }
  if (state == nullptr) {
    const bool soon = dropping_ != nullptr || keys_at(KeyList::kDoomed) != 0;
    result = {UNJAM_ERROR_RESOURCES,
              "there is device memory for " + std::to_string(device_keys(settings_)) +
                  " keys of this rank, and " +
                  (soon ? "the engine has yet to let go of some that are out of use: call again "
                          "soon, or raise UNJAM_IDLE_KEYS"
                        : "all are in use: use fewer names, or raise UNJAM_IDLE_KEYS"),
              /*transient=*/soon};
    return false;
  }
  key.keeper = streams_;
  key.engine_state = state;
  return true;
}

Key* Context::find_or_create_key(unjamGroup& group, const char* name, Result& result) {
  const std::string text = name == nullptr ? "" : name;
  const auto found = group.keys.find(text);
  if (found != group.keys.end()) return found->second.get();
  if (group.destroyed) {
    result = {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    return nullptr;
  }
  tidy();
  std::unique_ptr<Key> key = make_key(group, text, result);
  if (key == nullptr) return nullptr;
  Key& added = add_key(group, std::move(key));
  const auto record = records_.find(added.state.tag);
  if (record == records_.end()) {
    open_ledger(added, 0);
    return &added;
  }
  resume(added, record->second);
  records_.erase(record);
  move_key(added, resting_place(added));  // one that has failed is only asked for its error
  return &added;
}

std::unique_ptr<Key> Context::make_key(unjamGroup& group, const std::string& text, Result& result) {
  auto key = std::make_unique<Key>();
  if (cuda()) {
    // In front of all lookups below, for taking completions tidies up, too.
    if (!take_device_key(*key, result)) return nullptr;
  }
  key->name = text;
  key->group = &group;
  key->state.tag = key_tag(group, text);
  key->state.group = group.tag;
  if (const std::string other = same_tag(*key); !other.empty()) {
    result = {UNJAM_ERROR_RESOURCES, name_text(text, group.name) + " and " + other +
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
  if (!cuda()) {
    key->engine_state = &key->state;
    key->engine_lanes = key->lanes.data();
  }
  return key;
}

std::string Context::same_tag(const Key& key) const {
  if (const auto other = keys_.find(key.state.tag); other != keys_.end()) {
    return name_text(*other->second);
  }
  const auto record = records_.find(key.state.tag);
  const bool another = record != records_.end() && (record->second.group != key.group ||
                                                    record->second.check != name_check(key.name));
  return another ? "a key used earlier" : "";
}

Key& Context::add_key(unjamGroup& group, std::unique_ptr<Key> key) {
  Key* p = key.get();
  const std::string text = p->name;
  std::list<Key*>& idle = key_lists_[static_cast<std::size_t>(KeyList::kIdle)];
  p->at = idle.insert(idle.end(), p);
  try {
    keys_.reserve(keys_.size() + 1);
    group.keys.emplace(text, std::move(key));
    const auto record = records_.find(p->state.tag);
    if (record != records_.end() && record->second.failure != nullptr && !record->second.voided) {
      failing_.push_back(p);
    }
    keys_.emplace(p->state.tag, p);
  } catch (...) {
    std::erase(failing_, p);
    idle.erase(p->at);
    group.keys.erase(text);
    throw;
  }
  ++group.in_use;
  return *p;
}

void Context::open_ledger(Key& key, std::uint64_t done) {
  const bool alone = key.group->members.size() == 1;
  key.ledger = alone ? nullptr : ledger_->open(key.state.tag, key.group->tag, done);
}

void Context::resume(Key& key, KeyRecord& record) {
  open_ledger(
      key, record.failure == nullptr ? record.uses : std::min(record.uses, record.failure->from));
  key.submitted = key.completed = key.first = key.state.done = record.uses;
  key.voided = record.voided;
  if (record.failure != nullptr) {
    key.failed_from = record.failure->from;
    key.failed = std::move(record.failure->why);
  }
}

Result Context::register_collective(unjamGroup* group, const char* name, const Signature& signature,
                                    std::int32_t priority, unjamCollective** out) {
  if (signature.kind == Kind::kBarrier || signature.kind == Kind::kSendRecv) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            std::string("a ") + to_string(signature.kind) +
                " is not registered: call it (unjamBarrier, unjamSend, unjamRecv) each time"};
  }
  Call probe;
  probe.signature = signature;
  if (Result r = check_call(*group, probe); !r.ok()) return r;
  std::lock_guard lock(mutex_);
  if (closed()) return closed_why_;
  Result result;
  Key* key = find_or_create_key(*group, name, result);
  if (key == nullptr) return result;
  if (key->registered != nullptr) {
    return {UNJAM_ERROR_INVALID_USAGE, name_text(key->name, group->name) +
                                           " is registered already (as " +
                                           key->registered->signature.text(false) +
                                           "): deregister it first, or use another key"};
  }
  auto collective = std::make_unique<unjamCollective>();
  collective->group = group;
  collective->key = key;
  collective->signature = signature;
  collective->priority = priority;
  key->registered = *out = collective.get();
  if (key->list == KeyList::kIdle || key->list == KeyList::kDoomed) {
    move_key(*key, KeyList::kRegistered);
  }
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
  if (key.list == KeyList::kRegistered) move_key(key, resting_place(key));
  std::erase_if(collectives_, [&](const auto& c) { return c.get() == collective; });
  return {};
}

// ---- where a key stands ----

void Context::move_key(Key& key, KeyList which, bool front) {
  std::list<Key*>& to = key_lists_[static_cast<std::size_t>(which)];
  to.splice(front ? to.begin() : to.end(), key_lists_[static_cast<std::size_t>(key.list)], key.at);
  key.list = which;
  if (which == KeyList::kBusy) key.settled.clear();
}

void Context::rest(Key& key) { move_key(key, KeyList::kLingering); }

KeyList Context::resting_place(const Key& key) const {
  if (key.registered != nullptr) return KeyList::kRegistered;
  const bool hopeless = key.over() || key.group->destroyed || !key.group->failed.ok();
  return hopeless ? KeyList::kDoomed : KeyList::kIdle;
}

// No peer has slices of the key to consume. Only while it has nothing in the engine. What is found
// of a peer stays true as long: credits grow, and a mark that says "void" is never taken back
// (though another may replace it, so it is remembered here).
bool Context::settled(Key& key) const {
  // The device's endpoints are not seen from here: the lanes look, as they let go of them.
  if (cuda()) return true;
  const unjamGroup& group = *key.group;
  key.settled.resize((group.members.size() + 63) / 64);
  for (std::size_t q = 0; q < group.members.size(); ++q) {
    std::uint64_t& word = key.settled[q / 64];
    const std::uint64_t bit = std::uint64_t{1} << q % 64;
    const auto peer = static_cast<std::uint32_t>(group.members[q]);
    // Who is gone takes nothing any more. It may still be reading, though, so its connectors stay
    // as they are (LaneTransport::release).
    if (group.members[q] == rank_ || (word & bit) != 0 || gone_[peer]) continue;
    for (std::size_t l = 0; l < key.lanes.size(); ++l) {
      const LaneTransport& t = memory_->lane(static_cast<std::uint32_t>(l)).transport;
      if (!t.drained(peer, key.lanes[l].out[q]) && !t.voided(peer, key.state.tag) &&
          !t.voided(peer, group.tag)) {
        return false;
      }
    }
    word |= bit;
  }
  return true;
}

void Context::retire_lingering(std::size_t looks) {
  std::list<Key*>& lingering = key_lists_[static_cast<std::size_t>(KeyList::kLingering)];
  for (looks = std::min(looks, lingering.size()); looks != 0; --looks) {
    Key& key = *lingering.front();
    move_key(key, settled(key) ? resting_place(key) : KeyList::kLingering);
  }
}

// ---- forgetting ----

void Context::tidy() {
  if (closed_ || memory_ == nullptr) return;
  // As many as complete, on the whole: the list stays short.
  retire_lingering(1);
  const auto limit = static_cast<std::size_t>(settings_.idle_keys);
  const std::size_t kept = keys_at(KeyList::kLingering) + keys_at(KeyList::kIdle);
  // What a CUDA rank's peers have yet to take is not known here: nothing idle is forgotten there.
  const bool many = kept >= limit + kFew && !cuda();
  if (!many && keys_at(KeyList::kDoomed) == 0 && failing_.empty() && failing_records_.empty() &&
      voiding_.empty()) {
    return;
  }
  // One command at a time, and only into the half of the slots that successors may use too: a key's
  // first use always finds one.
  if (dropping_ != nullptr || free_slots_.size() <= slots_.size() / 2) return;
  if (many) retire_lingering(2 * kBatch);
  auto drop = std::make_unique<KeyDrop>();
  drop->releases.reserve(4 * kBatch);
  drop->keys.reserve(kBatch);
  drop->groups.reserve(2 * kBatch);
  collect_marks(*drop);
  collect_keys(*drop);
  if (drop->releases.empty()) return;

  const std::uint16_t slot = free_slots_.back();
  free_slots_.pop_back();
  dropping_ = std::move(drop);
  Invocation command;
  command.input = dropping_->releases.data();
  command.n = dropping_->releases.size();
  command.geometry.first_lane = 0;
  command.geometry.lanes = static_cast<std::uint16_t>(memory_->rank().num_lanes);
  command.slot = slot;
  // A stream may have yet to see that the slot's former invocation has ended: the number it looks
  // for must not be taken back.
  command.serial = ++serials_;
  store_release<std::uint32_t>(memory_->rank().cancelled[slot], 0);
  daemon_->completes(slot, nullptr, 0);
  daemon_->submit(command, nullptr);
  daemon_->ring(0);
}

// What this rank will never read again: its peers may reuse the connectors. Not before everything
// of it that was under way here has completed: then no lane reads a slot of it, nor ever will,
// since later uses are refused.
void Context::collect_marks(KeyDrop& drop) {
  const auto mark = [&](const unjamGroup& group, std::uint64_t tag) {
    KeyRelease r;
    r.members = group.members16.data();
    r.group_size = static_cast<std::uint32_t>(group.members16.size());
    r.void_tag = tag;
    drop.releases.push_back(r);
  };
  // Each mark's group stays until the command is complete: by the key, or by a count.
  for (std::size_t looks = std::min(failing_.size(), kBatch); looks != 0; --looks) {
    Key& key = *failing_.front();
    failing_.pop_front();
    if (key.list == KeyList::kBusy || !key.over() || !hears_marks(*key.group)) {
      failing_.push_back(&key);  // it has uses before the one that failed
      continue;
    }
    mark(*key.group, key.state.tag);
    key.voided = true;
    if (key.list == KeyList::kIdle) move_key(key, resting_place(key));
  }
  for (std::size_t i = 0; i < kBatch && !failing_records_.empty(); ++i) {
    const auto record = records_.find(failing_records_.back());
    const bool is_due = record != records_.end() && !record->second.voided;
    if (is_due && !hears_marks(*record->second.group)) break;
    failing_records_.pop_back();
    if (!is_due) continue;
    unjamGroup& group = *record->second.group;
    mark(group, record->first);
    record->second.voided = true;
    ++group.in_use;
    drop.groups.push_back(&group);
  }
  std::erase_if(voiding_, [&](unjamGroup* group) {
    if (group->pending != 0 || drop.groups.size() == drop.groups.capacity()) return false;
    if (!hears_marks(*group)) return false;
    mark(*group, group->tag);
    drop.groups.push_back(group);  // counted since release_group()
    return true;
  });
}

void Context::collect_keys(KeyDrop& drop) {
  const auto from = [&](KeyList which, std::size_t count) {
    std::list<Key*>& list = key_lists_[static_cast<std::size_t>(which)];
    for (std::size_t looks = std::min(count, list.size());
         looks != 0 && drop.keys.size() != drop.keys.capacity(); --looks) {
      Key& key = *list.front();
      if (!forget(drop, key)) move_key(key, which);  // pinned: later
    }
  };
  from(KeyList::kDoomed, kBatch);
  const auto limit = static_cast<std::size_t>(settings_.idle_keys);
  const std::size_t kept = keys_at(KeyList::kLingering) + keys_at(KeyList::kIdle);
  if (kept > limit && !cuda()) from(KeyList::kIdle, kept - limit);
}

bool Context::forget(KeyDrop& drop, Key& key) {
  if (key.pins != 0 || (key.over() && !key.voided)) return false;
  unjamGroup& group = *key.group;
  const std::uint64_t tag = key.state.tag;
  if (group.destroyed) {
    former_.emplace_back(tag, key.submitted);
    if (former_.size() > kFormerKeys) former_.pop_front();
  } else if (key.submitted != 0 || key.failed_from != UINT64_MAX) {
    KeyRecord r;
    r.group = &group;
    r.uses = key.submitted;
    r.check = name_check(key.name);
    r.voided = key.voided;
    if (key.failed_from != UINT64_MAX) {
      r.failure = std::make_unique<KeyRecord::Failure>(key.failed_from, key.failed);
    }
    records_.insert_or_assign(tag, std::move(r));
  }
  if (key.failed_from != UINT64_MAX && !key.voided) std::erase(failing_, &key);
  KeyRelease r;
  r.lanes = key.engine_lanes;
  r.members = group.members16.data();
  r.group_size = static_cast<std::uint32_t>(group.members16.size());
  r.settled = key.settled.empty() ? nullptr : key.settled.data();
  drop.releases.push_back(r);  // there is room, as in `keys`
  ledger_->close(key.ledger);
  key_lists_[static_cast<std::size_t>(key.list)].erase(key.at);
  keys_.erase(tag);
  const auto owned = group.keys.find(key.name);
  drop.keys.push_back(std::move(owned->second));
  group.keys.erase(owned);
  ++forgotten_;
  return true;
}

// The engine has carried out the command.
void Context::dropped() {
  const std::unique_ptr<KeyDrop> drop = std::move(dropping_);
  const auto leave = [](unjamGroup& group) {
    if (--group.in_use != 0 || !group.destroyed) return;
    // Nobody has pointers into it any more; the handle stays, for refusals.
    decltype(group.keys)().swap(group.keys);
    group.members.clear();
    group.members.shrink_to_fit();
    group.members16.clear();
    group.members16.shrink_to_fit();
  };
  for (const auto& key : drop->keys) leave(*key->group);
  for (unjamGroup* group : drop->groups) leave(*group);
}

// No call of the group's keys is accepted any more.
void Context::release_group(unjamGroup& group) {
  if (!group.voids) {
    voiding_.push_back(&group);
    ++group.in_use;
    group.voids = true;
  }
  if (!group.destroyed) return;
  for (auto& [name, key] : group.keys) {
    if (key->registered != nullptr) key->registered->key = nullptr;
    key->registered = nullptr;
    const KeyList which =
        key->list == KeyList::kLingering ? KeyList::kLingering : resting_place(*key);
    move_key(*key, which, true);  // looked at first
  }
  std::erase_if(records_, [&](const auto& record) {
    if (record.second.group != &group) return false;
    former_.emplace_back(record.first, record.second.uses);
    if (former_.size() > kFormerKeys) former_.pop_front();
    return true;
  });
}

// A use of a key failed that was forgotten here.
void Context::fail_record(const FailureNotice& notice) {
  const auto found = records_.find(notice.tag);
  if (found == records_.end() || !notice.is_heeded_by(*found->second.group)) return;
  KeyRecord& r = found->second;
  if (first_error_.ok()) first_error_ = notice.why;
  if (r.failure != nullptr && notice.n >= r.failure->from) return;
  r.failure = std::make_unique<KeyRecord::Failure>(notice.n, notice.why);
  if (r.uses >= notice.n && !r.voided) failing_records_.push_back(notice.tag);
}

// How often this rank has called a key, also one that it has forgotten.
std::uint64_t Context::uses_of(std::uint64_t tag) const {
  if (const auto key = keys_.find(tag); key != keys_.end()) return key->second->submitted;
  if (const auto record = records_.find(tag); record != records_.end()) return record->second.uses;
  const auto former = std::find_if(former_.begin(), former_.end(),
                                   [&](const auto& key) { return key.first == tag; });
  return former == former_.end() ? 0 : former->second;
}

std::map<std::uint64_t, std::uint64_t> Context::call_counts() const {
  std::map<std::uint64_t, std::uint64_t> calls(former_.begin(), former_.end());
  for (const auto& [tag, record] : records_) calls[tag] = record.uses;
  for (const auto& [tag, key] : keys_) calls[tag] = key->submitted;
  return calls;
}

}  // namespace unjam
