"""Harnesses that talk to the model over HTTP, for the tests."""

import asyncio
import contextlib
import time

import httpx

GIVES_UP = 0.4  # seconds
SEEN = {}  # what harnesses were answered

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


class Tokens:
    """Writes its prompts itself, as the clients of verifiers and renderers do: twice behind what
    was sampled, then a new one."""

    def run(self, problem, base_url):
        route = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
        ids, seen = [], 0
        for put in ([5, 6, 7], [8, 9, 8], None):
            ids = [10] if put is None else ids + put
            sampling = {"stop_token_ids": [0], "logprobs": 1, "routed_experts_prompt_start": 2}
            body = {"token_ids": ids, "sampling_params": sampling}
            answer = httpx.post(route, json=body, timeout=30).json()
            (choice,) = answer["choices"]
            assert answer["prompt_token_ids"] == ids
            assert choice["token_logprobs"] == [-0.5] * len(choice["token_ids"])
            assert choice["versions"] == [3] * len(choice["token_ids"])
            ids = ids + choice["token_ids"]
            seen += len(choice["token_ids"])
        return seen


class Opens:
    """Writes a prompt that opens the thoughts of the answer."""

    def run(self, problem, base_url):
        route = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
        body = {"token_ids": problem.metadata["ids"]}
        httpx.post(route, json=body, timeout=30).raise_for_status()
        return True


class Back:
    """Continues the tokens that it was given."""

    def run(self, problem, base_url):
        route, ids = f"{base_url.removesuffix('/v1')}/inference/v1/generate", [5]
        for put in ([], [7]):
            body = {"token_ids": ids + put}
            answer = httpx.post(route, json=body, timeout=30)
            answer.raise_for_status()
            ids = ids + put + answer.json()["choices"][0]["token_ids"]


class Unfit:
    """Asks for what no run answers, and reads the tokens of what one does."""

    def run(self, problem, base_url):
        route = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
        for ids, sampling in (([5], {"n": 2}), ([5], {"stop": ["."]}), ([10**6], {}), ([-1], {})):
            body = {"token_ids": ids, "sampling_params": sampling}
            assert httpx.post(route, json=body, timeout=30).status_code == 400
        (model,) = httpx.get(f"{base_url}/models", timeout=30).json()["data"]
        chat = {"model": model["id"], "messages": [{"role": "user", "content": "?"}]}
        assert chat["model"] == "tramontane"
        answer = httpx.post(f"{base_url}/chat/completions", json=chat | {"logprobs": True})
        (choice,) = answer.json()["choices"]
        assert choice["token_logprobs"] == [-0.5] * len(choice["token_ids"])
        assert "".join(t["token"] for t in choice["logprobs"]["content"]) == "Hm.<|im_end|>"
        return len(choice["token_ids"])


class GivesUp:
    """Gives up its first and its second request after a moment, and repeats each, or asks something
    else (problem's field `else`)."""

    def run(self, problem, base_url):
        chat = [{"role": "user", "content": "One?"}]
        first = self.ask_twice(base_url, chat, problem.metadata.get("else", [None])[0])
        chat += [first, {"role": "user", "content": "Two?"}]
        second = self.ask_twice(base_url, chat, problem.metadata.get("else", [None])[-1])
        return float(second["content"] == "Read.")

    def ask_twice(self, base_url, chat, other):
        body = {"model": "tramontane", "messages": chat}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{base_url}/chat/completions", json=body, timeout=GIVES_UP)
        time.sleep(GIVES_UP)
        if other:
            chat[-1] = {"role": "user", "content": other}
        return ask(base_url, chat)


class Repeats:
    """Asks the same twice at once."""

    async def run(self, problem, base_url):
        chat = [{"role": "user", "content": "?"}]
        both = [asyncio.to_thread(ask, base_url, chat) for _ in range(2)]
        one, other = await asyncio.gather(*both)
        return float(one == other)


class Impatient:
    """Gives up all its requests."""

    def run(self, problem, base_url):
        body = {"model": "tramontane", "messages": [{"role": "user", "content": "?"}]}
        for _ in range(30):
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(f"{base_url}/chat/completions", json=body, timeout=0.02)
            time.sleep(GIVES_UP)


class Compact:
    """Asks until it is refused; then it begins with a shorter chat, once, and returns the status
    and the codes of its answers as a number."""

    def run(self, problem, base_url):
        chat, codes, again = [{"role": "user", "content": "so " * problem.metadata["n"]}], [], 1
        SEEN[problem.id, "told"] = told = []
        while True:
            body = {"model": "tramontane", "messages": chat}
            answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=30)
            if answer.status_code == 200:
                message = answer.json()["choices"][0]["message"]
                chat += [message, {"role": "user", "content": "more " * 20}]
                codes.append(answer.json()["choices"][0]["finish_reason"])
                continue
            codes.append(answer.json()["error"]["code"])
            told.append(answer.json()["error"]["message"])
            if not again:
                break
            again, chat = 0, [{"role": "user", "content": "Go on."}]
        SEEN[problem.id] = codes
        return 0.5


class Stays(Compact):
    """Says nothing any more once it is refused."""

    def run(self, problem, base_url):
        super().run(problem, base_url)
        time.sleep(2)
        answer = httpx.get(f"{base_url}/models")
        SEEN["stays"] = answer.status_code


class Broken:
    def run(self, problem, base_url):
        ask(base_url, [{"role": "user", "content": "?"}])
        raise OSError("the disk is full")


class Wordy:
    def run(self, problem, base_url):
        ask(base_url, [{"role": "user", "content": "?"}])
        return "much"


class Silent:
    def run(self, problem, base_url):
        return 1.0


class Unmade:
    def __init__(self):
        raise OSError("no room for another")

    def run(self, problem, base_url): ...
