// How much of one sort of work goes on beside another, from when each piece began and ended.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace async_ring {

struct Span {
  double begin = 0, end = 0;
};

// Spans that touch or overlap become one, in order.
inline std::vector<Span> merged(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> all;
  for (const Span& s : spans) {
    if (s.end <= s.begin) continue;
    if (!all.empty() && s.begin <= all.back().end) {
      all.back().end = std::max(all.back().end, s.end);
    } else {
      all.push_back(s);
    }
  }
  return all;
}

inline double length(const std::vector<Span>& spans) {
  double sum = 0;
  for (const Span& s : merged(spans)) sum += s.end - s.begin;
  return sum;
}

// The time in which both sorts are under way.
inline double length_of_both(const std::vector<Span>& a, const std::vector<Span>& b) {
  const std::vector<Span> x = merged(a), y = merged(b);
  double sum = 0;
  for (std::size_t i = 0, j = 0; i < x.size() && j < y.size();) {
    sum += std::max(0.0, std::min(x[i].end, y[j].end) - std::max(x[i].begin, y[j].begin));
    x[i].end < y[j].end ? ++i : ++j;
  }
  return sum;
}

}  // namespace async_ring
