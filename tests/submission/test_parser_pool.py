"""Parsers that die, hang, lie or are killed, and how the file is judged."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.sandbox import pool
from shoal.sandbox.frames import pack_frame
from shoal.submission.columns import dump_columns, measure_columns
from shoal.submission.limits import NO_ROOM, FormError, ParserCrashError, SubmissionLimits
from shoal.submission.parse import parse_submission
from shoal.submission.read import MAX_TRIES, ParserPool, ParserPoolError, read_submission

PATIENCE_S = 60.0
HANG = "[lock.acquire() for lock in [__import__('_thread').allocate_lock()] * 2]"
"""Waits for itself: one of the few ways to wait that are left in a sandbox."""
WIDE = SubmissionLimits(max_rollouts=4, group_size=2, max_tokens=64, vocab_size=50)
START = """
import os, pathlib, signal, socket, sys, time
from shoal.sandbox.forkserver import Program, ProgramSet
from shoal.sandbox.frames import send_bytes, send_frame
from shoal.sandbox.isolate import PARSE_FILE
from shoal.submission import parse
from shoal.submission.limits import FormError

good = parse.parse_submission

def tell(value):
    raise FormError(repr(value))

def attempt(work):
    try:
        return work()
    except (OSError, MemoryError) as error:
        return (type(error).__name__, *error.args[:1])
"""
TRIAL = "parse.run_trial(channel, job)"


@pytest.fixture
def write_programs(tmp_path_factory, monkeypatch) -> Callable[..., str]:
    """Writes a test-specific module of programs, and returns its name."""

    def write(text: str, trial: str = TRIAL) -> str:
        folder = tmp_path_factory.mktemp("programs")
        name = f"programs_{folder.name}".replace("-", "_")
        (folder / f"{name}.py").write_text(
            START + text + f"\ndef run_trial(channel, job):\n    {trial}\n"
            "PROGRAMS = ProgramSet(programs={'parse': Program(run), 'trial': Program(run_trial)}, "
            "profile=PARSE_FILE, warm_up=parse.warm_up)\n"
        )
        monkeypatch.syspath_prepend(folder)
        return name

    return write


@pytest.fixture
def open_with(open_reader, write_programs):
    """Opens parsers whose files are parsed by an expression of `data`, `limits`, `good`, `tell` and `attempt`."""

    def open_one(expression: str, **options):
        text = "parse.warm_up()\nparse.warm_up = lambda: None\n"
        text += f"parse.parse_submission = lambda data, limits: {expression}\nrun = parse.run_parse\n"
        return open_reader(programs=write_programs(text), **options)

    return open_one


@pytest.fixture
def open_lying(open_reader, write_programs):
    """Opens parsers that send these bytes, and then do something."""

    def open_one(answer: bytes, then: str = "pass", trial: str = "send_frame(channel, {'done': True})"):
        text = f"def run(channel, job):\n    send_bytes(channel, bytes.fromhex('{answer.hex()}'))\n    {then}\n"
        return open_reader(programs=write_programs(text, trial))

    return open_one


def ask(open_with, good: bytes, expression: str) -> str:
    """What a job reports about itself."""
    with pytest.raises(FormError) as caught:
        open_with(f"tell({expression})").read(good)
    return str(caught.value)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("os.abort()", "it was ended by SIG"),
        ("os._exit(0)", "it ended without an answer"),
        ("os._exit(7)", "it failed with code 7"),
        ("1 / 0", "it failed with code 1"),
        ("sys.exit()", "it ended without an answer"),
        ("exec('while True: pass')", "it took more than 1 s of CPU time"),
        ("(signal.signal(signal.SIGXCPU, signal.SIG_IGN), exec('while True: pass'))", "it took more than 1 s of CPU"),
        ("[bytearray(1 << 24) for _ in range(1000)]", "it failed with code 1"),
    ],
)
def test_a_file_that_ends_its_parser_twice_is_refused(open_with, good, expression, words):
    # The trial must succeed: only the file's own job dies.
    reader = open_with(f"good(data, limits) if len(data) != {len(good)} else {expression}", cpu_s=1, wall_s=PATIENCE_S)
    with pytest.raises(ParserCrashError, match=f"it ends its parser each time: {words}") as caught:
        reader.read(good)
    assert (reader.num_started, caught.value.num_deaths) == (1, MAX_TRIES)


def test_a_refused_file_costs_no_fork_server(open_reader, good):
    reader = open_reader()
    for _ in range(3):
        with pytest.raises(FormError):
            reader.read(good[:-1])
    assert reader.num_started == 1


def test_a_file_that_takes_too_long_is_refused(open_with, good):
    reader = open_with(f"good(data, limits) if len(data) != {len(good)} else {HANG}", wall_s=0.5)
    with pytest.raises(FormError, match=r"it took more than 0\.5 s"):
        reader.read(good)


def test_a_parser_that_dies_once_is_replaced(open_reader, write_programs, good, groups, make_proofs, is_same):
    """Once in the life of the fork server, which a job cannot write to: by the time of day."""
    text = "end = time.monotonic() + 1\ndef run(channel, job):\n"
    text += "    os.abort() if time.monotonic() < end else parse.run_parse(channel, job)\n"
    reader = open_reader(programs=write_programs(text))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            contents = reader.read(good)
            break
        except ParserCrashError:
            assert time.monotonic() < deadline
    assert is_same(contents, groups, make_proofs(groups))
    assert reader.num_started == 1


def test_a_file_is_not_blamed_where_no_parser_works_any_more(open_with, good):
    """Two crashes, and then no working parser: nothing is known about the file."""
    with pytest.raises(ParserPoolError, match="on a known good file: it failed with code 1"):
        open_with("1 / 0").read(good)


@pytest.mark.parametrize(
    ("then", "trial", "words"),
    [
        ("os.kill(os.getpid(), 9)", TRIAL, "failed with code 1"),  # it cannot: its own end is not that of the kernel
        ("send_frame(channel, {'fault': 'the disk'})", TRIAL, "does not work: the disk"),
        ("os._exit(11)", "os._exit(1)", "on a known good file: it failed with code 1"),
        ("os._exit(11)", "send_frame(channel, {})", "a known good file: an answer of unknown form"),
        (
            "os._exit(11)",
            "(send_frame(channel, {'done': True}), os._exit(1))",
            "on a known good file: it failed",
        ),
    ],
)
def test_a_file_is_not_blamed_for_a_fault_of_the_machine(open_lying, good, then, trial, words):
    expected = FormError if "kill" in then else ParserPoolError
    with pytest.raises(expected, match=words):
        open_lying(b"", then, trial).read(good)


def run_hanging(open_reader, write_programs, good: bytes, end: Callable[[pool.SandboxProcess], None]) -> None:
    """Read a file with parsers that hang, and are ended each time."""
    reader = open_reader(programs=write_programs(f"def run(channel, job):\n    {HANG}\n"))
    (process,) = reader.parsers.sandboxes.processes
    path = reader.folder / "file"
    path.write_bytes(good)

    async def read_and_end() -> None:
        task = asyncio.create_task(read_submission(reader.parsers, path, WIDE))
        while not task.done():
            await asyncio.sleep(0.05)
            end(process)
        await task

    reader.runner.run(read_and_end())


def test_a_file_is_not_blamed_for_a_fork_server_that_is_killed(open_reader, write_programs, good):
    with pytest.raises(ParserPoolError, match="keep dying on this machine: the fork server"):
        run_hanging(open_reader, write_programs, good, lambda process: process.interrupt())


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_file_is_not_blamed_for_a_job_that_is_killed(open_reader, write_programs, good):
    """Like the kernel when memory runs out: kills the innermost process, which holds the file."""

    def end_job(process: pool.SandboxProcess) -> None:
        if process._process is not None and process.isolation:
            deep = list_descendants(process._process.pid)
            if len(deep) > (process.isolation == "namespaces"):
                os.kill(deep[-1], signal.SIGKILL)

    with pytest.raises(ParserPoolError, match="keep dying on this machine: it was ended by SIGKILL"):
        run_hanging(open_reader, write_programs, good, end_job)


def test_a_file_is_blamed_for_its_memory_use_only_if_that_much_memory_is_available(open_lying, good):
    answer = pack_frame({"error": NO_ROOM})
    with pytest.raises(FormError, match=NO_ROOM):
        open_lying(answer).read(good)
    with pytest.raises(ParserPoolError, match="failed on a known good file"):
        open_lying(answer, trial="os._exit(1)").read(good)


def test_a_machine_without_descriptors_or_memory_blames_nobody(open_reader, good, monkeypatch):
    reader = open_reader()
    assert reader.read(good).groups

    def lack_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("shoal.sandbox.pool.SandboxJob.read_exactly", lack_memory)
        with pytest.raises(ParserPoolError, match="not enough memory for the contents"):
            reader.read(good)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = reader.folder / "file"
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(ParserPoolError, match="cannot open the submission file"):
            reader.runner.run(read_submission(reader.parsers, path, WIDE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert reader.read(good).groups


def test_a_job_cannot_connect_to_this_machine(open_with, good):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        found = ask(open_with, good, f"attempt(lambda: socket.socket().connect(('127.0.0.1', {port})))")
        assert "Error" in found
        with pytest.raises(BlockingIOError):
            server.accept()
        with socket.create_connection(("127.0.0.1", port)):  # anybody else can
            assert server.accept()


def test_a_fork_server_that_cannot_start_says_why(open_reader, good, monkeypatch):
    with pytest.raises(ParserPoolError, match="No module named 'no_such_thing'"):
        open_reader(programs="no_such_thing").read(good)
    monkeypatch.setattr(pool, "_BOOT", "import time; time.sleep(100)")
    monkeypatch.setattr(pool, "START_S", 0.5)
    with pytest.raises(ParserPoolError, match="does not respond: timed out"):
        open_reader().read(good)


def test_a_missing_interpreter_is_no_fault_of_the_file(open_reader, good, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ParserPoolError, match="No such file"):
        open_reader().read(good)


FAKE_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
import socket
from shoal.sandbox.frames import receive_frame, send_bytes, send_frame
control = socket.socket(fileno=int(sys.argv[1]))
send_frame(control.fileno(), {{"ready": "limits"}})
while True:
    head, descriptors, _, _ = socket.recv_fds(control, 4, 2)
    order = receive_frame(control.fileno(), head)
    if order is None:
        break
    if "program" in order:
        receive_frame(descriptors[0])  # the job's input: closing before it was sent would be another fault
        send_frame(descriptors[0], {{"isolated": True}})
        send_frame(descriptors[0], {{"error": "made up"}})
        socket.socket(fileno=descriptors[0]).close()
        send_bytes(control.fileno(), bytes.fromhex("{report}"))
"""


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (pack_frame({"lost": "cannot fork"}), "cannot fork"),
        (pack_frame({"code": "0"}), "a job was lost"),
        (pack_frame({}), "a job was lost"),
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\x02\0\0\0{{", "not JSON"),
    ],
)
def test_a_fork_server_that_reports_nonsense_is_no_fault_of_the_file(open_reader, good, monkeypatch, report, words):
    monkeypatch.setattr(pool, "_BOOT", FAKE_SERVER.format(report=report.hex()))
    with pytest.raises(ParserPoolError, match=words):
        open_reader().read(good)


@pytest.fixture(scope="module")
def honest(good, bounds) -> bytes:
    """The output of an honest parser."""
    columns = parse_submission(good, bounds)
    return pack_frame({"sizes": measure_columns(columns)}) + b"".join(dump_columns(columns))


def test_a_lying_parser_can_tell_the_truth(open_lying, good, honest, groups, make_proofs, is_same):
    assert is_same(open_lying(honest).read(good), groups, make_proofs(groups))


@pytest.mark.parametrize(
    ("make", "then", "words"),
    [
        (lambda honest: b"", "pass", "it ended without an answer"),
        (lambda honest: honest[:-1], "pass", "it ended before its answer did"),
        (lambda honest: honest[:20], "pass", "it ended before its answer did"),
        (lambda honest: honest[:2], "pass", "it ended before its answer did"),
        (lambda honest: honest + b"x", "pass", "continues after its end"),
        (lambda honest: b"\xff\xff\xff\xff" + honest, "pass", "a frame of 4294967295 bytes"),
        (lambda honest: b"\x04\0\0\0null", "pass", "an answer of unknown form"),
        (lambda honest: b"\x02\0\0\0{{", "pass", "not JSON"),
        (lambda honest: honest, "os._exit(1)", "it failed with code 1"),
        (lambda honest: pack_frame({"error": "made up"}), "os._exit(1)", "it failed with code 1"),
        (lambda honest: honest, "os.abort()", "it was ended by SIG"),
    ],
)
def test_an_answer_of_unknown_form_counts_as_a_crash(open_lying, good, honest, make, then, words):
    with pytest.raises(FormError, match=f"it ends its parser each time: .*{words}"):
        open_lying(make(honest), then).read(good)


def test_values_that_a_lying_parser_makes_up_are_checked(open_lying, good, honest):
    place = honest.index(b"stop")
    with pytest.raises(FormError, match="rollout 0: finish is slop"):
        open_lying(honest[:place] + b"slop" + honest[place + 4 :]).read(good)


def test_a_job_holds_its_file_and_its_channel_alone(open_with, good):
    found = ask(open_with, good, "[fd for fd in range(1000) if attempt(lambda: os.lseek(fd, 0, 1)) != ('OSError', 9)]")
    assert found == "[0, 1, 2, 3, 4]"  # 0 to 2: /dev/null


def test_a_job_has_no_environment_and_no_torch(open_with, good, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert ask(open_with, good, "[name for name in ('SECRET', 'PATH', 'HOME') if name in os.environ]") == "[]"
    names = "('torch', 'pandas', 'pydantic', 'asyncio')"
    assert ask(open_with, good, f"[name for name in {names} if name in sys.modules]") == "[]"


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
def test_a_job_can_do_nothing_but_read(open_with, good, work, error):
    found = ask(open_with, good, f"attempt(lambda: {work})")
    assert error in found


def test_what_a_file_does_to_its_job_ends_with_the_job(open_with, good, groups, make_proofs, is_same):
    """A hijacked job damages what it can; the next file is parsed by another one."""
    spoil = "sys.modules.__setitem__('spoiled', 1) if 'spoiled' not in sys.modules else tell('spoiled')"
    reader = open_with(f"({spoil}, good(data, limits))[1]")
    for _ in range(3):
        assert is_same(reader.read(good), groups, make_proofs(groups))
    assert reader.num_started == 1


def test_without_namespaces_and_filter_files_are_read_within_limits(open_reader, good, monkeypatch):
    refuse = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[3])\n"
        "from shoal.sandbox import isolate, linux\n"
        "def refuse(*_): raise PermissionError(1, 'not permitted')\n"
        "linux.unshare = refuse; isolate.build_filter = lambda _: None\n"
    )
    monkeypatch.setattr(pool, "_BOOT", refuse + pool._BOOT)
    reader = open_reader()
    assert reader.read(good).groups
    assert [process.isolation for process in reader.parsers.sandboxes.processes] == ["limits"]
    with pytest.raises(FormError):
        reader.read(good[:-1])


def test_a_filter_that_does_not_work_here_is_left_out(open_reader, good, monkeypatch):
    """As on a machine whose kernel rejects it, or whose C library needs another system call."""
    invalid = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[3])\n"
        "from shoal.sandbox import isolate\n"
        "build = isolate.build_filter\n"
        "isolate.build_filter = lambda calls: build(calls)[:-8]\n"
    )
    monkeypatch.setattr(pool, "_BOOT", invalid + pool._BOOT)
    assert open_reader().read(good).groups


def test_a_cancelled_read_leaves_no_process_and_parsers_that_work(write_programs, good, tmp_path, bounds):
    hanging, honest = tmp_path / "hanging", tmp_path / "honest"
    hanging.write_bytes(b"H")
    honest.write_bytes(good)
    programs = write_programs(
        f"def run(channel, job):\n    {HANG} if os.pread(4, 9, 0) == b'H' else parse.run_parse(channel, job)\n"
    )

    async def cancel_one() -> None:
        async with ParserPool(programs=programs) as parsers:
            assert (await read_submission(parsers, honest, bounds)).groups
            (process,) = parsers.sandboxes.processes
            server = process._process
            assert server is not None
            task = asyncio.create_task(read_submission(parsers, hanging, bounds))
            await asyncio.sleep(0.2)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.wait(PATIENCE_S) == -signal.SIGKILL
            assert (await read_submission(parsers, honest, bounds)).groups
            assert process.num_started == 2

    asyncio.run(cancel_one())


def test_a_fork_server_that_was_killed_while_idle_is_replaced(open_reader, good):
    reader = open_reader()
    reader.read(good)
    (process,) = reader.parsers.sandboxes.processes
    process.interrupt()
    process._process.wait(PATIENCE_S)
    assert reader.read(good).groups
    assert reader.num_started == 2


def test_closing_ends_all_processes(good, tmp_path, bounds):
    path = tmp_path / "a"
    path.write_bytes(good)

    async def open_and_close() -> list[int | None]:
        parsers = ParserPool(size=2)
        await asyncio.gather(*(parsers.parse(path, bounds) for _ in range(2)))
        servers = [process._process for process in parsers.sandboxes.processes]
        await parsers.close()
        return [server.returncode for server in servers]

    assert None not in asyncio.run(open_and_close())


PARENT = """
import asyncio, json, sys
sys.path[:] = json.loads(sys.argv[3])
from pathlib import Path
from shoal.submission.limits import SubmissionLimits
from shoal.submission.read import ParserPool

async def main():
    parsers = ParserPool(programs=sys.argv[1])
    (process,) = parsers.sandboxes.processes
    process.start()
    print(process._process.pid, flush=True)
    limits = SubmissionLimits(max_rollouts=4, group_size=2, max_tokens=64, vocab_size=50)
    await parsers.parse(Path(sys.argv[2]), limits)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_fork_servers_and_their_jobs_end_with_a_killed_caller(write_programs, good, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(good)
    programs = write_programs(f"def run(channel, job):\n    {HANG}\n")
    command = [sys.executable, "-c", PARENT, programs, str(path), json.dumps(sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        wait_for(lambda: len(list_descendants(server)) >= 1)
        time.sleep(0.2)
        pids = [server, *list_descendants(server)]
        parent.kill()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_descendants(parent: int) -> list[int]:
    """Children, their children, ... in this order."""
    found, edge = [], [parent]
    while edge:
        edge = [pid for pid in list_pids() if read_stat(pid)[1:2] and int(read_stat(pid)[1]) in edge]
        found += edge
    return found


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


def test_only_a_regular_file_is_read(open_reader, tmp_path, bounds):
    reader = open_reader()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FormError, match="not a file"):
            reader.runner.run(read_submission(reader.parsers, path, bounds))
    assert reader.num_started == 0
    with pytest.raises(FileNotFoundError):
        reader.runner.run(read_submission(reader.parsers, tmp_path / "none", bounds))


def test_the_job_gets_all_of_the_file(open_with, good):
    data = good * 700
    with pytest.raises(FormError, match=f"^{len(data)}$"):
        open_with("tell(len(data))").read(data, WIDE)
