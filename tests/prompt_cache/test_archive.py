"""The archive's file: what it gives back is what it got, whether it is written yet or not."""

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_tq.cache.blocks import Block, LayerRows, LayerShape, from_bytes, to_bytes
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.archive import ArchiveFile, default_limit


def block(count=5):
    rng = np.random.default_rng(0)
    shapes = [LayerShape(2, 9, 4, 16), LayerShape(1, 3, 8, 0)]
    rows = [
        LayerRows(
            *(rng.integers(0, 2**16, (s.heads, count, words), np.uint16) for words in (s.key_words, s.value_words)),
            rng.standard_normal((s.heads, s.mean)).astype(np.float16) if s.mean else None,
        )
        for s in shapes
    ]
    return Block(np.arange(count) * 3, rows), shapes


def same(a, b):
    assert a.positions.tolist() == b.positions.tolist()
    for one, other in zip(a.layers, b.layers, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert np.array_equal(one.values, other.values)
        assert (one.mean is None) == (other.mean is None)
        assert one.mean is None or np.array_equal(one.mean, other.mean)


def test_every_bit_of_a_block_is_checked():
    """A flipped bit anywhere, or a missing end, is damage."""
    stored, shapes = block()
    data = to_bytes(stored)
    same(from_bytes(data, shapes), stored)
    for at in range(0, len(data), 7):
        with pytest.raises(CacheFormatError):
            from_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :], shapes)
        with pytest.raises(CacheFormatError):
            from_bytes(data[:at], shapes)
    with pytest.raises(CacheFormatError, match="other layers"):
        from_bytes(data, shapes[:1])


@pytest.mark.parametrize("folder", [tempfile.gettempdir(), "/dev/shm"])  # large and small, on most machines
def test_an_archive_is_limited_to_20_gb_or_a_tenth_of_the_free_disk(folder):
    if not Path(folder).exists():
        pytest.skip(f"this system has no {folder}")
    disk = os.statvfs(folder)
    tenth = disk.f_bavail * disk.f_frsize / 10
    assert default_limit(Path(folder)) == pytest.approx(min(20e9, tenth), rel=0.02)


def test_an_archive_has_no_name_and_places_are_used_again(tmp_path):
    stored, shapes = block()
    archive = ArchiveFile(shapes, tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    extents = [archive.put(stored) for _ in range(3)]
    archive.settle()
    size = archive.nbytes
    same(archive.read(extents[1]), stored)
    keys, means = archive.keys(extents[:2], 0)
    assert np.array_equal(keys, np.concatenate([stored.layers[0].keys] * 2, axis=1))
    assert np.array_equal(means, np.stack([stored.layers[0].mean] * 2))
    shorter, _ = block(3)
    mixed = [extents[0], archive.put(shorter), extents[1]]
    archive.settle()
    for number in (0, 1):
        keys, means = archive.keys(mixed, number)
        rows = [each.layers[number] for each in (stored, shorter, stored)]
        assert np.array_equal(keys, np.concatenate([each.keys for each in rows], axis=1))
        assert means.size == 0 or np.array_equal(means, np.stack([each.mean for each in rows]))
    del extents[0], mixed
    assert archive.nbytes == size * 2 // 3
    again = archive.put(stored)
    archive.settle()
    assert (archive.nbytes, again.start) == (size, 0)


def test_what_does_not_fit_is_lost_and_said_once(tmp_path):
    stored, shapes = block()
    archive = ArchiveFile(shapes, tmp_path, limit=len(to_bytes(stored)) - 1)
    assert [archive.put(stored), archive.put(stored)] == [None, None]
    assert "bytes are above its limit of" in archive.take_warning()
    assert (archive.lost, archive.left, archive.nbytes, archive.take_warning()) == (2, 0, 0, None)


def test_of_a_disk_that_gives_no_more_keys_are_zeros_and_blocks_are_damaged(tmp_path):
    """A file that lost its end, and one that cannot be read at all."""
    stored, shapes = block()
    archive = ArchiveFile(shapes, tmp_path)
    extents = [archive.put(stored) for _ in range(3)]
    archive.settle()
    os.ftruncate(archive._file, extents[1].start)
    for there in ([True, False, False], [False] * 3):
        keys, _ = archive.keys(extents, 1)
        assert np.array_equal(keys, np.concatenate([stored.layers[1].keys * found for found in there], axis=1))
        assert [archive.undamaged(extent) is not None for extent in extents] == there
        folder = os.open(tmp_path, os.O_RDONLY)  # each read of it is an error
        os.dup2(folder, archive._file)
        os.close(folder)


def test_at_the_limit_what_was_recalled_least_leaves_the_oldest_first(tmp_path):
    stored, shapes = block()
    archive = ArchiveFile(shapes, tmp_path, limit=3 * len(to_bytes(stored)))
    numbered = [replace(stored, positions=stored.positions + 100 * number) for number in range(7)]
    extents = [archive.put(each) for each in numbered[:3]]
    assert (archive.left, archive.take_warning()) == (0, None)
    extents[1].recalls, extents[2].recalls = 2, 1
    extents += [archive.put(each) for each in numbered[3:]]
    archive.settle()
    assert [extent.lost for extent in extents] == [True, False, False, True, True, True, False]
    for extent, each in zip(extents, numbered, strict=True):
        if not extent.lost:
            same(archive.read(extent), each)
    assert (archive.left, os.fstat(archive._file).st_size, archive.nbytes) == (4, archive.limit, archive.limit)
    archive.drop(extents)
    said = archive.take_warning()
    assert said.index("blocks that were recalled least leave it, the oldest first") < said.index("3 blocks are damaged")
    assert archive.take_warning() is None


def test_what_waits_to_be_written_is_read_from_memory(tmp_path, monkeypatch):
    """Beside what is written, and also where that fails meanwhile."""
    stored, shapes = block()
    shorter, _ = block(3)
    archive, write = ArchiveFile(shapes, tmp_path), os.pwrite
    first, go_on = archive.put(stored), threading.Event()
    archive.settle()

    def late(file, data, start):
        go_on.wait(20)
        if len(data) < first.size:
            raise OSError(28, "No space left on device")
        return write(file, data, start)

    monkeypatch.setattr(os, "pwrite", late)
    blocks = [stored, stored, shorter]
    extents = [first, archive.put(stored), archive.put(shorter)]
    for _ in range(2):
        for extent, each in zip(extents, blocks, strict=True):
            same(archive.read(extent), each)
            assert archive.raw(extent) == to_bytes(each)
        keys, _ = archive.keys(extents, 1)
        assert np.array_equal(keys, np.concatenate([each.layers[1].keys for each in blocks], axis=1))
        go_on.set()
        archive.settle()
    assert [extent.lost for extent in extents] == [False, False, True]
    assert [extent.waiting is None for extent in extents] == [True, True, False]
