// System-scope atomics on plain memory, the same on the host and under nvcc. Only acquire, release
// and read-modify-write operations: no standalone fences, which TSan cannot see.
#pragma once

#include "base/portability.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace unjam {

#if defined(__CUDACC__)
template <class T>
using AtomicRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
// For words that only one device looks at: its fences need not wait for other devices.
template <class T>
using LocalAtomicRef = cuda::atomic_ref<T, cuda::thread_scope_device>;
inline constexpr auto kRelaxed = cuda::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::memory_order_acquire;
inline constexpr auto kRelease = cuda::memory_order_release;
inline constexpr auto kAcqRel = cuda::memory_order_acq_rel;
inline constexpr auto kSeqCst = cuda::memory_order_seq_cst;
#else
template <class T>
using AtomicRef = std::atomic_ref<T>;
template <class T>
using LocalAtomicRef = std::atomic_ref<T>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kAcqRel = std::memory_order_acq_rel;
inline constexpr auto kSeqCst = std::memory_order_seq_cst;
#endif

// The schedule explorer (tests/support/explorer.h) interleaves protocols at every operation that
// other threads can notice, and is told of every word that is looked at. Nowhere else is this
// defined.
#if defined(UNJAM_EXPLORER)
void explorer_point(bool writes);
void explorer_look(const void* at);
#define UNJAM_EXPLORER_POINT(writes) explorer_point(writes)
#define UNJAM_EXPLORER_LOOK(x) explorer_look(&(x))
#else
#define UNJAM_EXPLORER_POINT(writes) static_cast<void>(0)
#define UNJAM_EXPLORER_LOOK(x) static_cast<void>(0)
#endif

template <class T>
UNJAM_HD inline T load_relaxed(T& x) {
  UNJAM_EXPLORER_LOOK(x);
  return AtomicRef<T>(x).load(kRelaxed);
}
template <class T>
UNJAM_HD inline T load_acquire(T& x) {
  UNJAM_EXPLORER_POINT(false);
  UNJAM_EXPLORER_LOOK(x);
  return AtomicRef<T>(x).load(kAcquire);
}
template <class T>
UNJAM_HD inline void store_relaxed(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  AtomicRef<T>(x).store(v, kRelaxed);
}
template <class T>
UNJAM_HD inline void store_release(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  AtomicRef<T>(x).store(v, kRelease);
}
// One total order of all of these: of two threads that each store, then load what the other stores,
// at least one sees the other's.
template <class T>
UNJAM_HD inline T load_seq_cst(T& x) {
  UNJAM_EXPLORER_POINT(false);
  UNJAM_EXPLORER_LOOK(x);
  return AtomicRef<T>(x).load(kSeqCst);
}
template <class T>
UNJAM_HD inline void store_seq_cst(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  AtomicRef<T>(x).store(v, kSeqCst);
}
template <class T>
UNJAM_HD inline T fetch_add(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  return AtomicRef<T>(x).fetch_add(v, kAcqRel);
}
template <class T>
UNJAM_HD inline T fetch_and(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  return AtomicRef<T>(x).fetch_and(v, kAcqRel);
}
template <class T>
UNJAM_HD inline bool compare_exchange(T& x, T expected, T desired) {
  UNJAM_EXPLORER_POINT(true);
  return AtomicRef<T>(x).compare_exchange_strong(expected, desired, kAcqRel, kRelaxed);
}
// The same for words that only one device looks at (see LocalAtomicRef).
template <class T>
UNJAM_HD inline T load_relaxed_local(T& x) {
  UNJAM_EXPLORER_LOOK(x);
  return LocalAtomicRef<T>(x).load(kRelaxed);
}
template <class T>
UNJAM_HD inline T load_acquire_local(T& x) {
  UNJAM_EXPLORER_POINT(false);
  UNJAM_EXPLORER_LOOK(x);
  return LocalAtomicRef<T>(x).load(kAcquire);
}
template <class T>
UNJAM_HD inline void store_relaxed_local(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  LocalAtomicRef<T>(x).store(v, kRelaxed);
}
template <class T>
UNJAM_HD inline void store_release_local(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  LocalAtomicRef<T>(x).store(v, kRelease);
}
template <class T>
UNJAM_HD inline T fetch_add_local(T& x, T v) {
  UNJAM_EXPLORER_POINT(true);
  return LocalAtomicRef<T>(x).fetch_add(v, kAcqRel);
}
// A counter with one writer that other threads may read at any time.
template <class T>
UNJAM_HD inline void bump(T& x, T by = 1) {
  store_relaxed(x, static_cast<T>(load_relaxed(x) + by));
}

}  // namespace unjam
