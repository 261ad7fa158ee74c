"""Loads before a fake bench, set against queueing theory; and the search for the rate that keeps a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from redline.analyze.load import KEEPS_UP, LoadSummary, load_of, load_point, load_rows, points_of
from redline.analyze.rows import headline_of
from redline.analyze.trust import verdict
from redline.model.arrivals import LoadSpec, Served, VirtualClock, poisson_arrivals, run_arrivals
from redline.model.errors import SpecError
from redline.model.metrics import SUSTAINABLE_RATE, Row, Table
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec, WorkloadSpec
from redline.search.observer import NoJournal
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.load import LoadQuestion, load, parse_rates, run_rates
from redline.verbs.workspace import Workspace

WITHIN = 0.02


def spec_of(max_batch: int, max_wait_s: float = 0.0, slo_p99_s: float | None = None) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model="resnet18", batch=max_batch),
        device="cuda:0",
        load=LoadSpec(max_batch=max_batch, max_wait_s=max_wait_s, slo_p99_s=slo_p99_s),
    )


def served_by(
    step_s: object, rate: float, requests: int, *, max_batch: int = 1, max_wait_s: float = 0.0
) -> LoadSummary:
    door = FakeDoor(Landscape(step_s=step_s, noise_sigma=0.0))  # type: ignore[arg-type]
    question = LoadQuestion(rates=(rate,), seconds=requests / rate)
    return load_of(run_rates(spec_of(max_batch, max_wait_s), question, door, NoJournal()))


@pytest.mark.parametrize(("use", "requests"), [(0.3, 200_000), (0.6, 400_000)])
def test_one_at_a_time_waits_as_pollaczek_and_khinchine_say(use: float, requests: int) -> None:
    service_s = 0.01
    (point,) = served_by(service_s, use / service_s, requests).points
    waiting_s = use * service_s / (2 * (1 - use))
    assert point.queue_s == pytest.approx(waiting_s, rel=WITHIN)
    assert point.mean_s == pytest.approx(waiting_s + service_s, rel=WITHIN)
    assert point.compute_s == pytest.approx(service_s)
    assert point.busy_share == pytest.approx(use, rel=WITHIN)
    assert point.batching_s == pytest.approx(0.0, abs=1e-12)
    assert point.verdict == "kept"


def bulk_service(rate: float, step_s: list[float]) -> tuple[float, float]:
    """Mean wait and mean batch of a server that takes whoever is there, up to its most, and never waits for company.

    From the chain of those left behind at the end of each batch: exact up to the length at which it is cut.
    """
    most, size = len(step_s), 25 * len(step_s)
    chain = np.zeros((size, size))
    waiting, length, served = np.zeros(size), np.zeros(size), np.zeros(size)
    for left in range(size):
        batch = min(max(left, 1), most)
        mean = rate * step_s[batch - 1]
        stay = max(left - batch, 0)
        chances = np.exp(np.arange(size) * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in range(size)]))
        chain[left, stay:] = chances[: size - stay]
        chain[left, -1] += max(0.0, 1 - chain[left].sum())
        served[left] = batch
        length[left] = step_s[batch - 1] + (1 / rate if left == 0 else 0.0)
        waiting[left] = stay * step_s[batch - 1] + rate * step_s[batch - 1] ** 2 / 2
    values, vectors = np.linalg.eig(chain.T)
    share = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    share /= share.sum()
    return float(share @ waiting / (share @ length) / rate), float(share @ served)


@pytest.mark.parametrize("growth", [0.0, 0.15])
def test_batches_wait_as_the_chain_of_bulk_service_says(growth: float) -> None:
    steps = [0.01 * (1 + growth * batch) for batch in range(8)]
    rate = 0.7 * 8 / steps[-1]
    (point,) = served_by(lambda spec: steps[spec.workload.batch - 1], rate, 200_000, max_batch=8).points
    waiting_s, mean_batch = bulk_service(rate, steps)
    assert point.queue_s + point.batching_s == pytest.approx(waiting_s, rel=WITHIN)
    assert point.mean_batch == pytest.approx(mean_batch, rel=WITHIN)


def test_an_idle_server_waits_for_company_as_long_as_it_may() -> None:
    """With a device that takes no time, a request waits for the rest of the window its first one opened."""
    rate, wait_s = 100.0, 0.02
    (point,) = served_by(1e-9, rate, 200_000, max_batch=1000, max_wait_s=wait_s).points
    company = rate * wait_s  # arrivals in a window, each of which waits half of it on average
    assert point.mean_batch == pytest.approx(1 + company, rel=WITHIN)
    assert point.batching_s == pytest.approx((wait_s + company * wait_s / 2) / (1 + company), rel=WITHIN)
    assert point.queue_s == pytest.approx(0.0, abs=1e-6)


def test_latency_counts_from_the_intended_arrival_of_those_who_were_never_served_too() -> None:
    (point,) = served_by(0.1, 100.0, 1000).points
    assert point.verdict == "falls behind"
    assert point.unfinished > 800
    assert point.achieved_rate == pytest.approx(10.0, rel=0.05)
    assert point.p50_s > 5.0  # half of them waited half of the fifteen seconds and longer


def test_rates_at_which_nothing_comes_are_refused() -> None:
    with Workspace(door=FakeDoor(Landscape(step_s=0.01)), keep=False) as workspace:
        with pytest.raises(SpecError, match=r"rate 0.01 is too low to be measured in 12 s: give 0.417 or more"):
            load("resnet18", rate="0.01,10", seconds=2.0, workspace=workspace)
        assert load("resnet18", rate=0.01, seconds=100.0, workspace=workspace).exit_code == 0


def tail_of_one_server(use: float, steps: float) -> float:
    """The chance of waiting longer than so many service times in M/D/1, by its exponential tail."""
    low, high = 1e-9, 50.0
    while high - low > 1e-12:
        decay = (low + high) / 2
        low, high = (low, decay) if use * math.expm1(decay) > decay else (decay, high)
    return (1 - use) / (use * math.exp(low) - 1) * math.exp(-low * steps)


def test_the_sustainable_rate_is_closed_in_on() -> None:
    """One server of 10 ms whose p99 must stay within 50 ms: theory says how much load it can take."""
    truth = 100 * next(use / 1000 for use in range(100, 1000) if tail_of_one_server(use / 1000, 4.0) > 0.01)
    door = FakeDoor(Landscape(step_s=0.01, noise_sigma=0.0))
    question = LoadQuestion(rates=(10.0, 20.0, 40.0, 80.0, 160.0), seconds=500.0)
    record = run_rates(spec_of(1, slo_p99_s=0.05), question, door, NoJournal())
    found = load_of(record)
    assert found.sustainable_rate == pytest.approx(truth, rel=0.06)
    assert not found.is_open_ended
    kept = [point.rate for point in found.points if point.is_kept]
    assert kept == [point.rate for point in found.points][: len(kept)]
    assert found.points[len(kept)].rate / kept[-1] < 1.05


def test_the_sustained_rate_is_offered_again_and_lowered_where_it_no_longer_holds() -> None:
    """A server that slows down after the search for its limit: 100 requests a second at first, 74 in the end."""
    served: list[float] = []

    def step_s(spec: RunSpec) -> float:
        served.append(spec.workload.batch)
        return 0.01 if len(served) < 12 else 0.0135

    question = LoadQuestion(rates=(10.0, 20.0, 40.0, 80.0, 160.0), seconds=50.0)
    found = load_of(run_rates(spec_of(1), question, FakeDoor(Landscape(step_s=step_s, noise_sigma=0.0)), NoJournal()))
    assert len(served) > 12
    assert 65.0 < (found.sustainable_rate or 0.0) < 1 / 0.0135
    twice = [point for point in found.points if point.runs == 2]
    assert twice[0].rate == found.sustainable_rate
    assert not any(point.is_kept for point in twice[1:]), "what held once and not again does not count"


def run_of(rate: float, step_s: Callable[[float], float], seconds: float = 10.0) -> Served:
    """One run of a server whose steps take as long as the time says."""
    clock = VirtualClock()

    def run(size: int) -> int:
        clock.advance(step_s(clock.now()))
        return size

    served = run_arrivals(poisson_arrivals(rate, round(rate * seconds), 0), LoadSpec(max_batch=1), clock, run, 1e9)
    return msgspec.structs.replace(served, rate=rate)


def test_a_rate_offered_twice_must_hold_twice_and_shows_the_run_that_went_worst() -> None:
    well, late = run_of(100.0, lambda now: 0.001), run_of(100.0, lambda now: 0.008)
    for runs in ([well, late], [late, well]):
        (both,) = points_of(runs, 0.02)
        assert (both.verdict, both.runs, both.compute_s) == ("above the target", 2, pytest.approx(0.008))
    assert points_of([well, well], 0.02)[0].is_kept


def test_no_row_is_refuted_by_its_own_numbers() -> None:
    """Whatever was served, and however the machine changed from run to run."""
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        target_s = float(random.choice([0.02, 0.05, 0.5])) if random.random() < 0.8 else None
        rates = random.choice([20.0, 40.0, 80.0, 97.0, 113.0, 160.0], size=5)
        loads = tuple(run_of(float(rate), lambda now, step=step: step, 8.0)
                      for rate, step in zip(rates, random.uniform(0.002, 0.02, size=5), strict=True))  # fmt: skip
        found = load_of(RunRecord(id="1", spec=spec_of(1, slo_p99_s=target_s), loads=loads))
        kept = {row.value("rate") for row in load_rows(found) if row["keeps_target"]}
        for row in load_rows(found):
            tail = row.value("latency_p99") or row.value("largest")
            behind = bool(row.value("unfinished")) or row.value("achieved_rate") < KEEPS_UP * row.value("offered_rate")
            above = target_s is not None and tail > target_s
            told = "falls behind" if behind else "above the target" if above else {"kept", "sustained"}
            assert row["verdict"] == told or row["verdict"] in told
            seen.add(row["verdict"])
        assert found.sustainable_rate is None or found.sustainable_rate in kept
        beyond = any(rate > (found.sustainable_rate or 0.0) for rate in kept)
        assert ("pace-changed" in [note.code for note in found.notes]) == beyond
    assert seen == {"falls behind", "above the target", "kept", "sustained"}


def test_a_range_that_is_sustained_whole_says_so() -> None:
    found = served_by(0.001, 10.0, 1000)
    assert found.sustainable_rate == 10.0
    assert found.is_open_ended


def test_few_requests_have_no_p99_and_are_judged_by_the_slowest() -> None:
    served = Served(
        rate=1.0,
        arrivals_s=(0.0, 1.0, 2.0, 3.0),
        sizes=(1, 1, 1, 1),
        started_s=(0.0, 1.0, 2.0, 3.0),
        finished_s=(0.1, 1.1, 2.1, 3.5),
        ended_s=3.5,
    )
    assert load_point(served, 0.6).p99_s is None
    assert load_point(served, 0.6).is_kept
    assert not load_point(served, 0.4).is_kept


def test_a_broken_worker_leaves_a_failed_record_with_what_was_served() -> None:
    failure = Failure(stage="load", kind="crash", message="gone")
    door = FakeDoor(Landscape(step_s=0.01, failure=failure))
    record = run_rates(spec_of(1), LoadQuestion(rates=(10.0,), seconds=1.0), door, NoJournal())
    assert record.failure == failure
    assert record.stopped == "failed"
    assert load_of(record).sustainable_rate is None


def test_a_load_is_kept_in_the_history_and_told_as_json(tmp_path: Path) -> None:
    door = FakeDoor(Landscape(step_s=lambda spec: 0.001 * (1 + spec.workload.batch), noise_sigma=0.02))
    with Workspace(door=door, history=tmp_path / "history.sqlite") as workspace:
        result = load("resnet18", rate="100..400", max_batch=4, max_wait="2ms", slo_p99="50ms", workspace=workspace)
        stored = workspace.history.load(result.record_ids[0])
    assert verdict(stored).labels == ("valid",)  # though no step was timed by itself
    told = msgspec.json.decode(result.to_json())
    assert told["tables"]["recipes"][0]["sustainable_rate"] == {
        "value": 400.0,
        "unit": "req/s",
        "low": 400.0,
        "high": None,
    }
    rates = told["tables"]["rates"]
    assert [row["rate"]["value"] for row in rates] == [100.0, 200.0, 400.0]
    wanted = {"achieved_rate", "latency_p50", "latency_p95", "latency_p99", "mean_batch", "queue", "compute"}
    assert all(wanted <= row.keys() for row in rates)
    assert str(result.headline) == "resnet18 under baseline sustains ≥ 400 req/s with p99 within 50.0 ms."
    result.plot(tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 10_000


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    assert poisson_arrivals(10.0, 50, 3) == poisson_arrivals(10.0, 50, 3) != poisson_arrivals(10.0, 50, 4)
    gaps = np.diff(poisson_arrivals(10.0, 20_000, 0))
    assert gaps.mean() == pytest.approx(0.1, rel=WITHIN)
    assert gaps.std() == pytest.approx(0.1, rel=0.03)


def test_rates_as_a_person_writes_them() -> None:
    assert parse_rates("50..400") == (50.0, 100.0, 200.0, 400.0)
    assert parse_rates("50..300") == (50.0, 100.0, 200.0, 300.0)
    assert parse_rates("5,1.5") == (1.5, 5.0)
    assert parse_rates([10, 20]) == (10.0, 20.0)
    for bad in ("0", "9..3", "fast", "nan", ""):
        with pytest.raises(SpecError):
            parse_rates(bad)


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({"baseline": (100.0, "passed"), "fp16": (200.0, "passed")}, "resnet18 under fp16 sustains 200 req/s."),
        ({"baseline": (100.0, "passed"), "fp16": (200.0, "wrong")}, "resnet18 under baseline sustains 100 req/s."),
        ({"fp16": (200.0, "wrong")}, "resnet18 under fp16 sustains 200 req/s, but its outputs are wrong."),
    ],
)
def test_the_sentence_names_the_best_load_whose_outputs_are_right(
    rates: dict[str, tuple[float, str]], told: str
) -> None:
    rows = (
        Row(facts={"recipe": recipe, "model": "resnet18", "numerics": numerics}, metrics=(SUSTAINABLE_RATE(rate),))
        for recipe, (rate, numerics) in rates.items()
    )
    assert str(headline_of(Table(name="results", rows=tuple(rows)))) == told
