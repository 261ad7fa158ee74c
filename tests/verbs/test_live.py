"""Live models as files: the same model has the same name in every process, and no file outlives its use."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from redline.model.errors import UsageError
from redline.verbs.live import digest, held_artifact

PROGRAM = textwrap.dedent("""
    import functools, json, sys
    import torch
    from torch import nn

    SCALE = 2.0

    class Block(nn.Module):
        kinds = frozenset({"a", "b", "c", "d"})

        def __init__(self, width):
            super().__init__()
            self.layer = nn.Linear(width, width)
            self.names = {"x", "y", "z"}
            self.register_forward_hook(lambda module, args, output: output * 1.0)

        def forward(self, x):
            return self.layer(x) * SCALE if self.names & {"x", "q"} else x

    def loss(output, weight=0.5):
        return (output * weight).sum()

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(Block(4), Block(4), nn.BatchNorm1d(4)).to(torch.bfloat16)
        return model, torch.ones(2, 4, dtype=torch.bfloat16), functools.partial(loss, weight=0.25), None

    if __name__ == "__main__":
        exec(sys.argv[1])
""")


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., str]:
    """Runs Python in a new process, with another order of sets, after the model's own program."""
    path = tmp_path / "program.py"

    def run(code: str) -> str:
        path.write_text(PROGRAM)
        seed = str(int.from_bytes(os.urandom(3)))
        done = subprocess.run(
            [sys.executable, str(path), code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


DIGEST = "from redline.verbs.live import digest; print(digest(make()))"


def test_the_same_model_has_the_same_name_in_every_process(program: Callable[..., str]) -> None:
    assert len({program(DIGEST) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        ("manual_seed(0)", "manual_seed(1)"),
        ("* SCALE if", "+ SCALE if"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("weight=0.25", "weight=0.75"),
        ("(output * weight)", "(output + weight)"),
        ("output * 1.0", "output * 2.0"),
        ("torch.ones(2, 4", "torch.zeros(2, 4"),
        ("torch.ones(2, 4", "torch.ones(3, 4"),
        ("nn.BatchNorm1d(4)", "nn.BatchNorm1d(4, eps=0.1)"),
        ('"x", "y", "z"', '"x", "y"'),
        ('"c", "d"}', '"c", "e"}'),
    ],
)
def test_another_state_structure_or_code_is_another_model(change: tuple[str, str]) -> None:
    assert change[0] in PROGRAM
    assert digest_here(PROGRAM.replace(*change)) != digest_here(PROGRAM) == digest_here(PROGRAM)


def digest_here(program: str) -> str:
    """What the program makes, named in this process."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), namespace)
    return digest(namespace["make"]())


class Raising:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("do not look")


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def test_small_differences_are_seen() -> None:
    values: list[Any] = [
        1, True, 1.0, "1", b"1", None, [1], (1,), {1}, {1: 2}, {2: 1}, [1, 2], [2, 1], [[1], 2], [1, [2]],
        torch.tensor([1]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([2]), torch.tensor([]),
        torch.tensor([1.0], requires_grad=True), torch.float32, torch.float64, Slotted(1), Slotted(2),
        functools.partial(max, 1), functools.partial(max, 2), functools.partial(min, 1), max, min, json, os,
        nn.Linear(1, 1).eval().forward, nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU().eval(), range(3), range(4),
    ]  # fmt: skip
    names = [digest(value) for value in values]
    assert len(set(names)) == len(names)


def test_what_cannot_be_looked_at_is_like_nothing_else() -> None:
    assert digest(Raising()) != digest(Raising())


def artifacts() -> list[Path]:
    folder = Path(os.environ["XDG_DATA_HOME"]) / "redline" / "artifacts"
    return sorted(folder.iterdir()) if folder.exists() else []


class TestFiles:
    def test_a_file_lasts_as_long_as_it_is_held(self) -> None:
        live = (nn.Linear(2, 2), torch.ones(1, 2), None)
        with held_artifact(live) as first:
            assert first is not None
            with held_artifact(live) as second:
                assert second == first
            assert [str(path) for path in artifacts()] == [first]
            with held_artifact((nn.Linear(3, 3),)):
                assert len(artifacts()) == 2
            assert [str(path) for path in artifacts()] == [first]
        assert artifacts() == []

    def test_what_a_killed_process_left_is_removed_and_what_another_holds_is_not(self) -> None:
        program = (
            "import os, sys\nfrom redline.verbs.live import held_artifact\n"
            "with held_artifact([sys.argv[1]]) as path:\n"
            "    print(path, flush=True)\n    sys.stdin.read()\n    os.kill(os.getpid(), 9)\n"
        )
        others = [
            subprocess.Popen(
                [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for name in ("killed", "living")
        ]
        killed, living = [Path(other.stdout.readline().strip()) for other in others if other.stdout]
        others[0].communicate("")
        assert killed.exists()
        with held_artifact("something else") as path:
            assert artifacts() == sorted([living, Path(str(path))])
        others[1].communicate("")

    def test_one_that_breaks_off_leaves_no_half_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: Path, target: Path) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        refused = pytest.raises(UsageError, match=r"cannot write the model to .*artifacts: No space left on device")
        with refused, held_artifact([1]):
            pass
        assert artifacts() == []

    def test_what_cannot_be_pickled_has_no_file(self) -> None:
        import threading

        with held_artifact(threading.Lock()) as path:
            assert path is None
        assert artifacts() == []


@pytest.mark.long
def test_a_sweep_and_a_search_of_a_live_module_go_on_in_the_next_process(program: Callable[..., str]) -> None:
    """And leave no copy of it behind."""
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parent.parent)!r}); import brief; brief.shorten_efforts()\n"
        "import redline; result = redline.run(*make()[:2], recipes=['baseline', 'fold-bn'], device='cpu', threads=1,"
        " effort='quick', name='grid', resume={resume})\n"
        "found = redline.tune(*make()[:2], name='study', budget='1s', device='cpu', threads=1, resume={resume},"
        " switches=['fold-bn'], replicates=1).tune\n"
        "print(json.dumps([found.name, *sorted(row.record_id for row in result)]))"
    )
    first, again = (json.loads(program(code.format(resume=resume))) for resume in (False, True))
    assert len(first) == 1 + 2
    assert again == first
    assert first[0] == "study"
    assert artifacts() == []


def test_tensors_without_memory_of_their_own_are_told_apart_by_what_they_are_made_of() -> None:
    """Reading where they say their memory is would end the process."""

    def ragged(*values: float) -> torch.Tensor:
        rows = [torch.tensor([[value, 1.0]]) for value in values]
        return torch.nested.nested_tensor([*rows, torch.zeros(3, 2)], layout=torch.jagged)

    assert digest(ragged(1.0, 2.0)) == digest(ragged(1.0, 2.0))
    assert digest(ragged(1.0, 2.0)) != digest(ragged(1.0, 3.0))
    with FakeTensorMode():
        hollow = torch.ones(4)
    assert digest(hollow)
