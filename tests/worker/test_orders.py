"""Which leases a worker accepts."""

import pytest

from shoal.protocol.beacon import derive_group
from shoal.recipe import Recipe
from shoal.worker.orders import LeaseError, WorkLimits, take_order


def test_an_order_says_what_the_lease_said(recipe: Recipe, make_lease) -> None:
    order = take_order(make_lease("l7", step=3, first=5, version=1), recipe, WorkLimits())
    assert (order.lease, order.step, order.first, order.count, order.version) == ("l7", 3, 5, 2, 1)
    assert order.seeds == tuple(derive_group("5a" * 32, index, 4) for index in (5, 6))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group_size": 5}, "the recipe has"),
        ({"max_tokens": 9}, "the recipe has"),
        ({"count": 0}, "asks for 0 rollouts"),
        ({"count": 2000, "seeds": ()}, "asks for 8000 rollouts"),
        ({"count": 2**52, "seeds": ()}, "rollouts, allowed are"),
        ({"seeds": ("0" * 80,)}, "does not have the seeds of 2 groups"),
        ({"seeds": ("0" * 64, "0" * 80)}, "does not have the seeds of 2 groups"),
        ({"step": 0}, "step 0"),
        ({"step": 2, "version": 2}, "step 2 with v2"),
    ],
)
def test_a_lease_beyond_recipe_or_limits_is_refused(recipe: Recipe, make_lease, changes, text: str) -> None:
    with pytest.raises(LeaseError, match=text):
        take_order(make_lease(**changes), recipe, WorkLimits())


def test_the_owners_limit_stands_above_the_recipe(recipe: Recipe, make_lease) -> None:
    with pytest.raises(LeaseError, match="generates at most 7"):
        take_order(make_lease(), recipe, WorkLimits(max_tokens=7))
