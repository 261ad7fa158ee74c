"""Which recipes are possible, what is believed about them, and who is blamed when one breaks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redline.model.errors import UsageError
from redline.model.note import note
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.search.observer import NoJournal
from redline.search.run import measure_together
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.record import TuneSpec
from redline.search.tune.space import BASELINE, Space, Switches, space_for
from redline.search.tune.standings import Estimate, complexity
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

CHOICES = (
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="amp", family="precision"),
    SwitchChoice(switch="tf32", family="tf32", excludes=("fp16",)),
    SwitchChoice(switch="compile", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:reduce-overhead", family="compiler", relieves="both", excludes=("graphs",)),
    SwitchChoice(switch="graphs", family="graphs", relieves="host"),
    SwitchChoice(switch="int8", family="quantization", capabilities=Capabilities(quantizes=True)),
    SwitchChoice(switch="onnx", family="runtime", refusal=note("unavailable", "onnxruntime is not installed")),
)


def asked(**changes: object) -> TuneSpec:
    return TuneSpec(spec=RunSpec(workload=WorkloadSpec(model="m")), **changes)  # type: ignore[arg-type]


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) if text else BASELINE


class TestSpace:
    def test_a_caution_does_not_hold_for_who_names_the_switch(self) -> None:
        careful = SwitchChoice(switch="bf16", family="precision", refusal=note("caution", "drops small updates"))
        assert [row.switch for row in space_for(asked(), (careful,))[1]] == ["bf16"]
        assert space_for(asked(seeds=("bf16",)), (careful,))[0].choices == (careful,)
        assert space_for(asked(switches=("bf16",)), (careful,))[0].choices == (careful,)
        absent = SwitchChoice(switch="bf16", family="precision", refusal=note("unavailable", "not here"))
        assert space_for(asked(seeds=("bf16",)), (absent,))[0].choices == ()

    def test_holds_every_valid_recipe_once_and_no_other(self) -> None:
        space, _ = space_for(asked(), CHOICES)
        assert len(space.recipes) == len(set(space.recipes)) == 25
        assert space.recipes[0] == BASELINE
        assert switches("amp+tf32+compile+graphs") in space.recipes
        assert not any({"fp16", "tf32"} <= recipe for recipe in space.recipes)
        assert not any({"graphs", "compile:reduce-overhead"} <= recipe for recipe in space.recipes)
        assert all(space.is_valid(recipe) for recipe in space.recipes)

    def test_holds_no_recipe_without_what_its_steps_need(self) -> None:
        need = SwitchNeed(beside="amp", wants=("fused",), reason="scaling asks the host; add fused")
        choices = (*CHOICES[:4], SwitchChoice(switch="graphs", family="graphs", needs=(need,)))
        fused = SwitchChoice(switch="fused", family="optimizer")
        space, _ = space_for(asked(), (*choices, fused))
        lacking = [each for each in space.recipes if {"amp", "graphs"} <= each and "fused" not in each]
        assert not lacking
        assert {switches("amp+graphs+fused"), switches("amp+fused"), switches("fp16+graphs")} <= set(space.recipes)
        assert not space.is_valid(switches("amp+compile+graphs"))
        # What needs a switch is left out together with it.
        left_out = {"graphs+fused": "amp", "amp+fused": "graphs", "amp": "fused+graphs"}
        less_one = space.less_one(switches("amp+graphs+fused"))
        assert less_one == {switches(rest): name for rest, name in left_out.items()}
        with pytest.raises(UsageError, match="recipe amp\\+graphs: graphs: scaling asks the host; add fused"):
            space.checked("amp+graphs")
        without, _ = space_for(asked(without=("fused",)), (*choices, fused))
        assert switches("amp+graphs") not in without.recipes

    def test_says_why_a_step_is_not_tried(self) -> None:
        _, refused = space_for(asked(), CHOICES)
        told = {each.switch: str(each.reason) for each in refused}
        assert told["onnx"] == "onnxruntime is not installed"
        assert "--allow-quantized" in told["int8"]

    def test_is_restricted_by_name_or_by_step(self) -> None:
        space, _ = space_for(asked(switches=("fp16", "compile")), CHOICES)
        assert set(space.by_switch) == {"fp16", "compile", "compile:reduce-overhead"}
        space, _ = space_for(asked(without=("compile:reduce-overhead", "graphs")), CHOICES)
        assert set(space.by_switch) == {"fp16", "amp", "tf32", "compile"}
        with pytest.raises(UsageError, match="unknown switch 'fp61'; did you mean fp16"):
            space_for(asked(switches=("fp61",)), CHOICES)

    def test_some_switches_come_only_where_they_are_wanted(self) -> None:
        """What quantizes when it is allowed, and what only spares memory never."""
        sparing = SwitchChoice(switch="checkpointing", family="checkpointing", relieves="memory")
        for wish, more in (({}, set()), ({"allow_quantized": True}, {"int8"})):
            space, refused = space_for(asked(**wish), (*CHOICES, sparing))
            assert {"int8", "checkpointing"} & space.by_switch.keys() == more
            assert {each.switch for each in refused} == {"onnx", "int8", "checkpointing"} - more

    def test_a_persons_own_variant_of_a_step_is_one_more_choice(self) -> None:
        space, _ = space_for(asked(seeds=("fp16+compile:max-autotune,fullgraph=true",)), CHOICES)
        own = "compile:max-autotune,fullgraph=true"
        assert space.by_switch[own].family == "compiler"
        assert space.text(frozenset({own, "fp16"})) == f"fp16+{own}"

    def test_recipes_read_in_one_order(self) -> None:
        space, _ = space_for(asked(), CHOICES)
        assert space.text(switches("graphs+compile+tf32+amp")) == "amp+tf32+compile+graphs"
        assert space.switches_of("graphs+amp") == switches("amp+graphs")
        with pytest.raises(UsageError, match="exclude"):
            space.switches_of("fp16+tf32")


def seen(*, host_s: float | None = None, **times_s: float) -> dict[Switches, Estimate]:
    """Times by recipe, `_` standing for '+'; a host time makes what is not longer host-bound."""
    found = {}
    for name, seconds in times_s.items():
        recipe = BASELINE if name == "baseline" else switches(name.replace("_", "+"))
        is_graphed = "graphs" in recipe
        host = None if host_s is None else (0.05 * host_s if is_graphed else host_s)
        found[recipe] = Estimate(
            recipe=name,
            record_id=name,
            log_s=math.log(seconds),
            error=0.003,
            host_log_s=None if host is None else math.log(host),
            is_host_bound=host is not None and host >= 0.9 * seconds,
        )
    return found


def promises(beliefs: Beliefs, known: dict[Switches, Estimate]) -> dict[Switches, float]:
    fastest = min(each.log_s for each in known.values())
    return dict(zip(beliefs.recipes, beliefs.promises(known, fastest).tolist(), strict=True))


class TestBeliefs:
    @pytest.fixture
    def beliefs(self) -> Beliefs:
        return Beliefs(space_for(asked(), CHOICES)[0], on_cpu=False)

    @pytest.mark.parametrize(
        ("host_s", "fp16_s", "first", "times", "last"),
        [
            (0.01, 0.01, "fp16+graphs", 5, "amp"),
            (0.01, 0.01, "graphs", 5, "tf32"),
            (0.0001, 0.005, "fp16+compile", 3, "fp16+graphs"),
        ],
    )
    def test_graphs_come_first_where_the_host_is_the_limit(
        self, beliefs: Beliefs, host_s: float, fp16_s: float, first: str, times: float, last: str
    ) -> None:
        found = promises(beliefs, seen(host_s=host_s, baseline=0.01, fp16=fp16_s))
        assert found[switches(first)] > times * found[switches(last)]

    def test_a_host_bound_recipe_does_not_speak_against_its_steps(self, beliefs: Beliefs) -> None:
        """Under Python's thumb fp16 shows nothing; that is no reason to leave it out of a graph."""
        found = promises(beliefs, seen(host_s=0.01, baseline=0.01, fp16=0.01, graphs=0.008))
        assert found[switches("fp16+graphs")] > 0.3

    def test_effects_of_steps_add_up(self, beliefs: Beliefs) -> None:
        known = seen(baseline=1.0, fp16=0.5, compile=0.8, graphs=1.3)
        found = promises(beliefs, known)
        assert found[switches("fp16+compile")] == pytest.approx(math.log(1 / 0.8), abs=0.07)
        assert found[switches("fp16+graphs")] < 0.05

    def test_what_was_tried_and_is_slow_promises_nothing(self, beliefs: Beliefs) -> None:
        known = seen(baseline=1.0, fp16=0.4, amp=0.9, tf32=0.8, compile=1.4, graphs=1.5)
        assert promises(beliefs, known)[switches("compile")] < 0.002

    def test_a_family_shares_its_luck(self) -> None:
        beliefs = Beliefs(space_for(asked(), CHOICES)[0], on_cpu=True)
        before = promises(beliefs, seen(baseline=1.0))[switches("amp")]
        after = promises(beliefs, seen(baseline=1.0, fp16=8.0))[switches("amp")]
        assert after < 0.3 * before

    def test_what_the_device_was_seen_to_need_stands_above_experience(self) -> None:
        """A CPU with arithmetic for bf16 and none for fp16."""
        choices = (
            SwitchChoice(switch="fp16", family="precision", expected_time=12.0),
            SwitchChoice(switch="amp-bf16", family="precision", expected_time=0.4),
            SwitchChoice(switch="bf16", family="precision", expected_time=0.4),
            SwitchChoice(switch="channels-last", family="layout"),
            SwitchChoice(
                switch="onnx", family="compiler", excludes=("bf16",), capabilities=Capabilities(compiles=True)
            ),
            SwitchChoice(switch="compile", family="compiler", capabilities=Capabilities(compiles=True)),
        )
        space, _ = space_for(asked(), choices)
        found = promises(Beliefs(space, on_cpu=True), seen(baseline=1.0))
        assert found[switches("bf16")] > found[switches("amp-bf16")] > 0.5
        assert found[switches("fp16")] < 0.01
        after_fp16 = promises(Beliefs(space, on_cpu=True), seen(baseline=1.0, fp16=12.0))
        assert after_fp16[switches("bf16")] > 0.5, "one slow format says nothing about the other"

    def test_nothing_overflows_on_extreme_times(self, beliefs: Beliefs) -> None:
        found = promises(beliefs, seen(baseline=1e-6, fp16=1e3, graphs=1e-7))
        assert np.isfinite(list(found.values())).all()


def test_a_space_too_large_to_hold_keeps_the_short_recipes() -> None:
    choices = tuple(SwitchChoice(switch=f"s{number}", family=f"f{number}") for number in range(18))
    space = Space(choices)
    assert len(space.recipes) == 20_000
    assert max(len(recipe) for recipe in space.recipes) == 6


def test_what_compiles_counts_before_the_number_of_switches() -> None:
    """Told by the records, so that somebody else's compiler counts as well."""
    compiler = SwitchChoice(switch="my-compiler", family="compiler", capabilities=Capabilities(compiles=True))
    door = FakeDoor(Landscape(step_s=0.01, choices=(compiler,)))
    specs = [RunSpec(workload=WorkloadSpec(model="m"), recipe=Recipe.parse(text)) for text in ("a+b+c", "my-compiler")]
    records = {record.id: record for record in measure_together(specs, door, NoJournal())}
    assert complexity("a+b+c", records) == (0, 3)
    assert complexity("my-compiler", records) == (1, 1)
