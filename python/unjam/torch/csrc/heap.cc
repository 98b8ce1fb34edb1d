#include "heap.h"

#include <ATen/ops/from_blob.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "world.h"

namespace unjam_torch {
namespace {

// Called with locks of torch's allocator held: nothing here may wait, take the GIL, or call torch.
struct Offers {
  struct Offer {
    int device;
    unjamContext_t context;
    std::uint64_t number;
  };
  std::mutex mutex;
  std::vector<Offer> list;
  std::uint64_t numbers = 0;

  // With the lock; the end if there is none.
  std::vector<Offer>::iterator on(int device) {
    return std::find_if(list.begin(), list.end(),
                        [device](const Offer& offer) { return offer.device == device; });
  }
};
Offers& offers() {
  static auto* const all = new Offers;
  return *all;
}

void* allocate(std::size_t bytes, int device) {
  Offers& o = offers();
  const std::lock_guard lock(o.mutex);
  const auto offer = o.on(device);
  void* memory = nullptr;
  if (offer != o.list.end()) unjamMemAlloc(offer->context, bytes, &memory);
  return memory;
}

}  // namespace

void offer_heap(int device, unjamContext_t context) {
  void* memory = nullptr;
  if (unjamMemAlloc(context, 1, &memory) != UNJAM_SUCCESS) return;  // it has no heap
  unjamMemFree(context, memory);
  Offers& o = offers();
  const std::lock_guard lock(o.mutex);
  o.list.push_back({device, context, ++o.numbers});
}

void withdraw_heap(unjamContext_t context) {
  Offers& o = offers();
  const std::lock_guard lock(o.mutex);
  std::erase_if(o.list, [context](const auto& offer) { return offer.context == context; });
}

std::uint64_t heap_on(int device) {
  Offers& o = offers();
  const std::lock_guard lock(o.mutex);
  const auto offer = o.on(device);
  return offer == o.list.end() ? 0 : offer->number;
}

void forked_heaps() {
  Offers& o = offers();
  new (&o.mutex) std::mutex;
  o.list.clear();
}

at::Tensor empty_in_heap(World& world, const std::vector<std::int64_t>& sizes,
                         at::ScalarType dtype) {
  const at::IntArrayRef shape(sizes);
  std::int64_t elements = 1;
  bool valid = true;
  for (const std::int64_t size : sizes) {
    valid = valid && size >= 0 && !__builtin_mul_overflow(elements, size, &elements);
  }
  valid = valid && elements < std::int64_t{1} << 58;
  TORCH_CHECK_VALUE(valid, "unjam: there is no tensor of sizes ", shape);
  const std::size_t bytes = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  void* const memory = world.allocate(bytes);
  // In a child of fork() the address is another heap's, if it is any.
  const auto free = [owner = getpid()](void* p) {
    if (getpid() == owner) unjamMemFree(nullptr, p);
  };
  return at::from_blob(memory, shape, free, at::TensorOptions().dtype(dtype));
}

}  // namespace unjam_torch

// What torch.cuda.memory.CUDAPluggableAllocator looks up. Null: torch says that it is out of
// memory. `stream`: torch orders the memory's users among streams itself.
extern "C" {
__attribute__((visibility("default"))) void* unjam_torch_alloc(std::size_t bytes, int device,
                                                               void* /*stream*/) {
  return unjam_torch::allocate(bytes, device);
}
// Also after the context has gone, whose memory goes with the last of it.
__attribute__((visibility("default"))) void unjam_torch_free(void* memory, std::size_t /*bytes*/,
                                                             int /*device*/, void* /*stream*/) {
  unjamMemFree(nullptr, memory);
}
}
