// The key that a thread's calls are made under.
//
// torch keeps it among what a thread that works for another one takes over (at::ThreadLocalState).
// Autograd evaluates the nodes of a backward pass on CUDA in threads of its own, with what the
// thread had that called backward(). So `with unjam.key(…): loss.backward()` holds for what hooks
// call.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

#include <memory>
#include <string>
#include <utility>

namespace unjam_torch {

class Scope;  // context.h

struct ThreadKey {
  // Of `with unjam.key(…)`: users' names, escaped() each, joined with "/"; "" outside of all.
  std::string own;
  // In the callback of a future: what is added to the key of collectives, "#…#", or why there are
  // to be none (context.h). "" elsewhere.
  std::string context;
  // So much of `own` was there where the callback began.
  std::size_t given = 0;
  std::shared_ptr<Scope> scope;  // of the callback
};

inline std::string join(const std::string& a, const std::string& b) {
  return a.empty() || b.empty() ? a + b : a + "/" + b;
}

// A user's part of a key. A single "#" begins, or ends, what is added to keys here, so a user's own
// is doubled. (Parts of a user's key are joined with "/", as what users nest; so a group's name,
// which is no part of one, ends with "#".)
inline std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) text.append(c == '#' ? 2 : 1, c);
  return text;
}

namespace internal {

// torch's slots are made for Python's objects. This one holds none.
struct KeptKey : c10::SafePyObject {
  explicit KeptKey(ThreadKey k) : c10::SafePyObject(nullptr, nullptr), key(std::move(k)) {}
  const ThreadKey key;
};

inline const std::string& key_slot() {
  static const auto* const name = new std::string("unjam.key");
  return *name;
}

}  // namespace internal

inline ThreadKey thread_key() {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(internal::key_slot())) return {};
  return static_cast<const internal::KeptKey&>(*Objects::get(internal::key_slot())).key;
}

inline void set_thread_key(ThreadKey key) {
  at::impl::ThreadLocalPythonObjects::set(internal::key_slot(),
                                          std::make_shared<internal::KeptKey>(std::move(key)));
}

// This thread's inside of `with unjam.key(name)`.
inline ThreadKey nested_key(const std::string& name) {
  ThreadKey key = thread_key();
  key.own = join(key.own, escaped(name));
  return key;
}

class KeyScope {
 public:
  explicit KeyScope(ThreadKey key) : outer_(thread_key()) { set_thread_key(std::move(key)); }
  ~KeyScope() { set_thread_key(outer_); }
  KeyScope(const KeyScope&) = delete;
  KeyScope& operator=(const KeyScope&) = delete;

 private:
  const ThreadKey outer_;
};

}  // namespace unjam_torch
