"""A quick profile for a person: one sentence, both sides, and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.finding import Finding
from redline.model.fields import Frozen
from redline.model.units import format_bytes, format_rate, format_seconds, format_share
from redline.show.terminal import Fitted, make_table, one_line


class QuickSide(Frozen):
    """Before, or after."""

    batch: int | None
    samples_per_s: float | None
    peak_bytes: int | None
    epoch_s: float | None
    accuracy: float | None


class QuickResults(Frozen):
    """The figures of a quick profile. None is unknown, never a guess."""

    model: str
    dataset: str
    device: str
    item: str | None
    before: QuickSide
    """One epoch with the batch that was asked for."""
    after: QuickSide
    """All epochs with the batch that was found."""
    changed: str
    """What makes the difference between the two."""
    largest_batch: int | None
    """The largest that was tried and fits; the search looks no further than 16 times what was asked for."""
    knee_batch: int | None
    epochs: tuple[dict[str, Any], ...]
    train_loss: float | None
    val_loss: float | None
    accuracy: float | None
    best_accuracy: float | None
    phases: dict[str, float]
    """Shares of the training time; `data` is waiting for batches."""
    kernel_classes: dict[str, float]
    """Shares of the busy time."""
    kernel_libraries: dict[str, float]
    """The same by whose kernels they are: cuDNN, cuBLAS, Triton, native. On a CPU of the operators."""
    peak_bytes: int | None
    data_wait_share: float | None
    utilisation: float | None
    stem: str | None
    bound: str

    @property
    def batch(self) -> int | None:
        return self.after.batch

    @property
    def samples_per_s(self) -> float | None:
        return self.after.samples_per_s


def quick_headline(results: QuickResults) -> str:
    speed = (
        "" if results.samples_per_s is None else f" at {format_rate(results.samples_per_s)} {results.item or 'items'}/s"
    )
    reached = "" if results.accuracy is None else f" to {results.accuracy:.0%} accuracy in {len(results.epochs)} epochs"
    longest = max(results.phases, key=lambda name: results.phases[name], default=None)
    phase = f"; {results.phases[longest]:.0%} of the time is the {longest}" if longest else ""
    return f"{results.model} trains{speed}{reached} with batch {results.batch} on {results.device}{phase}"


def quick_report(results: QuickResults, findings: Sequence[Finding]) -> RenderableType:
    """The headline, both sides as a table, and a line for each fact and finding."""
    table = make_table(None)
    for name in ("", "batch", "samples/s", "memory", "epoch", "accuracy"):
        table.add_column(name, justify="right" if name else "left")
    for name, side in (("before", results.before), ("after", results.after)):
        table.add_row(name, *_side_cells(side))
    lines = [f"- {name}: {value}" for name, value in _facts(results)]
    lines += [f"- {finding.code}: {finding.evidence}; next: {finding.next}" for finding in findings]
    headline = Text(one_line(quick_headline(results)), style="bold")
    return Group(headline, Fitted(table), *(Text(one_line(line)) for line in lines))


def _facts(results: QuickResults) -> list[tuple[str, str]]:
    told = (
        ("what changed", results.changed),
        ("losses", f"training {_loss(results.train_loss)}, held-out {_loss(results.val_loss)}"),
        ("accuracy", format_share(results.accuracy) if results.accuracy is not None else ""),
        ("phases", _shares(results.phases)),
        ("kernel classes", _shares(results.kernel_classes)),
        ("libraries", _shares(results.kernel_libraries)),
        ("bound", results.bound),
    )
    return [(name, value) for name, value in told if value]


def _loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _shares(shares: dict[str, float], most: int = 5) -> str:
    largest = sorted(shares.items(), key=lambda pair: -pair[1])[:most]
    return ", ".join(f"{name} {format_share(share)}" for name, share in largest)


def _side_cells(side: QuickSide) -> list[str]:
    return [
        str(side.batch or "n/a"),
        format_rate(side.samples_per_s),
        format_bytes(side.peak_bytes),
        format_seconds(side.epoch_s),
        format_share(side.accuracy) if side.accuracy is not None else "n/a",
    ]
