// A job as one process sees it: the ranks that joined under one unique id, in this process and in
// others, their arenas, and what their processes tell each other (control/mesh.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/mesh.h"
#include "control/rendezvous.h"
#include "control/waitfor.h"
#include "plan/host_table.h"
#include "runtime/ledger.h"
#include "runtime/rank_arenas.h"
#include "runtime/rooms.h"
#include "runtime/settings.h"
#include "runtime/window_maps.h"
#include "unjam/unjam.h"

namespace unjam {

class Context;
class CourierDriver;
class HostsMeeting;
class NetCarrier;
class Network;
struct Signature;
struct CallRecord;

// "key 'k' of group 'g', use 3"
std::string call_text(const std::string& key, const std::string& group, std::uint64_t n);
// "ranks 1, 2": in ascending order, however their group is ordered, so that all ranks say the same.
std::string rank_list(std::vector<int> ranks);

// From the closing of a dying process's sockets to its end, which a busy machine puts off. Its
// death is to be known within a second, also where a GPU is in use, whose driver takes its time.
inline constexpr int kLastBreathMs = 400;

class World : private Rooms::Memory {
 public:
  // Ranks meet others by the secret; without one all are in this process, joined by one thread.
  World(int ranks, const Settings& first_settings, std::optional<JobSecret> secret = {});
  ~World() override;

  // Of a job without a secret (unjamInitAll): settings with which its ranks can share the CUDA
  // devices there are.
  static void share_devices(int ranks, Settings& settings);
  // Whether long packets are lines, where nobody has said it: if GPUs reach each other by links on
  // which they come whole. Before ranks join, who must agree on it.
  static void decide_lines(Settings& settings);

  // This process's world of that id.
  static std::shared_ptr<World> by_id(const unjamUniqueId_t& id, int ranks,
                                      const Settings& settings, unjamResult_t& code,
                                      std::string& error);

  int ranks() const { return ranks_; }
  // Once all have joined: processes of the job, and what a job says of itself when it starts.
  int processes() const { return alone() ? 1 : static_cast<int>(pids_.size()); }
  std::string banner(const Settings& settings) const;
  // As which hosts ranks count (UNJAM_HOST_ID), and which rank as which; empty: all as one.
  const std::vector<std::string>& hosts() const { return hosts_; }
  const std::vector<int>& host_of() const { return host_of_; }
  // Ranks of the job for each CPU that any of them may run on, rounded up; once all have joined.
  // (Ranks that are bound to CPUs of their own are as many as those.) All ranks have the same.
  int ranks_a_core() const;
  // What takes lanes' slices to other hosts; null: all ranks are on this one.
  CourierDriver* network() const;
  // What that is, with version and file; "": nothing is needed.
  std::string carrier() const;
  // Whether a rank is on another host.
  bool is_remote_rank(int rank) const {
    return is_remote(process_of_[static_cast<std::size_t>(rank)]);
  }
  // Of a rank, for people: its host where there are several, else "".
  std::string host_name(int rank) const;
  // Something was announced for a call of these members.
  void announced(const std::vector<int>& members, std::uint64_t tag);
  // All that ranks of this process have sent to other hosts is to be there before the process ends.
  void flush_network();
  // Of the members of a group; nothing: all are on one host.
  std::optional<HostTable> host_table(const std::vector<int>& members) const;
  // In whose log lines belong that are about the process.
  int log_rank() const;
  const ArenaShape& shape() const { return arenas_.shape(); }
  // Where the ranks' arenas are: on the host, or on CUDA devices (then null until enter_device()).
  unsigned char* const* bases() const { return arenas_.bases(); }
  // Whether a rank is of this process.
  bool is_local(int rank) const override {
    return process_of_[static_cast<std::size_t>(rank)] == me_;
  }
  CudaDriver* cuda() const { return arenas_.cuda(); }
  // CUDA: the device of a rank of this process, and the host memory that its device and its peers'
  // share (kLinkBytes).
  int device_of(int rank) const { return arenas_.device_of(rank); }
  unsigned char* link(int rank) const { return arenas_.link(rank); }
  // CUDA: maps all ranks' arenas for a rank's device; all must have joined.
  bool enter_device(int rank, std::string& error);
  std::uint64_t arena_committed(int rank) const { return arenas_.committed(rank); }
  // Where the members of a group announce their calls of a key, see transport/announcement.h.
  std::uint64_t* announcements(const std::vector<int>& members, std::uint64_t tag) const;

  // Contributes rank's memory; `settings` must agree with those of the ranks before.
  unjamResult_t join(int rank, const Settings& settings, std::string& error);
  // Waits until all ranks have joined.
  unjamResult_t wait_joined(int rank, std::int64_t timeout_ms, std::string& error);

  // Of this process's ranks; null: all memory of all arenas is there.
  Rooms* rooms() const { return rooms_.get(); }

  // ---- windows (unjamMemRegister()), world_windows.cc ----
  // A rank's table of its peers' windows. Null: `error`.
  WindowEntry* windows_of(int rank, std::string& error) { return windows_.table(rank, error); }
  WindowMaps::Usage windows_mapped(int rank) const { return windows_.usage(rank); }
  // Lets peers know, now or some time, of a window of a rank of this process. `unnamed`: why other
  // processes do not; "": they do, or there are none.
  void open_window(int rank, std::uint64_t serial, unsigned char* base, std::string& unnamed);
  // Nobody is invited into them any more. Waits for other processes to let go of them, for a moment
  // at most.
  struct ClosedWindow {
    std::uint64_t serial = 0;
    bool stored_into = false;  // a call into it has failed: its mappings stay
  };
  void close_windows(int rank, const std::vector<ClosedWindow>& windows);
  // Windows of a rank that are closed, and that other processes have yet to let go of.
  std::uint64_t windows_left(int rank) const;

  void attach(Context* context);
  // `calls`: how often the rank has called each key. untaken: see RankSnapshot.
  void detach(Context* context, std::map<std::uint64_t, std::uint64_t> calls,
              std::vector<PendingCall> untaken);
  // Ends other ranks' invocations in groups with `rank`. ended: but for those of which it has
  // completed its part, and will complete no more (see ending.h). Not while holding a context's
  // lock.
  void tell_peers_gone(int rank, const std::string& why, bool ended = false);
  // A rank that is gone in that way, and what can still be had of it; legacy: null if nothing.
  struct Gone {
    std::string why;
    std::shared_ptr<const Legacy> legacy;
    std::vector<int> given_up;  // who has met that, see Context::give_up()
  };
  // Those of `members`, in their order.
  std::vector<std::pair<int, Gone>> gone(const std::vector<int>& members) const;
  // A rank of this process has given up calls on account of `of`: other processes are told at once,
  // ranks of this one soon (see Context::given_up()). Without the lock.
  void gave_up(int rank, int of);
  // Where a rank writes down what it has completed.
  LedgerMemory& ledger(int rank) const { return arenas_.ledger(rank); }
  // The process ends by itself: its ranks' ledgers say so. Without a lock.
  void say_exit();
  // Ends a call on all ranks, before the caller makes it.
  void refuse(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
              const std::string& text);
  // The same for a rank that will not make it any more, nor any later use of its key.
  void abandon(std::uint64_t tag, std::uint64_t n, const std::vector<int>& members,
               const std::string& text);
  // Ranks that were aborted, whose process died, or that have left.
  std::vector<int> absent() const;

  // Why an invocation has ended on all ranks, those included that call it later.
  struct Verdict {
    unjamResult_t code = UNJAM_SUCCESS;
    std::string text;
  };
  // Compares what `caller` is about to call as use n of a key with what other members have called.
  // If members of this process differ: says how, and ends it on all of them. Those of other
  // processes are asked: if they differ, the call ends soon after. `ended`: another rank has
  // announced that it has been ended, whose reasons are waited for. Not while holding a context's
  // lock.
  Verdict compare(const Context& caller, std::uint64_t tag, std::uint64_t n,
                  const Signature& signature, const std::vector<int>& members,
                  const std::string& what, bool ended);

  // Whether `member` has called use n of a key, as far as is known: of another process's rank by
  // what that answered to an earlier question. Not while holding a context's lock.
  bool called(std::uint64_t tag, std::uint64_t n, int member);

  // May wait for other processes, a second at most.
  std::string explain();

 private:
  // What the ranks of other processes have said of use n of a key.
  struct Inquiry {
    std::vector<int> members;
    std::string what;
    std::set<int> waits_for;  // processes
    std::map<int, SaidItem> said;
    std::uint64_t asked_ns = 0;
  };
  using CallKey = std::pair<std::uint64_t, std::uint64_t>;  // (tag, n)

  struct Probe {
    std::uint64_t asked_ns = 0;
    bool waits = false;  // for an answer
    bool called = false;
  };

  // Snapshots of all ranks, on their way.
  struct Gathering {
    std::vector<RankSnapshot> ranks;
    std::set<int> busy;              // ranks that could not look
    std::set<int> asked, waits_for;  // processes
    bool print = false;              // nobody waits for it: to be printed
    void add(RankSnapshot snapshot);
    // Of a second look, what the first one saw, which is what is printed.
    std::vector<RankSnapshot> before;
    std::vector<AbsentRank> absent;
    std::uint64_t deadline_ns = 0;
  };

  struct Disagreement {
    std::uint64_t from = 0;  // the first use
    unjamResult_t code = UNJAM_ERROR_MISMATCH;
    std::string text;
  };

  unjamResult_t check_join(int rank, const std::string& agreed, bool host_is_valid,
                           std::string& error);
  std::vector<int> missing() const;
  bool know_who(std::unique_lock<std::mutex>& lock);
  // The control thread.
  void control();
  void meet(std::unique_lock<std::mutex>& lock);
  void await_start(std::unique_lock<std::mutex>& lock);
  void leave_rendezvous(std::unique_lock<std::mutex>& lock);
  bool adopt_memory();
  void begin();
  // ---- world_hosts.cc: a job on several hosts ----
  void open_hosts(const Settings& settings);
  std::string hosts_settings(const std::string& agreed, const Settings& settings);
  void meet_hosts(std::unique_lock<std::mutex>& lock);
  bool run_hosts(std::unique_lock<std::mutex>& lock, const std::function<bool()>& until);
  bool take_places();
  bool meet_here(std::unique_lock<std::mutex>& lock);
  bool open_network();
  bool meet_pairs(std::unique_lock<std::mutex>& lock);
  bool is_remote(int process) const {
    return network_ != nullptr && remote_[static_cast<std::size_t>(process)];
  }
  std::string process_text(int process) const;
  std::size_t host_index(int process) const;
  void take_network_news();
  void tell_lost(int process, const std::string& why);
  void on_said_lost(int by, const LostMessage& m);
  void fail_meeting(const std::string& why);
  void fail_start(const std::string& why);
  // Its reactions to messages; with the lock.
  void on_message(int process, Frame& frame);
  bool misses(int process) const;
  // A process is heard no more. What its ranks have given up on another's account (see given_up_)
  // must be told with that one's name: while its end is not known here, theirs waits a moment.
  struct Loss {
    int process = 0;
    bool died = false;
    std::string why;
    std::uint64_t until_ns = 0;  // for so long
  };
  void on_lost(Loss loss);
  bool follows_another(int process) const;
  void take_losses();  // those that wait no longer
  void lose(const Loss& loss);
  void on_snapshot_request(int process, const SnapshotRequestMessage& m);
  void on_snapshot(int process, SnapshotMessage& m);
  void on_query(int process, const QueryMessage& query);
  void on_answer(int process, const AnswerMessage& answer);
  void mark_gone(int rank, const std::string& why, const std::shared_ptr<const Legacy>& legacy);
  std::shared_ptr<const Legacy> legacy_of(int rank) const;
  void tell_given_up();
  void on_gave_up(int rank, const std::vector<int>& of);
  void meet_end(int rank, int peer);
  bool alone() const { return !secret_; }
  bool is_rank_of(std::uint32_t rank, int process) const;
  std::set<int> processes_of(const std::vector<int>& members) const;

  // ---- world_rooms.cc: Rooms::Memory ----
  bool add_memory(int owner, std::uint64_t offset, std::uint64_t bytes,
                  std::string& error) override;
  bool share_memory(int owner, std::uint64_t offset, Fd& fd, std::string& error) override;
  bool let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) override;
  bool adopt_memory(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd, int viewer,
                    std::string& error) override;
  void tell_of_room(int rank, const RoomMessage& message, Fd fd) override;
  void warn(const std::string& text) override;
  void on_room(int process, Frame& frame);

  // ---- world_windows.cc ----
  std::vector<WindowMaps::Viewer> viewers_of(int owner) const;
  void say_let_go(int owner, std::uint64_t serial);
  void on_window(int process, const Frame& frame);
  void windows_let_go(int process);

  // ---- diagnosis.cc; with the lock ----
  struct OldCall;
  // The age at which a pending call is looked at, and how often that is done.
  std::int64_t look_ms() const;
  std::int64_t watch_ms() const;
  void watch();
  void look_at(const OldCall& old, std::map<int, QueryMessage>& questions);
  void report(const std::map<CallKey, OldCall>& old, std::uint64_t now,
              std::map<int, QueryMessage>& questions);
  void inquire(const CallKey& call, const std::vector<int>& members, const std::string& what,
               std::map<int, QueryMessage>& questions);
  // Whether it is known what all members have called, as of just now; if not, they are asked. True
  // too if they do not answer.
  bool informed(const CallKey& call, const std::vector<int>& members, const std::string& what,
                std::map<int, QueryMessage>& questions);
  void send_questions(const std::map<int, QueryMessage>& questions);
  void evaluate(const CallKey& call, Inquiry& inquiry);
  // Signatures by the ranks of this process that have called it; who has left without doing so.
  std::map<std::string, std::vector<int>> said_here(const CallKey& call,
                                                    const std::vector<int>& members) const;
  bool left_without(int rank, const CallKey& call) const;
  const PendingCall* left_behind(int rank, const CallKey& call) const;
  void fail_everywhere(const CallKey& call, const std::vector<int>& members, unjamResult_t code,
                       const std::string& text);
  // As `process` says, this one or another.
  void fail_here(std::uint64_t tag, std::uint64_t n, unjamResult_t code, const std::string& text,
                 int process);
  // What ends this use of a key, as a process with members of its group says.
  const Disagreement* disagreement(const CallKey& call, const std::vector<int>& members) const;
  void wait_for_reasons(std::unique_lock<std::mutex>& lock, const CallKey& call,
                        const std::vector<int>& members);
  // Members that have not called it, as far as is known; `unknown`: those that have not answered.
  std::vector<int> not_called(const CallKey& call, const std::vector<int>& members,
                              std::vector<int>& unknown) const;
  std::string who_called(const CallKey& key, const CallRecord& call) const;
  std::vector<RankSnapshot> local_snapshots() const;
  std::uint64_t gather(bool print);
  std::set<int> worth_asking(const std::vector<RankSnapshot>& here) const;
  // Whether it is known what all ranks are doing, as of just now; if not, they are asked.
  bool looked_around();
  // "; rank 0 has called …, which rank 1 has not", by what looked_around() has found.
  std::string instead(const OldCall& old) const;
  std::vector<AbsentRank> absentees(const Gathering& g) const;
  void add_departed(std::vector<RankSnapshot>& ranks) const;
  void print_gathered();

  const int ranks_;
  const Settings first_settings_;
  const std::optional<JobSecret> secret_;
  RankArenas arenas_;
  Mesh mesh_;
  WindowMaps windows_;
  std::unique_ptr<Rooms> rooms_;

  // Order of locks: a world's, then a context's.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Of a job on several hosts; null: all ranks are on this one.
  std::unique_ptr<HostsMeeting> hosts_meeting_;
  std::unique_ptr<NetCarrier> carrier_;  // until network_ has it
  std::string no_carrier_;               // why there is none
  std::unique_ptr<Network> network_;
  struct HostPlace {
    int host = 0;
    std::string name, door;  // of its host, and its address
  };
  std::vector<HostPlace> host_places_;  // by process
  std::uint64_t hosts_deadline_ns_ = 0;
  std::vector<bool> remote_;  // by process
  std::set<int> lost_;        // processes
  // Of other hosts: all that they have sent is here. A rank's departure comes by another connection
  // than its slices do, and may overtake them.
  std::set<int> said_good_bye_;
  struct Joining {  // of this process's ranks, until all hosts are known
    JoinMessage message;
    std::vector<Fd> shared;
  };
  std::vector<Joining> joining_;
  // The meeting.
  bool connecting_ = false, connected_ = false;
  RendezvousClient client_;
  std::vector<bool> joined_;  // ranks of this process
  std::string first_agreed_;
  int first_rank_ = -1;
  int num_joined_ = 0;
  bool started_ = false;
  std::string failure_;
  bool start_failed_ = false;  // here, when all had joined
  // The job.
  int me_ = 0;                      // this process
  std::vector<int> process_of_;     // by rank
  std::vector<std::int64_t> pids_;  // by process
  std::vector<std::string> hosts_;
  std::vector<int> host_of_;        // by rank
  std::vector<CpuSet> host_cpus_;   // of several hosts
  CpuSet cpus_;                     // on which any rank may run, see allowed_cpus()
  std::vector<Context*> contexts_;  // by rank; null: not attached, or of another process
  struct Departed {
    std::map<std::uint64_t, std::uint64_t> calls;
    std::vector<PendingCall> untaken;
  };
  std::map<int, Departed> departed_;
  std::vector<Loss> losses_;               // that wait
  std::map<int, std::set<int>> given_up_;  // by rank: on whose account it has given up calls
  std::map<int, Gone> gone_;               // aborted, dead, or their process ends: by rank
  // Disagreements found, by tag and by the process that says so. For ranks that call later.
  std::map<std::pair<std::uint64_t, int>, Disagreement> disagreements_;
  std::map<CallKey, Inquiry> inquiries_;
  std::map<std::pair<CallKey, int>, Probe> probes_;  // by call and rank
  std::map<std::uint64_t, Gathering> gatherings_;
  std::uint64_t last_gathering_ = 0;
  std::uint64_t around_ = 0;  // looked_around()'s gathering; 0: none
  std::uint64_t last_report_ns_ = 0;
  std::uint64_t last_watch_ns_ = 0;
  // Windows of ranks of this process that others know of, by rank and number; and closed ones, and
  // who has yet to let go of them.
  std::set<std::pair<int, std::uint64_t>> open_;
  std::map<std::pair<int, std::uint64_t>, std::set<int>> leaving_;
  std::atomic<bool> runs_{false};  // with other processes: their ledgers may be looked at
  bool stopping_ = false;
  std::thread control_;
};

}  // namespace unjam
