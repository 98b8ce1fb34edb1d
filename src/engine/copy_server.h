// Who carries out what lanes post (copy_ring.h): looks at the rings by turns, and hands what it has
// found for a peer to copy engines, together. Posts that continue each other at both ends become
// one copy: for each copy takes the driver about as long as it takes an engine to move half a
// megabyte. On the host; one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/copy_ring.h"

namespace unjam {

// What copies. What is given later for a peer is done later.
class CopyEngines {
 public:
  virtual ~CopyEngines() = default;
  // Begins these, and behind them stores how many posts are done where lanes look for it. False: it
  // cannot, and nothing more is to be given to it.
  virtual bool issue(std::uint32_t peer, const std::vector<CopyPost>& copies,
                     std::uint64_t done) = 0;
  // Whether so much is under way to the peer that more had better wait, and go together then.
  virtual bool is_busy(std::uint32_t peer) = 0;
};

class CopyServer {
 public:
  // `rings`: [ranks]. `most_bytes`: of what is issued together. Copies ignore streams' priorities,
  // so this is what one of somebody else's waits for.
  CopyServer(CopyRing* rings, std::uint32_t ranks, std::uint64_t most_bytes)
      : rings_(rings), most_bytes_(most_bytes), taken_(ranks) {}

  enum class Swept { kNothing, kSome, kFailed };
  Swept sweep(CopyEngines& engines) {
    Swept swept = Swept::kNothing;
    for (std::uint32_t peer = 0; peer < taken_.size(); ++peer) {
      const std::uint64_t before = taken_[peer];
      // (Looked at first: it is in the cache, and what says whether the peer is busy may not be.)
      if (CopyPost post; !find_post(rings_[peer], before, post) || engines.is_busy(peer)) continue;
      copies_.clear();
      std::uint64_t bytes = 0;
      while (bytes < most_bytes_ && take(peer, bytes)) {
      }
      if (taken_[peer] == before) continue;
      if (!engines.issue(peer, copies_, taken_[peer])) return Swept::kFailed;
      ++batches_;
      swept = Swept::kSome;
    }
    return swept;
  }

  // So far.
  std::uint64_t posts() const { return posts_; }  // that were carried out
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
      add(post);
      bytes += post.bytes;
      ++posts_;
      bytes_ += post.bytes;
    }
    ++taken;
    return true;
  }

  void add(const CopyPost& post) {
    for (CopyPost& c : copies_) {
      if (c.source + c.bytes != post.source || c.target + c.bytes != post.target) continue;
      c.bytes += post.bytes;
      return;
    }
    copies_.push_back(post);
  }

  CopyRing* const rings_;
  const std::uint64_t most_bytes_;
  std::vector<std::uint64_t> taken_;  // posts of the peer's ring
  std::vector<CopyPost> copies_;
  std::uint64_t posts_ = 0, batches_ = 0, bytes_ = 0, dropped_ = 0;
};

}  // namespace unjam
