import gc

from tests import forked
from tests.fork_server import context
from tramontane import garbage
from tramontane.run.train import _frozen


def frozen_by_a_run():
    """How many objects more are frozen while a run goes on, and after it."""
    made, before = [[] for _ in range(1000)], gc.get_freeze_count()
    with _frozen():
        during = gc.get_freeze_count() - before
    return during >= len(made), gc.get_freeze_count() > 0


def run(sent):
    gc.unfreeze()  # what the server of this fork has kept
    garbage._kept = False
    alone = garbage.is_kept(), frozen_by_a_run()
    gc.freeze()  # a caller's own
    callers = garbage.is_kept(), frozen_by_a_run()
    gc.unfreeze()
    garbage.keep()
    sent.send([alone, callers, (garbage.is_kept(), frozen_by_a_run())])


def test_a_run_freezes_what_was_made_unless_that_is_kept_already():
    ours, theirs = context.Pipe(duplex=False)
    assert forked.end(forked.start(run, theirs)) == 0
    assert ours.recv() == [(False, (True, False)), (True, (False, True)), (True, (False, True))]
