"""The six places of a slot: what is derived from them, and what is refused."""

import pytest

from allocator.waste import Waste

WASTE = Waste(pool=100, live=60, internal=10, reservation=5, imbalance=15, external=4)


def test_held_is_what_no_other_sequence_can_have() -> None:
    assert WASTE.held == 60 + 10 + 5 + 15


def test_the_six_places_add_up_to_the_pool() -> None:
    places = (WASTE.live, WASTE.internal, WASTE.reservation, WASTE.imbalance, WASTE.external, WASTE.free)
    assert sum(places) == WASTE.pool
    assert WASTE.free == 6


def test_shares_are_parts_of_the_pool() -> None:
    assert WASTE.live_share == 0.6
    assert WASTE.held_share == 0.9


def test_an_empty_pool_is_all_free() -> None:
    waste = Waste(pool=8, live=0)
    waste.check()
    assert (waste.held, waste.free, waste.held_share) == (0, 8, 0.0)


def test_full_pools_pass_the_check() -> None:
    WASTE.check()
    Waste(pool=3, live=2, external=1).check()


@pytest.mark.parametrize("place", ["live", "internal", "reservation", "imbalance", "external"])
def test_a_place_that_holds_less_than_nothing_is_named(place: str) -> None:
    waste = Waste(**({"pool": 9, "live": 3} | {place: -1}))
    with pytest.raises(ValueError, match=rf"^{place} is -1 slots"):
        waste.check()


def test_more_in_use_than_the_pool_holds_is_refused_as_negative_free_room() -> None:
    with pytest.raises(ValueError, match=r"^free is -2 slots"):
        Waste(pool=10, live=7, internal=3, external=2).check()
