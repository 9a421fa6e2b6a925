"""The page at `/`: one file, no build step, nothing loaded from elsewhere."""

from pathlib import Path

PAGE = Path(__file__).with_name("page.html")
