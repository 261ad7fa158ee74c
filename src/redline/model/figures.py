"""The figures that several verbs share, each named once: the column, the CSV field and the key in a document."""

from __future__ import annotations

from redline.model.metrics import Figure

THROUGHPUT = Figure(name="throughput", unit="{item}/s", better="higher", doc="Items per second, by the median step.")
LATENCY_P50 = Figure(name="latency_p50", unit="s", header="p50", better="lower", doc="The median time of a step.")
LATENCY_P95 = Figure(name="latency_p95", unit="s", header="p95", better="lower", doc="Needs 130 samples.")
LATENCY_P99 = Figure(name="latency_p99", unit="s", header="p99", better="lower", doc="Needs 662 samples.")
MEMORY = Figure(
    name="memory", unit="B", better="lower", doc="What must fit: reserved by the allocator, on a CPU resident."
)
MEMORY_SHARE = Figure(
    name="memory_share", unit="share", header="share", better="lower", doc="Needed memory over the limit."
)
RATIO = Figure(
    name="ratio", unit="x", header="vs first", better="higher", doc="Time of the first over time of this one."
)
TTFT = Figure(name="ttft", unit="s", header="TTFT", better="lower", doc="The median time to the first token.")
TPOT = Figure(name="tpot", unit="s", header="TPOT", better="lower", doc="The time per further token.")
REL_ERROR = Figure(
    name="rel_error",
    unit="error",
    header="rel. error",
    better="lower",
    doc="The distance of the outputs from those of strict fp32, ‖Δ‖/‖y‖.",
)
COMPILE = Figure(name="compile_time", unit="s", header="compiling", better="lower", doc="Before the first step.")
SUSTAINABLE_RATE = Figure(
    name="sustainable_rate",
    unit="req/s",
    header="sustains",
    better="higher",
    doc="The highest rate that keeps the target.",
)
