"""Files written whole: nothing half, nothing beside, and nothing that is no file replaced."""

import os
import stat

import pytest

from mlx_tq.atomic_files import atomic_write


def write(path, text):
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def test_a_file_appears_and_is_replaced(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        write(path, text)
        assert path.read_text() == text
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("ne")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_it_is_as_open_to_others_as_any_file(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_what_is_no_file_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="a folder, a device or a pipe"):
            write(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_no_folder(tmp_path):
    with pytest.raises(OSError, match="there is no folder"):
        write(tmp_path / "no" / "file", "text")
