"""Every prepared step carries its work, and counting never costs a measurement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.bench.count import count as ask
from redline.bench.session import BenchSession
from redline.model.note import note
from redline.model.protocol import BlockReply, Close, FailureReply, Measure, Prepare, PreparedReply, Reply
from redline.model.record import Capabilities, Prepared
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table


@pytest.fixture
def bench() -> Iterator[BenchSession]:
    session = BenchSession(lambda progress: None)
    yield session
    session.handle(Close())


def spec_of(recipe: str = "baseline", **changes: Any) -> RunSpec:
    table = {"model": "simple_cnn", "batch": 4, "device": "cpu", "effort": "quick", "recipe": recipe}
    return specs_from_table({**table, "threads": 1, **changes})[0]


def prepared(bench: BenchSession, spec: RunSpec, *, modules: bool = False) -> Prepared:
    reply: Reply = bench.handle(Prepare(spec=spec, modules=modules))
    assert isinstance(reply, PreparedReply), reply
    return reply.prepared


def test_inference_is_counted_without_its_modules(bench: BenchSession) -> None:
    found = prepared(bench, spec_of())
    assert found.work.params == found.workload.parameters
    assert found.work.flops > 0
    assert found.work.backward_flops == 0
    assert found.work.modules == ()
    assert found.work.for_these_inputs is None


def test_a_training_step_with_backward_and_optimizer(bench: BenchSession) -> None:
    work = prepared(bench, spec_of(task="train", optimizer="adamw"), modules=True).work
    assert 1.9 < work.backward_flops / work.flops < 2.0
    assert {one.phase for one in work.operators} == {"forward", "backward", "optimizer"}
    assert work.modules[0].backward_flops == work.backward_flops


def test_in_the_formats_of_the_recipe(bench: BenchSession) -> None:
    work = prepared(bench, spec_of("amp-bf16")).work
    assert set(work.flops_by_format()) == {"bf16"}
    reply = bench.handle(Measure(kind="throughput", seconds=0.01))  # no weight without memory stayed anywhere
    assert isinstance(reply, BlockReply), reply


def test_a_count_that_breaks_is_a_note_and_the_run_goes_on(
    bench: BenchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such formula\nmore lines")

    monkeypatch.setattr(ask, "count_step", breaks)
    found = prepared(bench, spec_of())
    assert found.work is None
    assert found.workload.notes[-1] == note("work-not-counted", "work not counted: RuntimeError: no such formula")


def test_trials_at_the_edge_of_memory_are_not_counted(bench: BenchSession) -> None:
    assert prepared(bench, spec_of(measure={"check_numerics": False, "sparing": True})).work is None
    assert prepared(bench, spec_of(measure={"check_numerics": False})).work is not None, "unchecked is not uncounted"


def test_a_prepared_recipe_says_what_its_switches_do(bench: BenchSession) -> None:
    found = prepared(bench, spec_of("channels-last+compile:backend=eager"))
    assert set(found.switches) == {"channels-last", "compile:backend=eager"}
    assert found.capabilities == Capabilities(compiles=True, dissolves_modules=True)
    assert found.cold_start.compile_s is not None


def test_compiling_that_compiled_nothing_is_no_compiled_model(
    bench: BenchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", lambda model, **settings: model)
    monkeypatch.setattr("torch._dynamo.utils.counters", defaultdict(Counter))
    reply = bench.handle(Prepare(spec=spec_of("channels-last+compile:backend=eager")))
    assert isinstance(reply, FailureReply), reply
    assert reply.failure.message == "compile:backend=eager: torch.compile compiled nothing of this model"
    assert (reply.failure.kind, reply.failure.switches) == ("unsupported", ("compile:backend=eager",))


def test_a_first_call_that_breaks_is_put_down_to_the_switch_that_changed_the_program(
    bench: BenchSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Any, **settings: Any) -> Any:
        def call(*args: Any) -> Any:
            raise RuntimeError("cannot lower this")

        return call

    monkeypatch.setattr("torch.compile", broken)
    for recipe, scope in (("compile", "switch"), ("compile+channels-last", "recipe")):
        reply = bench.handle(Prepare(spec=spec_of(recipe)))
        assert isinstance(reply, FailureReply)
        assert (reply.failure.switches, reply.failure.scope) == (("compile",), scope)
        assert (reply.failure.stage, reply.failure.kind) == ("compile", "compile")


CACHES = """
import torch
from torch import nn


class Cache:
    def __init__(self):
        self.layers = []


class Reads(nn.Linear):
    def __init__(self, *, own):
        super().__init__(4, 4)
        self.own = Cache() if own else None

    def forward(self, x, cache=None):
        cache = cache or self.own
        cache.layers.append(super().forward(x))
        return torch.cat(cache.layers)[-1:] @ (torch.cat(cache.layers).T @ torch.cat(cache.layers))


def given(batch):
    return Reads(own=False), {"x": torch.randn(batch, 4), "cache": Cache()}


def own(batch):
    return Reads(own=True), torch.randn(batch, 4)
"""


def test_a_cache_among_the_inputs_is_the_same_in_every_step_as_in_a_count(bench: BenchSession, tmp_path: Path) -> None:
    (tmp_path / "caches.py").write_text(CACHES)
    spec = spec_of(model=f"{tmp_path}/caches.py:given", batch=2)
    found = prepared(bench, spec)
    assert found.work.flops == ask.answer_count(spec).work.flops == 2 * 2 * 4 * 4 + 2 * 4 * 2 * 4 + 2 * 1 * 4 * 4
    assert [each.code for each in found.workload.notes] == ["input"]


def test_no_count_fits_steps_that_differ_from_call_to_call(bench: BenchSession, tmp_path: Path) -> None:
    (tmp_path / "caches.py").write_text(CACHES)
    spec = spec_of(model=f"{tmp_path}/caches.py:own", batch=2)
    found = prepared(bench, spec)
    assert found.work is None
    assert found.workload.notes[-1].code == "work-changes"
    assert "work-changes" in [each.code for each in ask.answer_count(spec).work.notes]


def test_where_data_decides_the_weights_are_those_of_a_run(bench: BenchSession, tmp_path: Path) -> None:
    (tmp_path / "chooses.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Chooses(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        y = self.norm(x)\n"
        "        return self.linear(y[y.amax(1) > 5])\n"
        "def make(batch):\n"
        "    return Chooses(), 100 + torch.randn(batch, 4)\n"
    )
    spec = spec_of(model=f"{tmp_path}/chooses.py:make", batch=8)
    found = prepared(bench, spec)
    assert found.work.flops == ask.answer_count(spec).work.flops == 0  # of 256 before a BatchNorm is calibrated


def test_outputs_of_a_recipe_are_compared_on_a_cache_as_it_was_given(bench: BenchSession, tmp_path: Path) -> None:
    (tmp_path / "caches.py").write_text(CACHES)
    found = prepared(bench, spec_of("bf16", model=f"{tmp_path}/caches.py:given", batch=2))
    assert found.numerics.passed
    assert found.numerics.second_inputs == "factory"


def test_a_position_that_a_cache_counts_in_a_tensor_is_the_same_in_every_step(
    bench: BenchSession, tmp_path: Path
) -> None:
    (tmp_path / "position.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Cache:\n"
        "    def __init__(self, batch):\n"
        "        self.keys, self.position = torch.zeros(2, batch, 4), torch.zeros((), dtype=torch.long)\n"
        "class Writes(nn.Linear):\n"
        "    def forward(self, x, cache):\n"
        "        cache.keys[cache.position] = super().forward(x)\n"
        "        cache.position += 1\n"
        "        return cache.keys.sum(0)\n"
        "class Holder:\n"
        "    def __init__(self, cache):\n"
        "        self.layers = [cache]\n"
        "class Reads(Writes):\n"
        "    def forward(self, x, cache):\n"
        "        return super().forward(x, cache.layers[0])\n"
        "def make(batch):\n"
        "    return Reads(4, 4), {'x': torch.randn(batch, 4), 'cache': Holder(Cache(batch))}\n"
    )
    found = prepared(bench, spec_of(model=f"{tmp_path}/position.py:make", batch=2))  # the third position does not exist
    assert [each.code for each in found.workload.notes] == ["input"]
