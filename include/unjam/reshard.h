/*
 * unjam: cross-mesh resharding, planned and carried out.
 *
 * A *mesh* is a grid of ranks. A *placement* says for one mesh dimension what it does with a
 * tensor, in the words of PyTorch's DTensor. A plan says how tensors that one mesh holds under some
 * placements get to another mesh, or the same one, under others: who sends what, through which NIC,
 * in which chain. It follows "On Optimizing the Communication of Model Parallelism", section 3.
 *
 * Planning needs no context and no GPU, and talks to nobody: every rank makes the same plan from
 * the same request. unjamReshardRun carries a plan out, in the memory of the context's device.
 *
 * Every function may be called from any thread at any time; a plan does not change once it is made.
 * Errors are those of unjam.h: unjamGetLastError names the cause and the cure.
 */
#ifndef UNJAM_RESHARD_H_
#define UNJAM_RESHARD_H_

#include "unjam.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks in a grid. dims: of `ndims` dimensions, 1 or more each. ranks: as many as their product, at
 * most 65536, row-major, each once. The ranks are those of the group in which the plan is to run.
 */
typedef struct {
  size_t size; /* sizeof(unjamMesh_t) */
  int32_t ndims;
  const int64_t* dims;
  const int32_t* ranks;
} unjamMesh_t;

typedef enum {
  UNJAM_REPLICATE = 0,    /* each place has all */
  UNJAM_SHARD = 1,        /* tensor dimension `dim` in chunks, as torch.chunk cuts */
  UNJAM_STRIDED_SHARD = 2 /* DTensor's _StridedShard: `split` chunks first, a chunk of each */
} unjamPlacementKind_t;

/* Partial sums are no placement here: reduce them on their own mesh first. */
typedef struct {
  int32_t kind; /* unjamPlacementKind_t */
  int32_t dim;
  int64_t split; /* of UNJAM_STRIDED_SHARD: 1 or more */
} unjamPlacement_t;

/* name: tells tensors apart; ranks may list them in any order. shape: global. src, dst: one
 * placement for each dimension of the source and of the destination mesh, applied from the first
 * on. Elements travel as the smaller one of the two types. */
typedef struct {
  size_t size; /* sizeof(unjamReshardTensor_t) */
  const char* name;
  int32_t ndims;
  const int64_t* shape;
  int32_t src_dtype; /* unjamDataType_t */
  int32_t dst_dtype;
  const unjamPlacement_t* src;
  const unjamPlacement_t* dst;
} unjamReshardTensor_t;

/* Of each rank from 0 on its host and its NIC, which is numbered inside the host. Links inside a
 * host are taken to be free. */
typedef struct {
  size_t size; /* sizeof(unjamTopology_t) */
  int32_t nranks;
  const int32_t* host;
  const int32_t* nic;
} unjamTopology_t;

/* Zero means the default. */
typedef struct {
  size_t size;        /* sizeof(unjamReshardOptions_t) */
  uint64_t max_bytes; /* staging memory of a rank, on each side; default 256 MiB */
  int32_t window;     /* bundles under way at once; default 32 */
  int32_t stripes;    /* parts in which one pair of tiles goes from different senders; default 8 */
} unjamReshardOptions_t;

typedef struct unjamReshardPlanImpl* unjamReshardPlan_t;

/* Makes a plan. All tensors have at most 2^46 bytes together. topology: NULL makes every rank a
 * host with one NIC, as GPUs are that NVLink connects. options: NULL takes the defaults. Nothing of
 * the arguments is kept. UNJAM_ERROR_INVALID_ARGUMENT: something does not fit; the message names
 * the tensor. */
UNJAM_API unjamResult_t unjamReshardPlan(const unjamMesh_t* src, const unjamMesh_t* dst,
                                         const unjamReshardTensor_t* tensors, size_t ntensors,
                                         const unjamTopology_t* topology,
                                         const unjamReshardOptions_t* options,
                                         unjamReshardPlan_t* plan);
UNJAM_API unjamResult_t unjamReshardDestroy(unjamReshardPlan_t plan);

/* The plan of what is left without some ranks, such as those that are gone, and without some
 * tensors. Asks nobody. With a rank the whole replica goes that it belongs to, of the source and of
 * the destination; ranks in no mesh do not count. renumber: not 0: ranks behind those left out move
 * up, as in the group that unjamGroupShrink gives. UNJAM_ERROR_INVALID_ARGUMENT: a rank has parts
 * that no other rank has, a name is not there, or nothing is left; the message names it. */
UNJAM_API unjamResult_t unjamReshardWithout(unjamReshardPlan_t plan, const int32_t* ranks,
                                            size_t nranks, const char* const* tensors,
                                            size_t ntensors, int renumber,
                                            unjamReshardPlan_t* left);

/* The plan as JSON. "bound": the bytes that the busiest NIC must carry in one direction, whoever
 * plans with the NICs of ranks that hold or want the data; "busiest": those that it does carry;
 * "ports": {"host", "nic", "out", "in"} of each NIC; "digest": of ranks with equal ones the plans
 * are equal. list: not 0 adds "bundle_list": what travels together, and by which ranks, in the
 * order in which it should begin. */
UNJAM_API unjamResult_t unjamReshardInfo(unjamReshardPlan_t plan, int list, char* buffer,
                                         size_t bytes, size_t* needed);

/* What one rank does, as JSON: "tensors": {"name", "src", "dst"}, the shapes of its own parts, null
 * where it has none; "steps", in the plan's order: {"bundle", "bytes", "parent", "children",
 * "pack", "unpack"}; "copies": {"tensor", "src_start", "dst_start", "size"}. A parent of -1: the
 * bundle begins here. pack and unpack list {"tensor", "at", "start", "size"}: a box of the rank's
 * own part, row-major, from byte `at` of the bundle on. */
UNJAM_API unjamResult_t unjamReshardRank(unjamReshardPlan_t plan, int rank, char* buffer,
                                         size_t bytes, size_t* needed);

/* Executes all ranks' plans on the numbers of elements: whether every rank gets each element that
 * it wants, at its place, exactly once. Who holds what is told element by element, apart from the
 * planner. JSON: {"ok", "error", "elements"}. For small shapes: UNJAM_ERROR_INVALID_ARGUMENT if the
 * ranks' tensors have more than 2^24 elements together. */
UNJAM_API unjamResult_t unjamReshardCheck(unjamReshardPlan_t plan, char* buffer, size_t bytes,
                                          size_t* needed);

/* ---- carrying a plan out ---- */
/* A rank's own part of a tensor: `data` is its first element, in memory of the context's device:
 * the host's, or that of its GPU. shape: that part's, as unjamReshardRank tells it. strides: bytes
 * from one element to the next in each dimension, may be negative; NULL: row-major, without gaps.
 * data may be NULL if the part is empty. */
typedef struct {
  size_t size; /* sizeof(unjamReshardPart_t) */
  const char* name;
  void* data; /* of the source: not written */
  int32_t dtype;
  int32_t ndims;
  const int64_t* shape;
  const int64_t* strides;
} unjamReshardPart_t;

/* Carries the plan out. Ranks of the plan are ranks of `group`, all members of which call it, also
 * those that are in no mesh. src, dst: this rank's parts, one of each tensor, in any order; none on
 * a side whose mesh it is not in.
 *
 * Returns at once; the request is one as of any collective. Sources must stay untouched, and
 * destinations must not be read, until it is complete. Ranks agree on the plan first, by its
 * digest: UNJAM_ERROR_MISMATCH names those that differ, and nothing is written then. After that
 * each rank goes on as far as it can: where a rank is gone, the request ends with
 * UNJAM_ERROR_PEER when all that is still to be had has come, and unjamReshardIncomplete tells
 * which tensors are not. A rank whose part is only to send may complete before others have it all.
 *
 * key: a use of the key in the group, as of any collective, and the runs under one key come one
 * after the other; the bundles have keys of their own, "<key> bundle <number>", for sends and
 * receives. Runs under other keys, and other collectives, may be in another order on every rank.
 * options: may be NULL; match_text is agreed on too; no algorithm. A thread lives as long as the
 * run. On the host it packs, unpacks and copies; stream_order is UNJAM_STREAM_NONE. On a GPU
 * kernels do, in a stream of the context's: UNJAM_STREAM_ASYNC makes the run come behind what
 * options->stream has, UNJAM_STREAM_NONE takes sources and destinations to be ready. unjamWait
 * waits in the calling thread; unjamStreamWait lets a stream wait, and returns at once. While a
 * stream waits for a run, no thread may be in cudaFree or another call of CUDA's that holds up
 * launches of other threads until that stream is done: the run could not go on.
 *
 * Staging memory is at most max_bytes, and none where a bundle lies in one piece in a tensor. On a
 * GPU it is kept for later runs until the context ends, and at most 16 bundles are under way at
 * once.
 *
 * UNJAM_ERROR_INVALID_ARGUMENT: a part is missing, is not as planned, or the memory of a
 * destination overlaps that of a source; or the group has no such ranks. The message names tensor
 * and rank. Or memory of another device, or UNJAM_STREAM_SYNC. Nothing was submitted.
 * UNJAM_ERROR_RESOURCES: no memory for staging: plan with a smaller max_bytes. */
UNJAM_API unjamResult_t unjamReshardRun(unjamReshardPlan_t plan, unjamGroup_t group,
                                        const char* key, const unjamReshardPart_t* src, size_t nsrc,
                                        const unjamReshardPart_t* dst, size_t ndst,
                                        const unjamCallOptions_t* options, unjamRequest_t* request);

/* Of a run that is complete: JSON, the list of the names of this rank's tensors that are not;
 * their contents are undefined. UNJAM_ERROR_INVALID_USAGE: the request is not of a run, or it is
 * pending. */
UNJAM_API unjamResult_t unjamReshardIncomplete(unjamRequest_t request, char* buffer, size_t bytes,
                                               size_t* needed);

/* The plan of one of the paper's nine cases (its table 2). number: 1 to 9. */
UNJAM_API unjamResult_t unjamReshardNine(int number, unjamReshardPlan_t* plan);

/* What the paper's planners make of the same tensors, beside the plan: times in a model with links
 * of one rate and no latency, in bytes through one NIC. JSON: {"bound", "naive", "size",
 * "depth_first", "greedy", "paper", "copies", "plan"}: the first sender in the tiles' order; the
 * sender with least to send; depth-first search, of `nodes` decisions at most; random sets, the
 * best of `tries` each; the better one of these; sends and receives without multicast; and the
 * plan, all of it under way. Equal seeds give equal numbers. nodes: 0 to 10^9; tries: 1 to 10^6.
 * UNJAM_ERROR_INVALID_ARGUMENT: more than 1024 pairs of tiles meet, for which they take too long.
 */
UNJAM_API unjamResult_t unjamReshardCompare(unjamReshardPlan_t plan, uint64_t nodes, int tries,
                                            uint64_t seed, char* buffer, size_t bytes,
                                            size_t* needed);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* UNJAM_RESHARD_H_ */
