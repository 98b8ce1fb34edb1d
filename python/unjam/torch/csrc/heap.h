// Memory of unjam's heaps for tensors: on a GPU through torch's allocator, on the CPU a piece each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "unjam/unjam.h"

namespace unjam_torch {

class World;

// Offers a context's heap to the allocator of a GPU, which uses the first that is offered there. It
// must be withdrawn before the context is destroyed.
void offer_heap(int device, unjamContext_t context);
void withdraw_heap(unjamContext_t context);
// A number of that offer, which no other one has; 0: there is none.
std::uint64_t heap_on(int device);
void forked_heaps();

// A tensor in the heap of the world's context for CPU tensors; not initialised.
at::Tensor empty_in_heap(World& world, const std::vector<std::int64_t>& sizes,
                         at::ScalarType dtype);

}  // namespace unjam_torch
