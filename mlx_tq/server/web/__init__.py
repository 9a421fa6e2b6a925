"""The chat page at `/` and its scripts at `/page/`, without a build step; it loads nothing from elsewhere."""

from pathlib import Path

from http_limits.web_page import source_of

_FOLDER = Path(__file__).parent
_STYLE = (_FOLDER / "page.css").read_bytes()
PAGE = (_FOLDER / "page.html").read_bytes().replace(b"<style></style>", b"<style>%s</style>" % _STYLE)
SCRIPTS = {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in _FOLDER.rglob("*.js")}
# Model output cannot run as script or style, and the page contacts no other host unless the user clicks a link.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src {source_of(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
}
