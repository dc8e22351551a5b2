"""One name of many megabytes: that of a task, or that of a column."""

import pyarrow as pa

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor, load_table, put_column, save_table
from shoal.redteam.footer import Footer
from shoal.worker.author import Author

NAME_CHARS = 48_000_000


def name_task(honest: bytes) -> bytes:
    """The footer says how long the name of the first task is."""
    table = load_table(honest)
    names = ["x" * NAME_CHARS, *table.column("task_id").to_pylist()[1:]]
    return save_table(put_column(table, "task_id", pa.array(names, pa.string())))


def hide_name(honest: bytes) -> bytes:
    """The footer says that it is as long as ever."""
    size = Footer(honest).meta("task_id")[6][1]
    footer = Footer(name_task(honest))
    footer.meta("task_id")[6][1] = size
    return footer.build()


def name_column(honest: bytes) -> bytes:
    """The name is that of a column."""
    footer = Footer(honest)
    footer.schema[1][4][1] = b"x" * (NAME_CHARS // 8)
    return footer.build()


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, name_task, hide_name, name_column),)
