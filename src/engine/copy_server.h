// Who carries out what lanes post (copy_ring.h): looks at all rings by turns, and hands what it has
// found for a peer to copy engines, together, so that many short copies cost about as much as one.
// On the host; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/copy_ring.h"

namespace unjam {

// What copies. Both of one peer after the other: what is given later is done later.
class CopyEngines {
 public:
  virtual ~CopyEngines() = default;
  // Copies of a lane that are done when these are: how many, ever.
  struct Done {
    std::uint32_t lane = 0;
    std::uint64_t count = 0;
  };
  // Begins these, and behind them stores the counts where the lanes look for them. False: it
  // cannot, and nothing more is to be given to it.
  virtual bool issue(std::uint32_t peer, const std::vector<CopyPost>& copies,
                     const std::vector<Done>& done) = 0;
  // Bytes that were issued for the peer and have not come there yet.
  virtual std::uint64_t in_flight(std::uint32_t peer) = 0;
};

class CopyServer {
 public:
  // `rings`: [lanes][ranks]. `most_in_flight`: bytes a peer. Copies ignore streams' priorities, so
  // this is what one of somebody else's waits for at most.
  CopyServer(CopyRing* rings, std::uint32_t lanes, std::uint32_t ranks,
             std::uint64_t most_in_flight)
      : rings_(rings),
        lanes_(lanes),
        ranks_(ranks),
        most_in_flight_(most_in_flight),
        taken_(std::size_t{lanes} * ranks) {}

  enum class Swept { kNothing, kSome, kFailed };
  Swept sweep(CopyEngines& engines) {
    Swept swept = Swept::kNothing;
    for (std::uint32_t peer = 0; peer < ranks_; ++peer) {
      std::uint64_t bytes = engines.in_flight(peer);
      copies_.clear();
      done_.clear();
      // (A turn each, so that no lane's posts hold up the others'.)
      for (bool found = true; found && bytes < most_in_flight_;) {
        found = false;
        for (std::uint32_t lane = 0; lane < lanes_ && bytes < most_in_flight_; ++lane) {
          found = take(peer, lane, bytes) || found;
        }
      }
      if (done_.empty()) continue;
      if (!engines.issue(peer, copies_, done_)) return Swept::kFailed;
      swept = Swept::kSome;
    }
    return swept;
  }

  // So far. Of these, taken back before they were claimed.
  std::uint64_t posts() const { return posts_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t dropped() const { return dropped_; }

 private:
  bool take(std::uint32_t peer, std::uint32_t lane, std::uint64_t& bytes) {
    const std::size_t at = std::size_t{lane} * ranks_ + peer;
    CopyRing& ring = rings_[at];
    CopyPost post;
    if (!find_post(ring, taken_[at], post)) return false;
    // (Who takes back what is claimed here does not wait for it.)
    if (taken_[at] < load_acquire(ring.taken_back)) {
      ++dropped_;
    } else if (post.bytes != 0) {
      copies_.push_back(post);
      bytes += post.bytes;
      ++posts_;
      bytes_ += post.bytes;
    }
    ++taken_[at];
    if (!done_.empty() && done_.back().lane == lane) {
      done_.back().count = taken_[at];
      return true;
    }
    for (CopyEngines::Done& d : done_) {
      if (d.lane != lane) continue;
      d.count = taken_[at];
      return true;
    }
    done_.push_back({lane, taken_[at]});
    return true;
  }

  CopyRing* const rings_;
  const std::uint32_t lanes_, ranks_;
  const std::uint64_t most_in_flight_;
  std::vector<std::uint64_t> taken_;  // [lanes][ranks]: posts of the ring
  std::vector<CopyPost> copies_;
  std::vector<CopyEngines::Done> done_;
  std::uint64_t posts_ = 0, bytes_ = 0, dropped_ = 0;
};

}  // namespace unjam
