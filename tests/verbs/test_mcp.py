"""`redline mcp` as a coding agent meets it: a real client starts the server and asks its tools."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

TRACES = Path(__file__).parents[1] / "data" / "traces"
READING = {"profile", "compare", "history", "explain"}


def ask(tool: str | None = None, *, words: Sequence[str] = (), **arguments: Any) -> Any:
    """What a tool of a fresh server answers; the names of all tools where none is named."""

    async def talk() -> Any:
        command = ["-m", "redline", "mcp", *words]
        async with Client(StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))) as client:
            if tool is None:
                return {offered.name for offered in (await client.list_tools()).tools}
            answer: Any = (await client.call_tool(tool, arguments)).content[0]
            return json.loads(answer.text)

    return anyio.run(talk)


def test_only_reading_tools_are_offered_unless_running_is_allowed() -> None:
    assert ask() == READING
    assert ask(words=["--allow-run"]) == READING | {"run", "tune", "profile_model"}


def test_a_trace_is_profiled() -> None:
    answer = ask("profile", trace=str(TRACES / "h200_resnet50_fp16_b32.json.gz"))
    assert answer["schema"]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("explain", {"record": "--json"}), ("explain", {"record": "ffffffff"}), ("profile", {"trace": "nowhere.json"})],
    ids=["an option for a record", "an unknown record", "a missing file"],
)
def test_a_mistake_comes_back_in_one_line(tool: str, arguments: dict[str, str], tmp_path: Path) -> None:
    answer = ask(tool, **arguments)
    assert list(answer) == ["error"]
    assert answer["error"].startswith("redline: ")
