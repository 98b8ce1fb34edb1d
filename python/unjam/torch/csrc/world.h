// A rank's contexts, shared by all process groups over the same job, and their groups.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "context.h"
#include "explanation.h"
#include "gil.h"
#include "heap.h"
#include "recorder.h"
#include "unjam/unjam.h"

namespace unjam_torch {

[[noreturn]] inline void raise(std::string_view what, unjamResult_t code, const char* text) {
  std::string said = text != nullptr ? text : "";
  // The library ends so what it says of ranks that disagree; this says how keys are given here.
  constexpr std::string_view kKey = " give each call a key of its own.";
  if (code == UNJAM_ERROR_MISMATCH && said.ends_with(kKey)) {
    said.back() = ':';
    said += " with unjam.key(\"name\"), or key= of unjam's functions.";
  }
  const std::string message =
      "unjam: " + std::string(what) + ": " + said + " [" + unjamGetErrorString(code) + "]";
  TORCH_CHECK_VALUE(code != UNJAM_ERROR_INVALID_ARGUMENT, message);
  TORCH_CHECK_WITH(DistBackendError, false, message);
  std::abort();  // not reached: the check throws
}

// what is a view, so that nothing is built for a call that succeeds.
inline void check(unjamResult_t code, std::string_view what) {
  if (code != UNJAM_SUCCESS) raise(what, code, unjamGetLastError());
}

// A JSON text of unjam's, as long as it is: f(context, buffer, bytes, &needed) asks for it.
template <class F>
unjamResult_t ask_text(F f, unjamContext_t context, std::string& text,
                       std::size_t bytes = std::size_t{1} << 16) {
  for (;;) {
    text.assign(bytes, '\0');
    std::size_t needed = 0;
    const unjamResult_t code = f(context, text.data(), text.size(), &needed);
    if (code == UNJAM_ERROR_RESOURCES && needed > bytes) {
      bytes = needed + needed / 2;
      continue;
    }
    text.resize(std::strlen(text.c_str()));
    return code;
  }
}

// One rank of a job: a context for CPU tensors and, where it is asked for, one for CUDA tensors.
class World {
 public:
  // Joins, and returns when all ranks have. cuda_device: -1, or the index of this rank's GPU, for a
  // context on it, too. timeout_ms: on GPUs a call that a rank has not made fails on all after this
  // time, for streams that wait look at no clock; UNJAM_TIMEOUT_MS in the environment comes first.
  // on_host: the second context is on the host as well, for tests on machines without a GPU.
  World(int rank, int size, const std::string& host_id, const std::string& cuda_id, int cuda_device,
        std::uint32_t timeout_ms, bool on_host = false)
      : rank_(rank), size_(size), cuda_device_(cuda_device) {
    Recorder::get().forget();
    // On the CPU the thread that waits looks at the clock itself, by its process group's limit.
    host_ = join(host_id, UNJAM_DEVICE_HOST, -1, static_cast<std::uint32_t>(-1));
    if (cuda_device < 0) return;
    try {
      cuda_ = on_host ? join(cuda_id, UNJAM_DEVICE_HOST, -1, timeout_ms)
                      : join(cuda_id, UNJAM_DEVICE_CUDA, cuda_device, timeout_ms);
    } catch (...) {
      unjamDestroy(host_);
      throw;
    }
    offer_heap(cuda_device, cuda_);
  }
  // For tests, before there are groups: the contexts for CPU tensors and for CUDA tensors change
  // places.
  void change_places() {
    const std::unique_lock lock(mutex_);
    std::swap(host_, cuda_);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() { close(); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  int cuda_device() const { return cuda_device_; }

  // f(context) for each context, unless the world is closed.
  template <class F>
  void each(F f) {
    const std::shared_lock lock(mutex_);
    for (unjamContext_t context : {host_, cuda_}) {
      if (context != nullptr) f(context);
    }
  }
  // What unjamExplain says of the job for CPU tensors, or of that for CUDA tensors. "": there is
  // none, or it cannot say.
  std::string explain(bool cuda) {
    const std::shared_lock lock(mutex_);
    unjamContext_t const context = cuda ? cuda_ : host_;
    if (context == nullptr) return "";
    std::string text;
    return ask_text(unjamExplain, context, text, std::size_t{1} << 20) == UNJAM_SUCCESS ? text : "";
  }
  // The handles of the contexts for CPU tensors and for CUDA tensors, for the Python package; 0: it
  // has ended, or there is none.
  std::uintptr_t host_handle() {
    const std::shared_lock lock(mutex_);
    return reinterpret_cast<std::uintptr_t>(host_);
  }
  std::uintptr_t cuda_handle() {
    const std::shared_lock lock(mutex_);
    return reinterpret_cast<std::uintptr_t>(cuda_);
  }
  unjamContext_t host() const { return host_; }
  unjamContext_t cuda() const { return cuda_; }

  // Takes memory from the heap for CPU tensors.
  void* allocate(std::size_t bytes) {
    const std::shared_lock lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, host_ != nullptr,
                     "unjam: the process group was destroyed (destroy_process_group)");
    void* memory = nullptr;
    check(unjamMemAlloc(host_, bytes, &memory), "allocating");
    return memory;
  }

  // Lets peers store into memory of a tensor's.
  void register_memory(std::uintptr_t memory, std::size_t bytes, bool cuda) {
    const std::shared_lock lock(mutex_);
    unjamContext_t const context = cuda ? cuda_ : host_;
    TORCH_CHECK_WITH(DistBackendError, context != nullptr,
                     "unjam: the process group was destroyed (destroy_process_group), or has no ",
                     cuda ? "GPU" : "CPU tensors");
    check(unjamMemRegister(context, reinterpret_cast<void*>(memory), bytes), "registering memory");
  }
  // Ends that. Gives the result of unjamMemDeregister, and what it says; success if the context has
  // ended.
  std::pair<int, std::string> deregister_memory(std::uintptr_t memory, bool cuda) {
    const std::shared_lock lock(mutex_);
    unjamContext_t const context = cuda ? cuda_ : host_;
    if (context == nullptr) return {UNJAM_SUCCESS, ""};
    const unjamResult_t code = unjamMemDeregister(context, reinterpret_cast<void*>(memory));
    return {code, code == UNJAM_SUCCESS ? "" : unjamGetLastError()};
  }

  // Ends all that is pending on this rank, with an error; peers learn of it. Returns always.
  void abort() {
    each([](unjamContext_t context) { unjamAbort(context); });
  }

  // Waits for what is merely under way, as long as something moves, and for two seconds after that.
  // Gives what the handler of a signal has raised meanwhile: then nothing gets any more time.
  std::exception_ptr let_end() {
    constexpr std::chrono::milliseconds kLook{50};
    try {
      for (const bool cuda : {true, false}) {
        Progress progress;
        for (auto look = std::chrono::steady_clock::now() + kLook;;) {
          {
            const std::shared_lock lock(mutex_);
            unjamContext_t const context = cuda ? cuda_ : host_;
            if (context == nullptr || !progress.goes_on(context)) break;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          if (std::chrono::steady_clock::now() < look) continue;
          run_signal_handlers();
          look += kLook;
        }
      }
    } catch (...) {
      waited_.store(true);
      return std::current_exception();
    }
    waited_.store(true);
    return nullptr;
  }

  // What is pending gets no time at the end.
  void hurry() { waited_.store(true); }

  // Leaves the job. What is merely under way gets the time to end; what does not move any more is
  // aborted, and told of.
  void close() {
    const std::unique_lock lock(mutex_);
    for (unjamContext_t context : {cuda_, host_}) withdraw_heap(context);  // whichever is offered
    for (unjamContext_t* context : {&cuda_, &host_}) {
      if (*context == nullptr) continue;
      if (unjamDestroy(*context) == UNJAM_ERROR_INVALID_USAGE) {
        for (Progress progress; !waited_.load() && progress.goes_on(*context);) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (unjamDestroy(*context) == UNJAM_ERROR_INVALID_USAGE) {
          TORCH_WARN("unjam: a process group ends with operations pending, which are aborted: ",
                     unjamGetLastError());
          unjamAbort(*context);
          unjamDestroy(*context);
        }
      }
      *context = nullptr;
    }
  }

 private:
  // Whether there is something pending that moves, or did within the last two seconds.
  class Progress {
   public:
    bool goes_on(unjamContext_t context) {
      constexpr std::chrono::seconds kPatience{2};
      unjamStats_t stats{};
      stats.size = sizeof(stats);
      if (unjamGetStats(context, &stats) != UNJAM_SUCCESS || stats.pending == 0) return false;
      const std::uint64_t moved = stats.completed + stats.slices;
      const auto now = std::chrono::steady_clock::now();
      if (moved != seen_) since_ = now;
      seen_ = moved;
      return now - since_ <= kPatience;
    }

   private:
    std::uint64_t seen_ = 0;
    std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  };

  unjamContext_t join(const std::string& id, unjamDevice_t device, int index,
                      std::uint32_t timeout_ms) const {
    unjamUniqueId_t unique;
    TORCH_CHECK_VALUE(id.size() == sizeof(unique.internal), "unjam: a job's id has ",
                      sizeof(unique.internal), " bytes, not ", id.size());
    std::copy(id.begin(), id.end(), unique.internal);
    unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
    config.device = device;
    config.device_index = index;
    if (std::getenv("UNJAM_TIMEOUT_MS") == nullptr) config.timeout_ms = timeout_ms;
    unjamContext_t context = nullptr;
    check(unjamInit(&context, size_, unique, rank_, &config),
          device == UNJAM_DEVICE_CUDA ? "joining with GPU " + std::to_string(index) : "joining");
    return context;
  }

  const int rank_;
  const int size_;
  const int cuda_device_;
  std::shared_mutex mutex_;
  std::atomic<bool> waited_{false};  // let_end() has
  unjamContext_t host_ = nullptr;
  unjamContext_t cuda_ = nullptr;
};

// One process group's groups. Several backends share one: a keyed group has its parent's.
class Groups {
 public:
  Groups(std::shared_ptr<World> world, std::vector<int> ranks, const std::string& name)
      : world_(std::move(world)), ranks_(std::move(ranks)), name_(name) {
    host_ = make(world_->host());
    if (world_->cuda() != nullptr) cuda_ = make(world_->cuda());
  }
  // Groups with something pending cannot be destroyed; they end with their context.
  ~Groups() {
    unjamGroupDestroy(host_);
    if (cuda_ != nullptr) unjamGroupDestroy(cuda_);
  }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  World& world() const { return *world_; }
  std::shared_ptr<World> share_world() const { return world_; }
  const std::vector<int>& ranks() const { return ranks_; }  // in the world
  const std::string& name() const { return name_; }
  // Of operations outside of callbacks, see context.h. They are here, for a keyed group may be made
  // anew, and its numbers go on.
  std::shared_ptr<Names> names(const std::string& key) { return names_.of(key); }

  // ": rank 1 has not called it", of the oldest of this rank's calls under the key, and what that
  // rank has called; on CUDA, where all have called it, what else it can be. "": nothing is known.
  std::string who_has_not_called(const at::Device& device, const std::string& key) const {
    const auto call = explained_call(world_->explain(device.is_cuda()), world_->rank(), name_, key);
    if (!call) return "";
    if (call->not_called_by.empty()) {
      return device.is_cuda() ? ": nobody is missing, so a stream may stand still in front of it "
                                "(CUDA_DEVICE_MAX_CONNECTIONS, see unjam's docs/api.md)"
                              : "";
    }
    if (const auto lacks = call->what.find(" without its "); lacks != std::string::npos) {
      return ": rank " + std::to_string(world_->rank()) + " has not called the " +
             call->what.substr(lacks + std::strlen(" without its ")) + " that meets it";
    }
    std::string ranks;
    for (const int rank : call->not_called_by) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    const bool one = call->not_called_by.size() == 1;
    return (one ? ": rank " : ": ranks ") + ranks + (one ? " has" : " have") + " not called it" +
           (call->instead.empty() ? "" : "; " + call->instead);
  }

  // "; rank 1 has called … with CUDA tensors, …": calls under the key that this rank has not made,
  // where it has made one with tensors on `device`. Tensors of the two kinds are in two jobs, and
  // neither job knows of the other.
  std::string called_with_other_tensors(const at::Device& device, const std::string& key) const {
    const std::string other = world_->explain(!device.is_cuda());
    if (other.empty()) return "";
    const int me = world_->rank();
    std::string text;
    for (const int rank : ranks_) {
      const auto call = explained_call(other, rank, name_, key);
      if (rank == me || !call) continue;
      const std::vector<int>& missing = call->not_called_by;
      if (std::find(missing.begin(), missing.end(), me) == missing.end()) continue;
      text += "; rank " + std::to_string(rank) + " has called " + call->what + " with " +
              (device.is_cuda() ? "CPU" : "CUDA") + " tensors, which rank " + std::to_string(me) +
              " has not";
    }
    if (text.empty()) return "";
    return text +
           ". Calls with CPU tensors and calls with CUDA tensors do not meet: make the call "
           "with the same kind on all ranks";
  }

  // The name of a group that is split off: "<name> split 2 of 0,3" for the second of these ranks.
  // Their members all split it, and so count alike. key: of a keyed group that is split.
  std::string next_split(const std::string& key, const std::vector<int>& members) {
    std::string of = (key.empty() ? "" : " under " + key) + " of ";
    for (std::size_t i = 0; i < members.size(); ++i) {
      of += (i == 0 ? "" : ",") + std::to_string(members[i]);
    }
    const std::lock_guard lock(splits_mutex_);
    return name_ + " split " + std::to_string(++splits_[of]) + of;
  }

  // The group for tensors on `device`.
  unjamGroup_t on(const at::Device& device) const {
    if (device.is_cpu()) return host_;
    TORCH_CHECK_VALUE(device.is_cuda(), "unjam: tensors must be on the CPU or a CUDA device, not ",
                      device);
    TORCH_CHECK_VALUE(
        cuda_ != nullptr,
        "unjam: this job was joined without GPUs: none was visible at init_process_group, or no "
        "rank had chosen one (torch.cuda.set_device, device_id=, or torchrun's "
        "LOCAL_RANK), or UNJAM_TORCH_CUDA=0");
    TORCH_CHECK_VALUE(device.index() == world_->cuda_device(), "unjam: a tensor is on ", device,
                      ", but rank ", world_->rank(), " joined with cuda:", world_->cuda_device(),
                      ": call torch.cuda.set_device before init_process_group, or give it "
                      "device_id");
    return cuda_;
  }

 private:
  unjamGroup_t make(unjamContext_t context) const {
    unjamGroup_t group = nullptr;
    check(unjamGroupCreate(context, ranks_.data(), static_cast<int>(ranks_.size()), name_.c_str(),
                           &group),
          "making group " + name_);
    return group;
  }

  const std::shared_ptr<World> world_;
  const std::vector<int> ranks_;
  const std::string name_;
  unjamGroup_t host_ = nullptr;
  unjamGroup_t cuda_ = nullptr;
  std::mutex splits_mutex_;
  std::map<std::string, int> splits_;  // by key and members, so far
  NamesByKey names_;
};

}  // namespace unjam_torch
