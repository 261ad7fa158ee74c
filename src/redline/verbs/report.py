"""`redline report`: choose records, and write a folder with their dashboard, Markdown, pictures, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from redline.analyze.measurement import CeilingsOf
from redline.analyze.profile import Profile
from redline.model.errors import RecordError, UsageError
from redline.model.files import is_file
from redline.model.metrics import Block, Headline
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.settings import OUTPUT, WHICH, setting
from redline.model.work import Ceilings
from redline.search.tune.record import KeptSearches
from redline.search.tune.summary import TuneSummary, summary_of
from redline.show.contents import contents_of
from redline.show.folder import open_in_browser
from redline.show.report import ReportFiles, write_folder
from redline.show.result import Result
from redline.store import History
from redline.store.history import history_in
from redline.verbs.capture import kept_memories
from redline.verbs.tune import kept_tune
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use


class Chosen:
    """The records a report is about, and what could not be had of them."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.records: list[RunRecord] = []
        self._ids: set[str] = set()
        self.notes: list[Note] = []
        self.tunes: list[TuneSummary] = []
        """These are the searches of which all records are here, newest last."""
        self.only_files = False
        """It is true if all records were read from files, so that nothing else in this user's history belongs to them."""
        self._ceilings: list[CeilingsOf] = []

    def left_out(self, record_id: str, error: RecordError) -> None:
        self.notes.append(note("unreadable", f"left out record {record_id}: {error}", about=record_id))

    def left_out_search(self, name: str, error: RecordError) -> None:
        self.notes.append(note("unreadable", f"left out tune {name!r}: {error}", about=name))

    def know(self, ceilings_of: CeilingsOf) -> None:
        """Ceilings that were in a file beside the records."""
        self._ceilings.append(ceilings_of)

    def ceilings_of(self, record: RunRecord) -> Ceilings | None:
        return next((found for known in self._ceilings if (found := known(record)) is not None), None)

    def add(self, records: Iterable[RunRecord]) -> None:
        new = {record.id: record for record in records if record.id not in self._ids}
        self._ids |= new.keys()
        self.records += new.values()


def choose(
    what: Sequence[str] = (),
    *,
    last: bool = False,
    sweep: str | None = None,
    tune: str | None = None,
    workspace: Workspace | None = None,
) -> Chosen:
    """Chooses records by ids (or beginnings of them), files with records (exported, back-ups, other histories), or the name of a sweep or a
    tune. Without any of these it is the last command with its replicates, or else all."""
    if sum((bool(what), last, sweep is not None, tune is not None)) > 1:
        raise UsageError("choose records by their ids, by --last, by --sweep or by --tune: one of them")
    files = [Path(word) for word in what if is_file(word)]
    if what and len(files) == len(what):
        chosen = Chosen()
        chosen.only_files = True
        _add_files(chosen, files)
        return chosen
    with use(workspace) as opened, opened.reading() as history:
        if tune is not None:
            return _tune(tune, opened)
        return _sweep(sweep, history) if sweep is not None else _from_history(what, last, opened, history)


@verb(
    examples=(
        "redline report --last --open",
        "redline report --sweep resnet50-grid -o report",
        "redline report backup.redline -o report",
    ),
)
def report(
    what: Annotated[
        Any,
        setting(
            "Records; or files: a back-up, a history or what --save wrote. Default: the whole history.",
            kind=list[str],
            is_argument=True,
            shape="[ID|FILE]...",
        ),
    ] = (),
    *,
    out: Annotated[
        Any, setting("The folder to write.", short="-o", group=OUTPUT, shape="DIR", kind=str)
    ] = "redline-report",
    last: Annotated[bool, setting("The last run, with all recipes measured in it.", group=WHICH)] = False,
    sweep: Annotated[str | None, setting("The finished cells of a sweep, by its name.", group=WHICH)] = None,
    tune: Annotated[str | None, setting("A search for the fastest recipe, by its name.", group=WHICH)] = None,
    open: Annotated[bool, setting("Open the dashboard in a browser.", group=OUTPUT)] = False,
    workspace: Workspace | None = None,
) -> Result:
    """Write a folder: dashboard, Markdown with pictures, CSV, JSON.

    The dashboard is one file, which fetches nothing.
    """
    with use(workspace) as opened:
        chosen = choose([what] if isinstance(what, str) else what, last=last, sweep=sweep, tune=tune, workspace=opened)
        files = report_records(
            chosen.records,
            out,
            title=chosen.title,
            notes=chosen.notes,
            tunes=chosen.tunes,
            memories="none" if chosen.only_files else "matching" if what or last or sweep or tune else "all",
            ceilings_of=chosen.ceilings_of,
            workspace=opened,
        )
    if open:
        open_in_browser(Path(files.dashboard))
    return files_result(files)


def files_result(files: ReportFiles) -> Result:
    """Returns what a report says, and where it is."""
    made = {"dashboard": files.dashboard, "markdown": files.markdown, "csv": files.csv, "json": files.json}
    made |= {Path(picture).stem: picture for picture in files.pictures}
    return Result(
        verb="report",
        headline=Headline(template="{headline}", figures={"headline": files.headline}),
        blocks=(Block(title="", text="\n".join(f"{name}: {path}" for name, path in made.items())),),
        about={"folder": files.folder, "records": files.records, **made},
        notes=files.notes,
        next=f"open {files.dashboard}" if files.records else "redline demo",
    )


def report_records(
    records: Sequence[RunRecord],
    folder: str | Path,
    *,
    title: str = "",
    notes: Sequence[Note] = (),
    profiles: Sequence[Profile] | None = None,
    tunes: Sequence[TuneSummary] = (),
    memories: Literal["all", "matching", "none"] = "matching",
    ceilings_of: CeilingsOf | None = None,
    workspace: Workspace | None = None,
) -> ReportFiles:
    """Writes the report of these records.

    `memories`: which of what `redline profile --memory` saw belongs to it. `profiles`: those at hand already; None reads the traces that
    the records name. `tunes`: the searches among them. `ceilings_of`: what came with the records; the history knows others.
    """
    with use(workspace) as opened:
        known = opened.ceilings_of(records)
        rows, unreadable = kept_memories(opened) if memories != "none" else ([], [])
    if memories == "matching":
        about = {(record.spec.workload.model, record.spec.workload.task) for record in records}
        rows = [row for row in rows if (row.model, row.task) in about]
    contents = contents_of(
        records,
        title=title,
        notes=[*notes, *unreadable],
        profiles=profiles,
        tunes=tunes,
        ceilings_of=lambda record: (ceilings_of(record) if ceilings_of else None) or known(record),
        memories=rows,
    )
    return write_folder(contents, Path(folder))


def _from_history(what: Sequence[str], last: bool, workspace: Workspace, history: History) -> Chosen:
    chosen = Chosen()
    if last:
        group = _last_measured(history)
        searched = _search_of(group, history)
        if searched is not None:
            return _tune(searched, workspace)
        chosen.add(group)
    elif what:
        _add_files(chosen, [Path(word) for word in what if is_file(word)])
        # Siblings come along: a ratio is against the first of the group.
        chosen.add(history.load_with_groups(word for word in what if not is_file(word)))
    else:
        chosen.add(history.find(newest_first=False, on_unreadable=chosen.left_out))
    _add_searches(chosen, workspace, history)
    return chosen


NEXT_S = 5.0
"""One replicate starts at most this long after the last step of the one before, because workers are closed meanwhile."""
MOST_BEFORE = 200
"""This many records are looked at for earlier replicates."""


def _last_measured(history: History) -> list[RunRecord]:
    """Returns the newest group, and before it the replicates that the same command measured."""
    found = newest = history.latest_group()
    known = {record.id for record in newest}
    for row in history.rows(limit=MOST_BEFORE):
        if row.id in known:
            continue
        if row.group is None:
            earlier = list(history.load_many([row.id]).values())
        else:
            earlier = history.find(group=row.group, newest_first=False)
        if not _is_replicate(earlier, newest):
            break
        found, newest = [*earlier, *found], earlier
        known |= {record.id for record in earlier}
    return found


def _is_replicate(earlier: Sequence[RunRecord], later: Sequence[RunRecord]) -> bool:
    """Returns whether all of `later` was measured in `earlier` too, which ended just before. A race may go on with fewer."""
    ends = [block.started_at + block.wall_s for record in earlier for block in record.blocks]
    begins = [record.created_at for record in later]
    measured = [_what(record) for record in earlier]
    if not ends or not begins or any(_what(record) not in measured for record in later):
        return False
    return 0 <= min(begins) - max(ends) <= NEXT_S


def _what(record: RunRecord) -> tuple[object, ...]:
    return record.spec.workload, record.spec.recipe, record.spec.device


def _tune(name: str, workspace: Workspace) -> Chosen:
    chosen = Chosen(title=f"tune {name}")
    found = kept_tune(name, workspace=workspace, on_unreadable=chosen.left_out)
    chosen.tunes.append(found.summary)
    chosen.add(found.records)
    return chosen


def _search_of(records: Sequence[RunRecord], history: History) -> str | None:
    """Returns the search that these were measured for, where it is the latest."""
    latest = next(KeptSearches(history.tunes()).newest_first(), None)
    ids = set() if latest is None else set(latest.record_ids)
    return latest.name if latest is not None and any(record.id in ids for record in records) else None


def _add_searches(chosen: Chosen, workspace: Workspace, history: History) -> None:
    """Adds the searches all of whose records are chosen."""
    records = {record.id: record for record in chosen.records}
    known = workspace.ceilings_of(chosen.records)
    there = {summary.tune.name for summary in chosen.tunes}
    for search in reversed(list(KeptSearches(history.tunes()).newest_first(chosen.left_out_search))):
        has_records = search.record_ids and all(record_id in records for record_id in search.record_ids)
        if has_records and search.name not in there:
            own = {record_id: records[record_id] for record_id in search.record_ids}
            chosen.tunes.append(summary_of(search, own, known))


def _sweep(name: str, history: History) -> Chosen:
    cells = history.sweep(name).cells()
    if not cells:
        raise UsageError(f"no sweep {name!r} with a settled cell in {history.location}")
    chosen = Chosen(title=f"sweep {name}")
    found = history.load_many((cell.record_id for cell in cells.values()), on_unreadable=chosen.left_out)
    chosen.add(sorted(found.values(), key=lambda record: (record.created_at, record.id)))
    return chosen


def _add_files(chosen: Chosen, files: Sequence[Path]) -> None:
    for file in files:
        with history_in(file) as history:
            chosen.add(history.find(newest_first=False, on_unreadable=chosen.left_out))
            with Workspace(history=history) as workspace:
                _add_searches(chosen, workspace, history)
                chosen.know(workspace.ceilings_of(chosen.records))
