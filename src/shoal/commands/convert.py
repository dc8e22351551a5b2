"""`shoal convert`: a policy folder from a GGUF file, or from the model that a Python package carries."""

import argparse
from pathlib import Path

from shoal.commands.broadcast_flags import Commands


def add_convert(commands: Commands) -> None:
    """Add the parser of this command."""
    text = "write a GGUF file as a policy folder in float32, for policy.path (extra `smollm`)"
    parser = commands.add_parser("convert", help=text, description=text, allow_abbrev=False)
    parser.add_argument("source", metavar="SOURCE", help="a GGUF file, or smollm2 for SmolLM2-135M-Instruct of PyPI")
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder to write; must not be there yet")
    parser.set_defaults(command=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Convert, and say what it is."""
    from shoal.disk import guard_disk
    from shoal.policy.convert import convert_model

    with guard_disk(args.folder):
        policy = convert_model(args.source, args.folder)
    chat = "with a chat template" if policy.tokenizer.chat_template else "without a chat template"
    print(f"{args.folder}: {policy.num_parameters:,} parameters, {len(policy.tokenizer):,} tokens, {chat}")
    return 0
