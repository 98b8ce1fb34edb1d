#include "runtime/settings.h"

#include <strings.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "base/json_writer.h"
#include "base/types.h"
#include "plan/registry.h"
#include "transport/arena.h"

namespace unjam {

// Long because it is the table of all variables.
const std::vector<Variable>& variables() {
  static const std::vector<Variable> kVariables = {
      {"UNJAM_DEVICE", &Settings::device, 0, 1, "host|cuda",
       "Where ranks' engines run and their buffers lie.", true},
      {"UNJAM_DEVICE_INDEX", &Settings::device_index, -1, 1023, nullptr,
       "CUDA: which device. -1: the calling thread's current one; where one call makes all ranks, "
       "rank r uses device r (of d devices r modulo d).",
       false},
      {"UNJAM_POLICY", &Settings::policy, 0, 2, "adaptive|fixed|hold",
       "How long an engine waits before it preempts: adaptive thresholds (the paper's), one fixed "
       "threshold, or for ever (hold: as NCCL in one stream; can deadlock; for comparison).",
       false},
      {"UNJAM_ORDER", &Settings::order, 0, 1, "fifo|priority",
       "Order of the task queue: first come first served, or by the calls' priorities.", false},
      {"UNJAM_LANES", &Settings::lanes, 1, std::int64_t{kMaxLanes}, nullptr,
       "Blocks a rank; on CUDA 32 unless said, and at most what fits where `unjamInitAll` has "
       "ranks share a device. With more than one, the first is kept for small collectives.",
       true},
      {"UNJAM_BLOCK_THREADS", &Settings::block_threads, 1, 1024, nullptr,
       "Threads a block: on the host at most 16; on CUDA a multiple of 64, 128 to 512, which is "
       "the default there (one warp controls, one publishes, the others move data).",
       false},
      {"UNJAM_MAX_ACTIVE_KEYS", &Settings::max_active_keys, 1, 8192, nullptr,
       "Keys of a rank with an invocation under way at a time; a further one is refused. On CUDA "
       "64 unless said.",
       true},
      {"UNJAM_IDLE_KEYS", &Settings::idle_keys, 0, 1 << 24, nullptr,
       "Keys without an invocation under way that a rank keeps in full; beyond, those unused for "
       "longest shrink to a record of how often they were called.",
       false},
      {"UNJAM_FIRST_CONNECTORS", &Settings::first_connectors, 0, 1 << 14, nullptr,
       "Connectors of a lane that have memory when two ranks meet, rounded up to a power of two; "
       "more get it when keys have use for them. 0: all, for which the host's pages come as they "
       "are touched. On CUDA 8 unless said, and under the hold policy always all.",
       true},
      {"UNJAM_GUARANTEED_SLOTS", &Settings::guaranteed_slots, 2, 16, nullptr,
       "Guaranteed slots of each connector; on CUDA 4 unless said.", true},
      {"UNJAM_GUARANTEED_SLOT_BYTES", &Settings::guaranteed_slot_bytes, 256, 1 << 20, nullptr,
       "Bytes of a guaranteed slot; a multiple of 64. On CUDA 74944 (two ranks: 149824) unless "
       "said, with 16 lanes and fewer about twice as many, with 8 and fewer four times. `unjam "
       "info --computed` says what that comes to for each neighbour.",
       true, true},
      {"UNJAM_POOL_SLOTS", &Settings::pool_slots, 0, 65536, nullptr,
       "Larger slots a (peer, lane) that all keys share; on CUDA 16 unless said.", true},
      {"UNJAM_POOL_SLOT_BYTES", &Settings::pool_slot_bytes, 0, 1 << 24, nullptr,
       "Bytes of a larger slot, a multiple of 64 and at least those of a guaranteed one; 0: as "
       "many as guaranteed_slots - 1 guaranteed ones. On CUDA 299776 (two ranks: 299648) unless "
       "said, and more where guaranteed ones are larger. Of what is no multiple of a guaranteed "
       "one the "
       "rest is not used.",
       true, true},
      {"UNJAM_SPIN_HEAD", &Settings::spin_head, 0, 1 << 30, nullptr,
       "Polls granted to the collective at the head of the task queue; later ones get less. 0: by "
       "whether the job's ranks outnumber the cores.",
       false},
      {"UNJAM_SPIN_BASE", &Settings::spin_base, 0, 1 << 30, nullptr,
       "Polls granted at least; under the fixed policy, always. 0: see UNJAM_SPIN_HEAD.", false},
      {"UNJAM_SPIN_BOOST", &Settings::spin_boost, 1, 1000, nullptr,
       "Factor by which a success raises the threshold.", false},
      {"UNJAM_SPIN_CAP", &Settings::spin_cap, 0, 1 << 30, nullptr,
       "Polls granted at most. 0: see UNJAM_SPIN_HEAD.", false},
      {"UNJAM_QUANTUM_SLICES", &Settings::quantum_slices, 1, 1 << 30, nullptr,
       "Slices that a collective may move in a row at most while others wait that take no more "
       "than "
       "so many (in priority order: any others). The first turn has 4, and each is twice as long "
       "as "
       "the one before while somebody waits.",
       false},
      {"UNJAM_RESIDENCY_US", &Settings::residency_us, 1, 1 << 30, nullptr,
       "Longest stay of an engine that nobody waits for, in microseconds.", false},
      {"UNJAM_ORDER_AFTER_US", &Settings::order_after_us, 0, 1 << 30, nullptr,
       "Adaptive policy, FIFO order: a lane that has seen ranks call in different orders, and "
       "while its engine stays hears nothing from peers for so many microseconds, puts its queue "
       "into an order that is the same at all ranks.",
       false},
      {"UNJAM_HELP", &Settings::help, 0, 1, nullptr,
       "Host device: whether threads that submit or wait run the engine themselves when no other "
       "thread does. 0: only the daemon's threads run it.",
       false},
      {"UNJAM_IN_STREAM", &Settings::in_stream, 0, 1, nullptr,
       "CUDA: whether collectives in a stream run without the engine where they can, and those "
       "beside streams in batches, not slice by slice.",
       false},
      {"UNJAM_LINES", &Settings::lines, -1, 1, nullptr,
       "CUDA: whether packets from 64 KiB on, of messages to all others in one hop from 32, are "
       "lines, with one flag for 56 bytes of data instead of one for 8: links carry half as much. "
       "-1: 1 where UNJAM_WHOLE_LINES is.",
       true},
      {"UNJAM_WHOLE_LINES", &Settings::whole_lines, -1, 1, nullptr,
       "CUDA: whether a line of 64 bytes that a warp stores to a peer comes there whole. If not, "
       "lines are sent by the engine alone, which stores their flags behind a fence. -1: 1 where "
       "NVML knows of NVLinks between all GPUs of the machine, and they are H100s or H200s.",
       false},
      {"UNJAM_IN_STREAM_PATIENCE_US", &Settings::in_stream_patience_us, 0, 1000000, nullptr,
       "CUDA: how long such a collective of more than packets waits for a peer before the engine "
       "takes it over, in microseconds; as long again for each 100 MiB of its vector, or of what "
       "comes from the others, up to 25 times. (Beside streams at most 50 microseconds.)",
       false},
      {"UNJAM_IN_STREAM_OVERLAP", &Settings::in_stream_overlap, 0, 1, nullptr,
       "CUDA: whether such a collective may begin, lane by lane, while the one directly in front "
       "of it in its stream ends, where neither writes what the other reads or writes, or both "
       "are the same call.",
       false},
      {"UNJAM_DMA", &Settings::dma, 0, 2, "off|on|stuck",
       "CUDA: whether copy engines move what plans mark for them: slices that are only sent, of "
       "large collectives through slots. What they have not moved in time blocks do. stuck: for "
       "tests, nobody serves what is asked of them.",
       true},
      {"UNJAM_DMA_FROM", &Settings::dma_from, 0, std::int64_t{1} << 40, nullptr,
       "CUDA: from how many bytes of a vector (count times element size) on plans are marked so.",
       true, true},
      {"UNJAM_DMA_LANES", &Settings::dma_lanes, 2, std::int64_t{kMaxLanes}, nullptr,
       "CUDA: blocks of a plan that is marked so, at most.", true},
      {"UNJAM_DMA_FLIGHT", &Settings::dma_flight, 1 << 16, std::int64_t{1} << 40, nullptr,
       "CUDA: bytes that copy engines are given for a peer at once, at most; twice that are under "
       "way, behind which a copy of somebody else's may wait.",
       false, true},
      {"UNJAM_TRACE_EVENTS", &Settings::trace_events, 0, 1 << 24, nullptr,
       "Trace events kept a lane; 0: no trace.", false},
      {"UNJAM_STALL_MS", &Settings::stall_ms, 1, 1 << 30, nullptr,
       "A pending invocation older than this is compared with its peers' calls, in milliseconds.",
       false},
      {"UNJAM_ALGORITHM", &Settings::algorithm, -1, kNumAlgorithms - 1, algorithm_choices(),
       "How plans move the data. auto: by the selector's table. A kind that the algorithm does not "
       "serve uses ring, chain or pairwise; a group whose hosts (UNJAM_HOST_ID) do not suit it, "
       "auto.",
       true},
      {"UNJAM_OVERLAP", &Settings::overlap, 0, 2, nullptr,
       "Whether rsag plans work on several chunks at a time, where the guaranteed slots suffice (4 "
       "for an all-reduce): hides the links' latency. 2: and send one while they receive another, "
       "as one slice (not broadcast and reduce). On CUDA 1 unless said.",
       true},
      {"UNJAM_DELAY_SEED", &Settings::delay_seed, 0, INT64_MAX, nullptr,
       "Fault injection on the host device: seed of random delays at every wait of the engine; 0: "
       "none.",
       false},
      {"UNJAM_DELAY_MAX_US", &Settings::delay_max_us, 0, 1000000, nullptr,
       "Fault injection: the longest such delay, in microseconds.", false},
      {"UNJAM_INIT_TIMEOUT_MS", &Settings::init_timeout_ms, 1, 1 << 30, nullptr,
       "How long unjamInit waits for the other ranks, in milliseconds.", false},
      {"UNJAM_REPORT_MS", &Settings::report_ms, 0, 1 << 30, nullptr,
       "Invocations pending for longer are reported (UNJAM_LOG), with the ranks that have not "
       "called "
       "them, and again after as long; in milliseconds, 0: never.",
       false},
      {"UNJAM_TIMEOUT_MS", &Settings::timeout_ms, 0, 1 << 30, nullptr,
       "Invocations pending for longer end with UNJAM_ERROR_TIMEOUT, which names the ranks that "
       "have "
       "not called them; in milliseconds, 0: never.",
       false},
      {"UNJAM_EXPLAIN_SIGNAL", &Settings::explain_signal, 0, 64, nullptr,
       "Number of a signal that makes the process print on stderr what every rank waits for, "
       "unless "
       "the program handles it itself; 0: none. 12 is SIGUSR2.",
       false},
      {"UNJAM_HEAP", &Settings::heap_bytes, 0, std::int64_t{1} << 40, nullptr,
       "Bytes of each rank's memory that unjamMemAlloc has, for buffers that peers may store into "
       "themselves; 0: none.",
       true, true},
      {"UNJAM_NET", &Settings::net, 0, 2, "auto|ucx|plugin",
       "What carries slices between hosts: UCX, or a network plugin for NCCL. auto: the plugin "
       "that "
       "UNJAM_NET_PLUGIN names, else UCX.",
       false},
      {"UNJAM_NET_WINDOW", &Settings::net_window, 1 << 12, std::int64_t{1} << 30, nullptr,
       "Bytes for one process that the carrier is given at once, at most: behind so many a short "
       "slice may have to wait.",
       false, true},
      {"UNJAM_PEER_TIMEOUT_MS", &Settings::peer_timeout_ms, 100, 1 << 30, nullptr,
       "A process of another host of which nothing was heard for so long counts as lost, in "
       "milliseconds.",
       true},
      {"UNJAM_LOG", &Settings::log, 0, 2, "warn|info|debug",
       "What the process says on stderr, or in UNJAM_LOG_FILE. warn: calls that are pending for "
       "long, and mistyped variables. info: also one line about the job, ranks that come and go, "
       "and calls that fail. debug: also groups, and every call with its duration.",
       false},
  };
  return kVariables;
}

const std::vector<TextVariable>& text_variables() {
  static const std::vector<TextVariable> kVariables = {
      {"UNJAM_RANK", "0 to 63",
       "This process's rank, for unjamInitFromEnvironment. Unset: what torchrun (RANK), mpirun "
       "(OMPI_COMM_WORLD_RANK, PMI_RANK) or srun (SLURM_PROCID) say.",
       false},
      {"UNJAM_RANKS", "1 to 65535",
       "Ranks of the job (on CUDA 64 at most); set together with UNJAM_RANK.", false},
      {"UNJAM_ID", "hexadecimal digits",
       "Name of the job, the same on all ranks and secret: what `unjam id` prints. Unset: made of "
       "what the launcher calls the job, or of MASTER_ADDR and MASTER_PORT.",
       true},
      {"UNJAM_HOST_ID", "1 to 64 letters, digits, and any of -_.:",
       "As which host this process counts, for plans that do in a host otherwise than between "
       "hosts; equal where ranks are on one. Set on all ranks or on none. Unset: all are on one. "
       "With UNJAM_ROOT, processes of different ids use the network.",
       false},
      {"UNJAM_ROOT", "address:port",
       "Where the hosts of a job meet: an address of rank 0's host that all can reach, and a port "
       "that is free there. The same on all ranks. Unset: all ranks are on one host.",
       false},
      {"UNJAM_NET_PLUGIN", "name or path",
       "The network plugin for NCCL that carries slices between hosts: a file, or NAME for "
       "libnccl-net-NAME.so. Unset with UNJAM_NET=plugin: NCCL_NET_PLUGIN, else libnccl-net.so.",
       false},
      {"UNJAM_NET_UCX", "path",
       "UCX's libucp.so.0, unless the process has one already. Unset: in Python that of the "
       "package "
       "libucx, if it is there, else the system's. UCX's own "
       "settings are UNJAM_UCX_ and the name that UCX has for them behind UCX_.",
       false},
      {"UNJAM_LOG_FILE", "path",
       "File to which UNJAM_LOG's lines are appended, instead of stderr. In its name %r stands for "
       "the rank, %p for the process's number, %h for the host's name, %% for %.",
       false},
  };
  return kVariables;
}

const std::vector<const char*>& names_of_others() {
  static const std::vector<const char*> kNames = {
      // The Python package (python/unjam/_lib.py, _torch_settings.py, bench/figures.py).
      "UNJAM_LIBRARY", "UNJAM_COMMIT", "UNJAM_TORCH_DEFAULT", "UNJAM_TORCH_REPLACE",
      "UNJAM_TORCH_CUDA", "UNJAM_TORCH_BUILD", "UNJAM_PYTHON_INCLUDE", "UNJAM_TORCH_STACKS",
      // The build and the tests (CONTRIBUTING.md).
      "UNJAM_CUDA", "UNJAM_JOBS", "UNJAM_TEST_SEED", "UNJAM_TEST_UCX", "UNJAM_TEST_NET_PLUGIN",
      "UNJAM_FUZZ_SEEDS", "UNJAM_UPDATE_DOCS"};
  return kNames;
}

const std::vector<FormerName>& former_names() {
  static const std::vector<FormerName> kNames = {
      {"UNJAM_ESCAPE_SLOTS", "UNJAM_GUARANTEED_SLOTS"},
      {"UNJAM_ESCAPE_SLOT_BYTES", "UNJAM_GUARANTEED_SLOT_BYTES"},
      {"UNJAM_BORROW_SLOTS", "UNJAM_POOL_SLOTS"},
      {"UNJAM_BORROW_SLOT_BYTES", "UNJAM_POOL_SLOT_BYTES"},
      {"UNJAM_SOLO", "UNJAM_IN_STREAM"},
      {"UNJAM_SOLO_PATIENCE_US", "UNJAM_IN_STREAM_PATIENCE_US"},
      {"UNJAM_SOLO_OVERLAP", "UNJAM_IN_STREAM_OVERLAP"}};
  return kNames;
}

const char* environment_text(const char* name, const char** under) {
  const char* text = std::getenv(name);
  const char* found = name;
  for (const FormerName& f : former_names()) {
    if (std::string_view(f.name) != name || (text != nullptr && *text != '\0')) continue;
    const char* const former = std::getenv(f.former);
    if (former == nullptr || *former == '\0') continue;
    text = former;
    found = f.former;
  }
  if (under != nullptr) *under = found;
  return text;
}

namespace {

bool is_switch(const Variable& v) { return v.choices == nullptr && v.min >= -1 && v.max == 1; }

std::string range_text(const Variable& v) {
  if (is_switch(v)) {
    return std::string(v.min < 0 ? "-1, " : "") + "0 or 1 (or on, off, yes, no, true, false)";
  }
  if (v.choices != nullptr) return std::string("one of ") + v.choices;
  return "a number from " + std::to_string(v.min) + " to " + std::to_string(v.max) +
         (v.is_size ? ", of bytes or with K, M, G or T behind it (1K is 1024)" : "");
}

// The torch backend's switches take the same (python/unjam/_torch_settings.py).
constexpr std::pair<const char*, std::int64_t> kSwitchWords[] = {
    {"on", 1}, {"yes", 1}, {"true", 1}, {"off", 0}, {"no", 0}, {"false", 0}};

bool parse(const Variable& v, const char* text, std::int64_t& value) {
  // (Behind the names, a choice's number is taken as well.)
  const std::string_view choice = v.field == &Settings::algorithm ? name_today(text) : text;
  for (std::int64_t i = v.min; v.choices != nullptr && i <= v.max; ++i) {
    if (value_text(v, i) != choice) continue;
    value = i;
    return true;
  }
  if (is_switch(v)) {
    for (const auto& [word, meant] : kSwitchWords) {
      if (strcasecmp(word, text) != 0) continue;
      value = meant;
      return true;
    }
  }
  char* end = nullptr;
  errno = 0;
  value = std::strtoll(text, &end, 10);
  if (errno != 0 || end == text) return false;
  const std::string_view suffix = end;
  if (v.is_size && suffix.size() == 1) {
    const auto unit = std::string_view("KMGT").find(suffix[0]);
    if (unit == std::string_view::npos || value < 0) return false;
    const int bits = 10 * (static_cast<int>(unit) + 1);
    if (value > v.max >> bits) return false;
    value <<= bits;
  } else if (!suffix.empty()) {
    return false;
  }
  return value >= v.min && value <= v.max;
}

const Variable& variable(std::int64_t Settings::* field) {
  for (const Variable& v : variables()) {
    if (v.field == field) return v;
  }
  std::abort();
}

constexpr std::int64_t kCudaLanes = 32;  // unless said
constexpr std::int64_t kByLanes = -1;    // until it is known how many lanes there are

// Bytes of a guaranteed slot on CUDA. What is done about a slice takes longer than 64 KiB of it,
// which is no matter while the links bind; few lanes do not fill these, so each has larger ones: of
// 16 and 8 lanes as many bytes in all as of 32.
std::int64_t cuda_slot_bytes(int ranks, std::int64_t lanes) {
  constexpr std::int64_t kWidest = 4;
  const auto share = static_cast<std::uint64_t>(
      std::clamp<std::int64_t>(kCudaLanes / std::max<std::int64_t>(lanes, 1), 1, kWidest));
  const auto width = static_cast<std::int64_t>(std::bit_floor(share));
  // A slice goes to all peers at once; where there is one, it is to carry more. So many bytes as
  // lines: a lane's part of 4 MiB, or 2.
  return line_places<std::int64_t>(width * (ranks <= 2 ? 131072 : 65536)) * kWordBytes;
}

// All settings as they are for a device where nobody says otherwise.
Settings device_defaults(unjamDevice_t device) {
  Settings s;
  if (device == UNJAM_DEVICE_HOST) return s;
  s.device = device;
  s.lanes = kCudaLanes;
  s.block_threads = 512;
  s.max_active_keys = 64;
  s.idle_keys = 4096;
  s.first_connectors = 8;
  // Four, so that rsag plans overlap.
  s.guaranteed_slots = 4;
  s.overlap = 1;
  s.guaranteed_slot_bytes = s.pool_slot_bytes = kByLanes;
  s.pool_slots = 16;
  // A poll takes most of a microsecond. An attempt at something that no peer has called must be
  // over in 50 us together with the quit after it, for so much later may a synchronisation of the
  // device return; and to look for something that a peer has begun is better than to wait for one.
  s.spin_head = 4;
  s.spin_base = 1;
  s.spin_cap = 512;
  return s;
}

}  // namespace

std::uint32_t packet_slot_bytes(const Settings& s, int ranks) {
  const bool by_lanes =
      s.device != UNJAM_DEVICE_HOST && s.guaranteed_slot_bytes == cuda_slot_bytes(ranks, s.lanes);
  return static_cast<std::uint32_t>(by_lanes ? cuda_slot_bytes(ranks, kCudaLanes)
                                             : s.guaranteed_slot_bytes);
}

std::int64_t lanes_of_sharers(int sms, int ranks, std::int64_t lanes) {
  if (ranks < 2 || sms <= 0) return lanes;
  // At once a rank may have a block a lane, which has an SM to itself, of a daemon, as many of a
  // call, and one of each other stream that waits.
  constexpr int kStreams = 8;
  const std::int64_t most = (sms / ranks - kStreams) / 2;
  return std::clamp<std::int64_t>(most, 1, lanes);
}

namespace {

bool take_environment(const Variable& v, Settings& s, std::string& error) {
  const char* name = nullptr;
  const char* text = environment_text(v.name, &name);
  if (text == nullptr || *text == '\0' || parse(v, text, s.*v.field)) return true;
  error = std::string(name) + "=" + text + " is not valid: give " + range_text(v);
  return false;
}

// What the caller's configuration says beyond the device.
bool take_config(const unjamConfig_t& config, Settings& s, std::string& error) {
  if (config.size < offsetof(unjamConfig_t, lanes) || config.size > sizeof(unjamConfig_t)) {
    error = "unjamConfig_t has size " + std::to_string(config.size) + ", this library knows " +
            std::to_string(sizeof(unjamConfig_t)) +
            ": initialise it with UNJAM_CONFIG_INITIALIZER, and use a header not newer than the "
            "library";
    return false;
  }
  unjamConfig_t c = UNJAM_CONFIG_INITIALIZER;
  std::memcpy(&c, &config, config.size);
  bool ok = true;
  const auto take = [&](std::int64_t Settings::* field, std::int64_t value, std::int64_t unset) {
    if (!ok || value == unset) return;
    const Variable& v = variable(field);
    if (value < v.min || value > v.max) {
      error = std::string("the configuration's value ") + std::to_string(value) + " (as " + v.name +
              ") is not valid: give " + range_text(v);
      ok = false;
    }
    s.*field = value;
  };
  take(&Settings::device, c.device, -1);
  take(&Settings::device_index, c.device_index, -1);
  take(&Settings::policy, c.policy, -1);
  take(&Settings::order, c.order, -1);
  take(&Settings::lanes, c.lanes, 0);
  take(&Settings::block_threads, c.block_threads, 0);
  take(&Settings::max_active_keys, c.max_active_keys, 0);
  take(&Settings::guaranteed_slots, c.guaranteed_slots, 0);
  take(&Settings::guaranteed_slot_bytes, c.guaranteed_slot_bytes, 0);
  // Unsigned -1 means "none", since 0 means "default".
  take(&Settings::pool_slots, c.pool_slots == UINT32_MAX ? 0 : c.pool_slots,
       c.pool_slots == UINT32_MAX ? -1 : 0);
  take(&Settings::spin_head, c.spin_head, 0);
  take(&Settings::spin_base, c.spin_base, 0);
  take(&Settings::spin_boost, c.spin_boost, 0);
  take(&Settings::spin_cap, c.spin_cap, 0);
  take(&Settings::quantum_slices, c.quantum_slices, 0);
  take(&Settings::residency_us, c.residency_us, 0);
  take(&Settings::trace_events, c.trace_events, 0);
  take(&Settings::stall_ms, c.stall_ms, 0);
  take(&Settings::algorithm, c.algorithm, -1);
  take(&Settings::delay_seed, static_cast<std::int64_t>(c.delay_seed & INT64_MAX), 0);
  take(&Settings::delay_max_us, c.delay_max_us, 0);
  take(&Settings::report_ms, c.report_ms == UINT32_MAX ? 0 : c.report_ms,
       c.report_ms == UINT32_MAX ? -1 : 0);
  take(&Settings::timeout_ms, c.timeout_ms == UINT32_MAX ? 0 : c.timeout_ms,
       c.timeout_ms == UINT32_MAX ? -1 : 0);
  take(&Settings::heap_bytes,
       c.heap_bytes == UINT64_MAX ? 0
                                  : static_cast<std::int64_t>(std::min<std::uint64_t>(
                                        c.heap_bytes, std::numeric_limits<std::int64_t>::max())),
       c.heap_bytes == UINT64_MAX ? -1 : 0);
  return ok;
}

// Bytes of slots that nobody has said.
void fill_slot_bytes(int ranks, Settings& s) {
  const std::int64_t slot = cuda_slot_bytes(ranks, s.lanes);
  if (s.guaranteed_slot_bytes == kByLanes) {
    // Who says how large the larger ones are need not know of this.
    const auto fits = [&](std::int64_t bytes) {
      return s.pool_slots == 0 || s.pool_slot_bytes <= 0 || s.pool_slot_bytes >= bytes;
    };
    // At least, the same without lines' flags.
    const std::int64_t usual = cuda_slot_bytes(ranks, kCudaLanes);
    s.guaranteed_slot_bytes = fits(slot)    ? slot
                              : fits(usual) ? usual
                                            : std::bit_floor(static_cast<std::uint64_t>(usual));
  }
  if (s.pool_slot_bytes == kByLanes && s.dma != 0 && s.device == UNJAM_DEVICE_CUDA) {
    // Twice as many that lie one behind the other without gaps: slices that follow each other there
    // copy engines move at once (engine/copy_server.h, plan/carried.h).
    s.pool_slot_bytes = s.guaranteed_slot_bytes;
    if (s.pool_slots == device_defaults(UNJAM_DEVICE_CUDA).pool_slots) s.pool_slots *= 2;
  } else if (s.pool_slot_bytes == kByLanes) {
    s.pool_slot_bytes = std::max((ranks <= 2 ? 2 : 4) * slot, s.guaranteed_slot_bytes);
  }
}

bool check_slot_bytes(Settings& s, std::string& error) {
  if (s.guaranteed_slot_bytes % kSlotGranularity != 0) {
    error = "guaranteed_slot_bytes (UNJAM_GUARANTEED_SLOT_BYTES) is " +
            std::to_string(s.guaranteed_slot_bytes) + ": it must be a multiple of " +
            std::to_string(kSlotGranularity);
    return false;
  }
  if (s.pool_slot_bytes % kSlotGranularity != 0) {
    error = "UNJAM_POOL_SLOT_BYTES is " + std::to_string(s.pool_slot_bytes) +
            ": it must be a multiple of " + std::to_string(kSlotGranularity);
    return false;
  }
  // A chunk must fit into the slots of its connector but one, however its slices are granted.
  if (s.pool_slots != 0 && s.pool_slot_bytes != 0 && s.pool_slot_bytes < s.guaranteed_slot_bytes) {
    error = "UNJAM_POOL_SLOT_BYTES is " + std::to_string(s.pool_slot_bytes) +
            ", less than a guaranteed slot has (UNJAM_GUARANTEED_SLOT_BYTES, " +
            std::to_string(s.guaranteed_slot_bytes) + "): give at least as many, or 0";
    return false;
  }
  // Plans around a ring do not deadlock if slices are cut at multiples of a guaranteed slot
  // (plan/algorithms/ring.h), so larger ones hold whole multiples.
  s.pool_slot_bytes -= s.pool_slot_bytes % s.guaranteed_slot_bytes;
  const bool host = s.device == UNJAM_DEVICE_HOST;
  if (host ? s.block_threads > 16
           : s.block_threads < 128 || s.block_threads > 512 || s.block_threads % 64 != 0) {
    error = "block_threads (UNJAM_BLOCK_THREADS) is " + std::to_string(s.block_threads) +
            (host ? ": the host device takes at most 16"
                  : ": the CUDA device takes a multiple of 64, 128 to 512");
    return false;
  }
  return true;
}

}  // namespace

bool resolve_settings(const unjamConfig_t* config, int ranks, Settings& s, std::string& error) {
  // The device first: it decides the defaults.
  s = Settings{};
  if (!take_environment(variable(&Settings::device), s, error)) return false;
  if (config != nullptr && config->size >= offsetof(unjamConfig_t, device) + sizeof(int32_t) &&
      (config->device == UNJAM_DEVICE_HOST || config->device == UNJAM_DEVICE_CUDA)) {
    s.device = config->device;
  }
  s = device_defaults(static_cast<unjamDevice_t>(s.device));
  const std::int64_t device = s.device;
  for (const Variable& v : variables()) {
    if (!take_environment(v, s, error)) return false;
  }
  s.device = device;
  if (config != nullptr && !take_config(*config, s, error)) return false;
  // An engine that holds its lane clears no rooms meanwhile.
  if (s.device == UNJAM_DEVICE_CUDA && s.policy == UNJAM_POLICY_HOLD) s.first_connectors = 0;
  fill_slot_bytes(ranks, s);
  return check_slot_bytes(s, error);
}

void resolve_spins(Settings& s, std::int64_t threads) {
  // Every eighth poll yields the core. Where ranks share cores, a rank that spins takes the time in
  // which its peer would have made the data, and in random orders most: short thresholds are best.
  const bool crowded = threads > static_cast<std::int64_t>(std::thread::hardware_concurrency());
  if (s.spin_head == 0) s.spin_head = crowded ? 4 : 256;
  if (s.spin_base == 0) s.spin_base = crowded ? 1 : 4;
  if (s.spin_cap == 0) s.spin_cap = crowded ? 32 : 2048;
}

std::string value_text(const Variable& v, std::int64_t value) {
  if (v.choices == nullptr || value < v.min || value > v.max) return std::to_string(value);
  std::string_view rest = v.choices;
  for (std::int64_t i = v.min; i < value; ++i) rest.remove_prefix(rest.find('|') + 1);
  return std::string(rest.substr(0, rest.find('|')));
}

std::string agreed_settings_text(const Settings& s) {
  std::string text;
  for (const Variable& v : variables()) {
    if (!v.agreed) continue;
    if (!text.empty()) text += ", ";
    text += std::string(v.name) + "=" + value_text(v, s.*v.field);
  }
  return text;
}

}  // namespace unjam
