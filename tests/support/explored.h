// For tests that run the library's own protocols under the schedule explorer (explorer.h): they
// define UNJAM_EXPLORER and rename the namespace to unjam_explored before they include those, and
// include this once, behind them. Every operation there that others can notice ends up here.
#pragma once

#include "tests/support/explorer.h"

namespace unjam_explored {
void explorer_point([[maybe_unused]] bool writes) {
#if UNJAM_HAS_EXPLORER
  if (unjam_test::Explorer::self() != nullptr) unjam_test::Explorer::self()->point(writes);
#endif
}
void explorer_look(const void*) {}
}  // namespace unjam_explored
