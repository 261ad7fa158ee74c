"""From rows of a watched process to rates, drift and advice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from redline.analyze.watch import BY_BACKWARD, BY_BATCH, Rates, Steps, drift_of, growth_of, main_logs, rates_of
from redline.analyze.watch_findings import Evidence, advice_of, sync_gain
from redline.bench.watch.spool import COLUMNS
from redline.model.watching import PHASES


class FakeLog:
    def __init__(self, rows: list[dict[str, float]], **process: Any) -> None:
        self.columns = COLUMNS
        self.rows = np.array([[row.get(name, 0.0) for name in COLUMNS] for row in rows]).reshape(-1, len(COLUMNS))
        self.process = process
        self.facts: dict[str, dict[str, Any]] = {}
        self.pulses: list[dict[str, Any]] = []


def row(number: int, **fields: float) -> dict[str, float]:
    plain = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.04, "loaded": 32.0}
    return {"step": number, "ended": 0.1 * (number + 1), **plain, **fields}


def test_the_columns_have_names_of_their_own() -> None:
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_rates_and_shares_of_a_plain_loop() -> None:
    rates = rates_of([FakeLog([row(number) for number in range(50)])])
    assert rates.steps == 50
    assert rates.steps_per_s == pytest.approx(10.0)
    assert rates.samples_per_s == pytest.approx(320.0)
    assert rates.shares == pytest.approx(
        {"data": 0.1, "copy": 0.0, "forward": 0.2, "backward": 0.3, "optimizer": 0.4, "other": 0.0}
    )
    assert sum(rates.shares.values()) == pytest.approx(1.0)


def test_workers_that_start_are_part_of_the_loop_and_compiling_is_not() -> None:
    """Both come with the first step; the wait for a first batch comes back in each epoch."""
    later = [row(number) for number in range(1, 50)]
    assert rates_of([FakeLog([row(0, data=2.01), *later])]).steps_per_s == pytest.approx(50 / 7.0)
    assert rates_of([FakeLog([row(0, forward=2.02), *later])]).steps_per_s == pytest.approx(10.0)


def test_batches_count_only_where_nothing_else_does() -> None:
    """Before the first step somebody may have gone through the loader for its statistics."""
    batches = [row(number, caller=BY_BATCH, other=0.1, before=0.1) for number in range(30)]
    alone = rates_of([FakeLog(batches)])
    assert alone.steps == 30
    assert (alone.shares["forward"], alone.shares["other"]) == (pytest.approx(0.6), 0.0)
    assert rates_of([FakeLog([*batches, *(row(number) for number in range(30, 35))])]).steps == 5


def test_batches_that_are_fetched_ahead_belong_to_the_first_step() -> None:
    """As accelerate and the Trainer fetch them; what an earlier pass over the loader read does not."""
    read = [row(number, caller=BY_BATCH) for number in range(5)]
    ahead = [row(5, caller=BY_BATCH, data=0.2), row(6, caller=BY_BATCH, data=0.3)]
    training = [row(number, loaded=96.0) for number in range(9)]
    rates = rates_of([FakeLog([*read, {"kind": 2.0, "step": 5.0}, *ahead, *training])])
    assert (rates.steps, rates.samples) == (9, 9 * 96 + 2 * 32)
    assert rates.first_step_s == pytest.approx(0.1 + 0.5 + 2 * 0.09)


def test_what_the_device_did_before_the_training_is_left_out() -> None:
    early = [row(0, caller=BY_BATCH), {"kind": 1.0, "step": 0, "forward": 100.0, "ended": 100.0}]
    late = [row(0), {"kind": 1.0, "step": 0, "data": 0.1, "forward": 0.9, "ended": 1.0}]
    assert rates_of([FakeLog([*early, *late])]).shares["forward"] == pytest.approx(0.9)


def test_a_batch_that_is_used_again_and_again_counts_in_each_step() -> None:
    """To overfit one batch, or to cycle through batches that were kept: only the first ones come from the loader."""
    once = FakeLog([row(n, loaded=0.0 if n else 16.0, fed=16.0, data=0.0, other=0.01, before=0.01) for n in range(100)])
    rates = rates_of([once])
    assert rates.samples == 1600
    assert rates.shares["data"] == pytest.approx(0.099, rel=1e-3)
    cycled = FakeLog([row(n, loaded=16.0 if n < 60 else 0.0, fed=16.0) for n in range(200)])
    assert rates_of([cycled]).samples == 3200
    chunks = FakeLog([row(n, loaded=0.0 if n % 8 else 16.0, fed=16.0) for n in range(80)])
    assert rates_of([chunks]).samples == 160  # truncated backpropagation: several steps per batch


def test_a_training_that_goes_on_with_a_new_optimizer() -> None:
    log = FakeLog([row(n, caller=float(n >= 30), models=1) for n in range(60)])
    assert rates_of([log]).steps == 60
    folds = FakeLog([row(n, caller=float(n // 20), models=1) for n in range(60)])
    assert rates_of([folds]).steps == 60


def test_a_rank_that_was_started_again_counts_once() -> None:
    lives = [FakeLog([row(n) for n in range(count)], rank=rank, world_size=2) for count in (10, 40) for rank in (1, 0)]
    assert main_logs(lives) == [lives[3], lives[2]]
    assert rates_of(lives).steps == 40


def test_ranks_that_take_the_same_steps_have_one_pace() -> None:
    """A rank that starts late, or whose first step is left out as compiling, is as fast as the others."""
    lead = FakeLog([row(n) for n in range(50)], rank=0, world_size=2)
    late = FakeLog([row(n, forward=0.02 if n else 3.0) for n in range(50)], rank=1, world_size=2)
    assert rates_of([lead, late]).samples_per_s == pytest.approx(640.0)
    fewer = FakeLog([row(n, forward=0.12) for n in range(25)], rank=1, world_size=2)  # not in step: at its own pace
    assert rates_of([lead, fewer]).samples_per_s == pytest.approx(320.0 + 160.0)


def test_two_optimizers_make_one_step() -> None:
    """A GAN: each iteration calls two, and only one of them fetches a batch."""
    log = FakeLog([row(n, caller=n % 2, loaded=0.0 if n % 2 else 16.0) for n in range(60)])
    rates = rates_of([log])
    assert rates.steps == 30
    assert rates.samples_per_s == pytest.approx(16 / 0.2)


def test_a_critic_that_steps_more_often_sets_the_pace() -> None:
    log = FakeLog([row(n, caller=1.0 if n % 6 == 5 else 0.0) for n in range(60)])
    assert rates_of([log]).steps == 50


def test_a_batch_that_optimizers_use_unequally_often_is_a_step() -> None:
    """A critic that takes two steps of each batch and then its generator one; with as many of each, each pair is a step."""
    critic = [row(n, caller=float(n % 3 == 2), loaded=0.0 if n % 3 else 32.0) for n in range(60)]
    assert rates_of([FakeLog(critic)]).steps == 20
    pairs = [row(n, caller=n % 2, loaded=0.0 if n % 6 else 32.0) for n in range(60)]
    assert rates_of([FakeLog(pairs)]).steps == 30


def test_optimizers_that_take_turns_take_a_step_each() -> None:
    """Each with a model and a batch of its own; a GAN's two pass through the same models."""
    alone = FakeLog([row(n, caller=n % 2, models=1 << (n % 2)) for n in range(40)])
    assert rates_of([alone]).steps == 40
    together = FakeLog([row(n, caller=n % 2, models=3 if n % 2 else 1) for n in range(40)])
    assert rates_of([together]).steps == 20
    without_loader = FakeLog([row(n, caller=n % 2, models=1 << (n % 2), loaded=0.0, fed=8.0) for n in range(40)])
    assert rates_of([without_loader]).steps == 40


def test_steps_without_an_optimizer_end_with_their_backward_pass() -> None:
    alone = [row(n, caller=BY_BACKWARD) for n in range(20)]
    assert rates_of([FakeLog(alone)]).steps == 20
    accumulating = [*alone[:3], *(row(n, caller=0.0) for n in range(3, 23))]
    rates = rates_of([FakeLog(accumulating)])
    assert (rates.steps, rates.samples) == (20, 23 * 32)  # the first ones were batches of the first step


def test_evaluation_without_a_loader_is_set_aside_where_it_is_rare() -> None:
    def rows(every: int) -> list[dict[str, float]]:
        aside = {"forward": 5.02, "aside_forward": 5.0}
        return [row(n, **(aside if n % every == 0 else {})) for n in range(40)]

    assert rates_of([FakeLog(rows(10))]).steps_per_s == pytest.approx(10.0)
    assert rates_of([FakeLog(rows(10))]).paused_s == pytest.approx(20.0)
    assert rates_of([FakeLog(rows(1))]).paused_s == 0.0  # before every step: an agent that plays


def test_without_a_loader_the_gap_before_the_model_is_waiting_for_data() -> None:
    fields = {"data": 0.0, "other": 0.05, "before": 0.04, "loaded": 0.0, "fed": 8.0}
    shares = rates_of([FakeLog([row(n, **fields) for n in range(20)])]).shares
    assert (shares["data"], shares["other"]) == (pytest.approx(0.04 / 0.14), pytest.approx(0.01 / 0.14))
    with_loader = rates_of([FakeLog([row(n, other=0.05, before=0.04) for n in range(20)])]).shares
    assert with_loader["other"] == pytest.approx(0.05 / 0.15)


def test_without_loader_and_model_the_gap_is_the_forward_pass() -> None:
    """Bare weights, or a loss that is compiled with its model: making the batch is in there too, and nobody waits for a loader."""
    fields = {"data": 0.0, "other": 0.05, "before": 0.04, "loaded": 0.0, "fed": 0.0}
    shares = rates_of([FakeLog([row(n, **fields) for n in range(20)])]).shares
    assert (shares["data"], shares["forward"]) == (0.0, pytest.approx(0.06 / 0.14))


def test_evaluation_after_the_last_step_is_set_aside_as_it_is_before_others() -> None:
    steps = [row(n, aside_forward=1.0, forward=1.02) if n == 10 else row(n) for n in range(20)]
    tail = {"kind": 2.0, "step": 20.0, "forward": 1.0, "other": 0.5, "aside_forward": 1.0}
    assert rates_of([FakeLog([*steps, tail])]).steps_per_s == pytest.approx(20 / 2.5)
    playing = [
        row(n, aside_forward=0.01) for n in range(20)
    ]  # before each step: part of it, and of what comes after the last
    assert rates_of([FakeLog([*playing, tail])]).steps_per_s == pytest.approx(20 / 3.5)


def test_what_comes_after_the_last_step_is_counted() -> None:
    steps = [row(n) for n in range(20)]
    tail = {"kind": 2.0, "step": 20.0, "data": 1.0}
    assert rates_of([FakeLog([*steps, tail])]).steps_per_s == pytest.approx(20 / 3)
    early = {**tail, "step": 10.0}  # of an epoch that another one followed
    assert rates_of([FakeLog([*steps[:10], early, *steps[10:]])]).steps_per_s == pytest.approx(10.0)


def test_a_slow_end_of_the_last_step_is_an_outlier_like_any_other() -> None:
    steps = [row(n, other=1.0 if n in (10, 20) else 0.0) for n in range(30)]
    tail = {"kind": 2.0, "step": 30.0, "other": 1.0}
    rates = rates_of([FakeLog([*steps, tail])])
    usual = 30 * rates.median_step_s
    assert (rates.outliers, rates.outlier_share) == (3, pytest.approx(3 / (3 + usual)))
    assert rates_of([FakeLog([*steps, {**tail, "other": 0.01}])]).outliers == 2


def test_work_that_the_device_had_still_to_do_is_counted() -> None:
    steps = [row(n) for n in range(20)]  # the last ends at 2.0 by the host's clock
    on_device = {"kind": 1.0, "step": 19.0, "ended": 3.5, "paused": 0.5, "forward": 1.0}
    assert rates_of([FakeLog([*steps, on_device])]).steps_per_s == pytest.approx(20 / 4)


def test_ranks_share_their_steps_and_add_their_samples() -> None:
    logs = [FakeLog([row(n) for n in range(20)], rank=rank, world_size=2) for rank in (1, 0)]
    rates = rates_of(logs)
    assert (rates.steps, rates.samples) == (20, 2 * 20 * 32)
    assert rates.samples_per_s == pytest.approx(640.0)
    assert main_logs(logs)[0].process["rank"] == 0


def test_compiling_and_profiling_are_not_in_the_rate() -> None:
    first = row(0, forward=60.0)
    profiled = [row(n, forward=0.9, profiled=1.0) for n in (10, 11)]
    rates = rates_of([FakeLog([first, *(row(n) for n in range(1, 10)), *profiled, *(row(n) for n in range(12, 40))])])
    assert rates.steps == 40
    assert rates.steps_per_s == pytest.approx(10.0)
    assert rates.first_step_s == pytest.approx(60.08)


def test_a_loop_without_a_loader_counts_what_the_model_was_fed() -> None:
    rates = rates_of([FakeLog([row(n, loaded=0.0, fed=4.0) for n in range(20)])])
    assert rates.samples_per_s == pytest.approx(40.0)


def test_the_devices_clock_decides_where_there_is_one() -> None:
    on_device = [{"kind": 1.0, "step": n, "data": 0.5, "forward": 0.5} for n in range(3)]
    rates = rates_of([FakeLog([*(row(n) for n in range(20)), *on_device])])
    assert rates.device_clock
    assert rates.shares["data"] == pytest.approx(0.5)
    assert rates.steps == 20


def test_nothing_is_made_up_where_nothing_was_seen() -> None:
    for logs in ([], [FakeLog([])]):
        rates = rates_of(logs)
        assert (rates.steps, rates.steps_per_s, rates.samples_per_s, rates.shares) == (0, None, None, {})


def test_a_lasting_slowdown_is_told_with_when_it_began() -> None:
    random = np.random.default_rng(0)
    slow = [row(n, forward=(0.02 if n < 600 else 0.06) * random.lognormal(0, 0.1)) for n in range(1000)]
    drift = drift_of(Steps(FakeLog(slow)))
    assert drift is not None
    assert 580 <= drift.step <= 620
    assert drift.ratio == pytest.approx(1.4, rel=0.05)
    noisy = [row(n, forward=0.02 * random.lognormal(0, 0.4)) for n in range(1000)]
    assert drift_of(Steps(FakeLog(noisy))) is None


def test_memory_that_grows_is_told_apart_from_memory_that_varies() -> None:
    leaking = [(float(n), int(1e9 + 5e6 * n)) for n in range(60)]
    growth = growth_of([], leaking)
    assert growth is not None
    assert growth[1] == pytest.approx(5e6, rel=0.2)
    assert growth_of([], [(float(n), int(1e9 + 4e8 * (n % 3))) for n in range(60)]) is None
    assert growth_of([], leaking[:5]) is None


def test_memory_of_a_script_that_gets_ready_does_not_grow() -> None:
    loading = [(float(n), int(1e9 + 5e7 * min(n, 40))) for n in range(80)]
    assert growth_of([{"at": 41.0}], loading) is None
    assert growth_of([{"at": 0.0}], loading[:41]) is not None


def test_a_wait_that_is_left_out_saves_neither_the_hosts_work_nor_the_devices() -> None:
    assert sync_gain(0.1) == pytest.approx(1 / 0.9)
    assert sync_gain(0.5) == pytest.approx(2.0)
    assert sync_gain(0.9) == pytest.approx(1 / 0.9)


def test_a_wait_in_each_step_is_told_also_where_the_gpu_is_the_limit() -> None:
    """The host waits nearly all the time then, and leaving that out brings next to nothing."""
    for seconds in (0.95, 0.985, 0.999):
        usage = {"waits": [{"what": "item train.py:12", "count": 10, "seconds": seconds}]}
        assert "sync-in-loop" in seen(device="cuda", usage=usage, forward=1.0)


def test_a_recorded_graph_needs_no_compiler() -> None:
    models = {"models": [{"dtypes": {"bfloat16": 1}, "compiled": False}]}
    assert "not-compiled" not in seen(device="cuda", usage={"replays": 100}, models=models, forward=1.0)


def seen(*, device: str = "cpu", usage: dict[str, Any] | None = None, models: dict[str, Any] | None = None,
         **shares: float) -> set[str]:  # fmt: skip
    """The codes of what is found."""
    told = {**dict.fromkeys(PHASES, 0.0), **shares}
    rates = Rates(
        steps=100, steps_per_s=10.0, samples_per_s=1.0, samples=1.0, first_step_s=0.1, median_step_s=0.1, outliers=0,
        outlier_share=0.0, shares=told, host_shares=told, device_clock=False, paused_s=0.0, loss=None,
    )  # fmt: skip
    process = {"device": {"kind": device, "capability": "9.0"}}
    found = advice_of(Evidence(rates=rates, process=process, usage=usage or {}, models=models or {}))
    assert all(each.change and each.text and each.gain_bound >= 1 for each in found)
    return {each.code for each in found}


FP32 = {"models": [{"dtypes": {"float32": 3}, "convolutions": 0, "channels_last": 0, "compiled": True}],
        "flags": {"matmul_precision": "high", "cudnn_tf32": True}}  # fmt: skip
CONVOLUTIONS = {"models": [{**FP32["models"][0], "convolutions": 5}], "flags": FP32["flags"]}  # type: ignore[dict-item]
IMAGES = {"inputs": ["32×3×224×224 float32"], "autocast": "torch.bfloat16"}
COPIES = {"count": 100, "bytes": 1, "seconds": 1.0, "asked": 64, "pageable": 64, "blocking": 64}
ADAM = {"name": "Adam", "can_fuse": True, "fused": False, "tensors": 12}


@pytest.mark.parametrize(
    ("code", "faulty", "mended"),
    [
        ("data-wait", {"data": 0.4, "forward": 0.6}, {"data": 0.01, "forward": 0.99}),
        ("other-work", {"other": 0.4, "forward": 0.6}, {"other": 0.05, "forward": 0.95}),
        (
            "pageable-copies",
            {"device": "cuda", "copy": 0.2, "usage": {"copies": COPIES, "autocast": "x"}},
            {"device": "cuda", "copy": 0.2, "usage": {"copies": {**COPIES, "pageable": 0, "blocking": 0}}},
        ),
        (
            "blocking-copies",
            {"device": "cuda", "copy": 0.2, "usage": {"copies": {**COPIES, "pageable": 0}}},
            {"device": "cuda", "copy": 0.0, "usage": {"copies": {**COPIES, "pageable": 0, "blocking": 0}}},
        ),
        (
            "sync-in-loop",
            {"device": "cuda", "usage": {"waits": [{"what": "item train.py:12", "count": 10, "seconds": 0.3}]}, "data": 0.1},
            {"device": "cuda", "usage": {"waits": [{"what": "item train.py:12", "count": 1, "seconds": 0.03}]}, "data": 0.1},
        ),
        (
            "zero-grad-fills",
            {"usage": {"zero_grads": {"count": 100, "kept": 100, "seconds": 0.3}}, "forward": 1.0},
            {"usage": {"zero_grads": {"count": 100, "kept": 0, "seconds": 0.3}}, "forward": 1.0},
        ),
        (
            "unfused-optimizer",
            {"optimizer": 0.3, "usage": {"optimizers": [ADAM]}},
            {"optimizer": 0.3, "usage": {"optimizers": [{**ADAM, "fused": True}]}},
        ),
        (
            "autocast-off",
            {"device": "cuda", "forward": 0.9, "models": FP32},
            {"device": "cuda", "forward": 0.9, "models": FP32, "usage": {"autocast": "torch.bfloat16"}},
        ),
        (
            "tf32-off",
            {"device": "cuda", "forward": 0.9, "models": {**FP32, "flags": {"matmul_precision": "highest"}}},
            {"device": "cuda", "forward": 0.9, "models": FP32},
        ),
        (
            "channels-first",
            {"device": "cuda", "forward": 0.9, "models": CONVOLUTIONS, "usage": IMAGES},
            {"device": "cuda", "forward": 0.9, "usage": IMAGES,
             "models": {"models": [{**CONVOLUTIONS["models"][0], "channels_last": 5}]}},  # type: ignore[dict-item]
        ),
        (
            "not-compiled",
            {"device": "cuda", "forward": 0.9, "models": {"models": [{"dtypes": {"bfloat16": 1}, "compiled": False}]}},
            {"device": "cuda", "forward": 0.9, "models": {"models": [{"dtypes": {"bfloat16": 1}, "compiled": True}]}},
        ),
        (
            "needless-grad-scaler",
            {"usage": {"scaler": {"enabled": True}, "autocast": "torch.bfloat16"}, "forward": 1.0},
            {"usage": {"scaler": {"enabled": True}, "autocast": "torch.float16"}, "forward": 1.0},
        ),
        (
            "no-grad-scaler",
            {"usage": {"scaler": None, "autocast": "torch.float16"}, "forward": 1.0},
            {"usage": {"scaler": {"enabled": True}, "autocast": "torch.float16"}, "forward": 1.0},
        ),
        (
            "worker-restarts",
            {"data": 0.5, "usage": {"loaders": [{"num_workers": 2, "persistent_workers": False, "iterators": 3,
                                                 "starts_s": [1.0, 1.0, 1.0]}]}},
            {"data": 0.5, "usage": {"loaders": [{"num_workers": 2, "persistent_workers": True, "iterators": 3,
                                                 "starts_s": [1.0, 0.1, 0.1]}]}},
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_its_mended_twin_is_not(
    code: str, faulty: dict[str, Any], mended: dict[str, Any]
) -> None:
    assert code in seen(**faulty)
    assert code not in seen(**mended)


@pytest.mark.parametrize(
    ("training", "validation"),
    [({"iterators": 2, "batches": 500}, {"iterators": 20, "batches": 10}), ({"iterators": 1, "batches": None}, {"iterators": 9, "batches": 10})],
)  # fmt: skip
def test_the_wait_is_that_of_the_training_loader_however_often_validation_runs(
    training: dict[str, Any], validation: dict[str, Any]
) -> None:
    loaders = [{"num_workers": 0, **validation}, {"num_workers": 4, **training}]
    rates = rates_of([FakeLog([row(number, data=0.1) for number in range(20)])])
    (found,) = [
        each for each in advice_of(Evidence(rates=rates, usage={"loaders": loaders})) if each.code == "data-wait"
    ]
    assert "4 loader workers" in found.text


def test_running_out_of_memory_is_told_with_who_held_it() -> None:
    told = {"phase": "backward", "step": 3, "where": "train.py:9", "held": {"weights": 2**20, "optimizer state": 2**30}}
    (found,) = advice_of(Evidence(rates=rates_of([]), out_of_memory=told))
    assert found.code == "out-of-memory"
    assert "backward pass after step 3, at train.py:9: optimizer state 1.00 GiB" in found.text
    assert "less state" in found.change


def test_gpu_advice_is_not_given_on_a_cpu() -> None:
    codes = seen(forward=0.9, models={**FP32, "flags": {"matmul_precision": "highest"}}, usage={"copies": COPIES})
    assert not codes & {"autocast-off", "tf32-off", "not-compiled", "pageable-copies", "sync-in-loop"}


@pytest.mark.parametrize(
    ("step_s", "first_s", "is_start_up"), [(0.007, 0.98, True), (0.02, 0.98, False), (0.001, 0.4, False)]
)
def test_a_first_step_far_beyond_the_others_compiles_also_below_a_second(
    step_s: float, first_s: float, is_start_up: bool
) -> None:
    usual = {"data": 0.0, "forward": step_s, "backward": 0.0, "optimizer": 0.0, "other": 0.0}
    rows = [row(0, **usual | {"forward": first_s}), *(row(n, **usual) for n in range(1, 200))]
    seconds = 199 * step_s + (0.0 if is_start_up else first_s)
    assert rates_of([FakeLog(rows)]).steps_per_s == pytest.approx((199 if is_start_up else 200) / seconds)
