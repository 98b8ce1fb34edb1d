// Drives a courier: one thread, which sleeps while there is nothing to move, and is woken by lanes
// that post and by the carrier.
#pragma once

#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "transport/network/courier.h"
#include "transport/network/fabric.h"

namespace unjam {

class CourierDriver {
 public:
  // Both must outlive this. Throws where the system denies it a descriptor.
  CourierDriver(Courier& courier, Fabric& fabric);
  ~CourierDriver();  // stop()
  CourierDriver(const CourierDriver&) = delete;
  CourierDriver& operator=(const CourierDriver&) = delete;

  // Throws where the system denies it a thread.
  void start();
  void stop();

  // ---- for lanes of a rank here ----

  // Device's posted(). False: the peer is on this host.
  bool posted(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer,
              const PublishedWord& word) {
    if (!courier_.posted(rank, lane, peer, word)) return false;
    wake();
    return true;
  }
  void marked(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer) {
    if (!courier_.is_remote(peer)) return;
    courier_.marked(rank, lane, peer);
    wake();
  }
  std::uint64_t* const* groups(std::uint32_t rank, std::uint32_t lane) const {
    return courier_.groups(rank, lane);
  }

  // ---- from anywhere ----

  // Something was announced in a mirror.
  void announced() {
    courier_.announced();
    wake();
  }
  // See Courier::leave().
  void leave(std::uint32_t peer) {
    courier_.leave(peer);
    wake();
  }
  // The process is gone, as others have found. The courier's home hears of it as well.
  void give_up(std::uint32_t peer);

 private:
  void wake();
  void run();
  void take_given_up();
  void sleep(std::int64_t most_us);

  Courier& courier_;
  Fabric& fabric_;
  Fd event_;
  // Of its own line: written by all lanes. 1: the thread is about to sleep, or does.
  alignas(64) std::uint32_t asleep_ = 0;
  alignas(64) std::uint32_t stop_ = 0;
  std::uint32_t asked_ = 0;  // whether given_up_ has something
  std::mutex mutex_;         // given_up_
  std::vector<std::uint32_t> given_up_;
  std::thread thread_;
};

}  // namespace unjam
