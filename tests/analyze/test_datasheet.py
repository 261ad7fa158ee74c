"""A card is known by the whole of its name, or not at all."""

from __future__ import annotations

import pytest

from redline.analyze.roofline import Datasheet


@pytest.mark.parametrize(
    ("driver_says", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_known_cards(driver_says: str, card: str) -> None:
    found = Datasheet.of(driver_says)
    assert found.card == card


@pytest.mark.parametrize(
    "driver_says",
    [
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "Quadro T4",
        "AMD EPYC",
        "some cuda",
    ],
)
def test_nothing_is_guessed(driver_says: str) -> None:
    assert Datasheet.of(driver_says) is None


def test_units_and_sources() -> None:
    found = Datasheet.of("NVIDIA H200")
    assert found.flops_per_s["bf16"] == pytest.approx(989.4e12)
    assert found.bytes_per_s == pytest.approx(4.8e12)
    assert found.verified
    assert "H200" in found.source
