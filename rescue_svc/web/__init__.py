"""The page at `/`: one file, no build step, nothing loaded from elsewhere."""

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: bytes) -> str:
    """Return the source expression that allows the page's own inline element and no other."""
    found = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    if found is None:
        raise ValueError(f"page.html has no <{tag.decode()}>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"


# Recovered text cannot become script, and nothing can be sent elsewhere. Style is open: bars carry their width.
POLICY = (
    f"default-src 'none'; script-src {_hash_of(b'script')}; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
