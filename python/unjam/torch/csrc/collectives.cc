// torch's operations, one by one.
#include <algorithm>
#include <numeric>
#include <utility>

#include "any_source.h"
#include "launch.h"

namespace unjam_torch {

namespace {

using c10d::OpType;

// Part `i` of a buffer that holds tensors like `like` one after the other, as they lie in memory.
at::Tensor part_like(const at::Tensor& buffer, const at::Tensor& like, std::size_t i) {
  return buffer.as_strided(like.sizes(), like.strides(),
                           static_cast<std::int64_t>(i) * like.numel());
}

// The tensors' memory if they lie one after the other already; else null.
void* adjacent(const Tensors& tensors) {
  auto* const base = static_cast<unsigned char*>(tensors.front().data_ptr());
  const std::size_t bytes = tensors.front().nbytes();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].data_ptr() != base + i * bytes) return nullptr;
  }
  return base;
}

at::Tensor buffer_for(const Tensors& tensors) {
  return at::empty({static_cast<std::int64_t>(tensors.size()) * tensors.front().numel()},
                   tensors.front().options().memory_format(at::MemoryFormat::Contiguous));
}

// On CUDA in the current stream, which need not be the one that the tensors belong to: the
// allocator is told.
void unpack(const at::Tensor& buffer, const Tensors& into) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i].copy_(part_like(buffer, into[i], i));
  if (!buffer.is_cuda()) return;
  const c10::Stream stream = current_stream(buffer.device());
  buffer.record_stream(stream);
  for (const at::Tensor& t : into) t.record_stream(stream);
}

// What PREMUL_SUM multiplies by.
void premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr,
                    "unjam: PREMUL_SUM without its factor: make it with "
                    "torch.distributed._make_nccl_premul_sum");
  if (factor->tensor_factor.defined()) {
    tensor.mul_(factor->tensor_factor);
  } else {
    tensor.mul_(factor->double_factor);
  }
}

// What is reduced of it: with PREMUL_SUM a multiplied copy, for the user's tensor stays as it is,
// at least if the call is refused.
at::Tensor to_reduce(Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  at::Tensor copy = tensor.clone();
  premultiply(copy, op);
  call.hold(copy);
  return copy;
}

// What the keys of pairs begin with that make up an all-to-all.
constexpr const char* kPairs = "#all_to_all";
// What their barrier is for, in messages.
const Elements kInPairs{UNJAM_UINT8, 1, "all_to_all by lists or split sizes"};

std::string tag_key(int tag) { return tag == 0 ? "" : "#tag " + std::to_string(tag); }

}  // namespace

// ---- collectives ----

WorkPtr UnjamBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& t = only(tensors, "broadcast");
  const int from = root(options.rootRank, "broadcast");
  Launch launch(*this, "broadcast", OpType::BROADCAST, t.device(), !options.asyncOp,
                options.timeout);
  launch.observe({"unjam:broadcast", "broadcast", "broadcast"}, tensors, tensors);
  launch.call().hold(t);
  launch.by(from);
  const Elements e = moved_as(t);
  launch.run([&](unjamRequest_t* request) {
    return unjamBroadcast(launch.group(), launch.key(), t.data_ptr(), t.data_ptr(),
                          static_cast<std::size_t>(t.numel()) * e.each, e.dtype, from,
                          launch.options(e), request);
  });
  return launch.done({t});
}

WorkPtr UnjamBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions same;
  static_cast<c10d::AllreduceOptions&>(same) = options;
  return allreduce_coalesced(tensors, same);
}

// torch sends sparse CUDA tensors here, and those of the CPU to allreduce().
WorkPtr UnjamBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);  // which says what to do
}

WorkPtr UnjamBackend::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "unjam: all_reduce was given no tensor");
  TORCH_CHECK_VALUE(!options.sparseIndices.has_value(),
                    "unjam: all_reduce of sparse tensors is not supported: use .to_dense()");
  std::vector<Reduction> reductions;
  for (const at::Tensor& t : tensors) {
    usable(t, "all_reduce");
    TORCH_CHECK_VALUE(t.device() == tensors.front().device(),
                      "unjam: all_reduce: tensors must be on the same device");
    reductions.push_back(reduced_as(t, options.reduceOp, "all_reduce"));
  }
  const bool several = tensors.size() > 1;
  Launch launch(*this, "all_reduce", several ? OpType::ALLREDUCE_COALESCED : OpType::ALLREDUCE,
                tensors.front().device(), !options.asyncOp, options.timeout, several);
  launch.observe({"unjam:all_reduce", several ? "allreduce_coalesced" : "allreduce",
                  several ? "allreduce_coalesced" : "all_reduce"},
                 tensors, tensors);
  launch.call().hold(tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    const auto [e, op] = reductions[i];
    launch.by(op);
    const at::Tensor input = to_reduce(launch.call(), t, options.reduceOp);
    launch.run([&, e = e, op = op](unjamRequest_t* request) {
      return unjamAllReduce(launch.group(), launch.key(), input.data_ptr(), t.data_ptr(),
                            static_cast<std::size_t>(t.numel()) * e.each, e.dtype, op,
                            launch.options(e), request);
    });
  }
  return launch.done(tensors);
}

WorkPtr UnjamBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& t = only(tensors, "reduce");
  const int to = root(options.rootRank, "reduce");
  const auto [e, op] = reduced_as(t, options.reduceOp, "reduce");
  Launch launch(*this, "reduce", OpType::REDUCE, t.device(), !options.asyncOp, options.timeout);
  launch.observe({"unjam:reduce", "reduce", "reduce"}, tensors, tensors);
  launch.call().hold(t);
  launch.by(to);
  launch.by(op);
  const at::Tensor input = to_reduce(launch.call(), t, options.reduceOp);
  launch.run([&, e = e, op = op](unjamRequest_t* request) {
    return unjamReduce(launch.group(), launch.key(), input.data_ptr(), t.data_ptr(),
                       static_cast<std::size_t>(t.numel()) * e.each, e.dtype, op, to,
                       launch.options(e), request);
  });
  return launch.done({t});
}

WorkPtr UnjamBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr UnjamBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  const char* const what = "all_gather_into_tensor";
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "unjam: ", what,
                    " needs as many outputs as inputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    matching(usable(outputs[i], what), usable(inputs[i], what), what);
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * getSize(), "unjam: ", what,
                      ": the output has ", outputs[i].numel(), " elements, and must have ",
                      getSize(), " times the input's ", inputs[i].numel());
  }
  const bool several = inputs.size() > 1;
  Launch launch(*this, what, several ? OpType::COALESCED : OpType::_ALLGATHER_BASE,
                inputs.front().device(), !options.asyncOp, options.timeout, several);
  launch.observe({"unjam:all_gather_into_tensor",
                  several ? "allgather_into_tensor_coalesced" : "_allgather_base",
                  several ? "all_gather_into_tensor_coalesced" : "_all_gather_base"},
                 inputs, outputs);
  launch.call().hold(inputs);
  launch.call().hold(outputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Elements e = moved_as(inputs[i]);
    launch.run([&](unjamRequest_t* request) {
      return unjamAllGather(launch.group(), launch.key(), inputs[i].data_ptr(),
                            outputs[i].data_ptr(),
                            static_cast<std::size_t>(inputs[i].numel()) * e.each, e.dtype,
                            launch.options(e), request);
    });
  }
  return launch.done(outputs);
}

WorkPtr UnjamBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) {
  const char* const what = "all_gather";
  const at::Tensor& input = only(inputs, what);
  const auto ranks = static_cast<std::size_t>(getSize());
  TORCH_CHECK_VALUE(outputs.size() == 1 && outputs.front().size() == ranks, "unjam: ", what,
                    " needs a list of ", ranks, " output tensors, one a rank");
  const Tensors& into = outputs.front();
  for (const at::Tensor& t : into) matching(usable(t, what), input, what);
  const auto me = static_cast<std::size_t>(getRank());
  TORCH_CHECK_VALUE(into[me].numel() == input.numel(), "unjam: ", what, ": rank ", me,
                    "'s own output has ", into[me].numel(), " elements, its input ", input.numel());
  const bool even = same_sizes(into);
  Launch launch(*this, what, OpType::ALLGATHER, input.device(), !options.asyncOp, options.timeout,
                !even);
  // Readers of flight recorders expect pieces of one size, but for "coalesced".
  launch.observe({"unjam:all_gather", "all_gather", even ? "all_gather" : "coalesced"}, inputs,
                 into, false, true);
  launch.call().hold(input);
  launch.call().hold(into);
  if (!even) {
    // Sizes that differ: a broadcast from every rank. They are one operation of the key, in order.
    for (std::size_t r = 0; r < ranks; ++r) {
      const Elements e = moved_as(into[r]);
      launch.run([&](unjamRequest_t* request) {
        return unjamBroadcast(launch.group(), launch.key(),
                              r == me ? input.data_ptr() : into[r].data_ptr(), into[r].data_ptr(),
                              static_cast<std::size_t>(into[r].numel()) * e.each, e.dtype,
                              static_cast<int>(r), launch.options(e), request);
      });
    }
    return launch.done(into);
  }
  void* target = adjacent(into);
  at::Tensor buffer;
  if (target == nullptr) {
    buffer = buffer_for(into);
    target = buffer.data_ptr();
    launch.call().hold(buffer);
  }
  const Elements e = moved_as(input);
  launch.run([&](unjamRequest_t* request) {
    return unjamAllGather(launch.group(), launch.key(), input.data_ptr(), target,
                          static_cast<std::size_t>(input.numel()) * e.each, e.dtype,
                          launch.options(e), request);
  });
  if (!buffer.defined()) return launch.done(into);
  return launch.done(into, [buffer, into] { unpack(buffer, into); });
}

WorkPtr UnjamBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const char* const what = "all_gather_coalesced";
  const auto ranks = static_cast<std::size_t>(getSize());
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == ranks, "unjam: ", what, " needs ", ranks,
                    " lists of output tensors, one a rank");
  // All checks before the first call: one that is refused must not put the ranks out of step.
  std::vector<Tensors> lists(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    usable(inputs[i], what);
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "unjam: ", what,
                        ": every rank's list must have ", inputs.size(), " tensors");
      matching(usable(of_rank[i], what), inputs[i], what);
      TORCH_CHECK_VALUE(of_rank[i].numel() == inputs[i].numel(), "unjam: ", what,
                        ": outputs must be as large as the input");
      lists[i].push_back(of_rank[i]);
    }
  }
  Launch launch(*this, what, OpType::COALESCED, inputs.front().device(), !options.asyncOp,
                options.timeout, true);
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  launch.observe({"unjam:all_gather_coalesced", "all_gather_coalesced", "coalesced"}, inputs, all);
  std::vector<std::pair<at::Tensor, Tensors>> copies;
  launch.call().hold(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor buffer = buffer_for(lists[i]);
    launch.call().hold(lists[i]);
    launch.call().hold(buffer);
    const Elements e = moved_as(inputs[i]);
    launch.run([&](unjamRequest_t* request) {
      return unjamAllGather(launch.group(), launch.key(), inputs[i].data_ptr(), buffer.data_ptr(),
                            static_cast<std::size_t>(inputs[i].numel()) * e.each, e.dtype,
                            launch.options(e), request);
    });
    copies.emplace_back(buffer, std::move(lists[i]));
  }
  return launch.done(all, [copies] {
    for (const auto& [buffer, into] : copies) unpack(buffer, into);
  });
}

WorkPtr UnjamBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) {
  const char* const what = "gather";
  const at::Tensor& input = only(inputs, what);
  const int to = root(options.rootRank, what);
  const auto ranks = static_cast<std::size_t>(getSize());
  Tensors into;
  if (getRank() == to) {
    TORCH_CHECK_VALUE(outputs.size() == 1 && outputs.front().size() == ranks, "unjam: ", what,
                      ": the root needs a list of ", ranks, " output tensors, one a rank");
    into = outputs.front();
    for (const at::Tensor& t : into) {
      matching(usable(t, what), input, what);
      TORCH_CHECK_VALUE(t.numel() == input.numel(), "unjam: ", what,
                        ": outputs must be as large as the input");
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs.front().empty(), "unjam: ", what,
                      ": only the root gives outputs");
  }
  Launch launch(*this, what, OpType::GATHER, input.device(), !options.asyncOp, options.timeout);
  launch.observe({"unjam:gather", "gather", "gather"}, inputs, into, false, true);
  launch.call().hold(input);
  launch.call().hold(into);
  launch.by(to);
  at::Tensor buffer;
  void* target = into.empty() ? nullptr : adjacent(into);
  if (!into.empty() && target == nullptr) {
    buffer = buffer_for(into);
    target = buffer.data_ptr();
    launch.call().hold(buffer);
  }
  const Elements e = moved_as(input);
  launch.run([&](unjamRequest_t* request) {
    return unjamGather(launch.group(), launch.key(), input.data_ptr(), target,
                       static_cast<std::size_t>(input.numel()) * e.each, e.dtype, to,
                       launch.options(e), request);
  });
  if (!buffer.defined()) return launch.done(into);
  return launch.done(into, [buffer, into] { unpack(buffer, into); });
}

WorkPtr UnjamBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) {
  const char* const what = "scatter";
  const at::Tensor& output = only(outputs, what);
  const int from = root(options.rootRank, what);
  const auto ranks = static_cast<std::size_t>(getSize());
  Launch launch(*this, what, OpType::SCATTER, output.device(), !options.asyncOp, options.timeout);
  launch.observe({"unjam:scatter", "scatter", "scatter"},
                 getRank() == from && !inputs.empty() ? inputs.front() : Tensors{}, outputs, true);
  launch.call().hold(output);
  launch.by(from);
  const void* source = nullptr;
  if (getRank() == from) {
    TORCH_CHECK_VALUE(inputs.size() == 1 && inputs.front().size() == ranks, "unjam: ", what,
                      ": the root needs a list of ", ranks, " input tensors, one a rank");
    const Tensors& given = inputs.front();
    for (const at::Tensor& t : given) {
      matching(usable(t, what), output, what);
      TORCH_CHECK_VALUE(t.numel() == output.numel(), "unjam: ", what,
                        ": inputs must be as large as the output");
    }
    launch.call().hold(given);
    source = adjacent(given);
    if (source == nullptr) {
      const at::Tensor buffer = buffer_for(given);
      for (std::size_t i = 0; i < ranks; ++i) part_like(buffer, given[i], i).copy_(given[i]);
      launch.call().hold(buffer);
      source = buffer.data_ptr();
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs.front().empty(), "unjam: ", what,
                      ": only the root gives inputs");
  }
  const Elements e = moved_as(output);
  launch.run([&](unjamRequest_t* request) {
    return unjamScatter(launch.group(), launch.key(), source, output.data_ptr(),
                        static_cast<std::size_t>(output.numel()) * e.each, e.dtype, from,
                        launch.options(e), request);
  });
  return launch.done({output});
}

WorkPtr UnjamBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr UnjamBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  const char* const what = "reduce_scatter_tensor";
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "unjam: ", what,
                    " needs as many outputs as inputs");
  std::vector<Reduction> reductions;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    matching(usable(outputs[i], what), usable(inputs[i], what), what);
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * getSize(), "unjam: ", what,
                      ": the input has ", inputs[i].numel(), " elements, and must have ", getSize(),
                      " times the output's ", outputs[i].numel());
    reductions.push_back(reduced_as(inputs[i], options.reduceOp, what));
  }
  const bool several = inputs.size() > 1;
  Launch launch(*this, what, several ? OpType::COALESCED : OpType::_REDUCE_SCATTER_BASE,
                inputs.front().device(), !options.asyncOp, options.timeout, several);
  launch.observe({"unjam:reduce_scatter_tensor",
                  several ? "reduce_scatter_tensor_coalesced" : "_reduce_scatter_base",
                  several ? "reduce_scatter_tensor_coalesced" : "_reduce_scatter_base"},
                 inputs, outputs);
  launch.call().hold(inputs);
  launch.call().hold(outputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto [e, op] = reductions[i];
    launch.by(op);
    const at::Tensor input = to_reduce(launch.call(), inputs[i], options.reduceOp);
    launch.run([&, e = e, op = op](unjamRequest_t* request) {
      return unjamReduceScatter(launch.group(), launch.key(), input.data_ptr(),
                                outputs[i].data_ptr(),
                                static_cast<std::size_t>(outputs[i].numel()) * e.each, e.dtype, op,
                                launch.options(e), request);
    });
  }
  return launch.done(outputs);
}

WorkPtr UnjamBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  const char* const what = "reduce_scatter";
  const at::Tensor& output = only(outputs, what);
  const auto ranks = static_cast<std::size_t>(getSize());
  TORCH_CHECK_VALUE(inputs.size() == 1 && inputs.front().size() == ranks, "unjam: ", what,
                    " needs a list of ", ranks, " input tensors, one a rank");
  Tensors given = inputs.front();
  for (const at::Tensor& t : given) matching(usable(t, what), output, what);
  const auto me = static_cast<std::size_t>(getRank());
  TORCH_CHECK_VALUE(given[me].numel() == output.numel(), "unjam: ", what, ": rank ", me,
                    "'s own input has ", given[me].numel(), " elements, its output ",
                    output.numel());
  const auto [e, op] = reduced_as(output, options.reduceOp, what);  // says what it cannot
  const bool premul = options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM;
  const bool even = same_sizes(given);
  Launch launch(*this, what, OpType::REDUCE_SCATTER, output.device(), !options.asyncOp,
                options.timeout, !even);
  launch.observe({"unjam:reduce_scatter", "reduce_scatter", even ? "reduce_scatter" : "coalesced"},
                 given, outputs, true);
  launch.call().hold(given);
  launch.call().hold(output);
  launch.by(op);
  if (!even) {
    // Sizes that differ: a reduction to every rank, one operation of the key, in order.
    for (std::size_t r = 0; r < ranks; ++r) {
      given[r] = to_reduce(launch.call(), given[r], options.reduceOp);
      const auto [e, op] = reduced_as(given[r], options.reduceOp, what);
      launch.run([&, e = e, op = op](unjamRequest_t* request) {
        return unjamReduce(launch.group(), launch.key(), given[r].data_ptr(),
                           r == me ? output.data_ptr() : nullptr,
                           static_cast<std::size_t>(given[r].numel()) * e.each, e.dtype, op,
                           static_cast<int>(r), launch.options(e), request);
      });
    }
    return launch.done({output});
  }
  const void* source = premul ? nullptr : adjacent(given);
  if (source == nullptr) {
    const at::Tensor buffer = buffer_for(given);
    for (std::size_t i = 0; i < ranks; ++i) part_like(buffer, given[i], i).copy_(given[i]);
    if (premul) premultiply(buffer, options.reduceOp);
    launch.call().hold(buffer);
    source = buffer.data_ptr();
  }
  launch.run([&, e = e, op = op](unjamRequest_t* request) {
    return unjamReduceScatter(launch.group(), launch.key(), source, output.data_ptr(),
                              static_cast<std::size_t>(output.numel()) * e.each, e.dtype, op,
                              launch.options(e), request);
  });
  return launch.done({output});
}

// Every rank sends something to every other: pairs that need not agree with each other on sizes.
// A barrier under the caller's key goes with them: it is there that the operation meets others of
// the key, so that a rank that has called something else (the form without split sizes, which is
// one collective) is told from one that is late.
WorkPtr UnjamBackend::exchange(Launch& launch, const Tensors& received, const Tensors& sent) {
  const auto me = static_cast<std::size_t>(getRank());
  TORCH_CHECK_VALUE(received[me].numel() == sent[me].numel(), "unjam: ", launch.call().what(),
                    ": rank ", me, " sends itself ", sent[me].numel(), " elements and receives ",
                    received[me].numel());
  if (getSize() > 1) {
    launch.run([&](unjamRequest_t* request) {
      return unjamBarrier(launch.group(), launch.common_key(), launch.options(kInPairs), request);
    });
    launch.call().set_first_decides();
  }
  for (int step = 0; step < getSize(); ++step) {
    // Not all to rank 0 first.
    const int to = (getRank() + step) % getSize();
    const int from = (getRank() - step + getSize()) % getSize();
    const at::Tensor& out = sent[static_cast<std::size_t>(to)];
    const at::Tensor& in = received[static_cast<std::size_t>(from)];
    if (step == 0) {
      in.copy_(out.view_as(in));
      continue;
    }
    launch.run([&, e = moved_as(out)](unjamRequest_t* request) {
      return unjamSend(launch.group(), launch.key(), out.data_ptr(),
                       static_cast<std::size_t>(out.numel()) * e.each, e.dtype, to,
                       launch.options(e), request);
    });
    launch.run([&, e = moved_as(in)](unjamRequest_t* request) {
      return unjamRecv(launch.group(), launch.key(), in.data_ptr(),
                       static_cast<std::size_t>(in.numel()) * e.each, e.dtype, from,
                       launch.options(e), request);
    });
  }
  // Alone: only the copy to itself.
  if (!launch.call().has_requests() && launch.call().device().is_cuda()) {
    launch.call().set_ends_here();
  }
  return launch.done(received);
}

WorkPtr UnjamBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<std::int64_t>& received,
                                    std::vector<std::int64_t>& sent,
                                    const c10d::AllToAllOptions& options) {
  const char* const what = "all_to_all_single";
  matching(usable(output, what), usable(input, what), what);
  const bool even = received.empty() && sent.empty();
  Launch launch(*this, what, OpType::ALLTOALL_BASE, input.device(), !options.asyncOp,
                options.timeout, !even, even ? "" : kPairs);
  launch.observe({"unjam:all_to_all_single", even ? "all_to_all" : "all_to_allv", "all_to_all"},
                 {input}, {output}, false, false, sent, received);
  launch.call().hold(input);
  launch.call().hold(output);
  if (even) {
    TORCH_CHECK_VALUE(input.numel() == output.numel(), "unjam: ", what, ": the input has ",
                      input.numel(), " elements, the output ", output.numel(),
                      ": without split sizes they must be equal");
    TORCH_CHECK_VALUE(input.dim() > 0 && input.size(0) % getSize() == 0, "unjam: ", what,
                      ": the first dimension, ", input.dim() > 0 ? input.size(0) : 1,
                      ", is not a multiple of ", getSize(), " ranks: give split sizes");
    const Elements e = moved_as(input);
    launch.run([&](unjamRequest_t* request) {
      return unjamAllToAll(launch.group(), launch.key(), input.data_ptr(), output.data_ptr(),
                           static_cast<std::size_t>(input.numel() / getSize()) * e.each, e.dtype,
                           launch.options(e), request);
    });
    return launch.done({output});
  }
  const auto cut = [&](const at::Tensor& whole, const std::vector<std::int64_t>& splits,
                       const char* which) {
    std::vector<std::int64_t> rows = splits;
    if (rows.empty()) {
      TORCH_CHECK_VALUE(whole.size(0) % getSize() == 0, "unjam: ", what, ": the ", which,
                        "'s first dimension, ", whole.size(0), ", is not a multiple of ", getSize(),
                        " ranks: give split sizes");
      rows.assign(static_cast<std::size_t>(getSize()), whole.size(0) / getSize());
    }
    const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    TORCH_CHECK_VALUE(static_cast<int>(rows.size()) == getSize() && sum == whole.size(0),
                      "unjam: ", what, ": the ", which, " split sizes must be ", getSize(),
                      " numbers whose sum is its first dimension, ", whole.size(0));
    Tensors segments;
    std::int64_t at = 0;
    for (const std::int64_t n : rows) {
      TORCH_CHECK_VALUE(n >= 0, "unjam: ", what, ": a split size is negative: ", n);
      segments.push_back(whole.narrow(0, at, n));
      at += n;
    }
    return segments;
  };
  WorkPtr work = exchange(launch, cut(output, received, "output"), cut(input, sent, "input"));
  return work;
}

WorkPtr UnjamBackend::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& options) {
  const char* const what = "all_to_all";
  TORCH_CHECK_VALUE(static_cast<int>(inputs.size()) == getSize() && inputs.size() == outputs.size(),
                    "unjam: ", what, " needs ", getSize(), " inputs and outputs, one a rank");
  Tensors received, sent;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    matching(usable(outputs[r], what), usable(inputs[r], what), what);
    matching(inputs[r], inputs.front(), what);
    received.push_back(outputs[r]);
    sent.push_back(inputs[r]);
  }
  Launch launch(*this, what, OpType::ALLTOALL, inputs.front().device(), !options.asyncOp,
                options.timeout, true, kPairs);
  launch.observe({"unjam:all_to_all", "all_to_all", "all_to_all"}, inputs, outputs, true, true);
  launch.call().hold(inputs);
  launch.call().hold(outputs);
  return exchange(launch, received, sent);
}

// ---- point to point ----

WorkPtr UnjamBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& t = only(tensors, "send");
  peer(to, "send");
  Launch launch(*this, "send", OpType::SEND, t.device(), false, c10d::kUnsetTimeout, false,
                tag_key(tag));
  launch.between(getRank(), to);
  launch.observe({"unjam:send", "send", "send"}, tensors, {});
  launch.call().hold(t);
  const Elements e = moved_as(t);
  launch.run([&](unjamRequest_t* request) {
    return unjamSend(launch.group(), launch.key(), t.data_ptr(),
                     static_cast<std::size_t>(t.numel()) * e.each, e.dtype, to, launch.options(e),
                     request);
  });
  return launch.done({t});
}

WorkPtr UnjamBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& t = only(tensors, "recv");
  peer(from, "recv");
  Launch launch(*this, "recv", OpType::RECV, t.device(), false, c10d::kUnsetTimeout, false,
                tag_key(tag));
  launch.call().hold(t);
  launch.call().set_source_rank(from);
  launch.between(from, getRank());
  launch.observe({"unjam:recv", "recv", "recv"}, {}, tensors);
  const Elements e = moved_as(t);
  launch.run([&](unjamRequest_t* request) {
    return unjamRecv(launch.group(), launch.key(), t.data_ptr(),
                     static_cast<std::size_t>(t.numel()) * e.each, e.dtype, from, launch.options(e),
                     request);
  });
  return launch.done({t});
}

WorkPtr UnjamBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& t = only(tensors, "recv");
  Launch launch(*this, "recv from any source", OpType::RECVANYSOURCE, t.device(), false,
                c10d::kUnsetTimeout, false, tag_key(tag));
  launch.call().hold(t);
  launch.observe({"unjam:recv", "recvAnySource", "recv"}, {}, tensors);
  launch.call().set_open();
  const Elements e = moved_as(t);
  std::shared_ptr<c10::Event> called;
  if (t.is_cuda()) {
    TORCH_CHECK_WITH(DistBackendError, !stream_is_captured(),
                     "unjam: recv from any source: the stream is being captured, and unjam's calls "
                     "cannot be part of a CUDA graph yet: make the call outside of the capture");
    called = std::make_shared<c10::Event>(t.device().type());
    called->record(current_stream(t.device()));
  }
  WorkPtr work = launch.done({t});
  AnySource::get().add({this, launch.share(), launch.groups(), launch.group(), launch.key(), t,
                        static_cast<std::size_t>(t.numel()) * e.each, e.dtype, e.match_text,
                        getSize(), std::move(called)});
  return work;
}

WorkPtr UnjamBackend::barrier(const c10d::BarrierOptions& options) {
  // torch names the CPU where a group serves both. What this rank has queued on its GPU belongs in
  // front of the barrier in any case, and wait() blocks the host: as with NCCL.
  const int gpu = groups()->world().cuda_device();
  const at::Device device =
      gpu >= 0 ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)) : at::Device(at::kCPU);
  Launch launch(*this, "barrier", OpType::BARRIER, device, false, options.timeout);
  launch.observe({"unjam:barrier", "barrier", "all_reduce_barrier"}, {}, {});
  launch.call().set_blocks_host();
  launch.run([&](unjamRequest_t* request) {
    return unjamBarrier(launch.group(), launch.key(), launch.options(), request);
  });
  return launch.done({});
}

}  // namespace unjam_torch
