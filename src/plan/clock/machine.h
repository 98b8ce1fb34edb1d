// What the clock knows of a machine: nodes with GPUs, links between these, NICs, and leaf switches
// whose trunks lead to all other leaves. Every link is a port on each side, which carries one
// message after the other.
//
// What it does not know, so that no time has it: congestion control, adaptive routing, jitter,
// other jobs. Above the leaves nothing is ever busy.
//
// GB are 10^9 bytes. A rate may be infinite.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.h"

namespace unjam {

// More ranks than this are not timed: what is kept of each fits memory up to here.
inline constexpr std::int64_t kMostClockRanks = 1 << 20;
inline constexpr int kMostMachineLanes = 32;

struct Machine {
  // Shape. Ranks are GPUs, node after node; nodes are numbered leaf after leaf.
  int gpus_per_node = 1;
  int nics_per_node = 1;  // GPUs have them in turns: the first ones have the first
  // Lanes take the node's NICs in turns, from their GPU's on; the even lanes have all, and so have
  // the odd ones, for trees have these.
  bool nics_by_lane = false;
  int nodes_per_leaf = 1;
  // Processors that all ranks of a node share, each of which moves one slice at a time; 0: every
  // lane of every rank has its own.
  int cores = 0;

  // Between GPUs of a node; between nodes of a leaf; and, in addition, between leaves.
  double link_us = 0, link_gb_per_s = 1;
  double network_us = 0, nic_gb_per_s = 1;
  double leaf_us = 0;
  // What a leaf's NICs carry together, for each that its trunk carries.
  double oversubscription = 1;

  // What a lane does about a slice: a fixed time; more if it had to wait for it, and for each
  // further peer that it receives from, or sends to, whichever are more; and the slice's bytes, as
  // often as it reads them or writes them, whichever is more.
  double slice_us = 0, wait_us = 0, peer_us = 0, engine_gb_per_s = 1;
  // What a call takes beside its slices.
  double base_us = 0;

  // How plans are made there (PlanLimits).
  Device device = Device::kCuda;
  std::uint16_t lanes = 1;
  std::uint32_t slots = 4, slot_bytes = 65536;
};

// "" if the machine makes sense, else which field does not, and what it may be.
std::string machine_error(const Machine& machine);

}  // namespace unjam
