// The courier of a process: takes what its lanes have posted into mirrors (mirror.h) to ranks on
// other hosts, as frames (frame.h) over a carrier (fabric.h), and what comes from there into the
// arenas here. It has no thread: whoever waits, drives it, one at a time.
//
// The invariant. *A frame is sent only for a place that its sender owns, so a receiving courier
// always puts it away at once: without memory, a lock, or an engine.* For
//   - a step is sent when a lane has posted it, which it does into a grant() alone. So the step's
//     header, and its slot, were the sender's by credit: a credit that has come from the receiver,
//     whose reader is through with whatever was there before. They stay the sender's until the
//     receiver consumes this very step. Both ends count alike, so the receiver can tell: it knows
//     what it has consumed (never less than what it has given credit for), and which step has used
//     each pool slot last;
//   - a connector's new owner begins where all that was posted before was consumed;
//   - credits, the end of a listing, announcements and the good-bye have words of their own, which
//     later values replace.
// It is checked for each frame before a byte is written (refusal()). One without a place is an
// error of its sender's, and ends that peer.
//
// Why nothing can deadlock. Connections always drain, so one may be shared by all connectors. What
// the carrier does not take now stays where it is: in mirrors, whose slots lanes cannot reuse. A
// lane without credit has no room, which is an attempt that has changed nothing. So a network is a
// delay between a post and its sight.
//
// Slots under a carrier's hands. Payload is read straight from the mirror, and a lane reuses a slot
// when it sees its credit. So credits that have come are shown up to what the carrier has let go
// of, and no further. A step that was posted and not shown as consumed keeps its connector with its
// owner, and that is all that the courier relies on when it reads what lanes write.
//
// Marks (LaneTransport::mark_void()) do not travel. Shown to the sender's lane they would let it
// reuse slots that a carrier reads, or whose frames are still under way. Instead the receiving
// courier consumes in the reader's place, so that the sender gets its slots back by credit, as
// ever. It looks at marks when a lane says that it has left some (leave_marks()), and for each step
// that comes. As everywhere, a mark that a later one has replaced costs a connector, no more.
//
// Order. Nothing is asked of the carrier. Steps of a connector may overtake each other: each says
// where it belongs. Credits only grow. An owner's first frame at a connector is behind the last
// credit of the former one. kUnlist names the base of what it ends, which no later owner shares.
// kBye says how many frames came before it.
//
// Loads and stores of arenas' words are ordered as connector.h says of the rank for which the
// courier stores or loads; what differs has its argument beside it. All else is the driver's own,
// and goes from one driver to the next through `driven_`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/arena.h"
#include "transport/connector.h"
#include "transport/network/carver.h"
#include "transport/network/fabric.h"
#include "transport/network/frame.h"
#include "transport/network/mirror.h"

namespace unjam {

// What a courier tells those whose courier it is. Called by whoever drives; none may drive.
class CourierHome {
 public:
  virtual ~CourierHome() = default;

  enum class Came { kData, kRoom };
  // There is something for this lane of a rank here. What is there was stored before; to be told
  // with a release.
  virtual void ring(std::uint32_t rank, std::uint32_t lane, Came what) = 0;
  // Once, at most, for each peer.
  virtual void gone(std::uint32_t peer, const char* why) = 0;
  // It has said good-bye, and all that it has sent is here.
  virtual void left(std::uint32_t peer) = 0;
  // A rank elsewhere has announced something else than stands in rank's arena (announcement.h), or
  // what has ended.
  virtual void differs(std::uint32_t rank, std::uint32_t place, std::uint64_t found,
                       std::uint64_t announced) = 0;
};

// In the place of the number of a process that is another one of this host: its ranks share memory
// with those here, and are none of a courier's business.
inline constexpr std::uint16_t kBeside = 0xffff;

struct CourierSettings {
  ArenaShape shape;
  std::uint32_t processes = 1, self = 0;
  const std::uint16_t* process_of = nullptr;     // [ranks], or kBeside
  unsigned char* const* const* bases = nullptr;  // [ranks], of those here: LaneTransport::bases
  std::uint64_t window = 512 << 10;  // bytes that a peer's carrier is given at once, a channel
};

struct CourierCounts {
  std::uint64_t sent = 0, came = 0;  // frames
  std::uint64_t dropped = 0;         // that were here already
  std::uint64_t refused = 0;         // after which a peer is gone
};

class Courier final : public FabricSink {
 public:
  // All that it will ever need.
  static std::size_t memory_bytes(const CourierSettings& settings);
  // `memory`: so many bytes, aligned to Carver::kAlignment. What the settings point to, too, has to
  // outlive the courier.
  Courier(const CourierSettings& settings, unsigned char* memory, Fabric& fabric,
          CourierHome& home);

  // ---- for lanes of a rank here ----

  bool is_here(std::uint32_t rank) const { return process_of_[rank] == self_; }
  bool is_remote(std::uint32_t rank) const {
    return !is_here(rank) && process_of_[rank] != kBeside;
  }
  // Device's posted(). False: the peer is on this host.
  bool posted(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer,
              const PublishedWord& word);
  void marked(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer);
  // LaneTransport::groups.
  std::uint64_t* const* groups(std::uint32_t rank, std::uint32_t lane) const;

  // ---- from anywhere ----

  // Moves what can be moved now, and never waits. Whether anything has moved; false, too, if
  // another thread is at it, who may have looked before what this one knows of was there.
  bool drive();
  // To be called before one sleeps on the fabric's descriptor(), as drive() is, since the fabric
  // has one caller at a time. False: drive again, there is something to move, or another thread is
  // at it.
  bool arm();
  // Something was announced in a mirror.
  void announced();
  // Says good-bye to the peer when all that lanes have posted until then has gone out.
  void leave(std::uint32_t peer);

  // By whoever drives.
  const CourierCounts& counts() const { return counts_; }
  bool is_gone(std::uint32_t peer) const { return peers_[peer].state == State::kGone; }

  // ---- for the fabric ----

  Landing land(std::uint32_t peer, const FrameBytes& head) override;
  void arrived(std::uint32_t peer, const FrameBytes& head, std::uint64_t cookie) override;
  void sent(std::uint32_t peer, std::uint64_t cookie) override;
  void broken(std::uint32_t peer, const char* why) override;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  // Payloads that go in front of longer ones.
  static constexpr std::uint32_t kShortBytes = 8192;

  // A connector of a rank here to a remote one.
  struct Out {
    // Whose steps were sent last; no tag: it was never sent to, or its listing has ended.
    std::uint64_t tag = 0, base = 0;
    std::uint64_t sent = 0;      // steps that the carrier was given
    std::uint64_t complete = 0;  // those below it the carrier does not read any more
    std::uint64_t credit = 0;    // consumed, as has come
    std::uint64_t shown = 0;     // consumed, as the lane sees
    std::uint32_t next = kNone;
    std::uint32_t next_unlist = kNone;
    std::uint16_t completed = 0;  // of steps from `complete` on, by step modulo 16
    bool queued = false, unlists = false, in_unlists = false;
  };
  // A connector of a remote rank to one here.
  struct In {
    std::uint64_t tag = 0, base = 0, group = 0;  // of the owner
    std::uint64_t frontier = 0;                  // all steps below it are here
    std::uint64_t given_up = 0;  // consumed in the place of a reader that will never come
    std::uint64_t credited = 0;  // consumed, as the sender was told
    std::uint32_t place = 0;     // in the directory
    std::uint32_t next = kNone;
    std::uint16_t claimed = 0;  // of steps from `frontier` on, by step modulo 16: under way here
    std::uint16_t here = 0;     // and those that are here
    bool begun = false;         // it has had an owner
    bool ended = false;         // the owner's listing has ended
    bool listed = false;        // the owner is in the directory
    bool queued = false;
  };
  static_assert(kSlotHeaders == 16, "steps of a connector have a bit each");
  static constexpr std::uint32_t bit(std::uint64_t step) { return 1u << step % kSlotHeaders; }
  struct Borrowed {
    std::uint32_t connector = 0;
    std::uint64_t step_end = 0;  // free when the connector's steps below it were consumed; 0: free
  };
  struct Fifo {
    std::uint32_t head = kNone, tail = kNone;
  };
  // A lane of a rank here, and of one remote rank.
  struct Route {
    std::uint16_t rank = 0, peer = 0;
    std::uint32_t lane = 0, process = 0;
    // The parts of the two arenas: for the peer in ours, and for us in its mirror.
    unsigned char* own = nullptr;
    unsigned char* mirror = nullptr;
    PostBoard board;
    std::uint64_t seen_data = 0, seen_credits = 0, seen_marks = 0;
    Out* out = nullptr;
    In* in = nullptr;
    Borrowed* borrowed = nullptr;
    Fifo steps[kChannels], credits, unlists;
    std::uint32_t longest_probe = 0;
    std::uint32_t allowance[kChannels] = {};  // bytes of its turn
  };
  enum class State : std::uint8_t { kOpen, kLeft, kGone };
  struct Peer {
    State state = State::kOpen;
    std::uint32_t first = 0, count = 0;  // in by_process_
    std::uint32_t turn[kChannels] = {};
    std::uint64_t under_way[kChannels] = {};
    std::uint64_t sent = 0, came = 0;
    std::uint64_t bye = ~std::uint64_t{0};  // frames that come before it
    std::uint32_t leaves = 0;               // written from anywhere
    bool has_left = false;                  // we have said good-bye
  };
  // Announcements of ranks here for a remote rank.
  struct Announcements {
    std::uint16_t home = 0;
    const std::uint64_t* mirror = nullptr;
    std::uint64_t* sent = nullptr;  // [kAnnouncements]
    std::uint64_t seen = 0;
  };

  void carve(Carver& carver);
  bool take_driving();
  Route* route(std::uint32_t rank, std::uint32_t peer, std::uint32_t lane) const;
  bool look();
  bool look(Route& r);
  bool speak(std::uint32_t p);
  bool send_steps(Peer& peer, std::uint32_t p, FrameChannel channel);
  bool send_step(Route& r, std::uint32_t i, FrameChannel channel, std::uint32_t bytes);
  bool send_credits(Route& r);
  bool send_unlists(Route& r);
  bool send_announcements(std::uint32_t p);
  void send_bye(std::uint32_t p);
  bool idle(const Peer& peer) const;
  bool send_head(std::uint32_t p, const CourierFrame& frame);

  void queue_steps(Route& r, std::uint32_t i);
  void queue_credit(Route& r, std::uint32_t i);
  void end_listing(Route& r, std::uint32_t but, std::uint64_t tag);
  void show(Route& r, std::uint32_t i);

  Route* checked_route(std::uint32_t p, const CourierFrame& f) const;
  const char* refusal(Route& r, const CourierFrame& f, bool* drop);
  void put_data(Route& r, const CourierFrame& f);
  const char* put(std::uint32_t p, const CourierFrame& f);
  const char* put_unlist(Route& r, const CourierFrame& f);
  void put_announcement(const CourierFrame& f);
  void list(Route& r, std::uint32_t i);
  void leave_place(Route& r, In& in);
  std::uint64_t consumed(Route& r, std::uint32_t i);
  void give_up_if_marked(Route& r, std::uint32_t i);
  void fail(std::uint32_t p, const char* why);

  CreditCell* cells(unsigned char* part) const { return reinterpret_cast<CreditCell*>(part); }
  DirectoryEntry* entries(unsigned char* part) const {
    return reinterpret_cast<DirectoryEntry*>(part + shape_.entries_offset());
  }
  std::uint64_t* places(unsigned char* part) const {
    return reinterpret_cast<std::uint64_t*>(part + shape_.places_offset());
  }
  // A connector's steps in the arena, or the mirror, that has this part.
  unsigned char* steps(unsigned char* part, std::uint32_t lane, std::uint32_t i) const {
    return part - shape_.head(lane) + shape_.connector(lane, i);
  }
  unsigned char* slot_of(unsigned char* part, std::uint32_t lane, std::uint32_t i,
                         std::uint64_t step, std::uint32_t location) const;
  std::uint32_t step_bytes(Route& r, std::uint32_t i, std::uint64_t step) const;

  const ArenaShape shape_;
  const std::uint32_t processes_, self_;
  const std::uint16_t* const process_of_;
  unsigned char* const* const* const bases_;
  const std::uint64_t window_;
  Fabric& fabric_;
  CourierHome& home_;

  std::uint32_t here_ = 0, elsewhere_ = 0;  // ranks
  std::uint16_t* index_ = nullptr;          // [ranks], among those here, or among the others
  Route* routes_ = nullptr;
  std::uint32_t num_routes_ = 0;
  std::uint32_t* by_process_ = nullptr;
  std::uint64_t** groups_ = nullptr;  // [rank here][lane][ranks]
  Peer* peers_ = nullptr;
  Announcements* announcements_ = nullptr;  // [ranks elsewhere]
  CourierCounts counts_;
  // Of its own: written from anywhere.
  alignas(64) std::uint64_t announced_ = 0;
  alignas(64) std::uint32_t driven_ = 0;
};

}  // namespace unjam
