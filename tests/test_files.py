"""Files are written whole, and replace only files; errors suggest the nearest name."""

import os
import stat

import pytest

from mlx_tq.errors import ConfigError, MlxTqError, unknown_name
from mlx_tq.files import atomic_write


def write(path, text):
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def test_a_file_appears_and_is_replaced(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        write(path, text)
        assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


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
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_it_has_the_permissions_of_any_new_file(tmp_path):
    umask = os.umask(0o027)
    try:
        write(tmp_path / "file", "text")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_pipes_and_folders_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="a folder, a device or a pipe"):
            write(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(OSError, match="no does not exist"):
        write(tmp_path / "no" / "file", "text")


def test_an_unknown_name_suggests_the_nearest():
    assert {ValueError, MlxTqError} <= set(ConfigError.__mro__)
    assert (
        str(unknown_name("pet", "dgo", ["cat", "dog"])) == "pet 'dgo' is unknown; valid are cat, dog. Did you mean dog?"
    )
    assert str(unknown_name("pet", 7, ["cat", "dog"])) == "pet 7 is unknown; valid are cat, dog."
