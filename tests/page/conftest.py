"""Browser and engine shared by the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.e2e.engine_process import DEMO, EngineProcess
from tests.page.browser import Browser

API_KEY = "user"


@pytest.fixture(scope="package")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(DEMO, "--api-key", API_KEY, "--tool-call-parser", "hermes") as engine:
        yield engine


@pytest.fixture(scope="package")
def chromium(request: pytest.FixtureRequest) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver is not None
    assert chromium is not None
    browser = Browser(driver, chromium, request.config.getoption("--screenshots"))
    yield browser
    browser.quit()


@pytest.fixture
def page(chromium: Browser, engine: EngineProcess) -> Iterator[Browser]:
    """The page as a new user sees it, with the API key given; afterwards no message on the console and no foreign request."""
    chromium.open_fresh(engine.url)
    chromium.give_key(API_KEY)
    yield chromium
    assert chromium.complaints() == []
    assert chromium.foreign_requests(engine.url) == []
