"""What the plots of the documentation share: their style, and a check that every label can be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.text import Text

# Legible on a white page and on a dark one; the background is transparent.
INK, FRAME = "#777777", "#8b8b8b"


@contextmanager
def drawing(path: Path, rows: int, columns: int, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure and its axes [rows, columns], then write it; raise ValueError if a label cannot be read."""
    style = {"font.size": 9, "axes.edgecolor": FRAME, "svg.hashsalt": path.stem}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context(style):
        figure, axes = plt.subplots(rows, columns, squeeze=False, **options)
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        try:
            yield figure, axes
            check_labels(figure)
            figure.savefig(path, transparent=True, metadata={"Date": None})
        finally:
            plt.close(figure)


def check_labels(figure: Figure) -> None:
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    wrong = [f"{name!r} leaves the picture" for name, box in boxes if figure.bbox.count_contains(box.corners()) < 4]
    wrong += [f"{one!r} overlaps {other!r}" for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
    for line in (line for axis in figure.axes for line in axis.lines):
        path = line.get_transform().transform_path(line.get_path())
        wrong += [f"{name!r} lies on a line" for name, box in boxes if path.intersects_bbox(box, filled=False)]
    if wrong:
        raise ValueError("; ".join(wrong))
