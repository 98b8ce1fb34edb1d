#include "runtime/reshard_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/atomics.h"
#include "base/pause.h"
#include "device/host/boxes.h"

namespace unjam {
namespace {

class HostMemory : public ReshardMemory {
 public:
  Result reserve(std::size_t, std::int64_t bytes, std::size_t words) override {
    bytes_ = bytes;
    words_.assign(words, 0);
    return {};
  }
  std::uint64_t* words() override { return words_.data(); }
  std::uint8_t* take() override {
    if (spare_.empty()) {
      all_.emplace_back(new std::uint8_t[static_cast<std::size_t>(bytes_)]);
      return all_.back().get();
    }
    std::uint8_t* const bundle = spare_.back();
    spare_.pop_back();
    return bundle;
  }
  void give_back(std::uint8_t* bundle) override { spare_.push_back(bundle); }
  void copy(const std::vector<Copy>& copies) override {
    for (const Copy& c : copies) copy_box(c.from, c.to, *c.size);
  }
  void clear(std::uint8_t* memory, std::int64_t bytes) override {
    std::memset(memory, 0, static_cast<std::size_t>(bytes));
  }

 private:
  std::int64_t bytes_ = 0;
  std::vector<std::uint64_t> words_;
  std::vector<std::unique_ptr<std::uint8_t[]>> all_;
  std::vector<std::uint8_t*> spare_;
};

class DeviceMemory : public ReshardMemory {
 public:
  DeviceMemory(BoxMemory& boxes, std::shared_ptr<void> after)
      : boxes_(boxes), after_(std::move(after)) {}
  ~DeviceMemory() override {
    for (const std::uint8_t* const bundle : all_) boxes_.give_back(bundle);
    if (words_ != nullptr) boxes_.give_back_words(words_);
  }

  Result reserve(std::size_t bundles, std::int64_t bytes, std::size_t words) override {
    // (And one more, for finish().)
    words_ = boxes_.take_words(words + 1);
    if (words_ == nullptr) {
      return {UNJAM_ERROR_RESOURCES,
              "too many runs of resharding are under way on this rank: wait for some",
              /*transient=*/true};
    }
    std::fill_n(words_, words + 1, 0);
    done_ = words_ + words;
    std::string error;
    for (std::size_t i = 0; i < bundles; ++i) {
      unsigned char* const bundle = boxes_.take(static_cast<std::uint64_t>(bytes), error);
      if (bundle == nullptr) {
        return {UNJAM_ERROR_RESOURCES, "no memory for " + std::to_string(bundles) + " bundles of " +
                                           std::to_string(bytes) +
                                           " bytes on the device: plan with a smaller max_bytes (" +
                                           error + ")"};
      }
      all_.push_back(bundle);
      spare_.push_back(bundle);
    }
    return {};
  }
  std::uint64_t* words() override { return words_; }
  std::uint8_t* take() override {
    if (spare_.empty()) throw std::logic_error("more bundles are under way than were reserved");
    std::uint8_t* const bundle = spare_.back();
    spare_.pop_back();
    return bundle;
  }
  void give_back(std::uint8_t* bundle) override { spare_.push_back(bundle); }

  void copy(const std::vector<Copy>& copies) override {
    list_.clear();
    for (const Copy& c : copies) append_copies(c.from, c.to, *c.size, &list_);
    if (list_.empty()) return;
    queued_ = true;
    must(boxes_.mover().copy(list_, error_));
  }
  void clear(std::uint8_t* memory, std::int64_t bytes) override {
    queued_ = true;
    must(boxes_.mover().clear(memory, static_cast<std::uint64_t>(bytes), error_));
  }
  void* stream() const override { return boxes_.mover().stream(); }
  void enter() override { boxes_.mover().enter(); }
  bool sources_are_ready() override {
    if (after_ == nullptr) return true;
    bool past = false;
    must(boxes_.mover().is_past(after_.get(), past, error_));
    if (past) after_ = nullptr;
    return past;
  }
  void finish() override {
    if (!queued_) return;
    queued_ = false;
    must(boxes_.mover().tell(done_, ++told_, error_));
    // (Kernels that copy are short, and may stand behind the user's.)
    for (int round = 0; load_acquire(*done_) != told_; ++round) {
      if (round < 1000) {
        pause_core();
      } else {
        usleep(20);
      }
    }
  }

 private:
  void must(bool done) const {
    if (!done) throw std::runtime_error(error_);
  }

  BoxMemory& boxes_;
  std::shared_ptr<void> after_;
  std::uint64_t* words_ = nullptr;
  std::uint64_t* done_ = nullptr;
  std::uint64_t told_ = 0;
  bool queued_ = false;
  std::vector<std::uint8_t*> all_, spare_;
  std::vector<BoxCopy> list_;
  std::string error_;
};

}  // namespace

std::unique_ptr<ReshardMemory> make_reshard_memory(BoxMemory* boxes, std::shared_ptr<void> after) {
  if (boxes == nullptr) return std::make_unique<HostMemory>();
  return std::make_unique<DeviceMemory>(*boxes, std::move(after));
}

}  // namespace unjam
