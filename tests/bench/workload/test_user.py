"""The user's own model, from a file, from a package or alive."""

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
from redline.bench.workload.sources.live import remember_module
from redline.bench.workload.step import make_optimizer
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError
from redline.model.spec import WorkloadSpec

Write = Callable[..., Path]

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, scale=None):
        y = self.layer(x)
        return y if scale is None else y * scale
"""


def from_file(file: Path, factory: str, **options: Any) -> Workload:
    return settled(WorkloadSpec(model=f"{file}:{factory}", **options))


def settled(spec: WorkloadSpec) -> Workload:
    workload = build_workload(spec, 0)
    settle_batch(workload, spec)
    return workload


def run(workload: Workload) -> Any:
    return workload.model(*workload.args, **workload.kwargs)


@pytest.mark.parametrize(
    ("returned", "shape"),
    [
        ("torch.randn(2, 4)", (2, 3)),
        ("(torch.randn(2, 4),)", (2, 3)),
        ("[torch.randn(2, 4), torch.ones(2, 1)]", (2, 3)),
        ("{'x': torch.randn(2, 4), 'scale': torch.ones(2, 1)}", (2, 3)),
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_inputs_may_be_a_tensor_positions_or_keywords(user_file: Write, returned: str, shape: tuple[int, ...]) -> None:
    workload = from_file(user_file(f"{NET}\ndef make():\n    return Net(), {returned}\n"), "make")
    assert run(workload).shape == shape
    assert workload.items_per_step == 2, "without a batch the inputs stay as given"
    assert workload.source == "user"
    assert workload.weights_are_random


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("batch", 5),
        ("batch_size", 5),
        ("batch, /", 5),
        ("width=4, batch=2", 5),
        ("*, batch", 5),
        ("batch=2", 5),
    ],
)
def test_a_factory_may_take_the_batch(user_file: Write, signature: str, expected: int) -> None:
    name = "batch_size" if "batch_size" in signature else "batch"
    file = user_file(f"{NET}\ndef make({signature}):\n    return Net(), torch.randn({name}, 4)\n")
    assert from_file(file, "make", batch=5).items_per_step == expected


def test_a_factory_that_must_be_told_gets_the_default_and_one_that_need_not_keeps_its_own(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef must(batch):\n    return Net(), torch.randn(batch, 4)\n"
        "def may(batch=6):\n    return Net(), torch.randn(batch, 4)\n"
    )
    told = from_file(file, "must", task="train")
    assert told.items_per_step == 8
    assert list(map(str, told.notes)) == ["batch 8 by default for training"]
    assert from_file(file, "may").items_per_step == 6


def test_without_a_batch_parameter_the_inputs_are_resized(user_file: Write) -> None:
    file = user_file(f"{NET}\ndef make():\n    return Net(), (torch.randn(2, 4), torch.tensor([1.0, 2.0, 3.0]))\n")
    workload = from_file(file, "make", batch=7)
    assert workload.args[0].shape == (7, 4)
    assert workload.args[1].tolist() == [1.0, 2.0, 3.0]
    assert [str(each) for each in workload.notes] == ["the inputs' 2 items became 7"]
    assert run(workload).shape == (7, 3)


def test_a_parameter_that_is_not_the_batch_is_not_taken_for_it(user_file: Write) -> None:
    file = user_file(f"{NET}\ndef make(width):\n    return Net(), torch.randn(2, width)\n")
    with pytest.raises(SpecError, match="must be given width, which Redline does not know"):
        from_file(file, "make", batch=4)


def test_a_factory_that_ignores_the_batch_it_takes_is_refused(user_file: Write) -> None:
    file = user_file(f"{NET}\ndef make(batch):\n    return Net(), torch.randn(2, 4)\n")
    with pytest.raises(SpecError, match=r"takes batch but gives the same inputs for 7 and 14"):
        from_file(file, "make", batch=7)


def test_a_factory_says_all_there_is_to_know_in_a_dict(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef make():\n"
        "    return {'model': Net(), 'inputs': torch.randn(2, 4), 'batch_axis': 0, 'items': 10, 'item': 'token'}\n"
        "def slip():\n    return {'model': Net(), 'input': torch.randn(2, 4)}\n"
        "def none():\n    return {'model': Net(), 'inputs': torch.randn(2, 4), 'items': 0}\n"
    )
    workload = from_file(file, "make")
    assert (workload.batch, workload.items_per_step, workload.item) == (2, 10, "token")
    assert from_file(file, "make", batch=6).items_per_step == 30, "three times the inputs, three times the items"
    with pytest.raises(SpecError, match="items were given for 2, and it is no multiple"):
        from_file(file, "make", batch=5)
    assert from_file(file, "make", items=7).items_per_step == 7, "the spec's word counts"
    with pytest.raises(BenchError, match="gave a dict with 'input'; did you mean inputs"):
        from_file(file, "slip")
    with pytest.raises(BenchError, match="gave items 0"):
        from_file(file, "none")


def test_the_seed_goes_to_a_factory_that_takes_it(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef make(batch, seed=0):\n    torch.manual_seed(seed)\n    return Net(), torch.randn(batch, 4)\n"
    )
    workload = from_file(file, "make", batch=2)
    second = workload.second_inputs(5)
    assert second is not None
    assert second.how == "factory"
    assert not torch.equal(second.inputs[0][0], workload.args[0])


def test_second_inputs_come_from_the_factory_then_from_noise(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef drawn():\n    return Net(), torch.randn(2, 4)\n"
        "def fixed():\n    return Net(), torch.linspace(0, 1, 8).view(2, 4)\n"
        "def lengths():\n    n = torch.randint(5, 500, ()).item()\n    return nn.Identity(), torch.randn(n, 4)\n"
        "calls = []\n"
        "def once():\n    calls.append(1)\n    assert len(calls) < 2, 'only once'\n    return Net(), torch.randn(2, 4)\n"
        "def tokens():\n    return nn.Embedding(9, 3), torch.arange(9)\n"
    )
    hows = {name: from_file(file, name).second_inputs(1) for name in ("drawn", "fixed", "lengths", "tokens")}
    assert {name: second and second.how for name, second in hows.items()} == {
        "drawn": "factory",
        "fixed": "noise",
        "lengths": "factory",  # as many items as there were before
        "tokens": None,
    }
    once = from_file(file, "once")
    second = once.second_inputs(1)
    assert second is not None
    assert second.how == "noise"
    assert once.notes[-1].code == "one-input-set"
    assert "no second inputs from the factory: factory once in" in str(once.notes[-1])


def test_the_factorys_loss_is_used(user_file: Write) -> None:
    file = user_file(
        f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4), lambda output: output.sum() * 0 + 42\n"
        "def two():\n    return Net(), torch.randn(2, 4), nn.CrossEntropyLoss()\n"
    )
    workload = from_file(file, "make", task="train")
    assert workload.model.training
    assert workload.loss(run(workload)).item() == 42
    two = from_file(file, "two", task="train")
    two.loss(run(two)).backward()


def test_the_factorys_targets_go_to_its_loss_and_follow_the_batch(user_file: Write) -> None:
    file = user_file(
        f"{NET}\nlabels = torch.tensor([2, 0, 1])\n"
        "def make():\n    return Net(), torch.randn(3, 4), nn.CrossEntropyLoss(), labels\n"
        "def classes():\n    return {'model': Net(), 'inputs': torch.randn(3, 4), 'targets': labels}\n"
        "def other():\n    return Net(), torch.randn(3, 4), nn.MSELoss(), torch.randn(2, 3)\n"
    )
    workload = from_file(file, "make", task="train")
    output = run(workload)
    assert workload.loss(output) == nn.functional.cross_entropy(output, torch.tensor([2, 0, 1]))
    resized = from_file(file, "make", task="train", batch=5)
    assert resized.loss.targets.tolist() == [2, 0, 1, 2, 0]
    alone = from_file(file, "classes", task="train")
    assert alone.loss(run(alone)).isfinite()
    assert alone.loss.name == "cross_entropy"
    with pytest.raises(BenchError, match=r"the targets of shape \[2, 3\] do not hold the 3 items along axis 0"):
        from_file(file, "other", task="train", batch=5)


def test_a_class_is_a_factory_too_when_images_are_asked_for(user_file: Write) -> None:
    file = user_file(
        "class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Conv2d(3, 2, 3), nn.Flatten())\n"
    )
    with pytest.raises(BenchError, match=r"gave a module without inputs: give \(module, inputs\)"):
        from_file(file, "Net")
    workload = from_file(file, "Net", image_size=8, batch=3)
    assert run(workload).shape == (3, 2 * 6 * 6)


FUNCTIONS = """
net = nn.Linear(3, 2)
class Holder:
    def __init__(self):
        self.net = nn.Linear(3, 2)
    def __call__(self, x):
        return self.net(x)
def by_closure(batch):
    own = nn.Linear(3, 2)
    return (lambda x: own(x)), torch.ones(batch, 3)
def by_global(batch):
    return (lambda x: net(x)), torch.ones(batch, 3)
def by_partial(batch):
    return functools.partial(lambda layer, x: layer(x), nn.Linear(3, 2)), torch.ones(batch, 3)
def by_object(batch):
    return Holder(), torch.ones(batch, 3)
def by_method(batch):
    return Holder().net.forward, torch.ones(batch, 3)
def by_export(batch):
    return torch.export.export(nn.Linear(3, 2), (torch.ones(batch, 3),)), torch.ones(batch, 3)
"""


@pytest.mark.parametrize("name", ["by_closure", "by_global", "by_partial", "by_object", "by_method", "by_export"])
def test_a_function_in_the_place_of_a_module_keeps_its_modules_in_sight(user_file: Write, name: str) -> None:
    workload = from_file(user_file(f"import functools\n{FUNCTIONS}"), name, batch=4)
    assert sum(weight.numel() for weight in workload.model.parameters()) == 8
    assert not any(module.training for module in workload.model.modules())
    assert run(workload).shape == (4, 2)


def test_weights_made_under_inference_mode_are_refused_and_inputs_are_not(user_file: Write) -> None:
    file = user_file(
        "def make(batch):\n    with torch.inference_mode():\n        return nn.Linear(3, 3), torch.ones(batch, 3)\n"
        "def inputs(batch):\n    with torch.inference_mode():\n        x = torch.ones(batch, 3)\n    return nn.Linear(3, 3), x\n"
    )
    with pytest.raises(BenchError, match=r"made its weights under torch\.inference_mode"):
        from_file(file, "make", batch=2)
    assert not from_file(file, "inputs", batch=2).args[0].is_inference()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no such\\nthing')", r"^factory make in .*\.py raised ValueError: no such$"),
        ("raise SystemExit(3)", "called sys.exit"),
        ("return 3", "gave int where a torch.nn.Module belongs"),
        ("return nn.Linear(1, 1), None, None, None, None", "gave 5 things"),
        ("return nn.Linear(1, 1), torch.ones(1, 1), 3", "gave int where the loss belongs"),
    ],
)
def test_a_factory_that_goes_wrong_is_told_in_one_line(user_file: Write, body: str, says: str) -> None:
    with pytest.raises(BenchError, match=says) as caught:
        from_file(user_file(f"def make():\n    {body}\n"), "make")
    assert caught.value.kind == "user"
    assert "\n" not in str(caught.value)


def test_the_cause_is_kept_and_memory_is_another_failure(user_file: Write) -> None:
    with pytest.raises(BenchError) as caught:
        from_file(user_file("def make():\n    raise ValueError('why')\n"), "make")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(MemoryError):
        from_file(user_file("def make():\n    raise MemoryError\n"), "make")


def test_a_file_that_cannot_be_imported_says_so(user_file: Write) -> None:
    with pytest.raises(
        BenchError, match=r"importing .* raised ModuleNotFoundError: No module named 'not_there_at_all'"
    ):
        from_file(user_file("import not_there_at_all\ndef make(): ...\n"), "make")


def test_places_that_do_not_exist_are_found_without_running_the_file(user_file: Write, tmp_path: Path) -> None:
    file = user_file("raise RuntimeError('was run')\ndef make_model(): ...\nif True:\n    also = make_model\n")
    check_model(WorkloadSpec(model=f"{file}:make_model"))
    check_model(WorkloadSpec(model=f"{file}:also"))
    starred = user_file("from math import *\n")
    check_model(WorkloadSpec(model=f"{starred}:sqrt"))
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


def test_image_size_is_refused_where_the_factory_brings_inputs(user_file: Write) -> None:
    file = user_file(f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4)\n")
    with pytest.raises(SpecError, match="brings its own inputs"):
        from_file(file, "make", image_size=8)


def test_a_file_sees_its_neighbours_and_its_classes_pickle(user_file: Write) -> None:
    user_file(NET, name="neighbour_of_redline.py")
    file = user_file(
        "from neighbour_of_redline import Net\nclass Mine(Net): ...\n"
        "def make():\n    return Mine(), torch.randn(2, 4)\n"
    )
    workload = from_file(file, "make")
    twin = pickle.loads(pickle.dumps(workload.model))
    assert type(twin) is type(workload.model)
    assert sys.modules[type(twin).__module__].__file__ == str(file)
    torch._dynamo.reset()
    compiled = torch.compile(workload.model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*workload.args), run(workload))


@pytest.mark.parametrize("with_init", [True, False])
def test_a_file_may_import_relatively(tmp_path: Path, with_init: bool) -> None:
    package = tmp_path / f"shop_{with_init}" / "models"
    package.mkdir(parents=True)
    if with_init:
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").touch()
    (package / "layers.py").write_text("from torch import nn\nwidth = 3\n")
    (package.parent / "sizes.py").write_text("rows = 5\n")
    (package / "net.py").write_text(
        "import torch\nfrom .layers import nn, width\nfrom ..sizes import rows\n"
        "class Net(nn.Linear):\n    pass\n"
        "def build():\n    return Net(4, width), torch.randn(rows, 4)\n"
    )
    workload = from_file(package / "net.py", "build")
    assert run(workload).shape == (5, 3)
    assert type(pickle.loads(pickle.dumps(workload.model))) is type(workload.model)


def test_of_two_packages_of_one_name_each_keeps_its_own(tmp_path: Path) -> None:
    for owner, width in (("first", 3), ("second", 6)):
        package = tmp_path / owner / "twins"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "sizes.py").write_text(f"width = {width}\n")
        (package / "net.py").write_text(
            "import torch\nfrom .sizes import width\n"
            "def build():\n    return torch.nn.Linear(4, width), torch.randn(2, 4)\n"
        )
    for owner, width in (("first", 3), ("second", 6)):
        assert run(from_file(tmp_path / owner / "twins" / "net.py", "build")).shape == (2, width)


def test_a_file_named_like_a_module_of_python_does_not_replace_it(user_file: Write) -> None:
    file = user_file(f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4)\n", name="json.py")
    import json

    assert type(from_file(file, "make").model).__name__ == "Net"
    assert sys.modules["json"] is json


def test_a_package_is_found_from_where_one_stands(
    user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redline_test_package").mkdir()
    (tmp_path / "redline_test_package" / "__init__.py").touch()
    user_file(f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4)\n", name="redline_test_package/zoo.py")
    monkeypatch.chdir(tmp_path)
    workload = build_workload(WorkloadSpec(model="redline_test_package.zoo:make"), 0)
    assert run(workload).shape == (2, 3)


def test_the_hash_follows_the_files_content(user_file: Write) -> None:
    text = f"{NET}\ndef make():\n    return Net(), torch.randn(2, 4)\n"
    one, moved, changed = user_file(text), user_file(text), user_file(text.replace("y * scale", "y / scale"))
    hashes = [from_file(file, "make").model_hash for file in (one, moved, changed)]
    # The class of a moved file lives in another module, which is part of its name; the content is what changes below.
    assert hashes[0] != hashes[2]
    before = hashes[0]
    one.write_text(one.read_text() + "\n# a word more\n")
    assert from_file(one, "make").model_hash != before, "an edited file is loaded again"


def test_a_file_that_is_changed_twice_within_a_second_is_read_anew(
    user_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes its old byte-code for it, as its size and its second are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for width in (4, 8):
        file = user_file(f"def make():\n    return nn.Linear({width}, 3), torch.randn(2, {width})\n", "changing.py")
        os.utime(file, (1e9, 1e9))
        assert from_file(file, "make").model.in_features == width


def test_lazy_layers_are_given_their_shape(user_file: Write) -> None:
    file = user_file(
        "def make():\n    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), torch.randn(2, 4)\n"
    )
    workload = from_file(file, "make", task="train")
    assert workload.info().parameters == 4 * 3 + 3 + 6
    assert workload.model.training


def test_other_number_formats_are_noted(user_file: Write) -> None:
    file = user_file("def make():\n    return nn.Linear(4, 3).double(), torch.randn(2, 4).double()\n")
    assert "float64" in str(from_file(file, "make").notes[0])


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
    assert workload.source == "live"
    assert not workload.weights_are_random
    assert torch.equal(workload.model.layer.weight, model.layer.weight)
    assert not workload.model.training
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

    inputs = torch.randn(2, 4)
    same = {live(tmp_path, make(1), inputs, None).model_hash for _ in range(2)}
    assert len(same) == 1
    assert live(tmp_path, make(-1), inputs, None).model_hash not in same


def test_a_live_model_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        check_model(WorkloadSpec(model="mine", artifact=str(tmp_path / "absent.pkl")))
    broken = tmp_path / "broken.pkl"
    broken.write_bytes(b"nonsense")
    with pytest.raises(BenchError, match="live model mine cannot be opened in the worker: UnpicklingError") as caught:
        build_workload(WorkloadSpec(model="mine", artifact=str(broken)), 0)
    assert caught.value.kind == "user"


def test_a_model_in_the_place_of_its_factory_is_told_what_to_write(user_file: Write) -> None:
    file = user_file(f"{NET}\nnet = Net()\n")
    with pytest.raises(SpecError, match=r"net in .* is a model, not a function that makes one: write `def build\(\)"):
        from_file(file, "net")


def test_a_function_goes_by_its_own_name(user_file: Write) -> None:
    file = user_file(
        "from functools import partial\n"
        "def doubled(x, by):\n    return x * by\n"
        "def make():\n    return partial(doubled, by=2), torch.ones(3, 4)\n"
    )
    workload = from_file(file, "make")
    assert workload.info().class_name == "doubled"
    with pytest.raises(BenchError, match=r"^doubled has no parameter with a gradient"):
        make_optimizer("sgd", workload.model)


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
