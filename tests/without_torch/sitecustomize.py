"""A command's process is as where torch is not installed: where it is, transformers takes half of each start for it."""

import sys

if not any("rescue_svc" in word or "multiprocessing" in word for word in sys.orig_argv):  # an embedder needs it
    sys.modules["torch"] = None  # an import of it then fails
