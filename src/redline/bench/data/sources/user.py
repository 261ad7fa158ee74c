"""This source reads the user's own loaders: `file.py:loaders` returns a training loader and a validation loader."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, Subset

from redline.bench.data.source import DATA, USER, DataSource, LoaderData, refuse
from redline.bench.workload.called import batch_parameter, call_with
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.sources.user import check_object, load_function
from redline.model.errors import BenchError, SpecError
from redline.model.note import note
from redline.model.spec import DataSpec, WorkloadSpec

EXPECTED = "expected (train_loader, validation_loader), the second of which may be None"


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
        train, validation = _checked(call_with(function, takes_batch, workload.batch, 0, spec.name), spec.name)
        loaders = [loader for loader in (train, validation) if loader is not None]
        workers = [loader.num_workers if isinstance(loader, DataLoader) else 0 for loader in loaders]
        for loader, count in zip(loaders, workers, strict=True):
            if count and not loader.timeout:
                # Without a timeout we would wait for a worker that hangs for ever.
                loader.timeout = spec.loader_timeout_s
        classes = getattr(getattr(train, "dataset", None), "classes", None)
        text = "the held-out samples are trained on, too: validation says nothing about new ones"
        return LoaderData(
            name=spec.name,
            train=train,
            validation=validation,
            fingerprint=short_hash(f"{spec.name} {_length(train)} {_length(validation)}"),
            classes=len(classes) if isinstance(classes, list | tuple) and classes else None,
            workers=workers[0],
            has_workers=all(workers),
            queued=workers[0] * (train.prefetch_factor or 0) if workers[0] else 0,
            notes=(note("held-out-is-trained-on", text),) if _share_samples(train, validation) else (),
        )


def _checked(returned: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        many = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise BenchError("user", f"{name} returned {type(returned).__name__}{many}; {EXPECTED}")
    for loader in returned[: 1 if returned[1] is None else 2]:
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
            raise BenchError(
                "user", f"{name} returned {type(loader).__name__}, which cannot be gone through twice; {EXPECTED}"
            )
    return returned[0], returned[1]


def _share_samples(train: Any, validation: Any) -> bool:
    """Returns whether both loaders read some of the same rows of one data set, as far as their subsets tell."""
    sets = [getattr(loader, "dataset", loader) for loader in (train, validation)]
    bases = [data.dataset if isinstance(data, Subset) else data for data in sets]
    rows = [set(data.indices) for data in sets if isinstance(data, Subset)]
    return bases[0] is bases[1] and (len(rows) < 2 or bool(rows[0] & rows[1]))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


DATA.register(USER)(UserLoaders())
