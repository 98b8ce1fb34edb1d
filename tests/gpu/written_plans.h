// Which programs the library of written.cu plans: see there.
#pragma once

#include <string>

enum class Written {
  kNone,
  kTreeBroadcast,
  kLaggingTreeBroadcast,
  kTreeReduce,
  kTwoLevels,
  kTwoLevelsApart,
  kHalves,
};

// For plans that are made from now on, of all ranks of this process.
void set_written(Written written);

// Of the plans that were made, by program and reason, how many need the engine, on a GPU as tests
// use it.
std::string lowering_reasons();
