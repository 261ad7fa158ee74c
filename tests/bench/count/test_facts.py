"""What a watched step tells about a workload, on models whose ways are known."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from applying import Model, workload_of
from torch import Tensor, nn

from redline.bench import session
from redline.bench.count.facts import facts_of
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import switch_choices
from redline.bench.session import BenchSession
from redline.model.protocol import Ask, AskSwitches, SwitchChoice, SwitchChoices
from redline.model.spec import Task
from redline.model.spec_table import specs_from_table
from redline.model.work import Facts


def facts(model: nn.Module, *inputs: Any, task: Task = "infer") -> Facts:
    torch.manual_seed(0)
    return facts_of(workload_of(model, *inputs, task=task), CpuDevice(), "sgd", seed=0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))


class Attends(nn.Module):
    """Through scaled_dot_product_attention, or written out in products and softmax."""

    def __init__(self, *, written_out: bool = False) -> None:
        super().__init__()
        self.project, self.written_out = nn.Linear(16, 48), written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        if self.written_out:
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v)


def test_layers_are_known_by_the_operators_that_ran() -> None:
    def everything(own: Any, ids: Tensor) -> Tensor:
        x = own.attend(own.norm(own.memory(own.words(ids))[0]))
        return own.scale(F.conv2d(x.flatten(1, 2).unsqueeze(1), own.weight))  # no nn.Conv2d anywhere

    model = Model(
        everything, words=nn.Embedding(10, 16), memory=nn.LSTM(16, 16, batch_first=True), norm=nn.LayerNorm(16),
        attend=Attends(), weight=nn.Parameter(torch.randn(4, 1, 3, 3)), unused=nn.GRU(16, 16), scale=nn.BatchNorm2d(4),
    )  # fmt: skip
    found = facts(model, torch.randint(0, 10, (2, 5)))
    kinds = ("embedding", "recurrent", "norm", "linear", "attention", "convolution", "batch-norm")
    assert {kind: layer.calls for kind, layer in found.layers.items()} == dict.fromkeys(kinds, 1)
    assert sum(layer.share for layer in found.layers.values()) <= 1.0
    assert sum(found.kinds.values()) == pytest.approx(1.0)
    assert found.attention_backends["fp32"] == ("flash", "math"), "what torch has for a CPU"


def test_attention_written_out_is_not_a_call_of_it() -> None:
    assert "attention" not in facts(Attends(written_out=True), torch.randn(2, 5, 16)).layers
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert "attention" in facts(encoder, torch.randn(2, 5, 16)).layers, "its fast path would hide it"


def test_a_backend_must_do_every_attention() -> None:
    class Masked(Attends):
        def forward(self, x: Tensor) -> Tensor:
            q = self.project(x).chunk(3, dim=-1)[0].unflatten(-1, (2, 8)).transpose(1, 2)
            # torch's flash kernel for CPUs wants keys and values of one width.
            return F.scaled_dot_product_attention(q, q, q[..., :4]) + super().forward(x)[..., :4]

    assert facts(Masked(), torch.randn(2, 5, 16)).attention_backends["fp32"] == ("math",)


def test_a_branch_on_data_shows_on_a_second_draw_of_the_inputs() -> None:
    x = torch.randn(3, 4)
    first = float(x[0, 0])

    def gated(own: Any, x: Tensor) -> Tensor:
        """Takes another way when its input is not the very first one it was made with."""
        return own.layer(x) if x[0, 0].item() == first else own.layer(own.layer(x)).relu()

    found = facts(Model(gated, layer=nn.Linear(4, 4)), x)
    assert found.branches
    assert found.reads == ("item (1)",)
    plain = facts(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
    assert (plain.branches, plain.varies_shapes, plain.reads) == (False, False, ())


class Seldom(nn.Module):
    """Goes another way from the fifth inputs on that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(4, 4), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        first = x[0, 0].item()
        self.given += [first] if first not in self.given else []
        return self.layer(x) if self.given.index(first) < 4 else self.layer(x).relu()


def test_a_model_that_reads_values_is_looked_at_on_more_inputs() -> None:
    model = Seldom()
    assert facts(model, torch.randn(3, 4)).branches
    assert len(model.given) == 5, "no more than needed to see it"


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.last = x + 1
        return x * self.table


X, PICTURES = torch.randn(3, 4), torch.randn(2, 3, 8, 8)


def reading(read: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Model(lambda _, x: (read(x), x * 2)[1]))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


SEEN: list[tuple[nn.Module, Tensor, Task, dict[str, Any]]] = [
    (nn.Linear(4, 4), X, "infer", {"double_share": 0.0, "reads": (), "branches": False, "varies_shapes": False, "host_s": None,
                                   "synchronises": None, "draws_random_numbers": False, "mutates": ()}),
    (nn.Linear(4, 4).double(), X.double(), "infer", {"double_share": pytest.approx(1.0)}),
    *(
        (reading(read), X, "infer", {"reads": (f"{told} in 1 (1)",)})
        for read, told in [
            (lambda x: x.sum().item(), "item"), (lambda x: bool((x > 0).any()), "item"), (lambda x: x.tolist(), "tolist"),
            (lambda x: x.detach().numpy(), "numpy"), (lambda x: x.nonzero(), "nonzero"),
        ]
    ),
    # A mask gives other shapes for other data, and an index of positions reads nothing.
    (Model(lambda _, x: x[x > 0].sum() + x[torch.tensor([0, 1])].sum() + x * 0), X, "infer",
     {"varies_shapes": True, "reads": ("index (1)",)}),
    (nn.Sequential(Remembers()), X, "infer", {"mutates": ("0.seen", "0.last")}),
    (normed(), PICTURES, "infer", {"mutates": ()}),
    (normed(), PICTURES, "train", {"mutates": ("1.running_mean", "1.running_var", "1.num_batches_tracked")}),
    (Model(lambda _, x: x + torch.rand(4)), X, "infer", {"draws_random_numbers": True}),
    (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), X, "infer", {"draws_random_numbers": False}),
    (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), X, "train", {"draws_random_numbers": True}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "x", "task", "expected"), SEEN)
def test_what_a_watched_step_tells(model: nn.Module, x: Tensor, task: Task, expected: dict[str, Any]) -> None:
    seen = facts(model, x, task=task)
    assert (seen.step_s or 0) > 0
    assert (seen.device_s or 0) > 0
    for name, value in expected.items():
        found = getattr(seen, name)
        assert (sorted(found) == sorted(value)) if isinstance(value, tuple) else found == value


def test_a_training_step_is_watched_whole() -> None:
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    infer, train = facts(network, torch.randn(4, 8)), facts(network, torch.randn(4, 8), task="train")
    assert train.launches > 2 * infer.launches
    assert train.layers["linear"].calls == 2, "layers are those of the forward"


@pytest.mark.parametrize(("rates", "infer", "train"), [((0.1, 0.1, 0.1), 1, 1), ((0.1, 0.2, 0.3), 1, 3)])
def test_kinds_of_blocks_are_told_by_what_they_compute(rates: tuple[float, ...], infer: int, train: int) -> None:
    """As stochastic depth with a rate that grows from block to block: the compiler writes each rate into a program of its own."""
    dropping = [Model(lambda own, x: own.drop(own.block(x)), block=Block(16), drop=nn.Dropout(rate)) for rate in rates]
    network = nn.Sequential(*map(nn.Sequential, dropping), nn.Linear(16, 3))
    for task, kinds in (("infer", infer), ("train", train)):
        blocks = facts(network, torch.randn(4, 16), task=cast(Task, task)).blocks
        assert (blocks.class_name, blocks.count, blocks.kinds) == ("Model", 3, kinds)


def test_blocks_of_other_shapes_are_other_kinds() -> None:
    network = nn.Sequential(Block(16), Block(16), nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 3))
    blocks = facts(network, torch.randn(4, 16)).blocks
    assert (blocks.count, blocks.kinds) == (4, 2)


def test_the_workload_is_left_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3))
    workload = workload_of(network, torch.randn(2, 3, 8, 8), task="train")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    facts_of(workload, CpuDevice(), "adamw", seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.training


def ask(**table: Any) -> SwitchChoices:
    (spec,) = specs_from_table({"model": "simple_cnn", "batch": 2, "device": "cpu", "threads": 1, **table})
    reply = BenchSession(lambda progress: None).handle(Ask(question=AskSwitches(spec=spec)))
    assert isinstance(reply, SwitchChoices), reply
    return reply


def test_a_model_without_attention_is_never_offered_one() -> None:
    """Every trial of a ConvNeXt once held `sdpa:…` and failed with the same sentence."""
    told = ask()
    assert "convolution" in told.facts.layers
    refusals = {choice.switch: choice.refusal for choice in told.choices}
    for backend in ("flash", "math"):
        assert str(refusals[f"sdpa:{backend}"]) == "no attention runs in this model"
    assert refusals["channels-last"] is None
    assert ask(model="transformer", sequence_length=8).facts is not None


def test_where_a_plain_step_does_not_fit_switches_are_offered_without_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> Facts:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(session, "facts_of", too_large)
    told = ask()
    assert told.facts is None
    assert "channels-last" in {choice.switch for choice in told.choices if choice.refusal is None}


def choices(model: nn.Module, seen: Facts | None, device: CpuDevice | None = None) -> dict[str, SwitchChoice]:
    told = switch_choices(model, device or CpuDevice(), "infer", seen)
    return {choice.switch: choice for choice in told}


def test_what_python_reads_keeps_a_model_from_being_traced() -> None:
    def reads(own: Any, x: Tensor) -> Tensor:
        out: Tensor = own.inner(x)
        return out if float(out.mean()) > 1e6 else out.relu()

    model, plain, x = Model(reads, inner=nn.Linear(8, 8)), Block(8), torch.randn(4, 8)
    found = facts(model, x)
    assert found.reads
    assert not found.branches, "these inputs never take the other way, which is why a trace would pass the comparison"
    told = choices(model, found)
    assert "keeps what Python read" in str(told["torchscript"].refusal)
    assert told["onnx"].is_doubtful
    assert not told["compile"].is_doubtful
    told = choices(plain, facts(plain, x))
    assert told["torchscript"].refusal is None
    assert not told["onnx"].is_doubtful


class Quick(CpuDevice):
    """Has arithmetic for bf16, and none for fp16."""

    def product_time(self, number_format: str) -> float | None:
        return {"bf16": 0.4, "fp16": 30.0}.get(number_format)


def test_what_half_precision_may_bring_on_a_cpu_is_measured() -> None:
    halves = Facts(kinds={"matmul": 0.4, "convolution": 0.1, "elementwise": 0.5})
    told = choices(Block(8), halves, Quick())
    assert told["bf16"].expected_time == told["amp-bf16"].expected_time == pytest.approx(0.5 + 0.5 * 0.4)
    assert told["fp16"].expected_time == pytest.approx(0.5 + 0.5 * 30.0)
    assert told["compile"].expected_time is None
    assert {"bf16", "amp-bf16"} <= set(told["onnx"].excludes)
    assert all(choice.expected_time is None for choice in choices(Block(8), None, Quick()).values())


def test_a_cpu_is_asked_with_one_thread_that_is_given_back() -> None:
    device, threads = CpuDevice(), torch.get_num_threads()
    bf16 = device.product_time("bf16")
    assert bf16 is not None
    assert bf16 > 0
    assert device.product_time("bf16") == bf16, "asked once"
    assert device.product_time("int8") is None
    assert torch.get_num_threads() == threads


def test_convolutions_that_differ_in_nothing_are_of_one_kind() -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)]
    found = facts(nn.Sequential(*layers), torch.randn(1, 4, 8, 8)).layers["convolution"]
    assert (found.calls, found.kinds) == (3, 2)


class Accumulates(nn.Module):
    """A count, one that is replaced, a moving average; and what only looks like them: a cache and a line of the last inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"count": 3.0, "replaced": 3.0, "mean": 0.5}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("total", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("cache", torch.randn(8, 4))
        self.register_buffer("line", torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.count += 1
        self.replaced = self.replaced + 1
        self.mean.lerp_(seen.mean(), 0.01)
        self.total += 1
        self.cache[2:5] = seen + self.total[0] * self.cache[0]
        self.line.copy_(torch.cat([self.line[3:], seen * self.total[0]]))
        return x * self.mean + self.cache.sum() + self.line.sum() + self.count + self.replaced


def test_what_the_forward_adds_to_call_by_call() -> None:
    model = nn.Sequential(Accumulates())
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = facts(model, torch.randn(3, 4))
    assert {"0.cache", "0.line", "0.total"} < set(found.mutates)
    assert set(found.accumulates) == {"0.count", "0.replaced", "0.mean"}
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    trained = nn.Sequential(nn.Linear(4, 4), Accumulates())
    assert facts(trained, torch.randn(3, 4), task="train").accumulates == ()
