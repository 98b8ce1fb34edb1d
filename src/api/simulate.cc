// The C API of the deadlock simulator.
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <utility>

#include "api/last_error.h"
#include "sim/simulator.h"
#include "unjam/unjam.h"

struct unjamSimulator {
  unjam::sim::Simulator impl;
};

namespace {

using unjam::api::fail;

static_assert(static_cast<int>(unjam::sim::Model::kSynchronization) == UNJAM_SIM_SYNCHRONIZATION);
static_assert(static_cast<int>(unjam::sim::Order::kExplicit) == UNJAM_SIM_EXPLICIT);
static_assert(unjam::sim::kNoRound == UINT64_MAX);

template <class F>
unjamResult_t guarded(F&& f) {
  try {
    return f();
  } catch (const unjam::sim::BadJob& e) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT, e.what());
  } catch (const unjam::sim::TooLarge& e) {
    return fail(UNJAM_ERROR_RESOURCES, e.what());
  } catch (const std::bad_alloc&) {
    return fail(UNJAM_ERROR_SYSTEM, "out of memory");
  } catch (const std::exception& e) {
    return fail(UNJAM_ERROR_SYSTEM, e.what());
  }
}

unjamResult_t invalid(const char* message) { return fail(UNJAM_ERROR_INVALID_ARGUMENT, message); }

}  // namespace

extern "C" {

unjamResult_t unjamSimulatorCreate(const unjamSimulation_t* job, unjamSimulator_t* simulator) {
  return guarded([&] {
    if (job == nullptr) return invalid("job is NULL");
    if (simulator == nullptr) return invalid("simulator is NULL");
    if (job->size != sizeof(unjamSimulation_t)) {
      return invalid("job: size is not sizeof(unjamSimulation_t)");
    }
    if (job->model < UNJAM_SIM_SINGLE_QUEUE || job->model > UNJAM_SIM_SYNCHRONIZATION) {
      return invalid("model: unknown");
    }
    if (job->order < UNJAM_SIM_INTERLEAVED || job->order > UNJAM_SIM_EXPLICIT) {
      return invalid("order: unknown");
    }
    if (job->groups == 0) return invalid("groups: there are none");
    if (job->group_begin == nullptr || job->members == nullptr || job->counts == nullptr ||
        (job->sequence == nullptr && job->sequence_length > 0)) {
      return invalid("job: an array is NULL");
    }
    unjam::sim::JobSpec spec;
    spec.gpus = job->gpus;
    spec.group_begin.assign(job->group_begin, job->group_begin + job->groups + 1);
    spec.members.assign(job->members, job->members + spec.group_begin.back());
    spec.counts.assign(job->counts, job->counts + job->groups);
    spec.order = static_cast<unjam::sim::Order>(job->order);
    spec.sequence.assign(job->sequence, job->sequence + job->sequence_length);
    spec.model = static_cast<unjam::sim::Model>(job->model);
    spec.disorder = job->disorder;
    spec.sync = job->sync;
    spec.seed = job->seed;
    spec.memory_limit = job->memory_limit;
    *simulator = new unjamSimulator{unjam::sim::Simulator(std::move(spec))};
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamSimulatorDestroy(unjamSimulator_t simulator) {
  if (simulator == nullptr) return invalid("simulator is NULL");
  delete simulator;
  return UNJAM_SUCCESS;
}

unjamResult_t unjamSimulatorRun(unjamSimulator_t simulator, uint64_t first, uint64_t rounds,
                                int threads, int semantics, int plain,
                                unjamSimulationCounts_t* counts) {
  return guarded([&] {
    if (simulator == nullptr) return invalid("simulator is NULL");
    if (counts == nullptr) return invalid("counts is NULL");
    if (threads < 1 || threads > 1024) return invalid("threads: must be 1 to 1024");
    constexpr int kBoth = UNJAM_SIM_EXACT | UNJAM_SIM_RELEASED;
    if (semantics < 1 || semantics > kBoth) return invalid("semantics: unknown");
    const unjam::sim::Counts found = simulator->impl.run(
        first, rounds, static_cast<unsigned>(threads),
        {(semantics & UNJAM_SIM_EXACT) != 0, (semantics & UNJAM_SIM_RELEASED) != 0, false},
        plain != 0);
    *counts = {sizeof(unjamSimulationCounts_t),
               found.rounds,
               found.exact,
               found.released,
               found.exact_only,
               found.released_only,
               found.first_exact,
               found.first_released,
               found.disorders,
               found.syncs};
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamSimulatorRound(unjamSimulator_t simulator, uint64_t round, int plain,
                                  char* buffer, size_t bytes, size_t* needed) {
  return guarded([&] {
    if (simulator == nullptr) return invalid("simulator is NULL");
    return unjam::api::copy_text(simulator->impl.describe(round, plain != 0), buffer, bytes,
                                 needed);
  });
}

}  // extern "C"
