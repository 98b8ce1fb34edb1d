// Which carrier (transport/network/fabric.h) takes a job's slices to other hosts, and how it is
// opened: UCX, or a network plugin for NCCL (UNJAM_NET, UNJAM_NET_PLUGIN, UNJAM_NET_UCX).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/settings.h"
#include "transport/network/fabric.h"

namespace unjam {

struct CarrierPlaces {
  std::uint32_t processes = 1, self = 0;
  std::uint32_t most_payload = 0;  // bytes
  std::vector<FabricMemory> memory;
};

class NetCarrier {
 public:
  // Loads what the settings and the environment ask for. Null: `error` says what is missing.
  static std::unique_ptr<NetCarrier> find(const Settings& settings, std::string& error);

  virtual ~NetCarrier() = default;
  // What must be the same on all hosts: "ucx", or the plugin's name and version.
  virtual std::string kind() const = 0;
  // With version and file.
  virtual std::string title() const = 0;

  // Once, before the following. False: `error` says why.
  virtual bool open(const CarrierPlaces& places, std::string& error) = 0;
  virtual Fabric& fabric() = 0;
  // The address to be told to that process, and to nobody else. (Of two carriers of one kind each
  // understands the other's.)
  virtual bool invite(std::uint32_t process, std::string& address, std::string& error) = 0;
  virtual bool meet(std::uint32_t process, const std::string& address, std::string& error) = 0;
};

}  // namespace unjam
