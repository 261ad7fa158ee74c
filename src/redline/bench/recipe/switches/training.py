"""These switches are for training and for memory: some spare it, one keeps it, and one spreads it over several ranks.

Those that spare memory make no step faster. They pay if a larger batch does.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.recipe.base import DISTRIBUTE, FLAGS, RECOMPUTE, TRAIN, RecipeCode, RecipeSwitch, registered
from redline.bench.recipe.plain import recompute_blocks, repeated_blocks
from redline.bench.workload.ranks import is_ranked, world_size
from redline.bench.workload.step import Setup
from redline.model.work import Facts

FEW_PAGE_FAULTS = 64
"""A step with fewer page faults gains nothing, because each takes only about two microseconds, with the clearing of its page."""


@registered
class FusedOptimizer(RecipeSwitch):
    name = "fused-optimizer"
    summary = "SGD, Adam or AdamW as one fused kernel (fused=True)"
    stage = FLAGS
    family = "optimizer"
    relieves = "both"
    tasks = TRAIN
    leaves_program = True

    def apply(self, setup: Setup) -> None:
        setup.optimizer_options["fused"] = True

    def write(self, code: RecipeCode) -> None:
        code.optimizer_options["fused"] = "True"
        if code.device == "cuda":
            # Tensors are sorted by size, because small ones that share launches with large ones leave most of the device idle.
            code.model_lines.append("parameters.sort(key=torch.Tensor.numel, reverse=True)")


@registered
class Checkpointing(RecipeSwitch):
    name = "checkpointing"
    summary = "activations inside repeated blocks are computed again in the backward instead of being kept (training)"
    stage = RECOMPUTE
    relieves = "memory"
    tasks = TRAIN
    # The state of the random numbers is read before each block, and a graph cannot record that.
    excludes = frozenset({"graphs"})
    carries = (recompute_blocks,)
    lines = ("recompute_blocks(model)",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        return None if repeated_blocks(model) else "no block of the model repeats, so there is nothing to recompute by"

    def apply(self, setup: Setup) -> None:
        blocks = [setup.workload.model.get_submodule(name) for name in recompute_blocks(setup.workload.model)]
        setup.notes[self.name] = f"recomputes {len(blocks)} blocks of class {type(blocks[0]).__name__}"
        if any(isinstance(module, _BatchNorm) for block in blocks for module in block.modules()):
            setup.notes[self.name] += "; the running statistics of BatchNorm inside them count every batch twice"


@registered
class KeepMemory(RecipeSwitch):
    name = "keep-memory"
    summary = "a process on a CPU keeps the memory it frees, so the kernel need not clear the same pages in every step"
    stage = FLAGS
    family = "allocator"
    relieves = "both"
    leaves_program = True
    imports = ("import ctypes",)
    flag_lines = (
        "# Keep freed memory in the process (malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX).",
        "ctypes.CDLL(None).mallopt(-1, 2**31 - 1)",
        "ctypes.CDLL(None).mallopt(-4, 0)",
    )

    def refused_by(self, device: Device) -> str | None:
        return device.keeping_refusal()

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is None or facts.page_faults is None or facts.page_faults >= FEW_PAGE_FAULTS:
            return None
        return f"the kernel gives a step hardly any new memory ({facts.page_faults:.0f} page faults)"

    def apply(self, setup: Setup) -> None:
        setup.device.keep_memory(True)


@registered
class Fsdp(RecipeSwitch):
    name = "fsdp"
    summary = "weights, gradients and optimizer state spread over the ranks, gathered block by block (FSDP2, training)"
    stage = DISTRIBUTE
    relieves = "memory"
    tasks = TRAIN
    excludes = frozenset({"graphs"})
    remarks = ("on several ranks: torch.distributed.fsdp.fully_shard on every block, then on the model",)

    def refused_by(self, device: Device) -> str | None:
        return None if is_ranked() else "it is for several ranks: give --ranks"

    def apply(self, setup: Setup) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = setup.workload.model
        mesh = init_device_mesh(setup.device.torch_device.type, (world_size(),))
        blocks = repeated_blocks(model)
        for block in (*map(model.get_submodule, blocks), model):
            fully_shard(block, mesh=mesh)
        setup.is_sharded = True
        setup.notes[self.name] = f"{len(blocks)} blocks are gathered one by one" if blocks else "gathered as a whole"
