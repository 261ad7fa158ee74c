"""Counting leaves the model as it was, knows its modules and formats, and says when it needed real values."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from applying import Model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchvision.models import get_model, get_model_weights
from torchvision.ops import DeformConv2d

from redline.bench.count.count import Task, answer_count, count_work
from redline.bench.count.operators import tensor_bytes
from redline.bench.memory import Ledger
from redline.bench.workload.batch import proven_axes
from redline.model.errors import BenchError
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.work import ModuleWork, WorkCount


def count(model: nn.Module, *args: Any, **changes: Any) -> WorkCount:
    return count_work(Task(model=model, inputs=(args, {}), **changes))


def by_path(work: WorkCount) -> dict[str, ModuleWork]:
    return {module.path: module for module in work.modules}


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vit_b_32", "shufflenet_v2_x1_0", "regnet_y_400mf"])
def test_agrees_with_what_torchvision_publishes(name: str) -> None:
    meta = get_model_weights(name)["IMAGENET1K_V1"].meta
    work = count(get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224))
    assert work.macs / 1e9 == pytest.approx(meta["_ops"], rel=0.01)
    assert work.params == meta["num_params"]
    assert work.for_these_inputs is None
    assert not work.uncounted


def test_a_sparse_weight_of_a_model_built_without_memory_is_not_taken_for_empty(tmp_path: Path) -> None:
    file = tmp_path / "sparse_weight.py"
    file.write_text(
        "import torch\n"
        "class Sparse(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('weight', torch.diag(torch.arange(64) < 5).float().to_sparse_csr())\n"
        "    def forward(self, x):\n"
        "        return self.weight @ x\n"
        "def make(batch):\n"
        "    return Sparse(), torch.randn(64, batch)\n"
    )
    work = answer_count(RunSpec(workload=WorkloadSpec(model=f"{file}:make", batch=3), device="cpu")).work
    assert work.macs == 5 * 3
    assert "sparse" in str(work.for_these_inputs)


class Forgetful(nn.Module):
    """Keeps what it sees, as caches of positions and of keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.table: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.table = x * 2
        self.seen.append(x)
        return self.norm(self.table)


class TestTheModelIsLeftAlone:
    def test_no_tensor_without_memory_stays_behind(self) -> None:
        model = Forgetful().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        count(model, torch.randn(8, 4), loss=torch.sum)
        assert model.table is None
        assert model.seen == []
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(isinstance(tensor, FakeTensor) for tensor in model.parameters())

    def test_gradients_and_hooks_are_as_before(self) -> None:
        model = nn.Linear(3, 3)
        kept = model.weight.grad = torch.ones(3, 3)
        count(model, torch.randn(2, 3), loss=torch.sum)
        assert model.weight.grad is kept
        assert torch.backends.mha.get_fastpath_enabled()
        model(torch.randn(2, 3))  # a hook left behind would fail: its mode is gone
        assert not nn.modules.module._global_forward_hooks

    def test_also_in_a_real_step(self) -> None:
        model = choosing()
        kept = model.small.weight.grad = torch.ones(4, 4)
        count(model, torch.ones(2, 4), loss=torch.sum)
        assert model.small.weight.grad is kept
        assert model.large.weight.grad is None

    def test_random_numbers_are_not_drawn(self) -> None:
        state = torch.get_rng_state()
        count(nn.Dropout(0.5).train(), torch.ones(2, 3))
        assert torch.equal(torch.get_rng_state(), state)


def choosing() -> Model:
    """Its way depends on data."""
    parts = {"small": nn.Linear(4, 4, bias=False), "large": nn.Linear(4, 400, bias=False)}
    return Model(lambda own, x: own.small(x) if x.sum() > 0 else own.large(x), **parts)


class TestDataDecides:
    def test_one_real_forward_labelled_so(self) -> None:
        positive, negative = count(choosing(), torch.ones(2, 4)), count(choosing(), -torch.ones(2, 4))
        assert (positive.flops, negative.flops) == (2 * 2 * 16, 2 * 2 * 1600)
        assert positive.for_these_inputs == "aten._local_scalar_dense.default needs the values of its inputs"

    def test_a_shape_that_depends_on_data_too(self) -> None:
        work = count(Model(lambda _, x: x[x > 0] @ x[x > 0]), torch.tensor([1.0, -1.0, 2.0]))
        assert work.flops == 2 * 2
        assert work.for_these_inputs is not None

    def test_a_model_that_is_wrong_raises_its_own_error(self) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            count(nn.Linear(3, 3), torch.randn(2, 5))


class TestStructures:
    def test_any_structure_goes_in_and_out(self) -> None:
        pair = namedtuple("pair", "left right")
        model = Model(lambda _, table, *, both: {"out": [table["a"][0] @ both.left, (both.right,)], "name": "odd"})
        inputs = {"a": [torch.randn(2, 3)], "word": "x"}
        work = count_work(Task(model=model, inputs=((inputs,), {"both": pair(torch.randn(3, 4), torch.randn(5))})))
        assert work.flops == 2 * 2 * 3 * 4

    def test_a_model_on_meta_or_without_memory(self) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, x = nn.Linear(10**6, 10**5), torch.randn(2, 10**6)  # 400 GB
        assert count(model, x, loss=torch.sum).total_flops == 2 * 2 * 2 * 10**11
        with torch.device("meta"):
            model, x = nn.Linear(10**6, 10**5).half(), torch.randn(2, 10**6).half()
        work = count(model, x, loss=torch.sum)
        assert work.total_flops == 2 * 2 * 2 * 10**11
        assert set(work.flops_by_format()) == {"fp16"}


class TestModules:
    def test_the_tree_adds_up_forward_and_backward(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 3)), nn.Flatten())
        work = count(model, torch.randn(2, 3, 12, 12), loss=torch.sum)
        rows = by_path(work)
        assert rows[""].flops == work.flops == rows["0"].flops + rows["1"].flops
        assert rows[""].backward_flops == work.backward_flops
        assert rows["0"].backward_flops == rows["0"].flops  # images want no gradient
        assert rows["1.1"].backward_flops == 2 * rows["1.1"].flops
        assert rows["1"].backward_flops == rows["1.1"].backward_flops
        assert rows["1.0"].other_flops == 2 * 2 * 8 * 10 * 10
        assert rows[""].params == work.params == rows["0"].params + rows["1.1"].params
        assert (rows["1"].type, rows["1.1"].calls) == ("Sequential", 1)

    def test_a_shared_module_goes_by_its_first_name_and_all_its_calls(self) -> None:
        one = nn.Linear(4, 4, bias=False)
        twice = Model(lambda own, x: own.other(own.one(x)), one=one, other=one)
        rows = by_path(count(twice, torch.randn(3, 4), loss=torch.sum))
        assert set(rows) == {"", "one"}
        assert (rows["one"].calls, rows["one"].flops) == (2, 2 * 2 * 3 * 16)
        assert rows["one"].backward_flops == 2 * 2 * 3 * 16 * 3 // 2


class TestFormats:
    def test_autocast_shows_operator_by_operator(self) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8, bias=False))
        work = count(model, torch.randn(4, 8), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        assert work.flops_by_format() == {"bf16": 2 * 4 * 64}
        assert {one.number_format for one in work.operators if one.kind in ("elementwise", "copy")} == {"fp32"}
        assert work.compulsory_bytes == 4 * 8 * 4 + 8 * 8 * 4 + 4 * 8 * 2  # weights lie there in fp32

    def test_tf32_is_for_products_only(self) -> None:
        work = count(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), tf32=frozenset({"matmul"}))
        assert {one.kind: one.number_format for one in work.operators} == {"matmul": "tf32", "elementwise": "fp32"}


class TestBytes:
    def test_stride_zero_counts_once_and_views_are_free(self) -> None:
        assert tensor_bytes(torch.ones(3, 1).expand(3, 100)) == 12
        work = count(nn.Flatten(), torch.randn(2, 3, 4))
        assert work.operator_bytes == 0

    def test_unfused_and_compulsory_are_two_counts(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.ReLU())
        work = count(model, torch.randn(8, 16))
        rows, weight = 8 * 16 * 4, 16 * 16 * 4
        assert work.compulsory_bytes == rows + weight + rows
        assert work.operator_bytes == (rows + weight + rows) + 2 * 2 * rows

    def test_of_a_tensor_that_is_written_in_places_only_those_must_move(self) -> None:
        def places(_: nn.Module, cache: Tensor, row: Tensor) -> Tensor:
            cache.index_copy_(0, torch.tensor([7]), row)
            cache.index_add_(0, torch.tensor([7]), row)
            cache[torch.tensor([7])] = row
            cache.scatter_(0, torch.full((1, 4), 7), row)
            return row

        work, row = count(Model(places), torch.zeros(10_000, 16), torch.ones(1, 16)), 16 * 4
        sizes = {one.name: one.bytes for one in work.operators}
        wanted = {"index_copy_": 8 + 2 * row, "index_add_": 8 + 3 * row, "index_put_": 8 + 2 * row}
        assert wanted.items() <= sizes.items()
        assert sizes["scatter_"] == 4 * 8 + row + 4 * 4

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_of_a_sparse_matrix_only_its_entries_count(self) -> None:
        edges, x = torch.diag(torch.arange(1000) < 3).float().to_sparse(), torch.randn(1000, 16)
        for matrix, index in ((edges, 2 * 3 * 8), (edges.coalesce().to_sparse_csr(), (1001 + 3) * 8)):
            work = count(Model(lambda _, edges, x: torch.sparse.mm(edges, x)), matrix, x)
            assert work.flops == 2 * 3 * 16
            assert work.compulsory_bytes == 3 * 4 + index + 2 * x.numel() * 4
            assert "sparse" in str(work.for_these_inputs)

    def test_training_reads_and_writes_weights_and_state(self) -> None:
        model, x = nn.Linear(16, 16, bias=False), torch.randn(8, 16)
        work = count(model, x, loss=torch.sum, optimizer="adam")
        assert work.compulsory_bytes == x.numel() * 4 + (2 + 2 * 2) * 16 * 16 * 4
        (update,) = [one for one in work.operators if one.phase == "optimizer"]
        assert (update.name, update.kind, update.bytes) == ("optimizer adam", "elementwise", 7 * 16 * 16 * 4)


class Cloud:
    """Moves itself to a device, and holds itself."""

    def __init__(self, points: Tensor) -> None:
        self.points, self.whole = points, self

    def to(self, device: object) -> Cloud:
        return self


def frozen_first() -> nn.Module:
    first = nn.Linear(16, 16, bias=False).requires_grad_(False)
    return nn.Sequential(first, nn.Linear(16, 4, bias=False))


TWICE = Model(lambda _, x, y: x.sum() + y.mean())
GIVEN = torch.ones(100), torch.ones(100, device="meta")


@pytest.mark.parametrize(
    ("model", "inputs", "changes", "elements"),
    [
        (Model(lambda own, x: x * own.mask, mask=torch.ones(100)), [torch.randn(1, 100)], {}, 3 * 100),  # an attribute
        (nn.Embedding(10_000, 16), [torch.tensor([1, 2, 3])], {}, 3 * 2 + 2 * 3 * 16),  # rows that are looked up
        (nn.EmbeddingBag(10_000, 16, mode="sum"), [torch.arange(30), torch.tensor([0, 10])], {}, 32 * 2 + 32 * 16),
        *((TWICE, [given, given], {}, 100 + 1) for given in GIVEN),  # a tensor given twice is read once
        (
            Model(
                lambda own, x: sum(x @ part.t() for part in own.weight.chunk(3)),
                weight=nn.Parameter(torch.randn(24, 8)),
            ),
            [torch.randn(2, 8)],
            {},
            24 * 8 + 2 * 8 + 2 * 8,  # parts of one weight add up to it
        ),
        (
            Model(lambda own, cloud: own.layer(cloud.points), layer=nn.Linear(8, 4, bias=False)),
            [Cloud(torch.randn(5, 8))],
            {},
            8 * 4 + 5 * 8 + 5 * 4,
        ),
        # Training reads frozen weights too.
        (frozen_first(), [torch.randn(8, 16)], {"loss": torch.sum, "optimizer": "sgd"}, 8 * 16 + 16 * 16 + 4 * 16 * 4),
    ],
)
def test_what_must_move_is_each_input_weight_and_output_once(
    model: nn.Module, inputs: list[Any], changes: dict[str, Any], elements: int
) -> None:
    assert count(model, *inputs, **changes).compulsory_bytes == 4 * elements


class Branches(nn.Module):
    """Operators of torch that call functions: without the compiler, whose import takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        higher = torch.ops.higher_order
        (chosen,) = higher.cond(x.sum() > 0, lambda y: (self.a(y),), lambda y: (self.b(self.b(y)),), (x,))
        _, looped = higher.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, self.b(y)), (torch.tensor(0), chosen), ()
        )
        return looped


def test_functions_that_an_operator_calls_are_counted_as_they_run() -> None:
    model, x = Branches().eval(), torch.ones(4, 32)
    work = count_work(Task(model=model, inputs=((x,), {})))
    assert work.uncounted == ()
    assert {module.path: module.flops for module in work.modules if module.path} == {"a": 8192, "b": 3 * 8192}
    assert proven_axes(model, ((torch.rand(4, 32),), {})) == {"0": 0}
    with torch.inference_mode(), Ledger(["forward"], 1, lambda: None) as ledger:
        model(x)
    assert ledger.use(None, None).peak_bytes >= 2 * x.nbytes  # the result of one layer and of the next
    with pytest.raises(BenchError, match="gradients in a compiled step only"):
        count(model, x, loss=torch.sum)


def quantized_layers() -> nn.Module:
    layers = torch.ao.nn.quantized
    return nn.Sequential(
        layers.Quantize(0.1, 0, torch.quint8),
        layers.Conv2d(4, 8, 3, groups=2),
        layers.DeQuantize(),
        nn.Flatten(),
        layers.dynamic.Linear(8 * 6 * 6, 10),
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_layers_are_counted_with_the_weights_they_packed() -> None:
    work = count(quantized_layers(), torch.randn(2, 4, 8, 8))
    convolution, linear = 2 * 8 * 36 * 2 * 9, 2 * 10 * 288
    assert (work.macs, work.uncounted) == (convolution + linear, ())
    assert work.params == (8 * 2 * 9 + 8) + (288 * 10 + 10)
    assert {one.number_format for one in work.operators if one.flops and "::" in one.name} == {"int8"}
    assert by_path(work)["4"].params == 2890
    assert work.compulsory_bytes >= 2880 + 144


def test_a_deformable_convolution_counts_as_much_as_a_plain_one() -> None:
    model = Model(lambda own, x: own.layer(x, x.new_zeros(len(x), 18, 12, 12)), layer=DeformConv2d(4, 8, 3, padding=1))
    work = count(model, torch.randn(2, 4, 12, 12), loss=torch.sum)
    plain = 2 * (2 * 8 * 144) * (4 * 9)
    assert work.uncounted == ()
    assert [one.flops for one in work.operators if "deform" in one.name] == [plain, 2 * plain]


class Keeps(nn.Module):
    """A first call that builds a table; a cache that grows with every call, where it is asked to."""

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.grows, self.table, self.cache = grows, None, None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(100, 4) @ self.linear.weight
        held = x if self.cache is None else torch.cat([self.cache, x])
        self.cache = held if self.grows else None
        return self.linear(held) + self.table[:1]


class TestCallsDiffer:
    def test_what_the_first_call_alone_does_is_no_part_of_a_step(self) -> None:
        work = count(Keeps(grows=False), torch.randn(2, 4))
        assert work.flops == 2 * 2 * 4 * 4
        assert work.notes == ()

    def test_where_every_call_differs_that_is_said(self) -> None:
        (told,) = count(Keeps(grows=True), torch.randn(2, 4)).notes
        assert told.code == "work-changes"

    def test_gradients_of_one_call_are_not_added_to_those_of_another(self) -> None:
        class Counts(nn.Linear):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x)

        def names(model: nn.Module) -> list[str]:
            return sorted(one.name for one in count(model, torch.randn(2, 4), loss=torch.sum).operators)

        assert names(Counts(4, 4)) == names(nn.Linear(4, 4))

    def test_what_only_a_first_call_can_differentiate_is_counted_there(self) -> None:
        model = Keeps(grows=False)  # its table has a graph that the first backward frees
        work = count(model, torch.randn(2, 4), loss=torch.sum)
        assert work.backward_flops > 0

    def test_an_object_that_grows_is_given_as_it_was_to_every_call(self) -> None:
        class Cache:
            def __init__(self) -> None:
                self.layers: list[Tensor] = []

        class Reads(nn.Linear):
            def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
                cache.layers.append(super().forward(x))
                return torch.cat(cache.layers) @ self.weight

        cache = Cache()
        counts = [count(Reads(4, 4, bias=False), torch.randn(2, 4), cache).flops for _ in range(2)]
        assert counts == [2 * (2 * 2 * 4 * 4)] * 2
        assert cache.layers == []
