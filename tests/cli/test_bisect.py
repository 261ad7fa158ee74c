"""`redline gate --bisect` over commits, recipes and environments, before a fake bench that reads the checkout it is in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from invoking import Redline, document, refused

from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

SPEEDS = {"baseline": 1.0, "fp16": 1.01, "fp16+channels-last": 1.2, "fp16+channels-last+compile": 1.2}


def failure(spec: RunSpec) -> Failure | None:
    """A commit that does not build has a file that says so."""
    is_broken = (Path(spec.launch.folder or ".") / "broken").exists()
    return Failure(stage="build", kind="user", message="no such name") if is_broken else None


def step_s(spec: RunSpec) -> float:
    cost = Path(spec.launch.folder or ".") / "cost"
    return 0.01 * float(cost.read_text()) * SPEEDS[str(spec.recipe)]


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(Landscape(step_s=step_s, failure=failure, offset_sigma=0.002))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Seven commits; from the fifth on everything takes 6 % longer. A parameter says at which it breaks and is mended."""
    broken = getattr(request, "param", {})
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "bench.toml").write_text('device = "cuda:0"\n[[run]]\nmodel = "m"\nbatch = 8\n')
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    for number in range(7):
        (folder / "cost").write_text(f"{1.06 if number >= 4 else 1.0}\n# {number}".split("#")[0])
        (folder / "number").write_text(str(number))
        for name in broken.get(number, ()):
            getattr(folder / "broken", name)()
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", f"change {number}"], check=True)
    listed = subprocess.run(["git", "rev-list", "--reverse", "HEAD"], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_the_commit_that_made_it_slower_is_found(redline: Redline, project: list[str]) -> None:
    result = redline("gate bench.toml --bisect", f"{project[0]}..main", "--json")
    found = document(result)
    assert (result.exit_code, found["about"]["culprit"], found["about"]["subject"]) == (0, project[4], "change 4")
    assert len(found["tables"]["steps"]) <= 4


def test_nothing_slower_is_said(redline: Redline, project: list[str]) -> None:
    result = redline("gate bench.toml --bisect", f"{project[0]}..{project[3]}")
    assert result.exit_code == 3
    assert "nothing to find" in result.stdout


@pytest.mark.parametrize("project", [{3: ["touch"], 4: ["unlink"]}], indirect=True)
def test_a_commit_that_does_not_build_is_passed_over(redline: Redline, project: list[str]) -> None:
    """The fourth, which is half way: the third is still fast, so that it is the fourth or the fifth."""
    result = redline("gate bench.toml --bisect", f"{project[0]}..main", "--json")
    found = document(result)
    assert (result.exit_code, found["about"]["culprit"], found["about"]["suspects"]) == (
        3,
        None,
        ", ".join(project[3:5]),
    )
    assert [step["verdict"] for step in found["tables"]["steps"] if step["commit"] == project[3]] == ["failed"]
    told = redline("gate bench.toml --bisect", f"{project[0]}..main").stdout
    assert "no such name" in told
    assert "one of these 2 made it slower" in told


@pytest.mark.parametrize("project", [{1: ["touch"], 2: ["unlink"]}], indirect=True)
def test_one_that_does_not_build_elsewhere_does_not_matter(redline: Redline, project: list[str]) -> None:
    found = document(redline("gate bench.toml --bisect", f"{project[0]}..{project[4]}", "--json"))
    assert found["about"]["culprit"] == project[4]


def test_so_is_the_recipe(redline: Redline, project: list[str]) -> None:
    words = [word for recipe in SPEEDS for word in ("--bisect", recipe)]
    assert document(redline("gate bench.toml", *words, "--json"))["about"]["culprit"] == "fp16+channels-last"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "give --baseline, or --bisect GOOD..BAD"),
        ("--bisect main..", "needs both ends"),
        ("--bisect main..main", "nothing between"),
        ("--bisect main..main~3", "is not an ancestor"),
        ("--bisect fp16", "nothing between"),
        ("--bisect /no/such/python --bisect ./x", "no interpreter at"),
        ("--bisect fp16 --bisect baseline --benchmark x", "no benchmark 'x'"),
        ("--bisect fp16 --bisect baseline --budget nan", "budget must be between 1"),
        ("--bisect fp16 --baseline main", "leave out --baseline"),
        ("--baseline main --benchmark x", "--benchmark goes with --bisect"),
    ],
)
def test_a_mistake_is_one_line(redline: Redline, project: list[str], words: str, says: str) -> None:
    refused(redline(f"gate bench.toml {words}"), says)


def test_of_a_slowdown_in_two_parts_the_smaller_is_told_too(redline: Redline, project: list[str]) -> None:
    """Twice as slow from the second commit on and six times from the fifth: the second is not 'same'."""
    costs = [1, 2, 2, 2, 6, 6]
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    commits = []
    for number, cost in enumerate(costs):
        Path("cost").write_text(str(cost))
        Path("number").write_text(f"part {number}")
        subprocess.run([*git, "commit", "-qam", f"part {number}"], check=True)
        commits.append(subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip())
    asked = ("gate", "bench.toml", "--bisect", f"{commits[0]}..main")
    found = document(redline(*asked, "--json"))
    assert (found["about"]["culprit"], [each["about"] for each in found["notes"]]) == (commits[4], [commits[3]])
    assert {step["verdict"] for step in found["tables"]["steps"]} == {"slower"}
    assert f"commit {commits[3]} before it was already +" in " ".join(redline(*asked).stdout.split())


def test_of_a_slowdown_in_one_part_nothing_is_told_of_another(redline: Redline, project: list[str]) -> None:
    found = document(redline("gate bench.toml --bisect", f"{project[0]}..main", "--json"))
    assert found["notes"] == []
