"""Math: 1 if the one answer of a completion equals `info["answer"]`, else 0.

Parsing and exact comparison are done here: their cost is bounded by the length of the answer, and no text can trigger a
computation. Expressions that must be evaluated are compared in a sandbox, a fresh process for each, with limits that no
answer of the grammar should hit; if one does, the score is not firm and the next answer gets a new process.
"""

from functools import partial
from importlib.metadata import version

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.sandbox.isolate import SandboxLimits
from shoal.sandbox.pool import JobEndedError, SandboxError, SandboxPool
from shoal.tasks.base import quote_text
from shoal.tasks.verify.base import Info, Verifier, give_up, own_fault
from shoal.tasks.verify.math.equal import equal_answers, read_answer, same_text
from shoal.tasks.verify.math.extract import MAX_ANSWER_CHARS, NoAnswerError, find_answer
from shoal.tasks.verify.math.form import read_question
from shoal.tasks.verify.math.parse import Tree, list_symbols

LIMITS = SandboxLimits(cpu_s=4, wall_s=20.0, memory_bytes=256 << 20)
_PROGRAMS = "shoal.sandbox.programs.algebra"
_KEY = "answer"


class _LimitError(Exception):
    """A comparison that a sandbox did not finish."""


class MathVerifier(Verifier):
    """Equality of final answers; starts a pool of sandboxes when it first needs one."""

    name = "math"
    version = 4

    def __init__(self, *, size: int = 1, limits: SandboxLimits = LIMITS) -> None:
        self.limits = limits
        self._pool = SandboxPool(_PROGRAMS, size)

    @property
    def stamp(self) -> str:
        return f"{self.name}/{self.version} mpmath-{version('mpmath')}"

    def check_info(self, info: Info) -> None:
        gold = info.get(_KEY)
        if not isinstance(gold, str) or not gold.strip() or len(gold) > MAX_ANSWER_CHARS:
            raise ConfigError(f"info of a math task: needs {_KEY}, a text of 1 to {MAX_ANSWER_CHARS} characters")
        reading = read_answer(gold)
        if reading.number is None and reading.tree is not None and reading.tree[0] != "symbol":
            # A machine that cannot evaluate it would give 0 to right answers, and be bound by that score.
            try:
                with self._pool.borrow(100 * self.limits.wall_s) as process:
                    process.start()
            except SandboxError as error:
                raise ConfigError(f"answers that must be evaluated cannot be compared here: {error}") from error

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        question = read_question(prompt)
        try:
            answer = find_answer(completion, partial(same_text, nouns=question.nouns))
            mine, right = read_answer(answer, question.nouns), read_answer(info[_KEY], question.nouns)
            is_right = equal_answers(mine, right, question, self._compare_trees)
        except NoAnswerError as error:
            return Score(0.0, str(error))
        except _LimitError as error:
            return give_up(str(error))
        except (SandboxError, ConfigError) as error:  # a machine without sandboxes can still compare numbers
            return own_fault(str(error))
        return Score(1.0, "correct") if is_right else Score(0.0, f"wrong answer: {quote_text(answer)}")

    def close(self) -> None:
        self._pool.close()

    def _compare_trees(self, left: Tree, right: Tree) -> bool:
        given = {"left": left, "right": right, "symbols": sorted(list_symbols(right))}
        with (
            self._pool.borrow(100 * self.limits.wall_s) as process,
            process.open_job("compare", given, self.limits) as job,
        ):
            try:
                answer = job.receive()
            except JobEndedError as error:
                raise _LimitError(f"a comparison that does not end: {error}") from None
        return bool(answer.get("equal", False))
