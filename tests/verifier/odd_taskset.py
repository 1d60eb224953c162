"""Sets of verifiers that a run must not misread, for tests: shuffled at each load, endless, with
penalties, mappings, metrics, stages and a state."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["Odd"]


class Noted(vf.State):
    seen: int = 0


class Number(vf.TaskData):
    answer: str


class NumberTask(vf.Task[Number, Noted]):
    async def setup(self, trace, runtime):
        assert not trace.assistant_messages
        trace.state.seen = 5

    async def finalize(self, trace, runtime):
        trace.state.seen += len(trace.messages)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward(weight=1.0)
    async def graded(self, trace: vf.Trace) -> dict[str, float]:
        right = trace.last_reply == self.data.answer
        return {"right": 2.0 * right, "short": float(trace.metrics["length"] < 3)}

    @vf.reward(weight=-0.5)
    async def wordy(self, trace: vf.Trace) -> float:
        return float(trace.metrics["length"] > 20)

    @vf.reward(weight=1.0)
    async def staged(self, trace: vf.Trace) -> float:
        # The stages' 5, and the messages: one of the system, one of the user, one of the model.
        return float(trace.state.seen == 8 and trace.messages[0].role == "system")


class Odd(vf.Taskset[NumberTask]):
    INFINITE = True

    def load(self):
        first = random.randrange(10**9)  # another in every process
        for n in itertools.count(first):
            data = Number(prompt=f"{n}?", system_prompt="Say it.", answer=str(n))
            yield NumberTask(data, self.config.task)
