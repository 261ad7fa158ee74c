"""A dashboard of 5 000 records: how large it is, and how soon Chromium can be used with it. Targets: 6 MB, 3 s.

Interactive means: table, filters and the charts in view are there and answer. Beside it stands the plain alternative: the
same page with every chart drawn at once.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reported import race_records, sweep_records

from redline.model.record import RunRecord, new_id
from redline.model.spec import Recipe
from redline.model.spec_table import specs_from_table
from redline.report.contents import contents_of
from redline.report.dashboard import dashboard

ROWS = 5000
SIZE_TARGET = 6_000_000
READY_TARGET_S = 3.0
ROUNDS = 5
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RECIPES = (
    "baseline",
    "tf32",
    "amp",
    "amp-bf16",
    "fp16",
    "bf16",
    "channels-last",
    "compile",
    "fp16+compile",
    "torchscript",
)


def many_records() -> list[RunRecord]:
    """A grid of 25 models, 10 recipes, 10 batches and two tasks, with the samples of a few simulated runs."""
    templates = {
        "infer": sweep_records(recipe="fp16", batches=[8])[0],
        "train": sweep_records(recipe="fp16", batches=[8], task="train")[0],
    }
    records = list(race_records())
    for model in range(25):
        for task, template in templates.items():
            for recipe in RECIPES:
                for batch in BATCHES:
                    records.append(_variant(template, f"model_{model}", task, recipe, batch))
    return records[:ROWS]


def _variant(template: RunRecord, model: str, task: str, recipe: str, batch: int) -> RunRecord:
    (spec,) = specs_from_table({"model": model, "task": task, "batch": batch, "device": "cuda:0"})
    spec = msgspec.structs.replace(spec, recipe=Recipe.parse(recipe))
    assert template.prepared is not None
    workload = msgspec.structs.replace(template.prepared.workload, items_per_step=batch, batch=batch)
    prepared = msgspec.structs.replace(template.prepared, workload=workload)
    return msgspec.structs.replace(template, id=new_id(), spec=spec, prepared=prepared)


def open_browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,1000"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def seconds_until_ready(driver: Any, page: Path) -> float:
    driver.get(page.as_uri())
    while not (ready := driver.execute_script("return document.documentElement.dataset.ready")):
        time.sleep(0.01)
    return float(ready) / 1e3


def seconds_of(driver: Any, script: str) -> float:
    """From a script's start to the frame that shows what it did."""
    timed = f"const done = arguments[0], t = performance.now(); {script}; requestAnimationFrame(() => setTimeout(() => done(performance.now() - t)))"
    return float(driver.execute_async_script(timed)) / 1e3


def main() -> None:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        print("chromium and chromedriver are not installed: nothing measured")
        return
    records = many_records()
    started = time.perf_counter()
    text = dashboard(contents_of(records))
    made_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "dashboard.html"
        page.write_text(text, encoding="utf-8")
        size = page.stat().st_size
        driver = open_browser()
        try:
            ready, all_at_once, filtered, ordered = [], [], [], []
            for _ in range(ROUNDS):
                ready.append(seconds_until_ready(driver, page))
                filtered.append(seconds_of(driver, "document.querySelector('[data-filter=recipe] input').click()"))
                ordered.append(seconds_of(driver, "document.querySelector('#table th').click()"))
                whole = seconds_of(driver, "dispatchEvent(new Event('beforeprint'))")
                all_at_once.append(ready[-1] + whole)
        finally:
            driver.quit()
    print(f"records               {len(records)}")
    print(f"made in               {made_s:.1f} s")
    print(f"size                  {size / 1e6:.2f} MB (target {SIZE_TARGET / 1e6:.0f})")
    print(
        f"interactive after     {median(ready):.2f} s (target {READY_TARGET_S:.0f}); all charts at once {median(all_at_once):.2f} s"
    )
    print(f"a filter answers in   {median(filtered):.3f} s")
    print(f"sorting answers in    {median(ordered):.3f} s")
    print("ok" if size <= SIZE_TARGET and median(ready) < READY_TARGET_S else "MISSED")


if __name__ == "__main__":
    main()
