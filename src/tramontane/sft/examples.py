"""Examples for supervised fine-tuning: prompts with responses, from the playground or a file, and
conversations from a file."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from tramontane.config.sft import ExamplesConfig, SFTConfig
from tramontane.data import images, playground
from tramontane.data.files import read_rows, shuffled
from tramontane.data.prompts import PromptEncoder, chat_of
from tramontane.data.values import Row
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.mistral import MistralExamples
from tramontane.environments.recorded import Conversation, ConversationEncoder, Example
from tramontane.errors import InputError
from tramontane.types import IMAGE, PAPER_TAGS, PLACE, Illustrated, Message, Prompt

CHUNK = 4096  # examples generated at once
PART = 256  # of them are tokenized at once: a short fine-tuning needs a few
# Names of fields that others use for prompts and responses.
USUAL = {
    "prompt": ("instruction", "question", "problem", "query"),
    "response": ("output", "answer", "chosen"),
}
MUCH = 2  # times all rows that a step may train on without a warning


class Pair(NamedTuple):
    """A prompt and its response, with their place and the level of effort asked for, if any."""

    where: str
    prompt: str
    response: str
    effort: str | None = None
    images: tuple[str, ...] = ()  # of the prompt, as data URIs


class Recorded(NamedTuple):
    """A conversation, with its place and the level of effort asked for, if any."""

    where: str
    conversation: Conversation
    effort: str | None = None


Rows = Sequence[Pair | Recorded]


class ExampleStream:
    """Endless tokenized examples, in an order that depends only on the seed.

    A response includes the tokens with which the chat template ends a message (else EOS). If the
    prompts already contain the start of every response (an opening thinking tag from the chat
    template, or `response_prefix`), the responses continue there (`continuation`). A response that
    does not fit after its prompt is skipped, since a truncated one would teach the model not to
    stop; a warning gives their number.

    Args:
        config: the source of pairs, and `max_length`.
        encoder: makes the prompts.
        context: the model's context in tokens; None: unknown, so no limit.
        rows: the result of `read_examples` for the config; None: read here.

    Attributes:
        position: (chunk, index in the chunk); a resumed run needs nothing else.
        room: tokens of the longest example.
        limit: what sets them, a key or the model.
        skipped: examples that were longer.

    Raises:
        InputError: rows without the fields; a prompt that leaves no room for its response; a
            response that repeats the opening thinking tag of its prompt; no pair that fits.
    """

    def __init__(
        self,
        config: SFTConfig,
        encoder: PromptEncoder,
        context: int | None = None,
        rows: Rows | None = None,
    ) -> None:
        self.config, self.encoder = config, encoder
        self.room = min(config.max_length, context or config.max_length)
        by_length = "max_length", "raise max_length"
        by_model = "the model's context", "take a model with more context"
        self.limit, self._remedy = by_length if self.room == config.max_length else by_model
        self.position: tuple[int, ...] = (0, 0)
        self.skipped = 0
        # Its number, its examples so far, and the others.
        self._chunk: tuple[int, list[Example], Iterator[list[Example]]] | None = None
        self._rows: list[Example] | None = None
        if (given := rows or read_examples(config)) is not None:
            [self._rows] = self._fitting(given, max(1, len(given)))

    def take(self, tokens: int) -> list[Example]:
        """Return the next examples, enough to reach `tokens` tokens."""
        taken: list[Example] = []
        used = 0
        while used < tokens:
            number, index = self.position
            chunk = self._tokenized(number, index + 1)
            if index == len(chunk):
                self.position = (number + 1, 0)
                continue
            taken.append(chunk[index])
            used += len(chunk[index].prompt) + len(chunk[index].response)
            self.position = (number, index + 1)
        return taken

    @property
    def epoch(self) -> list[Example]:
        """The examples of the first epoch, or of an endless source the first of them."""
        return self._tokenized(0)

    def steps_of_epoch(self, tokens: int) -> int:
        """Number of `take(tokens)` calls that go through a finite source once from the start; may
        differ by one for a different order of the examples."""
        steps = used = 0
        for example in self.epoch:
            steps += not used
            used += len(example.prompt) + len(example.response)
            used = 0 if used >= tokens else used
        return steps

    def _tokenized(self, number: int, least: float = math.inf) -> list[Example]:
        """The examples of a chunk, or as many of the first as are tokenized, `least` or more."""
        if self._chunk is None or self._chunk[0] != number:
            seed = self.config.seed + 1 + number
            if self._rows is None:
                drawn = generated_chats(self.config.data, seed, CHUNK)
                parts = self._fitting([self._row(*chat) for chat in drawn], PART)
                self._chunk = (number, [], parts)
            else:
                self._chunk = (number, shuffled(self._rows, seed), iter(()))
        _, examples, parts = self._chunk
        while len(examples) < least and (part := next(parts, None)) is not None:
            examples += part
        return examples

    def _fitting(self, rows: Rows, size: int) -> Iterator[list[Example]]:
        """The examples of rows that fit, of so many rows at once."""
        self.skipped = kept = 0
        for start in range(0, len(rows), size):
            fitting, count = list[Example](), 0
            for location, example in self._examples(rows[start : start + size]):
                count += 1
                ids, answer = example.prompt, example.response
                if len(ids) >= self.room:
                    raise InputError(
                        f"{location}: its prompt has {len(ids)} tokens, which leaves none of "
                        f"{self.room} to the response ({self.limit}): remove it, or {self._remedy}"
                    )
                if len(ids) + len(answer) <= self.room:
                    fitting.append(example)
            first_time = not self.skipped
            self.skipped += count - len(fitting)
            kept += len(fitting)
            message = (
                f"of {kept + self.skipped} responses in {self.config.data.train!r}, {self.skipped} "
                f"do not fit with their prompts into {self.room} tokens ({self.limit})"
            )
            if not kept and start + size >= len(rows):
                raise InputError(f"{message}: nothing is left; {self._remedy}")
            if first_time and self.skipped:
                warnings.warn(f"{message} and are skipped", stacklevel=2)
            self._warn_of_few(fitting)
            yield fitting

    def _warn_of_few(self, fitting: Sequence[Example]) -> None:
        source = self.config.data.train
        tokens = sum(len(example.prompt) + len(example.response) for example in fitting)
        if self.config.data.train != "playground:" and MUCH * tokens <= self.config.batch_tokens:
            warnings.warn(
                f"{source!r} has {tokens:,} tokens in all, and each step trains on "
                f"{self.config.batch_tokens:,} (batch_tokens), so that the same ones come again in "
                f"every step: give more rows, or lower batch_tokens",
                stacklevel=2,
            )

    def _examples(self, rows: Rows) -> Iterator[tuple[str, Example]]:
        if self.config.data.tokens == "mistral":
            yield from self._by_mistral(rows)
            return
        pairs = [row for row in rows if isinstance(row, Pair)]
        prompts, conversations = {}, {}
        for level in {row.effort for row in rows}:
            encoder = self.encoder.at(level)
            asked = [pair for pair in pairs if pair.effort == level]
            texts, places = [_prompt(pair) for pair in asked], [pair.where for pair in asked]
            prompts[level] = iter(encoder.encode_all(texts, places) if asked else [])
            conversations[level] = ConversationEncoder(encoder, partial(_rest, encoder))
        tokenizer, end = self.encoder.tokenizer, ChatFormat(self.encoder).turn_end
        for row in rows:
            if isinstance(row, Recorded):
                found = conversations[row.effort].examples(row.conversation, row.where)
                yield from ((row.where, example) for example in found)
            else:
                rest = _rest(self.encoder.at(row.effort), row.where, row.response)
                response = tokenizer(rest + end, add_special_tokens=False)["input_ids"]
                prompt = next(prompts[row.effort])
                yield row.where, Example(prompt, response, images=row.images)

    def _by_mistral(self, rows: Rows) -> Iterator[tuple[str, Example]]:
        levels = {row.effort for row in rows}
        made = {level: MistralExamples(self.encoder.at(level)) for level in levels}
        for row in rows:
            if isinstance(row, Pair):
                said = Message(role="assistant", content=row.response)
                asked = [{**message} for message in chat_of(_prompt(row))]
                conversation = Conversation([*asked, {**said}], [])
            else:
                conversation = row.conversation
            for example in made[row.effort].examples(conversation, row.where):
                yield row.where, example

    def _row(self, chat: list[Message], effort: str | None) -> Pair | Recorded:
        """A generated chat, with the model's thinking tags."""
        texts = [chat[0]["content"]]
        for message in chat[1:]:
            text = message["content"]
            for tag, own in zip(PAPER_TAGS, self.encoder.tags, strict=True):
                text = text.replace(tag, own)
            texts.append(text)
        if len(texts) == 2:
            return Pair("playground:", texts[0], texts[1], effort)
        messages = [{**m, "content": text} for m, text in zip(chat, texts, strict=True)]
        return Recorded("playground:", Conversation(messages, []), effort)


def _prompt(pair: Pair) -> Prompt:
    return Illustrated(pair.prompt, pair.images) if pair.images else pair.prompt


def _rest(encoder: PromptEncoder, location: str, response: str) -> str:
    """The part of a response that follows its prompt."""
    prefix, opening = encoder.response.prefix, encoder.tags.opening
    rest = continuation(response, prefix)
    if opening in prefix and opening in rest:
        raise InputError(
            f"{location}: its response would have {opening} twice, since every prompt ends "
            f"with {prefix!r}; remove it, or change the prompts (data.chat_template_kwargs, "
            f"data.response_prefix)"
        )
    return rest


def continuation(response: str, prefix: str) -> str:
    """The part of a response after `prefix`, the end of its prompt; white space may differ.

    A response that does not start with the prefix is returned unchanged.
    """
    if response.startswith(prefix):
        return response.removeprefix(prefix)
    pattern = r"\s*" + r"\s*".join(map(re.escape, prefix.split()))
    if prefix != prefix.rstrip():
        pattern += r"\s*"
    return re.sub(pattern, "", response, count=1) if re.match(pattern, response) else response


def generated_chats(
    data: ExamplesConfig, seed: int, count: int
) -> list[tuple[list[Message], str | None]]:
    """Generate about `count` chats from the playground and its drills, each with the level of
    effort that it asks for; a chat begins with the user, and ends with the model."""
    total = sum(part.share for part in data.playground) + data.drills.share
    chats = [
        (example["messages"], part.effort)
        for part in data.playground
        for example in playground.examples(
            seed=seed,
            count=round(count * part.share / total),
            mixture=part.mixture or data.mixture,
            levels=part.levels,
            languages=part.languages,
            kinds=part.kinds,
        )
    ]
    number = round(count * data.drills.share / total)
    drills = playground.drills(seed, number, data.drills.levels, data.drills.equations)
    chats += [
        ([Message(role="user", content=asked), Message(role="assistant", content=response)], None)
        for asked, response in drills
    ]
    return shuffled(chats, seed)


def read_examples(config: SFTConfig) -> Rows | None:
    """The rows of the config's data, which ask for effort only if the config has levels; None for
    the playground, which is endless.

    Raises:
        InputError: no such source, rows without the fields, or of an unknown level of effort.
    """
    if config.data.train == "playground:":
        return None
    rows, levels = rows_of(config.data), config.data.effort
    if not levels:
        return [row._replace(effort=None) for row in rows]
    for row in rows:
        if row.effort is not None and row.effort not in levels:
            raise InputError(
                f"{row.where}: effort {row.effort!r} is not in data.effort, which has "
                f"{', '.join(levels)}; add it, or read the levels from another field "
                f"(data.fields.effort)"
            )
    return rows


def rows_of(data: ExamplesConfig) -> Rows:
    """The rows of a file or dataset: prompts with responses, or conversations.

    Raises:
        InputError: no such source, or rows without the fields.
    """
    first = next(iter(read_rows(data.train)))[1]
    names = _names(data, first)
    if not any(isinstance(first.get(names[name]), list) for name in ("messages", "prompt")):
        return pairs_of_rows(data)
    found, album = [], _album(data)
    for where, row, shown in _rows_and_images(data, names):
        chat, given = _chat_of(row, names, where)
        chat = _illustrated(chat, shown, album, where)
        chats = [names[name] for name in ("messages", "prompt", "response")]
        images.refuse({key: row[key] for key in row.keys() - {*chats}}, where)
        conversation = Conversation.of(chat, row.get(names["tools"]), where, given)
        found.append(Recorded(where, conversation, row.get(names["effort"])))
    return found


def _chat_of(row: Row, names: Mapping[str, str], where: str) -> tuple[list[Any], int]:
    """The chat of a row (its messages, or the chats of its prompt and its response in a row), and
    how many messages at its start are not learned.

    Raises:
        InputError: the row has neither.
    """
    if isinstance(messages := row.get(names["messages"]), list):
        return messages, 0
    asked, said = parts = [row.get(names[name]) or [] for name in ("prompt", "response")]
    for name, part in zip(("prompt", "response"), parts, strict=True):
        if not isinstance(part, list):
            raise InputError(
                f"{where}: no chat in field {names[name]!r}, and none in field "
                f"{names['messages']!r}, though the first row has one: a prompt and its response "
                f"are both texts or both chats, in all rows alike; the row has {sorted(row)}"
            )
    return [*asked, *said], len(asked)


def pairs_of_rows(data: ExamplesConfig) -> list[Pair]:
    """The prompt and response of every row of a file or dataset.

    Raises:
        InputError: no such source, or rows without the fields.
    """
    names = _names(data, next(iter(read_rows(data.train)))[1])
    pairs, album = [], _album(data)
    for location, row, shown in _rows_and_images(data, names):
        images.refuse(row, location)
        for name in (names["prompt"], names["response"]):
            if not isinstance(text := row.get(name), str) or not text.strip():
                raise InputError(
                    f"{location}: no text in field {name!r}{_remedy(row, name, names)}"
                )
        texts = row[names["prompt"]], row[names["response"]]
        found = images.placed(texts[0], shown, (), location)
        own = tuple(album.read(image, location) for image in found)
        pairs.append(Pair(location, *texts, row.get(names["effort"]), own))
    return pairs


def _remedy(row: Row, name: str, names: Mapping[str, str]) -> str:
    """What to do about a row without a text in a field."""
    if names["messages"] in row:
        return ", but messages, and the first row has none: give each kind of rows its own run"
    if isinstance(row.get(name), str):
        return ", which is empty: remove the row"
    if isinstance(row.get(name), list):
        return ", but a chat, and the first row has texts: give each kind of rows its own run"
    remedy = f"; the row has {sorted(row)}; map the names with data.fields"
    guesses = [
        f"{field}: {other}"
        for field, others in USUAL.items()
        for other in others
        if names[field] not in row and other in row
    ]
    return f"{remedy}, e.g. 'data.fields={{{', '.join(guesses)}}}'" if guesses else remedy


def _rows_and_images(
    data: ExamplesConfig, names: Mapping[str, str]
) -> Iterator[tuple[str, Row, list[Any]]]:
    """The rows of a source, each with the images of its fields, which are taken out of it."""
    fields = dict.fromkeys([names["images"], *images.FIELDS])
    for where, row in read_rows(data.train):
        shown = [row.pop(name) for name in fields if row.get(name)]
        yield where, row, [value for given in shown for value in images.listed(given)]


def _album(data: ExamplesConfig) -> images.Album:
    return images.Album(Path(data.train).expanduser().parent, data.images.limits)


def _illustrated(chat: Any, shown: Sequence[Any], album: images.Album, where: str) -> Any:
    """A row's chat with a `PLACE` for each image in its messages, which have them as `images`.

    Raises:
        InputError: images without a place, or in the model's messages, or that cannot be read.
    """
    chat, own = images.flattened(chat, where)
    if not shown and not own:
        return chat
    asked = [m for m in chat if isinstance(m, dict) and m.get("role") != "assistant"]
    asked = [message for message in asked if isinstance(message.get("content"), str)]
    if not any(IMAGE in message["content"] for message in asked):
        users = [message for message in asked if message.get("role") == "user"]
        if own or len(users) != 1:
            raise InputError(
                f"{where}: its images have no place in what the model reads: give {IMAGE}, or an "
                f"image part, in messages of users or tools"
            )
        users[0]["content"] = IMAGE * len(shown) + users[0]["content"]
    found = images.placed(cast(Any, asked), shown, own, where)
    rest = iter([album.read(image, where) for image in found])
    for message in asked:
        if count := message["content"].count(IMAGE):
            message["content"] = message["content"].replace(IMAGE, PLACE)
            message["images"] = [*islice(rest, count)]
    return chat


def _names(data: ExamplesConfig, first: Row) -> dict[str, str]:
    """The name in the rows of each field; TRL's `completion` is a response, if the first row has no
    `response`."""
    known = ("prompt", "response", "messages", "tools", "images", "effort")
    if unknown := data.fields.keys() - {*known}:
        raise InputError(
            f"data.fields: {sorted(unknown)} unknown; use {', '.join(known[:-1])} and {known[-1]}"
        )
    names = {name: data.fields.get(name, name) for name in known}
    if names["response"] not in first and "completion" in first and "response" not in data.fields:
        names["response"] = "completion"
    return names
