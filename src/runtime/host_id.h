// As which host this process counts (UNJAM_HOST_ID), for the table of hosts that all ranks of a job
// have alike.
#pragma once

#include <cstdint>
#include <string>

namespace unjam {

// id: "" if the environment does not say it. False: it is malformed, and `error` says what is
// accepted.
bool host_id(std::string& id, std::string& error);

// Of a job on several hosts (UNJAM_ROOT): processes with the same number can share memory. By
// UNJAM_HOST_ID, or by what tells machines, their networks and users apart.
struct HostIdentity {
  std::string name;  // for people
  std::uint64_t number = 0;
};
HostIdentity this_host();

}  // namespace unjam
