"""Switches for training and for memory: those that spare it, one that keeps it, and those of several ranks (how gradients
are averaged, where weights lie).

Those that spare memory make no step faster. They pay where a larger batch does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.recipe.base import (
    DISTRIBUTE,
    FLAGS,
    RECOMPUTE,
    SWITCHES,
    RecipeCode,
    RecipeSwitch,
    must_change,
)
from redline.bench.recipe.overlap import OverlappedGradients, SideStreams, overlap_gradients
from redline.bench.recipe.plain import add_pass, recompute_blocks, repeated_blocks
from redline.bench.workload.ranks import is_ranked, world_size
from redline.bench.workload.step import Setup
from redline.model.errors import SpecError
from redline.model.questions import SwitchNeed
from redline.model.spec import OptionValue, Task
from redline.model.work import Facts

NEEDS_COMPILER = SwitchNeed(wants=("compile",), reason="it changes the program of torch.compile; add compile")
FEWEST_CONVOLUTIONS = 3
"""The first of a model is not moved, and with one more there is little that could run at the same time."""
FEW_PAGE_FAULTS = 64
"""In a step: each takes about two microseconds, with the clearing of its page."""


@SWITCHES.register("fused-optimizer")
class FusedOptimizer(RecipeSwitch):
    name = "fused-optimizer"
    summary = "SGD, Adam or AdamW as one fused kernel (fused=True)"
    stage = FLAGS
    family = "optimizer"
    relieves = "both"
    tasks = ("train",)
    leaves_program = True

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is None or not facts.sparse_gradients:
            return None
        return f"fused optimizers take no sparse gradients, and that of {facts.sparse_gradients[0]} is one"

    def apply(self, setup: Setup) -> None:
        setup.optimizer_options["fused"] = True

    def write(self, code: RecipeCode) -> None:
        code.optimizer_options["fused"] = "True"
        if code.device == "cuda":
            # So that small tensors do not share launches with large ones, which would leave most of the device idle.
            code.model_lines.append("parameters.sort(key=torch.Tensor.numel, reverse=True)")


@SWITCHES.register("overlap-gradients")
class OverlapGradients(RecipeSwitch):
    name = "overlap-gradients"
    summary = (
        "weight gradients of convolutions on other streams, beside the rest of the backward (training, with compile)"
    )
    stage = FLAGS
    tasks = ("train",)
    needs: ClassVar[dict[Task, tuple[SwitchNeed, ...]]] = {"train": (NEEDS_COMPILER,)}

    def refusal(self, device: Device, task: Task) -> str | None:
        return None if device.is_accelerator else "a CPU runs one operator after the other"

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        convolutions = facts.layers.get("convolution") if facts is not None else None
        if facts is None or (convolutions is not None and convolutions.calls >= FEWEST_CONVOLUTIONS):
            return None
        return "no convolution runs in this model" if convolutions is None else "it has too few convolutions"

    def apply(self, setup: Setup) -> None:
        missing = "no convolution with a weight gradient that can be computed apart"
        must_change(setup, self.name, overlap_gradients(), missing)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any", "import itertools", "import operator", "import torch.fx")
        code.carry(add_pass, SideStreams, OverlappedGradients, overlap_gradients)
        code.model_lines.append("overlap_gradients()")


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


@SWITCHES.register("keep-memory")
class KeepMemory(RecipeSwitch):
    name = "keep-memory"
    summary = "a process on a CPU keeps the memory it frees, so the kernel need not clear the same pages in every step"
    stage = FLAGS
    family = "allocator"
    relieves = "both"
    leaves_program = True

    def refusal(self, device: Device, task: Task) -> str | None:
        return device.keeping_refusal()

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is None or facts.page_faults is None or facts.page_faults >= FEW_PAGE_FAULTS:
            return None
        return f"the kernel gives a step hardly any new memory ({facts.page_faults:.0f} page faults)"

    def apply(self, setup: Setup) -> None:
        setup.device.keep_memory(True)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("import ctypes")
        code.flags += [
            "# Keep freed memory in the process (malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX).",
            "ctypes.CDLL(None).mallopt(-1, 2**31 - 1)",
            "ctypes.CDLL(None).mallopt(-4, 0)",
        ]


NEEDS_RANKS = "it is for several ranks: give --ranks"


class DdpSwitch(RecipeSwitch):
    """An option of DistributedDataParallel, which every training on several ranks uses unless it shards."""

    stage = FLAGS
    tasks = ("train",)
    excludes = frozenset({"fsdp"})

    def refusal(self, device: Device, task: Task) -> str | None:
        return None if is_ranked() else NEEDS_RANKS

    def options(self) -> dict[str, Any]:
        raise NotImplementedError

    def apply(self, setup: Setup) -> None:
        setup.ddp_options |= self.options()
        if world_size() == 1:
            setup.notes[self.name] = "changes nothing on one rank"

    def write(self, code: RecipeCode) -> None:
        told = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        code.notes.append(f"on several ranks: DistributedDataParallel(model, {told})")


@SWITCHES.register("gradient-as-bucket-view")
class GradientAsBucketView(DdpSwitch):
    name = "gradient-as-bucket-view"
    summary = "gradients live in the buckets that are sent, which saves a copy and its memory (several ranks, training)"
    relieves = "memory"

    def options(self) -> dict[str, Any]:
        return {"gradient_as_bucket_view": True}


@SWITCHES.register("static-graph")
class StaticGraph(DdpSwitch):
    name = "static-graph"
    summary = "DDP learns once in which order gradients come (several ranks, training; the model must not branch)"
    relieves = "host"

    def options(self) -> dict[str, Any]:
        return {"static_graph": True}


@SWITCHES.register("bucket-size")
class BucketSize(DdpSwitch):
    name = "bucket-size"
    summary = "megabytes of gradients sent at once, such as bucket-size:mb=50 (several ranks, training; DDP's own: 25)"
    relieves = "device"

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        megabytes = options.get("mb")
        if set(options) != {"mb"} or not isinstance(megabytes, int | float) or isinstance(megabytes, bool):
            raise SpecError(f"switch bucket-size needs a size: write bucket-size:mb=50, got {self.switch}")
        if not 0 < megabytes <= 1e6:
            raise SpecError(f"bucket-size: mb must be above 0 and at most 1000000, got {megabytes}")

    offered: ClassVar[tuple[str | None, ...]] = ()

    def options(self) -> dict[str, Any]:
        return {"bucket_cap_mb": self.switch.options["mb"]}


@SWITCHES.register("fsdp")
class Fsdp(RecipeSwitch):
    name = "fsdp"
    summary = "weights, gradients and optimizer state spread over the ranks, gathered block by block (FSDP2, training)"
    stage = DISTRIBUTE
    relieves = "memory"
    tasks = ("train",)
    excludes = frozenset({"graphs"})

    def refusal(self, device: Device, task: Task) -> str | None:
        if not is_ranked():
            return NEEDS_RANKS
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            return f"FSDP2 (fully_shard) came with torch 2.6, and this is {torch.__version__}"
        return None

    def apply(self, setup: Setup) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = setup.workload.model
        mesh = init_device_mesh(setup.device.torch_device.type, (world_size(),))
        blocks = repeated_blocks(model)
        for name in blocks:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        setup.is_sharded = True
        setup.notes[self.name] = f"{len(blocks)} blocks are gathered one by one" if blocks else "gathered as a whole"

    def write(self, code: RecipeCode) -> None:
        code.notes.append("on several ranks: torch.distributed.fsdp.fully_shard on every block, then on the model")
