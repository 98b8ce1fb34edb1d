// How one end of a connection proves to the other that it knows the job's secret, which is never
// sent: by a keyed hash over both ends' nonces. The same gives a connection a key of its own.
#pragma once

#include <array>
#include <cstdint>

#include "base/siphash.h"

namespace unjam {

using JobSecret = std::array<unsigned char, 32>;

// What proves that its sender, as whom the letter `who` stands, knows the secret. Domain-separated:
// what one end sends is no proof for the other, nor is it one at another kind of door.
void proof_tag(const JobSecret& secret, char who, const std::uint64_t server_nonce[2],
               const std::uint64_t client_nonce[2], std::uint64_t tag[2]);

// In constant time.
bool same_tag(const std::uint64_t a[2], const std::uint64_t b[2]);

// A key for what one end of a connection sends. `who`: a letter that no proof uses.
SipKey session_key(const JobSecret& secret, char who, const std::uint64_t server_nonce[2],
                   const std::uint64_t client_nonce[2]);

}  // namespace unjam
