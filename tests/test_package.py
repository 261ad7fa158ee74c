"""What people install: the wheel in an environment that has nothing else, torch included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests" / "data" / "traces" / "h200_resnet50_fp16_b32.json.gz"
MOST_MIB = 240
"""More than an installation without torch takes, and far less than one with it (several GiB)."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("bare")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("torch_redline-*.whl")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), str(wheel)], check=True)
    return folder / "env"


def ask(bare: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([bare / "bin" / words[0], *words[1:]], capture_output=True, text=True, cwd=cwd, env=env)


@pytest.mark.long
def test_the_desk_works_without_torch(bare: Path, tmp_path: Path) -> None:
    assert not (bare / "lib" / "python" / "torch").exists()
    assert ask(bare, "python", "-c", "import torch", cwd=tmp_path).returncode == 1
    profiled = ask(bare, "torch-redline", "profile", str(TRACE), "--json", cwd=tmp_path)
    assert profiled.returncode == 0, profiled.stderr
    assert '"schema"' in profiled.stdout
    assert ask(bare, "redline", "history", cwd=tmp_path).returncode == 0
    reported = ask(bare, "redline", "report", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "redline-report" / "dashboard.html").stat().st_size > 0
    assert "pip install 'torch-redline[torch]'" in ask(bare, "redline", "doctor", "--json", cwd=tmp_path).stdout


@pytest.mark.long
@pytest.mark.parametrize("words", [("run", "simple_cnn"), ("micro", "--network", "resnet18")])
def test_a_verb_that_needs_torch_says_what_to_install(bare: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = ask(bare, "redline", *words, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith("needs the package torch: pip install 'torch-redline[torch]'")


@pytest.mark.long
def test_an_installation_without_torch_is_small(bare: Path) -> None:
    files = (path for path in bare.rglob("*") if path.is_file() and not path.is_symlink())
    assert sum(path.stat().st_size for path in files) < MOST_MIB * 2**20
