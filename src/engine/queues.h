// Rings between one producer and one consumer: the submission queue (host -> first lane) and the
// mailboxes (first lane -> every lane). Their capacity is the number of invocation slots of a rank,
// and an invocation occupies at most one place, so they are never full: nothing blocks here.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

template <class T>
struct SpscRing {
  T* places = nullptr;
  std::uint32_t capacity = 0;
  alignas(kFalseSharingBytes) std::uint64_t written = 0;  // the producer's
  alignas(kFalseSharingBytes) std::uint64_t read = 0;     // the consumer's

  UNJAM_HD void push(const T& value) {
    const std::uint64_t w = load_relaxed(written);
    places[w % capacity] = value;
    // Release: the value is visible before the count. That the place was read before is known
    // because its slot was free: the completion that freed it came after the read.
    store_release(written, w + 1);
  }
  // push() in two steps, for a producer that publishes several rings, or values, at once (P: see
  // Publisher in connector.h). i: how many are put already, and not yet shown.
  UNJAM_HD void put(const T& value, std::uint32_t i = 0) {
    places[(load_relaxed_local(written) + i) % capacity] = value;
  }
  template <class P>
  UNJAM_HD void show(std::uint32_t n = 1) {
    P::publish(written, load_relaxed_local(written) + n);
  }
  UNJAM_HD bool empty() { return load_acquire(written) == load_relaxed(read); }
  // For who only wants to know: both looks are under way together.
  UNJAM_HD bool looks_empty() { return load_relaxed_local(written) == load_relaxed_local(read); }
  // pop() in parts, for a consumer that takes several: how many there are, acquired; one of them
  // (behind that); and that so many are taken.
  UNJAM_HD std::uint32_t count(std::uint32_t most) {
    const std::uint64_t n = load_acquire(written) - load_relaxed(read);
    return n < most ? static_cast<std::uint32_t>(n) : most;
  }
  UNJAM_HD T at(std::uint32_t i) { return places[(load_relaxed(read) + i) % capacity]; }
  UNJAM_HD void take(std::uint32_t n) { store_relaxed(read, load_relaxed(read) + n); }
  UNJAM_HD bool pop(T& value) {
    const std::uint64_t r = load_relaxed(read);
    if (load_acquire(written) == r) return false;
    value = places[r % capacity];
    // Relaxed: it is the consumer's own count. The producer learns from a completion, see push().
    store_relaxed(read, r + 1);
    return true;
  }
};

}  // namespace unjam
