// Where packets are lines: by what NVML tells of the machine's GPUs.
#include "device/cuda/host/nvlink.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace unjam {
namespace {

// All linked with all.
std::vector<SeenGpu> machine(const std::vector<std::string>& names) {
  std::vector<SeenGpu> gpus;
  for (const std::string& name : names) {
    gpus.push_back({name, std::vector<bool>(gpus.size(), true)});
  }
  return gpus;
}

TEST(Nvlink, LinesComeWholeBetweenGpusThatWereTested) {
  for (const char* name : {"NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 NVL", "H200"}) {
    for (const std::size_t n : {2u, 4u, 8u}) {
      const NvlinkAnswer answer = judge_links(machine(std::vector<std::string>(n, name)));
      EXPECT_TRUE(answer.whole_lines) << name << ", " << n << ": " << answer.why;
    }
  }
  EXPECT_TRUE(judge_links(machine({"NVIDIA H100 80GB HBM3", "NVIDIA H200"})).whole_lines);
}

TEST(Nvlink, NotBetweenOthers) {
  for (const char* name : {"NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB", "NVIDIA B200",
                           "NVIDIA H1000", "NVIDIA H20", ""}) {
    const NvlinkAnswer answer = judge_links(machine({"NVIDIA H200", name}));
    EXPECT_FALSE(answer.whole_lines) << name;
    EXPECT_NE(answer.why.find("GPU 1"), std::string::npos) << answer.why;
  }
  EXPECT_FALSE(judge_links({}).whole_lines);
  EXPECT_FALSE(judge_links(machine({"NVIDIA H200"})).whole_lines);
}

TEST(Nvlink, NotWhereALinkIsMissing) {
  for (std::size_t i = 1; i < 4; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      std::vector<SeenGpu> gpus = machine(std::vector<std::string>(4, "NVIDIA H100 80GB HBM3"));
      gpus[i].linked[j] = false;
      const NvlinkAnswer answer = judge_links(gpus);
      EXPECT_FALSE(answer.whole_lines);
      EXPECT_EQ(answer.why,
                "GPU " + std::to_string(i) + " has no NVLink to GPU " + std::to_string(j));
    }
  }
}

}  // namespace
}  // namespace unjam
