// Threads that complete futures. A future's callbacks are the user's: they may take the GIL, and
// they may wait for other collectives, so neither unjam's own callback thread runs them, nor may
// one that blocks keep the others from running: there is always a thread for what is next.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace unjam_torch {

class Executor {
 public:
  // Lives as long as the process: its threads may be inside callbacks when that ends.
  static Executor& get() {
    static Executor* const executor = new Executor;
    return *executor;
  }

  void run(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ >= tasks_.size()) {
      ready_.notify_one();
    } else if (threads_ < kMostThreads) {
      ++threads_;
      std::thread([this] { work(); }).detach();
    }
  }

  // In the child of a fork() none of the threads is there, and the lock may be held by one of them.
  void forked() {
    new (&mutex_) std::mutex;
    new (&ready_) std::condition_variable;
    tasks_.clear();
    threads_ = idle_ = 0;
  }

 private:
  static constexpr std::size_t kMostThreads = 64;

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds goes before it sleeps
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;
};

}  // namespace unjam_torch
