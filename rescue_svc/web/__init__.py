"""The web page at `/`, one file that loads nothing from other sites."""

from pathlib import Path

from http_limits.web_page import source_of

PAGE = Path(__file__).with_name("page.html").read_bytes()
_SCRIPT = PAGE.partition(b"<script>")[2].partition(b"</script>")[0]

# Retrieved text cannot become script, and nothing can be sent to other sites. Inline styles set the width of bars.
POLICY = (
    f"default-src 'none'; script-src {source_of(_SCRIPT)}; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
