"""Kernels for a CPU: C++ text that is compiled when it is first used, and called through ctypes."""
