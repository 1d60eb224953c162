"""Whole runs that train adapters: the gate, learning in flight, checkpoints, resume, and refusals
before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.controller.test_pipeline import check_ledger
from tests.runs import small_config
from tramontane.errors import InputError
from tramontane.run.changes import open_run
from tramontane.run.prepare import prepare
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

ADAPTERS = {
    "lora": {"rank": 4},
    "learning_rate": 1e-3,
    "objective": {"magistral": {"kl_coef": 0.01}},
}


@pytest.mark.slow
def test_run_trains_adapters_passes_the_gate_and_resumes(tmp_path: Path, one_layer: str) -> None:
    config = small_config(
        tmp_path,
        model=one_layer,
        trainer=ADAPTERS,
        pipeline={"max_staleness": 2},
        checkpoint={"every": 2},
    )
    # The gate compares log-probs at the start, and again with the weights of the first update.
    train(config, QuietScreen())
    folder, config = open_run(tmp_path, ["pipeline.updates=4"])
    result = train(config, QuietScreen(), folder)
    assert result.finished and result.updates == 4
    check_ledger(tmp_path, config)

    weights = load_file(result.weights / "model.safetensors")
    base = load_file(Path(one_layer) / "model.safetensors")
    changed = [name for name in base if not torch.equal(base[name].float(), weights[name].float())]
    assert changed and all("_proj" in name for name in changed)
    model = AutoModelForCausalLM.from_pretrained(one_layer, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, result.weights.parent / "adapter")
    merged = loaded.merge_and_unload().state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(merged[name], weight.float(), atol=1e-6, rtol=0)

    with pytest.raises(InputError, match=r"trainer\.lora\.rank: the optimizer's state"):
        open_run(tmp_path, ["pipeline.updates=6", "trainer.lora.rank=8"])
    with pytest.raises(InputError, match=r"trainer\.lora: the optimizer's state"):
        open_run(tmp_path, ["pipeline.updates=6", "trainer.lora=null"])


def test_layers_that_the_model_lacks_are_refused_before_any_work(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", trainer={"lora": {"target_modules": ["query"]}})
    with pytest.raises(InputError, match=r"lora\.target_modules: no linear layer .* 'query'"):
        train(config, QuietScreen())
    assert not (tmp_path / "run").exists()


def test_missing_peft_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "peft" else find(name, *more),
    )
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[lora\]'"):
        prepare(small_config(tmp_path, trainer={"lora": {"rank": 4}}))
