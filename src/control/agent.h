// One agent a machine (or what counts as one): it speaks for all ranks there. The agents of a job
// are a tree of fan-out 32 (agent_tree.h) over TCP (tagged_channel.h), so that none has more than a
// few connections whatever the size of the job.
//
// Start. Every agent opens a door (a listening port) and calls the root, whose address it was
// given. The root seats agents in the order of their arrival: agent i's parent, (i-1)/32, came
// before, so its door is known, and the size of the job need not be. The caller is told its number
// and its parent's door, and that connection is over. It attaches to its parent, says what all must
// agree on, and its join goes upwards, together with others that come at the same time. When the
// root has all ranks it sends one table downwards; and all doors are shut. Before the start any
// failure, a time-out among them, fails the meeting of all.
//
// Afterwards. Deaths, of ranks or of whole machines, are flooded: whoever hears of one for the
// first time passes it on. A connection that breaks, or on which nothing has come for `silence_ms`
// though beats come each `beat_ms`, is the end of the machine behind it, and of its ranks only: the
// children of the dead call their nearest living ancestor, which has opened its door to them; if
// the root and all other ancestors are gone, the living agent with the lowest number. Whoever finds
// nobody within `rejoin_ms` is cut off, is told so, and hangs up, so its own children call in turn.
// The parent declares those gone that do not come. Questions go through the tree to sets of
// agents, and answers back; these are best effort, for the asker has a time-out.
//
// An agent has no thread: a Poller drives it, in whose thread everything happens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/agent_messages.h"
#include "control/door.h"
#include "control/poller.h"
#include "control/proof.h"
#include "control/tagged_channel.h"

namespace unjam {

struct AgentConfig {
  JobSecret secret = {};
  bool root = false;
  SocketAddress root_address;   // where the root is; the root itself opens its door there
  SocketAddress door;           // where another opens its own; port 0: any
  std::string host;             // this machine's name, for messages
  std::vector<RankCard> ranks;  // that live here
  std::uint32_t job_ranks = 0;
  std::string settings;            // that must be equal on all ranks: "NAME=1, NAME=2"
  std::int64_t start_ms = 60'000;  // until all ranks have joined
  std::int64_t beat_ms = 1'000;
  std::int64_t suspect_ms = 3'000;   // of silence, until reports say so
  std::int64_t silence_ms = 10'000;  // until the machine counts as gone
  std::int64_t rejoin_ms = 3'000;    // for one that has lost its parent to find another
  std::int64_t gather_ms = 2;        // for joins to wait for others
};

struct AgentNews {
  std::uint32_t agent = kNoAgent;  // of a whole machine's end
  NumberList ranks;                // that are gone with this piece of news, and were not before
  std::string text;                // for people: which machine, which ranks, why
};

// Called in the poller's thread. They may call the agent, but not destroy it.
struct AgentEvents {
  std::function<void()> started;
  std::function<void(const std::string& why)> failed;  // instead of a start
  std::function<void(const AgentNews& news)> gone;
  // A neighbour in the tree has said nothing for long, or speaks again.
  std::function<void(std::uint32_t agent, bool suspect)> suspect;
  std::function<void(std::uint32_t from, std::uint64_t number, const std::string& payload)> asked;
  std::function<void(std::uint64_t number, std::uint32_t from, const std::string& payload)> answer;
  // No more answers come to this question: these agents are gone or did not answer in time.
  std::function<void(std::uint64_t number, const NumberList& missing)> settled;
  // The others count this machine as gone, or it has lost all of them. It has hung up.
  std::function<void(const std::string& why)> cut_off;
  std::function<void()> finished;  // all agents have called finish()
};

class Agent : private Watcher {
 public:
  enum class State { kNew, kSeating, kAttaching, kJoined, kRunning, kFailed, kCutOff, kFinished };

  Agent(Poller& poller, AgentConfig config, AgentEvents events);
  ~Agent() override;
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // False: it cannot even begin; `error` says why.
  bool start(std::string& error);

  State state() const { return state_; }
  const SocketAddress& door() const { return door_.address(); }
  std::uint32_t number() const { return number_; }  // kNoAgent: not seated
  // Once started.
  const AgentTable& table() const { return table_; }
  bool is_gone(std::uint32_t rank) const { return rank < gone_ranks_.size() && gone_ranks_[rank]; }
  bool agent_gone(std::uint32_t a) const { return a < gone_agents_.size() && gone_agents_[a]; }
  std::uint32_t parent() const;  // kNoAgent: none, now

  // Ranks of this machine have ended: all agents learn it.
  void report_gone(const NumberList& ranks, const std::string& why);
  // Asks these agents, oneself perhaps. Answers come within that time, then settled() is called.
  // Its number; 0: not running, or too many questions are open, or the payload is too long.
  std::uint64_t ask(const NumberList& agents, const std::string& payload, std::int64_t timeout_ms);
  void answer(std::uint32_t from, std::uint64_t number, const std::string& payload);
  // This machine needs the others no more. When all have said so they part without complaint.
  void finish();

  struct Counts {
    std::uint64_t frames = 0, bytes = 0;  // sent, tags included
    std::uint64_t dropped = 0;            // questions and answers that found no way
    std::uint64_t refused = 0;            // connections that were ended for what they said
    std::size_t connections = 0;
  };
  Counts counts() const;

 private:
  enum class Purpose { kStranger, kSeat, kParent, kChild };
  struct Link {
    TaggedChannel channel;
    Purpose purpose = Purpose::kStranger;
    std::uint64_t token = 0;
    bool connecting = false;
    bool dirty = false;
    bool closing = false;  // as soon as all is sent
    bool shut = false;     // nothing more is sent
    bool attached = false;
    bool done = false;  // a child whose subtree is
    bool suspect = false;
    std::uint32_t agent = kNoAgent;
    std::uint64_t since_ns = 0, heard_ns = 0, sent_ns = 0;
  };
  struct Question {
    NumberList open, missing;
    std::uint64_t deadline_ns = 0;
  };

  // Watcher.
  void on_ready(std::uint64_t token, bool readable, bool writable) override;
  void on_time() override;
  void on_round_end() override;

  // Connections.
  Link* add_link(Fd socket, TaggedChannel::Role role, Purpose purpose, bool connecting);
  Link* find(std::uint64_t token);
  void accept_some();
  void make_room();
  void call_root();
  void call_parent();
  void connected(Link& link);
  void post(Link& link, AgentMessageType type, std::string_view payload);
  void settle(Link& link);
  void drop(std::uint64_t token);
  void lose(Link& link, const std::string& why);
  void turn_away(Link& link, const std::string& why, bool gone);
  void close_soon(Link& link);
  void hang_up();

  // What arrives. False: `error` says what is wrong with it.
  bool take(Link& link, const Frame& frame, std::string& error);
  bool take_enter(Link& link, const Frame& frame, std::string& error);
  bool take_seat(Link& link, const Frame& frame, std::string& error);
  bool take_attach(Link& link, const Frame& frame, std::string& error);
  bool take_attach_again(Link& link, const AttachMessage& m, std::string& error);
  bool take_attached(Link& link, const Frame& frame);
  bool take_joins(Link& link, const Frame& frame, std::string& error);
  bool take_failed(const Link& link, const Frame& frame);
  bool take_turned_away(Link& link, const Frame& frame);
  bool take_table(Link& link, const Frame& frame, std::string& error);
  bool take_gone(Link& link, const Frame& frame, std::string& error);
  bool take_question(Link& link, const Frame& frame, std::string& error);
  bool take_answer(Link& link, const Frame& frame, std::string& error);

  // Before the start.
  bool add_join(AgentJoin join, std::string& why);
  void send_joins();
  void begin_job();
  void run_table(const std::string& bytes);
  void fail(const std::string& why);
  void fail_all(const std::string& why);
  void give_up();
  std::string missing_text() const;
  std::string name_of(std::uint32_t agent) const;

  // After it.
  bool may_be(std::uint32_t agent) const;
  bool fits(const NumberList& agents, const NumberList& ranks) const;
  void mark_gone(const AgentGoneMessage& m, const Link* from);
  void merge(const NumberList& agents, const NumberList& ranks, const Link* from);
  void tell_missed(Link& link, const AttachedMessage& told);
  void adopt_children_of(std::uint32_t agent);
  void tend_door();
  void look_for_parent();
  void stand_in();
  void cut_off(const std::string& why);
  Link* way_to(std::uint32_t agent, const Link* from);
  void route(AgentQuestionMessage m, const Link* from);
  void route(const AgentAnswerMessage& m, const Link* from);
  void take_answer(const AgentAnswerMessage& m);
  void settle_question(std::uint64_t number, bool late);
  void settle_gone_questions(std::uint32_t agent);
  void check_done();
  void farewell();
  void tick(std::uint64_t now);
  void schedule();

  Poller& poller_;
  AgentConfig config_;
  AgentEvents events_;
  State state_ = State::kNew;
  std::uint64_t id_ = 0;
  std::uint32_t number_ = kNoAgent;
  Door door_;
  std::uint64_t door_token_ = 0;
  std::uint64_t crowded_until_ns_ = 0;
  std::unordered_map<std::uint64_t, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Link>> dropped_;  // until the end of the round
  std::vector<std::uint64_t> dirty_;
  bool at_round_end_ = false;
  std::uint64_t upwards_ = 0;  // the link to the parent, or the one that is to become it
  std::map<std::uint32_t, std::uint64_t> children_;
  SocketAddress parent_door_;
  std::string last_error_;  // of calls that are tried again

  std::uint64_t start_deadline_ns_ = 0, retry_ns_ = 0, retry_wait_ns_ = 0;
  std::uint64_t gather_ns_ = 0;
  std::string failure_;   // what is said when the meeting fails
  bool failing_ = false;  // and the root knows

  // Of the root: seats by agents' ids, doors by agent.
  std::unordered_map<std::uint64_t, std::uint32_t> seats_;
  std::vector<SocketAddress> doors_;
  // Of this subtree, until the start.
  std::map<std::uint32_t, AgentJoin> joins_;
  std::unordered_map<std::uint32_t, std::uint32_t> joined_;  // rank: its agent
  std::vector<std::uint32_t> unsent_joins_;

  AgentTable table_;
  std::vector<bool> gone_ranks_, gone_agents_;
  std::map<std::uint32_t, std::uint64_t> awaited_;  // children to come, and until when
  std::uint32_t lost_parent_ = kNoAgent;            // while another is looked for
  std::string lost_why_;
  std::uint32_t lost_before_ = kNoAgent;  // the last that was
  std::size_t rejoin_attempt_ = 0;
  std::uint64_t rejoin_deadline_ns_ = 0;
  std::uint64_t last_tick_ns_ = 0, next_tick_ns_ = 0;
  std::map<std::uint64_t, Question> questions_;
  std::uint64_t last_question_ = 0;
  std::vector<std::pair<std::uint64_t, std::string>> self_asked_;  // number, payload
  bool done_ = false, done_sent_ = false;
  Counts counts_;
};

}  // namespace unjam
