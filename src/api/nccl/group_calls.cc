#include "api/nccl/group_calls.h"

#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "api/nccl/machine.h"

namespace unjam::nccl {
namespace {

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<Making> makings;
  Status failure;
};
thread_local Group group;

Status make(Making& making) {
  Status status = making.run();
  // By another thread: its handle is none any more.
  if (status.ok() && making.child != nullptr && making.child->aborted()) status = aborted_status();
  if (status.ok() || making.child == nullptr || !making.blocking) return status;
  take_back(*making.handle);
  give(making.handle, nullptr);
  return status;
}

// Several communicators are made by as many threads, for each waits for its own ranks.
Status make_all(std::vector<Making> makings) {
  std::vector<Status> said(makings.size());
  std::vector<std::thread> threads;
  Status status;
  bool in_progress = false;
  for (std::size_t i = 0; i < makings.size(); ++i) {
    Making& making = makings[i];
    try {
      if (!making.blocking) {
        in_progress = true;
        std::thread([making]() mutable { make(making); }).detach();
      } else if (makings.size() == 1) {
        said[i] = make(making);
      } else {
        threads.emplace_back([&making, &answer = said[i]] { answer = make(making); });
      }
    } catch (const std::system_error& e) {
      said[i] = {Code::kSystemError, std::string("no thread: ") + e.what()};
      if (making.child != nullptr) making.child->fail(said[i]);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& s : said) {
    if (status.ok()) status = s;
  }
  if (status.ok() && in_progress) return {Code::kInProgress, ""};
  return status;
}

}  // namespace

void start_group() { ++group.depth; }

Status noted(Status status) {
  if (group.depth != 0 && group.failure.ok() && !status.ok() && status.code != Code::kInProgress) {
    group.failure = status;
  }
  return status;
}

Status end_group() {
  if (group.depth == 0) {
    return invalid_usage("ncclGroupEnd without ncclGroupStart in this thread");
  }
  if (--group.depth != 0) return {};
  Group ended = std::exchange(group, Group{});
  if (!ended.failure.ok()) {
    for (const Making& making : ended.makings) {
      if (making.child == nullptr) continue;
      making.child->fail(ended.failure);
      take_back(*making.handle);
      give(making.handle, nullptr);
    }
    return {ended.failure.code, "a call of the group was refused: " + ended.failure.text};
  }
  Status status;
  if (!ended.makings.empty()) status = make_all(std::move(ended.makings));
  if (!status.ok() && status.code != Code::kInProgress) return status;
  if (!ended.operations.empty()) {
    const Status launched = Machine::get().launch(std::move(ended.operations));
    if (!launched.ok()) return launched;
  }
  return status;
}

Status discard_group() {
  if (group.depth == 0) {
    return invalid_usage("ncclGroupSimulateEnd without ncclGroupStart in this thread");
  }
  group.failure = invalid_usage("unjam does not estimate times of groups");
  const int depth = std::exchange(group.depth, 1);
  const Status status = end_group();
  group.depth = depth - 1;
  return status;
}

Status enqueue(Operation operation) {
  if (group.depth != 0) {
    group.operations.push_back(std::move(operation));
    return {};
  }
  std::vector<Operation> one;
  one.push_back(std::move(operation));
  return Machine::get().launch(std::move(one));
}

Status enqueue(Making making) {
  if (group.depth != 0) {
    group.makings.push_back(std::move(making));
    return {};
  }
  std::vector<Making> one;
  one.push_back(std::move(making));
  return make_all(std::move(one));
}

}  // namespace unjam::nccl
