"""The chat page in a real browser, with a real server whose sessions evict and recall tokens."""

import json
import re

import pytest
from browser import SCRIPT, assert_fits_and_can_be_read, needs_chromium, refused_script
from http_harness import wait_for
from playwright.sync_api import expect

from .conftest import ENDLESS, QUESTION
from .harness import running
from .test_sessions import ASK, EVICTS, long_text, stored

pytestmark = needs_chromium
KEY = "correct-horse-battery"
FLAGS = (*EVICTS, "--kv-recall", "96", "--max-tokens", "16")


@pytest.fixture(scope="module")
def server(start, service):
    return start(*FLAGS, "--rescue", service.url)


def say(page, text):
    """Send a message as a user does; return the item of its complete answer."""
    items = page.locator("#messages > li")
    count = items.count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answered = f"#log[aria-busy=false] > #messages > li:nth-child({count + 2}):last-child"
    page.wait_for_selector(answered, timeout=60_000)  # `expect` would describe all messages meanwhile
    return items.last


def stored_chat(name, *contents):
    """Return a script that stores a chat as the page does, and makes it the tab's."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    chat = json.dumps({"id": name, "turns": turns, "memory": None, "changed": 1})
    current = json.dumps(json.dumps(name))
    return f"localStorage['mlx-tq-chat-{name}'] ??= {json.dumps(chat)}; sessionStorage.chat = {current};"


def never_end(page):
    """Make further requests of this page forbid the tokens that end an answer."""

    def change(route):
        body = {**json.loads(route.request.post_data), "logit_bias": ENDLESS, "max_tokens": 3000}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)


def test_a_chat_is_a_session_and_shows_its_cache(server, service, open_page):
    page = open_page(server)
    expect(page.locator("#model")).to_have_text("needle32")
    page.get_by_text("Cache layout").click()
    expect(page.locator("#layout")).to_contain_text("6 layers: keys q8, values q8")
    expect(page.locator("#layout")).to_contain_text("Eviction: recency, budget 64 tokens")
    say(page, long_text())
    wait_for(lambda: stored(service))
    answer = say(page, ASK)
    expect(answer.locator(".content")).to_have_text("417295")
    usage = re.compile(
        r"Context: \d+ tokens of 4,096 \(\d+%\)\d+ cached \(\d+%\)"
        r"\d+ live\d+ archived\d+ recalled[\d.]+ MB, float32 cache [\d.]+ MB"
    )
    expect(page.locator("#usage")).to_have_text(usage)
    live, archived = (page.locator(f"#bar .{name}").evaluate("e => e.offsetWidth") for name in ("live", "archived"))
    assert live > 10 < archived
    facts = answer.locator(".facts").inner_text()
    assert re.search(r"recalled [1-9]\d* tokens \([1-9]\d* by search\) in [\d,.]+ ms", facts)
    assert int(re.search(r"\((\d+)% cached\)", facts)[1]) > 80, f"cached tokens were prefilled again: {facts}"
    page.reload()
    expect(page.locator("#messages > li")).to_have_count(4)
    expect(page.locator("#usage")).to_have_text(usage)
    expect(say(page, ASK).locator(".content")).to_have_text("417295")
    page.locator("#chats").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#messages > li")).to_have_count(0)
    wait_for(lambda: server.metrics()["mlx_tq_sessions"] == 0 and not stored(service))


# The name of the element that has the focus, if that can be seen.
FOCUSED = """() => {
  const { activeElement: e } = document, { outlineStyle, outlineWidth } = getComputedStyle(e);
  return outlineStyle === "solid" && outlineWidth === "2px" && (e.ariaLabel || e.textContent);
}"""


@pytest.mark.full
def test_keyboard_only(server, open_page):
    page = open_page(server)
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    expect(page.get_by_label("Message")).to_have_value("Hello\nthere")
    never_end(page)
    page.keyboard.press("Enter")
    expect(page.locator("#messages > li .content").last).to_have_text(re.compile(r"\w{2}"), timeout=60_000)
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#messages > li").last.locator(".facts")).to_contain_text(", stopped")
    expect(page.locator("#status")).to_have_text("Stopped")
    wait_for(lambda: server.metrics()["mlx_tq_running"] == 0)
    page.unroute("**/v1/chat/completions")
    expect(say(page, QUESTION).locator(".content")).to_have_text("417295")
    reached = []
    for _ in range(8):
        page.keyboard.press("Shift+Tab")
        reached.append(page.evaluate(FOCUSED))
    assert reached == ["Regenerate", "Copy", "Edit", "Copy", "Settings", "Delete Hello", "Hello", "New chat"]
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("You are terse.")
    for text in ("0", "1"):
        page.keyboard.press("Tab")
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message")).to_be_focused()
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = say(page, ASK)
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"generated 1,.* stopped at max tokens"))
    body = json.loads(sent.value.post_data)
    assert body["messages"][0] == {"role": "system", "content": "You are terse."}
    assert (body["temperature"], body["max_tokens"]) == (0, 1)


# Whether more is there than fits, and the end is in view.
AT_END = """() => {
  const main = document.querySelector("main"), below = main.scrollHeight - main.clientHeight - main.scrollTop;
  return main.scrollHeight > main.clientHeight + 100 && below < 4;
}"""


@pytest.mark.full
def test_the_end_stays_in_view(server, open_page):
    page = open_page(server, viewport={"width": 1280, "height": 440})

    def is_at_end():
        return page.evaluate(AT_END)

    for text in ("\n".join(f"Line {n}." for n in range(12)), "Hello", "And now?"):
        say(page, text)
        wait_for(is_at_end)
    page.reload()
    expect(page.locator("#messages > li")).to_have_count(6)
    wait_for(is_at_end)
    never_end(page)
    page.get_by_label("Message").fill("Talk on")
    page.keyboard.press("Enter")
    answer = page.locator("#messages > li .content").last
    expect(answer).to_have_text(re.compile(r"\w{2}"), timeout=60_000)
    wait_for(is_at_end)
    latest = page.get_by_role("button", name="Jump to latest")
    expect(latest).to_be_hidden()
    page.evaluate("document.querySelector('main').scrollTop = 40")
    expect(latest).to_be_visible()
    length = len(answer.text_content())
    wait_for(lambda: len(answer.text_content()) > length + 200)
    assert page.evaluate("document.querySelector('main').scrollTop") == 40, "what the user reads stays where it is"
    latest.click()
    expect(latest).to_be_hidden()
    expect(page.get_by_label("Message")).to_be_focused()
    length = len(answer.text_content())
    wait_for(lambda: len(answer.text_content()) > length + 200)
    wait_for(is_at_end)
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
    wait_for(is_at_end)
    page.evaluate("document.querySelector('main').scrollTop = 0")
    expect(latest).to_be_visible()
    page.unroute("**/v1/chat/completions")
    say(page, "Are you there?")
    wait_for(is_at_end)


@pytest.mark.full
def test_a_long_message_is_folded(server, open_page):
    page = open_page(server)
    say(page, "One line.")
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)
    paste = "\n".join(f"Line {n}." for n in range(40))
    say(page, paste)
    content = page.locator("#messages .user .content").last
    for _ in range(2):  # when it is sent, and after a reload
        button = page.get_by_role("button", name="Show all")
        assert content.bounding_box()["height"] < 200
        button.click()
        assert content.bounding_box()["height"] > 900
        expect(content).to_have_text(paste)
        expect(content).to_be_in_viewport()
        page.get_by_role("button", name="Show less").click()
        assert content.bounding_box()["height"] < 200
        page.reload()


def test_untrusted_text_is_not_executed(server, open_page):
    page = open_page(server)
    say(page, f"{SCRIPT} and an innocent \u202eneighbor\x1b]0;owned\x07")
    hostile = {"choices": [{"index": 0, "delta": {"content": f"{SCRIPT} \u202e\x9b31m"}, "finish_reason": "stop"}]}
    numbers = ("context_length", "tokens", "live", "evicted", "archived", "recalled", "recall_ms", "rescued")
    session = dict.fromkeys((*numbers, "dropped", "bytes", "native_bytes", "compressed_from"), 9) | {
        "quoted": [{"start": 0, "stop": 9, "text": SCRIPT}]
    }
    events = json.dumps(hostile), json.dumps({"choices": [], "session": session}), "[DONE]"
    stream = "".join(f"data: {event}\n\n" for event in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    say(page, "Go on")
    for _ in range(2):  # streamed, and after a reload
        expect(page.locator("#messages .content").first).to_contain_text("[U+202E]neighbor[U+001B]]0;owned[U+0007]")
        expect(page.locator("#messages .content").last).to_have_text(f"{SCRIPT} [U+202E][U+009B]31m")
        page.get_by_text("Quoted: 9 tokens").click()
        expect(page.locator(".quotes")).to_contain_text(SCRIPT)
        assert page.locator("#messages img, #messages script").count() == 0
        page.reload()
    assert page.title() == "mlx-tq"


def test_an_injected_script_does_not_run(server, browser):
    page = browser.new_page()
    page.goto(server.url)
    assert (refused_script(page), page.title()) == ("require-trusted-types-for", "mlx-tq")
    page.close()


@pytest.mark.full
def test_it_fits_narrow_windows_and_has_contrast(server, open_page):
    page = open_page(server, viewport={"width": 375, "height": 667})
    say(page, "x" * 400)
    expect(page.locator("#layout")).to_be_hidden()
    assert page.evaluate("document.querySelector('main').clientHeight > innerHeight / 2"), "the conversation has room"
    page.get_by_text("Cache layout").click()
    for width, scheme in ((320, "light"), (320, "dark"), (768, "dark"), (1600, "light")):
        page.set_viewport_size({"width": width, "height": 700})
        page.emulate_media(color_scheme=scheme)
        assert_fits_and_can_be_read(page)
        page.get_by_role("button", name="Settings").click()
        assert_fits_and_can_be_read(page)
        page.keyboard.press("Escape")


@pytest.mark.full
def test_the_key_and_a_stopped_server(folder, browser, tmp_path):
    """The page stores the key in its tab only; a message that cannot be sent is not lost."""
    context = browser.new_context()  # its console may show errors
    page = context.new_page()
    with running(folder, tmp_path / "log", key=KEY) as server:
        page.goto(server.url)
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#error")).to_contain_text("the API key is missing or wrong")
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#layout")).to_contain_text("Context window: 4,096 tokens")
        expect(page.locator("#error")).to_be_hidden()
        expect(say(page, QUESTION).locator(".content")).to_have_text("417295")
        page.reload()
        expect(page.locator("#model")).to_have_text("needle32")
        assert KEY not in page.content()
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.get_by_label("Message").fill("Are you there?")
    page.keyboard.press("Enter")
    expect(page.locator("#error")).to_contain_text("Cannot reach the server")
    expect(page.get_by_label("Message")).to_have_value("Are you there?")
    expect(page.locator("#messages > li")).to_have_count(2)
    context.close()
