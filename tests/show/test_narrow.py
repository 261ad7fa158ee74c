"""Tables of a run on narrow terminals: fewer columns, never a number cut off or a recipe that nobody can read."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from reported import race_records
from rich.console import Console, RenderableType

from redline.analyze.grid import GridCell, GridSummary
from redline.analyze.summary import RunSummary, summarize
from redline.show.grid import grid_report
from redline.show.history import Listed, detail, listing
from redline.show.run import RunReport
from redline.store.codec import row_of

RECIPES = ("baseline", "fp16+channels-last+compile:reduce-overhead", "amp+channels-last")


@pytest.fixture(scope="module")
def rows() -> list[RunSummary]:
    return summarize(race_records(RECIPES))


def lines_of(report: RenderableType, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(report)
    return text.getvalue().splitlines()


def headers_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("recipe")]


@pytest.mark.parametrize("width", [160, 100, 80, 70, 60, 50])
def test_recipe_and_trust_stay_readable_in_any_width(rows: list[RunSummary], width: int) -> None:
    lines = lines_of(RunReport(rows), width)
    assert all(len(line) <= width for line in lines)
    table, cold = headers_of(lines)
    assert re.match(r"recipe {8,}", table)
    assert table.rstrip().endswith("trust")
    assert "valid" in next(line for line in lines if line.startswith("baseline "))
    assert re.match(r"recipe {8,}", cold)
    assert "compiling" in cold
    assert sum(line.startswith("baseline ") for line in lines) == 2
    assert not any("…" in line for line in lines)


def test_the_ratio_goes_later_than_the_error_and_what_went_is_named(rows: list[RunSummary]) -> None:
    lines = lines_of(RunReport(rows), 60)
    assert "vs baseline" in headers_of(lines)[0]
    assert "rel. error" not in headers_of(lines)[0]
    told = " ".join(" ".join(lines).split())
    assert re.search(
        r"not shown at this width: (utilisation, )?power, memory, p95 ms, energy, bound, p50 ms, error", told
    )
    assert "not shown at this width: cache, import" in told


@pytest.mark.parametrize("width", [110, 90, 75])
def test_the_list_of_records_keeps_the_batch_longer_than_most(rows: list[RunSummary], width: int) -> None:
    records = race_records(RECIPES)
    listed = [Listed(row_of(record, over=True), row.conditions, row) for record, row in zip(records, rows, strict=True)]
    header = lines_of(listing(listed), width)[0].split()
    assert {"id", "model", "batch", "recipe", "speed"} <= set(header)
    assert "device" not in header


def test_all_about_one_record_hides_the_same_columns(rows: list[RunSummary]) -> None:
    record = race_records(RECIPES)[1]
    row = rows[1]
    lines = lines_of(detail(row, record), 80)
    (header,) = headers_of(lines)
    for name in ("recipe", "img/s", "vs baseline", "trust"):
        assert name in header
    assert any(line.strip().startswith("not shown at this width:") for line in lines)
    assert not any("…" in line for line in lines[:6])


@pytest.mark.parametrize("width", [110, 80, 70])
def test_names_in_the_overview_are_broken_between_their_parts(width: int) -> None:
    records = [
        msgspec.structs.replace(
            record,
            spec=msgspec.structs.replace(
                record.spec, workload=msgspec.structs.replace(record.spec.workload, model=f"models.py:{name}")
            ),
            group=name,
        )
        for name in ("prototypes", "recurrent")
        for record in race_records(("baseline", "bf16"))
    ]
    lines = lines_of(RunReport(summarize(records)), width)
    shown = lines[next(at for at, line in enumerate(lines) if line.startswith("all together")) :]
    assert all(len(line) <= width for line in shown)
    assert any(re.match(r"(models.py:)?prototypes ", line) for line in shown)
    assert any(re.match(r"(models.py:)?recurrent ", line) for line in shown)
    assert sum("✗" in line for line in shown) == 2, "outputs that are wrong are marked here too"


def test_a_grid_breaks_no_word_of_its_status_and_keeps_what_tells_rows_apart() -> None:
    (measured,) = summarize(race_records(["baseline"]))
    shared = msgspec.structs.replace(
        measured,
        sustained_per_s=409_356.0,
        throughput_per_s=443_970.0,
        verdict=msgspec.structs.replace(measured.verdict, labels=("shared-cpu",)),
    )
    rows = [msgspec.structs.replace(shared, record_id=f"{threads}") for threads in (1, 2)]

    def header_of(threads: tuple[int, int]) -> str:
        cells = tuple(
            GridCell(
                model="m",
                task="infer",
                recipe="baseline",
                batch=32,
                threads=each,
                axes={"threads": each, "batch": row.batch},
                status="done",
                record_id=row.record_id,
            )
            for each, row in zip(threads, rows, strict=True)
        )
        lines = lines_of(grid_report(rows, GridSummary(name="s", planned=2, done=2, failed=0, cells=cells)), 80)
        assert sum(line.rstrip().endswith("shared-cpu") for line in lines) == len(threads)
        return headers_of(lines)[0]

    assert "threads" not in header_of((1, 1))
    assert "threads" in header_of((1, 2))
