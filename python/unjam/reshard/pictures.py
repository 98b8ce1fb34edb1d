"""Pictures of plans, through matplotlib: the file's ending chooses the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..clock.pictures import drawing, plain
from ..picture import color_of
from ..picture.text import literal
from .plan import Plan

_MOST_PORTS = 128
_GIB = 1 << 30
_UNITS = ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def unit_of(most: int) -> tuple[int, str]:
    """The unit in which so many bytes are read easily: its size and its name."""
    return next((size, name) for size, name in _UNITS if most >= size or size == 1)


def draw_loads(plan: Plan, title: str, path: Path) -> None:
    """Two bars a NIC, out and in, beside the bound.

    Args:
        plan: whose loads.
        title: above the picture.
        path: a .png, .svg or .pdf.
    """
    ports = [port for port in plan.loads() if port.out or port.into]
    left_out = max(0, len(ports) - _MOST_PORTS)
    ports = sorted(
        sorted(ports, key=lambda port: -max(port.out, port.into))[:_MOST_PORTS],
        key=lambda port: (port.host, port.nic),
    )
    unit, name = unit_of(plan.busiest())
    with drawing(path, 9, 1.8 + 0.32 * max(1, len(ports))) as (axes,):
        for shift, what, values in (
            (-0.2, "out", [port.out / unit for port in ports]),
            (0.2, "in", [port.into / unit for port in ports]),
        ):
            places = [place + shift for place in range(len(ports))]
            axes.barh(places, values, height=0.36, color=color_of(int(shift > 0)), label=what)
        axes.axvline(plan.bound() / unit, color="#111111", linewidth=1, label="bound")
        axes.set_yticks(
            range(len(ports)), [f"host {port.host}, NIC {port.nic}" for port in ports], fontsize=8
        )
        axes.invert_yaxis()
        note = f"; {left_out} less busy NICs left out" if left_out else ""
        axes.set_xlabel(literal(f"{name} through the NIC{note}"))
        plain(axes, title)
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def draw_times(cases: Sequence[str], times: Mapping[str, Sequence[float]], path: Path) -> None:
    """A bar for each case and planner: modelled times, of the bound.

    Args:
        cases: their names.
        times: of each planner, one for each case.
        path: a .png, .svg or .pdf.
    """
    width = 0.8 / len(times)
    with drawing(path, 9, 3.6) as (axes,):
        for n, (name, values) in enumerate(times.items()):
            places = [place - 0.4 + (n + 0.5) * width for place in range(len(cases))]
            axes.bar(places, values, width=width, color=color_of(n), label=name)
        axes.axhline(1, color="#111111", linewidth=1)
        axes.set_xticks(range(len(cases)), cases, fontsize=8)
        axes.set_xlabel("case of the paper")
        axes.set_ylabel("time, of the bound")
        plain(axes, "In a model: nothing was moved")
        axes.legend(
            frameon=False,
            fontsize=8,
            ncols=len(times),
            loc="lower right",
            bbox_to_anchor=(1, 1),
        )
