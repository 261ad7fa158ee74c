"""Results in a notebook and at any width of a terminal: HTML with a table, text without control codes, no number cut."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from reported import CEILINGS, captured, race_records
from rich.console import Console, RenderableType

from redline.analyze.compare import compare_records
from redline.analyze.gate import GateRow
from redline.analyze.profile import Profile, profile_of
from redline.model.errors import UsageError
from redline.model.work import MemoryHolder, MemoryRow, MemoryUse
from redline.show.result import terminal
from redline.show.terminal import Fitted, make_table
from redline.store import Row
from redline.trace.decode import read_trace
from redline.verbs import compare, gate, monitor, profile
from redline.verbs.roofline import under_roofs
from redline.verbs.run import Measured, result_of

LONG = "fp16+channels-last+compile:reduce-overhead"
RECORDS = race_records(("baseline", LONG, "fp16"))
AGAIN = race_records(("baseline", LONG, "fp16"))


def row_of(record: Any) -> Row:
    values = {"id": record.id, "created_at": record.created_at, "model": "resnet50", "recipe": str(record.spec.recipe)}
    values |= {"task": "infer", "batch": 32, "device": "cuda:0", "device_name": "fake", "status": "done"}
    return Row(**{name: values.get(name) for name in Row.__struct_fields__})


def _profile() -> Profile:
    record = captured()
    assert record.trace is not None
    return profile_of([read_trace(Path(record.trace.path))], record)


def results() -> dict[str, Any]:
    return {
        "run": result_of(Measured(records=RECORDS)),
        "decided": result_of(Measured(records=[*RECORDS, *AGAIN], decided=[[RECORDS, AGAIN]])),
    }


RESULTS = results()


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_notebook_shows_tables_and_a_picture(result: Any) -> None:
    shown = result._repr_html_()
    assert "<table>" in shown
    assert shown.count("<tr") > 1
    assert "data:image/png;base64," in shown
    assert "\x1b" not in str(result)


def test_text_stays_plain_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(RESULTS["run"])


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        RESULTS["run"].to_dataframe()


def reports() -> dict[str, RenderableType]:
    found = compare_records(RECORDS[:1], race_records(("baseline", LONG))[:1])
    compared = terminal(compare.result_of(found, "one", "other"))
    return {
        **{name: terminal(RESULTS[name]) for name in ("run", "decided")},
        "compare": compared,
        **others(),
    }


def others() -> dict[str, RenderableType]:
    """What no record is needed for."""
    row = GateRow(
        name="resnet50 · infer · fp16+channels-last+compile:reduce-overhead · batch 32",
        verdict="slower",
        ratio=0.93,
        low=0.91,
        high=0.95,
        threshold=0.03,
        basis="interleaved",
        baseline_s=0.01234,
        candidate_s=0.01327,
        baseline_processes=5,
        candidate_processes=5,
    )
    use = MemoryUse(
        peak_bytes=3 * 2**30,
        peak_phase="backward",
        categories={"parameters": 2**28, "gradients": 2**28, "optimizer state": 2**29, "activations": 2**31},
        holders=(MemoryHolder(module="layer4.2.conv3", bytes=2**29, category="activations", line="resnet.py:154"),),
        fragments_bytes=2**27,
    )
    held = MemoryRow(
        model="resnet50", task="train", recipe=LONG, batch=32, device="NVIDIA H200", use=use, saved_bytes=2**20
    )
    look = dict.fromkeys(monitor.FIGURES) | {
        "device": "gpu0",
        "name": "NVIDIA H200",
        "throttle": ("hw_thermal",),
        "processes": {7: None},
    }
    looks = [
        {**look, "at_s": float(at), "utilisation": 0.98, "power_w": 512.0, "energy_j": 512.0 * at} for at in range(3)
    ]
    return {
        "gate": terminal(gate.result_of([row], "main")),
        "memory": terminal(profile.memory_result([held])),
        "profile": terminal(profile.result_of(_profile())),
        "monitor": terminal(monitor.result_of(looks), verbose=True),
    }


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("report", reports().values(), ids=reports())
def test_every_table_fits_and_cuts_nothing(report: RenderableType, width: int) -> None:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(report)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if re.search(r"\d…", line)], "a number that was cut"


@pytest.mark.parametrize("width", [60, 80])
def test_what_is_hidden_is_named_and_the_identity_stays(width: int) -> None:
    text = io.StringIO()
    found = terminal(under_roofs([(record, None) for record in RECORDS], CEILINGS))
    Console(file=text, width=width, highlight=False).print(found)
    assert "recipe" in text.getvalue()
    assert "headroom" in text.getvalue()
    assert "reduce-overhead" in text.getvalue(), "broken between switches, not inside one"


def test_a_long_word_is_broken_only_where_it_must_be() -> None:
    table = make_table(None)
    table.add_column("name")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_row(LONG, "123 456 789")
    text = io.StringIO()
    Console(file=text, width=34, highlight=False).print(Fitted(table))
    assert "123 456 789" in text.getvalue()
    assert "channels-last+" in text.getvalue()
