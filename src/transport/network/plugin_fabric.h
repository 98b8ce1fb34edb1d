// A carrier over any network plugin for NCCL (net_plugin.h).
//
// Connections. A plugin's connection goes one way, keeps its messages' order, and has messages
// received where a receive was posted before, of which only so many may be under way. So each peer
// and channel has two connections a direction:
//   heads:     messages of at most kMessageBytes: a frame's head, and its payload if there is room.
//              As many receives are posted as the plugin takes.
//   payloads:  the longer ones, each received straight into its place. Its receive is posted when
//              its head has come, so both ends have payloads in the order of their heads.
// A receiver posts receives at once, whatever else there is to do, and a sender has posted the
// payload of each head that it has sent, or will as soon as the plugin takes it. So connections
// drain.
//
// Nothing waits: poll() also brings connections about. Whoever fails meanwhile is perhaps noticed
// by nobody: heartbeats are for that. Each connection begins with a greeting that has a key which
// only the invited peer was told, so that no stranger's connection is taken for a peer's. Until it
// is there, the connection has nothing but the peer's own messages registered with it. A wrong one,
// none in time, or an error instead is a stranger's: the connection is dismissed, and the listener
// waits for the next one. (A plugin whose listener takes no second one says so: that is the end of
// the peer.)
//
// Whatever else goes wrong (an error of the plugin's, a message of a wrong length) is the end of
// that peer, with a text that names the plugin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/network/fabric.h"
#include "transport/network/net_plugin.h"

namespace unjam {

struct PluginFabricSettings {
  std::uint32_t processes = 1, self = 0;
  int device = 0;                  // of the plugin's
  std::uint32_t most_payload = 0;  // bytes
  // Where payloads lie and land, all of them, for good.
  std::vector<FabricMemory> memory;
  // How long who has connected may take for the greeting. Peers send it at once.
  std::uint32_t greeting_patience_ms = 10'000;
};

// What a peer has to be told before it can connect: bytes, to be handed over as they are, in a way
// that nobody else can write to. The checksum finds what was damaged, not what was forged.
struct PluginAddress {
  static constexpr std::uint32_t kConnections = 2 * kChannels;
  static constexpr std::uint64_t kMagic = 0x3161'7067'6d6a'6e75ull;  // "unjmgpa1"
  std::uint64_t magic = kMagic;
  std::uint64_t checksum = 0;  // of all that follows
  std::uint64_t key = 0;
  // What both ends have to agree about.
  std::uint32_t version = 0;  // of the ABI
  std::uint32_t most_payload = 0;
  char plugin[32] = {};  // the beginning of its name, and zeros
  alignas(NetPlugin::kHandleAlignment) unsigned char handles[kConnections]
                                                            [NetPlugin::kHandleBytes] = {};
};

class PluginFabric final : public Fabric {
 public:
  static constexpr std::uint32_t kMessageBytes = 1024;

  // Null: `error` says why. The plugin has to outlive the fabric.
  static std::unique_ptr<PluginFabric> make(NetPlugin& plugin, const PluginFabricSettings& settings,
                                            std::string& error);
  ~PluginFabric() override;

  // Listens for the peer. Once, at most, for each.
  bool invite(std::uint32_t peer, PluginAddress* address, std::string& error);
  // After invite(): the address that the peer has for us. poll() does the rest. False: `error` says
  // what is wrong with it, and nothing has changed.
  bool meet(std::uint32_t peer, const PluginAddress& address, std::string& error);
  // Whether frames can be sent and have a way back.
  bool met(std::uint32_t peer) const;

  bool send(std::uint32_t peer, FrameChannel channel, const FrameBytes& head,
            const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) override;
  bool poll(FabricSink& sink) override;
  void close(std::uint32_t peer) override;
  // False for good where the plugin has failed to end a connection and what was registered with it:
  // a network may write there. Then the fabric's own buffers stay allocated, even beyond its end,
  // and so has the memory that the settings name.
  bool drained(std::uint32_t peer) const override;

  // Connections that were dismissed.
  std::uint64_t strangers() const { return strangers_; }

 private:
  struct Line;
  struct Outgoing;
  struct Incoming;
  struct Sender;
  struct Receiver;
  struct Peer;

  PluginFabric(NetPlugin& plugin, const PluginFabricSettings& settings);

  PluginAddress address_of(std::uint64_t key) const;
  void fail(Peer& peer, const std::string& why);
  bool enroll(Line& line, const FabricMemory& memory);
  bool enroll_payloads(Line& line);
  bool find_memory(Peer& peer, const Line& line, const unsigned char* at, std::size_t bytes,
                   void** memory);
  bool connect(Peer& peer, Line& line, std::uint32_t number);
  bool accept(Peer& peer, Line& line, std::uint32_t number);
  void dismiss(Peer& peer, Line& line);
  bool meet_further(Peer& peer);
  bool post(Peer& peer, Sender& sender);
  bool post(Peer& peer, Receiver& receiver);
  bool poll(Peer& peer, Sender& sender, FabricSink& sink);
  bool poll(Peer& peer, Receiver& receiver, FabricSink& sink);
  bool take_head(Peer& peer, Receiver& receiver, std::size_t bytes, FabricSink& sink);
  bool close(Line& line, bool sends);

  NetPlugin& plugin_;
  const PluginFabricSettings settings_;
  const std::uint32_t depth_;
  std::vector<unsigned char> waste_;  // where payloads go that nobody wants
  std::vector<FabricMemory> memory_;  // by address; all but a peer's messages
  std::vector<std::unique_ptr<Peer>> peers_;
  std::uint64_t strangers_ = 0;
};

}  // namespace unjam
