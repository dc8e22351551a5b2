"""Which files can be published in place, and how changes are detected."""

import os
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.store.origin_files import FileFingerprint, PublishedFiles, scan_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "b.bin").write_bytes(b"bb")
    (path / "a.bin").write_bytes(b"a")
    return path


def test_a_folder_is_its_files_in_the_order_of_their_names(folder: Path) -> None:
    source = scan_source(folder)
    assert list(source.fingerprints) == ["a.bin", "b.bin"]
    assert source.fingerprints["b.bin"] == FileFingerprint.from_status((folder / "b.bin").stat())
    assert (source.path, source.folder, source.single) == (folder, folder, False)
    assert source.is_unchanged()


def test_a_single_file_is_published_without_its_neighbours(folder: Path) -> None:
    source = scan_source(folder / "a.bin")
    assert (list(source.fingerprints), source.folder, source.single) == (["a.bin"], folder, True)
    (folder / "c.bin").write_bytes(b"c")
    assert source.is_unchanged()


def test_a_link_to_the_whole_is_followed_and_a_link_inside_may_point_inside(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    (folder / "again.bin").symlink_to("a.bin")
    source = scan_source(tmp_path / "latest")
    assert source.path == folder and list(source.fingerprints) == ["a.bin", "again.bin", "b.bin"]


def test_a_record_comes_back_from_its_bytes(folder: Path) -> None:
    for source in (scan_source(folder), scan_source(folder / "a.bin")):
        assert PublishedFiles.from_bytes(source.to_bytes()) == source


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"path":1}', b'{"path":"a","single":false,"files":{"a":[1]}}'])
def test_a_torn_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        PublishedFiles.from_bytes(data)


@pytest.mark.parametrize("change", ["rewrite", "replace", "touch", "remove", "add", "grow", "folder"])
def test_any_change_shows(folder: Path, change: str) -> None:
    source = scan_source(folder)
    path = folder / "a.bin"
    if change == "rewrite":
        os.utime(path, ns=(0, 0))
        source = scan_source(folder)
        path.write_bytes(b"x")
    elif change == "replace":
        (folder.parent / "new").write_bytes(b"a")
        os.utime(folder.parent / "new", ns=(0, path.stat().st_mtime_ns))
        (folder.parent / "new").replace(path)
    elif change == "touch":
        os.utime(path, ns=(0, 0))
    elif change == "remove":
        path.unlink()
    elif change == "add":
        (folder / "c.bin").write_bytes(b"c")
    elif change == "grow":
        stamp = path.stat().st_mtime_ns
        path.write_bytes(b"aa")
        os.utime(path, ns=(stamp, stamp))
    else:
        folder.rename(folder.parent / "moved")
    assert not source.is_unchanged()


def refuse(path: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        scan_source(path)


def test_what_cannot_be_published_is_a_user_error(folder: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "none", "No such file")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "empty folder")
    (tmp_path / "loop").symlink_to("loop")
    refuse(tmp_path / "loop", "loop|Too many levels")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "neither a folder nor a file")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("folder", "subfolders"),
        ("outside", "path outside"),
        ("dangling", "No such file"),
        ("pipe", "not a regular file"),
        (".hidden", "under this name"),
        ("a b", "under this name"),
        ("x" * 200, "under this name"),
    ],
)
def test_one_unpublishable_file_in_the_folder_is_a_user_error(folder: Path, kind: str, reason: str) -> None:
    if kind == "folder":
        (folder / "sub").mkdir()
    elif kind == "outside":
        (folder.parent / "secret").write_text("x")
        (folder / "link").symlink_to("../secret")
    elif kind == "dangling":
        (folder / "link").symlink_to("nothing")
    elif kind == "pipe":
        os.mkfifo(folder / "pipe")
    else:
        (folder / kind).write_text("x")
    refuse(folder, reason)
