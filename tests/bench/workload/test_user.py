"""The user's own model, from a file, from a package or alive: what a factory may return, and where its file may lie."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from redline.bench.workload.build import build_workload, check_model, settle_batch
from redline.bench.workload.sources.user import remember_module
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError
from redline.model.spec import WorkloadSpec

Write = Callable[..., Path]

NET = """
import functools
import numpy as np
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, scale=None):
        y = self.layer(torch.as_tensor(x))
        return y if scale is None else y * scale
x = torch.randn(2, 4)
labels = torch.tensor([2, 0, 1])
def of(batch):
    return Net(), torch.randn(batch, 4)
"""
MAKE = f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4)\n"


def from_file(file: Path, factory: str = "make", **options: Any) -> Workload:
    return settled(WorkloadSpec(model=f"{file}:{factory}", **options))


def settled(spec: WorkloadSpec) -> Workload:
    workload = build_workload(spec, 0)
    settle_batch(workload, spec)
    return workload


def run(workload: Workload) -> Any:
    return workload.model(*workload.args, **workload.kwargs)


@pytest.mark.parametrize(
    ("factory", "options", "shape"),
    [
        # inputs: a tensor, positions, keywords; without a batch they stay as they are
        ("def make(): return Net(), torch.randn(2, 4)", {}, (2, 3)),
        ("def make(): return Net(), (torch.randn(2, 4),)", {}, (2, 3)),
        ("def make(): return Net(), [torch.randn(2, 4), torch.ones(2, 1)]", {}, (2, 3)),
        ("def make(): return Net(), {'x': torch.randn(2, 4), 'scale': torch.ones(2, 1)}", {}, (2, 3)),
        # the batch, in every place where a parameter may stand, else axis 0 of the first input
        ("def make(batch): return of(batch)", {"batch": 5}, (5, 3)),
        ("def make(batch_size): return of(batch_size)", {"batch": 5}, (5, 3)),
        ("def make(width=4, batch=2): return of(batch)", {"batch": 5}, (5, 3)),
        ("def make(*, batch): return of(batch)", {"batch": 5}, (5, 3)),
        ("def make(batch=6): return of(batch)", {}, (6, 3)),
        ("def make(batch): return of(batch)", {"task": "train"}, (8, 3)),
        ("def make(n=3): return of(5)", {}, (5, 3)),
        ("def make(batch): return Net(), (np.ones((batch, 4), np.float32),)", {"batch": 5}, (5, 3)),
        ("def make(): return Net(), (x, torch.tensor([1.0, 2.0, 3.0]))", {"batch": 7}, (7, 3)),
    ],
)  # fmt: skip
def test_a_contract_that_works(user_file: Write, factory: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    workload = from_file(user_file(f"{NET}\n{factory}\n"), **options)
    assert run(workload).shape == shape
    assert workload.items_per_step == shape[0]
    assert (workload.source, workload.weights_are_random) == ("user", True)
    assert not any(module.training for module in workload.model.modules()) or options.get("task") == "train"


@pytest.mark.parametrize(
    ("factory", "options", "error", "says"),
    [
        ("def make(width): return Net(), torch.randn(2, width)", {"batch": 4}, SpecError,
         "must be given width, which Redline does not know"),
        ("def make(batch): return Net(), x", {"batch": 7}, SpecError, "takes batch but gives the same inputs for 7 and 14"),
        ("def make(): return {'model': Net(), 'input': x}", {}, BenchError, "gave a dict with 'input'; did you mean inputs"),
        ("def make(): return {'model': Net(), 'inputs': x, 'items': 0}", {}, BenchError, "gave items 0"),
        ("def make(): return {'model': Net(), 'inputs': x, 'batch_axis': 0, 'items': 10}", {"batch": 5}, SpecError,
         "items were given for 2, and it is no multiple"),
        ("def make(): return Net(), torch.randn(3, 4), nn.MSELoss(), torch.randn(2, 3)", {"task": "train", "batch": 5}, BenchError,
         r"the targets of shape \[2, 3\] do not hold the 3 items along axis 0"),
        ("make = Net", {}, BenchError, r"gave a module without inputs: give \(module, inputs\)"),
        ("make = Net()", {}, SpecError, r"make in .* is a model, not a function that makes one: write `def build\(\)"),
        ("def make(): return (lambda x: x), x", {}, BenchError,
         r"gave function where a torch.nn.Module belongs \(to time the function itself: --task step\)"),
        ("def make(): return functools.partial(Net()), x", {}, BenchError, "gave partial where a torch.nn.Module belongs"),
        ("def make():\n    with torch.inference_mode(): return Net(), x", {}, BenchError,
         r"made its weights under torch\.inference_mode\(\)"),
        ("def make(): return Net(), x", {"image_size": 8}, SpecError, "brings its own inputs"),
        ("def make(): raise ValueError('no such\\nthing')", {}, BenchError, r"^factory make in .*\.py raised ValueError: no such$"),
        ("def make(): raise SystemExit(3)", {}, BenchError, "called sys.exit"),
        ("def make(): return 3", {}, BenchError, "gave int where a torch.nn.Module belongs"),
        ("def make(): return Net(), None, None, None, None", {}, BenchError, "gave 5 things"),
        ("def make(): return Net(), x, 3", {}, BenchError, "gave int where the loss belongs"),
        ("import not_there_at_all\ndef make(): ...", {}, BenchError,
         r"importing .* raised ModuleNotFoundError: No module named 'not_there_at_all'"),
    ],
)  # fmt: skip
def test_a_contract_that_is_broken_is_told_in_one_line(
    user_file: Write, factory: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        from_file(user_file(f"{NET}\n{factory}\n"), **options)
    assert getattr(caught.value, "kind", "user") == "user"
    assert "\n" not in str(caught.value)


def test_the_cause_is_kept_memory_is_another_failure_and_a_change_of_the_batch_is_said(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef wrong(): raise ValueError('why')\ndef large(): raise MemoryError\n"
        "def make(): return Net(), x\ndef must(batch): return of(batch)\n"
    )
    with pytest.raises(BenchError) as caught:
        from_file(file, "wrong")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(MemoryError):
        from_file(file, "large")
    assert list(map(str, from_file(file, batch=7).notes)) == ["the inputs' 2 items became 7"]
    assert list(map(str, from_file(file, "must", task="train").notes)) == ["batch 8 by default for training"]


def test_a_factory_says_all_there_is_to_know_in_a_dict(user_file: Write) -> None:
    given = "{'model': Net(), 'inputs': x, 'batch_axis': 0, 'items': 10, 'item': 'token'}"
    file = user_file(f"{NET}\ndef make(): return {given}\n")
    workload = from_file(file)
    assert (workload.batch, workload.items_per_step, workload.item) == (2, 10, "token")
    assert from_file(file, batch=6).items_per_step == 30, "three times the inputs, three times the items"
    assert from_file(file, items=7).items_per_step == 7, "the spec's word counts"


def test_second_inputs_come_from_the_factory_then_from_noise(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef drawn(): return Net(), torch.randn(2, 4)\n"
        "def seeded(batch=2, seed=0):\n    torch.manual_seed(seed)\n    return of(batch)\n"
        "def fixed(): return Net(), torch.linspace(0, 1, 8).view(2, 4)\n"
        "def lengths(): return nn.Identity(), torch.randn(torch.randint(5, 500, ()).item(), 4)\n"
        "def tokens(): return nn.Embedding(9, 3), torch.arange(9)\n"
        "calls = []\n"
        "def once():\n    calls.append(1)\n    assert len(calls) < 2, 'only once'\n    return Net(), x\n"
    )
    expected = {
        "drawn": "factory",
        "seeded": "factory",
        "fixed": "noise",
        "lengths": "factory",  # as many items as there were before
        "tokens": None,
    }
    for name, how in expected.items():
        second = from_file(file, name).second_inputs(1)
        assert (second and second.how) == how, name
    once = from_file(file, "once")
    second = once.second_inputs(1)
    assert second.how == "noise"
    assert once.notes[-1].code == "one-input-set"
    assert "no second inputs from the factory: factory once in" in str(once.notes[-1])


def test_the_factorys_targets_follow_the_batch(user_file: Write) -> None:
    given = "torch.randn(3, 4), nn.CrossEntropyLoss(), labels"
    file = user_file(f"{NET}\ndef make(): return Net(), {given}\n")
    for batch, targets in ((None, [2, 0, 1]), (5, [2, 0, 1, 2, 0])):
        workload = from_file(file, task="train", batch=batch)
        output = run(workload)
        assert workload.model.training
        assert workload.loss(output) == nn.functional.cross_entropy(output, torch.tensor(targets))


def test_places_that_do_not_exist_are_found_without_running_the_file(user_file: Write, tmp_path: Path) -> None:
    file = user_file("raise RuntimeError('was run')\ndef make_model(): ...\nif True:\n    also = make_model\n")
    for sound in (f"{file}:make_model", f"{file}:also", f"{user_file('from math import *')}:sqrt"):
        check_model(WorkloadSpec(model=sound))
    for model, says in {
        f"{file}:make_modle": "has no make_modle; did you mean make_model?",
        f"{tmp_path}/absent.py:make": "no such file: .*absent.py",
        f"{user_file('def make(:')}:make": r"line 3: ",
        f"{file}": "does not name a factory",
        "no_such_package.module:make": "no module named 'no_such_package.module'",
        "tim:resnet50": r"no module named 'tim'; did you mean timm:\?",
        "json:dumpz": "json has no dumpz; did you mean dump",
    }.items():
        with pytest.raises(SpecError, match=says):
            check_model(WorkloadSpec(model=model))
    with pytest.raises(SpecError, match="the factory decides it"):
        check_model(WorkloadSpec(model=f"{file}:make_model", classes=3))


def test_a_file_sees_its_neighbours_and_its_classes_pickle(user_file: Write) -> None:
    user_file(NET, name="neighbour_of_redline.py")
    file = user_file(
        "from neighbour_of_redline import Net\nclass Mine(Net): ...\ndef make(): return Mine(), torch.randn(2, 4)\n"
    )
    workload = from_file(file)
    twin = pickle.loads(pickle.dumps(workload.model))
    assert type(twin) is type(workload.model)
    assert sys.modules[type(twin).__module__].__file__ == str(file)
    torch._dynamo.reset()
    compiled = torch.compile(workload.model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*workload.args), run(workload))


@pytest.mark.parametrize("with_init", [True, False])
def test_a_file_may_import_relatively_and_two_packages_may_share_a_name(tmp_path: Path, with_init: bool) -> None:
    for owner, width in (("first", 3), ("second", 6)):
        package = tmp_path / owner / f"shop_{with_init}" / "models"
        package.mkdir(parents=True)
        if with_init:
            (package / "__init__.py").touch()
            (package.parent / "__init__.py").touch()
        (package / "layers.py").write_text(f"from torch import nn\nwidth = {width}\n")
        (package.parent / "sizes.py").write_text("rows = 5\n")
        (package / "net.py").write_text(
            "import torch\nfrom .layers import nn, width\n"
            + ("from ..sizes import rows\n" if owner == "first" else "rows = 5\n")
            + "class Net(nn.Linear):\n    pass\ndef build(): return Net(4, width), torch.randn(rows, 4)\n"
        )
        workload = from_file(package / "net.py", "build")
        assert run(workload).shape == (5, width)
        assert type(pickle.loads(pickle.dumps(workload.model))) is type(workload.model)


def test_a_file_named_like_a_module_of_python_does_not_replace_it(user_file: Write) -> None:
    file = user_file(MAKE, name="json.py")
    import json

    assert type(from_file(file).model).__name__ == "Net"
    assert sys.modules["json"] is json


def test_a_package_is_found_from_where_one_stands(
    user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redline_test_package").mkdir()
    (tmp_path / "redline_test_package" / "__init__.py").touch()
    user_file(MAKE, name="redline_test_package/zoo.py")
    monkeypatch.chdir(tmp_path)
    assert run(build_workload(WorkloadSpec(model="redline_test_package.zoo:make"), 0)).shape == (2, 3)


def test_a_file_that_is_changed_is_read_anew_and_has_another_hash(
    user_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also twice within a second: Python takes its old byte-code for it, as its size and its second are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    hashes = set()
    for width in (4, 8):
        file = user_file(f"def make():\n    return nn.Linear({width}, 3), torch.randn(2, {width})\n", "changing.py")
        os.utime(file, (1e9, 1e9))
        assert from_file(file).model.in_features == width
        hashes.add(from_file(file).model_hash)
    file.write_text(file.read_text() + "\n# a word more\n")
    assert len({*hashes, from_file(file).model_hash}) == 3


def test_exported_programs_lazy_layers_and_other_formats_are_settled(user_file: Write) -> None:
    file = user_file(
        "def exported():\n    x = torch.ones(4, 3)\n    return torch.export.export(nn.Linear(3, 2), (x,)), x\n"
        "class Late(nn.Module):\n    def forward(self, x):\n"
        "        if not self._modules: self.layer = nn.Linear(4, 3)\n        return self.layer(x)\n"
        "def late(): return Late(), torch.randn(2, 4)\n"
        "def lazy(): return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), torch.randn(2, 4)\n"
        "def double(): return nn.Linear(4, 3).double(), torch.randn(2, 4).double()\n"
        "def inference():\n    with torch.inference_mode(): x = torch.ones(2, 4)\n    return nn.Linear(4, 3), x\n"
    )
    exported = from_file(file, "exported")
    assert not any(module.training for module in exported.model.modules())
    assert run(exported).shape == (4, 2)
    lazy = from_file(file, "lazy", task="train")
    assert lazy.info().parameters == 4 * 3 + 3 + 6
    assert lazy.model.training
    assert from_file(file, "late").info().parameters == 4 * 3 + 3
    assert "float64" in str(from_file(file, "double").notes[0])
    assert not from_file(file, "inference").args[0].is_inference()


def live(tmp_path: Path, *parts: Any, **options: Any) -> Workload:
    artifact = tmp_path / "model.pkl"
    artifact.write_bytes(cloudpickle.dumps(parts))
    return settled(WorkloadSpec(model="my model", artifact=str(artifact), **options))


def test_a_live_module_keeps_its_weights(tmp_path: Path) -> None:
    class Local(nn.Module):
        """Defined inside a function: only cloudpickle can carry it."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.layer(x))

    model = Local()
    workload = live(tmp_path, model, torch.randn(2, 4), None)
    assert (workload.source, workload.weights_are_random, workload.model.training) == ("live", False, False)
    assert torch.equal(workload.model.layer.weight, model.layer.weight)
    assert model.training, "the user's own stays as it was"
    train = live(tmp_path, model, {"x": torch.randn(2, 4)}, lambda output: output.sum(), task="train", batch=6)
    assert train.model.training
    assert train.kwargs["x"].shape == (6, 4)
    train.loss(run(train)).backward()


def test_the_hash_of_a_live_module_follows_its_code_not_its_weights(tmp_path: Path) -> None:
    def make(sign: int) -> nn.Module:
        class Local(nn.Linear):
            if sign > 0:

                def forward(self, input: Tensor) -> Tensor:
                    return super().forward(input)

            else:

                def forward(self, input: Tensor) -> Tensor:
                    return -super().forward(input)

        return Local(4, 3)

    hashes = [live(tmp_path, make(sign), torch.randn(2, 4), None).model_hash for sign in (1, 1, -1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_live_model_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        check_model(WorkloadSpec(model="mine", artifact=str(tmp_path / "absent.pkl")))
    broken = tmp_path / "broken.pkl"
    broken.write_bytes(b"nonsense")
    with pytest.raises(BenchError, match="live model mine cannot be opened in the worker: UnpicklingError") as caught:
        build_workload(WorkloadSpec(model="mine", artifact=str(broken)), 0)
    assert caught.value.kind == "user"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_torchscript_module_is_given_back_as_it_was() -> None:
    model = torch.jit.script(nn.Linear(4, 3))
    before = model.weight.detach().clone()
    give_back = remember_module(model)
    with torch.no_grad():
        model.weight.zero_()
    model.eval()
    give_back()
    assert torch.equal(model.weight, before)
    assert model.training
