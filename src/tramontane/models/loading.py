"""Loading of Hugging Face causal LMs, for generator and trainer alike."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.logging import disable_progress_bar

from tramontane.errors import InputError
from tramontane.models import fp8, longrope, wrapped
from tramontane.models.attention import PACKED
from tramontane.models.equivalents import check_equivalent
from tramontane.models.families import check_packing, transformers_fails
from tramontane.models.gpu import Build
from tramontane.models.names import (
    TOKENIZER_FILES,
    check_hub,
    folder_of,
    has_tokenizer,
    is_local,
    pinned,
    resolve,
)
from tramontane.models.states import separate_states
from tramontane.models.tokenizers import add_processor_template, is_tekken_alone, load_tekken
from tramontane.models.weight_files import INDEX, WeightFiles, listed_files
from tramontane.models.wrapped import LOADING, TextHalf

logger = logging.getLogger("tramontane")

# Ways of quantization from which transformers reads plain weights: FP8 of DeepSeek-V3, Ministral 3
# and Devstral Small 2, and gpt-oss's four bits.
DEQUANTIZED = {"fp8", "mxfp4"}

# What a folder without a checkpoint may hold instead, by a file of it.
_OTHERS = {
    "adapter_config.json": ", but adapters; name the `weights`, into which a run merges them",
    "params.json": ", but its maker's own layout (params.json); download config.json and "
    "model*.safetensors too, from the same repository or one in the Hugging Face layout",
    "consolidated*.safetensors": ", but its maker's own layout (consolidated*.safetensors); "
    "download model*.safetensors too, from the same repository or one in the Hugging Face layout",
    "*.gguf": ", but GGUF files; download the model that they were made of, in the Hugging Face "
    "layout (config.json, model*.safetensors)",
}

# Progress bars would break the display of a run, and so would transformers' tables of weights that
# a model lacks or a file has beside the model's, such as those of a vision tower. `_complete` says
# what matters of them; a failed conversion is only in the table.
disable_progress_bar()
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in (text := record.getMessage()) or "CONVERSION" in text
)

# In bfloat16 on a CPU, each thread of torch caches the kernels of the last 1,024 shapes, which took
# 1.3 GiB in a trainer. oneDNN has a cache shared by all threads, with lookups of microseconds. With
# 512 kernels there, a trainer is up to 7 % faster at 1.8 M, but takes 0.3 GiB more and keeps
# growing for an hour. Both variables are read when the first kernel is made.
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def local_folder(model: str) -> Path | None:
    """The folder that holds a model on this machine: a checkpoint folder, one in this package, or
    the snapshot of a Hugging Face name in the cache, if it has all weights. None for other names.
    """
    path = Path(resolve(model)).expanduser()
    if (path / "config.json").is_file():
        return path
    try:
        name, revision = pinned(model)
        snapshot = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    files = {"model.safetensors"}
    if (index := snapshot / "model.safetensors.index.json").is_file():
        files = {*listed_files(index)}
    return snapshot if all((snapshot / name).is_file() for name in files) else None


def check_files(model: str) -> None:
    """Check by names and headers alone that a model's files hold weights that can be loaded; no
    check for a Hugging Face name that is not on this machine.

    Raises:
        InputError: an unknown architecture, no weights, a file that is missing or damaged, or
            weights in 8 bits without scales.
    """
    if (folder := local_folder(model)) is None:
        return
    config = load_own_config(model)
    if not WeightFiles.present(folder):
        if not any(folder.glob("pytorch_model*.bin")):
            raise InputError(
                f"model {model!r}: no weights (model*.safetensors) in folder {folder}"
                f"{_found_instead(folder)}"
            )
        return
    files = WeightFiles(folder)
    if (quantization(model, config) or {}).get("quant_method") != "fp8":
        return
    if unscaled := fp8.unscaled(files.entries()):
        first, more = unscaled[0], len(unscaled) - 1
        raise InputError(
            f"model {model!r}: its weights are in 8 bits, and there is no {first}_scale_inv (nor "
            f"that of {more} others), so their sizes are unknown; choose the model's unquantized "
            f"form, or one whose scales have the names that transformers reads"
        )


def _found_instead(folder: Path) -> str:
    """What a folder without a checkpoint or weights has, with the remedy; empty if not known."""
    return next((what for file, what in _OTHERS.items() if any(folder.glob(file))), "")


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder or Hugging Face name.

    Raises:
        InputError: no tokenizer there, one without an EOS token (completions could never end by
            themselves), or one with tokens that the model lacks.
    """
    local = is_local(model)
    folder = Path(resolve(model)).expanduser() if local else folder_of(model, TOKENIZER_FILES)
    if (folder / "config.json").is_file() and not has_tokenizer(folder):
        raise InputError(
            f"model {model!r}: its folder holds no tokenizer (tokenizer.json); set the key "
            f"`tokenizer` next to the model's, e.g. tokenizer=FOLDER, to the folder or the name of "
            f"a model that has it"
        )
    if is_tekken_alone(folder):
        tokenizer = load_tekken(folder)
    else:
        # Where mistral-common is installed, transformers would use it for Mistral's models, without
        # a chat template.
        own = load_own_config(model)
        tokenizer = _from_pretrained(AutoTokenizer, model, mistral_format=False, config=own)
        add_processor_template(tokenizer, folder)
        if not local:  # with its revision, if it has one
            tokenizer.name_or_path = model
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{model}: the tokenizer has no EOS token, so no completion could ever stop; "
            f"set `eos_token` in its tokenizer_config.json"
        )
    _check_vocabulary(model, tokenizer)
    return tokenizer


def _check_vocabulary(model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer whose texts may contain tokens without an embedding in the model.

    Special tokens that neither the tokenizer nor its template uses may be missing: Gemma 3's text
    models have all but the image token.
    """
    known = getattr(load_config(model).get_text_config(), "vocab_size", None)
    if known is None:
        return
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template or "")
    used = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token}

    def may_occur(text: str, token: int) -> bool:
        special = token in added and added[token].special
        return not special or text in used or text in template

    beyond = {text: token for text, token in tokenizer.get_vocab().items() if token >= known}
    lacking = {token: text for text, token in beyond.items() if may_occur(text, token)}
    if lacking:
        last = max(lacking)
        raise InputError(
            f"model {model!r}: its vocabulary of {known:,} tokens is too small for its tokenizer: "
            f"it lacks {len(lacking):,} of these, up to {last:,} ({lacking[last]!r}). Give the "
            f"model's own tokenizer (tokenizer=FOLDER), or enlarge the model with transformers: "
            f"resize_token_embeddings({last + 1}), and save it again"
        )


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of the token spelled exactly `text`, or None."""
    found = tokenizer.convert_tokens_to_ids(text)  # None or the unknown token's id otherwise
    return found if isinstance(found, int) and tokenizer.decode([found]) == text else None


def load_model(
    model: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Load a causal LM whose attention takes packed rows.

    Raises:
        InputError: no checkpoint there, damaged weights, or a model that does not compute for
            packed rows what it computes for each sequence alone.
    """
    check_files(model)
    # Some models look their attention up while they are built, among transformers' own.
    own = load_own_config(model)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "config": own}
    half = _text_half(model, own, local_folder(model))
    if half:
        options |= half.loading_options()
    quantized = _dequantize(model, options["config"])
    loaded = _complete(AutoModelForCausalLM, model, half, **options)
    if quantized:
        check_files(model)  # again: they may have been downloaded meanwhile
        loaded.to(dtype)  # transformers leaves some weights in the type of their scales
        # Saving cannot undo the conversions of quantized weights.
        loaded._weight_conversions = get_model_conversion_mapping(loaded, add_legacy=False)
    loaded.set_attn_implementation(PACKED)
    if half:
        # save_pretrained would write the wrapper's names, which AutoModelForCausalLM does not read.
        loaded._weight_conversions = None
    # Weights may be unaligned in a mapped file, and matrix products then round differently (seen in
    # the seventh digit). Once copied, equal weights give equal bits from any file.
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()
    separate_states(loaded)
    loaded.to(device)
    check_packing(loaded)
    return loaded


def _text_half(model: str, own: Any, folder: Path | None) -> TextHalf | None:
    """The text half of a checkpoint; None for one that wraps nothing.

    Raises:
        InputError: see `TextHalf` and `check_equivalent`.
    """
    half = wrapped.find(model, own, folder)
    if half:
        check_equivalent(model, own, half.config)
    return half


def load_tower(model: str, dtype: torch.dtype) -> Any:
    """The vision tower and projector of a wrapper, as its base model without a text half, which
    has `get_image_features`.

    Raises:
        InputError: no checkpoint there, or damaged weights.
    """
    own = load_own_config(model)
    text = own.get_text_config()
    text.num_hidden_layers = 0  # of the text half only the embeddings are read
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):  # Gemma 4's
        if getattr(text, key, None):
            setattr(text, key, 0)
    if getattr(own, "audio_config", None) is not None:
        own.audio_config = None
    auto = AutoModelForImageTextToText
    loaded, info = _from_pretrained(auto, model, output_loading_info=True, config=own, dtype=dtype)
    if lacking := sorted(info["missing_keys"]):
        raise InputError(
            f"model {model!r}: damaged, its weights lack {lacking[0]}; fetch or save it again"
        )
    tower, decoder = loaded.model, loaded.get_decoder()
    for name, part in tower.named_children():
        if part is decoder:
            setattr(tower, name, torch.nn.Identity())
    return tower.requires_grad_(False).eval()


def read_back(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM as transformers alone reads it from a folder that was just written.

    Raises:
        InputError: weights are missing there.
    """
    return _complete(AutoModelForCausalLM, str(folder), dtype=dtype)


def _dequantize(model: str, config: Any) -> bool:
    """Let transformers read quantized weights as plain ones; False if they are plain.

    Raises:
        InputError: it cannot.
    """
    if (settings := quantization(model, config)) is None:
        return False
    config.quantization_config = settings | {"dequantize": True}
    return True


def quantization(model: str, config: Any) -> dict[str, Any] | None:
    """How a checkpoint's weights are quantized, by its config; None if they are plain.

    Raises:
        InputError: in a way that cannot be undone.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = dict(settings if isinstance(settings, dict) else settings.to_dict())
    if (method := settings.get("quant_method")) not in DEQUANTIZED:
        raise InputError(
            f"model {model!r}: quantized by {method!r}, which cannot be undone here; give "
            f"the model that it was made from"
        )
    return settings


def load_classifier(
    model: str, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence classifier and its tokenizer.

    Raises:
        InputError: no checkpoint there, or one without weights of a classifier's head.
    """
    own = load_own_config(model)
    loaded = _complete(AutoModelForSequenceClassification, model, dtype=dtype, config=own)
    tokenizer = _from_pretrained(AutoTokenizer, model, mistral_format=False)
    return loaded.to(device).eval(), tokenizer


def _complete(auto: Any, model: str, half: TextHalf | None = None, **options: Any) -> Any:
    loaded, info = _from_pretrained(
        auto, model, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    unread = sorted(half.unread(info["unexpected_keys"]) if half else info["unexpected_keys"])
    if unread and half:  # before what is missing: a layout that is not known here has both
        raise InputError(
            f"model {model!r}: its text half has weights that {type(loaded).__name__} does not "
            f"read ({unread[0]}, {len(unread)} in all), so it would compute something else; "
            f"choose another model"
        )
    # transformers would continue with random weights.
    faults = [f"its weights lack {name}" for name in sorted(info["missing_keys"])]
    faults += [
        f"{name} has the shape {list(there)}, and the config says {list(wanted)}"
        for name, there, wanted in sorted(info["mismatched_keys"])
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(f"model {model!r}: damaged, {faults[0]}{more}; fetch or save it again")
    if unread:
        logger.warning(
            "%s: %d weights are not a part of %s, and are not loaded (%s …)",
            model,
            len(unread),
            type(loaded).__name__,
            unread[0],
        )
    return loaded


def empty_model(model: str) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Build a checkpoint's model with float32 parameters on the meta device and real buffers on the
    CPU, for a trainer whose ranks read only their shards of the weights.

    Returns:
        The model, and the files to read its weights from. None, with a warning in the log, for a
        checkpoint whose weights must be loaded as a whole: they are not in safetensors files, are
        quantized, or are converted by transformers while loading.

    Raises:
        InputError: no checkpoint there, or an incomplete one.
    """
    folder = folder_of(
        model, ["model*.safetensors", INDEX, "config.json", "generation_config.json"]
    )
    half = _text_half(model, load_own_config(model), folder)
    config = half.config if half else load_config(model)
    with LOADING, _parameters_on_meta():
        built = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=PACKED
        )
    if getattr(config, "quantization_config", None) is not None:
        obstacle: str | None = "they are quantized"
    elif not WeightFiles.present(folder):
        obstacle = f"{folder} has no safetensors files"
    elif converts_weights(built):
        obstacle = f"transformers converts the weights of {type(built).__name__}"
    else:
        files = WeightFiles(folder, half.names if half else None)
        obstacle = files.misfit(built)
        if obstacle is None:
            separate_states(built)
            if (folder / "generation_config.json").is_file():
                built.generation_config = _from_pretrained(GenerationConfig, model)
            return built.eval(), files
    logger.warning(
        "%s: every trainer rank loads the whole model before it keeps its share of the weights, "
        "since they cannot be read in parts: %s. To avoid this, load the model with transformers "
        "and save it again with save_pretrained",
        model,
        obstacle,
    )
    return None


def converts_weights(model: PreTrainedModel) -> bool:
    """True if the model's weights have different names or layouts in checkpoint files; see
    transformers' `conversion_mapping`."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as a module has it; buffers are computed."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one is already there
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    setattr(torch.nn.Module, "register_parameter", register_on_meta)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.nn.Module, "register_parameter", register)  # noqa: B010


def load_config(model: str) -> Any:
    """The architecture of a causal LM, without its weights: of a checkpoint that wraps one, that of
    its text half.

    Raises:
        InputError: no checkpoint there, or a wrapper whose text half is not a causal LM.
    """
    own = load_own_config(model)
    half = _text_half(model, own, local_folder(model))
    return copy.deepcopy(half.config) if half else own


def load_own_config(model: str) -> Any:
    """The config of a checkpoint as published, but with one set of rotary frequencies."""
    file = Path(resolve(model)).expanduser() / "config.json"
    if is_local(model) and file.is_file():
        return copy.deepcopy(_parsed_config(model, file.read_bytes()))
    return _parse_config(model)


@functools.lru_cache(maxsize=16)
def _parsed_config(model: str, written: bytes) -> Any:
    """The config of a folder that is as `written`: to parse one takes transformers 1 to 7 ms, and
    a model, its tokenizer and its processor ask for it several times."""
    return _parse_config(model)


def _parse_config(model: str) -> Any:
    config = _from_pretrained(AutoConfig, model)
    longrope.unify(config)
    with transformers_fails(f"config of {config.model_type}"):
        text = config.get_text_config()
    longrope.unify(text)
    return config


def vocabulary(model: PreTrainedModel) -> int:
    """Number of tokens that the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index, arg-type]


def check_device(device: str, key: str = "device") -> None:
    """Check that torch sees the device; `key` is the configuration key that the error names.

    Raises:
        InputError: torch sees no device of that kind, or fewer than its number requires.
    """
    asked = torch.device(device)
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = counts.get(asked.type)
    if count == 0:
        why = Build.installed().why_no_gpu() if asked.type == "cuda" else "this is not a Mac's GPU"
        raise InputError(
            f"{key} is {device!r}, but torch sees no GPU of that kind: {why}. Or set {key} to cpu"
        )
    if count is not None and (asked.index or 0) >= count:
        raise InputError(
            f"{key} needs the device {device!r}, but torch sees {count} of that kind, numbered "
            f"from 0"
        )


def context_length(model_config: Any) -> int | None:
    """The model's maximum number of positions, or None if its config does not say."""
    whole = getattr(model_config, "max_position_embeddings", None)
    return longrope.original_context(model_config) or whole


def _from_pretrained(auto: Any, model: str, **options: Any) -> Any:
    path, revision = pinned(resolve(model))
    options |= {"revision": revision} if revision else {}
    if is_local(model):
        folder = Path(path).expanduser()
        if not folder.exists():
            raise InputError(f"model {model!r}: no such folder")
        if not (folder / "config.json").is_file():
            raise InputError(
                f"model {model!r}: no checkpoint (config.json) in folder {path}"
                f"{_found_instead(folder)}"
            )
        path = str(folder)
    else:
        check_hub(model)
    try:
        with LOADING:
            # Never run code from a checkpoint (`auto_map`); otherwise transformers would ask.
            return auto.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:
        # transformers raises OSError, ValueError, SafetensorError and others here; all of them mean
        # that the user's model cannot be loaded. What follows a blank line is about transformers.
        reason = " ".join(str(error).partition("\n\n")[0].split())
        raise InputError(
            f"model {model!r}: cannot be loaded ({type(error).__name__}: {reason}). Give a "
            f"checkpoint folder in the Hugging Face layout, a model name, or `tiny`."
        ) from error
