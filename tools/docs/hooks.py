"""What mkdocs asks while it builds the site: the start page, and the reference pages that are made from the code."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

import redline
import redline.verbs
from redline.cli.main import filled
from redline.model import metrics
from redline.model.metrics import Figure
from redline.show.result import SCHEMA
from redline.verbs import COMMANDS, GROUPS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def on_files(files: Files, config: Any) -> Files:
    pages = {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8"),
        "reference/commands.md": commands(),
        "reference/python.md": names(),
        "reference/figures.md": figure_page(),
        "reference/switches.md": switches(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Follow links as the repository has them: a folder is its README, and a file that is no page is named and not linked."""
    at = {"index.md": ROOT, "contributing.md": ROOT}.get(page.file.src_uri, (DOCS / page.file.src_uri).parent)

    def followed(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        file = (at / target).resolve()
        if not target or "://" in target or not file.exists():
            return link[0]
        if (file / "README.md").exists():
            file = file / "README.md"
        name = (
            "contributing.md" if file == ROOT / "CONTRIBUTING.md" else "index.md" if file == ROOT / "README.md" else ""
        )
        if name or (file.is_relative_to(DOCS) and file.suffix in (".md", ".png", ".svg", ".txt", ".html")):
            name = name or file.relative_to(DOCS).as_posix()
            return f"[{text}]({os.path.relpath(name, Path(page.file.src_uri).parent)}{anchor})"
        return f"{text} (`{file.relative_to(ROOT).as_posix()}`)"

    return re.sub(r"\[([^\]\[]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", followed, markdown)


# The reference


def commands() -> str:
    group: Any = typer.main.get_command(filled(*COMMANDS))
    lines = [
        "# Commands",
        "",
        "Every setting below is also a keyword of `redline.COMMAND(...)` and a key of a study's TOML file.",
    ]
    for title, listed in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in listed:
            lines += ["", f"### redline {name}", "", *help_of(group.commands[name])]
    return "\n".join(lines) + "\n"


def help_of(command: Any) -> Iterator[str]:
    yield from ("```text", inspect.cleandoc(command.help or "").replace("\b\n", ""), "```", "")
    rows = [each for each in command.params if not getattr(each, "hidden", False)]
    if rows:
        yield from ("| setting | what it does |", "|---|---|")
    for each in rows:
        spelt = (
            ", ".join([*each.opts, *each.secondary_opts])
            if each.param_type_name == "option"
            else (each.metavar or each.name.upper())
        )
        yield f"| `{spelt}` | {cell(getattr(each, 'help', '') or '')} |"


def names() -> str:
    lines = ["# From Python", "", "`import redline` loads nothing; each name is loaded when it is first used.", ""]
    for name in redline.__all__:
        if name == "__version__":
            continue
        thing = getattr(redline, name)
        try:
            signature = str(inspect.signature(thing))
        except (TypeError, ValueError):
            signature = ""
        lines += [
            f"## {name}",
            "",
            "```python",
            f"redline.{name}{signature}",
            "```",
            "",
            inspect.getdoc(thing) or "",
            "",
        ]
    return "\n".join(lines)


def figure_page() -> str:
    """The JSON document that all verbs share, and every figure by its name."""
    found = dict(figures_of(metrics))
    for package in ("verbs", "analyze"):
        parent = importlib.import_module(f"redline.{package}")
        for module in pkgutil.iter_modules(parent.__path__):
            found |= dict(figures_of(importlib.import_module(f"redline.{package}.{module.name}")))
    lines = [
        "# JSON and figures",
        "",
        f"`--json` prints one document on stdout, and nothing else there. All verbs share its shape, `schema: {SCHEMA}`:",
        "",
        "| field | what it holds |",
        "|---|---|",
        "| `verb` | the command |",
        "| `headline` | `text`, the answer in one sentence, and the `figures` in it |",
        "| `about` | the conditions that all rows share |",
        "| `tables` | by name, the rows; a fact is a plain value, a figure an object of `value`, `unit`, `low`, `high` (a 95 % interval) and `doubt` |",
        "| `notes` | what may change a decision: `code` for programs, `text` for people |",
        "| `blocks` | code to paste and other text |",
        "| `next` | the command to go on with |",
        "| `record_ids` | the records behind it, for `redline compare` and `redline history show` |",
        "",
        "CSV files and data frames have the same rows: a figure's interval and doubt stand in the columns `NAME_low`, `NAME_high` and `NAME_doubt`.",
        "Units are SI: seconds, bytes, joules, watts, FLOP; a share is a part of one, and `x` is a ratio.",
        "",
        "| figure | unit | better | what it is |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {each.unit or 'number'} | {each.better} | {cell(each.doc)} |"
        for name, each in sorted(found.items())
    ]
    return "\n".join(lines) + "\n"


def figures_of(module: Any) -> Iterator[tuple[str, Figure]]:
    for value in vars(module).values():
        several = value if isinstance(value, tuple | list) else value.values() if isinstance(value, dict) else [value]
        named = (each[0] if isinstance(each, tuple) and each else each for each in several)
        yield from ((each.name, each) for each in named if isinstance(each, Figure))


def switches() -> str:
    from redline.bench.recipe.base import SWITCHES

    lines = ["# Switches", "", "A recipe joins switches by `+`; `baseline` is strict fp32 without a compiler.", ""]
    lines += ["| switch | what it does | for |", "|---|---|---|"]
    for name in SWITCHES.names():
        switch = SWITCHES.get(name)
        spelt = [name, *(f"{name}:{argument}" for argument in switch.arguments)]
        lines.append(
            f"| {', '.join(f'`{each}`' for each in spelt)} | {cell(switch.summary)} | {', '.join(switch.tasks)} |"
        )
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
