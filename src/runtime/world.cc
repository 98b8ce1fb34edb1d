#include "runtime/world.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/context.h"
#include "runtime/engine_memory.h"
#include "transport/announcement.h"

namespace unjam {
namespace {

// What an id holds.
struct IdContents {
  char magic[8];  // "unjam-1"
  std::int64_t process;
  std::uint64_t secret[4];
};
static_assert(sizeof(IdContents) <= UNJAM_UNIQUE_ID_BYTES);
constexpr char kMagic[8] = "unjam-1";

// Worlds by id: those that ranks are joining. (The runtime's one piece of global state.)
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<World>> worlds;
};
Registry& registry() {
  static Registry* r = new Registry;  // never destroyed: contexts may outlive static destructors
  return *r;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string t = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return t + ", … (" + std::to_string(ranks.size()) + " in all)";
    t += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return t;
}

std::string disagreement_text(const std::map<std::string, std::vector<int>>& said,
                              const std::string& what) {
  std::string text = "ranks disagree on " + what + ": ";
  bool first = true;
  for (const auto& [signature, ranks] : said) {
    text += (first ? "" : "; ") + rank_list(ranks) + " called " + signature;
    first = false;
  }
  return text + ". Make the same call on all ranks of the group.";
}

}  // namespace

std::string call_text(const std::string& key, const std::string& group, std::uint64_t n) {
  return "key '" + key + "' of group '" + group + "', use " + std::to_string(n + 1);
}

unjamUniqueId_t World::create_id() {
  IdContents c{};
  std::memcpy(c.magic, kMagic, sizeof(kMagic));
  c.process = getpid();
  std::size_t got = 0;
  while (got < sizeof(c.secret)) {
    const ssize_t n = getrandom(reinterpret_cast<char*>(c.secret) + got, sizeof(c.secret) - got, 0);
    if (n > 0) got += static_cast<std::size_t>(n);
  }
  unjamUniqueId_t id{};
  std::memcpy(id.internal, &c, sizeof(c));
  return id;
}

std::shared_ptr<World> World::by_id(const unjamUniqueId_t& id, int ranks, const Settings& settings,
                                    unjamResult_t& code, std::string& error) {
  IdContents c;
  std::memcpy(&c, id.internal, sizeof(c));
  if (std::memcmp(c.magic, kMagic, sizeof(kMagic)) != 0) {
    code = UNJAM_ERROR_INVALID_ARGUMENT;
    error = "this is no unique id: make one with unjamGetUniqueId and hand it to every rank";
    return nullptr;
  }
  if (c.process != getpid()) {
    code = UNJAM_ERROR_INVALID_USAGE;
    error = "this unique id was made in process " + std::to_string(c.process) +
            ": in this version all ranks of a job are threads of one process";
    return nullptr;
  }
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  std::erase_if(r.worlds, [](const auto& w) { return w.second.expired(); });
  std::weak_ptr<World>& place = r.worlds[std::string(id.internal, sizeof(id.internal))];
  std::shared_ptr<World> world = place.lock();
  if (world == nullptr) {
    world = std::make_shared<World>(ranks, settings);
    place = world;
  }
  if (world->ranks() != ranks) {
    code = UNJAM_ERROR_MISMATCH;
    error = "this rank says that the job has " + std::to_string(ranks) + " ranks, an earlier one " +
            std::to_string(world->ranks()) + ": give the same number everywhere";
    return nullptr;
  }
  return world;
}

World::World(int ranks, const Settings& first_settings)
    : ranks_(ranks),
      first_settings_(first_settings),
      shape_(arena_shape(first_settings, ranks)),
      arenas_(static_cast<std::size_t>(ranks)),
      bases_(static_cast<std::size_t>(ranks), nullptr),
      joined_(static_cast<std::size_t>(ranks), false),
      contexts_(static_cast<std::size_t>(ranks), nullptr),
      watcher_([this] { watch(); }) {}

World::~World() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

std::uint64_t World::arena_committed(int rank) const {
  return arenas_[static_cast<std::size_t>(rank)].committed();
}

unjamResult_t World::join(int rank, const Settings& settings, std::string& error) {
  const auto r = static_cast<std::size_t>(rank);
  const std::string agreed = agreed_settings_text(settings);
  std::unique_lock lock(mutex_);
  if (joined_[r]) {
    error = "rank " + std::to_string(rank) + " has joined this job already";
    return UNJAM_ERROR_INVALID_USAGE;
  }
  if (first_rank_ < 0) {
    first_rank_ = rank;
    first_agreed_ = agreed;
  } else if (agreed != first_agreed_) {
    error = "settings differ: rank " + std::to_string(first_rank_) + " has " + first_agreed_ +
            "; rank " + std::to_string(rank) + " has " + agreed + "; they must be equal";
    failure_ = error;
    changed_.notify_all();
    return UNJAM_ERROR_MISMATCH;
  }
  arenas_[r] = SharedMemory::create(shape_.total_bytes(), error);
  if (arenas_[r].data() == nullptr) {
    failure_ = "rank " + std::to_string(rank) + ": " + error;
    changed_.notify_all();
    return UNJAM_ERROR_SYSTEM;
  }
  bases_[r] = arenas_[r].data();
  joined_[r] = true;
  ++num_joined_;
  changed_.notify_all();
  return UNJAM_SUCCESS;
}

unjamResult_t World::wait_joined(std::int64_t timeout_ms, std::string& error) {
  std::unique_lock lock(mutex_);
  const bool in_time = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] {
    return num_joined_ == ranks_ || !failure_.empty();
  });
  if (!failure_.empty()) {
    error = "another rank could not join: " + failure_;
    return UNJAM_ERROR_PEER;
  }
  if (!in_time) {
    std::vector<int> missing;
    for (int r = 0; r < ranks_; ++r) {
      if (!joined_[static_cast<std::size_t>(r)]) missing.push_back(r);
    }
    error = rank_list(missing) + " did not join within " + std::to_string(timeout_ms) +
            " ms (UNJAM_INIT_TIMEOUT_MS)";
    failure_ = error;
    changed_.notify_all();
    return UNJAM_ERROR_TIMEOUT;
  }
  return UNJAM_SUCCESS;
}

void World::attach(Context* context) {
  std::lock_guard lock(mutex_);
  contexts_[static_cast<std::size_t>(context->rank())] = context;
  changed_.notify_all();
}

void World::detach(Context* context, std::map<std::uint64_t, std::uint64_t> calls) {
  std::lock_guard lock(mutex_);
  Context*& place = contexts_[static_cast<std::size_t>(context->rank())];
  if (place != context) return;
  place = nullptr;
  departed_[context->rank()] = std::move(calls);
}

int World::first_gone(const std::vector<int>& members, std::string& why) const {
  std::lock_guard lock(mutex_);
  for (const int member : members) {
    const auto found = gone_.find(member);
    if (found == gone_.end()) continue;
    why = found->second;
    return member;
  }
  return -1;
}

void World::tell_peers_gone(int rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  gone_.emplace(rank, why);
  for (Context* c : contexts_) {
    if (c != nullptr && c->rank() != rank) c->peer_gone(rank, why);
  }
}

std::string World::explain() {
  std::lock_guard lock(mutex_);
  std::vector<RankSnapshot> ranks;
  for (Context* c : contexts_) {
    if (c != nullptr) ranks.push_back(c->snapshot());
  }
  for (const auto& [rank, calls] : departed_) {
    RankSnapshot gone;
    gone.rank = rank;
    gone.calls = calls;
    ranks.push_back(std::move(gone));
  }
  const std::vector<WaitEdge> edges = certain_edges(ranks);
  std::vector<WaitCycle> cycles = find_cycles(edges);
  // The snapshots were taken one after the other. Where a rank's lanes have neither left nor
  // entered anything between its snapshot and now, what they were inside of then they have been
  // inside of all the time between: so all edges of the cycle held at one moment, and for good.
  std::erase_if(cycles, [&](const WaitCycle& cycle) {
    return std::any_of(cycle.edges.begin(), cycle.edges.end(), [&](const WaitEdge& e) {
      std::vector<std::uint64_t> now;
      contexts_[static_cast<std::size_t>(e.rank)]->running_words(now);
      const auto then = std::find_if(ranks.begin(), ranks.end(),
                                     [&](const RankSnapshot& r) { return r.rank == e.rank; });
      return now != then->words;
    });
  });
  return explain_json(ranks, edges, cycles);
}

std::uint64_t* World::announcements(const std::vector<int>& members, std::uint64_t tag) const {
  const auto home = static_cast<std::size_t>(members[tag % members.size()]);
  return reinterpret_cast<std::uint64_t*>(bases_[home] + shape_.announcements());
}

std::string World::compare(const Context& caller, std::uint64_t tag, std::uint64_t n,
                           const Signature& signature, const std::vector<int>& members,
                           const std::string& what) {
  std::lock_guard lock(mutex_);
  std::map<std::string, std::vector<int>> said = {{signature.text(), {caller.rank()}}};
  for (const int member : members) {
    Context* other = contexts_[static_cast<std::size_t>(member)];
    Signature s;
    if (other != nullptr && other != &caller && other->find_call(tag, n, s)) {
      said[s.text()].push_back(member);
    }
  }
  const auto known = disagreements_.find(tag);
  if (known != disagreements_.end() && known->second.first <= n) return known->second.second;
  if (said.size() == 1) return "";
  const std::string text = disagreement_text(said, what);
  fail_everywhere(tag, n, members, text);
  return text;
}

void World::fail_everywhere(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
                            const std::string& text) {
  const auto [known, first] = disagreements_.try_emplace(tag, n, text);
  if (!first && n < known->second.first) known->second = {n, text};
  announce_disagreement(announcements(members, tag), tag, n);
  for (const int member : members) {
    Context* c = contexts_[static_cast<std::size_t>(member)];
    if (c != nullptr) c->fail_call(tag, n, {UNJAM_ERROR_MISMATCH, text});
  }
}

void World::watch() {
  std::unique_lock lock(mutex_);
  const auto period =
      std::chrono::milliseconds(std::clamp<std::int64_t>(first_settings_.stall_ms / 2, 5, 250));
  const auto nobody = [this] {
    return std::all_of(contexts_.begin(), contexts_.end(), [](Context* c) { return c == nullptr; });
  };
  while (!stopping_) {
    changed_.wait(lock, [&] { return stopping_ || !nobody(); });
    changed_.wait_for(lock, period, [this] { return stopping_; });
    if (!stopping_) look_for_disagreement();
  }
}

// Compares what ranks have called where something has been pending for too long: calls that differ,
// and calls that a rank can no longer make.
void World::look_for_disagreement() {
  for (Context* c : contexts_) {
    if (c == nullptr) continue;
    for (const Context::CallRecord& call : c->pending_calls()) {
      if (call.age_ms < static_cast<double>(c->stall_ms())) continue;
      std::map<std::string, std::vector<int>> said = {{call.signature.text(), {c->rank()}}};
      std::vector<int> gone;
      for (const int member : call.members) {
        if (member == c->rank()) continue;
        Context* other = contexts_[static_cast<std::size_t>(member)];
        if (other == nullptr) {
          const auto d = departed_.find(member);
          if (d == departed_.end()) continue;
          const auto calls = d->second.find(call.id.tag);
          if (calls == d->second.end() || calls->second <= call.id.n) gone.push_back(member);
          continue;
        }
        Signature s;
        if (other->find_call(call.id.tag, call.id.n, s)) said[s.text()].push_back(member);
      }
      const std::string what = call_text(call.id.key, call.id.group, call.id.n);
      if (said.size() > 1) {
        fail_everywhere(call.id.tag, call.id.n, call.members, disagreement_text(said, what));
      } else if (!gone.empty()) {
        c->fail_call(call.id.tag, call.id.n,
                     {UNJAM_ERROR_PEER, rank_list(gone) + " left the job without calling " + what});
      }
    }
  }
}

}  // namespace unjam
