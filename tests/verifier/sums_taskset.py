"""Sets of tasks of verifiers, for tests."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "fail":
            raise OSError("the judge is gone")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(5):
            data = Sum(prompt=f"{i} + 1?", system_prompt="Calculate.", answer=str(i + 1))
            yield SumTask(data, self.config.task)
