"""Show text from a model or a file on a terminal without obeying its control characters."""

import sys
import unicodedata

_ALLOWED = "\n\t"
_CONTROL_PICTURES = 0x2400  # of U+0000 to U+001F
_BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # reorder the text around them


_PICTURES = {
    code: chr(_CONTROL_PICTURES + code) if code < 0x20 else f"<U+{code:04X}>"
    for code in range(0x2100)  # none lies behind
    if chr(code) not in _ALLOWED
    and (unicodedata.category(chr(code)) == "Cc" or unicodedata.bidirectional(chr(code)) in _BIDIRECTIONAL)
} | {0x7F: "\u2421"}


def readable(text: str) -> str:
    """Replace control and bidirectional characters, except newlines and tabs, by pictures or numbers."""
    return text.translate(_PICTURES)


def write_answer(text: str) -> None:
    """Write to stdout and flush; on a terminal, the text is made readable first."""
    sys.stdout.write(readable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
