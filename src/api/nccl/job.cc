#include "api/nccl/job.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "api/nccl/machine.h"

namespace unjam::nccl {
namespace {

// Jobs that a member names to the others: those that it has joined last.
constexpr std::size_t kMostOffers = 8;

struct Offer {
  unjamUniqueId_t job;
  std::int32_t rank;
  std::int32_t size;
};

constexpr int kActiveKeys = 512;

// What members tell each other when they meet.
struct Card {
  unjamUniqueId_t fresh;  // the first member's is the new job's, if there is to be one
  std::int32_t lanes;     // that its device has for one more job; 0: as many as there are
  std::int32_t full;      // nothing is left there
  std::int32_t offers;
  Offer offer[kMostOffers];
};

bool same(const unjamUniqueId_t& a, const unjamUniqueId_t& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

const Offer* find(const Card& card, const unjamUniqueId_t& job) {
  const Offer* const end = card.offer + card.offers;
  const Offer* const found =
      std::find_if(card.offer, end, [&](const Offer& o) { return same(o.job, job); });
  return found == end ? nullptr : found;
}

// The jobs of this process that communicators use.
struct Jobs {
  std::mutex mutex;
  std::vector<std::weak_ptr<Job>> all;
};
Jobs& jobs() {
  static Jobs* const all = new Jobs;  // outlives what runs at the end of the process
  return *all;
}

std::vector<std::shared_ptr<Job>> jobs_on(int device) {
  std::vector<std::shared_ptr<Job>> found;
  const std::lock_guard lock(jobs().mutex);
  std::erase_if(jobs().all, [](const auto& job) { return job.expired(); });
  for (const auto& weak : jobs().all) {
    std::shared_ptr<Job> job = weak.lock();
    if (job != nullptr && job->device() == device) found.push_back(std::move(job));
  }
  return found;
}

// Of jobs of which this device is one rank: where several are, nobody could tell which is meant.
std::vector<std::shared_ptr<Job>> offered(const std::vector<std::shared_ptr<Job>>& here) {
  std::vector<std::shared_ptr<Job>> result;
  for (auto job = here.rbegin(); job != here.rend() && result.size() < kMostOffers; ++job) {
    const auto count = std::count_if(here.begin(), here.end(), [&](const auto& other) {
      return same(other->id(), (*job)->id());
    });
    if (count == 1) result.push_back(*job);
  }
  return result;
}

// The largest job of which all members are ranks, each another one; null: there is none.
const Offer* common_job(const std::vector<Card>& cards) {
  const Offer* best = nullptr;
  for (std::int32_t i = 0; i < cards[0].offers; ++i) {
    const Offer& offer = cards[0].offer[i];
    std::set<int> ranks;
    for (const Card& card : cards) {
      const Offer* const theirs = find(card, offer.job);
      if (theirs != nullptr) ranks.insert(theirs->rank);
    }
    if (ranks.size() != cards.size()) continue;
    const bool better =
        best == nullptr || offer.size > best->size ||
        (offer.size == best->size && std::memcmp(&offer.job, &best->job, sizeof(offer.job)) < 0);
    if (better) best = &offer;
  }
  return best;
}

unjamConfig_t control_config() {
  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  config.device = UNJAM_DEVICE_HOST;
  config.lanes = 1;
  config.block_threads = 1;
  config.max_active_keys = 64;
  config.pool_slots = static_cast<std::uint32_t>(-1);
  config.timeout_ms = static_cast<std::uint32_t>(-1);
  config.heap_bytes = static_cast<std::uint64_t>(-1);
  return config;
}

// A context that goes if what it is for does not come to be.
class Held {
 public:
  Held() = default;
  ~Held() {
    if (context != nullptr) end(context);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  unjamContext_t release() { return std::exchange(context, nullptr); }
  static void end(unjamContext_t context) {
    if (unjamDestroy(context) == UNJAM_SUCCESS) return;
    unjamAbort(context);  // something is pending that nobody waits for
    unjamDestroy(context);
  }

  unjamContext_t context = nullptr;
};

int lanes_of(unjamContext_t context) {
  unjamStats_t stats{};
  stats.size = sizeof(stats);
  return unjamGetStats(context, &stats) == UNJAM_SUCCESS ? static_cast<int>(stats.lanes) : 0;
}

// At once a job may have on a device a block a lane of its daemon, as many of a call, and one of
// each other stream that waits. (As settings.h's lanes_of_sharers(), of jobs that come one by one.)
constexpr int kWaitingStreams = 8;
int sms_of(int lanes) { return 2 * lanes + kWaitingStreams; }

Status join(const UniqueId& id, int rank, int size, Held& control) {
  unjamUniqueId_t meeting;
  static_assert(sizeof(meeting) == sizeof(id));
  std::memcpy(&meeting, &id, sizeof(id));
  const unjamConfig_t config = control_config();
  return from_unjam(unjamInit(&control.context, size, meeting, rank, &config));
}

// Once CUDA has begun, so that it ends behind this.
void leave_at_exit() {
  static const int registered = std::atexit([] { unjamFinalize(-1); });
  (void)registered;
}

}  // namespace

int lanes_beside(int sms, int taken, int& takes) {
  const int left = sms - taken;
  int lanes = (left / 2 - kWaitingStreams) / 2;
  if (lanes < 1) lanes = left >= sms_of(1) ? 1 : 0;
  takes = lanes == 0 ? 0 : sms_of(lanes);
  return lanes;
}

// ---- memory ----

struct Job::Windows {
  struct One {
    int users = 0;
    bool registered = false;
  };
  std::mutex mutex;
  std::map<std::pair<void*, std::size_t>, One> all;
  std::atomic<int> unused{0};
};

Job::Job(unjamContext_t control, unjamContext_t data, const unjamUniqueId_t& id, int rank, int size,
         int device, int sms)
    : control_(control),
      data_(data),
      id_(id),
      rank_(rank),
      size_(size),
      device_(device),
      sms_(sms),
      windows_(std::make_unique<Windows>()) {}

Job::~Job() {
  Held::end(data_);
  Held::end(control_);
}

bool Job::register_memory(void* memory, std::size_t bytes) {
  const std::lock_guard lock(windows_->mutex);
  const auto [found, added] = windows_->all.try_emplace({memory, bytes});
  Windows::One& one = found->second;
  if (one.users++ == 0 && !added) windows_->unused.fetch_sub(1);
  remove_unused_locked();
  if (added) one.registered = unjamMemRegister(data_, memory, bytes) == UNJAM_SUCCESS;
  return one.registered;
}

void Job::deregister_memory(void* memory, std::size_t bytes) {
  const std::lock_guard lock(windows_->mutex);
  const auto found = windows_->all.find({memory, bytes});
  if (found != windows_->all.end() && --found->second.users == 0) windows_->unused.fetch_add(1);
  remove_unused_locked();
}

void Job::remove_unused() {
  if (windows_->unused.load() == 0) return;
  const std::lock_guard lock(windows_->mutex);
  remove_unused_locked();
}

void Job::remove_unused_locked() {
  for (auto window = windows_->all.begin(); window != windows_->all.end();) {
    const auto& [place, one] = *window;
    // (Invalid usage: a call into it is pending. Any other error is a failed call's, and it is
    // removed.)
    const bool stays =
        one.users != 0 ||
        (one.registered && unjamMemDeregister(data_, place.first) == UNJAM_ERROR_INVALID_USAGE);
    if (stays) {
      ++window;
      continue;
    }
    window = windows_->all.erase(window);
    windows_->unused.fetch_sub(1);
  }
}

int Job::windows() const {
  const std::lock_guard lock(windows_->mutex);
  return static_cast<int>(std::count_if(windows_->all.begin(), windows_->all.end(),
                                        [](const auto& w) { return w.second.registered; }));
}

// ---- groups ----

Status make_membership(const Job& job, std::string name, std::vector<int> members,
                       Membership& membership) {
  membership.name = std::move(name);
  membership.members = std::move(members);
  const auto size = static_cast<int>(membership.members.size());
  const int* const ranks = membership.members.data();
  const char* const text = membership.name.c_str();
  if (const unjamResult_t r = unjamGroupCreate(job.control(), ranks, size, text, &membership.talk);
      r != UNJAM_SUCCESS) {
    return from_unjam(r);
  }
  const unjamResult_t r = unjamGroupCreate(job.data(), ranks, size, text, &membership.group);
  if (r == UNJAM_SUCCESS) return {};
  const Status status = from_unjam(r);
  unjamGroupDestroy(membership.talk);
  return status;
}

Status exchange(unjamGroup_t group, const std::string& key, const void* mine, std::size_t bytes,
                void* all) {
  unjamRequest_t request = nullptr;
  const unjamResult_t called =
      unjamAllGather(group, key.c_str(), mine, all, bytes, UNJAM_UINT8, nullptr, &request);
  if (called != UNJAM_SUCCESS) return from_unjam(called);
  const unjamResult_t result = unjamWait(request, -1);
  Status status = from_unjam(result, unjamRequestError(request));
  unjamRequestFree(request);
  return status;
}

// ---- meetings ----

Status meet(const UniqueId& id, int rank, int size, int device, std::shared_ptr<Job>& job,
            std::vector<int>& members) {
  Machine& machine = Machine::get();
  const std::vector<std::shared_ptr<Job>> here = jobs_on(device);
  const std::vector<std::shared_ptr<Job>> offers = offered(here);

  Held control;
  if (Status s = join(id, rank, size, control); !s.ok()) return s;

  Card card{};
  if (const unjamResult_t r = unjamGetUniqueId(&card.fresh); r != UNJAM_SUCCESS) {
    return from_unjam(r);
  }
  const int sms = machine.multiprocessors(device);
  int takes = 0;
  if (!here.empty() && sms != 0) {
    int taken = 0;
    for (const auto& other : here) taken += other->sms();
    card.lanes = lanes_beside(sms, taken, takes);
    card.full = card.lanes == 0 ? 1 : 0;
  }
  for (const auto& offer : offers) {
    card.offer[card.offers++] = {offer->id(), offer->rank(), offer->size()};
  }
  std::vector<Card> cards(static_cast<std::size_t>(size));
  {
    unjamGroup_t all = nullptr;
    if (const unjamResult_t r = unjamGroupCreate(control.context, nullptr, 0, "meeting", &all);
        r != UNJAM_SUCCESS) {
      return from_unjam(r);
    }
    if (Status s = exchange(all, "cards", &card, sizeof(card), cards.data()); !s.ok()) return s;
    unjamGroupDestroy(all);
  }

  if (const Offer* const common = common_job(cards); common != nullptr) {
    members.clear();
    for (const Card& theirs : cards) members.push_back(find(theirs, common->job)->rank);
    for (const auto& offer : offers) {
      if (same(offer->id(), common->job)) job = offer;
    }
    return {};
  }

  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  config.device = machine.kind();
  config.device_index = device;
  int lanes = 0;
  for (const Card& theirs : cards) {
    if (theirs.full != 0) {
      return {Code::kSystemError,
              "a GPU of this communicator has no room for one more engine: its processes have "
              "communicators that are of no common one. Make the one of all ranks first "
              "(ncclCommInitRank of all; in PyTorch init_process_group with device_id), or "
              "make this one by ncclCommSplit"};
    }
    if (theirs.lanes != 0) lanes = lanes == 0 ? theirs.lanes : std::min(lanes, theirs.lanes);
  }
  config.lanes = static_cast<std::uint32_t>(lanes);
  // Each communicator under way is a key, and each pair of ranks for each direction. Memory of keys
  // comes as they are used.
  if (std::getenv("UNJAM_MAX_ACTIVE_KEYS") == nullptr) {
    config.max_active_keys = static_cast<std::uint32_t>(std::max(kActiveKeys, 64 + 2 * size));
  }
  Held data;
  if (const unjamResult_t r = unjamInit(&data.context, size, cards[0].fresh, rank, &config);
      r != UNJAM_SUCCESS) {
    return from_unjam(r);
  }
  leave_at_exit();
  const int used = sms == 0 ? 0 : sms_of(lanes_of(data.context));
  job = std::make_shared<Job>(control.release(), data.release(), cards[0].fresh, rank, size, device,
                              used);
  members.resize(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) members[static_cast<std::size_t>(r)] = r;
  const std::lock_guard lock(jobs().mutex);
  jobs().all.push_back(job);
  return {};
}

}  // namespace unjam::nccl
