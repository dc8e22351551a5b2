"""Learning under attack: held-out pass rates without attackers, with 30 % attackers, and with 30 % and no checks.

    python bench/poison.py [--quick] [--json] [--fresh] [--out DIR] [--seeds 0 1 2] [--arms clean checked unchecked]

All processes of `shoal run` on this machine: seven honest workers, and in two of the arms three attackers. A banned
attacker returns immediately under a new identity, with the next attack of the mix, so the pressure lasts for the whole
run. `unchecked` has the same attackers, and validators that accept everything (`shoal redteam judge --lie accept`).

Pass rates are those of the versions, evaluated after the run. Runs are interleaved over seeds. Results of finished runs
are kept in DIR: the same command resumes where it stopped.
"""

import argparse
import asyncio
import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import OUT, build_parser, finish, mean, open_plots, save_picture
from shoal.launch.layout import name_validators
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.process import Part, Process, open_log
from shoal.launch.run import make_environment
from shoal.launch.supervisor import Supervisor
from shoal.launch.view import EVALS
from shoal.protocol.messages import Standing, SubmissionState
from shoal.redteam.ledger_summary import LedgerSummary, read_ledger_summary
from shoal.train.report import read_metrics
from shoal.util.files import remove_dir, write_atomic
from swarms import evaluate_versions, hash_settings, load_swarm, lower_priority, run_swarm

ARMS = {
    "clean": "no attackers",
    "checked": "30 % attack, validation on",
    "unchecked": "30 % attack, validation off",
}
SEEDS = (0, 1, 2)
HONEST, ATTACKERS, STEPS = 7, 3, 40
MIX = ("flipped_reward", "edited_tokens", "flipped_reward", "foreign_text", "greedy", "claimed_reward")
"""attacks that do harm if there are no checks; each attacker starts with a different one and then rotates"""
SETTINGS = ("swarm.cheats=[]", "swarm.groups_per_lease=4", "checkpoint.every=10")
EVAL = ("eval.tasks=256", "eval.samples=4", "eval.k=1", "eval.every=4")
QUICK = ("eval.tasks=64", "eval.samples=2", "eval.k=1", "eval.every=4")
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a run."""

    arm: str
    seed: int
    evals: list[tuple[int, float, float]]
    """version, pass rate sampled, greedy"""
    names: int
    """number of owners that the attackers used"""
    banned: int
    bad_share: float
    """share of attackers in the accepted groups"""
    ledger: bool
    """it holds"""


Results = dict[str, list[Result]]
"""by arm, in order of seeds"""


def main() -> None:
    flags = parse_flags()
    results: Results = {arm: [] for arm in flags.arms}
    for number, seed in enumerate(flags.seeds):
        turn = number % len(flags.arms)
        for arm in [*flags.arms[turn:], *flags.arms[:turn]]:
            results[arm].append(find_result(flags, arm, seed))
    if not flags.quick:
        draw_curves(results, "redteam_learning.png")
    finish(flags, format_table(results), collect_figures(results))


def find_result(flags: argparse.Namespace, arm: str, seed: int) -> Result:
    """The outcome of a run, from its file, or by running it now."""
    honest, attackers, steps = (2, 1, 8) if flags.quick else (HONEST, ATTACKERS, STEPS)
    settings = [*SETTINGS, *(QUICK if flags.quick else EVAL), f"steps={steps}", f"swarm.workers={honest}"]
    config = load_swarm(f"poison-{arm}", seed, flags.out, settings)
    path = flags.out / f"{config.name}-{hash_settings(config)}.json"
    if path.exists() and not flags.fresh:
        return Result(**json.loads(path.read_bytes()))
    attack = PoisonAttack(0 if arm == "clean" else attackers, lies=arm == "unchecked")
    apart = name_validators(config.swarm) if attack.lies else ()
    prepared, _ = run_swarm(config, apart=apart, drive=attack.drive)
    result = read_result(prepared, arm)
    flags.out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(result)).encode())
    remove_dir(prepared.layout.root)
    return result


class PoisonAttack:
    """Attackers that return after a ban, and validators that accept everything."""

    def __init__(self, attackers: int, *, lies: bool) -> None:
        self._attackers, self.lies = attackers, lies

    async def drive(self, prepared: PreparedSwarm, supervisor: Supervisor) -> None:
        """Attack until the run ends."""
        attackers = [self._come_back(prepared, number) for number in range(self._attackers)]
        liars = name_validators(prepared.config.swarm) if self.lies else []
        await asyncio.gather(*attackers, *(self._lie(prepared, name) for name in liars))

    async def _come_back(self, prepared: PreparedSwarm, number: int) -> None:
        """One attacker, under one identity after another."""
        for turn in itertools.count():
            attack, name = MIX[(number + turn * self._attackers) % len(MIX)], f"attacker-{number}-{turn}"
            slots = str(prepared.config.engine.slots)
            await run_part(prepared, name, "redteam", "work", prepared.url, "--attack", attack, "--slots", slots)
            await asyncio.sleep(PAUSE_S)

    async def _lie(self, prepared: PreparedSwarm, name: str) -> None:
        while True:
            await run_part(prepared, name, "redteam", "judge", prepared.url, "--lie", "accept")
            await asyncio.sleep(PAUSE_S)


async def run_part(prepared: PreparedSwarm, name: str, *words: str) -> None:
    """Run a process to its end, or until this is cancelled."""
    layout, threads = prepared.layout, prepared.config.swarm.threads
    place = ("--folder", str(layout.folder(name)), "--threads", str(threads))
    part = Part(name=name, arguments=(*words, *place), rank=0)
    with open_log(layout.logs, name) as log:
        process = await Process.start(part, log, make_environment(threads))
    lower_priority(process.pid)
    try:
        await process.wait()
    finally:
        process.signal(signal.SIGKILL)
        await process.wait()


def read_result(prepared: PreparedSwarm, arm: str) -> Result:
    """The outcome of a finished swarm; its versions are evaluated now."""
    evaluate_versions(prepared)
    ledger = read_ledger_summary(prepared.layout.ledger)
    known = {identity.owner for identity in prepared.identities.values()}
    strangers = [owner for owner in ledger.standings if owner not in known]
    lines = read_metrics(prepared.layout.root / EVALS)
    return Result(
        arm=arm,
        seed=prepared.config.seed,
        evals=[(line["step"], line["eval/pass_at_1"], line["eval/greedy"]) for line in lines],
        names=len(strangers),
        banned=sum(ledger.standings[owner] is Standing.BANNED for owner in strangers),
        bad_share=count_accepted(ledger, strangers) / max(1, count_accepted(ledger, list(ledger.standings))),
        ledger=ledger.holds,
    )


def count_accepted(ledger: LedgerSummary, owners: Sequence[str]) -> int:
    """Accepted groups of some owners."""
    return sum(each.groups for each in ledger.list_submissions(owners) if each.state is SubmissionState.ACCEPTED)


def collect_figures(results: Results) -> dict[str, float]:
    """For each arm the final pass rates, their spread over seeds, and the share of bad groups among the accepted."""
    figures: dict[str, float] = {}
    for arm, seeds in results.items():
        last = [result.evals[-1] for result in seeds]
        figures[f"pass_{arm}"] = mean([sampled for _, sampled, _ in last])
        figures[f"greedy_{arm}"] = mean([greedy for _, _, greedy in last])
        figures[f"spread_{arm}"] = max(sampled for _, sampled, _ in last) - min(sampled for _, sampled, _ in last)
        figures[f"bad_share_{arm}"] = mean([result.bad_share for result in seeds])
        figures[f"names_{arm}"] = mean([result.names for result in seeds])
        figures[f"banned_{arm}"] = mean([result.banned for result in seeds])
    figures["ledgers_hold"] = float(all(result.ledger for seeds in results.values() for result in seeds))
    return figures


def format_table(results: Results) -> str:
    """A row for each arm."""
    rows = [
        "| arm | before | sampled, each seed | mean | greedy, mean | names | banned | bad, of accepted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, seeds in results.items():
        last = [result.evals[-1] for result in seeds]
        cells = [
            ARMS[arm],
            f"{mean([result.evals[0][1] for result in seeds]):.3f}",
            " ".join(f"{sampled:.3f}" for _, sampled, _ in last),
            f"{mean([sampled for _, sampled, _ in last]):.3f}",
            f"{mean([greedy for _, _, greedy in last]):.3f}",
            f"{mean([result.names for result in seeds]):.1f}",
            f"{mean([result.banned for result in seeds]):.1f}",
            f"{mean([result.bad_share for result in seeds]):.1%}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw_curves(results: Results, name: str) -> None:
    """Held-out pass rates, sampled and greedy; each seed thin and the mean thick."""
    figure, axes = open_plots().subplots(1, 2, figsize=(9, 3.6), dpi=120, sharey=True)
    for panel, place, label in zip(axes, (1, 2), ("sampled", "greedy"), strict=True):
        for colour, (arm, seeds) in enumerate(results.items()):
            _draw_arm(panel, seeds, place, f"C{colour}", ARMS[arm])
        panel.set(xlabel="step", title=f"held-out tasks that pass, {label}", ylim=(0, 1))
        panel.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize="small")
    save_picture(figure, name)


def _draw_arm(panel: Any, seeds: Sequence[Result], place: int, colour: str, label: str) -> None:
    steps = [line[0] for line in seeds[0].evals]
    curves = [[line[place] for line in result.evals] for result in seeds]
    for curve in curves:
        panel.plot(steps, curve, color=colour, alpha=0.35, linewidth=0.8)
    means = [mean(column) for column in zip(*curves, strict=True)]
    panel.plot(steps, means, color=colour, linewidth=2, label=label)


def parse_flags() -> argparse.Namespace:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="ignore kept results and run again")
    parser.add_argument("--out", type=Path, default=OUT / "poison", help="folder for results (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds (0 1 2; --quick: 0)")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), help="arms (all)")
    flags = parser.parse_args()
    flags.out = flags.out.resolve()
    flags.seeds = flags.seeds or (SEEDS[:1] if flags.quick else SEEDS)
    return flags


if __name__ == "__main__":
    main()
