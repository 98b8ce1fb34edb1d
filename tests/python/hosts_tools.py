"""Jobs on several hosts, which are processes here: each has a host's id of its own, and they meet
over loopback."""

import functools
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import unjam
from processes import Puppet
from rank_tools import puppet_main
from unjam import _ucx

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def plugin(version=11):
    """The tests' network plugin, of that ABI: the build's, or compiled here."""
    beside = Path(unjam.library_path()).parent
    for build in (beside, *(ROOT / "build" / name for name in ("release", "check"))):
        built = build / "tests" / "net" / f"v{version}.so"
        if built.exists():
            return os.fspath(built)
    made = Path(tempfile.mkdtemp(prefix="unjam-net-")) / f"v{version}.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-DUNJAM_NET_ABI={version}"]
    places = [f"-I{ROOT}", f"-I{ROOT / 'src'}"]
    source = os.fspath(ROOT / "tests" / "net" / "test_plugin.cc")
    subprocess.run(["g++", *flags, *places, source, "-o", made], check=True)
    return os.fspath(made)


@functools.cache
def ucx():
    """UCX's libucp.so.0, from UNJAM_TEST_UCX or the wheel, or None."""
    named = os.environ.get("UNJAM_TEST_UCX")
    if named:
        return named
    return _ucx.wheel()


def carrier(name):
    """Variables that choose it: "plugin", or "ucx"."""
    if name == "plugin":
        return {"UNJAM_NET_PLUGIN": plugin()}
    return {"UNJAM_NET": "ucx", "UNJAM_NET_UCX": ucx(), "UNJAM_UCX_NET_DEVICES": "lo"}


def free_port():
    """On loopback. (Somebody else may be faster.)"""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def places(hosts, port=None):
    """Variables of each rank, where `hosts` says how many ranks each host has."""
    root = f"127.0.0.1:{free_port() if port is None else port}"
    unique = unjam.unique_id().rstrip(b"\0").hex()
    ranks = []
    for host, count in enumerate(hosts):
        for _ in range(count):
            ranks.append(
                {
                    "UNJAM_ROOT": root,
                    "UNJAM_ID": unique,
                    "UNJAM_HOST_ID": f"host{host}",
                    "UNJAM_RANK": len(ranks),
                    "UNJAM_RANKS": sum(hosts),
                    "UNJAM_PEER_TIMEOUT_MS": 60_000,  # the machine may be shared
                }
            )
    return ranks


def job(harness, hosts, worker, *arguments, by="plugin", **env):
    """A process for each rank."""
    return [
        harness.start(worker, *arguments, name=f"rank {rank}", **{**place, **carrier(by), **env})
        for rank, place in enumerate(places(hosts))
    ]


def puppets(harness, hosts, config=None, by="plugin", **env):
    """As processes.puppets()."""
    ranks = job(harness, hosts, puppet_main, config or {}, by=by, **env)
    for rank in ranks:
        assert rank.said() == "ready"
    return [Puppet(rank) for rank in ranks]
