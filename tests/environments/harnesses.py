"""Harnesses that talk to the model over HTTP, for the tests."""

import asyncio

import httpx

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}


def ask(base_url, messages, **keys):
    body = {"model": "tramontane", "messages": messages, **keys}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=30)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]


class Adder:
    """Answers the calls of a tool, and rewards the right answer."""

    def run(self, problem, base_url):
        chat = [{"role": "user", "content": problem.problem}]
        message = ask(base_url, chat, tools=[TOOL])
        while calls := message.get("tool_calls"):
            answers = [
                {"role": "tool", "content": f"five {n}", "tool_call_id": c["id"]}
                for n, c in enumerate(calls)
            ]
            chat += [message, *answers]
            message = ask(base_url, chat, tools=[TOOL])
        return float(problem.answer in message["content"])


class Forgetful:
    """Begins a new chat for each request, in a coroutine."""

    async def run(self, problem, base_url):
        first = await asyncio.to_thread(ask, base_url, [{"role": "user", "content": "Draft."}])
        said = {"role": "user", "content": f"Improve: {first['content']}"}
        await asyncio.to_thread(ask, base_url, [said])


class Broken:
    def run(self, problem, base_url):
        ask(base_url, [{"role": "user", "content": "?"}])
        raise OSError("the disk is full")


class Silent:
    def run(self, problem, base_url):
        return 1.0
