"""The tree of modules stays readable, however many there are."""

from __future__ import annotations

import io

from rich.console import Console

from redline.analyze.flops import FlopsSummary, ModuleRow
from redline.report.flops import MOST_LISTED, FlopsReport


def row(path: str, macs: int, type: str = "Linear") -> ModuleRow:
    return ModuleRow(
        path=path, type=type, depth=path.count(".") + bool(path), params=1, macs=macs, flops=2 * macs, backward_flops=0,
        other_flops=0, min_bytes=8, params_share=None, macs_share=None, backward_min_bytes=0,
    )  # fmt: skip


def printed(modules: list[ModuleRow], depth: int | None = None, width: int = 100) -> str:
    summary = FlopsSummary(
        model="many", task="infer", recipe="baseline", batch=1, item="item", input_shapes=(), params=1, macs=1, flops=2,
        backward_flops=None, min_bytes=8, backward_min_bytes=0, compulsory_bytes=8, other_flops={}, flops_by_format={},
        uncounted=(), for_these_inputs=None, notes=(), modules=tuple(modules),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    console.print(FlopsReport(summary, depth))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_of_thousands_of_modules_those_that_do_the_most_are_listed() -> None:
    modules = [row("", 10**9), *(row(f"layer{number}", number) for number in range(1000))]
    text = printed(modules)
    assert len(text.splitlines()) < MOST_LISTED + 40
    assert "layer999 (Linear)" in text
    assert "layer0 (Linear)" not in text
    assert "801 smaller modules are not shown: --depth 2 lists all" in text
    assert "layer0 (Linear)" in printed(modules, depth=2)


def test_few_modules_are_all_listed() -> None:
    assert "not shown" not in printed([row("", 3), *(row(f"layer{number}", 1) for number in range(MOST_LISTED - 1))])


def test_a_long_name_goes_on_further_to_the_right_than_its_children() -> None:
    name = "AVeryLongTypeOfModuleThatFitsIntoNoColumn"
    modules = [row("", 3), row("blocks", 3), row("blocks.0", 3, name), row("blocks.0.inner", 1)]
    lines = [line.rstrip() for line in printed(modules, depth=3, width=80).splitlines()]
    first = next(at for at, line in enumerate(lines) if line.startswith("    0 "))
    inner = next(at for at, line in enumerate(lines) if line.startswith("      inner"))
    rest = lines[first + 1 : inner]
    assert "".join(line.strip() for line in rest) == f"({name})"
    assert all(line.startswith(" " * 8) for line in rest)
