"""The ledger of a run held against its law, from the genesis to the last event."""

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from shoal.keys import Key, check_public
from shoal.swarm.edition import describe_edition
from shoal.swarm.event import Event, Kind
from shoal.swarm.law.cases import take_again
from shoal.swarm.law.docket import Docket, LawError, name_event
from shoal.swarm.law.hearing import Echo, Hearing, ReadChain
from shoal.swarm.law.purses import check_purses
from shoal.swarm.mirror import Mirror
from shoal.swarm.params import dump_params, parse_params
from shoal.swarm.projection import Projection
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.run import read_run
from shoal.swarm.turn import Setting

_GENESIS = {"beacon", "coordinator", "operator", "params", "recipe", "rules", "run"}
_BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, SQLAlchemyError)
"""What the coordinator's code may raise over an event that it did not make: a forged ledger may say anything."""


def hear_events(events: Iterator[Event], target: Connection, projections: Sequence[Projection]) -> None:
    """Bring all events of a ledger into the tables of an empty database, if each is what the rules make.

    Else `LawError`, over the first that is not.
    """
    docket = Docket(events, target, projections)
    genesis = docket.next
    if genesis is None:
        return
    if words := describe_edition(genesis):
        raise LawError(f"event 0: {words}")
    try:
        _check_genesis(genesis)
        docket.take()
    except _BROKEN as error:
        raise LawError(f"event 0: not the genesis of a run ({_show_error(error)})") from error
    setting = open_setting(docket)
    while docket.next is not None:
        hear_decision(docket, setting, genesis.actor)
    check_purses(target)


def open_setting(docket: Docket) -> Setting:
    """What stays the same from decision to decision."""
    state = read_run(docket.connection)
    return Setting(state.run, Key.generate(), ReadChain(docket), Mirror(docket.connection, state))


def hear_decision(docket: Docket, setting: Setting, coordinator: str) -> None:
    """Take one decision again, with all its events; `LawError` if it was another one."""
    event = docket.next
    assert event is not None, "a decision begins with an event"
    place, size = f"event {event.seq}: {name_event(event.kind, event.subject)}", docket.size
    try:
        echo = Echo(docket, coordinator, setting.reader)
        answer = take_again(Hearing(echo, setting, last_ms=docket.time_ms), event)
    except LawError:
        raise
    except AuthError as error:
        raise LawError(f"{place}: refused by the rules: {error.text}") from error
    except _BROKEN as error:
        raise LawError(f"{place}: not what the rules make ({_show_error(error)})") from error
    if docket.size == size:
        reason = getattr(answer, "reason", "") or "the decision it could begin comes to nothing"
        raise LawError(f"{place}: refused by the rules: {reason}")


def _check_genesis(event: Event) -> None:
    content = event.content
    if content.keys() != _GENESIS or event.kind != Kind.GENESIS:
        raise ValueError(f"it has {', '.join(sorted(content))}")
    check_public(content["operator"])
    if dump_params(parse_params(content["params"])) != content["params"]:
        raise ValueError("parameters that are not all there")


def _show_error(error: BaseException) -> str:
    return f"{error!a:.200}"
