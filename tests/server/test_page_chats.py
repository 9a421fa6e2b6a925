"""The chats of the chat page: their list, where they are stored, new answers and edited messages, 500 messages."""

import re

import pytest
from browser import needs_chromium
from http_harness import wait_for
from playwright.sync_api import expect

from .scripted_site import scripted_site
from .test_chat_page import say, stored_chat
from .test_messages import tokenizer  # noqa: F401 - a fixture

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site(loaded, tokenizer):  # noqa: F811
    with scripted_site(loaded, tokenizer, "--prefill-step-size", "32") as scripted:
        yield scripted


def ask(site, page, question, answer):
    site.script(answer)
    return say(page, question)


def contents(page):
    return page.locator("#messages .content")


def titles(page):
    return page.locator("#chats .title")


@pytest.mark.full
def test_chats_are_listed_opened_and_deleted(site, open_page):
    page = open_page(site)
    ask(site, page, "\nFirst question\nwith a second line", "One.")
    page.get_by_role("button", name="New chat").click()
    expect(contents(page)).to_have_count(0)
    ask(site, page, "Second question", "Two.")
    expect(titles(page)).to_have_text(["Second question", "First question"])
    other = page.context.new_page()  # another tab
    other.goto(site.url)
    expect(contents(other)).to_have_count(0)
    other.get_by_role("button", name="First question", exact=True).click()
    expect(contents(other)).to_have_text(["\nFirst question\nwith a second line", "One."])
    expect(other.get_by_label("Message")).to_be_focused()
    ask(site, other, "And then?", "Three.")
    expect(titles(page)).to_have_text(["First question", "Second question"])
    page.get_by_role("button", name="Delete Second question").click()
    page.keyboard.press("Escape")
    expect(titles(page)).to_have_count(2)
    page.get_by_role("button", name="Delete Second question").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(contents(page)).to_have_count(0)
    expect(titles(other)).to_have_text(["First question"])
    titles(other).focus()
    ask(site, page, "Third question", "Four.")
    expect(titles(other)).to_have_count(2)
    expect(titles(other).last).to_be_focused()
    page.get_by_role("button", name="Delete Third question").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(titles(other)).to_have_count(1)
    titles(page).click()
    other.get_by_role("button", name="First question", exact=True).click()
    other.get_by_role("button", name="Edit").click()
    other.get_by_label("Edit message").fill("Not lost")
    ask(site, page, "Last question", "Five.")
    other.evaluate("new Promise(resolve => setTimeout(resolve, 100))")
    expect(other.get_by_label("Edit message")).to_have_value("Not lost")
    other.close()


# Pages end as in a crash, without events, and `window.emit` writes the answers.
CRASHES = """for (const name of ["pagehide", "beforeunload"])
  addEventListener(name, event => event.stopImmediatePropagation(), true);
document.addEventListener("visibilitychange", event => event.stopImmediatePropagation(), true);
const { fetch } = window, encoder = new TextEncoder();
window.fetch = (path, options) => path.endsWith("/completions") ? Promise.resolve(new Response(new ReadableStream({
  start(controller) {
    window.emit = event => controller.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
    options.signal.addEventListener("abort", () => controller.error(new DOMException("stopped", "AbortError")));
  },
}))) : fetch(path, options);"""


def test_a_crash_loses_no_turn_and_an_error_restores_the_answer(site, open_page):
    page = open_page(site)
    page.add_init_script(CRASHES)
    page.evaluate(stored_chat("chat", "Question", "One."))
    page.reload()
    page.get_by_role("button", name="Regenerate").click()
    wait_for(lambda: page.evaluate("Boolean(window.emit)"))
    for delta in ({"content": "", "reasoning": "Why"}, {"content": None, "reasoning": "?"}, {"content": "Tw"}):
        page.evaluate("delta => emit({ choices: [{ delta }] })", delta)
    expect(contents(page).last).to_have_text("Tw")
    page.evaluate("emit({ error: { message: 'out of memory' } })")
    expect(page.locator("#error")).to_have_text("out of memory")
    expect(contents(page)).to_have_text(["Question", "One."])
    message = page.get_by_label("Message", exact=True)
    message.fill("And then?")
    page.evaluate("""sessionStorage.draft = '"And then?"'""")
    message.press("Enter")
    expect(contents(page)).to_have_count(4)
    page.reload()
    expect(contents(page)).to_have_text(["Question", "One.", "And then?", ""])
    expect(message).to_have_value("")
    message.fill("More")
    message.press("Enter")
    wait_for(lambda: page.evaluate("Boolean(window.emit)"))
    page.evaluate("emit({ choices: [{ delta: { content: 'Thr' } }] })")
    wait_for(lambda: "Thr" in page.evaluate("JSON.stringify(localStorage)"))
    page.reload()
    expect(contents(page).last).to_have_text("Thr")


@pytest.mark.full
def test_two_tabs_lose_no_message(site, open_page):
    """A chat that changes in two tabs at once becomes two."""
    page = open_page(site)
    ask(site, page, "Question", "One.")
    other = page.context.new_page()
    other.add_init_script("addEventListener('storage', event => event.stopImmediatePropagation(), true)")
    other.goto(site.url)
    titles(other).click()
    ask(site, page, "Here", "Two.")
    ask(site, other, "There", "Three.")
    expect(titles(page)).to_have_text(["Question", "Question"])
    expect(contents(other)).to_have_text(["Question", "One.", "There", "Three."])
    titles(page).last.click()
    expect(contents(page)).to_have_text(["Question", "One.", "Here", "Two."])
    other.close()


def test_the_last_answer_is_made_again_and_the_last_message_edited(site, open_page):
    page = open_page(site)
    ask(site, page, "First", "One.")
    ask(site, page, "Second", "Two.")
    for name in ("Regenerate", "Edit"):
        expect(page.get_by_role("button", name=name)).to_have_count(1)  # only of the last ones
    site.script("Two again.")
    page.get_by_role("button", name="Regenerate").click()
    expect(contents(page)).to_have_text(["First", "One.", "Second", "Two again."])
    page.get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Edit message")
    expect(editor).to_be_focused()
    editor.fill("Lost")
    page.keyboard.press("Escape")
    expect(contents(page)).to_have_text(["First", "One.", "Second", "Two again."])
    page.get_by_role("button", name="Edit").click()
    expect(editor).to_have_value("Second")
    editor.fill("Third")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line")
    answer = "Three, four, five, six, seven, eight, nine, ten."  # in several parts, so that there is a speed
    site.script(answer)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    expect(contents(page)).to_have_text(["First", "One.", "Third\nline", answer])
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["First", "One.", "Third\nline"]
    expect(page.locator("#status")).to_have_text("Answer complete")
    facts = page.locator(".facts").last
    rates = r"generated \d+, [\d.]+ tokens/s, first token after [\d.]+ s"
    expect(facts).to_have_text(re.compile(rf"^prompt \d+ tokens \([1-9]\d% cached\), {rates}$"))
    page.reload()
    expect(contents(page)).to_have_text(["First", "One.", "Third\nline", answer])
    expect(facts).to_contain_text("tokens/s")


def test_nothing_is_lost_if_the_server_cannot_be_reached(site, browser):
    context = browser.new_context()  # its console may show errors
    page = context.new_page()
    page.goto(site.url)
    ask(site, page, "First", "One.")
    context.set_offline(True)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#error")).to_contain_text("Cannot reach the server")
    expect(contents(page)).to_have_text(["First", "One."])
    expect(page.get_by_label("Message")).to_have_value("")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("Changed")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Changed")
    expect(contents(page)).to_have_text(["First", "One."])
    context.set_offline(False)
    page.reload()
    expect(page.get_by_label("Message")).to_have_value("Changed")
    expect(contents(page)).to_have_text(["First", "One."])
    context.close()


@pytest.mark.full
def test_full_storage_is_said_and_a_deleted_chat_makes_room(site, open_page):
    page = open_page(site)
    page.evaluate(stored_chat("large", "x" * 5_000_000, "y"))
    page.evaluate("localStorage.other = 'z'.repeat(5_242_880 - 5_000_200); sessionStorage.clear()")
    page.reload()
    ask(site, page, "Kept?", "One. " * 60)
    expect(page.locator("#unsaved")).to_contain_text("its storage for this page is full. Delete other chats")
    page.get_by_role("button", name="New chat").click()
    titles(page).first.click()  # it is still in this tab
    expect(contents(page).first).to_have_text("Kept?")
    assert "Kept?" not in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_role("button", name="Delete xx").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#unsaved")).to_be_hidden()
    page.reload()
    expect(contents(page).first).to_have_text("Kept?")
    assert page.evaluate("localStorage.other.length") > 1000, "what is not the page's own stays"


REFUSE = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("refused", "SecurityError"); } });"""


@pytest.mark.full
def test_a_browser_that_refuses_storage(site, open_page):
    page = open_page(site)
    page.add_init_script(REFUSE)
    page.reload()
    for title in ("First", "Second"):
        page.get_by_role("button", name="New chat").click()
        ask(site, page, title, "One.")
    expect(page.locator("#unsaved")).to_contain_text("cannot keep this chat: it refuses to store anything")
    titles(page).last.click()
    expect(contents(page)).to_have_text(["First", "One."])
    page.get_by_role("button", name="Delete First").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(titles(page)).to_have_text(["Second"])


# Collect what an element shows, from now on.
TEXTS = """id => {
  window.texts = [];
  const node = document.getElementById(id);
  new MutationObserver(() => texts.push(node.textContent)).observe(node, { childList: true, characterData: true });
}"""


@pytest.mark.full
def test_the_progress_of_prefill_and_the_share_of_the_context(site, open_page):
    page = open_page(site)
    page.evaluate(TEXTS, "activity-text")
    ask(site, page, "word " * 150, "One.")
    shown = [re.fullmatch(r"Prefill (\d+)% of (\d+) tokens", text) for text in page.evaluate("texts")]
    shares = [int(text[1]) for text in shown if text]
    assert shares == sorted(set(shares))
    assert len(shares) > 2
    assert shares[-1] == 100
    expect(page.locator("#usage")).to_have_text(
        re.compile(r"^Context: 1\d\d tokens of 4,096 \([34]%\)\d cached \([0-5]%\)1\d\d new$")
    )
    ask(site, page, "Again", "Two.")
    expect(page.locator("#usage")).to_have_text(
        re.compile(r"^Context: \d+ tokens of 4,096 \(\d%\)\d+ cached \([89]\d%\)\d+ new$")
    )


# Note each message in which something changes, and the elements that are added.
CHANGES = """() => {
  const list = document.getElementById("messages");
  window.changes = [];
  new MutationObserver(records => {
    for (const { target, addedNodes } of records) {
      const element = target.nodeType === Node.TEXT_NODE ? target.parentElement : target;
      const item = element?.closest("#messages > li") ?? null;
      changes.push([item && [...list.children].indexOf(item), addedNodes.length]);
    }
  }).observe(list, { childList: true, characterData: true, subtree: true });
}"""


@pytest.mark.full
def test_500_messages(site, open_page):
    """While an answer is written, nothing changes in the others."""
    page = open_page(site)
    text = "A *paragraph* with `code`.\n\n```py\nprint(1)\n```\n\n- one\n- two\n"
    page.evaluate(stored_chat("long", *[text] * 500))
    page.reload()
    expect(page.locator("#messages > li")).to_have_count(500)
    page.evaluate(CHANGES)
    page.route("**/v1/chat/completions", shorten)
    ask(site, page, "Go on", "One paragraph.\n\nAnd another one, *longer*.\n\n```py\nprint(2)\n```\n\nThe end.")
    changes = page.evaluate("changes")
    assert {item for item, _ in changes} == {None, 501}  # the list itself, and the answer
    assert [added for item, added in changes if item is None] == [2]
    expect(page.locator(".code").last).to_be_in_viewport()


def shorten(route):
    """Send only the last message: all of them are slow to prefill, or do not fit into the model's context."""
    body = route.request.post_data_json
    route.continue_(post_data={**body, "messages": body["messages"][-1:]})
