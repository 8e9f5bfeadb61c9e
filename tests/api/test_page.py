"""The page at ``/`` in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from backfill.http.page import PAGE_PATHS
from tests.api.servers import RunningServer

SHORT = 60_000  # ms; a busy machine is slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a screen. Tests that use it are left out where there is none (tests/conftest.py)."""
    quiet = ("disable-background-networking", "disable-component-update", "disable-sync", "no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[f"--{each}" for each in quiet]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab, in which no script fails and nothing is asked of another host."""
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.set_default_timeout(SHORT)
    expect.set_options(timeout=SHORT)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: _note_foreign(request.url, faults))
    yield page
    page.close()
    assert faults == []


def _note_foreign(url: str, faults: list[str]) -> None:
    if not url.startswith(("http://127.0.0.1:", "data:", "blob:")):
        faults.append(url)


def _without_an_end(route: Route) -> None:
    body = {**(route.request.post_data_json or {}), "ignore_eos": True}
    route.continue_(post_data=json.dumps(body))


def batches_after(url: str, ids: list[str]) -> dict[str, Any]:
    """What a server with these ended batches answers."""
    asked = parse_qs(urlsplit(url).query)
    limit, after = int(asked["limit"][0]), asked.get("after", [None])[0]
    if after is not None and after not in ids:
        return {"status": 404, "json": {"error": {"message": f"after: no batch found with id '{after}'."}}}
    start = 0 if after is None else ids.index(after) + 1
    counts, usage = {"total": 1, "completed": 1, "failed": 0}, {"output_tokens": 1}
    ended = {"status": "completed", "completed_at": 1, "request_counts": counts, "usage": usage}
    data = [{"id": each, "input_file_id": f"file_{each}", **ended} for each in ids[start : start + limit]]
    return {"json": {"object": "list", "data": data, "has_more": start + limit < len(ids)}}


def sent_events(*deltas: str) -> dict[str, Any]:
    """The answer to a chat as a stream of these parts."""
    chunks = [{"choices": [{"delta": {"content": each}}]} for each in deltas]
    usage = {"prompt_tokens": 1, "completion_tokens": len(deltas)}
    events = [json.dumps(each) for each in (*chunks, {"choices": [], "usage": usage})] + ["[DONE]"]
    body = "".join(f"data: {each}\n\n" for each in events)
    return {"content_type": "text/event-stream", "body": body}


def figure_of(page: Page, chart: str) -> Locator:
    return page.locator(".chart", has_text=chart).locator(".figure")


def test_the_page_is_small_and_names_all_of_its_files(server: RunningServer) -> None:
    contents = {path: server.http.get(path) for path in PAGE_PATHS}
    assert all(each.status_code == 200 for each in contents.values())
    assert sum(len(each.content) for each in contents.values()) < 200_000
    text = "".join(each.text for each in contents.values())
    named = set(re.findall(r'"(?:\./|page/)(\w+\.(?:js|css))"', text))
    assert {f"/page/{name}" for name in named} == PAGE_PATHS - {"/"}


def test_a_chat_streams_stops_and_is_seen_live(page: Page, server: RunningServer) -> None:
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_contain_text("smollm2")
    page.get_by_text("Parameters").click()
    page.get_by_label("Tokens at most").fill("12")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("What is gravity?")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .note")).to_contain_text(", 12 tokens")
    answer = page.locator("#chat-log .answer").text_content()
    messages = [{"role": "user", "content": "What is gravity?"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    whole = server.http.post("/v1/chat/completions", json=body).json()
    assert answer == whole["choices"][0]["message"]["content"]
    expect(figure_of(page, "Time to first token")).to_contain_text("met by")

    page.route("**/v1/chat/completions", _without_an_end)
    page.get_by_label("Tokens at most").fill("1500")
    page.get_by_label("Class").select_option("flex")
    page.get_by_label("Message", exact=True).fill("Count to one thousand.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .answer")).to_have_count(2)
    expect(figure_of(page, "Requests that")).to_contain_text("offline 1")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-log .note").last).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()

    page.get_by_label("Tokens at most").fill("400")  # beside what a fast machine has made of the 1,500
    page.get_by_label("Message", exact=True).fill("Count on.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .answer")).to_have_count(3)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#chat-log")).to_be_empty()


def test_one_token_is_no_tokens_and_an_error_is_shown_in_the_server_s_words(
    page: Page, server: RunningServer
) -> None:
    page.goto(f"{server.url}/")
    page.get_by_text("Parameters").click()
    page.get_by_label("Tokens at most").fill("1")
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .note")).to_contain_text(", 1 token; prompt")
    page.get_by_label("Tokens at most").fill("1000000")
    page.get_by_label("Message", exact=True).fill("x")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .error")).to_contain_text("max_tokens")


def test_the_text_of_an_answer_changes_at_most_ten_times_a_second(page: Page, server: RunningServer) -> None:
    parts = [f"{number} " for number in range(500)]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**sent_events(*parts)))
    page.goto(f"{server.url}/")
    page.evaluate(_COUNT_CHANGES)
    page.get_by_label("Message", exact=True).fill("Count.")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .note")).to_contain_text(", 500 tokens")
    assert page.locator("#chat-log .answer").text_content() == "".join(parts)
    changes, elapsed_s = page.evaluate("[changes, (lastAt - firstAt) / 1000]")
    # The message, the answer's two nodes, its first and its last tokens and the note, beside one in 100 ms.
    assert changes <= 6 + 10 * elapsed_s


def test_a_lost_connection_is_told_and_the_message_returns(
    page: Page, server: RunningServer, tmp_path: Path
) -> None:
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready")
    page.route("**/v1/**", lambda route: route.abort("connectionreset"))
    message = page.get_by_label("Message", exact=True)
    message.fill("What is gravity?")
    page.keyboard.press("Enter")
    lost = "The connection to the server was lost."
    expect(page.locator("#chat-log .error")).to_have_text(lost)
    expect(message).to_have_value("What is gravity?")
    (tmp_path / "one.jsonl").write_text("{}")
    page.get_by_label("Requests, JSONL").set_input_files(tmp_path / "one.jsonl")
    page.get_by_role("button", name="Upload and run").click()
    expect(page.locator("#batch-message")).to_have_text(lost)
    page.unroute_all(behavior="wait")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .note")).to_contain_text("first token")
    expect(message).to_have_value("")


def test_a_batch_is_uploaded_watched_and_its_results_downloaded(
    page: Page, server: RunningServer, tmp_path: Path
) -> None:
    body = {"prompt": "Gravity", "max_tokens": 3, "max_tokns": 3}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(index), **line}) for index in range(5)]
    (tmp_path / "five.jsonl").write_text("\n".join(lines))
    page.goto(f"{server.url}/")
    page.get_by_label("Requests, JSONL").set_input_files(tmp_path / "five.jsonl")
    page.get_by_role("button", name="Upload and run").click()
    expect(page.locator("#batch-message")).to_contain_text("five.jsonl is batch")
    row = page.locator("#batch-list tbody tr").first
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("5 of 5")
    expect(row.get_by_role("rowheader")).to_contain_text("five.jsonl")
    expect(row.locator(".warning")).to_contain_text("max_tokns")
    expect(row.locator(".error")).to_have_count(0)
    with page.expect_download() as download:
        row.get_by_role("button", name="Results").click()
    results = Path(download.value.path()).read_text().splitlines()
    assert sorted(json.loads(each)["custom_id"] for each in results) == list("01234")

    files = server.http.get("/v1/files").json()["data"]
    page.get_by_label("Complete within").fill("soon")
    page.get_by_role("button", name="Upload and run").click()
    expect(page.locator("#batch-window:invalid")).to_have_count(1)
    assert server.http.get("/v1/files").json()["data"] == files, "nothing is uploaded for such a window"

    page.get_by_label("Complete within").fill("24h")
    (tmp_path / "bad.jsonl").write_text("\n".join(["{}"] * 5))
    page.get_by_label("Requests, JSONL").set_input_files(tmp_path / "bad.jsonl")
    page.get_by_role("button", name="Upload and run").click()
    faults = page.locator("#batch-list tbody tr").first.locator(".error")
    expect(faults).to_have_count(4)
    expect(faults.nth(1)).to_contain_text("Line 2: ")
    expect(faults.last).to_have_text("and 2 more")


def test_a_key_is_asked_for_once_and_used(page: Page, keyed_server: RunningServer) -> None:
    page.goto(f"{keyed_server.url}/")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Key", exact=True).fill("another")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#key-reason")).to_contain_text("refused this API key")
    page.get_by_label("Key", exact=True).fill("one")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#model")).to_contain_text("context of")
    page.reload()
    expect(page.locator("#model")).to_contain_text("context of")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_nothing_stays_stale_over_a_lost_connection_and_a_dead_engine(
    page: Page, server: RunningServer
) -> None:
    page.goto(f"{server.url}/")
    status = page.locator("#status")
    expect(status).to_have_text("ready")
    server.complete([7] * 500, max_tokens=4)
    chart = page.locator(".chart", has_text="KV blocks on the device").locator("svg")
    expect(chart).to_have_attribute("aria-label", re.compile("cached [1-9]"))
    requests = figure_of(page, "Requests that")
    expect(requests).to_contain_text("online 0 and 0")
    os.kill(server.engine_pid(), signal.SIGKILL)
    expect(requests).to_have_text("no engine runs")
    expect(chart).to_have_attribute("aria-label", re.compile("cached 0,"))
    expect(status).to_have_text("ready")
    page.route("**/*", lambda route: route.abort("connectionrefused"))
    expect(status).to_contain_text("no connection to the server; what is shown is of")
    expect(page.locator("body")).to_have_class("stale")
    page.unroute_all(behavior="wait")
    expect(status).to_have_text("ready")
    expect(page.locator("body")).not_to_have_class("stale")


def test_a_connection_that_is_lost_without_a_word_is_seen(page: Page, server: RunningServer) -> None:
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready")
    page.route("**/health", lambda route: None)  # no answer
    expect(page.locator("#status")).to_contain_text("no connection to the server")
    expect(page.locator("body")).to_have_class("stale")
    page.unroute_all(behavior="ignoreErrors")
    expect(page.locator("#status")).to_have_text("ready")


def test_a_hundred_batches_are_turned_over_page_by_page(page: Page, server: RunningServer) -> None:
    ids = [f"batch_{number}" for number in range(100)]
    page.route("**/v1/batches?*", lambda route: route.fulfill(**batches_after(route.request.url, ids)))
    page.goto(f"{server.url}/")
    rows, older = page.locator("#batch-list tbody tr"), page.get_by_role("button", name="Older")
    for first in range(0, 100, 20):
        expect(rows.first).to_contain_text(ids[first])
        expect(rows).to_have_count(20)
        if first < 80:
            older.click()
    expect(older).to_be_disabled()
    page.get_by_role("button", name="Newer").click()
    expect(rows.first).to_contain_text(ids[60])
    del ids[40:]  # with the one after which the list is asked
    expect(rows.first).to_contain_text(ids[0])
    assert page.locator("#batches").is_visible()


def test_one_of_a_thousand_batches_is_found(page: Page, server: RunningServer) -> None:
    ids = [f"batch_{number}" for number in range(1000)]
    files = [{"id": f"file_{each}", "filename": f"{each[6:]}-lines.jsonl"} for each in ids[:-1]]
    page.route("**/v1/batches?*", lambda route: route.fulfill(**batches_after(route.request.url, ids)))
    page.route("**/v1/files?*", lambda route: route.fulfill(json={"object": "list", "data": files}))
    answers = {each["id"]: {"json": each} for each in files}
    answers["file_batch_999"] = {"status": 404, "json": {"error": {"message": "no such file"}}}
    page.route("**/v1/files/*", lambda route: route.fulfill(**answers[route.request.url.rpartition("/")[2]]))
    page.goto(f"{server.url}/")
    rows = page.locator("#batch-list tbody tr")
    expect(rows.first).to_contain_text("0-lines.jsonl")
    find = page.get_by_label("Find")
    find.fill("987-LINES completed")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("batch_987")
    find.fill("batch_999")
    expect(rows).to_have_count(1)
    expect(rows.get_by_role("rowheader")).to_have_text("batch_999")
    find.fill("failed")
    expect(rows).to_have_text("No batch has these words in its file's name, id or status.")
    find.fill("9-lines")  # 9, 19, ...: a hundred, but for the deleted one
    for first in range(9, 999, 200):
        expect(rows.first).to_contain_text(f"batch_{first}")
        expect(rows).to_have_count(20 if first < 809 else 19)
        if first < 809:
            page.get_by_role("button", name="Older").click()
    expect(page.get_by_role("button", name="Older")).to_be_disabled()


def test_text_has_contrast_and_a_narrow_screen_does_not_scroll_sideways(
    page: Page, server: RunningServer
) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        ratios = page.evaluate(_CONTRASTS)
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}, scheme
    unnamed = page.evaluate(_UNNAMED)
    assert unnamed == []


_COUNT_CHANGES = """() => {
  Object.assign(window, { changes: 0, firstAt: performance.now(), lastAt: 0 });
  const count = (records) => { changes += records.length; lastAt = performance.now(); };
  const options = { subtree: true, childList: true, characterData: true };
  new MutationObserver(count).observe(document.getElementById("chat-log"), options);
}"""
_UNNAMED = """[...document.querySelectorAll("input, select, textarea, button")]
  .filter((each) => !(each.labels?.length || each.textContent.trim() || each.ariaLabel))
  .map((each) => each.id)"""
# The contrast of each colour of text with the card behind it (WCAG 2.2, 1.4.3), by class or kind of element.
_CONTRASTS = """() => {
  const parse = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((each) => {
    const share = each / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const weights = [0.2126, 0.7152, 0.0722];
  const luminance = (text) => parse(text).reduce((sum, each, i) => sum + each * weights[i], 0);
  const back = luminance(getComputedStyle(document.querySelector("section")).backgroundColor);
  const ratios = {};
  const kinds = "p, span, label, button, h1, h2, h3, th, td, a, summary, text";
  for (const each of document.querySelectorAll(kinds)) {
    const style = getComputedStyle(each);
    const front = luminance(each instanceof SVGElement ? style.fill : style.color);
    const name = `${each.tagName}.${each.className.baseVal ?? each.className}`;
    ratios[name] = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  }
  return ratios;
}"""
