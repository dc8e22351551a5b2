"""Candidates per second that the code verifier scores, compared with a plain `subprocess.run` without protection.

Both run the same candidate with the same tests and the same concurrency. The plain one starts an interpreter for each
candidate and trusts its exit code. Rounds alternate, and the median of the rounds counts. CPU time is that of the whole
process tree without start-up, and is more reliable than rates on a shared machine.

    python bench/sandbox.py [--quick] [--json]
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

from common import finish, parse_flags
from shoal.tasks.verify.base import Attempt
from shoal.tasks.verify.code.verifier import CodeVerifier

_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
SIZE = 2
"""concurrent boxes, or plain processes"""
SOURCE = (
    "def near(numbers, limit):\n"
    "    pairs = [(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]\n"
    "    return any(abs(a - b) < limit for a, b in pairs)\n"
)
CASES = (([1.0, 2.0, 3.9, 4.0], 0.3, True), ([1.0, 2.0, 5.9, 4.0], 0.8, False), ([1.1, 2.2, 3.1], 1.0, True))
ASSERTS = "".join(f"assert near({numbers}, {limit}) == {right}\n" for numbers, limit, right in CASES)
PROGRAM = f"{SOURCE}numbers = list(map(float, input().split()))\nprint(near(numbers, 0.3))\n"
INFOS = {
    "calls": {
        "test_cases": [
            {"type": "function_call", "fn_name": "near", "input": [numbers, limit], "output": right}
            for numbers, limit, right in CASES
        ]
    },
    "asserts": {"test": ASSERTS, "entry_point": "near"},
    "program": {"test_cases": [{"type": "stdin_stdout", "input": "1.0 2.0 3.9 4.0\n", "output": "True\n"}]},
}


def run_plain(_: int) -> bool:
    command = [sys.executable, "-I", "-c", SOURCE + ASSERTS]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def measure_plain(count: int) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=SIZE) as threads:
        assert all(threads.map(run_plain, range(count)))
    return count / (time.perf_counter() - start)


def measure_boxes(verifier: CodeVerifier, form: str, count: int) -> float:
    source = PROGRAM if form == "program" else SOURCE
    attempts = [Attempt(INFOS[form], "", f"```python\n{source}```")] * count
    start = time.perf_counter()
    scores = verifier.score_many(attempts)
    elapsed_s = time.perf_counter() - start
    assert all(score.value == 1.0 for score in scores), scores[0]
    return count / elapsed_s


@contextmanager
def open_arms() -> Iterator[dict[str, Callable[[int], float]]]:
    """The arms to measure, by name."""
    with ExitStack() as stack:
        walled = stack.enter_context(closing(CodeVerifier(size=SIZE)))
        bare = stack.enter_context(closing(CodeVerifier(size=SIZE, namespaces=False)))
        yield {
            "plain": measure_plain,
            **{form: lambda count, form=form: measure_boxes(walled, form, count) for form in INFOS},
            "calls_bare": lambda count: measure_boxes(bare, "calls", count),
        }


def count_cpu(name: str, count: int) -> float:
    """CPU seconds of one arm from start to end, including its processes; hardly affected by other load."""
    before = sum(resource.getrusage(who)[place] for who in _WHO for place in (0, 1))
    with open_arms() as arms:
        arms[name](count)
    return sum(resource.getrusage(who)[place] for who in _WHO for place in (0, 1)) - before


def main() -> None:
    flags = parse_flags("Candidates per second in boxes and in a plain subprocess.")
    count, rounds = (40, 3) if flags.quick else (200, 7)
    with open_arms() as arms:
        for measure in arms.values():
            measure(4)
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, measure in arms.items():
                rates[name].append(measure(count))
    cpu_ms = {name: 1000 * (count_cpu(name, count + 4) - count_cpu(name, 4)) / count for name in rates}
    found = {name: statistics.median(values) for name, values in rates.items()}
    head = f"{SIZE} at a time"
    lines = [f"{head:14} {'per s':>9} {'least':>7} {'most':>7} {'ratio':>7} {'CPU ms each':>12} {'ratio':>7}"]
    for name, values in rates.items():
        speed = f"{found[name]:9.1f} {min(values):7.1f} {max(values):7.1f} {found[name] / found['plain']:7.2f}"
        lines.append(f"{name:14} {speed} {cpu_ms[name]:12.2f} {cpu_ms[name] / cpu_ms['plain']:7.2f}")
    figures = {f"{name}_per_s": value for name, value in found.items()}
    figures |= {f"{name}_cpu_ms": value for name, value in cpu_ms.items()}
    finish(flags, "\n".join(lines), figures)


if __name__ == "__main__":
    main()
