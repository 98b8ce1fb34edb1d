// A rank's messages to itself: a send, and a receive, of which both are this rank's calls.
//
// The first of the two is kept outside of the engine until the other one comes (Key::halves): it is
// nobody's to run yet. Then the two are one invocation, a copy, as a collective of a group of one,
// which both requests are complete with. So there is no buffer between them, and a send is not
// complete before it is received. The n-th send under a key meets the n-th receive, whichever came
// first; so of a key at most one of the two kinds waits.
//
// A use of the key is counted when both calls are there. What waits alone has the number of the use
// that it will be.
#include <utility>

#include "base/clock.h"
#include "runtime/call_checks.h"
#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {
namespace {

std::string half_text(const Submitted& s) {
  const Signature& c = s.call.signature;
  return std::string(s.call.half == Half::kSend ? "sends" : "receives") +
         " count=" + std::to_string(c.count) + ", " + to_string(c.dtype) + c.algorithm_text(", ") +
         (c.match_text[0] == 0 ? "" : " as '" + std::string(c.match_text.data()) + "'");
}

}  // namespace

Result Context::lacks_half(const Submitted& s) {
  return {UNJAM_ERROR_INVALID_USAGE,
          "a stream cannot wait for " + name_text(*s.key) +
              " before both calls are made: call the " +
              (s.lacks() != nullptr ? s.lacks() : "other one") + " first",
          /*transient=*/true};
}

Result Context::submit_half(unjamGroup& channel, const char* name, const Call& call,
                            unjamRequest** request) {
  if (Result r = check_call(channel, call); !r.ok()) return r;
  if (Result r = check_buffers(channel, call); !r.ok()) return r;
  if (call.stream_order != UNJAM_STREAM_NONE && !cuda()) return no_streams();
  auto s = std::make_unique<Submitted>();
  s->since_ns = monotonic_ns();
  std::unique_lock lock(mutex_);
  if (closed()) return closed_why_;
  Result result;
  Key* const key = find_or_create_key(channel, name, result);
  if (key == nullptr) return result;
  std::optional<Pin> pin(*key);
  s->key = key;
  s->call = call;
  const auto meets = [&] {
    return !key->halves.empty() && key->halves.front()->call.half != s->call.half;
  };
  for (;;) {
    // A key's uses come to the device in their order.
    while (key->launching && !closed_) launched_.wait(lock);
    if (closed()) return closed_why_;
    if (channel.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    if (key->over()) {
      return {key->failed.code, name_text(*key) +
                                    " is out of use since an earlier invocation failed (" +
                                    key->failed.message + "): use another key"};
    }
    if (meets() || s->call.stream_order == UNJAM_STREAM_NONE || s->called != nullptr) break;
    if (s->call.stream_order == UNJAM_STREAM_SYNC) {
      return {UNJAM_ERROR_INVALID_USAGE, "a stream cannot wait for " + name_text(*key) +
                                             " before both calls are made: call the " + s->lacks() +
                                             " first, or make this call with UNJAM_STREAM_ASYNC"};
    }
    std::string error;
    s->called = streams_->note(lock, s->call.stream, error);  // without the lock: all may differ
    if (s->called == nullptr) return {UNJAM_ERROR_SYSTEM, std::move(error)};
  }
  if (Result r = room_for(*key); !r.ok()) return r;
  return meets() ? join_halves(lock, pin, std::move(s), request)
                 : leave_half(std::move(s), request);
}

// The first of the two.
Result Context::leave_half(std::unique_ptr<Submitted> s, unjamRequest** request) {
  Key& key = *s->key;
  if (s->call.callback != nullptr) need_background();
  Submitted& half = *s;
  key.halves.push_back(std::move(s));
  try {
    if (request != nullptr) *request = make_request(half);
  } catch (...) {
    key.halves.pop_back();
    throw;
  }
  half.n = key.submitted + key.halves.size() - 1;
  half.order = orders_++;
  ++submitted_;
  log_called(half);
  ++key.group->pending;
  if (half.call.callback != nullptr) ++callbacks_;
  move_key(key, KeyList::kBusy);
  return {};
}

// The second: it carries the first one along.
Result Context::join_halves(std::unique_lock<std::mutex>& lock, std::optional<Pin>& pin,
                            std::unique_ptr<Submitted> s, unjamRequest** request) {
  Key& key = *s->key;
  Submitted& first = *key.halves.front();
  Call both = s->call;
  both.half = Half::kNone;
  if (both.send == nullptr) both.send = first.call.send;
  if (both.recv == nullptr) both.recv = first.call.recv;
  Result disagreement;
  if (!(first.call.signature == s->call.signature)) {
    const bool sends = first.call.half == Half::kSend;
    disagreement = {
        UNJAM_ERROR_MISMATCH,
        "the two calls of " +
            use_text(s->call.signature, key.name, key.group->name, key.submitted) + " differ: it " +
            half_text(sends ? first : *s) + ", but " + half_text(sends ? *s : first) +
            ". Give both the same count and type; if sends and receives are called in different "
            "orders, give each message a key (tag) of its own."};
  } else if (Result r = check_buffers(*key.group, both); !r.ok()) {
    return r;
  } else if (r = plan_call(*key.group, key, both.signature); !r.ok()) {
    return r;
  }
  s->call = both;
  s->called = first.called;
  s->other = std::move(key.halves.front());
  key.halves.pop_front();
  Result result;
  try {
    result = enter(lock, pin, s, request, disagreement);
  } catch (...) {
    key.halves.push_front(std::move(s->other));
    throw;
  }
  // Where the second has not got in (else it is gone from here), the first waits on.
  if (s != nullptr) key.halves.push_front(std::move(s->other));
  if (!disagreement.ok()) fail_waiting(key, key.failed_from, key.failed);
  return result;
}

}  // namespace unjam
