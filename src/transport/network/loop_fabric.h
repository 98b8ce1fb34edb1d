// A carrier between processes that are none: all are in this one. For tests and the schedule
// explorer: it does with frames whatever a network may do, and whoever chooses says what.
//
// A frame may wait, frames may overtake each other, payloads come in pieces of several frames in
// turn, and a connection may be cut at any time. It reads a payload where its sender has it until
// it is delivered, or copies it before (then the sender is told at once). That the sender may write
// its payload again it says when it likes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "transport/network/carver.h"
#include "transport/network/fabric.h"

namespace unjam {

struct LoopOptions {
  std::uint32_t processes = 2;
  std::uint32_t depth = 8;         // frames that a connection and channel holds
  std::uint32_t piece = 0;         // bytes delivered at once; 0: all
  std::uint32_t copied_bytes = 0;  // payloads up to so long may be copied when they are sent
  bool reorders = true;
  // Any number below n: what happens next. Called by whoever polls or sends, by several at once
  // perhaps, never with a lock. nullptr: always 0.
  //   kDelivers  the frame, by age, that gets on; n - 1: none
  //   kLetsGo    the payload that is not needed any more; n - 1: none
  //   kCopies    1: the payload is copied as it is sent
  enum class Choice { kDelivers, kLetsGo, kCopies };
  std::uint32_t (*choose)(void* context, Choice what, std::uint32_t n) = nullptr;
  void* context = nullptr;  // handed through
};

// What all its ends share.
class LoopNet {
 public:
  static std::size_t memory_bytes(const LoopOptions& options);
  LoopNet(const LoopOptions& options, unsigned char* memory);

  // Both ends are told, as of a carrier's error, when they poll.
  void cut(std::uint32_t a, std::uint32_t b);
  // Whether no frame is under way.
  bool empty();

  // For tests, of what frames a correct courier never sees: of type `loses` none is delivered, and
  // data come again after they came (so that none is lost, but what is repeated is late).
  std::uint8_t loses = 0;
  bool repeats = false;

  // Whether a payload was ever written to before it was let go.
  bool overwritten();

 private:
  friend class LoopFabric;
  enum class Stage : std::uint8_t { kFree, kUnderWay, kLanded, kDelivering, kDelivered };
  struct Entry {
    Stage stage = Stage::kFree;
    bool let_go = false;  // the sender was told
    bool again = false;   // it was delivered before
    std::uint64_t order = 0;
    FrameBytes head;
    const unsigned char* payload = nullptr;
    unsigned char* copy = nullptr;  // room for one
    std::uint32_t bytes = 0, done = 0;
    std::uint64_t cookie = 0;
    std::uint64_t sum = 0;  // of the payload as it was sent
    Landing landing;
  };
  struct Way {
    bool cut = false;
    bool told = false;    // whom it leads to
    bool closed = false;  // by either end
    std::uint64_t sent = 0;
  };
  Way& way(std::uint32_t from, std::uint32_t to) { return ways_[from * options_.processes + to]; }
  Entry* entries(std::uint32_t from, std::uint32_t to, std::uint32_t channel) {
    return entries_ +
           ((std::size_t{from} * options_.processes + to) * kChannels + channel) * options_.depth;
  }

  const LoopOptions options_;
  std::mutex mutex_;  // never held where anything can wait
  bool overwritten_ = false;
  Way* ways_ = nullptr;
  Entry* entries_ = nullptr;
};

class LoopFabric final : public Fabric {
 public:
  LoopFabric(LoopNet& net, std::uint32_t self) : net_(net), self_(self) {}

  bool send(std::uint32_t peer, FrameChannel channel, const FrameBytes& head,
            const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) override;
  bool poll(FabricSink& sink) override;
  void close(std::uint32_t peer) override;

 private:
  std::uint32_t choose(LoopOptions::Choice what, std::uint32_t n) const;
  bool let_go(std::uint32_t peer, std::uint32_t channel, FabricSink& sink);
  bool deliver(std::uint32_t peer, std::uint32_t channel, FabricSink& sink);

  LoopNet& net_;
  const std::uint32_t self_;
};

}  // namespace unjam
