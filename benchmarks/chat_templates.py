"""A table of chat templates: what a run, the endpoint and fine-tuning make of each.

    python -m benchmarks.chat_templates [FOLDER ...] [--only NAME ...] [--into docs/templates.md]

A folder has `*.jinja` files, or is a checkpoint. Without one, the templates are those of the
installed packages: TRL's, with its response templates, and each version of Mistral's tokenizers in
mistral-common, which writes without a template. A template gets a byte-level tokenizer that has its
control tokens; a version of Mistral's, a thousand tokens of a real one.

The exit code is 1 if a cell is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tramontane.data.prompts import PromptEncoder
from tramontane.environments.mistral import files_of, load_mistral
from tramontane.environments.mistral_family import MistralFamily
from tramontane.environments.template_checks import COLUMNS, Cell, Family
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer

# Control tokens in the text of a template; some are ordinary added tokens of their tokenizers.
CONTROL = re.compile(
    r"<\|[^|<>\s]+(?: [^|<>\s]+)*\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<｜[^｜<>]+｜>"
    r"|\[/?[A-Z_]{3,}\]|[\[\]]\w?~!?\w?[\[\]]|\]<\][^<>\[\]\s]+\[>\["
    r"|</?s>|<[be]os>|<(?:start_of|end_of|beginning_of)_\w+>|<SPECIAL_\d+>|<image>|<sep>|</?seed:\w+>"
    r"|</?(?:assistant|(?:mm:)?think|tool_calls?|tool_sep|tool_response|arg_key|arg_value)(?::\w+)?>"
    r"|〈\|EOS\|〉|\[\|[^|\[\]\s]+\|\]"
)
ADDED = re.compile(
    r"</?(?:(?:mm:)?think|tool_calls?|tool_sep|tool_response|arg_key|arg_value)(?::\w+)?>"
)
BEGINS = ("<|begin_of_text|>", "<bos>", "<s>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>")
MISTRAL_VERSIONS = ("v3", "v7", "v11", "v13", "v15")
MISTRAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]",
    "[/MODEL_SETTINGS]",
)  # fmt: skip
EFFORTS = {
    "reasoning_effort": {
        "type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]
    }
}  # fmt: skip
RESPONSE = ", response template"  # behind a template's name
START, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def tokenizer_for(template: str, folder: Path) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with the control tokens of a template, whose EOS is the token that
    ends a message of the model.

    Where the template writes none (GLM), a generation config in the folder names the tokens that
    begin the turns after it, as such models have one.
    """
    tokens = [*dict.fromkeys(CONTROL.findall(template))]
    bos = next((token for token in BEGINS if token in template), "<|bos|>")
    tokenizer = _byte_level(template, tokens, bos, "<|endoftext|>")
    if "'.format(" in template:  # of control tokens
        chat = _written(tokenizer, [{"role": "user", "content": "?"}])
        tokens += {*CONTROL.findall(chat)} - {*tokens}
        tokenizer = _byte_level(template, tokens, bos, "<|endoftext|>")
    text = _behind(tokenizer, [])
    ends = [token for token in CONTROL.findall(text) if token in tokens]
    if ends and tokenizer.eos_token not in text:  # or the template writes it
        return _byte_level(template, tokens, bos, ends[-1])
    if not text.strip():
        after = [{"role": "user", "content": "?"}], [{"role": "tool", "content": "?"}]
        begin = [CONTROL.match(_behind(tokenizer, each)) for each in after]
        ends = [str(tokenizer.eos_token), *(found[0] for found in begin if found)]
        known = [tokenizer.convert_tokens_to_ids(end) for end in ends]
        config = json.dumps({"eos_token_id": [end for end in known if end is not None]})
        (folder / "generation_config.json").write_text(config)
        tokenizer.name_or_path = str(folder)
    return tokenizer


def _behind(tokenizer: PreTrainedTokenizerBase, after: list[dict[str, str]]) -> str:
    """What a template writes behind a message of the model; empty if it refuses the chat."""
    return _written(tokenizer, after).rpartition("zq0qz")[2]


def _written(tokenizer: PreTrainedTokenizerBase, after: list[dict[str, str]]) -> str:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zq0qz"}, *after]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template may raise anything
        return ""


def _byte_level(template: str, tokens: list[str], bos: str, eos: str) -> PreTrainedTokenizerBase:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [AddedToken(t, special=not ADDED.fullmatch(t), normalized=False) for t in tokens]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def sources(folders: list[str], scratch: Path) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """(name, tokenizer) of each template."""
    for folder in map(Path, folders):
        if (folder / "tokenizer_config.json").is_file():
            yield folder.name, load_tokenizer(str(folder))
        for file in sorted(folder.glob("*.jinja")):
            yield file.stem, tokenizer_for(file.read_text(encoding="utf-8"), scratch)
    if not folders:
        yield from _of_trl(scratch)
        yield from _of_mistral(scratch)


def _of_trl(scratch: Path) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    if importlib.util.find_spec("trl") is None:
        sys.exit("no templates: give a folder, or pip install trl")
    from trl.chat_template_utils import _CHAT_TEMPLATES_DIR, add_response_schema

    for file in sorted(_CHAT_TEMPLATES_DIR.glob("*.jinja")):
        template = file.read_text(encoding="utf-8")
        yield file.stem, tokenizer_for(template, scratch)
        try:
            with_response = add_response_schema(tokenizer_for(template, scratch))
        except ValueError:  # it has none for this template
            continue
        yield file.stem + RESPONSE, with_response


def mistral_tokenizer(version: str, folder: Path, **more: Any) -> PreTrainedTokenizerBase:
    """A tokenizer of a version of Mistral's, whose `tekken.json` is written to a folder; `more`
    is added to that."""
    import mistral_common
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    raw = json.loads(file.read_text())
    raw["config"] |= {
        "version": version,
        "default_vocab_size": 1000 + len(MISTRAL),
        "default_num_special_tokens": len(MISTRAL),
        "num_vocab_tokens": 1000,
    }
    raw.pop("image", None)
    raw |= {"vocab": raw["vocab"][:1000], **more}
    raw["special_tokens"] = [
        {"rank": n, "token_str": token, "is_control": True} for n, token in enumerate(MISTRAL)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(raw))
    template = "{{ reasoning_effort }}{{ messages[0].content }}"  # the library's tokens are used
    tokenizer = convert_tekken_tokenizer(str(folder / "tekken.json"), template)
    tokenizer.name_or_path = str(folder)
    return tokenizer


def _of_mistral(scratch: Path) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    if importlib.util.find_spec("mistral_common") is not None:
        for version in MISTRAL_VERSIONS:
            more = {"model_settings_builder": EFFORTS} if version == "v15" else {}
            tokenizer = mistral_tokenizer(version, scratch / version, **more)
            yield f"mistral-common {version}", tokenizer


def row_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Cell]:
    try:
        encoder = PromptEncoder(tokenizer)
        if files_of(encoder):
            return MistralFamily(load_mistral(encoder), encoder).row()
        return Family(encoder).row()
    except InputError as error:
        return {column: Cell("refused", {str(error): ["all"]}) for column in COLUMNS}


def table(rows: dict[str, dict[str, Cell]]) -> str:
    """The rows in Markdown, those alike in one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        alike.setdefault(tuple(_shown(str(row[column])) for column in COLUMNS), []).append(name)
    lines = [f"| template | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {_named(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]
    return "\n".join(lines) + "\n"


def _named(names: list[str]) -> str:
    """The names of a row, with R or T behind those that stand for others."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        stem = name.removesuffix(RESPONSE).removesuffix("_training")
        kind = {name: ""} | {stem + RESPONSE: "R", f"{stem}_training": "T"}
        kinds.setdefault(stem, []).append(kind[name])
    shown = []
    for stem, found in kinds.items():
        more = ", ".join(filter(None, found))
        shown.append(f"{stem} ({more})" if more and "" in found else f"{stem} {more}".strip())
    return ", ".join(shown)


def _shown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--into", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    rows = {}
    with TemporaryDirectory() as scratch:
        for name, tokenizer in sources(given.folders, Path(scratch)):
            if given.only and name.partition(",")[0] not in given.only:
                continue
            rows[name] = row = row_of(tokenizer)
            print(f"## {name}")
            for column, cell in row.items():
                print(f"   {column}: {cell}", flush=True)
    if given.into:
        page = given.into.read_text(encoding="utf-8")
        before, rest = page.split(START)
        given.into.write_text(f"{before}{START}\n{table(rows)}\n{END}{rest.split(END)[1]}")
    wrong = [name for name, row in rows.items() for cell in row.values() if cell.state == "wrong"]
    print(f"{len(rows)} templates, {len(wrong)} cells wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
