"""Readers that die, hang, lie or are killed, and what becomes of the file."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.submission.bounds import NO_ROOM, Bounds, CrashError, FormError
from shoal.submission.frame import encode_columns, encode_error
from shoal.submission.jail import MAX_TRIES, Jail, JailError, Limits
from shoal.submission.parse import parse_submission
from shoal.submission.read import read_submission

PATHS = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
PATIENCE_S = 60.0
HANG = "[lock.acquire() for lock in [__import__('_thread').allocate_lock()] * 2]"
"""Waits for itself: one of the few ways to wait that are left."""
WIDE = Bounds(max_rollouts=4, group_size=2, max_tokens=64, vocab_size=50)


def boot_with(parse: str) -> str:
    """A reader whose files are read by an expression of `data`, `bounds`, `good` (the honest way) and `tell`."""
    return PATHS + (
        "import os, time, signal, socket\n"
        "from shoal.submission.child import run_reader\n"
        "from shoal.submission.parse import parse_submission as good\n"
        "from shoal.submission.bounds import FormError\n"
        "def tell(value):\n    raise FormError(repr(value))\n"
        "def attempt(work):\n"
        "    try:\n        return work()\n"
        "    except (OSError, MemoryError) as error:\n        return (type(error).__name__, *error.args[:1])\n"
        f"run_reader(int(sys.argv[1]), int(sys.argv[2]), lambda data, bounds: {parse})\n"
    )


GOOD_END = b'{"code": 0}\n'


def boot_lying(answer: bytes, report: bytes = GOOD_END, trial: bytes = GOOD_END) -> str:
    """A reader that answers with these bytes; `trial` is what it reports when it is to read a file of its own."""
    return PATHS + (
        "import os, socket\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "channel.sendall(b'{\"guards\": []}\\n')\n"
        "while True:\n"
        "    message, files, _, _ = socket.recv_fds(channel, 4096, 2)\n"
        "    if not message: break\n"
        "    is_trial = json.loads(message)['trial']\n"
        f"    is_trial or os.write(files[1], bytes.fromhex('{answer.hex()}'))\n"
        "    os.close(files[0]); os.close(files[1])\n"
        f"    channel.sendall({trial!r} if is_trial else {report!r})\n"
    )


BOOT_DYING = PATHS + (
    "import os, socket\n"
    "channel = socket.socket(fileno=int(sys.argv[1]))\n"
    "channel.sendall(b'{\"guards\": []}\\n')\n"
    "socket.recv_fds(channel, 4096, 2)\n"
)
"""A reader that ends with its first file, as it does when the kernel needs its memory."""


def ask(open_desk, good: bytes, parse: str) -> str:
    """What a file's child found out about itself."""
    with pytest.raises(FormError) as caught:
        open_desk(boot=boot_with(f"tell({parse})")).read(good)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        ("os.abort()", "it was ended by SIG"),
        ("os._exit(0)", "an answer that ends too early"),
        ("os._exit(7)", "it failed with code 7"),
        ("1 / 0", "it failed with code 1"),
        ("sys.exit()", "it failed with code 1"),
        ("exec('while True: pass')", "it was ended by SIGXCPU"),
        ("[bytearray(1 << 24) for _ in range(1000)]", "it failed with code 1"),
    ],
)
def test_a_file_that_ends_its_reader_twice_is_refused(open_desk, good, parse, words):
    desk = open_desk(boot=boot_with(parse), limits=Limits(cpu_s=1, wall_s=PATIENCE_S))
    with pytest.raises(CrashError, match=f"it ends its reader each time: {words}") as caught:
        desk.read(good)
    assert (desk.jail.num_started, caught.value.num_deaths) == (3, MAX_TRIES)


def test_a_refused_file_costs_no_reader(open_desk, good):
    desk = open_desk()
    for _ in range(3):
        with pytest.raises(FormError):
            desk.read(good[:-1])
    assert desk.jail.num_started == 1


def test_a_file_that_takes_too_long_is_refused(open_desk, good):
    desk = open_desk(boot=boot_with(HANG), limits=Limits(wall_s=0.5))
    with pytest.raises(FormError, match=r"it was killed after 0\.5 s"):
        desk.read(good)


def test_a_reader_that_dies_once_is_replaced(open_desk, good, groups, make_proofs, is_same, tmp_path):
    mark = tmp_path / "mark"
    boot = PATHS + (
        "import os, pathlib\n"
        "from shoal.submission.child import run_reader\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "is_first = not mark.exists()\n"
        "mark.touch()\n"
        "run_reader(int(sys.argv[1]), int(sys.argv[2]), (lambda data, bounds: os.abort()) if is_first else None)\n"
    )
    desk = open_desk(boot=boot)
    assert is_same(desk.read(good), groups, make_proofs(groups))
    assert desk.jail.num_started == 2


def test_a_file_is_not_blamed_for_readers_that_cannot_start_any_more(open_desk, good, tmp_path):
    """Two deaths, and then none that works: nothing is known about the file."""
    mark = tmp_path / "mark"
    boot = PATHS + (
        "import os, pathlib\n"
        "from shoal.submission.child import run_reader\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "count = int(mark.read_text()) if mark.exists() else 0\n"
        "mark.write_text(str(count + 1))\n"
        "assert count < 2, 'out of order'\n"
        "run_reader(int(sys.argv[1]), int(sys.argv[2]), lambda data, bounds: os.abort())\n"
    )
    with pytest.raises(JailError, match="out of order"):
        open_desk(boot=boot).read(good)


@pytest.mark.parametrize(
    ("boot", "words"),
    [
        (boot_lying(b"", b'{"code": -9}\n'), "do not last here: it was ended by SIGKILL"),
        (BOOT_DYING, "do not last here: the process that forks readers died"),
        (boot_with("os._exit(3)"), "cannot read the file from the disk"),
        (boot_lying(b"", b'{"code": -11}\n', trial=b'{"code": 1}\n'), "our own file either: it failed with code 1"),
        (boot_lying(b"", b'{"code": -11}\n', trial=b'{"code": null}\n'), "our own file either: it cannot fork"),
    ],
)
def test_a_file_is_not_blamed_for_what_ails_the_machine(open_desk, good, boot, words):
    """The kernel that is out of memory, a disk that fails, a reader that reads nothing at all."""
    with pytest.raises(JailError, match=words):
        open_desk(boot=boot).read(good)


def test_a_file_is_blamed_for_its_want_of_memory_only_if_there_is_as_much(open_desk, good):
    answer = b"".join(encode_error(NO_ROOM))
    with pytest.raises(FormError, match=NO_ROOM):
        open_desk(boot=boot_lying(answer)).read(good)
    with pytest.raises(JailError, match="our own file either"):
        open_desk(boot=boot_lying(answer, trial=b'{"code": 1}\n')).read(good)


def test_a_machine_without_descriptors_or_memory_blames_nobody(open_desk, good, monkeypatch):
    desk = open_desk()
    assert desk.read(good).groups

    async def lack_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("shoal.submission.reader._receive_exactly", lack_memory)
        with pytest.raises(JailError, match="no memory here"):
            desk.read(good)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = desk.folder / "file"
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(JailError, match="cannot be opened here"):
            desk.runner.run(read_submission(desk.jail, path, WIDE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert desk.read(good).groups


def test_a_files_child_cannot_connect_to_this_machine(open_desk, good):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        found = ask(open_desk, good, f"attempt(lambda: socket.socket().connect(('127.0.0.1', {port})))")
        assert "Error" in found
        with pytest.raises(BlockingIOError):
            server.accept()
        with socket.create_connection(("127.0.0.1", port)):  # anybody else can
            assert server.accept()


def test_a_reader_that_cannot_start_says_why(open_desk, good):
    with pytest.raises(JailError, match="No module named 'no_such_thing'"):
        open_desk(boot="import no_such_thing").read(good)
    with pytest.raises(JailError, match=r"not ready after 0\.5 s"):
        open_desk(boot="import time; time.sleep(100)", limits=Limits(start_s=0.5)).read(good)


def test_a_reader_that_there_is_no_program_for_is_no_fault_of_the_file(open_desk, good, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(JailError, match="No such file"):
        open_desk().read(good)


def test_a_reader_that_cannot_fork_is_no_fault_of_the_file(open_desk, good):
    with pytest.raises(JailError, match="cannot fork"):
        open_desk(boot=boot_lying(b"", b'{"code": null}\n')).read(good)


@pytest.fixture(scope="module")
def honest(good, bounds) -> bytes:
    """The answer of an honest reader."""
    return b"".join(encode_columns(parse_submission(good, bounds)))


def test_a_lying_reader_can_tell_the_truth(open_desk, good, honest, groups, make_proofs, is_same):
    assert is_same(open_desk(boot=boot_lying(honest)).read(good), groups, make_proofs(groups))


@pytest.mark.parametrize(
    ("make", "report", "words"),
    [
        (lambda honest: b"", b'{"code": 0}\n', "ends too early"),
        (lambda honest: honest[:-1], b'{"code": 0}\n', "ends too early"),
        (lambda honest: honest[:20], b'{"code": 0}\n', "ends too early"),
        (lambda honest: honest[:2], b'{"code": 0}\n', "ends too early"),
        (lambda honest: honest + b"x", b'{"code": 0}\n', "goes on after its end"),
        (lambda honest: b"\xff\xff\xff\xff" + honest, b'{"code": 0}\n', "a head of 4294967295 bytes"),
        (lambda honest: b"\x04\0\0\0null", b'{"code": 0}\n', "a head of another kind"),
        (lambda honest: b"\x02\0\0\0{{", b'{"code": 0}\n', "a head that is not JSON"),
        (lambda honest: honest, b'{"code": 1}\n', "it failed with code 1"),
        (lambda honest: honest, b'{"code": -999}\n', "it was ended by signal 999"),
        (lambda honest: honest, b'{"code": "0"}\n', "a report of another kind"),
        (lambda honest: honest, b"{}\n", "a report of another kind"),
        (lambda honest: honest, b"\xff\n", "a report that is not JSON"),
        (lambda honest: honest, b"x" * 5000, "a report without an end"),
    ],
)
def test_an_answer_of_another_form_is_as_good_as_a_death(open_desk, good, honest, make, report, words):
    desk = open_desk(boot=boot_lying(make(honest), report))
    with pytest.raises(FormError, match=f"it ends its reader each time: .*{words}"):
        desk.read(good)


def test_values_that_a_lying_reader_makes_up_are_checked(open_desk, good, honest):
    place = honest.index(b"stop")
    with pytest.raises(FormError, match="rollout 0: finish is slop"):
        open_desk(boot=boot_lying(honest[:place] + b"slop" + honest[place + 4 :])).read(good)


def test_a_files_child_holds_the_file_and_its_answer_alone(open_desk, good):
    found = ask(open_desk, good, "[fd for fd in range(1000) if attempt(lambda: os.lseek(fd, 0, 1)) != ('OSError', 9)]")
    assert found.startswith("[0, 1, 2, ")  # /dev/null
    assert len(found.split(",")) == 5


def test_a_files_child_has_no_environment_and_no_torch(open_desk, good, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert ask(open_desk, good, "[name for name in ('SECRET', 'PATH', 'HOME') if name in os.environ]") == "[]"
    names = "('torch', 'pandas', 'pydantic', 'asyncio')"
    assert ask(open_desk, good, f"[name for name in {names} if name in sys.modules]") == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what is tested")
@pytest.mark.parametrize(
    ("work", "error"),
    [
        ("os.open('/etc/hostname', os.O_RDONLY)", "Error"),
        ("os.open('/tmp/x', os.O_RDWR | os.O_CREAT)", "Error"),
        ("socket.socket()", "Error"),
        ("os.fork()", "Error"),
        ("os.kill(os.getppid(), 9)", "PermissionError"),
        ("os.execv('/bin/true', ['true'])", "Error"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("os.setresuid(0, 0, 0)", "PermissionError"),
    ],
)
def test_a_files_child_can_do_nothing_but_read(open_desk, good, work, error):
    found = ask(open_desk, good, f"attempt(lambda: {work})")
    assert error in found


def test_what_a_file_does_to_its_child_ends_with_the_child(open_desk, good, groups, make_proofs, is_same):
    """A child that is no longer ours spoils what it can; the next file is read by another."""
    spoil = "sys.modules.__setitem__('spoiled', 1) if 'spoiled' not in sys.modules else tell('spoiled')"
    desk = open_desk(boot=boot_with(f"({spoil}, good(data, bounds))[1]"))
    for _ in range(3):
        assert is_same(desk.read(good), groups, make_proofs(groups))
    assert desk.jail.num_started == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what is tested")
def test_this_machine_says_what_it_permits(desk):
    guards = desk.runner.run(desk.jail.find_guards())
    assert {"parent", "privileges"} <= set(guards)


def test_a_cancelled_read_leaves_no_process_and_a_jail_that_works(good, tmp_path, bounds):
    hanging, honest = tmp_path / "hanging", tmp_path / "honest"
    hanging.write_bytes(b"H")
    honest.write_bytes(good)

    async def cancel_one() -> None:
        async with Jail(boot=boot_with(f"{HANG} if data == b'H' else good(data, bounds)")) as jail:
            await jail.find_guards()
            (reader,) = jail._idle
            task = asyncio.create_task(read_submission(jail, hanging, bounds))
            await asyncio.sleep(0.2)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert reader.process.wait(PATIENCE_S) == -signal.SIGKILL
            assert (await read_submission(jail, honest, bounds)).groups
            assert jail.num_started == 2

    asyncio.run(cancel_one())


def test_a_reader_that_was_killed_while_idle_is_replaced(open_desk, good):
    desk = open_desk()
    desk.read(good)
    (reader,) = desk.jail._idle
    reader.process.kill()
    reader.process.wait(PATIENCE_S)
    assert desk.read(good).groups
    assert desk.jail.num_started == 2


def test_closing_ends_all_readers(good, tmp_path, bounds):
    path = tmp_path / "a"
    path.write_bytes(good)

    async def open_and_close() -> list[int | None]:
        jail = Jail(size=2)
        await asyncio.gather(*(jail.read(path, bounds) for _ in range(2)))
        readers = list(jail._idle)
        await jail.close()
        return [reader.process.returncode for reader in readers]

    assert asyncio.run(open_and_close()) == [-signal.SIGKILL] * 2


PARENT = """
import asyncio, sys
from pathlib import Path
from shoal.submission.bounds import Bounds
from shoal.submission.jail import Jail

async def main():
    jail = Jail(boot=sys.argv[1])
    await jail.find_guards()
    print(jail._idle[0].process.pid, flush=True)
    await jail.read(Path(sys.argv[2]), Bounds(max_rollouts=4, group_size=2, max_tokens=64, vocab_size=50))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_readers_and_their_children_end_with_a_killed_parent(good, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(good)
    command = [sys.executable, "-c", PARENT, boot_with(HANG), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        reader = int(parent.stdout.readline())
        wait_for(lambda: list_children(reader))
        pids = [reader, *list_children(reader)]
        parent.kill()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_children(parent: int) -> list[int]:
    return [pid for pid in list_pids() if read_stat(pid)[1:2] == [str(parent)]]


def list_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def is_running(pid: int) -> bool:
    return read_stat(pid)[:1] not in ([], ["Z"])


def read_stat(pid: int) -> list[str]:
    """State, parent, ... of a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_only_a_regular_file_is_read(open_desk, tmp_path, bounds):
    desk = open_desk()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FormError, match="not a file"):
            desk.runner.run(read_submission(desk.jail, path, bounds))
    assert desk.jail.num_started == 0
    with pytest.raises(FileNotFoundError):
        desk.runner.run(read_submission(desk.jail, tmp_path / "none", bounds))


def test_the_child_gets_all_of_the_file(open_desk, good):
    data = good * 700
    with pytest.raises(FormError, match=f"^{len(data)}$"):
        open_desk(boot=boot_with("tell(len(data))")).read(data, WIDE)
