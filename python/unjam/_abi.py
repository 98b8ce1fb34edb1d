"""The C API of ``include/unjam/unjam.h`` as ctypes sees it: constants, structs, prototypes.

Nothing here loads the library (see ``_lib``); ``tests/python/test_abi.py`` compares every name,
value, field and signature with the header, so that the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
VERSION = VERSION_MAJOR * 10000 + VERSION_MINOR * 100 + VERSION_PATCH

UNIQUE_ID_BYTES = 128

# unjamResult_t
SUCCESS = 0
ERROR_INVALID_ARGUMENT = 1
ERROR_INVALID_USAGE = 2
ERROR_MISMATCH = 3
ERROR_TIMEOUT = 4
ERROR_ABORTED = 5
ERROR_PEER = 6
ERROR_RESOURCES = 7
ERROR_SYSTEM = 8
ERROR_INTERNAL = 9

# unjamHolders_t
HOLDERS_ALL = 0
HOLDERS_OWNER = 1
HOLDERS_ROOT = 2
HOLDERS_OTHERS = 3

# unjamTraceType_t
TRACE_START = 0
TRACE_PREEMPT = 1
TRACE_YIELD = 2
TRACE_FINISH = 3
TRACE_QUIT = 4
TRACE_RESTART = 5

# unjamStreamOrder_t
STREAM_NONE = 0
STREAM_ASYNC = 1
STREAM_SYNC = 2

# unjamSimModel_t, unjamSimOrder_t, unjamSimSemantics_t
SIM_SINGLE_QUEUE = 0
SIM_SYNCHRONIZATION = 1
SIM_INTERLEAVED = 0
SIM_CONCATENATED = 1
SIM_EXPLICIT = 2
SIM_EXACT = 1
SIM_RELEASED = 2

Handle = c_void_p
Callback = CFUNCTYPE(None, c_int, c_void_p)


class UniqueId(Structure):
    """unjamUniqueId_t."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class KindInfo(Structure):
    """unjamKindInfo_t."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("reduces", c_int32),
        ("has_root", c_int32),
        ("blocks", c_int32),
        ("reads", c_int32),
        ("writes", c_int32),
        ("in_place", c_int32),
        ("has_buffers", c_int32),
    ]


class Config(Structure):
    """unjamConfig_t; make one with ``config.make_config``."""

    _fields_ = [
        ("size", c_size_t),
        ("version", c_uint32),
        ("policy", c_int32),
        ("order", c_int32),
        ("lanes", c_uint32),
        ("block_threads", c_uint32),
        ("max_active_keys", c_uint32),
        ("escape_slots", c_uint32),
        ("escape_slot_bytes", c_uint32),
        ("borrow_slots", c_uint32),
        ("spin_head", c_uint32),
        ("spin_base", c_uint32),
        ("spin_boost", c_uint32),
        ("spin_cap", c_uint32),
        ("quantum_slices", c_uint32),
        ("residency_us", c_uint32),
        ("trace_events", c_uint32),
        ("stall_ms", c_uint32),
        ("algorithm", c_int32),
        ("delay_seed", c_uint64),
        ("delay_max_us", c_uint32),
        ("report_ms", c_uint32),
        ("timeout_ms", c_uint32),
        ("device", c_int32),
        ("device_index", c_int32),
        ("heap_bytes", c_uint64),
    ]


class CallOptions(Structure):
    """unjamCallOptions_t. ``callback`` is a plain address: the trampoline outlives every call."""

    _fields_ = [
        ("size", c_size_t),
        ("version", c_uint32),
        ("priority", c_int32),
        ("callback", c_void_p),
        ("user", c_void_p),
        ("stream", c_void_p),
        ("stream_order", c_int32),
        ("alike", c_char_p),
        ("algorithm", c_char_p),
    ]


class Stats(Structure):
    """unjamStats_t."""

    _fields_ = [
        ("size", c_size_t),
        ("submitted", c_uint64),
        ("completed", c_uint64),
        ("pending", c_uint64),
        ("preemptions", c_uint64),
        ("quantum_switches", c_uint64),
        ("context_loads", c_uint64),
        ("context_saves", c_uint64),
        ("spins", c_uint64),
        ("slices", c_uint64),
        ("bytes_sent", c_uint64),
        ("borrowed", c_uint64),
        ("starts", c_uint64),
        ("quits", c_uint64),
        ("residency_quits", c_uint64),
        ("lanes", c_uint64),
        ("idle_quits", c_uint64),
        ("stuck_quits", c_uint64),
    ]


class TraceEvent(Structure):
    """unjamTraceEvent_t."""

    _fields_ = [
        ("time_ns", c_uint64),
        ("key_hash", c_uint64),
        ("n", c_uint32),
        ("lane", c_uint16),
        ("type", c_uint16),
    ]


class Machine(Structure):
    """unjamMachine_t."""

    _fields_ = [
        ("size", c_size_t),
        ("gpus_per_node", c_int32),
        ("nics_per_node", c_int32),
        ("nics_by_lane", c_int32),
        ("nodes_per_leaf", c_int32),
        ("cores", c_int32),
        ("device", c_int32),
        ("lanes", c_uint32),
        ("slots", c_uint32),
        ("slot_bytes", c_uint32),
        ("link_us", c_double),
        ("link_gb_per_s", c_double),
        ("network_us", c_double),
        ("nic_gb_per_s", c_double),
        ("leaf_us", c_double),
        ("oversubscription", c_double),
        ("slice_us", c_double),
        ("wait_us", c_double),
        ("peer_us", c_double),
        ("engine_gb_per_s", c_double),
        ("base_us", c_double),
    ]


class PlanTiming(Structure):
    """unjamPlanTiming_t."""

    _fields_ = [
        ("size", c_size_t),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("root", c_int32),
        ("count", c_uint64),
        ("nranks", c_int64),
        ("algorithm", c_char_p),
        ("machine", c_void_p),
        ("path", c_int32),
        ("late_count", c_int32),
        ("late_ranks", c_void_p),
        ("late_us", c_void_p),
    ]


class Simulation(Structure):
    """unjamSimulation_t."""

    _fields_ = [
        ("size", c_size_t),
        ("model", c_int32),
        ("order", c_int32),
        ("gpus", c_uint32),
        ("groups", c_uint32),
        ("group_begin", c_void_p),
        ("members", c_void_p),
        ("counts", c_void_p),
        ("sequence", c_void_p),
        ("sequence_length", c_uint64),
        ("disorder", c_double),
        ("sync", c_double),
        ("seed", c_uint64),
        ("memory_limit", c_uint64),
    ]


class SimulationCounts(Structure):
    """unjamSimulationCounts_t."""

    _fields_ = [
        ("size", c_size_t),
        ("rounds", c_uint64),
        ("exact", c_uint64),
        ("released", c_uint64),
        ("exact_only", c_uint64),
        ("released_only", c_uint64),
        ("first_exact", c_uint64),
        ("first_released", c_uint64),
        ("disorders", c_uint64),
        ("syncs", c_uint64),
    ]


_Request = POINTER(Handle)
_Options = POINTER(CallOptions)
_Text = [c_char_p, c_size_t, POINTER(c_size_t)]  # buffer, bytes, needed

# name -> (result type, argument types); handles and buffers are void*, enums are int.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "unjamGetVersion": (c_int, [POINTER(c_int)]),
    "unjamGetErrorString": (c_char_p, [c_int]),
    "unjamGetLastError": (c_char_p, []),
    "unjamLastErrorIsTransient": (c_int, []),
    "unjamGetUniqueId": (c_int, [POINTER(UniqueId)]),
    "unjamInit": (c_int, [POINTER(Handle), c_int, UniqueId, c_int, POINTER(Config)]),
    "unjamInitFromEnvironment": (c_int, [POINTER(Handle), POINTER(Config)]),
    "unjamInitAll": (c_int, [POINTER(Handle), c_int, POINTER(Config)]),
    "unjamDestroy": (c_int, [Handle]),
    "unjamAbort": (c_int, [Handle]),
    "unjamFinalize": (c_int, [c_int64]),
    "unjamContextRank": (c_int, [Handle, POINTER(c_int)]),
    "unjamContextSize": (c_int, [Handle, POINTER(c_int)]),
    "unjamContextAbsent": (c_int, [Handle, POINTER(c_int), c_int, POINTER(c_int)]),
    "unjamGetAsyncError": (c_int, [Handle, POINTER(c_int), c_char_p, c_size_t]),
    "unjamDeviceSynchronize": (c_int, [Handle, c_int64]),
    "unjamMemAlloc": (c_int, [Handle, c_size_t, POINTER(c_void_p)]),
    "unjamMemFree": (c_int, [Handle, c_void_p]),
    "unjamMemRegister": (c_int, [Handle, c_void_p, c_size_t]),
    "unjamMemDeregister": (c_int, [Handle, c_void_p]),
    "unjamGroupCreate": (c_int, [Handle, POINTER(c_int), c_int, c_char_p, POINTER(Handle)]),
    "unjamGroupDestroy": (c_int, [Handle]),
    "unjamGroupShrink": (c_int, [Handle, c_char_p, POINTER(Handle)]),
    "unjamGroupRank": (c_int, [Handle, POINTER(c_int)]),
    "unjamGroupSize": (c_int, [Handle, POINTER(c_int)]),
    "unjamAllReduce": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamAllGather": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, _Options, _Request],
    ),
    "unjamReduceScatter": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamReduce": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, _Options, _Request],
    ),
    "unjamBroadcast": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamAllToAll": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, _Options, _Request],
    ),
    "unjamGather": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamScatter": (
        c_int,
        [Handle, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamBarrier": (c_int, [Handle, c_char_p, _Options, _Request]),
    "unjamSend": (
        c_int,
        [Handle, c_char_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamRecv": (
        c_int,
        [Handle, c_char_p, c_void_p, c_size_t, c_int, c_int, _Options, _Request],
    ),
    "unjamProbe": (c_int, [Handle, c_char_p, c_int, POINTER(c_int)]),
    "unjamRegister": (
        c_int,
        [Handle, c_char_p, c_int, c_int, c_int, c_int, c_int, POINTER(Handle)],
    ),
    "unjamRegisterAllReduce": (c_int, [Handle, c_char_p, c_int, c_int, c_int, POINTER(Handle)]),
    "unjamRegisterAllGather": (c_int, [Handle, c_char_p, c_int, c_int, POINTER(Handle)]),
    "unjamRegisterReduceScatter": (
        c_int,
        [Handle, c_char_p, c_int, c_int, c_int, POINTER(Handle)],
    ),
    "unjamRegisterReduce": (
        c_int,
        [Handle, c_char_p, c_int, c_int, c_int, c_int, POINTER(Handle)],
    ),
    "unjamRegisterBroadcast": (c_int, [Handle, c_char_p, c_int, c_int, c_int, POINTER(Handle)]),
    "unjamRun": (
        c_int,
        [Handle, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, _Request],
    ),
    "unjamRunWithOptions": (
        c_int,
        [Handle, c_void_p, c_void_p, c_size_t, _Options, _Request],
    ),
    "unjamDeregister": (c_int, [Handle]),
    "unjamWait": (c_int, [Handle, c_int64]),
    "unjamTest": (c_int, [Handle, POINTER(c_int)]),
    "unjamStreamWait": (c_int, [Handle, c_void_p]),
    "unjamOnDone": (c_int, [Handle, c_void_p, c_void_p]),
    "unjamRequestError": (c_char_p, [Handle]),
    "unjamRequestFree": (c_int, [Handle]),
    "unjamGetKindInfo": (c_int, [c_int, POINTER(KindInfo)]),
    "unjamGetStats": (c_int, [Handle, POINTER(Stats)]),
    "unjamInfo": (c_int, [Handle, *_Text]),
    "unjamJobMemory": (c_int, [c_int, POINTER(Config), *_Text]),
    "unjamExplain": (c_int, [Handle, *_Text]),
    "unjamGetTrace": (c_int, [Handle, POINTER(TraceEvent), c_size_t, POINTER(c_size_t)]),
    "unjamKeyHash": (c_int, [Handle, c_char_p, POINTER(c_uint64)]),
    "unjamEnvironment": (c_int, _Text),
    "unjamPlanCheck": (
        c_int,
        [c_int, c_int, c_int, c_size_t, c_int, c_int, c_int, c_int, c_int, c_int, *_Text],
    ),
    "unjamPlanCheckOnHosts": (
        c_int,
        [
            *(c_int, c_int, c_int, c_size_t, c_int, POINTER(c_int)),
            *(c_int, c_int, c_int, c_int, c_int, *_Text),
        ],
    ),
    "unjamPlanTime": (c_int, [POINTER(PlanTiming), *_Text]),
    "unjamSimulatorCreate": (c_int, [POINTER(Simulation), POINTER(Handle)]),
    "unjamSimulatorDestroy": (c_int, [Handle]),
    "unjamSimulatorRun": (
        c_int,
        [Handle, c_uint64, c_uint64, c_int, c_int, c_int, POINTER(SimulationCounts)],
    ),
    "unjamSimulatorRound": (c_int, [Handle, c_uint64, c_int, *_Text]),
}


def declare(cdll: ctypes.CDLL) -> None:
    """Sets result and argument types of every function; AttributeError if the library lacks one."""
    for name, (restype, argtypes) in PROTOTYPES.items():
        function = getattr(cdll, name)
        function.restype = restype
        function.argtypes = argtypes
