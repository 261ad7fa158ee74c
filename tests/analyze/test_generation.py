"""Prefill and decode, each by itself: figures by hand, and what is said to limit a token, each beside its opposite."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from by_hand import make_prepared
from kineto import GEMM, TraceMaker

import redline
from redline.analyze.batch import keeps, trial_of
from redline.analyze.bound import bound
from redline.analyze.finding import Finding
from redline.analyze.generation import generation_of
from redline.analyze.measurement import measurements
from redline.analyze.pairs import pair_of
from redline.analyze.profile import Capture
from redline.analyze.removals import TraceFacts
from redline.analyze.rows import row_of
from redline.analyze.rules import diagnose
from redline.model.errors import UsageError
from redline.model.record import Block, Capabilities, RunRecord
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.units import THIN_SPACE
from redline.model.work import GenerationInfo
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.trace.window import Steps
from redline.verbs.profile import result_of
from redline.verbs.workspace import Workspace

GB = 10**9


def generated(
    *,
    ttft_s: float = 0.01,
    tpot_s: float = 0.001,
    issue_share: float = 0.1,
    read_bytes: int = GB,
    recipe: str = "bf16",
    group: str = "g",
) -> RunRecord:
    """Ten generations of nine tokens on a device that copies a terabyte per second."""
    info = GenerationInfo(
        prompt=512, new_tokens=9, weight_bytes=2 * GB, read_bytes=read_bytes, cache_bytes=200, cache_read_bytes=100,
        copy_bytes_per_s=1e12,
    )  # fmt: skip
    prepared = make_prepared(generation=info)
    workload = msgspec.structs.replace(prepared.workload, parameters=GB, items_per_step=18, item="tok", batch=2)
    whole_s = ttft_s + 8 * tpot_s
    block = Block(
        kind="throughput",
        clock="host",
        samples=(whole_s,) * 10,
        issue_s=(issue_share * whole_s,) * 10,
        phases={"prefill": (ttft_s,) * 10, "decode": (8 * tpot_s,) * 10},
        token_s=(tpot_s,) * 80,
        token_issue_s=(issue_share * tpot_s,) * 10,
        wall_s=10 * whole_s,
    )
    return RunRecord(
        id=recipe,
        spec=RunSpec(workload=WorkloadSpec(model="hf:llama", task="generate", batch=2), recipe=Recipe.parse(recipe)),
        prepared=msgspec.structs.replace(prepared, workload=workload),
        blocks=tuple(msgspec.structs.replace(block, round=number) for number in range(4)),
        group=group,
    )


def test_figures_by_hand() -> None:
    found = generation_of(generated(tpot_s=0.002))
    assert (found.ttft_s, found.tpot_s.p50) == (0.01, 0.002)
    assert found.prefill_tokens_per_s == pytest.approx(2 * 512 / 0.01)
    assert found.decode_tokens_per_s == pytest.approx(2 / 0.002)
    assert found.read_bytes == GB + 100
    assert found.read_s == pytest.approx(0.001, rel=1e-6)
    assert found.bandwidth_share == pytest.approx(0.5, rel=1e-6)
    assert found.decode_share == pytest.approx(16 / 26)
    assert found.host_share == pytest.approx(0.1)
    assert found.bytes_per_weight == 2.0


def test_recipes_are_compared_by_the_part_that_is_asked_for() -> None:
    """One has the earlier first token, the other the faster further ones."""
    replicates = [
        [
            generated(ttft_s=0.010, tpot_s=0.004, recipe="bf16", group=str(number)),
            generated(ttft_s=0.020, tpot_s=0.001, recipe="fp16", group=str(number)),
        ]
        for number in range(3)
    ]
    ratios = {kind: pair_of(replicates, "bf16", "fp16", kind) for kind in ("ttft", "tpot", "throughput")}  # type: ignore[arg-type]
    assert (ratios["ttft"].ratio, ratios["ttft"].verdict) == (pytest.approx(0.5), "slower")
    assert (ratios["tpot"].ratio, ratios["tpot"].verdict) == (pytest.approx(4.0), "faster")
    assert ratios["throughput"].ratio == pytest.approx(42 / 28)


def test_memory_is_the_bound_of_tokens_that_take_little_longer_than_reading() -> None:
    reading = bound(generated(tpot_s=0.00125))
    assert (reading.label, str(reading.evidence)) == (
        "memory",
        "a decode step reads 954 MiB at 80% of the copy bandwidth",
    )
    assert bound(generated(tpot_s=0.004)).label != "memory"
    assert bound(generated(tpot_s=0.0005)).label != "memory"  # twice what memory can do: from a cache


def diagnosed(record: RunRecord, recipe: str = "bf16") -> dict[str, Finding]:
    maker = TraceMaker()
    for number in range(10):
        maker.kernel(GEMM, 10_000_000 + 101_000 * number, 100_000, launched=0, call_ns=10)
    profile = maker.profile()
    step_s = record.blocks[0].samples[0]
    does = {"compile": Capabilities(compiles=True), "graphs": Capabilities(records_graph=True)}
    capture = Capture(
        record_id="1", model="hf:llama", task="generate", recipe=recipe, batch=2, device="cuda:0", device_name="H200",
        capture_s=1.0, step_s=step_s,
        switches={switch: does.get(switch.partition(":")[0], Capabilities()) for switch in recipe.split("+")},
    )  # fmt: skip
    steps = Steps(count=3, seconds=(step_s,) * 3, mean_s=step_s, std_s=None, min_s=step_s, max_s=step_s, spread=None)
    profile = msgspec.structs.replace(profile, capture=capture, steps=steps, generation=generation_of(record))
    assert any(str(row["of"]).startswith("generation: ") for row in result_of(profile).table("figures").rows)
    return {finding.code: finding for finding in diagnose(TraceFacts(profile))}


DECODE = {"decode-memory-bound", "decode-host-bound", "decode-slow-kernels", "prefill-bound"}


@pytest.mark.parametrize(
    ("changes", "code", "advised"),
    [
        ({"tpot_s": 0.00125}, "decode-memory-bound", "half the bytes per token"),
        ({"tpot_s": 0.010, "issue_share": 1.0}, "decode-host-bound", "static-cache+graphs"),
        ({"tpot_s": 0.010, "issue_share": 0.2}, "decode-slow-kernels", "compile:coordinate-descent"),
        ({"tpot_s": 0.010}, "decode-slow-kernels", "a larger batch"),
        ({"ttft_s": 1.0, "tpot_s": 0.00125}, "prefill-bound", "a shorter prompt"),
    ],
)
def test_what_limits_a_generation(changes: dict[str, float], code: str, advised: str) -> None:
    found = diagnosed(generated(**changes))
    assert DECODE & found.keys() == {code}
    assert advised in found[code].next
    assert found[code].gain_bound > 1.0


def test_the_gain_of_a_graph_ends_where_reading_begins() -> None:
    record = generated(ttft_s=0.001, tpot_s=0.010, issue_share=1.0)
    found = diagnosed(record)["decode-host-bound"]
    assert found.gain_bound == pytest.approx(81 / 9, rel=1e-3)  # tokens could take 1 ms instead of 10
    assert "reading what it needs (954 MiB) 1.00 ms" in found.evidence


def test_a_tail_of_few_generations_keeps_no_target() -> None:
    trial = trial_of(generated(ttft_s=0.1, tpot_s=0.02))
    assert trial.p95_ceiling_s is None, "ten generations are too few"
    assert not keeps(trial, 10.0)


def test_a_grid_names_the_fastest_generation() -> None:
    """1 ms and 0.1 ms for each of the batch per token: by hand, 10 sequences at 2 ms are 5 000 tokens a second."""

    def first_s(spec: RunSpec) -> float:
        return 0.001 * (spec.workload.prompt or 0)

    def step_s(spec: RunSpec) -> float:
        return first_s(spec) + 15 * (0.001 + 0.0001 * (spec.workload.batch or 1))

    door = FakeDoor(Landscape(step_s=step_s, ttft_s=first_s, noise_sigma=0.0))
    with Workspace(door=door, history="sqlite://") as workspace:
        result = redline.run(
            "m", task="generate", batch=[10, 30], prompt=[8, 16], new_tokens=16, launch={"door": "fake"},
            workspace=workspace,
        )  # fmt: skip
    assert "7 059 tok/s" in str(result.headline).replace(THIN_SPACE, " ")
    largest = next(row for row in result if (row["batch"], row["prompt"]) == (30, 16))
    expected = {"ttft": 0.016, "tpot": 0.004, "decode_rate": 7500, "prefill_rate": 30 * 16 / 0.016}
    assert {name: largest.value(name) for name in expected} == pytest.approx(expected)


def test_tokens_faster_than_memory_have_no_share_of_its_bandwidth() -> None:
    """Twice what can be copied: a small model that stays in a cache of the processor."""
    record = generated(tpot_s=0.0005)
    found = generation_of(record)
    assert found.bandwidth_share is None
    assert found.reads_from_cache
    (row,) = measurements([record])
    assert (row_of(row)["cache"], "bandwidth_share" in row_of(row)) == ("in cache", False)
    near = generation_of(generated(tpot_s=0.00095))  # reading is a little faster than copying
    assert near.bandwidth_share == pytest.approx(1.05, rel=0.01)


@pytest.mark.parametrize(
    ("look", "told"),
    [
        (redline.roofline, "the share of the copy bandwidth"),
        (partial(redline.profile, memory=True), "the memory of weights, cache"),
    ],
)
def test_what_looks_at_one_step_sends_a_generation_to_run(look: Any, told: str) -> None:
    with (
        Workspace(door=FakeDoor(Landscape(step_s=0.01)), keep=False) as workspace,
        pytest.raises(UsageError, match=told),
    ):
        look("hf:llama", task="generate", workspace=workspace)
