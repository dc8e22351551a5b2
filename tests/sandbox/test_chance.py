"""A program that reads chance gets the same in every sandbox, and a job gets no descriptor but its own."""

import os
import sys

import pytest

from shoal.errors import ConfigError
from shoal.sandbox import pool
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.pool import SandboxProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes need Linux")

PROGRAMS = "shoal.sandbox.programs.code"
LIMITS = SandboxLimits(cpu_s=5, wall_s=30.0, memory_bytes=256 << 20)
CHANCES = {
    "urandom": "import os\ndef f(): return os.urandom(8)",
    "getrandom": "import os\ndef f(): return os.getrandom(8)",
    "posix": "import posix\ndef f(): return posix.urandom(8)",
    "secrets": "import secrets\ndef f(): return [secrets.token_hex(8), secrets.randbelow(99), secrets.choice('abc')]",
    "system random": "import random\ndef f(): return random.SystemRandom().random()",
    "random": "import random\ndef f(): return random.random()",
    "unseeded random": "import random\ndef f(): return random.Random().random()",
    "random seeded by chance": "import random\ndef f():\n  random.seed()\n  return random.random()",
    "uuid": "import uuid\ndef f(): return [uuid.uuid4().hex, uuid.uuid1().hex]",
    "temporary names": "import tempfile\ndef f(): return next(tempfile._get_candidate_names())",
    "hash of a text": "def f(): return [hash('a'), list({'a', 'b', 'c', 'd'})]",
    "time": "import time\ndef f(): return [time.time(), time.time_ns()]",
    "other clocks": "import time\ndef f(): return [time.monotonic(), time.perf_counter_ns(), time.process_time(), "
    "time.thread_time_ns(), time.clock_gettime(time.CLOCK_REALTIME), time.clock_gettime_ns(time.CLOCK_MONOTONIC)]",
    "calendar": "import time\ndef f(): return [time.ctime(), time.asctime(), time.strftime('%c'), list(time.gmtime())]",
    "from time import": "from time import time, perf_counter\ndef f(): return [time(), perf_counter()]",
    "datetime": "import datetime\ndef f(): return [str(datetime.datetime.now()), str(datetime.datetime.utcnow()), "
    "str(datetime.date.today()), str(datetime.datetime.now(datetime.timezone.utc)), str(datetime.datetime.today())]",
    "timeit": "import timeit\ndef f(): return [timeit.default_timer(), timeit.timeit('1', number=9)]",
    "process times": "import os\ndef f(): return list(os.times())",
    "process and host": "import os\ndef f(): return [os.getpid(), os.getppid(), os.getuid(), list(os.uname()), "
    "os.cpu_count(), len(os.sched_getaffinity(0))]",
    "size of the machine": "import os\ndef f(): return [os.sysconf('SC_PHYS_PAGES'), os.sysconf('SC_PAGESIZE')]",
    "interpreter": "import sys\ndef f(): return [sys.executable, sys.prefix, sys.argv, sys.path]",
    "sleep": "import time\ndef f():\n  a = time.time()\n  time.sleep(0.01)\n  return time.time() - a",
    "log records": "import logging\ndef f(): return logging.makeLogRecord({}).created",
}
FILES = {
    "file times": "import os\ndef f():\n  open('a', 'w').close()\n  s = os.stat('a')\n"
    "  return [s.st_mtime, s.st_ino, s.st_uid]",
}
ADDRESSES = {
    "id": "def f(): return id(object())",
    "hash of an object": "def f(): return hash(object())",
    "text of an object": "def f(): return repr(object())",
    "a set of objects": "class A:\n  pass\nnames = {A(): n for n in range(9)}\n"
    "def f(): return [names[a] for a in set(names)]",
    "a set of types": "def f(): return [t.__name__ for t in {int, str, float, list, dict, set, tuple, bytes}]",
}


def ask(process, source, shift=0):
    """What the function of a program returns, in its encoded form."""
    job = {"source": source, "function": "f", "seed": "0", "shift": shift}
    with process.open_job("calls", job, LIMITS) as opened:
        assert opened.receive() == {"ready": True}
        opened.send({"args": [], "kwargs": {"d": []}})
        return opened.receive()


@pytest.fixture(scope="module")
def processes():
    found = [SandboxProcess(PROGRAMS, namespaces=namespaces) for namespaces in (True, True, False)]
    yield found
    for process in found:
        process.close()


@pytest.mark.parametrize("source", CHANCES.values(), ids=CHANCES)
def test_chance_is_the_same_in_every_sandbox(processes, source):
    answers = [ask(process, source) for process in processes for _ in range(2)]
    assert "value" in answers[0], answers[0]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("source", FILES.values(), ids=FILES)
def test_files_tell_neither_time_nor_place(processes, source):
    answers = [ask(process, source) for process in processes[:2] for _ in range(2)]
    if processes[0].isolation != "namespaces":
        pytest.skip("no files without namespaces")
    assert "value" in answers[0] and all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("source", ADDRESSES.values(), ids=ADDRESSES)
def test_addresses_are_not_random(processes, source):
    answers = [ask(process, source) for process in processes[:2]]
    assert "value" in answers[0] and answers[0] == answers[1]


@pytest.mark.parametrize("name", ["id", "hash of an object", "a set of objects"])
def test_a_shift_shows_whether_a_result_depends_on_addresses(processes, name):
    assert len({str(ask(processes[0], ADDRESSES[name], shift)) for shift in range(8)}) > 1
    assert len({str(ask(processes[0], CHANCES["random"], shift)) for shift in range(8)}) == 1


def test_a_seed_decides_random_numbers(processes):
    source = "import os, random\ndef f(): return [os.urandom(8), random.random(), random.Random().random()]"
    found = []
    for seed in ("0", "1"):
        job = {"source": source, "function": "f", "seed": seed, "shift": 0}
        with processes[0].open_job("calls", job, LIMITS) as opened:
            opened.receive()
            opened.send({"args": [], "kwargs": {"d": []}})
            found.append(opened.receive()["value"])
    assert all(left != right for left, right in zip(*found, strict=True))


def test_a_clock_advances_so_that_who_waits_for_it_does_not_wait_for_ever(processes):
    source = "import time\ndef f():\n  end = time.time() + 2\n  while time.time() < end: pass\n  return 1"
    assert ask(processes[0], source) == {"value": 1}


def test_memory_for_threads_does_not_depend_on_their_timing(processes):
    """Whether threads met in the allocator decided whether a program with 512 MiB was told that memory is full."""
    source = "from concurrent.futures import ThreadPoolExecutor\ndef f():\n  with ThreadPoolExecutor(16) as pool:\n"
    source += "    return sum(pool.map(lambda n: len([n] * 10000) + 0 * sum(range(20000)), range(100)))"
    for process in processes:
        assert [ask(process, source) for _ in range(3)] == [{"value": 1_000_000}] * 3


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_job_holds_only_its_own_descriptors_if_its_caller_has_many(namespaces):
    """A job that holds the control socket could forge the report of how it ended, and break the next job."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(400)]
    process = SandboxProcess(PROGRAMS, namespaces=namespaces)
    try:
        source = "import errno, os\ndef f():\n  found = []\n  for n in range(1024):\n    try: os.lseek(n, 0, 1)\n"
        source += "    except OSError as error:\n      if error.errno == errno.EBADF: continue\n    found.append(n)\n"
        source += "  return found"
        assert ask(process, source) == {"value": [0, 1, 2, 3]}
        forge = 'import os, struct\nbody = b\'{"code":0,"cpu_s":0.0,"peak_bytes":1,"late":false}\'\ndef f():\n'
        forge += "  for n in range(4, 1024):\n    try: os.write(n, struct.pack('<I', len(body)) + body)\n"
        forge += "    except OSError: pass\n  return 0"
        assert ask(process, forge) == {"value": 0}
        assert ask(process, "def f(): return 5") == {"value": 5}
    finally:
        process.close()
        for descriptor in held:
            os.close(descriptor)


def test_a_fork_server_whose_jobs_would_inherit_a_descriptor_refuses_to_serve(monkeypatch):
    monkeypatch.setattr(pool, "_BOOT", f"import os; os.dup2(0, 310)\n{pool._BOOT}")
    with pytest.raises(ConfigError, match="isolation test failed"):
        SandboxProcess(PROGRAMS).start()
