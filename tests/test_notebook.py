"""The quickstart notebook runs top to bottom, as it stands."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import redline

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"

pytestmark = pytest.mark.slow


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder for the kernel's sockets: the names of those may have some hundred characters."""
    with tempfile.TemporaryDirectory(prefix="redline-") as folder:
        yield folder


# The kernel's own libraries warn about themselves on some machines; what the notebook's code does runs in its process.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_the_notebook_runs_top_to_bottom(tmp_path: Path, sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # It runs as it stands; only each measurement is shorter than a reader's.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import brief; brief.shorten_efforts()"))
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=600,
        resources={"metadata": {"path": str(tmp_path)}},
        # Not over ports: they are looked for before the kernel starts, and another process may take one meanwhile.
        config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
    )
    client.execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert (tmp_path / "quickstart-report" / "dashboard.html").exists()
    assert (tmp_path / "quickstart-profile" / "report.md").exists()
    pages = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert sum("<table" in page for page in pages) >= 6, "every result shows its table"


@pytest.mark.parametrize("notebook", sorted(NOTEBOOK.parent.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_name_what_exists(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    compile(code, str(notebook), "exec")
    used = set(re.findall(r"\bredline\.(\w+)", code))
    assert used
    assert used <= {*redline.__all__, "__version__"}
