// What was measured of one all-reduce at one size; as a line between two processes, and as JSON.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace async_ring {

struct Quartiles {
  double low = 0, median = 0, high = 0;
};
inline Quartiles quartiles(std::vector<double> v) {
  if (v.empty()) return {};
  std::sort(v.begin(), v.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(v.size() - 1);
    const auto k = static_cast<std::size_t>(place);
    const double next = v[std::min(k + 1, v.size() - 1)];
    return v[k] + (next - v[k]) * (place - static_cast<double>(k));
  };
  return {at(0.25), at(0.5), at(0.75)};
}

struct Cell {
  std::string column;
  std::size_t bytes = 0;
  std::vector<double> us;         // of calls, each until its stream is done, at the slowest rank
  std::vector<double> stream_us;  // a call, of several in a row in a stream; {}: not measured
  std::vector<double> issue_us;   // a call, of the same, until the host is done with them
  std::uint64_t checked = 0;      // results that were compared with a separate sum
  std::uint64_t wrong = 0;        // elements of these, over all ranks, that were not right
};

// ---- a line ----

inline std::string words_of(const std::vector<double>& numbers) {
  std::string text = std::to_string(numbers.size());
  for (const double x : numbers) {
    char word[32];
    std::snprintf(word, sizeof(word), " %.4f", x);
    text += word;
  }
  return text;
}
inline bool read_words(std::istream& in, std::vector<double>* numbers) {
  std::size_t n = 0;
  if (!(in >> n) || n > 1'000'000) return false;
  numbers->resize(n);
  for (double& x : *numbers) {
    if (!(in >> x)) return false;
  }
  return true;
}

inline constexpr char kCellWord[] = "cell";

inline std::string line_of(const Cell& c) {
  return std::string(kCellWord) + " " + c.column + " " + std::to_string(c.bytes) + " " +
         std::to_string(c.checked) + " " + std::to_string(c.wrong) + " " + words_of(c.us) + " " +
         words_of(c.stream_us) + " " + words_of(c.issue_us);
}
// False: the line is not one of a cell.
inline bool read_cell(const std::string& line, Cell* cell) {
  std::istringstream in(line);
  std::string word;
  Cell c;
  if (!(in >> word) || word != kCellWord) return false;
  if (!(in >> c.column >> c.bytes >> c.checked >> c.wrong)) return false;
  if (!read_words(in, &c.us) || !read_words(in, &c.stream_us) || !read_words(in, &c.issue_us)) {
    return false;
  }
  *cell = std::move(c);
  return true;
}

// ---- JSON ----

inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

inline std::string number(double x) {
  char word[32];
  std::snprintf(word, sizeof(word), "%.4f", x);
  return word;
}

// "us": [all], and its quartiles as "us_median", "us_q1", "us_q3".
inline std::string samples_json(const std::string& name, const std::vector<double>& v) {
  std::string list;
  for (const double x : v) list += (list.empty() ? "" : ", ") + number(x);
  const Quartiles q = quartiles(v);
  return quoted(name) + ": [" + list + "], " + quoted(name + "_q1") + ": " + number(q.low) + ", " +
         quoted(name + "_median") + ": " + number(q.median) + ", " + quoted(name + "_q3") + ": " +
         number(q.high);
}

inline std::string json_of(const Cell& c) {
  std::string text = "{\"column\": " + quoted(c.column) +
                     ", \"bytes\": " + std::to_string(c.bytes) +
                     ", \"checked\": " + std::to_string(c.checked) +
                     ", \"wrong\": " + std::to_string(c.wrong) + ", " + samples_json("us", c.us);
  if (!c.stream_us.empty()) text += ", " + samples_json("stream_us", c.stream_us);
  if (!c.issue_us.empty()) text += ", " + samples_json("issue_us", c.issue_us);
  return text + "}";
}

}  // namespace async_ring
