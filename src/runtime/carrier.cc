#include "runtime/carrier.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/fork_guard.h"
#include "transport/network/net_plugin.h"
#include "transport/network/plugin_fabric.h"
#include "transport/network/ucx_fabric.h"
#include "transport/network/ucx_library.h"

namespace unjam {
namespace {

const char* text_of(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

class UcxCarrier final : public NetCarrier {
 public:
  explicit UcxCarrier(const UcxLibrary& library) : library_(library) {}

  std::string kind() const override { return "ucx"; }
  std::string title() const override { return library_.title(); }
  bool open(const CarrierPlaces& places, std::string& error) override {
    UcxFabricSettings s;
    s.processes = places.processes;
    s.self = places.self;
    s.most_payload = places.most_payload;
    fabric_ = UcxFabric::make(library_, s, error);
    return fabric_ != nullptr;
  }
  Fabric& fabric() override { return *fabric_; }
  bool invite(std::uint32_t process, std::string& address, std::string&) override {
    address = fabric_->invite(process);
    return true;
  }
  bool meet(std::uint32_t process, const std::string& address, std::string& error) override {
    return fabric_->meet(process, address, error);
  }

 private:
  const UcxLibrary& library_;
  std::unique_ptr<UcxFabric> fabric_;
};

class PluginCarrier final : public NetCarrier {
 public:
  explicit PluginCarrier(NetPlugin& plugin) : plugin_(plugin) {}

  std::string kind() const override {
    return "plugin " + plugin_.name() + " v" + std::to_string(plugin_.version());
  }
  std::string title() const override { return plugin_.title(); }
  bool open(const CarrierPlaces& places, std::string& error) override {
    PluginFabricSettings s;
    s.processes = places.processes;
    s.self = places.self;
    s.most_payload = places.most_payload;
    s.memory = places.memory;
    fabric_ = PluginFabric::make(plugin_, s, error);
    return fabric_ != nullptr;
  }
  Fabric& fabric() override { return *fabric_; }
  bool invite(std::uint32_t process, std::string& address, std::string& error) override {
    PluginAddress own;
    if (!fabric_->invite(process, &own, error)) return false;
    address.assign(reinterpret_cast<const char*>(&own), sizeof(own));
    return true;
  }
  bool meet(std::uint32_t process, const std::string& address, std::string& error) override {
    PluginAddress theirs;
    if (address.size() != sizeof(theirs)) {
      error = "the other end's address is of another kind of carrier";
      return false;
    }
    std::memcpy(static_cast<void*>(&theirs), address.data(), sizeof(theirs));
    return fabric_->meet(process, theirs, error);
  }

 private:
  NetPlugin& plugin_;
  std::unique_ptr<PluginFabric> fabric_;
};

// Plugins are loaded once in a process, and never unloaded.
struct Plugins {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<NetPlugin>> by_name;
};

std::unique_ptr<NetCarrier> plugin_carrier(const std::string& name, std::string& error) {
  Plugins& plugins = per_process<Plugins>();
  const std::lock_guard lock(plugins.mutex);
  std::unique_ptr<NetPlugin>& place = plugins.by_name[name];
  if (place == nullptr) place = NetPlugin::load(name, error);
  if (place == nullptr) return nullptr;
  return std::make_unique<PluginCarrier>(*place);
}

struct Ucx {
  std::mutex mutex;
  const UcxLibrary* library = nullptr;
};

std::unique_ptr<NetCarrier> ucx_carrier(std::string& error) {
  Ucx& ucx = per_process<Ucx>();
  const std::lock_guard lock(ucx.mutex);
  if (ucx.library == nullptr) ucx.library = UcxLibrary::load(text_of("UNJAM_NET_UCX"), error);
  if (ucx.library == nullptr) return nullptr;
  return std::make_unique<UcxCarrier>(*ucx.library);
}

// As settings.cc numbers UNJAM_NET's choices.
constexpr std::int64_t kUcx = 1, kPlugin = 2;

}  // namespace

std::unique_ptr<NetCarrier> NetCarrier::find(const Settings& settings, std::string& error) {
  std::string name = text_of("UNJAM_NET_PLUGIN");
  if (settings.net != kUcx && (settings.net == kPlugin || !name.empty())) {
    if (name.empty()) name = text_of("NCCL_NET_PLUGIN");
    return plugin_carrier(name, error);
  }
  return ucx_carrier(error);
}

}  // namespace unjam
