"""`redline mcp`: coding agents ask Redline through the Model Context Protocol, over standard input and output.

Each tool runs one command of Redline in a process of its own and returns its JSON document: the server never loads torch, a model that
crashes does not end it, and an agent gets the same figures as a person.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from redline import __version__
from redline.model.errors import Exit, MissingExtra
from redline.model.settings import setting
from redline.verbs.verb import verb

INSTRUCTIONS = """Redline measures PyTorch models on this machine. Every answer is a document: 'headline' has the answer in one
sentence, 'tables' the figures with 95 % intervals ('low', 'high') and the doubt about them, 'notes' what may change a decision, and
'next' the command to go on with. Do not report a figure whose 'doubt' says that it is too noisy, and do not claim a speed-up whose
interval includes 1. Start with 'profile' or 'run', prove a change with 'compare' or with two recipes in one 'run'."""

Words = Sequence[str]


@verb(examples=("redline mcp", "redline mcp --allow-run"))
def mcp(
    *,
    allow_run: Annotated[
        bool, setting("Also offer the tools that measure, and so run the code of models that an agent names.")
    ] = False,
) -> int:
    """Serve Redline to coding agents through the Model Context Protocol.

    The server speaks on standard input and output until its client leaves. By default its tools only read traces, files of records and the
    history.
    """
    server_of(allow_run=allow_run).run("stdio")
    return Exit.DONE


def server_of(*, allow_run: bool) -> Any:
    """Returns the server with its tools; those that measure are there only where `allow_run` says so."""
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise MissingExtra("redline mcp", "mcp", "mcp") from None

    server: Any = MCPServer("redline", version=__version__, instructions=INSTRUCTIONS)
    tools = (profile, compare, history, explain)
    for tool in (*tools, run, tune, profile_model) if allow_run else tools:
        server.add_tool(tool, structured_output=False)
    return server


# The tools. Their docstrings are what an agent reads.


async def profile(trace: str) -> str:
    """Say where the time of a recorded PyTorch or vendor trace goes, what is in the way, and what to change.

    `trace` is a path to a Chrome trace of torch.profiler (.json or .json.gz), a folder of such traces, or the output of nsys, ncu or rocprof.
    """
    return await _ask(["profile"], [trace])


async def compare(a: str, b: str) -> str:
    """Say whether B is faster or slower than A, with an interval and a verdict.

    Each is the id of a record of the history, a tag, or a .redline file.
    """
    return await _ask(["compare"], [a, b])


async def history(limit: int = 20) -> str:
    """List what was measured last, newest first, with ids that `explain` and `compare` take."""
    return await _ask(["history", "show"], [], {"--limit": limit})


async def explain(record: str) -> str:
    """Show everything that is known about one record: its figures, how far to trust each, what limits it, and its conditions."""
    return await _ask(["history", "show"], [record])


async def run(
    model: str, recipes: list[str] | None = None, batch: int | None = None, task: str = "infer", effort: str = "quick"
) -> str:
    """Measure a model under one or several recipes, interleaved, with the numerics of each compared with fp32.

    `model` is a name ('resnet50', 'timm:NAME', 'hf:NAME') or 'file.py:factory'; a recipe joins switches by '+', such as
    'bf16+channels-last+compile'; `task` is infer, train or generate; `effort` is quick, normal or strict.
    """
    words = [word for recipe in recipes or ["baseline"] for word in ("-r", recipe)]
    settings = {"--batch": batch, "--task": task, "--effort": effort}
    return await _ask(["run", *words], [model], settings)


async def tune(model: str, budget: str = "60s", batch: int | None = None, task: str = "infer") -> str:
    """Find the fastest recipe that keeps the numerics within a budget of time, with what each step brings and the code to paste."""
    return await _ask(["tune"], [model], {"--budget": budget, "--batch": batch, "--task": task})


async def profile_model(model: str, recipe: str = "baseline", batch: int | None = None, task: str = "infer") -> str:
    """Profile a few steps of a model on this machine: where their time goes, what is in the way, and what to change."""
    return await _ask(["profile", "-r", recipe], [model], {"--batch": batch, "--task": task})


async def _ask(words: Words, arguments: Words, settings: dict[str, Any] | None = None) -> str:
    """Returns the JSON document of a command, or what it says is wrong as `{"error": …}`.

    What the agent names follows `--`, so that none of it is taken for an option.
    """
    import anyio

    given = [word for option, value in (settings or {}).items() if value is not None for word in (option, str(value))]
    command = [sys.executable, "-m", "redline", *words, *given, "--json", "--", *arguments]
    done = await anyio.run_process(command, check=False)
    answer = done.stdout.decode("utf-8", "replace")
    if answer.strip():
        return answer
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return json.dumps({"error": said[-1] if said else f"ended with status {done.returncode}"})
