"""This module has the figures, axes, colours and files with which every picture is made."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

from redline.model.errors import SpecError
from redline.show.terminal import one_line

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5478a", "#b07c00", "#3d9bd6", "#6b57a8", "#7a5c22")
LABEL = 46
"""A label in a picture has at most this many characters."""


PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuses a path where no picture can be written. It is called before the long measurement, not after it."""
    if path.suffix.lower() not in PICTURES:
        raise SpecError(f"plot must end in {', '.join(PICTURES)}, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write the plot to {path}: {error.strerror}") from None


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its axes, or several axes side by side."""
    # It is made without pyplot, so that no window system is needed, and a notebook's own state stays untouched.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    every = figure.subplots(1, columns, squeeze=False)[0]
    for axes in every:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, every[0] if columns == 1 else tuple(every)


def label_axes(axes: Any, across: str, up: str, title: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, fontsize="small")


def label_text(text: str, longest: int = LABEL) -> str:
    """Returns text for a picture, with dollars escaped, which would begin a formula."""
    return one_line(text, longest).replace("$", r"\$")


def log_ticks(axes: Any) -> None:
    """Makes the vertical axis logarithmic, with whole numbers as labels: 1, 2, 5, 10, 20, 50."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # With these labels alone, less than a decade would show only one or two.
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high > 8 * low else range(1, 10)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def batch_ticks(axes: Any, batches: set[int]) -> None:
    ordered = sorted(batches)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ordered[:: max(1, len(ordered) // 12)])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("batch")


def save_figure(figure: Any, path: Path, dpi: int = 130) -> Path:
    with warnings.catch_warnings():
        # A name may hold a character that no font here has; the picture then shows a box for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        try:
            figure.savefig(path, dpi=dpi)
        except OSError as error:
            raise SpecError(f"cannot write the plot to {path}: {error.strerror}") from None
    return path


def data_url(figure: Any) -> str:
    """Returns the picture as an address that holds the whole image, so that a page fetches nothing."""
    held = io.BytesIO()
    figure.savefig(held, dpi=110, format="png")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
