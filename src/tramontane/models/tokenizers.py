"""Loading and saving of tokenizers, for every worker alike."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from tramontane.errors import InputError, install

logger = logging.getLogger("tramontane")

TEKKEN = "tekken.json"  # Mistral's own format, without a template
_CONVERTED = ("tokenizer.json", "tokenizer.model")  # used instead where a folder has them


def is_tekken_alone(folder: Path) -> bool:
    """True if a `tekken.json` is the only tokenizer in a checkpoint folder."""
    return (folder / TEKKEN).is_file() and not any((folder / name).is_file() for name in _CONVERTED)


def load_tekken(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a `tekken.json`, which puts BOS before texts as Mistral's library does. Its
    chat template is the folder's, else the one that `mistral-common` writes.

    Raises:
        InputError: the file is damaged, or of a version that only `mistral-common` reads.
    """
    file = folder / TEKKEN
    try:
        tokenizer = convert_tekken_tokenizer(str(file))
    except ImportError:
        raise InputError(
            f"{file}: names no special tokens, which takes a package that is not installed: "
            f"{install('mistral')}"
        ) from None
    except Exception as error:  # tokenizers raises Exception itself, e.g. for a damaged pattern
        raise InputError(f"{file}: damaged, not a tekken tokenizer ({error!r})") from None
    setattr(tokenizer, "add_bos_token", True)  # noqa: B010 (typed as read-only)
    tokenizer.name_or_path = str(folder)
    if tokenizer.chat_template is None:
        _warn_no_template(file)
    return tokenizer


def add_processor_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Give a tokenizer without a chat template that of the folder's processor: processors of early
    multimodal models keep theirs in `chat_template.json`, which tokenizers do not read.

    Raises:
        InputError: the file is damaged.
    """
    file = folder / "chat_template.json"
    if tokenizer.chat_template is not None or not file.is_file():
        return
    try:
        tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{file}: damaged, not a chat template ({error!r})") from None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer for any tool: with the `tekken.json` that it comes with, if there is one."""
    tokenizer.save_pretrained(folder)
    tekken = Path(tokenizer.name_or_path) / TEKKEN
    if tekken.is_file():
        shutil.copyfile(tekken, folder / TEKKEN)


@cache
def _warn_no_template(file: Path) -> None:
    """Once, though a run's workers load the tokenizer several times."""
    logger.warning(
        f"{file} has no chat template, so prompts are texts to be continued, as for a base model. "
        f"For a model that chats, set data.chat_template, put a chat_template.jinja next to the "
        f"file, or have it written: {install('mistral')}"
    )
