"""From a spec to a workload on the CPU, and from a name to the source that knows it."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from redline.bench.workload.source import SOURCES, ExampleCode, Source
from redline.bench.workload.workload import Workload
from redline.errors import MissingExtra, UnknownName
from redline.protocol import ModelName
from redline.spec import WorkloadSpec


def build_workload(spec: WorkloadSpec, seed: int, within: AbstractContextManager[Any] | None = None) -> Workload:
    """The model with its inputs on the CPU. The same seed gives the same weights and inputs.

    `within` is held while the source builds: a mode that gives tensors no memory.
    """
    source = _source_of(spec)
    source.check(spec)
    with seeded(seed), within or nullcontext():
        return source.build(spec, seed)


def check_model(spec: WorkloadSpec) -> None:
    """Raise a `UsageError` for an unknown name, a missing package or file, or options that cannot be honoured."""
    _source_of(spec).check(spec)


def fingerprint_of(spec: WorkloadSpec) -> str:
    """Which source, and what that knows of a checked spec's model without building it."""
    source = _source_of(spec)
    return f"{type(source).__name__} {source.fingerprint(spec)}"


def example_code(spec: WorkloadSpec) -> ExampleCode | None:
    return _source_of(spec).example_code(spec)


def find_source(model: str) -> Source:
    """The source in front of the colon, else the one that claims the name."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in SOURCES:
        return SOURCES.get(prefix)
    # Those that need their name in front stay out: importing timm to answer a slip of the pen would take seconds.
    candidates = [source for source in map(SOURCES.get, SOURCES) if not source.needs_prefix]
    for source in candidates:
        if source.claims(model):
            return source
    known = [model.name for source in candidates for model in source.models()]
    raise UnknownName("model", model, known, hint="`redline models` lists them")


def list_models(pattern: str | None = None) -> tuple[list[ModelName], list[str]]:
    """Models by name that match (part of a name, or a pattern with `*`), and the sources whose package is missing."""
    found: list[ModelName] = []
    missing: list[str] = []
    for name in SOURCES:
        try:
            found += SOURCES.get(name).models()
        except MissingExtra as error:
            missing.append(str(error))
    if pattern is not None:
        wanted = pattern.lower() if any(sign in pattern for sign in "*?[") else f"*{pattern.lower()}*"
        found = [model for model in found if _matches(model.name.lower(), wanted)]
    return found, missing


def _matches(name: str, pattern: str) -> bool:
    """With its source in front or without: `resnet5*` finds timm's too."""
    return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in (name, name.partition(":")[2]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed what factories draw from, and give the state back: the bench may share its process with the user's code."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    # Only the CPU's generator: torch.manual_seed would reach for every device.
    generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(state)


def _source_of(spec: WorkloadSpec) -> Source:
    return SOURCES.get("live") if spec.artifact is not None else find_source(spec.model)
