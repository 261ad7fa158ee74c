"""The first screen: for each workload how fast it is, how fast it could be, what is in the way and what to switch on."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.recommend import Advice, rate, rate_figure
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.model.fields import Frozen
from redline.model.identity import Subject
from redline.model.spec import BASELINE
from redline.model.units import format_seconds, format_share
from redline.show.contents import Contents

IN_THE_WAY = {
    "host": "the host: the device waits for Python to launch work",
    "launch": "gaps between kernels that were launched in time",
    "compute": "arithmetic: the matrix units are the limit",
    "memory": "memory traffic: operators move more bytes than they compute on",
    "data": "the data loader: the device waits for batches",
    "communication": "communication between devices",
    "device": "the device's own work; a profile tells whether arithmetic or memory",
    "unknown": "not known: no profile and no ceilings yet",
}


class Station(Frozen):
    """One of now, reached and possible."""

    label: str
    value: str
    about: str
    doubt: str = ""


class Answer(Frozen):
    subject: Subject
    batch: int | None
    row: int
    """The number of the line it is about, so that filters can act on it."""
    stations: tuple[Station, ...]
    in_the_way: str
    switch_on: str
    code: str = ""
    command: str = ""

    @property
    def title(self) -> str:
        batch = f"batch {self.batch}" if self.batch else ""
        parts = (self.subject.model, self.subject.task, batch, self.subject.setting, self.subject.device)
        return " · ".join(part for part in parts if part)


def answers_of(contents: Contents) -> list[Answer]:
    """One per subject that was timed; those with a proven gain first."""
    numbers = {id(line): number for number, line in enumerate(contents.lines)}
    found = []
    for subject in dict.fromkeys(line.subject for line in contents.lines):
        timed = [line for line in contents.lines if line.subject == subject and line.row.throughput_per_s is not None]
        if timed:
            advice = next((each for each in contents.advice if each.subject == subject and each.kind == "recipe"), None)
            found.append(_answer(subject, timed, advice, contents, numbers))
    return sorted(found, key=lambda answer: len(answer.stations[1].about) == 0)


def _answer(
    subject: Subject, timed: Sequence[Line], advice: Advice | None, contents: Contents, numbers: dict[int, int]
) -> Answer:
    now = _now(timed, advice)
    reached = _reached(timed, advice)
    best = reached or now
    return Answer(
        subject=subject,
        batch=best.row.batch,
        row=numbers[id(best)],
        stations=(_station_now(now.row), _station_reached(reached, advice, now), _station_possible(best.row)),
        in_the_way=_way(best, contents),
        switch_on=_switch_on(reached, advice, best.row),
        code=_code(reached, subject),
        command=_command(reached, advice, now, best),
    )


def _now(timed: Sequence[Line], advice: Advice | None) -> Line:
    """The baseline, at the batch that the advice is about, else at the one that most recipes share."""
    plain = [line for line in timed if not line.is_capture] or list(timed)
    batches = [line.row.batch for line in plain]
    batch = advice.batch if advice is not None and advice.batch in batches else max(set(batches), key=batches.count)
    there = [line for line in plain if line.row.batch == batch]
    return next((line for line in there if line.row.recipe == BASELINE), there[0])


def _reached(timed: Sequence[Line], advice: Advice | None) -> Line | None:
    """The recipe that is proven faster; None where none is."""
    if advice is None or not advice.decided or advice.ratio is None:
        return None
    own = [line for line in timed if line.row.recipe == advice.recipe and line.row.batch == advice.batch]
    return next((line for line in own if not line.is_capture), own[0] if own else None)


def _station_now(row: RunSummary) -> Station:
    about = f"{row.recipe}{_between(row)}, {format_seconds(row.step_s)} per step"
    return Station(label="now", value=rate(row), about=about, doubt=_doubt(row))


def _station_reached(reached: Line | None, advice: Advice | None, now: Line) -> Station:
    if reached is None:
        told = "no recipe is proven faster" if advice is not None and advice.decided else "nothing decided yet"
        return Station(label="reached", value="–", about="", doubt=told)
    assert advice is not None
    interval = f" ({advice.low:.2f}–{advice.high:.2f})" if advice.low is not None and advice.high is not None else ""
    ratio = f"{advice.ratio:.2f}×{interval}"
    return Station(
        label="reached",
        value=rate(reached.row),
        about=f"{reached.row.recipe}: {ratio} as fast as {now.row.recipe}",
        doubt=_doubt(reached.row),
    )


def _station_possible(row: RunSummary) -> Station:
    found = row.roofline
    if found is None or not found.attainable_s or not row.items_per_step:
        return Station(label="possible", value="–", about="", doubt="needs the device's ceilings: redline roofline")
    if found.error is not None:
        return Station(
            label="possible", value="–", about="", doubt="the step beats its own limit: see the roofline below"
        )
    if found.headroom is None:
        return Station(label="possible", value="–", about="", doubt="some of its products have no measured ceiling")
    value = f"{rate_figure(row.items_per_step / found.attainable_s)} {row.item or 'items'}/s"
    about = f"roofline, {format_seconds(found.attainable_s)} per step ({found.limited_by}); {found.headroom:.1f}× left"
    return Station(label="possible", value=value, about=about)


def _between(row: RunSummary) -> str:
    return f", ±{format_share(row.throughput_interval.half_width)}" if row.throughput_interval else ""


def _doubt(row: RunSummary) -> str:
    return "" if row.verdict.trusted else ", ".join(row.verdict.labels)


def _way(best: Line, contents: Contents) -> str:
    for profile in contents.profiles:
        capture = profile.capture
        same = capture is not None and (capture.model, capture.task, capture.recipe) == (
            best.subject.model,
            best.subject.task,
            best.row.recipe,
        )
        if same and profile.findings:
            finding = profile.findings[0]
            return f"{finding.code}: {finding.evidence}"
    return IN_THE_WAY[best.row.bound.label]


def _switch_on(reached: Line | None, advice: Advice | None, row: RunSummary) -> str:
    if reached is not None:
        return reached.row.recipe
    if row.worth_trying:
        return f"try {' or '.join(row.worth_trying)}"
    if advice is not None and advice.decided:
        return "nothing more: stay with it"
    if advice is not None and advice.recipe != row.recipe:
        return f"not decided: {advice.recipe} may be faster; the command compares them in turns"
    return "not decided: compare it with other recipes"


def _code(reached: Line | None, subject: Subject) -> str:
    if reached is None:
        return ""
    if subject.task == "train":
        return f"redline.recipe({reached.row.recipe!r}, task='train').training_step(model, loss, inputs, targets)"
    return f"redline.recipe({reached.row.recipe!r}).apply(model, *example_inputs)"


def _command(reached: Line | None, advice: Advice | None, now: Line, best: Line) -> str:
    """What measures the two against each other again, in turns."""
    row = best.row
    rivals = [reached.row.recipe] if reached is not None else list(row.worth_trying)
    if reached is None and advice is not None and not advice.decided and advice.recipe != now.row.recipe:
        rivals = [advice.recipe]
    return row.command("run", [now.row.recipe, *rivals]) or ""
