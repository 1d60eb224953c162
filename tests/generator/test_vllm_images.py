"""vLLM on images: every log-prob is that of the whole model's plain forward, and that of a packed
row of training."""

from dataclasses import replace

import pytest
import torch

from tests import vision
from tests.generator.slot_models import finish
from tests.generator.test_image_lives import MAX_LEN, Life
from tests.generator.test_parking import going_on
from tests.pictures import uri
from tests.vision import write_wrapper
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import load_generator
from tramontane.models.image_tokens import FAMILIES
from tramontane.models.loading import load_model
from tramontane.types import Completion, Illustrated, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("vllm_environment")]

# Heads of a size that vLLM's kernels have.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PLAIN = [kind for kind, family in FAMILIES.items() if family.plain]


@pytest.fixture(scope="module", params=PLAIN)
def versions(request, tmp_path_factory):
    """A folder, and two versions of the whole model and of its text half."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in WIDE.items():
            patch.setitem(vision.TEXT, name, size)
        folders = [tmp_path_factory.mktemp(f"{request.param}_{seed}") for seed in range(2)]
        models = [write_wrapper(folder, request.param) for folder in folders]
    with torch.no_grad():
        for name, parameter in models[1].named_parameters():
            if any(part in name for part in ("language_model", "text_model", "lm_head")):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    models[1].save_pretrained(folders[1])
    return str(folders[0]), models, [load_model(str(folder)) for folder in folders]


def asked(life, group, text, *shown, tokens=12, n=2):
    prompt = life.encoder.encode(Illustrated(text, list(shown)) if shown else text)
    params = SamplingParams(tokens)
    return [
        Completion.requested(group, i, prompt, 7 * group + i, params, images=shown)
        for i in range(n)
    ]


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_images_enter_vllm_by_their_features(versions, kv_cache):
    folder, _, halves = versions
    life = Life(versions, 0)
    config = GeneratorConfig(
        kind="vllm", dtype="float32", float32_vision=True, kv_cache=kv_cache, steps_per_call=2
    )
    generator = load_generator(folder, config, 6, MAX_LEN)
    one, other = uri(width=40, height=30), uri(width=56, height=20, seed=1)
    requests = asked(life, 1, "How many?", tokens=30)
    generator.submit(requests)
    assert not generator.step()  # text alone, and under way
    first = asked(life, 2, "What is <image> beside <image>?", one, other)
    generator.submit(first)  # vLLM's process starts again, and the earlier go on
    requests += first
    if kv_cache == "recompute":
        generator.step()
        generator.update_weights(1, halves[1].state_dict())
    ended = finish(generator)
    assert {*ended} == {(r.group, r.index) for r in requests}
    behind = []
    for request in requests:
        done = ended[request.group, request.index]
        life.check(replace(done, images=request.images))
        if request.group == 2:
            put = life.encoder.encode(Illustrated("and <image>?", [other]))
            following = going_on(request, done, put)
            behind.append(replace(following, put_images=[other]))
    generator.submit(behind)
    again = finish(generator)
    for request in behind:
        done = again[request.group, request.index]
        life.check(replace(done, images=request.images, put_images=request.put_images))
    assert len(requests) == 4 and len(behind) == 2
    if kv_cache == "recompute":
        assert {0, 1} <= {v for done in ended.values() for v in done.versions}


def test_families_whose_images_change_more_are_refused(tmp_path, monkeypatch):
    for name, size in WIDE.items():
        monkeypatch.setitem(vision.TEXT, name, size)
    write_wrapper(tmp_path, "gemma3")
    generator = load_generator(str(tmp_path), GeneratorConfig(kind="vllm"), 2, MAX_LEN)
    request = Completion.requested(1, 0, [5, 6], 0, SamplingParams(2), images=[uri()])
    with pytest.raises(InputError, match="change more than the embeddings.*use slots"):
        generator.submit([request])
