"""Environments and tools for tests, named by import path as a user's are."""

import asyncio
import os
import random
import sqlite3
import subprocess
import tempfile
import threading
import time

import numpy as np

from tramontane.environments.protocol import Turn


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def divide(a: float, b: float) -> float:
    """Divide.

    Args:
        a: The dividend.
        b: The divisor.
    """
    await asyncio.sleep(0)
    return a / b


class Guess:
    """Higher or lower, by messages."""

    def start(self, problem, seed):
        self.number = random.Random(seed).randrange(100)
        self.tries = 0
        return [{"role": "user", "content": "Guess a number from 0 to 99."}]

    def step(self, message):
        self.tries += 1
        if not message["content"].strip().isdigit():
            return "Write a number.", None, False
        guess = int(message["content"])
        if guess == self.number:
            return Turn(reward=1 / self.tries, done=True)
        return {"messages": "higher" if guess < self.number else "lower"}


class Meets:
    """Starts once as many conversations have begun as its `place` waits for."""

    place = threading.Barrier(1)

    def start(self):
        self.place.wait()
        return [{"role": "user", "content": "Hello!"}]

    def step(self, message):
        return Turn(done=True)


class Waits:
    """Waits in each step until its `gate` is open."""

    gate = threading.Event()

    def step(self, message):
        Waits.gate.wait()
        return Turn(done=True)


class Says:
    """Says the texts of its row, one after another."""

    def start(self, problem):
        self.left = list(problem.metadata["texts"])

    def step(self, message):
        return (self.left.pop(0), None, False) if self.left else ((), 1.0, True)


class Counter:
    """A toolbox with state."""

    def __init__(self):
        self.count = 0

    def increase(self, by: int = 1) -> int:
        """Increase the counter.

        Args:
            by: How much.
        """
        self.count += by
        return self.count

    def fail(self):
        """Break."""
        raise OSError("the disk is gone")

    def hang(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "awake"

    def give(self, kind: str):
        """Give something odd.

        Args:
            kind: What.
        """
        loop = []
        loop.append(loop)
        found = {"unprintable": Unprintable(), "loop": loop, "huge": 10**6000, "half": "a\ud800b"}
        return found[kind]


class Dozer:
    """A toolbox of the event loop."""

    async def doze(self, seconds: float) -> str:
        """Wait without a thread.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "awake"


class Untyped:
    """A toolbox that cannot be described."""

    def look(self, where):
        """Look.

        Args:
            where: Where.
        """


class Stocked(Guess):
    """An environment whose object has a tool."""

    def start(self, problem, seed):
        self.tools = [self.look]
        return super().start(problem, seed)

    def look(self) -> str:
        """Look."""
        return str(self.number)


class TrlCounter:
    """In the shape of TRL's environments."""

    def reset(self, **row) -> str:
        self.target, self.count = int(row["answer"]), 0
        return f" The target is {self.target}."

    def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: How much.

        Returns:
            The counter.
        """
        if by < 0:
            raise ValueError("only upwards")
        self.count += by
        return f"now {self.count}"

    async def get_reward(self) -> float:
        return float(self.count == self.target)


class TrlRow:
    """In the shape of TRL's environments; says what it was reset with."""

    def reset(self, **row) -> str:
        return ", ".join(f"{name} {row[name]!r}" for name in ("answer", "question", "seed"))

    def get_reward(self) -> float:
        return 1.0


class TrlWordle:
    """In the shape of the game in TRL's guide."""

    def __init__(self):
        self.done = False

    def reset(self, answer: str, **row) -> None:
        self._secret, self._hits, self.done = answer, "", False

    @property
    def hits(self) -> int:
        raise AssertionError("evaluated")

    def _mark(self, word: str) -> str:
        pairs = zip(word, self._secret, strict=False)
        return "".join("G" if a == b else "." for a, b in pairs)

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: A word of five letters.

        Returns:
            G for each letter in its place.
        """
        if self.done:
            raise ValueError("Game over.")
        self._hits = self._mark(word)
        self.done = word == self._secret
        return self._hits

    def get_reward(self) -> float:
        return float(self.done)


class Unprintable:
    """Raises whatever is done with it."""

    def __repr__(self):
        raise ValueError("no")

    __str__ = __repr__

    @property
    def messages(self):
        raise OSError("neither")


class Untold(Exception):
    """Has no text."""

    def __str__(self):
        raise ValueError("no")


class Odd:
    """Behaves as `problem.metadata["behavior"]` says."""

    def start(self, problem):
        self.behavior = problem.metadata["behavior"]

    def step(self, message):
        match self.behavior:
            case "raise":
                raise RuntimeError("broken")
            case "exit":
                raise SystemExit(1)
            case "untold":
                raise Untold
            case "cancel":
                raise asyncio.CancelledError
            case "stop":
                raise StopIteration
            case "many":
                return Turn([{"role": "user", "content": "x"}] * 1001)
            case "huge":
                return Turn("x" * 4_000_001)
            case "none":
                return None
            case "silent":
                return Turn()
            case "nonsense":
                return "text", "much", False
            case "nan":
                return "text", float("nan"), False
            case "hang":
                time.sleep(1.5)
            case "die":
                os._exit(9)
            case "random":
                return Turn(str(random.SystemRandom().random()))
            case "long":
                return Turn("word " * 500)
            case "spawn":
                child = subprocess.Popen(["sleep", "1000"])
                with open(f"{tempfile.gettempdir()}/child", "w") as file:
                    file.write(str(child.pid))
                time.sleep(1000)
            case "memory":
                bytearray(1 << 30)
            case "file":
                return Turn(tempfile.mkstemp()[1])
            case "fork":
                child = os.fork()
                if child == 0:
                    os.setsid()
                    time.sleep(60)
                    os._exit(0)
                return Turn(str(child))
            case "wide":
                return Turn("x" * 300_000, done=True)
            case "stack":
                return Turn(str(threading.stack_size()))
            case "unprintable":
                return Unprintable()
            case "print":
                print("whole")
                print("half\ud800", end="")
                os.close(1)
            case "array":
                return "text", None, np.ones(2)
            case "endless":
                return ("x" for _ in iter(int, 1)), None, False
            case "halves":
                return "a\ud800b", None, True
            case "roles":
                return Turn([{"role": "assistant", "content": "I said so"}])
        return Turn("fine", 0.5, True)


class Bound:
    """Each part works only in the thread that made the object, as connections to SQLite do."""

    made = 0  # objects with a connection that is not closed

    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table notes (text)")
        self.local = threading.local()
        self.local.notes = []
        Bound.made += 1

    def start(self, problem):
        self.note("start")

    @property
    def tools(self):
        self.note("tools")
        return [self.note]

    def note(self, text: str) -> int:
        """Keep a note.

        Args:
            text: The note.
        """
        self.local.notes.append(text)
        self.database.execute("insert into notes values (?)", (text,))
        return len(self.local.notes)

    def step(self, message):
        time.sleep(0.01)  # other conversations take threads of a pool meanwhile
        self.note("step")
        rows = self.database.execute("select text from notes").fetchall()
        return [], float([text for (text,) in rows] == self.local.notes), True

    def close(self):
        self.note("close")
        self.database.close()
        Bound.made -= 1


class Desk:
    """A toolbox like `Bound`."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        time.sleep(0.01)
        return self.database.execute("select 2 * ?", (number,)).fetchone()[0]


def pause(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


class StartsWithMore:
    def start(self, problem, world):
        return None

    def step(self, message):
        return [], 1.0, True


class StepsWithMore:
    def step(self, message, state):
        return [], 1.0, True


class Loud:
    """Prints, and has a child print."""

    def start(self, problem):
        print("starts")
        subprocess.run(["echo", "from a child"])

    def step(self, message):
        return [], 1.0, True


LOUD = f"{__name__}:Loud"


class Kept:
    """Made in one place, used in all others: a connection works in one thread alone."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")
        self.seen = threading.local()
        self.seen.number = 0

    def _use(self):
        self.connection.execute("select 1")
        self.seen.number += 1
        return str(self.seen.number)


class AsyncStep(Kept):
    def start(self, problem):
        self._use()

    async def step(self, message):
        await asyncio.sleep(0.01)
        return self._use(), 1.0, self.seen.number == 3

    def close(self):
        self._use()


class AsyncStart(Kept):
    async def start(self, problem):
        self._use()

    def step(self, message):
        return self._use(), 1.0, self.seen.number == 3


class MixedBox(Kept):
    def start(self, problem):
        self._use()

    def look(self) -> str:
        """Look."""
        return self._use()

    async def listen(self) -> str:
        """Listen."""
        await asyncio.sleep(0.01)
        return self._use()


class MixedTrl(Kept):
    look, listen = MixedBox.look, MixedBox.listen

    def reset(self, **row):
        self._use()

    def get_reward(self):
        return float(self._use())


class ClosingOver(AsyncStep):
    """An asynchronous environment whose tool is a closure, and whose `tools` is a property."""

    @property
    def tools(self):
        self._use()

        def look() -> str:
            """Look."""
            return self._use()

        return [look]


class Boxed(Kept):
    """A synchronous environment with a tool of an object that it makes."""

    def __init__(self):
        super().__init__()
        box = MixedBox()
        box._use()
        self.tools = [box.look]

    def step(self, message):
        return self._use(), 1.0, False
