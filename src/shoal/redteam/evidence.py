"""What an attack tried and what it was answered, written down as it comes: the matrix decides by this and the ledger.

A trial is something that must be refused. Its code is taken from the answer itself: no script says of itself that it
was refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.asking import RefusedError, read_refusal
from shoal.swarm.link import Answer

TAKEN = ""
"""the code of what was not refused"""
MAX_NOTES = 1000


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that must be refused, and its answer."""

    what: str
    wanted: tuple[str, ...]
    """codes by which it is rightly refused"""
    code: str
    """of the answer; empty if it was taken"""

    @property
    def is_refused(self) -> bool:
        """Whether it was refused, and for one of the right reasons."""
        return self.code in self.wanted


@dataclass(slots=True)
class Evidence:
    """All that is known of one attack beside the ledger."""

    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[Trial]:
        """Trials that were taken, or refused for another reason."""
        return [trial for trial in self.trials if not trial.is_refused]

    def note(self, text: str) -> None:
        """Write down what happened."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + amount

    def record(self, what: str, wanted: tuple[str, ...], answer: Answer) -> None:
        """Write down what a request was answered."""
        self.record_code(what, wanted, find_code(answer))

    def record_code(self, what: str, wanted: tuple[str, ...], code: str) -> None:
        """The same for an answer whose code was read."""
        assert wanted, "a trial is something that must be refused"
        self.trials.append(Trial(what, wanted, code))

    @contextmanager
    def refused(self, *wanted: str, what: str, moot: tuple[str, ...] = ()) -> Iterator[None]:
        """Write down what becomes of a call that must be refused with one of these codes.

        Refused with one of `moot`, it proves nothing: the rest of the run went on meanwhile.
        """
        code = TAKEN
        try:
            yield
        except RefusedError as error:
            code = error.refusal.code
        if code in moot:
            self.note(f"{what}: came too late to be tried ({code})")
        else:
            self.record_code(what, wanted, code)

    def dump(self) -> dict[str, Any]:
        """For a report."""
        trials = [{"what": trial.what, "wanted": list(trial.wanted), "code": trial.code} for trial in self.trials]
        return {"trials": trials, "notes": self.notes, "figures": self.figures}


def find_code(answer: Answer) -> str:
    """The code of a refusal; empty for an answer that is none. No answer at all has the code `closed`."""
    if answer.status == 0:
        return "closed"
    return TAKEN if answer.status == 200 else read_refusal(answer).code
