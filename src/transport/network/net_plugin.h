// A network plugin for NCCL (libnccl-net*.so), loaded as it is, whichever version of the ABI it
// has: v6 to v12 (net_plugin_abi.h) look the same from here.
//
// What is not used: GPU memory, grouped receives, virtual devices, and connections that GPUs drive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace unjam {

class NetPlugin {
 public:
  static constexpr int kOldest = 6, kNewest = 12;
  static constexpr std::uint32_t kHandleBytes = 128;
  static constexpr std::uint64_t kHandleAlignment = 16;

  struct Device {
    std::string name;
    std::uint64_t most_bytes = 0;  // of a message
  };

  // `name` as NCCL_NET_PLUGIN has it: a file; X, which is libnccl-net-X.so; or nothing, which is
  // libnccl-net.so. Takes the newest version that the file has. Load a file once in a process: a
  // plugin may keep threads, and is never unloaded once it has begun.
  //
  // Null: `error` names the file, the version if there is one, what is wrong, and the cure.
  static std::unique_ptr<NetPlugin> load(const std::string& name, std::string& error);

  virtual ~NetPlugin() = default;
  NetPlugin(const NetPlugin&) = delete;
  NetPlugin& operator=(const NetPlugin&) = delete;

  const std::string& file() const { return file_; }
  const std::string& name() const { return name_; }
  int version() const { return version_; }
  const std::vector<Device>& devices() const { return devices_; }
  // That a connection has under way at once, at most.
  std::uint32_t requests() const { return version_ == 6 ? 8 : 32; }

  // All of the following return whether they have succeeded; if not, problem() says why. A listener
  // or a connection is used by one thread at a time.
  virtual bool listen(int device, void* handle, void** listener) = 0;
  // True with a null `comm`: not yet, call again with the same handle, which has the plugin's
  // state.
  virtual bool connect(int device, void* handle, void** comm) = 0;
  virtual bool accept(void* listener, void** comm) = 0;
  // Host memory.
  virtual bool enroll(void* comm, void* data, std::size_t bytes, void** memory) = 0;
  virtual bool dismiss(void* comm, void* memory) = 0;
  // True with a null `request`: no room now.
  virtual bool send(void* comm, const void* data, std::size_t bytes, void* memory,
                    void** request) = 0;
  virtual bool receive(void* comm, void* data, std::size_t bytes, void* memory, void** request) = 0;
  // Not again of a request that was done.
  virtual bool test(void* request, bool* done, std::size_t* bytes) = 0;
  virtual bool close_send(void* comm) = 0;
  virtual bool close_receive(void* comm) = 0;
  virtual bool close_listen(void* listener) = 0;

  // Of the last call by this thread that has failed: what it was, and what the plugin has said.
  std::string problem() const;
  // "NAME (FILE, v8)".
  std::string title() const;

 protected:
  NetPlugin(std::string file, std::string name, int version)
      : file_(std::move(file)), name_(std::move(name)), version_(version) {}
  virtual bool begin(std::string& error) = 0;

  std::vector<Device> devices_;

 private:
  const std::string file_, name_;
  const int version_;
};

}  // namespace unjam
