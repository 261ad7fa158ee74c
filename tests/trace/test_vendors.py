"""What vendors' profilers write, read into the same kernel table and counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.model.errors import TraceError, UnknownName
from redline.search.vendors import TOOLS
from redline.trace.vendors import (
    DURATION,
    VendorTable,
    bandwidth_share,
    counters_in,
    counters_of,
    nanoseconds,
    number,
    rows_under,
    size_in_bytes,
)

NCU_HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_row(call: int, kernel: str, metric: str, unit: str, value: str) -> str:
    cells = (
        call,
        4711,
        "python3.11",
        "127.0.0.1",
        kernel,
        1,
        7,
        "(256, 1, 1)",
        "(64, 1, 1)",
        0,
        "9.0",
        "Command line",
        metric,
    )
    return ",".join(f'"{cell}"' for cell in (*cells, unit, value))


NCU = "\n".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.11)",
        '==PROF== Profiling "vectorized_elementwise_kernel" - 0: 0%....50%....100% - 4 passes',
        NCU_HEADER,
        ncu_row(0, "void gemm<float, 128>(int)", DURATION, "ns", "1,205,000"),
        ncu_row(0, "void gemm<float, 128>(int)", "dram__bytes.sum", "Mbyte", "1,024.5"),
        ncu_row(0, "void gemm<float, 128>(int)", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "90.00"),
        ncu_row(0, "void gemm<float, 128>(int)", "sm__warps_active.avg.pct_of_peak_sustained_active", "%", "25.5"),
        ncu_row(1, "void add(int)", DURATION, "us", "95"),
        ncu_row(1, "void add(int)", "dram__bytes.sum", "Kbyte", "500"),
        ncu_row(1, "void add(int)", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "40"),
        ncu_row(1, "void add(int)", "lts__t_sector_hit_rate.pct", "%", "60"),
        ncu_row(1, "void add(int)", "sm__warps_active.avg.pct_of_peak_sustained_active", "", "n/a"),
        ncu_row(2, "void add(int)", DURATION, "usecond", "5"),
        "==PROF== Disconnected from process 4711",
    ]
)
NSYS = """Generating SQLite file report.sqlite from report.nsys-rep
Processing [report.sqlite] with [/opt/nsys/reports/cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
75.0,3000,2,1500.0,1500.0,1000,2000,707.1,"void gemm<float, 128>(int)"
25.0,1000,10,100.0,100.0,90,110,5.0,ncclDevKernel_AllReduce
"""
ROCPROF = """"Name","Calls","TotalDurationNs","AverageNs","Percentage"
"Cijk_Ailk_Bljk_HB.kd",4,4000,1000,80.0
"void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int).kd",10,1000,100,20.0
"""
ROCPROFV3 = """"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"
"Cijk_Ailk_Bljk_HB",4,4000,1000.000000,80.00,900,1200,12.5
"""
DISPATCHES = """"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"
"KERNEL_DISPATCH","Agent 4",1,10,"void k<float>(int, int)",1,1551874061244694,1551874061255734
"KERNEL_DISPATCH","Agent 4",1,10,"void k<float>(int, int)",2,1551874061259214,1551874061260214
"KERNEL_DISPATCH","Agent 4",1,11,"late, and backwards",3,1551874061270254,1551874061270000
"""
ROCPROFV2 = """Dispatch_ID,GPU_ID,Queue_ID,PID,TID,Grid_Size,Kernel_Name,Start_Timestamp,End_Timestamp,Correlation_ID
0,2,1,10,10,64,"void k(int)",100,600,1
"""
ANALYSIS = """
Analysis mode = cli
2. System Speed-of-Light
2.1 Speed-of-Light
╒═════════════╤═══════════════════════════╤═════════╤════════════╤═════════╤═══════════════╕
│ Metric_ID   │ Metric                    │ Avg     │ Unit       │ Peak    │ Pct of Peak   │
╞═════════════╪═══════════════════════════╪═════════╪════════════╪═════════╪═══════════════╡
│ 2.1.19      │ Vector L1D Cache Hit Rate │ 50.0    │ Pct        │ 100.0   │ 50.0          │
├─────────────┼───────────────────────────┼─────────┼────────────┼─────────┼───────────────┤
│ 2.1.21      │ L2 Cache Hit Rate         │ 87.5    │ Pct        │ 100.0   │ 87.5          │
│ 2.1.22      │ L2-Fabric Read BW         │ 1350.11 │ Gb/s       │ 1638.4  │ 82.4          │
│ 2.1.26      │ Wavefront Occupancy       │ 1200.5  │ Wavefronts │ 7040.0  │ 17.05         │
╘═════════════╧═══════════════════════════╧═════════╧════════════╧═════════╧═══════════════╛
"""


def read(tool: str, folder: Path, **files: str) -> VendorTable:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_csv", ".csv").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return TOOLS.get(tool)().read(folder)


def rows(table: VendorTable) -> list[tuple[str, int, int, int | None, int | None]]:
    return [(row.name, row.calls, row.total_ns, row.min_ns, row.max_ns) for row in table.kernels]


class TestNcu:
    def test_calls_become_a_kernel_table(self, tmp_path: Path) -> None:
        assert rows(read("ncu", tmp_path, ncu_csv=NCU)) == [
            ("void gemm<float, 128>(int)", 1, 1_205_000, 1_205_000, 1_205_000),
            ("void add(int)", 2, 100_000, 5_000, 95_000),
        ]

    def test_counters_are_weighted_by_time_and_carry_their_meaning(self, tmp_path: Path) -> None:
        table = read("ncu", tmp_path, ncu_csv=NCU)
        found = {(one.name, one.kernel): one for one in counters_of(table.readings, ["void add(int)"])}
        overall = found[("bandwidth", None)]
        assert overall.value == pytest.approx((0.9 * 1205 + 0.4 * 95) / 1300)
        assert (overall.verdict, overall.unit) == ("memory-bound", "share")
        assert found[("bandwidth", "void add(int)")].verdict == "fine"
        assert found[("occupancy", None)].verdict == "poor"
        assert found[("l2_hits", None)].verdict == "poor"
        assert found[("traffic", None)].value == pytest.approx(1_025_000_000)
        assert found[("traffic", None)].unit == "bytes"
        assert ("occupancy", "void add(int)") not in found  # n/a is no number
        assert bandwidth_share(found.values()) == overall.value

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "run as root"),
            ("==PROF== Connected\n==ERROR== Failed to do it\n", "Failed to do it"),
            ("==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
            (NCU_HEADER, "nothing about why"),
            ("", "nothing about why"),
        ],
    )
    def test_no_kernels_come_with_the_reason(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(TraceError, match=words):
            read("ncu", tmp_path, ncu_csv=text)

    def test_it_looks_only_where_it_is_told_to(self, tmp_path: Path) -> None:
        words = TOOLS.get("ncu")().prefix(tmp_path)
        assert words[words.index("--profile-from-start") + 1] == "off"
        assert words[words.index("--clock-control") + 1] == "none"


def test_nsys(tmp_path: Path) -> None:
    assert rows(read("nsys", tmp_path, kernels_csv=NSYS)) == [
        ("void gemm<float, 128>(int)", 2, 3000, 1000, 2000),
        ("ncclDevKernel_AllReduce", 10, 1000, 90, 110),
    ]
    tool = TOOLS.get("nsys")()
    assert "--capture-range-end=stop" in tool.prefix(tmp_path)  # else it ends the worker with the range
    assert str(tmp_path / "report.nsys-rep") in tool.follow_ups(tmp_path)[0].command


def test_rocprof(tmp_path: Path) -> None:
    table = read("rocprof", tmp_path, **{"results.stats_csv": ROCPROF})
    assert rows(table)[0] == ("Cijk_Ailk_Bljk_HB.kd", 4, 4000, None, None)
    assert len(table.kernels) == 2
    assert "the whole worker" in str(table.notes[0])


def test_rocprofv3_prefers_its_statistics_and_else_adds_up(tmp_path: Path) -> None:
    only_trace = read("rocprofv3", tmp_path, host__results_kernel_trace_csv=DISPATCHES)
    assert rows(only_trace) == [("void k<float>(int, int)", 2, 12_040, 1_000, 11_040)]
    both = read("rocprofv3", tmp_path, host__results_kernel_stats_csv=ROCPROFV3)
    assert rows(both) == [("Cijk_Ailk_Bljk_HB", 4, 4000, 900, 1200)]
    assert TOOLS.get("rocprofv3")().prefix(tmp_path)[-1] == "--"


def test_rocprofv2(tmp_path: Path) -> None:
    assert rows(read("rocprofv2", tmp_path, results_csv=ROCPROFV2)) == [("void k(int)", 1, 500, 500, 500)]


def test_rocprof_compute(tmp_path: Path) -> None:
    table = read("rocprof-compute", tmp_path, workload__MI300X__pmc_perf_csv=DISPATCHES, analysis_txt=ANALYSIS)
    assert rows(table)[0][1] == 2
    found = {one.name: one for one in counters_of(table.readings, [])}
    assert {name: one.verdict for name, one in found.items()} == {
        "bandwidth": "memory-bound",
        "occupancy": "poor",
        "l1_hits": "poor",
        "l2_hits": "fine",
    }
    assert found["l2_hits"].value == pytest.approx(0.875)
    follow_up = TOOLS.get("rocprof-compute")().follow_ups(tmp_path)[0]
    assert str(tmp_path / "workload" / "MI300X") in follow_up.command


def test_tables_without_known_metrics_give_no_counters() -> None:
    assert list(counters_in("")) == []
    assert (
        list(counters_in("│ Metric │ Avg │ Unit │\n│ Something │ 5 │ Pct │\n│ L2 Cache Hit Rate │ N/A │ Pct │")) == []
    )


@pytest.mark.parametrize("tool", TOOLS.names())
@pytest.mark.parametrize("content", [None, "", "\0\0\0", "a,b,c\n1,2,3\n", "<html>", '"' * 300_000])
def test_files_that_are_missing_or_nonsense_are_told_in_one_line(
    tmp_path: Path, tool: str, content: str | None
) -> None:
    if content is not None:
        names = ("ncu.csv", "kernels.csv", "results.csv", "results.stats.csv", "x_kernel_stats.csv", "pmc_perf.csv")
        for name in (*names, "analysis.txt"):
            (tmp_path / name).write_text(content)
    with pytest.raises(TraceError) as caught:
        TOOLS.get(tool)().read(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_tool_gets_the_closest_names() -> None:
    with pytest.raises(UnknownName, match="rocprofv3"):
        TOOLS.get("rocprof3")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (5, "ns", 5),
        (5, "nsecond", 5),
        (1.5, "us", 1500),
        (2, "usecond", 2000),
        (3, "ms", 3e6),
        (1, "second", 1e9),
        (7, "", 7),
    ],
)
def test_units_of_time(value: float, unit: str, expected: float) -> None:
    assert nanoseconds(value, unit) == pytest.approx(expected)


def test_units_that_are_none() -> None:
    assert nanoseconds(5, "cycle") is None
    assert size_in_bytes(5, "sector") is None
    assert [size_in_bytes(2, unit) for unit in ("byte", "Kbyte", "Mbyte", "Gbyte", "")] == [2, 2e3, 2e6, 2e9, 2]
    assert [number(text) for text in ("1,234.5", "87 %", "n/a", "", "nan", "inf", None)] == [1234.5, 87, *[None] * 5]


def test_chatter_between_rows_is_no_row() -> None:
    text = "hello\nA,B\n1,2\n==PROF== something, else, here\n3,4\n"
    assert list(rows_under(text, ("A", "B"))) == [{"A": "1", "B": "2"}, {"A": "3", "B": "4"}]
