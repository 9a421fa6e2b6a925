"""Memory of mlx arrays, read in place."""

import ctypes
from typing import NamedTuple

import mlx.core as mx


class TracedArrayError(Exception):
    """An array has no values: a function is being traced."""


def evaluate(*arrays: object) -> None:
    try:
        mx.eval(*arrays)
    except ValueError as error:  # as mlx says it inside mx.compile, mx.vmap and mx.grad
        raise TracedArrayError from error


class Memory(NamedTuple):
    address: int
    strides: tuple[int, ...]  # in bytes


class _Buffer(ctypes.Structure):
    """Python's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_STRIDED = 0x18  # PyBUF_STRIDES
_get, _release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get.argtypes, _release.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int), (ctypes.POINTER(_Buffer),)


class Reader:
    """Gives the addresses of evaluated arrays inside a `with` block; meanwhile mlx would copy them to write to them."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[_Buffer, Memory]] = {}  # by the array, which a buffer keeps alive

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        for buffer, _ in self._buffers.values():
            _release(buffer)

    def read(self, array: mx.array) -> Memory:
        if id(array) not in self._buffers:
            buffer = _Buffer()
            _get(array, buffer, _STRIDED)
            memory = Memory(buffer.buf or 0, tuple(buffer.strides[: buffer.ndim]))
            self._buffers[id(array)] = buffer, memory
        return self._buffers[id(array)][1]
