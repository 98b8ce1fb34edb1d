// Who carries out what lanes post (copy_ring.h): looks at the rings by turns, and hands what it has
// found for a peer to copy engines, together. On the host; one thread.
//
// To issue a short copy takes the driver longer than it takes an engine to move it. So posts are
// put together: those of a lane that continue each other at both ends are one; and such that lie
// alike in lanes one behind the other are rows of one, for their sources are as far apart as lanes'
// stretches, and their targets as lanes' slots. And while an engine has something to do, more is
// waited for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/copy_ring.h"

namespace unjam {

// Rows of `bytes`, so far apart; of one row pitches are 0.
struct CopyRows : CopyPost {
  std::uint32_t rows = 1;
  std::uint64_t source_pitch = 0, target_pitch = 0;
};

// What copies. What is given later for a peer is done later.
class CopyEngines {
 public:
  virtual ~CopyEngines() = default;
  // Begins these, and behind them stores how many posts are done where lanes look for it. False: it
  // cannot, and nothing more is to be given to it.
  virtual bool issue(std::uint32_t peer, const std::vector<CopyRows>& copies,
                     std::uint64_t done) = 0;
  // How often that was done for the peer, and has not come to its end.
  virtual std::uint64_t in_flight(std::uint32_t peer) = 0;
};

class CopyServer {
 public:
  // `rings`: [ranks]. `lane_pitch`: from a lane's slots to the next one's. `most_bytes`: of what is
  // issued together. Copies ignore streams' priorities, so this is what one of somebody else's
  // waits for.
  CopyServer(CopyRing* rings, std::uint32_t ranks, std::uint64_t lane_pitch,
             std::uint64_t most_bytes)
      : rings_(rings),
        lane_pitch_(std::max<std::uint64_t>(lane_pitch, 1)),
        most_bytes_(most_bytes),
        taken_(ranks) {}

  enum class Swept { kNothing, kSome, kFailed };
  Swept sweep(CopyEngines& engines) {
    Swept swept = Swept::kNothing;
    for (std::uint32_t peer = 0; peer < taken_.size(); ++peer) {
      const std::uint64_t before = taken_[peer];
      // (Looked at first: it is in the cache, and what says how much is under way may not be.)
      if (CopyPost post; !find_post(rings_[peer], before, post)) continue;
      const std::uint64_t batches = engines.in_flight(peer);
      if (batches >= kMostBatches || (batches != 0 && !is_worth_it(peer))) continue;
      found_.clear();
      std::uint64_t bytes = 0;
      while (bytes < most_bytes_ && take(peer, bytes)) {
      }
      if (taken_[peer] == before) continue;
      put_together();
      if (!engines.issue(peer, copies_, taken_[peer]) && !issue_apart(engines, peer, before)) {
        return Swept::kFailed;
      }
      ++batches_;
      copies_made_ += copies_.size();
      swept = Swept::kSome;
    }
    return swept;
  }

  // So far.
  std::uint64_t posts() const { return posts_; }         // that were carried out
  std::uint64_t copies() const { return copies_made_; }  // as which they were issued
  std::uint64_t batches() const { return batches_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t dropped() const { return dropped_; }  // taken back before they were claimed

 private:
  bool take(std::uint32_t peer, std::uint64_t& bytes) {
    CopyRing& ring = rings_[peer];
    std::uint64_t& taken = taken_[peer];
    CopyPost post;
    if (!find_post(ring, taken, post)) return false;
    // (Who takes back what is claimed here does not wait for it.)
    if (is_taken_back(ring, taken)) {
      ++dropped_;
    } else if (post.bytes != 0) {
      found_.push_back(post);
      bytes += post.bytes;
      ++posts_;
      bytes_ += post.bytes;
    }
    ++taken;
    return true;
  }

  // What was refused together, one by one: calls' buffers may lie so that their posts continue each
  // other, and the driver copies within one allocation alone. (What is copied twice is the same.) A
  // copy that was taken back may read what was freed since, and need not be made.
  bool issue_apart(CopyEngines& engines, std::uint32_t peer, std::uint64_t from) {
    for (std::uint64_t n = from; n != taken_[peer]; ++n) {
      CopyPost post;
      copies_.clear();
      const bool wanted = find_post(rings_[peer], n, post) && !is_taken_back(rings_[peer], n);
      if (wanted && post.bytes != 0) copies_.push_back({post});
      if (engines.issue(peer, copies_, n + 1)) continue;
      if (!is_taken_back(rings_[peer], n) || !engines.issue(peer, {}, n + 1)) return false;
    }
    return true;
  }

  // Whether what is posted would keep an engine busy for about as long as issuing it takes.
  bool is_worth_it(std::uint32_t peer) const {
    std::uint64_t bytes = 0;
    CopyPost post;
    for (std::uint64_t n = taken_[peer]; bytes < most_bytes_ / 2; ++n) {
      if (!find_post(rings_[peer], n, post)) return false;
      bytes += post.bytes;
    }
    return true;
  }

  void put_together() {
    std::sort(found_.begin(), found_.end(),
              [](const CopyPost& x, const CopyPost& y) { return x.target < y.target; });
    std::size_t runs = 0;
    for (const CopyPost& post : found_) {
      CopyPost* const run = runs == 0 ? nullptr : &found_[runs - 1];
      if (run != nullptr && run->source + run->bytes == post.source &&
          run->target + run->bytes == post.target) {
        run->bytes += post.bytes;
      } else {
        found_[runs++] = post;
      }
    }
    found_.resize(runs);
    const auto place = [&](const CopyPost& x) { return x.target % lane_pitch_; };
    std::sort(found_.begin(), found_.end(), [&](const CopyPost& x, const CopyPost& y) {
      return std::pair(place(x), x.target) < std::pair(place(y), y.target);
    });
    copies_.clear();
    for (std::size_t i = 0; i < runs;) {
      CopyRows c{found_[i]};
      std::size_t end = i + 1;
      // (Unsigned: a source that lies in front of the one before gives a pitch that is too long.)
      const std::uint64_t pitch = end < runs ? found_[end].source - c.source : 0;
      while (pitch >= c.bytes && pitch <= kMostPitch && end < runs &&
             found_[end].bytes == c.bytes &&
             found_[end].target == c.target + c.rows * lane_pitch_ &&
             found_[end].source == c.source + c.rows * pitch) {
        ++c.rows;
        ++end;
      }
      if (c.rows > 1) {
        c.source_pitch = pitch;
        c.target_pitch = lane_pitch_;
      }
      copies_.push_back(c);
      i = end;
    }
  }

  // At most so many at once: the next is there when one ends.
  static constexpr std::uint64_t kMostBatches = 2;
  static constexpr std::uint64_t kMostPitch = 0x7fffffff;  // as the driver has it
  CopyRing* const rings_;
  const std::uint64_t lane_pitch_, most_bytes_;
  std::vector<std::uint64_t> taken_;  // posts of the peer's ring
  std::vector<CopyPost> found_;
  std::vector<CopyRows> copies_;
  std::uint64_t posts_ = 0, batches_ = 0, copies_made_ = 0, bytes_ = 0, dropped_ = 0;
};

}  // namespace unjam
