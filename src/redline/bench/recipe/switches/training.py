"""Switches for training, and those that spare memory.

The latter make no step faster. They pay where a larger batch does.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.recipe.base import FLAGS, RECOMPUTE, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.recipe.plain.models import recompute_blocks, repeated_blocks
from redline.bench.workload.step import Setup
from redline.spec import Task
from redline.work import Facts


@SWITCHES.register("fused-optimizer")
class FusedOptimizer(RecipeSwitch):
    name = "fused-optimizer"
    summary = "SGD, Adam or AdamW as one fused kernel (fused=True)"
    stage = FLAGS
    family = "optimizer"
    relieves = "both"
    tasks = ("train",)
    leaves_program = True

    def apply(self, setup: Setup) -> None:
        setup.optimizer_options["fused"] = True

    def write(self, code: RecipeCode) -> None:
        code.optimizer_options["fused"] = "True"


@SWITCHES.register("checkpointing")
class Checkpointing(RecipeSwitch):
    name = "checkpointing"
    summary = "activations inside repeated blocks are computed again in the backward instead of being kept (training)"
    stage = RECOMPUTE
    relieves = "memory"
    tasks = ("train",)
    # The state of the random numbers is read before each block, which cannot be recorded.
    excludes = frozenset({"graphs"})

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        return None if repeated_blocks(model) else "no block of the model repeats, so there is nothing to recompute by"

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        names = recompute_blocks(model)
        kind = type(model.get_submodule(names[0])).__name__
        setup.notes[self.name] = f"recomputes {len(names)} blocks of class {kind}"
        if any(isinstance(module, _BatchNorm) for name in names for module in model.get_submodule(name).modules()):
            setup.notes[self.name] += "; the running statistics of BatchNorm inside them count every batch twice"

    def write(self, code: RecipeCode) -> None:
        code.bring_in("import functools", "import torch.utils.checkpoint", "from typing import Any")
        code.carry(repeated_blocks, recompute_blocks)
        code.model_lines.append("recompute_blocks(model)")


@SWITCHES.register("expandable-segments")
class ExpandableSegments(RecipeSwitch):
    name = "expandable-segments"
    summary = "torch's allocator grows its segments instead of adding new ones, so less memory is lost between them"
    stage = FLAGS
    relieves = "memory"
    leaves_program = True

    def refusal(self, device: Device, task: Task) -> str | None:
        return device.segments_refusal()

    def apply(self, setup: Setup) -> None:
        # What was allocated so far stays where it is: the weights, and nothing else once the cache is given back.
        setup.device.release_cache()
        setup.device.expand_segments(True)

    def write(self, code: RecipeCode) -> None:
        code.flags.append('torch.cuda.memory._set_allocator_settings("expandable_segments:True")')
