"""The public API, one behaviour a test: tiers, room, pins, reset (design section 4)."""

from __future__ import annotations

import random

import pytest

import kvmem
from tests.driver import Driver, GoodWork, assert_same, state_of, tokens_of

# --- tiers -----------------------------------------------------------------------------------


def test_swap_states_and_no_ops() -> None:
    with Driver() as d:
        m = d.manager
        seq, waiting = d.create(tokens_of(6)), d.create([5])
        d.step([seq])
        out = m.swap_out([seq, waiting])
        assert (seq.state, waiting.state) == ("SWAPPED", "WAITING")
        assert out.num_blocks == 2
        out.wait(30)
        assert out.done
        assert m.swap_out([seq]).done
        d.check_content()
        m.evict(8)
        assert [m.block(b).device for b in seq.block_ids] == ["host", "host"]
        d.check_content()
        into = m.swap_in([seq, waiting])
        assert (seq.state, waiting.state) == ("RESIDENT", "WAITING")
        assert into.num_blocks == 2
        into.wait()
        assert m.swap_in([seq]).done
        assert m.swap_in([seq]).num_blocks == 0
        d.check_content()
        assert seq.num_swaps == 1


def test_a_clean_block_goes_out_without_a_copy_and_comes_back_without_one() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(8))
        d.step([seq])
        assert m.swap_out([seq]).num_blocks == 2
        assert m.swap_in([seq]).num_blocks == 0  # nobody took the frames meanwhile
        m.append([seq], [9])
        d.step([seq])
        assert m.swap_out([seq]).num_blocks == 1  # the two full ones are clean
        assert m.stats().clean_swap_outs == 2
        d.check_content()


def test_recompute_keeps_the_tokens_only() -> None:
    with Driver(host_blocks=0) as d:
        m = d.manager
        seq = d.create(tokens_of(6), publish=False)
        d.step([seq])
        with pytest.raises(kvmem.TierError, match="host_blocks.*recompute"):
            m.swap_out([seq])
        m.swap_out([seq], how="recompute").wait(30)
        assert (seq.state, seq.num_computed, seq.num_tokens) == ("WAITING", 0, 6)
        assert m.stats().device.free == 8
        d.step([seq])
        m.swap_out([seq], how="auto")  # no host tier: gives up
        assert seq.state == "WAITING"
        assert m.stats().recomputes == 2


def test_auto_swaps_what_fits_and_gives_up_the_rest() -> None:
    with Driver(host_blocks=2) as d:
        one, two = d.create(tokens_of(8)), d.create(tokens_of(58, 50))
        d.step([one, two])
        before = state_of(d.manager)
        with pytest.raises(kvmem.OutOfBlocks) as caught:
            d.manager.swap_out([one, two])
        assert (caught.value.tier, caught.value.needed) == ("host", 4)
        assert_same(before, state_of(d.manager))
        d.manager.swap_out([one, two], how="auto")
        assert (one.state, two.state) == ("SWAPPED", "WAITING")
        d.step([one, two], fit="some")
        d.check_content()


def test_shared_blocks_go_out_once() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        seqs = [seq, *d.fork(seq, 5)]
        assert d.manager.swap_out(seqs).num_blocks == 2
        d.wait()
        d.manager.evict(8)
        assert d.manager.swap_in(seqs).num_blocks == 2
        d.check_content()


def test_one_owner_resident_while_the_other_is_swapped() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(7))
        d.step([seq])
        child = d.fork(seq)[0]
        d.manager.swap_out([seq])
        assert d.manager.evict(8) == 0  # the child needs them here
        d.manager.append([child], [9])
        d.step([child])
        d.manager.swap_in([seq])
        d.manager.append([seq], [8])
        d.step([seq])
        d.check_content()


def test_prefetch_brings_what_fits() -> None:
    with Driver() as d:
        m = d.manager
        one, two, three = (d.create(tokens_of(100 * i + 12, 100 * i)) for i in range(3))
        d.step([one])
        m.swap_out([one])
        d.step([two])
        m.swap_out([two])
        m.evict(8)
        d.step([three])
        m.prefetch([one, two, three])
        assert [s.state for s in (one, two, three)] == ["RESIDENT", "SWAPPED", "RESIDENT"]
        with pytest.raises(kvmem.OutOfBlocks) as caught:
            m.swap_in([two])
        assert caught.value.tier == "device"
        m.swap_out([three])
        m.swap_in([two])
        d.check_content()


def test_make_room_takes_lower_priority_then_who_came_last() -> None:
    with Driver(device_blocks=8, host_blocks=16) as d:
        old, low, new = (
            d.create(tokens_of(8)),
            d.create(tokens_of(58, 50), priority=-1),
            d.create(tokens_of(78, 70)),
        )
        d.step([old, low, new])
        urgent = d.create(tokens_of(112, 100), priority=1)
        assert d.manager.make_room([urgent]) == [low]
        assert [s.state for s in (old, low, new)] == ["RESIDENT", "SWAPPED", "RESIDENT"]
        d.step([urgent])
        later = d.create(tokens_of(136, 124), priority=1)
        assert d.manager.make_room([later]) == [new]
        d.step([later])
        last = d.create(tokens_of(156, 140), priority=1)
        assert d.manager.make_room([last]) == [old]  # none of its own rank that came before it
        assert d.step([last], fit="some").left_out == [(last, "room")]
        d.check_content()


def test_make_room_spares_open_steps_and_the_just_swapped_in_while_there_are_others() -> None:
    with Driver(host_blocks=16) as d:
        m = d.manager
        other, busy, back = (
            d.create(tokens_of(8)),
            d.create(tokens_of(58, 50)),
            d.create(tokens_of(92, 80)),
        )
        d.step([other, busy, back])
        m.swap_out([back])
        m.swap_in([back])
        m.append([busy], [1])
        with m.step([busy]) as step:
            urgent = d.create(tokens_of(208, 200), priority=1)
            assert m.make_room([urgent]) == [other]  # though `back` came last
            big = d.create(tokens_of(120, 100), priority=2)
            assert m.make_room([big]) == [back]
            d.run(step)
        d.step([urgent])
        assert m.make_room([big]) == [busy]
        d.step([big])


def test_make_room_for_rows_of_its_own_list() -> None:
    with Driver(device_blocks=4, host_blocks=16) as d:
        one, two = d.create(tokens_of(8)), d.create(tokens_of(58, 50))
        d.step([one, two])
        d.manager.append([one, two], [1, 2])
        assert d.manager.make_room([one, two]) == [two]
        step = d.step([one, two], fit="some")
        assert step.seqs == [one]
        assert [reason for _, reason in step.left_out] == ["room"]


def test_eviction_goes_to_the_host_and_hits_come_back() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(9))
        d.step([seq])
        d.free(seq)
        assert m.evict(1) == 1
        match = m.match(tokens_of(9))
        assert (match.num_tokens, match.on_device, match.on_host) == (8, 4, 4)
        assert m.evict(100) == 1
        assert m.match(tokens_of(9)) == kvmem.Match(8, 0, 8)
        again = d.create(tokens_of(9))
        assert again.num_cached == 8
        assert d.step([again]).num_tokens == 1
        d.check_content()
        assert m.stats().blocks_in == 2


def test_policy_none_drops_what_is_evicted() -> None:
    with Driver(tier_policy="none") as d:
        m = d.manager
        seq = d.create(tokens_of(9))
        d.step([seq])
        d.free(seq)
        m.evict(8)
        assert m.match(tokens_of(9)).num_tokens == 0
        assert m.stats().blocks_dropped == 2
        other = d.create(tokens_of(9))
        d.step([other])
        m.swap_out([other])
        assert m.stats().blocks_out == 3  # the host tier still serves swapping
        d.check_content()


def test_evict_counts_exactly() -> None:
    with Driver(host_blocks=0) as d:
        for i in range(3):
            seq = d.create(tokens_of(100 * i + 8, 100 * i))
            d.step([seq])
            d.free(seq)
        assert d.manager.stats().device.evictable == 6
        assert [d.manager.evict(n) for n in (0, 1, 2, 100, 100)] == [0, 1, 2, 3, 0]


# --- can_fit ---------------------------------------------------------------------------------


def test_can_fit() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(20))
        assert m.can_fit() == "yes"
        assert m.can_fit(32) == "yes"
        assert m.can_fit(33) == "never"
        assert m.can_fit(seqs=[seq]) == "yes"
        d.step([seq])
        assert m.can_fit(12) == "yes"
        assert m.can_fit(13) == "later"
        assert m.can_fit(tokens=tokens_of(33, 1)) == "later"
        assert m.can_fit(tokens=tokens_of(33)) == "never"
        assert m.can_fit(tokens=tokens_of(32)) == "yes"  # 5 blocks are hits
        assert m.can_fit(tokens=tokens_of(32), namespace="x") == "later"
        assert m.can_fit(4, tokens=tokens_of(32)) == "never"  # 8 blocks and one of 8


@pytest.mark.parametrize("part", range(4))
def test_can_fit_agrees_with_the_act(seed: int, part: int) -> None:
    rng = random.Random(seed + part)
    with Driver() as d:
        work = GoodWork(d, seed + part)
        for _ in range(40):
            work.run(3)
            seqs = rng.sample(d.live, rng.randint(0, len(d.live)))
            answer = d.manager.can_fit(seqs=seqs)
            try:
                d.manager.step(seqs).cancel()
                assert answer == "yes"
            except kvmem.OutOfBlocks:
                assert answer == "later"
            except kvmem.SequenceTooLong:
                assert answer == "never"


# --- pins, reset -----------------------------------------------------------------------------


def test_a_pin_keeps_blocks_on_the_device() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(9))
        d.step([seq])
        pin = d.pin(seq)
        assert pin.num_tokens == 8
        assert m.block(seq.block_ids[0]).state == "PINNED"
        d.free(seq)
        assert m.evict(8) == 0
        assert m.stats().device.pinned == 2
        assert m.match(tokens_of(9)).on_device == 8
        with d.pin(tokens_of(6)) as other:
            assert other.num_tokens == 4
        assert other.released
        pin.release()
        assert m.evict(8) == 2


def test_a_pinned_block_is_copied_before_a_write() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        with d.pin(seq):
            d.manager.truncate([seq], 6)
            d.manager.append([seq], [99])
            d.step([seq])
            assert d.manager.match(tokens_of(8)).num_tokens == 8
            d.check_content()


def test_swap_out_leaves_pinned_blocks_on_the_device() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(9))
        d.step([seq])
        with d.pin(seq):
            d.manager.swap_out([seq])
            d.manager.evict(8)
            assert [d.manager.block(b).frame_ids[0] > 0 for b in seq.block_ids] == [
                True,
                True,
                False,
            ]
            assert d.manager.swap_in([seq]).num_blocks == 1
        d.check_content()


def test_pins_in_a_namespace() -> None:
    with Driver() as d:
        d.step([d.create(tokens_of(9), namespace="a")])
        with pytest.raises(kvmem.PinError):
            d.manager.pin(tokens_of(9))
        with d.pin(tokens_of(9), namespace="a") as pin:
            assert pin.num_tokens == 8


def test_reset_forgets_the_cache_and_spares_the_living() -> None:
    with Driver(device_blocks=16) as d:
        m = d.manager
        gone, seq, other = (
            d.create(tokens_of(8)),
            d.create(tokens_of(5)),
            d.create([1] * 5, namespace="x"),
        )
        d.step([gone, seq, other])
        d.free(gone)
        m.reset("x")
        assert m.match([1] * 5, "x").num_tokens == 0
        assert m.match(tokens_of(8)).num_tokens == 8
        m.reset()
        assert m.match(tokens_of(8)).num_tokens == 0
        m.append([seq, other], [4, 4])
        d.step([seq, other])
        d.check_content()
        new = d.create(tokens_of(8))
        assert d.step([new]).num_tokens == 8
        assert m.match(tokens_of(8)).num_tokens == 8


def test_reset_refuses_an_open_step() -> None:
    with Driver() as d:
        with d.manager.step([d.create([1])]) as step:
            with pytest.raises(RuntimeError, match="end it first"):
                d.manager.reset()
            with pytest.raises(RuntimeError, match="end it first"):
                d.manager.reset("never used")  # the answer tells nothing about other tenants
            d.run(step)
