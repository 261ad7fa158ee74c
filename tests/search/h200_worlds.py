"""Worlds that are like workloads on an H200: what recipes take there, and what compiling them takes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from worlds.recipes import RecipeTruth
from worlds.tuning import simulated_facts

from redline.model.protocol import SwitchChoice
from redline.model.record import Capabilities
from redline.model.work import Facts, RepeatedBlock
from redline.search.tune.space import Switches

GRAPHED = ("compile:reduce-overhead", "compile:max-autotune")
CHOICES = (
    SwitchChoice(switch="amp", family="precision"),
    SwitchChoice(switch="amp-bf16", family="precision"),
    SwitchChoice(switch="tf32", family="tf32"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:reduce-overhead", family="compiler", relieves="both"),
    SwitchChoice(switch="compile:max-autotune", family="compiler", relieves="both", is_slow_to_prepare=True),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", excludes=GRAPHED, leaves_program=True),
    SwitchChoice(switch="fused-optimizer", family="optimizer", relieves="both", leaves_program=True),
    SwitchChoice(switch="cudnn-benchmark", family="autotune", leaves_program=True),
    SwitchChoice(switch="compile:regional", family="compiler", relieves="both"),
)
COMPILED = ("compile", "compile:reduce-overhead", "compile:max-autotune", "compile:regional")


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) - {"baseline"}


def like_an_h200() -> RecipeTruth:
    """ResNet-50's training step as it was seen: seconds of trials, a costly first use, compile on top worth a seventh."""
    return RecipeTruth(
        choices=CHOICES[:-1],
        device_s=0.05,
        host_s=0.02,
        on_cpu=False,
        effects={
            "amp": -1.2,
            "amp-bf16": -1.05,
            "tf32": 0.0,
            "channels-last": -0.3,
            "graphs": -0.02,
            "compile": -0.13,
            "compile:reduce-overhead": -0.1,
            "compile:max-autotune": -0.15,
            "fused-optimizer": -0.1,
            "cudnn-benchmark": -0.08,
        },
        host_effects={"amp": 0.3, "amp-bf16": 0.3, "graphs": -3.0, "compile": -0.3, "compile:reduce-overhead": -2.5},
        cold_compile_s=21.0,
        warm_compile_s=6.0,
        build_s=2.0,
        first_use_s={"cudnn-benchmark": 10.0},
    )


def convnext_on_an_h200(compile_s: float) -> RecipeTruth:
    """ConvNeXt-Tiny at batch 32 as it was seen: 2 600 images/s, 10 000 in half precision, 14 500 of it compiled."""
    compiled = dict.fromkeys(("compile", "compile:reduce-overhead", "compile:max-autotune"), -0.37)
    choices = [
        SwitchChoice(switch="fp16", family="precision"),
        SwitchChoice(switch="bf16", family="precision"),
        *(
            msgspec.structs.replace(each, capabilities=Capabilities(compiles=each.family == "compiler"))
            for each in (*CHOICES[2:8], *CHOICES[9:])
        ),
    ]
    return RecipeTruth(
        choices=tuple(choices),
        device_s=0.01225,
        host_s=0.003,
        on_cpu=False,
        effects={
            "fp16": -1.2,
            "bf16": -1.15,
            "tf32": -0.7,
            "channels-last": -0.15,
            "graphs": -0.02,
            **compiled,
            "compile:regional": -0.25,
            "cudnn-benchmark": -0.02,
        },
        host_effects={"graphs": -3.0, **dict.fromkeys(compiled, -1.0), "compile:regional": -0.3},
        pairs={frozenset({form, "tf32"}): 0.7 for form in ("fp16", "bf16")},
        quirk=lambda _: 0.0,
        failing=(),
        wrong=(),
        cold_compile_s=compile_s,
        warm_compile_s=0.27 * compile_s,
        build_s=2.5,
        first_use_s={"cudnn-benchmark": 8.0},
    )


def trained_on_an_h200(compile_s: float) -> RecipeTruth:
    compiles = Capabilities(compiles=True)
    choices = [
        msgspec.structs.replace(each, capabilities=compiles) if each.family == "compiler" else each for each in CHOICES
    ]
    truth = like_an_h200()
    effects = {**truth.effects, "compile:regional": -0.08}
    warm_s = 0.27 * compile_s
    return replace(truth, choices=tuple(choices), effects=effects, cold_compile_s=compile_s, warm_compile_s=warm_s)


def without_blocks(truth: RecipeTruth) -> RecipeTruth:
    return replace(truth, choices=tuple(each for each in truth.choices if each.switch != "compile:regional"))


def convnext_as_timed() -> tuple[RecipeTruth, Facts]:
    """ConvNeXt-Tiny at batch 32 with the times and costs of a search on an H200.

    Half precision 3.9 times as fast as the baseline as a graph and 3.6 times without, compiled 5.8 times after 19 s.
    """
    truth = convnext_on_an_h200(17.0)
    truth = replace(
        truth,
        device_s=0.0122,
        host_s=0.0034,
        effects={**truth.effects, "fp16": -1.21, "bf16": -1.18, "graphs": 0.0, "cudnn-benchmark": -0.005},
        host_effects={"graphs": -3.0, **dict.fromkeys(COMPILED[:3], -0.5), "compile:regional": -0.3},
        warm_compile_s=6.4,
        build_s=2.8,
        first_use_s={"cudnn-benchmark": 2.0},
    )
    blocks = RepeatedBlock(class_name="CNBlock", count=18, share=0.9, kinds=4)
    return truth, msgspec.structs.replace(simulated_facts(truth, launches=137), blocks=blocks)


def regnet_as_timed() -> tuple[RecipeTruth, Facts]:
    """The training step of RegNet-Y-400MF at batch 64 likewise: no compile is ready within a minute, nor is it by hand.

    What cudnn-benchmark compares, every process compares anew.
    """
    truth = trained_on_an_h200(62.0)
    truth = replace(
        truth,
        device_s=0.0355,
        host_s=0.047,
        effects={**truth.effects, "amp": -1.1, "amp-bf16": -0.95, "compile": -0.25, "cudnn-benchmark": -0.06},
        build_s=3.5,
        first_use_s={},
        each_use_s={"cudnn-benchmark": 5.0},
        task="train",
    )
    blocks = RepeatedBlock(class_name="ResBottleneckBlock", count=16, share=0.93, kinds=7)
    return truth, msgspec.structs.replace(simulated_facts(truth, launches=874), blocks=blocks)
