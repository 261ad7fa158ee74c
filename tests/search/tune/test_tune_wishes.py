"""Searches that were asked for something: recipes, latency, a batch; and for generating text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest
from tune_bench import BEST, Tune, landscape, tuned
from worlds.recipes import switches_of

from redline.model.errors import SpecError, UsageError
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import RunSpec
from redline.model.work import Facts
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape


class TestWishes:
    def test_recipes_asked_for_come_first(self, tune: Tune) -> None:
        trials = tune(recipes=["bf16+compile", "fp16+graphs"]).tune.trials
        assert [trial.recipe for trial in trials[:3]] == ["baseline", "bf16+compile", "fp16+graphs"]

    def test_steps_restrict_and_leave_out(self, tune: Tune) -> None:
        assert tune(switches=["bf16", "graphs"], name="a").recipe == "bf16+graphs"
        assert tune(without=["fp16", "compile"], name="b").recipe == "bf16+channels-last+graphs+cudnn-benchmark"

    def test_a_latency_target_rules_out_what_is_late(self, tune: Tune) -> None:
        result = tune(slo_p95="2.6ms")
        late = [each for each in result.summary.ranking if each.note and each.note.code == "too-late"]
        assert late
        assert result.winner is not None
        assert all(each.ratio < result.winner.ratio for each in late)
        nothing = tune(slo_p95="1us", name="strict")
        assert nothing.winner is None

    def test_the_objective_may_be_latency(self, tune: Tune) -> None:
        result = tune(landscape(sync_s=0.002), objective="latency")
        assert result.winner.recipe == BEST
        blocks = {block.kind for record in result.recorded.values() for block in record.blocks}
        assert blocks == {"latency"}

    def test_the_batch_may_be_looked_for(self, tune: Tune) -> None:
        # Without drift, which over the minutes of a search is as large as the gain that is looked for.
        truth = landscape(
            memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34, drift_sigma=0.0
        )
        result = tune(truth, batch="auto", budget="1h")
        assert result.winner.recipe == BEST
        assert 90 < result.winner.row.batch <= 256
        assert result.winner.low is not None
        assert result.winner.row.throughput_per_s > 1.05 * 32 / 0.01 * math.exp(1.45)

    def test_what_spares_memory_is_tried_where_a_larger_batch_pays(self, tune: Tune) -> None:
        """Checkpointing makes a step slower and lets four times as many items in."""

        def step_s(spec: RunSpec) -> float:
            slower = 1.1 if "checkpointing" in switches_of(spec) else 1.0
            faster = 0.5 if "fp16" in switches_of(spec) else 1.0
            return slower * faster * (0.02 + 0.0002 * (spec.workload.batch or 32))

        def memory_bytes(spec: RunSpec) -> int:
            return (2**24 if "checkpointing" in switches_of(spec) else 2**26) * (spec.workload.batch or 32)

        truth = landscape(
            step_s=step_s,
            issue_share=lambda spec: 0.1,
            memory_bytes=memory_bytes,
            memory_limit_bytes=2**32,
            drift_sigma=0.0,
            choices=(
                SwitchChoice(switch="fp16", family="precision"),
                SwitchChoice(switch="checkpointing", family="checkpointing", relieves="memory"),
            ),
        )
        found = {choice.recipe: choice for choice in tune(truth, batch="auto", budget="1h").tune.batches}
        sparing, plain = found["fp16+checkpointing"], found["fp16"]
        assert sparing.batch > 2 * plain.batch
        assert sparing.throughput_per_s > 1.3 * plain.throughput_per_s
        at_32 = tune(truth, budget="1h").winner
        assert at_32.recipe == "fp16"

    @pytest.mark.parametrize("budget_s", [60.0, 120.0, 240.0, 600.0])
    def test_what_is_told_of_the_winner_is_of_one_batch(self, history: History, budget_s: float) -> None:
        truth = landscape(
            memory_bytes=lambda spec: 2**26 * (spec.workload.batch or 32), memory_limit_bytes=2**34, drift_sigma=0.0
        )
        result = tuned(FakeDoor(truth), history, batch="auto", budget=budget_s)
        winner, tune = result.winner, result.tune
        own = [record for record in result.recorded.values() if str(record.spec.recipe) == winner.recipe]
        timed = [record for record in own if (record.spec.workload.batch or 32) == winner.row.batch and record.blocks]
        assert result.recorded[winner.row.record_id] in timed
        assert winner.row.throughput_per_s == pytest.approx(
            (winner.row.batch or 0) / truth.step_s(timed[0].spec), rel=0.02
        )
        apart = [each for each in result.notes if each.code == "batch-not-raced"]
        assert bool(apart) == (bool(tune.batches) and not tune.batch_replicates)
        assert all("the budget ended before they were compared there" in str(each) for each in apart)
        assert (
            f"batch {tune.batches[0].batch}" in str(apart[0]) if apart else winner.row.batch != 32 or not tune.batches
        )
        assert "· batch 32 ·" in str(result), "where the ranking was made"
        assert f"at batch {winner.row.batch}" in str(result)

    def test_who_moves_most_at_its_batch_wins(self, history: History) -> None:
        """Channels last is faster at the first batch, and takes so much memory that it cannot grow."""
        choices = (SwitchChoice(switch="channels-last", family="layout"),)

        def step_s(spec: RunSpec) -> float:
            return 0.02 if spec.recipe.switches else 0.05 + 0.0001 * (spec.workload.batch or 32)

        def memory_bytes(spec: RunSpec) -> int:
            return (2**28 if spec.recipe.switches else 2**24) * (spec.workload.batch or 32)

        truth = landscape(
            choices=choices, step_s=step_s, issue_share=0.1, memory_bytes=memory_bytes, memory_limit_bytes=2**34
        )
        result = tuned(FakeDoor(truth), history, batch="auto", budget="1h")
        winner = result.summary.leader
        assert (winner.recipe, winner.ratio) == ("baseline", 1.0)
        assert winner.row.batch > 300
        assert any(each.code == "other-winner" and "channels-last won" in str(each) for each in result.notes)

    @pytest.mark.parametrize(
        ("wish", "words"),
        [
            ({"batch": "some"}, "batch must be a number or 'auto'"),
            ({"budget": 0}, "budget must be above 0"),
            ({"budget": "soon"}, "10m"),
            ({"objective": "beauty"}, "objective must be one of"),
            ({"tolerance": "loose"}, "2x"),
            ({"tolerance": "-1"}, "2x"),
            ({"slo_p95": 0.0}, "slo_p95 must be above 0"),
            ({"switches": ["fp61"]}, "did you mean fp16"),
            ({"recipes": ["fp16+bf16"]}, "exclude"),
            ({"recipes": ["nosuch"]}, "unknown switch"),
            ({"replicates": 0}, "replicates must be 1 or more"),
            ({"check": "top1", "allow_quantized": True}, "does not name a function"),
            ({"check": "nosuch.py:top1", "allow_quantized": True}, "no such file"),
            ({"check": "metrics:top1", "allow_quantized": True, "task": "train"}, "inference only"),
            ({"resume": True}, "no tune .* to resume"),
        ],
    )
    def test_mistakes_are_told_before_anything_is_measured(
        self, history: History, wish: dict[str, Any], words: str
    ) -> None:
        door = FakeDoor(landscape())
        with pytest.raises(UsageError, match=words):
            tuned(door, history, **wish)
        assert door.clock_s == 0


WITH_CACHE = SwitchNeed(wants=("static-cache",), reason="add static-cache")
COMPILED = SwitchChoice(
    switch="compile",
    family="compiler",
    relieves="both",
    needs=(WITH_CACHE,),
    capabilities=Capabilities(compiles=True),
)
DECODING = (
    SwitchChoice(switch="bf16", family="precision"),
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="static-cache", family="cache", relieves="both"),
    COMPILED,
    msgspec.structs.replace(COMPILED, switch="compile:coordinate-descent", is_slow_to_prepare=True, prepare_s=70.0),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", needs=(WITH_CACHE,), leaves_program=True),
)


def token_s(spec: RunSpec) -> float:
    """As on a large GPU: the host needs 10 ms for a token that a graph replays at once; kernels read slowly, or well."""
    switches = switches_of(spec)
    host_s = 1e-5 if "graphs" in switches else 0.010
    reading = {"compile": 0.0016, "compile:coordinate-descent": 0.0008}
    device_s = next((seconds for switch, seconds in reading.items() if switch in switches), 0.0026)
    return max(host_s, device_s * (1.0 if switches & {"bf16", "fp16"} else 2.0))


def first_s(spec: RunSpec) -> float:
    """The cache that is made beforehand costs the prompt time."""
    switches = switches_of(spec)
    return (0.02 if switches & {"bf16", "fp16"} else 0.04) * (1.5 if "static-cache" in switches else 1.0)


class TestGeneration:
    LANDSCAPE = Landscape(
        step_s=lambda spec: first_s(spec) + 31 * token_s(spec),
        ttft_s=first_s,
        issue_share=lambda spec: 0.0001 if "graphs" in switches_of(spec) else min(0.010 / token_s(spec), 1.0),
        compile_s=lambda spec: {"compile": 20.0, "compile:coordinate-descent": 60.0}.get(
            next((each for each in switches_of(spec) if each.startswith("compile")), ""), 0.0
        ),
        choices=DECODING,
        noise_sigma=0.01,
    )

    def test_the_recipe_for_tokens_is_found_without_its_name(self, tune: Tune) -> None:
        found = tune(self.LANDSCAPE, task="generate", batch=1, objective="tpot", budget="8m", replicates=2)
        assert switches_of_text(found.recipe) >= {"static-cache", "compile:coordinate-descent", "graphs"}
        assert found.winner.row.tpot_s.p50 == pytest.approx(0.0008, rel=0.05)
        assert found.winner.ratio == pytest.approx(0.010 / 0.0008, rel=0.1)

    def test_what_compiles_for_a_minute_is_begun_beside_what_is_quick(self, tune: Tune) -> None:
        """Begun once the quick ones were timed it would not fit any more: plain compiling would win, half as fast."""
        facts = Facts(launches=900, step_s=0.35, host_s=0.34, peak_bytes=6 * 2**30, limit_bytes=140 * 2**30)
        truth = dataclasses.replace(self.LANDSCAPE, facts=facts)
        found = tune(truth, task="generate", batch=1, objective="tpot", budget="2m", replicates=2, jobs=8)
        assert switches_of_text(found.recipe) >= {"static-cache", "compile:coordinate-descent", "graphs"}
        assert found.winner is not None

    def test_the_first_token_wants_another_recipe(self, tune: Tune) -> None:
        found = tune(self.LANDSCAPE, task="generate", batch=1, objective="ttft", budget="5m", replicates=2)
        assert found.recipe in ("bf16", "fp16")
        assert found.winner.ratio == pytest.approx(2.0, rel=0.05)

    def test_objectives_of_tokens_need_a_generation(self, tune: Tune) -> None:
        with pytest.raises(SpecError, match="goes with --task generate"):
            tune(objective="tpot")
        with pytest.raises(SpecError, match="objective must be one of"):
            tune(objective="tokens")
        with pytest.raises(SpecError, match="needs new_tokens 2 or more"):
            tune(self.LANDSCAPE, task="generate", batch=1, new_tokens=1, objective="tpot")


def switches_of_text(recipe: str) -> set[str]:
    return set(recipe.split("+"))
