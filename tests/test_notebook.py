"""The quickstart notebook runs top to bottom, as it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"

pytestmark = pytest.mark.slow


# The kernel's own libraries warn about themselves on some machines; what the notebook's code does runs in its process.
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert (tmp_path / "quickstart-report" / "dashboard.html").exists()
    assert (tmp_path / "quickstart-profile" / "report.md").exists()
    assert any("text/html" in output.get("data", {}) for output in shown)


def test_the_notebook_is_kept_without_outputs() -> None:
    import json

    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
