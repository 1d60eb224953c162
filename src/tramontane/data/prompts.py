"""Turns problem statements into prompt tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from itertools import chain, islice, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from jinja2 import TemplateError, TemplateSyntaxError

from tramontane.config import EffortConfig, PromptConfig
from tramontane.data.images import image_name
from tramontane.data.special_tokens import Marks, SpecialTokens
from tramontane.data.system_prompt import describe, system_text
from tramontane.errors import InputError
from tramontane.types import (
    IMAGE,
    PAPER_TAGS,
    PLACE,
    Illustrated,
    Message,
    Problem,
    Prompt,
    ResponseText,
    ThinkingTags,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tramontane.models.image_tokens import ImageProcessor

# Pairs that are tokens of published models, the paper's first: DeepSeek-R1, Qwen3 and many others;
# Magistral 1.2; Command A Reasoning; Seed-OSS; MiniMax-M3; Hy3; Kimi-VL; OpenThinker.
KNOWN_TAGS = (
    PAPER_TAGS,
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<seed:think>", "</seed:think>"),
    ThinkingTags("<mm:think>", "</mm:think>"),
    ThinkingTags("<think:opensource>", "</think:opensource>"),
    ThinkingTags("◁think▷", "◁/think▷"),
    ThinkingTags("<|begin_of_thought|>", "<|end_of_thought|>"),
)
Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters", …}}
# Noncharacters, each for one use, as `types.PLACE`; `environments.chat` has two more.
GENERATED = "\ufdd2"  # see `PromptEncoder.marking`
_GENERATION = re.compile(r"{%(-?)\s*(?:end)?generation\s*(-?)%}")
_PROBE = "1 + 1?"  # a statement that no template treats specially


def find_tags(tokenizer: PreTrainedTokenizerBase) -> ThinkingTags:
    """The first pair of known thinking tags that the tokenizer has as single tokens; the paper's
    if it has none."""
    from tramontane.models.loading import token_id

    return next(
        (tags for tags in KNOWN_TAGS if all(token_id(tokenizer, tag) is not None for tag in tags)),
        PAPER_TAGS,
    )


def opened_by(text: str, tags: ThinkingTags) -> str:
    """The start of a response at the end of a prompt: an opening tag, or an empty pair."""
    opening, closing = map(re.escape, tags)
    found = re.search(rf"{opening}\s*(?:{closing}\s*)?\Z", text)
    return found[0] if found else ""


def _parts(content: str) -> list[dict[str, str]]:
    """A message's content as a list of its parts: texts, with an image at each `PLACE` between."""
    found: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PLACE)):
        found += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return found or [{"type": "text", "text": ""}]


def _chat(prompt: Prompt) -> list[Message]:
    """The messages of a prompt, with a `PLACE` for each of its images."""
    if not isinstance(prompt, Illustrated):
        return prompt if isinstance(prompt, list) else [Message(role="user", content=prompt)]
    chat = [Message(role=m["role"], content=m["content"]) for m in _chat(prompt.text)]
    if any(IMAGE in message["content"] for message in chat):
        for message in chat:
            message["content"] = message["content"].replace(IMAGE, PLACE)
    else:
        chat[-1]["content"] = PLACE * len(prompt.images) + chat[-1]["content"]
    return chat


def chat_of(prompt: Prompt) -> list[Message]:
    """The messages of a prompt, each with its own images."""
    chat = list(_chat(prompt))
    if isinstance(prompt, Illustrated):
        images = iter(prompt.images)
        for message in chat:
            if own := [*islice(images, message["content"].count(PLACE))]:
                message["images"] = own
    return chat


class PromptEncoder:
    """Turns problem statements into prompts for one model.

    A chat template may write the start of the response into its prompt: the opening thinking tag
    (DeepSeek-R1, QwQ, Qwen3-Thinking), or an empty pair of tags (Qwen3 with `enable_thinking:
    false`). This and `response_prefix` are prepended to every response's text, so that formats,
    thought lengths and rewards see whole responses (`response`).

    Args:
        tokenizer: the model's.
        config: system prompt, chat template and its variables, start of the response. A given
            template replaces the tokenizer's.
        tags: the thinking tags; None: the tokenizer's (`find_tags`).
        efforts: levels of effort by name; `at` has an encoder for each.
        phrase: text before the system prompt.
        images: the model's processor; None: prompts have no images.

    Attributes:
        tags: the thinking tags of the responses.
        special: keeps special tokens in the texts of rows and tools apart from the template's.
        levels: the encoder of each level of effort.
        date: the time that the chat template reads.

    Raises:
        InputError: a template that fails or omits the problem; `chat_template_kwargs` that the
            template does not read; a second opening thinking tag in `response_prefix`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptConfig | None = None,
        tags: tuple[str, str] | None = None,
        efforts: Mapping[str, EffortConfig] = MappingProxyType({}),
        phrase: str = "",
        images: ImageProcessor | None = None,
    ) -> None:
        self.tokenizer, self.config, self.phrase = tokenizer, config or PromptConfig(), phrase
        self.images = images
        self._image_tokens: dict[str, int] = {}
        self.tags = ThinkingTags.of(tags) if tags else find_tags(tokenizer)
        self.special = SpecialTokens(tokenizer, self.tags, allowed=self.config.allow_special_tokens)
        self.date = self.config.date or datetime.now()
        if self.config.chat_template is not None:
            tokenizer.chat_template = self.config.chat_template
        self._check_template_kwargs()
        self._check_template()
        if self.tags.opening in self.opened and self.tags.opening in self.config.response_prefix:
            raise InputError(
                f"response_prefix {self.config.response_prefix!r}: the chat template already ends "
                f"its prompts with {self.opened!r}; leave {self.tags.opening} out of the prefix"
            )
        self.levels: dict[str, PromptEncoder] = {}
        for name, level in efforts.items():
            kwargs = self.config.chat_template_kwargs | level.chat_template_kwargs
            update = {"chat_template_kwargs": kwargs, "date": self.date}
            own = self.config.model_copy(update=update)
            self.levels[name] = PromptEncoder(
                tokenizer, own, self.tags, phrase=level.phrase, images=images
            )

    def at(self, effort: str | None) -> PromptEncoder:
        """The encoder of the prompts at a level of effort."""
        return self if effort is None else self.levels[effort]

    @cached_property
    def opened(self) -> str:
        """The start of the response written by the chat template; usually empty."""
        return self.opened_in(self._templated(_PROBE))

    def opened_in(self, text: str) -> str:
        """The start of the response at the end of a text written by the chat template."""
        return opened_by(text, self.tags)

    def begun_in(self, prompt: str) -> str:
        """The start of the response that a prompt already holds: what the template opened, and
        `response_prefix`."""
        written = prompt.removesuffix(self.config.response_prefix)
        return self.opened_in(written) + prompt[len(written) :]

    def never_closes(self, prompt: str, response: str) -> bool:
        """True if a prompt opens thoughts that its response opens again, or does not close."""
        opened = self.opened_in(prompt)
        if self.tags.opening not in opened or self.tags.closing in opened:
            return False
        return self.tags.opening in response or self.tags.closing not in response

    @property
    def response(self) -> ResponseText:
        """The parts of a response's text that are not sampled, for generators."""
        prefix = self.opened + self.config.response_prefix
        at_levels = {level.response.prefix for level in self.levels.values()}
        return ResponseText(self.tags, prefix, tuple(sorted(at_levels - {prefix})))

    def render(self, prompt: Prompt, where: str = "", tools: Sequence[Tool] = ()) -> str:
        """The text before a completion, by the tokenizer's chat template.

        A chat's own system message replaces the configured one. A base model without a template
        gets the system text (by default the package's, since nothing else describes the format),
        the messages, and a line break. If the template has no system role, the system text precedes
        the first message.

        Args:
            prompt: a statement or a chat.
            where: the row it comes from, for messages.
            tools: descriptions of the tools that the model may call (`describe`).

        Raises:
            InputError: the chat template rejects the prompt, e.g. because roles do not alternate.
        """
        return self._templated(prompt, where, tools) + self.config.response_prefix

    def complete(self, chat: Prompt, where: str = "", tools: Sequence[Tool] = ()) -> str:
        """A whole chat as the template writes it, without the start of a response.

        Raises:
            InputError: see `render`.
        """
        return self._templated(chat, where, tools, prompts=False)

    def check_chats(self, problems: Iterable[Problem]) -> None:
        """Render one chat for each order of roles among the problems, since templates only reject
        orders of roles.

        Raises:
            InputError: see `render`.
        """
        seen: set[tuple[str, ...]] = set()
        for problem in problems:
            roles = tuple(message["role"] for message in problem.messages or ())
            if roles and roles not in seen:
                seen.add(roles)
                self.render(problem.prompt, problem.where)

    def encode(self, prompt: Prompt, where: str = "") -> list[int]:
        """Token ids of `render`, which start with BOS if the tokenizer or the template writes it,
        and do not end with EOS.

        Only the template and the config may write special tokens: those in a row's text are encoded
        as text (`allow_special_tokens`), except thinking tags in system and assistant messages,
        which the system prompt of Magistral 1.2 needs.
        """
        return self.encode_all([prompt], [where])[0]

    def encode_all(self, prompts: Sequence[Prompt], where: Iterable[str] = ()) -> list[list[int]]:
        """`encode` for many prompts, which the tokenizer may process in parallel."""
        places = [*islice(chain(where, repeat("")), len(prompts))]
        texts = [self.render(prompt, place) for prompt, place in zip(prompts, places, strict=True)]
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        for number, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
            if isinstance(prompt, Illustrated) or self.has_special_tokens(prompt):
                encoded[number] = self._encode_marked(prompt, place)
        return [[*self.first_tokens, *ids] for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))

    def tokens_of(self, tools: Sequence[Tool]) -> int:
        """Number of tokens that descriptions of tools add to a prompt."""
        texts = [self.render(_PROBE, tools=described) for described in (tools, ())]
        whole, bare = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return len(whole) - len(bare)

    @property
    def image_token(self) -> str:
        """The text that stands for an image in a rendered chat.

        Raises:
            InputError: the model takes no images.
        """
        return self._processor.token

    def tokens_of_image(self, image: str) -> int:
        """Number of tokens that the model's processor writes for an image."""
        if (name := image_name(image)) not in self._image_tokens:
            text = self.expansion(image)
            self._image_tokens[name] = len(self.tokenizer(text, add_special_tokens=False).input_ids)
        return self._image_tokens[name]

    def expansion(self, image: str) -> str:
        """What the model's processor writes for an image.

        Raises:
            InputError: the model takes no images, or the processor refuses it.
        """
        return self._processor.expansion(image)

    @cached_property
    def first_tokens(self) -> list[int]:
        """The tokens that a tokenizer without a template puts before every text, usually BOS. Those
        after a text are omitted, since a prompt does not end there."""
        if self.tokenizer.chat_template is not None:
            return []
        bare: list[int] = self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        whole: list[int] = self.tokenizer(_PROBE)["input_ids"]
        for i in range(len(whole)):
            if whole[i : i + len(bare)] == bare:
                return whole[:i]
        raise InputError("the tokenizer splits a text differently when it adds special tokens")

    def has_special_tokens(self, prompt: Prompt) -> bool:
        """True if a prompt's own text holds special tokens, which are encoded as text."""
        return any(self.special.found_in(message["content"]) for message in _chat(prompt))

    def _encode_marked(self, prompt: Prompt, where: str) -> list[int]:
        """`encode` for a prompt with special tokens in its own text, or with images."""
        chat = _chat(prompt)
        texts = PLACE + GENERATED + "".join(message["content"] for message in chat)
        marks = Marks(next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in texts))
        text = self.render(
            [
                Message(role=m["role"], content=self.special.mark(m["content"], m["role"], marks))
                for m in chat
            ],
            where,
        )
        if isinstance(prompt, Illustrated):
            text = self.illustrated(text, prompt.images, where)
        return self.special.encode(text, marks)

    def illustrated(self, text: str, images: Sequence[str], where: str = "") -> str:
        """A rendered text with what the model's processor writes for each image, in order, in place
        of what the chat template wrote for it.

        Raises:
            InputError: the template writes other places than there are images, or one at the end;
                or the processor refuses an image.
        """
        processor, count = self._processor, len(images)
        texts, row = text.split(processor.token), f"{where}: " * bool(where)
        if len(texts) != count + 1:
            raise InputError(
                f"{row}the chat template writes {len(texts) - 1} places ({processor.token}) for "
                f"{count} images; give a template that takes images (data.chat_template)"
            )
        if not texts[-1]:
            raise InputError(f"{row}the prompt ends with an image, and needs text after it")
        try:
            expansions = [*map(processor.expansion, images), ""]
        except InputError as error:
            raise InputError(f"{row}{error}") from None
        return "".join(map("".join, zip(texts, expansions, strict=True)))

    @property
    def _processor(self) -> ImageProcessor:
        if self.images is None:
            raise InputError("a prompt has images, which are not supported here: remove them")
        return self.images

    def _templated(
        self, prompt: Prompt, where: str = "", tools: Sequence[Tool] = (), *, prompts: bool = True
    ) -> str:
        try:
            return self._by_template(prompt, tools, prompts)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in _chat(prompt))
            row = f"{where}: " if where else ""
            raise InputError(
                f"{row}the model's chat template refuses the prompt, whose roles are {roles} "
                f"({error}); give messages that the template takes, or remove the row"
            ) from None

    def _by_template(self, prompt: Prompt, tools: Sequence[Tool] = (), prompts: bool = True) -> str:
        chat = list(_chat(prompt))
        own = chat.pop(0)["content"] if chat[0]["role"] == "system" else None
        if own is None and self.config.system_prompt is None and not self.tokenizer.chat_template:
            own = system_text("magistral", self.tags)
        system = self.system(own)
        if tools and not self.reads_tools:
            system, tools = describe(tools, system or ""), ()
        if self.tokenizer.chat_template is None:
            return (system or "") + "".join(map(self._without_template, chat))
        if system is None:
            return self._apply(chat, tools, prompts)
        try:
            return self._apply([Message(role="system", content=system), *chat], tools, prompts)
        except TemplateError:  # the template has no such role
            first = Message(role=chat[0]["role"], content=f"{system}{chat[0]['content']}")
            return self._apply([first, *chat[1:]], tools, prompts)

    def system(self, own: str | None = None) -> str | None:
        """The system prompt: a chat's `own`, or the configured one, after the phrase of the level
        of effort; None: the chat template's."""
        system = system_text(self.config.system_prompt, self.tags) if own is None else own
        return "\n\n".join(filter(None, [self.phrase, system])) if self.phrase else system

    def _without_template(self, message: Message) -> str:
        """A message to a model without a chat template: its text, and a blank line."""
        end = self.tokenizer.eos_token if message["role"] == "assistant" else ""
        content = message["content"]
        if PLACE in content:
            content = content.replace(PLACE, self._processor.token)
        return f"{content}{end}\n\n"

    @cached_property
    def reads_tools(self) -> bool:
        """True if the chat template describes tools; otherwise the system prompt does. The template
        is tried, since SmolLM3's mentions tools but expects them under a different name."""
        if self.tokenizer.chat_template is None:
            return False
        taken = {"x": {"type": "string", "description": "x"}}
        schema = {"type": "object", "properties": taken, "required": ["x"]}
        function = {"name": "zq0qz", "description": "x", "parameters": schema}
        probe: Tool = {"type": "function", "function": function}
        try:
            return "zq0qz" in self._apply([Message(role="user", content=_PROBE)], [probe])
        except Exception:  # a template may raise anything
            return False

    @cached_property
    def _in_parts(self) -> bool:
        """True if the template takes contents only as lists of parts, not as texts (Idefics 3,
        LLaVA-NeXT)."""

        def writes(content: Any) -> bool:
            try:
                return _PROBE in self._applied([{"role": "user", "content": content}])
            except Exception:  # a template may raise anything
                return False

        return not writes(_PROBE) and writes(_parts(_PROBE))

    def _apply(
        self, messages: list[Message], tools: Sequence[Tool] = (), prompts: bool = True
    ) -> str:
        return self._applied(self.as_read(messages), tools, prompts)

    def as_read(self, messages: Sequence[Any]) -> list[Any]:
        """Messages with their contents as the template reads them: texts, or lists of parts."""
        return [
            {**message, "content": _parts(message["content"])}
            if self._in_parts or PLACE in str(message.get("content"))
            else message
            for message in messages
        ]

    def marking(self) -> PromptEncoder | None:
        """This encoder with a `GENERATED` at both ends of what the chat template marks as the
        model's (`{% generation %}`); None if it marks nothing."""
        template = str(self.tokenizer.chat_template or "")
        marked = _GENERATION.sub(rf"{{{{\1 '{GENERATED}' \2}}}}", template)
        if marked == template:
            return None
        encoder = copy(self)
        encoder.tokenizer = copy(self.tokenizer)
        encoder.tokenizer.chat_template = marked
        return encoder

    def _applied(
        self, messages: list[Any], tools: Sequence[Tool] = (), prompts: bool = True
    ) -> str:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # Variables that are functions reach no template, so the clock is set where templates find
        # transformers' own; the compiled template is the one that is applied next.
        template: Any = self.tokenizer.get_chat_template(tools=cast(Any, list(tools) or None))
        _compile_jinja_template(template).globals["strftime_now"] = self.date.strftime
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=cast(Any, list(tools) or None),
            tokenize=False,
            add_generation_prompt=prompts,
            **self.config.chat_template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def _check_template(self) -> None:
        given = self.config.chat_template is not None
        name = "data.chat_template" if given else "the tokenizer's chat template"
        try:
            text = self._by_template(_PROBE)
        except TemplateSyntaxError as error:
            raise InputError(f"{name}: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template may raise anything, e.g. a division by 0
            said = error if isinstance(error, TemplateError) else repr(error)
            raise InputError(f"{name}: cannot write a prompt: {said}") from None
        if given and _PROBE not in text:
            raise InputError(
                f"{name}: its prompts lack the problem, e.g. {text[:80]!r}; a chat template writes "
                f"the `content` of each of the `messages`"
            )

    def _check_template_kwargs(self) -> None:
        if not (names := self.config.chat_template_kwargs):
            return
        if self.tokenizer.chat_template is None:
            raise InputError(
                f"chat_template_kwargs {', '.join(names)}: the tokenizer has no chat template; "
                f"remove them"
            )
        template = self.tokenizer.get_chat_template()
        if unread := [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise InputError(
                f"chat_template_kwargs {', '.join(unread)}: the tokenizer's chat template does not "
                f"read them; remove them"
            )
