"""Images in prompts: tokens as the model's processor writes them, and the same numbers from the
whole model, from decoding and from packed rows of training."""

import json
from array import array
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests import forked
from tests.models import imported
from tests.pictures import uri
from tests.vision import TOKEN, write_wrapper
from tramontane.batches import TrainSequence
from tramontane.config import GeneratorConfig, PromptConfig, TrainerConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.generator.generator import Generator
from tramontane.models.image_tokens import FAMILIES, ImageProcessor
from tramontane.models.images import decode
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.models.vision import Pictured, Vision
from tramontane.tokens import INSERTED, floats, ints
from tramontane.trainer.forwards import checkpoint_blocks, train_blocks
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row
from tramontane.types import Completion, Illustrated, SamplingParams

GIVEN = ("image_sizes", "pixel_attention_mask", "image_grid_thw", "image_position_ids")
QWEN = tuple(kind for kind in FAMILIES if "qwen" in kind)
# By family, the argument that says which tokens are an image's.
KINDS = {"gemma3": "token_type_ids"} | dict.fromkeys((*QWEN, "gemma4"), "mm_token_type_ids")
SIZES = [{"width": 40, "height": 30}, {"width": 90, "height": 20, "seed": 1}]


@pytest.fixture(scope="module", params=FAMILIES)
def wrapper(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return write_wrapper(folder, request.param), str(folder)


@pytest.fixture(scope="module")
def generator(wrapper):
    """With room for all prompts of these tests; no request leaves anything behind that another
    would use."""
    return Generator.load(wrapper[1], GeneratorConfig(dtype="float32"), 3, 400)


# What tests only read of a wrapper is loaded once.


@cache
def half_of(folder):
    return load_model(folder)


@cache
def vision_of(folder):
    return Vision(folder)


def processor_of(folder):
    return vision_of(folder).processor


@cache
def encoder_of(folder):
    prompts = PromptConfig(system_prompt=None)
    return PromptEncoder(load_tokenizer(folder), prompts, images=processor_of(folder))


def by_processor(folder, prompt, pictures):
    """What the model's own processor makes of a whole prompt."""
    text = encoder_of(folder).render(prompt)
    made = processor_of(folder)._processor(
        text=[text],
        images=[[*map(decode, pictures)]],
        return_tensors="pt",
        add_special_tokens=False,
    )
    return made


@torch.no_grad()
def whole_logprobs(model, made, completion):
    """Log-probs of a completion by the whole model."""
    return predicted(model, made, completion)


def predicted(model, made, completion):
    """Log-probs of a completion by the whole model."""
    ids = torch.cat([made["input_ids"], torch.tensor([completion])], 1)
    rest = {k: v for k, v in made.items() if k in ("pixel_values", *GIVEN)}
    # Of the prompt's tokens, as the processors of some families say: 1 for one of an image.
    kinds = (ids == model.config.image_token_id).int()
    if name := KINDS.get(model.config.model_type):
        rest[name] = kinds
    logits = model(input_ids=ids, **rest).logits[0]
    predicted = logits[-len(completion) - 1 : -1].log_softmax(-1)
    return predicted.gather(1, torch.tensor(completion)[:, None])[:, 0]


def seen(vision, half, row):
    """Log-probs of a packed row with its images."""
    with vision.entering(half, row.pictured, row.inputs) as inputs:
        return plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs.detach()


def test_tokens_and_numbers_are_those_of_the_whole_model(wrapper, generator):
    model, folder = wrapper
    pictures = [uri(**size) for size in SIZES]
    prompt = Illustrated("Is <image> larger than <image> here?", pictures)
    prompt_ids = encoder_of(folder).encode(prompt)
    made = by_processor(folder, prompt, pictures)
    assert prompt_ids == made["input_ids"][0].tolist()
    # Decoding: a group of two, and the same tokens with the first image twice, where they fit.
    before = generator.stats()["prefill_tokens"]
    requests = [
        Completion.requested(0, i, prompt_ids, i, SamplingParams(6), images=pictures)
        for i in range(2)
    ]
    generator.submit(requests)
    found = []
    while len(found) < 2:
        found += generator.step()
    # Once for the group.
    assert generator.stats()["prefill_tokens"] == before + len(prompt_ids) - 1
    # The whole model refuses a sampled image token, which is text here.
    ordinary = [c for c in found if model.config.image_token_id not in c.token_ids]
    assert ordinary
    for completion in ordinary:
        expected = whole_logprobs(model, made, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    # Training: the group shares its prompt in a row.
    sequences = [
        TrainSequence(
            array("i", c.prompt_ids), c.token_ids, c.logprobs, c.versions, images=tuple(pictures)
        )
        for c in found
    ]
    half, vision = half_of(folder), vision_of(folder)
    row = pack_row(sequences, torch.device("cpu"))
    assert len(row.pictured) == 1
    packed = seen(vision, half, row)
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
    half, vision = half_of(folder), vision_of(folder)
    row = pack_row(sequences, torch.device("cpu"))
    packed = seen(vision, half, row).split(4)
    for prompt, image, logprobs in zip(prompts, pictures, packed, strict=True):
        expected = whole_logprobs(model, by_processor(folder, prompt, [image]), tokens)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert (packed[0] - packed[1]).abs().max() > 1e-2


def test_keys_and_values_are_recomputed_with_the_images(wrapper, generator):
    model, folder = wrapper
    image = uri()
    prompt_ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    generator.submit([Completion.requested(0, 0, prompt_ids, 0, SamplingParams(6), images=[image])])
    generator.step(3)
    generator._engine.recompute()
    [completion] = generator.step(3)
    made = by_processor(folder, Illustrated("What?", [image]), [image])
    expected = whole_logprobs(model, made, completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_a_conversation_goes_on_behind_its_images(wrapper, generator):
    """Its keys and values are kept while it waits; positions go on as the images shift them."""
    model, folder = wrapper
    image = uri()
    prompt = Illustrated("What?", [image])
    prompt_ids = encoder_of(folder).encode(prompt)
    before = generator.stats()["parked_tokens"]
    request = Completion.requested(0, 0, prompt_ids, 0, SamplingParams(4), images=[image])
    request = replace(request, keep_kv=True)
    first = finished(generator, request)
    put = ints([70, 71, 72])
    tokens = first.token_ids + put
    [*logprobs] = [*first.logprobs, 0.0, 0.0, 0.0]
    again = replace(
        request,
        token_ids=tokens,
        logprobs=floats(logprobs),
        versions=first.versions + ints([INSERTED] * 3),
        sampling=SamplingParams(len(tokens) + 4),
    )
    second = finished(generator, again)
    assert generator.stats()["parked_tokens"] == before + len(prompt_ids) + 3
    made = by_processor(folder, prompt, [image])
    expected = whole_logprobs(model, made, second.token_ids.tolist())
    sampled = [i for i in range(len(second.token_ids)) if second.versions[i] != INSERTED]
    found = torch.tensor(second.logprobs)[sampled]
    torch.testing.assert_close(found, expected[sampled], atol=1e-4, rtol=0)


def finished(generator, request):
    generator.submit([request])
    while not (ended := generator.step()):
        pass
    return ended[0]


def test_gradients_are_the_same_where_blocks_are_computed_again(wrapper):
    _, folder = wrapper
    image = uri()
    ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    tokens = ints([70, 71, 72, 73])
    sequence = TrainSequence(array("i", ids), tokens, [0.0] * 4, [0] * 4, images=(image,))
    row, vision, gradients = pack_row([sequence], torch.device("cpu")), vision_of(folder), []
    for checkpointed in (False, True):
        half = load_model(folder) if checkpointed else half_of(folder)
        if checkpointed:
            checkpoint_blocks(half, TrainerConfig())
            train_blocks(half)
        with vision.entering(half, row.pictured, row.inputs) as inputs:
            found = plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs
        found.sum().backward()
        gradients.append({name: p.grad for name, p in half.named_parameters()})
        half.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_positions_are_those_of_the_whole_model(wrapper):
    """What follows an image stands behind its longer side in some families, not its tokens."""
    model, folder = wrapper
    vision, pictures = vision_of(folder), [uri(**size) for size in SIZES]
    prompt = Illustrated("Is <image> larger than <image> here?", pictures)
    ids = encoder_of(folder).encode(prompt)
    shift = vision.shift(ids, pictures)
    if model.config.model_type not in QWEN:
        assert shift == 0
        return
    kinds = (torch.tensor([ids]) == model.config.image_token_id).int()
    grids = torch.cat([vision.processor.inputs(image)["image_grid_thw"] for image in pictures])
    _, expected = model.model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=grids)
    assert shift == int(expected) < 0
    # Without the kinds of tokens, transformers refuses, or counts them in silence (Qwen2.5-VL).
    given = {"pixel_values", "image_grid_thw", "input_ids"}
    inputs = {k: v for k, v in by_processor(folder, prompt, pictures).items() if k in given}
    if model.config.model_type == "qwen2_5_vl":
        with torch.no_grad():
            counted, whole = model(**inputs), model(**inputs, mm_token_type_ids=kinds)
        assert (counted.logits - whole.logits).abs().max() > 1e-2
    else:
        with pytest.raises(ValueError, match="mm_token_type_ids"):
            model(**inputs)
    assert vision.shift(ids, []) == 0


def mutual_of(folder):
    """What a row of two prompts with an image each says of tokens that see each other, and where
    the image is."""
    image, vision = uri(), vision_of(folder)
    ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    prompts = [Pictured(n * len(ids), ids, [image], (n + 1) * len(ids)) for n in (0, 1)]
    with vision.entering(half_of(folder), prompts, pack([ids, ids])) as inputs:
        packing = inputs["packing"]
    token = vision.processor.token_id
    return packing, ids.index(token), ids.count(token)


def test_tokens_of_neighboring_patches_see_each_other_in_gemma(wrapper):
    model, folder = wrapper
    kind = model.config.model_type
    if kind not in ("gemma3", "gemma4"):
        assert processor_of(folder).family.mutual is None
        return
    made = dict(by_processor(folder, Illustrated("What?", [uri()]), [uri()]))
    kinds = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}[kind]
    known = {k: v for k, v in made.items() if k in ("input_ids", "pixel_values", *GIVEN)}
    of_image = (made["input_ids"] == model.config.image_token_id).int()
    with torch.no_grad():  # transformers does so only if it is told which tokens are an image's
        told, plain = model(**known, **{kinds: of_image}), model(**known)
    assert (told.logits - plain.logits).abs().max() > 1e-2
    packing, start, count = mutual_of(folder)
    end = start + count
    assert packing.mutual == {0: [(start, end)], 1: [(start, end)]}
    # Within a sliding window, a token sees all that follow it in its image, and few before it.
    seen = packing.blocks[1].mask(3)[start:end, start:end]
    expected = torch.ones(count, count).triu(-2).bool()
    assert torch.equal(seen, expected)
    whole = packing.blocks[1].mask(None)
    assert not whole[start - 1, start]
    assert whole[start, end - 1] == (kind == "gemma3")  # Gemma 4: not in layers without a window


def test_small_gemmas_4_see_images_as_text(tmp_path):
    """The config of E2B and E4B does not ask for more."""
    write_wrapper(tmp_path, "gemma4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mutual_of(str(tmp_path))[0].mutual == {}


def test_an_image_is_padding_to_the_embeddings_of_gemmas_layers(wrapper):
    """Its feature is in the ordinary embeddings alone."""
    model, folder = wrapper
    half, image, vision, seen = half_of(folder), uri(), vision_of(folder), []
    table = getattr(half.base_model, "embed_tokens_per_layer", None)
    assert (table is not None) == (model.config.model_type == "gemma4")
    if table is None:
        return
    ids = encoder_of(folder).encode(Illustrated("What?", [image]))
    noting = table.register_forward_hook(lambda _, given, __: seen.append(given[0][0].tolist()))
    row = pack([ids])
    with vision.entering(half, [Pictured(0, ids, [image], len(ids))], row) as inputs:
        half(**inputs)
    half(**row)  # the hook of the images is gone
    noting.remove()
    token, padding = vision.processor.token_id, half.config.pad_token_id
    assert seen == [[padding if i == token else i for i in ids], ids]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # As many squares as fit into 70, of a small image too.
        ("gemma4", [8 * 8, 8 * 8, 11 * 5]),
        # 4 x 4 patches of the whole; tiles without what only fills them, with an end of each line.
        ("llava_next", [16 + 4 * (4 + 1), 16 + 8 * (8 + 1), 16 + 4 * (8 + 1)]),
    ],
)
def test_how_many_tokens_an_image_takes(tmp_path, kind, counts):
    write_wrapper(tmp_path, kind)
    processor = ImageProcessor(str(tmp_path))
    sizes = [(8, 8), (80, 80), (80, 40)]
    found = [processor.expansion(uri(width=w, height=h)).count(TOKEN[kind]) for w, h in sizes]
    assert found == counts


def test_smolvlm_writes_what_transformers_would(tmp_path):
    """Its own class there needs torchvision and num2words, for videos."""
    write_wrapper(tmp_path, "smolvlm")
    names = "<fake_token_around_image>", "<image>", "<global-img>"
    expected = get_image_prompt_string(2, 2, 4, *names)
    assert ImageProcessor(str(tmp_path)).expansion(uri(width=50, height=50)) == expected


def test_a_small_image_has_as_many_features_as_tokens(wrapper):
    _, folder = wrapper
    vision, image = vision_of(folder), uri(width=16, height=16)
    tokens = encoder_of(folder).tokenizer(vision.processor.expansion(image)).input_ids
    with torch.no_grad():
        assert len(vision._computed(image)[0]) == tokens.count(vision.processor.token_id) > 0


def test_an_image_of_one_token_has_its_features_in_mistral_3(tmp_path):
    """Those that transformers computes with a second image; alone it would raise an error."""
    write_wrapper(tmp_path, "mistral3")
    vision = Vision(str(tmp_path))
    one, other = uri(width=14, height=14), uri(width=14, height=28)
    inputs = [vision.processor.inputs(image) for image in (one, other)]
    small, large = (each["pixel_values"] for each in inputs)
    pixels = torch.cat([torch.nn.functional.pad(small, (0, 0, 0, 14)), large])
    sizes = torch.cat([each["image_sizes"] for each in inputs])
    with torch.no_grad():
        both = vision._tower.get_image_features(pixel_values=pixels, image_sizes=sizes)
        found = vision._computed(one)[0]
    assert found.shape == (1, 32)
    torch.testing.assert_close(found, both.pooler_output[0], atol=1e-5, rtol=0)


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
    vision, half = vision_of(folder), half_of(folder)
    token = vision.processor.token_id
    wrong, row = Pictured(0, [token, 70], [uri()], 2), pack([[token, 70]])
    with pytest.raises(InputError, match="1 image tokens"), vision.entering(half, [wrong], row):
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
    prompts = PromptConfig(system_prompt=None, chat_template=template)
    encoder = PromptEncoder(load_tokenizer(folder), prompts, images=processor_of(folder))
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
    assert forked.end(forked.start(imported.no_processor)) == 0
