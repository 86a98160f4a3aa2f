"""Which loss scale gradients carry, told by notes: against plain arithmetic, where each gradient knows its truth."""

import pytest
from hypothesis import given, settings, strategies as st

import ampx
from ampx.protocol import ScaleGroup
from ampx.provenance import UNKNOWN, Provenance, Slots


class Gradient:
    """A gradient of one element, which counts how often it was written.

    `parts` is the truth that nothing under test reads: what it should be without any scale, by the scale it carries.
    """

    def __init__(self, value, scale):
        self.value, self.version, self.parts = value * scale, 0, {scale: value}

    def add(self, value, scale):
        self.value += value * scale
        self.version += 1
        self.parts[scale] = self.parts.get(scale, 0.0) + value

    def divide(self, divisor):
        self.value /= divisor
        self.version += 1
        self.parts = {scale / divisor: value for scale, value in self.parts.items()}


class Slot:
    def __init__(self, gradient=None):
        self.gradient = gradient

    def backward(self, value, scale):
        if self.gradient is None:
            self.gradient = Gradient(value, scale)
        else:
            self.gradient.add(value, scale)


class PlainSlots(Slots):
    also_unknown = " or that a test left"

    def __init__(self):
        self.snapshots, self.shared = 0, []

    def snapshot(self, slots):
        self.snapshots += 1
        return [(slot, slot.gradient, slot.gradient and slot.gradient.version) for slot in slots]

    def is_zero(self, gradient):
        return gradient.value == 0.0

    def divide(self, gradients, divisor):
        for gradient in gradients:
            gradient.divide(divisor)

    def sharers(self, own, slots):
        return [(other, [slot for slot in slots if slot in held]) for other, held in self.shared if other is not own]


def values(slots):
    return [slot.gradient and slot.gradient.value for slot in slots]


def new_member():
    return ScaleGroup("plain", ampx.LossScale(8.0)).add_member()


@pytest.fixture
def member():
    return new_member()


@pytest.fixture
def provenance():
    return Provenance(PlainSlots())


def test_nothing_is_looked_at_where_nothing_is_noted_and_the_scale_is_right(provenance):
    assert provenance.plan([Slot(Gradient(1.0, 8.0))], 8.0, 8.0) == []
    assert provenance._slots.snapshots == 0


def test_gradients_that_nothing_is_noted_of_carry_the_default(provenance, member):
    slots = [Slot(Gradient(3.0, 8.0)), Slot(), Slot(Gradient(-5.0, 8.0))]
    provenance.bring_to(member, slots, 2.0, 8.0)
    assert values(slots) == [6.0, None, -10.0]
    assert member.stage == "changing"


def test_each_gradient_is_divided_by_what_was_noted_of_it(provenance, member):
    slots = [Slot(Gradient(3.0, 8.0)), Slot(Gradient(3.0, 16.0)), Slot(Gradient(3.0, 16.0)), Slot(Gradient(3.0, 1.0))]
    provenance.note(slots[:1], 8.0)
    provenance.note(slots[1:3], 16.0)
    assert [divisor for divisor, _ in provenance.plan(slots, 1.0, 1.0)] == [8.0, 16.0]
    provenance.bring_to(member, slots, 1.0, 1.0)
    assert values(slots) == [3.0] * 4
    assert provenance.notes == {}


def test_nothing_changes_where_all_carry_the_scale_by_their_notes(provenance, member):
    slots = [Slot(Gradient(3.0, 8.0))]
    provenance.note(slots, 8.0)
    provenance.bring_to(member, slots, 8.0, 1.0)
    assert (values(slots), member.stage, provenance.notes) == ([24.0], "idle", {})


@pytest.mark.parametrize("stays", [False, True])
def test_a_note_ends_with_the_next_write_unless_it_stays(provenance, stays):
    slot = Slot(Gradient(3.0, 8.0))
    provenance.note([slot], 8.0, stays=stays)
    slot.gradient.add(0.0, 8.0)
    (snapshot,) = provenance._slots.snapshot([slot])
    assert provenance.scale_of(snapshot, 1.0) == (8.0 if stays else 1.0)


@pytest.mark.parametrize("stays", [False, True])
def test_a_note_ends_with_its_gradient(provenance, stays):
    slot = Slot(Gradient(3.0, 8.0))
    provenance.note([slot], 8.0, stays=stays)
    slot.gradient = Gradient(3.0, 1.0)
    (snapshot,) = provenance._slots.snapshot([slot])
    assert provenance.scale_of(snapshot, 1.0) == 1.0


def test_gradients_of_unknown_scale_are_refused_and_stay_as_they_are(provenance, member):
    slots = [Slot(Gradient(3.0, 8.0)), Slot(Gradient(3.0, 8.0))]
    provenance.note(slots[1:], UNKNOWN)
    assert provenance.are_unknown(slots)
    with pytest.raises(ampx.ProtocolError, match=r"or that a test left.*opt\.zero_grad\(\)"):
        provenance.bring_to(member, slots, 1.0, 8.0)
    assert (values(slots), member.stage) == ([24.0, 24.0], "idle")


def test_zeros_carry_every_scale(provenance, member):
    slots = [Slot(Gradient(0.0, 8.0)), Slot()]
    provenance.note(slots, UNKNOWN)
    assert not provenance.are_unknown(slots)
    provenance.bring_to(member, slots, 1.0, 1.0)
    assert (values(slots), member.stage, provenance.notes) == ([0.0, None], "idle", {})


def test_a_backward_for_others_is_noted_only_where_it_wrote(provenance):
    slots = [Slot(), Slot(Gradient(3.0, 8.0)), Slot(Gradient(3.0, 1.0)), Slot(Gradient(3.0, 1.0)), Slot()]
    provenance.note(slots[1:2], 8.0)
    before = provenance._slots.snapshot(slots)
    for slot in slots[:3]:
        slot.backward(1.0, 8.0)
    provenance.note_foreign(before, 1.0, 8.0)
    scales = [provenance.scale_of(snapshot, "default") for snapshot in provenance._slots.snapshot(slots)]
    # made by it, added to one of its scale, added to an unscaled one, untouched, none
    assert scales == [8.0, 8.0, UNKNOWN, "default", "default"]


@pytest.mark.parametrize("gradient", [Gradient(3.0, 8.0), None], ids=["pending", "none yet"])
def test_what_a_backward_for_others_leaves_where_they_must_not_add_is_unknown(provenance, gradient):
    slots = [Slot(gradient)]
    before = provenance._slots.snapshot(slots)
    slots[0].backward(1.0, 8.0)
    provenance.note_foreign(before, UNKNOWN, 8.0)
    assert provenance.are_unknown(slots)


def test_who_shares_a_gradient_that_was_divided_does_not_know_its_scale(provenance, member):
    own, shared, theirs = Slot(Gradient(3.0, 8.0)), Slot(Gradient(3.0, 8.0)), Slot(Gradient(3.0, 8.0))
    other = Provenance(provenance._slots)
    provenance._slots.shared = [(provenance, [own, shared]), (other, [shared, theirs])]
    provenance.bring_to(member, [own, shared], 1.0, 8.0)
    assert values([own, shared, theirs]) == [3.0, 3.0, 24.0]
    shared.gradient.add(1.0, 8.0)
    assert [other.are_unknown([slot]) for slot in (shared, theirs)] == [True, False]


# Powers of two, so that the arithmetic is exact.
_SCALE = st.sampled_from([1.0, 8.0, 64.0])
_ORDERS = st.lists(
    st.tuples(st.sampled_from(["own", "foreign", "clear", "skip", "bring"]), st.integers(0, 2), _SCALE), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(_ORDERS)
def test_in_any_order_gradients_carry_one_scale_after_it_or_are_refused(orders):
    member, provenance = new_member(), Provenance(PlainSlots())
    slots = [Slot(), Slot(), Slot()]
    default = 1.0  # what the optimizer's stage says
    for order, place, scale in orders:
        if order == "own":  # the optimizer's own backward, for which all its gradients are brought to one scale first
            if not brought(provenance, member, slots, scale, default):
                return
            default = scale
            slots[place].backward(1.0, scale)
        elif order == "foreign":
            before = provenance._slots.snapshot(slots)
            slots[place].backward(1.0, scale)
            provenance.note_foreign(before, default, scale)
        elif order == "clear":
            slots[place].gradient = None
        elif order == "skip":
            provenance.note(slots, UNKNOWN)
            default = 1.0
        else:
            if not brought(provenance, member, slots, scale, default):
                return
            default = scale


def brought(provenance, member, slots, scale, default):
    """Return whether gradients were brought to a scale: to the true values then; else they stayed as they were."""
    before = values(slots)
    try:
        provenance.bring_to(member, slots, scale, default)
    except ampx.ProtocolError:
        assert values(slots) == before
        return False
    for slot in slots:
        if slot.gradient is not None:
            assert set(slot.gradient.parts) == {scale}
            assert slot.gradient.value == sum(slot.gradient.parts.values()) * scale
    return True
