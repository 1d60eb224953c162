"""Chat templates in Python, for tests of what is learned from the texts that a template writes."""

import json
from types import SimpleNamespace

from tramontane.environments.learned import NAME

SPECIAL = ("<|u|>", "<|a|>", "<|e|>")


def tokenizer(write, special=SPECIAL):
    """A tokenizer whose template writes each message by `write`; `<|a|>` opens an answer."""

    def apply(chat, tools, tokenize, add_generation_prompt):
        assert not tokenize and tools[0]["function"]["name"] == NAME
        text = "".join(write(message) for message in chat)
        return text + ("<|a|>" if add_generation_prompt else "")

    tokens = {n: Token(text, text in special) for n, text in enumerate((*special, "plain"))}
    return SimpleNamespace(
        chat_template="{{ … }}", apply_chat_template=apply, added_tokens_decoder=tokens
    )


class Token(str):
    def __new__(cls, text, special):
        made = super().__new__(cls, text)
        made.special = special
        return made


def said(message, calls="", head="<|a|>", end="<|e|>"):
    if message["role"] != "assistant":
        return f"<|u|>{message['content']}{end}"
    return f"{head}{message['content'] or ''}{calls}{end}"


def in_json(message):
    """Hermes' form, with a key of its own and a list of calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f"<call>{c['name']} => {json.dumps(c['arguments'])}</call>" for c in calls]
    return said(message, "".join(written))


def in_tags(message):
    def arguments(given):
        return "".join(f'<p name="{k}">{v}</p>\n' for k, v in given.items())

    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f'<do name="{c["name"]}">\n{arguments(c["arguments"])}</do>' for c in calls]
    return said(message, f"\n<all>\n{chr(10).join(written)}\n</all>" if calls else "")


def in_keys(message):
    """Values in tags that are their keys, lists and objects within."""

    def tags(value):
        if isinstance(value, dict):
            return "".join(f"<{k}>{tags(v)}</{k}>" for k, v in value.items())
        if isinstance(value, list):
            return "".join(f"<item>{tags(each)}</item>" for each in value)
        return str(value)

    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = "".join(f"<run:{c['name']}>{tags(c['arguments'])}</run>" for c in calls)
    return said(message, written)
