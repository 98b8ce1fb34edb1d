#include "runtime/explain_signal.h"

#include <signal.h>

#include <atomic>

namespace unjam {
namespace {

// Lock-free, so a handler may touch it.
std::atomic<std::uint32_t> arrivals{0};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

void on_signal(int) { arrivals.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

void explain_on_signal(int signal) {
  struct sigaction now{};
  if (signal == 0 || sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

std::uint32_t explain_signals() { return arrivals.load(std::memory_order_relaxed); }

}  // namespace unjam
