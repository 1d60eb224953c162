"""A set of tasks of verifiers whose `setup` needs a container, for tests."""

import verifiers.v1 as vf

__all__ = ["Staged"]


class StagedTask(vf.Task[vf.TaskData, vf.State]):
    async def setup(self, trace, runtime):
        await runtime.run(["ls"])

    @vf.reward
    async def passes(self, trace: vf.Trace) -> float:
        return 1.0


class Staged(vf.Taskset[StagedTask]):
    def load(self):
        yield StagedTask(vf.TaskData(prompt="Write a file."), self.config.task)
