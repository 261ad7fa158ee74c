"""The user's own loaders: `file.py:loaders` returns a training loader and a validation loader."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from redline.bench.data.source import DATA, USER, DataSource, LoaderData, refuse
from redline.bench.workload.called import batch_parameter, call_with
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.sources.user import check_object, load_function
from redline.errors import BenchError, SpecError
from redline.note import Note, note
from redline.spec import DataSpec, WorkloadSpec

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
        returned = call_with(function, takes_batch, workload.batch, 0, spec.name)
        train, validation = _sorted_out(returned, spec.name)
        loaders = [each for each in (train, validation) if each is not None]
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.timeout:
                loader.timeout = spec.loader_timeout_s  # without one, a worker that hangs is waited for forever
        return LoaderData(
            name=spec.name,
            train=train,
            validation=validation,
            fingerprint=short_hash(f"{spec.name} {_length(train)} {_length(validation)}"),
            classes=_classes(train),
            has_workers=all(isinstance(each, DataLoader) and each.num_workers > 0 for each in loaders),
            queued=train.num_workers * (train.prefetch_factor or 0) if isinstance(train, DataLoader) else 0,
            notes=tuple(_what_is_odd(train, validation)),
        )


def _sorted_out(returned: Any, name: str) -> tuple[Iterable[Any], Iterable[Any] | None]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        many = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise BenchError("user", f"{name} returned {type(returned).__name__}{many}; {EXPECTED}")
    for number, each in enumerate(returned):
        if each is None and number:
            continue
        if inspect.isfunction(each):
            raise BenchError("user", f"{name} returned a function, which must be called first; {EXPECTED}")
        if not hasattr(each, "__iter__") or hasattr(each, "__next__"):
            raise BenchError(
                "user", f"{name} returned {type(each).__name__}, which cannot be gone through twice; {EXPECTED}"
            )
    return returned[0], returned[1]


def _what_is_odd(train: Any, validation: Any) -> Iterator[Note]:
    seen, held_out = (_rows(each) for each in (train, validation))
    if train is validation or (seen and held_out and seen[0] is held_out[0] and seen[1] & held_out[1]):
        both = len(seen[1] & held_out[1]) if seen and held_out else 0
        many = (
            f"{both} of the {len(held_out[1])} held-out samples are"
            if both and held_out
            else "the held-out samples are"
        )
        yield note("held-out-is-trained-on", f"{many} trained on, too: validation says nothing about new ones")


def _rows(loader: Any) -> tuple[Any, set[int]] | None:
    """The data set below a loader's subsets, and which rows of it are loaded; None where that cannot be told."""
    data = getattr(loader, "dataset", None)
    if data is None or isinstance(data, IterableDataset) or _length(data) is None:
        return None
    rows = list(range(len(data)))
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        rows = list(sampler.indices)
    while isinstance(data, Subset):
        rows, data = [int(data.indices[row]) for row in rows], data.dataset
    return data, set(rows)


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
