"""Names that no library has are refused without torch; names that one has never are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from redline.model.errors import UnknownName
from redline.model.names import BUILTIN_MODELS, refuse_impossible_name
from redline.model.spec import WorkloadSpec


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("resnet55", "unknown model 'resnet55'; did you mean resnet50"),
        ("simple_cn", "did you mean simple_cnn"),
        ("torchvision:resnet55", "did you mean torchvision:resnet50"),
        ("timm:resnett50", "did you mean timm:resnet50"),
        ("hf:bertt", "did you mean hf:bert"),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_what_was_meant(model: str, told: str) -> None:
    with pytest.raises(UnknownName, match=told):
        refuse_impossible_name(WorkloadSpec(model=model))


def test_it_loads_no_library() -> None:
    code = (
        "import sys; from redline.model.names import refuse_impossible_name; from redline.model.spec import WorkloadSpec\n"
        "try: refuse_impossible_name(WorkloadSpec(model='timm:resnett50'))\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print({'torch', 'timm', 'torchvision', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["UnknownName", "set()"]


@pytest.mark.parametrize(
    "model",
    ["my.py:build", "package.module:build", "live:Net", "hf:owner/name", "user:a.py:b", "timm:resnet50.a1_in1k"],
)
def test_what_may_be_anything_is_left_to_the_bench(model: str) -> None:
    refuse_impossible_name(WorkloadSpec(model=model))


def test_a_folder_with_a_config_is_left_to_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    refuse_impossible_name(WorkloadSpec(model="hf:mine"))


def test_a_package_that_brings_models_may_bring_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.model.names.entry_points", lambda group: [group])
    refuse_impossible_name(WorkloadSpec(model="resnet55"))


def test_no_model_that_exists_is_refused() -> None:
    import timm
    from torchvision.models import list_models
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = [*BUILTIN_MODELS, *list_models()]
    names += [f"timm:{name}" for name in timm.list_models()]
    names += [f"hf:{name}" for name in CONFIG_MAPPING_NAMES]
    for name in names:
        refuse_impossible_name(WorkloadSpec(model=name))
