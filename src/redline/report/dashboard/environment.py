"""Where the records were measured: each distinct place once, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from redline.record import Environment, RunRecord
from redline.spec import Spec
from redline.units import format_bytes

VERSIONS_FIRST = ("torch", "torchvision", "cuda", "hip", "cudnn", "triton")


class Place(Spec):
    device: str
    facts: tuple[tuple[str, str], ...]
    records: int


def places_of(records: Sequence[RunRecord]) -> list[Place]:
    counts: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for record in records:
        if record.prepared is not None:
            environment = record.prepared.environment
            place = (environment.device.name or environment.device.kind, tuple(_facts(environment)))
            counts[place] = counts.get(place, 0) + 1
    return [Place(device=device, facts=facts, records=count) for (device, facts), count in counts.items()]


def _facts(environment: Environment) -> list[tuple[str, str]]:
    device = environment.device
    limit = f", {device.power_limit_w:.0f} W" if device.power_limit_w else ""
    memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
    cores = f"{environment.logical_cores} logical cores" if environment.logical_cores else ""
    names = sorted(environment.versions, key=lambda name: (_rank(name), name))
    told = (
        ("device", f"{device.kind}, {memory}{limit}" if memory else f"{device.kind}{limit}"),
        ("driver", device.driver or ""),
        ("CPU", ", ".join(part for part in (environment.cpu, cores) if part)),
        ("threads", str(environment.threads) if environment.threads else ""),
        ("platform", environment.platform),
        ("Python", environment.python),
        ("versions", ", ".join(f"{name} {environment.versions[name]}" for name in names)),
        ("Redline", environment.redline),
        ("variables", ", ".join(_variables(environment))),
        ("code", _code(environment)),
    )
    return [(name, value) for name, value in told if value]


def _variables(environment: Environment) -> list[str]:
    """Those that say how; where something lies changes no speed and is nobody else's business."""
    told = sorted(environment.variables.items())
    return [f"{name}={value}" for name, value in told if not name.endswith(("_DIR", "_PATH", "_HOME"))]


def _rank(name: str) -> int:
    return VERSIONS_FIRST.index(name) if name in VERSIONS_FIRST else len(VERSIONS_FIRST)


def _code(environment: Environment) -> str:
    if environment.git_commit is None:
        return ""
    return f"{environment.git_commit[:12]}{' with local changes' if environment.git_dirty else ''}"
