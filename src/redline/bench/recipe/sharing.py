"""Blocks that several processes compile at the same time: each compiles some, and finds the others in inductor's cache.

Compiling keeps one processor busy and the others idle. Blocks that are compiled one by one can be compiled in any order,
also before the first step, once it is known with which inputs they are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from redline.bench.device.failure import one_line
from redline.bench.workload.step import Setup
from redline.model.spec import RunSpec
from redline.system.locks import file_lock


@dataclass(frozen=True)
class BlockCall:
    """A block with the inputs of its first call in a step."""

    block: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> tuple[object, ...]:
        """What can be seen of it from outside: blocks of one kind share a compiled program, unless constants in them differ."""
        weights = ((name, tuple(each.shape), each.dtype) for name, each in self.block.named_parameters())
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        return type(self.block), tuple(weights), str(structure), tuple(map(_described, leaves))

    def run(self, setup: Setup) -> None:
        """Forward, and in training backward: each is compiled when it is first needed."""
        copies: dict[int, torch.Tensor] = {}

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            """The same values, with a gradient that ends here; a tensor that is passed twice stays one."""
            return copies.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))

        inputs = (self.args, self.kwargs)
        if setup.task == "train":
            inputs = pytree.tree_map_only(torch.Tensor, apart, inputs)
        args, kwargs = inputs
        with setup.autocast():
            output = self.block(*args, **kwargs)
        results = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
        if setup.task == "train" and results:
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])
            for weight in self.block.parameters():
                weight.grad = None


def compile_together(setup: Setup, names: Sequence[str], spec: RunSpec) -> None:
    """Compile these blocks, whose modules compile themselves when called, beside other processes that do the same.

    Where a block cannot be called by itself, the first step compiles them; what cannot be compiled breaks here as it would there.
    """
    from torch._dynamo.exc import TorchDynamoException

    try:
        with _nothing_drawn(setup):
            calls, lock_of = _calls_of(setup, names), _lock_files(spec)
            firsts = {call.kind: name for name, call in reversed(calls.items())}
            # One of each kind first: two processes that begin with blocks that are alike would both compile the same.
            for some in (set(firsts.values()), calls.keys() - firsts.values()):
                in_turns([(lock_of(name), partial(calls[name].run, setup)) for name in calls if name in some])
    except TorchDynamoException:
        raise
    except Exception as error:
        setup.workload.model.zero_grad(set_to_none=True)
        known = setup.notes.get("compile", "")
        setup.notes["compile"] = f"{known}; they could not be shared with other processes: {one_line(error)}"


def in_turns(works: Sequence[tuple[Path, Callable[[], None]]]) -> None:
    """Do all of these, each under its lock, first those that no other process is busy with: what it has done is quick to do again."""
    left = list(works)
    while left:
        if not any(_is_done_now(each, left) for each in list(left)):
            lock, work = left.pop(0)
            with file_lock(lock, on_wait=lambda _: None):
                work()


def _is_done_now(each: tuple[Path, Callable[[], None]], left: list[tuple[Path, Callable[[], None]]]) -> bool:
    lock, work = each
    with file_lock(lock) as holder:
        if holder is None:
            work()
            left.remove(each)
    return holder is None


def _calls_of(setup: Setup, names: Sequence[str]) -> dict[str, BlockCall]:
    """The first call of each block, as a step without a compiler makes it."""
    found: dict[str, BlockCall] = {}

    def keep(name: str, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(name, BlockCall(block, args, kwargs))

    blocks = {name: setup.workload.model.get_submodule(name) for name in names}
    hooks = [each.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, each in blocks.items()]
    try:
        with torch.compiler.set_stance("force_eager"), setup.autocast():
            setup.model(*setup.args, **setup.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _lock_files(spec: RunSpec) -> Callable[[str], Path]:
    """Where the cache is: processes with another one share nothing."""
    from torch._inductor.runtime import runtime_utils

    utilities: Any = runtime_utils
    what = msgspec.json.encode((spec.workload, spec.recipe, spec.device))
    name = hashlib.sha256(what).hexdigest()[:16]
    folder = Path(utilities.cache_dir()) / "redline-locks"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda block: folder / f"{name}-{block}.lock"


@contextmanager
def _nothing_drawn(setup: Setup) -> Iterator[None]:
    """Random numbers of the first step are those that it would have drawn without this."""
    devices = [setup.device.torch_device] if setup.device.is_accelerator else []
    with torch.random.fork_rng(devices):
        yield


def _described(leaf: Any) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, bool | int | float | str | None) else type(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_inference()
