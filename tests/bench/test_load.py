"""A real model behind the queue: every request is answered, in batches that fit, whatever the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.analyze.load import load_point
from redline.bench.session import BenchSession
from redline.model.arrivals import LoadSpec, Served, doubling_buckets, poisson_arrivals
from redline.model.protocol import Close, FailureReply, Load, LoadReply, Prepare, PreparedReply
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec

TINY = f"{Path(__file__).parents[1] / 'models' / 'tiny.py'}:make"


def served(recipe: str, max_batch: int) -> Served:
    spec = RunSpec(
        workload=WorkloadSpec(model=TINY, batch=max_batch),
        recipe=Recipe.parse(recipe),
        measure=MeasureSpec.for_effort("quick"),
        load=LoadSpec(max_batch=max_batch, max_wait_s=0.002),
        device="cpu",
    )
    session = BenchSession(on_progress=lambda progress: None)
    reply = session.handle(Prepare(spec=spec))
    assert isinstance(reply, PreparedReply), reply
    answer = session.handle(Load(arrivals_s=poisson_arrivals(400.0, 200, 0), rate=400.0, deadline_s=60.0, seed=0))
    session.handle(Close())
    assert isinstance(answer, LoadReply), answer
    return answer.served


def test_every_request_is_served_in_order_and_none_before_it_came() -> None:
    found = served("baseline", 4)
    assert sum(found.sizes) == 200
    assert max(found.sizes) <= 4
    assert found.padded == 0  # an eager model runs every size as it comes
    firsts = [sum(found.sizes[:batch]) for batch in range(len(found.sizes))]
    assert all(found.started_s[batch] >= found.arrivals_s[first] for batch, first in enumerate(firsts))
    assert all(one <= other for one, other in zip(found.finished_s, found.started_s[1:], strict=False))
    point = load_point(found)
    assert point.compute_s > 0
    assert point.mean_s == pytest.approx(point.queue_s + point.batching_s + point.compute_s, rel=1e-6)


def test_a_program_of_fixed_sizes_is_padded() -> None:
    found = served("compile:backend=eager", 3)
    assert sum(found.sizes) == 200
    assert found.padded == 0  # 1, 2 and 3 are all there
    assert doubling_buckets(3) == (1, 2, 3)
    assert doubling_buckets(32) == (1, 2, 4, 8, 16, 32)
    assert doubling_buckets(1) == (1,)


def test_a_batch_that_the_model_does_not_take_is_named(tmp_path: Path) -> None:
    picky = """
import torch

class Picky(torch.nn.Linear):
    def forward(self, x):
        if len(x) == 3:
            raise ValueError("not three")
        return super().forward(x)

def make():
    return Picky(4, 4), torch.randn(8, 4)
"""
    (tmp_path / "picky.py").write_text(picky)
    spec = RunSpec(
        workload=WorkloadSpec(model=f"{tmp_path / 'picky.py'}:make", batch=4),
        measure=MeasureSpec.for_effort("quick"),
        load=LoadSpec(max_batch=4),
        device="cpu",
    )
    reply = BenchSession(on_progress=lambda progress: None).handle(Prepare(spec=spec))
    assert isinstance(reply, FailureReply)
    assert (reply.failure.kind, reply.failure.message) == ("user", "at batch 3: ValueError: not three")
    assert "picky.py:7 in forward" in reply.failure.where


def test_serving_without_a_load_is_refused() -> None:
    session = BenchSession(on_progress=lambda progress: None)
    reply = session.handle(Load(arrivals_s=(0.0,), rate=1.0, deadline_s=1.0))
    assert isinstance(reply, FailureReply)
