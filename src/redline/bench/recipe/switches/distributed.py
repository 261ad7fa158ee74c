"""Switches for several ranks: how gradients are averaged, and where weights lie."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import DISTRIBUTE, FLAGS, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.recipe.plain.models import repeated_blocks
from redline.bench.workload.ranks import is_ranked, world_size
from redline.bench.workload.step import Setup
from redline.errors import SpecError
from redline.spec import OptionValue, Task

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
