// In which order the slices of a program go through one connector, in closed form: for who moves a
// program's steps independently of each other, and must say at any time how much of it anybody else
// could take for a program that was interrupted.
//
// A program makes passes; primitive i moves its chunk l in pass l + lag(i), and within a pass
// primitives come in the program's order (program/primitive.h). So in front of that chunk come
// those chunks m of primitive j for which m + lag(j) < l + lag(i), or <= if j comes first. They are
//   clamp(l + lag(i) - lag(j) + [j first], 0, chunks(j)).
// The primitives that use the connector are its *terms*, numbered in the program's order. Both ends
// of a connector number its slices alike, from 0 on, if each chunk is one slice and both have the
// same terms, lags and chunks, which the plan checker proves.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

// One term: a primitive that uses the connector, and what it moves there in this lane.
struct SliceTerm {
  std::uint32_t chunks = 0;  // that are not empty; the first ones
  std::uint32_t lag = 0;     // in passes
};

// kMost: the most terms that an order can have, and are added; 1 and 2 are the cases that must be
// fast. Sums of chunks and lags fit 31 bits. (Executors still use program/hop_order.h, which is
// this for two terms.)
template <std::uint32_t kMost>
class SliceOrder {
 public:
  UNJAM_HD constexpr void add(SliceTerm term) { term_[terms_++] = term; }

  UNJAM_HD constexpr std::uint32_t terms() const {
    if constexpr (kMost == 1) return 1;
    return terms_;
  }
  UNJAM_HD constexpr std::uint32_t chunks(std::uint32_t i) const { return term_[i].chunks; }
  UNJAM_HD constexpr std::uint32_t slices() const {
    std::uint32_t sum = 0;
    for (std::uint32_t j = 0; j < terms(); ++j) sum += term_[j].chunks;
    return sum;
  }

  // The number of chunk l of term i. (Of l = chunks(i): that of a chunk more, if there were one.)
  UNJAM_HD constexpr std::uint32_t number(std::uint32_t i, std::uint32_t l) const {
    if constexpr (kMost == 1) return l;
    std::uint32_t before = 0;
    for (std::uint32_t j = 0; j < terms(); ++j) before += before_chunk(i, l, j);
    return before;
  }

  // Of the slices of the first done[i] chunks of each term, how many come in front of all that are
  // missing: a program that stopped may say that it has moved so many.
  UNJAM_HD constexpr std::uint32_t prefix(const std::uint32_t* done) const {
    std::uint32_t least = slices();
    for (std::uint32_t i = 0; i < terms(); ++i) {
      if (done[i] == term_[i].chunks) continue;
      const std::uint32_t missing = number(i, done[i]);
      if (missing < least) least = missing;
    }
    return least;
  }

  // How many of the first `prefix` slices are term i's.
  UNJAM_HD constexpr std::uint32_t count_in(std::uint32_t i, std::uint32_t prefix) const {
    if constexpr (kMost == 1) return prefix < term_[0].chunks ? prefix : term_[0].chunks;
    // Numbers grow with chunks: the first one that is not in front.
    std::uint32_t low = 0, high = term_[i].chunks < prefix ? term_[i].chunks : prefix;
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (number(i, middle) < prefix) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // The term whose next chunk comes next, if the first done[i] chunks of each are through; terms():
  // all are.
  UNJAM_HD constexpr std::uint32_t next(const std::uint32_t* done) const {
    std::uint32_t first = terms(), pass = 0;
    for (std::uint32_t i = 0; i < terms(); ++i) {
      if (done[i] == term_[i].chunks) continue;
      const std::uint32_t its = done[i] + term_[i].lag;
      if (first != terms() && its >= pass) continue;
      first = i;
      pass = its;
    }
    return first;
  }

  // Of term j, the chunks that come in front of chunk l of term i, whether or not i and j use one
  // connector: what a program has moved when it comes to that chunk.
  UNJAM_HD constexpr std::uint32_t before_chunk(std::uint32_t i, std::uint32_t l,
                                                std::uint32_t j) const {
    const std::uint32_t ahead = l + term_[i].lag + (j < i ? 1 : 0);
    const std::uint32_t count = ahead > term_[j].lag ? ahead - term_[j].lag : 0;
    return count < term_[j].chunks ? count : term_[j].chunks;
  }

 private:
  SliceTerm term_[kMost] = {};
  std::uint32_t terms_ = 0;
};

}  // namespace unjam
