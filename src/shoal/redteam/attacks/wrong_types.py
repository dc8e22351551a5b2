"""Columns of other types than the layout's, for readers that take what they get."""

import pyarrow as pa

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor, load_table, put_column, save_table
from shoal.redteam.footer import Footer
from shoal.worker.author import Author


def widen_tokens(honest: bytes) -> bytes:
    """Token ids of eight bytes."""
    table = load_table(honest)
    return save_table(put_column(table, "token_ids", table.column("token_ids").cast(pa.list_(pa.int64()))))


def spell_numbers(honest: bytes) -> bytes:
    """Numbers as texts."""
    table = load_table(honest)
    for name in ("group", "seed", "reward"):
        table = put_column(table, name, table.column(name).cast(pa.string()))
    return save_table(table)


def allow_gaps(honest: bytes) -> bytes:
    """Values that may be missing, and one that is."""
    table = load_table(honest)
    rewards = [None, *table.column("reward").to_pylist()[1:]]
    return save_table(put_column(table, "reward", pa.array(rewards, pa.float64()), nullable=True))


def swap_type(honest: bytes) -> bytes:
    """Bytes of one type under the name of another: log-probs are to be read as whole numbers."""
    footer = Footer(honest)
    names = [element[4][1] for element in footer.schema]
    # A list takes three elements of the schema: itself, what repeats, and what is in it.
    tokens, logprobs = (footer.schema[names.index(name) + 2] for name in (b"token_ids", b"logprobs"))
    logprobs[1][1] = tokens[1][1]
    return footer.build()


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, widen_tokens, spell_numbers, allow_gaps, swap_type),)
