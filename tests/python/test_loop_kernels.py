"""Kernels of unjam.loop: compiled by NVRTC, and run on the CPU by the machine of tests/simt.

No GPU has run them. The machine runs each thread of all ranks' blocks as a fiber, in an order that
a seed chooses; it has no memory model, and no tensor cores or copies of a GPU.
"""

import copy
import dataclasses
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from loop_models import CONFIGS, make_everything, make_model, make_plan, torch_tokens
from unjam import InvalidArgument
from unjam._errors import Internal, InvalidUsage
from unjam.loop import SHAPES, Machine, compile_graph, llama, moe
from unjam.loop.codegen import ENTRY, INSTRUCTION, KERNELS, generate, pack_weights, read_report
from unjam.loop.interpret import Interpreter
from unjam.loop.interpret import generate as generate_tokens
from unjam.loop.nvrtc import Nvrtc, find_library
from unjam.loop.ops import RULES
from unjam.loop.pages import PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
COMPILE = [
    shutil.which("g++"), "-std=c++20", "-O1", "-w", f"-I{ROOT / 'tests/simt/loop'}", f"-I{ROOT}",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(COMPILE[0] is None, reason="there is no g++")
needs_nvrtc = pytest.mark.skipif(find_library() is None, reason="there is no NVRTC")

MOST_REGISTERS = 168  # a thread of a block of 288 could have 224
PROMPT = [[1, 2], [40, 5]]
MOST_SEEDS = 40  # until a mistake is seen


# ---- on the CPU ----


class OnCpu:
    """A program compiled for the machine of tests/simt."""

    def __init__(self, folder, code, objects, kernels=KERNELS):
        self.folder, self.code = folder, code
        (folder / "program.cc").write_text(code.source)
        self.program = folder / "program"
        parts = [folder / "program.cc", *objects]
        subprocess.run([*COMPILE, f"-I{kernels}", "-o", self.program, *parts], check=True)

    def run(self, weights, launches, seed, programs=None, dropped=0, limit_ns=10**9):
        """Lines that it prints. A launch: steps, positions, tokens or None."""
        plan, code = self.code.plan, self.code
        graph, places = plan.graph, plan.places
        header = [
            seed, 10**9, limit_ns, graph.ranks, len(code.streams) - 1, graph.batch,
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
        """Greedy tokens of each rank behind PROMPT: the last launch gives all but the first."""
        batch, length = self.code.plan.graph.batch, len(PROMPT[0])
        launches = [(1, [p] * batch, [row[p] for row in PROMPT[:batch]]) for p in range(length)]
        launches.append((count - 1, [length] * batch, None))
        found = [[] for _ in weights]
        for line in self.run(weights, launches, seed, **how):
            word, rank, *tokens = line.split()
            if word != "tokens":
                return line
            found[int(rank)].append([int(t) for t in tokens])
        return [[list(row) for row in zip(*rank[length - 1 :], strict=True)] for rank in found]

    def is_wrong(self, weights, seed, want):
        """Whether tokens are others, or there are none."""
        try:
            found = self.tokens(weights, seed, len(want[0]), limit_ns=10**7)
        except AssertionError:  # it crashed
            return True
        return found != [want] * len(weights)

    def reports(self, weights, seed=1, **how):
        """What the ranks say of a launch that ends early."""
        batch = self.code.plan.graph.batch
        lines = self.run(weights, [(1, [0] * batch, [1] * batch)], seed, limit_ns=3 * 10**6, **how)
        found = [line.split()[1:] for line in lines if line.startswith("report")]
        return [read_report(self.code, bytes(map(int, words))) for words in found]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """What all programs are linked with."""
    folder = tmp_path_factory.mktemp("machine")
    sources = [ROOT / "tests/simt/loop/main.cc", ROOT / "tests/simt/machine.cc"]
    subprocess.run([*COMPILE, f"-I{KERNELS}", "-c", *sources], cwd=folder, check=True)
    return [folder / "main.o", folder / "machine.o"]


CASES = {
    "2 ranks": {"ranks": 2},
    "1 rank, bf16, grid": {"ranks": 1, "dtype": "bf16", "sync": "grid"},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, objects, tmp_path_factory):
    """A program with every operator, its weights, and the interpreter's tokens."""
    how = dict(CASES[request.param])
    sync = how.pop("sync", "counters")
    model = make_everything(**how)
    plan = compile_graph(model.graph, Machine(sms=2), sync)
    lacking = set(RULES) - {op.kind for op in plan.graph.operators}
    assert lacking == (set() if plan.graph.ranks > 1 else {"send", "gather", "best"})
    want = generate_tokens(Interpreter(plan, model.weights), PROMPT, 3)
    program = OnCpu(tmp_path_factory.mktemp("program"), generate(plan, slots=3), objects)
    return program, model.weights, want


@needs_compiler
def test_kernels_on_the_cpu_give_the_interpreters_tokens(case):
    program, weights, want = case
    seed = random.randrange(2**32)
    assert program.tokens(weights, seed) == [want] * len(weights), seed


@needs_compiler
def test_a_launch_whose_peer_does_not_come_ends(case):
    program, weights, _ = case
    plan = program.code.plan
    if len(weights) == 1:
        pytest.skip("it has no peer")
    (text,) = program.reports(weights, dropped=2)
    assert re.match(
        rf"rank 0, SM \d: task \d+ \(sum.0\[0\]\) of program {plan.number:016x}, step 0, "
        r"has waited \d+ ms for packets of rank 1, which has not begun$",
        text,
    ), text
    texts = program.reports(weights, programs=[plan.number, plan.number + 1])
    assert f"packets of rank 1, which runs program {plan.number + 1:016x}" in texts[0]
    assert f"packets of rank 0, which runs program {plan.number:016x}" in texts[1]


@needs_compiler
def test_a_counter_that_does_not_come_is_named(case):
    program, weights, _ = case
    other = copy.copy(program)
    other.code = copy.copy(program.code)
    other.code.instructions = program.code.instructions.copy()
    tasks, plan = other.code.instructions["task"], program.code.plan
    lost = next(t for t in plan.program.tasks if plan.program.name(t) == "o[0]")
    finish = len(plan.program.counters) - 1
    other.code.instructions["signal"][tasks == lost.number] = finish
    # (The step's counter is too high then: nobody looks at it in this launch.)
    texts = other.reports(weights)
    assert len(texts) == len(weights)
    for text in texts:
        assert re.search(r"ms for counter \d+ \(.*\): \d+ of \d+ arrivals$", text), text


@needs_compiler
def test_tasks_that_do_not_wait_are_seen(case):
    """The machine has the orders in which waits matter."""
    program, weights, want = case
    other = copy.copy(program)
    other.code = copy.copy(program.code)
    other.code.instructions = program.code.instructions.copy()
    other.code.instructions["num_waits"] = 0
    assert any(other.is_wrong(weights, seed, want) for seed in range(5))


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_models_on_the_cpu(kind, ranks, objects, tmp_path):
    """In many orders of threads tokens are torch's."""
    pytest.importorskip("torch")
    model, plan = make_plan(CONFIGS[kind], sms=3, ranks=ranks)
    program = OnCpu(tmp_path, generate(plan, slots=3), objects)
    want = torch_tokens(CONFIGS[kind], PROMPT, 3)
    first = random.randrange(2**32)
    for seed in range(first, first + 10 // ranks):
        assert program.tokens(model.weights, seed) == [want] * ranks, seed


# Of the kernels: a file, and what is replaced there by what.
MISTAKES = {
    "a page before it is there": (
        "pages.cuh",
        "!wait_for_gate(t.p, full_gate<L>",
        "false && !wait_for_gate(t.p, full_gate<L>",
    ),
    "a page that is in use": ("pages.cuh", "if (page >= L::kSlotCount) {", "if (false) {"),
    "a page given back too early": (
        "pages.cuh",
        "  sync_warp();\n  if (lane_here() == 0) gate_arrive",
        "  if (lane_here() == 0) gate_arrive",
    ),
    "experts before the routing": (
        "pages.cuh",
        "if (!kAhead || i.experts != 0) {",
        "if (!kAhead) {",
    ),
    "told before it is written": (
        "frame.cuh",
        "      Program::run(task);\n      sync_computing();\n",
        "      Program::run(task);\n",
    ),
    "packets without a flag": ("exchange.cuh", "!= flag) {", "!= flag && false) {"),
    "packets of any step": ("program.cuh", "0x80000000u) + t.epoch", "0x80000000u)"),
    "logits over x": ("dense.cuh", "  sync_computing();  // x is not needed any more\n", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_where_a_mistake_is_planted(mistake):
    name, right, _ = MISTAKES[mistake]
    assert (KERNELS / name).read_text().count(right) == 1


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_kernels_is_seen(mistake, objects, tmp_path):
    name, right, wrong = MISTAKES[mistake]
    shutil.copytree(KERNELS, tmp_path / "kernels")
    text = (KERNELS / name).read_text()
    assert text.count(right) == 1
    (tmp_path / "kernels" / name).write_text(text.replace(right, wrong))
    model = make_everything()
    code = generate(compile_graph(model.graph, Machine(sms=2)), slots=3)
    want = generate_tokens(Interpreter(code.plan, model.weights), PROMPT, 4)
    program = OnCpu(tmp_path, code, objects, tmp_path / "kernels")
    assert any(program.is_wrong(model.weights, seed, want) for seed in range(MOST_SEEDS))


# ---- by NVRTC ----


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_for_gpus(arch):
    code = generate(
        compile_graph(make_everything(dtype="bf16", batch=1).graph, Machine(sms=2)), arch
    )
    compiled = Nvrtc().compile(code)
    assert compiled.image[:4] == b"\x7fELF" and ENTRY.encode() in compiled.image
    assert compiled.spill_bytes == 0 and compiled.stack_bytes == 0
    assert 32 < compiled.registers <= MOST_REGISTERS


@needs_nvrtc
@pytest.mark.soak
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_programs_of_models_compile(name, batch, arch):
    config = SHAPES[name]
    build = moe if config.experts else llama
    plan = compile_graph(build(config, ranks=2, batch=batch, context=4096).graph)
    compiled = Nvrtc().compile(generate(plan, arch))
    assert compiled.spill_bytes == 0
    assert compiled.registers <= MOST_REGISTERS


@needs_nvrtc
def test_what_nvrtc_refuses_is_told():
    with pytest.raises(Internal, match=r"NVRTC refuses the program for sm_80: .*no storage class"):
        Nvrtc().compile_source("nothing", "sm_80")
    assert Nvrtc().version() >= (12, 0)


def test_nvrtc_that_is_not_there(tmp_path):
    with pytest.raises(InvalidUsage, match="cannot be loaded: .*pip install nvidia-cuda-nvrtc"):
        Nvrtc(tmp_path / "libnvrtc.so")


# ---- tables ----


def test_an_instruction_has_64_bytes():
    assert INSTRUCTION.itemsize == 64


def test_weights_are_packed_tile_by_tile():
    model, plan = make_plan(CONFIGS["moe"], ranks=2, sms=3)
    code = generate(plan)
    blob = pack_weights(code, model.weights[1]).view(np.float32)
    for number, rule in enumerate(plan.program.rules):
        packed = rule.weights()
        if packed is None:
            continue
        at = code.weight_places["packed", number] // 4
        tile = packed.tile_bytes // 4
        for which, value in enumerate(packed.matrices):
            array = model.weights[1][value.name].reshape(packed.experts, -1, value.cols)
            expert, row, col = packed.experts - 1, array.shape[1] - 1, value.cols // 2
            t, r = divmod(row, packed.rows)
            page, c = divmod(col, packed.chunk)
            place = at + (expert * packed.tiles + t) * tile + page * packed.page_bytes // 4
            place += (which * packed.rows + r) * packed.chunk + c
            assert blob[place] == array[expert, row, col]


def test_what_no_gpu_can_run_is_named():
    plan = make_plan(CONFIGS["dense"], state=False)[1]
    with pytest.raises(InvalidArgument, match="arch='sm_70' is not supported: give sm_80"):
        generate(plan, "sm_70")
    one_layer = dataclasses.replace(SHAPES["llama-3-8b"], layers=1, vocab_size=1024)
    wide = compile_graph(llama(one_layer, batch=8, context=64).graph)
    with pytest.raises(InvalidArgument, match="a batch of 8 takes 229376 bytes of shared memory"):
        generate(wide, "sm_90a")
    with pytest.raises(InvalidArgument, match="slots=2: give 3 to 12"):
        generate(plan, slots=2)
    lacking = make_model(CONFIGS["dense"], dtype="bf16").weights[0]
    with pytest.raises(InvalidArgument, match="is uint16 of .* numbers"):
        pack_weights(generate(plan), lacking)
