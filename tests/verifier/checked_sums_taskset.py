"""The sums with a harness of two turns: asked to check it, the model answers again."""

from openai import AsyncOpenAI
from sums_taskset import Once, Sums
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Checked", "Twice"]


class Checked(Sums):
    pass


class Twice(Once):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *rest):
        system, prompt = self.resolve_prompt(data)
        chat = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=chat)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                chat += [said, {"role": "user", "content": "Check it."}]
        return ProgramResult(0, "", "")
