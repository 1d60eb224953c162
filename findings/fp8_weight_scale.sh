#!/usr/bin/env bash
# transformers 5.23.0: FP8 weights whose scales are named weight_scale are loaded without them.
#
# Expected: scales by the name that AutoFP8's and vLLM's checkpoints have (weight_scale, one number a
# weight, quant_method fp8) are applied, as those named weight_scale_inv are, or the load fails. Seen:
# from_pretrained lists them among keys that "can be ignored", and weights are thousands of times too large.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'transformers==5.23.0' 'accelerate==1.15.0'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, **sizes))
plain = {name: x.clone() for name, x in model.state_dict().items()}


def error(scale: str) -> float:
    """Distance of a loaded weight from the one that was quantized, as a share of it; `scale` names
    the scales in the file."""
    target = folder / scale
    model.save_pretrained(target)
    weights = load_file(target / "model.safetensors")
    for name in [n for n in weights if n.endswith("_proj.weight")]:
        size = weights[name].abs().max() / 448  # the largest number of E4M3
        weights[name] = (weights[name] / size).to(torch.float8_e4m3fn)
        weights[f"{name.removesuffix('weight')}{scale}"] = size
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config["quantization_config"]["weight_block_size"] = None
    (target / "config.json").write_text(json.dumps(config))
    dequantized = FineGrainedFP8Config(dequantize=True, weight_block_size=None)
    loaded = AutoModelForCausalLM.from_pretrained(
        target, quantization_config=dequantized, dtype=torch.float32
    ).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    return float((loaded[name].float() - plain[name]).norm() / plain[name].norm())


known, other = error("weight_scale_inv"), error("weight_scale")
print(f"relative error of a weight: weight_scale_inv {known:.3f}, weight_scale {other:.1f}")
assert known < 0.1, "scales of the known name are not applied"
assert other > 10, "scales named weight_scale are applied now"
PYTHON
