"""The verbs, one file each, and the one table that `redline --help`, the commands and `redline.NAME` are made from.

A verb is the function of its own name in `redline/verbs/NAME.py`. A name of two words, such as `history show`, is the function
`show` in the file of the first word; it is a command and no public name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

GROUPS: dict[str, dict[str, str]] = {
    "Start here": {
        "demo": "Measure a well-known model with good defaults for this machine.",
        "doctor": "Check drivers, torch, devices, profilers; say how to fix each.",
        "models": "List the models that can be measured by name.",
    },
    "Measure": {
        "run": "Measure models under recipes; several values make a grid.",
        "batch": "Find the largest batch that fits, and the knee.",
        "train": "Train on data for epochs: time, accuracy, data wait, memory.",
        "load": "Measure latency under load: requests arrive at random.",
        "scale": "Measure 1, 2, 4 and more ranks: throughput against the ideal.",
        "study": "Measure an experiment: a question, and the grid that answers it.",
    },
    "Make it faster": {
        "tune": "Find the fastest recipe that keeps the numerics; write its code.",
        "profile": "Show where a step's time and memory go, and what is in the way.",
        "roofline": "Show the device's ceilings, and how far a model is from them.",
        "flops": "Count parameters, MACs, FLOPs and bytes per module.",
    },
    "Your own script": {
        "watch": "Watch your own script, unchanged: its steps, where its time goes.",
        "monitor": "Show every GPU and the CPU live: load, memory, power, clocks.",
    },
    "Keep and share": {
        "history": "Show benchmarks over time, and where each got faster or slower.",
        "history show": "List the latest records, or show everything about one.",
        "history tag": "Tag records, or note something about them; without arguments, list all tags and notes.",
        "history export": "Write the history as CSV or JSON.",
        "history import": "Add the records of a file to the history.",
        "history delete": "Delete records with their samples, tags and traces.",
        "history prune": "Delete old records.",
        "compare": "Is B faster or slower than A? A verdict with an interval.",
        "report": "Write a folder: dashboard, Markdown with pictures, CSV, JSON.",
        "serve": "Show the history as a web page, live and read-only.",
        "gate": "Fail when a benchmark got slower than a baseline. For CI.",
        "mcp": "Serve Redline to coding agents, over standard input and output.",
    },
    "Learn": {
        "workshop": "Walk through seven exercises on this machine.",
        "micro": "Run micro_benchmarking_pytorch.py with its own flags.",
    },
}
"""This has every command with the line that `redline --help` shows, by group. Commands of two words are listed below their first."""

NOT_PUBLIC = ("micro", "mcp")
"""Commands whose function has another public name, or none."""

PUBLIC: dict[str, str] = {
    "Workspace": "redline.verbs.workspace",
    "PlainRecipe": "redline.verbs.recipe",
    "recipe": "redline.verbs.recipe",
    "QuickProfile": "redline.verbs.quick",
    "run_quick_profile": "redline.verbs.quick",
    "Result": "redline.show.result",
    "TuneResult": "redline.verbs.tune",
    "kept_tune": "redline.verbs.tune",
    "ProfileResult": "redline.verbs.profile",
    "Watch": "redline.verbs.watch",
    "lightning_callback": "redline.verbs.watch",
    "trainer_callback": "redline.verbs.watch",
}
"""These public names are no verbs. Each stands beside the module that has it."""

COMMANDS: dict[str, str] = {name: line for group in GROUPS.values() for name, line in group.items()}
NAMES = tuple(name for name in COMMANDS if " " not in name)
"""These are the commands of one word."""


def verb_of(command: str) -> Any:
    """Returns the function of a command that has moved. It has a `_` after its name where that is Python's own word, as `import`, or where
    the public name is something else, as `redline.watch`."""
    first, _, second = command.partition(" ")
    module = import_module(f"redline.verbs.{first}")
    name = second or first
    return getattr(module, f"{name}_" if hasattr(module, f"{name}_") else name)


def public_names() -> list[str]:
    return sorted([*(name for name in NAMES if name not in NOT_PUBLIC), *PUBLIC])


def home_of(name: str) -> str | None:
    """Returns the module that a public name is in, or None where there is no such name."""
    if name in PUBLIC:
        return PUBLIC[name]
    if name not in NAMES or name in NOT_PUBLIC:
        return None
    return f"redline.verbs.{name}"


def public(name: str) -> Any:
    """Returns what `redline.NAME` is; raises AttributeError where there is nothing of that name."""
    home = home_of(name)
    if home is None:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    return getattr(import_module(home), name)
