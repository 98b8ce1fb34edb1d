// Geometry's parts by lanes: the lanes cover each part exactly, each lane has data of one part
// alone, and makes as many loops as that part's stretch needs.
#include "program/geometry.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace unjam {
namespace {

// None, fewer elements than a unit of alignment, fewer units than lanes, odd ones, and many.
constexpr std::uint64_t kCounts[] = {0, 1, 3, 4, 5, 17, 63, 64, 65, 1001, 5003, 100003};

Geometry by_lanes(std::uint64_t count, std::uint32_t parts, std::uint32_t lanes,
                  DType dtype = DType::kFloat32) {
  Geometry g;
  g.count = count;
  g.dtype = dtype;
  g.parts = parts;
  g.lanes = static_cast<std::uint16_t>(lanes);
  g.chunk = 64;
  g.by_lane = true;
  return g;
}

// Does f(geometry) for all counts, parts, lanes, first lanes and two types.
template <class F>
void for_all(const F& f) {
  for (const DType dtype : {DType::kFloat32, DType::kInt8}) {
    for (std::uint32_t parts = 1; parts <= 4; ++parts) {
      for (std::uint32_t lanes = parts; lanes <= 9; ++lanes) {
        for (const std::uint16_t first : {0, 1, 5}) {
          for (const std::uint64_t count : kCounts) {
            SCOPED_TRACE(std::to_string(count) + " elements, " + std::to_string(parts) +
                         " parts, " + std::to_string(lanes) + " lanes from " +
                         std::to_string(first));
            Geometry g = by_lanes(count, parts, lanes, dtype);
            g.first_lane = first;
            f(g);
            if (testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(PartsByLanes, CoverTheVectorOnce) {
  for_all([](const Geometry& g) {
    std::vector<int> times(g.count);
    for (std::uint32_t p = 0; p < g.parts; ++p) {
      const Range part = g.part(p);
      std::uint64_t next = part.offset;
      for (std::uint32_t lane = g.first_lane; lane < std::uint32_t{g.first_lane} + g.lanes;
           ++lane) {
        const Range r = g.lane_part(p, lane);
        if (r.length == 0) continue;
        ASSERT_EQ((lane - g.first_lane) % g.parts, p) << "lane " << lane << " has another's part";
        ASSERT_EQ(r.offset, next) << "lane " << lane;
        ASSERT_EQ(r.offset % g.align(), 0u);
        next = r.offset + r.length;
        for (std::uint64_t i = r.offset; i < next; ++i) ++times[i];
      }
      ASSERT_EQ(next, part.offset + part.length) << "part " << p;
    }
    for (std::uint64_t i = 0; i < g.count; ++i) ASSERT_EQ(times[i], 1) << "element " << i;
  });
}

TEST(PartsByLanes, AreCutIntoChunks) {
  for_all([](const Geometry& g) {
    for (std::uint32_t lane = g.first_lane; lane < std::uint32_t{g.first_lane} + g.lanes; ++lane) {
      const std::uint32_t mine = g.longest_part_of(lane);
      ASSERT_EQ(mine, (lane - g.first_lane) % g.parts);
      const Range stretch = g.lane_part(mine, lane);
      ASSERT_EQ(g.loops(lane), (stretch.length + g.chunk - 1) / g.chunk);
      std::uint64_t elements = 0;
      for (std::uint64_t loop = 0; loop < g.loops(lane); ++loop) {
        const Range chunk = g.chunk_range(mine, lane, loop);
        ASSERT_NE(chunk.length, 0u);
        ASSERT_EQ(chunk.offset, stretch.offset + elements);
        elements += chunk.length;
      }
      ASSERT_EQ(elements, stretch.length);
      ASSERT_EQ(g.chunk_range(mine, lane, g.loops(lane)).length, 0u);
    }
  });
}

// Those of one part differ by less than two units (the vector's last one may be cut short), the
// longer ones first.
TEST(PartsByLanes, AreSharedEvenly) {
  for_all([](const Geometry& g) {
    for (std::uint32_t p = 0; p < g.parts; ++p) {
      const std::uint32_t first = g.first_lane + p;
      std::uint64_t before = g.lane_part(p, first).length;
      const std::uint64_t longest = before;
      for (std::uint32_t lane = first; lane < std::uint32_t{g.first_lane} + g.lanes;
           lane += g.parts) {
        const std::uint64_t length = g.lane_part(p, lane).length;
        ASSERT_LE(length, before);
        ASSERT_LT(longest - length, 2 * g.align());
        before = length;
      }
    }
  });
}

TEST(PartsByLanes, OfOnePartAreAsOtherLanes) {
  for (const std::uint64_t count : kCounts) {
    for (std::uint32_t lanes = 1; lanes <= 9; ++lanes) {
      const Geometry g = by_lanes(count, 1, lanes);
      Geometry other = g;
      other.by_lane = false;
      for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        EXPECT_EQ(g.lane_part(0, lane).offset, other.lane_part(0, lane).offset);
        EXPECT_EQ(g.lane_part(0, lane).length, other.lane_part(0, lane).length);
        EXPECT_EQ(g.loops(lane), other.loops(lane));
      }
    }
  }
}

// Without it each lane has a share of every part.
TEST(PartsByLanes, AreAskedFor) {
  Geometry g = by_lanes(1001, 2, 4);
  EXPECT_EQ(g.lane_part(1, 0).length, 0u);
  EXPECT_EQ(g.lane_part(0, 0).length + g.lane_part(0, 2).length, g.part(0).length);
  g.by_lane = false;
  for (std::uint32_t lane = 0; lane < 4; ++lane) {
    EXPECT_NE(g.lane_part(0, lane).length, 0u);
    EXPECT_NE(g.lane_part(1, lane).length, 0u);
    EXPECT_EQ(g.longest_part_of(lane), 0u);
  }
}

}  // namespace
}  // namespace unjam
