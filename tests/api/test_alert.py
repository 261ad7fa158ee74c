"""The alarm of a long training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from redline.analyze.watch import Rates
from redline.api.watch import Alarm, deliver_alert, parse_share
from redline.model.errors import UsageError


def rates(steps: int, seconds: float) -> Rates:
    return Rates(
        steps=steps, steps_per_s=steps / seconds, samples_per_s=None, samples=0.0, first_step_s=None, median_step_s=None,
        outliers=0, outlier_share=None, shares={}, host_shares={}, device_clock=False, paused_s=0.0, loss=None,
    )  # fmt: skip


def heard(paces: list[float], drop: float = 0.2) -> list[int]:
    """At which of these paces, a hundred steps each, it goes off."""
    told: list[bytes] = []
    alarm = Alarm("target", drop, deliver=lambda target, body: told.append(body))
    seconds, at = 1.0, []
    alarm.hear(rates(1, seconds))
    for number, pace in enumerate(paces):
        seconds += 100 / pace
        before = len(told)
        alarm.hear(rates(1 + 100 * (number + 1), seconds))
        at += [number] if len(told) > before else []
    return at


def test_it_goes_off_once_per_fall_and_again_after_a_recovery() -> None:
    assert heard([10, 10, 9, 7, 7, 7, 10, 5]) == [3, 7]
    assert heard([10, 9, 8.5, 9]) == []
    assert heard([1, 5, 10]) == []


def test_too_few_steps_say_nothing() -> None:
    told: list[bytes] = []
    alarm = Alarm("target", 0.2, deliver=lambda target, body: told.append(body))
    for steps, seconds in ((100, 10.0), (200, 20.0), (205, 40.0)):
        alarm.hear(rates(steps, seconds))
    assert told == []


def test_a_command_gets_the_message_on_its_stdin(tmp_path: Path) -> None:
    deliver_alert(
        f'{sys.executable} -c \'import sys; open("{tmp_path}/told", "w").write(sys.stdin.read())\'', b'{"step": 3}'
    )
    assert json.loads((tmp_path / "told").read_text()) == {"step": 3}


def test_an_alert_that_fails_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    deliver_alert("exit 3", b"{}")
    deliver_alert("http://127.0.0.1:1/nobody", b"{}")
    assert capsys.readouterr().err.count("not delivered") == 2


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), ("0.35", 0.35)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["much", "0", "120%", "-0.1"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--alert-drop must be"):
        parse_share(text)
