"""Models nobody named, for `check_tune_on_cpu.py`: each is a factory of this file. The last two are planted: every switch makes
the one slower and breaks the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(256, 512), nn.Linear(512, 64), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.one(hidden) if hidden.mean() > 0.3 else self.other(hidden)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(1000, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.layer(self.table(batch["ids"]), src_key_padding_mask=batch["mask"])
        return {"pooled": hidden.mean(1), "hidden": hidden}


class WritesBuffers(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)
        self.register_buffer("mean", torch.zeros(128))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return (hidden - self.mean).relu_()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(32, 64, 2, batch_first=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


def _stage(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up, self.head = _stage(3, 16), _stage(16, 32), _stage(48, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        deep = interpolate(self.deep(max_pool2d(down, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([deep, down], 1)))


class Scatters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            nodes = layer(torch.zeros_like(nodes).index_add_(0, edges[1], nodes[edges[0]]))
        return nodes


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = expert(x[mine]) * weight[mine, None]
        return out


class OnlySingle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if hidden.dtype != torch.float32:
            raise TypeError(f"my kernel takes float32 only, got {hidden.dtype}")
        return hidden.tanh()


class CannotBeTraced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise RuntimeError("this model cannot be traced")
        return self.layer(x).relu()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Squared.apply(self.first(x)))


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(8, 32, 5, padding=2), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Answer:
        hidden = self.first(x).relu()
        return Answer(self.last(hidden.mean(-1)), hidden)


class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, pairs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[layer(each) for each in pair] for layer, pair in zip(self.layers, pairs, strict=True)]


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Conv2d(8, 8, 3, padding=1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50000, 32, mode="sum"), nn.Linear(32, 2)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(ids, offsets))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(16, 33, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.weight, n=64, dim=-1)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.layers(x)
        return {"loss": ((found - y) ** 2).mean() + 0.01 * found.abs().mean(), "found": found}


class SlowerWithAll(nn.Module):
    """Planted: half precision, another layout and a compiler each make it do more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        is_other = y.dtype != torch.float32 or y.is_contiguous(memory_format=torch.channels_last)
        if is_other or torch.compiler.is_compiling() or torch.jit.is_tracing():
            for _ in range(30):
                y = y.sin().asin().clamp(-2, 2) if torch.compiler.is_compiling() else y.clone()
        return y


class BreaksWithAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise RuntimeError("contiguous float32 only")
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise RuntimeError("cannot be traced")
        return self.layer(x)


IDS = torch.randint(0, 1000, (16, 32))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "branches": (Branches, (torch.randn(64, 256),)),
    "takes_dict": (TakesDict, ({"ids": IDS, "mask": torch.zeros(16, 32, dtype=torch.bool)},)),
    "writes_buffers": (WritesBuffers, (torch.randn(256, 128),)),
    "recurrent": (Recurrent, (torch.randn(16, 50, 32),)),
    "unet": (UNet, (torch.randn(4, 3, 64, 64),)),
    "scatters": (Scatters, (torch.randn(2000, 32), torch.randint(0, 2000, (2, 10000)))),
    "experts": (Experts, (torch.randn(512, 64),)),
    "only_single": (OnlySingle, (torch.randn(128, 64),)),
    "cannot_be_traced": (CannotBeTraced, (torch.randn(128, 512),)),
    "own_function": (OwnFunction, (torch.randn(128, 128),)),
    "returns_dataclass": (ReturnsDataclass, (torch.randn(32, 8, 256),)),
    "nested_lists": (NestedLists, ([[torch.randn(64, 32), torch.randn(64, 32)] for _ in range(3)],)),
    "counts_calls": (CountsCalls, (torch.randn(8, 8, 64, 64),)),
    "bags": (Bags, (torch.randint(0, 50000, (4096,)), torch.arange(0, 4096, 8))),
    "spectral": (Spectral, (torch.randn(32, 16, 64),)),
    "double": (lambda: nn.Sequential(nn.Linear(128, 256), nn.Tanh()).double(), (torch.randn(256, 128).double(),)),
    "own_loss": (OwnLoss, (torch.randn(64, 64), torch.randn(64, 1))),
    "slower_with_all": (SlowerWithAll, (torch.randn(8, 3, 64, 64),)),
    "breaks_with_all": (BreaksWithAll, (torch.randn(8, 3, 64, 64),)),
}
TRAINED = ("own_loss", "own_function", "recurrent", "bags")
PLANTED = ("slower_with_all", "breaks_with_all")


def _built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    return build(), inputs


branches = partial(_built, "branches")
takes_dict = partial(_built, "takes_dict")
writes_buffers = partial(_built, "writes_buffers")
recurrent = partial(_built, "recurrent")
unet = partial(_built, "unet")
scatters = partial(_built, "scatters")
experts = partial(_built, "experts")
only_single = partial(_built, "only_single")
cannot_be_traced = partial(_built, "cannot_be_traced")
own_function = partial(_built, "own_function")
returns_dataclass = partial(_built, "returns_dataclass")
nested_lists = partial(_built, "nested_lists")
counts_calls = partial(_built, "counts_calls")
bags = partial(_built, "bags")
spectral = partial(_built, "spectral")
double = partial(_built, "double")
own_loss = partial(_built, "own_loss")
slower_with_all = partial(_built, "slower_with_all")
breaks_with_all = partial(_built, "breaks_with_all")
