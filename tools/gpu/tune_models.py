"""Models of kinds that the first workloads of `tune_workloads.py` do not cover. Nothing here uses Redline.

Each function takes the batch and returns a module and its inputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        return (single * torch.rsqrt(single.square().mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class RotaryBlock(nn.Module):
    """Rotary positions, keys shared by groups of heads, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * key_heads * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        inner = self.norm1(x)
        q = self.q(inner).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(inner).view(batch, length, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4)
        many = self.heads // self.key_heads
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Rotary(nn.Module):
    """A decoder as recent language models are built."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, layers: int = 16, width: int = 1024, heads: int = 16, length: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(RotaryBlock(width, heads, heads // 4) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 32000, bias=False)
        rates = 10000 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Of a denoiser: group norms, convolutions, and the time added in between."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.skip = nn.Linear(512, after), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(inner)))


class PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, high, wide = x.shape
        flat = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(flat).view(batch, -1, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, width)
        return x + self.out(mixed).transpose(1, 2).reshape(batch, width, high, wide)


class Denoiser(nn.Module):
    """One step of a diffusion model."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        pairs = list(zip([width, *widths[:-1]], widths, strict=True))
        self.down = nn.ModuleList(nn.ModuleList([Residual(a, b), Residual(b, b)]) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for b in widths[:-1])
        self.middle = nn.ModuleList([Residual(widths[-1], widths[-1]), PixelAttention(widths[-1])])
        self.up = nn.ModuleList(nn.ModuleList([Residual(2 * b, b), Residual(b, a)]) for a, b in reversed(pairs))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(64, device=x.device) / 64)
        angles = at[:, None] * rates
        time = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)))
        x, kept = self.first(x), []
        for number, (one, other) in enumerate(self.down):
            x = other(one(x, time), time)
            kept.append(x)
            if number < len(self.shrink):
                x = self.shrink[number](x)
        residual, attention = self.middle
        x = attention(residual(x, time))
        for number, (one, other) in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2.0) if number else x
            x = other(one(torch.cat([x, kept.pop()], 1), time), time)
        return self.last(x)


class Upscaler(nn.Module):
    """Convolutions at full resolution, no norms, and a shuffle of pixels at the end."""

    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()

        def twice() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))

        self.first, self.blocks = nn.Conv2d(3, width, 3, 1, 1), nn.ModuleList(twice() for _ in range(blocks))
        self.last = nn.Sequential(nn.Conv2d(width, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, images: Tensor) -> Tensor:
        x = first = self.first(images)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.last(x + first)


class Waves(nn.Module):
    """Convolutions over raw sound, then PyTorch's own encoder layers with a mask of what is padding."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        strides = [(1, 10, 5), (width, 3, 2), (width, 3, 2), (width, 3, 2), (width, 2, 2), (width, 2, 2)]
        self.convs = nn.ModuleList(nn.Conv1d(a, width, kernel, stride, bias=False) for a, kernel, stride in strides)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in strides)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8)
        self.head = nn.Linear(width, 32)

    def forward(self, sound: Tensor, lengths: Tensor) -> Tensor:
        x = sound[:, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.gelu(norm(conv(x).transpose(1, 2)).transpose(1, 2))
        x = x.transpose(1, 2)
        samples = torch.arange(x.shape[1], device=x.device) * sound.shape[1] // x.shape[1]
        is_padding = samples >= lengths[:, None]
        return self.head(self.encoder(x, src_key_padding_mask=is_padding))


class Experts(nn.Module):
    """Each token goes to two of eight networks, and which they are is read on the host."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, 8) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.layers, strict=True):
            weights, chosen = gate(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows, places = torch.where(chosen == number)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
            x = x + out
        return x


class Scan(nn.Module):
    """A state that is updated frame by frame in Python: hundreds of small operators."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner, self.gate, self.out = nn.Linear(64, width), nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, frames: Tensor) -> Tensor:
        values, gates = self.inner(frames), torch.sigmoid(self.gate(frames))
        state = torch.zeros_like(values[:, 0])
        for at in range(frames.shape[1]):
            state = gates[:, at] * state + (1 - gates[:, at]) * torch.tanh(values[:, at])
        return self.out(state)


class Graph(nn.Module):
    """Messages along edges: gathers and scatters beside small products."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 16)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.first(nodes)
        for message, norm in zip(self.messages, self.norms, strict=True):
            sent = F.relu(message(torch.cat([x[edges[:, 0]], x[edges[:, 1]]], 1)))
            x = norm(x + torch.zeros_like(x).index_add_(0, edges[:, 1], sent.to(x.dtype)))
        return self.last(x)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(10000, 256), nn.GRU(256, 512, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens))[0][:, -1])


def rotary(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Rotary(), (torch.randint(0, 32000, (batch, 1024)),)


def denoiser(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Denoiser(), (torch.randn(batch, 4, 64, 64), torch.linspace(1.0, 900.0, batch).long())


def upscaler(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Upscaler(), (torch.randn(batch, 3, 256, 256),)


def waves(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Waves(), (torch.randn(batch, 80000), torch.linspace(40000, 80000, batch).long())


def video(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return torchvision.models.video.r3d_18(), (torch.randn(batch, 3, 16, 112, 112),)


def experts(batch: int = 2048) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Experts(), (torch.randn(batch, 512),)


def scan(batch: int = 32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Scan(), (torch.randn(batch, 100, 64),)


def graph(batch: int = 20000) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Graph(), (torch.randn(batch, 64), torch.randint(0, batch, (8 * batch, 2)))


def sequences(batch: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Sequences(), (torch.randint(0, 10000, (batch, 128)),)


def digits(batch: int = 256) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [nn.Linear(784, 512), *(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 10)]
    steps = [step for layer in layers[:-1] for step in (layer, nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*steps, layers[-1]), (torch.randn(batch, 784),)
