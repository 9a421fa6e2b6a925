"""The page at `/` in a real browser, driven as a person would."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or (MAC if Path(MAC).exists() else None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")

TOKEN = "a-token-of-the-tests"
ARGUMENTS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        sandbox = [] if os.geteuid() or sys.platform == "darwin" else ["--no-sandbox"]  # root cannot have one
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, *sandbox])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open the page; fail if it ever logs an error or asks anyone else for anything."""
    contexts, faults = [], []

    def open_page(server, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith((server.url, "data:")) else faults.append(request.url),
        )
        page.goto(server.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def filled(serve):
    server = serve()
    server.write(
        "first-chat",
        *((f"the {animal} says number {n}", 10 * n, 10 * n + 8) for n, animal in enumerate(("fox", "owl", "elk"))),
    )
    server.write("second-chat", (SCRIPT, 0, 40), ("an innocent neighbour", 100, 120))
    server.wait_until_embedded()
    return server


def test_search_shows_both_scores(filled, open_page):
    page = open_page(filled)
    page.get_by_role("button", name="first-chat").click()
    expect(page.locator("#session-facts")).to_have_text("3 spans, 24 tokens")
    expect(page.locator("#axis")).to_have_attribute("aria-label", "3 spans from token 0 to 28")
    page.get_by_label("Question", exact=True).fill("what does the owl say?")
    page.get_by_label("At most").fill("1")
    page.get_by_role("button", name="Search").click()
    result = page.locator("#results li")
    expect(result).to_have_count(1)
    expect(result.locator("p")).to_have_text("the owl says number 1")
    expect(result).to_contain_text("words 1.00")
    expect(result).to_contain_text("tokens 10 to 18")
    meaning = filled.retrieve("first-chat", "what does the owl say?", top_k=1)["chunks"][0]["dense"]
    expect(result).to_contain_text(f"meaning {meaning:.2f}")
    expect(page.locator("#hits-figures")).to_contain_text("found something")
    expect(page.locator("#latency-figures")).to_contain_text("1 searches")


def test_the_hit_is_drawn_on_the_axis(filled, open_page):
    page = open_page(filled, device_scale_factor=1)
    page.get_by_role("button", name="first-chat").click()
    expect(page.locator("#session-facts")).to_contain_text("3 spans")
    pixel = """([x, y]) => {
        const canvas = document.getElementById("axis");
        return [...canvas.getContext("2d").getImageData(x * canvas.width, y, 1, 1).data];
    }"""
    middle_of_owl = [14 / 28, 45]
    before = page.evaluate(pixel, middle_of_owl)
    gap = page.evaluate(pixel, [9 / 28, 45])
    assert before != gap
    page.get_by_label("Question", exact=True).fill("owl")
    page.get_by_label("Search by").select_option("words")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#results li")).to_have_count(1)
    assert page.evaluate(pixel, middle_of_owl) not in (before, gap)
    page.locator("#axis").hover(position={"x": 10, "y": 40})
    expect(page.locator("#under")).to_have_text("span 1 of 3: tokens 0 to 8")


def test_recovered_text_is_never_code(filled, open_page):
    page = open_page(filled)
    page.get_by_role("button", name="second-chat").click()
    page.get_by_label("Question", exact=True).fill("img script document title")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#results li").first.locator("p")).to_have_text(SCRIPT)
    assert page.title() == "mlx-tq rescue"
    assert page.locator("#results img, #results script").count() == 0


def test_an_injected_script_would_not_run(filled, browser):
    """The second line of defence: even markup that got in is refused by the page's policy."""
    page = browser.new_page()
    page.goto(filled.url)
    refused = page.evaluate("""() => new Promise(resolve => {
        document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
        const made = document.createElement("script");
        made.textContent = "document.title = 'owned'";
        document.body.append(made);
        setTimeout(() => resolve("nothing"), 2000);
    })""")
    assert refused == "script-src-elem"
    assert page.title() == "mlx-tq rescue"
    page.close()


def test_keyboard_only(filled, open_page):
    page = open_page(filled)
    expect(page.get_by_role("button", name="second-chat")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("j")
    expect(page.get_by_role("button", name="first-chat")).to_be_focused()
    expect(page.locator("#session-title")).to_have_text("first-chat")
    page.keyboard.press("/")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    page.keyboard.type("elk")
    page.keyboard.press("Enter")
    expect(page.locator("#results li").first.locator("p")).to_have_text("the elk says number 2")
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#axis")).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#under")).to_have_text("span 2 of 3: tokens 10 to 18")
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("button", name="Forget", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep")).to_be_focused()
    page.keyboard.press("Escape")
    assert filled.dump("first-chat")["session_total"] == 3
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#sessions li")).to_have_count(1)
    assert filled.dump("first-chat")["session_total"] == 0


def test_forget_asks_first(filled, open_page):
    page = open_page(filled)
    page.get_by_role("button", name="first-chat").click()
    page.get_by_role("button", name="Forget", exact=True).click()
    expect(page.locator("#sure-text")).to_contain_text("Forget first-chat?")
    page.get_by_role("button", name="Keep").click()
    assert filled.dump("first-chat")["session_total"] == 3
    page.get_by_role("button", name="Forget", exact=True).click()
    page.get_by_role("button", name="Forget for good").click()
    expect(page.get_by_role("button", name="first-chat")).to_have_count(0)
    expect(page.locator("#session-title")).to_have_text("second-chat")
    assert filled.dump("first-chat")["session_total"] == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 1600])
def test_it_fits_and_can_be_read(filled, open_page, scheme, width, tmp_path):
    page = open_page(filled, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.get_by_role("button", name="first-chat").click()
    page.get_by_label("Question", exact=True).fill("owl")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#results li").first).to_be_visible()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert min(page.evaluate(CONTRASTS)) >= 4.5  # WCAG AA for text


# The contrast of each visible text against the first opaque background behind it.
CONTRASTS = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const linear = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = element => {
    const color = numbers(getComputedStyle(element).backgroundColor);
    return color[3] === 0 ? behind(element.parentElement) : color;
  };
  const hasText = e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("body *")].filter(hasText).map(e => {
    const pair = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
  });
}"""


def test_an_empty_store_and_no_embedder_are_said(serve, open_page):
    page = open_page(serve(embedder="none"))
    expect(page.locator("#no-sessions")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("words only: switched off (embedder=none)")


def test_a_service_that_is_gone_is_said(serve, browser):
    server = serve(embedder="none")
    page = browser.new_page()
    page.goto(server.url)
    expect(page.locator("#status")).to_contain_text("words only")
    server.kill()
    expect(page.locator("#status")).to_contain_text("does not answer", timeout=10_000)
    page.close()


def test_the_token_is_the_password(serve, open_page):
    server = serve(embedder="none", token=TOKEN)
    server.write("s", ("a text", 0, 5))
    page = open_page(server, http_credentials={"username": "anyone", "password": TOKEN})
    expect(page.get_by_role("button", name="s", exact=False).first).to_be_visible()
