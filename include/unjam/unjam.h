/*
 * unjam: GPU collectives that cannot deadlock each other.
 *
 * Words (ARCHITECTURE.md): a *context* is one rank of a job. A *group* is an ordered set of
 * ranks. A *key* is an ordering channel inside a group: the n-th use of a key on one rank is
 * matched with the n-th use of that key on every other rank of the group, and nothing else.
 * Invocations under one key run in order; different keys and different groups are independent and
 * may be invoked in a different order on every rank, from any thread, with any synchronisation
 * between.
 *
 * Every function may be called from any thread at any time, and none blocks on another rank, except
 * unjamInit (waits for all ranks to arrive), unjamWait, unjamDeviceSynchronize and (for work
 * that is running already) unjamDestroy. Functions return a code; unjamGetLastError gives the
 * calling thread's last message, which names the cause and the cure.
 *
 * Buffers: `count` elements as each function says; aligned to the element's size. The input must
 * hold its values when the call is made and stay untouched, and the output must not be read, until
 * the invocation is complete (unjamWait, unjamTest or the callback: an acquire on the results. Of a
 * call in a CUDA stream that goes for what the GPU does next; to read with the host what the GPU
 * has stored in mapped or managed memory, synchronise the stream). In place means what it means in
 * NCCL: see each function.
 */
#ifndef UNJAM_UNJAM_H_
#define UNJAM_UNJAM_H_

#include <stddef.h>
#include <stdint.h>

#define UNJAM_VERSION_MAJOR 0
#define UNJAM_VERSION_MINOR 1
#define UNJAM_VERSION_PATCH 0
#define UNJAM_VERSION \
  (UNJAM_VERSION_MAJOR * 10000 + UNJAM_VERSION_MINOR * 100 + UNJAM_VERSION_PATCH)

#if defined(__GNUC__)
#define UNJAM_API __attribute__((visibility("default")))
#else
#define UNJAM_API
#endif

/* What was renamed keeps its former name, of which a compiler warns. Fields: both are one. */
#if defined(__GNUC__)
#define UNJAM_FORMER_NAME(now) __attribute__((deprecated("it is called " #now)))
#else
#define UNJAM_FORMER_NAME(now)
#endif
#define UNJAM_RENAMED(type, now, former) \
  union {                                \
    type now;                            \
    type former UNJAM_FORMER_NAME(now);  \
  }

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  UNJAM_SUCCESS = 0,
  UNJAM_ERROR_INVALID_ARGUMENT = 1, /* a value that no call could accept; nothing was submitted */
  UNJAM_ERROR_INVALID_USAGE = 2,    /* right values at the wrong time or on the wrong object */
  UNJAM_ERROR_MISMATCH = 3,         /* ranks disagree on a collective; the message says how */
  UNJAM_ERROR_TIMEOUT = 4,          /* the time given has passed; see unjamWait */
  UNJAM_ERROR_ABORTED = 5,          /* unjamAbort ended it */
  UNJAM_ERROR_PEER = 6,             /* a peer is gone */
  UNJAM_ERROR_RESOURCES = 7,        /* a limit is reached; the message names it and its setting */
  UNJAM_ERROR_SYSTEM = 8,           /* the operating system refused something */
  UNJAM_ERROR_INTERNAL = 9          /* a fault of unjam: please report it */
} unjamResult_t;

typedef enum {
  UNJAM_INT8 = 0,
  UNJAM_UINT8 = 1,
  UNJAM_INT32 = 2,
  UNJAM_UINT32 = 3,
  UNJAM_INT64 = 4,
  UNJAM_UINT64 = 5,
  UNJAM_FLOAT16 = 6,
  UNJAM_BFLOAT16 = 7,
  UNJAM_FLOAT32 = 8,
  UNJAM_FLOAT64 = 9,
  UNJAM_FLOAT8_E4M3 = 10, /* e4m3fn: finite only */
  UNJAM_FLOAT8_E5M2 = 11
} unjamDataType_t;

/* 16-bit and 8-bit floats are added in float32 and rounded once a hop; integers wrap; UNJAM_AVG of
 * integers sums, then divides towards zero; UNJAM_MIN and UNJAM_MAX propagate NaN. All ranks get
 * the same bits, and so does every repetition with the same settings. */
typedef enum {
  UNJAM_SUM = 0,
  UNJAM_PROD = 1,
  UNJAM_MIN = 2,
  UNJAM_MAX = 3,
  UNJAM_AVG = 4
} unjamOp_t;

typedef enum {
  UNJAM_ALL_REDUCE = 0,
  UNJAM_ALL_GATHER = 1,
  UNJAM_REDUCE_SCATTER = 2,
  UNJAM_REDUCE = 3,
  UNJAM_BROADCAST = 4,
  UNJAM_ALL_TO_ALL = 5,
  UNJAM_GATHER = 6,
  UNJAM_SCATTER = 7,
  UNJAM_BARRIER = 8,
  UNJAM_SEND_RECV = 9
} unjamKind_t;

typedef struct unjamContext* unjamContext_t;
typedef struct unjamGroup* unjamGroup_t;
typedef struct unjamCollective* unjamCollective_t;
typedef struct unjamRequest* unjamRequest_t;

#define UNJAM_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[UNJAM_UNIQUE_ID_BYTES];
} unjamUniqueId_t;

/* ---- versions, errors ---- */
UNJAM_API unjamResult_t unjamGetVersion(int* version);
/* A fixed name of a code. */
UNJAM_API const char* unjamGetErrorString(unjamResult_t result);
/* The message of the last call that failed in this thread; "" if none. Valid until the next failing
 * call of the thread. */
UNJAM_API const char* unjamGetLastError(void);
/* 1 if that call was refused (UNJAM_ERROR_RESOURCES) for want of room that this rank's calls under
 * way, or its keys that are out of use, give back by themselves, so that the same call may go
 * later; else 0. Whoever tries again and again should end that some time: ranks that call more keys
 * than there is room for, in orders too far apart, wait for each other then. */
UNJAM_API int unjamLastErrorIsTransient(void);

/* ---- kinds of collectives ---- */
/* Who has data before or after a collective. A part is a rank's block, where a kind has blocks;
 * else the whole vector is one part. An all-gather reads OWNER and writes ALL. */
typedef enum {
  UNJAM_HOLDERS_ALL = 0,   /* every rank, of every part */
  UNJAM_HOLDERS_OWNER = 1, /* of part p, rank p */
  UNJAM_HOLDERS_ROOT = 2,  /* the root, of every part */
  UNJAM_HOLDERS_OTHERS = 3 /* all but the root, of every part */
} unjamHolders_t;

/* What a binding needs to know of a kind to check a call's buffers. Size-versioned. */
typedef struct {
  size_t size;
  const char* name; /* "all_reduce"; lives as long as the library */
  int32_t reduces;  /* it has an operator */
  int32_t has_root; /* it names a rank; of a send/recv that is the sender */
  int32_t blocks;   /* a buffer of UNJAM_HOLDERS_OWNER has count elements, any other count times
                       the group's size; 0: every buffer has count */
  int32_t reads;    /* unjamHolders_t: who has an input */
  int32_t writes;   /* unjamHolders_t: who has an output */
  int32_t in_place; /* input and output may be the same memory; of blocks, at the owner's place */
  int32_t has_buffers; /* 0: it moves nothing of the caller's, as a barrier */
} unjamKindInfo_t;
/* UNJAM_ERROR_INVALID_ARGUMENT: no such kind, or a size that is not this struct's. */
UNJAM_API unjamResult_t unjamGetKindInfo(unjamKind_t kind, unjamKindInfo_t* info);

/* ---- configuration ---- */
typedef enum {
  UNJAM_POLICY_ADAPTIVE = 0, /* the paper's: largest threshold at the head, x20 on success */
  UNJAM_POLICY_FIXED = 1,    /* one threshold for all: the paper's Fig. 11, for comparison */
  UNJAM_POLICY_HOLD = 2      /* never yields, as NCCL in one stream: can deadlock, for comparison */
} unjamPolicy_t;

typedef enum {
  UNJAM_ORDER_FIFO = 0,
  UNJAM_ORDER_PRIORITY = 1 /* higher priority first, then first come first served */
} unjamOrder_t;

/* Where a rank's engine runs and its buffers lie. CUDA: libunjam_cuda.so beside libunjam.so, a
 * driver for CUDA 13, and peer access between the devices of all ranks. */
typedef enum { UNJAM_DEVICE_HOST = 0, UNJAM_DEVICE_CUDA = 1 } unjamDevice_t;

/* Size-versioned: initialise with UNJAM_CONFIG_INITIALIZER; it only ever grows. 0 (or -1 where 0
 * means something) leaves a field to the environment variable of the same name (`unjam env`), then
 * to the default. Fields marked (*) must be equal on all ranks: unjamInit reports ranks that
 * differ. */
typedef struct {
  size_t size;
  uint32_t version;
  int32_t policy;           /* unjamPolicy_t, -1: default */
  int32_t order;            /* unjamOrder_t, -1: default */
  uint32_t lanes;           /* (*) blocks a rank, 1..32; default 1 on the host, 32 on CUDA;
                               fewer if unjamInitAll has ranks share a device */
  uint32_t block_threads;   /* threads a block; host 1..16, default 1; CUDA a multiple of 64, 128
                               to 512, the default */
  uint32_t max_active_keys; /* (*) keys with an invocation under way at a time; default 512, on
                               CUDA 64 */
  /* (*) guaranteed slots of a connector, at least 2; default 5, on CUDA 4 */
  UNJAM_RENAMED(uint32_t, guaranteed_slots, escape_slots);
  /* (*) bytes of one, multiple of 64; default 8192, on CUDA 74944 (two ranks: 149824), about twice
   * as many with 16 lanes and fewer, four times with 8 and fewer */
  UNJAM_RENAMED(uint32_t, guaranteed_slot_bytes, escape_slot_bytes);
  /* (*) larger slots, of a pool that all keys of a (peer, lane) share; -1 = none */
  UNJAM_RENAMED(uint32_t, pool_slots, borrow_slots);
  uint32_t spin_head;      /* polls granted to the head of the task queue */
  uint32_t spin_base;      /* polls granted at least; the fixed policy's threshold */
  uint32_t spin_boost;     /* factor on success; default 20 */
  uint32_t spin_cap;       /* polls granted at most */
  uint32_t quantum_slices; /* slices in a row at most while others wait */
  uint32_t residency_us;   /* longest stay of an engine that nobody waits for; default 5000 */
  uint32_t trace_events;   /* events kept a lane for unjamGetTrace; default 0 = off */
  uint32_t stall_ms;       /* a pending invocation older than this is diagnosed; default 1000 */
  int32_t algorithm;     /* (*) its place among the names of UNJAM_ALGORITHM: auto is -1, ring 0 */
  uint64_t delay_seed;   /* fault injection, host device: delays at every wait, 0 = off */
  uint32_t delay_max_us; /* fault injection: longest such delay; default 50 */
  uint32_t report_ms;    /* invocations pending for longer are reported (UNJAM_LOG), with the ranks
                            that have not called them; -1 = never; default 30000 */
  uint32_t timeout_ms;  /* invocations pending for longer end with UNJAM_ERROR_TIMEOUT on all ranks;
                           -1 = never, the default */
  int32_t device;       /* (*) unjamDevice_t, -1: default (host) */
  int32_t device_index; /* CUDA: which device; -1: unjamInit: the calling thread's current device;
                           unjamInitAll: rank r uses device r, of d devices r modulo d */
  uint64_t heap_bytes;  /* (*) what unjamMemAlloc has, bytes a rank; -1 = none; default 0 = none */
} unjamConfig_t;

/* clang-format off */
#define UNJAM_CONFIG_INITIALIZER                                                                 \
  {sizeof(unjamConfig_t), UNJAM_VERSION, -1, -1, 0, 0, 0, {0}, {0}, {0}, 0, 0, 0, 0, 0, 0, 0, 0,  \
   -1, 0, 0, 0, 0, -1, -1, 0}
/* clang-format on */

/* ---- contexts ---- */
/* A secret name for a new job, to be handed to every rank: to threads of this process, or to other
 * processes of this machine and user (by a pipe, a file, a key-value store, an environment variable
 * UNJAM_ID in hexadecimal digits). The first rank to join opens the rendezvous, a socket without a
 * name in any file system; ranks prove to each other that they know the secret. */
UNJAM_API unjamResult_t unjamGetUniqueId(unjamUniqueId_t* id);
/* Joins a job of `nranks` (1..65535, on CUDA devices 1..64) as `rank`; what the machine has ends
 * jobs on the host sooner, with an error. Returns when all ranks have joined, or with
 * UNJAM_ERROR_TIMEOUT (UNJAM_INIT_TIMEOUT_MS, default 30 s) that names the ranks missing.
 * `config` may be NULL. */
UNJAM_API unjamResult_t unjamInit(unjamContext_t* context, int nranks, unjamUniqueId_t id, int rank,
                                  const unjamConfig_t* config);
/* The same, with rank, number of ranks and id from the environment: UNJAM_RANK, UNJAM_RANKS and
 * UNJAM_ID, or what torchrun, mpirun or srun set. */
UNJAM_API unjamResult_t unjamInitFromEnvironment(unjamContext_t* context,
                                                 const unjamConfig_t* config);
/* All `nranks` contexts of a job at once, by one thread. contexts: array of nranks. CUDA ranks may
 * share devices, which is good for tests: each has fewer lanes then (blocks that wait must leave
 * the others' room), and what synchronises a device waits for the streams of all ranks there. */
UNJAM_API unjamResult_t unjamInitAll(unjamContext_t* contexts, int nranks,
                                     const unjamConfig_t* config);
/* Ends the context, frees its groups and collectives (their handles must not be used any more;
 * requests stay valid until they are freed). With invocations pending:
 * UNJAM_ERROR_INVALID_USAGE, names them, changes nothing (wait for them, or unjamAbort first).
 * Local: does not wait for other ranks. */
UNJAM_API unjamResult_t unjamDestroy(unjamContext_t context);
/* Ends every pending invocation of this rank with UNJAM_ERROR_ABORTED and refuses further ones.
 * Returns always, from any thread. Peers are told: their pending invocations that share a group
 * with this rank end with UNJAM_ERROR_PEER. (CUDA: a call of a group of one that is a copy in a
 * stream ends, with the error, when the stream comes to it; unjamDestroy waits for that.) */
UNJAM_API unjamResult_t unjamAbort(unjamContext_t context);
/* What a process does last that ends with contexts open (Python's packages do it by themselves):
 * ends all of them, whoever made them. Waits while invocations are pending and something moves, and
 * for patience_us after that (< 0: two seconds). A context with nothing pending leaves, as with
 * unjamDestroy; the others' pending invocations are aborted: UNJAM_ERROR_INVALID_USAGE, which names
 * them. Peers are told at once, and their calls that still need this process end with
 * UNJAM_ERROR_PEER; what it had completed its part of goes on, now and later. Handles stay valid
 * for unjamDestroy. Not in a callback: does nothing there. A process that just ends (killed, by
 * _exit(), or without this call) is noticed by its peers, and the same holds for their calls. */
UNJAM_API unjamResult_t unjamFinalize(int64_t patience_us);
UNJAM_API unjamResult_t unjamContextRank(unjamContext_t context, int* rank);
UNJAM_API unjamResult_t unjamContextSize(unjamContext_t context, int* nranks);
/* Ranks of the job that are no longer there: their process died, they were aborted, or they have
 * left (unjamDestroy). Ascending; at most `capacity` are stored. *count: how many there are. */
UNJAM_API unjamResult_t unjamContextAbsent(unjamContext_t context, int* ranks, int capacity,
                                           int* count);
/* First asynchronous error of the context (abort, mismatch, peer); UNJAM_SUCCESS if none.
 * message: may be NULL; otherwise receives a NUL-terminated text of at most `bytes`. */
UNJAM_API unjamResult_t unjamGetAsyncError(unjamContext_t context, unjamResult_t* error,
                                           char* message, size_t bytes);
/* As cudaDeviceSynchronize meets a resident kernel: returns once no engine of this rank is running
 * (every lane was seen to quit since the call). Pending collectives do not delay it, except under
 * UNJAM_POLICY_HOLD. timeout_us < 0: no limit. */
UNJAM_API unjamResult_t unjamDeviceSynchronize(unjamContext_t context, int64_t timeout_us);

/* ---- memory ---- */
/* Memory of the rank's device for any buffer, from its *heap*, which UNJAM_HEAP (heap_bytes) sets
 * aside for each rank when the job begins. All peers have it mapped, so they may store results into
 * outputs there themselves; inputs gain nothing by it. Both calls are local, and make no CUDA call
 * (but where the last memory of a context that was destroyed goes, and with it the context).
 * *pointer: `bytes` bytes, aligned to 512, of undefined contents; NULL if bytes is 0.
 * UNJAM_ERROR_RESOURCES: there is no heap, or no room in it. What is not freed when the context is
 * destroyed stays, and with it all the memory of the rank. */
UNJAM_API unjamResult_t unjamMemAlloc(unjamContext_t context, size_t bytes, void** pointer);
/* pointer: what unjamMemAlloc gave from this context, or NULL. context: NULL: any of this process,
 * also one that was destroyed. As with any buffer, no invocation may use the memory any more, nor
 * work queued in a stream. Peers may store into an output until the invocation is complete; if it
 * has failed or was aborted, for longer: then the allocation is given to nobody again, also when it
 * was freed, as long as the context lives. */
UNJAM_API unjamResult_t unjamMemFree(unjamContext_t context, void* pointer);
/* Lets peers store results into memory of the user's themselves, as if it were the heap's: into the
 * output of any call of this rank that begins at a multiple of 16 bytes there and lies within one
 * such *window* as a whole. (Others, and inputs, gain nothing by it.) A hint: results are the same
 * without, and no other rank need register anything. Local: waits for no peer, and each peer makes
 * use of it from when it has the memory mapped, which is soon; one that cannot map it goes on as
 * before (`unjam info` tells which, and why).
 * pointer: `bytes` bytes, of any alignment. On a CUDA device memory of that device, of one
 * allocation of cudaMalloc (parts of it may be windows of their own; torch's caching allocator has
 * such memory, unless its segments are expandable). On the host device any memory; other processes
 * cannot map it.
 * Order: peers store into an output when this rank's engine itself might, from when the call's
 * inputs are there (of a call with a stream: behind what was queued before) until it is complete;
 * its results are seen as those of any call. Registering orders nothing, in no stream.
 * The memory must stay what it is until it is deregistered: do that before it is freed.
 * UNJAM_ERROR_INVALID_ARGUMENT: no such memory. UNJAM_ERROR_INVALID_USAGE: some of it is registered
 * already, with this context. UNJAM_ERROR_RESOURCES: 64 windows are, as many as there can be. */
UNJAM_API unjamResult_t unjamMemRegister(unjamContext_t context, void* pointer, size_t bytes);
/* Ends that. pointer: as it was registered. Local, but that it waits up to 50 ms for other
 * processes to have the memory no longer mapped, as CUDA wants it before cudaFree (`unjam info`,
 * "windows", "left": how many such windows others still have mapped; they let go of them as soon as
 * nothing on their device holds them up). UNJAM_ERROR_INVALID_USAGE: nothing is registered there;
 * or a call whose output is there is pending (of calls in a stream: the stream has not come past
 * it), which the message names: then nothing has changed. The code of the first call into the
 * window that has failed here, if one has: the memory is no longer registered, but peers that have
 * yet to end that call may still store into it. So it must neither be freed nor used until all of
 * them have ended the call (with an error, or by unjamDestroy). unjamDestroy deregisters what is
 * left, and of that the same is true. */
UNJAM_API unjamResult_t unjamMemDeregister(unjamContext_t context, void* pointer);

/* ---- groups ---- */
/* Local: every member calls it with the same ranks in the same order; no communication. Groups with
 * equal members are told apart by `name`, and equal members and name by the number of earlier such
 * creations on the rank. ranks: `size` distinct ranks of the job, the caller among them; NULL: all.
 * name: may be NULL (""). Destroying a group with invocations pending is an error. */
UNJAM_API unjamResult_t unjamGroupCreate(unjamContext_t context, const int* ranks, int size,
                                         const char* name, unjamGroup_t* group);
UNJAM_API unjamResult_t unjamGroupDestroy(unjamGroup_t group);
/* Ends this rank's pending invocations of the group, sends and receives among them, with
 * UNJAM_ERROR_ABORTED, and refuses further ones; other groups go on. Returns at once, from any
 * thread. Peers are told: what they have pending in the group that this rank has not completed its
 * part of, and what they call later, ends with UNJAM_ERROR_PEER. (Under keys other than the empty
 * one that holds only of those that this rank has called.) The group must still be destroyed. */
UNJAM_API unjamResult_t unjamGroupAbort(unjamGroup_t group);
/* A group of those members of `group` that are not absent (see unjamContextAbsent), as
 * unjamGroupCreate makes it: local, no communication. All survivors call it with the same name. If
 * they do not yet know of the same absences, those that include an absent rank get UNJAM_ERROR_PEER
 * from the new group and shrink that one again: then all have the same. */
UNJAM_API unjamResult_t unjamGroupShrink(unjamGroup_t group, const char* name,
                                         unjamGroup_t* survivors);
UNJAM_API unjamResult_t unjamGroupRank(unjamGroup_t group, int* rank);
UNJAM_API unjamResult_t unjamGroupSize(unjamGroup_t group, int* size);

/* ---- collectives at once ---- */
/* Called on completion from the context's callback thread, in completion order; may submit, must
 * not wait for collectives (of any context: the same thread moves queued calls on). result: the
 * invocation's. */
typedef void (*unjamCallback_t)(unjamResult_t result, void* user);

/* How a call stands to a CUDA stream. In no case does a stream wait for a collective that nobody
 * has told it to wait for. */
typedef enum {
  UNJAM_STREAM_NONE = 0, /* no stream: the input holds its values when the call is made */
  /* The input holds its values when the work queued in `stream` until now is done. The stream does
   * not wait for the collective (unjamStreamWait does), so it goes on beside it. (A group of one
   * only copies, in the stream, and under one key what is in different streams ends in any order.)
   */
  UNJAM_STREAM_ASYNC = 1,
  /* As a kernel in `stream`: after the work queued before, and work queued later sees the results.
   */
  UNJAM_STREAM_SYNC = 2
} unjamStreamOrder_t;

#define UNJAM_MATCH_TEXT_BYTES 48
#define UNJAM_ALIKE_BYTES UNJAM_MATCH_TEXT_BYTES /* its former name */
/* May be NULL (all defaults). Size-versioned as the configuration. */
typedef struct {
  size_t size;
  uint32_t version;
  int32_t priority;         /* UNJAM_ORDER_PRIORITY: higher first; default 0 */
  unjamCallback_t callback; /* may be NULL */
  void* user;
  void* stream; /* CUDA: a cudaStream_t of the rank's device; NULL: the legacy default one */
  int32_t stream_order; /* unjamStreamOrder_t; the host device takes UNJAM_STREAM_NONE only */
  /* What else the caller wants all ranks to agree on, as a text of at most UNJAM_MATCH_TEXT_BYTES -
   * 1 bytes; NULL and "": nothing. A part of the call as its kind, count and data type are: ranks
   * that give different texts get UNJAM_ERROR_MISMATCH, whose message has both. Copied. For callers
   * whose data mean more than unjam knows: bool that travels as uint8, say. */
  UNJAM_RENAMED(const char*, match_text, alike);
  /* The call's algorithm by its name, as UNJAM_ALGORITHM takes it; NULL and "auto": as the
   * configuration says. A part of the call, as `match_text` is: give the same on all ranks. One
   * that does not serve the kind is refused with the names of those that do. */
  const char* algorithm;
} unjamCallOptions_t;
#define UNJAM_CALL_OPTIONS_INITIALIZER \
  {sizeof(unjamCallOptions_t), UNJAM_VERSION, 0, NULL, NULL, NULL, UNJAM_STREAM_NONE, {NULL}, NULL}

/* key: NUL-terminated, may be NULL or "" (the group's common channel). options: may be NULL.
 * request: may be NULL (then only the callback or the key's order tells of completion); otherwise
 * must be freed with unjamRequestFree. A failing call submits nothing.
 * Ranks that disagree on a use of a key get UNJAM_ERROR_MISMATCH, most at once, all within
 * UNJAM_STALL_MS and a half. A rank whose part only sends (a broadcast's root, most senders of a
 * reduce) may have completed with success before another rank's differing call was made: it gets
 * the error from unjamGetAsyncError and from the key's next use. */

/* recv[i] = op over all ranks of send[i], i < count. In place: send == recv. */
UNJAM_API unjamResult_t unjamAllReduce(unjamGroup_t group, const char* key, const void* send,
                                       void* recv, size_t count, unjamDataType_t dtype,
                                       unjamOp_t op, const unjamCallOptions_t* options,
                                       unjamRequest_t* request);
/* recv[r*count+i] = rank r's send[i]. In place: send == recv + rank*count. */
UNJAM_API unjamResult_t unjamAllGather(unjamGroup_t group, const char* key, const void* send,
                                       void* recv, size_t count, unjamDataType_t dtype,
                                       const unjamCallOptions_t* options, unjamRequest_t* request);
/* recv[i] = op over all ranks of send[rank*count+i], i < count. In place: recv == send+rank*count.
 */
UNJAM_API unjamResult_t unjamReduceScatter(unjamGroup_t group, const char* key, const void* send,
                                           void* recv, size_t count, unjamDataType_t dtype,
                                           unjamOp_t op, const unjamCallOptions_t* options,
                                           unjamRequest_t* request);
/* On root: recv[i] = op over all ranks of send[i]. recv is not used (may be NULL) elsewhere.
 * root: rank in the group. In place on root: send == recv. */
UNJAM_API unjamResult_t unjamReduce(unjamGroup_t group, const char* key, const void* send,
                                    void* recv, size_t count, unjamDataType_t dtype, unjamOp_t op,
                                    int root, const unjamCallOptions_t* options,
                                    unjamRequest_t* request);
/* recv[i] = root's send[i]. send is used on root only (may be NULL elsewhere). In place:
 * send == recv. */
UNJAM_API unjamResult_t unjamBroadcast(unjamGroup_t group, const char* key, const void* send,
                                       void* recv, size_t count, unjamDataType_t dtype, int root,
                                       const unjamCallOptions_t* options, unjamRequest_t* request);
/* recv[r*count+i] = rank r's send[rank*count+i], i < count: both buffers hold count elements for
 * every member. Not in place. */
UNJAM_API unjamResult_t unjamAllToAll(unjamGroup_t group, const char* key, const void* send,
                                      void* recv, size_t count, unjamDataType_t dtype,
                                      const unjamCallOptions_t* options, unjamRequest_t* request);
/* On root: recv[r*count+i] = rank r's send[i]. recv is not used (may be NULL) elsewhere. In place
 * on root: send == recv + root*count. */
UNJAM_API unjamResult_t unjamGather(unjamGroup_t group, const char* key, const void* send,
                                    void* recv, size_t count, unjamDataType_t dtype, int root,
                                    const unjamCallOptions_t* options, unjamRequest_t* request);
/* recv[i] = root's send[rank*count+i]. send is used on root only (may be NULL elsewhere). In place
 * on root: recv == send + root*count. */
UNJAM_API unjamResult_t unjamScatter(unjamGroup_t group, const char* key, const void* send,
                                     void* recv, size_t count, unjamDataType_t dtype, int root,
                                     const unjamCallOptions_t* options, unjamRequest_t* request);
/* Completes on no rank before all members have called it. It is a use of the key as any collective:
 * for a rank, it comes after that rank's earlier uses of the key, and of no other key. */
UNJAM_API unjamResult_t unjamBarrier(unjamGroup_t group, const char* key,
                                     const unjamCallOptions_t* options, unjamRequest_t* request);

/* ---- point to point ---- */
/* Matched by (group, the two ranks, direction, key, n): the n-th unjamSend from a to b under a key
 * meets b's n-th unjamRecv from a under it. Only these two ranks take part: sends and receives are
 * independent of the group's collectives under the same key, of other pairs, and of the other
 * direction, and go on when another member is gone. peer: rank in the group. Both give the same
 * count and dtype; else UNJAM_ERROR_MISMATCH, as for any collective. A send may complete before the
 * receive is called (what fits the connector waits there), and must not be relied on to. A rank may
 * send to itself: whichever of the two calls comes first, they are complete together, when both
 * have been made. (With streams: the copy is in that of the later call, behind what the earlier
 * one's held. The earlier one cannot be made with UNJAM_STREAM_SYNC, and unjamStreamWait for it
 * gives UNJAM_ERROR_INVALID_USAGE, which is transient, before the later one is made.) Each (pair,
 * direction, key) in use counts as a key (max_active_keys), at both ranks. */
UNJAM_API unjamResult_t unjamSend(unjamGroup_t group, const char* key, const void* buffer,
                                  size_t count, unjamDataType_t dtype, int peer,
                                  const unjamCallOptions_t* options, unjamRequest_t* request);
UNJAM_API unjamResult_t unjamRecv(unjamGroup_t group, const char* key, void* buffer, size_t count,
                                  unjamDataType_t dtype, int peer,
                                  const unjamCallOptions_t* options, unjamRequest_t* request);
/* As MPI_Iprobe: *ready = 1 if `peer` has made the call that this rank's next unjamRecv from it
 * under `key` would meet. Never blocks: a peer in another process is asked, and its answer is told
 * by a later call of unjamProbe (some milliseconds). What would make that unjamRecv fail fails the
 * probe as well (a peer that is gone: UNJAM_ERROR_PEER). */
UNJAM_API unjamResult_t unjamProbe(unjamGroup_t group, const char* key, int peer, int* ready);

/* ---- registered collectives: plan and key looked up once, run many times ---- */
/* Registers under (group, key) a collective of fixed kind, dtype, op, root. Local, at any time. Not
 * barriers, and not sends and receives: there is nothing to look up for them that a call does not.
 */
UNJAM_API unjamResult_t unjamRegister(unjamGroup_t group, const char* key, unjamKind_t kind,
                                      unjamDataType_t dtype, unjamOp_t op, int root, int priority,
                                      unjamCollective_t* collective);
UNJAM_API unjamResult_t unjamRegisterAllReduce(unjamGroup_t group, const char* key,
                                               unjamDataType_t dtype, unjamOp_t op, int priority,
                                               unjamCollective_t* collective);
UNJAM_API unjamResult_t unjamRegisterAllGather(unjamGroup_t group, const char* key,
                                               unjamDataType_t dtype, int priority,
                                               unjamCollective_t* collective);
UNJAM_API unjamResult_t unjamRegisterReduceScatter(unjamGroup_t group, const char* key,
                                                   unjamDataType_t dtype, unjamOp_t op,
                                                   int priority, unjamCollective_t* collective);
UNJAM_API unjamResult_t unjamRegisterReduce(unjamGroup_t group, const char* key,
                                            unjamDataType_t dtype, unjamOp_t op, int root,
                                            int priority, unjamCollective_t* collective);
UNJAM_API unjamResult_t unjamRegisterBroadcast(unjamGroup_t group, const char* key,
                                               unjamDataType_t dtype, int root, int priority,
                                               unjamCollective_t* collective);
/* Invokes it: as the call of its kind, with these buffers and count. */
UNJAM_API unjamResult_t unjamRun(unjamCollective_t collective, const void* send, void* recv,
                                 size_t count, unjamCallback_t callback, void* user,
                                 unjamRequest_t* request);
/* The same with options (may be NULL; their priority is not looked at). */
UNJAM_API unjamResult_t unjamRunWithOptions(unjamCollective_t collective, const void* send,
                                            void* recv, size_t count,
                                            const unjamCallOptions_t* options,
                                            unjamRequest_t* request);
/* With invocations pending: UNJAM_ERROR_INVALID_USAGE. */
UNJAM_API unjamResult_t unjamDeregister(unjamCollective_t collective);

/* ---- requests ---- */
/* Waits until the invocation is complete and returns its result; UNJAM_ERROR_TIMEOUT if timeout_us
 * (>= 0) has passed first; it is pending then, as unjamTest tells, unless it was UNJAM_TIMEOUT_MS
 * that has ended it. May be called again and from several threads. Never spins. */
UNJAM_API unjamResult_t unjamWait(unjamRequest_t request, int64_t timeout_us);
/* *done = 1 if complete, then the return value is the invocation's result. */
UNJAM_API unjamResult_t unjamTest(unjamRequest_t request, int* done);
/* CUDA: work queued in `stream` (a cudaStream_t) after this call runs after the invocation and sees
 * its results; this thread does not wait. While the stream waits, it serves all collectives of the
 * device. An invocation that fails ends the wait as well: ask unjamTest, or unjamGetAsyncError. */
UNJAM_API unjamResult_t unjamStreamWait(unjamRequest_t request, void* stream);
/* Calls `callback` when the invocation is complete, as a callback given with the call; if it is
 * complete already, at once in this thread. For a request that has no callback yet: else
 * UNJAM_ERROR_INVALID_USAGE. A call without callback completes faster: nobody has to be woken. */
UNJAM_API unjamResult_t unjamOnComplete(unjamRequest_t request, unjamCallback_t callback,
                                        void* user);
/* Its former name. */
UNJAM_API unjamResult_t unjamOnDone(unjamRequest_t request, unjamCallback_t callback, void* user)
    UNJAM_FORMER_NAME(unjamOnComplete);
/* The message of an invocation that failed; "" else. Valid until the request is freed. */
UNJAM_API const char* unjamRequestError(unjamRequest_t request);
/* Frees the handle; a pending invocation goes on. */
UNJAM_API unjamResult_t unjamRequestFree(unjamRequest_t request);

/* ---- what is going on ---- */
/* Counters since the context began, summed over lanes: none but `pending` ever falls.
 * Size-versioned. */
typedef struct {
  size_t size;
  uint64_t submitted;        /* invocations */
  uint64_t completed;        /* invocations, in error too */
  uint64_t pending;          /* invocations now */
  uint64_t preemptions;      /* a collective gave way because a wait passed its threshold */
  uint64_t quantum_switches; /* a progressing collective gave way after its turn */
  uint64_t context_loads;
  uint64_t context_saves; /* lazy: only contexts that had changed */
  uint64_t spins;         /* failed polls */
  uint64_t slices;        /* primitive executions that moved data */
  uint64_t bytes_sent;
  uint64_t borrowed;        /* slices that went through a pool slot */
  uint64_t starts;          /* engine starts, all lanes */
  uint64_t quits;           /* voluntary quits, all lanes */
  uint64_t residency_quits; /* of which: because the longest stay was over */
  uint64_t lanes;           /* blocks a rank: divide by it for figures "per block" */
  uint64_t idle_quits;      /* of the quits: because nothing was pending */
  uint64_t stuck_quits;     /* because nothing of what was pending could move. (The rest were called
                               away: threads and kernels that wait, by the end of their own call; on
                               CUDA a daemon's lanes, by the first one, which counts why.) */
} unjamStats_t;
UNJAM_API unjamResult_t unjamGetStats(unjamContext_t context, unjamStats_t* stats);

/* JSON texts. The size needed including the NUL is stored to *needed (may be NULL); a text that
 * does not fit in `bytes` is cut, and UNJAM_ERROR_RESOURCES returned. buffer may be NULL if bytes
 * is 0. */
/* Settings, memory per key and peer, the heap (its bytes, those used, the largest piece that is
 * free, allocations), what is held by which keys, statistics per key and lane. Of a lane while
 * traces are kept (trace_events) also what its engine's steps have taken, in ns: to read
 * submissions, to prepare invocations, to load and to save contexts, to write completions (the
 * paper's Fig. 7). "ranks_a_core": the job's ranks for each CPU that any may run on, rounded up.
 * Where UNJAM_HOST_ID says as which hosts ranks count, these, by rank. Where memory comes as ranks
 * meet (UNJAM_FIRST_CONNECTORS), how many neighbours this one has met, the bytes behind what they
 * write to, and "neighbours_lack": why memory that they want has not come ("": it has). */
UNJAM_API unjamResult_t unjamInfo(unjamContext_t context, char* buffer, size_t bytes,
                                  size_t* needed);
/* What each rank of such a job would hold, computed: no job is started, and no GPU is needed.
 *   {"ranks", "device", "lanes", "connectors", "first_connectors",
 *    "base_bytes":             of its arena, from the beginning (with heap_bytes),
 *    "neighbour_first_bytes":  more for each rank that a plan of its names as a neighbour,
 *    "neighbour_most_bytes":   the same when keys have use for all connectors,
 *    "engine_bytes":           queues, contexts, keys and what is kept of peers,
 *    "address_bytes":          of the arena's addresses, in each process that maps it}
 * On the host all but "engine_bytes" is committed page by page, as it is touched. On CUDA
 * "engine_bytes" is null where the CUDA library cannot be loaded. Ranks that share a device have
 * fewer lanes than this says. */
UNJAM_API unjamResult_t unjamJobMemory(int nranks, const unjamConfig_t* config, char* buffer,
                                       size_t bytes, size_t* needed);
/* {"ranks": [{"rank", "running": {group, key, n} | null, "waits_for": [...],
 *             "lacks_memory": why memory that a neighbour needs is not there, or null,
 *             "pending": [{"group", "key", "n", "what", "age_ms", "called_by", "not_called_by",
 *                          "instead",
 *                          "engines": [{"lane", "waits_for": "data" | "room", "rank", "since_ms"} |
 *                                      {"lane", "waits_for": "turn", "n"} |
 *                                      {"lane", "waits_for": "start" | "nothing"}]}]}],
 *  "cycles": [{"text": "rank 0 runs A and waits for rank 1, which …",
 *              "edges": [{"rank", "runs": {"group","key","n"}, "waits_for"}]}],
 *  "absent": [{"rank", "why"}]}
 * over all ranks of the job; of more than 64 over the members of what is pending in this process,
 * if there is something. Of ranks at most 64 are in a list, those that others wait for first;
 * "ranks_more", "called_by_more" and so on say how many others there are, if any. instead: what
 * those that have not called it have called of the same group that this rank has not (a send under
 * another key, say), in words; "" if nothing. An engine's lane waits for data from or room towards
 * a rank, for use n of the key to be complete, to be begun, or for nothing: it moves, or is done
 * with its part. The call waits for other processes to answer, a second at most; those that do not
 * are among the absent. The signal UNJAM_EXPLAIN_SIGNAL (SIGUSR2) prints the same for people. A
 * cycle is reported only if it is certain: under UNJAM_POLICY_HOLD with one lane, through
 * collectives that no rank completes before all have begun it (not those with a root, nor sends and
 * receives): no rank in it can go on. */
UNJAM_API unjamResult_t unjamExplain(unjamContext_t context, char* buffer, size_t bytes,
                                     size_t* needed);

typedef enum {
  UNJAM_TRACE_START = 0,   /* lane starts or goes on with the invocation */
  UNJAM_TRACE_PREEMPT = 1, /* lane leaves it: a wait passed its threshold */
  UNJAM_TRACE_YIELD = 2,   /* lane leaves it: its turn is over */
  UNJAM_TRACE_FINISH = 3,  /* lane has finished its part */
  UNJAM_TRACE_QUIT = 4,    /* engine of the lane quits (no invocation) */
  UNJAM_TRACE_RESTART = 5  /* engine of the lane starts (no invocation) */
} unjamTraceType_t;
typedef struct {
  uint64_t time_ns;  /* CLOCK_MONOTONIC */
  uint64_t key_hash; /* unjamKeyHash of (group, key) */
  uint32_t n;        /* which use of the key, from 0 */
  uint16_t lane;
  uint16_t type; /* unjamTraceType_t */
} unjamTraceEvent_t;
/* Copies the newest events (at most `capacity`), oldest first, lane after lane. *count: copied. On
 * CUDA, of a lane whose engine is at work meanwhile the newest event is left out, and the oldest.
 */
UNJAM_API unjamResult_t unjamGetTrace(unjamContext_t context, unjamTraceEvent_t* events,
                                      size_t capacity, size_t* count);
/* The hash under which (group, key) appears in traces. */
UNJAM_API unjamResult_t unjamKeyHash(unjamGroup_t group, const char* key, uint64_t* hash);

/* JSON array of {"name", "read_by", "type", "default", "doc", "value"} of every UNJAM_… variable
 * that the library reads ("read_by": "library"); of those that others read ("others": the Python
 * package, the build) only the name, of those that are set and known to nobody ("nobody") the name,
 * and as "doc" the nearest one. */
UNJAM_API unjamResult_t unjamEnvironment(char* buffer, size_t bytes, size_t* needed);

/* Plans the collective for all ranks of a group and executes the plans symbolically. algorithm: as
 * in unjamConfig_t. Of UNJAM_SEND_RECV nranks is 2, and root the sender. nranks is 1 to 65000: more
 * than 1024 for what a double binary tree serves (all-reduce, barrier, broadcast, reduce). slots:
 * guaranteed slots of a connector, 1 to 1024; lanes 1 to 32. JSON: {"ok", "error", "algorithm",
 * "protocol", "bytes_sent_max", "bytes_sent_total", "steps", "slots_needed", …}. With list != 0 the
 * primitives of every rank are in it, each with "recv_peers" and "send_peers", lists of ranks. */
UNJAM_API unjamResult_t unjamPlanCheck(unjamKind_t kind, unjamDataType_t dtype, unjamOp_t op,
                                       size_t count, int nranks, int root, int algorithm, int lanes,
                                       int slots, int list, char* buffer, size_t bytes,
                                       size_t* needed);
/* The same of a group that spans hosts. host_of: array of nranks numbers, equal where ranks are on
 * one host; NULL: all are. (In a job UNJAM_HOST_ID says it.) The JSON has their number, "hosts". */
UNJAM_API unjamResult_t unjamPlanCheckOnHosts(unjamKind_t kind, unjamDataType_t dtype, unjamOp_t op,
                                              size_t count, int nranks, const int* host_of,
                                              int root, int algorithm, int lanes, int slots,
                                              int list, char* buffer, size_t bytes, size_t* needed);

/* ---- the clock: docs/guide/clock.md ---- */
/* A machine of nodes with GPUs (ranks, node after node), links between these, NICs, and leaf
 * switches, whose trunks lead to all other leaves. Times are in us, rates in 10^9 bytes/s, which
 * may be infinite. */
typedef struct {
  size_t size; /* sizeof(unjamMachine_t) */
  int32_t gpus_per_node;
  int32_t nics_per_node;
  int32_t nics_by_lane; /* lanes take the node's NICs in turns; 0: a GPU has its own */
  int32_t nodes_per_leaf;
  int32_t cores;       /* processors that the ranks of a node share; 0: each lane has its own */
  int32_t device;      /* unjamDevice_t: for which plans are made */
  uint32_t lanes;      /* blocks a rank */
  uint32_t slots;      /* guaranteed slots of a connector */
  uint32_t slot_bytes; /* payload of one */
  double link_us;      /* latency between GPUs of a node */
  double link_gb_per_s;
  double network_us; /* latency between nodes of a leaf */
  double nic_gb_per_s;
  double leaf_us;          /* more latency between leaves */
  double oversubscription; /* what a leaf's NICs carry, for each that its trunk carries */
  double slice_us;         /* what a lane does about a slice, */
  double wait_us;          /* more if it had to wait for it, */
  double peer_us;          /* more for each further peer that it has to do with, */
  double engine_gb_per_s;  /* and its rate of bytes read or written, whichever are more */
  double base_us;          /* what a call takes beside its slices */
} unjamMachine_t;

typedef struct {
  size_t size; /* sizeof(unjamPlanTiming_t) */
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t root;
  uint64_t count;
  int64_t nranks;        /* 1 to 1048576 */
  const char* algorithm; /* a name, also "ring_2d" or "node_trees"; NULL: the selector's choice */
  const unjamMachine_t* machine;
  int32_t path;              /* whether the critical path is wanted */
  int32_t late_count;        /* ranks that begin late */
  const int32_t* late_ranks; /* which */
  const double* late_us;     /* and by how much each */
} unjamPlanTiming_t;

/* How long a collective takes on a machine, by running all ranks' plans as events in order of time;
 * every link is first come, first served. Congestion control, adaptive routing, jitter and other
 * jobs are not known. Rings of more than a node are run by the ranks of one leaf. JSON: {"us",
 * "algorithm", "ranks_run", "exact", "busiest": [{"class", "share", …}], "path": {"shares",
 * "slices"}, …}. What cannot be timed is UNJAM_ERROR_INVALID_ARGUMENT, and unjamGetLastError names
 * the field or the cause. */
UNJAM_API unjamResult_t unjamPlanTime(const unjamPlanTiming_t* timing, char* buffer, size_t bytes,
                                      size_t* needed);

/* ---- the deadlock simulator: docs/simulator.md ---- */
typedef enum { UNJAM_SIM_SINGLE_QUEUE = 0, UNJAM_SIM_SYNCHRONIZATION = 1 } unjamSimModel_t;

typedef enum {
  UNJAM_SIM_INTERLEAVED = 0,  /* the k-th collective of each group in group order, k = 0, 1, ... */
  UNJAM_SIM_CONCATENATED = 1, /* group after group */
  UNJAM_SIM_EXPLICIT = 2      /* as `sequence` says */
} unjamSimOrder_t;

/* To be added up: which verdicts are wanted. */
typedef enum { UNJAM_SIM_EXACT = 1, UNJAM_SIM_RELEASED = 2 } unjamSimSemantics_t;

typedef struct unjamSimulator* unjamSimulator_t;

typedef struct {
  size_t size;   /* sizeof(unjamSimulation_t) */
  int32_t model; /* unjamSimModel_t */
  int32_t order; /* unjamSimOrder_t: of each GPU's list without disorder */
  uint32_t gpus;
  uint32_t groups;
  const uint64_t* group_begin; /* groups + 1 offsets into members */
  const uint32_t* members;     /* GPUs */
  const uint32_t* counts;      /* collectives of each group */
  const uint32_t* sequence;    /* explicit order: the groups, each `counts` times; otherwise NULL */
  uint64_t sequence_length;
  double disorder; /* probability that an entry of a GPU's list is skipped */
  double sync;     /* probability that a turn goes to a synchronisation; single queue: 0 */
  uint64_t seed;
  uint64_t memory_limit; /* bytes; 0: none */
} unjamSimulation_t;

typedef struct {
  size_t size;
  uint64_t rounds;
  uint64_t exact;         /* rounds that deadlock */
  uint64_t released;      /* rounds that the paper's published code would count */
  uint64_t exact_only;    /* exact, but not released */
  uint64_t released_only; /* released, but not exact */
  uint64_t first_exact;   /* the lowest such round; UINT64_MAX: none */
  uint64_t first_released;
  uint64_t disorders; /* drawn */
  uint64_t syncs;
} unjamSimulationCounts_t;

/* UNJAM_ERROR_INVALID_ARGUMENT names the field that cannot be; UNJAM_ERROR_RESOURCES: it would take
 * more memory than allowed. The arrays are copied. */
UNJAM_API unjamResult_t unjamSimulatorCreate(const unjamSimulation_t* job,
                                             unjamSimulator_t* simulator);
UNJAM_API unjamResult_t unjamSimulatorDestroy(unjamSimulator_t simulator);
/* Rounds first .. first + rounds - 1; the result does not depend on the number of threads. plain:
 * 0 the event-driven engine, else the step-by-step one. One call at a time on a simulator. */
UNJAM_API unjamResult_t unjamSimulatorRun(unjamSimulator_t simulator, uint64_t first,
                                          uint64_t rounds, int threads, int semantics, int plain,
                                          unjamSimulationCounts_t* counts);
/* JSON: what happened in one round, and who waited for whom. */
UNJAM_API unjamResult_t unjamSimulatorRound(unjamSimulator_t simulator, uint64_t round, int plain,
                                            char* buffer, size_t bytes, size_t* needed);

#ifdef __cplusplus
}
#endif
#endif /* UNJAM_UNJAM_H_ */
