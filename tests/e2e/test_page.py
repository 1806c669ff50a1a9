"""The page at /, as a person uses it, in headless Chromium: `nox -s page`. SCREENSHOTS=FOLDER keeps pictures."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Server, serving

pytest.importorskip("playwright", reason="nox -s page installs it")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: CHROMIUM names one")
WEATHER = (
    '[{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        server.url()
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *QUIET])
        yield browser
        browser.close()


@pytest.fixture(params=["wide", "phone"])
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return (1280, 800) if request.param == "wide" else (390, 844)


@pytest.fixture
def page(server: Server, browser: Browser, size: tuple[int, int]) -> Iterator[Page]:
    """A fresh visit. Whatever the console complains of, or is loaded from elsewhere, fails the test."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(server.url()) else wrong.append(f"asks for {r.url}"))
    page.goto(server.url() + "/")
    expect(page.locator("#model")).to_have_text("demo")
    yield page
    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    context.close()
    assert not [line for line in wrong if "favicon" not in line and "400 (Bad Request)" not in line]
    assert not wide, "one has to scroll sideways"


def say(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)


def settings(page: Page, **values: str) -> None:
    page.keyboard.press("Alt+s")
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)


def picture(page: Page, name: str, size: tuple[int, int]) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}-{'phone' if size[0] < 500 else 'wide'}.png"))


def test_a_conversation(page: Page, size: tuple[int, int]) -> None:
    settings(page, temperature="0")
    page.keyboard.press("Alt+s")
    say(page, "What is 17 + 25?")
    expect(page.locator(".m.assistant").last).to_contain_text("42")
    expect(page.locator(".usage").last).to_contain_text("tokens")
    say(page, "What is lmkit?")
    expect(page.locator(".m.assistant")).to_have_count(2)
    picture(page, "talk", size)
    page.keyboard.press("Alt+n")
    expect(page.locator(".m")).to_have_count(0)


def test_reasoning_is_folded_when_the_answer_begins(page: Page, size: tuple[int, int]) -> None:
    settings(page, temperature="0")
    page.locator("#think").check()
    say(page, "What is 28 + 35?")
    expect(page.locator("details.think div")).not_to_have_text("")
    assert page.locator("details.think").get_attribute("open") is None
    expect(page.locator(".m.assistant").last).to_contain_text("63")
    picture(page, "reasoning", size)


def test_a_call_is_answered_by_hand(page: Page, size: tuple[int, int]) -> None:
    settings(page, temperature="0", tools=WEATHER)
    page.keyboard.press("Alt+s")
    say(page, "What is the weather in Berlin?")
    expect(page.locator(".m.call")).to_contain_text("get_weather")
    page.locator(".m.call textarea").fill('{"temperature": 21, "sky": "clear"}')
    picture(page, "call", size)
    page.locator(".m.call button").click()
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    expect(page.locator(".m.assistant").last).not_to_have_text("")
    expect(page.locator(".m.error")).to_have_count(0)


def test_tokens_say_how_likely_they_were(page: Page, size: tuple[int, int]) -> None:
    settings(page, temperature="1", seed="3")
    page.locator("#logprobs").check()
    page.keyboard.press("Alt+s")
    say(page, "What is 17 + 25?")
    tokens = page.locator(".token")
    assert tokens.count() > 3
    tokens.nth(2).hover()
    shown = tokens.nth(2).get_attribute("data-top") or ""
    assert len(re.findall(r"\d %  \"", shown)) == 5
    picture(page, "tokens", size)


def test_the_engine_is_drawn(page: Page, size: tuple[int, int]) -> None:
    say(page, "Hello!")
    page.keyboard.press("Alt+2")
    expect(page.locator(".plot")).to_have_count(8)
    expect(page.locator("#engine")).to_contain_text("KV blocks")
    page.wait_for_timeout(2500)
    assert "L" in (page.locator(".plot path").nth(1).get_attribute("d") or "")
    picture(page, "engine", size)


def test_plugins_and_why(page: Page, size: tuple[int, int]) -> None:
    page.locator("[data-view=plugins]").click()
    expect(page.locator("#plugins table").first).to_contain_text("attention")
    page.locator("#plugins details").first.locator("summary").click()
    expect(page.locator("#plugins details").first).to_contain_text("needed")
    expect(page.locator("#plugins")).to_contain_text("block_size")
    picture(page, "plugins", size)


@pytest.mark.parametrize("size", [(1280, 800)])
def test_what_is_refused_leaves_the_conversation(page: Page) -> None:
    settings(page, max_tokens="999999")
    say(page, "Hello!")
    expect(page.locator(".m.error")).to_have_count(1)
    expect(page.locator("#text")).to_have_value("Hello!")
    page.locator("#max_tokens").fill("5")
    page.locator("#text").press("Enter")
    expect(page.locator(".usage")).to_have_count(1, timeout=60_000)
    expect(page.locator(".m.error")).to_have_count(0)
    expect(page.locator(".m.user")).to_have_count(1)


@pytest.mark.parametrize("size", [(1280, 800)])
def test_escape_stops_and_the_conversation_goes_on(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: None)  # an answer that does not come
    page.locator("#text").fill("What is lmkit?")
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    page.unroute("**/v1/chat/completions")
    say(page, "Hello!")
    expect(page.locator(".usage")).to_have_count(1)


@pytest.mark.parametrize("size", [(1280, 800)])
def test_dark_and_light(page: Page, size: tuple[int, int]) -> None:
    shades = set()
    for _ in range(2):
        page.locator("#theme").click()
        shades.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        picture(page, f"shade-{len(shades)}", size)
    assert len(shades) == 2
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") in shades


def test_a_key_is_asked_for(browser: Browser) -> None:
    with serving(LMKIT_API_KEY="secret") as server:
        page = browser.new_page()
        page.goto(server.url() + "/")
        expect(page.locator("#key")).to_be_visible()
        for key in ("wrong", "secret"):
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("demo")
        say(page, "Hello!")
        expect(page.locator(".usage")).to_have_count(1)
        page.close()


def test_a_model_of_vectors_has_another_page(browser: Browser) -> None:
    with serving("demo", "--task", "embed") as server:
        page = browser.new_page()
        page.goto(server.url() + "/")
        expect(page.locator("#send")).to_have_text("Embed")
        page.locator("#text").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".m.assistant")).to_contain_text("numbers:")
        expect(page.locator("#settings")).to_be_hidden()
        page.close()
