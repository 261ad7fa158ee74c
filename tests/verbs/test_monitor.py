"""The monitor, with the drivers' libraries faked at their boundary."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from redline.model.errors import UsageError
from redline.system.telemetry import amd, package_energy_j
from redline.system.telemetry.amd import AmdCard, RocmSmiCard, rocm_smi
from redline.system.telemetry.card import EnergyMeter
from redline.system.telemetry.nvml import NvmlCard
from redline.verbs.monitor import Look, Machine, log_looks, monitor, serve_metrics, total_row


class NvmlError(Exception):
    """As pynvml raises."""


class FakeNvml:
    """Answers until it is told to fail; functions that are not set are not supported by this card."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 0

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
        nvmlDeviceGetPcieThroughput=2000,
    )

    def energy() -> int:
        fake.joules += 100
        return fake.joules * 1000

    fake._answers["nvmlDeviceGetTotalEnergyConsumption"] = energy
    return fake


def looks_at(*cards: Any, times: int = 3) -> list[Look]:
    machine = Machine(cards=cards)
    return [look for _ in range(times) for look in machine.look() if look["device"] != "cpu"]


def test_a_card_that_tells_all() -> None:
    look = looks_at(NvmlCard(h200(), object()))[-1]
    assert (look["utilisation"], look["power_w"], look["clock_hz"], look["throttle"]) == (
        0.8,
        350.0,
        1.98e9,
        ("sw_power_cap",),
    )
    assert (look["pcie_sent_per_s"], look["processes"], look["energy_j"]) == (2e6, {4711: None}, 200.0)


def test_a_card_that_vanishes_is_unknown_from_then_on() -> None:
    fake = h200()
    machine = Machine(cards=[NvmlCard(fake, object())])
    before = machine.look()[1]
    fake.is_lost = True
    after = machine.look()[1]
    assert before["utilisation"] == 0.8
    assert (
        after["utilisation"],
        after["memory_used_bytes"],
        after["power_w"],
        after["throttle"],
        after["processes"],
    ) == (None,) * 5
    total = total_row([before, after])
    assert (total["mean_utilisation"].value, total["mean_power_w"].value) == (0.8, 350.0)


def test_a_mig_slice_tells_little_and_nothing_is_made_up() -> None:
    """Utilisation, power and processes are not supported there; memory is."""
    fake = FakeNvml(nvmlDeviceGetMemoryInfo=SimpleNamespace(used=10**9, total=10**10), nvmlDeviceGetName=b"MIG 1g.10gb")
    look = looks_at(NvmlCard(fake, object()))[-1]
    assert (look["name"], look["memory_used_bytes"]) == ("MIG 1g.10gb", 10**9)
    assert (look["utilisation"], look["power_w"], look["energy_j"], look["throttle"], look["processes"]) == (None,) * 5
    total = total_row([look])
    assert (
        total["mean_utilisation"].value,
        total["saturated_share"].value,
        total["energy_j"].value,
        total["throttled_s"].value,
    ) == (None,) * 4


def test_figures_that_are_texts_are_unknown() -> None:
    fake = FakeNvml(
        nvmlDeviceGetPowerUsage="N/A", nvmlDeviceGetTemperature="N/A", nvmlDeviceGetUtilizationRates="N/A",
        nvmlDeviceGetCurrentClocksEventReasons="N/A",
    )  # fmt: skip
    look = looks_at(NvmlCard(fake, object()))[-1]
    assert (look["power_w"], look["temperature_c"], look["utilisation"], look["throttle"]) == (None,) * 4


def test_an_amd_card_by_recorded_answers() -> None:
    """Of an MI250X's second die, which has no power sensor of its own."""

    class Smi:
        AmdSmiException = NvmlError

        def amdsmi_get_gpu_activity(self, _: Any) -> dict[str, Any]:
            return {"gfx_activity": 97, "umc_activity": 40, "mm_activity": "N/A"}

        def amdsmi_get_power_info(self, _: Any) -> dict[str, Any]:
            return {"current_socket_power": "N/A", "average_socket_power": 0xFFFF}

        def amdsmi_get_gpu_vram_usage(self, _: Any) -> dict[str, Any]:
            return {"vram_total": 65520, "vram_used": 1024}

        def amdsmi_get_gpu_metrics_info(self, _: Any) -> dict[str, Any]:
            return {"current_gfxclk": 1700, "current_uclk": "N/A", "temperature_hotspot": 65535}

        def amdsmi_get_energy_count(self, _: Any) -> dict[str, Any]:
            raise NvmlError

    look = looks_at(AmdCard(Smi(), object()))[-1]
    assert (look["utilisation"], look["memory_used_bytes"], look["clock_hz"]) == (0.97, 2**30, 1.7e9)
    assert (look["power_w"], look["temperature_c"], look["energy_j"], look["processes"]) == (None,) * 4


ROCM_SMI = """{"card0": {"GPU use (%)": "97", "Current Socket Graphics Package Power (W)": "301.0",
"Temperature (Sensor junction) (C)": "61.0", "sclk clock speed:": "(1700Mhz)", "sclk clock level:": "1",
"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "1073741824"},
"card1": {"GPU use (%)": "N/A", "Temperature (Sensor edge) (C)": "35.0", "sclk clock speed:": "(N/A)"}, "system": {"Driver version": "6.2"}}"""


def test_cards_by_recorded_output_of_rocm_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [b"WARNING: AMD GPU device(s) is/are in a low-power state.\n" + ROCM_SMI.encode()]
    monkeypatch.setattr(amd.shutil, "which", lambda name: f"/opt/rocm/bin/{name}")
    monkeypatch.setattr(amd.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said[0]))
    machine = Machine(cards=[RocmSmiCard(name) for name in rocm_smi()])
    _, first, second = machine.look()
    assert (first["utilisation"], first["power_w"], first["temperature_c"], first["clock_hz"]) == (
        0.97,
        301.0,
        61.0,
        1.7e9,
    )
    assert (first["memory_used_bytes"], first["memory_bytes"]) == (2**30, 68_702_699_520)
    assert (second["utilisation"], second["power_w"], second["memory_used_bytes"], second["energy_j"]) == (None,) * 4
    assert (second["temperature_c"], second["clock_hz"]) == (35.0, None)
    said[0] = b"ERROR: no devices"
    assert all(look["utilisation"] is None for look in machine.look()[1:])


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
    monkeypatch.setattr(amd.shutil, "which", lambda name: None)
    assert (amd.open_amd_cards(), amd.open_amd_card(None)) == ([], None)


def test_attached_to_a_process_only_its_cards_are_shown() -> None:
    def card(*pids: int) -> NvmlCard:
        fake = h200()
        fake._answers["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=p, usedGpuMemory=1) for p in pids]
        return NvmlCard(fake, object())

    mine, others, hidden = card(os.getpid()), card(os.getppid()), card(999_999_999)
    machine = Machine(cards=[mine, others, hidden], attach=os.getpid())
    # The third one's process has a number that is unknown here, as in a container: it may be ours.
    assert [look["device"] for look in machine.look()] == ["cpu", "gpu0", "gpu2"]
    assert not machine.is_over


def test_the_attached_process_may_end_at_any_moment() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    machine = Machine(cards=[], attach=child.pid)
    assert not machine.is_over
    child.communicate(b"\n")
    assert machine.is_over
    assert machine.look()[0]["processes"] == {}


def test_there_must_be_something_to_attach_to() -> None:
    with pytest.raises(UsageError, match="there is no process 999999999"):
        monitor(attach=999_999_999)
