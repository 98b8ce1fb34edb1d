// As which host this process counts (UNJAM_HOST_ID), for the table of hosts that all ranks of a job
// have alike.
#pragma once

#include <string>

namespace unjam {

// id: "" if the environment does not say it. False: it is malformed, and `error` says what is
// accepted.
bool host_id(std::string& id, std::string& error);

}  // namespace unjam
