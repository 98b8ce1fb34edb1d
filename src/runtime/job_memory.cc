#include "runtime/job_memory.h"

#include <cstdint>
#include <vector>

#include "base/json_writer.h"
#include "runtime/cuda_library.h"
#include "runtime/engine_memory.h"

namespace unjam {

std::string job_memory_json(int ranks, const Settings& settings) {
  const ArenaShape shape = arena_shape(settings, ranks);
  const bool on_cuda = settings.device == UNJAM_DEVICE_CUDA;
  JsonWriter w;
  w.begin_object();
  w.field("ranks", ranks).field("device", on_cuda ? "cuda" : "host");
  w.field("lanes", shape.lanes);
  w.field("connectors", shape.connectors);
  w.field("first_connectors", shape.next_connectors(0));
  w.field("base_bytes", shape.base_bytes());
  w.field("neighbour_first_bytes", shape.room_bytes(shape.next_connectors(0)));
  w.field("neighbour_most_bytes", shape.block_bytes());
  std::string unused;
  if (!on_cuda) {
    // (Its pages are not touched.)
    std::vector<unsigned char*> bases(shape.ranks);
    const EngineMemory memory(settings, shape, bases.data(), 0);
    w.field("engine_bytes", memory.bytes());
  } else if (CudaDriver* const cuda = cuda_driver_alone(unused)) {
    CudaRankOptions options;
    options.shape = shape;
    options.slots = engine_slots(settings);
    options.keys = device_keys(settings);
    options.trace_events = static_cast<std::uint64_t>(settings.trace_events);
    w.field("engine_bytes", cuda->engine_bytes(options));
  } else {
    w.key("engine_bytes").json("null");
  }
  w.field("address_bytes", shape.total_bytes());
  w.end_object();
  return w.text();
}

}  // namespace unjam
