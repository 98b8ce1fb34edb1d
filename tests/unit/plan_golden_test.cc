// What plans have every connector carry, slice by slice, is what it was: compared with a committed
// file, tests/fixtures/golden_plans.txt. So who rewrites planners, programs or what runs them sees
// whether anything moves otherwise, for which case, and how.
//
// The plan checker says whether plans are right; this says whether they are the same. Where they
// are meant to change, or an algorithm is new, one command writes the file anew, and its diff goes
// to who reviews the change:
//
//     UNJAM_TEST_GOLDEN=update build/release/tests/plan_golden_test
//
// UNJAM_TEST_GOLDEN='broadcast rsag host 3 ranks 80K' prints a case in full: in a tree of before
// and one of after, to compare.
//
// Buffers' alignment and whether a call is in place are no cases: plans may not look at them. The
// lanes are the plan's own; a key's tag may shift them (spread_lanes(), plan/common.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "plan/registry.h"
#include "plan/selector.h"
#include "tests/support/all_plans.h"
#include "tests/support/golden_cases.h"
#include "tests/support/slice_walk.h"

namespace unjam {
namespace {

using unjam_test::Slice;
using unjam_test::SliceSequences;

using unjam_test::add_golden_cases;
using Case = unjam_test::GoldenCase;

struct Sequences {
  SliceSequences slices;
  Protocol protocol = Protocol::kSlot;
};
Sequences sequences_of(const Case& c) {
  SCOPED_TRACE(c.name);
  const std::vector<Plan> plans = unjam_test::make_plans(c.request, c.limits, c.algorithm);
  if (plans.empty()) return {};
  return {unjam_test::slices_of(plans, c.limits.guaranteed_slot_bytes), plans[0].protocol};
}

// "1344 slices 1048576 bytes 0123456789abcdef": of what is sent, and of all.
std::string summary_of(const Sequences& s) {
  std::uint64_t slices = 0, bytes = 0;
  for (const auto& [connector, sequence] : s.slices) {
    if (connector.end != unjam_test::End::kSends) continue;
    slices += sequence.size();
    for (const Slice& slice : sequence) bytes += slice.bytes;
  }
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(unjam_test::hash_of(s.slices, s.protocol)));
  return std::to_string(slices) + " " + std::to_string(bytes) + " " + hash;
}
std::string text_of(const Sequences& s) { return unjam_test::text_of(s.slices, s.protocol); }

// Written out, too, so that a reader sees what is summed up in the other lines.
const std::set<std::string> kWrittenOut = {
    "all_reduce ring host 3 ranks 37",     "all_reduce rsag host-lanes 2 ranks 80K",
    "all_reduce two_shot cuda 3 ranks 37", "reduce chain cuda 3 ranks 37",
    "broadcast rsag host-few 3 ranks 37",  "all_to_all one_shot host 2 ranks 37",
    "send_recv pairwise host 2 ranks 80K",
};

constexpr const char* kHead =
    "# What plans have connectors carry: written by UNJAM_TEST_GOLDEN=update plan_golden_test.\n"
    "#\n"
    "# KIND auto LIMITS DATA: the algorithms that the selector takes for 2, 3, … 8 ranks.\n"
    "# KIND ALGORITHM LIMITS RANKS DATA: slices sent, their bytes, a hash of all sequences.\n"
    "# Under some, in full: each end of each connector, a slice being step/part/chunk:bytes, and\n"
    "# where the step lags step/part/chunk@pass:bytes. A step is a primitive's index.\n"
    "# LIMITS and DATA are in the test, tests/unit/plan_golden_test.cc.\n";

// By name, what the file says behind the colon; of cases that are written out, and the lines below.
std::map<std::string, std::string> read_golden() {
  std::map<std::string, std::string> golden;
  std::ifstream file(unjam_test::fixture("golden_plans.txt"));
  EXPECT_TRUE(file.good()) << unjam_test::fixture("golden_plans.txt") << " cannot be read";
  std::string line, name;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == ' ') {
      golden[name] += "\n" + line;
      continue;
    }
    const std::size_t colon = line.find(": ");
    name = line.substr(0, colon);
    EXPECT_TRUE(golden.emplace(name, line.substr(colon + 2)).second) << name << " is there twice";
  }
  return golden;
}

std::string indented(const std::string& lines) {
  std::string text;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) text += "\n  " + line;
  return text;
}

// What the hashes are of is what plans mean: both ends of each connector carry the same bytes of
// the same chunks in the same order. "" if so.
std::string disagreement(const SliceSequences& sequences) {
  using unjam_test::End;
  const auto differ = [](const Slice& a, const Slice& b) {
    return a.bytes != b.bytes || a.chunk != b.chunk;
  };
  for (const auto& [connector, slices] : sequences) {
    if (connector.end == End::kAlone) continue;
    const End other_end = connector.end == End::kSends ? End::kReceives : End::kSends;
    const auto other = sequences.find({connector.lane, connector.peer, other_end, connector.rank});
    if (other == sequences.end() || !std::equal(slices.begin(), slices.end(), other->second.begin(),
                                                other->second.end(), std::not_fn(differ))) {
      return "ranks " + std::to_string(connector.rank) + " and " + std::to_string(connector.peer) +
             " do not expect the same on lane " + std::to_string(connector.lane);
    }
  }
  return "";
}

// The file as it would be written: names and what is said of them, in order.
struct Entry {
  std::string name, text;
  const Case* of = nullptr;  // nullptr: of what the selector takes
  std::uint64_t slices = 0;
};
std::vector<Entry> make_entries(const std::vector<Case>& cases,
                                const std::map<std::string, std::string>& table) {
  std::vector<Entry> entries;
  for (const auto& [name, names] : table) entries.push_back({name, names.substr(1)});
  for (const Case& c : cases) {
    const Sequences s = sequences_of(c);
    EXPECT_EQ(disagreement(s.slices), "") << c.name << "\n" << text_of(s);
    Entry entry{c.name, summary_of(s), &c};
    entry.slices = std::stoull(entry.text);
    if (kWrittenOut.contains(c.name)) entry.text += indented(text_of(s));
    entries.push_back(std::move(entry));
  }
  return entries;
}

TEST(PlanGolden, EveryConnectorCarriesWhatItCarried) {
  const char* asked = std::getenv("UNJAM_TEST_GOLDEN");
  const std::string what = asked != nullptr ? asked : "";
  std::vector<Case> cases;
  std::map<std::string, std::string> table;
  add_golden_cases(&cases, &table);
  const std::vector<Entry> entries = make_entries(cases, table);
  if (what == "update") {
    std::ofstream file(unjam_test::fixture("golden_plans.txt"));
    file << kHead;
    for (const Entry& e : entries) file << e.name << ": " << e.text << "\n";
    ASSERT_TRUE(file.good()) << unjam_test::fixture("golden_plans.txt") << " cannot be written";
    return;
  }
  bool known = what.empty();
  for (const Case& c : cases) {
    if (c.name != what) continue;
    known = true;
    std::printf("%s:\n%s", what.c_str(), text_of(sequences_of(c)).c_str());
  }
  ASSERT_TRUE(known) << "UNJAM_TEST_GOLDEN is no case: " << what;
  std::map<std::string, std::string> golden = read_golden();
  std::vector<std::string> differ;
  const Entry* shortest = nullptr;  // of those, the easiest to look at
  for (const Entry& e : entries) {
    const auto was = golden.find(e.name);
    const std::string before = was == golden.end() ? "not in the file" : was->second;
    if (was != golden.end()) golden.erase(was);
    if (before == e.text) continue;
    differ.push_back(e.name + "\n    was " + before + "\n    is  " + e.text);
    if (e.of == nullptr) continue;
    if (shortest == nullptr || e.slices < shortest->slices) shortest = &e;
  }
  for (const auto& [name, text] : golden) differ.push_back(name + "\n    is no case any more");
  if (differ.empty()) return;
  constexpr std::size_t kShown = 10;
  std::string report;
  for (std::size_t i = 0; i < differ.size() && i < kShown; ++i) report += "\n  " + differ[i];
  if (shortest != nullptr) {
    report += "\n\nThe shortest of them, " + shortest->name + ", is now" +
              indented(text_of(sequences_of(*shortest->of)));
  }
  ADD_FAILURE() << differ.size() << " of " << entries.size() << " cases differ from "
                << unjam_test::fixture("golden_plans.txt") << ":" << report
                << "\n\nThe head of this test says how to compare, and how to write the file anew.";
}

// No data, no slices, whoever plans.
TEST(PlanGolden, NothingOfNothing) {
  std::vector<Case> cases;
  std::map<std::string, std::string> table;
  add_golden_cases(&cases, &table);
  for (Case& c : cases) {
    if (c.request.kind == Kind::kBarrier) continue;
    c.request.count = 0;
    EXPECT_TRUE(sequences_of(c).slices.empty()) << c.name;
  }
}

}  // namespace
}  // namespace unjam
