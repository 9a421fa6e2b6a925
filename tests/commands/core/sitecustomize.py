"""A command's process is as where torch is not installed: where it is, transformers takes half of each start for it."""

import sys

if "mlx_tq" in sys.orig_argv:  # but not the rescue service, whose embedder needs it
    sys.modules["torch"] = None  # an import of it then fails
