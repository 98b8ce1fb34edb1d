#include "transport/network/net_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "transport/network/net_plugin_abi.h"

namespace unjam {
namespace {

namespace abi = net_plugin_abi;
static_assert(abi::kHandleBytes == NetPlugin::kHandleBytes);

// The functions of all versions, by what they are called with.
namespace any {

using abi::CommConfig, abi::DeviceHandle, abi::Log, abi::Profile, abi::Result;

Result init(Result (*f)(Log), void**, Log log, Profile) { return f(log); }
Result init(Result (*f)(Log, Profile), void**, Log log, Profile profile) { return f(log, profile); }
Result init(Result (*f)(void**, std::uint64_t, CommConfig*, Log, Profile), void** context, Log log,
            Profile profile) {
  CommConfig config;
  return f(context, 0, &config, log, profile);
}

Result listen(Result (*f)(int, void*, void**), void*, int device, void* handle, void** listener) {
  return f(device, handle, listener);
}
Result listen(Result (*f)(void*, int, void*, void**), void* context, int device, void* handle,
              void** listener) {
  return f(context, device, handle, listener);
}

Result connect(Result (*f)(int, void*, void**), void*, int device, void* handle, void** comm) {
  return f(device, handle, comm);
}
// (A null DeviceHandle: not by a GPU.)
Result connect(Result (*f)(int, void*, void**, DeviceHandle**), void*, int device, void* handle,
               void** comm) {
  DeviceHandle* none = nullptr;
  return f(device, handle, comm, &none);
}
Result connect(Result (*f)(int, CommConfig*, void*, void**, DeviceHandle**), void*, int device,
               void* handle, void** comm) {
  CommConfig config;
  DeviceHandle* none = nullptr;
  return f(device, &config, handle, comm, &none);
}
Result connect(Result (*f)(void*, int, void*, void**, DeviceHandle**), void* context, int device,
               void* handle, void** comm) {
  DeviceHandle* none = nullptr;
  return f(context, device, handle, comm, &none);
}

Result accept(Result (*f)(void*, void**), void* listener, void** comm) { return f(listener, comm); }
Result accept(Result (*f)(void*, void**, DeviceHandle**), void* listener, void** comm) {
  DeviceHandle* none = nullptr;
  return f(listener, comm, &none);
}

// Of host memory. (Bytes are checked to be an int where they have to be: see most_bytes().)
template <class Bytes>
Result reg_mr(Result (*f)(void*, void*, Bytes, int, void**), void* comm, void* data,
              std::size_t bytes, void** memory) {
  if (bytes > std::numeric_limits<Bytes>::max()) return 4;
  return f(comm, data, static_cast<Bytes>(bytes), abi::kHostMemory, memory);
}

template <class Bytes>
Result isend(Result (*f)(void*, void*, Bytes, int, void*, void**), void* comm, void* data,
             std::size_t bytes, void* memory, void** request) {
  return f(comm, data, static_cast<Bytes>(bytes), 0, memory, request);
}
Result isend(Result (*f)(void*, void*, std::size_t, int, void*, void*, void**), void* comm,
             void* data, std::size_t bytes, void* memory, void** request) {
  return f(comm, data, bytes, 0, memory, nullptr, request);
}

template <class Bytes>
Result irecv(Result (*f)(void*, int, void**, Bytes*, int*, void**, void**), void* comm, void* data,
             std::size_t bytes, void* memory, void** request) {
  auto size = static_cast<Bytes>(bytes);
  int tag = 0;
  return f(comm, 1, &data, &size, &tag, &memory, request);
}
Result irecv(Result (*f)(void*, int, void**, std::size_t*, int*, void**, void**, void**),
             void* comm, void* data, std::size_t bytes, void* memory, void** request) {
  void* profiled = nullptr;
  int tag = 0;
  return f(comm, 1, &data, &bytes, &tag, &memory, &profiled, request);
}

}  // namespace any

// What the plugin has said in this thread since a call has returned, and what has failed in it with
// what was said then. Loggers get nothing that tells whose they are, and errors are asked for by
// the thread that has got them. A call that succeeds ends what was said: it is nobody else's.
struct LastWords {
  char warning[256] = {};
  char said[256] = {};
  const char* call = "";
  int result = 0;
};
LastWords& last_words() {
  static thread_local LastWords words;
  return words;
}

void note_warning(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level != abi::kLogWarn || format == nullptr) return;
  LastWords& words = last_words();
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(words.warning, sizeof(words.warning), format, arguments);
  va_end(arguments);
  for (char* c = words.warning; *c != 0; ++c) {
    if (static_cast<unsigned char>(*c) < ' ') *c = ' ';
  }
}

constexpr abi::Result kInternalError = 3;

abi::Result profile_nothing(void**, int, void*, std::int64_t, void*) { return 0; }

const char* meaning(int result) {
  switch (result) {
    case 1:
      return "CUDA error";
    case 2:
      return "system error";
    case 3:
      return "internal error";
    case 4:
      return "invalid argument";
    case 5:
      return "invalid usage";
    case 6:
      return "remote error";
    case 7:
      return "in progress";
    case 8:
      return "time-out";
    default:
      return "unknown error";
  }
}

// NCCL's own limit for plugins that name none.
constexpr std::uint64_t kMostBytesBefore9 = std::uint64_t{1} << 30;
// Room behind what we know of, for a plugin that fills in more.
template <class P>
struct Roomy {
  P properties{};
  unsigned char room[256] = {};
};
template <class P>
std::uint64_t most_bytes(const P& p) {
  if constexpr (requires { p.most_bytes; }) {
    // (Sizes that were done come as an int.)
    constexpr std::uint64_t kMost = std::numeric_limits<int>::max();
    return p.most_bytes == 0 ? kMostBytesBefore9 : std::min<std::uint64_t>(p.most_bytes, kMost);
  }
  return kMostBytesBefore9;
}

template <class Table>
class Loaded final : public NetPlugin {
 public:
  Loaded(std::string file, const Table& table)
      : NetPlugin(std::move(file), table.name, Table::kVersion), table_(table) {}
  ~Loaded() override {
    if constexpr (requires { table_.finalize; }) {
      if (begun_ && table_.finalize != nullptr) table_.finalize(context_);
    }
  }

  // The first function that we need and that is not there.
  static const char* missing(const Table& t) {
    const std::pair<const char*, bool> needed[] = {{"init", t.init != nullptr},
                                                   {"devices", t.devices != nullptr},
                                                   {"getProperties", t.properties != nullptr},
                                                   {"listen", t.listen != nullptr},
                                                   {"connect", t.connect != nullptr},
                                                   {"accept", t.accept != nullptr},
                                                   {"regMr", t.reg_mr != nullptr},
                                                   {"deregMr", t.dereg_mr != nullptr},
                                                   {"isend", t.isend != nullptr},
                                                   {"irecv", t.irecv != nullptr},
                                                   {"test", t.test != nullptr},
                                                   {"closeSend", t.close_send != nullptr},
                                                   {"closeRecv", t.close_recv != nullptr},
                                                   {"closeListen", t.close_listen != nullptr},
                                                   {"name", t.name != nullptr}};
    for (const auto& [name, there] : needed) {
      if (!there) return name;
    }
    return nullptr;
  }

  bool begin(std::string& error) override {
    if (!well("init", any::init(table_.init, &context_, note_warning, profile_nothing))) {
      error = title() + " does not start: " + problem() +
              ". Its own log may say why (NCCL_DEBUG=INFO in a program with NCCL); mend what it "
              "needs, or use another carrier";
      return false;
    }
    begun_ = true;
    int count = 0;
    if (!well("devices", table_.devices(&count))) {
      error = title() + " does not say which devices it has: " + problem();
      return false;
    }
    if (count <= 0) {
      error = title() + " finds no network device that it can use. Check that the network is up, " +
              "and which devices the plugin's own settings leave out; or use another carrier";
      return false;
    }
    for (int i = 0; i < count; ++i) {
      Roomy<typename Table::Properties> p;
      if (!well("getProperties", table_.properties(i, &p.properties))) {
        error = title() + " says nothing of device " + std::to_string(i) + ": " + problem();
        return false;
      }
      if ((p.properties.memory & abi::kHostMemory) == 0) {
        error = title() + " cannot send from host memory by device " + std::to_string(i) +
                ", and unjam sends from there: use another carrier";
        return false;
      }
      devices_.push_back(
          {p.properties.name == nullptr ? "" : p.properties.name, most_bytes(p.properties)});
    }
    return true;
  }

  bool listen(int device, void* handle, void** listener) override {
    *listener = nullptr;
    const abi::Result result = any::listen(table_.listen, context_, device, handle, listener);
    return well("listen", result == 0 && *listener == nullptr ? kInternalError : result);
  }
  bool connect(int device, void* handle, void** comm) override {
    *comm = nullptr;
    return well("connect", any::connect(table_.connect, context_, device, handle, comm));
  }
  bool accept(void* listener, void** comm) override {
    *comm = nullptr;
    return well("accept", any::accept(table_.accept, listener, comm));
  }
  bool enroll(void* comm, void* data, std::size_t bytes, void** memory) override {
    *memory = nullptr;
    return well("regMr", any::reg_mr(table_.reg_mr, comm, data, bytes, memory));
  }
  bool dismiss(void* comm, void* memory) override {
    return well("deregMr", table_.dereg_mr(comm, memory));
  }
  bool send(void* comm, const void* data, std::size_t bytes, void* memory,
            void** request) override {
    *request = nullptr;
    return well("isend",
                any::isend(table_.isend, comm, const_cast<void*>(data), bytes, memory, request));
  }
  bool receive(void* comm, void* data, std::size_t bytes, void* memory, void** request) override {
    *request = nullptr;
    return well("irecv", any::irecv(table_.irecv, comm, data, bytes, memory, request));
  }
  bool test(void* request, bool* done, std::size_t* bytes) override {
    int is_done = 0, size = 0;
    const bool succeeds = well("test", table_.test(request, &is_done, &size));
    *done = succeeds && is_done != 0;
    *bytes = size < 0 ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(size);
    return succeeds;
  }
  bool close_send(void* comm) override { return well("closeSend", table_.close_send(comm)); }
  bool close_receive(void* comm) override { return well("closeRecv", table_.close_recv(comm)); }
  bool close_listen(void* listener) override {
    return well("closeListen", table_.close_listen(listener));
  }

 private:
  static bool well(const char* call, abi::Result result) {
    LastWords& words = last_words();
    if (result != 0) {
      words.call = call;
      words.result = result;
      std::memcpy(words.said, words.warning, sizeof(words.said));
    }
    words.warning[0] = 0;
    return result == 0;
  }

  const Table& table_;  // in the library, which stays
  void* context_ = nullptr;
  bool begun_ = false;
};

// As NCCL looks for it.
std::string file_of(const std::string& name) {
  if (name.empty()) return "libnccl-net.so";
  const bool is_file =
      name.find('/') != std::string::npos || name.starts_with("lib") || name.ends_with(".so");
  return is_file ? name : "libnccl-net-" + name + ".so";
}

std::string symbol_of(int version) { return "ncclNetPlugin_v" + std::to_string(version); }

// Versions that we have no table for.
std::string others_of(void* library) {
  std::string text;
  for (int v = 1; v < 40; ++v) {
    if (dlsym(library, symbol_of(v).c_str()) == nullptr) continue;
    text += (text.empty() ? "v" : ", v") + std::to_string(v);
  }
  return text;
}

template <class Table>
std::unique_ptr<NetPlugin> loaded(const std::string& file, const void* symbol, std::string& error) {
  const Table& table = *static_cast<const Table*>(symbol);
  if (const char* const what = Loaded<Table>::missing(table)) {
    error = file + " (v" + std::to_string(Table::kVersion) + ") has no " + what +
            " in its table: it is broken or not made for this use. Install another build of it";
    return nullptr;
  }
  return std::make_unique<Loaded<Table>>(file, table);
}

}  // namespace

std::string NetPlugin::title() const {
  return "the network plugin " + name_ + " (" + file_ + ", v" + std::to_string(version_) + ")";
}

std::string NetPlugin::problem() const {
  const LastWords& words = last_words();
  std::string text = std::string(words.call) + "() gives " + std::to_string(words.result) + " (" +
                     meaning(words.result) + ")";
  if (words.said[0] != 0) text += std::string("; it says: ") + words.said;
  return text;
}

std::unique_ptr<NetPlugin> NetPlugin::load(const std::string& name, std::string& error) {
  const std::string file = file_of(name);
  last_words() = {};
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    error = "the network plugin " + file + " cannot be loaded: " + (why == nullptr ? "?" : why) +
            ". Give the path of a libnccl-net*.so, with the libraries that it needs in " +
            "LD_LIBRARY_PATH";
    return nullptr;
  }
  std::unique_ptr<NetPlugin> plugin;
  bool found = false;
  const auto take = [&]<class Table>(const Table*) {
    if (found) return;
    const void* const symbol = dlsym(library, symbol_of(Table::kVersion).c_str());
    found = symbol != nullptr;
    if (found) plugin = loaded<Table>(file, symbol, error);
  };
  take(static_cast<const abi::TableV12*>(nullptr));
  take(static_cast<const abi::TableV11*>(nullptr));
  take(static_cast<const abi::TableV10*>(nullptr));
  take(static_cast<const abi::TableV9*>(nullptr));
  take(static_cast<const abi::TableV8*>(nullptr));
  take(static_cast<const abi::TableV7*>(nullptr));
  take(static_cast<const abi::TableV6*>(nullptr));
  if (!found) {
    const std::string others = others_of(library);
    const std::string range = "v" + std::to_string(kOldest) + " to v" + std::to_string(kNewest);
    error = others.empty()
                ? file + " is no network plugin for NCCL: it exports no ncclNetPlugin_v" +
                      std::to_string(kNewest) + " or older. Give another file"
                : file + " is a network plugin of " + others + ", and unjam knows " + range +
                      ". Install a release of it that has one of those";
  }
  if (plugin == nullptr) {
    dlclose(library);  // nothing of it has run but its constructors
    return nullptr;
  }
  if (!plugin->begin(error)) return nullptr;  // (the library stays: it may have begun threads)
  return plugin;
}

}  // namespace unjam
