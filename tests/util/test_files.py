import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.util import files
from shoal.util.files import (
    append_line,
    atomic_dir,
    check_output,
    hash_file,
    link_latest,
    remove_dir,
    repair_jsonl,
    sweep_leftovers,
    write_atomic,
    write_output,
)


def run_and_kill(code: str, *args: Path) -> None:
    """Run code in another process until it prints, then kill -9 it."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)


def list_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_an_atomic_write_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert list_names(tmp_path) == ["a"]


def test_an_atomic_write_may_leave_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    write_atomic(tmp_path / "a", b"new", sync=False)
    assert (tmp_path / "a").read_bytes() == b"new" and list_names(tmp_path) == ["a"] and not calls
    write_atomic(tmp_path / "a", b"newer")
    assert len(calls) == 2


def test_a_failed_atomic_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert list_names(tmp_path) == ["a"]


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "step-1"
    with atomic_dir(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text("w")
        assert not target.exists()
    assert (target / "sub" / "weights").read_text() == "w"
    assert list_names(target.parent) == ["step-1"]


def test_a_folder_whose_block_raises_never_appears(tmp_path: Path) -> None:
    def fill_half() -> None:
        with atomic_dir(tmp_path / "a") as folder:
            (folder / "half").write_text("h")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert list_names(tmp_path) == []


def test_a_folder_replaces_an_older_one_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with atomic_dir(tmp_path / "a") as folder:
            (folder / name).write_text(name)
    assert list_names(tmp_path) == ["a"]
    assert list_names(tmp_path / "a") == ["new"]


def test_a_writer_killed_half_way_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    run_and_kill(
        """
        import sys, time
        from pathlib import Path
        from shoal.util.files import atomic_dir
        with atomic_dir(Path(sys.argv[1])) as folder:
            (folder / "half").write_text("half")
            print("ready", flush=True)
            time.sleep(60)
        """,
        tmp_path / "a",
    )
    assert not (tmp_path / "a").exists()
    assert len(list_names(tmp_path)) == 1
    with atomic_dir(tmp_path / "a") as folder:
        (folder / "whole").write_text("whole")
    assert list_names(tmp_path) == ["a"]
    assert list_names(tmp_path / "a") == ["whole"]


def test_a_folder_moved_aside_by_a_writer_killed_while_replacing_it_comes_back(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "a") as folder:
        (folder / "old").write_text("old")
    run_and_kill(
        """
        import sys, time
        from pathlib import Path
        from shoal.util import files
        rename = Path.rename
        def stop_second(self, target):
            if ".new-" in self.name:
                print("ready", flush=True)
                time.sleep(60)
            return rename(self, target)
        Path.rename = stop_second
        with files.atomic_dir(Path(sys.argv[1])) as folder:
            (folder / "new").write_text("new")
        """,
        tmp_path / "a",
    )
    assert not (tmp_path / "a").exists()
    sweep_leftovers(tmp_path)
    assert list_names(tmp_path) == ["a"]
    assert list_names(tmp_path / "a") == ["old"]


def test_a_removed_folder_leaves_nothing(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "a") as folder:
        (folder / "old").write_text("old")
    remove_dir(tmp_path / "a")
    assert list_names(tmp_path) == []


def test_sweeping_spares_what_a_live_process_is_writing(tmp_path: Path) -> None:
    live = tmp_path / f".a.new-{os.getppid()}-00000000"
    live.mkdir()
    (tmp_path / ".hidden").touch()
    sweep_leftovers(tmp_path)
    assert list_names(tmp_path) == sorted([live.name, ".hidden"])


def test_a_file_hash_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    assert hash_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_appended_lines_are_read_back_in_order(tmp_path: Path) -> None:
    for number in range(3):
        append_line(tmp_path / "a.jsonl", json.dumps({"n": number}))
    assert [json.loads(line)["n"] for line in (tmp_path / "a.jsonl").open()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b'{"n": 1}\n', b'{"n": 1}\n'),
        (b'{"n": 1}\n{"n":', b'{"n": 1}\n'),
        (b'{"n"', b""),
        (b"1\n" + b"\x00" * 4096, b"1\n"),
        (b"1\n" + b"x" * 200_000, b"1\n"),
        (b"1\n\n", b"1\n\n"),
    ],
)
def test_repair_cuts_a_torn_last_line_and_nothing_else(tmp_path: Path, content: bytes, kept: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert repair_jsonl(path) == len(content) - len(kept)
    assert path.read_bytes() == kept


def test_repair_of_a_missing_file_does_nothing(tmp_path: Path) -> None:
    assert repair_jsonl(tmp_path / "a.jsonl") == 0
    assert list_names(tmp_path) == []


def test_lines_acknowledged_before_a_kill_survive_it_and_the_torn_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run_and_kill(
        """
        import os, sys, time
        from pathlib import Path
        from shoal.util.files import append_line
        path = Path(sys.argv[1])
        for number in range(5):
            append_line(path, f'{{"n": {number}}}')
        write = os.write
        def tear(descriptor, data):
            written = write(descriptor, bytes(data)[:4])
            print("ready", flush=True)
            time.sleep(60)
            return written
        os.write = tear
        append_line(path, '{"n": 5}')
        """,
        path,
    )
    assert repair_jsonl(path) == 4
    append_line(path, '{"n": 6}')
    assert [json.loads(line)["n"] for line in path.open()] == [0, 1, 2, 3, 4, 6]


def test_latest_is_a_relative_link_that_follows_the_newest_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name)
    assert (tmp_path / "latest").readlink() == Path("b")
    assert list_names(tmp_path) == ["a", "b", "latest"]


def test_a_dangling_latest_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "a").mkdir()
    link_latest(tmp_path / "a")
    assert (tmp_path / "latest").readlink() == Path("a")


def test_a_real_folder_named_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="move it away"):
        link_latest(tmp_path / "a")


def test_leftovers_of_an_earlier_process_with_this_ones_id_are_swept(tmp_path: Path) -> None:
    aside = tmp_path / f".kept.old-{os.getpid()}-00000000-3"
    aside.mkdir()
    (tmp_path / f".gone.new-{os.getpid()}-00000000-4").touch()
    sweep_leftovers(tmp_path)
    assert list_names(tmp_path) == ["kept"]


def test_an_output_goes_where_a_link_points_and_into_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"through")
    assert os.read(reader, 99) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, text in ((tmp_path, "it is a folder"), (tmp_path / "a" / "b", "there is no folder")):
        with pytest.raises(ConfigError, match=text):
            check_output(path)


def test_a_fork_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Otherwise leftovers of an earlier process with the same id would count as its own."""
    known, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, files._hidden_path(tmp_path / "a", "new").name.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    theirs, ours = os.read(known, 200).decode(), files._hidden_path(tmp_path / "a", "new").name
    os.close(known)
    os.close(told)
    assert theirs.split("-")[1] == str(pid) and theirs.split("-")[2] != ours.split("-")[2]
