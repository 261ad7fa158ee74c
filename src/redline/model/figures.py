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
TTFT = Figure(name="ttft", unit="s", header="TTFT", better="lower", doc="The median time to the first token.")
TPOT = Figure(name="tpot", unit="s", header="TPOT", better="lower", doc="The time per further token.")
LATENCY_MEAN = Figure(name="latency_mean", unit="s", header="mean", better="lower")
SPEEDUP = Figure(
    name="speedup",
    unit="x",
    header="vs first",
    better="higher",
    doc="The speed over that of the first recipe it was measured with; with an interval where they were interleaved.",
)
SUSTAINED = Figure(
    name="sustained",
    unit="{item}/s",
    header="sustained",
    better="higher",
    doc="Items per second by the wall clock, where that is clearly less than the median step says: the machine stalled.",
)
REL_ERROR = Figure(
    name="rel_error", header="rel. error", better="lower", doc="The distance of the outputs from strict fp32, relative."
)
HEADROOM = Figure(
    name="headroom", unit="x", header="left", better="lower", doc="The time of a step over its roofline time."
)
OF_PEAK = Figure(name="of_peak", unit="share", header="of peak", better="higher", doc="Achieved over measured FLOP/s.")
ENERGY = Figure(name="energy", unit="J", better="lower", doc="Energy per item.")
POWER = Figure(name="power", unit="W", doc="Mean power over the metered blocks.")
UTILISATION = Figure(name="utilisation", unit="share", header="busy", doc="How busy the device said it was.")
COST = Figure(name="cost", header="per million", better="lower", doc="Cost of a million items at the price given.")
START = Figure(
    name="start", unit="s", header="worker", better="lower", doc="From the request to a worker that answers."
)
BUILD = Figure(name="build", unit="s", better="lower", doc="Making the model and moving it to the device.")
FIRST_CALL = Figure(name="first_call", unit="s", better="lower", doc="The first step, without what the compiler took.")
COMPILE = Figure(name="compile", unit="s", better="lower", doc="The compiler's share of the first step.")
FORWARD = Figure(name="forward", unit="s", better="lower")
BACKWARD = Figure(name="backward", unit="s", better="lower")
OPTIMIZER = Figure(name="optimizer", unit="s", better="lower")
TPOT_P95 = Figure(name="tpot_p95", unit="s", header="TPOT p95", better="lower")
PREFILL_RATE = Figure(name="prefill_rate", unit="tok/s", header="prefill tok/s", better="higher")
DECODE_RATE = Figure(name="decode_rate", unit="tok/s", header="decode tok/s", better="higher")
BANDWIDTH_SHARE = Figure(
    name="bandwidth_share", unit="share", header="of copy", doc="Of the copy bandwidth, what decoding reaches."
)
EPOCH_TIME = Figure(name="epoch_time", unit="s", header="epoch", better="lower")
TRAIN_LOSS = Figure(name="train_loss", header="training loss", better="lower")
VAL_LOSS = Figure(name="val_loss", header="held-out loss", better="lower")
ACCURACY = Figure(name="accuracy", unit="share", better="higher", doc="Accuracy on the held-out part.")
DATA_WAIT = Figure(name="data_wait", unit="share", header="waiting for data", better="lower")
SUSTAINABLE_RATE = Figure(
    name="sustainable_rate",
    unit="req/s",
    header="sustains",
    better="higher",
    doc="The highest rate that keeps the target.",
)
