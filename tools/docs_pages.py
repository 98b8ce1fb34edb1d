"""The pages, and parts of pages, that are made from sources: what docs.py --generate writes.

    docs/reference/c.md      include/unjam/unjam.h and reshard.h
    docs/reference/cli.md    the parsers of python/unjam/cli
    docs/environment.md      its tables, from unjamEnvironment and unjam._torch_settings
    docs/algorithms/*.md     their numbers, and pictures beside them, from `unjam plan`
    docs/nccl.md             its table, from src/api/nccl
    docs/performance.md      bench/results/*.json, with a plot
    README.md                five rows of these, if it has the place for them

A part of a page stands between two comments (see part_of). tests/python/test_docs.py compares.
A picture carries a digest of what it was drawn from, for its bytes change with matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
API_PAGE, ROOT_PAGE = "api.md", "ARCHITECTURE.md"
GREY = "#808080"  # is read on a light page and on a dark one


def digest_of(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def part_of(text: str, name: str, new: str) -> str:
    """The page with what stands between the comments of that name replaced."""
    begin, end = f"<!-- generated: {name} -->\n", "<!-- end of what is generated -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no place for {name!r}: {begin.strip()} … {end}")
    return f"{before}{begin}\n{new.strip()}\n\n{end}{rest.partition(end)[2]}"


def table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- the C reference ----


@dataclass
class Piece:
    """A comment, or a declaration."""

    text: str
    comment: bool
    joined: bool  # nothing stands between it and what comes before


def _pieces(header: str) -> list[Piece]:
    """The header's comments and declarations after its head, in order."""
    lines = header.splitlines()
    pieces: list[Piece] = []
    i, joined = 0, False
    while i < len(lines):
        line = lines[i]
        begin = i
        if line.startswith("/*"):
            while "*/" not in lines[i]:
                i += 1
        elif re.match(
            r"(UNJAM_API|typedef|#define UNJAM_(?!\w+_H_|API|FORMER_NAME|RENAMED))", line
        ):
            depth = 0
            while True:
                depth += lines[i].count("{") - lines[i].count("}")
                ends = not lines[i].endswith("\\") if line[0] == "#" else lines[i].endswith(";")
                if ends and depth <= 0:
                    break
                i += 1
        else:
            joined = False
            i += 1
            continue
        i += 1
        text = "\n".join(lines[begin:i])
        pieces.append(Piece(text, line.startswith("/*"), joined))
        joined = True
    return pieces


def _prose(comment: str) -> str:
    """A comment's words, as Markdown."""
    body = re.sub(r"^/\*|\*/$", "", comment.strip())
    lines = [re.sub(r"^ ?\* ?", "", line).rstrip() for line in body.splitlines()]
    text = "\n".join(line.strip() for line in lines).strip()
    # A parameter or an error that begins a line begins a paragraph.
    text = re.sub(r"(?<=[.;:])\n(?=(\*?[a-z_]+|UNJAM_ERROR_\w+): )", "\n\n", text)
    kept = re.split(r"(`[^`]*`|\*[a-z][a-z -]*\*(?!\w))", text)
    return "".join(
        part if i % 2 else part.replace("*", r"\*").replace("<", "&lt;")
        for i, part in enumerate(kept)
    )


def _names(declaration: str) -> list[str]:
    """What a declaration declares, of which readers look for the page's headings."""
    if declaration.startswith("#define"):
        return re.findall(r"^#define (\w+)", declaration)
    if declaration.startswith("typedef struct ") or "(*" in declaration:
        return re.findall(r"(?:\(\*)?(\w+)\)?(?:\([^()]*\))?;$", declaration)
    if declaration.startswith("typedef"):
        return re.findall(r"(\w+);$", declaration)
    return re.findall(r"(\w+)\(", re.sub(r"__\w+\(.*?\)\)", "", declaration))[:1]


def _linked(text: str) -> str:
    """Functions and types in the text lead to their headings; blocks of code stay."""
    known = {
        name for line in re.findall(r"^### (.*)$", text, flags=re.M) for name in line.split(", ")
    }
    out, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        if not fenced and line[:1] not in ("#", "`"):
            line = re.sub(
                r"(?<![`\w\[])unjam[A-Z]\w+",
                lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in known else m[0],
                line,
            )
        out.append(line)
    return "\n".join(out)


def c_reference() -> str:
    head, *pieces = _pieces((ROOT / "include/unjam/unjam.h").read_text())
    out = [
        "# C reference",
        "Made from the comments of "
        "[include/unjam/unjam.h](../../include/unjam/unjam.h), for who writes C or C++. "
        f"[The API by task](../{API_PAGE}) is the map.",
        _prose(head.text)
        .partition("\n\n")[2]
        .replace(ROOT_PAGE, f"[{ROOT_PAGE}](../../{ROOT_PAGE}#words)"),
        "## Results and types",
        *_declarations(pieces),
    ]
    head, *pieces = _pieces((ROOT / "include/unjam/reshard.h").read_text())
    out += [
        "## Resharding",
        "Of a header of its own, [include/unjam/reshard.h](../../include/unjam/reshard.h).",
        _prose(head.text).partition("\n\n")[2],
        *_declarations(pieces),
    ]
    return _linked("\n\n".join(out) + "\n")


def _declarations(pieces: list[Piece]) -> list[str]:
    """A header's declarations with their comments, each a part of the page."""
    out: list[str] = []
    comment = ""
    for k, piece in enumerate(pieces):
        if piece.comment:
            if comment:
                out.append(_prose(comment))
                comment = ""
            title = re.fullmatch(r"/\* ---- (.*) ---- \*/", piece.text)
            if title:
                words = re.sub(r": docs/.*", "", title[1])
                out.append(f"## {words[0].upper()}{words[1:]}")
                continue
            following = pieces[k + 1] if k + 1 < len(pieces) else None
            if following is None or following.comment or not following.joined:
                out.append(_prose(piece.text))
            else:
                comment = piece.text
            continue
        declared = piece.text.replace("UNJAM_API ", "")
        if declared.startswith("#define UNJAM_VERSION_"):
            continue
        names = _names(declared)
        if names:
            out.append(f"### {', '.join(names)}")
        out.append(f"```c\n{declared}\n```")
        if comment:
            out.append(_prose(comment))
            comment = ""
    return out


# ---- the command line ----


def _option(action: argparse.Action) -> list[str]:
    words = " ".join(str(w) for w in (action.metavar,) if w) or action.dest.upper()
    if action.choices is not None and action.metavar is None:
        words = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    takes_value = action.nargs != 0
    if action.option_strings:
        name = ", ".join(
            f"`{s} {words}`" if takes_value else f"`{s}`" for s in action.option_strings
        )
    else:
        name = f"`{words}`"
    default = action.default
    shown = "" if default in (None, False, argparse.SUPPRESS) or not takes_value else f"`{default}`"
    text = (action.help or "").replace("%%", "%")
    text = re.sub(r"%\((\w+)\)s", lambda m: str(getattr(action, m[1], m[0])), text)
    text = re.sub(r"\s*\(default: ([^)]*)\)", "", text) if shown else text
    return [name.replace("|", r"\|"), shown, text.replace("|", r"\|").replace("<", "&lt;")]


def cli_reference() -> str:
    from unjam.cli import make_parser  # noqa: PLC0415

    parser = make_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    out = [
        "# Command line",
        "Made from the program's own parsers. `unjam COMMAND --help` prints the same.",
        "Exit status: 0 if all is well; 1 if a check failed or unjam reported an error; 2 for a "
        "wrong argument; 130 after Ctrl-C.",
    ]
    rows = [
        [f"[`{name}`](#{name})", (sub.description or "").partition(" (docs/")[0].rstrip(".")]
        for name, sub in commands.choices.items()
    ]
    out.append(table(["command", "what it does"], rows))
    for name, sub in commands.choices.items():
        text = (sub.description or "").partition(" (docs/")[0].rstrip(".")
        out += [f"## {name}", f"{text[0].upper()}{text[1:]}."]
        out += _options_of(sub)
        for action in sub._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below, parser in action.choices.items():
                    text = parser.description or ""
                    out += [f"### {name} {below}", f"{text[0].upper()}{text[1:]}."]
                    out += _options_of(parser)
    return "\n\n".join(out) + "\n"


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    out = []
    actions = [a for a in parser._actions if a.dest != "help" and a.help != argparse.SUPPRESS]
    actions = [a for a in actions if not isinstance(a, argparse._SubParsersAction)]
    if actions:
        out.append(table(["option", "default", "meaning"], map(_option, actions)))
    if parser.epilog:
        out.append(parser.epilog)
    return out


# ---- the environment ----


def environment_page(text: str) -> str:
    """docs/environment.md with its two tables as the library and the torch backend have them."""
    import unjam._lib  # noqa: PLC0415
    import unjam._torch_settings  # noqa: PLC0415

    def values(variable: dict[str, Any]) -> str:
        kind = str(variable["type"])
        if kind == "integer" and "min" in variable:
            return f"{variable['min']} to {variable['max']}"
        if kind == "bytes" and "min" in variable:
            return next(
                cells[1]
                for line in text.splitlines()
                if line.startswith(f"| `{variable['name']}` ")
                for cells in [[c.strip() for c in line.strip("|").split(" | ")]]
            )
        return ", ".join(kind.split("|"))

    library = [
        f"| `{v['name']}` | {values(v)} | {v['default']} | {'yes' * v['agreed']} | {v['doc']} |"
        for v in unjam._lib.environment()
        if v.get("read_by", "library") == "library"
    ]
    of_torch = [
        f"| `{v.name}` | {v.values} | {v.default} | {v.doc.removeprefix('torch: ')} |"
        for v in unjam._torch_settings.ALL
    ]
    heads = {
        "| variable | values | default | agreed | meaning |": library,
        "| variable | values | default | meaning |": of_torch,
    }
    for head, rows in heads.items():
        before, found, rest = text.partition(head + "\n")
        if not found:
            raise ValueError(f"docs/environment.md has no table {head}")
        rule, *lines = rest.split("\n")
        after = lines[next(i for i, line in enumerate(lines) if not line.startswith("|")) :]
        text = "\n".join([before + head, rule, *rows, *after])
    return text


# ---- algorithms ----

# Of each page: the algorithm's name for --algorithm, the kind whose steps are drawn, and the kinds
# with numbers.
ALGORITHM_PAGES: dict[str, tuple[str, str, list[str]]] = {
    "one-shot": (
        "one_shot",
        "all_reduce",
        ["all_reduce", "all_gather", "reduce_scatter", "broadcast"],
    ),
    "two-shot": ("two_shot", "all_reduce", ["all_reduce"]),
    "rsag": ("rsag", "all_reduce", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    "ring": ("ring", "all_reduce", ["all_reduce", "all_gather", "reduce_scatter"]),
    "chain": ("chain", "broadcast", ["broadcast", "reduce"]),
    "pairwise": ("pairwise", "all_to_all", ["all_to_all", "gather", "scatter"]),
    "double-binary-tree": (
        "double_binary_tree",
        "all_reduce",
        ["all_reduce", "broadcast", "reduce"],
    ),
    "hierarchical": ("hierarchical", "all_reduce", ["all_reduce"]),
    "pat": ("pat", "all_gather", ["all_reduce", "all_gather", "reduce_scatter"]),
}
HOSTS = {"hierarchical": 2}  # of those that have other plans on several
LANES = {"double_binary_tree": 3}  # of those that have other plans with several: one is for little
COUNT = 1 << 18  # float32: 1 MiB


def _plan_words(kind: str, ranks: int, algorithm: str) -> list[str]:
    words = ["plan", "--check", kind, "--ranks", str(ranks), "--algorithm", algorithm]
    for option, values in (("--lanes", LANES), ("--hosts", HOSTS)):
        if algorithm in values:
            words += [option, str(values[algorithm])]
    return words


def _checked(kind: str, ranks: int, algorithm: str, count: int) -> dict[str, Any]:
    from unjam.cli import make_parser, plan  # noqa: PLC0415

    words = [*_plan_words(kind, ranks, algorithm), "--count", str(count), "--list"]
    report = plan.check_plan(make_parser().parse_args(words))
    if not report["ok"] or report["algorithm"] != algorithm:
        raise ValueError(f"unjam {' '.join(words)}: {report}")
    return report


def algorithm_numbers(page: str) -> str:
    from unjam._kinds import facts_of  # noqa: PLC0415
    from unjam._types import kind_of  # noqa: PLC0415

    algorithm, _, kinds = ALGORITHM_PAGES[page]
    rows = []
    for kind in kinds:
        facts = facts_of(kind_of(kind))
        for ranks in (2, 4, 8):
            # The whole vector has 1 MiB whatever the kind.
            blocks = ranks if facts.input_blocks or facts.output_blocks else 1
            report = _checked(kind, ranks, algorithm, COUNT // blocks)
            vector = COUNT * 4
            rows.append(
                [
                    f"`{kind}`",
                    str(ranks),
                    str(report["primitives_max"]),
                    f"{report['bytes_sent_max'] / vector:.2f}",
                    f"{report['bytes_sent_total'] / vector:.2f}",
                    str(report["slots_needed"]),
                ]
            )
    heads = [
        "collective",
        "ranks",
        "primitives",
        "sent by the busiest rank",
        "sent by all",
        "slots needed",
    ]
    return (
        f"`unjam {' '.join(_plan_words(kinds[0], 4, algorithm))}` prints one row of this "
        "table. A vector has 1 MiB; what is sent is given in vectors, flags not counted.\n\n"
        + table(heads, rows)
    )


def _steps(programs: list[dict[str, Any]]) -> dict[str, Any]:
    """A plan's first pass: boxes (rank, step, part, what), arrows (rank, step, to rank, step)."""
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    boxes = []
    for program in programs:
        rank = program["rank"]
        for step, primitive in enumerate(program["primitives"]):
            words = primitive["op"].split("_")
            origins = primitive["recv_peers"]
            for peer in primitive["send_peers"]:
                sends.setdefault((rank, peer), []).append(step)
            for peer in origins:
                receives.setdefault((peer, rank), []).append(step)
            every = "scatter" in words or "collect" in words
            what = (
                "sum done"
                if primitive["finish"] and "reduce" in words
                else "add"
                if "reduce" in words
                else "receive"
                if origins
                else "send"
            )
            boxes.append([rank, step, "all" if every else str(primitive["part"]), what])
    arrows = [
        [pair[0], sent, pair[1], taken]
        for pair, steps in sorted(sends.items())
        for sent, taken in zip(steps, receives.get(pair, []), strict=True)
    ]
    return {"boxes": boxes, "arrows": arrows}


COLOURS = {"send": "#2a78b8", "receive": "#2e9e6b", "add": "#d98324", "sum done": "#c0504d"}


def draw_steps(path: Path, drawn: dict[str, Any], ranks: int) -> None:
    """A row a rank, a column a primitive, an arrow a slice."""
    figure, axes = _figure(1, 1, (8, 3.2))
    ax = axes[0][0]
    steps = 1 + max(step for _, step, _, _ in drawn["boxes"])
    for rank, sent, to, taken in drawn["arrows"]:
        ax.annotate(
            "",
            xy=(taken, to),
            xytext=(sent, rank),
            arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1, "shrinkA": 16, "shrinkB": 16},
            zorder=1,
        )
    for rank, step, part, what in drawn["boxes"]:
        ax.text(
            step,
            rank,
            part,
            ha="center",
            va="center",
            color="white",
            zorder=3,
            bbox={"boxstyle": "round,pad=0.35", "fc": COLOURS[what], "ec": "none"},
        )
    seen = [what for what in COLOURS if any(box[3] == what for box in drawn["boxes"])]
    handles = [
        ax.plot([], [], "s", color=COLOURS[what], markersize=9, label=what)[0] for what in seen
    ]
    legend = ax.legend(
        handles=handles, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    for text in legend.get_texts():
        text.set_color(GREY)
    ax.set_xlim(-0.5, steps - 0.5)
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xticks(range(steps), [str(step + 1) for step in range(steps)])
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set_xlabel("primitive")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    _save(figure, path, digest_of(drawn))


# ---- concepts ----

# Calls of three ranks in their orders: the key, "" where there is none, and its use.
CALLS = [
    [["layer1", 1], ["layer2", 1], ["", 1], ["layer1", 2], ["", 2]],
    [["layer2", 1], ["", 1], ["layer1", 1], ["", 2], ["layer1", 2]],
    [["", 1], ["layer1", 1], ["", 2], ["layer1", 2], ["layer2", 1]],
]


def draw_concepts(path: Path, calls: list[list[list[Any]]]) -> None:
    """A column a rank, its calls from above, and lines between calls that meet."""
    figure, axes = _figure(1, 1, (8, 3.6))
    ax = axes[0][0]
    colours = {"layer1": "#d98324", "layer2": "#2a78b8", "": "#6c757d"}
    for left, (mine, theirs) in enumerate(zip(calls, calls[1:])):  # noqa: B905
        for row, call in enumerate(mine):
            ax.plot(
                [left + 0.2, left + 0.8],
                [row, theirs.index(call)],
                color=colours[call[0]],
                lw=2,
                zorder=1,
            )
    for column, mine in enumerate(calls):
        ax.text(
            column, -0.85, f"rank {column}", ha="center", va="center", color=GREY, weight="bold"
        )
        for row, (key, use) in enumerate(mine):
            ax.text(
                column,
                row,
                f"{key or 'no key'}, use {use}",
                ha="center",
                va="center",
                color="white",
                bbox={"boxstyle": "round,pad=0.4", "fc": colours[key], "ec": "none"},
                zorder=2,
            )
    ax.annotate(
        "",
        xy=(-0.45, len(calls[0]) - 0.6),
        xytext=(-0.45, -0.5),
        arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1},
    )
    ax.text(-0.5, 2, "order of the calls", rotation=90, ha="right", va="center", color=GREY)
    ax.set_xlim(-0.65, len(calls) - 0.6)
    ax.set_ylim(len(calls[0]) - 0.5, -1.1)
    ax.set_axis_off()
    _save(figure, path, digest_of(calls))


# ---- performance ----

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
# Files whose builds or settings differ from what a user gets.
VARIANTS = ("no-overlap", "engine-by-slices", "heap", "bf16")
SHOWN = [1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30]
MODES = {"device": "Calls in a stream", "async": "Calls beside streams"}


def size_name(size: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def measured() -> dict[tuple[int, str], dict[tuple[str, int], dict[str, Any]]]:
    """By (GPUs, mode), by (collective, bytes): the latest row, with the file that it stands in."""
    found: dict[tuple[int, str], dict[tuple[str, int], dict[str, Any]]] = {}
    files = []
    for path in sorted((ROOT / "bench" / "results").glob("nccl-h200-*.json")):
        if not any(word in path.name for word in VARIANTS):
            files.append((json.loads(path.read_text()), path))
    for data, path in sorted(files, key=lambda entry: (entry[0]["date"], entry[1].name)):
        for row in data["rows"]:
            if row["mode"] not in MODES or row["collective"] not in KINDS:
                continue
            if row["dtype"] != "float32" or row.get("buffers", "own") != "own":
                continue
            rows = found.setdefault((row["ranks"], row["mode"]), {})
            rows[row["collective"], row["bytes"]] = {**row, "file": path.name, "data": data}
    return found


def _time(us: float) -> str:
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def performance_tables() -> str:
    out = []
    results = measured()
    for mode, title in MODES.items():
        for ranks in (2, 4):
            rows = results.get((ranks, mode), {})
            if not rows:
                continue
            out.append(f"### {title}, {ranks} GPUs")
            lines = []
            for kind, name in KINDS.items():
                for size in SHOWN:
                    row = rows.get((kind, size))
                    if row is None:
                        continue
                    lines.append(
                        [
                            name,
                            size_name(size),
                            _time(row["unjam_us"]),
                            _time(row["peer_us"]),
                            f"**{row['ratio']:.2f}**"
                            if row["ratio"] >= 1
                            else f"{row['ratio']:.2f}",
                            f"{max(row['spread'], row['peer_spread']):.0%}",
                            row["data"]["date"][:10],
                        ]
                    )
            heads = ["collective", "bytes", "unjam µs", "NCCL µs", "speed", "spread", "date"]
            out.append(table(heads, lines))
    return "\n\n".join(out)


def performance_summary() -> str:
    """Speed by range of sizes: the answer in one table."""
    results = measured()
    ranges = ((0, 1 << 20), (1 << 20, 64 << 20), (64 << 20, 1 << 40))
    lines = []
    for mode, title in MODES.items():
        for ranks in (2, 4):
            rows = results.get((ranks, mode), {})
            cells = [f"{title[0].lower()}{title[1:]}", str(ranks)]
            for low, high in ranges:
                ratios = [row["ratio"] for (_, size), row in rows.items() if low <= size < high]
                cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
            lines.append(cells)
    sizes = sorted({size for rows in results.values() for (_, size) in rows})
    spans = [[size for size in sizes if low <= size < high] for low, high in ranges]
    names = [f"{size_name(span[0])} to {size_name(span[-1])}" for span in spans]
    return table(["calls", "GPUs", *names], lines)


def performance_setting() -> str:
    """On what the rows of the page were measured."""
    found: dict[str, set[str]] = {}
    dates = set()
    for rows in measured().values():
        for row in rows.values():
            data = row["data"]
            versions = {**data["versions"], "driver": data["machine"]["driver"]}
            for part in ("unjam", "torch", "nvidia-nccl-cu13", "driver"):
                if part in versions:
                    found.setdefault(part, set()).add(versions[part])
            dates.add(data["date"][:10])
    names = {"nvidia-nccl-cu13": "NCCL", "torch": "PyTorch"}
    parts = [f"{names.get(part, part)} {', '.join(sorted(of))}" for part, of in found.items()]
    return f"Measured on H200s with {', '.join(parts)}, from {min(dates)} to {max(dates)}."


def performance_of_all_reduce() -> str:
    """Five rows, for README.md and the beginning of the page."""
    results = measured()
    lines, dates = [], []
    for size in (1 << 10, 64 << 10, 1 << 20, 64 << 20, 1 << 30):
        cells = [size_name(size)]
        for ranks in (2, 4):
            row = results[ranks, "device"]["all_reduce", size]
            cells += [_time(row["unjam_us"]), _time(row["peer_us"]), f"{row['ratio']:.2f}"]
            dates.append(row["data"]["date"][:10])
        lines.append(cells)
    heads = ["all-reduce in a stream"]
    for ranks in (2, 4):
        heads += [f"{ranks} H200s: unjam µs", "NCCL µs", "speed"]
    return (
        f"{table(heads, lines)}\n\n*Speed* is NCCL's time over unjam's: above 1, unjam is faster. "
        f"Measured {min(dates)} to {max(dates)}."
    )


def performance_slowest() -> str:
    lines = []
    for mode, title in MODES.items():
        for ranks in (2, 4):
            rows = measured().get((ranks, mode), {})
            worst = sorted((row["ratio"], kind, size) for (kind, size), row in rows.items())[:3]
            words = [
                f"{KINDS[kind]} of {size_name(size)} {ratio:.2f}" for ratio, kind, size in worst
            ]
            lines.append(f"- {title}, {ranks} GPUs: {', '.join(words)}.")
    return "\n".join(lines)


def performance_sources() -> str:
    results = measured()
    used: dict[str, dict[str, Any]] = {}
    for rows in results.values():
        for (_, size), row in rows.items():
            if size in SHOWN:
                used[row["file"]] = row["data"]
    lines = []
    for name, data in sorted(used.items(), key=lambda entry: entry[1]["date"]):
        machine, versions = data["machine"], data["versions"]
        nccl = versions.get("nvidia-nccl-cu13", "")
        command = re.sub(r" --json \S+", "", data["command"])
        lines.append(
            f"- [{name}](../bench/results/{name}), {data['date'][:10]}: {machine['gpus']} × "
            f"{machine['gpu']}, driver {machine['driver']}, NCCL {nccl}: `{command}`"
        )
    return "\n".join(lines)


def plotted() -> list[dict[str, Any]]:
    panels = []
    for (ranks, mode), rows in sorted(measured().items()):
        curves = {
            KINDS[kind]: [
                [size, row["ratio"]] for (k, size), row in sorted(rows.items()) if k == kind
            ]
            for kind in KINDS
        }
        panels.append({"ranks": ranks, "mode": mode, "curves": curves})
    return panels


def draw_performance(path: Path, panels: list[dict[str, Any]]) -> None:
    shown = [panel for panel in panels if panel["mode"] == "device"]
    figure, axes = _figure(1, len(shown), (9, 3.8))
    for ax, panel in zip(axes[0], shown, strict=True):
        for (name, points), colour in zip(
            panel["curves"].items(),
            ["#2a78b8", "#2e9e6b", "#d98324", "#c0504d", "#8a63b8"],
            strict=True,
        ):
            ax.plot(*zip(*points, strict=True), "o-", ms=3.5, lw=1.5, color=colour, label=name)
        ax.axhline(1, color=GREY, lw=1, ls="--")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_ylim(0.5, 2.0)
        ax.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1 (NCCL)", "1.4", "2"])
        ax.minorticks_off()
        sizes = [1 << 10, 32 << 10, 1 << 20, 32 << 20, 1 << 30]
        ax.set_xticks(sizes, [size_name(size) for size in sizes])
        ax.set_title(f"{panel['ranks']} H200s, calls in a stream", color=GREY, fontsize=10)
        ax.grid(alpha=0.25)
        for spine in ax.spines.values():
            spine.set_color(GREY)
    axes[0][0].set_ylabel("speed, NCCL = 1")
    legend = axes[0][-1].legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    for text in legend.get_texts():
        text.set_color(GREY)
    _save(figure, path, digest_of(panels))


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib  # noqa: PLC0415

    matplotlib.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "unjam",
            "font.size": 10,
            "font.family": "sans-serif",
            "axes.labelcolor": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
        }
    )
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _save(figure: Any, path: Path, digest: str) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None, "Description": f"data {digest}"}
    figure.savefig(path, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


# ---- all ----


NCCL_EXPORT = re.compile(
    r"^// ([^\n]+)\nUNJAM_NCCL_EXPORT\(\s*[\w ]+\*?,\s*(nccl\w+),", re.MULTILINE
)


def nccl_symbols() -> str:
    """NCCL's functions, and what each comes to, as their definitions say in front of them."""
    rows = ["| function | | |", "| --- | --- | --- |"]
    for file, state in (("exports", "served"), ("unsupported", "refused")):
        text = (ROOT / "src" / "api" / "nccl" / f"{file}.cc").read_text()
        found = NCCL_EXPORT.findall(text)
        if len(found) != text.count("\nUNJAM_NCCL_EXPORT("):
            raise ValueError(f"{file}.cc has a function of NCCL's without a comment in front of it")
        rows += [f"| `{name}` | {state} | {what} |" for what, name in found]
    return "\n".join(rows) + "\n"


def pages() -> dict[Path, str]:
    """What each page with something generated should read."""
    result = {
        DOCS / "reference" / "c.md": c_reference(),
        DOCS / "reference" / "cli.md": cli_reference(),
    }
    path = DOCS / "environment.md"
    result[path] = environment_page(path.read_text())
    for name in ALGORITHM_PAGES:
        path = DOCS / "algorithms" / f"{name}.md"
        result[path] = part_of(path.read_text(), "numbers", algorithm_numbers(name))
    path = DOCS / "nccl.md"
    result[path] = part_of(path.read_text(), "symbols", nccl_symbols())
    path = DOCS / "performance.md"
    text = part_of(path.read_text(), "setting", performance_setting())
    text = part_of(text, "summary", performance_summary())
    text = part_of(text, "all-reduce", performance_of_all_reduce())
    text = part_of(text, "slowest", performance_slowest())
    text = part_of(text, "tables", performance_tables())
    result[path] = part_of(text, "sources", performance_sources())
    path = ROOT / "README.md"
    text = path.read_text()
    if "<!-- generated: performance -->" in text:
        result[path] = part_of(text, "performance", performance_of_all_reduce())
    return result


def pictures() -> dict[Path, tuple[str, Callable[[Path], None]]]:
    """Each generated picture, with the digest of its data and what draws it."""
    result: dict[Path, tuple[str, Callable[[Path], None]]] = {}
    ranks = 4
    for name, (algorithm, kind, _) in ALGORITHM_PAGES.items():
        drawn = _steps(_checked(kind, ranks, algorithm, COUNT)["programs"])
        result[DOCS / "images" / "algorithms" / f"{name}.svg"] = (
            digest_of(drawn),
            lambda path, drawn=drawn: draw_steps(path, drawn, ranks),
        )
    result[DOCS / "images" / "concepts.svg"] = (
        digest_of(CALLS),
        lambda path: draw_concepts(path, CALLS),
    )
    panels = plotted()
    result[DOCS / "images" / "performance.svg"] = (
        digest_of(panels),
        lambda path: draw_performance(path, panels),
    )
    return result


def stale() -> list[Path]:
    """Files that do not say what their sources do."""
    old = [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]
    for path, (digest, _) in pictures().items():
        if not path.is_file() or f"data {digest}" not in path.read_text():
            old.append(path)
    return old


def write() -> list[Path]:
    """Writes what is stale; gives the files."""
    old = stale()
    texts, drawings = pages(), pictures()
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in texts:
            path.write_text(texts[path])
        else:
            drawings[path][1](path)
    return old
