#include "control/proof.h"

#include <cstring>
#include <string_view>

namespace unjam {
namespace {

struct Keys {
  SipKey key[2];
};

Keys keys_of(const JobSecret& secret) {
  Keys k;
  std::memcpy(&k, secret.data(), sizeof(k));
  return k;
}
static_assert(sizeof(Keys) == sizeof(JobSecret));

}  // namespace

void proof_tag(const JobSecret& secret, char who, const std::uint64_t server_nonce[2],
               const std::uint64_t client_nonce[2], std::uint64_t tag[2]) {
  char text[40];
  std::memset(text, who, 8);
  std::memcpy(text + 8, server_nonce, 16);
  std::memcpy(text + 24, client_nonce, 16);
  const Keys k = keys_of(secret);
  for (int i = 0; i < 2; ++i) tag[i] = siphash(k.key[i], std::string_view(text, sizeof(text)));
}

bool same_tag(const std::uint64_t a[2], const std::uint64_t b[2]) {
  return ((a[0] ^ b[0]) | (a[1] ^ b[1])) == 0;
}

SipKey session_key(const JobSecret& secret, char who, const std::uint64_t server_nonce[2],
                   const std::uint64_t client_nonce[2]) {
  std::uint64_t tag[2];
  proof_tag(secret, who, server_nonce, client_nonce, tag);
  return {tag[0], tag[1]};
}

}  // namespace unjam
