"""Searches that were asked for something: recipes, latency, a batch; and for generating text."""

from __future__ import annotations

import dataclasses
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

    @pytest.mark.parametrize(
        ("wish", "words"),
        [
            ({"batch": "auto"}, "at one batch"),
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
