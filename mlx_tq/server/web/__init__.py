"""The chat page at `/`, assembled from its files without a build step; it loads nothing from elsewhere."""

from pathlib import Path

from http_limits.web_page import source_of

_HTML, _STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_bytes() for kind in ("html", "css", "js"))
PAGE = _HTML.replace(b"<style></style>", b"<style>%s</style>" % _STYLE)
PAGE = PAGE.replace(b"<script></script>", b"<script>%s</script>" % _SCRIPT)
# Model output cannot become a script or style, and nothing can be sent elsewhere.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {source_of(_SCRIPT)}; style-src {source_of(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
