#include "runtime/heap_owners.h"

#include <cstdint>
#include <list>
#include <mutex>
#include <utility>

#include "base/fork_guard.h"
#include "runtime/context.h"

namespace unjam {
namespace {

struct Owner {
  std::uintptr_t base = 0;
  std::uint64_t bytes = 0;
  std::weak_ptr<Context> context;
  std::shared_ptr<Context> kept;  // destroyed, and memory of its heap is allocated
};
// A context's end takes other locks, and waits for threads: none may end with this lock. So no
// reference is taken with it that could be the last.
struct Owners {
  std::mutex mutex;
  std::list<Owner> list;
};
// Never destroyed: what the program has not freed at its end need not go.
Owners& owners() { return per_process<Owners>(); }

bool same(const std::weak_ptr<Context>& a, const std::shared_ptr<Context>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

}  // namespace

void own_heap(const std::shared_ptr<Context>& context) {
  Owners& o = owners();
  std::lock_guard lock(o.mutex);
  o.list.remove_if([](const Owner& owner) { return owner.context.expired(); });
  o.list.push_back({context->heap().base(), context->heap().bytes(), context, nullptr});
}

void keep_heap(const std::shared_ptr<Context>& context) {
  Owners& o = owners();
  std::lock_guard lock(o.mutex);
  if (context->heap().usage().allocations == 0) return;
  for (Owner& owner : o.list) {
    if (same(owner.context, context)) owner.kept = context;
  }
}

Result free_anywhere(const void* pointer) {
  if (pointer == nullptr) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  Owners& o = owners();
  std::shared_ptr<Context> context, kept;  // go last
  {
    std::lock_guard lock(o.mutex);
    // Where one has gone, another one's arena may have come.
    for (const Owner& owner : o.list) {
      if (address - owner.base >= owner.bytes || context != nullptr) continue;
      context = owner.context.lock();
    }
  }
  if (context == nullptr) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            "the pointer is in no heap of this process: free what unjamMemAlloc gave"};
  }
  Result result = context->heap().free(pointer);
  std::lock_guard lock(o.mutex);
  if (context->heap().usage().allocations != 0) return result;
  for (Owner& owner : o.list) {
    if (same(owner.context, context)) kept = std::move(owner.kept);
  }
  return result;
}

}  // namespace unjam
