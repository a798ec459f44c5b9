"""The page at `/`: self-contained, and tested in a headless browser if one is installed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.server import page
from agentspec.server.app import create_app
from agentspec.server.door import Door
from agentspec.server.pipeline import TextPipeline
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.fakes.text import byte_backend
from tests.server.loopback import bundled_app, served

STATIC = Path(page.__file__).with_name("static")
CALL = "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
WAIT_MS = 20_000
"""Generous, since nothing here is slow and a slow machine must not fail."""


def get(connect: Callable[..., httpx.AsyncClient], path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine()) as client:
            return await client.get(path)

    return asyncio.run(run())


def test_page_csp_forbids_external_resources(connect: Callable[..., httpx.AsyncClient]) -> None:
    response = get(connect, "/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_only_existing_files_are_served_with_their_types(connect: Callable[..., httpx.AsyncClient]) -> None:
    for path in STATIC.iterdir():
        response = get(connect, f"/static/{path.name}")
        assert response.content == path.read_bytes()
        assert response.headers["content-type"].startswith(
            {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[path.suffix]
        )
    for name in ("missing.js", "..%2fpage.py", "%2e%2e%2fapp.py"):
        assert get(connect, f"/static/{name}").status_code == 404


def test_links_between_files_resolve() -> None:
    named = re.findall(r'(?:href|src)="static/([\w.]+)"', (STATIC / "index.html").read_text())
    for script in STATIC.glob("*.js"):
        named += re.findall(r'from "\./([\w.]+)"', script.read_text())
    assert sorted(set(named) | {"index.html"}) == sorted(path.name for path in STATIC.iterdir())
    for path in STATIC.iterdir():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text()), (
            f"{path.name} names another host"
        )


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Opens an address in a fresh profile; at the end no script may have failed."""
    contexts: list[Any] = []
    failures: list[str] = []

    def open_page(address: str) -> Any:
        context = browser.new_context()
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(WAIT_MS)
        tab.on("pageerror", lambda error: failures.append(str(error)))
        tab.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
        tab.goto(address)
        return tab

    open_page.failures = failures  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert not failures


@pytest.fixture
def scripted(pipeline: TextPipeline) -> Callable[[ScriptedEngine], Any]:
    """Serves a scripted engine over loopback."""

    def serve(engine: ScriptedEngine) -> Any:
        @asynccontextmanager
        async def app() -> AsyncIterator[Any]:
            yield create_app(engine, pipeline)

        return served(app)

    return serve


def send(tab: Any, text: str) -> None:
    tab.get_by_label("Message", exact=True).fill(text)
    tab.get_by_role("button", name="Send", exact=True).click()


def prompt_text(engine: ScriptedEngine, index: int) -> str:
    """Without control tokens."""
    return Tokenizer(byte_backend()).decode(engine.submits[index].prompt_ids)


def idle(tab: Any) -> None:
    tab.wait_for_selector("#log[aria-busy=false]")


def test_tool_turn_with_the_bundled_model(visit: Callable[[str], Any]) -> None:
    """The suggestion's call runs in the page, its result is sent back, and the answer states it; the second turn hits
    the prefix cache."""
    with served(bundled_app) as address:
        tab = visit(address)
        tab.get_by_role("button", name="What is the status of order O-4312?").click()
        tab.wait_for_selector(".call .result")
        idle(tab)
        first, last = tab.locator("article").all()
        assert first.locator(".call code").inner_text() == "orders_get"
        assert "O-4312" in first.locator(".call > pre").inner_text()
        assert '"status": "open"' in first.locator(".result pre").inner_text()
        assert first.locator("details.reasoning").count() == 1
        assert not first.locator("details.reasoning").evaluate("node => node.open")
        assert "open" in last.locator(".content").inner_text()
        for answer in (first, last):
            cost = answer.locator(".cost").inner_text()
            assert re.search(r"\d ms to the first token", cost), cost
            assert re.search(r"\d\.\d\d tokens a step", cost), cost
            assert re.search(r"\d+% of drafts accepted, from a step's first to its last:\s+\d+%", cost), cost
        (cached,) = re.findall(r"(\d+) of \d+ prompt tokens cached", last.locator(".cost").inner_text())
        assert int(cached) > 0
        assert tab.locator("#session dd").first.inner_text() == "2"
        tab.set_viewport_size({"width": 375, "height": 700})
        assert tab.evaluate("document.documentElement.scrollWidth") == 375, "wider than a phone"


def test_typed_results_are_sent_in_call_order(
    visit: Callable[[str], Any], scripted: Callable[[ScriptedEngine], Any]
) -> None:
    calls = [
        CALL.format(name="orders_get", key="order_id", value="O-4313"),
        CALL.format(name="look_up", key="what", value="it"),
    ]
    engine = ScriptedEngine(
        [*said("thinking\n</think>\n\n", *calls), ended()], [*said("ok\n</think>\n\nAll done."), ended()]
    )
    with scripted(engine) as address:
        tab = visit(address)
        tab.get_by_label("Run the demo tools in this page").uncheck()
        send(tab, "go")
        proposal = tab.get_by_label("Result of orders_get")
        proposal.wait_for()
        assert json.loads(proposal.input_value())["order_id"] == "O-4313"
        proposal.fill("first result")
        tab.get_by_label("Result of look_up").fill("<b>second</b> result")
        tab.get_by_role("button", name="Send results").click()
        idle(tab)
        assert tab.locator("article").last.locator(".content").inner_text() == "All done."
        assert tab.locator(".result b").count() == 0
    assert len(engine.submits) == 2
    assert len({submit.session_id for submit in engine.submits}) == 1
    text = prompt_text(engine, 1)
    assert text.index("first result") < text.index("<b>second</b> result")


def test_refusal_is_shown_and_can_be_retried(
    visit: Callable[[str], Any], scripted: Callable[[ScriptedEngine], Any]
) -> None:
    engine = ScriptedEngine(
        [*said("hm"), ended(FinishReason.ERROR, error="the step failed")], [*said("</think>\n\nfine now"), ended()]
    )
    with scripted(engine) as address:
        tab = visit(address)
        send(tab, "hello")
        tab.get_by_role("button", name="Try again").click()
        tab.get_by_text("fine now").wait_for()
        idle(tab)
        assert tab.locator("#notice").is_hidden()
        assert prompt_text(engine, 0) == prompt_text(engine, 1)


def test_stop_aborts_the_request_and_the_chat_continues(
    visit: Callable[[str], Any], scripted: Callable[[ScriptedEngine], Any]
) -> None:
    engine = ScriptedEngine(
        [*said("</think>\n\nhalf an"), asyncio.Event(), ended()], [*said("</think>\n\nwhole"), ended()]
    )
    with scripted(engine) as address:
        tab = visit(address)
        send(tab, "one")
        tab.get_by_text("half an").wait_for()
        tab.get_by_role("button", name="Stop").click()
        tab.get_by_text("stopped by you").wait_for()
        send(tab, "two")
        tab.get_by_text("whole").wait_for()
        idle(tab)
    assert engine.aborted == [engine.submits[0].request_id]
    assert "half an" in prompt_text(engine, 1)


def test_settings_reach_the_request_and_a_new_chat_has_a_new_session(
    visit: Callable[[str], Any], scripted: Callable[[ScriptedEngine], Any]
) -> None:
    engine = ScriptedEngine([*said("yes"), ended()])
    with scripted(engine) as address:
        tab = visit(address)
        tab.get_by_label("System prompt").fill("Be brief.")
        tab.get_by_label("Temperature").fill("0.5")
        tab.get_by_label("Most tokens").fill("77")
        tab.get_by_label("Think first").uncheck()
        tab.get_by_text("Definitions").click()
        tab.get_by_label("OpenAI function tools, as JSON").fill("[")
        send(tab, "hello")
        tab.locator("#tools-problem").wait_for()
        assert not engine.submits
        tab.get_by_label("OpenAI function tools, as JSON").fill("[]")
        send(tab, "hello")
        tab.get_by_text("yes").wait_for()
        idle(tab)
        tab.get_by_role("button", name="New chat").click()
        assert tab.locator("article").count() == 0
        send(tab, "again")
        tab.get_by_text("yes").wait_for()
        idle(tab)
    first, second = engine.submits
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 77)
    assert prompt_text(engine, 0).startswith("system\nBe brief.\nuser\nhello\nassistant\n")
    assert first.session_id != second.session_id
    assert "hello" not in prompt_text(engine, 1)


def test_keyboard_use_and_dark_mode(visit: Callable[[str], Any], scripted: Callable[[ScriptedEngine], Any]) -> None:
    engine = ScriptedEngine([*said("</think>\n\nhere"), ended()])
    with scripted(engine) as address:
        tab = visit(address)
        tab.get_by_label("Message", exact=True).press_sequentially("hi")
        tab.keyboard.press("Shift+Enter")
        tab.keyboard.type("there")
        tab.keyboard.press("Enter")
        tab.get_by_text("here", exact=True).wait_for()
        idle(tab)
        assert tab.evaluate("document.activeElement.id") == "message"
        ground = "getComputedStyle(document.body).backgroundColor"
        seen = []
        for name in ("Light", "Dark", "Auto"):
            tab.locator("#theme").click()
            assert tab.locator("#theme").inner_text() == name
            seen.append(tab.evaluate(ground))
        assert seen[0] == seen[2] != seen[1]
        unnamed = tab.evaluate(
            "[...document.querySelectorAll('input,textarea')]"
            ".filter(field => !field.labels.length).map(field => field.id)"
        )
        assert unnamed == []
    assert "hi\nthere" in prompt_text(engine, 0)


def test_page_asks_for_a_required_key(visit: Callable[[str], Any], pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said("</think>\n\nopened"), ended()])

    @asynccontextmanager
    async def app() -> AsyncIterator[Any]:
        yield Door(create_app(engine, pipeline), ServerConfig(api_keys=("sesame",)), max_running=1)

    with served(app) as address:
        tab = visit(address)
        tab.get_by_text("The server wants an API key").wait_for()
        tab.get_by_label("API key").fill("sesame")
        tab.get_by_label("API key").press("Tab")
        tab.get_by_text("scripted").wait_for()
        send(tab, "hello")
        tab.get_by_text("opened").wait_for()
        idle(tab)
    visit.failures.clear()  # type: ignore[attr-defined]  # the browser reports the 401 that was meant
