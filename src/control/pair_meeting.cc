#include "control/pair_meeting.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace unjam {
namespace {

constexpr std::uint32_t kPairVersion = 1;
constexpr std::uint64_t kLookNs = 100'000'000;     // between calls of one who did not answer
constexpr std::uint64_t kProveNs = 5'000'000'000;  // for a stranger to prove himself
constexpr std::size_t kMostCallers = 128;          // who have yet to say who they are

}  // namespace

PairMeeting::PairMeeting(Poller& poller, const JobSecret& secret)
    : poller_(poller), secret_(secret) {}

PairMeeting::~PairMeeting() {
  for (const auto& [token, link] : links_) poller_.forget(token);
  if (door_token_ != 0) poller_.forget(door_token_);
  poller_.leave(this);
}

bool PairMeeting::open(const SocketAddress& at, std::string& error) {
  if (!door_.open(at, error)) return false;
  door_token_ = poller_.watch(this, door_.fd(), true, false);
  if (door_token_ == 0) {
    error = "no room for another descriptor to watch";
    return false;
  }
  schedule();
  return true;
}

void PairMeeting::meet(std::uint32_t self, const std::map<std::uint32_t, SocketAddress>& others,
                       std::function<GreetingMessage(std::uint32_t)> greeting) {
  self_ = self;
  others_ = others;
  greeting_ = std::move(greeting);
  begun_ = true;
  for (const auto& [process, address] : others_) waits_for_[process] = "it has not called";
  for (const auto& [process, address] : others_) {
    if (process > self_) call(process);
  }
  // Who has called before, and waits for an answer. (Tokens first: what is answered may go.)
  std::vector<std::uint64_t> callers;
  for (const auto& [token, link] : links_) callers.push_back(token);
  for (const std::uint64_t token : callers) on_ready(token, true, false);
}

void PairMeeting::add(Fd socket, bool called, bool connecting, std::uint32_t process) {
  const std::uint64_t token = poller_.watch(this, socket.get(), !connecting, connecting);
  if (token == 0) return;
  Link& link = links_[token];
  const auto role = called ? TaggedChannel::Role::kCaller : TaggedChannel::Role::kDoor;
  link.channel = TaggedChannel(std::move(socket), role, secret_, kPairVersion, kLongestFrame);
  link.process = process;
  link.called = called;
  link.connecting = connecting;
  link.since_ns = monotonic_ns();
  if (!called) settle(token, link);
}

void PairMeeting::call(std::uint32_t process) {
  std::string& why = waits_for_[process];
  Fd socket = begin_connect(others_[process], why);
  if (socket) {
    why = "it does not answer";
    add(std::move(socket), true, true, process);
  }
  schedule();
}

void PairMeeting::accept_some() {
  const auto strangers = [&] {
    return static_cast<std::size_t>(std::count_if(links_.begin(), links_.end(),
                                                  [](const auto& l) { return !l.second.called; }));
  };
  while (door_.is_open()) {
    bool crowded = strangers() >= kMostCallers;
    Fd socket = crowded ? Fd() : door_.accept(crowded);
    if (crowded) {  // the newcomer waits, and must not keep this thread busy
      door_rests_ = true;
      poller_.change(door_token_, false, false);
    }
    if (!socket) return;
    add(std::move(socket), false, false, 0);
  }
}

void PairMeeting::drop(std::uint64_t token, const std::string& why) {
  const auto at = links_.find(token);
  if (at == links_.end()) return;
  const bool called = at->second.called;
  const std::uint32_t process = at->second.process;
  poller_.forget(token);
  links_.erase(at);
  if (called && waits_for_.count(process) != 0) waits_for_[process] = why;  // called again soon
}

void PairMeeting::settle(std::uint64_t token, Link& link) {
  std::string error;
  if (!link.channel.flush(error)) return drop(token, error);
  poller_.change(token, true, link.channel.pending());
}

void PairMeeting::greet(Link& link, std::uint32_t process) {
  link.greeted = true;
  link.channel.post(static_cast<std::uint16_t>(MessageType::kGreeting),
                    greeting_(process).encode());
}

// False: the link is gone, or is met and no longer watched.
bool PairMeeting::take_greeting(std::uint64_t token, Link& link, const Frame& frame) {
  GreetingMessage m;
  const bool right = frame.type == static_cast<std::uint16_t>(MessageType::kGreeting) &&
                     m.decode(frame.payload) && m.to == self_ && waits_for_.count(m.from) != 0 &&
                     (link.called ? m.from == link.process : m.from < self_);
  if (!right) {
    drop(token, "its greeting makes no sense");
    return false;
  }
  if (!link.greeted) greet(link, m.from);
  std::string error;
  link.channel.flush(error);  // what is wrong, the mesh sees
  poller_.forget(token);
  waits_for_.erase(m.from);
  Met& met = met_[m.from];
  met.channel = std::move(link.channel);
  met.greeting = std::move(m);
  links_.erase(token);
  return false;
}

void PairMeeting::on_ready(std::uint64_t token, bool readable, bool writable) {
  if (token == door_token_) return accept_some();
  const auto at = links_.find(token);
  if (at == links_.end()) return;
  Link& link = at->second;
  std::string error;
  if (link.connecting) {
    if (!writable) return;
    if (!end_connect(link.channel.fd(), error)) return drop(token, error);
    link.connecting = false;
  }
  bool live = true;
  if (readable) live = link.channel.receive(error);
  // The caller speaks first; and who is not yet told of the others leaves unread what he is told.
  if (begun_ && link.channel.proven()) {
    if (link.called && !link.greeted) greet(link, link.process);
    if (Frame frame; link.channel.pop(frame) && !take_greeting(token, link, frame)) return;
    if (link.channel.broken()) return drop(token, link.channel.fault());
  }
  if (!live) return drop(token, error);
  settle(token, link);
}

void PairMeeting::on_time() {
  const std::uint64_t now = monotonic_ns();
  std::vector<std::uint64_t> late;
  for (const auto& [token, link] : links_) {
    if (!link.channel.proven() && now - link.since_ns > kProveNs) late.push_back(token);
  }
  for (const std::uint64_t token : late) drop(token, "it does not prove that it is of this job");
  for (const auto& [process, why] : waits_for_) {
    if (process < self_) continue;
    const bool called = std::any_of(links_.begin(), links_.end(), [p = process](const auto& l) {
      return l.second.called && l.second.process == p;
    });
    if (!called) call(process);
  }
  if (door_rests_) {
    door_rests_ = false;
    poller_.change(door_token_, true, false);
  }
  schedule();
}

void PairMeeting::schedule() { poller_.at(this, monotonic_ns() + kLookNs); }

std::map<std::uint32_t, PairMeeting::Met> PairMeeting::take() {
  for (const auto& [token, link] : links_) poller_.forget(token);
  links_.clear();
  if (door_token_ != 0) poller_.forget(door_token_);
  door_token_ = 0;
  door_.release();
  poller_.leave(this);
  return std::move(met_);
}

}  // namespace unjam
