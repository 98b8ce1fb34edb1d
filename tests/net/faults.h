// What a test may ask of the test plugin (test_plugin.cc), and what it has counted. One for each
// plugin file and process; dlsym() finds it as unjam_net_faults.
#pragma once

#include <atomic>
#include <cstdint>

struct NetFaults {
  enum Call : int {
    kNone,
    kInit,
    kDevices,
    kProperties,
    kListen,
    kConnect,
    kAccept,
    kRegister,
    kSend,
    kReceive,
    kTest
  };

  // Set by tests, while nothing is under way.
  std::atomic<int> fails{kNone};          // which function gives an error
  std::atomic<std::int64_t> after{0};     // of its calls so many succeed before
  std::atomic<int> result{6};             // the error
  std::atomic<std::uint32_t> no_room{0};  // so many of isend and irecv in 100 have no room
  std::atomic<std::uint32_t> piece{0};    // bytes moved at once; 0: all that go
  std::atomic<std::uint32_t> delay{0};    // tests that say "not yet" of what is done
  std::atomic<std::uint32_t> not_yet{0};  // calls of connect that say "not yet"
  std::atomic<int> no_devices{0}, no_host_memory{0};
  std::atomic<int> stays_registered{0}, stays_open{0};  // that is, deregMr and closing give errors
  std::atomic<int> grumbles{0};  // warns of what succeeds, and fails without a word
  // Called with each message that has come; may change it, and how long it is said to be.
  void (*received)(void* context, unsigned char* data, std::uint64_t* bytes) = nullptr;
  void* context = nullptr;

  // Counted by the plugin.
  std::atomic<std::int64_t> open{0};        // listeners and connections
  std::atomic<std::int64_t> registered{0};  // pieces of memory
  std::atomic<std::int64_t> misused{0};     // calls that no plugin has to bear
  std::atomic<std::int64_t> most{0};        // requests of a connection at once
  std::atomic<std::int64_t> messages{0};    // that have come
};
