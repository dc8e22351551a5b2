"""The privileges that a process drops, tested one at a time."""

import os
import socket
import subprocess
import sys

import pytest

from shoal.sandbox.seccomp import COMPUTE, FILES, READ

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of it")

START = """
import os, resource, socket, sys
from shoal.sandbox import isolate, linux
from shoal.sandbox.isolate import PARSE_FILE, Isolation, SandboxLimits
from shoal.sandbox.seccomp import READ, build_filter

LIMITS = SandboxLimits(cpu_s=10, wall_s=10.0, memory_bytes=1 << 26)

def limit(limits=LIMITS):
    isolate.isolate_job(Isolation(PARSE_FILE, linux.count_memory()), limits)

def filter_calls():
    try:
        linux.refuse_privileges()
        linux.load_filter(build_filter(READ))
    except (OSError, TypeError):
        return False
    return True

def close_network():
    for flags in (linux.NEW_NETWORK, linux.NEW_USER | linux.NEW_NETWORK):
        try:
            linux.unshare(flags)
        except OSError:
            continue
        return True
    return False

def attempt(work):
    try:
        work()
    except (OSError, MemoryError, ValueError) as error:
        return type(error).__name__
    return "done"
"""


def run(script: str) -> str:
    """What a process prints."""
    command = [sys.executable, "-c", START + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


LIMIT = "limit()\n"


@pytest.mark.parametrize(
    "work",
    ["lambda: bytearray(1 << 27)", "lambda: os.open('/', os.O_RDONLY)", "lambda: socket.socket()"],
)
def test_limits_alone_refuse_memory_and_descriptors(work):
    assert run(f"print(attempt({work}))") == "done"
    assert run(f"{LIMIT}print(attempt({work}))") in ("MemoryError", "OSError")


def test_memory_within_the_limit_is_there():
    assert run(f"{LIMIT}print(attempt(lambda: bytearray(1 << 25)))") == "done"


def test_nothing_can_be_written_to_an_open_file(tmp_path):
    script = f"""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = os.open({str(tmp_path / "a")!r}, os.O_WRONLY | os.O_CREAT)
{LIMIT}print(attempt(lambda: os.write(file, b"x")))
"""
    assert run(script) == "OSError"


def test_limits_cannot_be_raised_again():
    script = f"linux.drop_root()\n{LIMIT}print(attempt(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))))"
    assert run(script) == "ValueError"


def test_time_is_limited():
    script = "limit(SandboxLimits(cpu_s=1, wall_s=10.0, memory_bytes=1 << 26))\nwhile True: pass"
    command = [sys.executable, "-c", START + script]
    assert subprocess.run(command, check=False, timeout=60).returncode == -24  # SIGXCPU


@pytest.mark.parametrize(
    "work",
    [
        "lambda: os.open('/', os.O_RDONLY)",
        "lambda: socket.socket()",
        "lambda: os.fork()",
        "lambda: os.kill(os.getppid(), 0)",
        "lambda: os.listdir('/')",
        "lambda: os.pipe()",
        "lambda: os.dup(0)",
        "lambda: os.mkdir('/tmp/never')",
    ],
)
def test_the_filter_alone_refuses_all_but_reading(work):
    if run("print(filter_calls())") != "True":
        pytest.skip("filters are not permitted here")
    script = f"filter_calls()\nprint(attempt({work}), flush=True)\nos._exit(0)"
    assert run(script) == "PermissionError"


def test_the_filter_leaves_what_reading_needs():
    if run("print(filter_calls())") != "True":
        pytest.skip("filters are not permitted here")
    script = """
file = os.open(sys.executable, os.O_RDONLY)
filter_calls()
print(len(os.pread(file, 100, 0)), len(bytearray(1 << 24)), len(os.urandom(4)), flush=True)
os._exit(0)
"""
    assert run(script) == "100 16777216 4"


@pytest.mark.parametrize(("asked_mb", "found"), [(100, "done"), (160, "MemoryError")])
def test_a_trial_takes_all_the_memory_that_a_file_may_take(asked_mb, found):
    script = f"""
from shoal.submission import parse
parse.warm_up()
channel = os.open(os.devnull, os.O_WRONLY)
limit(SandboxLimits(cpu_s=10, wall_s=10.0, memory_bytes=100 << 20))
print(attempt(lambda: parse.run_trial(channel, dict(memory_bytes={asked_mb} << 20))))
"""
    assert run(script) == found


def test_a_fork_server_is_killed_first_when_memory_runs_out():
    script = "linux.prefer_oom_kill()\nprint(open('/proc/self/oom_score_adj').read())"
    assert run(script) == "1000"


@pytest.mark.parametrize("guard", ["calls", "limits", "network"])
def test_each_guard_alone_keeps_a_process_from_connecting_to_this_machine(guard):
    steps = {
        "calls": "filter_calls()",
        "limits": "limit() is None",
        "network": "close_network()",
    }
    script = """
for is_guarded in (False, True):
    if is_guarded and not ({step}):
        print("not permitted", flush=True)
        os._exit(0)
    print(attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5)), flush=True)
os._exit(0)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free, guarded = run(script.format(step=steps[guard], port=server.getsockname()[1])).split("\n")
    if guarded == "not permitted":
        pytest.skip(f"{guard} is not permitted here")
    assert (free, guarded) in (("done", "PermissionError"), ("done", "OSError"))


def test_the_network_is_left():
    script = """
if not close_network():
    print("not permitted")
else:
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=5)
    except OSError as error:
        print(error.errno)
"""
    found = run(script)
    if found == "not permitted":
        pytest.skip("namespaces are not permitted here")
    assert found == "101"  # ENETUNREACH, where a closed port of a network would answer ECONNREFUSED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stop being root")
def test_root_becomes_nobody_for_good():
    script = """
os.setgroups([1, 2])
print(linux.drop_root(), os.getresuid(), os.getresgid(), os.getgroups(), attempt(lambda: os.setuid(0)))
"""
    nobody = "(65534, 65534, 65534)"
    assert run(script) == f"None {nobody} {nobody} [] PermissionError"


def test_a_child_whose_parent_is_gone_ends_at_once():
    command = [sys.executable, "-c", START + "linux.die_with_parent(1 << 22)\nprint('alive')"]
    result = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, b"")


def test_calls_have_numbers_of_their_own():
    assert READ.keys() < COMPUTE.keys() < FILES.keys()
    for calls in (READ, COMPUTE, FILES):
        for column in (0, 1):
            numbers = [pair[column] for pair in calls.values() if pair[column] is not None]
            assert len(set(numbers)) == len(numbers)
