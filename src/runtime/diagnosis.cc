// What a world finds out about calls that do not come together: ranks that called something else,
// ranks that never call, and who waits for whom.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <utility>

#include "base/clock.h"
#include "runtime/context.h"
#include "runtime/log.h"
#include "runtime/texts.h"
#include "runtime/world.h"
#include "transport/announcement.h"

namespace unjam {
namespace {

// How long explain() waits for other processes.
constexpr std::uint64_t kGatherNs = 1'000'000'000;
constexpr std::uint64_t kProbeNs = 500'000;  // between two questions of one probe
constexpr std::size_t kMostProbes = 4096;
constexpr std::size_t kMostNamed = 3;  // calls in a report
// What others have said is of just now for so long: until the watch comes by again, and again.
constexpr std::uint64_t kFreshNs = 600'000'000;
// How long a call that others have ended waits for what ended it; see wait_for_reasons().
constexpr std::uint64_t kReasonsNs = 5'000'000'000;
// Bounds for what other processes make this one remember and say.
constexpr std::size_t kMostDisagreements = 1 << 16;
constexpr std::size_t kLongestDisagreement = 8192;

std::string disagreement_text(const std::map<std::string, std::vector<int>>& said,
                              const std::string& what) {
  std::string text = "ranks disagree on " + what + ": ";
  bool first = true;
  for (const auto& [signature, ranks] : said) {
    text += (first ? "" : "; ") + rank_list(ranks) + " called " + signature;
    first = false;
  }
  return text +
         ". Make the same call on all ranks of the group; if ranks make their calls in different "
         "orders, give each call a key of its own.";
}

std::string seconds_text(double ms) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", ms / 1e3);
  return text;
}

// The snapshots were taken one after the other. Where a rank's lanes have neither left nor entered
// anything between its snapshot and a later one, what they were inside of then they have been
// inside of all the time between: so all edges of a cycle held at one moment, and for good.
void keep_certain(std::vector<WaitCycle>& cycles, const std::vector<RankSnapshot>& before,
                  const std::vector<RankSnapshot>& after) {
  const auto words = [](const std::vector<RankSnapshot>& of, int rank) {
    const auto found =
        std::find_if(of.begin(), of.end(), [&](const RankSnapshot& r) { return r.rank == rank; });
    return found == of.end() ? std::vector<std::uint64_t>{} : found->words;
  };
  std::erase_if(cycles, [&](const WaitCycle& cycle) {
    return std::any_of(cycle.edges.begin(), cycle.edges.end(), [&](const WaitEdge& e) {
      return words(before, e.rank) != words(after, e.rank) || words(after, e.rank).empty();
    });
  });
}

bool contains(const std::vector<int>& v, int x) {
  return std::find(v.begin(), v.end(), x) != v.end();
}

}  // namespace

// A call that is pending here for longer than look_ms().
struct World::OldCall {
  CallRecord call;
  std::vector<int> callers;  // ranks of this process that wait for it
  double age_ms = 0;
};

// ---- disagreement ----

World::Verdict World::compare(const Context& caller, std::uint64_t tag, std::uint64_t n,
                              const Signature& signature, const std::vector<int>& members,
                              const std::string& what, bool ended) {
  std::unique_lock lock(mutex_);
  if (ended) wait_for_reasons(lock, {tag, n}, members);
  if (const Disagreement* known = disagreement({tag, n}, members)) {
    return {known->code, known->text};
  }
  std::vector<int> others = members;
  std::erase(others, caller.rank());
  std::map<std::string, std::vector<int>> said = said_here({tag, n}, others);
  said[signature.text()].push_back(caller.rank());
  if (said.size() > 1) {
    const std::string text = disagreement_text(said, what);
    fail_everywhere({tag, n}, members, UNJAM_ERROR_MISMATCH, text);
    return {UNJAM_ERROR_MISMATCH, text};
  }
  std::map<int, QueryMessage> questions;
  inquire({tag, n}, members, what, questions);
  if (!questions.empty()) {
    SaidItem& mine = inquiries_[{tag, n}].said[caller.rank()];
    mine.called = true;
    mine.signature = signature.text();
    send_questions(questions);
  }
  return {};
}

// Whoever ends a call announces it, and then sends its reasons. Who calls in between must not go on
// without: the others' data may be there, and it would complete here what has failed for them.
// Without end it does not wait: the sender may have been stopped, or died.
void World::wait_for_reasons(std::unique_lock<std::mutex>& lock, const CallKey& call,
                             const std::vector<int>& members) {
  changed_.wait_for(lock, std::chrono::nanoseconds(kReasonsNs), [&] {
    const bool forgotten = disagreements_.size() >= kMostDisagreements;
    return stopping_ || forgotten || disagreement(call, members) != nullptr ||
           std::any_of(members.begin(), members.end(), [&](int m) {
             // (One that had completed the call does not end it: there are reasons of others.)
             const auto gone = gone_.find(m);
             return gone != gone_.end() && (gone->second.legacy == nullptr ||
                                            !gone->second.legacy->covers(call.first, call.second));
           });
  });
}

std::map<std::string, std::vector<int>> World::said_here(const CallKey& call,
                                                         const std::vector<int>& members) const {
  std::map<std::string, std::vector<int>> said;
  for (const int member : members) {
    const Context* c = contexts_[static_cast<std::size_t>(member)];
    Signature s;
    if (c != nullptr && c->find_call(call.first, call.second, s) == Context::Found::kKnown) {
      said[s.text()].push_back(member);
    }
    if (const PendingCall* left = left_behind(member, call)) {
      said[left->signature].push_back(member);
    }
  }
  return said;
}

// What a rank that has left has called: if it is not what the others have, nobody takes its data.
const PendingCall* World::left_behind(int rank, const CallKey& call) const {
  const auto left = departed_.find(rank);
  if (left == departed_.end()) return nullptr;
  for (const PendingCall& c : left->second.untaken) {
    if (CallKey{c.call.tag, c.call.n} == call) return &c;
  }
  return nullptr;
}

bool World::left_without(int rank, const CallKey& call) const {
  const auto left = departed_.find(rank);
  if (left == departed_.end()) return false;
  const auto calls = left->second.calls.find(call.first);
  return calls == left->second.calls.end() || calls->second <= call.second;
}

const World::Disagreement* World::disagreement(const CallKey& call,
                                               const std::vector<int>& members) const {
  const auto& [tag, n] = call;
  for (auto known = disagreements_.lower_bound({tag, 0});
       known != disagreements_.end() && known->first.first == tag; ++known) {
    const bool member = std::any_of(members.begin(), members.end(), [&](int m) {
      return is_rank_of(static_cast<std::uint32_t>(m), known->first.second);
    });
    if (member && known->second.from <= n) return &known->second;
  }
  return nullptr;
}

void World::fail_here(std::uint64_t tag, std::uint64_t n, unjamResult_t code,
                      const std::string& text, int process) {
  const std::pair<std::uint64_t, int> place{tag, process};
  const auto known = disagreements_.find(place);
  const auto kept = [&] { return Disagreement{n, code, text.substr(0, kLongestDisagreement)}; };
  if (known != disagreements_.end()) {
    if (n < known->second.from) known->second = kept();
  } else if (disagreements_.size() < kMostDisagreements) {
    disagreements_.emplace(place, kept());
  }
  // A process speaks for the groups that its ranks are members of. Which group a tag is of only the
  // members know.
  std::vector<int> speakers;
  for (int r = 0; r < ranks_ && process != me_; ++r) {
    if (is_rank_of(static_cast<std::uint32_t>(r), process)) speakers.push_back(r);
  }
  for (Context* c : contexts_) {
    if (c != nullptr) c->fail_call(tag, n, {code, text}, speakers);
  }
  changed_.notify_all();
}

void World::fail_everywhere(const CallKey& call, const std::vector<int>& members,
                            unjamResult_t code, const std::string& text) {
  const auto& [tag, n] = call;
  announce_end(announcements(members, tag), tag, n);  // for those that call later
  announced(members, tag);
  FailMessage m;
  m.tag = tag;
  m.n = n;
  m.code = code;
  m.text = text;
  // First, as ranks of this process may be busy with calls of their own, see FailureNotices.
  mesh_.send_all(MessageType::kFail, m.encode());
  fail_here(tag, n, code, text, me_);
}

void World::refuse(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
                   const std::string& text) {
  std::lock_guard lock(mutex_);
  fail_everywhere({tag, n}, members, UNJAM_ERROR_MISMATCH, text);
}

void World::abandon(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
                    const std::string& text) {
  std::lock_guard lock(mutex_);
  fail_everywhere({tag, n}, members, UNJAM_ERROR_PEER, text);
}

// ---- probes ----

bool World::called(std::uint64_t tag, std::uint64_t n, int member) {
  const CallKey call{tag, n};
  std::lock_guard lock(mutex_);
  if (const auto gone = gone_.find(member); gone != gone_.end()) {
    return gone->second.legacy != nullptr && gone->second.legacy->covers(tag, n);
  }
  if (departed_.count(member) != 0) return !left_without(member, call);
  if (is_local(member)) {
    const Context* c = contexts_[static_cast<std::size_t>(member)];
    Signature s;
    if (c == nullptr) return false;
    const Context::Found found = c->find_call(tag, n, s);
    return found == Context::Found::kCalled || found == Context::Found::kKnown;
  }
  if (probes_.size() >= kMostProbes) probes_.clear();  // of keys that nobody probes any more
  Probe& probe = probes_[{call, member}];
  if (probe.called) {
    probes_.erase({call, member});
    return true;
  }
  const std::uint64_t now = monotonic_ns();
  // An answer that has not come for long will not: the question is asked again.
  if (now - probe.asked_ns < (probe.waits ? kGatherNs : kProbeNs)) return false;
  probe.asked_ns = now;
  probe.waits = true;
  QueryMessage question;
  question.calls.push_back(call);
  mesh_.send(process_of_[static_cast<std::size_t>(member)], MessageType::kQuery, question.encode());
  return false;
}

// ---- asking other processes ----

void World::inquire(const CallKey& call, const std::vector<int>& members, const std::string& what,
                    std::map<int, QueryMessage>& questions) {
  std::set<int> processes = processes_of(members);
  const std::vector<int> live = mesh_.live();
  std::erase_if(processes, [&](int p) { return !contains(live, p); });
  if (processes.empty()) return;
  Inquiry& inquiry = inquiries_[call];
  inquiry.members = members;
  inquiry.what = what;
  inquiry.waits_for = processes;
  inquiry.asked_ns = monotonic_ns();
  for (const int p : processes) questions[p].calls.push_back(call);
}

bool World::informed(const CallKey& call, const std::vector<int>& members, const std::string& what,
                     std::map<int, QueryMessage>& questions) {
  const auto asked = inquiries_.find(call);
  if (asked != inquiries_.end()) {
    const std::uint64_t age_ns = monotonic_ns() - asked->second.asked_ns;
    if (!asked->second.waits_for.empty()) return age_ns >= kGatherNs;
    if (age_ns <= kFreshNs) return true;
  }
  inquire(call, members, what, questions);
  const auto now = inquiries_.find(call);
  return now == inquiries_.end() || now->second.waits_for.empty();
}

void World::send_questions(const std::map<int, QueryMessage>& questions) {
  for (const auto& [process, query] : questions) {
    // In parts, so that no answer becomes too long.
    for (std::size_t i = 0; i < query.calls.size(); i += kMostQuestions) {
      const auto begin = query.calls.begin() + static_cast<std::ptrdiff_t>(i);
      const std::size_t count = std::min(kMostQuestions, query.calls.size() - i);
      QueryMessage part;
      part.calls.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
      mesh_.send(process, MessageType::kQuery, part.encode());
    }
  }
}

void World::on_query(int process, const QueryMessage& query) {
  AnswerMessage answer;
  answer.asked = query.calls;
  std::set<std::uint64_t> told;
  for (const auto& [tag, n] : query.calls) {
    for (const Context* c : contexts_) {
      if (c == nullptr) continue;
      Signature s;
      const Context::Found found = c->find_call(tag, n, s);
      if (found == Context::Found::kBusy) continue;  // as of a rank that is not there yet
      answer.said.push_back({tag, n, static_cast<std::uint32_t>(c->rank()),
                             found != Context::Found::kNotCalled,
                             found == Context::Found::kKnown ? s.text() : ""});
    }
    // What this process found out itself; of what others did they have told everybody.
    const auto known = disagreements_.find({tag, me_});
    if (known != disagreements_.end() && known->second.code == UNJAM_ERROR_MISMATCH &&
        told.insert(tag).second) {
      answer.known.push_back({tag, known->second.from, known->second.text});
    }
  }
  mesh_.send(process, MessageType::kAnswer, answer.encode());
}

void World::on_answer(int process, const AnswerMessage& answer) {
  for (const auto& known : answer.known) {
    fail_here(known.tag, known.n, UNJAM_ERROR_MISMATCH, known.text, process);
  }
  for (const SaidItem& s : answer.said) {
    const auto probe = probes_.find({{s.tag, s.n}, static_cast<int>(s.rank)});
    if (probe != probes_.end() && is_rank_of(s.rank, process)) {
      probe->second.waits = false;
      probe->second.called = s.called;
    }
    const auto found = inquiries_.find({s.tag, s.n});
    if (found == inquiries_.end() || !is_rank_of(s.rank, process)) continue;
    found->second.said[static_cast<int>(s.rank)] = s;
  }
  for (const CallKey& call : answer.asked) {
    // Also where nothing was said of a rank, which its process has not made yet: to be asked again.
    for (auto probe = probes_.lower_bound({call, 0});
         probe != probes_.end() && probe->first.first == call; ++probe) {
      if (is_rank_of(static_cast<std::uint32_t>(probe->first.second), process)) {
        probe->second.waits = false;
      }
    }
    const auto found = inquiries_.find(call);
    if (found == inquiries_.end() || found->second.waits_for.erase(process) == 0) continue;
    if (found->second.waits_for.empty()) evaluate(call, found->second);
  }
}

// All have answered (or died): do they agree?
void World::evaluate(const CallKey& call, Inquiry& inquiry) {
  const auto& [tag, n] = call;
  std::map<std::string, std::vector<int>> said;
  for (const int member : inquiry.members) {
    const auto found = inquiry.said.find(member);
    const Context* here = contexts_[static_cast<std::size_t>(member)];
    Signature s;
    if (here != nullptr && here->find_call(tag, n, s) == Context::Found::kKnown) {
      said[s.text()].push_back(member);
    } else if (found != inquiry.said.end() && found->second.called &&
               !found->second.signature.empty()) {
      said[found->second.signature].push_back(member);
    } else if (const PendingCall* left = left_behind(member, call)) {
      said[left->signature].push_back(member);
    }
  }
  if (said.size() < 2) return;
  fail_everywhere(call, inquiry.members, UNJAM_ERROR_MISMATCH,
                  disagreement_text(said, inquiry.what));
}

std::vector<int> World::not_called(const CallKey& call, const std::vector<int>& members,
                                   std::vector<int>& unknown) const {
  const auto inquiry = inquiries_.find(call);
  std::vector<int> missing;
  for (const int member : members) {
    if (departed_.count(member) != 0) {
      if (left_without(member, call)) missing.push_back(member);
    } else if (is_local(member)) {
      const Context* c = contexts_[static_cast<std::size_t>(member)];
      Signature s;
      const Context::Found found =
          c == nullptr ? Context::Found::kNotCalled : c->find_call(call.first, call.second, s);
      if (found == Context::Found::kNotCalled) missing.push_back(member);
      if (found == Context::Found::kBusy) unknown.push_back(member);
    } else if (inquiry == inquiries_.end()) {
      unknown.push_back(member);
    } else {
      const auto said = inquiry->second.said.find(member);
      if (said != inquiry->second.said.end() && said->second.called) continue;
      const int process = process_of_[static_cast<std::size_t>(member)];
      const bool answered =
          said != inquiry->second.said.end() && inquiry->second.waits_for.count(process) == 0;
      (answered ? missing : unknown).push_back(member);
    }
  }
  return missing;
}

// ---- the watch over what is pending ----

void World::watch() {
  const std::uint64_t now = monotonic_ns();
  if (now - last_watch_ns_ < static_cast<std::uint64_t>(watch_ms()) * 1000000) return;
  last_watch_ns_ = now;
  const auto look_at_ms = static_cast<double>(look_ms());
  std::map<CallKey, OldCall> old;
  for (Context* c : contexts_) {
    if (c == nullptr) continue;
    for (CallRecord& call : c->pending_calls()) {
      // A call of a group of one waits for no rank: at most for its stream, or for the other call
      // of a message to itself.
      const bool waits = call.members.size() > 1 || call.lacks != nullptr;
      if (call.age_ms < look_at_ms || !waits) continue;
      OldCall& o = old[{call.id.tag, call.id.n}];
      o.callers.push_back(c->rank());
      o.age_ms = std::max(o.age_ms, call.age_ms);
      o.call = std::move(call);
    }
  }
  std::erase_if(inquiries_, [&](const auto& i) {
    return old.count(i.first) == 0 && i.second.waits_for.empty();
  });
  std::map<int, QueryMessage> questions;
  for (const auto& [key, call] : old) look_at(call, questions);
  report(old, now, questions);
  send_questions(questions);
}

void World::look_at(const OldCall& old, std::map<int, QueryMessage>& questions) {
  const CallRecord& call = old.call;
  const CallKey key{call.id.tag, call.id.n};
  const std::string what = use_text(call.signature, call.id.key, call.id.group, call.id.n);
  if (const Disagreement* known = disagreement(key, call.members)) {
    // Ended before it was called here, and the caller has missed the hint.
    const Disagreement verdict = *known;
    fail_here(key.first, key.second, verdict.code, verdict.text, me_);
    return;
  }
  const std::map<std::string, std::vector<int>> said = said_here(key, call.members);
  if (said.size() > 1) {
    fail_everywhere(key, call.members, UNJAM_ERROR_MISMATCH, disagreement_text(said, what));
    return;
  }
  std::vector<int> left;
  for (const int member : call.members) {
    if (left_without(member, key)) left.push_back(member);
  }
  if (!left.empty()) {
    for (const int rank : old.callers) {
      contexts_[static_cast<std::size_t>(rank)]->fail_call(
          key.first, key.second,
          {UNJAM_ERROR_PEER, rank_list(left) + " left the job without calling " + what});
    }
    return;
  }
  // The older it gets, the seldomer are the others asked.
  const double again_ms = std::max(static_cast<double>(look_ms()), old.age_ms / 4);
  const auto asked = inquiries_.find(key);
  if (asked == inquiries_.end() ||
      (asked->second.waits_for.empty() &&
       static_cast<double>(monotonic_ns() - asked->second.asked_ns) / 1e6 >= again_ms)) {
    inquire(key, call.members, what, questions);
  }
  if (first_settings_.timeout_ms > 0 &&
      old.age_ms >= static_cast<double>(first_settings_.timeout_ms) &&
      informed(key, call.members, what, questions) && looked_around()) {
    fail_everywhere(key, call.members, UNJAM_ERROR_TIMEOUT,
                    what + " (" + call.signature.text() + ") was not complete after " +
                        seconds_text(old.age_ms) + " (UNJAM_TIMEOUT_MS): " + who_called(key, call) +
                        instead(old));
  }
}

// "rank 1 called it; ranks 2, 3 have not called it"; where nobody is missing, what else it can be.
std::string World::who_called(const CallKey& key, const CallRecord& call) const {
  if (call.lacks != nullptr) {
    return rank_list(call.members) + " has not called the " + call.lacks + " that meets it";
  }
  std::vector<int> unknown;
  const std::vector<int> missing = not_called(key, call.members, unknown);
  std::vector<int> called;
  for (const int m : call.members) {
    if (!contains(missing, m) && !contains(unknown, m)) called.push_back(m);
  }
  const auto verb = [](const std::vector<int>& ranks) {
    return ranks.size() == 1 ? " has" : " have";
  };
  std::string text;
  if (!missing.empty()) text += rank_list(missing) + verb(missing) + " not called it";
  if (!called.empty()) {
    text += (text.empty() ? "" : "; ") + rank_list(called) + verb(called) + " called it";
  }
  if (!unknown.empty()) {
    text += (text.empty() ? "" : "; ") + rank_list(unknown) +
            (unknown.size() == 1 ? " does not answer" : " do not answer");
  }
  if (missing.empty() && unknown.empty() && first_settings_.device == UNJAM_DEVICE_CUDA) {
    text +=
        "; nobody is missing, so a stream may stand still in front of it: behind what waits in "
        "that stream, or in another one of the same hardware queue "
        "(CUDA_DEVICE_MAX_CONNECTIONS, see docs/api.md)";
  }
  return text;
}

// Says now and then what has been pending for too long.
void World::report(const std::map<CallKey, OldCall>& old, std::uint64_t now,
                   std::map<int, QueryMessage>& questions) {
  const std::int64_t every_ms = first_settings_.report_ms;
  if (every_ms == 0) return;
  if (now - last_report_ns_ < static_cast<std::uint64_t>(every_ms) * 1000000) return;
  std::vector<const std::pair<const CallKey, OldCall>*> late;
  for (const auto& o : old) {
    if (o.second.age_ms >= static_cast<double>(every_ms)) late.push_back(&o);
  }
  if (late.empty()) return;
  std::sort(late.begin(), late.end(),
            [](const auto* a, const auto* b) { return a->second.age_ms > b->second.age_ms; });
  bool known = true;
  for (std::size_t i = 0; i < late.size() && i < kMostNamed; ++i) {
    const CallRecord& call = late[i]->second.call;
    known = informed(late[i]->first, call.members,
                     use_text(call.signature, call.id.key, call.id.group, call.id.n), questions) &&
            known;
  }
  known = looked_around() && known;
  if (!known) return;  // the next time
  last_report_ns_ = now;
  Log& log = Log::process();
  const int rank = log_rank();
  for (std::size_t i = 0; i < late.size() && i < kMostNamed; ++i) {
    const OldCall& o = late[i]->second;
    log.say(LogLevel::kWarn, rank, [&] {
      return rank_list(o.callers) + ": " + o.call.signature.text() + ", " +
             call_text(o.call.id.key, o.call.id.group, o.call.id.n) + ", pending for " +
             seconds_text(o.age_ms) + ": " + who_called(late[i]->first, o.call) + instead(o);
    });
  }
  if (late.size() <= kMostNamed) return;
  log.say(LogLevel::kWarn, rank, [&] {
    return "and " + std::to_string(late.size() - kMostNamed) +
           " more invocations that are pending for long";
  });
}

// ---- explain ----

std::vector<RankSnapshot> World::local_snapshots() const {
  std::vector<RankSnapshot> ranks;
  for (Context* c : contexts_) {
    if (c != nullptr) ranks.push_back(c->snapshot());
  }
  return ranks;
}

void World::Gathering::add(RankSnapshot snapshot) {
  if (snapshot.busy) {
    busy.insert(snapshot.rank);
  } else {
    ranks.push_back(std::move(snapshot));
  }
}

// Whose ranks an explanation is about: in large jobs the members of what is pending here, if there
// is something.
std::set<int> World::worth_asking(const std::vector<RankSnapshot>& here) const {
  const std::vector<int> live = mesh_.live();
  std::set<int> processes;
  if (static_cast<std::size_t>(ranks_) > kMostExplained) {
    for (const RankSnapshot& r : here) {
      for (const PendingCall& p : r.pending) processes.merge(processes_of(p.members));
    }
    std::erase_if(processes, [&](int p) { return !contains(live, p); });
  }
  if (processes.empty()) processes.insert(live.begin(), live.end());
  return processes;
}

// Asks other processes for what their ranks are doing.
std::uint64_t World::gather(bool print) {
  const std::uint64_t number = ++last_gathering_;
  Gathering& g = gatherings_[number];
  g.print = print;
  g.deadline_ns = monotonic_ns() + kGatherNs;
  std::vector<RankSnapshot> here = local_snapshots();
  g.asked = worth_asking(here);
  for (RankSnapshot& s : here) g.add(std::move(s));
  SnapshotRequestMessage m;
  m.number = number;
  for (const int process : g.asked) {
    g.waits_for.insert(process);
    mesh_.send(process, MessageType::kSnapshotRequest, m.encode());
  }
  return number;
}

bool World::looked_around() {
  const auto found = gatherings_.find(around_);
  const std::uint64_t now = monotonic_ns();
  if (found != gatherings_.end()) {
    const Gathering& g = found->second;
    if (!g.waits_for.empty() && now < g.deadline_ns) return false;
    if (now < g.deadline_ns + kFreshNs) return true;  // also without those that do not answer
    gatherings_.erase(found);
  }
  around_ = gather(false);
  Gathering& g = gatherings_[around_];
  add_departed(g.ranks);
  return g.waits_for.empty();
}

std::string World::instead(const OldCall& old) const {
  const auto found = gatherings_.find(around_);
  if (found == gatherings_.end() || old.callers.empty()) return "";
  const CallRecord& call = old.call;
  const std::string text = called_instead(
      old.callers.front(), {call.id, call.signature.text(), call.members}, found->second.ranks);
  return text.empty() ? "" : "; " + text;
}

std::vector<AbsentRank> World::absentees(const Gathering& g) const {
  std::vector<AbsentRank> ranks;
  for (int r = 0; r < ranks_ && started_; ++r) {
    const bool seen = std::any_of(g.ranks.begin(), g.ranks.end(),
                                  [&](const RankSnapshot& s) { return s.rank == r; });
    if (seen) continue;
    if (const auto gone = gone_.find(r); gone != gone_.end()) {
      ranks.push_back({r, "gone: " + gone->second.why});
    } else if (departed_.count(r) != 0) {
      ranks.push_back({r, "has left the job"});
    } else if (g.busy.count(r) != 0) {
      ranks.push_back({r,
                       "a call of it has been inside of CUDA for 0.2 s and more: what is pending "
                       "there is not known"});
    } else if (g.asked.count(process_of_[static_cast<std::size_t>(r)]) != 0) {
      ranks.push_back(
          {r, "does not answer (process " +
                  std::to_string(
                      pids_[static_cast<std::size_t>(process_of_[static_cast<std::size_t>(r)])]) +
                  ")"});
    }
  }
  return ranks;
}

// What the departed have called still counts.
void World::add_departed(std::vector<RankSnapshot>& ranks) const {
  for (const auto& [rank, left] : departed_) {
    // One that left just now has said more itself.
    if (std::any_of(ranks.begin(), ranks.end(),
                    [r = rank](const RankSnapshot& s) { return s.rank == r; })) {
      continue;
    }
    RankSnapshot gone;
    gone.rank = rank;
    gone.calls = left.calls;
    gone.untaken = left.untaken;
    ranks.push_back(std::move(gone));
  }
  std::sort(ranks.begin(), ranks.end(),
            [](const RankSnapshot& a, const RankSnapshot& b) { return a.rank < b.rank; });
}

std::string World::explain() {
  std::unique_lock lock(mutex_);
  const auto collect = [&] {
    const std::uint64_t number = gather(false);
    changed_.wait_for(lock, std::chrono::nanoseconds(kGatherNs),
                      [&] { return gatherings_[number].waits_for.empty(); });
    Gathering g = std::move(gatherings_[number]);
    gatherings_.erase(number);
    return g;
  };
  Gathering g = collect();
  const std::vector<AbsentRank> absent = absentees(g);
  add_departed(g.ranks);
  const std::vector<WaitEdge> edges = certain_edges(g.ranks);
  std::vector<WaitCycle> cycles = find_cycles(edges);
  if (!cycles.empty()) {
    keep_certain(cycles, g.ranks, collect().ranks);
  }
  return explain_json(g.ranks, edges, cycles, absent);
}

// What was asked for by the signal, once all have answered.
void World::print_gathered() {
  const std::uint64_t now = monotonic_ns();
  for (auto it = gatherings_.begin(); it != gatherings_.end();) {
    Gathering& g = it->second;
    if (!g.print || (!g.waits_for.empty() && now < g.deadline_ns)) {
      ++it;
      continue;
    }
    std::vector<WaitCycle> cycles;
    if (g.before.empty()) {
      const std::vector<AbsentRank> absent = absentees(g);
      add_departed(g.ranks);
      cycles = find_cycles(certain_edges(g.ranks));
      if (!cycles.empty()) {  // certain only after a second look, which the loop comes to
        std::vector<RankSnapshot> before = std::move(g.ranks);
        it = gatherings_.erase(it);
        Gathering& again = gatherings_[gather(true)];
        again.before = std::move(before);
        again.absent = absent;
        continue;
      }
      g.before = std::move(g.ranks);
      g.absent = absent;
    } else {
      cycles = find_cycles(certain_edges(g.before));
      keep_certain(cycles, g.before, g.ranks);
    }
    const std::string head = "unjam: process " + std::to_string(getpid()) + ", a job of " +
                             std::to_string(ranks_) + " ranks\n";
    std::fputs((head + explain_text(g.before, cycles, g.absent)).c_str(), stderr);
    it = gatherings_.erase(it);
  }
}

}  // namespace unjam
