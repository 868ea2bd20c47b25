"""One browser for all tests of the page, whose pages talk to their own server alone."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.live_page import ARTIFACTS, LivePage
from tests.integration.conftest import make_node, prepared  # noqa: F401 fixtures

WAIT_MS = 30_000  # a busy machine is no failure


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium has no sandbox for root; what it opens here is our own page.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """(url, width, scheme, ...) -> a page. The test fails where a page asked another host for
    something, or wrote an error to its console: unless `allowed` has its beginning, or a part."""
    contexts, foreign, errors = [], [], []

    def open_one(
        url: str,
        *,
        width: int = 1280,
        scheme: str = "light",
        allowed: tuple[str, ...] = (),
        **options: Any,
    ) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)

        def note(text: str) -> None:
            if not any(each in text for each in allowed):
                errors.append(text)

        def watch(request: Any) -> None:
            if not request.url.startswith((url, *allowed)):
                foreign.append(request.url)

        page.on("request", watch)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("console", lambda told: note(told.text) if told.type == "error" else None)
        page.on("dialog", lambda dialog: (note(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert foreign == []
    assert errors == []


@pytest.fixture
def live() -> Iterator[LivePage]:
    with LivePage().running() as page:
        yield page


@pytest.fixture
def shoot() -> Callable[[Any, str], None]:
    """Leave a screenshot of a whole page among the artifacts."""

    def take(page: Any, name: str) -> None:
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True, animations="disabled")

    return take
