"""The page at `/` in a real browser."""

import re

import pytest
from browser import SCRIPT, assert_fits_and_can_be_read, needs_chromium, refused_script
from playwright.sync_api import expect

from .harness import TOKEN, Server

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("page") / "data")
    yield server
    server.stop()


@pytest.fixture
def filled(server):
    """Write two sessions, the second one last."""
    animals = enumerate(("fox", "owl", "elk"))
    server.write("first-chat", *((f"the {animal} says number {n}", 10 * n, 10 * n + 8) for n, animal in animals))
    server.write("second-chat", (SCRIPT, 0, 40), ("an innocent \u202eneighbor", 100, 120))
    server.wait_until_embedded()
    return server


# The color of a point of the axis. The center of the owl's span is at token 14 of 28.
PIXEL = """place => {
    const canvas = document.getElementById("axis");
    return [...canvas.getContext("2d").getImageData(place * canvas.width, 45, 1, 1).data];
}"""
OWL, GAP = 14 / 28, 9 / 28


def search(page, session, query):
    page.get_by_role("button", name=session).click()
    page.get_by_label("Query", exact=True).fill(query)
    page.get_by_role("button", name="Search").click()


def test_a_search_shows_both_scores_and_draws_the_hit(filled, open_page):
    page = open_page(filled, device_scale_factor=1)
    page.get_by_role("button", name="first-chat").click()
    expect(page.locator("#session-facts")).to_have_text("3 spans, 24 tokens")
    expect(page.locator("#axis")).to_have_attribute("aria-label", "3 spans from token 0 to 28")
    before, gap = page.evaluate(PIXEL, OWL), page.evaluate(PIXEL, GAP)
    assert before != gap
    page.get_by_label("Query", exact=True).fill("what does the owl say?")
    page.get_by_label("Results", exact=True).fill("1")
    page.get_by_role("button", name="Search").click()
    result = page.locator("#results li")
    expect(result).to_have_count(1)
    expect(result.locator("p")).to_have_text("the owl says number 1")
    expect(result).to_contain_text("keyword 1.00")
    expect(result).to_contain_text("tokens 10 to 18")
    dense = filled.retrieve("first-chat", "what does the owl say?", top_k=1)["chunks"][0]["dense"]
    expect(result).to_contain_text(f"semantic {dense:.2f}")
    expect(page.locator("#hits-figures")).to_contain_text("had results")
    (searches,) = re.findall(r'retrieve_seconds_count\{stage="search"\} (\d+)', filled.http.get("/metrics").text)
    expect(page.locator("#latency-figures")).to_contain_text(f"{searches} searches")
    expect(page.locator("#latency-figures")).to_have_text(re.compile(r"p50 [\d.]+ ms, p95 [\d.]+ ms$"))
    assert page.evaluate(PIXEL, OWL) not in (before, gap)
    page.get_by_label("Mode").select_option("Keyword")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#results li")).to_have_count(1)
    page.locator("#axis").hover(position={"x": 10, "y": 40})
    expect(page.locator("#under")).to_have_text("span 1 of 3: tokens 0 to 8")


def test_all_spans_can_be_browsed(server, open_page):
    server.write("long-chat", *((f"sentence {n}", 10 * n, 10 * n + 8) for n in range(45)))
    page = open_page(server, device_scale_factor=1)
    page.get_by_role("button", name="long-chat").click()
    spans = page.locator("#spans li")
    next_, previous = (page.get_by_role("button", name=name) for name in ("Next", "Previous"))
    expect(spans).to_have_count(20)
    expect(spans.first).to_contain_text("sentence 0")
    expect(previous).to_be_disabled()
    next_.click()
    expect(spans.first).to_contain_text("sentence 20")
    page.locator("#axis").click(position={"x": page.locator("#axis").bounding_box()["width"] - 2, "y": 40})
    expect(spans).to_have_count(5)
    expect(page.locator("#spans [aria-current]")).to_contain_text("sentence 44")
    expect(next_).to_be_disabled()
    previous.press("Enter")
    expect(spans.last).to_contain_text("sentence 39")
    server.forget("long-chat")


def test_retrieved_text_is_not_executed(filled, open_page):
    page = open_page(filled)
    search(page, "second-chat", "img script document title")
    expect(page.locator("#results li").first.locator("p")).to_have_text(SCRIPT)
    expect(page.locator("#spans li").first).to_contain_text(SCRIPT)
    expect(page.locator("#spans li").last).to_contain_text("an innocent [U+202E]neighbor")
    assert page.title() == "mlx-tq rescue"
    assert page.locator("li img, li script").count() == 0


def test_an_injected_script_does_not_run(filled, browser):
    page = browser.new_page()
    page.goto(filled.url)
    assert (refused_script(page), page.title()) == ("script-src-elem", "mlx-tq rescue")
    page.close()


def test_keyboard_only(filled, open_page):
    page = open_page(filled)
    expect(page.get_by_role("button", name="second-chat")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("j")
    expect(page.get_by_role("button", name="first-chat")).to_be_focused()
    expect(page.locator("#session-title")).to_have_text("first-chat")
    page.keyboard.press("/")
    expect(page.get_by_label("Query", exact=True)).to_be_focused()
    page.keyboard.type("elk")
    page.keyboard.press("Enter")
    expect(page.locator("#results li").first.locator("p")).to_have_text("the elk says number 2")
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#axis")).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#under")).to_have_text("span 2 of 3: tokens 10 to 18")
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("button", name="Delete", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#sure-text")).to_contain_text("Delete first-chat?")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    assert filled.dump("first-chat")["session_total"] == 3
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#sessions li")).to_have_count(1)
    expect(page.locator("#session-title")).to_have_text("second-chat")
    assert filled.dump("first-chat")["session_total"] == 0


@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (768, "dark"), (1600, "light")])
def test_it_fits_narrow_windows_and_has_contrast(filled, open_page, scheme, width):
    page = open_page(filled, color_scheme=scheme, viewport={"width": width, "height": 800})
    search(page, "first-chat", "owl")
    expect(page.locator("#results li").first).to_be_visible()
    assert_fits_and_can_be_read(page)


@pytest.mark.full
def test_missing_sessions_embedder_and_service_are_shown(start_server, open_page, browser):
    server = start_server(embedder="none", token=TOKEN)
    person = {"http_credentials": {"username": "anyone", "password": TOKEN}}
    page = open_page(server, **person)
    expect(page.get_by_label("Mode")).to_have_value("0")
    expect(page.locator("#no-sessions")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("Keyword search only: switched off (embedder=none)")
    assert page.locator("#alpha option:disabled").all_text_contents() == ["Hybrid", "Semantic"]
    server.write("s", ("a text", 0, 5))
    expect(page.get_by_role("button", name="s", exact=False).first).to_be_visible()
    page.context.close()
    context = browser.new_context(**person)  # its console may show errors: the service goes away
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#status")).to_contain_text("Keyword search only")
    server.kill()
    expect(page.locator("#status")).to_contain_text("does not answer", timeout=10_000)
    context.close()
