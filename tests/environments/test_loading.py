"""What is an environment or a tool, and what is refused before a run."""

import functools

import pytest

from tests.environments import worlds
from tests.environments.templates import UNREAD, tokenizer_of
from tramontane.config import Config, DataConfig, PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading
from tramontane.errors import InputError
from tramontane.run.task import config_of
from tramontane.types import Problem

GUESS, REWARDED = "tests.environments.worlds:Guess", "tests.environments.worlds:TrlCounter"


class Taking:
    def start(self, config, seed, problem):
        return None

    def reset(self):
        return None

    def step(self, message):
        return "", None, True


class Gym:
    def reset(self, seed=None):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Unrewarded:
    def reset(self):
        return None


class Graded:
    """A toolbox with methods of other kinds' names."""

    def run(self, code: str) -> str:
        """Run code.

        Args:
            code: What to run.
        """
        return code

    def get_reward(self) -> float:
        return 1.0


class Undescribed(Unrewarded):
    def look(self, where):
        """Look."""


class Empty:
    _hidden = len


def unannotated(where):
    """Look.

    Args:
        where: Where.
    """


def data_of(environment=None, tools=()):
    named = [f"{__name__}:{each.__name__}" for each in tools]
    path = (
        environment if isinstance(environment, str | None) else f"{__name__}:{environment.__name__}"
    )
    return DataConfig(train="playground:", environment=path, tools=named)


def row(environment, where=""):
    return Problem("7", "math", "Hey", where=where, metadata={"environment": environment})


def test_what_is_whole_is_taken():
    for kind in (Taking, Unrewarded, Graded):
        loading.check(data_of(kind), reward_is_set=False)
    loading.check(data_of(tools=[Graded]), reward_is_set=False)
    loading.check(data_of("guessing"), [Problem("7", "math", "Hey")])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (data_of(Gym), "Gym has `reset` and `step` like Gymnasium's environments; wrap it in"),
        (data_of(Empty), f"data.environment: {__name__}:Empty has no public methods"),
        (data_of(tools=[Empty]), f"data.tools: {__name__}:Empty has no public methods"),
        (data_of(Undescribed), r"tool Undescribed.look \(.*\): .*type hint"),
        (data_of(tools=[unannotated]), r"tool unannotated \(.*\): .*type hint"),
    ],
)
def test_what_no_conversation_can_be_led_with_is_refused(data, said):
    with pytest.raises(InputError, match=said):
        loading.check(data)


def test_a_class_of_a_notebook_is_named_and_not_its_pickle():
    class Nothing:
        pass

    parsed, _ = config_of(
        None, {"data.train": "a", "data.environment": Nothing}, model="tiny", data=None, rewards=()
    )
    with pytest.raises(InputError, match=r"^data.environment: \S*\.Nothing has no public methods"):
        loading.check(parsed.data)


def test_a_reward_of_trls_in_a_row_is_not_overlooked_unless_one_is_chosen():
    data, rows = data_of("row"), [row(REWARDED)]
    loading.check(data, rows)
    loading.check_rows(data, rows)
    with pytest.raises(InputError, match="^7: field 'environment': TrlCounter has `get_reward`"):
        loading.check(data, rows, reward_is_set=False)


def test_what_a_row_names_is_found_in_the_row():
    data = data_of("row")
    assert loading.environment_of(data, row(GUESS)) == GUESS
    assert loading.environment_of(data, row(["no text"])) is None
    for path, where, said in (
        ("os:system", "a.jsonl:3", r"^a.jsonl:3: field 'environment': .*Python itself"),
        ("nowhere:Shop", "", r"^7: field 'environment': .*No module named 'nowhere'"),
    ):
        with pytest.raises(InputError, match=said):
            loading.check(data, [row(GUESS), row(path, where)])


def test_a_tool_that_cannot_be_loaded_is_told_as_one():
    data = DataConfig(train="playground:", tools=["nowhere:look"])
    for ask in (loading.described, lambda data: loading.deterministic(data, row(None))):
        with pytest.raises(InputError, match=r"^data.tools: .*No module named 'nowhere'"):
            ask(data)


def test_a_run_is_told_how_many_tokens_its_tools_add_and_what_cannot_be_read():
    encoder = PromptEncoder(tokenizer_of("qwen2.5"))
    none, guess, tools = ({}, {"environment": "guessing"}, {"tools": ["calculator"]})
    for data in (none, guess):
        assert loading.checked_tools(Config(model="m", data=data), encoder) == 0
    one, two = ({"tools": ["calculator", "notebook"][:n]} for n in (1, 2))
    texts = [
        encoder.render("1?", tools=loading.described(Config(model="m", data=data).data))
        for data in (none, one, two)
    ]
    sizes = [len(encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert sizes[0] < sizes[1] < sizes[2]
    for data, size in ((one, sizes[1]), (two, sizes[2])):
        assert loading.checked_tools(Config(model="m", data=data), encoder) == size - sizes[0]
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.chat_template = UNREAD
    unread = PromptEncoder(tokenizer)
    for conversation in ({"calls": "hermes"}, {"tokens": "mistral"}):
        config = Config(model="m", data=tools, conversation=conversation)
        assert loading.checked_tools(config, unread) > 0
    assert loading.checked_tools(Config(model="m", data=guess), unread) == 0
    with pytest.raises(InputError, match="not read"):
        loading.checked_tools(Config(model="m", data=tools), unread)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    assert loading.checked_tools(Config(model="m", data=none), PromptEncoder(tokenizer)) == 0
    for data in (guess, tools):
        for prefix in ("", "Hm."):
            endless = PromptEncoder(tokenizer, PromptConfig(response_prefix=prefix))
            with pytest.raises(InputError, match="begins a response behind every chat"):
                loading.checked_tools(Config(model="m", data=data), endless)


def test_the_methods_of_a_class_tell_what_it_is():
    kinds = {
        Taking: "environment",
        Gym: "environment",
        Unrewarded: "trl",
        Graded: "toolbox",
        unannotated: "tool",
        worlds.Guess: "environment",
    }
    assert {each: loading.kind_of(each) for each in kinds} == kinds


def test_functions_of_any_kind_are_tools_of_their_own():
    class Called:
        def __call__(self):
            return 1

    box, partial, called = Graded(), functools.partial(pow, 2), Called()
    append = [].append
    found = loading.functions_of(
        [pow, unannotated, box, box.run, partial, called, append, object()]
    )
    assert found == [pow, unannotated, box.run, box.run, partial, called, append]
    assert loading.name_of(partial) == "partial" and loading.name_of(box.run) == "Graded.run"
