"""One attempt by a script: what it did that must be refused, and what it was answered."""

import json
from pathlib import Path

from shoal.files import write_atomic
from shoal.redteam.budget import Budget
from shoal.redteam.camp import open_camp, run_script

EVIDENCE = "evidence.json"


class Script:
    """A scripted attack with a camp of its own."""

    def __init__(self, attack: str, url: str, folder: Path, *, seconds: float) -> None:
        self._attack, self._url, self._folder = attack, url, folder
        self._budget = Budget(seconds=seconds)
        self.owners: list[str] = []
        self.num_trials, self.taken = 0, list[str]()

    async def run(self) -> tuple[str, str]:
        """Why it ended, in a word and a sentence."""
        async with open_camp(self._url, self._folder, budget=self._budget) as camp:
            self.owners = camp.owners  # a list that grows: of an attempt that fails it has those that acted
            try:
                await run_script(camp, self._attack)
            finally:
                write_atomic(self._folder / EVIDENCE, json.dumps(camp.evidence.dump(), indent=1).encode())
                failures = camp.evidence.failures
                self.num_trials = len(camp.evidence.trials)
                self.taken = [f"{trial.what}: {trial.code or 'taken'}" for trial in failures]
        return "done", f"{self.num_trials} trials, {len(self.taken)} not refused as they must be"
