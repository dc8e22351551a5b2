"""`shoal status`, `explain` and `leaderboard`: what everybody may ask a coordinator."""

import argparse
import asyncio
import json
import re
import sys
from pathlib import Path

from shoal.commands.swarm_call import Failures, Outcome, explain_failure, open_client, run_until_stopped, run_work
from shoal.commands.swarm_words import describe_leaders, describe_status
from shoal.console import clean_text, is_live
from shoal.errors import ConfigError
from shoal.swarm.link import GLANCE

WATCH_S = 2.0
_SUBMISSION = re.compile(r"s[0-9]{1,18}")
_CLEAR = "\x1b[H\x1b[J"


def run_status(args: argparse.Namespace) -> int:
    if args.watch:
        return run_until_stopped(lambda: _watch_status(args.where, args.ca, as_json=args.json))
    return run_work(ask_status(args.where, args.ca), as_json=args.json)


def run_explain(args: argparse.Namespace) -> int:
    if _SUBMISSION.fullmatch(args.submission) is None:
        raise ConfigError(f"{args.submission[:40]!r}: no id of a submission, which is s and a number")
    return run_work(ask_explanation(args.where, args.submission, args.ca), as_json=args.json)


def run_leaderboard(args: argparse.Namespace) -> int:
    return run_work(ask_leaders(args.where, args.ca), as_json=args.json)


async def ask_status(where: str, authority: Path | None = None) -> Outcome:
    """The run at a glance, in words."""
    async with open_client(where, authority, deadlines=GLANCE) as client:
        status = await client.read_status()
    return Outcome(0, describe_status(status), status.model_dump(mode="json"))


async def ask_explanation(where: str, submission: str, authority: Path | None = None) -> Outcome:
    """All that is known of a submission, in words."""
    async with open_client(where, authority) as client:
        text = (await client.explain(submission)).text
    return Outcome(0, text, {"submission": submission, "text": text})


async def ask_leaders(where: str, authority: Path | None = None) -> Outcome:
    """Owners by accepted tokens."""
    async with open_client(where, authority) as client:
        leaders = await client.read_leaders()
    return Outcome(0, describe_leaders(leaders), leaders.model_dump(mode="json"))


async def _watch_status(where: str, authority: Path | None, *, as_json: bool) -> int:
    """The status again and again, until the user has seen enough; a coordinator that is away is waited for."""
    is_drawn = is_live(sys.stdout) and not as_json
    while True:
        try:
            outcome = await ask_status(where, authority)
        except Failures as error:
            outcome = Outcome(1, explain_failure(error), {"error": explain_failure(error)})
        text = json.dumps(outcome.data) if as_json else f"{clean_text(outcome.text)}\n"
        print(f"{_CLEAR if is_drawn else ''}{text}", flush=True)
        if outcome.data.get("finished"):
            return 0
        await asyncio.sleep(WATCH_S)
