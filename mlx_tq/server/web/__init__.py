"""The chat page at `/`, assembled from its files without a build step; it loads nothing from elsewhere."""

import base64
import hashlib
from pathlib import Path


def _source(text: str) -> str:
    """Return the Content-Security-Policy source that allows this inline text only."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_HTML, _STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
PAGE = _HTML.replace("<style></style>", f"<style>{_STYLE}</style>")
PAGE = PAGE.replace("<script></script>", f"<script>{_SCRIPT}</script>")
# Model output cannot become a script or style, and nothing can be sent elsewhere.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
