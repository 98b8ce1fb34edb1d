// Ranks that leave, die or give up, as a world hears of them and tells its contexts.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "runtime/context.h"
#include "runtime/ending.h"
#include "runtime/log.h"
#include "runtime/network.h"
#include "runtime/world.h"

namespace unjam {

// Whether a rank of the process is not known to be gone and has not left in good order. (Who waits
// for a call that a rank has left without learns it from watch().)
bool World::misses(int process) const {
  std::lock_guard lock(mutex_);
  for (int r = 0; r < ranks_; ++r) {
    if (!is_rank_of(static_cast<std::uint32_t>(r), process)) continue;
    if (departed_.count(r) == 0 && gone_.count(r) == 0) return true;
  }
  return false;
}

void World::on_lost(Loss loss) {
  if (start_failed_) return;
  loss.until_ns = monotonic_ns() + kLastBreathMs * std::uint64_t{1000000};
  losses_.push_back(std::move(loss));
  take_losses();
}

// Connections have no order among each other: that a rank has ended because of another one may be
// seen before that one's end, and calls would be told the wrong name.
bool World::follows_another(int process) const {
  return std::any_of(given_up_.begin(), given_up_.end(), [&](const auto& entry) {
    return is_rank_of(static_cast<std::uint32_t>(entry.first), process) &&
           std::any_of(entry.second.begin(), entry.second.end(), [&](int of) {
             return gone_.count(of) == 0 && departed_.count(of) == 0 &&
                    !is_rank_of(static_cast<std::uint32_t>(of), process);
           });
  });
}

void World::take_losses() {
  // Each that is taken may be what others wait for.
  for (bool again = true; again;) {
    again = false;
    for (auto loss = losses_.begin(); loss != losses_.end(); ++loss) {
      if (monotonic_ns() < loss->until_ns && follows_another(loss->process)) continue;
      const Loss taken = std::move(*loss);
      losses_.erase(loss);
      lose(taken);
      changed_.notify_all();
      again = true;
      break;
    }
  }
}

void World::lose(const Loss& loss) {
  const auto& [process, died, why, until] = loss;
  // Who has departed, and had no time to send all, may leave calls behind that would never end.
  const bool all_came = !is_remote(process) || said_good_bye_.count(process) != 0;
  const auto is_through = [&](int rank) { return all_came && departed_.count(rank) != 0; };
  // (Others may have told, whose connection to it has ended as well.)
  if (lost_.insert(process).second && is_remote(process)) {
    const bool missed = std::any_of(process_of_.begin(), process_of_.end(), [&](const int& p) {
      const int rank = static_cast<int>(&p - process_of_.data());
      return p == process && !is_through(rank);
    });
    if (missed) tell_lost(process, why);
    network_->give_up(process);
  }
  for (int r = 0; r < ranks_; ++r) {
    if (!is_rank_of(static_cast<std::uint32_t>(r), process) || is_through(r)) continue;
    const bool exits = died && load_acquire(ledger(r).exits) != 0;
    std::string text = "its process (" + process_text(process) + ") ";
    text += exits                ? kEndedText
            : died               ? "died"
            : is_remote(process) ? "is lost: "
                                 : "closed its connection: ";
    if (!died) text += why;
    mark_gone(r, text, legacy_of(r));
  }
  windows_let_go(process);
  for (auto& [number, g] : gatherings_) g.waits_for.erase(process);
  for (auto& [call, inquiry] : inquiries_) {
    if (inquiry.waits_for.erase(process) != 0 && inquiry.waits_for.empty()) {
      evaluate(call, inquiry);
    }
  }
}

void World::attach(Context* context) {
  {
    std::lock_guard lock(mutex_);
    contexts_[static_cast<std::size_t>(context->rank())] = context;
  }
  if (rooms_ != nullptr) rooms_->attach(context->rank(), context);
  changed_.notify_all();
  mesh_.wake();
}

void World::detach(Context* context, std::map<std::uint64_t, std::uint64_t> calls,
                   std::vector<PendingCall> untaken) {
  if (rooms_ != nullptr) rooms_->detach(context->rank(), context);
  std::lock_guard lock(mutex_);
  Context*& place = contexts_[static_cast<std::size_t>(context->rank())];
  if (place != context) return;
  tell_given_up();  // who still waits for this rank is to hear why it does not come
  place = nullptr;
  DepartedMessage m;
  m.rank = static_cast<std::uint32_t>(context->rank());
  m.calls.assign(calls.begin(), calls.end());
  m.untaken = untaken;
  departed_[context->rank()] = {std::move(calls), std::move(untaken)};
  windows_.forget(context->rank(), false);
  for (Context* c : contexts_) {
    if (c != nullptr) c->peer_left(context->rank());
  }
  mesh_.send_all(MessageType::kDeparted, m.encode());
}

// Its process has ended, or all that the rank had under way has: the ledger stays as it is. (Of one
// that has merely closed its connection it says what was complete by now, which stays true.)
// Of GPUs nothing: the host hears late of what is complete there, and what the device is told of a
// rank that is gone ends all calls with it.
std::shared_ptr<const Legacy> World::legacy_of(int rank) const {
  if (cuda() != nullptr) return nullptr;
  const auto left = departed_.find(rank);
  return std::make_shared<Legacy>(ledger(rank),
                                  left == departed_.end() ? nullptr : &left->second.calls);
}

void World::mark_gone(int rank, const std::string& why,
                      const std::shared_ptr<const Legacy>& legacy) {
  if (!gone_.emplace(rank, Gone{why, legacy, {}}).second) return;
  Log::process().say(LogLevel::kInfo, log_rank(),
                     [&] { return "rank " + std::to_string(rank) + " is gone: " + why; });
  // Some engine may be at it still: what is mapped stays so.
  windows_.forget(rank, true);
  for (Context* c : contexts_) {
    if (c != nullptr && c->rank() != rank) c->peer_gone(rank, why, legacy);
  }
  // Others may have met it before it was known here.
  for (const auto& [r, of] : given_up_) {
    if (of.count(rank) != 0) meet_end(r, rank);
  }
}

void World::on_gave_up(int rank, const std::vector<int>& of) {
  for (const int peer : of) {
    if (given_up_[rank].insert(peer).second) meet_end(rank, peer);
  }
}

// Whoever knows that `peer` is gone hears that `rank` has met that.
void World::meet_end(int rank, int peer) {
  const auto gone = gone_.find(peer);
  if (gone == gone_.end()) return;
  gone->second.given_up.push_back(rank);
  for (Context* c : contexts_) {
    if (c != nullptr && c->rank() != rank) c->peer_gave_up(rank, peer, gone->second.why);
  }
}

void World::gave_up(int rank, int of) {
  GaveUpMessage m;
  m.rank = static_cast<std::uint32_t>(rank);
  m.of = {static_cast<std::uint32_t>(of)};
  mesh_.send_all(MessageType::kGaveUp, m.encode());  // and wakes this process's thread
}

void World::tell_given_up() {
  for (Context* c : contexts_) {
    if (c == nullptr) continue;
    const auto known = given_up_.find(c->rank());
    on_gave_up(c->rank(), c->given_up(known == given_up_.end() ? 0 : known->second.size()));
  }
}

void World::tell_peers_gone(int rank, const std::string& why, bool ended) {
  std::lock_guard lock(mutex_);
  GoneMessage m;
  m.rank = static_cast<std::uint32_t>(rank);
  m.ended = ended;
  m.why = why;
  // First, as the ranks of this process may be busy with calls of their own, see peer_gone().
  mesh_.send_all(MessageType::kGone, m.encode());
  mark_gone(rank, why, ended ? legacy_of(rank) : nullptr);
  changed_.notify_all();
}

std::vector<std::pair<int, World::Gone>> World::gone(const std::vector<int>& members) const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int, Gone>> ranks;
  for (const int member : members) {
    const auto found = gone_.find(member);
    if (found != gone_.end()) ranks.emplace_back(member, found->second);
  }
  return ranks;
}

void World::say_exit() {
  // Acquire: who is of this process, and where its memory is.
  if (!runs_.load(std::memory_order_acquire)) return;
  for (int r = 0; r < ranks_; ++r) {
    if (is_local(r)) store_release<std::uint64_t>(ledger(r).exits, 1);
  }
}

std::vector<int> World::absent() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int r = 0; r < ranks_; ++r) {
    if (gone_.count(r) != 0 || departed_.count(r) != 0) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace unjam
