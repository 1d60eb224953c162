"""Properties of the parsers that hold for every text, on texts drawn by hypothesis.

The checks are those of fuzz/parsers.py; `make fuzz` runs them for an hour, guided by coverage.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz.__main__ import supervise
from fuzz.parsers import TARGETS, run
from fuzz.vocabulary import PART, TOKENS

# Slow checks get fewer examples, so that all of them together take a few seconds.
EXAMPLES = {
    "prediction": 20,
    "reference": 20,
    "pair": 30,
    "variation": 40,
    "file": 40,
    "odd-row": 60,
    "growth": 2,
    "steps": 30,
    "letters": 50,
    "words": 50,
    "products": 30,
    "function-tests": 6,
}
pieces = st.lists(st.sampled_from(TOKENS) | st.text(max_size=3), max_size=12).map("".join)


def texts(name):
    target = TARGETS[name]
    changed = st.builds(lambda seed, at, new: seed[: at % 80] + new + seed[at % 80 :],
                        st.sampled_from(target.seeds), st.integers(0, 80), pieces)  # fmt: skip
    return changed | st.lists(pieces, min_size=target.texts, max_size=target.texts).map(PART.join)


@pytest.mark.parametrize("name", TARGETS)
def test_holds_for_every_text(name):
    @settings(max_examples=EXAMPLES.get(name, 100), deadline=None, derandomize=True, database=None)
    @given(texts(name))
    def holds(text):
        run(TARGETS[name], text)

    for seed in TARGETS[name].seeds[-9:]:
        holds = example(seed)(holds)
    holds()


def test_a_target_that_did_not_start_has_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    supervise("boxes", 0)
    assert capsys.readouterr().out.split()[0] == "boxes"
