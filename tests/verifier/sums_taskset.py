"""Sets of tasks of verifiers, and how a model is asked for them, for tests."""

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Once", "Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "fail":
            raise OSError("the judge is gone")
        if trace.last_reply == "broken":
            raise ValueError("not a number")
        if trace.last_reply in ("nan", "tokens"):
            return float("nan") if trace.last_reply == "nan" else trace.num_output_tokens / 10
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(5):
            data = Sum(prompt=f"{i} + 1?", system_prompt="Calculate.", answer=str(i + 1))
            yield SumTask(data, self.config.task)


class Once(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process: verifiers' own harnesses install their programs by uv."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *rest):
        system, prompt = self.resolve_prompt(data)
        said = {"system": system, "user": prompt}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[{"role": r, "content": c} for r, c in said.items()]
            )
        return ProgramResult(0, "", "")
