#include "backend.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "any_source.h"
#include "launch.h"

namespace unjam_torch {

namespace {

std::mutex& backends_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::vector<UnjamBackend*>& backends() {
  static auto* const all = new std::vector<UnjamBackend*>;
  return *all;
}

}  // namespace

CallLog& CallLog::get() {
  static auto* const log = new CallLog;
  return *log;
}
void CallLog::add(Line line) {
  const std::lock_guard lock(mutex_);
  lines_.push_back(std::move(line));
}
std::vector<CallLog::Line> CallLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(lines_, {});
}

// ---- life ----

UnjamBackend::UnjamBackend(std::shared_ptr<Groups> groups, int rank,
                           c10::intrusive_ptr<UnjamOptions> options, std::string key_prefix,
                           bool owns_world)
    : c10d::Backend(rank, static_cast<int>(groups->ranks().size())),
      options_(std::move(options)),
      prefix_(std::move(key_prefix)),
      name_(groups->name()),
      owns_world_(owns_world),
      status_(std::make_shared<GroupStatus>(name_, prefix_)),
      groups_(std::move(groups)) {
  options_->group_name = name_;
  options_->global_ranks_in_group.assign(groups_->ranks().begin(), groups_->ranks().end());
  const std::lock_guard lock(backends_mutex());
  backends().push_back(this);
}

UnjamBackend::~UnjamBackend() {
  const std::lock_guard lock(backends_mutex());
  std::erase(backends(), this);
}

std::shared_ptr<Groups> UnjamBackend::groups_or_null() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

std::shared_ptr<Groups> UnjamBackend::groups() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, groups_ != nullptr, "unjam: process group ", name_,
                   " was destroyed (destroy_process_group, or the end of the process)");
  TORCH_CHECK_WITH(DistBackendError, !status_->aborted(), "unjam: process group ", name_,
                   " was aborted on this rank: destroy it, and make another");
  status_->check();
  return groups_;
}

void UnjamBackend::abort() {
  status_->abort();
  // A further group's own calls end here only; the default group's end is the rank's.
  const std::shared_ptr<Groups> groups = groups_or_null();
  if (owns_world_ && groups != nullptr) groups->world().abort();
  AnySource::get().cancel(this, "its process group was aborted", /*waits=*/false);
  for (const auto& keyed : keyed_ones()) keyed->abort();
}

std::shared_ptr<Groups> UnjamBackend::take_groups() {
  status_->end();
  const std::lock_guard lock(mutex_);
  return std::exchange(groups_, nullptr);
}

void UnjamBackend::shutdown() {
  std::exception_ptr interrupted;
  if (owns_world_) {
    if (const auto groups = groups_or_null()) interrupted = groups->world().let_end();
  }
  {
    const std::shared_ptr<Groups> groups = take_groups();  // ends here
    // After that, for keyed() looks whether there are groups as it adds another.
    for (const auto& keyed : keyed_ones()) keyed->shutdown();
    if (!AnySource::get().cancel(this, "its process group was destroyed", /*waits=*/true)) {
      TORCH_WARN("unjam: process group ", status_->channel(),
                 " was destroyed while a receive from any source was being made, which waits for "
                 "another call under its key that a full stream has no room for: that receive, and "
                 "the group's memory, end when the stream goes on");
    }
  }
  // Calls that are over keep their context, and its memory on the device.
  release_complete(true);
  if (interrupted != nullptr) std::rethrow_exception(interrupted);
}

void shutdown_all(std::int64_t patience_us) {
  std::vector<std::shared_ptr<Groups>> groups;  // end outside of the lock
  const std::lock_guard lock(backends_mutex());
  // With the lock none of them can end.
  for (UnjamBackend* backend : backends()) {
    groups.push_back(backend->take_groups());
    if (groups.back() != nullptr && signal_handler_raised()) groups.back()->world().hurry();
    AnySource::get().cancel(backend, "the process ends", /*waits=*/false);
  }
  if (unjamFinalize(patience_us) != UNJAM_SUCCESS) {
    TORCH_WARN("unjam: the process ends with operations pending, which are aborted: ",
               unjamGetLastError());
  }
}

void forked() {
  new (&backends_mutex()) std::mutex;
  CallLog::get().forked();
  forked_heaps();
  Executor::get().forked();
  AnySource::get().forked();
  Recorder::get().forked();
  forked_kept_calls();
}

std::vector<std::shared_ptr<World>> worlds() {
  std::vector<std::shared_ptr<Groups>> all;  // may be the last to hold them: let go without lock
  std::vector<std::shared_ptr<World>> found;
  const std::lock_guard lock(backends_mutex());
  for (const UnjamBackend* backend : backends()) {
    all.push_back(backend->groups_or_null());
    if (all.back() == nullptr) continue;
    const std::shared_ptr<World> world = all.back()->share_world();
    if (std::find(found.begin(), found.end(), world) == found.end()) found.push_back(world);
  }
  return found;
}

std::shared_ptr<World> default_world() {
  const std::lock_guard lock(backends_mutex());
  for (const UnjamBackend* backend : backends()) {
    if (const std::shared_ptr<World> world = backend->owned_world()) return world;
  }
  return nullptr;
}

std::shared_ptr<World> UnjamBackend::owned_world() const {
  const std::lock_guard lock(mutex_);
  return owns_world_ && !status_->aborted() && groups_ != nullptr ? groups_->share_world()
                                                                  : nullptr;
}

c10d::ErrorType UnjamBackend::getError() {
  c10d::ErrorType type = c10d::ErrorType::SUCCESS;
  groups()->world().each([&](unjamContext_t context) {
    unjamResult_t error = UNJAM_SUCCESS;
    unjamGetAsyncError(context, &error, nullptr, 0);
    if (error == UNJAM_ERROR_TIMEOUT) {
      type = c10d::ErrorType::TIMEOUT;
    } else if (error == UNJAM_ERROR_PEER || error == UNJAM_ERROR_MISMATCH) {
      type = c10d::ErrorType::REMOTE_ERROR;
    } else if (error != UNJAM_SUCCESS) {
      type = c10d::ErrorType::COMM_ERROR;
    }
  });
  return type;
}

void UnjamBackend::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) groups()->on(device);  // says what is wrong, if it is the wrong one
}

c10::intrusive_ptr<c10d::Backend> UnjamBackend::split(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) return nullptr;
  const std::shared_ptr<Groups> mine = groups();
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(mine->ranks().at(static_cast<std::size_t>(rank)));
  // torch's name does not serve: it counts the process groups of this rank, and others may have
  // more.
  const std::string name = mine->next_split(prefix_, members);
  auto own = c10::make_intrusive<UnjamOptions>(options->timeout);
  auto groups = std::make_shared<Groups>(mine->share_world(), members, name);
  return c10::make_intrusive<UnjamBackend>(std::move(groups), static_cast<int>(me - ranks.begin()),
                                           std::move(own), prefix_, false);
}

c10::intrusive_ptr<UnjamBackend> UnjamBackend::keyed(const std::string& name) {
  auto keyed = c10::make_intrusive<UnjamBackend>(
      groups(), getRank(), c10::make_intrusive<UnjamOptions>(options_->timeout),
      join(prefix_, "#group " + escaped(name) + "#"), false);
  // The end of the last weak reference destroys a backend, which takes the lock of all backends.
  // With this lock held that could be a deadlock.
  std::vector<c10::weak_intrusive_ptr<UnjamBackend>> ended;
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    const auto first = std::partition(keyed_.begin(), keyed_.end(),
                                      [](const auto& one) { return !one.expired(); });
    ended.assign(std::make_move_iterator(first), std::make_move_iterator(keyed_.end()));
    keyed_.erase(first, keyed_.end());
    over = groups_ == nullptr;
    keyed_.emplace_back(keyed);
  }
  if (over) keyed->shutdown();  // another thread has shut this one down meanwhile
  return keyed;
}

std::vector<c10::intrusive_ptr<UnjamBackend>> UnjamBackend::keyed_ones() const {
  std::vector<c10::intrusive_ptr<UnjamBackend>> ones;
  const std::lock_guard lock(mutex_);
  for (const auto& one : keyed_) {
    if (auto alive = one.lock()) ones.push_back(std::move(alive));
  }
  return ones;
}

int UnjamBackend::root(std::int64_t rank, const char* what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "unjam: ", what, ": root ", rank,
                    " is not in a group of ", getSize(), " ranks");
  return static_cast<int>(rank);
}

int UnjamBackend::peer(int rank, const char* what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "unjam: ", what, ": rank ", rank,
                    " is not in a group of ", getSize(), " ranks");
  return rank;
}

}  // namespace unjam_torch
