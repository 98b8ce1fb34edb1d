// A carrier over UCX's active messages (ucx_library.h): a frame is a message.
//
// Each channel has a worker of UCX's, so that short frames have connections of their own. Messages
// are sent eagerly, whatever their length: UCX receives into its own buffers, from where a payload
// is copied to its place at once. So no buffer of UCX's is ever kept, and no frame waits for one.
//
// Peers exchange workers' addresses, and a key, which every message carries: a message without the
// key of the peer that it says it is from is dropped.
//
// UCX notices a killed peer at once, a silent one hardly: heartbeats are for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transport/network/fabric.h"
#include "transport/network/ucx_library.h"

namespace unjam {

struct UcxFabricSettings {
  std::uint32_t processes = 1, self = 0;
  std::uint32_t most_payload = 0;  // bytes
  std::string transports;          // as UCX_TLS; nothing: as UCX decides
  std::string devices;             // as UCX_NET_DEVICES; nothing: all
  // UCX's other settings come from the environment, as UNJAM_UCX_*.
};

class UcxFabric final : public Fabric {
 public:
  static constexpr std::uint32_t kDepth = 64;  // frames under way, a peer and channel

  // Null: `error` says why.
  static std::unique_ptr<UcxFabric> make(const UcxLibrary& library,
                                         const UcxFabricSettings& settings, std::string& error);
  ~UcxFabric() override;

  // What the peer has to be told: bytes, to be handed over as they are, in a way that nobody else
  // can write to.
  std::string invite(std::uint32_t peer);
  // What the peer has for us. False: `error` says why.
  bool meet(std::uint32_t peer, const std::string& address, std::string& error);

  bool send(std::uint32_t peer, FrameChannel channel, const FrameBytes& head,
            const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) override;
  bool poll(FabricSink& sink) override;
  void close(std::uint32_t peer) override;
  bool drained(std::uint32_t peer) const override;
  int descriptor() const override { return events_.get(); }
  bool arm() override;

  // Messages without the right key.
  std::uint64_t strangers() const { return strangers_; }

 private:
  struct Outgoing;
  struct Peer;
  struct WorkerOf;

  UcxFabric(const UcxLibrary& library, const UcxFabricSettings& settings);
  bool begin(std::string& error);
  std::string said(ucx_abi::Status status) const;
  void fail(Peer& peer, const std::string& why);
  void close_endpoints(Peer& peer);
  void reap();
  void take(const void* header, std::size_t header_bytes, const void* data, std::size_t bytes,
            bool is_here);
  static ucx_abi::Status on_arrival(void* me, const void* header, std::size_t header_bytes,
                                    void* data, std::size_t bytes, const ucx_abi::Arrival* arrival);
  static void on_sent(void* request, ucx_abi::Status status, void* outgoing);
  static void on_error(void* peer, ucx_abi::Endpoint, ucx_abi::Status status);

  const UcxLibrary& library_;
  const ucx_abi::Functions& ucx_;
  const UcxFabricSettings settings_;
  ucx_abi::Context context_ = nullptr;
  ucx_abi::Worker workers_[kChannels] = {};
  Fd events_;  // readable when a worker's descriptor is
  std::vector<std::unique_ptr<Peer>> peers_;
  FabricSink* sink_ = nullptr;  // within poll()
  bool moved_ = false;
  std::uint64_t strangers_ = 0;
};

}  // namespace unjam
