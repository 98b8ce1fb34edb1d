// A libFuzzer program of one target, UNJAM_FUZZ_TARGET; see tools/fuzz.py. With UNJAM_FUZZ_SEEDS as
// a folder it writes examples there to begin with.
#include <cstdint>
#include <cstdlib>
#include <fstream>

#include "tests/support/control_targets.h"

namespace unjam_test {
namespace {

#define UNJAM_TEXT_OF(x) #x
#define UNJAM_TEXT(x) UNJAM_TEXT_OF(x)
constexpr const char* kName = UNJAM_TEXT(UNJAM_FUZZ_TARGET);

void write_seeds(const std::string& folder) {
  int count = 0;
  const auto write = [&](const std::string& bytes) {
    std::ofstream(folder + "/seed" + std::to_string(count++), std::ios::binary) << bytes;
  };
  const std::string name = kName;
  for (const SampleMessage& m : sample_messages()) {
    if (name == "messages") {
      std::size_t index = 0;
      while (kAllMessageTypes[index] != m.type) ++index;
      write(std::string(1, static_cast<char>(index)) + m.bytes);
    } else if (name == "channel") {
      const std::string frame = frame_bytes(number_of(m.type), m.bytes.substr(0, 200), 1);
      write(std::string(1, static_cast<char>(frame.size())) + '\1' + frame);
    }
  }
  for (const SampleAgentMessage& m : sample_agent_messages()) {
    std::size_t index = 0;
    while (kAllAgentMessageTypes[index] != m.type) ++index;
    if (name == "agent_messages") write(std::string(1, static_cast<char>(index)) + m.bytes);
    // To a job that runs.
    const std::string frame =
        std::string("\x02") +
        static_cast<char>(number_of(m.type) - number_of(AgentMessageType::kEnter)) +
        static_cast<char>(std::min<std::size_t>(m.bytes.size(), 255));
    const std::string two_join("\x00\x01\x00\x00\x09\x01", 6);
    if (name == "agent") write(two_join + frame + m.bytes.substr(0, 255));
  }
  if (name == "agent") {
    const std::string two_join("\x00\x01\x00\x00\x09\x01", 6);
    write(two_join + "\x06" + std::string("\x00\x01\x08", 3));  // a child dies, one comes again
    write(two_join + std::string("\x07\x00\x02\x0b\x00", 5));   // all are done
    write(two_join + "\x0f\x01");                               // a rank ends
    write(std::string("\x00\x01\x04", 3));                      // settings differ
    write(std::string("\x00\x01\x02", 3));                      // so do numbers of ranks
    write(std::string("\x00\x01\x40\x00\x05\x04garb\x18\x0d\x02zz", 14));
  }
  if (name == "rendezvous") {
    const std::string join0("\x02\x20", 2), join1("\x0a\x21", 2);  // ranks 0 and 1 of 2
    write("\x01" + join0 + "\x01" + join1 + "\x07\x0f");
    write("\x01" + join0 + "\x02\x24\x07");
    write(std::string("\x00\x03\x02\x04garb\x07\x06", 10));
    write("\x01" + join0 + "\x06");
    write(std::string("\x01\x05\x08\xff\xff\xff\xff\x04\x00\x00\x00", 11));
  }
}

}  // namespace
}  // namespace unjam_test

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (const char* folder = std::getenv("UNJAM_FUZZ_SEEDS")) unjam_test::write_seeds(folder);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace unjam_test;
  for (const FuzzTarget& t : kFuzzTargets) {
    if (std::string_view(t.name) == kName) {
      t.run({reinterpret_cast<const char*>(data), size});
    }
  }
  return 0;
}
