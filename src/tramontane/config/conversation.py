"""`conversation`: limits of conversations with an environment, and their reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tramontane.config.section import Section

RewardSource = Literal["verifier", "last", "sum"]


class ConversationConfig(Section):
    """Limits of conversations and how they are rewarded; read by a run whose data name an
    environment or tools. `pipeline.l_max` bounds a conversation's tokens, sampled and inserted. See
    docs/environments.md."""

    turns: int = Field(8, ge=1)
    """Maximum number of turns of the model in a conversation."""
    step_timeout: float = Field(30.0, gt=0)
    """Time limit of one step of an environment (all calls of a turn), and of its start, in seconds.
    A late step ends the conversation as `step_timeout`, unscorable."""
    answer_bytes: int = Field(8192, ge=64)
    """Longest answer of a tool, in bytes of UTF-8; a longer one is truncated, with a mark."""
    reward: RewardSource = "verifier"
    """Source of the correctness reward: the `verifier` of the problem's domain on the whole
    conversation, or the environment: the reward of its `last` turn that has one, or the `sum` of
    its turns."""
    unparsed: Literal["answer", "end"] = "answer"
    """What follows a call that does not parse: an error that the model reads as the tool's
    `answer`, or the `end` of the conversation as `unparsed_call`."""
    calls: Literal[
        "auto", "hermes", "qwen_xml", "llama", "mistral", "code", "harmony",
        "invoke", "glm", "gemma", "lfm", "deepseek", "kimi",
    ] = "auto"  # fmt: skip
    """Format of the model's calls. auto: with `tokens: mistral`, Mistral's; else the tokenizer's
    own `response_template`, else the one that its chat template writes, else `hermes`; a run is
    refused if that cannot be read."""
    tokens: Literal["template", "mistral"] = "template"
    """What turns messages into tokens: the chat `template`, or `mistral`: Mistral's own library
    (`mistral-common`, an extra), for a model whose folder has its `tekken.json`."""
    history: Literal["fork", "keep"] = "fork"
    """What happens where the chat template rewrites earlier turns, e.g. drops their thoughts:
    `fork` begins a new sequence of the same conversation with the rewritten turns as its prompt;
    `keep` appends only the new messages, so that earlier turns stay as they were sampled."""
    workers: int = Field(1, ge=1)
    """Processes that run environments. Each runs many conversations at once."""
    memory_mb: int = Field(2048, ge=64)
    """Memory that the environments of one process may allocate together, in MB."""
    replay: bool = False
    """All environments and tools are deterministic: after a kill, or the loss of a worker, an
    unfinished conversation resumes from its recorded turns, whose steps are repeated. false: only
    where its environment and tools have an attribute `deterministic = True`; others start again."""

    @property
    def calls_form(self) -> str:
        """`calls`, where `auto` does not depend on the model."""
        return "mistral" if (self.calls, self.tokens) == ("auto", "mistral") else self.calls

    @property
    def reward_is_set(self) -> bool:
        """True if the config says which reward counts."""
        return "reward" in self.model_fields_set
