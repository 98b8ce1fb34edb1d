// A job for the deadlock simulator: which GPUs form which groups, how many collectives each group
// has, in which order each GPU would invoke them without disorder. Checked and compiled once, then
// read by any number of threads. docs/simulator.md defines the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace unjam::sim {

enum class Model { kSingleQueue = 0, kSynchronization = 1 };

// How a GPU's base order comes about. All are restrictions of one global order, so without disorder
// no two GPUs disagree.
enum class Order {
  kInterleaved = 0,   // the k-th collective of each group in group order, k = 0, 1, ...
  kConcatenated = 1,  // group after group
  kExplicit = 2,      // as JobSpec::sequence says
};

struct JobSpec {
  std::uint32_t gpus = 0;
  // Group g has members[group_begin[g] .. group_begin[g + 1]) and counts[g] collectives.
  std::vector<std::uint64_t> group_begin{0};
  std::vector<std::uint32_t> members;
  std::vector<std::uint32_t> counts;
  Order order = Order::kInterleaved;
  // The global order for kExplicit: the groups in turn; the i-th mention of a group is its i-th
  // collective, so each group is mentioned counts[g] times.
  std::vector<std::uint32_t> sequence;
  Model model = Model::kSingleQueue;
  double disorder = 0;
  double sync = 0;
  std::uint64_t seed = 0;
  std::uint64_t memory_limit = 0;  // bytes; 0: none
};

// What the spec says cannot be; the message names the field.
struct BadJob : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
// It can be, but not in the memory allowed; the message says how much it would take.
struct TooLarge : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The k-th collective of a group.
struct Collective {
  std::uint32_t group = 0;
  std::uint32_t k = 0;
  friend bool operator==(const Collective&, const Collective&) = default;
};

struct Member {
  std::uint32_t gpu = 0;
  std::uint32_t slot = 0;  // which of the GPU's groups this is
};

// A base order in terms of the GPU's own groups ("slots", in ascending group order). GPUs with
// the same counts share one.
class Shape {
 public:
  // `sequence[i]`: the slot of the i-th invocation.
  Shape(std::uint32_t slots, const std::vector<std::uint32_t>& sequence);

  std::uint32_t size() const { return static_cast<std::uint32_t>(slot_.size()); }
  std::uint32_t slots() const { return slots_; }
  std::uint32_t slot(std::uint32_t position) const { return slot_[position]; }
  std::uint32_t k(std::uint32_t position) const { return k_[position]; }
  // Where the slot's k-th collective stands.
  std::uint32_t position(std::uint32_t slot, std::uint32_t k) const {
    return positions_[first_[slot] + k];
  }
  std::span<const std::uint32_t> positions(std::uint32_t slot) const {
    return {positions_.data() + first_[slot], positions_.data() + first_[slot + 1]};
  }
  // How many of the slot's collectives stand before `position`.
  std::uint32_t count_before(std::uint32_t slot, std::uint32_t position) const;

  static std::uint64_t bytes(std::uint64_t slots, std::uint64_t length);

 private:
  static constexpr std::uint32_t kMostCounted = 8;  // slots; beyond, count_before searches

  std::uint32_t slots_;
  std::vector<std::uint32_t> slot_, k_;
  std::vector<std::uint32_t> first_, positions_;
  std::vector<std::uint32_t> before_;  // [position][slot]
};

class Job {
 public:
  // Throws BadJob or TooLarge.
  explicit Job(JobSpec spec);

  const JobSpec& spec() const { return spec_; }
  std::uint32_t gpus() const { return spec_.gpus; }
  std::uint32_t groups() const { return static_cast<std::uint32_t>(spec_.counts.size()); }
  std::uint32_t count(std::uint32_t group) const { return spec_.counts[group]; }
  // In ascending order of GPUs.
  std::span<const Member> members(std::uint32_t group) const {
    return {members_.data() + spec_.group_begin[group],
            members_.data() + spec_.group_begin[group + 1]};
  }
  // The groups of a GPU, ascending.
  std::span<const std::uint32_t> slots(std::uint32_t gpu) const {
    return {slots_.data() + slot_begin_[gpu], slots_.data() + slot_begin_[gpu + 1]};
  }
  const Shape& shape(std::uint32_t gpu) const { return *shapes_[shape_of_[gpu]]; }
  std::uint32_t shape_id(std::uint32_t gpu) const { return shape_of_[gpu]; }
  std::uint32_t length(std::uint32_t gpu) const { return shape(gpu).size(); }
  Collective at(std::uint32_t gpu, std::uint32_t position) const {
    const Shape& s = shape(gpu);
    return {slots(gpu)[s.slot(position)], s.k(position)};
  }
  // Rank in the global base order (not dense).
  std::uint64_t rank(Collective c) const {
    switch (spec_.order) {
      case Order::kInterleaved:
        return std::uint64_t{c.k} << 32 | c.group;
      case Order::kConcatenated:
        return std::uint64_t{c.group} << 32 | c.k;
      default:
        return explicit_rank_[explicit_begin_[c.group] + c.k];
    }
  }

  // Parts of the job that share no GPU and no group cannot influence each other.
  std::uint32_t components() const {
    return static_cast<std::uint32_t>(component_begin_.size() - 1);
  }
  std::uint32_t component(std::uint32_t gpu) const { return component_[gpu]; }
  std::span<const std::uint32_t> component_gpus(std::uint32_t component) const {
    return {drawing_order_.data() + component_begin_[component],
            drawing_order_.data() + component_begin_[component + 1]};
  }
  // All GPUs, component after component, ascending inside one.
  std::span<const std::uint32_t> drawing_order() const { return drawing_order_; }
  // Invocations in a round.
  std::uint64_t invocations() const { return invocations_; }
  std::uint64_t memory() const { return memory_; }

 private:
  void check() const;
  void charge(std::uint64_t bytes, const char* what);
  void index_members();
  void find_components();
  void make_shapes();
  void charge_rounds();
  std::vector<std::uint32_t> order_of(std::uint32_t gpu) const;

  JobSpec spec_;
  std::uint64_t memory_ = 0;
  std::uint64_t invocations_ = 0;
  std::vector<Member> members_;
  std::vector<std::uint64_t> slot_begin_;
  std::vector<std::uint32_t> slots_;
  std::vector<std::unique_ptr<Shape>> shapes_;
  std::vector<std::uint32_t> shape_of_;
  std::vector<std::uint64_t> explicit_begin_, explicit_rank_;
  std::vector<std::uint32_t> component_, component_begin_, drawing_order_;
};

}  // namespace unjam::sim
