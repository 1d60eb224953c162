"""The text half of a model that wraps a language model and towers for images or sound, such as
Mistral 3, Gemma 3, Qwen-VL, Llava and Llama 4.

The text half is a causal LM: its config is the wrapper's text config, or that of a causal LM which
computes the same on text (`EQUIVALENTS`), and its weights are those under one prefix of the
wrapper's files. Published files name these weights in several ways (`language_model.model.`,
`model.language_model.`, `model.`, with the output head within or at the top), so the prefix is
found in the files.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from tramontane.errors import InputError
from tramontane.models.families import (
    DEFAULTS,
    EQUIVALENTS,
    SCALES,
    WHOLE_HEADS,
    transformers_fails,
)
from tramontane.models.names import cache_dir, pinned
from tramontane.models.weight_files import INDEX, SINGLE, WeightFiles

logger = logging.getLogger("tramontane")

# transformers patches torch globally while it builds a model: two threads that do so concurrently
# leave tied output heads untied, with random weights (seen with 5.23), or torch's default number
# type changed.
LOADING = threading.Lock()

PARENT = "text_half_of"  # key in the config of a text half: where it comes from
HEAD = "lm_head.weight"
_halves: dict[Hashable, TextHalf] = {}
PARTS = {"text_config", "thinker_config"}  # of a wrapper's config
_COMPARED = 64  # rows of embeddings and head that tell whether they are equal


class TextHalf:
    """The text half of a wrapper.

    Args:
        name: of the wrapper, as given.
        own: the wrapper's config.
        folder: where the wrapper is on this machine; None: it has not been downloaded, so that only
            its config is known.

    Raises:
        InputError: it is not a causal LM of transformers, or one that transformers cannot build, or
            not in the files, or these are not safetensors files.

    Attributes:
        config: its config as a causal LM, which says where it comes from (`PARENT`).
        names: its weights' names in the wrapper's files, by their names in the text half; None
            without files. The names of a layout that transformers converts on loading are not
            among them.
    """

    def __init__(self, name: str, own: PreTrainedConfig, folder: Path | None) -> None:
        self.config = _text_config(name, own)
        self._prefix, self._base = "", ""
        self._blocks = "layers."  # what the files call the layers
        self._modules: tuple[str, ...] = ()  # prefixes of its names
        self._head: str | None = None
        self.names: dict[str, str] | None = None
        if folder is not None and WeightFiles.present(folder):
            self._find(WeightFiles(folder), folder)
        elif folder is not None and any(folder.glob("pytorch_model*.bin")):
            raise InputError(
                f"model {name!r}: wraps a text half, which is read from safetensors files, and its "
                f"weights are in pytorch_model.bin; load it with transformers and save it again "
                f"with save_pretrained"
            )
        setattr(self.config, PARENT, _origin(name, folder, getattr(own, "_commit_hash", None)))

    def loading_options(self) -> dict[str, Any]:
        """Arguments with which `from_pretrained` reads the text half from the wrapper's files."""
        renames = {f"^{re.escape(self._prefix)}{self._blocks}": f"{self._base}layers."}
        done = "" if self._prefix else f"(?!{re.escape(self._base)})"  # renames follow each other
        renames[f"^{re.escape(self._prefix)}{done}"] = self._base
        if self._head is not None:
            renames[f"^{re.escape(self._head)}$"] = HEAD
        return {"config": self.config, "key_mapping": renames}

    def unread(self, names: Iterable[str]) -> list[str]:
        """The names in the text half's own modules, among those of weights that were not loaded."""
        return [name for name in names if name.startswith(self._modules)]

    def _place(self, name: str) -> str:
        """The name in the files of a weight below the base."""
        stem = name.removeprefix(self._base)
        return self._prefix + re.sub(r"^layers\.", self._blocks, stem)

    def _find(self, files: WeightFiles, folder: Path) -> None:
        code = f"code of {self.config.model_type}"
        with transformers_fails(code), LOADING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        own = model.state_dict(keep_vars=True)
        table = model.get_input_embeddings().weight
        embeddings = next(name for name, tensor in own.items() if tensor is table)
        self._base = "".join(f"{part}." for part in embeddings.split(".")[:-2])
        stems = [name.removeprefix(self._base) for name in own if name.startswith(self._base)]
        self._modules = tuple({f"{self._base}{stem.split('.')[0]}." for stem in stems})
        stem, shape = embeddings.removeprefix(self._base), table.shape
        there = set(files.names)
        prefixes = [
            name.removesuffix(stem)
            for name in sorted(there)
            if name.endswith(stem) and files.entry(name).shape == shape
        ]
        if not prefixes:
            raise _without_embeddings(folder, files, stem, shape)
        self._prefix = max(prefixes, key=lambda prefix: sum(prefix + s in there for s in stems))
        self._blocks = _blocks(there, self._prefix, stems)
        heads = [name for name in there if is_head(name, self._prefix)]
        self._head = max(heads, key=len, default=None)
        if self._head is not None and self.config.tie_word_embeddings:
            equal = _equal(files, self._prefix + stem, self._head)
            self.config.tie_word_embeddings = equal
        placed = {name: self._place(name) for name in own}
        if self._head is not None:
            placed[HEAD] = self._head
        self.names = {name: place for name, place in placed.items() if place in there}


def _without_embeddings(
    folder: Path, files: WeightFiles, stem: str, shape: torch.Size
) -> InputError:
    """The error for files without a weight that ends in `stem` and has this shape: those of
    Inkling call it `embed.weight`."""
    wanted = f"the text half's embeddings (…{stem} of shape {list(shape)})"
    alike = (n for n in files.names if "embed" in n and files.entry(n).shape == shape)
    if other := next(alike, ""):
        return InputError(
            f"model {folder}: its files have other names for weights than are known here ({other} "
            f"in place of {wanted}); choose another model"
        )
    return InputError(f"model {folder}: damaged, no file has {wanted}; fetch or save it again")


def find(name: str, own: PreTrainedConfig, folder: Path | None) -> TextHalf | None:
    """The `TextHalf` of a checkpoint; None for one that wraps nothing. Not to be changed: it is
    kept until the checkpoint's files change, since a model is built to find its weights."""
    if not PARTS & set(type(own).sub_configs):
        return None
    if folder is None:
        return TextHalf(name, own, folder)
    files = [file.stat() for n in ("config.json", SINGLE, INDEX) if (file := folder / n).is_file()]
    key = (name, folder, *((file.st_mtime_ns, file.st_size) for file in files))
    if key not in _halves:
        _halves[key] = TextHalf(name, own, folder)
    return _halves[key]


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write a text half's config as that of an ordinary causal LM."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def is_head(name: str, prefix: str) -> bool:
    """True for the output head of the text weights: `lm_head` after part of their prefix."""
    return name.endswith(HEAD) and prefix.startswith(name.removesuffix(HEAD))


def _text_config(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a wrapper's text half, from its config alone.

    Raises:
        InputError: its text half is not a causal LM of transformers.
    """
    text = config.get_text_config()
    kind = EQUIVALENTS.get(text.model_type, text.model_type)
    alone = CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    if not alone or getattr(text, "is_encoder_decoder", False):
        raise InputError(
            f"model {name!r}: {config.model_type} wraps a text half ({text.model_type}) for which "
            f"transformers has no causal LM; give a model that AutoModelForCausalLM loads"
        )
    found = copy.deepcopy(text) if kind == text.model_type else converted(text, kind)
    for key in ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config", "dtype"):
        value = getattr(config, key, None)
        if getattr(found, key, None) is None and value is not None:
            setattr(found, key, value)
    found.tie_word_embeddings = _ties(config)
    for key in _dropped_scales(config, found):
        logger.warning(
            f"{name}: transformers computes {config.model_type}'s logits without the {key} of its "
            f"text config ({getattr(found, key)}); its text half is trained and sampled likewise"
        )
        setattr(found, key, SCALES[key])
    return found


def _dropped_scales(config: PreTrainedConfig, text: PreTrainedConfig) -> list[str]:
    """Keys of `SCALES` that a text half's causal LM applies to its logits and its wrapper does not:
    many wrappers take a text model of any kind, and have an output head of their own."""
    scales = [key for key, off in SCALES.items() if getattr(text, key, off) not in (off, None)]
    wrapper: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if not scales or wrapper is None:
        return []
    own = [inspect.unwrap(method).__code__ for method in (wrapper.__init__, wrapper.forward)]
    read = {name for code in own for name in (*code.co_names, *code.co_consts)}
    dropped = [key for key in scales if key not in read]
    if not dropped:  # a whole may need packages of its towers to be built
        return []
    with transformers_fails(f"code of {config.model_type}"), LOADING, torch.device("meta"):
        parts = {type(module) for module in wrapper(config).modules()}
    return [] if MODEL_FOR_CAUSAL_LM_MAPPING[type(text)] in parts else dropped


def converted(text: PreTrainedConfig, kind: str) -> PreTrainedConfig:
    """The config of a text half as that of a causal LM of another architecture."""
    values = {k: v for k, v in text.to_dict().items() if k not in ("model_type", "architectures")}
    rope = dict(values.get("rope_parameters") or {})
    for key in [key for key in rope if key.startswith("mrope") or key == "type"]:
        del rope[key]
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    if text.model_type in WHOLE_HEADS:
        rope.setdefault("partial_rotary_factor", 1.0)
    values |= {"rope_parameters": rope} if rope else {}
    if values.get("head_dim") is None:
        values["head_dim"] = text.hidden_size // text.num_attention_heads
    return CONFIG_MAPPING[kind](**values | DEFAULTS.get(text.model_type, {}))


def _ties(config: PreTrainedConfig) -> bool:
    """True if a wrapper's config ties the output head: by itself or by one of its parts."""
    parts = (config, config.get_text_config())
    return any(getattr(part, "tie_word_embeddings", False) for part in parts)


def _blocks(there: set[str], prefix: str, stems: Iterable[str]) -> str:
    """What files call `layers.` below a prefix. Published ones say so; transformers 5.23 saves Kimi
    K2.5 with `blocks.` and Qianfan-OCR with `encoder.layers.`."""
    if any(name.startswith(f"{prefix}layers.") for name in there):
        return "layers."
    first = {stem.removeprefix("layers.0.") for stem in stems if stem.startswith("layers.0.")}
    found = (re.match(rf"{re.escape(prefix)}(\D+)0\.(.+)$", name) for name in there)
    names = Counter(match[1] for match in found if match and match[2] in first)
    return names.most_common(1)[0][0] if names else "layers."


def _equal(files: WeightFiles, first: str, second: str) -> bool:
    return bool(
        files.entry(first) == files.entry(second)
        and (files.read(first, 0, _COMPARED) == files.read(second, 0, _COMPARED)).all()
    )


def _origin(name: str, folder: Path | None, revision: str | None) -> dict[str, Any]:
    """What the text half's config says of the wrapper: `model`, a Hugging Face name or an absolute
    folder, and `revision`, the commit of a name.

    Args:
        name: as given.
        folder: where it is on this machine; None: not known.
        revision: of its config, as transformers found it.
    """
    if folder is not None and folder.parent == cache_dir() / "joined":  # of links
        folder = (folder / "config.json").readlink().parent
    if folder is not None and folder.parent.name == "snapshots":  # of the hub's cache
        repository = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return {"model": repository, "revision": folder.name}
    if folder is not None and Path(name).expanduser().exists():
        return {"model": str(folder.absolute()), "revision": None}
    return {"model": pinned(name)[0], "revision": revision}
