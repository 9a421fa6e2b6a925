"""Write the tables of README.md and docs/ anew from benchmarks/results: `python -m benchmarks.tables`.

A page says where a table stands with `<!-- table: NAME -->`; what is between that line and `<!-- end -->` is replaced.
"""

from benchmarks.tables.pages import PAGES, render


def main() -> None:
    """Write each page that has changed, and say which."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page}")


if __name__ == "__main__":
    main()
