// How collectives that are called in the callbacks of futures find each other.
//
// A callback that is added with then() runs when the operation is complete: in another thread, or
// in the one that adds it if that was the case already. So which calls it comes between is not the
// same on all ranks, and what it calls may not be matched by its order among them. It is matched by
// what is the same everywhere: that it is called by a callback of this very operation.
// The rules are at class Operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "key.h"

namespace unjam_torch {

// ThreadKey::context where collectives are refused, and why.
// kUnordered: nothing tells in which order callbacks in this thread come. (A key tells it.)
// kCrowded: another context has the name. kDeep: there are too many contexts in contexts.
inline constexpr const char* kUnordered = "!unordered";
inline constexpr const char* kCrowded = "!crowded";
inline constexpr const char* kDeep = "!deep";

// FNV-1a, in 16 digits: the same on all ranks.
inline std::string hashed(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

// The numbers of the operations of one group and key, outside of callbacks or in one of them, and
// which operation has which name.
class Names {
 public:
  static constexpr std::uint64_t kNames = 256;

  std::uint64_t next_number() {
    const std::lock_guard lock(mutex_);
    return numbers_++;
  }
  // False: the name is another operation's.
  bool claim(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    if (places_.empty()) places_.resize(kNames);
    Place& place = places_[number % kNames];
    if (place.bearer != number && (place.callbacks != 0 || place.bearer > number)) return false;
    place.bearer = number;
    ++place.callbacks;
    return true;
  }
  void release(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    --places_[number % kNames].callbacks;
  }

 private:
  struct Place {
    std::uint64_t bearer = 0;
    std::size_t callbacks = 0;  // of it, or of what those call, that have not ended
  };
  std::mutex mutex_;
  std::uint64_t numbers_ = 0;
  std::vector<Place> places_;
};

// Names by key.
class NamesByKey {
 public:
  std::shared_ptr<Names> of(const std::string& key) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Names>& names = names_[key];
    if (names == nullptr) names = std::make_shared<Names>();
    return names;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Names>> names_;
};

// An operation as contexts name it. Shared by all futures of one Work.
//
// What a callback calls is made in a *context*, which is a further part of its key. A context is
// named by
//  - the operation that the future is of: its process group, its key, and its number among the
//    operations of those (in a callback they are numbered anew, and the callback's name comes
//    first);
//  - the callback's place among those that are added to futures of the operation outside of
//    callbacks. What is chained to it has the same name, for it runs after it.
// A callback that is added *in* a callback, to whatever future, is named by that callback, and its
// place among those that this one adds. Two threads may add to one future, and which of them comes
// first would be different on every rank.
//
// Numbers are told modulo kNames, since what a device knows of a key is kept for good. A name
// passes to a later operation when no callback of the former one is under way or to come. If one
// is, collectives in callbacks of the later one are refused, and if one is added to the former
// afterwards, collectives in that are. What is called in callbacks of what a callback has called
// keeps the names of all of them busy. Where ranks add callbacks to such two operations in another
// order, each rank may have the other one pass; so the numbers themselves are among what ranks must
// agree on, see who_calls().
//
// Sends and receives have no contexts, for the other side is in another callback or in none. The
// caller tells their tags, and nothing is told for collectives in callbacks of theirs.
class Operation {
 public:
  // channel: its process group; key: that it was made under, with the scope that it was called in.
  Operation(std::shared_ptr<Names> names, std::uint64_t number, const std::string& channel,
            const ThreadKey& key);

  // What contexts of it begin with; and the same with the numbers as they are.
  const std::string& text() const { return text_; }
  const std::string& full_text() const { return full_text_; }
  std::uint64_t number() const { return number_; }
  int level() const { return level_; }  // 1: called outside of callbacks
  std::uint64_t next_added() { return added_.fetch_add(1, std::memory_order_relaxed); }

  // Around the time from when a callback is added until it has ended. False: another operation has
  // its name, or that of one whose callback it was called in.
  bool claim();
  void release();

 private:
  const std::shared_ptr<Names> names_;
  const std::uint64_t number_;
  const std::shared_ptr<Operation> outer_;  // in whose callback it was called; or null
  const std::string text_, full_text_;
  const int level_;
  std::atomic<std::uint64_t> added_{0};  // callbacks, outside of callbacks
};

// One callback.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  // operation, path: what it is named by; null: nothing. depth: in a chain, of which all may have
  // one name. level: callbacks in callbacks. refused: why collectives are, null: they are not, and
  // the name is claimed.
  Scope(std::shared_ptr<Operation> operation, std::string path, int depth, int level,
        std::string own_key, const char* refused)
      : operation_(std::move(operation)),
        path_(std::move(path)),
        depth_(depth),
        level_(level),
        own_key_(std::move(own_key)),
        context_(refused != nullptr ? refused : operation_->text() + path_ + "#"),
        claimed_(refused == nullptr) {}
  ~Scope() { end(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  // Its callback runs in this thread.
  void enter() {
    outer_ = thread_key();
    entered_ = true;
    set_thread_key({own_key_, context_, own_key_.size(), shared_from_this()});
  }
  void leave() {
    if (std::exchange(entered_, false)) set_thread_key(std::exchange(outer_, {}));
    end();
  }

  const std::shared_ptr<Operation>& operation() const { return operation_; }
  const std::string& path() const { return path_; }
  int depth() const { return depth_; }
  int level() const { return level_; }
  // Why collectives are refused; null: they are not.
  const char* refused() const { return claimed_ ? nullptr : context_.c_str(); }
  // Tells callbacks of one name apart.
  std::string place() const { return path_ + ":" + std::to_string(depth_); }
  // Of a callback that this one adds.
  std::string next_path() {
    return path_ + "." + std::to_string(depth_) + "t" +
           std::to_string(added_.fetch_add(1, std::memory_order_relaxed));
  }
  // For messages, and for ranks to agree on.
  std::string who_calls() const {
    return "callback of call " + std::to_string(operation_->number()) + " " +
           hashed(operation_->full_text() + place());
  }
  std::shared_ptr<Names> names(const std::string& key) { return names_.of(key); }

 private:
  void end() {
    if (claimed_ && !ended_.exchange(true)) operation_->release();
  }

  const std::shared_ptr<Operation> operation_;
  const std::string path_;
  const int depth_;
  const int level_;
  const std::string own_key_;
  const std::string context_;
  const bool claimed_;
  NamesByKey names_;
  std::atomic<std::uint64_t> added_{0};  // callbacks, by this one
  std::atomic<bool> ended_{false};
  bool entered_ = false;
  ThreadKey outer_;
};

// Where callbacks that are added to one future have their contexts.
class Callbacks {
 public:
  // Of an operation's own future. operation: null if nothing tells their order.
  Callbacks(std::shared_ptr<Operation> operation, std::string own_key)
      : operation_(std::move(operation)), own_key_(std::move(own_key)) {}
  // Of the future of what a callback returns.
  Callbacks(const Callbacks& of, const Scope& callback)
      : operation_(callback.operation()),
        own_key_(of.own_key_),
        path_(callback.path()),
        depth_(callback.depth() + 1) {}

  // For the next one, from its adding on.
  std::shared_ptr<Scope> add();

 private:
  const std::shared_ptr<Operation> operation_;
  const std::string own_key_;
  const std::string path_;
  const int depth_ = 0;  // in a chain
  std::atomic<std::uint64_t> added_{0};
};

namespace internal {

// "#then GROUP#|KEY NUMBER", after `outer`, the text of the operation in whose callback it is
// called, and that callback's place. GROUP and KEY have "#" only doubled.
inline std::string operation_text(const std::string& outer, const std::string& channel,
                                  const ThreadKey& key, std::uint64_t number) {
  return outer + (key.scope != nullptr ? key.scope->place() : "") + "#then " + escaped(channel) +
         "#|" + key.own + " " + std::to_string(number);
}

}  // namespace internal

inline Operation::Operation(std::shared_ptr<Names> names, std::uint64_t number,
                            const std::string& channel, const ThreadKey& key)
    : names_(std::move(names)),
      number_(number),
      outer_(key.scope != nullptr ? key.scope->operation() : nullptr),
      text_(internal::operation_text(outer_ != nullptr ? outer_->text() : "", channel, key,
                                     number % Names::kNames)),
      full_text_(internal::operation_text(outer_ != nullptr ? outer_->full_text() : "", channel,
                                          key, number)),
      level_(key.scope != nullptr ? key.scope->level() + 1 : 1) {}

inline bool Operation::claim() {
  if (!names_->claim(number_)) return false;
  if (outer_ == nullptr || outer_->claim()) return true;
  names_->release(number_);
  return false;
}

inline void Operation::release() {
  names_->release(number_);
  if (outer_ != nullptr) outer_->release();
}

inline std::shared_ptr<Scope> Callbacks::add() {
  std::shared_ptr<Scope> within = thread_key().scope;
  // What is called there, under a key, tells as much as elsewhere.
  if (within != nullptr && within->operation() == nullptr) within = nullptr;
  const std::shared_ptr<Operation> operation = within != nullptr ? within->operation() : operation_;
  if (operation == nullptr) {
    return std::make_shared<Scope>(nullptr, "", 0, 0, own_key_, kUnordered);
  }
  // Also for one that is refused: what is chained to it may not be.
  std::string path = path_;
  if (within != nullptr) {
    path = within->next_path();
  } else {
    const std::uint64_t index = depth_ == 0 ? operation->next_added() : added_.fetch_add(1);
    if (index != 0) path += "." + std::to_string(depth_) + "_" + std::to_string(index);
  }
  // Each level has names of its own, which stay.
  constexpr int kMostLevels = 16;
  const int level = within != nullptr ? within->level() + 1 : operation->level();
  const char* refused = within != nullptr ? within->refused() : nullptr;
  if (refused == nullptr && level > kMostLevels) refused = kDeep;
  if (refused == nullptr && !operation->claim()) refused = kCrowded;
  return std::make_shared<Scope>(operation, std::move(path), within != nullptr ? 0 : depth_, level,
                                 own_key_, refused);
}

}  // namespace unjam_torch
