"""The figures at the top of the page: few, large, each with its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from redline.analyze.recommend import Advice, rate, recommendable
from redline.analyze.summary import RunSummary
from redline.report.contents import Contents
from redline.spec import Spec
from redline.units import format_seconds


class Tile(Spec):
    label: str
    value: str
    about: str
    verdict: str = ""
    trusted: bool = True


def tiles_of(contents: Contents) -> list[Tile]:
    rows = {row.record_id: row for row in contents.rows}
    tiles = [_speed_up(contents.advice, rows), _fastest(contents), _quickest(contents), _counts(contents)]
    return [tile for tile in tiles if tile is not None]


def _speed_up(advice: Sequence[Advice], rows: dict[str, RunSummary]) -> Tile | None:
    for each in advice:
        row = rows.get(each.record_id)
        if each.kind == "recipe" and row is not None and each.ratio is not None:
            between = f"{each.low:.2f}–{each.high:.2f}, " if each.low is not None and each.high is not None else ""
            return _tile("Speed-up", f"{each.ratio:.2f}×", f"{between}{_where(row)}", row)
    return None


def _fastest(contents: Contents) -> Tile | None:
    rows = _believed(recommendable(contents.rows, contents.subjects))
    best = max(rows, key=lambda row: row.throughput_per_s or 0.0, default=None)
    return _tile("Highest throughput", rate(best), _where(best), best) if best else None


def _quickest(contents: Contents) -> Tile | None:
    sound = recommendable(contents.rows, contents.subjects)
    rows = _believed([row for row in sound if row.task == "infer" and row.latency_s is not None])
    best = min(rows, key=lambda row: row.latency_s.p50 if row.latency_s else 0.0, default=None)
    if best is None or best.latency_s is None:
        return None
    tail = f", p95 {format_seconds(best.latency_s.p95)}" if best.latency_s.p95 is not None else ""
    return _tile("Lowest median latency", format_seconds(best.latency_s.p50), _where(best) + tail, best)


def _believed(rows: list[RunSummary]) -> list[RunSummary]:
    """Without the noisy ones, unless there are no others."""
    return [row for row in rows if row.verdict.trusted] or rows


def _counts(contents: Contents) -> Tile:
    failed = sum(row.failure is not None for row in contents.rows)
    labels = Counter(label for row in contents.rows if row.failure is None for label in row.verdict.labels)
    told = ", ".join(f"{count} {label}" for label, count in labels.most_common())
    about = ", ".join(part for part in (told, f"{failed} failed" if failed else "") if part)
    return Tile(label="Records", value=f"{len(contents.rows)}", about=about)


def _tile(label: str, value: str, about: str, row: RunSummary) -> Tile:
    return Tile(
        label=label,
        value=value,
        about=about,
        verdict=", ".join(row.verdict.labels),
        trusted=row.verdict.trusted,
    )


def _where(row: RunSummary) -> str:
    batch = f" at batch {row.batch}" if row.batch else ""
    return f"{row.model} with {row.recipe}{batch}"
