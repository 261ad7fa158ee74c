"""FLOPs against counts made by hand, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from applying import Model
from torch import Tensor, nn

from redline.bench.count.count import Task, count_work
from redline.bench.count.operators import FORMULAS
from redline.model.work import WorkCount


def summed(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return first.float().sum()


def both(model: nn.Module, *args: Any) -> WorkCount:
    return count_work(Task(model=model, inputs=(args, {}), loss=summed))


def forward(model: nn.Module, *args: Any) -> WorkCount:
    return count_work(Task(model=model.eval(), inputs=(args, {})))


def calls(function: Any) -> Model:
    return Model(lambda _, *args: function(*args))


def moving(*shape: int) -> Tensor:
    """An input whose gradient is wanted too, as inside a network."""
    return torch.randn(*shape, requires_grad=True)


def conv(transposed: bool = False, **settings: Any) -> nn.Module:
    return (nn.ConvTranspose2d if transposed else nn.Conv2d)(**settings)


def attended(**how: Any) -> Model:
    return Model(lambda _, *qkv: F.scaled_dot_product_attention(*qkv, **how))


class Net(nn.Module):
    """Parts, and the way through them."""

    def __init__(self, way: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.way = way

    def forward(self, *args: Any) -> Any:
        return self.way(self, *args)


def pieces(own: Any, x: Tensor, heads: int) -> list[Tensor]:
    return [layer(x).unflatten(-1, (-1, 8)).transpose(1, 2).repeat_interleave(heads // size, 1)
            for layer, size in ((own.q, heads), (own.k, 2), (own.v, 2))]  # fmt: skip


def stepped(own: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 16)
    for step in range(x.shape[1]):
        state = own.cell(x[:, step], state)
    return own.last(state)


# The model, its inputs, FLOPs forward and backward by hand. Where an input is data, nobody wants its gradient.
PARTS: dict[str, tuple[nn.Module, tuple[Tensor, ...], int, int]] = {
    **{
        f"{groups} groups": (conv(in_channels=32, out_channels=32, kernel_size=3, padding=1, groups=groups), (moving(2, 32, 10, 10),),
                             2 * 6400 * (32 // groups * 9), 4 * 6400 * (32 // groups * 9))
        for groups in (1, 4, 32)
    },
    "first layer": (nn.Conv2d(3, 8, 3), (torch.randn(1, 3, 10, 10),), 2 * 512 * 27, 2 * 512 * 27),
    "line": (nn.Conv1d(4, 6, 5, stride=2), (moving(1, 4, 21),), 2 * 54 * 20, 4 * 54 * 20),
    "cube": (nn.Conv3d(2, 3, 3, dilation=2), (moving(1, 2, 9, 9, 9),), 2 * 375 * 54, 4 * 375 * 54),
    "transposed": (nn.ConvTranspose2d(8, 6, 3, groups=2, stride=2), (moving(1, 8, 5, 5),), 2 * 200 * 27, 4 * 200 * 27),
    "lstm": (nn.LSTM(16, 32, 2), (moving(7, 3, 16),), 42 * 128 * 112, 84 * 128 * 112),
    "lstm over data": (nn.LSTM(16, 32, 2), (torch.randn(7, 3, 16),), 42 * 128 * 112, 42 * 128 * (2 * 112 - 16)),
    "both ways": (nn.LSTM(16, 32, 2, bidirectional=True), (torch.randn(7, 3, 16),),
                  42 * 256 * 144, 42 * 256 * (2 * 144 - 16)),
    "attention": (attended(), (moving(2, 4, 10, 16), moving(2, 4, 30, 16), moving(2, 4, 30, 16)),
                  4 * 8 * 300 * 16, 10 * 8 * 300 * 16),
    "causal": (attended(is_causal=True), (moving(1, 2, 64, 8),) * 3, 2 * 2 * 64 * 64 * 8, 5 * 2 * 64 * 64 * 8),
    "distances": (calls(torch.cdist), (moving(3, 30, 16), moving(3, 40, 16)), 2 * 3600 * 18, 4 * 3600 * 16),
    "einsum": (Model(lambda _, a, b: torch.einsum("bik,bkj->bij", a, b)), (moving(3, 4, 5), moving(3, 5, 6)), 720, 1440),
    "matrix-vector": (calls(torch.mv), (moving(5, 7), moving(7)), 70, 70),
    "dot": (calls(torch.dot), (moving(7), moving(7)), 14, 0),
    "addmv": (calls(torch.addmv), (moving(5), moving(5, 7), moving(7)), 70, 70),
    "addbmm": (calls(torch.addbmm), (moving(4, 6), moving(3, 4, 5), moving(3, 5, 6)), 720, 1440),
    "in place": (Model(lambda _, a, b, c: a.clone().addmm_(b, c)), (moving(4, 6), moving(4, 5), moving(5, 6)), 240, 480),
    # Whole models, as strangers bring them.
    "u-net": (Net(lambda own, x: own.out(torch.cat([own.a(x), own.up(own.b(own.a(x).relu()))], 1)), a=nn.Conv2d(1, 8, 3, padding=1),
                  b=nn.Conv2d(8, 16, 3, padding=1, stride=2), up=nn.ConvTranspose2d(16, 8, 2, 2), out=nn.Conv2d(16, 2, 1)),
              (torch.randn(2, 1, 16, 16),), 4 * (2 * 18432 + 73728 + 32768 + 8192), 4 * (2 * 18432 + 2 * (73728 + 32768 + 8192))),
    "points": (Net(lambda own, x: own.last(own.b(own.a(x).relu()).amax(-1)), a=nn.Conv1d(3, 32, 1), b=nn.Conv1d(32, 64, 1),
                   last=nn.Linear(64, 5)), (torch.randn(2, 3, 100),), 4 * (9600 + 204800 + 320), 4 * (9600 + 2 * (204800 + 320))),
    "grouped queries": (Net(lambda own, x: F.scaled_dot_product_attention(*pieces(own, x, 4), is_causal=True),
                            q=nn.Linear(32, 32), k=nn.Linear(32, 16), v=nn.Linear(32, 16)),
                        (torch.randn(2, 10, 32),), 40 * 2048 + 4 * 100 * 32, 40 * 2048 + 10 * 100 * 32),
    "experts": (Net(lambda own, x: sum(w * e(x) for w, e in zip(own.gate(x).softmax(-1).split(1, -1), own.experts, strict=True)),
                    gate=nn.Linear(16, 4), experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(4))),
                (torch.randn(2, 16),), 4 * (64 + 1024), 4 * (64 + 1024)),
    "speech": (Net(lambda own, x: own.last(own.recurrent(own.conv(x).transpose(1, 2))[0]), conv=nn.Conv1d(8, 16, 5, 2, 2),
                   recurrent=nn.LSTM(16, 24, batch_first=True, bidirectional=True), last=nn.Linear(48, 10)),
               (torch.randn(2, 8, 40),), 80 * (640 + 7680 + 480), 80 * (640 + 2 * (7680 + 480))),
    "mixer": (Net(lambda own, x: own.channels(own.tokens(x.mT).mT), tokens=nn.Linear(49, 49), channels=nn.Linear(64, 64)),
              (torch.randn(2, 49, 64),), 4 * (64 * 2401 + 49 * 4096), 4 * (64 * 2401 + 2 * 49 * 4096)),
    "video": (Net(lambda own, x: own.time(own.space(x)), space=nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)),
                  time=nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), groups=8)),
              (torch.randn(2, 3, 4, 8, 8),), 8192 * (27 + 3), 8192 * (27 + 6)),
    "autoencoder": (Net(lambda own, x: own.out(own.mean(own.a(x).tanh()) * own.spread(own.a(x)).exp()), a=nn.Linear(64, 32),
                        mean=nn.Linear(32, 8), spread=nn.Linear(32, 8), out=nn.Linear(8, 64)),
                    (torch.randn(2, 64),), 4 * (4096 + 512 + 512), 4 * (4096 + 2 * (512 + 512))),
    "cell": (Net(stepped, cell=nn.GRUCell(8, 16), last=nn.Linear(16, 3)), (torch.randn(2, 6, 8),),
             4 * (6 * 48 * 24 + 48), 4 * (6 * 48 * 24 + 5 * 48 * 16 + 2 * 48)),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_flops_are_those_counted_by_hand(part: str) -> None:
    model, inputs, forward, backward = PARTS[part]
    work = both(model, *inputs)
    assert (work.flops, work.backward_flops) == (forward, backward)
    assert work.uncounted == ()


def test_the_encoder_s_fast_path_counts_like_the_slow_one() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
    tokens, width = 2 * 9, 32
    expected = 2 * tokens * (4 * width * width + 2 * width * 64) + 4 * 2 * 9 * 9 * width
    assert forward(layer, torch.randn(2, 9, 32)).flops == expected


WEIGHTS = [torch.empty(128, 16), torch.empty(128, 32), torch.empty(128), torch.empty(128)]
LSTM = {"input": torch.empty(7, 3, 16), "weight": WEIGHTS, "weight_stride0": 4, "bidirectional": False}
FLAT = {"self": torch.empty(16, 100), "mat2": torch.empty(100, 24)}


@pytest.mark.parametrize(
    ("operator", "arguments", "out", "flops"),
    [
        ("_cudnn_rnn", LSTM, (7, 3, 32), 2 * 21 * 128 * 48),
        ("_cudnn_rnn_backward", {**LSTM, "wants_input": True}, (7, 3, 32), 4 * 21 * 128 * 48),
        ("_cudnn_rnn_backward", {**LSTM, "wants_input": False}, (7, 3, 32), 2 * 21 * 128 * (16 + 2 * 32)),
        ("_grouped_mm", {"self": torch.empty(100, 16), "mat2": torch.empty(4, 16, 24)}, (100, 24), 2 * 100 * 16 * 24),
        ("_grouped_mm", FLAT, (4, 16, 24), 2 * 100 * 16 * 24),  # the groups share the inner dimension
        # More queries than keys see all keys in the end.
        ("_scaled_dot_product_flash_attention",
         {"query": torch.empty(1, 1, 6, 8), **dict.fromkeys(("key", "value"), torch.empty(1, 1, 4, 8)), "is_causal": True},
         (1, 1, 6, 8), 4 * 8 * (4 * 4 // 2 + 2 * 4)),
    ],
)  # fmt: skip
def test_operators_of_gpus_are_counted_from_their_shapes(
    operator: str, arguments: dict[str, Any], out: tuple[int, ...], flops: int
) -> None:
    _, formula = FORMULAS[operator]
    assert formula(arguments, torch.empty(out)) == flops


def test_products_of_int8_and_what_inference_mode_leaves_whole() -> None:
    a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)
    assert forward(calls(torch._int_mm), a, b).flops_by_format() == {"int8": 2 * 32 * 16 * 24}
    with torch.inference_mode():
        assert forward(nn.Linear(5, 7), torch.randn(3, 5)).flops == 2 * 3 * 5 * 7
        work = forward(calls(torch.cdist), torch.randn(30, 16), torch.randn(40, 16))
    assert (work.flops, work.uncounted) == (2 * 30 * 40 * 18, ())


def test_what_is_no_product_stands_apart_and_what_nobody_can_count_is_named() -> None:
    work = forward(nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4, bias=False)), torch.randn(3, 8))
    assert (work.flops, work.other_flops(["norm"]), work.other_flops(["elementwise"])) == (2 * 3 * 8 * 4, 5 * 24, 24)
    work = forward(Model(lambda _, a, b: torch.cdist(a, b, p=1.0)), torch.randn(30, 16), torch.randn(40, 16))
    assert (work.flops, work.other_flops()) == (0, 3 * 30 * 40 * 16)
    work = forward(calls(torch.linalg.inv), torch.eye(4))
    assert [one.name for one in work.uncounted] == ["linalg_inv_ex"]
    assert any(one.name == "linalg_inv_ex" and one.bytes for one in work.operators)
