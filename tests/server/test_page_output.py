"""What a model writes, on the chat page: Markdown is shown, hostile output does nothing, and nothing is sent."""

import re

import httpx
import pytest
from browser import SCRIPT, assert_fits_and_can_be_read, launch, needs_chromium
from playwright.sync_api import expect

from .scripted_site import scripted_site
from .test_chat_page import say, stored_chat
from .test_messages import tokenizer  # noqa: F401 - a fixture
from .test_page_chats import shorten

pytestmark = needs_chromium

ANSWER = """<think>A list and code.</think>Here is a **short** overview with `code` and a [link](https://docs.test/page).

## Steps

1. First ~~old~~ *new*
   - nested
- [x] done

```python
def area(radius):
    return 3 * radius ** 2  # <b>
```

| format | bits |
|:--|--:|
| q8 | 8<br>bits |

> A quotation.
"""


@pytest.fixture(scope="module")
def site(loaded, tokenizer):  # noqa: F811
    with scripted_site(loaded, tokenizer) as scripted:
        yield scripted


def ask(site, page, answer, question="Hello"):
    """Let the model answer this; return the element of its text."""
    site.script(answer)
    return say(page, question).locator(".content")


@pytest.mark.full
def test_markdown_is_shown(site, open_page):
    page = open_page(site, permissions=["clipboard-read", "clipboard-write"])
    content = ask(site, page, ANSWER)
    for _ in range(2):  # streamed, and after a reload
        for selector, text in {
            "strong": "short", "p code": "code", "h4": "Steps", "ol > li > ul > li": "nested", "del": "old",
            "em": "new", "ul > li > p, ul > li": "\u2611 done", "td >> nth=1": "8\nbits", "blockquote": "A quotation.",
        }.items():  # fmt: skip
            expect(content.locator(selector).last).to_have_text(re.compile(text), use_inner_text=True)
        link = content.get_by_role("link", name="link")
        assert [link.get_attribute(name) for name in ("href", "target", "rel", "title", "data-host")] == [
            "https://docs.test/page", "_blank", "noopener noreferrer", "https://docs.test/page", "docs.test",
        ]  # fmt: skip
        expect(content.locator(".code-bar span")).to_have_text("python")
        content.get_by_role("button", name="Copy").click()
        expect(content.get_by_role("button", name="Copied")).to_be_visible()
        code = "def area(radius):\n    return 3 * radius ** 2  # <b>"
        assert page.evaluate("navigator.clipboard.readText()") == code
        page.get_by_text("Reasoning").click()
        expect(page.locator(".reasoning p")).to_have_text("A list and code.")
        page.reload()
    page.locator("li.assistant > .actions").get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER.partition("</think>")[2]


# Each would load, send or run something if it were more than text.
HOSTILE = [
    SCRIPT,
    "![pixel](https://evil.test/pixel.png) ![a][ref]\n\n[ref]: https://evil.test/reference.png",
    "[click](javascript:document.title='owned') [data](data:text/html,<script>document.title='owned'</script>)",
    "[entity](&#106;avascript:document.title='owned') <javascript:document.title='owned'> [v](vbscript:a) [r](/health)",
    "<a href='https://evil.test/a' ping='https://evil.test/ping'>x</a><link rel=prefetch href=https://evil.test/prefetch>",
    "<style>@import url(https://evil.test/style);</style><p style='background:url(https://evil.test/background)'>x</p>",
    "<iframe src=https://evil.test/frame></iframe><object data=https://evil.test/object></object>",
    "<meta http-equiv=refresh content='0;url=//evil.test/refresh'><form action=//evil.test><base href=//evil.test>",
    "<svg><image href=https://evil.test/svg /><style><img src=x onerror=document.title='owned'></style></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=document.title='owned'></table></math>",
    "<video src=https://evil.test/video poster=https://evil.test/poster autoplay></video>",
    "<input name=attributes id=messages><form><input name=textContent></form>",
    "```\"><img/src=x/onerror=document.title='owned'>\n</code></pre><img src=https://evil.test/code>\n```",
    "- ```x onload=a\n  <img src=https://evil.test/nested>\n  ```\n\n| <img src=https://evil.test/cell> |\n|---|\n",
    "https://evil.test/plain www.evil.test <https://evil.test/angle>",
    "[x](<https://evil.test/\" onclick=\"document.title='owned'>) [x](https://evil.test 'x\" onclick=\"a()')",
]  # fmt: skip
ELEMENTS = """content => [...content.querySelectorAll("*")].map(e =>
  [e.localName, ...[...e.attributes].map(({ name }) => name).sort()].join(" "))"""
SAFE = re.compile(
    r"p|br|hr|h[3-6]|strong|em|del|code|blockquote|ul|ol|li|tr|td|th|tbody|thead|table|span|(p|div) class|"
    r"pre aria-label role tabindex|div|div aria-label class role tabindex|button class data-action type|"
    r"a( data-host)? href rel target title"
)


# Return the fragment's texts, the hosts shown after links, and its attributes.
RENDER = """async text => {
  const { showMarkdown } = await import("/page/markdown.js"), container = document.createElement("div");
  showMarkdown(container, text);
  const all = (selector, name) => [...container.querySelectorAll(selector)].map(e => e.getAttribute(name));
  return { text: container.textContent, hosts: all("a", "data-host"), starts: all("ol", "start"),
    aligns: all("th, td", "align"), labels: all("[role=region][tabindex='0']", "aria-label") };
}"""
LINKS = {
    "[google.com](https://e.co/x)": "e.co", "[https://bank.com/evil.test](https://evil.test/)": "evil.test",
    "[https://bank.com](https://bank.com:evil@k.co/)": "k.co", "https://bank.com:evil@k.co/": "k.co",
    "[b\u0430nk.com](https://b\u0430nk.com)": "xn--bnk-6cd.com",
    "https://docs.test/page": None, "[docs.test](https://docs.test/page)": None, "https://Docs.test:81?a": None,
}  # fmt: skip


def test_attributes_hosts_and_invisible_characters(site, open_page):
    page = open_page(site)
    shown = page.evaluate(RENDER, "10. ten\n\n| a | b |\n|:-:|--:|\n| c | d |\n\n```\ncode\n```")
    assert (shown["starts"], shown["aligns"]) == (["10"], ["center", "right"] * 2)
    assert shown["labels"] == ["Table", "Code"]
    assert page.evaluate(RENDER, "\n\n".join(LINKS))["hosts"] == list(LINKS.values())
    shown = page.evaluate(RENDER, "a &#8238;b&rlm; `\u200b\u2060` &shy;\ufeff [&#8203;](https://docs.test)")
    marks = "a [U+202E]b[U+200F] [U+200B][U+2060] [U+00AD][U+FEFF] [U+200B]"
    assert shown["text"].strip() == marks
    page.evaluate(stored_chat("list", "Hello", "Answer"))
    page.reload()
    expect(page.get_by_role("log", name="Conversation").get_by_role("list").get_by_role("listitem")).to_have_count(2)


def test_hostile_output_is_text_and_nothing_leaves_the_machine(site, browser, tmp_path):
    """Chromium's own log would have every request and every name that it looked up."""
    with launch(browser.browser_type, f"--log-net-log={tmp_path / 'net.json'}") as logging:
        page = logging.new_page()
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.add_init_script(stored_chat("hostile", *[text for shown in HOSTILE for text in ("Go on", shown)]))
        assert page.goto(site.url).headers["x-dns-prefetch-control"] == "off"
        page.route("**/v1/chat/completions", shorten)
        ask(site, page, "\n\n".join(HOSTILE[:2]))  # generated, not only stored
        contents = page.locator(".assistant .content")
        expect(contents).to_have_count(len(HOSTILE) + 1)
        for content in contents.all():
            content.scroll_into_view_if_needed()
            found = content.evaluate(ELEMENTS)
            assert [element for element in found if not SAFE.fullmatch(element)] == []
            assert content.evaluate("content => [...content.querySelectorAll('a')].every(a => /^https?:/.test(a.href))")
        for content in (contents.first, contents.last):
            expect(content).to_contain_text("<script>document.title='owned'</script>")
        link = contents.last.get_by_role("link").first
        expect(link).to_have_text("image: pixel")
        link.hover()
        link.focus()
        assert page.title() == "mlx-tq"
        assert {url.removeprefix(site.url).partition("/")[0] for url in requests} <= {"", "data:,"}
    log = (tmp_path / "net.json").read_text()
    assert site.url in log
    assert "evil" not in log


def test_only_scripts_of_the_page_are_served(site):
    for name in ("page.js", "vendor/marked.esm.js"):
        script = httpx.get(f"{site.url}/page/{name}")
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["x-content-type-options"] == "nosniff"
    for name in ("", "nope.js", "page.css", "vendor/README.md", "__init__.py", "..%2f__init__.py", "/etc/passwd"):
        assert httpx.get(f"{site.url}/page/{name}").status_code == 404


@pytest.mark.full
def test_a_link_opens_only_on_a_click(site, open_page):
    page = open_page(site)
    ask(site, page, f"[one]({site.url}/health) [two](mailto:a@b.test)")
    with page.expect_popup() as opened:
        page.get_by_role("link", name="one").click()
    assert opened.value.url == f"{site.url}/health"
    assert opened.value.evaluate("[opener, document.referrer]") == [None, ""]


# Whether paragraph, code block and last block keep their elements when the last one grows.
GROW = """async () => {
  const { showMarkdown } = await import("/page/markdown.js"), container = document.createElement("div");
  const kept = (first, second) => {
    showMarkdown(container, first);
    const nodes = [...container.children];
    showMarkdown(container, second);
    return nodes.map((node, place) => node === container.children[place]);
  };
  const start = "One.\\n\\n```py\\na";
  return [kept(start, start + " = 1"), kept(start + "\\n```\\nTw", start + "\\n```\\nTwo"), container.textContent];
}"""


def test_only_what_grows_is_made_again(site, open_page):
    page = open_page(site)
    assert page.evaluate(GROW) == [[True, True], [True, True, False], "One.\npyCopyaTwo\n"]


# For each, a parser could need quadratic time, or more stack than there is.
PATHOLOGICAL = [*(9000 * text for text in ("[", "> ", "- ", "*_", "_a_", "[a](")), f"a{' ' * 90_000}b", 999 * "|a"]
SHOW = """async text => {
  const { showMarkdown } = await import("/page/markdown.js"), container = document.createElement("div");
  showMarkdown(container, text);
  return container.textContent;
}"""


def test_pathological_markdown_is_shown(site, open_page):
    page = open_page(site)
    for text in PATHOLOGICAL:
        marks = page.evaluate(SHOW, text)
        assert marks.count("a") == text.count("a")
        assert len(marks) > len(text) / 2 or set(text) == set("> ") or set(text) == set("- "), text[:9]


@pytest.mark.full
def test_it_fits_a_phone_and_has_contrast_in_both_themes(site, open_page):
    wide = f"```\n{'x' * 400}\n```\n\n|{'head|' * 40}\n|{'-|' * 40}\n\n{'y' * 400} `{'z' * 99}`"
    page = open_page(site, viewport={"width": 360, "height": 700})
    expect(page.locator("#max-tokens")).to_have_attribute("placeholder", "no limit")
    page.evaluate(stored_chat("phone", "x" * 400, ANSWER, "Go on", wide))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.reload()
        expect(page.locator(".code")).to_have_count(2)
        page.get_by_role("button", name="Edit").click()
        assert_fits_and_can_be_read(page)
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Chats").click()
        expect(page.get_by_role("button", name="New chat")).to_be_focused()
        assert_fits_and_can_be_read(page)
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Chats")).to_be_focused()
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()
