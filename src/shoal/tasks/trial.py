"""A few tasks of a generator whose options a stranger chose, made in a process that can be ended.

    python -m shoal.tasks.trial    {"dataset", "options"} from standard input; a sentence to standard output if it fails

Generators of reasoning-gym take sizes and search until something fits: some options make one task take gigabytes, or
never end. A recipe names such options, so they are tried here before the process that read it makes a task of them:
`NUM_TASKS` tasks within limits of CPU time, memory and length. What a later task takes is thereby likely, not bounded:
options that are dear for one seed in a thousand pass, and cost who works on that run its time.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping

from shoal.config import Option
from shoal.errors import ConfigError

NUM_TASKS = 8
CPU_S = 10
"""for all of them, with the imports"""
WALL_S = 60.0
MEMORY_BYTES = 2 << 30
_MAX_SENTENCE = 200


def try_options(dataset: str, options: Mapping[str, Option]) -> None:
    """ConfigError for options with which tasks cannot be made, or not within the limits."""
    told = _run_trial(json.dumps({"dataset": dataset, "options": dict(options)}))
    if told is None:
        return
    limits = f"{NUM_TASKS} tasks took more than {CPU_S} s of CPU time or {MEMORY_BYTES >> 30} GiB"
    raise ConfigError(told or f"tasks.options: gym_{dataset} cannot be made with them ({limits})")


def _run_trial(job: str) -> str | None:
    """None if all went well, or else what is to be said about it; nothing, where a limit ended the process."""
    command = [sys.executable, "-m", "shoal.tasks.trial"]
    try:
        done = subprocess.run(
            command, input=job, capture_output=True, text=True, errors="replace", timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode == 0:
        return None
    return done.stdout.strip()[:_MAX_SENTENCE] if done.returncode == 1 else ""


def main() -> int:
    """Make the tasks; 0 if they could be made, 1 with a sentence if the options are wrong."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    job = json.loads(sys.stdin.read())
    import random

    from shoal.tasks.gym import GymFamily

    try:
        family = GymFamily(job["dataset"], job["options"])
        for seed in range(NUM_TASKS):
            family.make_task(random.Random(seed))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
