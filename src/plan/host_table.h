// Which host each rank of a group is on: what plans of two levels, within hosts and between them,
// are made for. All ranks of a group have the same table.
//
// Hosts are numbered in the order of their first ranks. The k-th rank of a host, in ascending
// order, has place k there. The ranks at place k of all hosts are rail k: between hosts each rank
// has to do with its rail alone, so that all of a host's ways out are used alike.
#pragma once

#include <string>
#include <vector>

namespace unjam {

class HostTable {
 public:
  // names: of each rank a number, equal where ranks are on one host. At least one rank.
  explicit HostTable(const std::vector<int>& names);
  // So many hosts with consecutive ranks, as many on each; the first ones have one more if they
  // must. 1 <= hosts <= ranks.
  static HostTable consecutive(int ranks, int hosts);

  int ranks() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  int place_of(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }
  // The ranks of a host, ascending.
  const std::vector<int>& members(int host) const {
    return members_[static_cast<std::size_t>(host)];
  }
  bool is_regular() const { return irregularity().empty(); }
  // "" if each host has as many ranks as any other, so that rails cross them all; else which hosts
  // differ, by their ranks.
  const std::string& irregularity() const { return irregularity_; }

 private:
  std::string find_irregularity() const;

  std::vector<int> host_of_, place_of_;    // by rank
  std::vector<std::vector<int>> members_;  // by host
  std::string irregularity_;
};

// A regular table as one rank sees it. Without a table all ranks are on one host.
class Rails {
 public:
  // hosts: null, or regular; it must outlive this.
  Rails(const HostTable* hosts, int ranks, int rank);
  // All ranks on hosts of their own: one rail.
  static Rails single(int ranks, int rank);

  int hosts() const { return hosts_; }
  int host() const { return host_; }
  int rails() const { return rails_; }
  int rail() const { return rail_; }
  int rank_at(int host, int rail) const;
  // The other ranks of this host, those behind this one first, so that not all begin with one.
  std::vector<int> mates() const;
  // Their rails, in the same order.
  std::vector<int> other_rails() const;

 private:
  Rails() = default;
  const HostTable* table_ = nullptr;
  int hosts_ = 1, host_ = 0, rails_ = 1, rail_ = 0;
};

}  // namespace unjam
