"""A simulator of Metal: runs the text that `mx.fast.metal_kernel` generates on any CPU with g++.

capture.py gets the text from mlx, translate.py makes it C++, build.py compiles it with cpp/metal_stdlib.h, run.py runs
it on arrays. Behavior that Metal leaves undefined is an error here: see `SimulationError`.
"""
