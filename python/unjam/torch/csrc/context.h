// How collectives that are called in the callbacks of futures find each other.
//
// A callback that is added with then() runs when the operation is complete: in another thread, or
// in the one that adds it if that was the case already. So which calls it comes between is not the
// same on all ranks, and what it calls may not be matched by its order among them. It is matched by
// what is the same everywhere: that it is called by a callback of this very operation.
//
// So it is made in a *context*, which is a further part of its key. A context is named by the
// operation that the future is of: the process group, and the operation's number among those of its
// group and key. (In a context operations are numbered anew.) A second callback of one future has
// another context than the first; what is chained runs one behind the other, in one context.
//
// Numbers are told modulo kNames, since what a device knows of a key is kept for good. A name
// passes to a later operation when no callback of the former one is under way or to come. If one
// is, collectives in callbacks of the later one are refused, and if one is added to the former
// afterwards, in that. What is called in callbacks of what a callback has called keeps the names of
// all of them busy. (Where ranks add callbacks to such two in another order, each rank may have the
// other one pass. So the numbers themselves are among what ranks must agree on, see who_calls().)
//
// Sends and receives have no contexts, for the other side is in another callback or in none: their
// tags are told by the caller; and nothing is told for collectives in callbacks of theirs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "key.h"

namespace unjam_torch {

// ThreadKey::context where collectives are refused: nothing tells in which order callbacks in this
// thread come (but if they are given a key, they go by that); the context's name is another one's;
// there are too many contexts in contexts.
inline constexpr const char* kUnordered = "!unordered";
inline constexpr const char* kCrowded = "!crowded";
inline constexpr const char* kDeep = "!deep";

// Of one group and key, outside of callbacks or in one of them: numbers of operations, and whose
// the names are.
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

// A collective as contexts name it. Shared by all futures of one Work.
class Operation {
 public:
  // channel: its process group; key: that it was made under, with the scope that it was called in.
  Operation(std::shared_ptr<Names> names, std::uint64_t number, const std::string& channel,
            ThreadKey key);

  const std::string& own_key() const { return key_.own; }
  // What contexts of it begin with.
  const std::string& text() const { return text_; }
  // Its number, behind those of the operations in whose callbacks it was called.
  const std::string& numbers() const { return numbers_; }
  int level() const { return level_; }  // 1: called outside of callbacks
  std::uint64_t next_added() { return added_.fetch_add(1, std::memory_order_relaxed); }

  // Around the time from when a callback is added until it has ended. False: another operation has
  // its name, or that of one whose callback it was called in.
  bool claim();
  void release();

 private:
  const std::shared_ptr<Names> names_;
  const std::uint64_t number_;
  const ThreadKey key_;
  const std::string text_;
  const std::string numbers_;
  const int level_;
  std::atomic<std::uint64_t> added_{0};  // callbacks, outside of callbacks
};

// One callback.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  // operation: whose name it has, claimed. path: behind that name. depth: in a chain, of which all
  // may have one path. level: callbacks in callbacks.
  Scope(std::shared_ptr<Operation> operation, std::string path, std::string own_key, int depth,
        int level)
      : operation_(std::move(operation)),
        path_(std::move(path)),
        own_key_(std::move(own_key)),
        context_(operation_->text() + path_ + "#"),
        depth_(depth),
        level_(level) {}
  // Without a name. context: why.
  Scope(std::string own_key, const char* context)
      : own_key_(std::move(own_key)), context_(context) {}
  ~Scope() { end(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  // Its callback runs in this thread.
  void enter() {
    outer_ = thread_key();
    set_thread_key({own_key_, context_, own_key_.size(), shared_from_this()});
  }
  void leave() {
    set_thread_key(std::exchange(outer_, {}));
    end();
  }

  const std::shared_ptr<Operation>& operation() const { return operation_; }
  const std::string& path() const { return path_; }
  const std::string& context() const { return context_; }
  int level() const { return level_; }
  // Of a callback that this one adds.
  std::string next_path() {
    return path_ + "." + std::to_string(depth_) + "t" +
           std::to_string(added_.fetch_add(1, std::memory_order_relaxed));
  }
  // For messages, and for ranks to agree on.
  std::string who_calls() const { return "in callback of call " + operation_->numbers(); }
  std::shared_ptr<Names> names(const std::string& key) { return names_.of(key); }

 private:
  void end() {
    if (operation_ != nullptr && !ended_.exchange(true)) operation_->release();
  }

  const std::shared_ptr<Operation> operation_;
  const std::string path_;
  const std::string own_key_;
  const std::string context_;
  const int depth_ = 0;
  const int level_ = 0;
  NamesByKey names_;
  std::atomic<std::uint64_t> added_{0};  // callbacks, by this one
  std::atomic<bool> ended_{false};
  ThreadKey outer_;
};

// Where callbacks that are added to one future have their contexts.
class Callbacks {
 public:
  // Of an operation's own future. operation: null if nothing tells their order.
  Callbacks(std::shared_ptr<Operation> operation, std::string own_key)
      : operation_(std::move(operation)), own_key_(std::move(own_key)) {}
  // Of the future of what a callback returns.
  explicit Callbacks(const Callbacks& of, const Scope& callback)
      : operation_(of.operation_),
        own_key_(of.own_key_),
        path_(callback.path()),
        depth_(of.depth_ + 1) {}

  // For the next one, from its adding on.
  std::shared_ptr<Scope> add();

 private:
  const std::shared_ptr<Operation> operation_;
  const std::string own_key_;
  const std::string path_;
  const int depth_ = 0;  // in a chain
  std::atomic<std::uint64_t> added_{0};
};

inline Operation::Operation(std::shared_ptr<Names> names, std::uint64_t number,
                            const std::string& channel, ThreadKey key)
    : names_(std::move(names)),
      number_(number),
      key_(std::move(key)),
      text_((key_.scope != nullptr ? key_.scope->operation()->text() + key_.scope->path() : "") +
            "#then " + escaped(channel) + " " + std::to_string(number % Names::kNames)),
      numbers_((key_.scope != nullptr ? key_.scope->operation()->numbers() + "." : "") +
               std::to_string(number)),
      level_(key_.scope != nullptr ? key_.scope->level() + 1 : 1) {}

inline bool Operation::claim() {
  if (!names_->claim(number_)) return false;
  if (key_.scope == nullptr || key_.scope->operation()->claim()) return true;
  names_->release(number_);
  return false;
}

inline void Operation::release() {
  names_->release(number_);
  if (key_.scope != nullptr) key_.scope->operation()->release();
}

inline std::shared_ptr<Scope> Callbacks::add() {
  const auto nameless = [this](const std::string& context) {
    return std::make_shared<Scope>(own_key_, context.c_str());
  };
  // In a callback: one of what that one adds, to whatever future. Which of two threads comes first,
  // that and one that adds to the same future, does not matter so.
  std::shared_ptr<Scope> within = thread_key().scope;
  if (within != nullptr && within->operation() == nullptr) {
    if (within->context() != kUnordered) return nameless(within->context());
    within = nullptr;  // what is called there, under a key, tells as much as elsewhere
  }
  const std::shared_ptr<Operation> operation = within != nullptr ? within->operation() : operation_;
  if (operation == nullptr) return nameless(kUnordered);
  std::string path;
  if (within != nullptr) {
    path = within->next_path();
  } else {
    const std::uint64_t index = depth_ == 0 ? operation->next_added() : added_.fetch_add(1);
    path = path_;
    if (index != 0) path += "." + std::to_string(depth_) + "_" + std::to_string(index);
  }
  // Each level has names of its own, which stay.
  constexpr int kMostLevels = 16;
  const int level = within != nullptr ? within->level() + 1 : operation->level();
  if (level > kMostLevels) return nameless(kDeep);
  if (!operation->claim()) return nameless(kCrowded);
  return std::make_shared<Scope>(operation, std::move(path), own_key_, depth_, level);
}

}  // namespace unjam_torch
