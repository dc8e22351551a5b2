"""Speed of the ledger: appending events one per commit and in groups, verifying, proving.

    python bench/ledger.py [--quick] [--json]                 # SQLite in a temporary folder
    python bench/ledger.py --url postgresql://user@host/db    # an empty database

An event here is a lease of about 200 bytes; with credit, every fourth is a verdict with two postings. Events are
appended with `transact` from one event loop with that many concurrent callers. CPU time is that of this process alone.
--quick: a tenth of the events.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Engine

from common import build_parser, finish
from shoal.audit.verify import verify_ledger
from shoal.identity.keys import Key
from shoal.ledger.db import open_database
from shoal.ledger.event import Event, EventKind, move_credit
from shoal.ledger.ledger import Ledger, LedgerTransaction

OWNER = "ab" * 32
NAMES = {
    "one per commit": "single",
    "64 callers": "grouped_64",
    "256 callers": "grouped_256",
    "256 callers, credit": "credit_256",
    "proofs": "proofs",
    "verify": "verify",
}
"""of the figures, by line of the table"""


@dataclass(frozen=True)
class Rate:
    """Count per wall-clock second, and per CPU second of this process."""

    per_s: float
    per_cpu_s: float


def measure(count: int, work: Callable[[], object]) -> Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Rate(count / (time.perf_counter() - wall), count / (time.process_time() - cpu))


def decide_one(index: int, *, credit: bool) -> Callable[[LedgerTransaction], Event]:
    body = {"deadline": 1_700_000_000_000 + index, "fence": 1, "groups": [index, index + 1], "node": OWNER, "step": 7}

    def decide(draft: LedgerTransaction) -> Event:
        if credit and index % 4 == 0:
            postings = move_credit("mint", f"pending:{index % 997:064x}", 1000)
            return draft.append(EventKind.VAL_VERDICT, subject=f"sub:{index}", body=body, postings=postings)
        return draft.append(EventKind.LEASE_GRANT, subject=f"lease:{index}", body=body)

    return decide


def append_events(ledger: Ledger, count: int, *, callers: int, credit: bool) -> Rate:
    async def call(first: int) -> None:
        for index in range(first, count, callers):
            await ledger.transact(decide_one(index, credit=credit))

    async def main() -> None:
        await asyncio.gather(*(call(first) for first in range(callers)))

    return measure(count, lambda: asyncio.run(main()))


def run_bench(url: str, single: int, grouped: int) -> dict[str, Rate]:
    ledger = Ledger.open(url, run="bench", key=Key.generate())
    rates = {
        "one per commit": append_events(ledger, single, callers=1, credit=False),
        "64 callers": append_events(ledger, grouped, callers=64, credit=False),
        "256 callers": append_events(ledger, grouped, callers=256, credit=False),
        "256 callers, credit": append_events(ledger, grouped, callers=256, credit=True),
    }
    size = ledger.size
    asyncio.run(ledger.sign_head())
    chosen = range(0, size, max(1, size // 200))
    rates["proofs"] = measure(len(chosen), lambda: [ledger.prove_event(seq, size) for seq in chosen])
    ledger.close()
    engine = open_database(url)
    rates["verify"] = measure(size, lambda: check_holds(engine))
    engine.dispose()
    return rates


def check_holds(engine: Engine) -> None:
    report = verify_ledger(engine)
    assert report.holds, report.findings


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="an empty database (default: SQLite in a temporary folder)")
    parser.add_argument("--single", type=int, default=300, help="number of events, one per commit (%(default)s)")
    parser.add_argument("--grouped", type=int, default=8000, help="number of events, in groups (%(default)s)")
    flags = parser.parse_args()
    share = 10 if flags.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        rates = run_bench(flags.url or f"{folder}/ledger.db", flags.single // share, flags.grouped // share)
    lines = [f"{name:<22}{rate.per_s:>10,.0f}{rate.per_cpu_s:>12,.0f}" for name, rate in rates.items()]
    figures = {f"{NAMES[name]}_per_s": rate.per_s for name, rate in rates.items()}
    figures |= {f"{NAMES[name]}_per_cpu_s": rate.per_cpu_s for name, rate in rates.items()}
    finish(flags, "\n".join([f"{'':<22}{'per s':>10}{'per CPU s':>12}", *lines]), figures)


if __name__ == "__main__":
    main()
