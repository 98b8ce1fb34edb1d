"""Kernels of unjam.loop: compiled by NVRTC, and run on the CPU by tests/simt's machine."""

import dataclasses
import random
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from loop_models import CONFIGS, DENSE, EXPERTS, make_model, make_plan
from unjam import InvalidArgument
from unjam._errors import InvalidUsage
from unjam.loop import SHAPES, Graph, Machine, compile_graph, llama, moe
from unjam.loop.codegen import INSTRUCTION, KERNELS, generate, pack_weights, read_report
from unjam.loop.interpret import Interpreter, generate as generate_tokens
from unjam.loop.nvrtc import Nvrtc, find_library
from unjam.loop.pages import PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++")
needs_nvrtc = pytest.mark.skipif(find_library() is None, reason="there is no NVRTC")

MOST_REGISTERS = 168  # of 224 that a block of 288 threads could have
PROMPT = [[1, 2], [40, 5]]


# ---- on the CPU ----


class OnCpu:
    """A program compiled for the machine of tests/simt."""

    def __init__(self, folder, code):
        self.folder, self.code = folder, code
        (folder / "program.cc").write_text(code.source)
        self.program = folder / "program"
        subprocess.run(
            [COMPILER, "-std=c++20", "-O1", "-w", f"-I{ROOT / 'tests/simt/loop'}", f"-I{KERNELS}",
             f"-I{ROOT}", "-I/usr/include", "-o", self.program, folder / "program.cc",
             ROOT / "tests/simt/loop/main.cc", ROOT / "tests/simt/machine.cc"],
            check=True,
        )  # fmt: skip

    def run(self, weights, launches, seed, programs=None, dropped=0, limit_ns=10**9):
        """Lines that it prints. A launch: steps, positions, tokens or None."""
        plan, code = self.code.plan, self.code
        graph, places = plan.graph, plan.places
        header = [
            seed, 2 * 10**9, limit_ns, graph.ranks, len(code.streams) - 1, graph.batch,
            len(launches), len(code.instructions), len(code.waits), len(plan.program.counters),
            len(plan.program.counters) - 1, places.page_count * PAGE_BYTES, places.state_bytes,
            2 * places.mail_bytes, code.weight_bytes, places.state[graph.tokens.number],
            places.state[graph.positions.number], dropped,
        ]  # fmt: skip
        parts = [struct.pack(f"<{len(header)}Q", *header)]
        parts += [a.tobytes() for a in (code.instructions, code.streams, code.waits)]
        parts += [struct.pack("<Q", n) for n in programs or [plan.number] * graph.ranks]
        parts += [pack_weights(code, rank).tobytes() for rank in weights]
        for steps, positions, tokens in launches:
            tokens = [0xFFFFFFFF] * graph.batch if tokens is None else tokens
            parts.append(np.array([steps, *positions, *tokens], np.uint32).tobytes())
        file = self.folder / "input"
        file.write_bytes(b"".join(parts))
        done = subprocess.run([self.program, file], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, (seed, done.stdout[-3000:], done.stderr)
        return done.stdout.splitlines()

    def tokens(self, weights, seed, count=3, **how):
        """Greedy tokens of each rank behind PROMPT: the last launch gives `count` - 1 of them."""
        batch, length = self.code.plan.graph.batch, len(PROMPT[0])
        launches = [
            (1, [p] * batch, [row[p] for row in PROMPT[:batch]]) for p in range(length)
        ]
        if count > 1:
            launches.append((count - 1, [length] * batch, None))
        found = [[] for _ in weights]
        for line in self.run(weights, launches, seed, **how):
            word, rank, *tokens = line.split()
            assert word == "tokens", line
            found[int(rank)].append([int(t) for t in tokens])
        return [[list(row) for row in zip(*rank[length - 1 :], strict=True)] for rank in found]


CASES = {
    "dense": (DENSE, {"ranks": 2}),
    "dense bf16 grid": (DENSE, {"ranks": 1, "dtype": "bf16", "sync": "grid"}),
    "moe": (EXPERTS, {"ranks": 2, "dtype": "bf16"}),
}


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_the_cpu_give_the_interpreters_tokens(case, tmp_path):
    config, how = CASES[case]
    model, plan = make_plan(dataclasses.replace(config, layers=1), sms=2, **how)
    want = generate_tokens(Interpreter(plan, model.weights), PROMPT, 3)
    program = OnCpu(tmp_path, generate(plan))
    seed = random.randrange(2**32)
    assert program.tokens(model.weights, seed) == [want] * plan.graph.ranks, seed
