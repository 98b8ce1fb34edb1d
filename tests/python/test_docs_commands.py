"""Every command that a page shows is run by a test, as it stands there or in a shorter form.

What cannot run here is in ELSEWHERE with what runs it: a test, or a script for machines with GPUs;
what nothing runs is in NOT_RUN.
So a command that is new on a page, and that nobody runs, makes a test fail.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import environment
from unjam.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# What is run instead, where the command itself takes longer than a test should.
SHORTER = {
    "unjam demo": "unjam demo --quick",
    "unjam bench --device host --ranks 2 --peer gloo --sizes 1K:1M": (
        "unjam bench --device host --ranks 2 --peer gloo --sizes 1K --collective all_reduce "
        "--seconds 0.01"
    ),
}

# Who runs it: a file, and the test in it if it is one of ours. `tools/ci.py` is make test's.
_INSTALL = "tests/python/test_install.py::"
_WHEEL = "tests/python/test_wheel.py::test_it_trains_without_a_compiler"  # from its fixture
_PACKAGE = "tools/ci.py::stage_package"
_UNIT = "tools/ci.py::stage_unit"
_GPUS = "tests/gpu/run_all.sh"
_ON_GPUS = "tests/python/gpu_recipes.py"
_LAUNCHED = "tests/python/test_docs.py::test_processes_started_by_a_loop"
_GLOO = "tests/python/test_torch_training.py::test_recipe_beside_gloo"
_RANKS = "tests/python/test_torch_training.py::test_alone"
_EXAMPLES = "examples/torch/recipes/"
_HOSTS = "tests/python/hosts_tools.py"  # of test_hosts.py
ELSEWHERE = {
    "python -m pip install libucx-cu13": "tools/setup_env.py",
    "export UNJAM_ROOT=10.0.0.1:29600 UNJAM_ID=…": _HOSTS,
    "UNJAM_RANKS=4 UNJAM_RANK=0 python rank.py & UNJAM_RANKS=4 UNJAM_RANK=1 python rank.py": _HOSTS,
    "UNJAM_RANKS=4 UNJAM_RANK=2 python rank.py & UNJAM_RANKS=4 UNJAM_RANK=3 python rank.py": _HOSTS,
    "export UNJAM_ROOT=127.0.0.1:29600 UNJAM_ID=$(unjam id) UNJAM_RANKS=2": _HOSTS,
    "UNJAM_HOST_ID=a UNJAM_RANK=0 python rank.py & UNJAM_HOST_ID=b UNJAM_RANK=1 python rank.py": (
        _HOSTS
    ),
    "make demo": "tests/python/test_demo_offline.py::test_the_machines_own_tools_do",
    "make test": "tools/ci.py::main",
    "pip install ./unjam": _PACKAGE,
    "python -m pip install ./unjam": _PACKAGE,
    "UNJAM_LOG=debug UNJAM_LOG_FILE=/tmp/unjam-%r.log torchrun --nproc-per-node 4 train.py": (
        "tests/python/test_log.py::test_a_file_for_each_rank"
    ),
    "unjam simulate --trace /tmp/dumps": (
        "tests/python/test_torch_profiling.py::test_simulate_command_reads_the_dumps"
    ),
    "unjam reshard plan weights.toml --check --compare": (
        "tests/python/test_reshard.py::test_the_pages_file_is_planned"
    ),
    "unjam reshard bench weights.toml": (
        "tests/python/test_reshard.py::test_the_pages_file_is_carried_out"
    ),
    # With fewer ranks, and by its defaults.
    "python examples/torch/unet_pipeline.py --ranks 4 --schedule eager_1f1b --split": (
        "tests/python/test_torch_training.py::test_example_by_itself"
    ),
    "python examples/torch/unet_pipeline.py --ranks 3 --wide": (
        "tests/python/test_torch_training.py::test_example_by_itself"
    ),
    "python examples/torch/unet_pipeline.py --ranks 4 --split": (
        "tests/python/test_torch_training.py::test_example_by_itself"
    ),
    "python examples/torch/weight_sync.py": (
        "tests/python/test_torch_training.py::test_example_by_itself"
    ),
    # Minutes; parts of it run there.
    "PYTHONPATH=python UNJAM_LIBRARY=build/release/libunjam.so python3 tools/scale.py": (
        "tests/python/test_clock.py::test_the_pages_ratios_are_the_clocks"
    ),
    "torchfrtrace /tmp/dumps": (
        "tests/python/test_torch_profiling.py::test_analyser_names_the_rank_that_is_missing"
    ),
    "pip install unjam/dist/unjam-0.1.0-py3-none-manylinux_2_35_x86_64.whl": _WHEEL,
    # Its kernels take minutes to compile; the other wheel is installed in the same way.
    "pip install unjam/dist/unjam-0.1.0+cu13-py3-none-manylinux_2_35_x86_64.whl": _WHEEL,
    "python -m pip install unjam/dist/unjam-0.1.0+cu13-py3-none-manylinux_2_35_x86_64.whl": _WHEEL,
    # Compiles kernels for minutes; the choice of GPUs is tested.
    "pip install -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a-real -C cmake.define.UNJAM_CUDA=ON "
    "./unjam": "tests/python/test_cuda_choice.py",
    "cc -std=c11 all_reduce.c $(unjam config --cflags --libs) -lpthread": (
        f"{_INSTALL}test_a_program_compiled_by_hand_starts"
    ),
    "cc -std=c11 examples/all_reduce.c $(unjam config --cflags --libs) -lpthread -o all_reduce": (
        f"{_INSTALL}test_a_program_compiled_by_hand_starts"
    ),
    "./all_reduce": f"{_INSTALL}test_a_program_compiled_by_hand_starts",
    "cmake -S . -B build -Dunjam_DIR=$(unjam config --cmakedir)": (
        f"{_INSTALL}test_a_cmake_project_finds_it"
    ),
    "PKG_CONFIG_PATH=$(unjam config --pkgconfigdir) pkg-config --cflags --libs unjam": (
        f"{_INSTALL}test_a_program_compiled_with_pkg_config_starts"
    ),
    "cmake -S . -B build/sdk && cmake --build build/sdk && cmake --install build/sdk "
    "--prefix /opt/unjam": f"{_INSTALL}prefix",
    "cmake --preset release && cmake --build --preset release && ctest --preset release": _UNIT,
    "cmake --build --preset release --target leaves_test collectives_test": _UNIT,
    "build/release/tests/leaves_test && build/release/tests/collectives_test "
    "--gtest_filter='-*Soak*'": _UNIT,
    "cmake --build --preset release --target plan_correct_test collectives_test": _UNIT,
    "build/release/tests/plan_correct_test && build/release/tests/collectives_test "
    "--gtest_filter='-*Soak*'": _UNIT,
    "build/release/tests/plan_correct_test --gtest_filter='*Broadcast*'": _UNIT,
    "UNJAM_TEST_GOLDEN=update build/release/tests/plan_golden_test": (
        "tests/python/test_add_an_algorithm.py::check_it_works"
    ),
    "PYTHONPATH=python UNJAM_LIBRARY=build/release/libunjam.so python3 -m pytest "
    "tests/python/test_requests.py": "tools/ci.py::stage_pytest",
    "PYTHONPATH=python UNJAM_LIBRARY=build/release/libunjam.so python3 tools/docs.py "
    "--generate": "tests/python/test_docs.py::test_generated_pages_are_what_their_sources_say",
    "export UNJAM_ID=$(unjam id) UNJAM_RANKS=4": _LAUNCHED,
    "for r in 0 1 2 3; do UNJAM_RANK=$r python rank.py & done; wait": _LAUNCHED,
    # Its variables, with those of mpirun and srun, which are not here.
    "torchrun --nproc-per-node 4 rank.py": "tests/python/test_processes.py",
    "mpirun -n 4 python rank.py": "tests/python/test_processes.py",
    "srun -N 1 -n 4 python rank.py": "tests/python/test_processes.py",
    "torchrun --nproc-per-node 2 first.py": (
        "tests/python/test_docs.py::test_torch_examples_run_under_torchrun"
    ),
    "unjam run -- torchrun --nproc-per-node 2 train.py": (
        "tests/python/test_nccl_library.py::test_a_program_of_two_processes"
    ),
    "UNJAM_TORCH_REPLACE=nccl torchrun --nproc-per-node 4 train.py": (
        "tests/python/test_torch_backend.py::test_replaces_nccl_where_asked_and_says_so_once"
    ),
    # These end the job, or hang, as the page says.
    f"python {_EXAMPLES}random_grad_order.py --backend gloo": _GLOO,
    f"python {_EXAMPLES}local_wait.py --backend gloo --groups 1": _GLOO,
    f"python {_EXAMPLES}expert_order.py --backend gloo": _GLOO,
    f"python {_EXAMPLES}sync_beside_training.py --backend gloo": _GLOO,
    f"python {_EXAMPLES}big_refit.py --backend gloo": _GLOO,
    # With fewer steps.
    f"python {_EXAMPLES}sync_beside_training.py --backend unjam --ranks 4": _RANKS,
    f"python {_EXAMPLES}big_refit.py --backend unjam --ranks 4": _RANKS,
    # On GPUs.
    "cmake --preset cuda -DUNJAM_GPU_TESTS=ON && cmake --build --preset cuda && "
    "build/cuda/gpu/run_all.sh": _GPUS,
    "python3 -m pytest -m gpu tests/python": "tests/python/test_cuda.py",
    "bench/ab.sh main HEAD --json ab.json": (
        "tests/python/test_ab.py::test_the_script_explains_itself_and_names_what_it_cannot_build"
    ),
    "compute-sanitizer --tool memcheck --target-processes all build/cuda/gpu/soak --processes "
    "--ranks 4 --seconds 5 --slices 1 --batches 3 --most 1e6": "tests/gpu/soak.cu",
    "unjam bench --device cuda --ranks 2 --peer nccl --modes device,async --kinds all "
    "--sizes 1K,64K,1M,64M,1G": "tests/python/test_bench_cuda.py",
    "python3 tests/python/gpu_recipes.py": _ON_GPUS,
    "python3 tests/python/gpu_recipes.py --only pipeline,d1 --peer none --seconds 180": _ON_GPUS,
    f"torchrun --nproc-per-node 4 {_EXAMPLES}two_threads.py --backend nccl --device cuda": _ON_GPUS,
    f"torchrun --nproc-per-node 4 {_EXAMPLES}local_wait.py --backend nccl --device cuda": _ON_GPUS,
}


# Nothing here runs these: who changes them has to, on a machine with GPUs and CUDA's headers.
NOT_RUN = {
    "cc -std=c11 examples/streams.c $(unjam config --cflags --libs) -I/usr/local/cuda/include "
    "-L/usr/local/cuda/lib64 -lcudart -o streams",
    "./streams",
}

# Words that stand in a test for a command's main words: it runs the same by other means.
BY_OTHER_MEANS = {
    "torchfrtrace": "torch.distributed.flight_recorder.fr_trace",  # is that module's command
    "collectives_test": "ctest",
    "plan_correct_test": "ctest",
    "pip": "install_package",  # of tools/demo.py
    "UNJAM_ID": 'blocks(page, "sh")',  # is read from the page
    "UNJAM_RANK": 'blocks(page, "sh")',
    "compute-sanitizer": "soak",  # the program that it looks at
}
_LAUNCHERS = ("torchrun", "mpirun", "srun")


def main_words(command: str) -> set[str]:
    """What a command is about: one of these is in whatever runs it.

    The variables that it sets, but for those of a checkout; without them the last program, unjam's
    command, Python's module or script, or the launcher and what it launches.
    """
    variables = set(re.findall(r"\b(UNJAM_\w+)=", command)) - {"UNJAM_LIBRARY"}
    if variables:
        return variables
    last = command.split(" && ")[-1]
    words = [word for word in last.split() if not re.match(r"\w+=", word)]
    name = words[0].split("/")[-1]
    if name in ("unjam", "make"):
        return {words[1]}
    if name in _LAUNCHERS:
        return {name, *(Path(word).stem for word in words if word.endswith(".py"))}
    if re.fullmatch(r"python3?", name):
        return {words[2] if words[1] == "-m" else Path(words[1]).stem}
    return {name}


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """The page's blocks: what stands behind the fence, and what is inside. Also those in lists."""
    text = re.sub(r"^ +```", "```", page.read_text(), flags=re.M)
    yield from re.findall(r"^```([^\n]*)\n(.*?)^ *```", text, flags=re.M | re.S)


def commands_of(language: str, block: str) -> Iterator[str]:
    """Of a block of shell, every command; of a session on a console, what stands behind $."""
    if language not in ("sh", "console"):
        return
    for line in re.sub(r" *\\\n\s*", " ", block).splitlines():
        command = re.sub(r"(^|\s+)# .*", "", line).strip()
        if language == "console":
            if not command.startswith("$ "):
                continue
            command = command.removeprefix("$ ")
        if command:
            yield command


@functools.cache
def shown() -> dict[str, str]:
    """Every command, and a page that shows it."""
    return {
        command: page.relative_to(ROOT).as_posix()
        for page in PAGES
        for language, block in fenced(page)
        for command in commands_of(language, block)
    }


def bare(command: str) -> str:
    """Without what only a checkout needs."""
    return re.sub(r"^PYTHONPATH=python UNJAM_LIBRARY=\S+ python3 -m unjam\b", "unjam", command)


def of_unjam() -> list[str]:
    return sorted({bare(c) for c in shown() if bare(c).startswith("unjam ")} - ELSEWHERE.keys())


def as_run() -> list[str]:
    return sorted({SHORTER.get(command, command) for command in of_unjam()})


def of_examples() -> list[str]:
    """Of the programs for torch, those with unjam on a CPU."""
    return [c for c in sorted(shown()) if "examples/torch/" in c and "--backend unjam" in c]


@pytest.mark.parametrize("command", as_run())
def test_shown_command_runs(
    command: str, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    words = shlex.split(command)
    if "gloo" in words:
        pytest.importorskip("torch")
    result = python("-m", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("command", of_examples())
@pytest.mark.timeout(400, func_only=True)
def test_shown_example_trains(command: str, request: pytest.FixtureRequest) -> None:
    """Two steps of it."""
    pytest.importorskip("torch")
    request.getfixturevalue("adapter")
    program, *words = shlex.split(command)
    start = [sys.executable]
    if program == "torchrun":
        start += ["-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*start, *words, "--steps", "2", "--json", "--limit", "300"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=380,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert lines and json.loads(lines[-1])["outcome"] == "right", result.stdout + result.stderr


def test_every_command_is_run_somewhere() -> None:
    run = {*of_unjam(), *of_examples(), *ELSEWHERE, *NOT_RUN}
    missing = [
        f"{page}: {command}" for command, page in shown().items() if bare(command) not in run
    ]
    assert missing == [], "run it in a test, or say in ELSEWHERE what does"


def test_what_is_said_of_commands_is_true() -> None:
    assert ELSEWHERE.keys() - shown().keys() == set(), "no page shows these"
    assert SHORTER.keys() - shown().keys() == set(), "no page shows these"
    assert NOT_RUN - shown().keys() == set(), "no page shows these"
    for command, who in ELSEWHERE.items():
        name, _, function = who.partition("::")
        file = ROOT / name
        assert file.is_file(), f"{command}: {who}"
        text = file.read_text()
        if function:
            assert re.search(rf"^def {function}\(", text, flags=re.M), f"{command}: {who}"
        words = main_words(command)
        means = words | {BY_OTHER_MEANS[word] for word in words & BY_OTHER_MEANS.keys()}
        found = [
            word for word in means if re.search(rf"(?<![A-Za-z]){re.escape(word)}(?!\w)", text)
        ]
        assert found, f"{command}: {who} has none of {', '.join(sorted(means))}"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("unjam simulate --trace /tmp/dumps", {"simulate"}),
        ("UNJAM_LOG=debug torchrun train.py", {"UNJAM_LOG"}),
        ("torchrun --nproc-per-node 2 a/first.py", {"torchrun", "first"}),
        ("PYTHONPATH=python UNJAM_LIBRARY=x python3 tools/docs.py --generate", {"docs"}),
        ("python -m pip install x", {"pip"}),
        ("build/a_test && build/release/tests/leaves_test", {"leaves_test"}),
    ],
)
def test_what_a_command_is_about(command: str, words: set[str]) -> None:
    assert main_words(command) == words


def test_no_command_hides_in_another_block() -> None:
    """What a reader would type stands in a block of sh or of console."""
    begins = re.compile(
        r"(\$ |[A-Z_]+=\S+ )*"
        r"(unjam|python3?|pip|make|cmake|ctest|torchrun|mpirun|srun|cc|docker|git|apt-get) "
    )
    for page in PAGES:
        for language, block in fenced(page):
            hidden = (
                [] if language in ("sh", "console") else [*filter(begins.match, block.split("\n"))]
            )
            assert hidden == [], page


@functools.cache
def options() -> dict[str, set[str]]:
    """The options of each command of unjam's, by its words; "" is the program's own."""
    found: dict[str, set[str]] = {}

    def look(parser: argparse.ArgumentParser, words: str) -> None:
        found[words] = {name for action in parser._actions for name in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    look(below, f"{words} {name}".strip())

    look(make_parser(), "")
    return found


def test_commands_in_sentences_exist() -> None:
    """`unjam …` and `make …` in a line of text: the command is there, and so are its options."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    seen = 0
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        for quoted in re.findall(r"`((?:unjam|make) [a-z][^`]*)`", text):
            words = quoted.split()
            seen += 1
            if words[0] == "make":
                assert words[1] in targets, f"{page}: {quoted}"
                continue
            known = max(
                (
                    k
                    for k in options()
                    if [*k.split(), ""] and words[1:][: len(k.split())] == k.split()
                ),
                key=len,
            )
            assert known, f"{page}: there is no {quoted}"
            if "--" in words:  # what stands behind it is another program's
                words = words[: words.index("--")]
            asked = {word.split("=")[0] for word in words if word.startswith("--")}
            assert asked <= options()[known], f"{page}: {quoted}"
    assert seen > 50


def test_programs_that_are_not_run_are_programs() -> None:
    for page in PAGES:
        for language, block in fenced(page):
            if language == "python no-run":
                ast.parse(textwrap.dedent(block), filename=str(page))


def test_functions_of_c_are_in_the_header(header: str) -> None:
    header += (ROOT / "include" / "unjam" / "reshard.h").read_text()
    for page in PAGES:
        for language, block in fenced(page):
            if language != "c":
                continue
            named = set(re.findall(r"\bunjam[A-Z]\w*(?=\()", re.sub(r"/\*.*?\*/", "", block)))
            assert {name for name in named if name not in header} == set(), page
