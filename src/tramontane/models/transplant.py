"""Puts a trained language model back into its multimodal parent.

Magistral did so after reinforcement learning on text alone, which also improved multimodal
reasoning (arXiv 2506.10910). Weights are copied from file to file, one tensor at a time, in the
parent's shards; all other weights are copied unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from tramontane.errors import InputError
from tramontane.models.loading import load_config
from tramontane.models.names import folder_of
from tramontane.models.weight_files import DTYPES, INDEX, SINGLE
from tramontane.workplace import whole_folder

CHUNK = 16 << 20  # bytes copied at once
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
_TORCH = {name: dtype for dtype, name in DTYPES.items()}
# Settings, besides weight shapes, that affect what a model computes.
_COMPUTING = (
    "hidden_act", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope", "partial_rotary_factor", "layer_types", "query_pre_attn_scalar", "logit_scale",
    "logits_scaling", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "num_experts_per_tok",
)  # fmt: skip
_OFF_IF_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


class Transplant(NamedTuple):
    """Summary of the written checkpoint.

    Args:
        out: the new checkpoint.
        replaced: tensors that come from the language model.
        kept: tensors unchanged from the parent.
        rounded: replaced tensors that were converted to the dtype of the parent's files.
        prefix: prefix of the parent's names before the language model's own.
    """

    out: Path
    replaced: int
    kept: int
    rounded: int
    prefix: str


class Stored(NamedTuple):
    """A tensor in a safetensors file: its type and shape, and the offsets of its bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def transplant(
    language_model: str, parent: str, out: str | Path, maps: Mapping[str, str] | None = None
) -> Transplant:
    """Write the parent with the language model's weights in place of its own text weights.

    Names map if the parent has all of the language model's names with one prefix, such as
    `language_model.model.` or `model.language_model.`; `maps` gives a different one. Config,
    tokenizer and processor are the parent's. If the language model ties its output head to the
    embeddings and the parent does not, the embeddings are written as the parent's head.

    Args:
        language_model: checkpoint folder (such as a run's `checkpoints/step_N/weights`) or name.
        parent: checkpoint folder or name of the multimodal model.
        out: folder of the result, which must not exist or be empty.
        maps: prefix of the parent's names by prefix of the language model's; None: found by names.

    Raises:
        InputError: no safetensors files, names without a counterpart on either side, different
            shapes or settings that affect computation, or an output folder that is not empty or is
            being written by another process.
    """
    out = Path(out)
    with whole_folder(out, "written") as unfinished:
        sources = {"language model": folder_of(language_model), "parent": folder_of(parent)}
        language, multimodal = (stored_tensors(folder) for folder in sources.values())
        _check_settings(language_model, parent)
        mapping, prefix = text_names(language, multimodal, maps)
        _check_shapes(language, multimodal, mapping)
        for file in sorted({stored.file for stored in multimodal.values()}):
            names = {name: stored for name, stored in multimodal.items() if stored.file == file}
            replaced = {n: language[mapping[n]] for n in names if n in mapping}
            _write_shard(unfinished / file.name, names, replaced)
        _copy_others(sources["parent"], unfinished)
    rounded = sum(
        multimodal[name].dtype != language[source].dtype for name, source in mapping.items()
    )
    return Transplant(out, len(mapping), len(multimodal) - len(mapping), rounded, prefix)


def text_names(
    language: Iterable[str], multimodal: Iterable[str], maps: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    """(name in the language model by name in the parent, prefix of the parent's text names).

    Raises:
        InputError: the names do not map one to one.
    """
    language, multimodal = list(language), set(multimodal)
    embeddings = [name for name in language if name.endswith(EMBEDDINGS)]
    if len(embeddings) != 1:
        raise InputError(f"the language model has {len(embeddings)} weights named …{EMBEDDINGS}")
    base = embeddings[0].removesuffix(EMBEDDINGS)
    prefix = (maps or {}).get(base)
    if prefix is None:
        prefix = _prefix(language, multimodal, base)
    places = {**(maps or {}), base: prefix}
    mapping = {}
    for name in language:
        place = _placed(name, multimodal, places, base)
        if name == HEAD and place not in multimodal and prefix + EMBEDDINGS in multimodal:
            raise InputError(
                f"the language model has an output head of its own ({name}), and the parent ties "
                f"its head to the embeddings; take a parent whose head is not tied"
            )
        if place not in multimodal:
            raise InputError(
                f"the parent has no counterpart of {name} ({place} is not in its files); "
                f"if its names have another prefix, give it: --map {base}=PREFIX."
            )
        mapping[place] = name
    head = next((name for name in sorted(multimodal) if _is_head(name, prefix)), None)
    if head is not None and head not in mapping:
        mapping[head] = embeddings[0]  # a tied head
    modules = {name.removeprefix(base).split(".")[0] for name in language if name.startswith(base)}
    stale = sorted(
        name
        for name in multimodal
        if name.startswith(prefix)
        and name.removeprefix(prefix).split(".")[0] in modules
        and name not in mapping
    )
    if stale:
        raise InputError(
            f"the language model has no counterpart of the parent's {stale[0]}"
            + (f" and {len(stale) - 1} more" if len(stale) > 1 else "")
            + ": they are not of the same architecture"
        )
    return mapping, prefix


def _prefix(language: Sequence[str], multimodal: set[str], base: str) -> str:
    """The prefix with which the parent has most of the language model's names."""
    found = [name.removesuffix(EMBEDDINGS) for name in multimodal if name.endswith(EMBEDDINGS)]
    body = [name.removeprefix(base) for name in language if name.startswith(base)]
    counts = {prefix: sum(prefix + stem in multimodal for stem in body) for prefix in sorted(found)}
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) != 1:
        reason = f"several prefixes fit ({', '.join(best)})" if best else "it has no text weights"
        raise InputError(
            f"the parent's names do not map: {reason}; give its prefix: --map {base}=PREFIX."
        )
    return best[0]


def _placed(name: str, multimodal: set[str], places: Mapping[str, str], base: str) -> str:
    """The parent's name for one of the language model's."""
    for prefix in sorted(places, key=len, reverse=True):
        if prefix and name.startswith(prefix):
            return places[prefix] + name.removeprefix(prefix)
    if not base and not name.startswith(HEAD):
        return places[base] + name
    found = [place for place in multimodal if _is_head(place, places[base])]
    return found[0] if name == HEAD and found else name


def _is_head(name: str, prefix: str) -> bool:
    """True for the output head of the text weights: `lm_head` after part of their prefix."""
    before = name.removesuffix(HEAD)
    return name.endswith(HEAD) and prefix.startswith(before)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint's safetensors files by name.

    Raises:
        InputError: no such files, or a damaged one.
    """
    paths = [folder / SINGLE]
    if (index := folder / INDEX).is_file():
        paths = [folder / name for name in _shards(index)]
    found: dict[str, Stored] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"model {folder}: it has no file {path.name}; save it as safetensors")
        found.update(_header(path)[0])
    return found


def _shards(index: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: damaged, no index of safetensors files ({error!r})") from None


def _header(path: Path) -> tuple[dict[str, Stored], int]:
    """The tensors of a safetensors file by name, and their start offset."""
    with path.open("rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            begin = 8 + length
            tensors = {
                name: _stored(path, entry, begin)
                for name, entry in json.loads(file.read(length)).items()
                if name != "__metadata__"
            }
        except (
            ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            raise InputError(f"{path}: damaged, no safetensors header ({error!r})") from None
    if path.stat().st_size != max((stored.end for stored in tensors.values()), default=begin):
        raise InputError(f"{path}: damaged, it does not have the size that its header names")
    return tensors, begin


def _stored(path: Path, entry: Mapping[str, Any], begin: int) -> Stored:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    return Stored(path, str(entry["dtype"]), shape, begin + int(start), begin + int(end))


def _write_shard(path: Path, names: Mapping[str, Stored], replaced: Mapping[str, Stored]) -> None:
    """Write one of the parent's files: its header unchanged, then each tensor's bytes."""
    source = next(iter(names.values())).file
    _, begin = _header(source)
    with path.open("wb") as target, source.open("rb") as file:
        _copy(file, target, 0, begin)
        for name, stored in sorted(names.items(), key=lambda pair: pair[1].start):
            new = replaced.get(name)
            if new is None:
                _copy(file, target, stored.start, stored.end)
            elif new.dtype == stored.dtype:
                with new.file.open("rb") as other:
                    _copy(other, target, new.start, new.end)
            else:
                target.write(_converted(new, stored.dtype))


def _copy(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    source.seek(start)
    while start < end:
        part = source.read(min(CHUNK, end - start))
        if not part:
            raise InputError(f"{source.name}: cut short")
        target.write(part)
        start += len(part)


def _converted(stored: Stored, dtype: str) -> bytes:
    """The bytes of a tensor in another number type."""
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        content = bytearray(file.read(stored.end - stored.start))
    tensor = torch.frombuffer(content, dtype=_TORCH[stored.dtype]).to(_TORCH[dtype])
    return tensor.view(torch.uint8).numpy().tobytes()


def _check_shapes(
    language: Mapping[str, Stored], multimodal: Mapping[str, Stored], mapping: Mapping[str, str]
) -> None:
    for name, source in mapping.items():
        old, new = multimodal[name], language[source]
        if old.shape != new.shape:
            raise InputError(
                f"{source} has the shape {list(new.shape)}, and the parent's {name} "
                f"{list(old.shape)}: they are not of the same architecture and vocabulary"
            )
        if old.dtype != new.dtype and not {old.dtype, new.dtype} <= _TORCH.keys():
            raise InputError(
                f"{name}: {new.dtype} cannot be converted to the parent's {old.dtype}; take a "
                f"parent that is not quantised"
            )


def _check_settings(language_model: str, parent: str) -> None:
    """Reject settings with which the same weights would compute something else."""
    language, multimodal = load_config(language_model), load_config(parent).get_text_config()
    for key in (*_COMPUTING, *_OFF_IF_NONE):
        first, second = _setting(language, key), _setting(multimodal, key)
        if None not in (first, second) and first != second:
            raise InputError(
                f"{key} is {first} in the language model and {second} in the parent: the text path "
                f"would compute something else"
            )


def _setting(config: Any, key: str) -> Any:
    """The value of a setting; None where the architecture has none, or does not say."""
    if key == "rope":
        return _rope(getattr(config, "rope_parameters", None))
    value = getattr(config, key, None)
    return "off" if value is None and key in _OFF_IF_NONE and hasattr(config, key) else value


def _rope(parameters: Any) -> Any:
    """Parameters of the rotary embeddings, by layer type if they differ, without those for image
    positions (`mrope_section`), which do not affect text."""
    if not isinstance(parameters, dict):
        return parameters
    return {
        key: _rope(value)
        for key, value in parameters.items()
        if value is not None and not key.startswith("mrope") and key != "type"
    }


def _copy_others(parent: Path, out: Path) -> None:
    """Copy the parent's other files: config, tokenizer, processor, the index of the shards."""
    for path in sorted(parent.iterdir()):
        if path.is_file() and not (out / path.name).exists() and path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
