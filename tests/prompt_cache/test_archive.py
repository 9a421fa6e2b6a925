"""The archive returns the blocks that it was given, whether they are written yet or not, within its limit."""

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.cache.blocks import Block, LayerRows, LayerShape, from_bytes, to_bytes
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.archive import Archive, default_limit

SHAPES = [LayerShape(2, 9, 4, 16), LayerShape(1, 3, 8, 0)]


def make_block(count=5, seed=0):
    rng = np.random.default_rng(seed)
    rows = [
        LayerRows(
            *(rng.integers(0, 2**16, (s.heads, count, words), np.uint16) for words in (s.key_words, s.value_words)),
            rng.standard_normal((s.heads, s.mean)).astype(np.float16) if s.mean else None,
        )
        for s in SHAPES
    ]
    return Block(np.arange(count) * 3 + 100 * seed, rows)


def assert_equal(a, b):
    assert to_bytes(a) == to_bytes(b)


def test_every_bit_of_a_block_is_checked():
    block = make_block()
    data = to_bytes(block)
    assert_equal(from_bytes(data, SHAPES), block)
    for at in range(0, len(data), 7):
        with pytest.raises(CacheFormatError):
            from_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :], SHAPES)
        with pytest.raises(CacheFormatError):
            from_bytes(data[:at], SHAPES)
    with pytest.raises(CacheFormatError, match="other layers"):
        from_bytes(data, SHAPES[:1])


@pytest.mark.parametrize("folder", [tempfile.gettempdir(), "/dev/shm"])  # large and small, on most machines
def test_the_default_limit_is_a_tenth_of_the_free_disk_and_at_most_20_gb(folder):
    if not Path(folder).exists():
        pytest.skip(f"this system has no {folder}")
    disk = os.statvfs(folder)
    tenth = disk.f_bavail * disk.f_frsize / 10
    for path in (Path(folder), Path(folder) / "missing" / "too"):
        assert default_limit(path) == pytest.approx(min(20e9, tenth), rel=0.02)


def test_the_file_has_no_name():
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(SHAPES, Path(folder) / "new" / "folder")
        archived = archive.put(make_block())
        archive.settle()
        assert not list((Path(folder) / "new" / "folder").iterdir())
        assert_equal(archive.read(archived), make_block())


def test_keys_and_means_are_those_of_the_blocks(tmp_path):
    """Also of blocks of different sizes, in any order."""
    archive = Archive(SHAPES, tmp_path)
    blocks = [make_block(5), make_block(3, 1), make_block(BLOCK, 2), make_block(5, 3)]
    archived = [archive.put(block) for block in blocks]
    archive.settle()
    for layer in (0, 1):
        keys, means = archive.read_keys(archived, layer)
        rows = [block.layers[layer] for block in blocks]
        assert np.array_equal(keys, np.concatenate([own.keys for own in rows], axis=1))
        assert means.size == 0 or np.array_equal(means, np.stack([own.mean for own in rows]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.one_of(st.integers(1, BLOCK), st.integers(-9, -1)), max_size=40),
    limit=st.integers(1, 5) | st.just(100),
)
def test_blocks_never_overlap_and_their_bytes_stay_within_the_limit(steps, limit):
    """A number above 0 archives so many rows; one below drops the block of that index. `limit` is in full blocks."""
    with tempfile.TemporaryDirectory() as folder:
        most = limit * len(to_bytes(make_block(BLOCK)))
        archive, held = Archive(SHAPES, Path(folder), limit=most), []
        for number, step in enumerate(steps):
            if step < 0 and held:
                held.pop(step % len(held))
            elif step > 0:
                block = make_block(step, number)
                held.append((archive.put(block), block))
            archive.settle()
            assert archive.nbytes == sum(archived.nbytes for archived, _ in held if not archived.lost) <= most
            assert all(archived.lost or to_bytes(archive.read(archived)) == to_bytes(block) for archived, block in held)
        size = os.fstat(archive._file).st_size
    assert size <= (len(steps) + 1) * len(to_bytes(make_block(BLOCK)))


def test_slots_are_used_again(tmp_path):
    archive = Archive(SHAPES, tmp_path)
    archived = [archive.put(make_block()) for _ in range(3)]
    archive.settle()
    size = archive.nbytes
    start = archived[1].start
    del archived[1]
    assert archive.nbytes == size * 2 // 3
    again = archive.put(make_block(7))
    assert again.start == start


def test_a_block_above_the_limit_is_lost_with_one_warning(tmp_path):
    archive = Archive(SHAPES, tmp_path, limit=len(to_bytes(make_block())) - 1)
    assert [archive.put(make_block()) for _ in range(2)] == [None, None]
    assert "bytes are above its limit of" in archive.take_warning()
    assert (archive.lost, archive.deleted, archive.nbytes, archive.take_warning()) == (2, 0, 0, None)


def test_what_a_disk_does_not_return_is_zeros_and_damaged_blocks(tmp_path):
    """Of a file that lost its end, and of one that cannot be read at all."""
    archive, block = Archive(SHAPES, tmp_path), make_block()
    archived = [archive.put(block) for _ in range(3)]
    archive.settle()
    os.ftruncate(archive._file, archived[1].start)
    for is_readable in ([True, False, False], [False] * 3):
        keys, _ = archive.read_keys(archived, 1)
        assert np.array_equal(keys, np.concatenate([block.layers[1].keys * flag for flag in is_readable], axis=1))
        assert [archive.read(each) is not None for each in archived] == is_readable
        folder = os.open(tmp_path, os.O_RDONLY)  # each read of it is an error
        os.dup2(folder, archive._file)
        os.close(folder)


def test_at_the_limit_the_least_recalled_blocks_are_deleted_the_oldest_first(tmp_path):
    blocks = [make_block(seed=number) for number in range(7)]
    archive = Archive(SHAPES, tmp_path, limit=3 * len(to_bytes(blocks[0])))
    archived = [archive.put(block) for block in blocks[:3]]
    assert (archive.deleted, archive.take_warning()) == (0, None)
    archived[1].recalls, archived[2].recalls = 2, 1
    archived += [archive.put(block) for block in blocks[3:]]
    archive.settle()
    assert [each.lost for each in archived] == [True, False, False, True, True, True, False]
    for each, block in zip(archived, blocks, strict=True):
        if not each.lost:
            assert_equal(archive.read(each), block)
    assert (archive.deleted, archive.nbytes) == (4, archive.limit)
    archive.delete_damaged(archived)
    warning = archive.take_warning()
    assert warning.index("the least recalled blocks are deleted, the oldest") < warning.index(
        "3 blocks of the archive are damaged"
    )
    assert archive.take_warning() is None


def test_what_is_not_written_yet_is_read_from_memory(tmp_path, monkeypatch):
    """Together with what is written, and also if writing fails meanwhile."""
    block, shorter = make_block(), make_block(3)
    archive, write = Archive(SHAPES, tmp_path), os.pwrite
    first, resume = archive.put(block), threading.Event()
    archive.settle()

    def write_late(file, data, start):
        resume.wait(20)
        if len(data) < first.nbytes:
            raise OSError(28, "No space left on device")
        return write(file, data, start)

    monkeypatch.setattr(os, "pwrite", write_late)
    blocks = [block, block, shorter]
    archived = [first, archive.put(block), archive.put(shorter)]
    for attempt in ("before", "after"):
        for each, stored in zip(archived, blocks, strict=True):
            assert archive.read_raw(each) == to_bytes(stored)
            assert attempt == "after" or to_bytes(archive.read(each)) == to_bytes(stored)
        keys, _ = archive.read_keys(archived, 1)
        assert np.array_equal(keys, np.concatenate([stored.layers[1].keys for stored in blocks], axis=1))
        resume.set()
        archive.settle()
    assert [each.lost for each in archived] == [False, False, True]
    assert [each.pending is None for each in archived] == [True, True, False]
