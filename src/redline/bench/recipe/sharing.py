"""Blocks that several processes compile at the same time: each compiles some, and finds the others in inductor's cache.

Compiling keeps one processor busy and the others idle. Blocks that are compiled one by one can be compiled in any order,
also before the first step, once it is known with which inputs they are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.bench.device.failure import one_line
from redline.bench.workload.step import Setup
from redline.model.spec import RunSpec
from redline.system.locks import file_lock

Call = tuple[torch.nn.Module, Any]
"""A block, and the positional and named inputs of its first call in a step."""


def compile_together(setup: Setup, names: Sequence[str], spec: RunSpec) -> None:
    """Compile these blocks, whose modules compile themselves when called, beside other processes that do the same.

    If a block cannot be called by itself, the first step compiles them; what cannot be compiled breaks here as it would there.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.runtime import runtime_utils

    utilities: Any = runtime_utils
    program = hashlib.sha256(msgspec.json.encode((spec.workload, spec.recipe, spec.device))).hexdigest()[:16]
    folder = Path(utilities.cache_dir()) / "redline-locks"  # processes with another cache share nothing
    folder.mkdir(parents=True, exist_ok=True)
    devices = [setup.device.torch_device] if setup.device.is_accelerator else []
    try:
        with torch.random.fork_rng(devices):  # the first step draws the numbers that it would have drawn without this
            calls = _first_calls(setup, names)
            firsts = {_kind(call): name for name, call in reversed(calls.items())}
            # One of each kind first: two processes that begin with blocks that are alike would both compile the same.
            for some in (set(firsts.values()), calls.keys() - firsts.values()):
                in_turns(
                    [
                        (folder / f"{program}-{name}.lock", partial(_run, setup, call))
                        for name, call in calls.items()
                        if name in some
                    ]
                )
    except TorchDynamoException:
        raise
    except Exception as error:
        setup.workload.model.zero_grad(set_to_none=True)
        shared = f"they could not be shared with other processes: {one_line(error)}"
        setup.notes["compile"] = f"{setup.notes.get('compile', '')}; {shared}"


def in_turns(works: Sequence[tuple[Path, Callable[[], None]]]) -> None:
    """Do all of these, each under its lock, beginning with those that no other process is busy with: what it has done is quick
    to do again."""
    left = list(works)
    while left:
        count = len(left)
        for lock, work in list(left):
            with file_lock(lock) as holder:
                if holder is None:
                    work()
                    left.remove((lock, work))
        if len(left) == count:
            lock, work = left.pop(0)
            with file_lock(lock, on_wait=lambda _: None):
                work()


def _first_calls(setup: Setup, names: Sequence[str]) -> dict[str, Call]:
    """The first call of each block, as a step without a compiler makes it."""
    found: dict[str, Call] = {}

    def keep(name: str, block: torch.nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(name, (block, (args, kwargs)))

    blocks = {name: setup.workload.model.get_submodule(name) for name in names}
    hooks = [each.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, each in blocks.items()]
    try:
        with torch.compiler.set_stance("force_eager"), setup.autocast():
            setup.model(*setup.args, **setup.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _run(setup: Setup, call: Call) -> None:
    """Run a block forward and, in training, backward: each is compiled when it is first needed."""
    (block, inputs), copies = call, dict[int, Tensor]()
    if setup.task == "train":
        # The same values, with a gradient that ends here; a tensor that is passed twice stays one.
        inputs = pytree.tree_map_only(
            Tensor, lambda leaf: copies.setdefault(id(leaf), leaf.detach().requires_grad_(leaf.requires_grad)), inputs
        )
    args, kwargs = inputs
    with setup.autocast():
        output = block(*args, **kwargs)
    results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if setup.task == "train" and results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        block.zero_grad(set_to_none=True)


def _kind(call: Call) -> object:
    """The part of a call that can be seen from outside: blocks of one kind share a compiled program, unless constants in them differ."""

    def described(leaf: Any) -> object:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_inference()
        return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf)

    (block, inputs) = call
    leaves, structure = pytree.tree_flatten((inputs, dict(block.named_parameters())))
    return type(block), str(structure), tuple(map(described, leaves))
