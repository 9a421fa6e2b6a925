"""The page at `/` to chat in: put together from its files once, no build step, nothing loaded from elsewhere."""

import base64
import hashlib
from pathlib import Path


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _source(text: str) -> str:
    """What allows this text within the page, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _read("page.css"), _read("page.js")
PAGE = _read("page.html").replace("<style></style>", f"<style>{_STYLE}</style>")
PAGE = PAGE.replace("<script></script>", f"<script>{_SCRIPT}</script>")
# What a model says cannot become script or style, and nothing can be sent elsewhere.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
