"""The monitor, with the drivers' libraries faked at their boundary."""

from __future__ import annotations

import io
import socket
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from redline.model.errors import UsageError
from redline.system.telemetry import amd, package_energy_j
from redline.system.telemetry.amd import AmdCard
from redline.system.telemetry.card import EnergyMeter
from redline.system.telemetry.nvml import NvmlCard
from redline.verbs.monitor import Machine, log_looks, monitor, serve_metrics, total_row


class NvmlError(Exception):
    """As pynvml raises."""


class FakeNvml:
    """Answers until it is told to fail; functions that are not set are not supported by this card."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.is_lost = False
        self.joules = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*_: Any) -> Any:
            if self.is_lost or name not in self._answers:
                raise NvmlError(name)
            found = self._answers[name]
            return found() if callable(found) else found

        return answer


def h200() -> FakeNvml:
    fake = FakeNvml(
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=80),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=2 * 10**9, total=10**11),
        nvmlDeviceGetPowerUsage=350_000,
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetTemperature=55,
        nvmlDeviceGetName="NVIDIA H200",
        nvmlDeviceGetCurrentClocksEventReasons=0x04,
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=4711, usedGpuMemory=None)],
    )

    def energy() -> int:
        fake.joules += 100
        return fake.joules * 1000

    fake._answers["nvmlDeviceGetTotalEnergyConsumption"] = energy
    return fake


UNKNOWN = ("utilisation", "power_w", "temperature_c", "energy_j", "throttle", "processes")
N_A = dict.fromkeys(
    ("PowerUsage", "Temperature", "UtilizationRates", "CurrentClocksEventReasons", "TotalEnergyConsumption"), "N/A"
)
MIG = {"MemoryInfo": SimpleNamespace(used=10**9, total=10**10), "Name": b"MIG 1g.10gb"}


def test_a_card_that_tells_all_until_it_vanishes() -> None:
    fake = h200()
    machine = Machine(cards=[NvmlCard(fake, object())])
    looks = [machine.look()[1] for _ in range(3)]
    fake.is_lost = True
    after = machine.look()[1]
    known = looks[-1]
    assert [known[name] for name in ("utilisation", "power_w", "clock_hz", "energy_j")] == [0.8, 350.0, 1.98e9, 200.0]
    assert (known["throttle"], known["processes"]) == (("sw_power_cap",), {4711: None})
    assert {after[name] for name in UNKNOWN if name != "energy_j"} == {None}
    total = total_row([*looks, after])
    assert (total["mean_utilisation"].value, total["mean_power_w"].value) == pytest.approx((0.8, 350.0))


@pytest.mark.parametrize("answers", [MIG, N_A])
def test_what_a_card_does_not_tell_is_not_made_up(answers: dict[str, Any]) -> None:
    """A MIG slice knows its memory alone, and some drivers write "N/A"."""
    fake = FakeNvml(**{f"nvmlDeviceGet{name}": value for name, value in answers.items()})
    look = Machine(cards=[NvmlCard(fake, object())]).look()[1]
    assert {look[name] for name in UNKNOWN} == {None}
    assert (look["name"], look["memory_used_bytes"]) == (("MIG 1g.10gb", 10**9) if answers is MIG else ("GPU", None))
    total = total_row([look])
    totals = ("mean_utilisation", "saturated_share", "energy_j", "throttled_s")
    assert {total[name].value for name in totals} == {None}


def test_an_amd_card_by_recorded_answers() -> None:
    """Of an MI250X's second die, which has no power sensor of its own and does not count energy."""
    answers = {
        "gpu_activity": {"gfx_activity": 97, "umc_activity": 40, "mm_activity": "N/A"},
        "power_info": {"current_socket_power": "N/A", "average_socket_power": 0xFFFF},
        "gpu_vram_usage": {"vram_total": 65520, "vram_used": 1024},
        "gpu_metrics_info": {"current_gfxclk": 1700, "current_uclk": "N/A", "temperature_hotspot": 65535},
    }
    functions = {f"amdsmi_get_{name}": lambda _, said=said: said for name, said in answers.items()}
    smi = SimpleNamespace(AmdSmiException=NvmlError, **functions)
    look = Machine(cards=[AmdCard(smi, object())]).look()[1]
    assert (look["utilisation"], look["memory_used_bytes"], look["clock_hz"]) == (0.97, 2**30, 1.7e9)
    assert {look[name] for name in ("power_w", "temperature_c", "energy_j", "processes")} == {None}


def test_throttled_time_and_energy_are_added_up() -> None:
    looks = [
        {"device": "gpu0", "name": "x", "at_s": float(n), "throttle": ("hw_thermal",) if n in (2, 3) else (),
         "energy_j": 100.0 * n, "utilisation": 1.0 if n < 5 else 0.0}
        for n in range(10)
    ]  # fmt: skip
    total = total_row(looks)
    assert (total["throttled_s"].value, total["energy_j"].value, total["saturated_share"].value) == (2.0, 900.0, 0.5)


def test_a_counter_that_wraps_is_not_counted_backwards() -> None:
    meter = EnergyMeter()
    for counter in (10.0, 15.0, 2.0, None, 4.0):
        meter.read(counter)
    assert meter.joules == 7.0


def test_cpu_packages_are_added_and_unreadable_ones_are_unknown(tmp_path: Any) -> None:
    assert package_energy_j(tmp_path) is None
    for name, joules in (("intel-rapl:0", 3), ("intel-rapl:1", 4), ("intel-rapl:0:0", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(joules * 10**6))
    assert package_energy_j(tmp_path) == 7.0
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert package_energy_j(tmp_path) is None


def test_the_log_leaves_unknown_cells_empty() -> None:
    file = io.StringIO()
    log_looks(file)([{"device": "gpu0", "name": "x", "at_s": 1.0, "processes": {7: None}, "throttle": ("a", "b")}])
    header, row = (line.split(",") for line in file.getvalue().splitlines())
    cells = dict(zip(header, row, strict=True))
    assert (cells["power_w"], cells["processes"], cells["throttle"], cells["utilisation"]) == ("", "7:", "a;b", "")


def test_the_monitor_ends_with_its_time_and_has_the_cpu() -> None:
    result = monitor(duration=0.02, interval=0.01, machine=Machine(cards=[]))
    assert [str(row["device"]).split()[0] for row in result.rows] == ["cpu"]
    assert result.table("looks").rows


def test_the_latest_look_is_served_to_prometheus() -> None:
    client = pytest.importorskip("prometheus_client")
    assert client is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hear = serve_metrics(f":{port}")
    for busy in (0.25, 0.5):
        hear([{"device": "gpu0", "name": "H200", "utilisation": busy, "power_w": None}])
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'redline_utilisation{device="gpu0",name="H200"} 0.5' in page
    assert "redline_power_w{" not in page
    with pytest.raises(UsageError, match="needs a port"):
        serve_metrics("everywhere")
    with pytest.raises(UsageError, match="cannot serve"):
        serve_metrics(f":{port}")


def test_a_library_of_amd_that_cannot_be_loaded_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As without ROCm below it."""
    (tmp_path / "amdsmi.py").write_text("raise OSError('libamd_smi.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    assert amd.open_amd_cards() == []
