// What processes of a job say to each other: at the rendezvous (rendezvous.h) and afterwards
// (mesh.h). Encoded as wire.h says; decode() is false for anything that is not exactly one message.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/cpu_set.h"
#include "control/waitfor.h"

namespace unjam {

inline constexpr std::uint32_t kProtocolVersion = 10;
inline constexpr std::size_t kLongestText = 1 << 16;
inline constexpr std::size_t kLongestHostId = 64;
// Before and after the other end has proved that it knows the secret.
inline constexpr std::size_t kLongestStrangerFrame = 256;
inline constexpr std::size_t kLongestFrame = 64 << 20;
inline constexpr std::size_t kLongestJoinFrame = 1 << 16;

enum class MessageType : std::uint16_t {
  // Rendezvous. S: sent by the server.
  kHello = 1,  // S
  kProof,      // by both, first the client
  kRefused,    // S: of one rank, or of the connection
  kJoin,       // with the arena's descriptor
  kWho,        // who is there by now?
  kPresent,    // S: the answer
  kFailed,     // by both: the job will not come to be
  kStart,      // S: all are there; with a socket by which the rest comes (hand_out.h)
  kMemory,     // S: of ranks of other processes, with its descriptors
  kPeers,      // S: for each other process a connected socket and, mostly, its pidfd
  // Between the processes of a running job.
  kGone = 32,
  kDeparted,
  kQuery,
  kAnswer,
  kFail,
  kSnapshotRequest,
  kSnapshot,
  kWindow,
  kWindowGone,
  kWindowLetGo,
  kGaveUp,
  kRoom,  // with the memory's descriptor, where one is offered that has one
  // Between processes of several hosts.
  kGreeting,  // the first word of each on a connection between hosts
  kBeat,      // nothing, but that the sender is there
  kLost,      // the sender has lost a process of another host
  kAllHere,   // all that the receiver has ever sent by its carrier is here
};

struct HelloMessage {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t nonce[2] = {};
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct ProofMessage {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t nonce[2] = {};
  std::uint64_t tag[2] = {};
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct RefusedMessage {
  std::int32_t rank = -1;  // -1: the whole connection
  std::int32_t code = 0;   // an unjamResult_t
  std::string text;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct JoinMessage {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint64_t arena_bytes = 0;
  std::string settings;     // that must be equal on all ranks
  std::string host;         // as which it counts (UNJAM_HOST_ID); "": it says nothing
  CpuSet cpus;              // on which it may run; none: it does not know
  std::uint64_t files = 0;  // that its process may open besides those it has open
  std::uint32_t here = 0;   // so many ranks meet here, and others elsewhere; 0: all
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// Of one that knows how many ranks there are: who has joined by now.
struct PresentMessage {
  std::vector<std::uint64_t> joined;  // bit r % 64 of word r / 64: rank r
  bool has(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return r / 64 < joined.size() && (joined[r / 64] >> r % 64 & 1) != 0;
  }
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct FailedMessage {
  std::string text;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct StartMessage {
  static constexpr std::uint32_t kElsewhere = 0xffffffff;
  std::uint32_t me = 0;                   // the receiver's index among the processes
  std::vector<std::uint32_t> process_of;  // by rank; kElsewhere: it does not meet here
  std::vector<std::int64_t> pids;         // by process
  // As which hosts ranks count, in the order of their first ranks. None: no rank has said it.
  std::vector<std::string> hosts;
  std::vector<std::uint32_t> host_of;  // by rank; as long as process_of, or empty
  CpuSet cpus;                         // on which any rank may run
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// kMemory: of which ranks, kPeers: of which processes the message's descriptors are, in order.
inline constexpr std::size_t kMostHanded = 64, kMostFdsOfOne = 2;
struct HandedMessage {
  struct Item {
    std::uint32_t of = 0;
    std::uint8_t fds = 1;  // so many are its
  };
  std::vector<Item> items;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// A rank was aborted, or its process ends without having left.
struct GoneMessage {
  std::uint32_t rank = 0;
  bool ended = false;  // the latter: what it has completed counts, see transport/ledger.h
  std::string why;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// A rank has met the end of others: it may make no more calls in their groups.
struct GaveUpMessage {
  std::uint32_t rank = 0;
  std::vector<std::uint32_t> of;  // ranks that are gone
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// A rank has left, with all its calls complete; how often it has called each key, and what of that
// its peers may have yet to take (RankSnapshot::untaken).
struct DepartedMessage {
  std::uint32_t rank = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> calls;  // (tag, count)
  std::vector<PendingCall> untaken;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// What have your ranks called as use n of these keys?
inline constexpr std::size_t kMostQuestions = 4096;  // in a message
struct QueryMessage {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> calls;  // (tag, n)
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct SaidItem {
  std::uint64_t tag = 0;
  std::uint64_t n = 0;
  std::uint32_t rank = 0;
  bool called = false;
  std::string signature;  // "" if called, and too long ago to know
};
struct AnswerMessage {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> asked;  // as in the query
  std::vector<SaidItem> said;  // by members among the sender's ranks that know the key
  // Disagreements that the sender knows of, for keys that were asked about.
  struct Known {
    std::uint64_t tag = 0;
    std::uint64_t n = 0;
    std::string text;
  };
  std::vector<Known> known;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// Use n of the key has failed, for all ranks.
struct FailMessage {
  std::uint64_t tag = 0;
  std::uint64_t n = 0;
  std::int32_t code = 0;  // an unjamResult_t
  std::string text;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct SnapshotRequestMessage {
  std::uint64_t number = 0;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct SnapshotMessage {
  std::uint64_t number = 0;  // of the request
  std::vector<RankSnapshot> ranks;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// Of a process, to one on another host: who it is, and what its peer has to know.
inline constexpr std::size_t kLongestCarrierAddress = 1 << 15;
struct GreetingMessage {
  std::uint32_t from = 0, to = 0;  // processes
  std::int64_t pid = 0;
  CpuSet cpus;          // on which its ranks may run
  std::string carrier;  // its carrier's address for the receiver
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// A process that the sender has lost: to the receiver it is lost, too.
struct LostMessage {
  std::uint32_t process = 0;
  std::string why;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// Of a rank's user, memory that peers may map and store into (transport/windows.h).
inline constexpr std::size_t kLongestWindowName = 64;
struct WindowMessage {
  std::uint32_t rank = 0;
  std::uint64_t serial = 0;
  std::string allocation;    // by what name the device knows it,
  std::uint64_t offset = 0;  // and the window's beginning in it, in bytes
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// It is not to be stored into any more.
struct WindowGoneMessage {
  std::uint32_t rank = 0;
  std::uint64_t serial = 0;
  bool stored_into = false;  // somebody may be at it all the same: the mapping is to stay
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// The answer, but where the mapping stays: the sender's ranks no longer have it mapped.
struct WindowLetGoMessage {
  std::uint32_t rank = 0;  // whose it was
  std::uint64_t serial = 0;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// About the block of rank `owner`'s arena that is for rank `peer` (transport/rooms.h), by either
// one's process: that it has memory for so many connectors; or, by the peer's, that it wants that.
struct RoomMessage {
  std::uint32_t owner = 0;
  std::uint32_t peer = 0;
  std::uint32_t connectors = 0;
  bool offers = false;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

}  // namespace unjam
