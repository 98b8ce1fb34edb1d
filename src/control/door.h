// A TCP port at which others may knock: it can be shut, and opened again with the same number.
#pragma once

#include <string>

#include "base/fd.h"
#include "control/socket_address.h"

namespace unjam {

class Door {
 public:
  // Opens at that address; port 0: any. False: `error` says why.
  bool open(const SocketAddress& at, std::string& error);
  // Nobody can connect until reopen(). The port stays ours, but a process of the same user could
  // take it: whoever connects asks for the proof of the secret.
  void shut();
  bool reopen(std::string& error);
  void release();

  bool is_open() const { return open_; }
  bool kept() const { return static_cast<bool>(socket_); }  // open, or shut
  int fd() const { return socket_.get(); }
  const SocketAddress& address() const { return address_; }
  // The next who has knocked; none: nobody, or (`crowded`) there are no descriptors left.
  Fd accept(bool& crowded);

 private:
  Fd socket_;
  SocketAddress address_;
  bool open_ = false;
};

// Begins to connect; done when the socket is writable. Nothing: `error` says why.
Fd begin_connect(const SocketAddress& to, std::string& error);
// What became of it. False: `error` says why.
bool end_connect(int socket, std::string& error);

}  // namespace unjam
