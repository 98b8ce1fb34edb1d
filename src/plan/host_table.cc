#include "plan/host_table.h"

#include <map>

#include "program/geometry.h"

namespace unjam {

HostTable::HostTable(const std::vector<int>& names) {
  std::map<int, int> numbers;
  for (std::size_t r = 0; r < names.size(); ++r) {
    const int host = numbers.try_emplace(names[r], hosts()).first->second;
    if (host == hosts()) members_.emplace_back();
    std::vector<int>& members = members_[static_cast<std::size_t>(host)];
    host_of_.push_back(host);
    place_of_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(r));
  }
  irregularity_ = find_irregularity();
}

HostTable HostTable::consecutive(int ranks, int hosts) {
  std::vector<int> names;
  for (int h = 0; h < hosts; ++h) {
    const Range share = split(static_cast<std::uint64_t>(ranks), static_cast<std::uint32_t>(hosts),
                              static_cast<std::uint32_t>(h), 1);
    names.insert(names.end(), share.length, h);
  }
  return HostTable(names);
}

std::string HostTable::find_irregularity() const {
  const std::vector<int>& first = members_.front();
  for (const std::vector<int>& other : members_) {
    if (other.size() == first.size()) continue;
    return "rank " + std::to_string(first.front()) + "'s host has " + std::to_string(first.size()) +
           " of them, rank " + std::to_string(other.front()) + "'s has " +
           std::to_string(other.size());
  }
  return "";
}

Rails::Rails(const HostTable* hosts, int ranks, int rank)
    : table_(hosts),
      hosts_(hosts == nullptr ? 1 : hosts->hosts()),
      host_(hosts == nullptr ? 0 : hosts->host_of(rank)),
      rails_(ranks / hosts_),
      rail_(hosts == nullptr ? rank : hosts->place_of(rank)) {}

Rails Rails::single(int ranks, int rank) {
  Rails rails;
  rails.hosts_ = ranks;
  rails.host_ = rank;
  return rails;
}

int Rails::rank_at(int host, int rail) const {
  // (Without a table one of them is 0.)
  return table_ == nullptr ? host + rail : table_->members(host)[static_cast<std::size_t>(rail)];
}

std::vector<int> Rails::other_rails() const {
  std::vector<int> rails;
  for (int k = 1; k < rails_; ++k) rails.push_back((rail_ + k) % rails_);
  return rails;
}

std::vector<int> Rails::mates() const {
  std::vector<int> ranks;
  for (const int rail : other_rails()) ranks.push_back(rank_at(host_, rail));
  return ranks;
}

}  // namespace unjam
