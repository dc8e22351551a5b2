"""Files that attack the parser: each is rejected as malformed, and costs little to read.

Also modified honest files: if one is accepted, its content equals the honest one.
"""

import asyncio
import hashlib
import io
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.coordinator.blobs.disk import DiskStore
from shoal.protocol.messages import SubmissionState, Verdict
from shoal.protocol.outcome import CRASH_CHECK, Vote, decide_outcome
from shoal.redteam.attacks import files
from shoal.redteam.behaviours.bad_files import BadFileBehaviour, ParquetFooter, load_table, replace_column, save_table
from shoal.redteam.registry import Expected, list_attacks, make_behaviours
from shoal.submission.columns import COLUMN_NAMES, limit_file
from shoal.submission.limits import SubmissionLimits
from shoal.validator.finding import Assessment

FILES = [name for name, attack in list_attacks().items() if attack.expect is Expected.FORM]
CRASHES = {"claim_codec"}
"""attacks that crash pyarrow's reader; a second validator has to confirm it"""
CHILD_CPU_S, CHILD_BYTES, PARENT_BYTES = 1.0, 200 << 20, 8 << 20
FREE = {"reason"}
"""columns that nothing depends on"""
FUZZ = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def decide_twice(opinion: Assessment) -> SubmissionState | None:
    """The state of a submission if two validators agree."""
    crashed = any(finding.check == CRASH_CHECK for finding in opinion.findings)
    return decide_outcome([Vote(opinion.verdict, crashed)] * 2, max_rounds=3)


def measure_judging(case) -> tuple[Assessment, int]:
    """An assessment, and the peak memory of the validator itself."""
    tracemalloc.start()
    try:
        return case.opinion(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FILES)
def test_bad_files_are_taken_unread_and_refused_at_little_cost(open_lease_workers, recipe, honest, tmp_path, name):
    honest.opinion()  # warm up
    (author,) = make_behaviours(name, recipe)
    assert isinstance(author, BadFileBehaviour)
    (lease_worker,) = open_lease_workers([author])
    for place, way in enumerate(author.ways):
        case = lease_worker.hand_in(f"l{place}")
        check_upload(case, tmp_path / "blobs")
        check_refusal(case, Verdict.INCONCLUSIVE if way.__name__ in CRASHES else Verdict.FORM)
    assert honest.opinion().verdict is Verdict.ACCEPTED


@pytest.mark.parametrize("name", FILES)
def test_two_owners_never_submit_the_same_file(recipe, honest, name):
    """The coordinator would refuse the second one as a copy, so that no validator would read it."""
    (author,) = make_behaviours(name, recipe)
    data = honest.path.read_bytes()
    table = load_table(data)
    reasons = pa.array(["other"] * table.num_rows, table.schema.field("reason").type)
    other = save_table(replace_column(table, "reason", reasons))
    for way in author.ways:
        assert way(data, 1 << 20) != way(other, 1 << 20), way.__name__


def check_upload(case, folder: Path) -> None:
    """The coordinator has no reason to refuse it, not even for its size, and stores it unchanged."""
    manifest, data = case.job.manifest, case.path.read_bytes()
    limits = SubmissionLimits(
        max_rollouts=case.job.count * case.job.group_size,
        group_size=1,
        max_tokens=case.job.max_tokens,
        vocab_size=1,
        max_prompt_tokens=case.policy.model.config.max_position_embeddings,
    )
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (manifest.blob, manifest.size)
    assert manifest.size <= limit_file(limits)
    assert len(manifest.rollouts) == case.job.count * case.job.group_size
    assert all(1 <= entry.tokens <= case.job.max_tokens for entry in manifest.rollouts)
    assert asyncio.run(store_file(folder, manifest.blob, data)) == data


def check_refusal(case, verdict: Verdict) -> None:
    """It is not paid, and neither the parser nor the validator has spent much on it."""
    before = len(case.metered_validator.usage)
    opinion, parent_bytes = measure_judging(case)
    used = case.metered_validator.usage[before:]
    assert opinion.verdict is verdict and decide_twice(opinion) is SubmissionState.FORM
    assert opinion.tokens == 0 and opinion.state(case.job).findings
    assert used and sum(report.cpu_s for report in used) < CHILD_CPU_S
    assert max(report.peak_bytes for report in used) < CHILD_BYTES
    assert parent_bytes < PARENT_BYTES


async def store_file(folder: Path, name: str, data: bytes) -> bytes:
    """Store a file and read it back."""

    async def send():
        for start in range(0, len(data), 1 << 16):
            yield data[start : start + (1 << 16)]

    store = DiskStore(folder)
    try:
        await store.put(name, len(data), send())
        async with await store.open(name) as reader:
            return b"".join([piece async for piece in reader])
    finally:
        await store.close()


def test_bombs_of_a_harmless_size_are_what_they_say(honest, monkeypatch):
    """Read without limits: they are rejected for their size, not because they are malformed."""
    data, room = honest.path.read_bytes(), 1 << 30
    monkeypatch.setattr(files, "ENTRY_BYTES", 20)
    for way in (files.repeat_entry, files.repeat_openly):
        assert load_table(way(data, room)).column("reason").to_pylist() == ["\0" * 20] * 8
    monkeypatch.setattr(files, "NUM_ROWS", 1000)
    table = load_table(files.add_rows(data, room))
    assert table.num_rows == 1000 and table.schema.equals(load_table(data).schema)
    table.validate(full=True)
    monkeypatch.setattr(files, "MOST_VALUES", 10)
    for way, num_pages in ((files.fill_page, 1), (files.fill_pages, 5)):
        footer = ParquetFooter(way(data, room))
        footer.meta("token_ids")[5][1] = 10 * num_pages
        column = pq.ParquetFile(io.BytesIO(footer.build())).reader.read_column(COLUMN_NAMES.index("token_ids"))
        assert column.to_pylist() == [[0] * 10 * num_pages]


def test_bombs_unpack_to_as_much_as_their_lease_allows(honest):
    """A file as large as the honest one could be unpacks to far more than a parser may use; a larger one to more."""
    data = honest.path.read_bytes()
    for room, least in ((1 << 15, 1 << 29), (1 << 20, 2**31 - 1000)):
        file = files.fill_page(data, room)
        header, _ = ParquetFooter(file).page("token_ids")
        assert len(file) <= room and header[2][1] >= least
        assert len(files.fill_pages(data, room)) <= room and len(files.waste_time(data, room)) <= room


def judge_bytes(honest, data: bytes, folder: Path, **of_manifest: Any) -> Assessment:
    """Assess other bytes in place of an honest file."""
    path = folder / "changed.parquet"
    path.write_bytes(data)
    manifest = honest.job.manifest.model_copy(update=of_manifest)
    return replace(honest, path=path, job=honest.job.model_copy(update={"manifest": manifest})).opinion()


def check_same(honest, data: bytes) -> None:
    """What was accepted is the honest work, except for values compared within a tolerance or not at all."""
    expected, found = load_table(honest.path.read_bytes()), load_table(data)
    for name in COLUMN_NAMES:
        if name == "logprobs":
            pairs = zip(expected.column(name).to_pylist(), found.column(name).to_pylist(), strict=True)
            assert all(np.allclose(one, other, atol=1e-2) for one, other in pairs)
        elif name not in FREE | {"proofs"}:
            assert found.column(name).equals(expected.column(name)), name


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bench")


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3), st.booleans())
def test_a_file_with_flipped_bits_never_passes_for_other_work(honest, bench, flips, squeezed):
    data = bytearray(honest.path.read_bytes())
    if not squeezed:  # where every bit is part of a value
        data = bytearray(save_table(load_table(bytes(data)), compression="none"))
    for place, mask in flips:
        data[place % len(data)] ^= mask
    if judge_bytes(honest, bytes(data), bench).verdict is Verdict.ACCEPTED:
        check_same(honest, bytes(data))


@FUZZ
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=30))
def test_a_file_with_a_piece_replaced_never_passes_for_other_work(honest, bench, start, length, piece):
    data = honest.path.read_bytes()
    start %= len(data)
    changed = data[:start] + piece + data[start + length % 100 :]
    if judge_bytes(honest, changed, bench).verdict is Verdict.ACCEPTED:
        check_same(honest, changed)


CHANGES: dict[str, Any] = {
    "group": [-1, 1, 7, 2**53, 2**63 - 1],
    "sample": [-1, 1, 3, 7, 2**31 - 1],
    "version": [-1, 1, 2**53, 2**63 - 1],
    "seed": [0, 1, 2**64 - 1],
    "temperature": [0.0, -1.0, 0.999, float("nan"), float("inf"), 1e300],
    "reward": [-1.0, 0.123, 1.5, float("nan"), float("inf")],
    "task_id": ["", "sort", "x" * 128, "x" * 129, "\0"],
    "finish": ["", "Stop", "stop ", "none"],
}


@FUZZ
@given(st.data())
def test_a_file_with_another_value_never_passes(honest, bench, data):
    """Even if its manifest states the same value."""
    table = load_table(honest.path.read_bytes())
    name = data.draw(st.sampled_from([*CHANGES, "prompt_ids", "token_ids", "logprobs", "proofs"]))
    values = table.column(name).to_pylist()
    row = data.draw(st.integers(0, len(values) - 1))
    old = values[row]
    if name in CHANGES:
        values[row] = data.draw(st.sampled_from([value for value in CHANGES[name] if value != old]))
    else:
        place = data.draw(st.integers(0, len(old) - 1))
        values[row] = [*old[:place], change_element(name, old[place], data), *old[place + 1 :]]
    changed = replace_column(table, name, pa.array(values, table.schema.field(name).type))
    opinion = judge_bytes(honest, save_table(changed), bench)
    assert opinion.verdict in (Verdict.FORM, Verdict.SOFT, Verdict.HARD)
    assert opinion.verdict is not Verdict.HARD or name in ("logprobs", "proofs")


def change_element(name: str, value: Any, data: Any) -> Any:
    """Replace an element of a list."""
    if name == "proofs":
        place = data.draw(st.integers(0, len(value) - 1))
        return value[:place] + bytes([value[place] ^ data.draw(st.integers(1, 255))]) + value[place + 1 :]
    if name == "logprobs":
        return value + data.draw(st.sampled_from([-50.0, -0.1, 0.05, 1.0, float("nan"), float("-inf")]))
    return (value + data.draw(st.sampled_from([1, 2, 1000, -1000]))) % 2**31


def test_a_reason_is_nobodys_business(honest, bench):
    table = load_table(honest.path.read_bytes())
    changed = replace_column(table, "reason", pa.array(["because"] * table.num_rows, pa.string()))
    assert judge_bytes(honest, save_table(changed), bench).verdict is Verdict.ACCEPTED
