// What names a job: a secret that all its ranks know, by a unique id or from the environment that a
// launcher sets.
#pragma once

#include <string>

#include "control/rendezvous.h"
#include "unjam/unjam.h"

namespace unjam {

unjamUniqueId_t make_unique_id();
bool secret_of(const unjamUniqueId_t& id, JobSecret& secret, std::string& error);

// A rank as its launcher describes it.
struct LaunchedRank {
  int rank = 0;
  int ranks = 1;
  unjamUniqueId_t id{};
};
// Reads UNJAM_RANK, UNJAM_RANKS and UNJAM_ID, or what torchrun, mpirun or srun set. False: `error`
// says what is missing.
bool rank_from_environment(LaunchedRank& launched, std::string& error);

}  // namespace unjam
