// Threads that complete futures. A future's callbacks are the user's: they may take the GIL, and
// they may wait for other collectives, so neither unjam's own callback thread runs them, nor may
// one that blocks keep the others from running: there is a thread for what is next, unless
// kMostThreads are blocked.
#pragma once

#include <chrono>
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

  // Never throws: where no thread can be had, those that are there do it later.
  void run(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      // What it holds may need Python, which is going: it stays.
      new std::function<void()>(std::move(task));
      return;
    }
    tasks_.push_back(std::move(task));
    if (idle_ >= tasks_.size()) {
      changed_.notify_all();
      return;
    }
    if (threads_ == kMostThreads) return;
    try {
      std::thread([this] { work(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
    }
  }

  // At the end of the process: waits for what is under way, not long, and does nothing afterwards.
  void close() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(1),
                      [this] { return tasks_.empty() && idle_ == threads_; });
    closed_ = true;
    for (auto& task : tasks_) new std::function<void()>(std::move(task));
    tasks_.clear();
  }

  // Whether the calling thread is one of its own.
  static bool runs_this_thread() { return own_; }

  // In the child of a fork() none of the threads is there, and nobody knows what they were at.
  void forked() {
    new (&mutex_) std::mutex;
    new (&changed_) std::condition_variable;
    new (&tasks_) std::deque<std::function<void()>>;
    threads_ = idle_ = 0;
  }

 private:
  static constexpr std::size_t kMostThreads = 1024;

  void work() {
    own_ = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds goes before it sleeps
      lock.lock();
    }
  }

  static inline thread_local bool own_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;
  bool closed_ = false;
};

}  // namespace unjam_torch
