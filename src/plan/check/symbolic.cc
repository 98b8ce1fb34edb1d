#include "plan/check/symbolic.h"

#include <algorithm>
#include <utility>

namespace unjam {
namespace {

std::string range_text(int first, int last) {
  std::string text = std::to_string(first);
  if (last != first) text += "-" + std::to_string(last);
  return text;
}

}  // namespace

ValuePool::ValuePool(int ranks) : ranks_(ranks), table_(1024) {
  nodes_.resize(1 + 2 * static_cast<std::size_t>(ranks));
  for (int form = 0; form < 2; ++form) {
    for (int r = 0; r < ranks; ++r) {
      Node& node = nodes_[1 + static_cast<std::size_t>(form * ranks + r)];
      node.begin = static_cast<std::uint32_t>(intervals_.size());
      node.size = 1;
      node.state = form == 0 ? ValueState::kRaw : ValueState::kPartial;
      intervals_.push_back({static_cast<std::uint16_t>(r), static_cast<std::uint16_t>(r), 1});
    }
  }
}

ValuePool::Entry* ValuePool::find(std::uint64_t key) {
  const std::size_t mask = table_.size() - 1;
  std::size_t at = static_cast<std::size_t>((key * 0x9e3779b97f4a7c15ull) >> 20) & mask;
  while (table_[at].value != kNoValue && table_[at].key != key) at = (at + 1) & mask;
  return &table_[at];
}

void ValuePool::grow() {
  std::vector<Entry> old(table_.size() * 2);
  old.swap(table_);
  for (const Entry& e : old) {
    if (e.value != kNoValue) *find(e.key) = e;
  }
}

void ValuePool::append(int first, int last, std::uint32_t times, std::size_t begin) {
  if (intervals_.size() > begin) {
    Interval& previous = intervals_.back();
    if (previous.last + 1 == first && previous.times == times) {
      previous.last = static_cast<std::uint16_t>(last);
      return;
    }
  }
  intervals_.push_back(
      {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(last), times});
}

ValueId ValuePool::combine(ValueId left, ValueId right) {
  const std::uint64_t key = std::uint64_t{left} << 32 | right;
  Entry* entry = find(key);
  if (entry->value != kNoValue) return entry->value;

  // The sum of two step functions over the ranks, left to right.
  const Node a = nodes_[left], b = nodes_[right];
  const std::size_t begin = intervals_.size();
  std::uint32_t i = 0, j = 0;
  int position = 0;
  constexpr int kNone = 1 << 30;
  while (i < a.size || j < b.size) {
    // Copies: append() may move the intervals.
    const Interval x = i < a.size ? intervals_[a.begin + i] : Interval{0, 0, 0};
    const Interval y = j < b.size ? intervals_[b.begin + j] : Interval{0, 0, 0};
    const int x_first = i < a.size ? x.first : kNone, y_first = j < b.size ? y.first : kNone;
    const int first = std::max(position, std::min(x_first, y_first));
    int last = kNone;
    std::uint32_t times = 0;
    for (const auto& [start, interval] : {std::pair{x_first, x}, std::pair{y_first, y}}) {
      if (start == kNone) continue;
      if (start <= first) {
        times += interval.times;
        last = std::min<int>(last, interval.last);
      } else {
        last = std::min(last, start - 1);
      }
    }
    append(first, last, times, begin);
    position = last + 1;
    if (i < a.size && x.last < position) ++i;
    if (j < b.size && y.last < position) ++j;
  }
  Node node;
  node.begin = static_cast<std::uint32_t>(begin);
  node.size = static_cast<std::uint32_t>(intervals_.size() - begin);
  node.state = ValueState::kPartial;
  const ValueId value = static_cast<ValueId>(nodes_.size());
  nodes_.push_back(node);
  *entry = {key, value};
  if (++used_ * 2 > table_.size()) grow();
  return value;
}

ValueId ValuePool::finish(ValueId partial) {
  if (nodes_[partial].finished == kNoValue) {
    Node node = nodes_[partial];
    node.state = ValueState::kFinished;
    nodes_[partial].finished = static_cast<ValueId>(nodes_.size());
    nodes_.push_back(node);
  }
  return nodes_[partial].finished;
}

bool ValuePool::has(ValueId v, int rank) const {
  if (v == kNoValue) return false;
  const Node& node = nodes_[v];
  if (node.state == ValueState::kRaw) return v == raw(rank);
  for (std::uint32_t i = 0; i < node.size; ++i) {
    const Interval& x = intervals_[node.begin + i];
    if (x.first <= rank && rank <= x.last && x.times != 0) return true;
  }
  return false;
}

bool ValuePool::complete(ValueId v) const {
  const Node& node = nodes_[v];
  if (node.size != 1) return false;
  const Interval& i = intervals_[node.begin];
  return i.first == 0 && i.last == ranks_ - 1 && i.times == 1;
}

std::string ValuePool::describe(ValueId v) const {
  if (v == kNoValue) return "nothing";
  const Node& node = nodes_[v];
  if (node.state == ValueState::kRaw) {
    return "the raw input of rank " + std::to_string(intervals_[node.begin].first);
  }
  std::string text = node.state == ValueState::kFinished ? "the finished result of ranks "
                                                         : "the contributions of ranks ";
  for (std::uint32_t i = 0; i < node.size; ++i) {
    const Interval& interval = intervals_[node.begin + i];
    if (i > 0) text += ",";
    text += range_text(interval.first, interval.last);
    if (interval.times > 1) text += " (" + std::to_string(interval.times) + " times)";
  }
  return text;
}

std::string ValuePool::defect(ValueId v) const {
  const Node& node = nodes_[v];
  std::string missing, repeated;
  const auto add = [](std::string* text, const std::string& more) {
    *text += (text->empty() ? "" : ",") + more;
  };
  int next = 0;
  for (std::uint32_t i = 0; i < node.size; ++i) {
    const Interval& interval = intervals_[node.begin + i];
    if (interval.first > next) add(&missing, range_text(next, interval.first - 1));
    if (interval.times > 1) {
      add(&repeated, range_text(interval.first, interval.last) + " (" +
                         std::to_string(interval.times) + " times)");
    }
    next = interval.last + 1;
  }
  if (next < ranks_) add(&missing, range_text(next, ranks_ - 1));
  std::string text;
  if (!missing.empty()) text = "lacks ranks " + missing;
  if (!repeated.empty()) text += (text.empty() ? "" : " and ") + ("has ranks " + repeated);
  return text;
}

}  // namespace unjam
