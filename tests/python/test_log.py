"""UNJAM_LOG and UNJAM_LOG_FILE: what a job says of itself, and where."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import numpy as np
import unjam

contexts = unjam.init_all(2)
groups = [context.group(name="pair") for context in contexts]
requests = [group.all_reduce(np.ones(4, np.float32), key="k") for group in groups]
for request in requests:
    request.wait()
for context in contexts:
    context.close()
"""

LINE = re.compile(r"unjam: \d\d:\d\d:\d\d\.\d{3} (warn|info|debug): (.*)")


def run(program: str = PROGRAM, **variables: str) -> tuple[str, str]:
    """What a program prints, and what is said of it on stderr."""
    environment = {name: value for name, value in os.environ.items() if "UNJAM_LOG" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def texts(log: str, level: str) -> list[str]:
    matches = [LINE.fullmatch(line) for line in log.splitlines()]
    assert all(matches), log
    return [m[2] for m in matches if m is not None and m[1] == level]


def test_nothing_is_said_unless_asked() -> None:
    assert run() == ("", "")
    assert run(UNJAM_LOG="warn") == ("", "")


def test_info_is_a_banner_a_job_and_ranks_that_come_and_go() -> None:
    said = texts(run(UNJAM_LOG="info")[1], "info")
    banners = [line for line in said if line.startswith("unjam ")]
    assert len(banners) == 1
    for part in (
        "a job of 2 ranks in 1 process",
        "device host",
        "shared memory",
        "slots of 8192 bytes",
        "timeout none",
        "set: UNJAM_LOG=info",
    ):
        assert part in banners[0]
    assert [line for line in said if line.startswith("rank 1")] == [
        next(line for line in said if line.startswith("rank 1 of 2: process ")),
        "rank 1 leaves the job after 1 call(s)",
    ]


def test_debug_names_groups_and_calls() -> None:
    said = texts(run(UNJAM_LOG="debug")[1], "debug")
    assert "rank 1: group 'pair' of ranks 0, 1" in said
    call = "rank 1: all_reduce(count=4, float32, sum), key 'k' of group 'pair', use 1: "
    assert any(re.fullmatch(re.escape(call) + r"called, plan \w+", line) for line in said)
    assert any(re.fullmatch(re.escape(call) + r"complete after \d+ us", line) for line in said)


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    assert run(UNJAM_LOG="debug", UNJAM_LOG_FILE=str(tmp_path / "r%r.log")) == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r0.log", "r1.log"]
    for rank in range(2):
        lines = (tmp_path / f"r{rank}.log").read_text()
        assert f"rank {rank} leaves" in lines
        assert f"rank {1 - rank}: " not in lines


def test_the_id_is_not_shown() -> None:
    secret = subprocess.run(
        [sys.executable, "-m", "unjam", "id"], capture_output=True, text=True, check=True
    ).stdout.strip()
    program = "import unjam\nunjam.init_from_environment().close()"
    said = run(program, UNJAM_LOG="info", UNJAM_ID=secret, UNJAM_RANK="0", UNJAM_RANKS="1")[1]
    assert "UNJAM_ID=(secret)" in said
    assert secret not in said


def test_a_failure_is_info() -> None:
    program = PROGRAM.replace("np.ones(4", "np.ones(4 + context.rank").replace(
        "for group in groups", "for context, group in zip(contexts, groups)"
    )
    program = program.replace("request.wait()", "assert request.exception() is not None")
    said = texts(run(program, UNJAM_LOG="info")[1], "info")
    assert any(": failed after " in line and "ranks disagree" in line for line in said), said


def test_a_level_that_there_is_not_is_named() -> None:
    with pytest.raises(AssertionError, match="UNJAM_LOG=loud is not valid: give one of warn"):
        run(UNJAM_LOG="loud")


def test_a_file_that_cannot_be_opened_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "none" / "log"
    said = run(UNJAM_LOG="info", UNJAM_LOG_FILE=str(path))[1].splitlines()
    assert said[0].startswith(f"unjam: UNJAM_LOG_FILE: cannot open '{path}'")
    assert sum("cannot open" in line for line in said) == 1
    assert any("a job of 2 ranks" in line for line in said)


# ---- the package's own lines ----

SAYS = """
import logging, sys
import unjam
{configure}
logging.getLogger("unjam.test").{level}("as %s", "it is")
"""


def test_lines_of_the_package_look_like_those_of_the_library() -> None:
    assert texts(run(SAYS.format(configure="", level="warning"))[1], "warn") == ["as it is"]
    assert run(SAYS.format(configure="", level="info"))[1] == ""
    said = run(SAYS.format(configure="", level="info"), UNJAM_LOG="info")[1]
    assert texts(said, "info") == ["as it is"]
    said = run(SAYS.format(configure="", level="debug"), UNJAM_LOG="debug")[1]
    assert texts(said, "debug") == ["as it is"]


def test_a_program_that_configures_logging_has_them() -> None:
    configure = "logging.basicConfig(format='mine: %(name)s: %(message)s', level=logging.INFO)"
    program = SAYS.format(configure=configure, level="info")
    assert run(program)[1] == "mine: unjam.test: as it is\n"
    assert run(program, UNJAM_LOG="warn")[1] == ""


def test_lines_of_the_package_go_to_the_ranks_file(tmp_path: Path) -> None:
    path = str(tmp_path / "%r.log")
    program = SAYS.format(configure="", level="info")
    assert run(program, UNJAM_LOG="info", UNJAM_LOG_FILE=path, RANK="3")[1] == ""
    assert texts((tmp_path / "3.log").read_text(), "info") == ["as it is"]


def test_the_logger_belongs_to_the_package() -> None:
    import unjam  # noqa: F401, PLC0415

    assert any(type(h).__module__ == "unjam._log" for h in logging.getLogger("unjam").handlers)
