"""How many candidates a second the code verifier scores, beside a plain `subprocess.run` that protects from nothing.

Both run the same candidate with the same tests and the same number at a time; the plain one starts an interpreter for
each and believes its exit code. Rounds alternate, and the median of the rounds counts.

    python bench/sandbox.py [--quick] [--json]
"""

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

SIZE = 2
"""boxes, or plain processes, at a time"""
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
    """What is measured, by name."""
    with ExitStack() as stack:
        walled = stack.enter_context(closing(CodeVerifier(size=SIZE)))
        bare = stack.enter_context(closing(CodeVerifier(size=SIZE, namespaces=False)))
        yield {
            "plain": measure_plain,
            **{form: lambda count, form=form: measure_boxes(walled, form, count) for form in INFOS},
            "calls_bare": lambda count: measure_boxes(bare, "calls", count),
        }


def main() -> None:
    flags = parse_flags("Candidates a second in boxes, beside a plain subprocess.")
    count, rounds = (40, 3) if flags.quick else (200, 7)
    start = time.perf_counter()
    with open_arms() as arms:
        started_s = time.perf_counter() - start
        for measure in arms.values():
            measure(4)
        rates = {name: [] for name in arms}
        for _ in range(rounds):
            for name, measure in arms.items():
                rates[name].append(measure(count))
    found = {name: statistics.median(values) for name, values in rates.items()}
    lines = [
        f"{'candidates a second, ' + str(SIZE) + ' at a time':34} {'median':>8} {'least':>8} {'most':>8} {'ratio':>7}"
    ]
    for name, values in rates.items():
        spread = f"{found[name]:8.1f} {min(values):8.1f} {max(values):8.1f} {found[name] / found['plain']:7.2f}"
        lines.append(f"{name:34} {spread}")
    figures = {f"{name}_per_s": value for name, value in found.items()}
    figures |= {f"{name}_ratio": value / found["plain"] for name, value in found.items() if name != "plain"}
    finish(flags, "\n".join(lines), figures | {"start_s": started_s})


if __name__ == "__main__":
    main()
