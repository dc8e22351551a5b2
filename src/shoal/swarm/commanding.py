"""The operator's commands: each signed, each in the ledger, each once."""

from shoal.errors import ConfigError
from shoal.swarm.crediting import post_redeem
from shoal.swarm.ending import void_work
from shoal.swarm.messages import Action, Command, CommandAnswer, SignedCommand
from shoal.swarm.params import check_change, parse_params
from shoal.swarm.postings import Posting
from shoal.swarm.refusal import AuthError
from shoal.swarm.revealing import check_reveal, check_seals, end_canary, post_reveal
from shoal.swarm.rows import read_event
from shoal.swarm.state.canaries import list_grades
from shoal.swarm.state.nodes import find_node
from shoal.swarm.state.run import find_command, read_run
from shoal.swarm.turn import Turn


def run_command(turn: Turn, *, signed: SignedCommand) -> CommandAnswer:
    """Do what the operator commands; the same command again is answered and not done twice."""
    command = signed.command
    state = read_run(turn.connection)
    statement = turn.open_message(state.operator, command, signed.signature)
    earlier = find_command(turn.connection, command.nonce)
    if earlier is not None:
        event = read_event(turn.connection, earlier)
        if event is not None and event.body != statement.body:
            raise AuthError(409, "nonce_known", "another command has this nonce; sign with a new one")
        return _answer_command(turn, command, earlier)
    _check_command(turn, command)
    event = turn.record(statement, _post_command(turn, command))
    if command.action is Action.BAN:
        _end_work(turn, command.target)
    if command.action is Action.CANARY_REVEAL:
        end_canary(turn, command)
    return _answer_command(turn, command, event.seq)


def _check_command(turn: Turn, command: Command) -> None:
    match command.action:
        case Action.BAN | Action.UNBAN:
            if not command.target:
                raise AuthError(400, "target", "a ban names an owner or a node")
        case Action.PARAMS:
            try:
                check_change(turn.params, parse_params(command.params))
            except ConfigError as error:
                raise AuthError(400, "params", str(error)[:300]) from None
        case Action.CANARY_SEAL:
            check_seals(turn, command)
        case Action.CANARY_REVEAL:
            check_reveal(turn, command)


def _post_command(turn: Turn, command: Command) -> tuple[Posting, ...]:
    """The credit that a command moves."""
    match command.action:
        case Action.REDEEM_DONE | Action.REDEEM_FAILED:
            return post_redeem(turn, command)
        case Action.CANARY_REVEAL:
            return post_reveal(turn, command)
    return ()


def _answer_command(turn: Turn, command: Command, seq: int) -> CommandAnswer:
    reveals = command.action is Action.CANARY_REVEAL
    rows = list_grades(turn.connection, command.target) if reveals else []
    return CommandAnswer(nonce=command.nonce, seq=seq, grades=tuple(row.grade for row in rows))


def _end_work(turn: Turn, target: str) -> None:
    """Whoever is banned works on nothing any more."""
    node = find_node(turn.connection, target)
    if node is not None:
        void_work(turn, node.owner, target)
    void_work(turn, target)
