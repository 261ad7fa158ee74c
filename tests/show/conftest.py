"""A Chromium that opens pages from files. Without one on this machine its tests are skipped; CI installs it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

READY_WITHIN_S = 60


class Browser:
    """One Chromium with what the tests ask of it."""

    def __init__(self, driver: Any, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, page: Path) -> None:
        """Always at one address: Chromium then keeps what it has compiled of plotly, which takes a second."""
        self.driver.get_log("browser")  # what an earlier page said
        self.driver.get(shutil.copyfile(page, self.downloads.parent / "opened.html").as_uri())
        self.until("return document.documentElement.dataset.ready")

    def until(self, script: str) -> Any:
        """What a script returns, once that is something."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not (found := self.driver.execute_script(script)):
            assert time.monotonic() < deadline, f"never came: {script}; the console said {self.console()}"
            time.sleep(0.02)
        return found

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def look_like(self, *, dark: bool = False, width: int = 1440, height: int = 1000) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def downloaded(self, name: str) -> str:
        deadline = time.monotonic() + READY_WITHIN_S
        while not (self.downloads / name).exists():
            assert time.monotonic() < deadline, f"{name} was not downloaded: {list(self.downloads.iterdir())}"
            time.sleep(0.02)
        text = (self.downloads / name).read_bytes().decode()
        (self.downloads / name).unlink()
        return text


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver_binary = shutil.which("chromedriver")
    if binary is None or driver_binary is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    downloads = tmp_path_factory.mktemp("browser") / "downloads"
    downloads.mkdir()
    options = Options()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_binary))
    try:
        yield Browser(driver, downloads)
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.look_like()
    return chromium
