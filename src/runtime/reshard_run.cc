// A run agrees on the plan first (an all-gather of its digest), then sends bundles along their
// routes by keyed sends and receives, a window of them at a time, in the plan's order. Of what a
// rank sends to another one, bundles take kKeysAPair keys in turns. On a GPU nothing here waits for
// the device but finish(), at the end. How, and what becomes of a run that fails:
// docs/internals/resharding-runs.md.
//
// No order can deadlock: take the first bundle in the plan's order that is not complete. All ranks
// that it reaches have begun it, for they have completed what comes before, the uses of its keys
// among it, and it waits for nothing else.
#include "runtime/reshard_run.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/types.h"
#include "runtime/reshard_arguments.h"
#include "runtime/reshard_memory.h"
#include "runtime/reshard_texts.h"

namespace unjam {
namespace {

constexpr const char* kGaveUp = "gave up";
// For room for a key, as long as nothing else of the run ends.
constexpr std::chrono::seconds kPatience{30};
constexpr auto kRetry = std::chrono::milliseconds(1);
constexpr std::uint32_t kKeysAPair = 32;
// Bundles under way on a GPU, at most: fewer keys may be under way there.
constexpr std::size_t kDeviceWindow = 16;
constexpr auto kLookAtStream = std::chrono::microseconds(20);

// Of what has the smaller elements; where both are equal, what the destination has, so that an
// element is cast once, by who sends it.
DType wire_dtype(const reshard::Tensor& tensor) {
  return dtype_bytes(tensor.src_dtype) < dtype_bytes(tensor.dst_dtype) ? tensor.src_dtype
                                                                       : tensor.dst_dtype;
}

BoxPlace at(const BoxPlace& whole, const std::vector<std::int64_t>& start) {
  BoxPlace place = whole;
  for (std::size_t d = 0; d < start.size(); ++d) place.data += start[d] * whole.strides[d];
  return place;
}

class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(std::shared_ptr<const ReshardPlan> plan, unjamGroup& group, ReshardCall call)
      : reshard_(std::move(plan)),
        plan_(reshard_->plan()),
        mine_(reshard_->of(group.rank)),
        context_(group.context),
        group_(group),
        call_(std::move(call)) {}

  Result start(unjamRequest** request);

 private:
  enum class What : std::uint8_t { kAgree, kRecv, kRecvWord, kSend, kSendWord };
  static bool sends(What what) { return what == What::kSend || what == What::kSendWord; }

  // Behind a bundle that was handed on: whether the sender had it, and if not, who is to blame.
  struct Word {
    std::int32_t code = UNJAM_SUCCESS;
    std::int32_t rank = -1;
  };

  // The keys of a step: of what it receives, and of what it sends to each child.
  struct Keys {
    std::uint32_t received = 0;
    std::vector<std::uint32_t> sent;
  };

  struct Live;
  struct Operation {
    std::shared_ptr<Run> run;
    What what = What::kAgree;
    Live* live = nullptr;
    int peer = -1;
    std::uint32_t key = 0;
    void* data = nullptr;
    std::uint64_t count = 0;
    unjamRequest* request = nullptr;
    Result result;
  };

  // A step under way.
  struct Live {
    const reshard::Step* step = nullptr;
    const Keys* keys = nullptr;
    std::int64_t bytes = 0;
    std::uint8_t* data = nullptr;  // of the bundle
    std::uint8_t* staging = nullptr;
    int receiving = 0, open = 0;  // operations under way: of both kinds, and all
    // What was got, and what is told; where sends and receives find them.
    Word* got = nullptr;
    Word* told = nullptr;
    Result failed;
  };

  // A send whose turn under its key comes when those before it were made.
  struct Turn {
    Live* live = nullptr;
    bool ready = false;
  };

  static void done(unjamResult_t, void* user);
  Result post(std::unique_ptr<Operation>& operation);
  void ask(What what, Live* live, int peer, std::uint32_t key, void* data, std::uint64_t count);
  void flush();
  bool nothing_parked() const { return parked_sends_.empty() && parked_.empty(); }
  std::unique_ptr<Operation> next();
  void ended(std::unique_ptr<Operation> operation);

  void work();
  Result carry_out();
  bool await_sources();
  void number_keys();
  std::size_t window() const;
  Result agreed() const;
  void copy_own();
  void begin(std::size_t number);
  void received(Live& live);
  void send_on(Live& live);
  void end_if_over(Live* live);
  std::uint8_t* batch_run(const std::vector<reshard::Segment>& segments,
                          const Places& places) const;
  void pack(Live& live) const;
  void unpack(const Live& live) const;
  std::size_t staged_steps(std::int64_t* most_bytes) const;
  Result prepare();
  void lose(const reshard::Step& step);
  void lose_all() {
    for (std::size_t t = 0; t < lost_.size(); ++t) lost_[t] = dst_[t].data != nullptr;
  }
  void note(const Result& error) {
    if (error_.ok()) error_ = error;
  }
  std::vector<std::string> lost_names() const;

  const std::shared_ptr<const ReshardPlan> reshard_;
  const reshard::Plan& plan_;
  const std::shared_ptr<const reshard::RankPlan> mine_;
  const std::shared_ptr<Context> context_;
  unjamGroup& group_;
  const ReshardCall call_;
  unjamRequest* request_ = nullptr;
  Places src_, dst_;
  std::unique_ptr<ReshardMemory> memory_;
  // In memory_: the own one, and those of all members.
  std::uint64_t* digest_ = nullptr;
  std::uint64_t* digests_ = nullptr;
  BoxMemory::End end_;  // what streams wait for

  // Of the run's own thread.
  std::vector<std::unique_ptr<Live>> live_;
  std::vector<Keys> keys_;                                                    // by step
  std::vector<Word*> words_;                                                  // free ones, in pairs
  std::map<std::pair<std::int32_t, std::uint32_t>, std::deque<Turn>> turns_;  // by child and key
  // For want of room. In order, for keys have one.
  std::deque<std::unique_ptr<Operation>> parked_sends_, parked_;
  std::string no_room_;  // why
  std::deque<std::unique_ptr<Operation>> refused_;
  std::vector<bool> lost_;
  Result error_;
  bool gave_up_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Operation>> ended_;
  bool over_ = false;

  // The run before it of the group and the key: their bundles have the same keys, which is why one
  // comes after the other.
  std::shared_ptr<Run> before_;
  friend class Order;
};

// The latest run of each group and key.
class Order {
 public:
  static Order& get() {
    static auto* const order = new Order;  // runs may end after what is static
    return *order;
  }
  // Together with its call, so that runs are in one order, whichever threads call.
  template <class F>
  Result enter(const std::shared_ptr<Run>& run, const F& call) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Run>& last = last_[{&run->group_, run->call_.key}];
    run->before_ = last;
    Result result = call();
    if (result.ok()) {
      last = run;
    } else if (last == nullptr) {
      last_.erase({&run->group_, run->call_.key});
    }
    return result;
  }
  void leave(const std::shared_ptr<Run>& run) {
    const std::lock_guard lock(mutex_);
    const auto at = last_.find({&run->group_, run->call_.key});
    if (at != last_.end() && at->second == run) last_.erase(at);
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const unjamGroup*, std::string>, std::shared_ptr<Run>> last_;
};

void Run::done(unjamResult_t, void* user) {
  std::unique_ptr<Operation> operation(static_cast<Operation*>(user));
  const std::shared_ptr<Run> run = operation->run;
  // (The request has its result: that comes before the callback.)
  operation->result = {operation->request->result, operation->request->message};
  operation->request->release();
  const std::lock_guard lock(run->mutex_);
  if (run->over_) return;  // it was given up
  run->ended_.push_back(std::move(operation));
  run->changed_.notify_all();  // the run's thread, and perhaps the next run's
}

// Takes the operation if it is under way.
Result Run::post(std::unique_ptr<Operation>& operation) {
  Operation& o = *operation;
  Call call;
  call.signature.dtype = DType::kUint8;
  call.signature.count = o.count;
  call.priority = call_.priority;
  call.callback = done;
  call.user = &o;
  Result result;
  if (o.what == What::kAgree) {
    call.signature.kind = Kind::kAllGather;
    call.signature.dtype = DType::kUint64;
    call.signature.set_match_text(call_.match_text.c_str());
    call.send = digest_;
    call.recv = o.data;
    result = context_->submit(group_, call_.key.c_str(), call, &o.request);
  } else {
    call.signature.kind = Kind::kSendRecv;
    if (gave_up_) call.signature.set_match_text(kGaveUp);
    if (sends(o.what)) {
      call.send = o.data;
    } else {
      call.recv = o.data;
    }
    if (o.data == o.live->staging && memory_->stream() != nullptr) {
      call.stream_order = UNJAM_STREAM_ASYNC;
      call.stream = memory_->stream();
    }
    const std::string key = call_.key + " bundle " + std::to_string(o.key);
    result = context_->transfer(group_, key.c_str(), call, o.peer, sends(o.what), &o.request);
  }
  if (result.ok()) {
    [[maybe_unused]] auto* const with_done = operation.release();
  }
  return result;
}

void Run::ask(What what, Live* live, int peer, std::uint32_t key, void* data, std::uint64_t count) {
  ++live->open;
  auto operation = std::make_unique<Operation>();
  operation->run = shared_from_this();
  operation->what = what;
  operation->live = live;
  operation->peer = peer;
  operation->key = key;
  operation->data = data;
  operation->count = count;
  (sends(what) ? parked_sends_ : parked_).push_back(std::move(operation));
}

// Makes the calls that wait for that. What cannot be made has ended. Sends come first: for want of
// room all that is under way may be receives of what is behind what they send.
void Run::flush() {
  for (auto* parked : {&parked_sends_, &parked_}) {
    while (!parked->empty()) {
      std::unique_ptr<Operation> operation = std::move(parked->front());
      Result result = post(operation);
      if (!result.ok() && result.transient) {
        parked->front() = std::move(operation);
        no_room_ = std::move(result.message);
        return;
      }
      parked->pop_front();
      if (!result.ok()) {
        operation->result = std::move(result);
        refused_.push_back(std::move(operation));
      }
    }
  }
}

// Waits for one to end.
std::unique_ptr<Run::Operation> Run::next() {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    flush();
    std::unique_ptr<Operation> operation;
    if (!refused_.empty()) {
      operation = std::move(refused_.front());
      refused_.pop_front();
      return operation;
    }
    std::unique_lock lock(mutex_);
    const auto has_one = [&] { return !ended_.empty(); };
    if (nothing_parked()) {
      changed_.wait(lock, has_one);
    } else if (!changed_.wait_for(lock, kRetry, has_one)) {
      // Ranks that are at different bundles may each hold what another one needs.
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error(no_room_);
      continue;
    }
    operation = std::move(ended_.front());
    ended_.pop_front();
    return operation;
  }
}

// Segments that lie in local memory as in the bundle: where the bundle is, then. nullptr: they do
// not.
std::uint8_t* Run::batch_run(const std::vector<reshard::Segment>& segments,
                             const Places& places) const {
  std::uint8_t* base = nullptr;
  for (const reshard::Segment& segment : segments) {
    const BoxPlace place = at(places[segment.tensor], segment.start);
    if (place.dtype != wire_dtype(plan_.request.tensors[segment.tensor]) ||
        !is_contiguous(place, segment.size)) {
      return nullptr;
    }
    std::uint8_t* const begin = place.data - segment.at;
    if (base != nullptr && begin != base) return nullptr;
    base = begin;
  }
  return base;
}

void Run::pack(Live& live) const {
  std::vector<ReshardMemory::Copy> copies;
  for (const reshard::Segment& segment : live.step->pack) {
    const DType wire = wire_dtype(plan_.request.tensors[segment.tensor]);
    copies.push_back({at(src_[segment.tensor], segment.start),
                      {live.data + segment.at, wire, row_major(segment.size, wire)},
                      &segment.size});
  }
  memory_->copy(copies);
}

void Run::unpack(const Live& live) const {
  std::vector<ReshardMemory::Copy> copies;
  for (const reshard::Segment& segment : live.step->unpack) {
    const DType wire = wire_dtype(plan_.request.tensors[segment.tensor]);
    copies.push_back({{live.data + segment.at, wire, row_major(segment.size, wire)},
                      at(dst_[segment.tensor], segment.start),
                      &segment.size});
  }
  memory_->copy(copies);
}

void Run::copy_own() {
  std::vector<ReshardMemory::Copy> copies;
  for (const reshard::CopyBox& copy : mine_->copies) {
    const BoxPlace from = at(src_[copy.tensor], copy.box.src_start);
    const BoxPlace to = at(dst_[copy.tensor], copy.box.dst_start);
    if (from.data != to.data) copies.push_back({from, to, &copy.box.size});
  }
  memory_->copy(copies);
}

// Steps whose bundles lie in no tensor as they travel, and the most bytes of one.
std::size_t Run::staged_steps(std::int64_t* most_bytes) const {
  std::size_t steps = 0;
  for (const reshard::Step& step : mine_->steps) {
    const bool first = step.parent < 0;
    // (A host's memory costs nothing before it is used.)
    if (!context_->on_host() && (first ? batch_run(step.pack, src_) : batch_run(step.unpack, dst_)))
      continue;
    ++steps;
    *most_bytes = std::max(*most_bytes, plan_.bundles[step.bundle].bytes);
  }
  return steps;
}

std::size_t Run::window() const {
  const auto most = static_cast<std::size_t>(plan_.request.options.window);
  return memory_->stream() != nullptr ? std::min(most, kDeviceWindow) : most;
}

void Run::number_keys() {
  std::map<std::int32_t, std::uint32_t> from, to;
  for (const reshard::Step& step : mine_->steps) {
    Keys keys;
    if (step.parent >= 0) keys.received = from[step.parent]++ % kKeysAPair;
    for (const std::int32_t child : step.children) keys.sent.push_back(to[child]++ % kKeysAPair);
    keys_.push_back(std::move(keys));
  }
}

void Run::begin(std::size_t number) {
  const reshard::Step& step = mine_->steps[number];
  live_.push_back(std::make_unique<Live>());
  Live& live = *live_.back();
  const bool first = step.parent < 0;
  live.step = &step;
  live.keys = &keys_[number];
  live.got = words_.back();
  live.told = live.got + 1;
  *live.got = *live.told = {};
  words_.pop_back();
  for (std::size_t c = 0; c < step.children.size(); ++c) {
    turns_[{step.children[c], live.keys->sent[c]}].push_back({&live, false});
  }
  const reshard::Bundle& bundle = plan_.bundles[step.bundle];
  if (gave_up_) {
    live.data = reinterpret_cast<std::uint8_t*>(live.told);  // for nothing
    live.bytes = 1;
    if (!first) {
      live.receiving = 1;
      ask(What::kRecv, &live, step.parent, live.keys->received, live.got, 1);
    }
    send_on(live);
    return;
  }
  live.bytes = bundle.bytes;
  live.data = first ? batch_run(step.pack, src_) : batch_run(step.unpack, dst_);
  if (live.data == nullptr) live.data = live.staging = memory_->take();
  if (first) {
    if (live.staging != nullptr) pack(live);
    send_on(live);
    return;
  }
  live.receiving = 1;
  ask(What::kRecv, &live, step.parent, live.keys->received, live.data,
      static_cast<std::uint64_t>(live.bytes));
  if (step.parent != bundle.hops[0].rank) {
    ++live.receiving;
    ask(What::kRecvWord, &live, step.parent, live.keys->received, live.got, sizeof(*live.got));
  }
}

// As its turn comes for each child.
void Run::send_on(Live& live) {
  for (std::size_t c = 0; c < live.step->children.size(); ++c) {
    const std::int32_t child = live.step->children[c];
    const std::uint32_t key = live.keys->sent[c];
    ++live.open;  // until its turn
    std::deque<Turn>& turns = turns_[{child, key}];
    for (Turn& turn : turns) turn.ready |= turn.live == &live;
    for (; !turns.empty() && turns.front().ready; turns.pop_front()) {
      Live& now = *turns.front().live;
      ask(What::kSend, &now, child, key, now.data, static_cast<std::uint64_t>(now.bytes));
      if (now.step->parent >= 0 && !gave_up_) {
        ask(What::kSendWord, &now, child, key, now.told, sizeof(*now.told));
      }
      --now.open;
    }
  }
}

void Run::lose(const reshard::Step& step) {
  for (const reshard::Segment& segment : step.unpack) lost_[segment.tensor] = true;
}

// All that a rank receives of a bundle has come, or has failed.
void Run::received(Live& live) {
  const Word got = *live.got;
  if (live.failed.ok() && got.code != UNJAM_SUCCESS) {
    live.failed = {got.code < 0 || got.code > UNJAM_ERROR_INTERNAL
                       ? UNJAM_ERROR_INTERNAL
                       : static_cast<unjamResult_t>(got.code),
                   "rank " + std::to_string(got.rank) + " did not get what it was to hand on"};
  }
  if (!live.failed.ok()) {
    note(live.failed);
    lose(*live.step);
    *live.told =
        got.code != UNJAM_SUCCESS ? got : Word{live.failed.code, std::int32_t{group_.rank}};
    // What children get instead is nothing that has lain there.
    if (live.staging != nullptr) memory_->clear(live.data, live.bytes);
  }
  send_on(live);
  flush();  // others need it sooner than this rank
  if (live.failed.ok() && live.staging != nullptr) unpack(live);
}

void Run::end_if_over(Live* live) {
  if (live->open != 0) return;
  if (live->staging != nullptr) memory_->give_back(live->staging);
  words_.push_back(live->got);
  live_.erase(std::find_if(live_.begin(), live_.end(),
                           [&](const std::unique_ptr<Live>& l) { return l.get() == live; }));
}

void Run::ended(std::unique_ptr<Operation> operation) {
  Live* const live = operation->live;
  --live->open;
  const bool receives = !sends(operation->what);
  if (operation->result.code == UNJAM_ERROR_MISMATCH) {
    // Plans are equal, so it is this.
    operation->result = {UNJAM_ERROR_PEER, "rank " + std::to_string(operation->peer) +
                                               " gave the run up: a rank was gone before it had "
                                               "seen that all agree"};
  }
  if (!operation->result.ok()) {
    if (receives && live->failed.ok()) live->failed = operation->result;
    note(operation->result);
  }
  if (receives && --live->receiving == 0 && !gave_up_) received(*live);
  end_if_over(live);
}

Result Run::agreed() const {
  const std::vector<std::uint64_t> digests(digests_, digests_ + group_.members.size());
  std::vector<std::uint64_t> kinds = digests;
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  if (kinds.size() == 1) return {};
  std::string text = "ranks have made different plans: ";
  for (std::size_t k = 0; k < kinds.size() && k < kMostNames; ++k) {
    std::vector<std::size_t> ranks;
    for (std::size_t r = 0; r < digests.size(); ++r) {
      if (digests[r] == kinds[k]) ranks.push_back(r);
    }
    char digest[17];
    std::snprintf(digest, sizeof(digest), "%016llx", static_cast<unsigned long long>(kinds[k]));
    text += (k == 0 ? "" : "; ") + std::string(digest) + " on rank" +
            (ranks.size() == 1 ? " " : "s ") +
            list_text(ranks, [](std::size_t r) { return std::to_string(r); });
  }
  return {UNJAM_ERROR_MISMATCH,
          text +
              ". Nothing was moved. Plan with the same meshes, placements, tensors, topology "
              "and options on all ranks"};
}

Result Run::carry_out() {
  const std::unique_ptr<Operation> agreement = next();
  if (agreement->result.code == UNJAM_ERROR_PEER) {
    lose_all();
    note(agreement->result);
    gave_up_ = true;
  } else if (Result result = agreement->result.ok() ? agreed() : agreement->result; !result.ok()) {
    // Of all other errors all ranks are told.
    lose_all();
    return result;
  }
  if (before_ != nullptr) {
    std::unique_lock lock(before_->mutex_);
    before_->changed_.wait(lock, [&] { return before_->over_; });
  }
  before_ = nullptr;
  if (!gave_up_ && !await_sources()) {
    lose_all();
    gave_up_ = true;
  }
  number_keys();
  const std::size_t most = window();
  std::size_t begun = 0;
  bool copied = gave_up_;
  while (begun < mine_->steps.size() || !live_.empty() || !copied) {
    // Not more than there is room for: else what is behind would keep the first ones from it.
    while (begun < mine_->steps.size() && live_.size() < most && nothing_parked()) {
      begin(begun++);
      flush();
    }
    // Others wait for what is begun, and nobody for this.
    if (!std::exchange(copied, true)) copy_own();
    if (!live_.empty()) ended(next());
  }
  memory_->finish();
  return error_;
}

// False: the context was aborted, and the caller's stream may never come to where it was.
bool Run::await_sources() {
  while (!memory_->sources_are_ready()) {
    // (Also where another error came first, which stays what async_error() says.)
    if (Result why = context_->why_closed(); !why.ok()) {
      note(why);
      return false;
    }
    std::this_thread::sleep_for(kLookAtStream);
  }
  return true;
}

std::vector<std::string> Run::lost_names() const {
  std::vector<std::string> names;
  for (std::size_t t = 0; t < lost_.size(); ++t) {
    if (lost_[t]) names.push_back(plan_.request.tensors[t].name);
  }
  return names;
}

void Run::work() {
  Result result;
  try {
    memory_->enter();
    result = carry_out();
  } catch (const std::exception& e) {
    // Nobody else waits for ever: peers would, for what this rank does not send any more.
    result = {UNJAM_ERROR_SYSTEM, std::string("the resharding was given up: ") + e.what()};
    context_->abort(UNJAM_ERROR_ABORTED, result.message);
    lose_all();
  }
  const std::vector<std::string> lost = lost_names();
  if (!result.ok()) {
    result.message += lost.empty()
                          ? ". All tensors of rank " + std::to_string(group_.rank) + " are complete"
                          : ". Not complete on rank " + std::to_string(group_.rank) + ": " +
                                list_text(lost, quoted);
  }
  Order::get().leave(shared_from_this());
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  if (end_.word != nullptr) context_->boxes()->reach(end_);
  context_->end_request(group_, std::exchange(request_, nullptr), result, lost);
}

// What a run needs beside its tensors.
Result Run::prepare() {
  BoxMemory* const boxes = context_->boxes();
  if (boxes == nullptr && !context_->on_host()) {
    return {UNJAM_ERROR_INVALID_USAGE,
            "this rank's GPU cannot pack and unpack tensors (" + context_->no_boxes_because() +
                "): reshard in host memory, by a context on the host device"};
  }
  std::shared_ptr<void> after;
  if (boxes != nullptr && call_.stream_order == UNJAM_STREAM_ASYNC) {
    std::string error;
    after = boxes->mover().note(call_.stream, error);
    if (after == nullptr) return {UNJAM_ERROR_SYSTEM, error};
  }
  memory_ = make_reshard_memory(boxes, std::move(after));
  std::int64_t most_bytes = 0;
  const std::size_t staged = staged_steps(&most_bytes);
  const std::size_t size = group_.members.size();
  const std::size_t most = std::min(window(), mine_->steps.size());
  if (Result r = memory_->reserve(std::min(most, staged), most_bytes, 1 + size + 2 * most);
      !r.ok()) {
    return r;
  }
  digest_ = memory_->words();
  digests_ = digest_ + 1;
  *digest_ = plan_.digest;
  static_assert(sizeof(Word) == sizeof(std::uint64_t));
  auto* const words = reinterpret_cast<Word*>(digests_ + size);
  for (std::size_t i = 0; i < most; ++i) words_.push_back(words + 2 * i);
  return {};
}

Result Run::start(unjamRequest** request) {
  if (Result r = take_parts(plan_, group_, call_.src, call_.dst, &src_, &dst_); !r.ok()) return r;
  lost_.resize(plan_.request.tensors.size(), false);
  if (Result r = prepare(); !r.ok()) return r;

  unjamRequest* made = nullptr;
  if (BoxMemory* const boxes = context_->boxes(); boxes != nullptr) {
    end_ = boxes->take_end();
    if (end_.word == nullptr) {
      return {UNJAM_ERROR_RESOURCES,
              "too many runs of resharding are under way on this rank: wait for some",
              /*transient=*/true};
    }
  }
  const auto give_back_end = [&] {
    if (end_.word != nullptr) context_->boxes()->reach(end_);
  };
  if (Result r = context_->begin_request(group_, call_.callback, call_.user, &made); !r.ok()) {
    give_back_end();
    return r;
  }
  request_ = made;
  made->end = end_;
  const auto give_up = [&](const Result& result) {
    give_back_end();
    context_->end_request(group_, std::exchange(request_, nullptr), result, {}, false);
    made->release();
  };
  Result result;
  try {
    auto operation = std::make_unique<Operation>();
    operation->run = shared_from_this();
    operation->data = digests_;
    operation->count = 1;
    // The thread before the call: what has been called cannot be taken back.
    std::promise<bool> called;
    std::thread thread([self = shared_from_this(), ready = called.get_future()]() mutable {
      if (ready.get()) self->work();
    });
    try {
      result = Order::get().enter(shared_from_this(), [&] { return post(operation); });
    } catch (const std::exception& e) {
      result = {UNJAM_ERROR_SYSTEM, e.what()};
    }
    called.set_value(result.ok());
    thread.detach();
  } catch (const std::exception& e) {
    result = {UNJAM_ERROR_SYSTEM, std::string("no thread for the resharding: ") + e.what()};
  }
  if (!result.ok()) {
    give_up(result);
    return result;
  }
  if (request != nullptr) {
    *request = made;
  } else {
    made->release();
  }
  return {};
}

}  // namespace

std::shared_ptr<const reshard::RankPlan> ReshardPlan::of(std::int32_t rank) const {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const reshard::RankPlan>& found = ranks_[rank];
  if (found == nullptr) {
    found = std::make_shared<const reshard::RankPlan>(reshard::rank_plan(plan_, rank));
  }
  return found;
}

Result run_reshard(std::shared_ptr<const ReshardPlan> plan, unjamGroup& group, ReshardCall call,
                   unjamRequest** request) {
  return std::make_shared<Run>(std::move(plan), group, std::move(call))->start(request);
}

}  // namespace unjam
