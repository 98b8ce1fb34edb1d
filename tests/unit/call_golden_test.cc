// What GPUs' kernels are told of calls is what it was: for the grid of tests/support/golden_cases.h
// compared with a committed file, tests/fixtures/golden_calls.txt. As plan_golden_test.cc, whose
// head says more:
//
//     UNJAM_TEST_GOLDEN=update build/release/tests/call_golden_test
//     UNJAM_TEST_GOLDEN='broadcast rsag cuda' build/release/tests/call_golden_test
//
// the latter of which prints all that a line of the file sums up.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda/host/bind.h"
#include "engine/set_plan.h"
#include "plan/lower.h"
#include "tests/support/golden_cases.h"

namespace unjam {
namespace {

using unjam_test::GoldenCase;

// Of the user's buffers.
struct Buffers {
  const char* name;
  std::uintptr_t input, output;
};
constexpr Buffers kBuffers[] = {
    {"apart", 0x10000, 0x90000000}, {"in place", 0x10000, 0x10000}, {"odd", 0x10001, 0x90000004}};

class Facts {
 public:
  template <class T>
  void add(const char* name, T value) {
    text_ += std::string(" ") + name + "=" + std::to_string(+value);
  }
  // Of group ranks.
  void add_ranks(const char* name, unsigned ranks) {
    text_ += std::string(" ") + name + "={";
    for (int q = 0; q < 32; ++q) {
      if ((ranks >> q & 1) != 0) text_ += " " + std::to_string(q);
    }
    text_ += " }";
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Places, as group ranks.
unsigned ranks_of(const StreamCall& call, unsigned places) {
  unsigned ranks = 0;
  for (std::uint32_t p = 0; p < call.places; ++p) {
    if ((places >> p & 1) != 0) ranks |= 1u << call.ranks[p];
  }
  return ranks;
}

// What kernels make of a call that goes chunk after chunk.
void add_slots(const StreamCall& call, Facts* facts) {
  const SlotSteps& s = call.steps;
  const bool sends = s.sends_to != 0, gathers = s.gathers_from != 0;
  facts->add("chunks", call.chunks_of_all());
  facts->add("lag", s.two_hops() ? s.lag : 0);
  facts->add("patience", call.patience_ns);
  facts->add_ranks("sends_to", ranks_of(call, s.sends_to));
  facts->add_ranks("gathers_from", ranks_of(call, s.gathers_from));
  facts->add_ranks("results_to", ranks_of(call, s.results_to));
  facts->add_ranks("collects_from", ranks_of(call, s.collects_from));
  facts->add("scatters", s.scatters);
  facts->add("part", s.parts[call.place]);
  if (sends) {
    facts->add("copies", s.copies);
    facts->add("sent_is_stored", s.stores_sent);
    facts->add("sent_is_contribution", s.contributes);
    facts->add("sends_into_outputs", s.sent_into_outputs);
  }
  if (gathers) {
    facts->add("result_is_stored", s.stores_result);
    facts->add("reduces", s.reduces);
    facts->add("own_source", s.own_source);
    facts->add("sources", s.num_sources);
    facts->add("sums", s.sums);
    facts->add("finishes", s.finishes);
  }
  if (s.results_to != 0) facts->add("results_into_outputs", s.results_into_outputs);
  const unsigned invites = s.collects_from | (s.reduces ? 0u : s.gathers_from);
  facts->add_ranks("invites", ranks_of(call, invites));
  const SlotTuning& t = s.tuning;
  facts->add("slots", t.slots);
  facts->add("in_step", t.in_step);
  if (sends) facts->add("sent_in_hand", t.sent_in_hand);
  facts->add("others_in_hand", t.others_in_hand);
  facts->add("paced", t.paced);
  facts->add("keeps_places", t.keeps_places && call.chunks_of_all() >= 16);
  facts->add("sent_ahead", s.lag + t.hops_back * 4);
}

std::string facts_of(const GoldenCase& c, int rank, const Buffers& buffers) {
  PlanRequest request = c.request;
  request.rank = rank;
  std::string error;
  const std::optional<Plan> plan = make_plan(request, c.limits, c.algorithm, &error);
  EXPECT_TRUE(plan.has_value()) << c.name << ": " << error;
  if (!plan) return {};
  Invocation inv;
  set_plan(*plan, static_cast<std::uint16_t>(rank), &inv);
  inv.input = reinterpret_cast<const void*>(buffers.input);
  inv.output = reinterpret_cast<void*>(buffers.output);
  inv.group_size = static_cast<std::uint16_t>(request.ranks);
  const LowerLimits limits{512, c.limits.lanes, true, 20, c.limits.guaranteed_slot_bytes};
  const Lowered lowered = lower(*plan, request.ranks, rank, limits);
  Facts facts;
  facts.add("why", static_cast<int>(lowered.why));
  facts.add("threads", lowered.threads);
  if (lowered.why != NeedsEngine::kNo) return facts.text();
  StreamCall call;
  bind(lowered, inv, call);
  call.lanes = inv.geometry.lanes;
  facts.add("whole", batch_of(lowered, call));
  if (call.by_slots) {
    add_slots(call, &facts);
    return facts.text();
  }
  facts.add("block_bytes", call.block_bytes);
  facts.add("lane_pieces", call.lane_pieces);
  facts.add("longer_lanes", call.longer_lanes);
  facts.add("sent_from", call.sent_from);
  facts.add("own_from", call.own_from);
  facts.add("own_to", call.own_to);
  facts.add("received_to", call.received_to);
  facts.add("num_sent", call.num_sent);
  facts.add("first_sent", call.first_sent);
  facts.add("num_received", call.num_received);
  facts.add("first_received", call.first_received);
  facts.add("scatters", call.scatters);
  facts.add("collects", call.collects);
  facts.add("reduces", call.reduces);
  facts.add("copies", call.copies);
  facts.add("plain", call.plain);
  facts.add("before", call.before);
  facts.add("two_shot", call.two_hops);
  facts.add("part_pieces", call.part_pieces);
  facts.add("longer_parts", call.longer_parts);
  return facts.text();
}

std::string text_of(const GoldenCase& c) {
  std::string text;
  for (int rank = 0; rank < c.request.ranks; ++rank) {
    for (const Buffers& buffers : kBuffers) {
      text += c.name + ", rank " + std::to_string(rank) + ", " + buffers.name + ":" +
              facts_of(c, rank, buffers) + "\n";
    }
  }
  return text;
}

// FNV-1a: what is written down in files is not to change with base/hash.h.
std::string hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

TEST(CallGolden, KernelsAreToldWhatTheyWereTold) {
  std::vector<GoldenCase> cases;
  std::map<std::string, std::string> unused, texts;
  unjam_test::add_golden_cases(&cases, &unused);
  for (const GoldenCase& c : cases) {
    if (c.limits.device != Device::kCuda) continue;
    // "all_reduce rsag cuda 4 ranks 80K": without the ranks and the data.
    std::size_t end = 0;
    for (int word = 0; word < 3; ++word) end = c.name.find(' ', end + 1);
    texts[c.name.substr(0, end)] += text_of(c);
  }
  const char* asked = std::getenv("UNJAM_TEST_GOLDEN");
  const std::string what = asked != nullptr ? asked : "";
  const auto path = unjam_test::fixture("golden_calls.txt");
  if (what == "update") {
    std::ofstream file(path);
    file << "# What GPUs' kernels are told of calls: written by UNJAM_TEST_GOLDEN=update\n"
            "# call_golden_test. KIND ALGORITHM LIMITS: a hash of what is said of all sizes of\n"
            "# groups and data.\n";
    for (const auto& [name, text] : texts) file << name << ": " << hash_of(text) << "\n";
    ASSERT_TRUE(file.good()) << path << " cannot be written";
    return;
  }
  if (!what.empty()) {
    ASSERT_TRUE(texts.contains(what)) << "UNJAM_TEST_GOLDEN is no case: " << what;
    std::fputs(texts[what].c_str(), stdout);
    return;
  }
  std::map<std::string, std::string> golden;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    golden[line.substr(0, colon)] = line.substr(colon + 2);
  }
  for (const auto& [name, text] : texts) {
    EXPECT_EQ(hash_of(text), golden[name])
        << name << " differs from " << path << ". The head of this test says how to compare.";
  }
  EXPECT_EQ(golden.size(), texts.size());
}

}  // namespace
}  // namespace unjam
