"""Chromium for the tests of pages."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or (MAC if Path(MAC).exists() else None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium")

ARGUMENTS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def launch(browser_type, *arguments):
    sandbox = [] if os.geteuid() or sys.platform == "darwin" else ["--no-sandbox"]  # root cannot have one
    return browser_type.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, *sandbox, *arguments])


@contextmanager
def chromium():
    with sync_playwright() as playwright, launch(playwright.chromium) as browser:
        yield browser


@contextmanager
def pages(browser):
    """Yield a function that opens a server's page; fail if a page logged an error or called another server."""
    contexts, faults = [], []

    def open_page(server, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        allowed = (server.url, "data:")
        page.on("request", lambda request: None if request.url.startswith(allowed) else faults.append(request.url))
        page.goto(server.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def refused_script(page):
    """Return the directive of the page's policy that refuses an injected script, or "nothing" if it runs."""
    return page.evaluate("""() => new Promise(resolve => {
        document.addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective));
        const text = document.createTextNode("document.title = 'owned'");
        document.body.appendChild(document.createElement("script")).append(text);
        setTimeout(() => resolve("nothing"), 2000);
    })""")


def assert_fits_and_can_be_read(page):
    """Check that nothing is wider than the window, and that text has the contrast of WCAG AA."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert min(page.evaluate(CONTRASTS)) >= 4.5


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
