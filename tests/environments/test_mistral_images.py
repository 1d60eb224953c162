"""Images in Mistral's own tokens, compared with what its library writes."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("mistral_common", reason="mistral-common is not installed")

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from transformers import AutoModelForImageTextToText, PixtralImageProcessorPil

from benchmarks.chat_templates import MISTRAL, MISTRAL_VERSIONS, mistral_tokenizer
from tests.environments.worlds import add
from tests.pictures import uri
from tests.vision import config_of
from tramontane.config import PromptConfig, SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.mistral import MistralChat, MistralExamples, load_mistral
from tramontane.environments.recorded import Conversation
from tramontane.environments.tools import schema_of
from tramontane.environments.wire import ChatMessage, write
from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.images import decode
from tramontane.models.loading import load_model
from tramontane.models.vision import Pictured, Vision
from tramontane.sft.examples import ExampleStream
from tramontane.types import PLACE, Illustrated, ToolCall

IMAGE = {"image_patch_size": 7, "max_image_size": 56, "spatial_merge_size": 2}
TOKEN = MISTRAL.index("[IMG]")
ONE, OTHER = uri(width=40, height=30), uri(width=28, height=56, seed=1)
SETTINGS = {"reasoning_effort": {"type": "enum", "default": "none", "values": ["none", "high"]}}


def write_mistral(folder: Path, version: str, alone: bool = False, image: bool = True) -> None:
    """A tiny Mistral 3 with Mistral's own tokens, and without its processor's files if `alone`."""
    key = "multimodal" if version in ("v3", "v7", "v11") else "image"  # as these files have it
    more = {key: IMAGE} if image else {}
    if version == "v15":
        more |= {"model_settings_builder": SETTINGS}
    mistral_tokenizer(version, folder, **more)
    config = config_of("mistral3", TOKEN)
    text = config.text_config
    text.vocab_size, text.bos_token_id, text.eos_token_id = 1000 + len(MISTRAL), 1, 2
    text.pad_token_id = 11
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else parameter.add_(0.0)
    model.save_pretrained(folder)
    if not alone:
        PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=7).save_pretrained(folder)
        given = {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2}
        (folder / "processor_config.json").write_text(json.dumps(given))


def encoder_at(folder, **config):
    from tramontane.models.loading import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    images = ImageProcessor(str(folder))
    return PromptEncoder(tokenizer, PromptConfig(system_prompt=None, **config), images=images)


@pytest.fixture(scope="module", params=MISTRAL_VERSIONS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_mistral(folder, request.param)
    return request.param, folder


def shown(text, *images, role="user"):
    """A message with images at its `*`."""
    found = {"role": role, "content": text.replace("*", PLACE)}
    return {**found, "images": list(images)} if images else found


def chunks(text, *images):
    parts, rest = [], iter(images)
    for number, piece in enumerate(text.split("*")):
        if number:
            parts.append({"type": "image_url", "image_url": next(rest)})
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts


def by_library(folder, messages, mode="test"):
    """The tokens of the library's own encoder of images."""
    from mistral_common.protocol.instruct.validator import ValidationMode

    mistral = MistralTokenizer.from_file(str(folder / "tekken.json"), ValidationMode(mode))
    request = ChatCompletionRequest.model_validate({"messages": messages})
    return list(mistral.encode_chat_completion(request).tokens)


def said(text):
    return ChatMessage(role="assistant", content=text).parsed()


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("What? *", [ONE]),
        ("*[IMG] on", [OTHER]),
        ("A *, B * and C?", [ONE, OTHER]),
        ("**", [ONE, ONE]),
    ],
)
def test_every_version_writes_images_as_its_library_does(model, text, images):
    _name, folder = model
    encoder = encoder_at(folder)
    chat = MistralChat(load_mistral(encoder), encoder)
    library = [{"role": "user", "content": chunks(text, *images)}]
    assert chat.start([shown(text, *images)]) == by_library(folder, library)
    assert chat.images == images
    following = chat.follow(said("It is 5."), [shown(f"And {text}", *images)])
    library += [
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": chunks(f"And {text}", *images)},
    ]
    assert following.whole() == by_library(folder, library)
    assert chat.images == images * 2 and following.put.count(TOKEN) >= len(images)
    assert not following.rewritten


def test_answers_of_tools_show_images(model):
    """In the answer itself since v15, before in a message of the user behind it."""
    name, folder = model
    encoder = encoder_at(folder)
    chat = MistralChat(load_mistral(encoder), encoder, [schema_of(add)])
    before = chat.start([shown("*?", ONE)])
    call = said("")._replace(calls=[ToolCall("add", {"a": 1, "b": 2}, "")])
    following = chat.follow(call, [shown("See * there", OTHER, role="tool")])
    text = encoder.decode(following.put)
    image = encoder.expansion(OTHER)
    assert text.count(image) == 1 and chat.images == [ONE, OTHER]
    answered = text.index("[/TOOL_RESULTS]") > text.index(image)
    assert answered == (name == "v15")
    assert following.whole()[: len(before)] == before or following.rewritten


def test_images_of_tools_stand_before_those_of_the_user(model):
    name, folder = model
    encoder = encoder_at(folder)
    for asked in ([], [shown("So *?", ONE)]):
        chat = MistralChat(load_mistral(encoder), encoder)
        chat.start([shown("?")])
        calls = [ToolCall("add", {"a": n, "b": 2}, "") for n in (1, 2)]
        answers = [shown("See * there", OTHER, role="tool"), shown("3", role="tool")]
        following = chat.follow(said("")._replace(calls=calls), [*answers, *asked])
        whole = following.whole()
        assert not following.rewritten
        assert chat.images == [OTHER, *[ONE] * len(asked)]
        texts = ('{"a": 1, "b": 2}', '{"a": 2, "b": 2}')
        made = [
            {"id": f"call0000{n}", "function": {"name": "add", "arguments": text}}
            for n, text in enumerate(texts)
        ]
        told = chunks("See * there", OTHER) if name == "v15" else "See  there"
        library = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": made},
            {"role": "tool", "content": told, "tool_call_id": "call00000"},
            {"role": "tool", "content": "3", "tool_call_id": "call00001"},
        ]
        if name != "v15":
            shown_after = chunks("*So *?", OTHER, ONE) if asked else chunks("*", OTHER)
            library.append({"role": "user", "content": shown_after})
        elif asked:
            library.append({"role": "user", "content": chunks("So *?", ONE)})
        assert whole == by_library(folder, library)


def test_pixels_are_those_of_the_library_where_nothing_is_resized(model, tmp_path):
    """Elsewhere the processor's: Pillow's filter takes in all that it leaves out, OpenCV's does
    not. Sizes above the largest are rounded by the library and cut by the processor."""
    name, folder = model
    write_mistral(tmp_path, name, alone=True)
    own, library = ImageProcessor(str(folder)), ImageProcessor(str(tmp_path))
    assert own.token == library.token
    for width, height in ((14, 14), (28, 56), (56, 42), (40, 30), (13, 5), (200, 100)):
        image = uri(width=width, height=height)
        one, other = own.inputs(image), library.inputs(image)
        assert own.expansion(image) == library.expansion(image)
        assert one["image_sizes"].tolist() == other["image_sizes"].tolist()
        far = (one["pixel_values"] - other["pixel_values"]).abs().max()
        assert (far < 1e-5) == (width % 14 == height % 14 == 0), (width, height, far)
    cut = uri(width=200, height=102)  # 28.56 pixels high at a width of 56
    assert own.expansion(cut) != library.expansion(cut)
    encoder = encoder_at(folder)
    ids = MistralChat(load_mistral(encoder), encoder).start([shown("*", cut)])
    assert ids.count(TOKEN) == own.expansion(cut).count("[IMG]")  # as many as its pixels ask for


@pytest.mark.parametrize("alone", [False, True])
def test_log_probs_are_those_of_the_whole_model(model, tmp_path, alone):
    name, folder = model
    if alone:
        write_mistral(folder := tmp_path, name, alone=True)
    encoder = encoder_at(folder)
    chat = MistralChat(load_mistral(encoder), encoder)
    ids = chat.start([shown("A * and * ?", ONE, OTHER)])
    half, vision = load_model(str(folder)), Vision(str(folder))
    from tramontane.models.packing import pack

    inputs = pack([ids])
    with vision.entering(half, [Pictured(0, ids, chat.images, len(ids))], inputs) as entered:
        found = half(**entered).logits[0]
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    sides = [vision.processor.inputs(image) for image in chat.images]
    high, wide = (max(s["pixel_values"].shape[i] for s in sides) for i in (2, 3))
    pixels = torch.zeros(len(sides), 3, high, wide)
    for number, side in enumerate(sides):
        _, _, height, width = side["pixel_values"].shape
        pixels[number, :, :height, :width] = side["pixel_values"][0]
    sizes = torch.cat([side["image_sizes"] for side in sides])
    with torch.no_grad():
        wanted = whole(torch.tensor([ids]), pixel_values=pixels, image_sizes=sizes).logits[0]
    assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < 1e-4


def test_sft_learns_what_the_library_writes(model, tmp_path):
    _name, folder = model
    encoder = encoder_at(folder)
    rows = [
        shown("A * or * ?", ONE, OTHER),
        {"role": "assistant", "content": "B."},
        shown("* too?", OTHER),
        {"role": "assistant", "content": "Yes."},
    ]
    [example] = MistralExamples(encoder).examples(Conversation(rows, []), "row 1")
    library = [
        {
            "role": row["role"],
            "content": chunks(row["content"].replace(PLACE, "*"), *row.get("images", ())),
        }
        for row in rows
    ]
    assert [*example.prompt, *example.response] == by_library(folder, library, "finetuning")
    assert example.images == (ONE, OTHER) and example.put_images == (OTHER,)
    [put] = example.inserted
    assert TOKEN in example.response[put.start : put.stop]
    decode(ONE).save(tmp_path / "a.png")
    row = {"prompt": "Is it <image>?", "response": "No.", "image": "a.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = SFTConfig.model_validate(
        {
            "output": str(tmp_path / "out"), "model": str(folder), "steps": 1,
            "data": {
                "train": str(tmp_path / "rows.jsonl"), "tokens": "mistral", "system_prompt": None
            },
        }
    )  # fmt: skip
    (found,) = ExampleStream(config, encoder).take(1)
    asked = [{"role": "user", "content": chunks("Is it *?", ONE)}]
    assert found.prompt == by_library(folder, asked) and len(found.images) == 1


def test_what_an_endpoint_is_sent_is_written_so(model):
    _name, folder = model
    encoder = encoder_at(folder)
    parts = [{"type": "image_url", "image_url": {"url": ONE}}, {"type": "text", "text": "What?"}]
    messages = [ChatMessage(role="user", content=parts)]
    chat = MistralChat(load_mistral(encoder), encoder)
    library = [{"role": "user", "content": chunks("*What?", ONE)}]
    assert write(chat, messages) == by_library(folder, library) and chat.images == [ONE]


def test_what_knows_no_images_is_refused(tmp_path):
    write_mistral(tmp_path, "v7", image=False)
    encoder = encoder_at(tmp_path)
    chat = MistralChat(load_mistral(encoder), encoder)
    with pytest.raises(InputError, match="tekken.json.* knows no images; set template"):
        chat.start([shown("*", ONE)])
    write_mistral(tmp_path / "v13", "v13")
    encoder = encoder_at(tmp_path / "v13")
    chat = MistralChat(load_mistral(encoder), encoder)
    with pytest.raises(InputError, match="no images in messages of the system"):
        chat.start([shown("*", ONE, role="system"), shown("What?")])


def test_templates_show_images_of_a_checkpoint_with_mistrals_file_alone(tmp_path):
    write_mistral(tmp_path, "v13", alone=True)
    encoder = encoder_at(tmp_path)
    ids = encoder.encode(Illustrated("What is <image>?", [ONE]))
    assert ids.count(TOKEN) == encoder.expansion(ONE).count("[IMG]")
    asked = [{"role": "user", "content": chunks("What is *?", ONE)}]
    assert ids == by_library(tmp_path, asked)
