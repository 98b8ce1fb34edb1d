// Who waits for whom: pure functions over snapshots of the ranks, however they were obtained.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace unjam {

// An invocation, as all ranks know it.
struct CallId {
  std::uint64_t tag = 0;  // hash of (group, key)
  std::uint64_t n = 0;
  std::string group;
  std::string key;
  bool operator==(const CallId& o) const { return tag == o.tag && n == o.n; }
};

// What a lane's engine waits for, inside of a call.
struct EngineWait {
  enum What : std::uint8_t {
    kStart,    // it has not begun
    kNothing,  // it moves, or its part is done
    kData,     // from `rank` (-1: from several)
    kRoom,     // towards `rank`
    kTurn,     // use `n` of the same key is not complete
  };
  int lane = 0;
  What what = kStart;
  int rank = -1;
  std::uint64_t n = 0;
  double since_ms = 0;  // of kData and kRoom
};
// "data from rank 2 since 0.120 s"
std::string engine_text(const EngineWait& wait);

struct PendingCall {
  CallId call;
  std::string signature;     // "all_reduce float32 sum count 1024"
  std::vector<int> members;  // world ranks
  double age_ms = 0;
  // No member can complete it before all have begun it (all-reduce, all-gather, reduce-scatter,
  // all-to-all, barrier; not those with a root and send/recv, where some only send).
  bool mutual = true;
  std::vector<EngineWait> engines{};  // by lane
};

struct RankSnapshot {
  int rank = 0;
  bool holds = false;  // hold policy: what runs is not left until it is complete
  // A call of the rank was inside of its device all the time that we looked: nothing else is known.
  bool busy = false;
  // Why memory that a neighbour needs is not there: calls that have use for it wait. "": it is.
  std::string lacks;
  // What each lane's engine is inside of, as an index into pending; -1: nothing. `words` changes
  // whenever a lane enters or leaves an invocation.
  std::vector<int> running;
  std::vector<std::uint64_t> words;
  std::vector<PendingCall> pending;  // in submission order; without what the engine has completed
  // Complete here, with data that a peer may have yet to take: the latest of each such key, at most
  // kMostUntaken in all. Their age and engines are not told.
  std::vector<PendingCall> untaken;
  std::map<std::uint64_t, std::uint64_t> calls;  // tag -> invocations submitted so far
};
inline constexpr std::size_t kMostUntaken = 256;

struct WaitEdge {
  int rank = 0;  // runs `runs`, and waits for
  CallId runs;
  int waits_for = 0;  // which has not begun it
};

struct WaitCycle {
  std::vector<WaitEdge> edges;  // edges[i].waits_for == edges[i + 1].rank, the last the first's
  std::string text() const;
};

// Certain wait-for edges (between ranks of one lane): rank i holds a mutual invocation that rank j,
// a member, cannot have begun (it holds another one, and has not called the former or has it queued
// behind).
std::vector<WaitEdge> certain_edges(const std::vector<RankSnapshot>& ranks);

// The shortest cycle through each strongly stuck set, at most one; empty if there is none.
std::vector<WaitCycle> find_cycles(const std::vector<WaitEdge>& edges);

// Members of a pending call's group that have not called it (by `calls`).
std::vector<int> missing_ranks(const PendingCall& call, const std::vector<RankSnapshot>& ranks);
// Those that have.
std::vector<int> calling_ranks(const PendingCall& call, const std::vector<RankSnapshot>& ranks);

// What members that have not called `call`, which is pending at `rank`, have called of the same
// group that `rank` has not: sends under another tag than the receive's, say. "rank 0 has called …,
// which rank 1 has not", the likeliest first, a few; "" if there is none.
std::string called_instead(int rank, const PendingCall& call,
                           const std::vector<RankSnapshot>& ranks);

// Of so many ranks at most explanations speak; of others they say how many there are.
inline constexpr std::size_t kMostExplained = 64;

// A rank that has nothing to say, and why.
struct AbsentRank {
  int rank = 0;
  std::string why;
};

std::string explain_json(const std::vector<RankSnapshot>& ranks, const std::vector<WaitEdge>& edges,
                         const std::vector<WaitCycle>& cycles,
                         const std::vector<AbsentRank>& absent = {});
// The same for people, a line a pending call.
std::string explain_text(const std::vector<RankSnapshot>& ranks,
                         const std::vector<WaitCycle>& cycles,
                         const std::vector<AbsentRank>& absent);

}  // namespace unjam
