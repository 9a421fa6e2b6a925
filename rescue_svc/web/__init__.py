"""The web page at `/`, one file that loads nothing from other sites."""

import base64
import hashlib
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_bytes()
_SCRIPT = PAGE.partition(b"<script>")[2].partition(b"</script>")[0]
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT).digest()).decode()

# Retrieved text cannot become script, and nothing can be sent to other sites. Inline styles set the width of bars.
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
