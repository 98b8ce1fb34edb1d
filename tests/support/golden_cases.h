// The grid of requests and limits over which plans, and what is made of them, are compared with
// committed files (tests/fixtures/golden_*.txt).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "plan/registry.h"
#include "plan/selector.h"

namespace unjam_test {

using unjam::Algorithm;
using unjam::Device;
using unjam::DType;
using unjam::Kind;
using unjam::PlanLimits;
using unjam::PlanRequest;

inline constexpr int kMostGoldenRanks = 8;

// Sizes: one element; fewer than a piece of 16 bytes a rank; packets and lines; slots of several
// chunks, with parts of several lengths.
struct GoldenData {
  const char* name;
  std::uint64_t count;
  DType dtype;
};
inline constexpr GoldenData kGoldenData[] = {
    {"1", 1, DType::kFloat64},         {"37", 37, DType::kInt8},
    {"80K", 40'960, DType::kBfloat16}, {"400K", 100'003, DType::kFloat32},
    {"12M", 3'000'001, DType::kInt32},
};

struct NamedLimits {
  const char* name;
  PlanLimits limits;
};
// The first of each device are its settings where nobody says otherwise.
inline std::vector<NamedLimits> golden_limits(int ranks) {
  const std::uint32_t line_slot = ranks <= 2 ? 149'824 : 74'944;
  PlanLimits host;
  host.pool_slot_bytes = 4 * host.guaranteed_slot_bytes;
  PlanLimits lanes = host;
  lanes.lanes = 4;
  lanes.guaranteed_slots = 4;
  lanes.overlap = true;
  PlanLimits few = host;
  few.lanes = 2;
  few.guaranteed_slots = 2;
  few.guaranteed_slot_bytes = 4096;
  PlanLimits cuda;
  cuda.device = Device::kCuda;
  cuda.lanes = 32;
  cuda.guaranteed_slots = 4;
  cuda.guaranteed_slot_bytes = cuda.packet_slot_bytes = line_slot;
  cuda.pool_slot_bytes = ranks <= 2 ? 2 * line_slot : 4 * line_slot;
  cuda.overlap = cuda.lines = true;
  PlanLimits packets = cuda;
  packets.lanes = 8;
  packets.guaranteed_slot_bytes *= 4;
  packets.pool_slot_bytes *= 4;
  packets.lines = false;
  PlanLimits together = cuda;
  together.guaranteed_slots = 6;
  together.guaranteed_slot_bytes = together.packet_slot_bytes = 65'536;
  together.pool_slot_bytes = 262'144;
  together.together = true;
  return {{"host", host}, {"host-lanes", lanes},     {"host-few", few},
          {"cuda", cuda}, {"cuda-packets", packets}, {"cuda-together", together}};
}

struct GoldenCase {
  PlanRequest request;
  PlanLimits limits;
  Algorithm algorithm = Algorithm::kRing;
  std::string name;  // "all_reduce ring host 4 ranks 80K"
};

inline bool is_golden_case(Kind kind, const PlanLimits& limits, const GoldenData& data, int ranks) {
  if (kind == Kind::kBarrier) return data.count == 1;
  // Of the host's short slots the size before is many chunks.
  if (limits.device == Device::kHost && data.count > 1'000'000) return false;
  return kind != Kind::kSendRecv || ranks == 2;
}

// What unjam::select_algorithm() takes, in place of an algorithm's name, in `table`: a row of names
// for 2, 3, … ranks.
inline void add_golden_cases(std::vector<GoldenCase>* cases,
                             std::map<std::string, std::string>* table) {
  for (int k = 0; k < unjam::kNumKinds; ++k) {
    for (int ranks = 2; ranks <= kMostGoldenRanks; ++ranks) {
      for (const auto& [limits_name, limits] : golden_limits(ranks)) {
        for (const GoldenData& data : kGoldenData) {
          GoldenCase c;
          c.request.kind = static_cast<Kind>(k);
          if (!is_golden_case(c.request.kind, limits, data, ranks)) continue;
          c.request.dtype = data.dtype;
          c.request.count = data.count;
          c.request.ranks = ranks;
          c.request.root = ranks / 2;
          c.limits = limits;
          const std::string kind = unjam::to_string(c.request.kind);
          (*table)[kind + " auto " + limits_name + " " + data.name] +=
              std::string(" ") + unjam::to_string(unjam::select_algorithm(c.request, limits));
          for (int a = 0; a < unjam::kNumAlgorithms; ++a) {
            c.algorithm = static_cast<Algorithm>(a);
            if (!unjam::row_of(c.algorithm).serves(c.request.kind)) continue;
            c.name = kind + " " + unjam::to_string(c.algorithm) + " " + limits_name + " " +
                     std::to_string(ranks) + " ranks " + data.name;
            cases->push_back(c);
          }
        }
      }
    }
  }
}

// A file of tests/fixtures, of the repository that the working folder is in: a build folder, or
// above.
inline std::filesystem::path fixture(const std::string& name) {
  const std::filesystem::path fixtures = "tests/fixtures";
  std::filesystem::path folder = std::filesystem::current_path();
  while (!exists(folder / fixtures) && folder.has_relative_path()) folder = folder.parent_path();
  return folder / fixtures / name;
}

}  // namespace unjam_test
