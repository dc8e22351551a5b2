"""Open files: bounded, and never closed while in use."""

import contextlib
import os
import resource
from pathlib import Path

import pytest

from shoal.shardcast.store.open_files import OpenFileCache


def make_files(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"f{number}" for number in range(count)]
    for path in paths:
        path.write_text(path.name)
    return paths


def count_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_stays_open_for_the_next_user_up_to_the_limit(tmp_path: Path) -> None:
    before, open_files = count_open(), OpenFileCache(3)
    for path in make_files(tmp_path, 10):
        with open_files.lease(path) as descriptor:
            assert os.pread(descriptor, 10, 0).decode() == path.name
        assert count_open() <= before + 3
    assert count_open() == before + 3
    open_files.close()
    assert count_open() == before


def test_two_leases_of_one_file_share_a_descriptor_and_other_flags_do_not(tmp_path: Path) -> None:
    open_files, (path,) = OpenFileCache(), make_files(tmp_path, 1)
    with open_files.lease(path) as one, open_files.lease(path) as two, open_files.lease(path, os.O_RDWR) as three:
        assert one == two != three
        os.pwrite(three, b"F", 0)
    open_files.close()
    assert path.read_text() == "F0"


def test_what_is_in_use_is_never_closed_however_many_come_after_it(tmp_path: Path) -> None:
    before, open_files = count_open(), OpenFileCache(2)
    first, *others = make_files(tmp_path, 8)
    with open_files.lease(first) as descriptor:
        for path in others:
            with open_files.lease(path):
                pass
        open_files.forget(tmp_path)
        open_files.close()
        assert os.pread(descriptor, 10, 0) == b"f0"
    assert count_open() == before


def test_a_forgotten_file_is_opened_again_by_name(tmp_path: Path) -> None:
    open_files, (path,) = OpenFileCache(), make_files(tmp_path, 1)
    with open_files.lease(path):
        path.rename(tmp_path / "old")
        path.write_text("new")
        open_files.forget(path)
        with open_files.lease(path) as descriptor:
            assert os.pread(descriptor, 10, 0) == b"new"
    open_files.close()


def test_forgetting_a_folder_leaves_those_whose_names_only_begin_like_it(tmp_path: Path) -> None:
    before, open_files = count_open(), OpenFileCache()
    for name in ("a", "ab"):
        (tmp_path / name).mkdir()
        (path,) = make_files(tmp_path / name, 1)
        with open_files.lease(path):
            pass
    open_files.forget(tmp_path / "a")
    assert count_open() == before + 1
    open_files.close()


def test_a_process_out_of_descriptors_gives_up_its_idle_ones(tmp_path: Path) -> None:
    open_files, paths = OpenFileCache(1000), make_files(tmp_path, 41)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for path in paths[:40]:
        with open_files.lease(path):
            pass
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        with open_files.lease(paths[40]) as descriptor:
            assert os.pread(descriptor, 10, 0) == b"f40"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)
    open_files.close()


def test_a_missing_file_raises_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), OpenFileCache().lease(tmp_path / "none"):
        pass
