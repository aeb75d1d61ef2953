"""Mistakes of ordering planted in the store, one a function, for the checker to find.

A patch calls `hit()` where it does something else than the original would have. Those of the ledger
lie in mutants_ledger.py; mutate.py drives both and knows the recorded seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvmem.ledger import sealed
from kvmem.store import order, store
from kvmem.store.device import Stream
from kvmem.store.order import StepFences, TransferQueue
from kvmem.store.sim import SimDevice
from kvmem.store.store import Store
from kvmem.store.transfer import Transfers
from tests.faults.plant import replaced

Hit = Callable[[], None]
Function = Callable[..., Any]
Patch = Callable[[Function, Hit], Function]


@dataclass(frozen=True)
class Mutant:
    """Places to patch, with what. `survives`: why nothing finds it, where nothing does."""

    places: tuple[tuple[Any, str], ...]  # (class or module, name), or (None, ledger function)
    patch: Patch
    survives: str = ""
    faults: bool = False  # found only where a device fails


MUTANTS: dict[str, Mutant] = {}


def mutant(
    *places: tuple[Any, str], survives: str = "", faults: bool = False
) -> Callable[[Patch], Patch]:
    """Register a patch under its own name."""

    def add(patch: Patch) -> Patch:
        MUTANTS[patch.__name__] = Mutant(places, patch, survives, faults)
        return patch

    return add


@contextmanager
def planted(one: Mutant, hit: Hit) -> Iterator[None]:
    """The mistake, while inside."""
    with contextlib.ExitStack() as stack:
        for owner, name in one.places:
            if owner is None:
                stack.enter_context(replaced(name, lambda original: one.patch(original, hit)))
                continue
            original = owner.__dict__[name]
            setattr(owner, name, one.patch(original, hit))
            stack.callback(setattr, owner, name, original)
        yield


# --- a wait is dropped ---------------------------------------------------------------------------


def dropping(stream: Stream, label: str) -> Patch:
    """Waits of one stream for one kind of fence."""

    def patch(original: Function, hit: Hit) -> Function:
        def after(self: Any, at: Stream, *fences: Any) -> None:
            kept = []
            for fence in fences:
                if at is stream and fence is not None and fence.label.startswith(label):
                    hit()
                else:
                    kept.append(fence)
            original(self, at, *kept)

        return after

    return patch


for _stream, _label in (
    (Stream.OUT, "step"), (Stream.OUT, "in"), (Stream.IN, "step"), (Stream.IN, "out"),
    (Stream.COMPUTE, "in"), (Stream.COMPUTE, "out"),
):  # fmt: skip
    MUTANTS[f"{_stream.name.lower()}_waits_for_no_{_label}"] = Mutant(
        ((Transfers, "after"),), dropping(_stream, _label)
    )


# --- steps ---------------------------------------------------------------------------------------


@mutant((StepFences, "after"))
def an_ended_step_counts_as_done(original: Function, hit: Hit) -> Function:
    """As it was before the simulated device: right where the calling thread computes."""

    def after(self: Any, epoch: int) -> list[Any]:
        if original(self, epoch) and epoch not in self.open:
            hit()
        return [self.open[epoch]] if epoch in self.open else []

    return after


@mutant((StepFences, "after"))
def after_a_step_means_that_step_alone(original: Function, hit: Hit) -> Function:
    """An earlier step that ended later is forgotten."""

    def after(self: Any, epoch: int) -> list[Any]:
        found: list[Any] = original(self, epoch)
        alone = [fence for ended, fence in self._ended if ended == epoch]
        alone += [self.open[epoch]] if epoch in self.open else []
        if {id(fence) for fence in found} != {id(fence) for fence in alone}:
            hit()
        return alone

    return after


@mutant((StepFences, "begin"))
def a_step_ends_when_it_begins(original: Function, hit: Hit) -> Function:
    def begin(self: Any, epoch: int) -> None:
        new = epoch not in self.open
        original(self, epoch)
        if new:
            hit()
            fence = self.open[epoch]
            self._device.record(Stream.COMPUTE, fence)

    return begin


@mutant((StepFences, "end"))
def the_fence_of_a_step_is_never_recorded(original: Function, hit: Hit) -> Function:
    def end(self: Any, epoch: int) -> None:
        fence = self.open.pop(epoch, None)
        if fence is not None:
            hit()
            self._ended.append((epoch, fence))

    return end


@mutant((Store, "begin"))
def copy_on_write_before_the_waits(original: Function, hit: Hit) -> Function:
    def begin(self: Any, plan: Any) -> Any:
        if len(plan.copy_source):
            hit()
            self._copy_on_write(plan)
            none = plan.copy_source[:0]
            plan.copy_source, kept = none, plan.copy_source
            try:
                return original(self, plan)
            finally:
                plan.copy_source = kept
        return original(self, plan)

    return begin


# --- transfers -----------------------------------------------------------------------------------


@mutant((TransferQueue, "fence"))
def every_transfer_counts_as_done(original: Function, hit: Hit) -> Function:
    def fence(self: Any, transfer_id: int) -> Any:
        if original(self, transfer_id) is not None:
            hit()

    return fence


@mutant((Store, "retired"))
def what_was_submitted_has_retired(original: Function, hit: Hit) -> Function:
    """The ledger is told too early, so its plans leave out waits."""

    def retired(self: Any) -> tuple[int, int]:
        now = (self._transfers["out"].last, self._transfers["in"].last)
        if original(self) != now:
            hit()
        return now

    return retired


def fence_first(stream: Stream) -> Patch:
    """The fence of a transfer is recorded before its last piece of work."""

    def patch(original: Function, hit: Hit) -> Function:
        def record(self: Any, at: Stream, fence: Any) -> None:
            queue = self.scheduler.queues[stream]
            held = stream in self.scheduler.held
            self.scheduler.held.add(stream)  # so that the entry before it can't have run
            try:
                original(self, at, fence)
            finally:
                if not held:
                    self.scheduler.held.discard(stream)
            if at is stream and len(queue) > 1 and queue[-2].kind != "wait" and not queue[-2].tick:
                hit()
                queue[-1], queue[-2] = queue[-2], queue[-1]

        return record

    return patch


MUTANTS["out_fence_before_its_copy"] = Mutant(((SimDevice, "record"),), fence_first(Stream.OUT))
MUTANTS["in_fence_before_its_copy"] = Mutant(((SimDevice, "record"),), fence_first(Stream.IN))


@mutant((Transfers, "submit_out"))
def poison_before_the_copies(original: Function, hit: Hit) -> Function:
    def submit_out(self: Any, plan: Any, out: Any, poison: Any) -> None:
        if len(poison) and set(poison.tolist()) & set(out.device.tolist()):
            hit()
        arena, fill = self._device_arena, partial(self._filler.fill, poison)
        self.after(Stream.OUT, *self._steps.after(plan.out_after_step))
        self.after(Stream.OUT, self.into.fence(plan.out_after_in))
        if len(poison):
            self._device.launch(Stream.OUT, fill, writes=((arena, poison),))
        original(self, plan, out, poison[:0])

    return submit_out


@mutant((Transfers, "submit_out"))
def poison_at_once(original: Function, hit: Hit) -> Function:
    """Vacated frames are filled by the host, under whatever still reads them."""

    def submit_out(self: Any, plan: Any, out: Any, poison: Any) -> None:
        if len(poison):
            hit()
            self._filler.fill(poison)
        original(self, plan, out, poison[:0])

    return submit_out


@mutant((Transfers, "submit_out"))
def poison_on_the_in_stream(original: Function, hit: Hit) -> Function:
    def submit_out(self: Any, plan: Any, out: Any, poison: Any) -> None:
        original(self, plan, out, poison[:0])
        if len(poison):
            hit()
            arena, fill = self._device_arena, partial(self._filler.fill, poison)
            self._device.launch(Stream.IN, fill, writes=((arena, poison),))

    return submit_out


def by_reference(original: Function, hit: Hit) -> Function:
    """Arrays of the plan are used in place (case 41)."""

    def keep(*arguments: Any) -> Any:
        hit()
        if len(arguments) == 1:
            return arguments[0]
        array, count = arguments
        return array[:count, 0], array[:count, 1], array[:count, 2]

    return keep


MUTANTS["ids_by_reference_in_the_store"] = Mutant(
    ((order, "own_copy"), (store, "own_copy")),
    by_reference,
    "masked: the ledger gives each plan arrays of its own (sealed._columns)",
)
MUTANTS["ids_by_reference_in_the_ledger"] = Mutant(
    ((sealed, "_columns"),),
    by_reference,  # copies on write are read when the step begins, perhaps after another plan
)
MUTANTS["ids_by_reference_in_both"] = Mutant(
    ((order, "own_copy"), (store, "own_copy"), (sealed, "_columns")), by_reference
)


# --- failures ------------------------------------------------------------------------------------


@mutant((Store, "check_usable"), faults=True)
def a_failed_device_goes_untold(original: Function, hit: Hit) -> Function:
    def check_usable(self: Any) -> None:
        if self.device.error is not None:
            hit()

    return check_usable


@mutant((SimDevice, "query"), faults=True)
def fences_of_a_failed_device_are_reached(original: Function, hit: Hit) -> Function:
    """A failed transfer retires (R5)."""

    def query(self: Any, fence: Any) -> bool:
        if self.error is not None:
            hit()
            return True
        return bool(original(self, fence))

    return query
