"""The user's own loaders: `file.py:loaders` returns a training loader and a validation loader."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from redline.bench.data.source import DATA, USER, DataSource, LoaderData, refuse
from redline.bench.workload.called import batch_parameter, call_with
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.sources.user import check_object, load_function
from redline.errors import BenchError, SpecError
from redline.spec import DataSpec, WorkloadSpec

EXPECTED = "expected (train_loader, validation_loader)"


class UserLoaders(DataSource):
    def check(self, spec: DataSpec, workload: WorkloadSpec) -> None:
        why = "your loaders decide it"
        refuse(spec, "folder", "download", "train_samples", "val_samples", "workers", "prefetch_factor", why=why)
        refuse(spec, "pin_memory", "persistent_workers", "on_device", "augment", why=why)
        check_object(spec.name, what="data", called="function")

    def open(self, spec: DataSpec, workload: WorkloadSpec) -> LoaderData:
        function = load_function(spec.name, "data")
        takes_batch = batch_parameter(function, spec.name)
        if takes_batch is None and workload.batch is not None:
            raise SpecError(f"batch {workload.batch} cannot be honoured: {spec.name} takes no batch")
        if takes_batch is not None and workload.batch is None and takes_batch.default is inspect.Parameter.empty:
            raise SpecError(f"{spec.name} must be told the batch: give --batch")
        returned = call_with(function, takes_batch, workload.batch, 0, spec.name)
        train, validation = _sorted_out(returned, spec.name)
        for loader in (train, validation):
            if isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.timeout:
                loader.timeout = spec.loader_timeout_s  # without one, a worker that hangs is waited for forever
        return LoaderData(
            name=spec.name,
            train=train,
            validation=validation,
            fingerprint=short_hash(f"{spec.name} {_length(train)} {_length(validation)}"),
            classes=_classes(train),
            has_workers=all(isinstance(each, DataLoader) and each.num_workers > 0 for each in (train, validation)),
        )


def _sorted_out(returned: Any, name: str) -> tuple[Iterable[Any], Iterable[Any]]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise BenchError("user", f"{name} returned {type(returned).__name__}; {EXPECTED}")
    for each in returned:
        if not hasattr(each, "__iter__") or hasattr(each, "__next__"):
            raise BenchError(
                "user", f"{name} returned {type(each).__name__}, which cannot be gone through twice; {EXPECTED}"
            )
    return returned[0], returned[1]


def _classes(loader: Any) -> int | None:
    """What the data set says of itself, as torchvision's do."""
    found = getattr(getattr(loader, "dataset", None), "classes", None)
    return len(found) if isinstance(found, list | tuple) and found else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


DATA.register(USER)(UserLoaders())
