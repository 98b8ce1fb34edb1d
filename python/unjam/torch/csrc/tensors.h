// What a tensor is to unjam: which data type its elements are moved or reduced as, and what cannot
// be done with it, in words.
#pragma once

#include <ATen/ATen.h>

#include <charconv>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "unjam/unjam.h"

namespace unjam_torch {

// One tensor element is `each` elements of `dtype`.
struct Elements {
  unjamDataType_t dtype = UNJAM_UINT8;
  std::size_t each = 1;
  // What the ranks must agree on beside that, in words; most types are what they travel as.
  std::string match_text;
  void also(const std::string& words) { match_text += (match_text.empty() ? "" : " ") + words; }
};

inline std::optional<unjamDataType_t> native_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return UNJAM_INT8;
    case at::kByte:
    case at::kBool:
      return UNJAM_UINT8;
    case at::kInt:
      return UNJAM_INT32;
    case at::kUInt32:
      return UNJAM_UINT32;
    case at::kLong:
      return UNJAM_INT64;
    case at::kUInt64:
      return UNJAM_UINT64;
    case at::kHalf:
      return UNJAM_FLOAT16;
    case at::kBFloat16:
      return UNJAM_BFLOAT16;
    case at::kFloat:
    case at::kComplexFloat:
      return UNJAM_FLOAT32;
    case at::kDouble:
    case at::kComplexDouble:
      return UNJAM_FLOAT64;
    case at::kFloat8_e4m3fn:
      return UNJAM_FLOAT8_E4M3;
    case at::kFloat8_e5m2:
      return UNJAM_FLOAT8_E5M2;
    default:
      return std::nullopt;
  }
}

// How elements travel that are only moved, which every type can be. Complex ones travel as the real
// numbers in them, for so torch's own functions hand most of them over.
inline Elements moved_as(at::ScalarType type) {
  const auto native = native_type(type);
  if (native && type != at::kBool) {
    return {*native, c10::isComplexType(type) ? std::size_t{2} : std::size_t{1}, ""};
  }
  const std::string name(c10::getDtypeNames(type).first);  // a string or a view of one
  return {native.value_or(UNJAM_UINT8), native ? std::size_t{1} : c10::elementSize(type), name};
}

// They travel as they lie in memory, so ranks must agree on that, too. (Of a usable() tensor.)
inline Elements moved_as(const at::Tensor& tensor) {
  Elements e = moved_as(tensor.scalar_type());
  if (!tensor.is_contiguous()) e.also("channels last");
  return e;
}

// A factor of PREMUL_SUM that is a tensor may lie on a GPU: to read it would wait for the GPU.
inline std::string factor_text(const c10d::ReduceOp& reduce) {
  const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
  if (factor == nullptr || factor->tensor_factor.defined()) return "a tensor";
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), factor->double_factor);
  return error == std::errc() ? std::string(text, end) : "a number";
}

struct Reduction {
  Elements elements;
  unjamOp_t op = UNJAM_SUM;
};

// How elements are reduced. Booleans as torch's NCCL backend has them: a sum is "or", a product is
// "and". Throws where torch defines nothing, or unjam has nothing.
inline Reduction reduced_as(const at::Tensor& tensor, const c10d::ReduceOp& reduce,
                            const char* what) {
  using Op = c10d::ReduceOp;
  const at::ScalarType type = tensor.scalar_type();
  const auto native = native_type(type);
  TORCH_CHECK_TYPE(native.has_value(), "unjam: ", what, " of ", type,
                   " tensors: convert them to a type that can be reduced (int8, uint8, int32, "
                   "int64, float16, bfloat16, float32, float64, complex, bool, float8)");
  Reduction r;
  r.elements = moved_as(tensor);
  const bool logical = type == at::kBool;
  switch (reduce.op_) {
    case Op::SUM:
      r.op = logical ? UNJAM_MAX : UNJAM_SUM;
      break;
    case Op::PREMUL_SUM:
      TORCH_CHECK_TYPE(at::isFloatingType(type) || at::isComplexType(type), "unjam: ", what,
                       " with PREMUL_SUM needs a floating-point tensor, not ", type);
      r.op = UNJAM_SUM;
      r.elements.also("premul_sum " + factor_text(reduce));
      break;
    case Op::AVG:
      TORCH_CHECK_TYPE(!logical, "unjam: ", what,
                       " cannot average bool tensors: convert them, or use SUM, MIN or MAX");
      r.op = UNJAM_AVG;
      break;
    case Op::PRODUCT:
      r.op = logical ? UNJAM_MIN : UNJAM_PROD;
      break;
    case Op::MIN:
      r.op = UNJAM_MIN;
      break;
    case Op::MAX:
      r.op = UNJAM_MAX;
      break;
    case Op::BAND:
    case Op::BOR:
    case Op::BXOR:
      TORCH_CHECK_VALUE(logical && reduce.op_ != Op::BXOR, "unjam: ", what,
                        " has no bitwise reductions (of bool tensors BAND and BOR): use SUM, MIN "
                        "or MAX, or gather and combine");
      r.op = reduce.op_ == Op::BAND ? UNJAM_MIN : UNJAM_MAX;
      break;
    default:
      TORCH_CHECK_VALUE(false, "unjam: ", what, ": unknown reduction ",
                        static_cast<int>(reduce.op_));
  }
  TORCH_CHECK_TYPE(!at::isComplexType(type) || c10d::isComplexViewAsRealAllowed(reduce),
                   "unjam: ", what, " of complex tensors can sum and average only");
  return r;
}

// A tensor that a collective can read or write where it lies.
inline const at::Tensor& usable(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.defined(), "unjam: ", what, " was given an undefined tensor");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "unjam: ", what, " needs a dense tensor, not ",
                   tensor.layout(), ": use .to_dense()");
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "unjam: ", what,
                    " needs a contiguous tensor; this one has sizes ", tensor.sizes(),
                    " and strides ", tensor.strides(), ": use .contiguous()");
  return tensor;
}

inline const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "unjam: ", what,
                    " works on one tensor a rank, and was given ", tensors.size());
  return usable(tensors.front(), what);
}

// Two usable tensors, of which one is to get what the other has, or a part of it.
inline void matching(const at::Tensor& a, const at::Tensor& b, const char* what) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "unjam: ", what,
                   ": tensors must have the same type, and have ", a.scalar_type(), " and ",
                   b.scalar_type());
  TORCH_CHECK_VALUE(a.device() == b.device(), "unjam: ", what,
                    ": tensors must be on the same device, and are on ", a.device(), " and ",
                    b.device());
  // A tensor without elements is contiguous in any order.
  TORCH_CHECK_VALUE(
      a.is_contiguous() == b.is_contiguous() || a.numel() == 0 || b.numel() == 0, "unjam: ", what,
      ": elements travel as they lie in memory, and of the tensors with sizes ", a.sizes(), " and ",
      b.sizes(), " one is channels last, the other is not: use ", ".contiguous(memory_format=…)");
}

inline bool same_sizes(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) {
    if (t.numel() != tensors.front().numel()) return false;
  }
  return true;
}

}  // namespace unjam_torch
