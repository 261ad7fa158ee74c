"""A timeline of 20 000 boxes: how soon Chromium has drawn it, and how long a zoom takes. Target: 2 s.

The boxes are those of a captured ResNet-50 on an H200, repeated.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dashboard_5000 import open_browser, seconds_of
from reported import captured

from redline.analyze.profile import profile_of
from redline.report.profile_files import profile_page
from redline.trace.decode import read_trace
from redline.trace.lanes import MOST_BOXES, Lanes, lanes_of

TARGET_S = 2.0
ROUNDS = 5
NAVIGATION = "const [n] = performance.getEntriesByType('navigation'); return n.domComplete - n.responseEnd"


def repeated(lanes: Lanes) -> Lanes:
    """The same steps again and again, until there are as many boxes as a page shows."""
    times = MOST_BOXES // sum(len(lane.boxes) for lane in lanes.lanes) + 1
    longer = tuple(
        msgspec.structs.replace(
            lane,
            boxes=tuple(
                box._replace(start_us=box.start_us + turn * lanes.span_us)
                for turn in range(times)
                for box in lane.boxes
            ),
        )
        for lane in lanes.lanes
    )
    return msgspec.structs.replace(lanes, lanes=longer, span_us=lanes.span_us * times)


def main() -> None:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        print("chromium and chromedriver are not installed: nothing measured")
        return
    record = captured()
    assert record.trace is not None
    trace = read_trace(Path(record.trace.path))
    lanes = lanes_of(trace)
    assert lanes is not None
    many = repeated(lanes)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "profile.html"
        page.write_text(profile_page(profile_of([trace], record), many), encoding="utf-8")
        driver = open_browser()
        try:
            drawn, zoomed = [], []
            for _ in range(ROUNDS):
                driver.get(page.as_uri())
                drawn.append(float(driver.execute_script(NAVIGATION)) / 1e3)
                zoomed.append(seconds_of(driver, "document.querySelector('.boxtools button').click()"))
        finally:
            driver.quit()
    print(f"boxes            {sum(len(lane.boxes) for lane in many.lanes)}")
    print(f"drawn after      {median(drawn):.2f} s (target {TARGET_S:.0f})")
    print(f"a zoom takes     {median(zoomed):.3f} s")
    print("ok" if median(drawn) < TARGET_S else "MISSED")


if __name__ == "__main__":
    main()
