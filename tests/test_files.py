"""Files are written whole, and replace only files; errors suggest the nearest name."""

import os
import stat

import pytest

from mlx_tq.errors import ConfigError, MlxTqError, unknown_name
from mlx_tq.files import atomic_write


def write(path, text):
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def test_a_file_is_replaced_unless_its_writer_fails(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        write(path, text)
        assert path.read_text() == text
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("new") / 0
    assert path.read_text() == "second"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


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


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in (("pipe", "a device or a pipe"), ("folder", "a folder, "), ("no/file", "no does not exist")):
        with pytest.raises(OSError, match=message):
            write(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_unknown_name_suggests_the_nearest():
    assert {ValueError, MlxTqError} <= set(ConfigError.__mro__)
    for name, hint in (("dgo", " Did you mean dog?"), (7, "")):
        error = unknown_name("pet", name, ["cat", "dog"])
        assert str(error) == f"pet {name!r} is unknown; valid are cat, dog.{hint}"
