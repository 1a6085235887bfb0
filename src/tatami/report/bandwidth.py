"""The picture of a benchmark of collectives: bandwidth over the size of the message, a line for each algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tatami.report.palette import MOSS, OCHRE, RUST
from tatami.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRONG = {"auto": "#1d3b2a", "shared": MOSS, "hierarchical": MOSS, "mpi": RUST, "gloo": OCHRE, "allgather": RUST}
"""What one looks for first; the others share a few quieter colours."""
QUIET = ("#5b7fa6", "#8c6bb1", "#6b9a9e", "#9b8f6b", "#a56b8f", "#7a7a72")
MARKERS = "osv^D<>Pd*X"


def draw_bandwidth(ax: Axes, records: Sequence[Mapping[str, Any]]) -> Axes:
    """Draw GB/s (size over median time) over the size, both on logarithmic scales.

    Args:
        ax: where.
        records: of `bench_allreduce` or `bench_put`.
    """
    from matplotlib.ticker import FuncFormatter

    names = list(dict.fromkeys(record["algorithm"] for record in records))
    quiet = iter(QUIET * (1 + len(names) // len(QUIET)))
    for index, name in enumerate(names):
        points = sorted(
            (record["size_bytes"], record["bandwidth_bytes_per_s"] / 1e9) for record in records if record["algorithm"] == name
        )
        strong = STRONG.get(name.partition("+")[0])
        ax.plot(
            [size for size, _ in points],
            [bandwidth for _, bandwidth in points],
            label=name,
            color=strong or next(quiet),
            linewidth=2.2 if strong else 1.1,
            linestyle="--" if name == "auto" else "-",
            marker=MARKERS[index % len(MARKERS)],
            markersize=5 if strong else 4,
            zorder=3 if strong else 2,
        )
    sizes = sorted({record["size_bytes"] for record in records})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [format_size(size, digits=3) for size in sizes], rotation=30)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("size of the message")
    ax.set_ylabel("size / time (GB/s)")
    ax.grid(alpha=0.25)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return ax
