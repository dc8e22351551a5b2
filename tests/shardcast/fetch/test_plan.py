from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.fetch.plan import ANCHOR_SHARE, Candidate, FetchPlan, FetchStep, plan_pull

FULL = 1000


def build(version: int, **changes: object) -> Candidate:
    values: dict[str, object] = {
        "version": version,
        "parent": version - 1,
        "anchor": False,
        "full_bytes": FULL,
        "delta_bytes": 10,
        "held": False,
    }
    return Candidate(**(values | changes))  # type: ignore[arg-type]


def plan(target: int, *candidates: Candidate) -> FetchPlan:
    return plan_pull({candidate.version: candidate for candidate in candidates}, target)


def test_a_held_version_needs_nothing() -> None:
    assert plan(3, build(3, held=True)) == FetchPlan((), 0)


def test_the_first_version_comes_in_full() -> None:
    assert plan(0, build(0, parent=None, delta_bytes=None)).steps == (FetchStep(0, "full"),)


def test_on_top_of_a_held_parent_the_delta_is_taken() -> None:
    assert plan(2, build(1, held=True), build(2)) == FetchPlan((FetchStep(2, "delta"),), 10)


def test_a_chain_of_deltas_is_taken_in_order() -> None:
    result = plan(4, build(1, held=True), build(2), build(3), build(4))
    assert result == FetchPlan((FetchStep(2, "delta"), FetchStep(3, "delta"), FetchStep(4, "delta")), 30)


def test_a_late_joiner_takes_the_anchor_and_the_deltas_onto_it() -> None:
    result = plan(3, build(1, anchor=True, parent=0), build(2), build(3))
    assert result == FetchPlan(
        (FetchStep(1, "full"), FetchStep(2, "delta"), FetchStep(3, "delta")), ANCHOR_SHARE * FULL + 20
    )


def test_a_late_joiner_takes_the_full_version_if_the_deltas_cost_more_than_the_anchor_saves() -> None:
    result = plan(3, build(1, anchor=True, parent=0), build(2, delta_bytes=150), build(3, delta_bytes=150))
    assert result == FetchPlan((FetchStep(3, "full"),), FULL)


def test_without_an_anchor_a_late_joiner_takes_the_full_version() -> None:
    assert plan(3, build(1, parent=0), build(2), build(3)).steps == (FetchStep(3, "full"),)


def test_a_delta_larger_than_what_is_missing_of_the_full_version_is_not_taken() -> None:
    assert plan(2, build(1, held=True), build(2, full_bytes=9)) == FetchPlan((FetchStep(2, "full"),), 9)


def test_a_delta_not_settled_is_waited_for_on_a_held_parent_only() -> None:
    unsettled = build(2, delta_bytes=None)
    assert plan(2, build(1, held=True), unsettled).steps == (FetchStep(2, "delta"),)
    assert plan(2, build(1, parent=0), unsettled).steps == (FetchStep(2, "full"),)
    assert plan(2, build(1, parent=None, anchor=True), unsettled).steps == (FetchStep(2, "full"),)


def test_a_chain_whose_manifests_are_not_read_yet_is_taken_from_a_held_version() -> None:
    result = plan(4, build(1, held=True), build(2, delta_bytes=None), build(3), build(4, delta_bytes=None))
    assert result == FetchPlan((FetchStep(2, "delta"), FetchStep(3, "delta"), FetchStep(4, "delta")), 10)


def test_a_parent_nobody_knows_any_more_means_the_full_version() -> None:
    assert plan(9, build(9, parent=4)).steps == (FetchStep(9, "full"),)


def test_parents_in_a_circle_end() -> None:
    assert plan(2, build(1, parent=2), build(2, parent=1)).steps == (FetchStep(2, "full"),)


candidates = st.integers(1, 8).flatmap(
    lambda number: st.tuples(
        *[
            st.builds(
                Candidate,
                version=st.just(version),
                parent=st.one_of(st.none(), st.integers(0, max(0, version - 1))),
                anchor=st.booleans(),
                full_bytes=st.integers(0, 100),
                delta_bytes=st.one_of(st.none(), st.integers(0, 100)),
                held=st.booleans(),
            )
            for version in range(number)
        ]
    )
)


@given(candidates)
def test_every_plan_ends_at_the_target_and_stands_on_what_is_there(known: tuple[Candidate, ...]) -> None:
    by_version = {candidate.version: candidate for candidate in known}
    target = known[-1].version
    result = plan_pull(by_version, target)
    have = {candidate.version for candidate in known if candidate.held}
    for step in result.steps:
        assert step.blob == "full" or by_version[step.version].parent in have
        have.add(step.version)
    assert target in have
    share = ANCHOR_SHARE if by_version[target].anchor else 1.0
    assert result.cost <= share * by_version[target].full_bytes or not result.steps
