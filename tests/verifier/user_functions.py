"""Rewards and verifiers for tests, which do what users' functions do."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile

from tramontane.verifier.custom import Response

SHORT = [Response("<think>a</think>\\boxed{2}", 9), Response("<think>b</think>\\boxed{2}", 9)]
KEPT = []


def square(x):
    return x * x


def fork_pool(problem, text, n_tokens):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return float(sum(pool.map(square, [0, 1])))


def spawn_pool(problem, text, n_tokens):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return float(sum(pool.map(square, [0, 1])))


def futures(problem, text, n_tokens):
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        return float(sum(pool.map(square, [0, 1])))


def kept_pool(problem, text, n_tokens):
    """One that nobody closes, and a program that nobody waits for."""
    if not KEPT:
        KEPT.append(multiprocessing.get_context("fork").Pool(2))
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    return float(sum(KEPT[0].map(square, [0, 1])))


def exits(problem, text, n_tokens):
    child = os.fork()
    if child == 0:
        sys.exit(7)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7)


def fails(problem, text, n_tokens):
    child = os.fork()
    if child == 0:
        raise KeyError("in the child")
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1)


def interrupts(problem, text, n_tokens):
    """A library's time limit does this, by a signal or `_thread.interrupt_main`."""
    raise KeyboardInterrupt


def returns(problem, text, n_tokens):
    child = os.fork()
    if child == 0:
        return 0.5
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)


def in_another_order(n_tokens, problem, text):
    return float(n_tokens == 9 and problem.id == "sum" and text.startswith("<think>"))


def misnamed(text, problem, length):
    return 1.0


def turned(answer, problem):
    return (answer, problem.answer) == ("2", "2")


def changes(problem, text, n_tokens):
    problem.metadata["seen"].append(text)
    return float(len(problem.metadata["seen"]) == 1)


def changes_all(problem, texts):
    problem.metadata["seen"].append("all")
    return [float(len(problem.metadata["seen"]) == 1)] * len(texts)


def moves(problem, text, n_tokens):
    """Leaves its worker in a folder that is gone."""
    found = os.path.exists("here")
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    return float(found)


class Forks:
    def step(self, message):
        return "pool", fork_pool(None, "", 0) + futures(None, "", 0) + exits(None, "", 0), False


class ForksInLoop:
    async def step(self, message):
        return Forks().step(message)


class Unsayable(Exception):
    def __str__(self):
        raise ValueError("no text")


def unsayable(problem, text, n_tokens):
    raise Unsayable


def beyond_exceptions(problem, text, n_tokens):
    raise BaseException("of no kind")


async def cancelled(problem, text, n_tokens):
    raise asyncio.CancelledError
