#include "runtime/network.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "device/host/lane_bell.h"
#include "transport/network/carver.h"

namespace unjam {
namespace {

// For a carrier to let go of the memory of its payloads.
constexpr std::uint64_t kDrainNs = 1'000'000'000;
constexpr useconds_t kDrainLookUs = 1000;

// Of what comes when all is over nobody hears.
class Deaf final : public FabricSink {
 public:
  Landing land(std::uint32_t, const FrameBytes&) override {
    Landing to;
    to.refused = true;
    return to;
  }
  void arrived(std::uint32_t, const FrameBytes&, std::uint64_t) override {}
  void sent(std::uint32_t, std::uint64_t) override {}
  void broken(std::uint32_t, const char*) override {}
};

}  // namespace

void Network::Free::operator()(unsigned char* p) const { std::free(p); }

Network::Network(std::unique_ptr<NetCarrier> carrier, Told told)
    : carrier_(std::move(carrier)), told_(std::move(told)) {}

Network::~Network() { close(); }

// What could not be drained in time the destructor does not wait for again.
bool Network::close() {
  if (opened_ && !drained_) drained_ = end_connections();
  return drained_.value_or(true);
}

bool Network::end_connections() {
  if (driver_ != nullptr) driver_->stop();
  Fabric& fabric = carrier_->fabric();
  const auto each = [&](auto&& what) {
    for (std::uint32_t p = 0; p < places_.processes; ++p) {
      if (places_.is_remote[p]) what(p);
    }
  };
  each([&](std::uint32_t p) { fabric.close(p); });
  Deaf deaf;
  for (const std::uint64_t end = monotonic_ns() + kDrainNs;;) {
    bool drained = true;
    each([&](std::uint32_t p) { drained = drained && fabric.drained(p); });
    if (drained || monotonic_ns() >= end) return drained;
    fabric.poll(deaf);
    usleep(kDrainLookUs);
  }
}

bool Network::open(const Places& places, std::string& error) {
  places_ = places;
  CarrierPlaces c;
  c.processes = places_.processes;
  c.self = places_.self;
  c.most_payload = std::max(places_.shape.guaranteed_slot_bytes, places_.shape.pool_slot_bytes);
  const auto ranks = static_cast<std::uint32_t>(places_.process_of.size());
  for (std::uint32_t r = 0; r < ranks; ++r) {
    if (places_.process_of[r] == kBeside) continue;
    c.memory.push_back({places_.bases[r], places_.shape.total_bytes()});
  }
  opened_ = carrier_->open(c, error);
  if (!opened_) return false;
  bases_.assign(ranks, places_.bases);
  return true;
}

void Network::start() {
  CourierSettings s;
  s.shape = places_.shape;
  s.processes = places_.processes;
  s.self = places_.self;
  s.process_of = places_.process_of.data();
  s.bases = bases_.data();
  s.window = places_.window;
  std::size_t bytes = Courier::memory_bytes(s);
  bytes = (bytes + Carver::kAlignment) / Carver::kAlignment * Carver::kAlignment;
  memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(Carver::kAlignment, bytes)));
  if (memory_ == nullptr) throw std::bad_alloc();
  courier_ = std::make_unique<Courier>(s, memory_.get(), carrier_->fabric(),
                                       static_cast<CourierHome&>(*this));
  driver_ = std::make_unique<CourierDriver>(*courier_, carrier_->fabric());
  driver_->start();
}

void Network::ring(std::uint32_t rank, std::uint32_t lane, Came what) {
  auto& cell = *reinterpret_cast<LaneCell*>(places_.bases[rank] + places_.shape.lane_cell(lane));
  ring_lane(cell.doorbell, what == Came::kData ? RingFor::kData : RingFor::kRoom);
}

void Network::add_news(News news) {
  {
    const std::lock_guard lock(mutex_);
    if (news.what == News::kGone) miss(news.process);
    news_.push_back(std::move(news));
  }
  changed_.notify_all();
  told_();
}

// With the lock.
void Network::miss(int process) {
  gone_.insert(process);
  awaited_.erase(process);
}

void Network::gone(std::uint32_t process, const char* why) {
  add_news({News::kGone, static_cast<int>(process), why});
}

void Network::left(std::uint32_t process) {
  add_news({News::kLeft, static_cast<int>(process), ""});
}

std::vector<Network::News> Network::take_news() {
  const std::lock_guard lock(mutex_);
  return std::exchange(news_, {});
}

void Network::give_up(int process) {
  {
    const std::lock_guard lock(mutex_);
    miss(process);
  }
  changed_.notify_all();
  if (driver_ != nullptr) driver_->give_up(static_cast<std::uint32_t>(process));
}

void Network::all_is_there(int process) {
  {
    const std::lock_guard lock(mutex_);
    awaited_.erase(process);
  }
  changed_.notify_all();
}

void Network::say_farewell(std::int64_t timeout_ms) {
  if (driver_ == nullptr) return;
  std::unique_lock lock(mutex_);
  if (std::exchange(said_farewell_, true)) return;
  for (std::uint32_t p = 0; p < places_.processes; ++p) {
    if (!places_.is_remote[p] || gone_.count(static_cast<int>(p)) != 0) continue;
    awaited_.insert(static_cast<int>(p));
    driver_->leave(p);
  }
  changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                    [this] { return awaited_.empty(); });
}

}  // namespace unjam
