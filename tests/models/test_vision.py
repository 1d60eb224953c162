"""Images in prompts: tokens as the model's processor writes them, and the same numbers from the
whole model, from decoding and from packed rows of training."""

import subprocess
import sys
from array import array

import pytest
import torch

from tests.vision import uri, write_wrapper
from tramontane.batches import TrainSequence
from tramontane.config import GeneratorConfig, PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.generator.generator import Generator
from tramontane.models.images import decode
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.vision import FAMILIES, ImageProcessor, Pictured, Vision
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row
from tramontane.types import Completion, Illustrated, SamplingParams, ints

SIZES = [{"width": 40, "height": 30}, {"width": 90, "height": 20, "seed": 1}]


@pytest.fixture(scope="module", params=FAMILIES)
def wrapper(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return write_wrapper(folder, request.param), str(folder)


def encoder_of(folder, **config):
    prompts = PromptConfig(system_prompt=None, **config)
    return PromptEncoder(load_tokenizer(folder), prompts, images=ImageProcessor(folder))


def by_processor(folder, prompt, pictures):
    """What the model's own processor makes of a whole prompt."""
    processor = ImageProcessor(folder)
    text = encoder_of(folder).render(prompt)
    made = processor._processor(
        text=[text],
        images=[[*map(decode, pictures)]],
        return_tensors="pt",
        add_special_tokens=False,
    )
    return made


def whole_logprobs(model, made, completion, pictures=True):
    """Log-probs of a completion by the whole model."""
    ids = torch.cat([made["input_ids"], torch.tensor([completion])], 1)
    rest = {
        k: v
        for k, v in made.items()
        if k in ("pixel_values", "image_sizes", "pixel_attention_mask")
    }
    with torch.no_grad():
        logits = model(input_ids=ids, **rest).logits[0]
    predicted = logits[-len(completion) - 1 : -1].log_softmax(-1)
    return predicted.gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_tokens_and_numbers_are_those_of_the_whole_model(wrapper):
    model, folder = wrapper
    pictures = [uri(**size) for size in SIZES]
    prompt = Illustrated("Is <image> larger than <image> here?", pictures)
    prompt_ids = encoder_of(folder).encode(prompt)
    made = by_processor(folder, prompt, pictures)
    assert prompt_ids == made["input_ids"][0].tolist()
    # Decoding: a group of two, and the same tokens with the first image twice, where they fit.
    generator = Generator.load(folder, GeneratorConfig(dtype="float32"), 3, len(prompt_ids) + 8)
    requests = [
        Completion.requested(0, i, prompt_ids, i, SamplingParams(6), images=pictures)
        for i in range(2)
    ]
    generator.submit(requests)
    found = []
    while len(found) < 2:
        found += generator.step()
    assert generator.stats()["prefill_tokens"] == len(prompt_ids) - 1  # once for the group
    for completion in found:
        expected = whole_logprobs(model, made, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    # Training: the group shares its prompt in a row.
    sequences = [
        TrainSequence(
            array("i", c.prompt_ids), c.token_ids, c.logprobs, c.versions, images=tuple(pictures)
        )
        for c in found
    ]
    half, vision = load_model(folder), Vision(folder)
    row = pack_row(sequences, torch.device("cpu"))
    assert len(row.pictured) == 1
    with vision.entering(half, row.pictured):
        packed = plain_predictions(half, row, 1.0).logprobs.detach()
    sampled = torch.tensor([x for s in sequences for x in s.logprobs])
    torch.testing.assert_close(packed, sampled, atol=1e-4, rtol=0)
    # Without its images the text half computes something else.
    blind = plain_predictions(half, row, 1.0).logprobs.detach()
    assert (blind - packed).abs().max() > 1e-2


def test_prompts_with_the_same_tokens_and_other_images_are_not_shared(wrapper):
    model, folder = wrapper
    pictures = [uri(width=30, height=30, seed=seed) for seed in (3, 4)]
    prompts = [Illustrated("What?", [image]) for image in pictures]
    ids = encoder_of(folder).encode_all(prompts)
    assert ids[0] == ids[1]
    tokens = [70, 71, 72, 73]
    sequences = [
        TrainSequence(array("i", ids[0]), ints(tokens), [0.0] * 4, [0] * 4, images=(image,))
        for image in pictures
    ]
    half, vision = load_model(folder), Vision(folder)
    row = pack_row(sequences, torch.device("cpu"))
    with vision.entering(half, row.pictured):
        packed = plain_predictions(half, row, 1.0).logprobs.detach().split(4)
    for prompt, image, logprobs in zip(prompts, pictures, packed, strict=True):
        expected = whole_logprobs(model, by_processor(folder, prompt, [image]), tokens)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert (packed[0] - packed[1]).abs().max() > 1e-2


def test_keys_and_values_are_recomputed_with_the_images(wrapper):
    model, folder = wrapper
    image = uri()
    prompt_ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    generator = Generator.load(folder, GeneratorConfig(dtype="float32"), 1, len(prompt_ids) + 8)
    generator.submit([Completion.requested(0, 0, prompt_ids, 0, SamplingParams(6), images=[image])])
    generator.step(3)
    generator._engine.recompute()
    [completion] = generator.step(3)
    made = by_processor(folder, Illustrated("What?", [image]), [image])
    expected = whole_logprobs(model, made, completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_features_are_computed_once_for_an_image(wrapper, monkeypatch):
    _, folder = wrapper
    vision = Vision(folder)
    computed = []
    real = vision._computed
    monkeypatch.setattr(vision, "_computed", lambda image: computed.append(image) or real(image))
    first, second = uri(), uri(seed=5)
    for image in (first, second, first, uri()):  # equal content, not the same object
        vision.features(image)
    assert computed == [first, second]


def test_a_prompt_whose_tokens_do_not_fit_its_image_is_refused(wrapper):
    _, folder = wrapper
    vision, half = Vision(folder), load_model(folder)
    token = vision.processor.token_id
    wrong = Pictured(0, [token, 70], [uri()])
    with pytest.raises(InputError, match="1 image tokens"), vision.entering(half, [wrong]):
        pass


def test_row_text_cannot_write_image_tokens(wrapper):
    """A family's own placeholder in a row's text is text."""
    _, folder = wrapper
    encoder = encoder_of(folder)
    token = encoder.images.token
    image = uri()
    inside = (
        encoder.encode(Illustrated([{"role": "user", "content": f"a {token} b <image>"}], [image]))
        if token != "<image>"
        else encoder.encode(Illustrated("a b", [image]))
    )
    assert inside.count(encoder.images.token_id) == encoder.encode(
        Illustrated("a b", [image])
    ).count(encoder.images.token_id)


def test_places_in_the_text(wrapper):
    _, folder = wrapper
    encoder, image = encoder_of(folder), uri()
    first = encoder.encode(Illustrated("What?", [image]))
    assert first == encoder.encode(Illustrated("<image>What?", [image]))
    assert first != encoder.encode(Illustrated("What<image>?", [image]))
    with pytest.raises(InputError, match="2 places"):
        encoder.encode(Illustrated("<image><image>What?", [image]))


def test_a_template_without_images_is_refused(wrapper):
    _, folder = wrapper
    text = "m.content if m.content is string else m.content[-1].text"
    template = f"{{% for m in messages %}}{{{{ {text} }}}}{{% endfor %}}"
    encoder = encoder_of(folder, chat_template=template)
    with pytest.raises(InputError, match="0 places"):
        encoder.encode(Illustrated("What?", [uri()]))


def test_an_image_that_the_processor_refuses_is_named(tmp_path):
    """Mistral's resizing makes the shorter side of a very narrow image 0 pixels."""
    write_wrapper(tmp_path, "mistral3")
    with pytest.raises(InputError, match=r"rows.jsonl:7: the model's processor refuses an image"):
        encoder_of(str(tmp_path)).encode(
            Illustrated("What?", [uri(width=1, height=2000)]), "rows.jsonl:7"
        )


@pytest.mark.slow
def test_without_images_no_processor_is_imported():
    code = "import sys, tramontane.generator.generator, tramontane.trainer.trainer; "
    code += "assert 'tramontane.models.processors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
