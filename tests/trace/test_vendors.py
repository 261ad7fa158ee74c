"""What vendors' profilers write, read by what is in it into one kernel table and one vocabulary of counters: whole, cut, renamed and empty."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from redline.model.errors import TraceError, UnknownName
from redline.search.vendors import TOOLS
from redline.trace.vendors import bandwidth_share, counters_of, merged, nanoseconds, read_file, size_in_bytes

ROCPROF_STATS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n"Cijk_A(x, y)",4,4000,1000,80.0\n"relu",2,1000,500,20.0\n'
ROCPROFV2_TRACE = "Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp\n1,0,conv,100,400\n2,0,conv,500,700\n3,0,relu,800,900\n"
ROCPROFV3_STATS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n"gemm",3,900,300,100.0,200,400,10\n'
ROCPROFV3_COUNTERS = (
    '"Dispatch_Id","Kernel_Name","Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"\n'
    '1,"gemm","LDSBankConflict",20.0,0,100\n1,"gemm","OccupancyPercent",50.0,0,100\n'
    '2,"gemm","LDSBankConflict",0.0,200,500\n2,"gemm","OccupancyPercent",90.0,200,500\n'
)
NSYS_STATS = (
    "Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...\n\n"
    "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    '75.0,"3,000",3,1000.0,1000.0,900,1100,100.0,"void gemm<float, int>(T1)"\n25.0,1000,1,1000.0,1000.0,1000,1000,0.0,copy\n'
)
NSYS_ALL = (
    "Time (%),Total Time (ms),Instances,Avg (ms),Med (ms),Min (ms),Max (ms),StdDev (ms),Name\n"
    "100.0,2.5,5,0.5,0.5,0.4,0.6,0.0,gemm\n\n"
    "Time (%),Total Time (ms),Count,Avg (ms),Med (ms),Min (ms),Max (ms),StdDev (ms),Operation\n"
    "100.0,7.0,9,0.5,0.5,0.4,0.6,0.0,[CUDA memcpy Host-to-Device]\n"
)
NCU_DETAILS = (
    '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"\n'
    '"0","9","gemm","GPU Speed Of Light Throughput","DRAM Throughput","%","40.5",""\n'
    '"0","9","gemm","GPU Speed Of Light Throughput","Duration","us","12.5",""\n'
    '"0","9","gemm","Occupancy","Achieved Occupancy","%","25",""\n'
    '"1","9","relu","GPU Speed Of Light Throughput","Duration","ns","900",""\n'
)
NCU_HEADER = '==PROF== Connected\n"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
NCU = (
    NCU_HEADER + '"0","9","gemm","gpu__time_duration.sum","usecond","1,205"\n'
    '"0","9","gemm","dram__bytes.sum","Mbyte","1,024.5"\n'
    '"0","9","gemm","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","90.00"\n'
    '"0","9","gemm","sm__warps_active.avg.pct_of_peak_sustained_active","%","25"\n'
    "==PROF== something, between, rows\n"
    '"1","9","add","gpu__time_duration.sum","us","95"\n"1","9","add","dram__bytes.sum","Kbyte","500"\n'
    '"1","9","add","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","40"\n"1","9","add","lts__t_sector_hit_rate.pct","%","60"\n'
    '"1","9","add","sm__warps_active.avg.pct_of_peak_sustained_active","","n/a"\n"2","9","add","gpu__time_duration.sum","ns","5000"\n'
)
ROCPROFV3_JSON = json.dumps(
    {
        "rocprofiler-sdk-tool": [
            {
                "kernel_symbols": [{"kernel_id": 7, "formatted_kernel_name": "gemm"}],
                "buffer_records": {
                    "kernel_dispatch": [
                        {"start_timestamp": 10, "end_timestamp": 40, "dispatch_info": {"kernel_id": 7}},
                        {"start_timestamp": 50, "end_timestamp": 60, "dispatch_info": {"kernel_id": 8}},
                    ]
                },
            }
        ]
    }
)


def kernels_of(path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    tool, table = read_file(path)
    return tool, {row.name: (row.calls, row.total_ns) for row in table.kernels}


@pytest.mark.parametrize(
    ("text", "tool", "kernels"),
    [
        (ROCPROF_STATS, "rocprof", {"Cijk_A(x, y)": (4, 4000), "relu": (2, 1000)}),
        (ROCPROFV2_TRACE, "rocprof", {"conv": (2, 500), "relu": (1, 100)}),
        (ROCPROFV3_STATS, "rocprof", {"gemm": (3, 900)}),
        (ROCPROFV3_COUNTERS, "rocprof", {"gemm": (2, 400)}),
        (NSYS_STATS, "nsys", {"void gemm<float, int>(T1)": (3, 3000), "copy": (1, 1000)}),
        (NSYS_ALL, "nsys", {"gemm": (5, 2_500_000)}),
        ("\ufeff" + ROCPROF_STATS, "rocprof", {"Cijk_A(x, y)": (4, 4000), "relu": (2, 1000)}),
        (NCU, "ncu", {"gemm": (1, 1_205_000), "add": (2, 100_000)}),
        (NCU_DETAILS, "ncu", {"gemm": (1, 12_500), "relu": (1, 900)}),
        (ROCPROFV3_JSON, "rocprofv3", {"gemm": (1, 30), "kernel 8": (1, 10)}),
    ],
    ids=[
        "rocprof stats",
        "rocprofv2",
        "rocprofv3 stats",
        "rocprofv3 counters",
        "nsys stats",
        "nsys, all reports in ms",
        "with a byte order mark",
        "ncu",
        "ncu details",
        "rocprofv3 json",
    ],
)
def test_the_tool_is_known_by_its_file(
    tmp_path: Path, text: str, tool: str, kernels: dict[str, tuple[int, int]]
) -> None:
    path = tmp_path / "anything.txt"
    path.write_text(text)
    assert kernels_of(path) == (tool, kernels)


def test_a_packed_table_of_rocprof_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(ROCPROFV3_JSON.encode()))
    assert kernels_of(path) == ("rocprofv3", {"gemm": (1, 30), "kernel 8": (1, 10)})


@pytest.mark.parametrize(
    "text",
    [ROCPROF_STATS, ROCPROFV2_TRACE, ROCPROFV3_STATS, ROCPROFV3_COUNTERS, NSYS_STATS, NCU],
    ids=["rocprof", "rocprofv2", "rocprofv3 stats", "rocprofv3 counters", "nsys", "ncu"],
)
def test_renamed_columns_an_empty_file_and_a_header_alone_are_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.csv"
    renamed = text
    for name in ("Name", "Kernel_Name", "Kernel Name"):
        renamed = renamed.replace(f'"{name}"', '"Title"').replace(f",{name}", ",Title")
    header = next(line for line in text.splitlines() if "Name" in line)
    for wrong in (renamed, "", "\n \n", header):
        path.write_text(wrong)
        with pytest.raises(TraceError) as caught:
            read_file(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_what_is_whole_in_a_cut_file_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv"
    path.write_text(ROCPROFV2_TRACE[:-12])
    assert kernels_of(path)[1] == {"conv": (2, 500)}
    path.write_text(ROCPROFV3_JSON[:-20])
    with pytest.raises(TraceError, match="not whole JSON"):
        read_file(path)


def test_counters_of_rocm_are_shares_weighted_by_time(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text(ROCPROFV3_COUNTERS)
    _, table = read_file(path)
    found = {one.name: one for one in counters_of(table.readings, [])}
    assert found["lds_conflicts"].value == pytest.approx((0.2 * 100 + 0 * 300) / 400)
    assert found["occupancy"].value == pytest.approx((0.5 * 100 + 0.9 * 300) / 400)
    assert found["lds_conflicts"].verdict == "fine"
    path.write_text(ROCPROFV3_COUNTERS.replace('"LDSBankConflict",0.0', '"LDSBankConflict",20.0'))
    assert counters_of(read_file(path)[1].readings, [])[-1].verdict == "poor"


def test_counters_in_ncus_own_words(tmp_path: Path) -> None:
    path = tmp_path / "details.csv"
    path.write_text(NCU_DETAILS)
    found = {one.name: one.value for one in counters_of(read_file(path)[1].readings, [])}
    assert found == {"bandwidth": pytest.approx(0.405), "occupancy": pytest.approx(0.25)}


def test_databases_of_nsys_and_of_rocm_7(tmp_path: Path) -> None:
    nsys, rocpd, other = tmp_path / "a.sqlite", tmp_path / "b.db", tmp_path / "c.db"
    with closing(sqlite3.connect(nsys)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        connection.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, demangledName INTEGER)'
        )
        connection.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 1)", [(0, 10), (20, 50)])
    with closing(sqlite3.connect(rocpd)) as connection, connection:
        connection.execute('CREATE TABLE k (name TEXT, start INTEGER, "end" INTEGER)')
        connection.execute("CREATE VIEW kernels AS SELECT * FROM k")
        connection.execute("INSERT INTO k VALUES ('relu', 5, 9)")
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE people (name TEXT)")
    assert kernels_of(nsys) == ("nsys", {"gemm": (2, 40)})
    assert kernels_of(rocpd) == ("rocprofv3", {"relu": (1, 4)})
    with pytest.raises(TraceError, match="without kernels Redline knows; it has people"):
        read_file(other)
    nsys.write_bytes(nsys.read_bytes()[:200])
    with pytest.raises(TraceError, match="cannot read"):
        read_file(nsys)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"traceEvents": []}', "is a timeline: read it with 'redline profile"),
        (b'{"a": 1}', "none that Redline knows"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is no kernel table Redline knows"),
        (ROCPROFV3_STATS.splitlines()[0].encode(), "has the columns of rocprof --stats and no row"),
        (ROCPROFV3_STATS[:100].encode(), "has the columns of rocprof --stats and no row"),
        (ROCPROF_STATS.replace("TotalDurationNs", "Total").encode(), "its column 'TotalDurationNs' is missing"),
        (
            NSYS_STATS.replace("Instances", "Calls").encode(),
            "looks like a table of nsys stats, but its column 'Instances'",
        ),
        (
            NCU.replace("Metric Value", "Value").encode(),
            "looks like a table of ncu --csv, but its column 'Metric Value'",
        ),
        (b"hello\nworld\n", "is no kernel table Redline knows"),
        (b'{"rocprofiler-sdk-tool": []}', "recorded no kernel"),
    ],
)
def test_other_files_say_what_to_do(tmp_path: Path, body: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(body)
    with pytest.raises(TraceError, match=says):
        read_file(path)
    with pytest.raises(TraceError, match="no such file"):
        read_file(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="is a folder"):
        read_file(tmp_path)


def test_a_report_that_is_not_exported_yet_says_how(tmp_path: Path) -> None:
    for name, command in (("a.nsys-rep", "nsys stats -r cuda_gpu_kern_sum"), ("b.ncu-rep", "ncu --import")):
        (tmp_path / name).write_bytes(b"\x01\x02")
        with pytest.raises(TraceError, match=command):
            read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (ROCPROF_STATS, None),
        (ROCPROF_STATS.rstrip(), None),
        ("\n" + NSYS_STATS, None),
        (ROCPROF_STATS.replace(",1000,500", ",abc,500"), "1 row of"),
        (ROCPROF_STATS.replace(",1000,500", ",-5,500"), "1 row of"),
        (ROCPROFV2_TRACE[:-12], "1 row of"),
        (ROCPROFV2_TRACE.replace("100,400", "x,400")[:-12], "2 rows of"),
        (NCU[:-9], "1 row of"),
        (ROCPROFV3_COUNTERS, None),
        (
            ROCPROFV3_COUNTERS.replace("LDSBankConflict", "SQ_LDS_BANK_CONFLICT"),
            "not explained here: SQ_LDS_BANK_CONFLICT",
        ),
    ],
)
def test_what_is_left_out_is_told(tmp_path: Path, text: str, lost: str | None) -> None:
    path = tmp_path / "file.csv"
    path.write_text(text)
    notes = [str(one) for one in read_file(path)[1].notes if "cold caches" not in str(one)]
    assert notes[0].startswith(lost) if lost else not notes, notes
    both = [read_file(path)[1], read_file(path)[1]]
    assert merged(both).notes == both[0].notes, "several files keep what each one said"


def test_several_files_add_up(tmp_path: Path) -> None:
    tables = []
    for number, text in enumerate((ROCPROFV3_STATS, ROCPROFV3_STATS, ROCPROF_STATS)):
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        tables.append(read_file(path)[1])
    rows = {row.name: row for row in merged(tables).kernels}
    assert (rows["gemm"].calls, rows["gemm"].total_ns, rows["gemm"].min_ns, rows["gemm"].max_ns) == (6, 1800, 200, 400)
    assert rows["relu"].calls == 2


# Tools


def read(tool: str, folder: Path, file: str, text: str) -> dict[str, tuple[int, int]]:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {row.name: (row.calls, row.total_ns) for row in TOOLS.get(tool).read(folder).kernels}


@pytest.mark.parametrize(
    ("tool", "file", "text", "kernels"),
    [
        ("ncu", "ncu.csv", NCU, {"gemm": (1, 1_205_000), "add": (2, 100_000)}),
        ("nsys", "kernels.csv", NSYS_STATS, {"void gemm<float, int>(T1)": (3, 3000), "copy": (1, 1000)}),
        ("rocprof", "results.stats.csv", ROCPROF_STATS, {"Cijk_A(x, y)": (4, 4000), "relu": (2, 1000)}),
        ("rocprofv2", "results.csv", ROCPROFV2_TRACE, {"conv": (2, 500), "relu": (1, 100)}),
        ("rocprofv3", "host/results_kernel_trace.csv", ROCPROFV2_TRACE, {"conv": (2, 500), "relu": (1, 100)}),
        ("rocprofv3", "host/results_kernel_stats.csv", ROCPROFV3_STATS, {"gemm": (3, 900)}),
        ("rocprof-compute", "workload/MI300X/pmc_perf.csv", ROCPROFV2_TRACE, {"conv": (2, 500), "relu": (1, 100)}),
    ],
)
def test_a_tool_reads_its_own_files(
    tmp_path: Path, tool: str, file: str, text: str, kernels: dict[str, tuple[int, int]]
) -> None:
    (tmp_path / "analysis.txt").touch()
    assert read(tool, tmp_path, file, text) == kernels


def test_statistics_are_preferred_and_what_a_table_covers_is_told(tmp_path: Path) -> None:
    read("rocprofv3", tmp_path, "a_kernel_trace.csv", ROCPROFV2_TRACE)
    assert read("rocprofv3", tmp_path, "a_kernel_stats.csv", ROCPROFV3_STATS) == {"gemm": (3, 900)}
    (told,) = TOOLS.get("rocprofv3").read(tmp_path).notes
    assert "the whole worker" in str(told)


def test_tools_look_only_where_they_are_told_to(tmp_path: Path) -> None:
    words = TOOLS.get("ncu").prefix(tmp_path)
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[words.index("--clock-control") + 1] == "none"
    nsys = TOOLS.get("nsys")
    assert "--capture-range-end=stop" in nsys.prefix(tmp_path)  # else it ends the worker with the range
    assert str(tmp_path / "report.nsys-rep") in nsys.follow_ups(tmp_path)
    assert TOOLS.get("rocprofv3").prefix(tmp_path)[-1] == "--"


def test_counters_are_weighted_by_time_and_carry_their_meaning(tmp_path: Path) -> None:
    read("ncu", tmp_path, "ncu.csv", NCU)
    table = TOOLS.get("ncu").read(tmp_path)
    found = {(one.name, one.kernel): one for one in counters_of(table.readings, ["add"])}
    overall = found[("bandwidth", None)]
    assert overall.value == pytest.approx((0.9 * 1205 + 0.4 * 95) / 1300)
    assert (overall.verdict, overall.unit) == ("memory-bound", "share")
    assert found[("bandwidth", "add")].verdict == "fine"
    assert found[("occupancy", None)].verdict == "poor"
    assert found[("l2_hits", None)].verdict == "poor"
    assert found[("traffic", None)].value == pytest.approx(1_025_000_000)
    assert found[("traffic", None)].unit == "bytes"
    assert ("occupancy", "add") not in found  # n/a is no number
    assert bandwidth_share(found.values()) == overall.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "run as root"),
        ("==PROF== Connected\n==ERROR== Failed to do it\n", "Failed to do it"),
        ("==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        (NCU_HEADER, "no kernel was recorded"),
        ("", "no kernel was recorded"),
    ],
)
def test_no_kernels_come_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read("ncu", tmp_path, "ncu.csv", text)


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


def test_counters_in_the_analysis_of_rocprof_compute(tmp_path: Path) -> None:
    (tmp_path / "analysis.txt").write_text(ANALYSIS)
    read("rocprof-compute", tmp_path, "workload/MI300X/pmc_perf.csv", ROCPROFV2_TRACE)
    table = TOOLS.get("rocprof-compute").read(tmp_path)
    found = {one.name: one for one in counters_of(table.readings, [])}
    assert {name: one.verdict for name, one in found.items()} == {
        "bandwidth": "memory-bound",
        "occupancy": "poor",
        "l1_hits": "poor",
        "l2_hits": "fine",
    }
    assert found["l2_hits"].value == pytest.approx(0.875)
    follow_up = TOOLS.get("rocprof-compute").follow_ups(tmp_path)
    assert str(tmp_path / "workload" / "MI300X") in follow_up


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
        TOOLS.get(tool).read(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_tool_gets_the_closest_names() -> None:
    with pytest.raises(UnknownName, match="rocprofv3"):
        TOOLS.get("rocprof3")


@pytest.mark.parametrize(
    ("convert", "value", "unit", "expected"),
    [
        (nanoseconds, 5, "ns", 5),
        (nanoseconds, 5, "nsecond", 5),
        (nanoseconds, 1.5, "us", 1500),
        (nanoseconds, 3, "ms", 3e6),
        (nanoseconds, 1, "second", 1e9),
        (nanoseconds, 7, "", 7),
        (nanoseconds, 5, "cycle", None),
        *((size_in_bytes, 2, unit, 2 * size) for unit, size in (("byte", 1), ("Kbyte", 1e3), ("Gbyte", 1e9), ("", 1))),
        (size_in_bytes, 5, "sector", None),
    ],
)
def test_units(convert: Any, value: float, unit: str, expected: float | None) -> None:
    assert convert(value, unit) == (None if expected is None else pytest.approx(expected))
