import pytest

from reef.cordis.context import Context


def logged(log, name, error=None):
    def undo():
        log.append(f"-{name}")
        if error is not None:
            raise error

    def do():
        log.append(f"+{name}")
        return undo

    return do


def test_inverses_run_once_and_last_first():
    log, context = [], Context()
    for name in "abc":
        context.effect(logged(log, name))
    assert len(context) == 3
    assert context.dispose() == ()
    assert context.dispose() == ()
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert len(context) == 0


def test_errors_are_collected_and_stop_nothing():
    log, context = [], Context()
    first, second = ValueError("first"), OSError("second")
    context.effect(logged(log, "a", first))
    context.effect(logged(log, "b"))
    context.child().effect(logged(log, "c", second))
    assert context.dispose() == (second, first)
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_an_effect_that_fails_leaves_nothing_to_undo():
    log, context = [], Context()
    context.effect(logged(log, "a"))
    with pytest.raises(ZeroDivisionError):
        context.effect(lambda: 1 / 0)
    context.dispose()
    assert log == ["+a", "-a"]


def test_a_child_goes_alone_or_with_its_parent_in_its_place():
    log, parent = [], Context()
    parent.effect(logged(log, "a"))
    one, two = parent.child(), parent.child()
    two.effect(logged(log, "two"))
    one.effect(logged(log, "one"))
    parent.effect(logged(log, "b"))
    assert one.dispose() == ()
    assert log[-1] == "-one"
    parent.dispose()
    assert log[-3:] == ["-b", "-two", "-a"]
    assert log.count("-one") == 1


def test_a_disposed_context_takes_nothing_also_while_it_is_disposed():
    log, context = [], Context()

    def again():
        context.effect(logged(log, "late"))

    context.effect(lambda: again)
    (error,) = context.dispose()
    assert isinstance(error, RuntimeError)
    assert log == []
    for late in (lambda: context.effect(logged(log, "x")), context.child):
        with pytest.raises(RuntimeError, match="disposed"):
            late()


def test_children_that_come_and_go_leave_nothing_behind():
    parent = Context()
    for _ in range(3):
        parent.child().dispose()
    assert not parent._stack
