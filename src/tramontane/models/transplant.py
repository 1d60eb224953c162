"""Puts a trained language model back into its multimodal parent.

Magistral did so after reinforcement learning on text alone, which also improved multimodal
reasoning (arXiv 2506.10910). Weights are copied from file to file, one tensor at a time, in the
parent's shards; all other weights are copied unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from tramontane.errors import InputError
from tramontane.models import fp8
from tramontane.models.loading import converts_weights, load_config, load_own_config
from tramontane.models.names import check_hub, folder_of
from tramontane.models.relaid import empty_wrapper, load_weights, write_relaid
from tramontane.models.weight_files import Entry, WeightFiles, write_files
from tramontane.models.weights import tied_names
from tramontane.models.wrapped import PARENT, is_head
from tramontane.workplace import whole_folder

TOWER = "vision"  # folder of a text half's checkpoint: weights of a vision tower trained with it
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight", "wte.weight")
HEAD = "lm_head.weight"
# Settings, besides weight shapes, that affect what a model computes.
_COMPUTING = (
    "hidden_act", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope", "partial_rotary_factor", "layer_types", "query_pre_attn_scalar", "logit_scale",
    "logits_scaling", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "num_experts_per_tok",
)  # fmt: skip
_OFF_IF_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


class Transplant(NamedTuple):
    """Summary of the written checkpoint."""

    out: Path  # the new checkpoint
    replaced: int  # tensors that come from the language model
    kept: int  # tensors unchanged from the parent
    rounded: int  # replaced tensors that were converted to the dtype of the parent's files
    prefix: str  # prefix of the parent's names before the language model's own


def parent_of(language_model: str) -> str:
    """The multimodal model whose text half was trained: a Hugging Face name's files are those of
    the commit that the training began with.

    Raises:
        InputError: the language model's config names none.
    """
    origin = getattr(load_config(language_model), PARENT, None)
    if origin is None:
        raise InputError(
            f"model {language_model!r}: its config does not say which multimodal model it is a "
            f"part of; name the parent"
        )
    if origin["revision"] is None:
        return str(origin["model"])
    from huggingface_hub import snapshot_download

    check_hub(origin["model"])
    return snapshot_download(origin["model"], revision=origin["revision"])


def transplant(
    language_model: str, parent: str, out: str | Path, maps: Mapping[str, str] | None = None
) -> Transplant:
    """Write the parent with the language model's weights in place of its own text weights.

    Names map if the parent has all of the language model's names with one prefix, such as
    `language_model.model.` or `model.language_model.`; `maps` gives a different one. Config,
    tokenizer and processor are the parent's. Weights that the parent stores in FP8 are quantized as
    it does; where transformers converts its layout (Qwen3-VL-MoE), the language model is loaded. If
    the language model ties its output head to the
    embeddings and the parent does not, the embeddings are written as the parent's head.

    Args:
        language_model: checkpoint folder (such as a run's `checkpoints/update_N/weights`) or name.
        parent: checkpoint folder or name of the multimodal model.
        out: folder of the result, which must not exist or be empty.
        maps: prefix of the parent's names by prefix of the language model's; None: found by names.

    Raises:
        InputError: no safetensors files, names without a counterpart on either side, different
            shapes or settings that affect computation, or an output folder that is not empty or is
            being written by another process.
    """
    out = Path(out)
    folder = folder_of(parent)
    with (
        whole_folder(out, "written") as unfinished,
        # Beside the result, whose disk has room for a model.
        TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as relaid,
    ):
        language = WeightFiles(folder_of(language_model))
        whole = _Parent(WeightFiles(folder), fp8.block_of(load_own_config(parent)))
        _check_settings(language_model, parent)
        try:
            mapping, prefix = whole.places(language, maps)
        except InputError:
            wrapper = empty_wrapper(parent)
            if maps or wrapper is None or not converts_weights(wrapper):
                raise
            own = load_weights(language_model, language)
            there = tied_names(wrapper.state_dict(keep_vars=True))
            names, _ = text_names(own, [tied[0] for tied in there])
            write_relaid(wrapper, {n: own[name] for n, name in names.items()}, Path(relaid))
            language = WeightFiles(Path(relaid))
            mapping, prefix = whole.places(language, None)
        tower = folder_of(language_model) / TOWER
        seeing = whole.tower(WeightFiles(tower)) if tower.is_dir() else {}
        write_files(
            unfinished, whole.entries, whole.tensors(language, mapping, seeing), whole.by_file
        )
        _copy_others(folder, unfinished)
    new = language.entries()
    rounded = sum(whole.entries[name].dtype != new[own].dtype for name, own in mapping.items())
    count = len(mapping) + len(seeing)
    return Transplant(out, count, len(whole.entries) - count, rounded, prefix)


class _Parent:
    """The weights of a multimodal model.

    Args:
        files: its weights.
        block: rows and columns of a block of its 8-bit weights (`fp8.block_of`).
    """

    def __init__(self, files: WeightFiles, block: Sequence[int] | None) -> None:
        self.entries, self.by_file = files.entries(), files.by_file()
        self._files, self._block = files, block
        self._scales = fp8.scales_of(self.entries)
        self._scaled = {scale: name for name, scale in self._scales.items()}

    def places(
        self, language: WeightFiles, maps: Mapping[str, str] | None
    ) -> tuple[dict[str, str], str]:
        """`text_names` of a language model whose shapes and types fit.

        Raises:
            InputError: they do not.
        """
        weights = [
            name
            for name in self.entries
            if name not in self._scaled and not fp8.is_activation_scale(name)
        ]
        mapping, prefix = text_names(language.names, weights, maps)
        _check_shapes(language.entries(), self.entries, mapping, self._scales)
        return mapping, prefix

    def tower(self, trained: WeightFiles) -> dict[str, torch.Tensor]:
        """The weights of a trained vision tower by their names here.

        Raises:
            InputError: one of them is not here, or has another shape.
        """
        found = {}
        for own in trained.names:
            names = [n for n in self.entries if n == own or n.endswith(f".{own}")]
            if len(names) != 1 or self.entries[names[0]].shape != trained.entry(own).shape:
                raise InputError(
                    f"the parent has no counterpart of {own}, a weight of the vision tower that "
                    f"was trained"
                )
            found[names[0]] = trained.read(own)
        return found

    def tensors(
        self,
        language: WeightFiles,
        mapping: Mapping[str, str],
        tower: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in the order of the files, with those of the language model and of the tower
        in their places."""
        for name in self.entries:
            weight = self._scaled.get(name, name)
            if name in tower:
                yield name, tower[name]
            elif weight not in mapping:
                yield name, self._files.read(name)
            elif weight not in self._scales:
                yield name, language.read(mapping[weight])
            else:
                scale = self._files.read(self._scales[weight])
                new = fp8.quantize(language.read(mapping[weight]), scale, self._block)
                yield name, new[name != weight]


def text_names(
    language: Iterable[str], multimodal: Iterable[str], maps: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    """(name in the language model by name in the parent, prefix of the parent's text names).

    Raises:
        InputError: the names do not map one to one.
    """
    language, multimodal = list(language), set(multimodal)
    embeddings = [name for name in language if _own(name) in EMBEDDINGS]
    if len(embeddings) != 1:
        raise InputError(
            f"the language model has {len(embeddings)} weights named …{' or …'.join(EMBEDDINGS)}"
        )
    own = _own(embeddings[0])
    base = embeddings[0].removesuffix(own)
    prefix = (maps or {}).get(base)
    if prefix is None:
        prefix = _prefix(language, multimodal, base, own)
    places = {**(maps or {}), base: prefix}
    mapping = {}
    for name in language:
        place = _placed(name, multimodal, places, base)
        if is_head(name, base) and place not in multimodal and prefix + own in multimodal:
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
    head = next((name for name in sorted(multimodal) if is_head(name, prefix)), None)
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


def _own(name: str) -> str:
    """The last module of a weight's name, with the weight."""
    return ".".join(name.split(".")[-2:])


def _prefix(language: Sequence[str], multimodal: set[str], base: str, embeddings: str) -> str:
    """The prefix with which the parent has most of the language model's names."""
    found = [name.removesuffix(embeddings) for name in multimodal if _own(name) == embeddings]
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
    for prefix in sorted(places, key=len, reverse=True):
        if prefix and name.startswith(prefix):
            return places[prefix] + name.removeprefix(prefix)
    if not base and not name.startswith(HEAD):
        return places[base] + name
    found = [place for place in multimodal if is_head(place, places[base])]
    return found[0] if is_head(name, base) and found else name


def _check_shapes(
    language: Mapping[str, Entry],
    multimodal: Mapping[str, Entry],
    mapping: Mapping[str, str],
    scales: Mapping[str, str],
) -> None:
    for name, source in mapping.items():
        old, new = multimodal[name], language[source]
        if old.shape != new.shape:
            raise InputError(
                f"{source} has the shape {list(new.shape)}, and the parent's {name} "
                f"{list(old.shape)}: they are not of the same architecture and vocabulary"
            )
        converted = new.dtype.itemsize > 1 and (name in scales or old.dtype.itemsize > 1)
        if old.dtype != new.dtype and not converted:
            raise InputError(
                f"{name}: {new.dtype} cannot be converted to the parent's {old.dtype} (only to "
                f"weights of 8 bits that have a scale); take a parent that is not quantized"
            )


def _check_settings(language_model: str, parent: str) -> None:
    """Reject settings with which the same weights would compute something else."""
    language, multimodal = load_config(language_model), load_config(parent).get_text_config()
    for config in (language, multimodal):  # of Gemma 4, some are those of most layers
        config.allow_global_per_layer_attribute_access = True
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
