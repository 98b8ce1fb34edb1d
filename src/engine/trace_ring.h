// The newest events of a lane, for pictures and diagnosis. One writer (the lane's leading thread),
// read by anybody meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

enum class TraceType : std::uint16_t { kStart, kPreempt, kYield, kFinish, kQuit, kRestart };

// Three words, stored and loaded one by one.
struct TraceEvent {
  std::uint64_t time_ns = 0;
  std::uint64_t tag = 0;
  std::uint64_t what = 0;  // n << 32 | lane << 16 | type
};

struct TraceRing {
  TraceEvent* events = nullptr;
  std::uint64_t places = 0;  // 0: no trace
  std::uint64_t written = 0;

  // One place more than is kept: the one that the writer may be filling.
  static constexpr std::uint64_t places_for(std::uint64_t kept) { return kept == 0 ? 0 : kept + 1; }

  // kWatched: others read this memory while the writer goes on. (The release has what they may see
  // of this event come after the count that makes its place no longer theirs; see newest().)
  template <bool kWatched>
  UNJAM_HD void record(const TraceEvent& event) {
    const std::uint64_t w = written;
    TraceEvent& e = events[w % places];
    const auto store = [](std::uint64_t& to, std::uint64_t v) {
      if constexpr (kWatched) {
        store_release(to, v);
      } else {
        store_relaxed(to, v);
      }
    };
    store(e.time_ns, event.time_ns);
    store(e.tag, event.tag);
    store(e.what, event.what);
    store_release(written, w + 1);
  }

  // Copies the newest events, oldest first; at most `most` and at most `places` - 1. Those that the
  // writer may have overwritten meanwhile are left out: whoever loads a word of event w (acquire)
  // finds at least w written afterwards, so it knows that the place of event w - places was taken.
  std::uint64_t newest(TraceEvent* out, std::uint64_t most) {
    if (places == 0) return 0;
    const std::uint64_t end = load_acquire(written);
    const std::uint64_t kept = std::min({end, places - 1, most});
    const std::uint64_t begin = end - kept;
    for (std::uint64_t i = 0; i < kept; ++i) {
      TraceEvent& e = events[(begin + i) % places];
      out[i] = {load_acquire(e.time_ns), load_acquire(e.tag), load_acquire(e.what)};
    }
    const std::uint64_t now = load_acquire(written);
    const std::uint64_t first = now + 1 > places ? now + 1 - places : 0;
    const std::uint64_t lost = first > begin ? std::min(first - begin, kept) : 0;
    if (lost != 0) std::copy(out + lost, out + kept, out);
    return kept - lost;
  }

  // From a copy of another's places. `rests`: he had counted `count`, and wrote nothing while the
  // copy was made. Else he has (what he has counted, if he is an engine on a GPU, nobody knows
  // until it leaves), and where he is is told by times alone: his newest event lies in front of his
  // oldest. Both may be half written, and are left out. Nothing torn is kept as long as places are
  // copied faster than they are filled; events that are between others may be missing.
  void keep(const TraceEvent* copied, std::uint64_t count, bool rests) {
    written = 0;
    if (places == 0) return;
    const auto at = [&](std::uint64_t i) -> const TraceEvent& { return copied[i % places]; };
    std::uint64_t first = 0, end = 0;
    if (rests) {
      end = count;
      first = count - std::min(count, places - 1);
    } else {
      std::uint64_t newest = 0;
      for (std::uint64_t i = 1; i < places; ++i) {
        if (at(i).time_ns > at(newest).time_ns) newest = i;
      }
      // Of several at one time the last.
      for (std::uint64_t i = 1; i < places && at(newest + 1).time_ns == at(newest).time_ns; ++i) {
        ++newest;
      }
      first = end = newest + places;
      while (first > newest + 2 && at(first - 1).time_ns != 0 &&
             (first == end || at(first - 1).time_ns <= at(first).time_ns)) {
        --first;
      }
    }
    for (std::uint64_t i = first; i < end; ++i) events[written++] = at(i);
  }
};

}  // namespace unjam
