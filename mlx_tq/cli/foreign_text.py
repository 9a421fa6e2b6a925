"""Text that others wrote, a model for one, on its way to a terminal: it is to be read there, not obeyed."""

import sys
import unicodedata

_KEPT = "\n\t"
_PICTURES = 0x2400  # of U+0000 to U+001F; that of DEL follows a space's
_TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # reorder what stands around them


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


_SHOWN = {
    code: _shown(chr(code))
    for code in range(0x2100)  # none lies behind
    if chr(code) not in _KEPT
    and (unicodedata.category(chr(code)) == "Cc" or unicodedata.bidirectional(chr(code)) in _TURNS)
}


def readable(text: str) -> str:
    """`text` with its control characters, and those that turn its direction, as pictures or numbers.

    Lines and tabs stay.
    """
    return text.translate(_SHOWN)


def say(text: str) -> None:
    """Write to stdout at once: readable where it is a terminal, as it is where it is a file or a pipe."""
    sys.stdout.write(readable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
