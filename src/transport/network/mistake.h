// Mistakes that tests plant into the courier, which the schedule explorer must find. Only there,
// where UNJAM_EXPLORER is defined, are there any.
#pragma once

#if defined(UNJAM_EXPLORER)
namespace unjam {
enum class Mistake { kNone, kFlagFirst, kShowsEarly, kNeverUnlists, kBelieves };
inline Mistake& mistake() {
  static Mistake planted = Mistake::kNone;
  return planted;
}
}  // namespace unjam
#define UNJAM_MISTAKE(what) (mistake() == Mistake::what)
#else
#define UNJAM_MISTAKE(what) false
#endif
