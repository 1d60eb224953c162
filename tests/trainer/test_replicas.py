"""Microbatches that several threads of a trainer share."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter

import pytest

from tests.trainer.rollouts import trainer
from tramontane.config import SFTConfig
from tramontane.models.loading import load_config
from tramontane.sft import sft
from tramontane.trainer.replicas import LOWEST_PRIORITY


def replicas(count):
    return trainer(threads=count)._replicas


def taken_while_the_first_is_busy(shared, *, repeatable):
    """Number of indices that each of two replicas takes of ten, the first waiting in its first
    until nine others are computed, or all that are the other's."""
    first = shared.models[0]
    begun, others, taken = threading.Event(), threading.Semaphore(0), Counter()
    expected = 5 if repeatable else 9

    def compute(model, index):
        number = 0 if model is first else 1
        if number == 1:
            assert begun.wait(60)
            others.release()
        elif not begun.is_set():
            begun.set()
            for _ in range(expected):
                assert others.acquire(timeout=60)
        taken[number] += 1
        return index * index

    assert shared.map(compute, 10, repeatable=repeatable) == [n * n for n in range(10)]
    return taken[0], taken[1]


def test_a_replica_that_is_slow_takes_fewer_microbatches():
    assert taken_while_the_first_is_busy(replicas(2), repeatable=False) == (1, 9)


def test_of_repeatable_batches_each_replica_takes_its_own():
    assert taken_while_the_first_is_busy(replicas(2), repeatable=True) == (5, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux alone")
@pytest.mark.parametrize("alone", [False, True])
def test_all_threads_but_the_first_give_way_to_generators(alone):
    config = SFTConfig(output="x", model="tiny", dtype="float32", threads=3)
    shared = sft.make_trainer(config, load_config("tiny"))._replicas if alone else replicas(3)
    nice = {}
    barrier = threading.Barrier(3, timeout=60)

    def compute(model, index):
        barrier.wait()
        nice[index] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, 0)
    shared.map(compute, 3, repeatable=True)
    others = own if alone else LOWEST_PRIORITY
    assert nice == {0: own, 1: others, 2: others}


def test_an_error_of_any_replica_is_raised():
    first = (shared := replicas(2)).models[0]

    def compute(model, index):
        if model is not first:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        shared.map(compute, 4, repeatable=True)
