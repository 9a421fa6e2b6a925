"""Limits of HTTP connections and of log lines, which both servers use; this package imports neither of them."""
