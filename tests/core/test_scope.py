import asyncio
import contextlib
import contextvars
import threading

import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ScopeError, UnknownStateError
from dualmesh.runtime import scope


@pytest.fixture
def states(world):
    return dm.init_parallel_states(
        {
            "base": dm.parallel_spec(dp_size=8),
            "a": dm.parallel_spec(dp_size=4, tp_size=2),
            "b": dm.parallel_spec(tp_size=8),
        }
    )


def in_thread(fn):
    """Return what fn returns in a thread of its own."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(fn()))
    thread.start()
    thread.join(10)
    return answers[0]


def test_first_registered_state_is_ambient(states):
    assert dm.get_parallel_state() is states["base"]
    assert dm.scope_name() == "base"


def test_scope_by_name_and_by_state(states):
    with dm.use_parallel_state("a") as entered:
        assert entered is states["a"] is dm.get_parallel_state()
        with dm.use_parallel_state(states["b"]):
            assert dm.get_parallel_state() is states["b"]
            assert dm.scope_name() == "b"
        assert dm.scope_name() == "a"
    assert dm.get_parallel_state() is states["base"]


def test_scope_knows_the_name_it_was_entered_by(states):
    again = dm.init_parallel_state(dp_size=4, tp_size=2, name="alias")
    assert again is states["a"]
    with dm.use_parallel_state("alias"):
        assert dm.scope_name() == "alias"


def test_exception_restores(states):
    with pytest.raises(ZeroDivisionError), dm.use_parallel_state("a"):
        _ = 1 / 0
    assert dm.get_parallel_state() is states["base"]


def test_unknown_name_lists_the_names_and_leaves_the_scope(states):
    with pytest.raises(UnknownStateError, match=r"'never' is not registered. Registered names: base, a, b"):
        dm.use_parallel_state("never").__enter__()
    with pytest.raises(ArgumentError, match="42 is no state"):
        dm.use_parallel_state(42).__enter__()
    assert dm.scope_name() == "base"


def test_one_object_can_be_entered_again_while_open(states):
    use = dm.use_parallel_state("a")
    with use, dm.use_parallel_state("b"):
        with use:
            assert dm.scope_name() == "a"
        assert dm.scope_name() == "b"
    assert dm.scope_name() == "base"


def test_one_object_used_by_many_threads_at_once(states):
    use = dm.use_parallel_state("a")
    entered, leave = threading.Barrier(9), threading.Barrier(9)
    seen, errors = [], []

    def work():
        try:
            with use:
                entered.wait(10)
                seen.append(dm.scope_name())
                leave.wait(10)
            seen.append(dm.scope_name())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    assert dm.scope_name() == "base"
    leave.wait(10)
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert sorted(seen) == ["a"] * 8 + ["base"] * 8


def test_leaving_out_of_order_puts_everything_right_then_raises(states):
    outer, inner = dm.use_parallel_state("a"), dm.use_parallel_state("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ScopeError, match=r"scope 'a' is left while scopes inside it are open \('b'\)"):
        outer.__exit__(None, None, None)
    assert dm.scope_name() == "base"
    inner.__exit__(None, None, None)
    assert dm.scope_name() == "base"


def test_out_of_order_does_not_hide_the_body_exception(states):
    outer, inner = dm.use_parallel_state("a"), dm.use_parallel_state("b")
    outer.__enter__()
    inner.__enter__()
    error = KeyError("body")
    assert outer.__exit__(KeyError, error, None) is None
    assert "scope 'a' is left while" in error.__notes__[0]
    assert dm.scope_name() == "base"


def test_scope_left_in_another_thread_is_named(states):
    use = dm.use_parallel_state("a")
    use.__enter__()

    def leave():
        with contextlib.suppress(ValueError):
            try:
                use.__exit__(None, None, None)
            except ScopeError as error:
                return str(error)

    assert "'a' is left in a thread or task that did not enter it" in in_thread(leave)
    assert dm.scope_name() == "a"
    scope.pop(scope.current_scope())


def test_threads_see_the_default_never_another_threads_scope(states):
    with dm.use_parallel_state("a"):
        assert in_thread(dm.scope_name) == "base"


def test_bind_carries_the_scope_into_a_thread(states):
    with dm.use_parallel_state("a"):
        bound = dm.bind(dm.scope_name)
    assert in_thread(bound) == "a"
    assert dm.bind(dm.scope_name)() == "base"


@pytest.mark.usefixtures("no_framework")
def test_copied_context_keeps_the_scope(states):
    with dm.use_parallel_state("a"):
        context = contextvars.copy_context()
    assert context.run(dm.scope_name) == "a"


def test_decorator_on_a_function_looks_the_name_up_at_call_time(world):
    @dm.use_parallel_state("late")
    def name(x, *, y):
        """Doc."""
        return dm.scope_name(), x + y

    with pytest.raises(UnknownStateError, match="late"):
        name(1, y=2)
    dm.init_parallel_state(dp_size=8)
    dm.init_parallel_state(tp_size=8, name="late")
    assert name(1, y=2) == ("late", 3)
    assert name.__doc__ == "Doc."
    assert dm.scope_name() == "base"


def test_decorator_recursion(states):
    @dm.use_parallel_state("a")
    def down(n):
        return [dm.scope_name(), *(down(n - 1) if n else [])]

    assert down(3) == ["a"] * 4


def test_generator_steps_run_in_the_scope_and_leak_nothing(states):
    log = []

    @dm.use_parallel_state("a")
    def generator():
        try:
            while True:
                log.append((dm.scope_name(), (yield dm.scope_name())))
        except ValueError:
            yield "caught " + dm.scope_name()
        finally:
            log.append(("closed", dm.scope_name()))

    steps = generator()
    assert next(steps) == "a"
    assert dm.scope_name() == "base"
    assert steps.send(1) == "a"
    with dm.use_parallel_state("b"):
        assert steps.send(2) == "a"
        assert dm.scope_name() == "b"
    assert steps.throw(ValueError()) == "caught a"
    steps.close()
    assert log == [("a", 1), ("a", 2), ("closed", "a")]
    assert dm.scope_name() == "base"


def test_generator_return_value_survives(states):
    @dm.use_parallel_state("a")
    def inner():
        yield 1
        return dm.scope_name()

    def outer():
        return (yield from inner())

    steps = outer()
    next(steps)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "a"


def test_coroutines_interleave_without_mixing(states):
    async def watch(name, other):
        seen = []
        for _ in range(4):
            seen.append(dm.scope_name())
            await asyncio.sleep(0)
            with dm.use_parallel_state(other):
                seen.append(dm.scope_name())
        return seen

    async def main():
        first, second = dm.use_parallel_state("a")(watch), dm.use_parallel_state("b")(watch)
        plain, answers = watch, await asyncio.gather(first("a", "b"), second("b", "a"), watch("base", "a"))
        assert plain is watch
        return answers, dm.scope_name()

    answers, after = asyncio.run(main())
    assert answers == [["a", "b"] * 4, ["b", "a"] * 4, ["base", "a"] * 4]
    assert after == "base"


def test_coroutine_exceptions_and_cancellation_pass_through(states):
    @dm.use_parallel_state("a")
    async def fails():
        await asyncio.sleep(0)
        raise KeyError(dm.scope_name())

    @dm.use_parallel_state("a")
    async def waits(log):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(dm.scope_name())
            raise

    async def main():
        with pytest.raises(KeyError, match="a"):
            await fails()
        log = []
        task = asyncio.ensure_future(waits(log))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return log, dm.scope_name()

    assert asyncio.run(main()) == (["a"], "base")


def test_async_generator_steps_run_in_the_scope(states):
    @dm.use_parallel_state("a")
    async def numbers():
        for number in range(3):
            await asyncio.sleep(0)
            yield number, dm.scope_name()

    async def main():
        seen = []
        async for item in numbers():
            seen.append((item, dm.scope_name()))
        return seen

    assert asyncio.run(main()) == [((number, "a"), "base") for number in range(3)]


@pytest.mark.usefixtures("no_framework")
def test_with_across_await_keeps_tasks_apart(states):
    async def task(name):
        with dm.use_parallel_state(name):
            await asyncio.sleep(0)
            return dm.scope_name()

    async def main():
        return await asyncio.gather(task("a"), task("b"), task("a"))

    assert asyncio.run(main()) == ["a", "b", "a"]
    assert dm.scope_name() == "base"


class RecordingMirror:
    """A mirror that keeps what it was told, and can refuse."""

    def __init__(self):
        self.stack, self.default, self.refuse, self.apart = [], "unset", False, []

    def enter(self, entered):
        if self.refuse:
            raise RuntimeError("no")
        self.stack.append(entered.name)
        return entered.name

    def leave(self, held):
        assert self.stack.pop() == held

    def set_default(self, state):
        self.default = state

    def allow_apart(self, entered):
        self.apart.append(entered and entered.name)


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setattr(scope, "_mirrors", ())
    return RecordingMirror()


def test_mirror_learns_open_scopes_and_the_default(states, mirror):
    with dm.use_parallel_state("a"), dm.use_parallel_state("b"):
        scope.add_mirror(mirror)
        assert mirror.stack == ["a", "b"]
        assert mirror.default is states["base"]
        with dm.use_parallel_state("a"):
            assert mirror.stack == ["a", "b", "a"]
    assert mirror.stack == []


def test_refusing_mirror_leaves_every_storage_as_it_was(states, mirror):
    second = RecordingMirror()
    second.refuse = True
    scope.add_mirror(mirror)
    scope.add_mirror(second)
    with pytest.raises(RuntimeError, match="no"):
        dm.use_parallel_state("a").__enter__()
    assert dm.scope_name() == "base"
    assert mirror.stack == []


def test_out_of_order_leaves_mirrors_in_order(states, mirror):
    scope.add_mirror(mirror)
    outer, inner = dm.use_parallel_state("a"), dm.use_parallel_state("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ScopeError):
        outer.__exit__(None, None, None)
    assert mirror.stack == []


def test_mirrors_stay_in_step_when_tasks_take_turns_with_open_blocks(states, mirror):
    scope.add_mirror(mirror)
    seen = []

    async def task(name, steps):
        with dm.use_parallel_state(name):
            for _ in range(steps):
                await asyncio.sleep(0)
            seen.append((name, list(mirror.stack)))

    async def main():
        await asyncio.gather(task("a", 1), task("b", 3), task("a", 2))

    asyncio.run(main())
    assert seen == [("a", ["a", "b", "a"]), ("a", ["b", "a"]), ("b", ["b"])]
    assert mirror.stack == []
    assert scope.this_thread.scope is None


def test_mirrors_are_asked_where_a_context_and_its_thread_are_in_different_scopes(states, mirror):
    scope.add_mirror(mirror)
    with dm.use_parallel_state("a"):
        context = contextvars.copy_context()
        assert context.run(dm.scope_name) == "a"
        assert mirror.apart == []
        in_thread(lambda: context.run(dm.get_parallel_state))
        in_thread(lambda: context.run(dm.scope_name))
    context.run(dm.get_parallel_state)
    assert mirror.apart == ["a"] * 3
    with dm.use_parallel_state("b"):
        contextvars.Context().run(dm.get_parallel_state)
    assert mirror.apart == ["a"] * 3 + [None]


def test_a_scope_entered_in_a_copied_context_is_right_there(states, mirror):
    scope.add_mirror(mirror)
    with dm.use_parallel_state("a"):
        context = contextvars.copy_context()

    def enter():
        with dm.use_parallel_state("b"):
            return dm.scope_name(), list(mirror.stack)

    assert in_thread(lambda: context.run(enter)) == ("b", ["b"])
    assert mirror.apart == []
    assert mirror.stack == []
