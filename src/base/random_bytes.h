// Bytes that nobody can foretell: secrets and nonces.
#pragma once

#include <sys/random.h>
#include <sys/types.h>

#include <cstddef>

namespace unjam {

inline void fill_random(void* to, std::size_t bytes) {
  std::size_t got = 0;
  while (got < bytes) {
    const ssize_t n = getrandom(static_cast<char*>(to) + got, bytes - got, 0);
    if (n > 0) got += static_cast<std::size_t>(n);
  }
}

}  // namespace unjam
