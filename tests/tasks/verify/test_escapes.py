"""Code that does not solve its task but tries to be paid, to escape, or to stay: all score 0, and nothing remains."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.sandbox import pool
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.pool import SandboxError, SandboxProcess
from shoal.tasks.verify.base import is_firm
from shoal.tasks.verify.code.verifier import CodeVerifier

LIMITS = SandboxLimits(cpu_s=60, wall_s=60.0, memory_bytes=256 << 20)
SECRET = 7_919_113
"""the expected value, which candidates do not get"""
INFO = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": SECRET}]}
SCRIPT = {"test_cases": [{"type": "stdin_stdout", "input": "1\n", "output": str(SECRET)}]}

ESCAPES = {
    "host files": "def f(x): return open('/etc/passwd').read()",
    "host files from the root": "import os\ndef f(x): return [n for n in os.listdir('/') if n != 'private'][0]",
    "parent folders": "def f(x): return open('../../../../etc/hostname').read()",
    "own program": "import sys\ndef f(x): return open(sys.executable, 'rb').read(4)",
    "sockets": "import socket\ndef f(x): return socket.socket().fileno()",
    "local sockets": "import socket\ndef f(x): return socket.socketpair()[0].fileno()",
    "resolver": "import socket\ndef f(x): return socket.gethostbyname('localhost')",
    "fork": "import os\ndef f(x): return os.fork()",
    "fork bomb": "import os\ndef f(x):\n  while True:\n    try: os.fork()\n    except OSError: raise",
    "thread bomb": "import threading, time\n"
    "def f(x):\n  while True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "memory bomb": "def f(x):\n  a = []\n  while True: a.append(bytearray(1 << 20))",
    "one big block": "def f(x): return len(bytearray(1 << 34))",
    "big integer": "def f(x): return 10 ** 10 ** 8",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x])",
    "deep syntax": "def f(x): return " + "(" * 5000 + "1" + ")" * 5000,
    "exit 0": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "exit at import": "import os\nos._exit(0)\ndef f(x): return 1",
    "equal to all": "class E:\n  def __eq__(s, o): return True\n  def __ne__(s, o): return False\n"
    "  def __hash__(s): return 0\ndef f(x): return E()",
    "an int equal to all": "class E(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\n"
    "def f(x): return E(1)",
    "a text equal to all": "class E(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\n"
    "def f(x): return E('1')",
    "patched builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = lambda *a: True\n"
    "builtins.len = lambda a: 0\ndef f(x): return 1",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 1",
    "forged frames": "import os, struct\nbody = b'{\"passed\": true}'\n"
    "os.write(3, struct.pack('<I', len(body)) + body)\ndef f(x): return 1",
    "forged flood": "import os\ndef f(x):\n  while True: os.write(3, b'\\x01\\x00\\x00\\x001')",
    "huge frame": "import os\ndef f(x): os.write(3, b'\\xff\\xff\\xff\\xff')",
    "not a frame": "import os\ndef f(x): os.write(3, b'\\x05\\x00\\x00\\x00[[[[[')",
    "importing the checker": "import shoal.tasks.verify.code.compare as c\nc.match_values = lambda *a: True\n"
    "def f(x): return 1",
    "frames": "import sys\ndef f(x):\n  frame, seen = sys._getframe(), []\n"
    "  while frame: seen += [*frame.f_locals.values(), *frame.f_globals.values()]; frame = frame.f_back\n"
    f"  return next(v for v in seen if v == {SECRET - 1} + 1)",
    "all objects": f"import gc\ndef f(x): return next(v for v in gc.get_objects() if v == {SECRET - 1} + 1 or "
    f"isinstance(v, (list, tuple)) and {SECRET - 1} + 1 in v)",
    "proc": "def f(x): return open('/proc/self/status').read()",
    "proc of the parent": "def f(x): return open('/proc/1/cmdline').read()",
    "devices": "def f(x): return open('/dev/mem', 'rb').read(1)",
    "ptrace": "import ctypes\ndef f(x): return ctypes.CDLL(None).ptrace(16, 1, 0, 0)",
    "exec": "import os\ndef f(x): os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "shell": "import os\ndef f(x): return os.system('true')",
    "subprocess": "import subprocess\ndef f(x): return subprocess.run(['true']).returncode",
    "signals to others": "import os, signal\ndef f(x): os.kill(-1, signal.SIGKILL)",
    "symlinks": "import os\ndef f(x):\n  os.symlink('/etc/passwd', 'a')\n  return open('a').read()",
    "hard links": "import os\ndef f(x):\n  os.link('/etc/passwd', 'a')\n  return open('a').read()",
    "mount": "import os\ndef f(x): return os.unshare(0x10000000)",
    "raised limits": "import resource\ndef f(x): resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "big file": "def f(x):\n  with open('a', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
    "many files": "def f(x):\n  for n in range(10**6): open(str(n), 'w').close()",
    "write outside": "def f(x): open('/a', 'w').write('x')",
    "no function": "g = 1",
    "not Python": "this is no program",
    "echo of the test": "def f(x): return x",
    "a generator": "def f(x):\n  while True: yield 1",
    "self-containing": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "deep value": "def f(x):\n  a = []\n  for _ in range(10000): a = [a]\n  return a",
    "wide value": "def f(x): return list(range(10**6))",
    "not a number": "def f(x): return float('nan')",
    "infinite": "def f(x): return float('inf')",
    "true": "def f(x): return True",
}
NO_WALLS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from shoal.sandbox import isolate as walls, linux as kernel, seccomp as calls\n"
    "def refuse(*_): raise PermissionError(1, 'not permitted')\n"
    "kernel.unshare = refuse; walls.build_filter = lambda _: None\n"
)
"""as on a machine that permits neither namespaces nor filters"""
SLOW = {
    "endless loop": "def f(x):\n  while True: pass",
    "loop that catches all": "def f(x):\n  while True:\n    try:\n      while True: pass\n"
    "    except BaseException: pass",
    "ignored signals": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\ndef f(x):\n  while True: pass",
    "loop at import": "while True: pass",
}
SLEEPY = {
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "closed channel": "import os, time\ndef f(x):\n  os.close(3)\n  time.sleep(1000)",
}
PROGRAMS = {
    "success marker": "print('all tests passed')\nprint('OK')\nprint('{\"passed\": true}')",
    "endless output": "while True: print('7' * 1000)",
    "endless output without lines": "import os\nwhile True: os.write(1, b'7' * 65536)",
    "no output": "pass",
    "crash": "raise SystemExit('no')",
    "exit code": f"print({SECRET - 1} + 1)\nraise SystemExit(1)",
    "crash after the answer": f"print({SECRET - 1} + 1)\n1 / 0",
    "two answers": f"print({SECRET - 1} + 1)\nprint(1)",
    "other digits": "print('".join(("", "".join(chr(0x660 + int(d)) for d in str(SECRET)), "")) + "')",
    "surrogates": "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')",
}


@pytest.mark.parametrize("walls", ["boxes", "bare_boxes"])
@pytest.mark.parametrize("source", [*ESCAPES.values(), *PROGRAMS.values()], ids=[*ESCAPES, *PROGRAMS])
def test_an_escape_scores_nothing(request, walls, source):
    info = SCRIPT if source in PROGRAMS.values() else INFO
    assert request.getfixturevalue(walls).score(info, "", f"```python\n{source}\n```").value == 0.0


@pytest.mark.parametrize("source", [*SLOW.values(), SLEEPY["closed channel"]], ids=[*SLOW, "closed channel"])
def test_code_that_does_not_end_is_stopped_and_inconclusive(boxes, source):
    score = boxes.score(INFO, "", f"```python\n{source}\n```")
    assert score.value == 0.0
    assert not is_firm(score)


def test_a_sleeper_is_ended_at_the_wall_clock_limit(boxes, monkeypatch):
    monkeypatch.setattr(boxes, "limits", SandboxLimits(cpu_s=1, wall_s=1.0, memory_bytes=256 << 20))
    start = time.monotonic()
    score = boxes.score(INFO, "", f"```python\n{SLEEPY['sleep']}\n```")
    assert score.value == 0.0 and not is_firm(score)
    assert time.monotonic() - start < 10


def test_the_right_answer_still_scores_after_all_that(boxes):
    assert boxes.score(INFO, "", f"```python\ndef f(x): return {SECRET}\n```").value == 1.0
    assert boxes.score(SCRIPT, "", f"```python\nprint({SECRET})\n```").value == 1.0


def test_nothing_of_one_candidate_is_left_for_the_next(boxes):
    write = "def f(x):\n  open('note', 'w').write('x')\n  import math\n  math.note = 1\n  return 0"
    look = f"import math, os\ndef f(x): return {SECRET} if not os.listdir('.') and not hasattr(math, 'note') else 0"
    assert boxes.score(INFO, "", f"```python\n{write}\n```").value == 0.0
    assert boxes.score(INFO, "", f"```python\n{look}\n```").value == 1.0


def test_threads_left_behind_end_with_their_candidate(boxes):
    source = (
        "import threading\ndef spin():\n  while True: pass\n"
        f"def f(x):\n  threading.Thread(target=spin, daemon=True).start()\n  return {SECRET}"
    )
    boxes.score(INFO, "", f"```python\n{source}\n```")
    before = count_cpu()
    time.sleep(0.5)
    assert count_cpu() - before < 0.2


def test_candidates_leave_no_process_behind(boxes):
    before = count_children()
    for _ in range(20):
        boxes.score(INFO, "", "```python\nimport os\ndef f(x): return os.fork()\n```")
    assert count_children() == before


def test_a_zygote_that_is_killed_takes_its_cells_along_and_is_replaced():
    keeper = SandboxProcess("shoal.sandbox.programs.code")
    job = {"source": SLOW["loop at import"], "function": "f"}
    with pytest.raises(SandboxError), keeper.open_job("calls", job, LIMITS):
        kill_zygote(keeper)
    with keeper.open_job(
        "calls", {"source": "def f(): pass", "function": "f", "seed": "0", "shift": 0}, LIMITS
    ) as cell:
        assert cell.receive() == {"ready": True}
    keeper.kill()


def test_boxes_end_with_the_process_that_asked_for_them():
    script = (
        "import sys\nfrom shoal.sandbox.pool import SandboxProcess\n"
        "from shoal.sandbox.isolate import SandboxLimits\n"
        "process = SandboxProcess('shoal.sandbox.programs.code')\n"
        "limits = SandboxLimits(cpu_s=60, wall_s=60.0, memory_bytes=1 << 28)\n"
        "with process.open_job('calls', {'source': 'import time; time.sleep(60)', 'function': 'f'}, limits):\n"
        "    print('open', flush=True)\n    sys.stdin.read()\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert asker.stdout.readline() == b"open\n"
    boxed = list_session(asker.pid)
    assert len(boxed) >= 2
    asker.kill()
    asker.communicate(timeout=10)
    await_end(boxed)


def test_a_machine_without_walls_runs_nothing(monkeypatch):
    monkeypatch.setattr(pool, "_BOOT", NO_WALLS + pool._BOOT)
    with pytest.raises(ConfigError, match="cannot run untrusted code safely"):
        CodeVerifier(size=1)


def kill_zygote(keeper: SandboxProcess) -> None:
    held = list_session(keeper._process.pid)
    os.killpg(keeper._process.pid, signal.SIGKILL)
    keeper._process.wait(5)
    await_end(held)


def await_end(pids: list[int]) -> None:
    assert len(pids) >= 1
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "something outlived its parent process"
        time.sleep(0.02)


def count_children() -> int:
    return len(list_session(os.getpid()))


def list_session(parent: int) -> list[int]:
    """Processes that descend from this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, edge = [], [parent]
    while edge:
        edge = [child for child, above in parents.items() if above in edge]
        found += edge
    return found


def count_cpu() -> float:
    """CPU seconds of our live descendants."""
    total = 0
    for child in list_session(os.getpid()):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
