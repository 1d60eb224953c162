"""Runs the conversations of one process: environments, tools, and the tokens between two turns.

A plain class, like all workers; `environments.process` serves it over a socket. It holds no weights
and samples nothing: a completion of one turn comes in, and what follows it goes out.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading, wire
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.mistral import MistralChat, load_mistral
from tramontane.environments.protocol import Continued, Lost, Started
from tramontane.environments.running import THREADS, EnvironmentFailed, Runner
from tramontane.environments.session import Reply, Session
from tramontane.errors import InputError
from tramontane.status import Status, moved
from tramontane.tokens import ints
from tramontane.types import Completion, Ending, Message, Problem, TurnRecord

if TYPE_CHECKING:
    from tramontane.environments.harness import HarnessSession, Switchboard

Key = tuple[int, int]  # group and index of a conversation
OPENING = 32  # tokens at the end of a harness's prompt that may open the model's thoughts


@dataclass
class _Said:
    """A turn of the model, and the conversation up to its end."""

    record: TurnRecord
    message: Parsed
    turn: Completion  # the turn by itself
    chat: Any  # the chat before the turn
    n_tokens: int  # of all sequences so far, without their prompts


@dataclass
class _Conversation:
    """A conversation under way."""

    session: Session | HarnessSession  # its environment and tools
    chat: Any  # its messages, a `Chat` or `MistralChat`
    prompt_ids: list[int]  # the prompt of its first sequence
    effort: str | None  # level of effort of its problem
    turns: int = 0  # number of turns so far
    said: _Said | None = None  # the last turn that was answered
    status: Status = Status.SAMPLED
    # Prompt and tokens of the current sequence, as they were last seen or sent; None after a
    # replay, until they are seen.
    tokens: array[int] | None = None

    def move(self, to: Status) -> None:
        """Change the status; see `status.MOVES`."""
        self.status = moved(self.status, to, "a conversation")


class EnvironmentWorker:
    """Many conversations at once, each with an environment of its own.

    Args:
        config: of the run; `conversation`, `data` and `verifier.thinking_tags` are read.
        encoder: makes the prompts.
    """

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        self._config, self._limits = config, config.conversation
        self._format = ChatFormat(encoder, self._limits.history)
        self._parser = Parser(encoder.tokenizer, self._limits.calls_form, encoder.tags)
        self._mistral = load_mistral(encoder) if self._limits.tokens == "mistral" else None
        self._runner = Runner(max(THREADS, config.pipeline.n_async))
        self._switchboard: Switchboard | None = None  # with the first harness
        self._open: dict[Key, _Conversation] = {}

    @property
    def stuck(self) -> int:
        """Number of threads still running a step that its conversation has given up on."""
        return self._runner.stuck

    async def start(
        self, key: Key, problem: Problem, seed: int, max_prompt: int = sys.maxsize
    ) -> Started:
        """Begin a conversation.

        Args:
            key: of the conversation.
            problem: the problem.
            seed: for environments whose `start` takes one. Conversations of one group are compared
                with each other, so they should have the same.
            max_prompt: longest prompt of a first turn, in tokens.
        """
        await self.close(key)  # if it starts again
        self._max_prompt, session = max_prompt, self._session(problem)
        opening = session.start(problem, seed, self._config)
        return await self._begin(key, session, opening, problem.effort)

    async def _begin(
        self,
        key: Key,
        session: Session | HarnessSession,
        opening: Awaitable[list[Message]],
        effort: str | None,
    ) -> Started:
        """Begin a conversation whose first messages are `opening`."""
        try:
            self._open[key] = await asyncio.wait_for(
                self._opened(session, opening, effort), self._limits.step_timeout
            )
            tools = [tool["function"]["name"] for tool in session.tools]
            prompt, images = self._open[key].prompt_ids, self._open[key].chat.images
            return Started(prompt, tools=tools, images=images, opened=session.opened)
        except asyncio.TimeoutError:
            started = Started([], *self._late(session, "start"))
        except (EnvironmentFailed, InputError) as error:
            started = Started([], session.ending or "environment_failed", str(error))
        except Exception:  # of this package
            await session.close()
            raise
        self._open.pop(key, None)
        await session.close()
        return started

    async def _opened(
        self,
        session: Session | HarnessSession,
        opening: Awaitable[list[Message]],
        effort: str | None,
    ) -> _Conversation:
        messages = await opening
        while True:
            chat = self._new_chat(session, effort)
            asked = session.asked or session.posted
            prompt = self._asked(chat, session) if asked else chat.start(messages)
            if len(prompt) <= self._max_prompt:
                return _Conversation(session, chat, prompt, effort, tokens=ints(prompt))
            reason = f"{wire.CONTEXT} {self._max_prompt} tokens at its beginning "
            reason += f"(data.max_prompt_tokens), and this prompt has {len(prompt)}"
            reply = await session.refuse("context_full", reason)
            if reply is None or reply.done:
                raise InputError(reason)

    async def step(
        self, key: Key, completion: Completion, l_max: int
    ) -> Continued | Started | Lost:
        """Answer a turn of the model.

        A turn that nobody reads, since the harness gave up its request, is dropped: what follows is
        that of the turn before, or the beginning of the conversation.

        Args:
            key: of the conversation.
            completion: ends with the turn, which begins at its `turn_start`.
            l_max: longest conversation allowed, in tokens, sampled and put in.

        Raises:
            RuntimeError: the completion's tokens do not extend those of the turn before; or that
                turn is not answered yet.
        """
        if (conversation := self._open.get(key)) is None:
            return Lost()
        conversation.move(Status.STEPPING)
        session = conversation.session
        withdrawn = session.withdraws()
        said = conversation.said if withdrawn else self._said(conversation, completion)
        if said is None:
            assert not isinstance(session, Session)
            conversation.move(Status.OPENING)
            return await self._begin(key, session, session.again(), conversation.effort)
        conversation.said, record = said, said.record
        started = time.perf_counter()
        try:
            continued = await asyncio.wait_for(
                self._step(conversation, said, l_max, withdrawn), self._limits.step_timeout
            )
        except asyncio.TimeoutError:
            ending, reason = self._late(session, "step")
            continued = Continued(record, ending=ending, reason=reason)
        except (EnvironmentFailed, InputError) as error:
            continued = Continued(record, ending="environment_failed", reason=str(error))
        finally:
            record.seconds = time.perf_counter() - started
        conversation.move(Status.SAMPLED if continued.ending is None else Status.ENDED)
        return replace(continued, withdrawn=withdrawn)

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
            conversation.said = self._read(conversation, completion, turn)
            try:
                reply = await asyncio.wait_for(
                    conversation.session.step(conversation.said.message, conversation.said.turn),
                    self._limits.step_timeout,
                )
                self._followed(conversation, conversation.said, reply.messages)
            except asyncio.TimeoutError:
                return Started(started.prompt_ids, *self._late(conversation.session, "step"))
            except (EnvironmentFailed, InputError) as error:
                return Started(started.prompt_ids, "environment_failed", str(error))
            if reply.messages != turn.messages:
                reason = f"not deterministic: turn {number} was answered differently in a replay"
                return Started(started.prompt_ids, "environment_failed", reason)
            conversation.turns += 1
        conversation.tokens = None
        return started

    async def close(self, key: Key) -> None:
        """End a conversation, and close its environment."""
        if conversation := self._open.pop(key, None):
            await conversation.session.close()

    def _session(self, problem: Problem) -> Session | HarnessSession:
        harness = loading.harness_of(self._config.data, problem)
        if harness is None:
            return Session(self._config.data, self._limits.answer_bytes, self._runner)
        from tramontane.environments.harness import HarnessSession, Line, Switchboard  # an extra

        self._switchboard = self._switchboard or Switchboard()
        limits = self._config.data.images.limits
        line = Line(self._format.encoder, limits)
        return HarnessSession(harness, self._runner, self._switchboard, line)

    def _new_chat(self, session: Session | HarnessSession, effort: str | None) -> Any:
        form = self._format.at(effort)
        if self._mistral is not None:
            return MistralChat(self._mistral, form.encoder, session.tools)
        self._parser.check(session.tools)
        return Chat(form, session.tools)

    async def _step(
        self, conversation: _Conversation, said: _Said, l_max: int, withdrawn: bool
    ) -> Continued:
        session, record = conversation.session, said.record
        if withdrawn:
            assert not isinstance(session, Session)
            reply: Reply | None = await session.next()
        elif isinstance(session, Session) and said.turn.finish_reason == "length":
            return await self._ended(session, record, "max_tokens")
        else:
            broken = [call for call in said.message.calls if not call.name]
            if self._limits.unparsed == "end" and broken:
                return await self._ended(session, record, "unparsed_call", broken[0].answer)
            reply = await session.step(said.message, said.turn)
        ending, reason = session.ending, ""
        while reply is not None:
            record.messages, record.reward = reply.messages, reply.reward
            if reply.done:
                return await self._ended(session, record, ending or "completed", reason)
            if conversation.turns == self._limits.turns:
                ending = "max_turns"
                reason = f"{conversation.turns} turns were answered (conversation.turns)"
            else:
                continued = self._continued(conversation, said, l_max)
                if continued.ending is None:
                    return continued
                ending, reason = continued.ending, continued.reason
            conversation.move(Status.REFUSED)
            reply = await session.refuse(ending, reason)
        assert ending is not None
        return await self._ended(session, record, ending, reason)

    async def _ended(
        self,
        session: Session | HarnessSession,
        record: TurnRecord,
        ending: Ending,
        reason: str = "",
    ) -> Continued:
        if record.reward is None:
            record.reward = await session.final_reward()
        return Continued(record, ending=ending, reason=reason)

    def _said(self, conversation: _Conversation, completion: Completion) -> _Said:
        """The turn that ends a completion, whose tokens extend those before."""
        tokens = ints(completion.prompt_ids) + completion.token_ids
        known, start = conversation.tokens, completion.turn_start
        if known is not None and tokens[: len(known)] != known:
            raise RuntimeError("a turn's tokens do not extend those of the turn before")
        conversation.turns += 1
        place = len(completion.prompt_ids) + start
        text = self._format.text_of(tokens[place:], tokens[:place])
        text = conversation.chat.prefix + text
        record = TurnRecord(start, len(completion.token_ids), len(completion.earlier), text)
        return self._read(conversation, completion, record)

    def _read(
        self, conversation: _Conversation, completion: Completion, record: TurnRecord
    ) -> _Said:
        """A turn with its message and its place in the conversation."""
        chat, session = conversation.chat, conversation.session
        message = self._parser.parse(record.text, session.tools, chat.prefix)
        record.calls = message.calls
        before = completion.earlier[: record.sequence]
        n_tokens = record.end + sum(len(sequence.token_ids) for sequence in before)
        return _Said(record, message, _turn_of(completion, record), chat, n_tokens)

    def _continued(self, conversation: _Conversation, said: _Said, l_max: int) -> Continued:
        """What follows a turn, if there is room for it and for one more token of the model."""
        put, forked = self._followed(conversation, said, said.record.messages)
        sampled, prompt = said.record.end, len(said.turn.prompt_ids) - said.record.start
        if forked is not None:
            sampled, prompt = 0, len(forked)
        # A forked conversation also keeps to the context of its first sequence.
        longest = min(
            l_max - said.n_tokens + sampled, l_max + len(conversation.prompt_ids) - prompt
        )
        if longest <= (needed := sampled + len(put)):
            reason = (
                f"{wire.CONTEXT} {prompt + longest} tokens (pipeline.l_max), and the messages have "
            )
            return Continued(
                said.record, ending="context_full", reason=f"{reason}{prompt + needed}"
            )
        conversation.tokens = (
            ints([*said.turn.prompt_ids, *said.turn.token_ids, *put])
            if forked is None
            else ints(forked)
        )
        return Continued(said.record, put=put, prompt_ids=forked, max_tokens=longest)

    def _followed(
        self, conversation: _Conversation, said: _Said, messages: Sequence[Message]
    ) -> tuple[list[int], list[int] | None]:
        """(tokens to put in after a turn, prompt of a new sequence or None)."""
        session, said.record.anew, said.record.opened = conversation.session, None, []
        if session.posted or session.restarted:
            conversation.chat = self._new_chat(session, conversation.effort)
            posted = self._asked(conversation.chat, session)
            if session.restarted:
                said.record.anew = [*conversation.chat.images]
                said.record.opened = session.opened
            known = len(said.turn.prompt_ids) + len(said.turn.token_ids)
            return ([], posted) if session.restarted else (posted[known:], None)
        conversation.chat = said.chat.copy()
        following = conversation.chat.follow(said.message, messages)
        if following.rewritten and self._format.history == "fork":
            return [], following.whole()
        return conversation.chat.tokens(following, said.turn.token_ids[-1]), None

    def _asked(self, chat: Any, session: Session | HarnessSession) -> list[int]:
        """The tokens that a harness asks for, with a new chat."""
        encoder = self._format.encoder
        if not session.posted:
            return wire.write(chat, session.asked)
        prompt = list(session.posted)
        chat.prefix = encoder.opened_in(str(encoder.tokenizer.decode(prompt[-OPENING:])))
        return prompt

    def _late(self, session: Session | HarnessSession, what: str) -> tuple[Ending, str]:
        """The ending of a conversation whose environment took too long, and the reason."""
        reason = f"its {what} took longer than {self._limits.step_timeout:g} s"
        return session.ending or "step_timeout", reason


def _turn_of(completion: Completion, record: TurnRecord) -> Completion:
    """A turn as a completion of its own; its prompt is everything before it in its sequence."""
    sequence, own = completion.sequences[record.sequence], slice(record.start, record.end)
    prompt_ids = [*sequence.prompt_ids, *sequence.token_ids[: record.start]]
    return replace(completion, prompt_ids=prompt_ids, **sequence.part(own))
