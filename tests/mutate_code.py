"""Would the tests notice? Plants small faults in the rooms where a wrong number hides, one at a time, and runs their tests.

A fault is a comparison at its edge (`<` for `<=`) or turned round, `+` for `-`, `and` for `or`, a lost `not`, a threshold
moved, a line dropped. A fault that no test notices survives. Faults are drawn with a seed, so a score can be repeated.

    python tests/mutate_code.py                          # 40 faults in each room, about an hour on two cores
    python tests/mutate_code.py statistics decide -n 100   # some rooms, more of each
    python tests/mutate_code.py trust --show             # print every survivor as a diff
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec  # noqa: F401  loaded once, here, for all forks
import numpy  # noqa: F401
import pytest
import typer  # noqa: F401

ROOT = Path(__file__).parents[1]
ROOMS: dict[str, Any] = {
    "statistics": (["analyze/statistics.py"], ["analyze/test_statistics.py", "analyze/test_pairs.py"]),
    "trust": (["analyze/trust.py"], ["analyze/test_trust.py", "analyze/test_contended.py"]),
    "compare": (["analyze/compare.py"], ["analyze/test_compare.py", "show/test_compare.py"]),
    "decide": (["analyze/pairs.py", "search/decide.py"], ["analyze/test_pairs.py", "search/test_decide.py"], "TestFalseAlarms"),
    "bound": (["analyze/bound.py"], ["analyze/test_bound.py", "analyze/test_roofline.py"]),
    "group": (["search/group.py"], ["search/test_group.py", "search/test_decide.py"], "TestTheRatio", "TestFalseAlarms"),
    "grid": (["search/grid.py"], ["search/test_grid.py", "search/test_plan.py"]),
    "connection": (["launch/connection.py"], ["launch/test_connection.py"]),
    "processes": (["system/processes.py"], ["system/test_processes.py"]),
    "supervisor": (["bench/supervisor.py"], ["launch/test_doors.py"]),  # loads torch for every fault
    "store": (
        ["store/schema.py", "store/history.py", "store/ledgers.py", "store/database.py"],
        ["store/test_database.py", "store/test_history.py", "store/test_schema.py", "store/test_ledgers.py", "show/test_export.py", "store/test_writers.py"],
        "postgres",
        "store/test_postgres.py::TestAway",
        "store/test_postgres.py::TestHolding",
    ),
}  # fmt: skip
"""Files under src/redline, the tests that are to notice, names of tests to leave out, and files for what survived the others."""
EDGES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
TURNED = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
EQUIVALENT = {
    "size = 1 << (2 * values.size": "any padding that is long enough gives the same sums",
    "LOOK_BACK": "one record more of a hundred",
    "@lru_cache": "how many answers are kept changes none of them",
    "END_TIMEOUT_S": "how long is waited",
    "LOOK_EVERY_S": "the same",
    "self._connection.settimeout(max(": "the same",
    "self._deadline = 0.0": "set before it is read",
    "LOG_": "how much of a log is kept or quoted",
    "BUSY_SECONDS": "how long a hung disk is waited for",
    "connection.execute(f'PRAGMA busy_timeout": "the same",
    "while time.monotonic() <": "two clocks never read the same",
    "elif time.monotonic() >= until": "the same",
    "return bool(poll.poll(1000": "a thousandth of a look",
    "def __init__(self, backlog": "one worker calls",
    "psutil.wait_procs(strays, timeout": "how long is waited between two looks",
    "while not self._over.wait(LEASE_S": "how often a lease on a server is renewed",
    "_SERVER_OPTIONS": "how long a server is waited for whose machine is gone",
    "time.sleep(0.01)": "how long is waited between two looks",
    'return _ADVICE.get(getattr(error, "sqlite_errorcode", 0)': "an error without a code has no advice of its own either way",
    "return row if sane else msgspec.structs.replace(row, created_at": "what is not sane lies far outside",
    "connection.execute(select(func.pg_advisory_xact_lock": "two that ask for the first time within the same millisecond",
}
"""Lines that begin so are left as they are, and why."""
TIMEOUT_S = 900


def faults(text: str) -> Iterator[tuple[str, int, int]]:
    """Where faults can be planted, and of which kind: words, the number of the node, the number of the choice."""
    for position, node in enumerate(list(ast.walk(ast.parse(text)))):
        for choice in range(2):
            what = plant(copy.deepcopy(node), choice)
            if what:
                yield f"line {node.lineno}: {what}", position, choice  # type: ignore[attr-defined]


def planted(text: str, position: int, choice: int) -> str:
    tree = ast.parse(text)
    plant(list(ast.walk(tree))[position], choice)
    return ast.unparse(ast.fix_missing_locations(tree))


def plant(node: ast.AST, choice: int) -> str:
    """Change this node in its `choice`-th way; what was done, or nothing where there is no such way."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        table = (EDGES, TURNED)[choice]
        other = table.get(type(node.ops[0]))
        if other is not None:
            node.ops = [other()]
            return f"comparison becomes {other.__name__}"
    elif choice:
        return ""
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not _is_text(node):
        node.op = SWAPPED[type(node.op)]()
        return f"operator becomes {type(node.op).__name__}"
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"becomes {type(node.op).__name__}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.op = ast.UAdd()
        node.operand = ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[node.operand], keywords=[])
        return "not is lost"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = (node.value * 1.5 or 1.0) if isinstance(node.value, float) else node.value + 1
        return f"number becomes {node.value}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(value=None)
        return "call is dropped"
    return ""


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="default: all")
    parser.add_argument("-n", type=int, default=40, help="faults per room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each survivor as a diff")
    asked = parser.parse_args()
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(Path(folder) / "src", quiet=1)
        os.chdir(ROOT)
        for room in asked.rooms or ROOMS:
            scores[room] = _score(room, Path(folder) / "src", asked.n, random.Random(asked.seed), show=asked.show)
    for room, (noticed, planted) in scores.items():
        print(f"{room:12} {noticed:3} of {planted:3} noticed ({noticed / max(planted, 1):.0%})")
    return 0


def _score(room: str, source: Path, number: int, order: random.Random, *, show: bool) -> tuple[int, int]:
    files, tests, *words = ROOMS[room]
    left_out, later = [word for word in words if "/" not in word], [word for word in words if "/" in word]
    found = []
    for file in files:
        text = (source / "redline" / file).read_text()
        found += [
            (file, text, fault) for fault in faults(text) if not _line(text, fault[0]).startswith(tuple(EQUIVALENT))
        ]
    chosen = order.sample(found, min(number, len(found)))
    common = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [*common, *(f"tests/{test}" for test in tests)]
    command += ["-k", " and ".join(f"not {name}" for name in left_out)] if left_out else []
    last = [*common, *(f"tests/{test}" for test in later)]
    if not _passes(source, command, write_bytecode=True) or (later and not _passes(source, last)):
        raise SystemExit(f"{room}: its tests fail without any fault")
    noticed = 0
    for file, text, (where, *fault) in chosen:
        path = source / "redline" / file
        changed = planted(text, *fault)
        path.write_text(changed)
        try:
            survives = _passes(source, command) and (not later or _passes(source, last))
        finally:
            path.write_text(text)
        noticed += not survives
        if survives:
            print(f"survives: {file} {where}", flush=True)
            if show:
                before, after = ast.unparse(ast.parse(text)).splitlines(), changed.splitlines()
                print(
                    "\n".join(line for line in difflib.unified_diff(before, after, lineterm="", n=1))[:800], flush=True
                )
    return noticed, len(chosen)


def _line(text: str, where: str) -> str:
    return text.splitlines()[int(where.split(":")[0].split()[1]) - 1].strip()


def _passes(source: Path, command: list[str], *, write_bytecode: bool = False) -> bool:
    """Run the tests in a fork of this process, which has loaded what is no part of Redline already."""
    child = os.fork()
    if not child:
        os.setsid()
        signal.alarm(TIMEOUT_S)
        os.environ["PYTHONPATH"] = str(source)
        sys.path.insert(0, str(source))
        sys.dont_write_bytecode = not write_bytecode
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        status = 1
        with contextlib.suppress(BaseException):
            status = int(pytest.main(command))
        os._exit(status)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
