"""Runs the conversations of one process: environments, tools, and the tokens between two turns.

A plain class, like all workers; `environments.process` serves it over a socket. It holds no weights
and samples nothing: a completion of one turn comes in, and what follows it goes out.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading, wire
from tramontane.environments.calls import Message as Parsed
from tramontane.environments.calls import Parser
from tramontane.environments.chat import Chat, ChatFormat, Chatted
from tramontane.environments.loading import Host
from tramontane.environments.mistral import MistralChat, load_mistral
from tramontane.environments.protocol import Continued, Started
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.errors import InputError
from tramontane.types import Completion, Ending, Problem, TurnRecord

if TYPE_CHECKING:
    from tramontane.environments.harness import HarnessHost, Switchboard

Key = tuple[int, int]  # group and index of a conversation
OPENING = 32  # tokens at the end of a harness's prompt that may open the model's thoughts


@dataclass
class _Conversation:
    """A conversation under way."""

    host: Host | HarnessHost  # its environment and tools
    chat: Any  # its messages, a `Chat` or `MistralChat`
    prompt_ids: list[int]  # the prompt of its first sequence
    effort: str | None  # level of effort of its problem
    turns: int = 0  # number of turns so far
    # Prompt and tokens of the current sequence, as they were last seen or sent; None after a
    # replay, until they are seen.
    tokens: list[int] | None = None


class EnvironmentWorker:
    """Many conversations at once, each with an environment of its own.

    Args:
        config: of the run; `conversation`, `data` and `verifier.thinking_tags` are read.
        encoder: makes the prompts.
    """

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        self._config, self._limits = config, config.conversation
        self._format = ChatFormat(encoder, self._limits.history)
        self._parser = Parser(encoder.tokenizer, self._limits.calls, encoder.tags)
        self._mistral = load_mistral(encoder) if self._limits.tokens == "mistral" else None
        self._runner = Runner()
        self._switchboard: Switchboard | None = None  # with the first harness
        self._open: dict[Key, _Conversation] = {}

    @property
    def stuck(self) -> int:
        """Number of threads still running a step that its conversation has given up on."""
        return self._runner.stuck

    async def start(self, key: Key, problem: Problem, seed: int) -> Started:
        """Begin a conversation.

        Args:
            key: of the conversation.
            problem: the problem.
            seed: for environments whose `start` takes one. Conversations of one group are compared
                with each other, so they should have the same.
        """
        await self.close(key)  # if it starts again
        host = self._host(problem)
        try:
            conversation = await asyncio.wait_for(
                self._start(host, problem, seed), self._limits.step_timeout
            )
        except asyncio.TimeoutError:
            await host.close()
            return Started([], "step_timeout", self._late("start"))
        except (EnvironmentFailed, InputError) as error:
            await host.close()
            return Started([], "environment_failed", str(error))
        self._open[key] = conversation
        tools = [tool["function"]["name"] for tool in host.tools]
        return Started(conversation.prompt_ids, tools=tools)

    async def step(self, key: Key, completion: Completion, l_max: int) -> Continued:
        """Answer a turn of the model.

        Args:
            key: of the conversation.
            completion: ends with the turn, which begins at its `turn_start`.
            l_max: longest conversation allowed, in tokens, sampled and put in.

        Raises:
            RuntimeError: the completion's tokens do not extend those of the turn before.
        """
        conversation = self._open[key]
        record = self._record(conversation, completion)
        started = time.perf_counter()
        try:
            return await asyncio.wait_for(
                self._step(conversation, record, completion, l_max), self._limits.step_timeout
            )
        except asyncio.TimeoutError:
            return Continued(record, ending="step_timeout", reason=self._late("step"))
        except (EnvironmentFailed, InputError) as error:
            return Continued(record, ending="environment_failed", reason=str(error))
        finally:
            record.seconds = time.perf_counter() - started

    async def replay(
        self, key: Key, problem: Problem, seed: int, completion: Completion
    ) -> Started:
        """Begin a conversation, and repeat the turns of its completion so far.

        If the environment answers differently than recorded, the conversation has failed.
        """
        started = await self.start(key, problem, seed)
        if started.ending is not None:
            return started
        conversation = self._open[key]
        for number, turn in enumerate(completion.turns, 1):
            message = self._parsed(conversation, turn.text)
            try:
                reply = await asyncio.wait_for(
                    conversation.host.step(message, _turn_of(completion, turn)),
                    self._limits.step_timeout,
                )
                if self._posted(conversation) is None:
                    conversation.chat.follow(message, cast(list[Chatted], reply.messages))
            except asyncio.TimeoutError:
                return Started(started.prompt_ids, "step_timeout", self._late("step"))
            except (EnvironmentFailed, InputError) as error:
                return Started(started.prompt_ids, "environment_failed", str(error))
            if reply.messages != turn.messages:
                reason = f"not deterministic: turn {number} was answered differently in a replay"
                return Started(started.prompt_ids, "environment_failed", reason)
            conversation.turns += 1
        if completion.turns:
            conversation.tokens = None
        return started

    async def close(self, key: Key) -> None:
        """End a conversation, and close its environment."""
        if conversation := self._open.pop(key, None):
            await conversation.host.close()

    def _host(self, problem: Problem) -> Host | HarnessHost:
        harness = loading.harness_of(self._config.data, problem)
        if harness is None:
            return Host(self._config.data, self._limits.answer_bytes, self._runner)
        from tramontane.environments.harness import HarnessHost, Switchboard  # an extra

        self._switchboard = self._switchboard or Switchboard()
        return HarnessHost(harness, self._runner, self._switchboard, self._format.encoder)

    async def _start(self, host: Host | HarnessHost, problem: Problem, seed: int) -> _Conversation:
        messages = await host.start(problem, seed, self._config)
        chat = self._new_chat(host, problem.effort)
        if host.asked or host.posted:
            prompt = self._asked(chat, host)
        else:
            prompt = chat.start(cast(list[Chatted], messages))
        return _Conversation(host, chat, prompt, problem.effort, tokens=prompt)

    def _new_chat(self, host: Host | HarnessHost, effort: str | None) -> Any:
        form = self._format.at(effort)
        if self._mistral is not None:
            return MistralChat(self._mistral, form.encoder, host.tools)
        return Chat(form, host.tools)

    async def _step(
        self, conversation: _Conversation, record: TurnRecord, completion: Completion, l_max: int
    ) -> Continued:
        host, limits = conversation.host, self._limits
        if completion.finish_reason == "length":
            record.reward = await host.final_reward()
            return Continued(record, ending="max_tokens")
        message = self._parsed(conversation, record.text)
        record.calls = message.calls
        if limits.unparsed == "end" and (broken := [c for c in message.calls if not c.name]):
            record.reward = await host.final_reward()
            return Continued(record, ending="unparsed_call", reason=broken[0].answer)
        reply = await host.step(message, _turn_of(completion, record))
        record.messages, record.reward = reply.messages, reply.reward
        ending: Ending | None = None
        if reply.done:
            ending = "completed"
        elif conversation.turns == limits.turns:
            ending = "max_turns"
        else:
            continued = self._continued(conversation, message, record, completion, l_max)
            if continued.ending is None:
                return continued
            ending = continued.ending
        if record.reward is None:
            record.reward = await host.final_reward()
        return Continued(record, ending=ending)

    def _parsed(self, conversation: _Conversation, text: str) -> Parsed:
        tools = conversation.host.tools
        return self._parser.parse(text, tools, conversation.chat.prefix)

    def _record(self, conversation: _Conversation, completion: Completion) -> TurnRecord:
        """The record of a turn, whose tokens extend those before."""
        tokens = [*completion.prompt_ids, *completion.token_ids]
        known, start = conversation.tokens, completion.turn_start
        if known is not None and tokens[: len(known)] != known:
            raise RuntimeError("a turn's tokens do not extend those of the turn before")
        conversation.tokens = tokens
        conversation.turns += 1
        place = len(completion.prompt_ids) + start
        text = self._format.text_of(tokens[place:], tokens[:place])
        text = conversation.chat.prefix + text
        return TurnRecord(start, len(completion.token_ids), len(completion.earlier), text)

    def _continued(
        self,
        conversation: _Conversation,
        message: Parsed,
        record: TurnRecord,
        completion: Completion,
        l_max: int,
    ) -> Continued:
        """What follows a turn, if there is room for it and for one more token of the model."""
        tokens, sampled = conversation.tokens, len(completion.token_ids)
        assert tokens is not None
        put, forked, posted = list[int](), None, self._posted(conversation)
        if posted is not None and conversation.host.restarted:
            forked = posted
        elif posted is not None:
            put = posted[len(tokens) :]
        else:
            following = conversation.chat.follow(message, cast(list[Chatted], record.messages))
            if following.rewritten and self._format.history == "fork":
                forked = following.whole()
            else:
                put = conversation.chat.tokens(following, tokens[-1])
        if forked is not None:
            sampled = 0
        prompt = completion.prompt_ids if forked is None else forked
        # A forked conversation also keeps to the context of its first sequence.
        longest = min(
            l_max - completion.n_tokens + sampled,
            l_max + len(conversation.prompt_ids) - len(prompt),
        )
        if longest <= sampled + len(put):
            return Continued(record, ending="context_full")
        conversation.tokens = tokens + put if forked is None else forked
        return Continued(record, put=put, prompt_ids=forked, max_tokens=longest)

    def _posted(self, conversation: _Conversation) -> list[int] | None:
        """All tokens of a harness's request; None if it is the chat so far with new messages."""
        host = conversation.host
        if not (host.posted or host.restarted):
            return None
        conversation.chat = self._new_chat(host, conversation.effort)
        return self._asked(conversation.chat, host)

    def _asked(self, chat: Any, host: Host | HarnessHost) -> list[int]:
        """The tokens that a harness asks for, with a new chat."""
        encoder = self._format.encoder
        if not host.posted:
            return wire.write(chat, host.asked)
        prompt = list(host.posted)
        chat.prefix = encoder.opened_in(str(encoder.tokenizer.decode(prompt[-OPENING:])))
        return prompt

    def _late(self, what: str) -> str:
        return f"its {what} took longer than {self._limits.step_timeout:g} s"


def _turn_of(completion: Completion, record: TurnRecord) -> Completion:
    """A turn as a completion of its own; its prompt is everything before it in its sequence."""
    sequence, own = completion.sequences[record.sequence], slice(record.start, record.end)
    return replace(
        completion,
        prompt_ids=[*sequence.prompt_ids, *sequence.token_ids[: record.start]],
        token_ids=sequence.token_ids[own],
        logprobs=sequence.logprobs[own],
        versions=sequence.versions[own],
        experts=None,
    )
