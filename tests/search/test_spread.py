"""Cells and searches measured on a Ray cluster come back once each, also when one machine is lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import redline
from redline.model.errors import BenchError, DoorError, SpecError, UsageError
from redline.model.record import RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec
from redline.search.spread import on_cluster, spread

MODELS = Path(__file__).parent.parent / "models" / "ranks.py"
QUICK = MeasureSpec(
    warmup_min_seconds=0.0,
    warmup_window_seconds=0.0,
    warmup_max_seconds=0.2,
    check_numerics=False,
    max_seconds=0.5,
    min_rounds=1,
)


def test_an_address_without_ray_is_a_mistake() -> None:
    with pytest.raises(SpecError, match="--launch ray"):
        redline.run("simple_cnn", address="auto")


def test_a_sweep_settles_what_comes_back_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.search.observer import NoJournal
    from redline.search.run import measure_together

    def backwards(specs: Sequence[RunSpec], address: str | None) -> Iterator[tuple[int, RunRecord]]:
        with redline.Workspace(keep=False) as workspace:
            for number, spec in reversed(list(enumerate(specs))):
                yield number, measure_together([spec], workspace.door(spec.launch), NoJournal())[0]

    monkeypatch.setattr("redline.verbs.run.spread", backwards)
    result = redline.run(
        f"{MODELS}:sound", batch=[1, 2], device="cpu", ray=True, address="auto", effort="quick", no_check=True
    )
    assert (result.about["cells"], result.about["done"]) == (2, 2)
    assert sorted(row["batch"] for row in result) == [1, 2]


class OneMachine:
    """Ray as far as we use it, in this process: calls are done at once, those that are to be lost are not."""

    class exceptions:
        class RayError(Exception): ...

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.lost = lost
        self.calls = 0
        self.needs: dict[str, Any] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 1.0, "GPU": 1.0}}]

    def remote(self, **needs: Any) -> Callable[[Callable[..., bytes]], Any]:
        self.needs = needs
        return lambda function: SimpleNamespace(remote=lambda *given: self._call(function, given))

    def _call(self, function: Callable[..., bytes], given: tuple[Any, ...]) -> int:
        self.done = {**getattr(self, "done", {}), self.calls: lambda: function(*given)}
        self.calls += 1
        return self.calls - 1

    def wait(self, waiting: Sequence[int], num_returns: int) -> tuple[list[int], list[int]]:
        return [waiting[-1]], list(waiting[:-1])

    def get(self, number: int) -> bytes:
        if number in self.lost:
            raise self.exceptions.RayError("the node died\nat some length")
        found: bytes = self.done[number]()
        return found


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> OneMachine:
    ray = OneMachine()
    monkeypatch.setattr("redline.search.spread.cluster", lambda address: nullcontext(ray))
    return ray


def refuse(payload: bytes) -> bytes:
    raise UsageError("no such model there")


def break_down(payload: bytes) -> bytes:
    raise BenchError("crash", "the worker died")


def echo(payload: bytes) -> bytes:
    return payload + payload


def test_answers_come_with_their_numbers_and_what_is_lost_is_told(one_machine: OneMachine) -> None:
    one_machine.lost = [1]
    found = dict(on_cluster(echo, [b"a", b"b", b"c"], ["cpu"] * 3, None))
    assert (found[0], found[2]) == (b"aa", b"cc")
    assert isinstance(found[1], DoorError)
    assert "the node died" in str(found[1])
    assert one_machine.needs == {"num_cpus": 2.0, "max_retries": 3}, "a machine to itself"


@pytest.mark.parametrize(("address", "kind"), [(None, DoorError), ("auto", UsageError)])
def test_a_cluster_that_is_not_there_is_one_line(
    address: str | None, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**_: Any) -> None:
        raise Exception("the node timed out\nduring startup")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=start))
    with pytest.raises(kind, match="the node timed out during startup; start"):
        list(on_cluster(echo, [b""], ["cpu"], address))


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1:1", "no Ray cluster at"), ("ray://127.0.0.1:1", "no Ray cluster"), ("a:b", "must be")],
)
def test_a_wrong_address_is_told_at_once(address: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **_: pytest.fail("Ray was asked")))
    with pytest.raises((UsageError, SpecError), match=says):
        list(on_cluster(echo, [b""], ["cpu"], address))


def test_mistakes_and_failures_there_are_told_here(one_machine: OneMachine) -> None:
    with pytest.raises(UsageError, match="no such model there"):
        list(on_cluster(refuse, [b""], ["auto"], None))
    ((_, failure),) = on_cluster(break_down, [b""], ["auto"], None)
    assert "the worker died" in str(failure)
    for device, said in (("cuda", "has no GPU"), ("cuda:1", "without a number")):
        with pytest.raises(UsageError, match=said):
            list(on_cluster(echo, [b""], [device], None))


SEARCH = {"device": "cpu", "threads": 1, "budget": 3, "switches": ["channels-last"], "replicates": 1}


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes on this machine, and its second node."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as monkeypatch:
        # Ray's workers are niced by 15: beside other tests they would take minutes to load torch.
        monkeypatch.setenv("RAY_worker_niceness", "0")
        try:
            found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            second = found.add_node(num_cpus=1)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            pytest.skip("Ray gives its nodes 30 s to start, and this machine is too busy for that")
        yield found, second
        found.shutdown()


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_machine_costs_no_row(machines: tuple[Any, Any]) -> None:
    cluster, second = machines
    specs = [
        RunSpec(
            workload=WorkloadSpec(model=f"{MODELS}:sound", batch=batch),
            measure=QUICK,
            launch=LaunchSpec(),
            device="cpu",
            threads=1,
        )
        for batch in (1, 2, 3)
    ]

    def lose_one() -> None:
        time.sleep(3.0)
        cluster.remove_node(second, allow_graceful=False)

    losing = threading.Thread(target=lose_one)
    losing.start()
    found = list(spread(specs, cluster.address))
    losing.join()
    assert sorted(number for number, _ in found) == [0, 1, 2]
    assert [record.failure for _, record in found] == [None] * 3
    assert all(record.spec == specs[number] and record.blocks for number, record in found)
