// The tables that the files compiled for one instruction set each hand to leaves.cc.
#pragma once

#include "device/host/leaves.h"

// Leaves beyond the baseline are switched on inside their own files with GCC's target pragma, so
// that the build needs no flag per file.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define UNJAM_X86_LEAVES 1
#else
#define UNJAM_X86_LEAVES 0
#endif

namespace unjam {

extern const HostLeafTable kBaseLeaves;
#if UNJAM_X86_LEAVES
extern const HostLeafTable kAvx2Leaves;
extern const HostLeafTable kAvx512Leaves;
#endif

}  // namespace unjam
