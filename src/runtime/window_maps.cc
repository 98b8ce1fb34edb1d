#include "runtime/window_maps.h"

#include <pthread.h>

#include <algorithm>

namespace unjam {

WindowMaps::WindowMaps(int ranks, LetGo let_go) : ranks_(ranks), let_go_(std::move(let_go)) {}

WindowMaps::~WindowMaps() { stop(); }

std::uint64_t WindowMaps::table_bytes() const {
  return whole_pages(table_entries() * sizeof(WindowEntry));
}

WindowEntry* WindowMaps::table(int rank, std::string& error) {
  const std::lock_guard lock(mutex_);
  return make_table(rank, error);
}

WindowEntry* WindowMaps::make_table(int rank, std::string& error) {
  const auto found = tables_.find(rank);
  if (found != tables_.end()) return found->second.get();
  SharedPages<WindowEntry> table = make_shared_pages<WindowEntry>(table_entries(), error);
  if (table == nullptr) return nullptr;
  return tables_.emplace(rank, std::move(table)).first->second.get();
}

WindowEntry& WindowMaps::entry(const Viewer& viewer, const Id& id) {
  return tables_.at(viewer.rank)
      .get()[static_cast<std::uint64_t>(id.first) * kWindows + id.second % kWindows];
}

void WindowMaps::add(CudaDriver* cuda, const Source& source, const std::vector<Viewer>& viewers) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  const Id id{source.owner, source.serial};
  // Another one in its place is gone, whether that was said or not.
  for (auto at = records_.lower_bound({source.owner, 0});
       at != records_.end() && at->first.first == source.owner;) {
    const Id other = at++->first;
    if (other.second % kWindows == id.second % kWindows) drop(other, true);
  }
  Record& record = records_.emplace(id, Record{cuda, source, {}, {}, {}}).first->second;
  for (const Viewer& v : viewers) {
    std::string why;
    if (make_table(v.rank, why) == nullptr) {
      record.unreachable.push_back(v);
      why_[v.rank] = why;
    } else if (cuda != nullptr) {
      record.viewers.push_back(v);
    } else {
      record.mapped.push_back(v);
      entry(v, id).set(source.serial, source.base);
    }
  }
  if (!record.viewers.empty()) queue({source.owner, source.serial, false, {}});
}

bool WindowMaps::remove(int owner, std::uint64_t serial, bool stored_into) {
  const std::lock_guard lock(mutex_);
  if (records_.count({owner, serial}) == 0) return false;
  drop({owner, serial}, stored_into);
  return true;
}

void WindowMaps::forget(int owner, bool stored_into) {
  const std::lock_guard lock(mutex_);
  for (auto at = records_.lower_bound({owner, 0});
       at != records_.end() && at->first.first == owner;) {
    drop(at++->first, stored_into);
  }
}

void WindowMaps::drop(const Id& id, bool stored_into) {
  const auto at = records_.find(id);
  const Record& r = at->second;
  std::vector<Mapping> mappings;
  for (const Viewer& v : r.mapped) {
    entry(v, id).clear();
    if (r.source.name) mappings.push_back({r.cuda, v.device, *r.source.name});
  }
  if (stored_into) {
    kept_.insert(kept_.end(), mappings.begin(), mappings.end());
  } else if (r.source.name) {
    queue({id.first, id.second, true, std::move(mappings)});
  }
  records_.erase(at);
}

void WindowMaps::queue(Job job) {
  jobs_.push_back(std::move(job));
  if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { work(); });
  changed_.notify_one();
}

void WindowMaps::work() {
  pthread_setname_np(pthread_self(), "unjam windows");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (job.closes) {
      close(job.mappings);
      let_go_(job.owner, job.serial);
    } else {
      open(job);
    }
    lock.lock();
  }
}

void WindowMaps::open(const Job& job) {
  const Id id{job.owner, job.serial};
  std::unique_lock lock(mutex_);
  for (;;) {
    // May be gone, each time anew.
    const auto found = records_.find(id);
    if (found == records_.end() || found->second.viewers.empty()) return;
    CudaDriver* const cuda = found->second.cuda;
    const Source s = found->second.source;
    const Viewer v = found->second.viewers.back();
    lock.unlock();
    unsigned char* base = nullptr;
    std::string why;
    if (s.name) {
      base = cuda->open_window(v.device, *s.name, why);
    } else if (v.device == s.device || cuda->reach(v.device, s.device, why)) {
      base = s.base;
    }
    lock.lock();
    const auto still = records_.find(id);
    if (still == records_.end()) {  // and nobody has seen the mapping
      lock.unlock();
      if (base != nullptr && s.name) cuda->close_window(v.device, *s.name);
      return;
    }
    Record& r = still->second;
    r.viewers.pop_back();
    if (base != nullptr) {
      r.mapped.push_back(v);
      entry(v, id).set(job.serial, base);
    } else {
      r.unreachable.push_back(v);
      why_[v.rank] = "rank " + std::to_string(job.owner) + "'s: " + why;
    }
  }
}

void WindowMaps::close(const std::vector<Mapping>& mappings) {
  for (const Mapping& m : mappings) m.cuda->close_window(m.device, m.name);
}

void WindowMaps::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  while (!records_.empty()) drop(records_.begin()->first, true);
  for (const Job& job : jobs_) close(job.mappings);
  jobs_.clear();
  close(kept_);
  kept_.clear();
}

WindowMaps::Usage WindowMaps::usage(int rank) const {
  const std::lock_guard lock(mutex_);
  Usage u;
  const auto counts = [rank](const std::vector<Viewer>& viewers) {
    return static_cast<std::uint64_t>(std::count_if(
        viewers.begin(), viewers.end(), [rank](const Viewer& v) { return v.rank == rank; }));
  };
  for (const auto& [id, r] : records_) {
    u.mapped += counts(r.mapped);
    u.unreachable += counts(r.unreachable);
    u.awaited += counts(r.viewers);
  }
  if (const auto why = why_.find(rank); why != why_.end()) u.why = why->second;
  return u;
}

}  // namespace unjam
