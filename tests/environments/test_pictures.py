"""Images that environments and tools return."""

import asyncio
import io
from types import SimpleNamespace

import pytest
from PIL import ImageDraw

from tests.environments.test_worker import Talk, call, talk
from tests.pictures import picture, png, uri
from tests.vision import TEMPLATE, write_wrapper
from tramontane.config import Config
from tramontane.config.images import ImagesConfig
from tramontane.data.images import as_text
from tramontane.environments.pictures import holds_images, joined
from tramontane.environments.recorded import Conversation, ConversationEncoder
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.types import PLACE, Problem

ONE, OTHER = picture(30, 30), picture(56, 28, seed=1)
# Messages of tools are texts, as in most templates.
TEXT_TOOLS = TEMPLATE.format(place="[IMG]").replace(
    "{% if m.content is string %}", "{% if m.role == 'tool' or m.content is string %}"
)


def look(at: str) -> object:
    """Look at a thing.

    Args:
        at: What to look at.
    """
    return {
        "picture": ONE,
        "bytes": png(ONE),
        "part": {"type": "image_url", "image_url": {"url": uri(ONE)}},
        "parts": ["Left: ", ONE, {"type": "text", "text": f", {PLACE}right: "}, OTHER, 7, {"a": 7}],
        "path": [{"type": "image", "path": "a.png"}],
        "address": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
        "large": picture(70, 70),
        "data": {"picture": "none"},
        "mark": f"no {PLACE}picture",
        "long": ["x" * 200, ONE, OTHER],
    }[at]


class Shows:
    """Shows a picture at the start, then the problem's beside another."""

    def start(self, problem):
        self.images = problem.images
        return [{"role": "user", "content": [ONE, "What?"]}]

    def step(self, message):
        shown = {"type": "image", "image": self.images[0]}
        return [{"role": "user", "content": ["Beside ", shown, " is ", OTHER, "?"]}], 0.5, False


class Unreadable(Shows):
    def step(self, message):
        return [{"role": "user", "content": [ONE, 7]}], 0.5, False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_wrapper(folder)
    return str(folder)


def worker_of(folder, environment=None, tools=(), template=None, **conversation):
    data = {
        "train": "playground:", "system_prompt": None, "chat_template": template,
        "environment": environment and f"{__name__}:{environment}",
        "tools": [f"{__name__}:{tool}" for tool in tools],
        "images": {"max_pixels": 60 * 60},
    }  # fmt: skip
    config = Config(model=folder, data=data, conversation=conversation)
    return EnvironmentWorker(config, encoder_of(config))


def encoder_of_template(folder, template):
    return worker_of(folder, template=template)._format.encoder


def problem(*images):
    return Problem("1", "math", "Go on.", answer="5", images=list(images))


def as_uris(*pictures):
    return [as_text(each) for each in pictures]


def put_text(spoken):
    """The text of what followed the last turn, an image for all that the processor writes."""
    encoder, put = spoken.worker._format.encoder, spoken.put[-1]
    text = encoder.decode(put)
    for each in (ONE, OTHER):
        text = text.replace(encoder.images.expansion(uri(each)), "*")
    return text


@pytest.mark.parametrize(
    ("name", "written", "shown"),
    [
        ("picture", "*", as_uris(ONE)),
        ("bytes", "*", as_uris(png(ONE))),
        ("part", "*", [uri(ONE)]),
        ("parts", 'Left: *, \ufffdright: *7{"a": 7}', as_uris(ONE, OTHER)),
        ("data", '{"picture": "none"}', []),
        ("mark", "no \ufffdpicture", []),
    ],
)
def test_a_tool_shows_what_it_returns(folder, name, written, shown):
    answered, spoken = talk(worker_of(folder, tools=["look"]), call("look", at=name))
    assert answered.ending is None, answered.reason
    assert f"tool:{written}\n" in put_text(spoken) or f"{written}\n</tool" in put_text(spoken)
    assert answered.turn.images == shown
    token = spoken.worker._format.encoder.images.token_id
    assert (token in answered.put) == bool(shown)


def test_the_tokens_are_those_of_the_whole_chat(folder):
    """What is put in behind turns is what one rendering of all messages has there."""
    worker = worker_of(folder, "Shows", tools=["look"])

    async def run():
        spoken = Talk(worker, given=problem(uri(OTHER)))
        started = await spoken.begin()
        assert list(started.images) == as_uris(ONE)
        for _ in range(2):
            answered = await spoken.say("Well.")
        chat = worker._open[(3, 1)].chat
        assert chat.images == as_uris(ONE) + [uri(OTHER), *as_uris(OTHER)] * 2
        assert answered.turn.images == [uri(OTHER), *as_uris(OTHER)]
        whole = chat._whole()
        ends = [i for i, token in enumerate(spoken.ids) if token == spoken.tokenizer.eos_token_id]
        sampled = [*spoken.prompt, *(t for i, t in enumerate(spoken.ids) if i not in ends)]
        assert whole == sampled  # the template writes no end of a turn

    asyncio.run(run())


def test_where_messages_of_tools_are_texts_the_users_follows_with_the_images(folder):
    worker = worker_of(folder, tools=["look"], template=TEXT_TOOLS)
    assert not worker._format.tool_images
    said = call("look", at="parts")
    answered, spoken = talk(worker, said)
    assert answered.ending is None, answered.reason
    assert 'tool:Left: , \ufffdright: 7{"a": 7}\nuser:**\nassistant:' in put_text(spoken)
    worker = worker_of(folder, "Shows", tools=["look"], template=TEXT_TOOLS)
    answered, spoken = talk(worker, said, given=problem(uri(OTHER)))
    assert "user:**Beside * is *?\nassistant:" in put_text(spoken)
    seen, shown = ({"role": role, "content": PLACE} for role in ("user", "tool"))
    system = {"role": "system", "content": "Look."}
    taken = worker._format.as_taken([shown, system])  # the user's is put in before others
    assert taken == [{"role": "tool", "content": ""}, seen, system]
    assert worker._format.as_taken([system, seen]) == [system, seen]


def test_where_tools_answer_as_the_user_their_images_stay_in_their_texts(folder):
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = TEXT_TOOLS.replace("{% if m.role == 'tool' or", f"{refuses}{{% if")
    form = worker_of(folder, template=template)._format
    taken = form.as_taken([{"role": "tool", "content": f"Left: {PLACE}"}])
    assert refuses in template and [m["content"] for m in taken] == [
        f"<tool_response>\nLeft: {PLACE}\n</tool_response>"
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("path", "nothing is fetched, and no file is read"),
        ("address", "nothing is fetched, and no file is read"),
        ("large", "70 x 70 pixels (4,900), and data.images.max_pixels allows 3,600"),
    ],
)
def test_an_image_that_is_not_read_names_the_tool(folder, name, said):
    answered, _ = talk(worker_of(folder, tools=["look"]), call("look", at=name))
    assert answered.ending == "environment_failed"
    assert "the result of look" in answered.reason and said in answered.reason


def test_a_part_that_is_no_text_or_image_names_the_step(folder):
    answered, _ = talk(worker_of(folder, "Unreadable"), "Well.", given=problem(uri(ONE)))
    assert answered.ending == "environment_failed"
    assert "Unreadable.step" in answered.reason and "give text and images" in answered.reason


def test_an_answer_that_is_cut_has_the_images_before_the_cut(folder):
    worker = worker_of(folder, tools=["look"], answer_bytes=64)
    answered, spoken = talk(worker, call("look", at="long"))
    assert answered.ending is None and answered.turn.images == []
    assert "[cut: 206 bytes]" in put_text(spoken)


@pytest.mark.parametrize("end", ["\n", "</s>"])
def test_a_recorded_conversation_has_the_images_of_its_turns(folder, end):
    template = TEMPLATE.format(place="[IMG]").replace("'\n'", f"'{end}'")
    encoder = encoder_of_template(folder, template)
    made = ConversationEncoder(encoder, lambda _, text: text)
    said, one, other = {"role": "assistant", "content": "Yes."}, uri(ONE), uri(OTHER)
    later = {"role": "user", "content": f"Or {PLACE} or {PLACE}?", "images": [other, one]}
    messages = [{"role": "user", "content": f"{PLACE}?", "images": [one]}, said, later, said]
    examples = [*made.examples(Conversation.of(messages, [], "row 1"), "row 1")]
    shown = [(example.images, example.put_images) for example in examples]
    if end == "</s>":  # the template appends
        assert shown == [((one,), (other, one))]
    else:
        assert shown == [((one,), ()), ((one, other, one), ())]
    for example in examples:
        own = (example.prompt, example.images), (example.response, example.put_images)
        for ids, images in own:
            text = encoder.decode(ids)
            for each in (one, other):
                text = text.replace(encoder.expansion(each), "*")
            assert text.count("*") == len(images) and "[IMG]" not in text
    for place, some in (("", "1"), ("{% if loop.first %}[IMG]{% endif %}", "[23]")):
        lacking = encoder_of_template(folder, template.replace("{{ '[IMG]' }}", place))
        made = ConversationEncoder(lacking, lambda _, text: text)
        with pytest.raises(InputError, match=f"row 1: .* writes . places .*for {some} images"):
            [*made.examples(Conversation.of(messages, [], "row 1"), "row 1")]


def test_what_is_an_image():
    assert holds_images(ONE) and holds_images([ONE]) and holds_images(("a", ONE))
    image = {"type": "image", "image": ONE}
    assert holds_images(image) and holds_images([image])
    assert holds_images(png(ONE)) and not holds_images(b"text")
    assert not holds_images(SimpleNamespace(save=print)) and not holds_images(ImageDraw.Draw(ONE))
    for part in ({"type": "image"}, {"type": "image", "index": 0}):
        with pytest.raises(ValueError, match="an image part needs a PIL image"):
            joined(part, ImagesConfig().limits)
    for other in (uri(ONE), {"type": "text"}, [[ONE]], {"a": ONE}, io.BytesIO(), None):
        assert not holds_images(other)


def test_a_model_of_text_alone_says_so():
    config = Config(model="tiny", data={"train": "playground:", "tools": [f"{__name__}:look"]})
    worker = EnvironmentWorker(config, encoder_of(config))
    answered, _ = talk(worker, call("look", at="picture"))
    assert answered.ending == "environment_failed"
    assert "it takes no images" in answered.reason
