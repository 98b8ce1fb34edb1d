// How the host and a GPU's engine instances (docs/internals/instances.md) tell each other that
// there is work and that nobody is there: through words in pinned host memory that one side stores
// and the other loads, for a GPU can wake no host thread.
//   resident  stored by the first lane's driver: it looks at what the host posts
//   posted    stored by the host: counts what it has made (submissions, marks, cancellations)
//   rung      stored by the device: an instance is needed; cleared by the launcher
//   queued    stored by the launcher before it launches, cleared by the instance that begins
// Quit: the driver clears `resident`, then looks at `posted` once more. Work: the host stores
// `posted`, then looks at `resident`; if that is 0, it wakes its launcher. Both are sequentially
// consistent, so at least one sees the other. protocol_test.cc and leaving_test.cc explore these
// steps.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

// In pinned host memory, one a rank.
struct HostLink {
  alignas(kFalseSharingBytes) std::uint32_t resident = 0;
  alignas(kFalseSharingBytes) std::uint32_t posted = 0;
  alignas(kFalseSharingBytes) std::uint32_t rung = 0;
  alignas(kFalseSharingBytes) std::uint32_t queued = 0;
};

struct ResidencySteps {
  // ---- host ----

  // After work was written; one thread at a time. True: the launcher must be woken.
  static bool post(HostLink& link) {
    // The order of the two is the protocol, see above. The store is a release, too: of the work.
    store_seq_cst(link.posted, load_relaxed(link.posted) + 1);
    return load_seq_cst(link.resident) == 0;
  }

  // The launcher, woken or having seen `rung`. True: it launches an instance.
  static bool should_launch(HostLink& link) {
    // First clear, then launch: a ring that is erased here came before the instance's look.
    store_seq_cst(link.rung, std::uint32_t{0});
    // One that is queued will look later than now. Sequentially consistent, as is begin(): if this
    // reads 1, the instance's clearing, and so its looks, come later in the one order.
    if (load_seq_cst(link.queued) != 0) return false;
    store_seq_cst(link.queued, std::uint32_t{1});
    return true;
  }

  // ---- instances ----

  // A launched instance begins.
  UNJAM_HD static void begin(HostLink& link) { store_seq_cst(link.queued, std::uint32_t{0}); }
};

}  // namespace unjam
