"""loop: plans a model's step as one kernel: tasks, counters, a schedule on SMs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from .._errors import InvalidArgument, UnjamError
from ._console import cell, make_console, make_table, print_block, print_json, print_title, whole
from ._outputs import check_picture, file_to_write, write
from ._parser import print_help
from ._streams import complain

if TYPE_CHECKING:
    from ..loop import Plan

_ARCHS = ("sm_80", "sm_90a")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    summary = "plan a step of decoding, check it, and say what a model of a GPU makes of it"
    plan = actions.add_parser("plan", help=summary, description=summary)
    plan.add_argument(
        "--model",
        default="llama-3.2-1b",
        metavar="NAME",
        help="its shapes: llama-3.2-1b, llama-3.2-3b, llama-3-8b, moe-8x1b, tiny or tiny-moe "
        "(default: llama-3.2-1b)",
    )
    plan.add_argument(
        "--layers", type=whole(1, 1024, "number of layers"), help="fewer or more than it has"
    )
    plan.add_argument(
        "--ranks", type=whole(1, 72, "number of ranks"), default=1, help="GPUs (default: 1)"
    )
    plan.add_argument(
        "--batch", type=whole(1, 16, "batch"), default=1, help="sequences (default: 1)"
    )
    plan.add_argument(
        "--context",
        type=whole(1, 1 << 20, "context"),
        default=4096,
        help="positions for which there is room (default: 4096)",
    )
    plan.add_argument(
        "--dtype", choices=("bf16", "f32"), default="bf16", help="of weights (default: bf16)"
    )
    plan.add_argument(
        "--sync",
        choices=("counters", "grid"),
        default="counters",
        help="how tasks wait: for what they need, or for whole levels (default: counters)",
    )
    plan.add_argument(
        "--sms", type=whole(1, 1024, "number of SMs"), default=131, help="(default: 131)"
    )
    plan.add_argument(
        "--bandwidth",
        type=_bandwidth,
        default=3.0,
        metavar="TB/S",
        help="of memory, for the model (default: 3)",
    )
    plan.add_argument(
        "--compile", choices=_ARCHS, metavar="ARCH", help="by NVRTC, for sm_80 or sm_90a"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument(
        "--picture", type=file_to_write, metavar="FILE", help="draw it (png, svg or pdf)"
    )
    plan.set_defaults(parser=plan)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; status 1 if it does not compile, 2 if there is nothing to plan."""
    if options.action is None:
        return print_help(options)
    if options.picture is not None:
        check_picture(options.parser, options.picture)
    try:
        plan = _plan(options)
        compiled = _compile(plan, options.compile) if options.compile is not None else {}
    except InvalidArgument as error:
        complain(str(error), "loop plan")
        return 2
    except UnjamError as error:  # of NVRTC
        complain(str(error), "loop plan")
        return 1
    if options.json:
        print_json(plan.as_dict() | {"operators": _rows(plan)} | compiled)
    else:
        _show(plan, options, compiled)
    return 0 if options.picture is None or _draw(plan, options) else 1


def _plan(options: argparse.Namespace) -> Plan:
    from ..loop import SHAPES, Machine, compile_graph, llama, moe

    if options.model not in SHAPES:
        raise InvalidArgument(
            f"--model {options.model} is not known: give one of {', '.join(SHAPES)}"
        )
    config = SHAPES[options.model]
    if options.layers is not None:
        config = dataclasses.replace(config, layers=options.layers)
    build = moe if config.experts else llama
    model = build(
        config,
        ranks=options.ranks,
        batch=options.batch,
        context=options.context,
        dtype=options.dtype,
    )
    machine = Machine(sms=options.sms, bandwidth=options.bandwidth * 1e6)
    return compile_graph(model.graph, machine, options.sync)


def _compile(plan: Plan, arch: str) -> dict[str, Any]:
    from ..loop.codegen import generate
    from ..loop.nvrtc import Nvrtc

    code = generate(plan, arch)
    cubin = Nvrtc().compile(code)
    return {
        "arch": arch,
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "shared_bytes": code.shared_bytes,
        "cubin_bytes": len(cubin.image),
    }


def _rows(plan: Plan) -> list[dict[str, Any]]:
    """By kinds of operators: tasks, bytes that they read, and their share of SMs' time."""
    spans = [span for row in plan.timeline() for span in row]
    busy = sum(span.end - span.start for span in spans) or 1.0
    found: dict[str, dict[str, Any]] = {}
    for span in spans:
        op = plan.program.tasks[span.task].op
        kind = plan.graph.operators[op].kind if op >= 0 else "finish"
        row = found.setdefault(kind, {"kind": kind, "tasks": 0, "read_bytes": 0, "busy": 0.0})
        row["tasks"] += 1
        row["busy"] += (span.end - span.start) / busy
        if op >= 0:
            tile = plan.program.tasks[span.task].tile
            row["read_bytes"] += plan.program.rules[op].weight_bytes(tile)
    return sorted(found.values(), key=lambda row: -row["busy"])


def _show(plan: Plan, options: argparse.Namespace, compiled: dict[str, Any]) -> None:
    console, told = make_console(), plan.as_dict()
    ranks = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
    print_title(
        console,
        f"{options.model}: {ranks}, batch {options.batch}, context {options.context:,}, "
        f"{options.dtype}",
    )
    console.print()
    numbers = ["tasks", "MB read", "of SMs' time"]
    table = make_table("", ["operator", *numbers], numbers, box=None)
    for row in _rows(plan):
        table.add_row(
            row["kind"],
            cell(row["tasks"]),
            f"{row['read_bytes'] / 1e6:,.1f}",
            f"{100 * row['busy']:.1f} %",
        )
    console.print(table)
    console.print()
    floor = told["read_bytes"] / plan.machine.bandwidth
    lines = [
        f"{told['tasks']:,} tasks on {told['sms']} SMs, {told['counters']:,} counters; program "
        f"{told['number']}.",
        f"Activations take {told['page_bytes'] / 1024:,.0f} KiB in pages, "
        f"{told['page_bytes_without_reuse'] / 1024:,.0f} KiB without reuse; caches and tokens "
        f"{told['state_bytes'] / 1e6:,.1f} MB; mail {told['mail_bytes'] / 1024:,.0f} KiB.",
        f"The checker finds nothing wrong, in {told['check_seconds']:.1f} s.",
        f"By the model, which is not measured: a step takes {told['model_us']:,.0f} us; to read "
        f"all weights, and full caches, alone {floor:,.0f} us.",
    ]
    if compiled:
        lines.append(
            f"NVRTC, {compiled['arch']}: {compiled['registers']} registers, "
            f"{compiled['spill_bytes']} bytes spilled, {compiled['shared_bytes'] / 1024:,.0f} KiB "
            "of shared memory."
        )
    lines.append("No GPU has run such a program yet.")
    for line in lines:
        print_block(console, line, indent=0)


def _draw(plan: Plan, options: argparse.Namespace) -> bool:
    """Whether the picture could be written."""
    from ..loop.picture import draw

    title = f"{options.model}, {options.sync}, {options.sms} SMs of one of {options.ranks} ranks"
    drawn = write(
        "--picture", options.picture, lambda: draw(plan, options.picture, title), "loop plan"
    )
    if drawn:
        complain(f"drawn: {options.picture}", "loop plan")
    return drawn


def _bandwidth(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a bandwidth above 0, of at most 1000")
    return number


_bandwidth.__name__ = "number"  # for argparse's messages
