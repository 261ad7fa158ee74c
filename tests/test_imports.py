"""The desk stays light: no torch anywhere, no plotting before a plot, and `--help` loads no library of ours but typer."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "torchvision", "matplotlib", "plotly")


@pytest.mark.parametrize(
    "module",
    [
        "redline.cli.main",
        "redline.api.run",
        "redline.api.profile",
        "redline.api.report",
        "redline.api.quick",
        "redline.api.race",
        "redline.api.tune",
        "redline.api.doctor",
        "redline.launch",
    ],
)
def test_the_desk_loads_nothing_heavy(module: str) -> None:
    # A process of its own: other tests have loaded torch into this one.
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_help_loads_no_command_s_body() -> None:
    code = "import sys, redline.cli.main; print([name for name in ('rich', 'msgspec', 'sqlalchemy', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_check_can_fail() -> None:
    code = f"import sys, plotly; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['plotly']"
