"""`redline gate --bisect` over commits, before a fake bench that reads the checkout it is in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from invoking import Redline, document, refused

from redline.model.record import Failure
from redline.model.spec import RunSpec
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape


def failure(spec: RunSpec) -> Failure | None:
    """A commit that does not build has a file that says so."""
    is_broken = (Path(spec.launch.folder or ".") / "broken").exists()
    return Failure(stage="build", kind="user", message="no such name") if is_broken else None


def step_s(spec: RunSpec) -> float:
    cost = Path(spec.launch.folder or ".") / "cost"
    return 0.01 * float(cost.read_text())


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "give either --baseline or --bisect GOOD..BAD"),
        ("--bisect main..main --baseline main", "give either"),
        ("--bisect main..", "needs both ends"),
        ("--bisect fp16", "needs both ends"),
        ("--bisect main..main", "nothing between"),
        ("--bisect main..main~3", "is not an ancestor"),
        ("--bisect main~3..main --benchmark x", "no benchmark 'x'"),
        ("--bisect main~3..main --budget nan", "budget must be above 0"),
    ],
)
def test_a_mistake_is_one_line(redline: Redline, project: list[str], words: str, says: str) -> None:
    refused(redline(f"gate bench.toml {words}"), says)


def test_one_benchmark_of_several_is_chosen(redline: Redline, project: list[str]) -> None:
    with Path("bench.toml").open("a") as file:
        file.write('[[run]]\nname = "other"\nmodel = "n"\n')
    refused(redline(f"gate bench.toml --bisect {project[0]}..main"), "the file has 2 benchmarks: choose one")
    result = redline(f"gate bench.toml --bisect {project[0]}..main --benchmark other --json")
    assert document(result)["about"]["culprit"] == project[4]


def test_of_a_slowdown_in_two_parts_the_first_is_found(redline: Redline, project: list[str]) -> None:
    """Twice as slow from the second commit on and six times from the fifth."""
    costs = [1, 2, 2, 2, 6, 6]
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    commits = []
    for number, cost in enumerate(costs):
        Path("cost").write_text(str(cost))
        Path("number").write_text(f"part {number}")
        subprocess.run([*git, "commit", "-qam", f"part {number}"], check=True)
        commits.append(subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip())
    found = document(redline(f"gate bench.toml --bisect {commits[0]}..main --json"))
    assert found["about"]["culprit"] == commits[1]
    assert {step["verdict"] for step in found["tables"]["steps"]} == {"slower"}
