"""The lengths of prompts: what is refused or dropped, and how little is tokenized for it."""

import pytest

from tests.data.chat_templates import make_tokenizer
from tramontane.config import DataConfig, PromptConfig
from tramontane.data.lengths import FINITE_LIMIT, PromptFilter, PromptLimit, measure_prompts
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.loading import described
from tramontane.errors import InputError
from tramontane.types import Problem


class CountingEncoder(PromptEncoder):
    """Counts the prompts that are tokenized."""

    encoded = 0

    def encode_all(self, problems, where=()):
        self.encoded += len(problems)
        return super().encode_all(problems, where)


@pytest.fixture
def encoder():
    return CountingEncoder(make_tokenizer("qwen2.5"), PromptConfig(system_prompt="Add."))


def sums(*lengths):
    return [Problem(f"sum-{n}", "math", "1 + " * n + "1?", "0") for n in lengths]


def tokens(encoder, problem):
    return len(encoder.tokenizer(encoder.render(problem.problem))["input_ids"])


def limit(n):
    return PromptLimit(n, f"the limit is {n}: raise it")


def test_the_limit_is_the_lower_one_of_key_and_context():
    assert PromptLimit.of(None, None, 100).tokens == FINITE_LIMIT
    assert PromptLimit.of(50, None, 100).tokens == 50
    assert PromptLimit.of(50, 150, 100).tokens == 50
    assert PromptLimit.of(50, 149, 100).tokens == 49
    assert "data.max_prompt_tokens allows 50: raise it" in PromptLimit.of(50, 150, 100).reason
    assert "context of 149 leaves 49" in PromptLimit.of(50, 149, 100).reason
    with pytest.raises(InputError, match="completions of 100 tokens leave no room"):
        PromptLimit.of(50, 100, 100)


def test_the_descriptions_of_tools_take_room_in_the_context(encoder):
    assert PromptLimit.of(50, 150, 80, tools=20).tokens == 50
    assert PromptLimit.of(50, 149, 80, tools=20).tokens == 49
    assert "next to completions of 80 and the tools' descriptions of 20" in (
        PromptLimit.of(50, 149, 80, tools=20).reason
    )
    with pytest.raises(InputError, match="80 tokens and the tools' descriptions of 20 leave no"):
        PromptLimit.of(50, 100, 80, tools=20)
    tools = described(DataConfig(train="playground:", tools=["calculator"]))
    (whole,) = encoder.tokenizer([encoder.render("2 + 2?", tools=tools)])["input_ids"]
    added = len(whole) - len(encoder.encode("2 + 2?"))
    assert encoder.tokens_of(tools) == added > 20 and encoder.tokens_of([]) == 0


def test_the_longest_prompt_is_exact_for_a_small_set(encoder):
    problems = sums(3, 90, 20, 89)
    longest = max(tokens(encoder, p) for p in problems)
    assert measure_prompts(encoder, problems, limit(10_000)).longest == longest
    assert measure_prompts(encoder, [], limit(10)).longest == 0


def test_overlong_prompts_are_refused_with_their_number(encoder):
    problems = sums(3, 90, 20, 89)
    bound = tokens(encoder, problems[2])
    filtered = PromptFilter(encoder, limit(bound), drop=False)
    with pytest.raises(InputError) as error:
        filtered.keep(problems)
    message = str(error.value)
    assert f"'sum-90': its prompt has {tokens(encoder, problems[1])} tokens" in message
    assert "2 of 4 prompts are too long" in message
    assert "data.overlong_prompts: drop" in message


def test_overlong_prompts_are_dropped_on_request(encoder):
    problems = sums(3, 90, 20, 89)
    bound = tokens(encoder, problems[2])
    filtered = PromptFilter(encoder, limit(bound), drop=True)
    assert filtered.keep(problems) == [problems[0], problems[2]]
    assert (filtered.longest, filtered.dropped) == (bound, 2)
    with pytest.raises(InputError, match="2 of 2 prompts"):
        filtered.keep([problems[1], problems[3]])


def test_problems_that_share_an_id_are_measured_apart(encoder):
    long, short = (Problem("same", "math", "1 + " * n + "1?", "0") for n in (90, 2))
    filtered = PromptFilter(encoder, limit(tokens(encoder, short)), drop=True)
    assert filtered.keep([long, short]) == [short]


@pytest.mark.parametrize("drop", [False, True])
def test_few_prompts_of_a_large_set_are_tokenized(encoder, drop):
    problems = [
        Problem(str(n), "math", f"What is {n} + {n % 97}?", "0") for n in range(20_000)
    ] + sums(100)
    longest = tokens(encoder, problems[-1])
    filtered = PromptFilter(encoder, limit(longest if not drop else longest - 1), drop=drop)
    assert len(filtered.keep(problems)) == 20_001 - drop
    assert encoder.encoded < 12_000
    # An upper bound, close to the longest of the short prompts when the long one is dropped.
    others = max(tokens(encoder, p) for p in problems[:-1:160])
    assert filtered.longest == longest if not drop else others <= filtered.longest < longest


def test_no_statement_has_more_tokens_than_its_bound(encoder):
    statements = [
        "🦆" * 40,
        "½" * 50,
        "\x00\t \r\n" * 9,
        "你好" * 30,
        "a" * 200,
        "",
        "<|im_end|>" * 5,
    ]
    problems = [Problem(str(i), "math", text, "0") for i, text in enumerate(statements)]
    for problem in problems:
        exact = tokens(encoder, problem)
        empty = tokens(encoder, Problem("", "math", "?", "0"))
        assert exact <= empty + 16 + len(problem.problem.encode())


def test_an_endless_source_has_a_bound_before_its_problems_are_known(encoder):
    sample = sums(3, 20)
    most = tokens(encoder, sample[1])
    dropping, refusing = (PromptFilter(encoder, limit(1000), drop=drop) for drop in (True, False))
    for filtered in (dropping, refusing):
        filtered.bound_endless(sample, 10)
        assert filtered.longest == int(1.5 * most)
        assert filtered.encode(sample[1]) == encoder.encode(sample[1].problem)
    [later] = sums(21)  # a little longer than all of the sample
    assert dropping.accepts(later)
    assert refusing.encode(later) == encoder.encode(later.problem)
    [late] = sums(60)
    assert not dropping.accepts(late)
    assert refusing.accepts(late)
    with pytest.raises(InputError, match=r"'sum-60'.* set data.max_prompt_tokens to \d+ or more"):
        refusing.encode(late)
    [never] = sums(2000)
    with pytest.raises(InputError, match="'sum-2000'.*the limit is 1000"):
        refusing.encode(never)
    with pytest.raises(InputError, match="1 of 2 prompts"):
        PromptFilter(encoder, limit(most - 1), drop=False).bound_endless(sample, 10)
