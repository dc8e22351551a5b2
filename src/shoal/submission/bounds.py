"""How large a submission may be, and what one is that is not read."""

from dataclasses import dataclass

PROOF_BYTES = 258
"""of one proof, at most"""
PROOF_TOKENS = 32
"""that one proof covers"""
TASK_BYTES = 128
FINISH_BYTES = 8
REASON_BYTES = 256
MAX_NUMBER = 1 << 53
"""of indices and versions; as in messages"""


NO_ROOM = "it needs more memory than a file of its kind may"
"""what is said of a file that does not fit into its reader"""


class FormError(ValueError):
    """A file that is no submission within its bounds: one sentence that says why."""


class CrashError(FormError):
    """A file that ended its reader each time it was read, where a file of our own is read right afterwards."""

    def __init__(self, num_deaths: int, reason: str) -> None:
        super().__init__(f"it ends its reader each time: {reason}")
        self.num_deaths, self.reason = num_deaths, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one file may hold. All of it follows from the run and the lease, nothing from the file."""

    max_rollouts: int
    group_size: int
    """rollouts of each group, exactly"""
    max_tokens: int
    """of one completion"""
    vocab_size: int
    max_prompt_tokens: int = 4096
    file_bytes: int = 64 << 20
    decoded_bytes: int = 1 << 29
    """of all columns together, once they are decoded"""

    def __post_init__(self) -> None:
        assert min(self.max_rollouts, self.group_size, self.max_tokens, self.vocab_size) > 0, "bounds are positive"
        assert min(self.max_prompt_tokens, self.file_bytes, self.decoded_bytes) > 0, "bounds are positive"

    @property
    def max_proofs(self) -> int:
        """Of one rollout."""
        return -(-self.max_tokens // PROOF_TOKENS)
