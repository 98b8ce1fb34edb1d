// A deterministic schedule explorer. Fibers run real code on real memory; at every operation of
// base/atomics.h that others can notice, the explorer decides who goes on. Whole states (the shared
// world and the used part of every stack) are copied, hashed and restored, so that each is visited
// once: depth first over all schedules, or over those that differ from one fixed schedule (each
// runs as long as it can, then the next in turn) by a bounded number of delays; or random walks, by
// seed.
//
// It interleaves, sequentially consistent; it does not reorder memory. Weaker orders are argued at
// each operation, and TSan watches the same code on threads.
//
// For one translation unit: #define UNJAM_EXPLORER and `#define unjam unjam_explored` before any
// other include, so that no inline function with scheduling points meets the library's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/support/fiber_switch.h"

// Stacks that are copied behind their backs do not agree with sanitizers.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define UNJAM_HAS_EXPLORER 1

namespace unjam_test {

class Explorer {
 public:
  static constexpr std::size_t kStackBytes = 8192;
  static constexpr int kMaxFibers = 20;
  using Entry = void (*)(int argument);
  using Condition = bool (*)(int argument);

  struct Verdict {
    std::string error;  // "": none was found
    std::string schedule;
    std::uint64_t states = 0;       // distinct
    std::uint64_t transitions = 0;  // steps run
    std::uint64_t schedules = 0;    // that ended
    bool complete = false;          // nothing was left out but what the bound excludes
  };

  // `world`: all the memory that fibers share; plain data, which is copied. `check` names what is
  // wrong with a state in which nothing can run any more, null: nothing.
  Explorer(void* world, std::size_t bytes, const char* (*check)(), const char** error)
      : world_(static_cast<unsigned char*>(world)), bytes_(bytes), check_(check), error_(error) {
    self() = this;
    fibers_.resize(kMaxFibers);
    stacks_.reset(new (std::align_val_t{64}) unsigned char[kStackBytes * kMaxFibers]);
  }
  ~Explorer() { self() = nullptr; }

  // ---- for fibers, and for setting up ----

  static Explorer*& self() {
    static Explorer* instance = nullptr;
    return instance;
  }

  void name(int f, const char* text) { fibers_[at(f)].name = text; }

  // Begins (again) a fiber that does not run.
  void start(int f, Entry entry, int argument) {
    Control& c = fibers_[at(f)].c;
    c = Control{};
    c.status = Status::kReady;
    c.entry = entry;
    c.argument = argument;
    auto* top = reinterpret_cast<void**>(stack(f) + kStackBytes);
    *--top = nullptr;  // the trampoline finds the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&trampoline);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    c.sp = top;
  }
  bool running(int f) const { return fibers_[at(f)].c.status != Status::kEnded; }
  int current() const { return current_; }

  // A scheduling point. writes: what follows may change what others poll.
  void point(bool writes) {
    if (current_ < 0) return;
    yield(Status::kReady);
    if (!writes) return;
    for (int f = 0; f < kMaxFibers; ++f) {
      if (f != current_) fibers_[at(f)].c.stale = true;
    }
  }
  // Goes on when the condition holds.
  void block(Condition condition, int argument) {
    Control& c = fibers_[at(current_)].c;
    c.condition = condition;
    c.condition_argument = argument;
    yield(Status::kBlocked);
  }
  // Polling: a round that found nothing would find nothing again until somebody has written.
  void poll_begin() { fibers_[at(current_)].c.stale = false; }
  void poll_again() { yield(Status::kPolling); }
  // All values below n are tried.
  int choose(int n) {
    fibers_[at(current_)].c.choices = n;
    yield(Status::kChoosing);
    return fibers_[at(current_)].c.choice;
  }

  // ---- exploring ----

  // All schedules with at most `bound` delays (< 0: no bound), at most `most` states.
  Verdict explore(int bound, std::uint64_t most) {
    Verdict v;
    std::vector<Node> path;
    std::unordered_map<std::uint64_t, int> seen;
    seen.reserve(1 << 20);
    const Snapshot initial = save();
    path.push_back(node(initial, -1, bound));
    bool live = true;  // memory is as in the last node
    v.complete = true;
    while (!path.empty()) {
      Node& top = path.back();
      if (top.next == top.options.size()) {
        path.pop_back();
        live = false;
        continue;
      }
      if (!live) restore(top.snapshot);
      const Option o = top.options[top.next++];
      run(o);
      ++v.transitions;
      live = false;
      if (*error_ != nullptr) {
        v.error = *error_;
        v.schedule = describe(path);
        break;
      }
      const int left = top.left - (bound >= 0 ? o.cost : 0);
      std::uint64_t h = hash();
      if (bound >= 0) h = (h ^ static_cast<std::uint64_t>(o.fiber + 1)) * 0x9e3779b97f4a7c15u;
      const auto [found, fresh] = seen.try_emplace(h, left);
      if (!fresh) {
        if (bound < 0 || found->second >= left) continue;
        found->second = left;
      }
      Node next = node(save(), o.fiber, left);
      if (next.options.empty()) {
        ++v.schedules;
        if (const char* wrong = check_(); wrong != nullptr) {
          v.error = wrong;
          v.schedule = describe(path);
          break;
        }
        continue;
      }
      if (seen.size() >= most) {
        v.complete = false;
        break;
      }
      path.push_back(std::move(next));
      live = true;
    }
    v.states = seen.size();
    restore(initial);
    return v;
  }

  // Random walks from the seed's.
  Verdict walk(std::uint64_t seed, std::uint64_t walks, std::uint64_t longest = 20000) {
    Verdict v;
    const Snapshot initial = save();
    for (std::uint64_t w = 0; w < walks && v.error.empty(); ++w) {
      restore(initial);
      std::uint64_t r = (seed + w) * 0x9e3779b97f4a7c15u | 1;
      int last = -1;
      std::uint64_t steps = 0;
      for (; steps < longest; ++steps) {
        const Node n = node({}, last, -1);
        if (n.options.empty()) break;
        r ^= r << 13, r ^= r >> 7, r ^= r << 17;
        // Mostly goes on with the same, so that long stretches happen too.
        const bool stays = n.options[0].fiber == last && (r >> 20) % 4 != 0;
        const Option o = n.options[stays ? 0 : (r >> 32) % n.options.size()];
        run(o);
        ++v.transitions;
        last = o.fiber;
        if (*error_ != nullptr) break;
      }
      ++v.schedules;
      if (*error_ != nullptr) {
        v.error = *error_;
      } else if (steps == longest) {
        v.error = "no end in sight";
      } else if (const char* wrong = check_(); wrong != nullptr) {
        v.error = wrong;
      }
      if (!v.error.empty()) v.schedule = "random walk, seed " + std::to_string(seed + w);
    }
    restore(initial);
    return v;
  }

 private:
  enum class Status : std::uint8_t { kEnded, kReady, kBlocked, kPolling, kChoosing };
  struct Control {
    void* sp = nullptr;
    Entry entry = nullptr;
    Condition condition = nullptr;
    int argument = 0;
    int condition_argument = 0;
    int choices = 0;
    int choice = 0;
    bool stale = false;  // somebody has written since poll_begin()
    Status status = Status::kEnded;
  };
  struct Fiber {
    Control c;
    const char* name = "?";
  };
  using Snapshot = std::vector<unsigned char>;  // the world, the controls, the used stacks
  struct Option {
    int fiber;
    int choice;
    int cost;
  };
  struct Node {
    Snapshot snapshot;
    std::vector<Option> options;
    std::size_t next = 0;
    int left = 0;
  };
  struct AlignedDelete {
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };

  static std::size_t at(int f) { return static_cast<std::size_t>(f); }
  unsigned char* stack(int f) { return stacks_.get() + at(f) * kStackBytes; }
  std::size_t used(int f) {
    const Control& c = fibers_[at(f)].c;
    if (c.status == Status::kEnded) return 0;
    return static_cast<std::size_t>(stack(f) + kStackBytes - static_cast<unsigned char*>(c.sp));
  }

  static void trampoline() {
    Explorer& e = *self();
    const Control& c = e.fibers_[at(e.current_)].c;
    c.entry(c.argument);
    e.yield(Status::kEnded);
    std::abort();
  }
  void yield(Status status) {
    Control& c = fibers_[at(current_)].c;
    c.status = status;
    unjam_fiber_switch(&c.sp, scheduler_);
  }

  void run(const Option& o) {
    Control& c = fibers_[at(o.fiber)].c;
    c.choice = o.choice;
    c.status = Status::kReady;
    current_ = o.fiber;
    unjam_fiber_switch(&scheduler_, c.sp);
    current_ = -1;
    if (c.status != Status::kEnded && used(o.fiber) > kStackBytes - 1024) {
      *error_ = "a fiber's stack is too small";
    }
  }

  bool can_run(const Control& c) const {
    switch (c.status) {
      case Status::kEnded:
        return false;
      case Status::kBlocked:
        return c.condition(c.condition_argument);
      case Status::kPolling:
        return c.stale;
      default:
        return true;
    }
  }

  // The last fiber first, then in turn. To pass over one that could run is a delay.
  Node node(Snapshot snapshot, int last, int left) {
    Node n;
    n.snapshot = std::move(snapshot);
    n.left = left;
    int cost = 0;
    for (int i = 0; i < kMaxFibers && (left < 0 || cost <= left); ++i) {
      const int f = (std::max(last, 0) + i) % kMaxFibers;
      const Control& c = fibers_[at(f)].c;
      if (!can_run(c)) continue;
      const int values = c.status == Status::kChoosing ? c.choices : 1;
      for (int k = 0; k < values; ++k) n.options.push_back({f, k, cost});
      ++cost;
    }
    return n;
  }

  Snapshot save() {
    std::size_t bytes = bytes_ + kMaxFibers * sizeof(Control);
    for (int f = 0; f < kMaxFibers; ++f) bytes += used(f);
    Snapshot s(bytes);
    unsigned char* to = s.data();
    const auto put = [&](const void* from, std::size_t n) {
      std::memcpy(to, from, n);
      to += n;
    };
    put(world_, bytes_);
    for (int f = 0; f < kMaxFibers; ++f) {
      put(&fibers_[at(f)].c, sizeof(Control));
      put(stack(f) + kStackBytes - used(f), used(f));
    }
    return s;
  }
  void restore(const Snapshot& s) {
    const unsigned char* from = s.data();
    const auto get = [&](void* to, std::size_t n) {
      std::memcpy(to, from, n);
      from += n;
    };
    get(world_, bytes_);
    for (int f = 0; f < kMaxFibers; ++f) {
      get(&fibers_[at(f)].c, sizeof(Control));
      get(stack(f) + kStackBytes - used(f), used(f));
    }
  }

  static void mix(std::uint64_t& h, const unsigned char* p, std::size_t bytes) {
    for (; bytes >= 8; p += 8, bytes -= 8) {
      std::uint64_t w;
      std::memcpy(&w, p, 8);
      h = (h ^ w) * 0x9fb21c651e98df25u;
      h ^= h >> 32;
    }
    for (; bytes > 0; ++p, --bytes) h = (h ^ *p) * 0x100000001b3u;
  }
  std::uint64_t hash() {
    std::uint64_t h = 0x243f6a8885a308d3u;
    mix(h, world_, bytes_);
    for (int f = 0; f < kMaxFibers; ++f) {
      const Control& c = fibers_[at(f)].c;
      h = (h ^ static_cast<std::uint64_t>(c.status)) * 0x9fb21c651e98df25u;
      if (c.status == Status::kEnded) continue;
      h = (h ^ static_cast<std::uint64_t>(c.stale)) * 0x9fb21c651e98df25u;
      mix(h, stack(f) + kStackBytes - used(f), used(f));
    }
    return h ^ h >> 29;
  }

  std::string describe(const std::vector<Node>& path) const {
    std::string text;
    int last = -1, count = 0;
    const auto flush = [&] {
      if (last >= 0)
        text += std::string(fibers_[at(last)].name) + " " + std::to_string(count) + ", ";
    };
    for (const Node& n : path) {
      const int f = n.options[n.next - 1].fiber;
      if (f == last) {
        ++count;
        continue;
      }
      flush();
      last = f;
      count = 1;
    }
    flush();
    return text + "end (steps of each in turn)";
  }

  unsigned char* const world_;
  const std::size_t bytes_;
  const char* (*const check_)();
  const char** const error_;
  std::vector<Fiber> fibers_;
  std::unique_ptr<unsigned char[], AlignedDelete> stacks_;
  void* scheduler_ = nullptr;
  int current_ = -1;
};

}  // namespace unjam_test
#else
#define UNJAM_HAS_EXPLORER 0
#endif
