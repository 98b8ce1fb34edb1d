// What takes a job's slices between this process and those of other hosts: a carrier, a courier
// over it, and the thread that drives both.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/carrier.h"
#include "transport/arena.h"
#include "transport/network/courier.h"
#include "transport/network/courier_driver.h"

namespace unjam {

class Network : private CourierHome {
 public:
  struct Places {
    ArenaShape shape;
    std::uint32_t self = 0, processes = 1;
    std::vector<std::uint16_t> process_of;  // by rank, as CourierSettings has it
    std::vector<bool> is_remote;            // by process: it is on another host
    unsigned char* const* bases = nullptr;  // by rank: arenas, and mirrors of remote ranks
    std::uint64_t window = 0;               // bytes, see CourierSettings
  };
  // What happened, for the job's control thread.
  struct News {
    enum What {
      kGone,  // the carrier has lost the process, or it has broken the protocol
      kLeft,  // it has said good-bye, and all that it has sent is here
    } what = kGone;
    int process = 0;
    std::string why;
  };

  // Called when there is news, by any thread; it may not call back.
  using Told = std::function<void()>;
  Network(std::unique_ptr<NetCarrier> carrier, Told told);
  ~Network() override;  // close()

  std::string title() const { return carrier_->title(); }

  // False: `error`.
  bool open(const Places& places, std::string& error);
  bool invite(std::uint32_t process, std::string& address, std::string& error) {
    return carrier_->invite(process, address, error);
  }
  bool meet(std::uint32_t process, const std::string& address, std::string& error) {
    return carrier_->meet(process, address, error);
  }
  // All are met. Throws where the system denies it a thread.
  void start();

  // Null until start().
  CourierDriver* driver() const { return driver_.get(); }
  std::vector<News> take_news();
  // The process is lost, as the others have found.
  void give_up(int process);
  // It has told that all is there that this process has sent, before it said good-bye.
  void all_is_there(int process);
  // Ends all connections, within a second or so. False: a network may still be at arenas and
  // mirrors.
  bool close();
  // Says good-bye to those that are left, and waits until all that was sent is there, for that time
  // at most. Once.
  void say_farewell(std::int64_t timeout_ms);

 private:
  void ring(std::uint32_t rank, std::uint32_t lane, Came what) override;
  void gone(std::uint32_t process, const char* why) override;
  void left(std::uint32_t process) override;
  void differs(std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t) override {}
  bool end_connections();
  void add_news(News news);
  void miss(int process);

  struct Free {
    void operator()(unsigned char* p) const;
  };

  const std::unique_ptr<NetCarrier> carrier_;
  const Told told_;
  Places places_;
  bool opened_ = false;
  std::optional<bool> drained_;               // close()'s answer
  std::vector<unsigned char* const*> bases_;  // by rank
  std::unique_ptr<unsigned char, Free> memory_;
  std::unique_ptr<Courier> courier_;
  std::unique_ptr<CourierDriver> driver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<News> news_;
  std::set<int> awaited_;  // who has yet to say that all is there
  std::set<int> gone_;     // nothing is waited for
  bool said_farewell_ = false;
};

}  // namespace unjam
