// The last calls of this process, for dumps in the format of torch's flight recorder.
//
// torch's own recorder is a template over its backends' events, which changes with its versions. So
// this one is unjam's, with torch's variables and torch's fields. Where torch names a process group
// there is a *channel* here, whatever counts its calls on its own: a group, one key of it, or one
// direction between two ranks. Else tools that compare dumps by numbers would take calls that may
// be made in any order for a mistake.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace unjam_torch {

class Call;

// How many calls are kept, unless the environment says another number: as torch's recorder.
constexpr std::size_t kRecords = 2000;

class Recorder {
 public:
  struct Channel {
    std::size_t index = 0;
    std::string name, description;
    std::vector<int> ranks;   // in the default group
    std::uint64_t calls = 0;  // guarded by the recorder
  };

  // Sizes as torch writes them: a list a tensor. flat: as of one tensor, which all of them make up.
  struct Sizes {
    c10::SmallVector<std::int64_t, 8> sizes;
    c10::SmallVector<std::uint8_t, 4> dims;
    c10::SmallVector<at::ScalarType, 4> types;
    void set(const std::vector<at::Tensor>& tensors, bool flat);
  };

  // One call. Whoever finds out what is atomic stores it. The rest does not change once the call is
  // in the list, but what the recorder guards.
  struct Record {
    const char* name = "";  // without "nccl:"
    bool p2p = false;
    bool on_device = false;  // in a stream's order: the host does not see it begin
    Sizes inputs, outputs;
    std::int64_t created_ns = 0;
    std::int64_t timeout_ms = 0;
    std::string thread_name;
    std::uint64_t thread_id = 0;
    std::shared_ptr<torch::CapturedTraceback> traceback;  // may be null
    std::weak_ptr<Call> call;

    std::atomic<std::int64_t> completed_ns{0};
    std::atomic<bool> failed{false};

    // Guarded by the recorder.
    std::uint64_t id = 0;
    std::shared_ptr<Channel> channel;
    std::uint64_t number = 0;           // in the channel, from 1
    int source = -1, destination = -1;  // of p2p: places in the channel's ranks

    void complete() {
      std::int64_t expected = 0;
      if (completed_ns.load(std::memory_order_relaxed) == 0) {
        completed_ns.compare_exchange_strong(expected, now_ns());
      }
    }
  };
  using RecordPtr = std::shared_ptr<Record>;

  // Lives as long as the process: it holds what belongs to Python.
  static Recorder& get() {
    static Recorder* const recorder = new Recorder;
    return *recorder;
  }

  bool on() const { return most_ != 0; }
  std::size_t most() const { return most_; }
  // Whether records have the place in the program. To find it takes the GIL, and most of the time.
  void keep_stacks(bool on) { stacks_.store(on); }

  // Of a call that is being made, on the calling thread.
  RecordPtr begin(const char* name, const std::vector<at::Tensor>& inputs,
                  const std::vector<at::Tensor>& outputs, bool flat_inputs, bool flat_outputs,
                  std::chrono::milliseconds timeout) const;

  // Which channel a call belongs to, and between which of its ranks it goes.
  struct Place {
    std::string name, description;
    std::vector<int> ranks;
    int source = -1, destination = -1;
  };
  // The call was made.
  void add(RecordPtr record, const Place& place);
  // A receive from any source has found one.
  void move(const RecordPtr& record, const Place& place);

  // What is there, the oldest first.
  std::vector<RecordPtr> records() const;
  // What the recorder guards of a record, as it is now.
  struct Standing {
    std::uint64_t id = 0;
    std::shared_ptr<const Channel> channel;
    std::uint64_t calls = 0;  // of the channel
    std::uint64_t number = 0;
    int source = -1, destination = -1;
  };
  std::vector<Standing> standings(const std::vector<RecordPtr>& records) const;

  // A new job begins: its groups have the names of the last one's, and other ranks and numbers.
  void forget();

  void forked() {
    new (&former_) std::unordered_map<std::size_t, std::uint64_t>;
    new (&mutex_) std::mutex;
    new (&records_) std::vector<RecordPtr>;
    new (&channels_) std::unordered_map<std::string, std::shared_ptr<Channel>>;
    next_ = 0;
    ids_ = 0;
  }

  static std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

 private:
  Recorder();
  void put(Record& record, const Place& place);  // with the lock, as the next
  void drop_channels();

  std::size_t most_ = 0;  // as torch's variables say
  std::atomic<bool> stacks_{false};
  mutable std::mutex mutex_;
  std::vector<RecordPtr> records_;  // a ring
  std::size_t next_ = 0;
  std::uint64_t ids_ = 0;
  std::unordered_map<std::string, std::shared_ptr<Channel>> channels_;
  std::size_t indices_ = 0;  // of channels that there were
  // How many calls the channels had that have no record left, by the hashes of their names. Whole
  // channels would fill the memory where keys are used once; and where a channel comes back, its
  // numbers go on, as on the other ranks.
  std::unordered_map<std::size_t, std::uint64_t> former_;
};

// The dump of a rank, as torch's is when it has been unpickled: dicts, lists, numbers and texts.
// Looks at what is pending, and waits for nothing. With the GIL.
pybind11::dict flight_record();

// A call was not complete in time. Has Python write a dump, where the environment asks for that.
void dump_on_timeout();

}  // namespace unjam_torch
