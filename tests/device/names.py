"""The checks of `program.py`, by name; apart from it, because importing that registers the device."""

NAMES = (
    "refusals",
    "learner",
    "learner gspo sequence",
    "learner qwen3",
    "learner chunked",
    "sft",
    "evaluation",
    "calibration",
    "replay",
    "replay greedy",
    "engine",
    "engine qwen3",
)
