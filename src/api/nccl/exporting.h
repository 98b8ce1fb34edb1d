// How a function of NCCL's interface is defined: under its name, and with a p in front of it, which
// profilers that replace the one call.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// Of functions that g++ finds to throw nothing the second name does not say so.
#pragma GCC diagnostic ignored "-Wmissing-attributes"
#endif

#define UNJAM_NCCL_EXPORT(returns, name, parameters)                                            \
  extern "C" [[gnu::visibility("default")]] returns p##name parameters;                         \
  extern "C"                                                                                    \
      [[gnu::visibility("default"), gnu::weak, gnu::alias("p" #name)]] returns name parameters; \
  returns p##name parameters
