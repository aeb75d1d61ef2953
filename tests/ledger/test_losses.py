"""Who is told of a copy in that failed, when blocks were given up since (losses.py)."""

from __future__ import annotations

import pytest

from kvmem.ledger.state import DEVICE
from tests.ledger.play import Play


@pytest.mark.parametrize("moment", ["stepped", "not stepped", "in an open step"])
def test_who_gave_up_its_blocks_is_told_if_it_stepped_over_them(play: Play, moment: str) -> None:
    s = play.made(6, publish=False)
    play.swap_out(s)
    play.evict(8)
    arrival = play.swap_in(s)
    assert arrival.in_id
    if moment != "not stepped":
        play.append(s, 7)
        play.run(s)  # over what is still on its way
    play.give_up(s)
    arrays = None
    if moment == "in an open step":
        _, arrays = play.plan(s)  # all of it anew
    losses, _ = play.ledger.fail(DEVICE, arrival.in_id)
    told = [(loss.record, loss.is_void) for loss in losses]
    # the sample of an open step is still to come, over what it has now
    expected = {"stepped": [(s, True)], "not stepped": [], "in an open step": [(s, False)]}
    assert told == expected[moment]
    play.ledger.verify()
    if arrays is not None:
        play.end(arrays)
    play.free(s)
