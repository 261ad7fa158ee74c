"""What is found in a watched script: each fault raises its finding, and its mended twin does not."""

from __future__ import annotations

from typing import Any

import pytest

from redline.analyze.finding import Finding
from redline.analyze.ranks import LateRank
from redline.analyze.watch import Drift
from redline.analyze.watch_findings import RunFacts, findings
from redline.model.note import note
from redline.model.record import Rates

FP32 = {"models": [{"dtypes": {"float32": 3}, "convolutions": 0, "channels_last": 0, "compiled": True}],
        "flags": {"matmul_precision": "high", "cudnn_tf32": True}}  # fmt: skip
STRICT = {**FP32, "flags": {"matmul_precision": "highest"}}
CONVOLUTIONS = {"models": [{**FP32["models"][0], "convolutions": 5}], "flags": FP32["flags"]}  # type: ignore[dict-item]
LAST = {"models": [{**CONVOLUTIONS["models"][0], "channels_last": 5}], "flags": FP32["flags"]}  # type: ignore[dict-item]
PLAIN = {"models": [{"dtypes": {"bfloat16": 1}, "compiled": False}]}
COMPILED = {"models": [{"dtypes": {"bfloat16": 1}, "compiled": True}]}
IMAGES = {"inputs": ["32×3×224×224 float32"], "autocast": "torch.bfloat16"}
COPIES = {"asked": 64, "pageable": 64, "blocking": 64}
ADAM = {"name": "Adam", "can_fuse": True, "fused": False, "tensors": 12}
FUSED = {**ADAM, "fused": True}
LATE = LateRank(rank=1, phase="backward", seconds=0.04, why=note("cause-unknown", "nothing is known of it"))
CALLS = {"operators": 1000.0, "optimizers": [FUSED]}
WAIT = {"how": "item", "where": "train.py:12", "count": 10, "seconds": 0.3}


def found(
    *, device: str = "cpu", usage: Any = None, process: Any = None, run_s: Any = None, **given: Any
) -> dict[str, Finding]:
    """By code, of a run of 100 steps in 10 s; what is given otherwise are shares of the steps."""
    shares = {
        name: given.pop(name)
        for name in list(given)
        if isinstance(given[name], float) and name not in ("wait_s", "growth")
    }
    rates = Rates(
        steps=100, steps_per_s=10.0, counted_s=10.0, shares=shares, host_shares=shares, **given.pop("rates", {}),
        run_s={**{name: 10 * share for name, share in shares.items()}, **(run_s or {})},
    )  # fmt: skip
    told = {"device": {"kind": device, "capability": "9.0"}, **(process or {})}
    facts = RunFacts(rates=rates, process=told, usage=usage or {}, **given)
    told_of = {finding.code: finding for finding in findings(facts)}
    assert all(each.next and each.evidence and each.gain_bound >= 1 for each in told_of.values())
    return told_of


@pytest.mark.parametrize(
    ("code", "faulty", "mended", "bound"),
    [
        ("data-wait", {"data": 0.4}, {"data": 0.01}, 1 / 0.6),
        ("other-work", {"other": 0.4}, {"other": 0.05}, 1 / 0.6),
        ("other-work", {"other": 0.4}, {"other": 0.4, "ends_s": (3.0,)}, 1 / 0.6),
        ("acting", {"acting": 0.6}, {"acting": 0.1}, 2.5),
        ("validation", {"forward": 1.0, "run_s": {"validation": 30.0}}, {"forward": 1.0, "run_s": {"validation": 1.0}}, 4.0),
        ("saving", {"forward": 0.8, "saving": 0.2}, {"forward": 0.99, "saving": 0.01}, 1.25),
        ("pageable-copies",
         {"device": "cuda", "copy": 0.2, "forward": 0.8, "usage": {"copies": COPIES}},
         {"device": "cuda", "copy": 0.2, "forward": 0.8, "usage": {"copies": {**COPIES, "pageable": 0, "blocking": 0}}}, 1.25),
        ("blocking-copies",
         {"device": "cuda", "copy": 0.2, "usage": {"copies": {**COPIES, "pageable": 0}}},
         {"device": "cuda", "copy": 0.0, "usage": {"copies": {**COPIES, "pageable": 0, "blocking": 0}}}, 1.25),
        ("sync-in-loop",
         {"device": "cuda", "usage": {"waits": [WAIT]}},
         {"device": "cuda", "usage": {"waits": [{**WAIT, "count": 1, "seconds": 0.03}]}}, 1 / 0.7),
        ("unfused-optimizer",
         {"optimizer": 0.3, "usage": {"optimizers": [ADAM]}},
         {"optimizer": 0.3, "usage": {"optimizers": [{**ADAM, "fused": True}]}}, 1 / 0.7),
        ("zero-grad-fills",
         {"usage": {"zero_grads": {"count": 100, "kept": 100, "seconds": 0.3}}},
         {"usage": {"zero_grads": {"count": 100, "kept": 0, "seconds": 0.0}}}, 1 / 0.94),
        ("needless-grad-scaler",
         {"other": 0.2, "usage": {"scales": True, "autocast": "torch.bfloat16"}},
         {"other": 0.2, "usage": {"scales": True, "autocast": "torch.float16"}}, 1.25),
        ("no-grad-scaler",
         {"usage": {"scales": False, "autocast": "torch.float16"}}, {"usage": {"scales": True, "autocast": "torch.float16"}}, 1.0),
        ("slowdown", {"drift": Drift(step=50, at_s=5.0, ratio=2.0, share_before=0.5)}, {}, 1 / 0.75),
        ("memory-grows", {"growth": 1e6}, {}, 1.0),
        ("slow-rank", {"backward": 0.9, "late_rank": LATE, "wait_s": LATE.seconds}, {"backward": 0.9}, 1 / 0.6),
        ("oversubscribed-threads",
         {"forward": 0.4, "backward": 0.4, "process": {"threads": 16, "cores": 2}},
         {"forward": 0.4, "backward": 0.4, "process": {"threads": 2, "cores": 2}}, 5.0),
        ("tiny-operators",  # 1000 operators in 80 ms of forward and backward pass: 80 µs each
         {"forward": 0.4, "backward": 0.4, "process": {"call_s": 9e-6}, "usage": CALLS},
         {"forward": 0.4, "backward": 0.4, "process": {"call_s": 7e-6}, "usage": CALLS}, 5.0),
        ("tiny-operators",  # a deep model calls many operators too, each weight once
         {"forward": 0.4, "backward": 0.4, "process": {"call_s": 9e-6}, "usage": CALLS},
         {"forward": 0.4, "backward": 0.4, "process": {"call_s": 9e-6},
          "usage": {**CALLS, "optimizers": [{**FUSED, "tensors": 200}]}}, 5.0),
        ("autocast-off",
         {"device": "cuda", "forward": 0.9, "process": FP32},
         {"device": "cuda", "forward": 0.9, "process": FP32, "usage": {"autocast": "torch.bfloat16"}}, 10.0),
        ("tf32-off",
         {"device": "cuda", "forward": 0.9, "process": STRICT}, {"device": "cuda", "forward": 0.9, "process": FP32}, 10.0),
        ("channels-first",
         {"device": "cuda", "forward": 0.9, "process": CONVOLUTIONS, "usage": IMAGES},
         {"device": "cuda", "forward": 0.9, "process": LAST, "usage": IMAGES}, 10.0),
        ("not-compiled",
         {"device": "cuda", "forward": 0.9, "process": PLAIN}, {"device": "cuda", "forward": 0.9, "process": COMPILED}, 10.0),
        ("not-compiled",  # a recorded graph needs no compiler
         {"device": "cuda", "forward": 0.9, "process": PLAIN},
         {"device": "cuda", "forward": 0.9, "process": PLAIN, "usage": {"replays": 100}}, 10.0),
        ("worker-restarts",
         {"data": 0.3, "other": 0.2, "starts_s": (1.0, 1.0, 1.0), "ends_s": (1.0, 1.0)}, {"data": 0.3, "starts_s": (1.0,)}, 2.0),
        ("slow-steps", {"rates": {"outliers": 5, "outlier_share": 0.2}}, {"rates": {"outliers": 1, "outlier_share": 0.2}}, 1.25),
    ],
)  # fmt: skip
def test_each_fault_is_found_with_its_bound_and_its_mended_twin_is_not(
    code: str, faulty: dict[str, Any], mended: dict[str, Any], bound: float
) -> None:
    assert found(**faulty)[code].gain_bound == pytest.approx(bound)
    assert code not in found(**mended)


def test_advice_fits_the_script() -> None:
    """A script without a loader is told of none, and the loader that matters is that of the training."""
    without = found(data=0.4)["data-wait"]
    assert "DataLoader" not in without.next + without.evidence
    assert "worker" not in without.evidence
    none = found(data=0.4, usage={"loaders": [{"num_workers": 0, "iterators": 1, "batches": 10}]})["data-wait"]
    assert "num_workers=N" in none.next
    validation = {"num_workers": 0, "iterators": 20, "batches": 10}
    for training in ({"iterators": 2, "batches": 500}, {"iterators": 1, "batches": None}):
        loaders = [validation, {"num_workers": 4, **training}]
        assert "4 loader workers" in found(data=0.4, usage={"loaders": loaders})["data-wait"].evidence


def test_a_wait_in_each_step_is_told_also_where_the_gpu_is_the_limit() -> None:
    """The host waits nearly all the time then, and leaving that out brings next to nothing."""
    for seconds, bound in ((0.5, 2.0), (0.9, 1 / 0.9), (0.985, 1 / 0.985)):
        usage = {"waits": [{**WAIT, "seconds": seconds}]}
        assert found(device="cuda", usage=usage)["sync-in-loop"].gain_bound == pytest.approx(bound)


def test_causes_come_before_symptoms_and_what_makes_the_model_itself_faster() -> None:
    """However much of the time the model takes: a layout does not bring all of it, and a wait for data may be left out."""
    rates = {"outliers": 5, "outlier_share": 0.5}
    told = found(data=0.2, forward=0.7, saving=0.1, process=CONVOLUTIONS, usage=IMAGES, rates=rates)
    assert list(told) == ["data-wait", "saving", "slow-steps", "channels-first"]


def test_gpu_advice_is_not_given_on_a_cpu() -> None:
    usage = {"copies": COPIES, "waits": [WAIT]}
    assert set(found(forward=0.9, process=STRICT, usage=usage)) == set()
