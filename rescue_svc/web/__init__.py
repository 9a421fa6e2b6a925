"""The web page at `/`, one file that loads nothing from other sites."""

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: bytes) -> str:
    """Return the CSP source that allows the inline element of the page and no other."""
    element = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    if element is None:
        raise ValueError(f"page.html has no <{tag.decode()}>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(element[1]).digest()).decode()}'"


# Retrieved text cannot become script, and nothing can be sent to other sites. Inline styles set the width of bars.
POLICY = (
    f"default-src 'none'; script-src {_hash_of(b'script')}; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
