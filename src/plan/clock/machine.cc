#include "plan/clock/machine.h"

namespace unjam {
namespace {

constexpr double kMostMicroseconds = 1e6;
constexpr int kMostOfAKind = 1 << 20;
constexpr int kMostCores = 1024;
constexpr std::uint32_t kMostMachineSlots = 1024, kMostSlotBytes = 1u << 26, kSlotUnit = 64;

std::string whole_error(const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  if (value >= least && value <= most) return "";
  return std::string(name) + " " + std::to_string(value) + " is out of range: give " +
         std::to_string(least) + " to " + std::to_string(most);
}

std::string time_error(const char* name, double us) {
  if (us >= 0 && us <= kMostMicroseconds) return "";
  return std::string(name) + " " + std::to_string(us) + " is no time: give 0 to 1000000 us";
}

std::string rate_error(const char* name, double rate) {
  if (rate >= 0.001) return "";  // (not so of NaN)
  return std::string(name) + " " + std::to_string(rate) +
         " is no rate: give GB/s, from 0.001 on, or infinity";
}

}  // namespace

std::string machine_error(const Machine& m) {
  for (const std::string& text :
       {whole_error("gpus_per_node", m.gpus_per_node, 1, kMostOfAKind),
        whole_error("nics_per_node", m.nics_per_node, 1, kMostOfAKind),
        whole_error("nodes_per_leaf", m.nodes_per_leaf, 1, kMostOfAKind),
        whole_error("cores", m.cores, 0, kMostCores), time_error("link_us", m.link_us),
        rate_error("link_gb_per_s", m.link_gb_per_s), time_error("network_us", m.network_us),
        rate_error("nic_gb_per_s", m.nic_gb_per_s), time_error("leaf_us", m.leaf_us),
        time_error("slice_us", m.slice_us), time_error("wait_us", m.wait_us),
        time_error("peer_us", m.peer_us), rate_error("engine_gb_per_s", m.engine_gb_per_s),
        time_error("base_us", m.base_us), whole_error("lanes", m.lanes, 1, kMostMachineLanes),
        whole_error("slots", m.slots, 1, kMostMachineSlots),
        whole_error("slot_bytes", m.slot_bytes, kSlotUnit, kMostSlotBytes)}) {
    if (!text.empty()) return text;
  }
  if (m.slot_bytes % kSlotUnit != 0) {
    return "slot_bytes " + std::to_string(m.slot_bytes) + " is no multiple of 64";
  }
  if (!(m.oversubscription >= 0.001 && m.oversubscription <= 1000)) {
    return "oversubscription " + std::to_string(m.oversubscription) +
           " is no ratio: give 0.001 to 1000, 1 for none";
  }
  return "";
}

}  // namespace unjam
