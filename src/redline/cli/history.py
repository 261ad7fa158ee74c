"""`redline history`, `show`, `export`, `tag`, `import`, `delete` and `prune`."""

from __future__ import annotations

import sys
from gzip import GzipFile
from pathlib import Path
from typing import IO, Annotated, cast

import typer

from redline.cli.options import OUTPUT, WAY, WHICH, Exit, Json, only_set, opt, print_json
from redline.model.errors import SpecError, UsageError
from redline.model.units import counted

DryRun = Annotated[bool, opt("--dry-run", group=WAY, help="Say what would be deleted, and delete nothing.")]
Ids = Annotated[list[str], typer.Argument(help="Records, by their ids or the start of them.")]


def history(
    model: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    task: Annotated[str | None, opt(group=WHICH, metavar="[infer|train|step|generate]", help="Only this task.")] = None,
    recipe: Annotated[str | None, opt("--recipe", "-r", group=WHICH, help="Only this recipe.")] = None,
    batch: Annotated[int | None, opt("--batch", "-b", group=WHICH, help="Only this batch.")] = None,
    device: Annotated[
        str | None, opt(group=WHICH, help="Only devices of this kind, or with this in their name.")
    ] = None,
    torch: Annotated[str | None, opt(group=WHICH, help="Only records of torch versions that start with this.")] = None,
    driver: Annotated[str | None, opt(group=WHICH, help="Only records of drivers that start with this.")] = None,
    commit: Annotated[str | None, opt(group=WHICH, help="Only records of commits that start with this.")] = None,
    tag: Annotated[str | None, opt(group=WHICH, help="Only records with this tag.")] = None,
    since: Annotated[str | None, opt(group=WHICH, help="Only records since then: 30d or 12h ago, or a date.")] = None,
    until: Annotated[str | None, opt(group=WHICH, help="Only records until then.")] = None,
    limit: Annotated[int, opt(group=OUTPUT, help="How many series to show, the latest measured first.")] = 20,
    plot: Annotated[Path | None, opt("--plot", group=OUTPUT, metavar="FILE.png", help="Also draw the trends.")] = None,
    json: Json = False,
) -> int:
    """Show benchmarks over time, and where each got faster or slower.

    A series is one benchmark on one device, across commits and versions. Each change is listed with when, how much and how
    certain; slow drift is listed separately. In JSON, ratio is time before over time after: below 1 it got slower.

    \b
    Examples:
      redline history
      redline history resnet50 --since 90d --plot trend.png
    """
    from redline.api.history import HistoryFilters, moment_of
    from redline.api.history import history as read_history
    from redline.show.history import history_report, plot_history
    from redline.show.terminal import make_console

    recipe = None if recipe is None else _canonical(recipe)
    times = {"since": since and moment_of(since), "until": until and moment_of(until)}
    exact = {"model": model, "task": task, "recipe": recipe, "batch": batch, "device": device, "tag": tag}
    asked = only_set(**exact, **times, torch=torch, driver=driver, commit=commit)
    found = read_history(HistoryFilters(**asked), limit=limit)
    if plot is not None:
        if not found:
            raise UsageError("nothing to plot: no record fits")
        if plot.is_dir() or not plot.suffix:  # the picture would get a name that was not asked for
            raise SpecError(f"cannot write {plot}: name a file such as trend.png")
        try:
            plot_history(found.series, plot)
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot write {plot}: {error}") from None
    if json:
        print_json(found.to_json())
    elif found:
        make_console().print(history_report(found.series, left_out=found.left_out))
    else:
        make_console().print("no record fits; 'redline history show' lists what was measured", markup=False)
    return Exit.DONE


def _canonical(recipe: str) -> str:
    from redline.model.spec import Recipe

    return Recipe.parse(recipe).canonical()


def tag(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="ID TAG", help="Records, then the tag. Nothing: list all tags.")
    ] = None,
    note: Annotated[bool, opt("--note", group=WAY, help="The last word is a note instead of a tag.")] = False,
    remove: Annotated[bool, opt("--remove", group=WAY, help="Remove the tag or note.")] = False,
    json: Json = False,
) -> int:
    """Tag records, or note something about them; without arguments, list all tags and notes.

    A tag names a baseline ('redline gate --baseline tag:NAME') and keeps its records from being pruned.

    \b
    Examples:
      redline history tag 19f1a2 19f1b7 v1.2
      redline history tag --note 19f1a2 "after the driver update"
    """
    from redline.api.history import marks
    from redline.api.history import tag as set_tag
    from redline.show.export import json_document
    from redline.show.terminal import make_console

    if not words:
        found = marks()
        if json:
            print_json(json_document("tag", {"marks": found}))
        for each in () if json else found:
            make_console().print(f"{each.record_id[:13]}  {each.kind}  {each.words}", markup=False)
        return Exit.DONE
    if len(words) < 2:
        raise UsageError("give at least one record and a tag: redline history tag ID TAG")
    changed = set_tag(words[:-1], words[-1], kind="note" if note else "tag", remove=remove)
    if json:
        print_json(json_document("tag", {"changed": changed}))
    else:
        done = "removed from" if remove else "set on"
        make_console().print(f"{words[-1]!r} {done} {counted(len(changed), 'record')}", markup=False)
    return Exit.DONE


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A back-up ('history export --format archive'), another history, or a file of 'history export --raw'."
        ),
    ],
    json: Json = False,
) -> int:
    """Add the records of a file to the history. Records that are already there are not changed.

    \b
    Examples:
      redline history import backup.redline
    """
    from redline.api.history import import_records
    from redline.show.export import json_document
    from redline.show.terminal import make_console

    found = import_records(file)
    if json:
        print_json(json_document("import", found))
    else:
        make_console().print(f"{found.added} records added, {found.known} were there already", markup=False)
    return Exit.DONE


def recover(
    output: Annotated[Path, opt("--output", "-o", group=OUTPUT, help="The new file.")] = Path("recovered.sqlite"),
    json: Json = False,
) -> int:
    """Write every record that can be read of a damaged history to a new file, and leave the damaged one as it is.

    \b
    Examples:
      redline history recover -o recovered.sqlite
    """
    from redline.api.history import recover as recover_records
    from redline.show.export import json_document
    from redline.show.terminal import make_console

    found = recover_records(output)
    if json:
        print_json(json_document("recover", found))
        return Exit.DONE
    console = make_console()
    console.print(f"{counted(found.added, 'record')} written to {found.path}", markup=False)
    for ids, what in ((found.cut, "without some of their samples"), (found.unreadable, "could not be read")):
        if ids:
            some = ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
            console.print(f"{counted(len(ids), 'record')} {what}: {some}", markup=False)
    console.print("put it in the place of the damaged file, or set REDLINE_STORE to it", markup=False)
    return Exit.DONE


def delete(ids: Ids, dry_run: DryRun = False, json: Json = False) -> int:
    """Delete records with their samples, tags and traces.

    \b
    Examples:
      redline history delete 19f1a2
    """
    from redline.api.history import delete as delete_records

    return _told(delete_records(ids, dry_run=dry_run), "delete", json)


def prune(
    older_than: Annotated[
        str | None, opt("--older-than", group=WHICH, help="Only records older than this: 90d, or a date.")
    ] = None,
    keep: Annotated[int | None, opt(group=WHICH, help="Keep this many of the latest records of each series.")] = None,
    failed: Annotated[bool, opt("--failed", group=WHICH, help="Only records that failed or were interrupted.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Delete old records. Several conditions must all hold; tagged records always stay.

    \b
    Examples:
      redline history prune --older-than 365d --keep 50 --dry-run
    """
    from redline.api.history import moment_of
    from redline.api.history import prune as prune_records

    before = None if older_than is None else moment_of(older_than)
    return _told(prune_records(before=before, keep=keep, failed=failed, dry_run=dry_run), "prune", json)


def _told(found: object, kind: str, json: bool) -> int:
    from redline.api.history import Deleted
    from redline.show.export import json_document
    from redline.show.terminal import make_console

    assert isinstance(found, Deleted)
    if json:
        print_json(json_document("delete" if kind == "delete" else "prune", found))
        return Exit.DONE
    done = "would be deleted" if found.dry_run else "deleted"
    make_console().print(f"{len(found.ids)} records {done}", markup=False)
    if found.sweeps:
        make_console().print(f"these sweeps measure what is gone again: {', '.join(found.sweeps)}", markup=False)
    return Exit.DONE


def show(
    id: Annotated[str | None, typer.Argument(help="A record's id, or the start of it.")] = None,
    limit: Annotated[int, opt(group=WHICH, help="How many of the latest records to list.")] = 20,
    json: Json = False,
) -> int:
    """List the latest records, or show everything about one.

    \b
    Examples:
      redline history show
      redline history show 19f1a2
    """
    from redline.api.history import latest, record_and_row
    from redline.show.export import export_json, json_document
    from redline.show.history import detail, listing
    from redline.show.terminal import make_console

    if id is None:
        rows, location = latest(limit)
        if json:
            print_json(json_document("show", {"records": [each.plain() for each in rows]}))
        elif rows:
            make_console().print(listing(rows))
        else:
            make_console().print(f"nothing measured yet in {location}; start with 'redline demo'", markup=False)
        return Exit.DONE
    record, row, is_cut_off = record_and_row(id)
    if json:
        print_json(export_json([record], raw=True, summarize=lambda _: [row], kind="show"))
    else:
        make_console().print(detail(row, record, is_cut_off=is_cut_off))
    return Exit.DONE


def export(
    ids: Annotated[list[str] | None, typer.Argument(help="Records. Default: all of them.")] = None,
    format: Annotated[
        str,
        opt(
            "--format",
            group=OUTPUT,
            metavar="[csv|json|archive]",
            help="Format of the file; archive is a back-up for 'redline history import'.",
        ),
    ] = "csv",
    output: Annotated[
        Path | None, opt("--output", "-o", group=OUTPUT, help="A file; compressed if it ends in .gz. Default: stdout.")
    ] = None,
    raw: Annotated[bool, opt("--raw", group=OUTPUT, help="JSON: include every raw sample.")] = False,
) -> int:
    """Write the history as CSV or JSON.

    \b
    Examples:
      redline history export > results.csv
      redline history export --format json --raw -o records.json
      redline history export --format archive -o backup.redline.gz
    """
    from redline.api.history import records_and_rows
    from redline.show.export import export_csv, export_json

    if format not in ("csv", "json", "archive"):
        raise SpecError(f"format must be csv, json or archive, got {format!r}")
    if format == "archive":
        return _back_up(ids or [], output)
    records, rows = records_and_rows(ids or [])
    if format == "csv":
        text = export_csv(records, summarize=lambda _: rows)
    else:
        text = export_json(records, raw=raw, summarize=lambda _: rows)
    if output is None:
        sys.stdout.write(text)
        return Exit.DONE
    try:
        with _opened(output, output) as file:
            file.write(text.encode())
    except OSError as error:
        raise SpecError(f"cannot write {output}: {error.strerror}") from None
    return Exit.DONE


def _opened(path: Path, named: Path) -> IO[bytes]:
    """A file for writing; packed where its final name ends in .gz."""
    # Without a time in it, so that the same records give the same file.
    return cast(IO[bytes], GzipFile(path, "wb", mtime=0)) if named.suffix == ".gz" else path.open("wb")


def _back_up(ids: list[str], output: Path | None) -> int:
    from redline.api.history import export_archive

    if output is None:
        raise SpecError("a back-up is not text: name a file with --output")
    is_other = output.exists() and not output.is_file()  # such as /dev/stdout
    unfinished = output if is_other else output.with_name(f"{output.name}.unfinished")
    try:
        with _opened(unfinished, output) as file:
            export_archive(file, ids)
        if not is_other:
            unfinished.replace(output)  # an older back-up of this name stays until there is a whole new one
    except OSError as error:
        raise SpecError(f"cannot write {output}: {error.strerror}") from None
    finally:
        if not is_other:
            unfinished.unlink(missing_ok=True)
    return Exit.DONE
