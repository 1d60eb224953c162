"""A set of tasks of verifiers whose reward needs a container, for tests."""

import verifiers.v1 as vf

__all__ = ["Boxed"]


class BoxedTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def passes(self, runtime: vf.Runtime) -> float:
        return 1.0


class Boxed(vf.Taskset[BoxedTask]):
    def load(self):
        yield BoxedTask(vf.TaskData(prompt="Write a file."), self.config.task)
