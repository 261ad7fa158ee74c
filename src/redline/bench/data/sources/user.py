"""The user's own loaders: `file.py:loaders` returns a training loader and a validation loader."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler, TensorDataset
from torchvision.datasets import DatasetFolder

from redline.bench.data.source import DATA, USER, DataSource, LoaderData, refuse
from redline.bench.workload.called import batch_parameter, call_with
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.sources.user import check_object, load_function
from redline.model.errors import BenchError, SpecError
from redline.model.note import Note, note
from redline.model.spec import DataSpec, WorkloadSpec

COMPARED_BYTES = 2**28
"""Arrays up to this size are compared sample by sample."""
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
        loaders = [loader for loader in (train, validation) if loader is not None]
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.timeout:
                loader.timeout = spec.loader_timeout_s  # without one, a worker that hangs is waited for forever
        return LoaderData(
            name=spec.name,
            train=train,
            validation=validation,
            fingerprint=short_hash(f"{spec.name} {_length(train)} {_length(validation)}"),
            classes=_classes(train),
            workers=train.num_workers if isinstance(train, DataLoader) else 0,
            has_workers=all(isinstance(loader, DataLoader) and loader.num_workers > 0 for loader in loaders),
            queued=train.num_workers * (train.prefetch_factor or 0) if isinstance(train, DataLoader) else 0,
            notes=tuple(_what_is_odd(train, validation)),
            in_copies=isinstance(train, DataLoader)
            and train.num_workers > 1
            and isinstance(train.dataset, IterableDataset),
        )


def _sorted_out(returned: Any, name: str) -> tuple[Iterable[Any], Iterable[Any] | None]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        many = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise BenchError("user", f"{name} returned {type(returned).__name__}{many}; {EXPECTED}")
    for number, loader in enumerate(returned):
        if loader is None and number:
            continue
        if inspect.isfunction(loader):
            raise BenchError("user", f"{name} returned a function, which must be called first; {EXPECTED}")
        if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
            raise BenchError(
                "user", f"{name} returned {type(loader).__name__}, which cannot be gone through twice; {EXPECTED}"
            )
    return returned[0], returned[1]


def _what_is_odd(train: Any, validation: Any) -> Iterator[Note]:
    seen, held_out = (_samples(loader) for loader in (train, validation))
    known = set(seen)
    both = sum(sample in known for sample in held_out)
    if train is validation or both:
        many = f"{both} of the {len(held_out)} held-out samples are" if both else "the held-out samples are"
        yield note("held-out-is-trained-on", f"{many} trained on, too: validation says nothing about new ones")


def _samples(loader: Any) -> list[Any]:
    """Returns what tells each sample of a loader from others, below its subsets. It is empty if that is not known.

    The same files, or the same arrays, are the same samples in whichever object they lie.
    """
    data = getattr(loader, "dataset", None)
    if data is None or isinstance(data, IterableDataset) or _length(data) is None:
        return []
    rows = list(range(len(data)))
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        rows = list(sampler.indices)
    while isinstance(data, Subset):
        rows, data = [int(data.indices[row]) for row in rows], data.dataset
    if isinstance(data, DatasetFolder):
        return [data.samples[row][0] for row in rows]
    held = data.tensors[0] if isinstance(data, TensorDataset) else getattr(data, "data", None)
    if isinstance(held, np.ndarray) and held.dtype.kind in "biuf":
        held = torch.as_tensor(held)
    if not isinstance(held, Tensor) or not held.numel() or len(held) != _length(data) or held.nbytes > COMPARED_BYTES:
        return [(id(data), row) for row in rows]
    pixels = held.detach().cpu().to_dense().reshape(len(held), -1).contiguous().view(torch.uint8).numpy()
    return [hash(pixels[row].tobytes()) for row in rows]


def _classes(loader: Any) -> int | None:
    """Returns how many classes the data set says it has, as torchvision's do."""
    found = getattr(getattr(loader, "dataset", None), "classes", None)
    return len(found) if isinstance(found, list | tuple) and found else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


DATA.register(USER)(UserLoaders())
