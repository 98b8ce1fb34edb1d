// How far one operation of torch is, and whether somebody is to be told of its end.
#pragma once

#include <atomic>

namespace unjam_torch {

enum class OperationState {
  kOpen,               // its request is still to come
  kOpenAwaited,        // likewise, and somebody is to be told of its end
  kPending,            // its requests are under way
  kListening,          // likewise, and the library calls at their end
  kComplete,           // somebody has looked, and found its end
  kCompleteListening,  // likewise, and the library's call is still to come
  kTold,               // the library has called
};

enum class OperationEvent {
  kPosted,    // its request is there, or it is known that none comes
  kAwaited,   // somebody wants to be told of its end
  kEnded,     // somebody has looked, and found its end
  kNotified,  // the library has called for it
};

// The state, and the one function that changes it:
//
//                        kPosted       kAwaited              kEnded                kNotified
//   kOpen                kPending      kOpenAwaited          -                     -
//   kOpenAwaited         kListening    =                     -                     -
//   kPending             -             kListening            kComplete             -
//   kListening           -             =                     kCompleteListening    kTold
//   kComplete            -             kCompleteListening    =                     -
//   kCompleteListening   -             =                     =                     kTold
//   kTold                -             =                     =                     =
//
// "=" changes nothing, and neither does "-", which cannot happen: an open operation has no request
// that could end, and the library calls only for who listens.
//
// Memory order: what a thread has stored before an event (a request that it has posted, the record
// of an end) is released by the change, and whoever sees the new state has acquired it. There is
// one word, so no thread misses that another one waits: with a flag for each, the one that posts
// and the one that begins to wait could each look before the other has stored.
class OperationStateWord {
 public:
  struct Change {
    OperationState before;
    OperationState after;

    bool made() const { return before != after; }
    // Whoever makes this change has the library call at the requests' end.
    bool begins_to_listen() const { return listens(after) && !listens(before); }
  };

  // While the operation is put together, by one thread.
  void set_open() { state_.store(OperationState::kOpen, std::memory_order_relaxed); }

  OperationState now() const { return state_.load(std::memory_order_acquire); }
  bool open() const { return now() <= OperationState::kOpenAwaited; }
  bool complete() const { return now() >= OperationState::kComplete; }

  Change advance(OperationEvent event) {
    OperationState before = now();
    for (;;) {
      const OperationState after = next(before, event);
      if (after == before) return {before, after};
      if (state_.compare_exchange_weak(before, after, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
        return {before, after};
      }
    }
  }

  static constexpr OperationState next(OperationState state, OperationEvent event) {
    using enum OperationState;
    switch (event) {
      case OperationEvent::kPosted:
        if (state == kOpen) return kPending;
        if (state == kOpenAwaited) return kListening;
        return state;
      case OperationEvent::kAwaited:
        if (state == kOpen) return kOpenAwaited;
        if (state == kPending) return kListening;
        if (state == kComplete) return kCompleteListening;
        return state;
      case OperationEvent::kEnded:
        if (state == kPending) return kComplete;
        if (state == kListening) return kCompleteListening;
        return state;
      case OperationEvent::kNotified:
        if (state == kListening || state == kCompleteListening) return kTold;
        return state;
    }
    return state;
  }

 private:
  static constexpr bool listens(OperationState state) {
    return state == OperationState::kListening || state == OperationState::kCompleteListening ||
           state == OperationState::kTold;
  }

  std::atomic<OperationState> state_{OperationState::kPending};
};

}  // namespace unjam_torch
