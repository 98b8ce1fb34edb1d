"""A planned step as a picture: a row an SM, time to the right, on the modelled machine."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from .._errors import InvalidArgument
from ..picture.files import amiss
from .plan import Plan
from .tasks import FINISH

_KINDS = {
    "embedding": "embedding",
    "norm": "norm",
    "linear": "product",
    "gated": "gate and up",
    "rope": "RoPE and append",
    "attention": "attention",
    "merge": "merge of attention",
    "send": "send",
    "sum": "sum over ranks",
    "gather": "gather",
    "head": "head",
    "best": "choice of tokens",
    "pick": "choice of tokens",
    "route": "routing",
    "expert_up": "experts, gate and up",
    "expert_down": "experts, down",
    FINISH: "finish",
}
_ROW = 0.045  # inches of an SM, where there are many
_FEWEST_INCHES, _MOST_INCHES = 2.0, 8.0


def draw(plan: Plan, path: str | Path, title: str = "", until: float | None = None) -> None:
    """Draws what each SM runs when, as the model has it; nothing of it is measured.

    Args:
        plan: of one step.
        path: a .png, .svg or .pdf.
        title: above the picture.
        until: the end of the picture, in microseconds; None: of the step.

    Raises:
        InvalidArgument: another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if problem := amiss(path):
        raise InvalidArgument(problem)
    from matplotlib.patches import Patch

    from ..clock.pictures import drawing, plain

    rows = plan.timeline()
    end = max((span.end for row in rows for span in row), default=1.0)
    end = min(end, until) if until is not None else end
    height = min(_MOST_INCHES, max(_FEWEST_INCHES, _ROW * len(rows) + 1.4))
    with drawing(path, 11, height) as (axes,):
        plain(axes, title)
        used: dict[str, Any] = {}
        for sm, row in enumerate(rows):
            spans = [span for span in row if span.start < end]
            colors = [_color(plan, span.task, used) for span in spans]
            axes.broken_barh(
                [(span.start, span.end - span.start) for span in spans],
                (sm - 0.5, 1.0),
                facecolors=colors,
                linewidth=0,
            )
        axes.set_xlim(0, end)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_ylabel("SM")
        axes.set_xlabel("microseconds, by a model: not measured", loc="right")
        axes.figure.legend(
            handles=[Patch(facecolor=color, label=words) for words, color in used.items()],
            loc="outside lower left",
            ncols=6,
            fontsize=8.5,
            frameon=False,
        )


def _color(plan: Plan, number: int, used: dict[str, Any]) -> Any:
    op = plan.program.tasks[number].op
    words = _KINDS[plan.graph.operators[op].kind if op >= 0 else FINISH]
    if words not in used:
        place = list(dict.fromkeys(_KINDS.values())).index(words)
        used[words] = colorsys.hls_to_rgb(place * 0.618 % 1, 0.45 + 0.1 * (place % 3), 0.6)
    return used[words]
