// The two ring all-reduces: which chunk goes where in which step, and in which order a rank issues
// its work. Without CUDA: the program runs this text on GPUs, a unit test on a model of them.
//
// A vector is cut into ranks × batches chunks. In each step a rank takes one chunk from the rank
// before it. In the first half of the steps it adds what it takes to its own part of the vector
// (reduce-scatter); in the second half it keeps it (all-gather).
#pragma once

#include <algorithm>
#include <cstddef>

namespace async_ring {

struct RingSteps {
  int ranks = 2;    // at least 2
  int batches = 1;  // chunks of a rank: 1 is the classic ring; the asynchronous one needs 2

  int chunks() const { return ranks * batches; }
  int reduce_steps() const { return (ranks - 1) * batches; }
  int steps() const { return 2 * reduce_steps(); }
  bool reduces(int step) const { return step < reduce_steps(); }
  int next(int rank) const { return (rank + 1) % ranks; }
  int previous(int rank) const { return (rank + ranks - 1) % ranks; }

  // What the next rank takes from `rank` in a step.
  int given_chunk(int rank, int step) const {
    const int chunk = (rank * batches - 1 - step) % chunks();
    return chunk < 0 ? chunk + chunks() : chunk;
  }
  // What `rank` takes from the one before it.
  int taken_chunk(int rank, int step) const { return given_chunk(previous(rank), step); }
  // The step in which a rank came by what it gives in `step`; negative: it is its input.
  int source_step(int step) const { return step < batches ? -1 : step - batches; }
};

// Where a chunk lies, in elements. The first chunks have one more where the count does not divide.
struct Part {
  std::size_t first = 0, count = 0;
};
inline Part part_of(std::size_t count, int chunks, int chunk) {
  const auto n = static_cast<std::size_t>(chunks), k = static_cast<std::size_t>(chunk);
  const std::size_t each = count / n, more = count % n;
  return {k * each + std::min(k, more), each + (k < more ? 1 : 0)};
}
inline std::size_t largest_part(std::size_t count, int chunks) {
  return part_of(count, chunks, 0).count;
}

// Two streams and two temporaries by turns: a chunk is added in one stream while the next one comes
// in the other. Where nothing is added, one stream does.
inline constexpr int kStreams = 2;
inline int stream_of(const RingSteps& ring, int step) {
  return ring.reduces(step) ? step % kStreams : 0;
}

// What a rank issues for the asynchronous ring. Acts:
//   copy_input()                    the whole input to the output, seen by both streams
//   wait(stream, rank, step)        until `rank` has done `step`; negative: has copied its input
//   pull(stream, chunk, temporary)  a chunk of the previous rank's output, into the stream's
//                                   temporary or to its place in the own output
//   add(stream, chunk)              the stream's temporary to the chunk of the own output
//   done(stream, step)              what later waits for this rank and step wait for
//   meet()                          until the threads of all ranks are here
// A chunk may be pulled once the previous rank has *added* to it, in whichever of its streams that
// was. So done() stands behind the addition in the addition's own stream, and a wait names the step
// that made the chunk, not the last one. Both streams wait for the copy of the input, which the
// first addition in either changes. meet() is needed since a wait for an event that has not been
// recorded yet would not wait.
template <class Acts>
void issue_async_ring(const RingSteps& ring, int rank, Acts& acts) {
  acts.copy_input();
  acts.meet();
  for (int step = 0; step < ring.steps(); ++step) {
    const int stream = stream_of(ring, step);
    const int chunk = ring.taken_chunk(rank, step);
    acts.wait(stream, ring.previous(rank), ring.source_step(step));
    acts.pull(stream, chunk, ring.reduces(step));
    if (ring.reduces(step)) acts.add(stream, chunk);
    acts.done(stream, step);
    acts.meet();
  }
}

// What a rank issues for the classic ring, all in one stream. Acts:
//   copy_input()
//   exchange(given, taken, temporary)  gives the next rank one chunk of the output and takes
//                                      another from the previous rank, as one group
//   add(chunk)                         the temporary to the chunk
template <class Acts>
void issue_classic_ring(const RingSteps& ring, int rank, Acts& acts) {
  acts.copy_input();
  for (int step = 0; step < ring.steps(); ++step) {
    const int taken = ring.taken_chunk(rank, step);
    acts.exchange(ring.given_chunk(rank, step), taken, ring.reduces(step));
    if (ring.reduces(step)) acts.add(taken);
  }
}

}  // namespace async_ring
