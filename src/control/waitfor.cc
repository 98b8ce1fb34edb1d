#include "control/waitfor.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <set>

#include "base/json_writer.h"

namespace unjam {
namespace {

std::string call_text(const CallId& c) {
  std::string t = "'" + c.key + "'";
  if (c.n != 0) t += " (use " + std::to_string(c.n + 1) + ")";
  if (!c.group.empty()) t += " of group '" + c.group + "'";
  return t;
}

const RankSnapshot* find_rank(const std::vector<RankSnapshot>& ranks, int rank) {
  // They are in order, mostly, and few are left out: rarely is it far from there.
  const std::size_t near = std::min(static_cast<std::size_t>(rank), ranks.size());
  for (std::size_t i = near + 1; i-- > 0;) {
    if (i < ranks.size() && ranks[i].rank == rank) return &ranks[i];
  }
  for (std::size_t i = near + 1; i < ranks.size(); ++i) {
    if (ranks[i].rank == rank) return &ranks[i];
  }
  return nullptr;
}

const PendingCall* held(const RankSnapshot& r) {
  // With several lanes, what one holds does not keep another from going on.
  if (!r.holds || r.running.size() != 1 || r.running[0] < 0) return nullptr;
  return &r.pending[static_cast<std::size_t>(r.running[0])];
}

bool runs_call(const RankSnapshot& r, const CallId& call) {
  return std::any_of(r.running.begin(), r.running.end(), [&](int i) {
    return i >= 0 && r.pending[static_cast<std::size_t>(i)].call == call;
  });
}

void write_call(JsonWriter& w, const CallId& c) {
  w.begin_object().field("group", c.group).field("key", c.key).field("n", c.n).end_object();
}

// The ranks that have not left, in order.
std::vector<const RankSnapshot*> present(const std::vector<RankSnapshot>& ranks,
                                         const std::vector<AbsentRank>& absent) {
  std::vector<const RankSnapshot*> sorted;
  for (const RankSnapshot& r : ranks) {
    const bool gone = std::any_of(absent.begin(), absent.end(),
                                  [&](const AbsentRank& a) { return a.rank == r.rank; });
    if (!gone) sorted.push_back(&r);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const RankSnapshot* a, const RankSnapshot* b) { return a->rank < b->rank; });
  return sorted;
}

// Those of which is told: all, or, if they are many, members of cycles first, then who is waited
// for, then who waits. In order.
std::vector<const RankSnapshot*> told_of(std::vector<const RankSnapshot*> all,
                                         const std::vector<RankSnapshot>& ranks,
                                         const std::vector<WaitCycle>& cycles) {
  if (all.size() <= kMostExplained) return all;
  std::set<int> in_cycles, missing;
  for (const WaitCycle& c : cycles) {
    for (const WaitEdge& e : c.edges) in_cycles.insert(e.rank);
  }
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (const RankSnapshot& r : ranks) {
    for (const PendingCall& p : r.pending) {
      if (!seen.emplace(p.call.tag, p.call.n).second) continue;
      for (const int m : missing_ranks(p, ranks)) missing.insert(m);
    }
  }
  const auto weight = [&](const RankSnapshot* r) {
    if (in_cycles.count(r->rank) != 0) return 0;
    if (missing.count(r->rank) != 0) return 1;
    return r->pending.empty() ? 3 : 2;
  };
  std::stable_sort(all.begin(), all.end(), [&](const RankSnapshot* a, const RankSnapshot* b) {
    return weight(a) < weight(b);
  });
  all.resize(kMostExplained);
  std::sort(all.begin(), all.end(),
            [](const RankSnapshot* a, const RankSnapshot* b) { return a->rank < b->rank; });
  return all;
}

// A list of ranks, and, if there are more than are told, how many more, under a name of its own.
template <class Ranks>
void write_ranks(JsonWriter& w, const char* name, const Ranks& ranks) {
  w.key(name).begin_array();
  std::size_t told = 0;
  for (const int r : ranks) {
    if (told++ == kMostExplained) break;
    w.value(r);
  }
  w.end_array();
  if (ranks.size() > kMostExplained) {
    w.field((std::string(name) + "_more").c_str(), std::uint64_t{ranks.size() - kMostExplained});
  }
}

std::string seconds(double ms) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f s", ms / 1e3);
  return text;
}

const char* name_of(EngineWait::What what) {
  switch (what) {
    case EngineWait::kStart:
      return "start";
    case EngineWait::kNothing:
      return "nothing";
    case EngineWait::kData:
      return "data";
    case EngineWait::kRoom:
      return "room";
    default:
      return "turn";
  }
}

}  // namespace

std::string engine_text(const EngineWait& wait) {
  switch (wait.what) {
    case EngineWait::kStart:
      return "its start";
    case EngineWait::kNothing:
      return "nothing";
    case EngineWait::kTurn:
      return "its turn: use " + std::to_string(wait.n + 1) + " of the key is not complete";
    default:
      break;
  }
  const std::string who = wait.rank < 0 ? "others" : "rank " + std::to_string(wait.rank);
  return (wait.what == EngineWait::kData ? "data from " : "room towards ") + who + " since " +
         seconds(wait.since_ms);
}

std::string WaitCycle::text() const {
  std::string t;
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const WaitEdge& e = edges[i];
    t += i == 0 ? "rank " + std::to_string(e.rank) + " runs " : ", which runs ";
    t += call_text(e.runs) + " and waits for rank " + std::to_string(e.waits_for);
  }
  return t;
}

std::vector<WaitEdge> certain_edges(const std::vector<RankSnapshot>& ranks) {
  std::vector<WaitEdge> edges;
  for (const RankSnapshot& i : ranks) {
    const PendingCall* runs = held(i);
    if (runs == nullptr || !runs->mutual) continue;
    for (const int member : runs->members) {
      if (member == i.rank) continue;
      const RankSnapshot* j = find_rank(ranks, member);
      if (j == nullptr) continue;
      const PendingCall* other = held(*j);
      if (other == nullptr || runs_call(*j, runs->call)) continue;
      // j holds another invocation. It has not begun ours if it has not called it, or has it
      // pending: what is pending and not held waits behind what is held.
      const auto calls = j->calls.find(runs->call.tag);
      const bool called = calls != j->calls.end() && calls->second > runs->call.n;
      const bool queued = std::any_of(j->pending.begin(), j->pending.end(),
                                      [&](const PendingCall& p) { return p.call == runs->call; });
      if (!called || queued) edges.push_back({i.rank, runs->call, member});
    }
  }
  return edges;
}

std::vector<WaitCycle> find_cycles(const std::vector<WaitEdge>& edges) {
  std::map<int, std::vector<const WaitEdge*>> out;
  for (const WaitEdge& e : edges) out[e.rank].push_back(&e);
  std::vector<WaitCycle> cycles;
  WaitCycle best;
  // Breadth first from each rank back to itself.
  for (const auto& [start, unused] : out) {
    std::map<int, const WaitEdge*> via;
    std::deque<int> todo = {start};
    while (!todo.empty() && via.find(start) == via.end()) {
      const int at = todo.front();
      todo.pop_front();
      const auto next = out.find(at);
      if (next == out.end()) continue;
      for (const WaitEdge* e : next->second) {
        if (via.emplace(e->waits_for, e).second) todo.push_back(e->waits_for);
      }
    }
    if (via.find(start) == via.end()) continue;
    WaitCycle c;
    for (int at = start;;) {
      c.edges.push_back(*via[at]);
      at = via[at]->rank;
      if (at == start) break;
    }
    std::reverse(c.edges.begin(), c.edges.end());
    if (best.edges.empty() || c.edges.size() < best.edges.size()) best = c;
  }
  if (!best.edges.empty()) cycles.push_back(best);
  return cycles;
}

std::vector<int> missing_ranks(const PendingCall& call, const std::vector<RankSnapshot>& ranks) {
  std::vector<int> missing;
  for (const int member : call.members) {
    const RankSnapshot* r = find_rank(ranks, member);
    if (r == nullptr) continue;
    const auto calls = r->calls.find(call.call.tag);
    if (calls == r->calls.end() || calls->second <= call.call.n) missing.push_back(member);
  }
  return missing;
}

std::vector<int> calling_ranks(const PendingCall& call, const std::vector<RankSnapshot>& ranks) {
  std::vector<int> calling;
  for (const int member : call.members) {
    const RankSnapshot* r = find_rank(ranks, member);
    if (r == nullptr) continue;
    const auto calls = r->calls.find(call.call.tag);
    if (calls != r->calls.end() && calls->second > call.call.n) calling.push_back(member);
  }
  return calling;
}

std::string called_instead(int rank, const PendingCall& call,
                           const std::vector<RankSnapshot>& ranks) {
  constexpr std::size_t kMostNamed = 3;
  const auto has_called = [](const RankSnapshot& r, const CallId& c) {
    const auto calls = r.calls.find(c.tag);
    return calls != r.calls.end() && calls->second > c.n;
  };
  const auto has = [](const PendingCall& c, int member) {
    return std::find(c.members.begin(), c.members.end(), member) != c.members.end();
  };
  const RankSnapshot* here = find_rank(ranks, rank);
  if (here == nullptr) return "";
  // Of the same kind, between just the same ranks (sends: in the same direction), come first.
  const auto kind = [](const PendingCall& c) {
    return c.signature.substr(0, c.signature.find('('));
  };
  std::vector<std::string> alike, others;
  for (const RankSnapshot& there : ranks) {
    if (there.rank == rank || !has(call, there.rank) || has_called(there, call.call)) continue;
    for (const auto* list : {&there.pending, &there.untaken}) {
      for (const PendingCall& c : *list) {
        if (c.call.tag == call.call.tag || c.call.group != call.call.group || !has(c, rank) ||
            has_called(*here, c.call)) {
          continue;
        }
        (c.members == call.members && kind(c) == kind(call) ? alike : others)
            .push_back("rank " + std::to_string(there.rank) + " has called " + c.signature +
                       ", key " + call_text(c.call) + ", which rank " + std::to_string(rank) +
                       " has not");
      }
    }
  }
  alike.insert(alike.end(), others.begin(), others.end());
  std::string text;
  for (std::size_t i = 0; i < alike.size() && i < kMostNamed; ++i) {
    text += (i == 0 ? "" : "; ") + alike[i];
  }
  if (alike.size() > kMostNamed) {
    text += "; and " + std::to_string(alike.size() - kMostNamed) + " more";
  }
  return text;
}

namespace {

// A call of `rank` that has not ended, and what its engines wait for.
void write_pending(JsonWriter& w, const PendingCall& p, int rank,
                   const std::vector<RankSnapshot>& ranks) {
  w.begin_object()
      .field("group", p.call.group)
      .field("key", p.call.key)
      .field("n", p.call.n)
      .field("what", p.signature)
      .field("age_ms", p.age_ms);
  write_ranks(w, "not_called_by", missing_ranks(p, ranks));
  write_ranks(w, "called_by", calling_ranks(p, ranks));
  w.field("instead", called_instead(rank, p, ranks)).key("engines").begin_array();
  for (const EngineWait& e : p.engines) {
    w.begin_object().field("lane", e.lane).field("waits_for", name_of(e.what));
    if (e.what == EngineWait::kTurn) w.field("n", e.n);
    if (e.what == EngineWait::kData || e.what == EngineWait::kRoom) {
      w.key("rank");
      if (e.rank < 0) {
        w.null();
      } else {
        w.value(e.rank);
      }
      w.field("since_ms", e.since_ms);
    }
    w.end_object();
  }
  w.end_array().end_object();
}

void write_snapshot(JsonWriter& w, const RankSnapshot& r, const std::vector<RankSnapshot>& ranks,
                    const std::vector<WaitEdge>& edges) {
  w.begin_object().field("rank", r.rank).field("holds", r.holds);
  w.key("lacks_memory");
  if (r.lacks.empty()) {
    w.null();
  } else {
    w.value(r.lacks);
  }
  w.key("running");
  const auto running =
      std::find_if(r.running.begin(), r.running.end(), [](int i) { return i >= 0; });
  if (running == r.running.end()) {
    w.null();
  } else {
    write_call(w, r.pending[static_cast<std::size_t>(*running)].call);
  }
  w.key("pending").begin_array();
  for (const PendingCall& p : r.pending) write_pending(w, p, r.rank, ranks);
  w.end_array();
  std::set<int> waits;
  for (const PendingCall& p : r.pending) {
    for (const int m : missing_ranks(p, ranks)) waits.insert(m);
  }
  for (const WaitEdge& e : edges) {
    if (e.rank == r.rank) waits.insert(e.waits_for);
  }
  write_ranks(w, "waits_for", waits);
  w.end_object();
}

}  // namespace

std::string explain_json(const std::vector<RankSnapshot>& ranks, const std::vector<WaitEdge>& edges,
                         const std::vector<WaitCycle>& cycles,
                         const std::vector<AbsentRank>& absent) {
  JsonWriter w;
  const std::vector<const RankSnapshot*> all = present(ranks, absent);
  w.begin_object().key("ranks").begin_array();
  for (const RankSnapshot* rank : told_of(all, ranks, cycles)) {
    write_snapshot(w, *rank, ranks, edges);
  }
  w.end_array();
  if (all.size() > kMostExplained) {
    w.field("ranks_more", std::uint64_t{all.size() - kMostExplained});
  }
  w.key("cycles").begin_array();
  for (const WaitCycle& c : cycles) {
    w.begin_object().field("text", c.text()).key("edges").begin_array();
    for (const WaitEdge& e : c.edges) {
      w.begin_object().field("rank", e.rank).key("runs");
      write_call(w, e.runs);
      w.field("waits_for", e.waits_for).end_object();
    }
    w.end_array().end_object();
  }
  w.end_array().key("absent").begin_array();
  const std::size_t named = std::min(absent.size(), kMostExplained);
  for (std::size_t i = 0; i < named; ++i) {
    w.begin_object().field("rank", absent[i].rank).field("why", absent[i].why).end_object();
  }
  w.end_array();
  if (absent.size() > named) w.field("absent_more", std::uint64_t{absent.size() - named});
  w.end_object();
  return w.text();
}

std::string explain_text(const std::vector<RankSnapshot>& ranks,
                         const std::vector<WaitCycle>& cycles,
                         const std::vector<AbsentRank>& absent) {
  constexpr std::size_t kMostCalls = 32;  // a rank
  const auto list = [](const std::vector<int>& of) {
    std::string t;
    for (std::size_t i = 0; i < of.size() && i < kMostExplained; ++i) {
      t += (t.empty() ? "" : ", ") + std::to_string(of[i]);
    }
    if (of.size() > kMostExplained) {
      t += ", … (" + std::to_string(of.size() - kMostExplained) + " more)";
    }
    return t.empty() ? std::string("none") : t;
  };
  std::string text;
  const std::vector<const RankSnapshot*> all = present(ranks, absent);
  for (const RankSnapshot* r : told_of(all, ranks, cycles)) {
    text += "unjam: rank " + std::to_string(r->rank) + ": " + std::to_string(r->pending.size()) +
            " pending\n";
    if (!r->lacks.empty()) {
      text += "unjam:   memory that a neighbour needs is not there: " + r->lacks +
              ". Calls that have use for it wait until it is\n";
    }
    for (std::size_t i = 0; i < r->pending.size() && i < kMostCalls; ++i) {
      const PendingCall& p = r->pending[i];
      const std::string instead = called_instead(r->rank, p, ranks);
      std::string engines;
      for (const EngineWait& e : p.engines) {
        const std::string lane = p.engines.size() > 1 ? " of lane " + std::to_string(e.lane) : "";
        engines += "; engine" + lane + " waits for " + engine_text(e);
      }
      text += "unjam:   " + p.signature + ", " + call_text(p.call) + ", since " +
              seconds(p.age_ms) + "; called by: " + list(calling_ranks(p, ranks)) +
              "; not called by: " + list(missing_ranks(p, ranks));
      if (!instead.empty()) text += "; " + instead;
      text += engines + "\n";
    }
    if (r->pending.size() > kMostCalls) {
      text += "unjam:   and " + std::to_string(r->pending.size() - kMostCalls) + " more\n";
    }
  }
  const auto more = [&](std::size_t ranks_left, const char* which) {
    if (ranks_left != 0) {
      text += "unjam: … (" + std::to_string(ranks_left) + " more " + which + ")\n";
    }
  };
  more(all.size() - std::min(all.size(), kMostExplained), "ranks");
  const std::size_t named = std::min(absent.size(), kMostExplained);
  for (std::size_t i = 0; i < named; ++i) {
    text += "unjam: rank " + std::to_string(absent[i].rank) + ": " + absent[i].why + "\n";
  }
  more(absent.size() - named, "that are absent");
  for (const WaitCycle& c : cycles) text += "unjam: DEADLOCK: " + c.text() + "\n";
  return text;
}

}  // namespace unjam
