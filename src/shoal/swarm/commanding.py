"""The operator's commands: each signed, each in the ledger, each once."""

from shoal.errors import ConfigError
from shoal.swarm.crediting import post_redeem
from shoal.swarm.ending import void_work
from shoal.swarm.messages import Action, Command, CommandAnswer, SignedCommand, open_message
from shoal.swarm.params import check_change, parse_params
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.nodes import find_node
from shoal.swarm.state.run import find_command, read_run
from shoal.swarm.state.steps import find_step
from shoal.swarm.turn import Turn


def run_command(turn: Turn, *, signed: SignedCommand) -> CommandAnswer:
    """Do what the operator commands; the same command again is answered and not done twice."""
    command = signed.command
    state = read_run(turn.connection)
    statement = open_message(turn.run, state.operator, command, signed.signature)
    earlier = find_command(turn.connection, command.nonce)
    if earlier is not None:
        return CommandAnswer(nonce=command.nonce, seq=earlier)
    _check_command(turn, command)
    ends_redeem = command.action in (Action.REDEEM_DONE, Action.REDEEM_FAILED)
    event = turn.record(statement, post_redeem(turn, command) if ends_redeem else ())
    if command.action is Action.BAN:
        _end_work(turn, command.target)
    return CommandAnswer(nonce=command.nonce, seq=event.seq)


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
        case Action.CANARY:
            _check_canary(turn, command)


def _check_canary(turn: Turn, command: Command) -> None:
    plan = command.canary
    if plan is None:
        raise AuthError(400, "canary", "a planted submission needs its plan")
    if find_step(turn.connection, plan.step) is None or plan.count < 1:
        raise AuthError(400, "canary", "a planted submission is of a step that was opened")
    if len(plan.rollouts) != plan.count * turn.params.group_size:
        raise AuthError(400, "canary", "as many rollouts as groups of this size have")


def _end_work(turn: Turn, target: str) -> None:
    """Whoever is banned works on nothing any more."""
    node = find_node(turn.connection, target)
    if node is not None:
        void_work(turn, node.owner, target)
    void_work(turn, target)
