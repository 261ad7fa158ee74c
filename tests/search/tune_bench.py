"""A bench with a card whose host is in the way of everything fast, and a search on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from worlds.recipes import switches_of

import redline
from redline.model.note import note
from redline.model.protocol import SwitchChoice
from redline.model.record import Capabilities
from redline.model.spec import RunSpec
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.tune import TuneResult
from redline.verbs.workspace import Workspace

Tune = Callable[..., TuneResult]
"""A search of a history of its own, on a bench whose truth may be given."""

CHOICES = (
    SwitchChoice(switch="fp16", family="precision"),
    SwitchChoice(switch="bf16", family="precision"),
    SwitchChoice(switch="channels-last", family="layout"),
    SwitchChoice(switch="compile", family="compiler", relieves="both", capabilities=Capabilities(compiles=True)),
    SwitchChoice(switch="graphs", family="graphs", relieves="host", leaves_program=True),
    SwitchChoice(switch="cudnn-benchmark", family="autotune", leaves_program=True),
    SwitchChoice(switch="int8", family="quantization", capabilities=Capabilities(quantizes=True)),
    SwitchChoice(switch="onnx", family="runtime", refusal=note("unavailable", "onnxruntime is not installed")),
)
DEVICE = {"fp16": -0.9, "bf16": -0.85, "channels-last": -0.2, "compile": -0.3, "cudnn-benchmark": -0.05, "int8": -0.5}
BEST = "fp16+channels-last+compile+graphs+cudnn-benchmark"


def device_s(spec: RunSpec) -> float:
    items = (spec.workload.batch or 32) / 32
    return (0.001 + 0.009 * items) * math.exp(sum(DEVICE.get(switch, 0.0) for switch in switches_of(spec)))


def host_s(spec: RunSpec) -> float:
    return 0.0001 if "graphs" in switches_of(spec) else 0.006


def compiling(cold_s: float, warm_s: float) -> Callable[[RunSpec], float]:
    """What compiling takes: what was compiled once is found in a cache."""
    known: set[tuple[int | None, frozenset[str]]] = set()

    def seconds(spec: RunSpec) -> float:
        program = spec.workload.batch, switches_of(spec) - {"graphs", "cudnn-benchmark"}
        is_warm = program in known
        known.add(program)
        return 0.0 if "compile" not in program[1] else warm_s if is_warm else cold_s

    return seconds


def landscape(**changes: Any) -> Landscape:
    """A card whose host is in the way of everything fast."""
    settings: dict[str, Any] = {
        "step_s": lambda spec: max(host_s(spec), device_s(spec)),
        "issue_share": lambda spec: host_s(spec) / max(host_s(spec), device_s(spec)),
        "compile_s": compiling(12.0, 3.0),
        "choices": CHOICES,
        "noise_sigma": 0.01,
        "offset_sigma": 0.003,
        "drift_sigma": 0.002,
    }
    return Landscape(**{**settings, **changes})


def tuned(door: FakeDoor, history: History, **settings: Any) -> TuneResult:
    observer = settings.pop("observer", None)
    given: dict[str, Any] = {"batch": 32, "budget": "30m", "launch": {"door": "fake"}, **settings}
    return redline.tune(
        "resnet50",
        clock=lambda: door.clock_s,
        **given,
        workspace=Workspace(door=door, history=history, observer=observer),
    )
