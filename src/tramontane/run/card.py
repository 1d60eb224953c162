"""The model card of a finished run: `weights/README.md` of its newest checkpoint.

Its front matter is read by the Hugging Face hub: base model, license, tags, and the results as a
model index (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tramontane.config import HELD_OUT, Config
from tramontane.data.prompts import PromptEncoder
from tramontane.data.system_prompt import system_text
from tramontane.errors import VERSION
from tramontane.evaluation.evaluate import hub_results
from tramontane.models.loading import local_folder
from tramontane.models.names import pinned
from tramontane.pages import render
from tramontane.run.prepare import Prepared
from tramontane.run.summary import Measured
from tramontane.workplace import write_whole

TIMES = {"base": "base", "before": "before RL", "after": "after RL"}  # of evaluations


def write_card(
    weights: Path, prepared: Prepared, measured: Measured, summary: Mapping[str, Any]
) -> Path:
    """Write the card of a checkpoint.

    Args:
        weights: the checkpoint's folder, in the Hugging Face layout.
        prepared: the run's input.
        measured: the run's evaluations.
        summary: the content of the run's `summary.json`.
    """
    config, final = prepared.config, measured.get("after", {})
    sources = {HELD_OUT: str(config.data.eval)}
    sources |= {name: suite.source for name, suite in config.evaluation.also.items()}
    sources = {name: _public(source) for name, source in sources.items()}
    results = [
        entry
        for name, result in final.items()
        for entry in hub_results(name, sources[name], result, prepared.sets[name].sampling)
    ]
    license: dict[str, Any] = _license(config.model)
    front = ModelCardData(
        base_model=pinned(config.model)[0] if _on_hub(config.model) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "grpo", "rlvr", "reasoning", "tramontane"],
        model_name=config.name if results else None,
        eval_results=results or None,
        **license,
    )
    page = render(
        "run/card.md.j2",
        front=front.to_yaml(line_break="\n"),
        name=config.name,
        model=_public(config.model),
        on_hub=_on_hub(config.model),
        license=license.get("license_name") or license.get("license"),
        version=VERSION,
        recipe=_recipe(config, summary),
        format="format_rate" in config.evaluated_rates,
        rows=[
            (name, sources[name], title, result)
            for name in final
            for when, title in TIMES.items()
            if (result := measured.get(when, {}).get(name))
        ],
        sampling={
            name: f"temperature {p.temperature:g}, top-p {p.top_p:g}, up to {p.max_tokens} tokens"
            for name in final
            for p in [prepared.sets[name].sampling]
        },
        prompt=_prompt(prepared.encoder),
        chat=prepared.encoder.tokenizer.chat_template,
        system=system_text(config.data.system_prompt, prepared.encoder.tags),
    )
    path = weights / "README.md"
    write_whole(path, page)
    return path


def _license(model: str) -> dict[str, str]:
    """The license of the model that training started from, if its card names it."""
    card = (local_folder(model) or Path(model)) / "README.md"
    data = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if key in data}


def _on_hub(model: str) -> bool:
    name = pinned(model)[0]
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(model).exists()


def _public(source: str) -> str:
    """A source without local folder names."""
    path, mark, rest = source.partition("#")
    return Path(path).name + mark + rest if Path(path).exists() else source


def _recipe(config: Config, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens = summary["trained_completion_tokens"]
    pipeline, trainer, reward = config.pipeline, config.trainer, config.verifier.reward
    weights = {"format": reward.format, "correctness": reward.correctness}
    weights |= {"length": reward.length, "language": reward.language}
    weights |= {custom.name: custom.weight for custom in reward.custom}
    return [
        ("training problems", f"`{_public(str(config.data.train))}`"),
        ("objective", trainer.objective.name),
        ("reward", ", ".join(f"{name} {weight:g}" for name, weight in weights.items() if weight)),
        ("updates", f"{summary['updates']} of {pipeline.n_batch} completions"),
        ("group size", f"{pipeline.group_size}"),
        ("longest completion", f"{pipeline.l_max} tokens"),
        ("trained tokens", "unknown: metrics were lost" if tokens is None else f"{tokens:,}"),
        ("learning rate", f"{trainer.learning_rate:g}"),
        ("adapters", f"rank {trainer.lora.rank}" if trainer.lora else "none: all weights"),
        ("sampling temperature", f"{config.generator.temperature:g}"),
        ("staleness", f"at most {pipeline.max_staleness} versions"),
        ("cold start", "supervised fine-tuning" if config.cold_start else "none"),
        ("number types", f"trainer {trainer.dtype}, generator {config.generator.dtype}"),
        ("seed", f"{config.seed}"),
    ]


def _prompt(encoder: PromptEncoder) -> str:
    """Python code that builds the prompt, for the card's example."""
    question = "What is 6 times 7?"
    rendered, template = encoder.render(question), encoder.tokenizer.chat_template
    system = system_text(encoder.config.system_prompt, encoder.tags)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    options = {"tokenize": False, "add_generation_prompt": True}
    options |= encoder.config.chat_template_kwargs
    if template is None or ("system" not in str(template) and system is not None):
        return f"text = {rendered!r}"
    prefix = f" + {encoder.config.response_prefix!r}" if encoder.config.response_prefix else ""
    keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return (
        f"messages = {json.dumps(messages, ensure_ascii=False)}\n"
        f"text = tokenizer.apply_chat_template(messages, {keywords}){prefix}"
    )
