"""How the numbers of a report were taken, in the words of docs/measurement.md, for a reader who has only the report."""

METHOD = (
    "Every spec ran in a process of its own. Warm-up ended when two windows of steps agreed; timing stopped when the 95 % "
    "interval of the median was narrow enough, or the verdict says why it was not.",
    "Latency waits for the device after every step. Throughput and training run without waiting and are timed by device "
    "events; on a CPU the host clock serves both.",
    "Intervals are order statistics of the median, widened where samples depend on each other, and hold within one "
    "process: another process may sit a few percent apart.",
    "A ratio with an interval comes from blocks measured in turns, in random order. Records that merely followed each "
    "other are shown side by side and carry none.",
    "p95 needs 130 samples and p99 662; with fewer they are not told. Every recipe's answers were compared with strict "
    "fp32 on fixed inputs; one that is too far away is shown and never recommended.",
    "The knee is where throughput reaches 90 % of what larger batches near, by the fit t = a + c·b on batches that the "
    "device, not the host, limits; the smallest are left out where one line does not describe all.",
)
