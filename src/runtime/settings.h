// Every setting, resolved: the caller's configuration, else the environment, else the default. The
// one place where UNJAM_ variables are declared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "unjam/unjam.h"

namespace unjam {

// The defaults are the host's; resolve_settings() knows the CUDA device's.
struct Settings {
  std::int64_t device = UNJAM_DEVICE_HOST;
  std::int64_t device_index = -1;  // see unjamConfig_t
  std::int64_t policy = UNJAM_POLICY_ADAPTIVE;
  std::int64_t order = UNJAM_ORDER_FIFO;
  std::int64_t lanes = 1;
  std::int64_t block_threads = 1;
  std::int64_t max_active_keys = 512;
  std::int64_t idle_keys = 1024;
  std::int64_t first_connectors = 0;  // 0: all
  std::int64_t guaranteed_slots = 5;
  std::int64_t guaranteed_slot_bytes = 8192;
  std::int64_t pool_slots = 64;
  std::int64_t pool_slot_bytes = 0;  // 0: guaranteed_slots - 1 guaranteed ones
  std::int64_t spin_head = 0;        // 0: see resolve_spins
  std::int64_t spin_base = 0;
  std::int64_t spin_boost = 20;
  std::int64_t spin_cap = 0;
  std::int64_t quantum_slices = 64;
  std::int64_t residency_us = 5000;
  std::int64_t order_after_us = 50;
  std::int64_t trace_events = 0;
  std::int64_t help = 1;
  std::int64_t in_stream = 1;
  std::int64_t lines = -1;
  std::int64_t whole_lines = -1;
  std::int64_t in_stream_patience_us = 200;
  std::int64_t in_stream_overlap = 1;
  std::int64_t dma = 0;  // off, on, stuck
  std::int64_t dma_from = 64 << 20;
  std::int64_t dma_lanes = 32;
  std::int64_t dma_flight = 16 << 20;
  std::int64_t stall_ms = 1000;
  std::int64_t algorithm = -1;
  std::int64_t overlap = 0;
  std::int64_t delay_seed = 0;
  std::int64_t delay_max_us = 50;
  std::int64_t init_timeout_ms = 30000;
  std::int64_t report_ms = 30000;
  std::int64_t timeout_ms = 0;
  std::int64_t explain_signal = 12;  // SIGUSR2
  std::int64_t heap_bytes = 0;
  std::int64_t log = 0;  // as LogLevel
  std::int64_t net = 0;  // auto, ucx, plugin
  std::int64_t net_window = 512 << 10;
  std::int64_t peer_timeout_ms = 10'000;
};

// One variable: what `unjam env` lists.
struct Variable {
  const char* name;
  std::int64_t Settings::* field;
  std::int64_t min;
  std::int64_t max;
  const char* choices;  // "a|b|c" for names of min, min + 1, min + 2; nullptr: a number
  const char* doc;
  bool agreed;           // must be equal on all ranks
  bool is_size = false;  // in bytes: the variable takes K, M, G and T
};
const std::vector<Variable>& variables();

// One that is no setting: what a launcher or a user says about this process's place in a job, see
// job_id.h.
struct TextVariable {
  const char* name;
  const char* type;
  const char* doc;
  bool secret;  // its value is not shown
};
const std::vector<TextVariable>& text_variables();

// UNJAM_ variables that others read: the Python package, which has their docs, the build, the
// tests.
const std::vector<const char*>& names_of_others();

// A variable that had another name. What is set under that name counts, with a warning, unless the
// new one is set, too.
struct FormerName {
  const char* former;
  const char* name;
};
const std::vector<FormerName>& former_names();

// What the environment says for a variable, under either name (`under`, where asked for); nullptr:
// nothing. An empty value says nothing where there is a former name.
const char* environment_text(const char* name, const char** under = nullptr);

// A value as the variable takes it: a choice by its name, else the number.
std::string value_text(const Variable& variable, std::int64_t value);

// Resolves `config` (may be null) against the environment and the defaults, for a job of `ranks`.
// False: `error` names the field or variable, its value and what is accepted.
bool resolve_settings(const unjamConfig_t* config, int ranks, Settings& settings,
                      std::string& error);

// Fills in spin thresholds that were left at 0, for `threads` engine threads on this machine's
// cores.
void resolve_spins(Settings& settings, std::int64_t threads);

// What plans of one loop of packets have of a guaranteed slot: few lanes of a CUDA device have
// larger ones, unless somebody says how large, for their slices alone: packets that filled them
// would be slower than a plan of slices. By values that ranks agree on, so all choose alike.
std::uint32_t packet_slot_bytes(const Settings& settings, int ranks);

// How many lanes of `lanes` each of several ranks of one process may have on one CUDA device with
// so many SMs. What waits in streams holds SMs; if some ranks' blocks held them all, a rank that
// these wait for could not begin.
std::int64_t lanes_of_sharers(int sms, int ranks, std::int64_t lanes);

// "lanes=2, guaranteed_slots=5, …": the values that ranks must agree on.
std::string agreed_settings_text(const Settings& settings);

}  // namespace unjam
