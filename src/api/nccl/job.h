// An unjam job that communicators are groups of.
//
// NCCL makes a communicator of any processes at any time. unjam has jobs, in which groups are made
// locally. So the members of a new communicator meet first, by its unique id, in a small job on the
// host device, and tell each other of which jobs they are already. If all are of one, the
// communicator is a group of that. Else they make a new one: it has an engine of its own on each of
// their GPUs, and memory for each peer. What a split or a shrink makes is always a group.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/nccl/status.h"
#include "api/nccl/types.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

// As a rank of a job: on CUDA devices where communicators' buffers are, and beside that on the
// host, where ranks tell each other what they make communicators of.
class Job {
 public:
  Job(unjamContext_t control, unjamContext_t data, const unjamUniqueId_t& id, int rank, int size,
      int device, int sms);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  unjamContext_t control() const { return control_; }
  unjamContext_t data() const { return data_; }
  const unjamUniqueId_t& id() const { return id_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  int sms() const { return sms_; }  // of its device, that it may take at most

  // Memory that peers may store into: counted, for several communicators may register it.
  bool register_memory(void* memory, std::size_t bytes);
  // While a call into it is pending it stays a window, until remove_unused().
  void deregister_memory(void* memory, std::size_t bytes);
  // What nobody has registered any more. In front of each call, for the program may have freed it
  // meanwhile: the next memory that lies there must not be taken for it.
  void remove_unused();
  int windows() const;

 private:
  struct Windows;
  void remove_unused_locked();
  unjamContext* const control_;
  unjamContext* const data_;
  const unjamUniqueId_t id_;
  const int rank_, size_, device_, sms_;
  const std::unique_ptr<Windows> windows_;
};

// A communicator's groups.
struct Membership {
  std::string name;
  std::vector<int> members;      // ranks of the job
  unjamGroup_t group = nullptr;  // of Job::data()
  unjamGroup_t talk = nullptr;   // of Job::control()
};

// Local: all members call it with the same name and members.
Status make_membership(const Job& job, std::string name, std::vector<int> members,
                       Membership& membership);
// The members of a communicator meet. Waits for all.
Status meet(const UniqueId& id, int rank, int size, int device, std::shared_ptr<Job>& job,
            std::vector<int>& members);
// All members of `group` give `bytes`; each gets everybody's, in their order. Exchanges
// that are under way at a time have different keys.
Status exchange(unjamGroup_t group, const std::string& key, const void* mine, std::size_t bytes,
                void* all);

// Of a device with `sms` SMs on which other jobs have taken `taken`: how many lanes one more may
// have, and how many SMs it may take with these at most. 0: none.
int lanes_beside(int sms, int taken, int& takes);

}  // namespace unjam::nccl
