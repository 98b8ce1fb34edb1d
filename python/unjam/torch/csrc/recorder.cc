#include "recorder.h"

#include <ATen/ATen.h>
#include <pthread.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

#include "gil.h"
#include "work.h"

namespace unjam_torch {

namespace py = pybind11;

namespace {

// As torch reads it: the first of the names that is set counts.
std::size_t records_asked_for() {
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    const char* const text = std::getenv(name);
    if (text == nullptr) continue;
    std::size_t number = 0;
    const char* const end = text + std::strlen(text);
    const auto [last, error] = std::from_chars(text, end, number);
    if (error == std::errc() && last == end) return number;
    TORCH_WARN("unjam: ", name, "=", text, " is not valid: give a number of calls; 0 for none");
    return 0;
  }
  return kRecords;
}

std::string own_thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

}  // namespace

void Recorder::Sizes::set(const std::vector<at::Tensor>& tensors, bool flat) {
  if (flat && !tensors.empty()) {
    std::int64_t sum = 0;
    for (const at::Tensor& t : tensors) sum += t.numel();
    sizes.push_back(sum);
    dims.push_back(1);
    types.push_back(tensors.front().scalar_type());
    return;
  }
  for (const at::Tensor& t : tensors) {
    sizes.append(t.sizes().begin(), t.sizes().end());
    dims.push_back(static_cast<std::uint8_t>(t.dim()));
    types.push_back(t.scalar_type());
  }
}

Recorder::Recorder() : most_(records_asked_for()) {}

Recorder::RecordPtr Recorder::begin(const char* name, const std::vector<at::Tensor>& inputs,
                                    const std::vector<at::Tensor>& outputs, bool flat_inputs,
                                    bool flat_outputs, std::chrono::milliseconds timeout) const {
  static thread_local const std::string thread_name = own_thread_name();
  auto record = std::make_shared<Record>();
  record->name = name;
  record->inputs.set(inputs, flat_inputs);
  record->outputs.set(outputs, flat_outputs);
  record->created_ns = now_ns();
  record->timeout_ms = timeout.count();
  record->thread_name = thread_name;
  record->thread_id = static_cast<std::uint64_t>(pthread_self());
  if (stacks_.load(std::memory_order_relaxed)) {
    record->traceback = torch::CapturedTraceback::gather(/*python=*/true, false, false);
  }
  return record;
}

void Recorder::put(Record& record, const Place& place) {
  std::shared_ptr<Channel>& channel = channels_[place.name];
  if (channel == nullptr) {
    channel = std::make_shared<Channel>();
    channel->index = indices_++;
    const auto former = former_.find(std::hash<std::string>()(place.name));
    if (former != former_.end()) channel->calls = former->second;
    channel->name = place.name;
    channel->description = place.description;
    channel->ranks = place.ranks;
  }
  record.channel = channel;
  record.number = ++channel->calls;
  record.source = place.source;
  record.destination = place.destination;
}

// Forgets channels that no record is of any more; before put(), whose channel has none yet.
void Recorder::drop_channels() {
  if (channels_.size() < 2 * most_ + 64) return;
  for (auto it = channels_.begin(); it != channels_.end();) {
    if (it->second.use_count() != 1) {
      ++it;
      continue;
    }
    former_[std::hash<std::string>()(it->first)] = it->second->calls;
    it = channels_.erase(it);
  }
}

void Recorder::forget() {
  std::vector<RecordPtr> records;  // their tracebacks are let go of without the lock
  const std::lock_guard lock(mutex_);
  records.swap(records_);
  channels_.clear();
  former_.clear();
  next_ = 0;
}

void Recorder::add(RecordPtr record, const Place& place) {
  RecordPtr oldest;  // its traceback is let go of without the lock
  const std::lock_guard lock(mutex_);
  record->id = ids_++;
  drop_channels();
  put(*record, place);
  if (records_.size() < most_) {
    records_.push_back(std::move(record));
    return;
  }
  oldest = std::exchange(records_[next_], std::move(record));
  next_ = (next_ + 1) % most_;
}

void Recorder::move(const RecordPtr& record, const Place& place) {
  const std::lock_guard lock(mutex_);
  put(*record, place);
}

std::vector<Recorder::RecordPtr> Recorder::records() const {
  const std::lock_guard lock(mutex_);
  std::vector<RecordPtr> all(records_.begin() + static_cast<std::ptrdiff_t>(next_), records_.end());
  all.insert(all.end(), records_.begin(), records_.begin() + static_cast<std::ptrdiff_t>(next_));
  return all;
}

std::vector<Recorder::Standing> Recorder::standings(const std::vector<RecordPtr>& records) const {
  std::vector<Standing> all;
  all.reserve(records.size());
  const std::lock_guard lock(mutex_);
  for (const RecordPtr& r : records) {
    all.push_back({r->id, r->channel, r->channel->calls, r->number, r->source, r->destination});
  }
  return all;
}

// ---- dumps ----

namespace {

// torch's fields, of which analysers read these.
constexpr const char* kVersion = "2.10";

// [[2, 3], [4]]
py::list lists(const Recorder::Sizes& sizes) {
  py::list all;
  std::size_t at = 0;
  for (const std::uint8_t dims : sizes.dims) {
    py::list one;
    for (std::uint8_t i = 0; i < dims; ++i) one.append(sizes.sizes[at++]);
    all.append(one);
  }
  return all;
}
py::list names(const Recorder::Sizes& sizes) {
  py::list all;
  for (const at::ScalarType type : sizes.types) all.append(c10::toString(type));
  return all;
}
// The system cuts names of threads, in the middle of a letter, too.
py::object text(const std::string& name) {
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      name.data(), static_cast<Py_ssize_t>(name.size()), /*errors=*/"replace"));
}
py::object or_none(std::int64_t value) {
  return value == 0 ? py::object(py::none()) : py::object(py::int_(value));
}

// "send 0->1": torch's texts. Its analyser takes no other library's name than "nccl" before them.
std::string profiling_name(const Recorder::Record& record, const Recorder::Standing& standing) {
  std::string text = std::string("nccl:") + record.name;
  if (!record.p2p) return text;
  const std::string from = std::to_string(standing.source),
                    to = std::to_string(standing.destination);
  return text +
         (std::strcmp(record.name, "send") == 0 ? " " + from + "->" + to : " " + to + "<-" + from);
}

// which: -1 for none.
py::list frames(const torch::SymbolizedTracebacks& symbols, std::ptrdiff_t which) {
  py::list all;
  if (which < 0) return all;
  for (const std::uint64_t i : symbols.tracebacks.at(static_cast<std::size_t>(which))) {
    const torch::unwind::Frame& frame = symbols.all_frames.at(i);
    py::dict one;
    one["name"] = frame.funcname;
    one["filename"] = frame.filename;
    one["line"] = frame.lineno;
    all.append(one);
  }
  return all;
}

}  // namespace

py::dict flight_record() {
  const Recorder& recorder = Recorder::get();
  std::vector<Recorder::RecordPtr> records;
  std::vector<bool> retired;
  std::vector<std::ptrdiff_t> places;  // in the symbols
  torch::SymbolizedTracebacks symbols;
  std::vector<Recorder::Standing> standings;  // (What makes Python's objects may run anything.)
  {
    const NoGil no_gil;
    records = recorder.records();
    std::vector<torch::CapturedTraceback*> tracebacks;
    for (const Recorder::RecordPtr& record : records) {
      const std::shared_ptr<Call> call = record->call.lock();
      retired.push_back(call == nullptr || call->complete());
      const bool has_one = record->traceback != nullptr;
      places.push_back(has_one ? static_cast<std::ptrdiff_t>(tracebacks.size()) : -1);
      if (has_one) tracebacks.push_back(record->traceback.get());
    }
    symbols = torch::symbolize(tracebacks);  // takes the GIL itself
    standings = recorder.standings(records);
  }

  py::list entries;
  py::dict configuration, status;
  std::map<std::size_t, std::int64_t> completed;  // the last of a channel
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Recorder::Record& record = *records[i];
    const Recorder::Standing& standing = standings[i];
    const Recorder::Channel& channel = *standing.channel;
    const bool over = record.completed_ns.load() != 0 && !record.failed.load();
    if (over) completed[channel.index] = static_cast<std::int64_t>(standing.number);
    py::dict entry;
    entry["frames"] = frames(symbols, places[i]);
    entry["record_id"] = standing.id;
    entry["pg_id"] = channel.index;
    entry["process_group"] = py::make_tuple(channel.name, channel.description);
    entry["thread_name"] = text(record.thread_name);
    entry["thread_id"] = std::to_string(record.thread_id);
    entry["collective_seq_id"] = standing.number;
    entry["p2p_seq_id"] = record.p2p ? standing.number : 0;
    entry["op_id"] = standing.number;
    entry["profiling_name"] = profiling_name(record, standing);
    entry["time_created_ns"] = record.created_ns;
    entry["input_sizes"] = lists(record.inputs);
    entry["input_dtypes"] = names(record.inputs);
    entry["output_sizes"] = lists(record.outputs);
    entry["output_dtypes"] = names(record.outputs);
    // A call in a stream's order begins unseen by the host.
    entry["state"] = over ? "completed" : record.on_device ? "scheduled" : "started";
    entry["time_discovered_started_ns"] = or_none(record.on_device ? 0 : record.created_ns);
    entry["time_discovered_completed_ns"] = or_none(over ? record.completed_ns.load() : 0);
    entry["retired"] = static_cast<bool>(retired[i]);
    entry["timeout_ms"] = record.timeout_ms;
    entry["is_p2p"] = record.p2p;
    entries.append(entry);

    py::dict group;
    group["name"] = channel.name;
    group["desc"] = channel.description;
    std::string ranks;
    for (const int rank : channel.ranks) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    group["ranks"] = "[" + ranks + "]";
    configuration[py::str(channel.name)] = group;
    py::dict stand;
    const auto last = completed.find(channel.index);
    stand["last_enqueued_collective"] = standing.calls;
    stand["last_started_collective"] = -1;  // as torch says what it does not know
    stand["last_completed_collective"] = last == completed.end() ? -1 : last->second;
    status[py::str(std::to_string(channel.index))] = stand;
  }

  py::dict dump;
  dump["version"] = kVersion;
  dump["pg_config"] = configuration;
  dump["pg_status"] = status;
  dump["entries"] = entries;
  return dump;
}

void dump_on_timeout() {
  if (!Recorder::get().on() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("unjam.torch.recorder").attr("_dump_on_timeout")();
  } catch (const std::exception& error) {  // the timeout itself is to be told
    TORCH_WARN("unjam: the flight recorder's dump was not written: ", error.what());
  }
}

}  // namespace unjam_torch
