// Who ends a call that runs without the engine (call_in_stream.cuh), or brings it to the engine:
// what its blocks, one a lane, tell each other. tests/unit/stream_call_reports_test.cc explores it.
//
// Two words a slot, both zero when a call gets it. `reports` has a Report of each lane: of one that
// is done as soon as all has come that it waits for (through slots: if it is close to the one in
// front, else when all is moved), of one that is not behind all that it does. A lane that is done
// counts itself in `stored` when it has stored what it has kept. All are done: the last to report
// adds the place in the CQ to that word, in front of its count; whoever counts last finds it, and
// ends the call. Else the last to report waits until the lanes that are done have stored, brings
// the call to the engine, and serves. Whoever does either zeroes both words first; so between
// begin_end() and its count a lane waits for nothing.
#pragma once

#include <bit>
#include <cstdint>

#include "transport/arena.h"

// Nothing but device code may call what is device code.
#if defined(__CUDACC__)
#define UNJAM_STEP __device__ __forceinline__
#else
#define UNJAM_STEP inline
#endif

namespace unjam {
namespace in_stream {

// How far a lane has come.
enum Report : std::uint32_t { kUntried = 1, kBegun = 2, kDone = 3 };
inline constexpr std::uint32_t kReportBits = 2;
inline constexpr std::uint64_t kFirstBits = 0x5555555555555555;  // of each report
static_assert(kReportBits * kMaxLanes <= 64);

// `stored`: so many lanes, and above that the place in the CQ, plus 1.
inline constexpr std::uint32_t kStoredBits = 8;
static_assert(kMaxLanes < 1u << kStoredBits);

UNJAM_STEP std::uint32_t count_bits(std::uint64_t word) {
#if defined(__CUDACC__)
  return static_cast<std::uint32_t>(__popcll(word));
#else
  return static_cast<std::uint32_t>(std::popcount(word));
#endif
}

UNJAM_STEP std::uint64_t report_word(Report report, std::uint32_t lane) {
  return std::uint64_t{report} << (kReportBits * lane);
}
// What the reports are with this one, which found `before`. 0: some are missing.
UNJAM_STEP std::uint64_t all_reports(std::uint32_t lanes, std::uint64_t before,
                                     std::uint64_t mine) {
  const std::uint64_t word = before | mine;
  return count_bits((word | word >> 1) & kFirstBits) == lanes ? word : 0;
}
// Whether any of those that have reported was not done.
UNJAM_STEP bool any_gave_up(std::uint64_t word) {
  static_assert(kDone == 3);
  return ((word ^ word >> 1) & kFirstBits) != 0;
}
UNJAM_STEP std::uint32_t lanes_done(std::uint64_t word) {
  static_assert(kDone == 3);
  return count_bits(word & word >> 1 & kFirstBits);
}

// What the thread that reports knows, of a lane that is done.
struct Ending {
  // Of a call of several lanes: by begin_end(), the reports before this one; by decide(), all of
  // them, if this one was the last, else 0.
  std::uint64_t reports = 0;
  std::uint64_t at = 0;  // of one lane: the call's place in the CQ, to be filled
};

// By a thread of each block, or by two with a barrier between the first two steps and the others.
// Call: that block's call, with
//   lanes, lane            of the call, and this block's among them
//   add_report(by)         to the word of reports; returns what was there. Relaxed
//   add_last_report(by)    the same; acquires and releases
//   add_stored(by)         to the word of what is stored, likewise relaxed
//   say_place(by)          the same; returns nothing
//   await_stored(n)        until n is there; acquires
//   clear()                both words
//   fence()                for the device: acquires and releases
//   take_place()           in the CQ
//   free_key()             its next use may begin
//   let_next_begin()       the stream's next call may come: it waits for our end. (A block that
//                          keeps it, see ClusterPlacement, lets it come by its own end)
//   end(at), end_lane(at)  tell of the end of a call of several lanes, or of one
//   hand_over(word)        tells the engine how far the lanes are
struct ReportSteps {
  // As soon as it is known that the lane is done. Nothing here is waited for.
  template <class Call>
  UNJAM_STEP static Ending begin_end(const Call& call) {
    Ending ending;
    if (call.lanes != 1) {
      // Relaxed: what this block stores is released as it is counted.
      ending.reports = call.add_report(report_word(kDone, call.lane));
      return ending;
    }
    ending.at = call.take_place();
    call.free_key();
    // Nothing behind this waits for a peer.
    call.let_next_begin();
    return ending;
  }

  // Of such a lane, in front of the barrier behind which it has stored all. It waits for what
  // begin_end() has asked for, so there is best something else between them. True: not all lanes
  // are done, and this block serves.
  template <class Call>
  UNJAM_STEP static bool decide(const Call& call, Ending& ending) {
    if (call.lanes == 1) return false;
    ending.reports = all_reports(call.lanes, ending.reports, report_word(kDone, call.lane));
    const bool last = ending.reports != 0;
    if (last && any_gave_up(ending.reports)) return true;
    if (last) {
      // In front of this block's count: whoever counts last finds the place, and acquires the rest.
      const std::uint64_t at = call.take_place();
      call.free_key();
      call.say_place((at + 1) << kStoredBits);
    }
    // As in begin_end(); the block that serves keeps the next call from coming. (In front of the
    // lines above, or behind the barrier or the count, it makes calls slower.)
    call.let_next_begin();
    return false;
  }

  // Behind that barrier.
  template <class Call>
  UNJAM_STEP static void finish_lane(const Call& call, const Ending& ending) {
    // Release, with what follows: what this block has stored.
    call.fence();
    if (call.lanes == 1) return call.end_lane(ending.at);
    const std::uint64_t word = call.add_stored(1) + 1;
    if ((word & ((1u << kStoredBits) - 1)) != call.lanes) return;
    // In front of the fence: who finds the slot free, behind the completion, finds them zero.
    call.clear();
    // Acquire: what the other blocks have stored. And for end(): fences are cumulative.
    call.fence();
    call.end((word >> kStoredBits) - 1);
  }

  // Of a lane that is not done, behind a barrier behind all that the block has done. Returns all
  // reports if this was the last one, and then this block serves; else 0.
  template <class Call>
  UNJAM_STEP static std::uint64_t give_up(const Call& call, Report report) {
    if (call.lanes == 1) return report;
    const std::uint64_t mine = report_word(report, call.lane);
    // Release: the lane's head start, for who brings the call to the engine. Acquire: the others'.
    const std::uint64_t word = all_reports(call.lanes, call.add_last_report(mine), mine);
    if (word == 0) call.let_next_begin();
    return word;
  }

  // By the block that serves, with all reports, behind a barrier behind all that it has done.
  // `done`: its own lane, which is not counted.
  template <class Call>
  UNJAM_STEP static void bring_to_engine(const Call& call, std::uint64_t word, bool done) {
    if (call.lanes != 1) {
      call.await_stored(lanes_done(word) - (done ? 1 : 0));
      // Acquire, behind decide()'s relaxed look: head starts of lanes that reported before.
      call.fence();
      call.clear();
    }
    call.hand_over(word);
  }
};

}  // namespace in_stream
}  // namespace unjam

#undef UNJAM_STEP
