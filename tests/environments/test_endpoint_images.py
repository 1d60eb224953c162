"""Images in the chats of an endpoint's clients."""

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from fastapi.testclient import TestClient

from tests.environments.test_endpoint import KEY, Recorded, ask
from tests.pictures import picture, uri
from tests.vision import write_wrapper
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.endpoint import ModelEndpoint, key_is, make_app
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.types import PLACE, Illustrated, Message, SamplingParams

ONE, OTHER = uri(picture(30, 30)), uri(picture(56, 28, seed=1))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_wrapper(folder)
    images = {"max_pixels": 60 * 60}
    return Config(model=str(folder), data={"system_prompt": None, "images": images})


@pytest.fixture(scope="module")
def sampler():
    return Recorded()


@pytest.fixture(scope="module")
def client(config, sampler):
    return made(config, sampler)


def made(config, sampler):
    model = ModelEndpoint(
        "tiny", config, encoder_of(config), SamplingParams(9, 0.7), sampler.sample, 400, 320
    )
    return TestClient(make_app(key_is(KEY, model)), raise_server_exceptions=False)


def shown(image, **keys):
    return {"type": "image_url", "image_url": {"url": image, **keys}}


def said(text):
    return {"type": "text", "text": text}


def asked(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


@pytest.mark.parametrize("typed", ["What?", "[IMG] is <image>?"])
def test_a_chat_is_written_as_a_rows(client, sampler, config, typed):
    answer = ask(client, asked(said("A "), shown(ONE), said("b"), shown(OTHER), said(typed)))
    assert answer.status_code == 200, answer.text
    assert list(sampler.images) == [ONE, OTHER]
    typed_as = typed.replace("<image>", "<img>")  # in a row's text, it would be a place
    row = Illustrated([Message(role="user", content=f"A <image>b<image>{typed_as}")], [ONE, OTHER])
    encoder = encoder_of(config)
    expected = encoder.decode(encoder.encode(row)).replace("<img>", "<image>")
    assert encoder.decode(sampler.prompts[-1]) == expected
    token = encoder.images.token_id
    count = sum(map(encoder.tokens_of_image, (ONE, OTHER)))
    written = sum(1 for t in sampler.prompts[-1] if t >= token)
    assert written == count  # none that the client typed
    assert answer.json()["usage"]["prompt_tokens"] == len(sampler.prompts[-1])


def test_images_of_earlier_turns_and_of_tools_stay_in_order(client, sampler, config):
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        *asked(shown(ONE), said("What?")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": [shown(OTHER), said("seen")]},
        {"role": "assistant", "content": "A square."},
        *asked(shown(ONE), said("And now?")),
    ]
    answer = ask(client, chat)
    assert answer.status_code == 200, answer.text
    assert list(sampler.images) == [ONE, OTHER, ONE]
    token = encoder_of(config).images.token_id
    sizes = [encoder_of(config).images.expansion(i).count("[IMG]") for i in (ONE, OTHER, ONE)]
    assert sampler.prompts[-1].count(token) == sum(sizes)


def test_images_of_tools_that_answer_in_another_order_belong_to_their_answers(client, sampler):
    named = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        *asked(said("What?")),
        {"role": "assistant", "content": "", "tool_calls": [{"id": n, **named} for n in "ab"]},
        {"role": "tool", "tool_call_id": "b", "content": [shown(OTHER), said("b")]},
        {"role": "tool", "tool_call_id": "a", "content": [shown(ONE), said("a")]},
    ]
    answer = ask(client, chat)
    assert answer.status_code == 200, answer.text
    assert list(sampler.images) == [ONE, OTHER]


def test_images_in_messages_of_the_assistant_are_refused(client):
    chat = [*asked(said("?")), *asked(shown(ONE), role="assistant"), *asked(said("And?"))]
    answer = ask(client, chat)
    assert answer.status_code == 400 and "of the assistant" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (shown("https://example.org/a.png"), "nothing is fetched"),
        (shown("/etc/hostname"), "no file is read"),
        ({"type": "image", "path": "a.png"}, "no file is read"),
        ({"type": "image"}, "data URI"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        (shown("data:image/png;base64,AAAA"), "not an image of the formats"),
        (shown(uri(picture(61, 60))), "max_pixels"),
        (shown(ONE, detail="low"), "'low' is not supported"),
        ({"type": "input_audio", "input_audio": {}}, "only texts and images"),
    ],
)
def test_what_is_no_image_of_the_request_is_refused(client, part, says):
    answer = ask(client, asked(part, said("What?")))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_client_cannot_type_the_place_of_an_image(client, sampler, config):
    answer = ask(client, f"{PLACE} [IMG]?")
    assert answer.status_code == 200 and not sampler.images
    assert encoder_of(config).images.token_id not in sampler.prompts[-1]


def test_image_tokens_without_their_images_are_refused(client, config):
    token = encoder_of(config).images.token_id
    answer = client.post(f"/{KEY}/inference/v1/generate", json={"token_ids": [1, token, 2]})
    assert answer.status_code == 400 and "image tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("generator", "because of its generator.kind"),
        ("placement", "because of its placement.kind"),
        ("model", "takes no images"),
    ],
)
def test_an_endpoint_without_eyes_says_so(config, sampler, key, says, tmp_path):
    changed = {
        "generator": config.generator.model_copy(update={"kind": "vllm"}),
        "placement": config.placement.model_copy(update={"kind": "ray"}),
        "model": "tiny",
    }
    eyes, update = config, {key: changed[key]}
    if key == "generator":  # vLLM takes images of families that change embeddings alone
        sees = made(config.model_copy(update=update), sampler)
        assert ask(sees, asked(shown(ONE), said("What?"))).status_code == 200
        write_wrapper(tmp_path, "gemma3")
        eyes = config.model_copy(update={"model": str(tmp_path)})
        assert ask(made(eyes, sampler), asked(shown(ONE))).status_code == 200
    client = made(eyes.model_copy(update=update), sampler)
    answer = ask(client, asked(shown(ONE), said("What?")))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_model_without_images_talks_through_vllm():
    sampler = Recorded()
    config = Config(generator={"kind": "vllm"})
    encoder = PromptEncoder(sampler.tokenizer)
    model = ModelEndpoint("tiny", config, encoder, SamplingParams(9), *sampler.served)
    assert ask(TestClient(make_app(key_is(KEY, model)))).status_code == 200
