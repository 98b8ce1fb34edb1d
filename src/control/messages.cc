#include "control/messages.h"

#include <algorithm>

#include "base/types.h"
#include "control/wire.h"
#include "transport/arena.h"
#include "transport/windows.h"

namespace unjam {
namespace {

constexpr std::uint32_t kLastRank = kMaxRanks - 1;
constexpr std::size_t kMostCalls = 1 << 22;
constexpr std::size_t kMostPending = 1 << 18;
constexpr std::size_t kLongestName = 4096;

using Pairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

std::string cut(const std::string& text, std::size_t longest) {
  return text.size() <= longest ? text : text.substr(0, longest - 4) + " ...";
}

void put(WireWriter& w, const Pairs& pairs) {
  w.list(pairs.size());
  for (const auto& [a, b] : pairs) {
    w.number(a);
    w.number(b);
  }
}

void get(WireReader& r, Pairs& pairs, std::size_t most) {
  pairs.resize(r.list(most, 16));
  for (auto& [a, b] : pairs) {
    a = r.number<std::uint64_t>();
    b = r.number<std::uint64_t>();
  }
}

void put(WireWriter& w, const PendingCall& c) {
  w.number(c.call.tag);
  w.number(c.call.n);
  w.text(cut(c.call.group, kLongestName));
  w.text(cut(c.call.key, kLongestName));
  w.text(cut(c.signature, kLongestName));
  w.number(static_cast<std::uint64_t>(c.age_ms * 1e3));
  w.number<std::uint8_t>(c.mutual);
  w.list(c.members.size());
  for (const int m : c.members) w.number(static_cast<std::uint16_t>(m));
  w.list(c.engines.size());
  for (const EngineWait& e : c.engines) {
    w.number(static_cast<std::uint8_t>(e.lane));
    w.number(static_cast<std::uint8_t>(e.what));
    w.number(static_cast<std::int32_t>(e.rank));
    w.number(e.n);
    w.number(static_cast<std::uint64_t>(e.since_ms * 1e3));
  }
}

void get(WireReader& r, PendingCall& c) {
  c.call.tag = r.number<std::uint64_t>();
  c.call.n = r.number<std::uint64_t>();
  c.call.group = r.text(kLongestName);
  c.call.key = r.text(kLongestName);
  c.signature = r.text(kLongestName);
  c.age_ms = static_cast<double>(r.number<std::uint64_t>()) / 1e3;
  c.mutual = r.up_to<std::uint8_t>(1) != 0;
  c.members.resize(r.list(kMaxRanks, 2));
  for (int& m : c.members) m = r.up_to<std::uint16_t>(kLastRank);
  c.engines.resize(r.list(kMaxLanes, 22));
  for (EngineWait& e : c.engines) {
    e.lane = r.up_to<std::uint8_t>(kMaxLanes - 1);
    e.what = static_cast<EngineWait::What>(r.up_to<std::uint8_t>(EngineWait::kTurn));
    e.rank = std::clamp<std::int32_t>(r.number<std::int32_t>(), -1, kLastRank);
    e.n = r.number<std::uint64_t>();
    e.since_ms = static_cast<double>(r.number<std::uint64_t>()) / 1e3;
  }
}

void put(WireWriter& w, const std::vector<PendingCall>& calls) {
  w.list(calls.size());
  for (const PendingCall& c : calls) put(w, c);
}

void get(WireReader& r, std::vector<PendingCall>& calls, std::size_t most) {
  calls.resize(r.list(most, 41));
  for (PendingCall& c : calls) get(r, c);
}

}  // namespace

std::string HelloMessage::encode() const {
  WireWriter w;
  w.number(version);
  w.number(nonce[0]);
  w.number(nonce[1]);
  return w.take();
}
bool HelloMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  version = r.number<std::uint32_t>();
  for (auto& n : nonce) n = r.number<std::uint64_t>();
  return r.complete();
}

std::string ProofMessage::encode() const {
  WireWriter w;
  w.number(version);
  for (const auto n : nonce) w.number(n);
  for (const auto t : tag) w.number(t);
  return w.take();
}
bool ProofMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  version = r.number<std::uint32_t>();
  for (auto& n : nonce) n = r.number<std::uint64_t>();
  for (auto& t : tag) t = r.number<std::uint64_t>();
  return r.complete();
}

std::string RefusedMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number(code);
  w.text(cut(text, kLongestText));
  return w.take();
}
bool RefusedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.number<std::int32_t>();
  code = r.number<std::int32_t>();
  text = r.text(kLongestText);
  return r.complete() && rank >= -1 && rank <= static_cast<std::int32_t>(kLastRank);
}

std::string JoinMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number(ranks);
  w.number(arena_bytes);
  w.text(settings);
  w.text(host);
  w.list(cpus.size());
  for (const auto word : cpus) w.number(word);
  w.number(files);
  w.number(here);
  return w.take();
}
bool JoinMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  ranks = r.up_to(kMaxRanks);
  arena_bytes = r.number<std::uint64_t>();
  settings = r.text(4096);
  host = r.text(kLongestHostId);
  cpus.resize(r.list(kMostCpuWords, 8));
  for (auto& word : cpus) word = r.number<std::uint64_t>();
  files = r.number<std::uint64_t>();
  here = r.up_to(kMaxRanks);
  return r.complete() && rank < ranks && here <= ranks;
}

std::string PresentMessage::encode() const {
  WireWriter w;
  w.list(joined.size());
  for (const auto word : joined) w.number(word);
  return w.take();
}
bool PresentMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  joined.resize(r.list((kMaxRanks + 63) / 64, 8));
  for (auto& word : joined) word = r.number<std::uint64_t>();
  return r.complete();
}

std::string FailedMessage::encode() const {
  WireWriter w;
  w.text(cut(text, kLongestText));
  return w.take();
}
bool FailedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  text = r.text(kLongestText);
  return r.complete();
}

std::string StartMessage::encode() const {
  WireWriter w;
  w.number(me);
  w.list(process_of.size());
  for (const auto p : process_of) w.number(p);
  w.list(pids.size());
  for (const auto p : pids) w.number(p);
  w.list(hosts.size());
  for (const std::string& host : hosts) w.text(host);
  w.list(host_of.size());
  for (const auto host : host_of) w.number(host);
  w.list(cpus.size());
  for (const auto word : cpus) w.number(word);
  return w.take();
}
bool StartMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  me = r.number<std::uint32_t>();
  process_of.resize(r.list(kMaxRanks, 4));
  for (auto& p : process_of) p = r.number<std::uint32_t>();
  pids.resize(r.list(kMaxRanks, 8));
  for (auto& p : pids) p = r.number<std::int64_t>();
  hosts.resize(r.list(kMaxRanks, 4));
  for (auto& host : hosts) host = r.text(kLongestHostId);
  host_of.resize(r.list(kMaxRanks, 4));
  for (auto& host : host_of) host = r.up_to(kLastRank);
  cpus.resize(r.list(kMostCpuWords, 8));
  for (auto& word : cpus) word = r.number<std::uint64_t>();
  if (!r.complete() || me >= pids.size()) return false;
  if (host_of.size() != (hosts.empty() ? 0 : process_of.size())) return false;
  for (const auto host : host_of) {
    if (host >= hosts.size()) return false;
  }
  for (const auto p : process_of) {
    if (p >= pids.size() && p != kElsewhere) return false;
  }
  return true;
}

std::string GreetingMessage::encode() const {
  WireWriter w;
  w.number(from);
  w.number(to);
  w.number(pid);
  w.list(cpus.size());
  for (const auto word : cpus) w.number(word);
  w.text(carrier);
  return w.take();
}
bool GreetingMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  from = r.number<std::uint32_t>();
  to = r.number<std::uint32_t>();
  pid = r.number<std::int64_t>();
  cpus.resize(r.list(kMostCpuWords, 8));
  for (auto& word : cpus) word = r.number<std::uint64_t>();
  carrier = r.text(kLongestCarrierAddress);
  return r.complete();
}

std::string LostMessage::encode() const {
  WireWriter w;
  w.number(process);
  w.text(cut(why, kLongestText));
  return w.take();
}
bool LostMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  process = r.number<std::uint32_t>();
  why = r.text(kLongestText);
  return r.complete();
}

std::string HandedMessage::encode() const {
  WireWriter w;
  w.list(items.size());
  for (const Item& i : items) {
    w.number(i.of);
    w.number(i.fds);
  }
  return w.take();
}
bool HandedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  items.resize(r.list(kMostHanded, 5));
  for (Item& i : items) {
    i.of = r.up_to(kLastRank);
    i.fds = r.up_to<std::uint8_t>(kMostFdsOfOne);
    if (i.fds == 0) return false;
  }
  return r.complete();
}

std::string GoneMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number<std::uint8_t>(ended);
  w.text(cut(why, kLongestText));
  return w.take();
}
bool GoneMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  ended = r.up_to<std::uint8_t>(1) != 0;
  why = r.text(kLongestText);
  return r.complete();
}

std::string GaveUpMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.list(of.size());
  for (const auto r : of) w.number(r);
  return w.take();
}
bool GaveUpMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  of.resize(r.list(kMaxRanks, 4));
  for (auto& gone : of) gone = r.up_to(kLastRank);
  return r.complete();
}

std::string DepartedMessage::encode() const {
  WireWriter w;
  w.number(rank);
  put(w, calls);
  put(w, untaken);
  return w.take();
}
bool DepartedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  get(r, calls, kMostCalls);
  get(r, untaken, kMostUntaken);
  return r.complete();
}

std::string QueryMessage::encode() const {
  WireWriter w;
  put(w, calls);
  return w.take();
}
bool QueryMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  get(r, calls, kMostQuestions);
  return r.complete();
}

std::string AnswerMessage::encode() const {
  WireWriter w;
  put(w, asked);
  w.list(said.size());
  for (const SaidItem& s : said) {
    w.number(s.tag);
    w.number(s.n);
    w.number(s.rank);
    w.number<std::uint8_t>(s.called);
    w.text(cut(s.signature, kLongestName));
  }
  w.list(known.size());
  for (const Known& k : known) {
    w.number(k.tag);
    w.number(k.n);
    w.text(cut(k.text, kLongestText));
  }
  return w.take();
}
bool AnswerMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  get(r, asked, kMostQuestions);
  said.resize(r.list(kMostCalls, 25));
  for (SaidItem& s : said) {
    s.tag = r.number<std::uint64_t>();
    s.n = r.number<std::uint64_t>();
    s.rank = r.up_to(kLastRank);
    s.called = r.up_to<std::uint8_t>(1) != 0;
    s.signature = r.text(kLongestName);
  }
  known.resize(r.list(kMostQuestions, 20));
  for (Known& k : known) {
    k.tag = r.number<std::uint64_t>();
    k.n = r.number<std::uint64_t>();
    k.text = r.text(kLongestText);
  }
  return r.complete();
}

std::string FailMessage::encode() const {
  WireWriter w;
  w.number(tag);
  w.number(n);
  w.number(code);
  w.text(cut(text, kLongestText));
  return w.take();
}
bool FailMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  tag = r.number<std::uint64_t>();
  n = r.number<std::uint64_t>();
  code = r.number<std::int32_t>();
  text = r.text(kLongestText);
  return r.complete();
}

std::string SnapshotRequestMessage::encode() const {
  WireWriter w;
  w.number(number);
  return w.take();
}
bool SnapshotRequestMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  number = r.number<std::uint64_t>();
  return r.complete();
}

std::string SnapshotMessage::encode() const {
  WireWriter w;
  w.number(number);
  w.list(ranks.size());
  for (const RankSnapshot& s : ranks) {
    w.number(static_cast<std::uint32_t>(s.rank));
    w.number(static_cast<std::uint8_t>((s.holds ? 1 : 0) | (s.busy ? 2 : 0)));
    w.text(cut(s.lacks, kLongestText));
    w.list(s.running.size());
    for (const int i : s.running) {
      w.number(static_cast<std::int32_t>(i < static_cast<int>(kMostPending) ? i : -1));
    }
    w.list(s.words.size());
    for (const auto word : s.words) w.number(word);
    const std::size_t pending = std::min(s.pending.size(), kMostPending);
    w.list(pending);
    for (std::size_t i = 0; i < pending; ++i) put(w, s.pending[i]);
    put(w, s.untaken);
    w.list(s.calls.size());
    for (const auto& [tag, count] : s.calls) {
      w.number(tag);
      w.number(count);
    }
  }
  return w.take();
}
bool SnapshotMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  number = r.number<std::uint64_t>();
  ranks.resize(r.list(kMaxRanks, 29));
  for (RankSnapshot& s : ranks) {
    s.rank = static_cast<int>(r.up_to(kLastRank));
    const auto flags = r.up_to<std::uint8_t>(3);
    s.holds = (flags & 1) != 0;
    s.busy = (flags & 2) != 0;
    s.lacks = r.text(kLongestText);
    s.running.resize(r.list(kMaxLanes, 4));
    for (int& i : s.running) i = r.number<std::int32_t>();
    s.words.resize(r.list(kMaxLanes, 8));
    for (auto& word : s.words) word = r.number<std::uint64_t>();
    get(r, s.pending, kMostPending);
    get(r, s.untaken, kMostUntaken);
    for (const int i : s.running) {
      if (i < -1 || i >= static_cast<int>(s.pending.size())) return false;
    }
    const std::size_t calls = r.list(kMostCalls, 16);
    for (std::size_t i = 0; i < calls; ++i) {
      const auto tag = r.number<std::uint64_t>();
      s.calls[tag] = r.number<std::uint64_t>();
    }
  }
  return r.complete();
}

std::string WindowMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number(serial);
  w.text(allocation);
  w.number(offset);
  return w.take();
}
bool WindowMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  serial = r.number<std::uint64_t>();
  allocation = r.text(kLongestWindowName);
  offset = r.number<std::uint64_t>();
  return r.complete() && serial != 0 && serial <= kLastWindowSerial;
}

std::string WindowGoneMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number(serial);
  w.number<std::uint8_t>(stored_into);
  return w.take();
}
bool WindowGoneMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  serial = r.number<std::uint64_t>();
  stored_into = r.up_to<std::uint8_t>(1) != 0;
  return r.complete();
}

std::string WindowLetGoMessage::encode() const {
  WireWriter w;
  w.number(rank);
  w.number(serial);
  return w.take();
}
bool WindowLetGoMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  rank = r.up_to(kLastRank);
  serial = r.number<std::uint64_t>();
  return r.complete();
}

std::string RoomMessage::encode() const {
  WireWriter w;
  w.number(owner);
  w.number(peer);
  w.number(connectors);
  w.number<std::uint8_t>(offers);
  return w.take();
}
bool RoomMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  owner = r.up_to(kLastRank);
  peer = r.up_to(kLastRank);
  connectors = r.number<std::uint32_t>();
  offers = r.up_to<std::uint8_t>(1) != 0;
  return r.complete() && owner != peer && connectors != 0;
}

}  // namespace unjam
