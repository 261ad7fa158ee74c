"""Single operators: what is timed, what it is held against, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.bench.measure.operators import answer_operators
from redline.model.errors import UsageError
from redline.model.protocol import AskOperators
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.units import format_share
from redline.model.work import Ceilings, OperatorTime
from redline.show.result import terminal
from redline.verbs.roofline import operator_cases, operator_row, operators_result, roofline
from redline.verbs.workspace import Workspace

CEILINGS = Ceilings(
    kind="cpu", name="a CPU", driver=None, torch="2", threads=1, flops_per_s={"fp32": 1e9}, copy_bytes_per_s=1e9,
    launch_s=1e-6, cache_bytes=1000,
)  # fmt: skip


def timed(**changes: object) -> OperatorTime:
    given = {
        "operator": "matmul", "shape": "a", "number_format": "fp32", "kind": "matmul", "calls": 1,
        "samples": (2.0, 2.0, 3.0), "flops": 10**9, "bytes": 10**6, "refusal": None,
    }  # fmt: skip
    return OperatorTime(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "limit", "reached"),
    [
        ({}, "compute", 0.5),
        ({"kind": "elementwise", "flops": 10**6, "bytes": 10**9}, "memory", 0.5),
        ({"kind": "elementwise", "flops": 10, "bytes": 999}, "in cache", None),
        ({"kind": "elementwise", "flops": 10, "bytes": 1000}, "memory", 5e-7),
        ({"number_format": "bf16"}, None, None),
    ],
)
def test_an_operator_is_held_against_its_own_limit(
    changes: dict[str, Any], limit: str | None, reached: float | None
) -> None:
    """Products against the matrix units, the rest against memory; nothing is claimed in the cache or without a ceiling."""
    row = operator_row(timed(**changes), CEILINGS)
    assert row["limit"] == limit
    found = row.metric("of_roofline")
    assert (found.value if found else None) == pytest.approx(reached)
    assert (row.value("measured"), row.value("spread")) == (2.0, pytest.approx(0.25))


def test_defaults_cover_every_operator_and_tf32_only_products() -> None:
    cases = operator_cases("cuda:0")
    assert {case.operator for case in cases} == {"matmul", "conv", "attention", "norm", "elementwise"}
    assert {case.operator for case in cases if case.number_format == "tf32"} == {"matmul", "conv"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"recipes": "fp16"}, "a recipe goes with a model"),
        ({"model": "simple_cnn", "recipes": ["tf32", "bf16"], "ops": True}, "with ops under one"),
    ],
)
def test_mistakes_are_one_line(asked: dict[str, Any], says: str) -> None:
    with Workspace(keep=False) as workspace, pytest.raises(UsageError, match=says):
        roofline(**asked, device="cpu", workspace=workspace)


def test_a_row_above_the_roof_says_why() -> None:
    winograd = operator_row(timed(kind="convolution", operator="conv", samples=(0.5,)), CEILINGS)
    copied = operator_row(timed(kind="elementwise", flops=1, bytes=10**9, samples=(0.5,)), CEILINGS)
    fine = operator_row(timed(samples=(1.0,)), CEILINGS)
    told = str(operators_result([winograd, copied, fine], CEILINGS))
    assert "fewer products" in told
    assert told.count("measure the ceilings again") == 1


RECURRENT = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 16, num_layers=2)
        self.last = nn.Linear(16, 4)
    def forward(self, x):
        return self.last(self.layer(x)[0]).relu_()

def build(batch=2):
    return Recurrent(), torch.randn(5, batch, 8)
"""


def test_a_call_that_is_several_operators_inside_is_timed_as_one(tmp_path: Path) -> None:
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    spec = RunSpec(workload=WorkloadSpec(model=f"{tmp_path / 'recurrent.py'}:build", batch=2), device="cpu")
    found = answer_operators(AskOperators(device="cpu", threads=1, cases=(), spec=spec))
    timed = {row.operator: row for row in found.rows}
    assert set(timed) == {"lstm", "linear"}
    assert timed["lstm"].flops == 2 * 10 * 4 * 16 * (8 + 3 * 16)
    assert timed["lstm"].refusal is None
    # What writes into its inputs is not timed, and that is told.
    assert [each.code for each in found.notes] == ["left-out"]
    assert "writes into its inputs: relu_ (1×)" in str(found.notes[0])
    assert "relu_" in str(operators_result([], CEILINGS, found.notes))


LOOKUPS = """
import torch
from torch import nn

class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.bag = nn.Embedding(1000, 8), nn.EmbeddingBag(500, 8, mode="sum")
    def forward(self, places, bags):
        return torch.cat([self.one(places), self.bag(bags)], -1)

def build(batch=4):
    return Lookups(), (torch.arange(batch), torch.arange(3 * batch).view(batch, 3))
"""


def test_lookups_are_timed_with_the_rows_that_they_read(tmp_path: Path) -> None:
    (tmp_path / "lookups.py").write_text(LOOKUPS)
    spec = RunSpec(workload=WorkloadSpec(model=f"{tmp_path / 'lookups.py'}:build", batch=4), device="cpu")
    found = answer_operators(AskOperators(device="cpu", threads=1, cases=(), spec=spec))
    timed = {row.operator: row for row in found.rows}
    assert set(timed) == {"embedding", "embedding_bag"}
    assert all(row.samples and row.number_format == "fp32" for row in found.rows)
    # Four places, the rows that are read, the rows that are written.
    assert timed["embedding"].bytes == 4 * 8 + 2 * 4 * 8 * 4
    assert 12 * 8 + 12 * 8 * 4 < timed["embedding_bag"].bytes < 500 * 8 * 4


def test_in_a_narrow_window_the_share_of_the_roofline_stays() -> None:
    text = io.StringIO()
    row = operator_row(timed(shape="1024×1024×1024"), CEILINGS)
    Console(file=text, width=60, highlight=False).print(terminal(operators_result([row], CEILINGS)))
    assert any("of roofline" in line for line in text.getvalue().splitlines())
    assert format_share(0.5) in text.getvalue()
