#include "transport/network/ucx_fabric.h"

#include <sys/epoll.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/hash.h"
#include "base/random_bytes.h"

namespace unjam {
namespace {

namespace ucx = ucx_abi;

constexpr unsigned kMessageId = 0x75;
// In front of a frame's head: who has sent it, and the key. Of equal machines.
constexpr std::uint32_t kNameBytes = 16;
constexpr std::uint32_t kHeaderBytes = kNameBytes + kFrameBytes;
// How often a poll() asks a worker, at most: others want to be heard, too.
constexpr int kTurns = 64;
// How long the end may take, and what may have to be left then.
constexpr std::int64_t kPatienceMs = 1000;

// An address: a word of ours, a checksum of the rest, the key, and each worker's address behind its
// length.
constexpr std::uint64_t kUcxAddressMagic = 0x3161'7867'6d6a'6e75ull;  // "unjmgxa1"
constexpr std::size_t kChecksumAt = sizeof(kUcxAddressMagic), kKeyAt = 2 * sizeof(std::uint64_t);

std::uint64_t word_at(const std::string& text, std::size_t at) {
  std::uint64_t word = 0;
  std::memcpy(&word, text.data() + at, sizeof(word));
  return word;
}

std::int64_t now_ms() {
  timespec t = {};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t{t.tv_sec} * 1000 + t.tv_nsec / 1000000;
}

}  // namespace

// A frame that UCX has, with its header.
struct UcxFabric::Outgoing {
  enum class State : std::uint8_t { kFree, kUnderWay, kDone };
  State state = State::kFree;
  ucx::Status status = ucx::kOk;
  unsigned char header[kHeaderBytes] = {};
  std::uint32_t bytes = 0;
  std::uint64_t cookie = 0;
  void* request = nullptr;
};

struct UcxFabric::Peer {
  enum class State : std::uint8_t { kUnknown, kOpen, kFailed, kOver };
  State state = State::kUnknown;
  bool closes = false;  // its endpoints, when that can be
  UcxFabric* of = nullptr;
  std::uint32_t number = 0;
  std::uint64_t own_key = 0, key = 0;  // that it sends, and that we send
  ucx::Endpoint endpoints[kChannels] = {};
  Outgoing frames[kChannels][kDepth];
  std::uint32_t under_way = 0;  // not free
  std::string why;

  // Frames that reap() is to see.
  bool has_done() const {
    const auto is_done = [](const Outgoing& o) { return o.state == Outgoing::State::kDone; };
    return under_way != 0 &&
           std::any_of(std::begin(frames), std::end(frames), [&](const auto& all) {
             return std::any_of(std::begin(all), std::end(all), is_done);
           });
  }
};

UcxFabric::UcxFabric(const UcxLibrary& library, const UcxFabricSettings& settings)
    : library_(library), ucx_(library.functions()), settings_(settings) {
  for (std::uint32_t p = 0; p < settings.processes; ++p) {
    peers_.push_back(std::make_unique<Peer>());
    peers_[p]->number = p;
    peers_[p]->of = this;
  }
}

std::string UcxFabric::said(ucx::Status status) const {
  return library_.title() + ": " + ucx_.status_string(status);
}

std::unique_ptr<UcxFabric> UcxFabric::make(const UcxLibrary& library,
                                           const UcxFabricSettings& settings, std::string& error) {
  std::unique_ptr<UcxFabric> fabric(new UcxFabric(library, settings));
  if (!fabric->begin(error)) return nullptr;
  return fabric;
}

bool UcxFabric::begin(std::string& error) {
  ucx::Config config = nullptr;
  ucx::Status status = ucx_.config_read("UNJAM", nullptr, &config);
  if (status != ucx::kOk) {
    error =
        said(status) + ", as it reads its settings. Look at variables that begin with UNJAM_UCX_";
    return false;
  }
  // What a frame of TCP's is cut into otherwise is far too short. (Releases that do not know a
  // setting say so, or ignore it: it is slower then, not wrong.)
  ucx_.config_modify(config, "TCP_TX_SEG_SIZE", "256k");
  ucx_.config_modify(config, "TCP_RX_SEG_SIZE", "256k");
  const std::pair<const char*, const std::string&> wishes[] = {{"TLS", settings_.transports},
                                                               {"NET_DEVICES", settings_.devices}};
  for (const auto& [name, value] : wishes) {
    if (value.empty()) continue;
    status = ucx_.config_modify(config, name, value.c_str());
    if (status != ucx::kOk) {
      error = said(status) + ": " + name + " cannot be " + value;
      ucx_.config_release(config);
      return false;
    }
  }
  ucx::Params params;
  params.mask = ucx::Params::kFeatures | ucx::Params::kSharedWorkers;
  params.features = ucx::Params::kActiveMessages | ucx::Params::kWakeUp;
  params.shared_workers = 0;
  status =
      ucx_.init_version(UcxLibrary::kMajor, UcxLibrary::kOldestMinor, &params, config, &context_);
  ucx_.config_release(config);
  if (status != ucx::kOk) {
    context_ = nullptr;
    error = said(status) + ", as it begins. Check that the network device is up, and what " +
            "UNJAM_UCX_TLS and UNJAM_UCX_NET_DEVICES allow";
    return false;
  }
  events_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  for (ucx::Worker& worker : workers_) {
    ucx::WorkerParams of_worker;
    of_worker.mask = ucx::WorkerParams::kThreadMode;
    of_worker.thread_mode = ucx::WorkerParams::kSerialized;
    status = ucx_.worker_create(context_, &of_worker, &worker);
    if (status != ucx::kOk) {
      worker = nullptr;
      error = said(status) + ", as it makes a worker";
      return false;
    }
    ucx::HandlerParams handler;
    handler.mask = ucx::HandlerParams::kId | ucx::HandlerParams::kFlags |
                   ucx::HandlerParams::kCallback | ucx::HandlerParams::kArgument;
    handler.id = kMessageId;
    handler.flags = ucx::HandlerParams::kWholeMessages;
    handler.callback = on_arrival;
    handler.argument = this;
    status = ucx_.worker_set_am_recv_handler(worker, &handler);
    int fd = -1;
    if (status == ucx::kOk) status = ucx_.worker_get_efd(worker, &fd);
    if (status != ucx::kOk) {
      error = said(status) + ", as it prepares to receive";
      return false;
    }
    epoll_event event = {};
    event.events = EPOLLIN;
    if (!events_ || epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      error = library_.title() + ": its descriptor cannot be waited for";
      return false;
    }
  }
  return true;
}

UcxFabric::~UcxFabric() {
  for (const auto& peer : peers_) close(peer->number);
  const std::int64_t end = now_ms() + kPatienceMs;
  const auto is_over = [&] {
    reap();
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& p) { return p->under_way == 0; });
  };
  bool over = is_over();
  while (!over && now_ms() < end) {
    for (ucx::Worker worker : workers_) {
      if (worker != nullptr) ucx_.worker_progress(worker);
    }
    over = is_over();
  }
  for (ucx::Worker worker : workers_) {
    if (worker != nullptr) ucx_.worker_destroy(worker);
  }
  if (context_ != nullptr) ucx_.cleanup(context_);
}

// ---- meeting ----

std::string UcxFabric::invite(std::uint32_t p) {
  Peer& peer = *peers_[p];
  if (peer.own_key == 0) fill_random(&peer.own_key, sizeof(peer.own_key));
  std::string text(kKeyAt, '\0');
  text.append(reinterpret_cast<const char*>(&peer.own_key), sizeof(peer.own_key));
  for (ucx::Worker worker : workers_) {
    void* address = nullptr;
    std::size_t bytes = 0;
    if (ucx_.worker_get_address(worker, &address, &bytes) != ucx::kOk) return "";
    const auto length = static_cast<std::uint32_t>(bytes);
    text.append(reinterpret_cast<const char*>(&length), sizeof(length));
    text.append(static_cast<const char*>(address), bytes);
    ucx_.worker_release_address(worker, address);
  }
  const std::uint64_t checksum = hash_bytes(std::string_view(text).substr(kKeyAt));
  std::memcpy(text.data(), &kUcxAddressMagic, sizeof(kUcxAddressMagic));
  std::memcpy(text.data() + kChecksumAt, &checksum, sizeof(checksum));
  return text;
}

bool UcxFabric::meet(std::uint32_t p, const std::string& address, std::string& error) {
  Peer& peer = *peers_[p];
  if (peer.state != Peer::State::kUnknown) {
    error = "process " + std::to_string(p) + " was met before";
    return false;
  }
  const auto bad = [&] {
    error = "the address of process " + std::to_string(p) + " is none of UCX's, or was damaged";
    return false;
  };
  std::size_t at = kKeyAt + sizeof(peer.key);
  if (address.size() < at || word_at(address, 0) != kUcxAddressMagic ||
      word_at(address, kChecksumAt) != hash_bytes(std::string_view(address).substr(kKeyAt))) {
    return bad();
  }
  std::string of_channel[kChannels];
  for (std::string& a : of_channel) {
    std::uint32_t length = 0;
    if (address.size() - at < sizeof(length)) return bad();
    std::memcpy(&length, address.data() + at, sizeof(length));
    at += sizeof(length);
    if (length == 0 || address.size() - at < length) return bad();
    a = address.substr(at, length);
    at += length;
  }
  if (at != address.size()) return bad();
  peer.key = word_at(address, kKeyAt);
  for (std::uint32_t c = 0; c < kChannels; ++c) {
    ucx::EndpointParams params;
    params.mask = ucx::EndpointParams::kAddress | ucx::EndpointParams::kErrorMode |
                  ucx::EndpointParams::kErrorHandler;
    params.address = of_channel[c].data();
    params.error_mode = ucx::EndpointParams::kPeerErrors;
    params.on_error = on_error;
    params.argument = &peer;
    const ucx::Status status = ucx_.ep_create(workers_[c], &params, &peer.endpoints[c]);
    if (status != ucx::kOk) {
      peer.endpoints[c] = nullptr;
      error = said(status) + ", as it connects to process " + std::to_string(p) +
              ". Both need a network and a transport in common (UNJAM_UCX_TLS)";
      close(p);
      return false;
    }
  }
  peer.state = Peer::State::kOpen;
  return true;
}

void UcxFabric::fail(Peer& peer, const std::string& why) {
  if (peer.state != Peer::State::kOpen) return;
  peer.state = Peer::State::kFailed;
  peer.why = why;
}

void UcxFabric::on_error(void* of, ucx::Endpoint, ucx::Status status) {
  Peer& peer = *static_cast<Peer*>(of);
  peer.of->fail(peer, peer.of->said(status));
}

// ---- sending ----

bool UcxFabric::send(std::uint32_t p, FrameChannel channel, const FrameBytes& head,
                     const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) {
  Peer& peer = *peers_[p];
  if (peer.state != Peer::State::kOpen) return false;
  const auto c = static_cast<std::size_t>(channel);
  Outgoing* const end = peer.frames[c] + kDepth;
  Outgoing* const o = std::find_if(
      peer.frames[c], end, [](const Outgoing& x) { return x.state == Outgoing::State::kFree; });
  if (o == end) return false;
  o->bytes = bytes;
  o->cookie = cookie;
  o->status = ucx::kOk;
  const std::uint64_t self = settings_.self;
  std::memcpy(o->header, &self, 8);
  std::memcpy(o->header + 8, &peer.key, 8);
  std::memcpy(o->header + kNameBytes, head.bytes, kFrameBytes);
  ucx::RequestParams params;
  params.mask =
      ucx::RequestParams::kCallback | ucx::RequestParams::kUserData | ucx::RequestParams::kFlags;
  params.flags = ucx::RequestParams::kEager;
  params.sent = on_sent;
  params.user_data = o;
  o->state = Outgoing::State::kUnderWay;
  ++peer.under_way;
  ucx::StatusOrRequest began = ucx_.am_send_nbx(peer.endpoints[c], kMessageId, o->header,
                                                kHeaderBytes, payload, bytes, &params);
  if (ucx::is_error(began)) {
    o->state = Outgoing::State::kFree;
    --peer.under_way;
    fail(peer, said(static_cast<ucx::Status>(reinterpret_cast<std::intptr_t>(began))));
    return false;
  }
  o->request = began;
  if (began == nullptr) o->state = Outgoing::State::kDone;  // (no callback comes)
  return true;
}

// (The request itself is freed by reap(): here send() may not have returned yet.)
void UcxFabric::on_sent(void*, ucx::Status status, void* outgoing) {
  Outgoing& o = *static_cast<Outgoing*>(outgoing);
  o.status = status;
  o.state = Outgoing::State::kDone;
}

// ---- receiving ----

ucx::Status UcxFabric::on_arrival(void* me, const void* header, std::size_t header_bytes,
                                  void* data, std::size_t bytes, const ucx::Arrival* arrival) {
  static_cast<UcxFabric*>(me)->take(header, header_bytes, data, bytes,
                                    (arrival->attributes & ucx::Arrival::kRendezvous) == 0);
  return ucx::kOk;  // UCX's buffer is free again
}

void UcxFabric::take(const void* header, std::size_t header_bytes, const void* data,
                     std::size_t bytes, bool is_here) {
  moved_ = true;
  std::uint64_t from = 0, key = 0;
  if (header_bytes == kHeaderBytes) {
    std::memcpy(&from, header, 8);
    std::memcpy(&key, static_cast<const char*>(header) + 8, 8);
  }
  if (header_bytes != kHeaderBytes || from >= peers_.size() || peers_[from]->own_key == 0 ||
      peers_[from]->own_key != key) {
    ++strangers_;
    return;
  }
  Peer& peer = *peers_[from];
  // (The peer may have met us before we have met it.)
  if (peer.state > Peer::State::kOpen || sink_ == nullptr) return;
  FrameBytes head;
  std::memcpy(head.bytes, static_cast<const char*>(header) + kNameBytes, kFrameBytes);
  const Landing to = sink_->land(peer.number, head);
  if (to.refused || peer.state > Peer::State::kOpen) return;
  if (to.bytes != bytes || !is_here) {
    peer.state = Peer::State::kFailed;
    peer.why = library_.title() + ": a payload of another length than its head says";
    return;
  }
  if (to.at != nullptr && bytes != 0) std::memcpy(to.at, data, bytes);
  sink_->arrived(peer.number, head, to.cookie);
}

bool UcxFabric::poll(FabricSink& sink) {
  sink_ = &sink;
  moved_ = false;
  for (ucx::Worker worker : workers_) {
    for (int turn = 0; turn < kTurns && ucx_.worker_progress(worker) != 0; ++turn) moved_ = true;
  }
  reap();
  for (const auto& p : peers_) {
    if (p->state == Peer::State::kFailed) {
      p->state = Peer::State::kOver;
      moved_ = true;
      sink.broken(p->number, p->why.c_str());
    }
  }
  sink_ = nullptr;
  for (const auto& p : peers_) {
    if (p->closes) close_endpoints(*p);
  }
  return moved_;
}

// What UCX is through with.
void UcxFabric::reap() {
  for (const auto& p : peers_) {
    Peer& peer = *p;
    for (std::uint32_t c = 0; c < kChannels && peer.under_way != 0; ++c) {
      for (Outgoing& o : peer.frames[c]) {
        if (o.state != Outgoing::State::kDone) continue;
        if (o.request != nullptr) ucx_.request_free(o.request);
        o.request = nullptr;
        o.state = Outgoing::State::kFree;
        --peer.under_way;
        moved_ = true;
        if (o.status != ucx::kOk) {
          fail(peer, said(o.status));
        } else if (o.bytes != 0 && peer.state == Peer::State::kOpen && sink_ != nullptr) {
          sink_->sent(peer.number, o.cookie);
        }
      }
    }
  }
}

bool UcxFabric::arm() {
  // What send() has found, UCX's descriptors do not tell: they would let a driver sleep over it.
  bool armed = std::none_of(peers_.begin(), peers_.end(), [](const auto& p) {
    return p->state == Peer::State::kFailed || p->has_done();
  });
  for (ucx::Worker worker : workers_) armed = ucx_.worker_arm(worker) == ucx::kOk && armed;
  return armed;
}

// ---- closing ----

void UcxFabric::close_endpoints(Peer& peer) {
  peer.closes = false;
  for (ucx::Endpoint& endpoint : peer.endpoints) {
    if (endpoint == nullptr) continue;
    ucx::RequestParams params;
    params.mask = ucx::RequestParams::kFlags;
    params.flags = ucx::RequestParams::kForce;
    ucx::StatusOrRequest began = ucx_.ep_close_nbx(endpoint, &params);
    endpoint = nullptr;
    // (By force it ends at once, without a request. Frames end one by one, behind it.)
    if (began != nullptr && !ucx::is_error(began)) ucx_.request_free(began);
  }
}

// A frame is under way until UCX has called back: it does not read the payload then.
bool UcxFabric::drained(std::uint32_t p) const {
  const Peer& peer = *peers_[p];
  return peer.state == Peer::State::kOver && !peer.closes && peer.under_way == 0;
}

// UCX's callbacks must not close what they are called for.
void UcxFabric::close(std::uint32_t p) {
  Peer& peer = *peers_[p];
  peer.state = Peer::State::kOver;
  peer.closes = true;
  if (sink_ == nullptr) close_endpoints(peer);
}

}  // namespace unjam
