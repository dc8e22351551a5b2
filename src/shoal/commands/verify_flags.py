"""Flags of `shoal verify`. What the command needs is imported when it runs, so that help and mistakes come at once."""

from pathlib import Path

from shoal.commands.swarm_flags import Commands, add_asking, call_later


def add_commands(commands: Commands) -> None:
    """Add the parser of this command."""
    parser = add_asking(commands, "verify", "check a decided submission again, and compare with what the ledger says")
    add = parser.add_argument
    add("submission", metavar="SUBMISSION", help="its id, e.g. s123")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--owner", type=Path, metavar="FILE", help="the key of the submission's owner")
    who.add_argument("--folder", type=Path, metavar="DIR", help="folder of one of the owner's nodes")
    who.add_argument("--case", type=Path, metavar="FILE", help="evidence that the owner saved, for anybody else")
    add("--save", type=Path, metavar="FILE", help="write the evidence to a file (default: not written)")
    add("--file", type=Path, metavar="FILE", help="the submission's file (default: from the coordinator, while kept)")
    add("--weights", type=Path, metavar="DIR", help="the version's weights (default: from the relays, while kept)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads (%(default)s)")
    parser.set_defaults(command=call_later("verify", "run_verify"))
