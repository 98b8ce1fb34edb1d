// What Python sees of the backend.
#include <pthread.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "any_source.h"
#include "backend.h"
#include "ddp.h"
#include "future.h"
#include "heap.h"
#include "nvtx.h"
#include "recorder.h"

namespace py = pybind11;

namespace unjam_torch {
namespace {

using GilRelease = py::call_guard<py::gil_scoped_release>;

// A JSON text of unjam's, for each context of a world.
template <class F>
std::vector<std::string> texts(World& world, F f) {
  std::vector<std::string> found;
  world.each([&](unjamContext_t context) {
    std::string text;
    check(ask_text(f, context, text), "asking a context");
    found.push_back(std::move(text));
  });
  return found;
}

std::vector<unjamStats_t> stats(World& world) {
  const NoGil no_gil;
  std::vector<unjamStats_t> found;
  world.each([&](unjamContext_t context) {
    unjamStats_t stats{};
    stats.size = sizeof(stats);
    check(unjamGetStats(context, &stats), "asking a context");
    found.push_back(stats);
  });
  return found;
}

std::vector<bool> failed(World& world) {
  std::vector<bool> found;
  world.each([&](unjamContext_t context) {
    unjamResult_t error = UNJAM_SUCCESS;
    check(unjamGetAsyncError(context, &error, nullptr, 0), "asking a context");
    found.push_back(error != UNJAM_SUCCESS);
  });
  return found;
}

std::vector<int> absent(World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  int count = 0;
  world.each([&](unjamContext_t context) {
    if (count == 0)
      check(unjamContextAbsent(context, ranks.data(), world.size(), &count), "asking");
  });
  ranks.resize(static_cast<std::size_t>(std::min(count, world.size())));
  return ranks;
}

std::string new_id() {
  unjamUniqueId_t id;
  check(unjamGetUniqueId(&id), "making an id");
  return {id.internal, sizeof(id.internal)};
}

template <class T>
using Ptr = c10::intrusive_ptr<T>;

std::atomic<bool> handler_raised{false};

// It says where the program is, while calls are recorded. It is never freed, for Python goes before
// the process does.
py::object& site_teller() {
  static auto* const teller = new py::object;
  return *teller;
}

}  // namespace

void run_signal_handlers() {
  // Python runs handlers in its main thread only: that of the process, or the one that has forked
  // it. Other threads do not ask for the GIL here, for the thread that has it may wait for this
  // very call.
  if (gettid() != getpid() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  handler_raised.store(true);
  throw py::error_already_set();
}

bool signal_handler_raised() { return handler_raised.load(); }

std::string call_site() {
  const py::gil_scoped_acquire gil;
  const py::object teller = site_teller();
  if (!teller || teller.is_none()) return "";
  return teller().cast<std::string>();
}

namespace {

// A rank's jobs.
void bind_world(py::module_& m) {
  py::class_<World, std::shared_ptr<World>>(m, "World")
      .def(py::init([](int rank, int size, const py::bytes& host_id, const py::bytes& cuda_id,
                       int cuda_device, std::uint32_t timeout_ms, bool on_host) {
             const std::string host = host_id, cuda = cuda_id;
             const py::gil_scoped_release release;
             return std::make_shared<World>(rank, size, host, cuda, cuda_device, timeout_ms,
                                            on_host);
           }),
           py::arg("rank"), py::arg("size"), py::arg("host_id"), py::arg("cuda_id"),
           py::arg("cuda_device"), py::arg("timeout_ms"), py::arg("on_host") = false)
      .def("change_places", &World::change_places)
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("cuda_device", &World::cuda_device)
      .def_property_readonly("host_handle", &World::host_handle)
      .def_property_readonly("cuda_handle", &World::cuda_handle)
      .def(
          "explain", [](World& w) { return texts(w, unjamExplain); }, GilRelease())
      .def(
          "info", [](World& w) { return texts(w, unjamInfo); }, GilRelease())
      // unjamStats_t, as it lies in memory; and whether there was an error. Of each context.
      .def("stats",
           [](World& w) {
             std::vector<py::bytes> found;
             for (const unjamStats_t& s : stats(w)) {
               found.emplace_back(reinterpret_cast<const char*>(&s), sizeof(s));
             }
             return found;
           })
      .def("failed", failed, GilRelease())
      .def("absent", absent, GilRelease())
      .def("empty", empty_in_heap, py::arg("sizes"), py::arg("dtype"), GilRelease())
      .def("register_memory", &World::register_memory, py::arg("memory"), py::arg("bytes"),
           py::arg("cuda"), GilRelease())
      .def("deregister_memory", &World::deregister_memory, py::arg("memory"), py::arg("cuda"),
           GilRelease());
}

// Operations, and the contexts of their futures' callbacks.
void bind_work(py::module_& m) {
  // What torch gives out as Work; _futures.py has it give out futures of its own.
  py::class_<UnjamWork, Ptr<UnjamWork>, c10d::Work>(m, "Work").def("callbacks",
                                                                   &UnjamWork::callbacks);
  py::class_<Scope, std::shared_ptr<Scope>>(m, "Scope")
      .def("enter", &Scope::enter)
      .def("leave", &Scope::leave);
  py::class_<Callbacks, std::shared_ptr<Callbacks>>(m, "Callbacks")
      .def("add", &Callbacks::add)
      .def("behind", [](const Callbacks& callbacks, const Scope& scope) {
        return std::make_shared<Callbacks>(callbacks, scope);
      });
  bind_futures(m);
}

// Process groups.
void bind_backend(py::module_& m) {
  py::class_<UnjamOptions, Ptr<UnjamOptions>, c10d::Backend::Options>(m, "Options")
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__", [](const UnjamOptions& o) { return c10::make_intrusive<UnjamOptions>(o); })
      .def("__deepcopy__", [](const UnjamOptions& o, const py::dict&) {
        return c10::make_intrusive<UnjamOptions>(o);
      });

  py::class_<UnjamBackend, Ptr<UnjamBackend>, c10d::Backend>(m, "Backend")
      .def(
          py::init([](const std::shared_ptr<World>& world, const std::vector<int>& ranks, int rank,
                      const std::string& name, std::chrono::milliseconds timeout, bool owns_world) {
            return c10::make_intrusive<UnjamBackend>(
                std::make_shared<Groups>(world, ranks, name), rank,
                c10::make_intrusive<UnjamOptions>(timeout), "", owns_world);
          }),
          py::arg("world"), py::arg("ranks"), py::arg("rank"), py::arg("name"), py::arg("timeout"),
          py::arg("owns_world"), GilRelease())
      .def_property_readonly("options", &UnjamBackend::getBackendOptions)
      .def_property_readonly("key", &UnjamBackend::key_prefix)
      .def_property_readonly("unjam_name", &UnjamBackend::name)
      .def("keyed", &UnjamBackend::keyed, py::arg("name"), GilRelease())
      .def(
          "world", [](UnjamBackend& b) { return b.groups()->share_world(); }, GilRelease())
      .def("get_error", &UnjamBackend::getError, GilRelease())
      .def("abort", &UnjamBackend::abort, GilRelease())
      .def("shutdown", &UnjamBackend::shutdown, GilRelease())
      .def("perform_nocolor_split", [](UnjamBackend&, const py::object&) {});
}

// The key of a thread's calls.
void bind_keys(py::module_& m) {
  py::class_<ThreadKey>(m, "Key").def_readonly("own", &ThreadKey::own);
  m.def("get_key", thread_key);
  m.def("set_key", set_thread_key, py::arg("key"));
  // What the key was.
  m.def(
      "push_key",
      [](const std::string& name) {
        const ThreadKey outer = thread_key();
        set_thread_key(nested_key(name));
        return outer;
      },
      py::arg("name"));
}

// What belongs to the process.
void bind_functions(py::module_& m) {
  m.def("average_by_keys", average_by_keys, py::arg("reducer"), py::arg("backend"),
        py::arg("prefix"));
  m.def("heap_on", heap_on, py::arg("device"), GilRelease());
  m.def("new_id", [] { return py::bytes(new_id()); });
  m.attr("has_nvtx") = nvtx_built_in();
  m.def("flight_record", flight_record);
  m.def("record_stacks", [](bool on) { Recorder::get().keep_stacks(on); });
  m.def("flight_recorder_size", [] { return Recorder::get().most(); });
  m.def("worlds", worlds);
  m.def("default_world", default_world);
  // At the end of the process futures of what is pending fail, and their callbacks get a moment.
  m.def(
      "shutdown_all",
      [](std::int64_t patience_us) {
        shutdown_all(patience_us);
        Executor::get().close();
      },
      py::arg("patience_us") = -1, GilRelease());
  // site: a function that says where in the program its caller is.
  m.def(
      "log_calls",
      [](bool on, const py::object& site) {
        site_teller() = site;
        CallLog::get().enable(on);
      },
      py::arg("on"), py::arg("site"));
  m.def("take_calls", [] {
    py::list calls;
    for (const CallLog::Line& c : CallLog::get().take()) {
      calls.append(py::make_tuple(c.group, c.key, c.what, c.source, c.destination, c.rest, c.tensor,
                                  c.site));
    }
    return calls;
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");  // the base classes
  pthread_atfork(nullptr, nullptr, forked);

  bind_world(m);
  bind_work(m);
  bind_backend(m);
  bind_keys(m);
  bind_functions(m);
}

}  // namespace unjam_torch
