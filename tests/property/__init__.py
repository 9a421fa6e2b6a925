"""Properties that random histories must keep."""
