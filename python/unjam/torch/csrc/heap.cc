#include "heap.h"

#include <ATen/ops/from_blob.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>

#include "executor.h"
#include "world.h"

namespace unjam_torch {
namespace {

// Called with locks of torch's allocator held: nothing here may wait, take the GIL, or call torch.
//
// The last memory of a destroyed context takes the context with it, and that does wait: for threads
// and for the device. So another thread frees it.
struct Offers {
  struct Offer {
    int device;
    unjamContext_t context;  // null: withdrawn, and torch still has memory of it
    std::uint64_t number;
    std::size_t allocations = 0;  // that torch has
  };
  std::mutex mutex;
  std::vector<Offer> list;
  std::map<void*, std::uint64_t> allocated;  // by torch: of the offer with this number
  std::uint64_t numbers = 0;

  // With the lock; the end if there is none.
  std::vector<Offer>::iterator on(int device) {
    return std::find_if(list.begin(), list.end(), [device](const Offer& offer) {
      return offer.device == device && offer.context != nullptr;
    });
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
  if (offer == o.list.end()) return nullptr;
  void* memory = nullptr;
  unjamMemAlloc(offer->context, bytes, &memory);
  if (memory == nullptr) return nullptr;
  o.allocated.emplace(memory, offer->number);
  ++offer->allocations;
  return memory;
}

void free(void* memory) {
  Offers& o = offers();
  const std::lock_guard lock(o.mutex);
  const auto found = o.allocated.find(memory);
  if (found != o.allocated.end()) {
    const auto offer = std::find_if(o.list.begin(), o.list.end(), [&](const Offers::Offer& one) {
      return one.number == found->second;
    });
    o.allocated.erase(found);
    if (--offer->allocations == 0 && offer->context == nullptr) {
      o.list.erase(offer);
      Executor::get().run([memory] { unjamMemFree(nullptr, memory); });
      return;
    }
  }
  // Ends no context: one that is offered is destroyed after it was withdrawn, which needs the lock,
  // and of others torch has more. (What the child of a fork() comes with is refused.)
  unjamMemFree(nullptr, memory);
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
  const auto offer = std::find_if(o.list.begin(), o.list.end(), [context](const auto& one) {
    return context != nullptr && one.context == context;
  });
  if (offer == o.list.end()) return;
  offer->context = nullptr;
  if (offer->allocations == 0) o.list.erase(offer);
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
  o.allocated.clear();
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
  unjam_torch::free(memory);
}
}
