"""`redline workshop`: seven exercises on the learner's own machine, checked and written down by the tool.

What the hardware cannot do is skipped, with an example that is marked as one. Results are written after every exercise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from redline.api.exercises import EXERCISES, Lab
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.errors import RedlineError, SpecError
from redline.report.folder import check_folder
from redline.report.workshop import ExerciseResult, WorkshopResult, results_text


def workshop(
    exercises: list[int] | None = None,
    *,
    folder: str | Path = ".",
    quick: bool = False,
    resume: bool = False,
    device: str = "auto",
    on_exercise: Callable[[ExerciseResult], None] = lambda result: None,
    on_start: Callable[[int, str, str], None] = lambda number, title, explain: None,
    on_begin: Callable[[WorkshopResult], None] = lambda result: None,
    workspace: Workspace | None = None,
) -> WorkshopResult:
    """Do the exercises, and fill in `my_workshop_results.txt` and `.json` in `folder` after each one.

    All seven start over; with `resume` those that are done stay. Where only some are named, the results of the others in
    that folder stay as they are. `on_begin` hears of the device, the model and what is done already.
    """
    chosen = exercises or [number for number, _, _, _ in EXERCISES]
    for number in chosen:
        if not 1 <= number <= len(EXERCISES):
            raise SpecError(f"exercise must be from 1 to {len(EXERCISES)}, got {number}")
    folder = Path(folder)
    if resume and not results_file(folder).exists():
        raise SpecError(f"nothing to resume in {folder}: leave out --resume")
    check_folder(folder)
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "simple_cnn", device=device)[0])[0].device
        lab = _lab(resolved, opened, quick)
        name = opened.environment(resolved).device.name
        result = WorkshopResult(device=resolved, device_name=name, model=lab.model, batch=lab.batch, quick=quick)
        done = _kept(folder, result) if resume or exercises else {}
        settled = {number for number, found in done.items() if resume and found.skipped is None}
        on_begin(msgspec.structs.replace(result, exercises=tuple(done[number] for number in sorted(settled))))
        for number, title, explain, exercise in EXERCISES:
            if number not in chosen or number in settled:
                continue
            on_start(number, title, explain)
            try:
                found = exercise(lab, ExerciseResult(number=number, title=title, explain=explain))
            except RedlineError as error:
                found = ExerciseResult(number=number, title=title, explain=explain, skipped=str(error).splitlines()[0])
            done[number] = found
            result = msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))
            _write(folder, result)
            on_exercise(found)
    return msgspec.structs.replace(result, exercises=tuple(done[key] for key in sorted(done)))


def _lab(device: str, workspace: Workspace, quick: bool) -> Lab:
    if device != "cpu":
        return Lab(workspace, device, "resnet50", 32, None, quick)
    return Lab(workspace, device, "resnet18" if not quick else "simple_cnn", 4, 64 if not quick else 32, quick)


def results_file(folder: Path) -> Path:
    return folder / "my_workshop_results.json"


def _kept(folder: Path, now: WorkshopResult) -> dict[int, ExerciseResult]:
    """What an earlier walk on the same device found; nothing where there was none."""
    path = results_file(folder)
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        kept = msgspec.convert(
            {key: value for key, value in plain.items() if key not in ("schema", "kind")}, WorkshopResult
        )
    except FileNotFoundError:
        return {}
    except (ValueError, msgspec.ValidationError) as error:
        raise SpecError(f"cannot read {path}: {error}; start in another folder (--out)") from None
    if (kept.device_name, kept.model, kept.quick) != (now.device_name, now.model, now.quick):
        raise SpecError(f"{path} is of another device or mode: start in another folder (--out)")
    return {exercise.number: exercise for exercise in kept.exercises}


def _write(folder: Path, result: WorkshopResult) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my_workshop_results.txt").write_text(results_text(result), encoding="utf-8")
        results_file(folder).write_text(result.to_json(), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write into {folder}: {error.strerror}") from None
