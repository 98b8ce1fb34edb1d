// For tests that run the library's own protocols under the schedule explorer (explorer.h): they
// define UNJAM_EXPLORER and rename the namespace to unjam_explored before they include those, and
// include this once, behind them. Every operation there that others can notice ends up here.
#pragma once

#include "tests/support/explorer.h"

#if UNJAM_HAS_EXPLORER

namespace unjam_explored {
void explorer_point(bool writes) {
  if (unjam_test::Explorer::self() != nullptr) unjam_test::Explorer::self()->point(writes);
}
}  // namespace unjam_explored

#endif
