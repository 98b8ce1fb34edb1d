// What the library sets as it comes into a process, before CUDA begins and threads run: what nobody
// has set, and what programs that are written for NCCL take for granted.
#include <cstdlib>

namespace {

[[gnu::constructor]] void set_environment() {
  // Ranks of such programs come to their first collective as late as they like: half an hour.
  setenv("UNJAM_INIT_TIMEOUT_MS", "1800000", 0);
  // Communicators have streams of their own, which wait: each is to have a hardware queue.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

}  // namespace
