"""A search for the fastest recipe in a terminal, in Markdown and as a document: the answer first, then what it rests on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.pairs import TIME_BAND
from redline.analyze.trust import error_text
from redline.model.note import Note
from redline.model.spec import BASELINE
from redline.model.units import counted, format_seconds, format_share, significant
from redline.model.work import Facts
from redline.search.tune.record import Spent
from redline.search.tune.result import Ranked, TuneSummary, Winner
from redline.show.cells import energy_cells, energy_columns, error_cell
from redline.show.terminal import Fitted, make_table, markdown_line, markdown_table

SHOWN = 12
"""Rows of the ranking a person is shown; the document has all."""
LAYERS = 3
"""Kinds of layers a person is told of."""
MANY_PAGE_FAULTS = 500
"""Worth a word: about a millisecond of a step."""
TOLD_WHEN_OFF = 1.25
"""By this factor or more: what a ratio of one process is worth is told beside it, in the table as `(~low–high)`."""
WIDEST = 1000.0
"""The upper end of an interval over its lower one."""
LONGEST_REASON = 240
"""Letters of an error that a person is shown; the document has all."""
SCOPES = {"switch": "in any recipe", "pair": "together", "recipe": "this recipe only"}


def tune_report(found: TuneSummary, snippet_file: Path | None = None) -> RenderableType:
    """The answer, the ranking, what each switch brings, what was ruled out and why, what was spent, the next step."""
    parts: list[RenderableType] = [Text(answer(found), style="bold green" if found.winner is not None else "bold")]
    if snippet_file is not None and found.snippet is not None:
        parts.append(Text(f"code without Redline: {snippet_file}", style="green"))
    parts += _checked(found)
    if found.ranking:
        parts.append(_ranking(found))
        if len(found.ranking) > SHOWN:
            parts.append(Text(f"  and {len(found.ranking) - SHOWN} slower ones (--json lists all)", style="dim"))
    if found.switches:
        parts.append(_gains(found))
    parts += [Text(f"  {line}", style="red") for line in reasons(found)]
    # What was left out because it was asked for needs no line each.
    together: dict[Note, list[str]] = {}
    for row in found.refused:
        if row.reason.code not in ("not-asked-for", "excluded"):
            together.setdefault(msgspec.structs.replace(row.reason, about=""), []).append(row.switch)
    parts += [
        Text(f"  not tried: {', '.join(switches)}: {_brief(str(why))}", style="dim")
        for why, switches in together.items()
    ]
    parts += [Text(f"  note: {each}", style="yellow") for each in found.notes]
    if found.facts is not None:
        parts.append(Text(f"a step of the model: {'; '.join(facts_told(found.facts))}", style="dim"))
    parts.append(Text(spent_told(found), style="dim"))
    return Group(*parts, Text(_next_step(found, snippet_file), style="bold"))


def answer(found: TuneSummary) -> str:
    """The result of the search in one sentence."""
    leader = found.leader
    codes = {each.code for each in found.notes}
    if leader is None:
        late, wild = "baseline-too-slow" in codes, "not-finite" in codes
        does = "was not ready within the budget" if late else "itself does not run here"
        return f"no answer: the baseline {'gives numbers that are not finite' if wild else does}"
    if found.winner is not None:
        told = f"{'winner' if found.has_answer else 'best so far'}: {_told(found, found.winner)}"
        return told + (f"; {found.headroom:.1f}× left to the roofline" if found.headroom is not None else "")
    if leader.recipe == BASELINE:
        if "not-repeatable" in codes:
            return "no answer: the baseline itself does not give the same twice; nothing can be compared with it"
        if found.trials > 1:
            return f"no winner: {_nothing_faster(found)}"
        if "no-signal" in codes:
            return "no answer: only the baseline was tried; nothing can be compared with it"
        why = "there is nothing else to try here" if found.has_answer else "there was no time for anything else"
        why = "what else was begun was not ready in time" if "given-up" in codes else why
        return f"no answer: only the baseline was tried; {why}"
    so_far = "" if found.has_answer else "best so far, but not certain: "
    return (
        f"{so_far or 'no winner: '}nothing surely {_beats(found)} the baseline; the best seen is {_told(found, leader)}"
    )


WRONG_NUMBERS = ("above-tolerance", "unresolved", "not-finite", "no-signal")
"""Codes of recipes that may not be recommended for what they compute."""


def _nothing_faster(found: TuneSummary) -> str:
    ended = "" if found.has_answer else "; the search ended before all that may be faster was tried"
    undecided = _undecided(found)
    if undecided is not None:
        told = f"{undecided.recipe} was measured at {ratio_told(undecided)}, which decides nothing"
        return f"nothing that was tried surely {_beats(found)} the baseline; {told}{ended}"
    rejected = {each.recipe: each.code for each in found.rejected}
    faster = [row for row in found.ranking if row.recipe != BASELINE and row.ratio > 1 + TIME_BAND]
    sound = " and kept its numbers" if any(rejected.get(row.recipe) in WRONG_NUMBERS for row in faster) else ""
    unraced = [row.recipe for row in faster if row.recipe not in rejected and row.verdict == "faster"]
    ended += f"; {unraced[0]} was faster in one process and was not raced" if unraced else ""
    return f"nothing that was tried{sound} {_beats(found)} the baseline{ended}"


def _undecided(found: TuneSummary) -> Ranked | None:
    """The first that was raced against the baseline and may be faster for all that its interval says."""
    rows = (row for row in found.ranking if row.recipe != BASELINE and row.verdict == "inconclusive")
    return next((row for row in rows if row.high is not None and row.high > 1 + TIME_BAND), None)


def _beats(found: TuneSummary) -> str:
    return "needs less energy than" if found.objective == "energy" else "is faster than"


def _told(found: TuneSummary, leader: Winner) -> str:
    by = "the items per joule of the baseline" if found.objective == "energy" else "the baseline"
    told = f"{leader.recipe}, {leader.ratio:.2f}× {by}"
    told += _interval(leader.low, leader.high) or f", seen in one process only{_off(leader.may_be_off)}"
    rate = leader.throughput_per_s
    if rate is not None:
        told += f", {significant(rate, max(3, len(str(round(rate)))))} {leader.item or 'item'}/s"
    if leader.ttft_s is not None:
        told += f", first token after {format_seconds(leader.ttft_s)}"
    if leader.tpot_s is not None:
        told += f", then {format_seconds(leader.tpot_s)} per token"
    if leader.bandwidth_share is not None:
        told += f" ({format_share(leader.bandwidth_share)} of the copy bandwidth)"
    if leader.energy_per_item_j is not None:
        told += f", {significant(leader.energy_per_item_j * 1e3, 3)} mJ/{leader.item or 'item'}"
    if leader.cost_per_million is not None:
        told += f", {significant(leader.cost_per_million, 3)} per million"
    return told + (f" at batch {leader.batch}" if leader.batch else "")


def _checked(found: TuneSummary) -> list[Text]:
    """What the user's check said of the winner."""
    recipe = found.winner.recipe if found.winner is not None else None
    metric = next((metric for metric in found.metrics if metric.recipe == recipe), None)
    if metric is None or metric.value is None or metric.baseline is None:
        return []
    return [Text(f"  your check: {metric.value:.4g}, {metric.baseline:.4g} with the baseline", style="green")]


def _ranking(found: TuneSummary) -> Fitted:
    where = f"{found.device_name} ({found.device})" if found.device_name else found.device
    batch = f"batch {found.batch}" if found.batch else ""
    title = " · ".join(part for part in (found.model, found.task, batch, where, found.objective) if part)
    table = make_table(Text(title, style="bold"))
    table.add_column("recipe", overflow="fold", min_width=12)
    item = found.leader.item if found.leader is not None and found.leader.item else "item"
    metered = energy_columns(found.ranking, item, on_gpu=not found.device.startswith("cpu"))
    for header in ("vs baseline", "verdict", "rel. error", "compile s", *metered.values()):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in found.ranking[:SHOWN]:
        cells = energy_cells(row)
        is_winner = found.winner is not None and row.recipe == found.winner.recipe
        table.add_row(
            Text(row.recipe, style="bold" if is_winner else ""),
            ratio_told(row),
            Text(
                row.verdict, style={"faster": "green", "slower": "red", "inconclusive": "yellow"}.get(row.verdict, "")
            ),
            error_cell(row.numerics, with_steps=True),
            compile_told(row),
            *(cells[name] for name in metered),
            Text(remark(found, row), style="green" if is_winner else "dim"),
        )
    return Fitted(table, (*metered.values(), "compile s"))


def remark(found: TuneSummary, row: Ranked) -> str:
    if found.winner is not None and row.recipe == found.winner.recipe:
        return "winner" if found.has_answer else "best so far"
    return str(row.note or ("host-bound" if row.bound == "host" else ""))


def ratio_told(row: Ranked) -> str:
    if row.recipe == BASELINE:
        return "–"
    told, off = _interval(row.low, row.high), row.may_be_off
    if not told and off is not None and off >= TOLD_WHEN_OFF:
        told = _interval(row.ratio / off, row.ratio * off, "~")
    return f"{row.ratio:.2f}×{told}"


def _off(factor: float | None) -> str:
    """What a ratio without an interval is worth, where that is little: beside other processes, say."""
    if factor is None or factor < TOLD_WHEN_OFF:
        return ""
    return f" and may be off by {significant(min(factor, WIDEST), 2)}×"


def _interval(low: float | None, high: float | None, mark: str = "") -> str:
    """In brackets; what two processes that do not agree at all say has no figures worth reading."""
    if not low or not high:
        return ""
    return f" ({mark}{low:.2f}–{high:.2f})" if high / low < WIDEST else " (too wide to tell)"


def compile_told(row: Ranked) -> str:
    """`<`: others were prepared at the same time, so that alone it takes less. `~`: they compiled a part of it."""
    mark = "~" if row.compile_is_shared else "<" if row.compile_is_contended else ""
    return "–" if row.compile_s is None else f"{mark}{row.compile_s:.1f}"


def _gains(found: TuneSummary) -> Fitted:
    what = "energy" if found.objective == "energy" else "time"
    table = make_table(Text(f"what each switch brings ({what} without it over {what} with it)", style="dim"))
    table.add_column("switch", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    for gain in found.switches:
        table.add_row(Text(gain.switch), f"{gain.gain:.2f}×{_interval(gain.low, gain.high)}")
    return Fitted(table)


def reasons(found: TuneSummary) -> list[str]:
    """What was ruled out and why, once for all recipes it ruled out."""
    told: dict[str, str] = {}
    for row in found.rejected:
        if row.scope == "recipe" or row.switch is None:
            told[row.recipe] = f"rejected: {row.recipe}: {_brief(row.text)}"
        else:
            told.setdefault(
                f"{row.scope} {row.switch}", f"ruled out: {row.switch} {SCOPES[row.scope]}: {_brief(row.text)}"
            )
    return list(told.values())


def _brief(text: str) -> str:
    """An error in a line or two: to the end of a sentence where one ends there."""
    if len(text) <= LONGEST_REASON:
        return text
    cut = text[:LONGEST_REASON]
    whole = ". ".join(cut.split(". ")[:-1])
    return f"{whole}. …" if len(whole) > LONGEST_REASON // 3 else f"{cut.rstrip()}…"


def facts_told(facts: Facts) -> list[str]:
    """The few facts about a step that decide which switches can help."""
    layers = sorted(facts.layers.items(), key=lambda item: -item[1].share)[:LAYERS]
    told = [f"{layer.calls} {kind} ({format_share(layer.share)} of the forward pass)" for kind, layer in layers]
    if facts.step_s is not None and facts.host_s is not None:
        told.append(f"the host issues it in {format_seconds(facts.host_s)} of {format_seconds(facts.step_s)}")
    if facts.page_faults is not None and facts.page_faults >= MANY_PAGE_FAULTS:
        told.append(f"the kernel gives it {facts.page_faults:.0f} pages of memory")
    if facts.reads:
        told.append(f"Python waits for values of tensors ({facts.reads[0]})")
    told += ["its operators depend on the values of its inputs"] if facts.branches else []
    told += ["its shapes depend on the values of its inputs"] if facts.varies_shapes else []
    told += [f"it writes to {facts.mutates[0]}"] if facts.mutates else []
    told += ["it draws random numbers"] if facts.draws_random_numbers else []
    told += [f"the gradient of {facts.sparse_gradients[0]} is sparse"] if facts.sparse_gradients else []
    return told or ["nothing that stands out"]


def spent_told(found: TuneSummary) -> str:
    spent = found.spent
    parts = [f"{name} {getattr(spent, name):.0f} s" for name in SPENT if getattr(spent, name) >= 0.5]
    total_s = sum(getattr(spent, name) for name in SPENT)
    tried = f"{counted(found.trials, 'recipe')} tried, {found.compile_seconds:.0f} s of compiling"
    return f"spent {total_s:.0f} s ({', '.join(parts)}), {spent.left:.0f} s left; {tried}"


SPENT = tuple(name for name in Spent.__struct_fields__ if name not in ("reserved", "left"))
"""What adds up to all seconds of a search."""


def _next_step(found: TuneSummary, snippet_file: Path | None) -> str:
    if found.state in ("running", "interrupted"):
        return "next: the same command with --resume continues"
    if any(each.code == "baseline-too-slow" for each in found.notes):
        return "next: the same command with a larger --budget, or on a quieter machine"
    if any(each.code == "not-finite" for each in found.notes) and found.leader is None:
        return "next: give inputs, weights or a loss with which the baseline's own numbers are finite"
    if any(each.code == "not-repeatable" for each in found.notes):
        return "next: make the model give the same twice: no state between calls, and random numbers from torch alone"
    if found.leader is None:
        return "next: make the baseline run; 'redline run' shows where it breaks"
    if not found.has_answer:
        return "next: the same command with --resume and a larger --budget continues"
    if found.winner is None:
        if _undecided(found) is not None:
            return "next: stay with the baseline, or try again on a quiet machine or with more --replicates"
        return "next: stay with the baseline; try another batch, or --allow-quantized with a --check"
    use = f"redline.recipe({found.winner.recipe!r}).apply(model, *example_inputs)"
    if found.task == "train":
        use = f"redline.recipe({found.winner.recipe!r}, task='train').training_step(model, loss, inputs, targets)"
    if found.task == "generate":
        use = (
            f"the code is in {snippet_file}" if snippet_file is not None else "use the recipe where you serve the model"
        )
    told = f"next: {use}"
    if found.snippet is not None and snippet_file is None:
        told += ", or the same command with --resume --snippet FILE for the code"
    return f"{told}; '{found.explained_by}' explains the rest" if found.explained_by else told


def tune_markdown(searches: Sequence[TuneSummary], most_rows: int) -> Iterator[str]:
    """The chapter of a report about searches, line by line."""
    if searches:
        yield "## Searches for the fastest recipe"
    for found in searches:
        yield ""
        yield markdown_line("### {} · {} · batch {} · {}", found.model, found.task, found.batch, found.objective)
        yield ""
        yield markdown_line("**{}**", answer(found))
        yield ""
        for line in (*_about_the_step(found), *reasons(found), spent_told(found)):
            yield markdown_line("- {}", line)
        yield ""
        metered = energy_columns(found.ranking, "item", on_gpu=not found.device.startswith("cpu"))
        rows = [
            [
                row.recipe,
                remark(found, row),
                ratio_told(row),
                row.verdict,
                error_text(row.numerics, with_steps=True),
                compile_told(row),
                *(energy_cells(row)[name] for name in metered),
            ]
            for row in found.ranking[:most_rows]
        ]
        headers = ["recipe", "", "vs baseline", "verdict", "rel. error", "compile s", *metered.values()]
        yield from markdown_table(headers, rows, left=2)
        if found.snippet is not None:
            yield ""
            yield "The winner without Redline:"
            yield ""
            yield from _code(found.snippet)


def _about_the_step(found: TuneSummary) -> list[str]:
    return [f"a step of the model: {'; '.join(facts_told(found.facts))}"] if found.facts is not None else []


def _code(text: str) -> Iterator[str]:
    """A block of code whose fence is longer than any inside it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}python"
    yield text.rstrip()
    yield fence
