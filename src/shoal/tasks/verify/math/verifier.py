"""Math: 1 if the one answer of a completion equals `info["answer"]`, else 0.

Reading and exact comparison are done here: they are bounded by the length of the answer, and no text can make them
compute. Expressions that must be worked out are compared in a box, a fresh process for each, with limits that no answer
of the grammar meets; where one does, the score is not firm and the next answer finds a new process.
"""

import re
from importlib.metadata import version

from shoal.box.walls import Limits
from shoal.box.warden import BoxError, EndedError, Pool
from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS, quote_text
from shoal.tasks.verify.base import Cheap, Info, give_up, own_fault
from shoal.tasks.verify.math.equal import equal_answers, read_answer, same_text
from shoal.tasks.verify.math.extract import MAX_ANSWER_CHARS, Refusal, find_answer
from shoal.tasks.verify.math.parse import Tree, list_symbols

LIMITS = Limits(cpu_s=4, wall_s=20.0, memory_bytes=256 << 20)
_WORKS = "shoal.box.algebra"
_PERCENT = re.compile(r"%|\bpercent", re.IGNORECASE)
_KEY = "answer"


class _LimitError(Exception):
    """A comparison that a box did not finish."""


class MathVerifier(Cheap):
    """Equality of final answers; it holds a pool of boxes once it has needed one."""

    name = "math"
    version = 2

    def __init__(self, *, size: int = 1, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._pool = Pool(_WORKS, size)

    @property
    def stamp(self) -> str:
        return f"{self.name}/{self.version} mpmath-{version('mpmath')}"

    def check_info(self, info: Info) -> None:
        gold = info.get(_KEY)
        if not isinstance(gold, str) or not gold.strip() or len(gold) > MAX_ANSWER_CHARS:
            raise ConfigError(f"info of a math task: needs {_KEY}, a text of 1 to {MAX_ANSWER_CHARS} characters")
        reading = read_answer(gold)
        if reading.number is None and reading.tree is not None and reading.tree[0] != "symbol":
            self._start_box()  # who cannot work it out would give 0 to right answers, and be held to it

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        if len(completion) > MAX_COMPLETION_CHARS:
            return Score(0.0, "too long")
        answer = find_answer(completion, same_text)
        if isinstance(answer, Refusal):
            return Score(0.0, answer.reason)
        about_percent = _PERCENT.search(prompt) is not None
        try:
            is_right = equal_answers(
                read_answer(answer), read_answer(info[_KEY]), self._judge_trees, about_percent=about_percent
            )
        except _LimitError as error:
            return give_up(str(error))
        except (BoxError, ConfigError) as error:  # a machine without boxes can still compare numbers
            return own_fault(str(error))
        return Score(1.0, "correct") if is_right else Score(0.0, f"wrong answer: {quote_text(answer)}")

    def close(self) -> None:
        self._pool.close()

    def _start_box(self) -> None:
        try:
            with self._pool.borrow(100 * self.limits.wall_s) as warden:
                warden.start()
        except BoxError as error:
            raise ConfigError(f"answers that must be worked out cannot be compared here: {error}") from error

    def _judge_trees(self, left: Tree, right: Tree) -> bool:
        job = {"left": left, "right": right, "symbols": sorted(list_symbols(right))}
        with (
            self._pool.borrow(100 * self.limits.wall_s) as warden,
            warden.open_cell("compare", job, self.limits) as cell,
        ):
            try:
                answer = cell.receive()
            except EndedError as error:
                raise _LimitError(f"a comparison that does not end: {error}") from None
        return bool(answer.get("equal", False))
