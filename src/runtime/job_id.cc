#include "runtime/job_id.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/random_bytes.h"
#include "base/siphash.h"
#include "transport/arena.h"

namespace unjam {
namespace {

struct IdContents {
  char magic[8];
  JobSecret secret;
};
static_assert(sizeof(IdContents) <= UNJAM_UNIQUE_ID_BYTES);
constexpr char kMagic[8] = "unjam-1";

unjamUniqueId_t id_of(const JobSecret& secret) {
  IdContents c{};
  std::memcpy(c.magic, kMagic, sizeof(kMagic));
  c.secret = secret;
  unjamUniqueId_t id{};
  std::memcpy(id.internal, &c, sizeof(c));
  return id;
}

// An environment variable; empty counts as unset.
const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

bool number(const char* name, int& value, std::string& error) {
  const char* text = variable(name);
  char* end = nullptr;
  errno = 0;
  const long v = std::strtol(text, &end, 10);
  if (errno != 0 || *end != '\0' || v < 0 || v > 1'000'000'000) {
    error = std::string(name) + "=" + text + " is not valid: give a number";
    return false;
  }
  value = static_cast<int>(v);
  return true;
}

// Where launchers put a process's rank, the job's ranks, and those of this machine, or how many
// machines there are (of two names the first that is set).
struct Launcher {
  const char* rank;
  const char* ranks;
  const char* local_ranks;
  const char* machines[2];
};
constexpr Launcher kLaunchers[] = {
    {"UNJAM_RANK", "UNJAM_RANKS", nullptr, {}},
    {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", {}},  // torchrun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", {}},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", {}},  // MPICH, Intel MPI
    {"SLURM_PROCID", "SLURM_NTASKS", nullptr, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}},
};

// What is equal on all ranks of a launch and different in any other that runs beside it.
constexpr const char* kLaunchNames[] = {
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "PMIX_NAMESPACE",      "OMPI_MCA_ess_base_jobid",    "PMI_JOBID",   "SLURM_JOB_ID",
    "SLURM_STEP_ID",
};

bool from_hex(std::string_view text, unjamUniqueId_t& id) {
  if (text.size() % 2 != 0 || text.size() / 2 > sizeof(id.internal)) return false;
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const int high = digit(text[i]), low = digit(text[i + 1]);
    if (high < 0 || low < 0) return false;
    id.internal[i / 2] = static_cast<char>(high * 16 + low);
  }
  return true;
}

bool id_from_launch(const LaunchedRank& launched, unjamUniqueId_t& id, std::string& error) {
  std::string names;
  for (const char* name : kLaunchNames) {
    if (const char* value = variable(name)) {
      names += std::string(name) + "=" + value + ";";
    }
  }
  if (names.empty() && launched.ranks > 1) {
    error =
        "nothing in the environment names this job: set UNJAM_ID to the same id on all ranks "
        "(UNJAM_ID=$(unjam id)), or MASTER_ADDR and MASTER_PORT as for PyTorch";
    return false;
  }
  if (names.empty()) {
    id = make_unique_id();
    return true;
  }
  // Others on the machine may know these names: only that the rendezvous takes nobody but processes
  // of the same user keeps them out.
  names += "user=" + std::to_string(geteuid());
  JobSecret secret;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const std::uint64_t word = siphash({i, 0x6c61756e6368ull}, names);
    std::memcpy(secret.data() + i * 8, &word, 8);
  }
  id = id_of(secret);
  return true;
}

}  // namespace

unjamUniqueId_t make_unique_id() {
  JobSecret secret;
  fill_random(secret.data(), secret.size());
  return id_of(secret);
}

bool secret_of(const unjamUniqueId_t& id, JobSecret& secret, std::string& error) {
  IdContents c;
  std::memcpy(&c, id.internal, sizeof(c));
  if (std::memcmp(c.magic, kMagic, sizeof(kMagic)) != 0) {
    error = "this is no unique id: make one with unjamGetUniqueId and hand it to every rank";
    return false;
  }
  secret = c.secret;
  return true;
}

bool rank_from_environment(LaunchedRank& launched, std::string& error) {
  const Launcher* by = nullptr;
  for (const Launcher& l : kLaunchers) {
    if (variable(l.rank) == nullptr) continue;
    if (variable(l.ranks) == nullptr) {
      error = std::string(l.rank) + " is set, " + l.ranks + " is not: set both";
      return false;
    }
    by = &l;
    break;
  }
  if (by == nullptr) {
    error =
        "the environment names no rank: start with torchrun, mpirun or srun, or set UNJAM_RANK, "
        "UNJAM_RANKS and UNJAM_ID";
    return false;
  }
  if (!number(by->rank, launched.rank, error) || !number(by->ranks, launched.ranks, error)) {
    return false;
  }
  if (launched.ranks < 1 || launched.ranks > static_cast<int>(kMaxRanks) ||
      launched.rank >= launched.ranks) {
    error = std::string(by->rank) + "=" + std::to_string(launched.rank) + " and " + by->ranks +
            "=" + std::to_string(launched.ranks) + ": give 1 to " + std::to_string(kMaxRanks) +
            " ranks, and a rank below their number";
    return false;
  }
  const char* const elsewhere =
      ": for ranks on several hosts set UNJAM_ROOT to an address and a free port of rank 0's host";
  const bool several_hosts = variable("UNJAM_ROOT") != nullptr;
  if (!several_hosts && by->local_ranks != nullptr && variable(by->local_ranks) != nullptr) {
    int local = 0;
    if (!number(by->local_ranks, local, error)) return false;
    if (local != launched.ranks) {
      error = std::string(by->local_ranks) + " is " + std::to_string(local) + ", " + by->ranks +
              " is " + std::to_string(launched.ranks) + elsewhere;
      return false;
    }
  }
  for (const char* name : by->machines) {
    if (several_hosts || name == nullptr || variable(name) == nullptr) continue;
    int machines = 0;
    if (!number(name, machines, error)) return false;
    if (machines > 1) {
      error = std::string(name) + " is " + std::to_string(machines) + elsewhere;
      return false;
    }
    break;
  }
  if (const char* text = variable("UNJAM_ID")) {
    JobSecret secret;
    if (!from_hex(text, launched.id) || !secret_of(launched.id, secret, error)) {
      error = "UNJAM_ID is no unique id in hexadecimal digits: make one with `unjam id`";
      return false;
    }
    return true;
  }
  if (several_hosts && launched.ranks > 1) {
    error =
        "UNJAM_ROOT is set, UNJAM_ID is not: between hosts a job's name is its secret, so set "
        "UNJAM_ID to the same id on all ranks (UNJAM_ID=$(unjam id))";
    return false;
  }
  return id_from_launch(launched, launched.id, error);
}

}  // namespace unjam
