#include "runtime/ending.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "runtime/context.h"
#include "runtime/world.h"

namespace unjam {
namespace {

constexpr useconds_t kLookUs = 500;

struct Open {
  std::mutex mutex;
  std::set<World*> worlds;
  std::list<std::weak_ptr<Context>> contexts;
};
// A child of fork() has none of these: its end is not its parent's.
Open& open() { return per_process<Open>(); }

// Says no more than that it is exit() that ends the process: threads of ours and of the user's run
// on, callbacks among them, and what they wait for may be what has called exit(). So nobody is
// waited for, no lock neither: without it, the process is said to have died.
void at_exit() {
  Open& o = open();
  const std::unique_lock lock(o.mutex, std::try_to_lock);
  if (!lock) return;
  for (World* world : o.worlds) world->say_exit();
}

}  // namespace

void end_with_process(World* world) {
  [[maybe_unused]] static const bool kRegistered = std::atexit(at_exit) == 0;
  Open& o = open();
  const std::lock_guard lock(o.mutex);
  o.worlds.insert(world);
}

void ended_before_process(World* world) {
  Open& o = open();
  const std::lock_guard lock(o.mutex);
  o.worlds.erase(world);
}

void end_with_process(const std::shared_ptr<Context>& context) {
  Open& o = open();
  const std::lock_guard lock(o.mutex);
  o.contexts.remove_if([](const std::weak_ptr<Context>& c) { return c.expired(); });
  o.contexts.push_back(context);
}

std::string end_contexts(std::int64_t patience_us) {
  if (Context::in_callback()) return "";  // whoever waits for callbacks waits for this one
  if (patience_us < 0) patience_us = kPatienceUs;
  std::vector<std::shared_ptr<Context>> contexts;
  {
    Open& o = open();
    const std::lock_guard lock(o.mutex);
    for (const std::weak_ptr<Context>& weak : o.contexts) {
      if (std::shared_ptr<Context> c = weak.lock()) contexts.push_back(std::move(c));
    }
  }
  // All together: one may be what another one waits for.
  std::uint64_t seen = UINT64_MAX, since = 0;
  for (;;) {
    std::uint64_t moved = 0, pending = 0;
    for (const auto& c : contexts) {
      const Context::Motion m = c->motion();
      moved += m.moved;
      pending += m.pending;
    }
    if (pending == 0) break;
    const std::uint64_t now = monotonic_ns();
    if (moved != seen) since = now;
    seen = moved;
    if (now - since >= static_cast<std::uint64_t>(patience_us) * 1000) break;
    usleep(kLookUs);
  }
  const std::string how = "its process (" + std::to_string(getpid()) + ") " + kEndedText;
  // All that is pending first, and nobody is waited for meanwhile: what one context waits for may
  // be behind another one's, in a stream.
  std::vector<std::string> whats;
  for (const auto& c : contexts) whats.push_back(c->abort_at_end(how));
  std::string aborted;
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    const auto& c = contexts[i];
    const std::string what = c->leave_at_end(how, std::move(whats[i]));
    if (!what.empty()) {
      aborted +=
          (aborted.empty() ? "" : "; ") + ("rank " + std::to_string(c->rank()) + ": ") + what;
    }
  }
  for (const auto& c : contexts) c->flush_network();
  return aborted;
}

}  // namespace unjam
