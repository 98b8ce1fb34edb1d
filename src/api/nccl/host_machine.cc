#include "api/nccl/host_machine.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "api/nccl/communicator.h"

namespace unjam::nccl {
namespace {

thread_local int current = 0;

// Tasks in order, by a thread of its own, for as long as the process lives.
class Stream {
 public:
  Stream() {
    std::thread([this] { work(); }).detach();
  }

  void queue(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++queued_;
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    const std::uint64_t until = queued_;
    changed_.wait(lock, [&] { return done_ >= until; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      {
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
      }
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::uint64_t queued_ = 0, done_ = 0;
};

// One for each device and name.
Stream& stream_of(int device, void* name) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const all = new std::map<std::pair<int, void*>, std::unique_ptr<Stream>>;
  const std::lock_guard lock(*mutex);
  std::unique_ptr<Stream>& stream = (*all)[{device, name}];
  if (stream == nullptr) stream = std::make_unique<Stream>();
  return *stream;
}

// What several streams do as one: the last to come runs it, and all go on when it is done.
class Together {
 public:
  Together(std::size_t streams, std::function<void()> run)
      : missing_(streams), run_(std::move(run)) {}

  void come() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) {
      lock.unlock();
      run_();
      lock.lock();
      over_ = true;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return over_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t missing_;
  const std::function<void()> run_;
  bool over_ = false;
};

template <class T>
void multiply(const void* input, void* output, std::size_t elements, const void* by) {
  T factor;
  std::memcpy(&factor, by, sizeof(T));
  for (std::size_t i = 0; i < elements; ++i) {
    static_cast<T*>(output)[i] = scaled(static_cast<const T*>(input)[i], factor);
  }
}

// Calls all, then waits for all.
void run(const std::vector<Operation>& operations, const std::vector<OwnCopy>& copies) {
  for (const OwnCopy& c : copies) {
    if (c.send.send != c.recv.recv) std::memcpy(c.recv.recv, c.send.send, c.bytes());
    c.send.comm->leave();
    c.recv.comm->leave();
  }
  struct Called {
    const Operation* operation = nullptr;
    unjamRequest_t request = nullptr;
    std::vector<std::uint64_t> scratch;
  };
  std::vector<Called> called;
  called.reserve(operations.size());
  for (const Operation& o : operations) {
    Called c;
    c.operation = &o;
    const void* input = o.send;
    if (o.scale != nullptr) {
      const std::size_t elements = o.reduced_elements();
      c.scratch.resize(elements * bytes_of(o.dtype) / sizeof(std::uint64_t) + 1);
      const void* const by = o.scale->place != nullptr ? o.scale->place : o.scale->value.data();
      with_type(o.dtype, [&](auto element) {
        multiply<decltype(element)>(o.send, c.scratch.data(), elements, by);
      });
      input = c.scratch.data();
    }
    const Status status = submit(o, input, UNJAM_STREAM_NONE, &c.request);
    if (status.ok()) {
      called.push_back(std::move(c));
    } else {
      o.comm->fail(status);
      o.comm->leave();
    }
  }
  for (const Called& c : called) {
    unjamWait(c.request, -1);
    c.operation->comm->keep(c.request);
    c.operation->comm->leave();
  }
}

class HostMachine final : public Machine {
 public:
  unjamDevice_t kind() const override { return UNJAM_DEVICE_HOST; }
  Status current_device(int& device) override {
    device = current;
    return {};
  }
  int multiprocessors(int) override { return 0; }

  Status allocate(std::size_t bytes, void** memory) override {
    *memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *memory != nullptr ? Status{} : Status{Code::kSystemError, "out of memory"};
  }
  Status release(void* memory) override {
    std::free(memory);
    return {};
  }

  Status launch(std::vector<Operation> operations) override {
    std::vector<std::vector<Operation>> all_parts = parts(std::move(operations));
    std::vector<std::vector<OwnCopy>> copies(all_parts.size());
    std::vector<std::vector<Operation>> others = all_parts;
    for (std::size_t i = 0; i < others.size(); ++i) {
      if (Status s = take_own_copies(others[i], copies[i]); !s.ok()) return s;
    }
    for (std::size_t i = 0; i < others.size(); ++i) {
      const std::vector<Operation>& part = all_parts[i];
      std::map<std::pair<int, void*>, Stream*> streams;
      for (const Operation& o : part) {
        o.comm->enter();
        const int device = o.comm->device();
        streams[{device, o.stream}] = &stream_of(device, o.stream);
      }
      auto all = std::make_shared<Together>(
          streams.size(), [operations = std::move(others[i]), own = std::move(copies[i])] {
            run(operations, own);
          });
      for (const auto& [name, stream] : streams) {
        stream->queue([all] { all->come(); });
      }
    }
    return {};
  }

 private:
  // Operations that share a stream or a communicator, directly or by others, go together.
  static std::vector<std::vector<Operation>> parts(std::vector<Operation> operations) {
    std::vector<std::vector<Operation>> result;
    for (Operation& o : operations) {
      std::vector<Operation> joined;
      for (auto part = result.begin(); part != result.end();) {
        bool shares = false;
        for (const Operation& other : *part) {
          shares = shares || other.comm == o.comm ||
                   (other.stream == o.stream && other.comm->device() == o.comm->device());
        }
        if (!shares) {
          ++part;
          continue;
        }
        for (Operation& other : *part) joined.push_back(std::move(other));
        part = result.erase(part);
      }
      joined.push_back(std::move(o));
      result.push_back(std::move(joined));
    }
    return result;
  }
};

}  // namespace

Machine& host_machine() {
  static HostMachine* const machine = new HostMachine;
  return *machine;
}

void set_host_device(int device) { current = device; }

void synchronize_host_stream(void* stream) { stream_of(current, stream).synchronize(); }

Machine& Machine::get() {
  static Machine& machine = []() -> Machine& {
    const char* const device = std::getenv("UNJAM_DEVICE");
    const bool host = device != nullptr && std::string_view(device) == "host";
    return host ? host_machine() : cuda_machine();
  }();
  return machine;
}

}  // namespace unjam::nccl
