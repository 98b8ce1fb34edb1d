// NCCL's functions that unjam does not serve: they refuse, with a text that says what to do
// instead. The comment in front of each is its row in docs/nccl.md.
#include <cstddef>
#include <string>

#include "api/nccl/exporting.h"
#include "api/nccl/group_calls.h"
#include "api/nccl/status.h"
#include "api/nccl/types.h"

namespace unjam::nccl {
namespace {

Code refuse(const char* what, const char* instead) {
  return guarded(
      [&] { return invalid_usage(std::string("unjam does not serve ") + what + ": " + instead); });
}

Code refuse_device_api(const char* what) {
  return refuse(what, "kernels cannot use NCCL's device interface with it; call collectives");
}

}  // namespace

// symmetric windows
UNJAM_NCCL_EXPORT(Code, ncclCommWindowRegister,
                  (ncclComm_t, void*, std::size_t, void** window, int)) {
  if (window != nullptr) *window = nullptr;
  return refuse("ncclCommWindowRegister", "use ncclCommRegister, or no registration");
}

// symmetric windows
UNJAM_NCCL_EXPORT(Code, ncclCommWindowDeregister, (ncclComm_t, void*)) {
  return refuse("ncclCommWindowDeregister", "it has registered no window");
}

// estimates; ends the group without doing it
UNJAM_NCCL_EXPORT(Code, ncclGroupSimulateEnd, (SimInfo*)) {
  return guarded([] { return discard_group(); });
}

// device interface
UNJAM_NCCL_EXPORT(Code, ncclDevCommCreate, (ncclComm_t, const void*, void*)) {
  return refuse_device_api("ncclDevCommCreate");
}

// device interface
UNJAM_NCCL_EXPORT(Code, ncclDevCommDestroy, (ncclComm_t, const void*)) {
  return refuse_device_api("ncclDevCommDestroy");
}

// device interface
UNJAM_NCCL_EXPORT(Code, ncclLsaBarrierCreateRequirement, (Team, int, void*, void*)) {
  return refuse_device_api("ncclLsaBarrierCreateRequirement");
}

// device interface
UNJAM_NCCL_EXPORT(Code, ncclGinBarrierCreateRequirement, (ncclComm_t, Team, int, void*, void*)) {
  return refuse_device_api("ncclGinBarrierCreateRequirement");
}

// device interface
UNJAM_NCCL_EXPORT(Code, ncclLLA2ACreateRequirement, (int, int, void*, void*)) {
  return refuse_device_api("ncclLLA2ACreateRequirement");
}

// device interface; gives -1
UNJAM_NCCL_EXPORT(int, ncclLLA2ACalcSlots, (int, int)) {
  refuse_device_api("ncclLLA2ACalcSlots");
  return -1;
}

// device interface; gives a team of no ranks
UNJAM_NCCL_EXPORT(Team, ncclTeamWorld, (ncclComm_t)) {
  refuse_device_api("ncclTeamWorld");
  return {0, -1, 0};
}

// device interface; gives a team of no ranks
UNJAM_NCCL_EXPORT(Team, ncclTeamLsa, (ncclComm_t)) {
  refuse_device_api("ncclTeamLsa");
  return {0, -1, 0};
}

// device interface; gives a team of no ranks
UNJAM_NCCL_EXPORT(Team, ncclTeamRail, (ncclComm_t)) {
  refuse_device_api("ncclTeamRail");
  return {0, -1, 0};
}

// device interface; gives -1
UNJAM_NCCL_EXPORT(int, ncclTeamRankToWorld, (ncclComm_t, Team, int)) {
  refuse_device_api("ncclTeamRankToWorld");
  return -1;
}

// device interface; gives -1
UNJAM_NCCL_EXPORT(int, ncclTeamRankToLsa, (ncclComm_t, Team, int)) {
  refuse_device_api("ncclTeamRankToLsa");
  return -1;
}

}  // namespace unjam::nccl
