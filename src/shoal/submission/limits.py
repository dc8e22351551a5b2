"""Size limits of a submission, and the errors for a file that is not a valid one."""

from dataclasses import astuple, dataclass

PROOF_BYTES = 258
"""maximum size of one proof"""
PROOF_TOKENS = 32
"""tokens covered by one proof"""
TASK_BYTES = 128
FINISH_BYTES = 8
REASON_BYTES = 256
MAX_NUMBER = 1 << 53
"""maximum of indices and versions; the same as in messages"""
MAX_FOOTER_BYTES = 1 << 14
"""an honest footer has 2 KB"""
PAGE_BYTES = 1 << 10
"""headers of a column's pages, beyond an eighth of its data"""
NO_ROOM = "it needs more memory than a file of its kind may"
"""the error of a file that exceeds the memory limit of its parser"""


class FormError(ValueError):
    """The file is not a submission within its limits; the message states the reason."""


class ParserCrashError(FormError):
    """The file crashes its parser every time, while a known good file is parsed right afterwards."""

    def __init__(self, num_deaths: int, reason: str) -> None:
        super().__init__(f"it ends its parser each time: {reason}")
        self.num_deaths, self.reason = num_deaths, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionLimits:
    """Limits of one file. They all follow from the run and the lease, none from the file."""

    max_rollouts: int
    group_size: int
    """exact number of rollouts per group"""
    max_tokens: int
    """per completion"""
    vocab_size: int
    max_prompt_tokens: int = 4096
    file_bytes: int = 64 << 20
    decoded_bytes: int = 1 << 29
    """all columns together, after decoding"""

    def __post_init__(self) -> None:
        assert min(astuple(self)) > 0, "limits are positive"

    @property
    def max_proofs(self) -> int:
        """Maximum number of proofs per rollout."""
        return -(-self.max_tokens // PROOF_TOKENS)
