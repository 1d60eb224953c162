"""Where what a user wrote runs, and what its failures say."""

import asyncio
import functools
import threading
from types import SimpleNamespace

import pytest

from tramontane.environments.running import EnvironmentFailed, Runner, lives_in_event_loop

HERE = threading.get_ident


def ran(*calls, process=None, kind=None):
    """Results of functions in one conversation, in order."""

    async def all_of_them():
        runner = (process or Runner()).of_conversation()
        runner.environment = kind
        found = [await runner.run(call) for call in calls]
        runner.end()
        return found

    return asyncio.run(all_of_them())


def wrapped(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


class Plain:
    def step(self):
        return HERE()

    def ask(self):
        return HERE()


class Helped(Plain):
    async def ask(self):  # nobody calls it
        return HERE()


class Stepped(Plain):
    async def step(self):
        return HERE()


class Started(Plain):
    async def start(self):
        return HERE()


class Closed(Plain):
    async def close(self):
        return HERE()


class Harness:
    async def run(self):
        return HERE()

    async def look(self):
        return HERE()


class SlowHarness(Harness):
    def run(self):
        return HERE()


class Box:
    def ask(self):
        return HERE()

    async def _wait(self):
        return HERE()


class AsynchronousBox(Box):
    async def look(self):
        return HERE()


class StreamingBox(Box):
    async def each(self):
        yield HERE()


class WrappedBox(Box):
    @wrapped
    async def look(self):
        return HERE()


class StaticBox(Box):
    @staticmethod
    async def look():
        return HERE()


class HoldingBox(Box):
    held = SimpleNamespace(__wrapped__=AsynchronousBox.look)  # an object, as proxies are


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        (Plain, False), (Helped, False), (Stepped, True), (Started, True), (Closed, True),
        (Harness, True), (SlowHarness, False),
        (Box, False), (AsynchronousBox, True), (StreamingBox, True), (WrappedBox, True),
        (StaticBox, True), (HoldingBox, False), (int, False),
    ],
)  # fmt: skip
def test_an_object_lives_in_the_event_loop_if_a_method_that_is_called_is_a_coroutine(kind, inside):
    assert lives_in_event_loop(kind) == inside


def test_an_object_is_made_and_used_in_one_thread():
    """The event loop's is this one."""

    async def conversation(kind, name):
        runner = Runner().of_conversation()
        runner.environment = kind
        made_in = []
        made = await runner.run(type(kind.__name__, (kind,), {
            "__init__": lambda self: made_in.append(HERE())}))  # fmt: skip
        other = kind()  # not made by this runner: it belongs to the environment
        found = [await runner.run(getattr(each, name)) for each in (made, made, other)]
        number = made_in[0]
        found.append(await runner.run(lambda: number and HERE()))  # a closure
        runner.end()
        return {*made_in, *found}

    for kind, name in ((Stepped, "step"), (AsynchronousBox, "ask"), (StreamingBox, "ask")):
        assert asyncio.run(conversation(kind, name)) == {HERE()}
    for kind, name in ((Plain, "step"), (Box, "ask")):
        used = asyncio.run(conversation(kind, name))
        assert len(used) == 1 and HERE() not in used


def test_a_toolbox_lives_where_its_own_methods_want():
    async def conversation(kind, environment):
        runner = Runner().of_conversation()
        runner.environment = environment
        box = await runner.run(kind)  # made by the runner, if `kind` is a class
        found = await runner.run(box.ask)
        runner.end()
        return found

    assert asyncio.run(conversation(AsynchronousBox, Plain)) == HERE()
    assert asyncio.run(conversation(Box, Stepped)) != HERE()
    assert asyncio.run(conversation(Box, None)) != HERE()
    assert asyncio.run(conversation(functools.partial(Box), Stepped)) == HERE()


def free(only=None):
    return only or HERE()


def test_functions_without_an_object_run_in_threads_of_their_own():
    """Even where the environment lives in the event loop; those of a module are none of its."""
    inside, outside = ran(Stepped().step, free, kind=Stepped)
    assert inside == HERE() != outside
    assert ran(HERE, kind=Stepped) != [HERE()]

    async def shared_and_own():
        process = Runner()
        one, other = process.of_conversation(), process.of_conversation()
        for runner in (one, other):
            runner.shared.append(free)
        threads = [await runner.run(free) for runner in (one, other)]
        own = await one.run(lambda: HERE())
        assert [await one.run(free, 3), await one.run(free, only=4)] == [3, 4]
        process.end(), one.end(), other.end()
        return threads, own

    threads, own = asyncio.run(shared_and_own())
    assert own not in threads and HERE() not in (*threads, own)


async def stream():
    yield 1
    yield 2


async def later():
    return 5


def test_what_is_generated_is_a_list_and_what_is_awaitable_is_awaited():
    class Counting:
        def __call__(self):
            yield from range(3)

    assert ran(Counting(), stream, later, lambda: later(), lambda: (6,)) == [
        [0, 1, 2], [1, 2], 5, 5, (6,),
    ]  # fmt: skip


class Quits:
    def __call__(self):
        raise SystemExit("so long")


def generates():
    yield 1
    raise KeyError("k")


async def streams():
    yield 1
    raise KeyError("k")


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def raises_cancelled():
    raise asyncio.CancelledError


def is_cancelled():
    raise asyncio.CancelledError


def other_thread():
    raise RuntimeError("objects made in a thread are used in that same thread")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Quits(), r"^Quits: SystemExit: so long \(.*test_running.py:\d+, in \w+\)$"),
        (generates, r"^generates: KeyError: 'k' \(.*test_running.py:\d+, in \w+\)$"),
        (streams, r"^streams: KeyError: 'k' \(.*test_running.py:\d+, in \w+\)$"),
        (is_cancelled, r"^is_cancelled: RuntimeError: CancelledError \("),
        (cancels_itself, "^cancels_itself: it was cancelled$"),
        (raises_cancelled, "^raises_cancelled: it was cancelled$"),
        (other_thread, "same thread; what a module makes is shared by .* asynchronous `step` "),
    ],
)
def test_a_failure_names_the_function_the_error_and_the_place(function, said):
    with pytest.raises(EnvironmentFailed, match=said) as failed:
        ran(function)
    shared = "what a module makes" in str(failed.value)
    assert shared == (function is other_thread)


class FailsInside(Stepped):
    def fail(self):
        raise KeyError("k")


def test_failures_in_the_event_loop_and_without_a_thread_are_named_as_well():
    async def fail(ended):
        runner = Runner().of_conversation()
        runner.environment = FailsInside
        if ended:
            runner.end()
        await runner.run(free if ended else FailsInside().fail)

    with pytest.raises(EnvironmentFailed, match="^FailsInside.fail: KeyError: 'k' "):
        asyncio.run(fail(False))
    with pytest.raises(EnvironmentFailed, match="^free: RuntimeError: cannot schedule new"):
        asyncio.run(fail(True))


def test_a_failure_within_keeps_its_own_words():
    def fails():
        raise EnvironmentFailed("the inner one")

    with pytest.raises(EnvironmentFailed, match="^the inner one$"):
        ran(fails)


def test_a_coroutine_that_nobody_waits_for_any_more_is_canceled():
    async def leave():
        entered, ended = asyncio.Event(), asyncio.Event()

        async def hang():
            try:
                entered.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(Runner().run(hang))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(leave())


@pytest.mark.parametrize("of_conversation", [True, False])
def test_what_nobody_waits_for_any_more_is_counted_until_it_ends(of_conversation):
    hold, entered, called = threading.Event(), threading.Event(), []

    def hang():
        entered.set()
        hold.wait(60)
        called.append("hung")

    async def leave():
        process = Runner(threads=1)
        runner = process.of_conversation() if of_conversation else process
        task = asyncio.create_task(runner.run(hang))
        await asyncio.to_thread(entered.wait, 60)
        waits = asyncio.create_task(runner.run(lambda: called.append(1)))  # behind it
        await asyncio.sleep(0)
        for each in (waits, task):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
        assert await asyncio.wait_for(runner.run(later), 60) == 5  # needs no thread
        counts = [(runner.stuck, process.stuck)]
        behind = runner.run(lambda: called.append("behind"))
        if of_conversation:  # its `close` finds a free thread
            await behind
        else:  # a process has no more threads than before
            behind = asyncio.create_task(behind)
            for _ in range(100):
                await asyncio.sleep(0)
        hold.set()
        while runner.stuck or process.stuck:
            await asyncio.sleep(0.001)
        if not of_conversation:
            await behind
        runner.end(), process.end()
        return counts

    assert asyncio.run(leave()) == [(1, 1)]
    assert called == (["behind", "hung"] if of_conversation else ["hung", "behind"])
