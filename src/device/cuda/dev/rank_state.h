// What a rank's kernels and its host share: the layout of its device memory beyond the engine's own
// state, and of its pinned memory.
#pragma once

#include <cstdint>

#include "device/cuda/dev/residency.h"
#include "device/cuda/dev/stream_call.h"
#include "device/cuda/placement/cluster_placement.h"
#include "device/cuda/placement/lane_placement.h"
#include "engine/copy_ring.h"
#include "engine/cuda_driver.h"
#include "engine/state.h"

namespace unjam {

// Longest program and largest group that a submission carries: a ring of all ranks that a job has.
inline constexpr std::uint32_t kMaxProgram = 2 * kMaxCudaRanks;

// A submission: what on the host are pointers into plans and groups goes along with it. In pinned
// memory (the SQ), or in a kernel's arguments.
struct alignas(16) CudaSqe {
  Invocation inv;  // program, members and, of commands, input are filled in by the device
  // Of a key that the engine sets up: what its state begins as.
  std::uint64_t key_tag = 0;
  std::uint64_t key_group = 0;
  std::uint64_t key_done = 0;
  std::uint32_t fresh = 0;
  std::uint32_t pad = 0;
  PeerSet sets[kMostSets];
  Primitive program[kMaxProgram];
  std::uint16_t members[kMaxCudaRanks];
  std::uint16_t neighbours[kMostNeighbours + 1];
};
// The same in device memory, by slot.
struct alignas(16) CudaTables {
  PeerSet sets[kMostSets];
  std::uint16_t members[kMaxCudaRanks];
  std::uint16_t neighbours[kMostNeighbours + 1];
};

inline constexpr std::uint32_t kGoneWords = (kMaxCudaRanks + 63) / 64;
// Of 32 bits, of a set of ranks of the job.
inline constexpr std::uint32_t kRankWords = (kMaxCudaRanks + 31) / 32;

// In the rank's link (cuda_driver.h), which its peers' devices reach too. One writer a word.
struct CudaLink {
  HostLink residency;
  // Stored by the host. Bit 0: all engines leave for good. The rest counts cancellations.
  alignas(kFalseSharingBytes) std::uint32_t attention;
  std::uint64_t gone[kGoneWords];  // ranks that are gone, as bits
  std::uint64_t sq_written;        // submissions so far
  // By peers' lanes, about when they have written something for this rank (it may come a little
  // later, see exec/packets/tell.cuh): another value each time. What
  // a rank's launcher looks at while no engine of it is resident.
  alignas(kFalseSharingBytes) std::uint32_t pokes[kMaxCudaRanks][kMaxLanes];
};
static_assert(sizeof(CudaLink) <= kLinkBytes);
inline constexpr std::uint32_t kAttentionStop = 1;

// How a kernel that is an engine came to be.
enum class EngineKind : std::uint32_t {
  kDaemon,  // launched by the host: nobody waits for it
  kCall,    // in a stream, brings an invocation and ends with it
  kWait,    // in a stream, ends with an invocation that was submitted before
};

// The kernels' arguments.
struct EngineLaunch {
  EngineKind kind = EngineKind::kDaemon;
  std::uint32_t slot = 0;    // that it ends with, if it is a wait
  std::uint64_t serial = 0;  // of the invocation there; of daemons: their generation, unique
  std::uint32_t choice = 0;  // of daemons, 0 and 1 by turns: LanePlacement::choose()
};
struct CudaLaunch {
  std::uint32_t slot = 0;
  std::uint64_t serial = 0;
  CudaSqe sqe;
  StreamCall call;
};
static_assert(sizeof(CudaLaunch) <= 4096, "fits a kernel's arguments");

// What the host submits for the engine to take.
struct alignas(16) CudaSubmission {
  CudaSqe sqe;
  StreamCall call;  // if Invocation::batch is not 0
};

inline constexpr std::uint32_t kGenerations = 64;

// What lanes ask copy engines for (engine/copy_ring.h).
struct CudaCopies {
  CopyRing* rings = nullptr;        // [ranks], pinned. nullptr: nobody carries out any
  std::uint64_t* done = nullptr;    // [ranks], counted behind the copies
  std::uint64_t* drawn = nullptr;   // [ranks], by lanes: numbers of posts
  std::uint64_t* posted = nullptr;  // [lanes][ranks], by who has the lane: of its latest, + 1
  std::uint64_t taken_back = 0;     // posts, of all lanes
  // How long a lane waits for the next of its copies before it takes them back.
  std::uint64_t patience_ns = 200000;
};

// CudaRank::launches.
inline constexpr std::uint32_t kRecentLaunches = 64;

// In device memory.
struct CudaRank {
  RankState rank;  // as the engine knows it; cq.words, cancelled are pinned; sq is not used
  CudaLink* link = nullptr;
  const CudaSubmission* sq = nullptr;  // [slots], pinned
  std::uint64_t sq_read = 0;
  // Calls that kernels in streams have brought, for whoever drives the first lane. An entry is its
  // place + 1, then the slot.
  std::uint64_t* inbox = nullptr;  // [slots]
  std::uint64_t inbox_written = 0;
  std::uint64_t inbox_read = 0;
  std::uint64_t* marks = nullptr;  // [slots]: ticket of the latest mark
  // Counts what lets invocations begin that wait in queues: marks, and ends of earlier uses of
  // keys.
  std::uint32_t readied = 0;
  std::uint32_t daemon = 0;            // 1: one is resident, as CudaLink::residency.resident says
  std::uint64_t* completed = nullptr;  // [slots]: serial of the latest invocation that has ended
  // [slots][lanes]: what lanes have behind them as the engine first sees an invocation. The lane
  // that has, or a call's last, writes it; the engine's sets it back when it has read it.
  HandOver* handed = nullptr;
  std::uint64_t* paces = nullptr;          // [slots][lanes]: LanePacing
  StreamCall* calls = nullptr;             // [slots]: of those that may be tried whole
  std::uint64_t calls_without_engine = 0;  // that have ended without the engine
  std::uint64_t early_calls = 0;           // that need not wait for what was in front to end
  // Of calls whose kernels have begun, by the low bits of their serials: LaunchSequence::word().
  std::uint64_t launches[kRecentLaunches] = {};
  ClusterPlacement clusters;                 // SMs of the blocks of calls by chains
  Primitive* programs = nullptr;             // [slots][kMaxProgram]
  CudaTables* tables = nullptr;              // [slots]
  std::uint32_t* pokes[kMaxCudaRanks] = {};  // this rank's words at each peer, by lane
  std::uint32_t poke_counts[kMaxLanes] = {};
  // Two bits a lane, in one word so that leaving and saying what is left is one step. Low half: an
  // instance drives it (its lease). High half: it was left with something in its queue.
  std::uint64_t lanes = 0;
  LanePlacement lane_placement;    // of the daemon's blocks
  std::uint32_t attention = 0;     // CudaLink::attention, as last seen
  std::uint32_t moving = 0;        // a bit a lane: something moves in it
  std::uint32_t holding = 0;       // a bit a lane: its queue was not empty at the last look
  std::uint32_t heard = 0;         // the daemon has had something from peers
  std::uint32_t waiters = 0;       // kernels in streams that are running
  std::uint64_t submitted_ns = 0;  // when a daemon last took a submission
  std::uint64_t wanted_ns = 0;     // when a call without the engine last waited for its lanes
  std::uint64_t closed[kGenerations] = {};  // the daemon of this generation leaves
  CudaCopies copies;
  // A line that is stored in one instruction comes whole, at all peers (see leaf_access.cuh).
  std::uint32_t whole_lines = 1;
  // How long a daemon stays when nothing moves and nobody waits: at first, and after something has
  // come from a peer. (A new start takes longer. But who makes the device synchronize waits for
  // this, too, so it cannot be much longer.)
  std::uint32_t idle_ns = 20000;
  std::uint32_t idle_among_peers_ns = 50000;
};

}  // namespace unjam
