"""References to objects that somebody else holds."""

from ddpcheck.record.recording import WeakList


class Thing:
    pass


def test_what_lives_is_given_in_its_order_and_what_is_gone_or_discarded_is_not() -> None:
    living = WeakList()
    first, second, third = things = [Thing() for _ in range(3)]
    for thing in things:
        living.add(thing)
    assert [*living] == [first, second, third]
    del things, thing, second
    assert [*living] == [first, third]
    living.discard(third)
    living.discard(third)
    assert [*living] == [first] and living
    del first
    assert not [*living] and not living


def test_it_may_change_while_it_is_gone_through() -> None:
    living = WeakList()
    things = [Thing() for _ in range(3)]
    for thing in things:
        living.add(thing)
    seen = []
    for thing in living:
        seen.append(thing)
        living.discard(thing)
        living.add(thing)
    assert seen == things and len([*living]) == 3
