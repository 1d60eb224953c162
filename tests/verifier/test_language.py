"""Language consistency: pure texts agree, a foreign fifth is seen."""

import itertools
import json
import random
from pathlib import Path

import pytest

from tramontane.config import LANGUAGES
from tramontane.verifier.language import THRESHOLD, consistent, detect, on_target_share, strip

DATA = Path(__file__).parents[2].parent / "shared/data"

SHORT = {
    "en": ["So the answer is .", "First I add 3 and 4 to get 7.", "What is 3 + 4?"],
    "fr": ["Donc la réponse est .", "D'abord j'additionne : 3 + 4 = 7.", "Le résultat est 7."],
    "es": ["Primero sumo 3 + 4 = 7. Luego 7 * 2 = 14.", "La respuesta es ."],
    "it": ["La risposta è .", "Poi moltiplico per 3.", "Prima sommo 3 + 4 = 7."],
    "de": ["Zuerst addiere ich: . Also ist das Ergebnis .", "Also lautet die Antwort 7."],
    "zh": ["答案是 7。", "首先，3 + 4 = 7。"],
    "ru": ["Ответ: 7.", "Сначала сложим 3 и 4."],
}  # fmt: skip


def test_strip_leaves_prose():
    text = (
        r"Let $x = \text{cat}$ and \(y\) be \[z^2\], $$w$$, \frac{ab}{cd}, `code`, "
        r"\boxed{\text{dog}}"
        "\n```python\nprint('bird')\n```\nend of it"
    )
    left = strip(text)
    assert not any(word in left for word in ("cat", "dog", "bird", "code", "z^2", "frac"))
    assert all(word in left for word in ("Let", "and", "be", "end of it"))


def test_dollars_are_not_always_maths():
    assert "and then" in strip("It costs $5 and then $6 more.")


@pytest.mark.parametrize("language", LANGUAGES)
def test_short_formulaic_sentences(language):
    for text in SHORT[language]:
        assert on_target_share(text, language) >= THRESHOLD, text
    for other in set(LANGUAGES) - {language}:
        text = " ".join(SHORT[language])
        assert on_target_share(text, other) < THRESHOLD, (text, other)


def test_composition():
    de, en = SHORT["de"][0], SHORT["en"][0]
    assert consistent("Was ist $3+4$ genau?", de, de)
    assert not consistent("Was ist $3+4$ genau?", de, en)
    assert not consistent("Was ist $3+4$ genau?", en, de)
    assert not consistent("What is the sum of 3 and 4?", de, de)
    assert consistent("$3+4$", de, de)  # no telling from the problem: the two must agree
    assert not consistent("$3+4$", de, " ".join(SHORT["ru"]))
    assert consistent("", "3 + 4 = 7", r"\boxed{7}", "fr")  # nothing to tell is neutral
    assert not consistent("", en, en, "fr")


def test_other_languages_are_off_target_where_told():
    polish = "Najpierw musimy zauważyć, że suma tych dwóch liczb jest zawsze parzysta."
    ukrainian = "Спочатку зауважимо, що сума цих двох чисел завжди є парною, і її легко знайти."
    japanese = "まず、この二つの数の和は必ず偶数になることに注意しましょう。"
    assert on_target_share(polish, "en") == 0
    assert on_target_share(ukrainian, "ru") == 0
    assert on_target_share(japanese, "zh") < THRESHOLD
    assert detect(polish) == "pl"


def test_variables_and_names_are_neutral():
    assert on_target_share("设 ABC 为三角形，Anna 有 3 个苹果。", "zh") == 1
    assert on_target_share("Пусть x + y = z, тогда sin x = 0.", "ru") == 1


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_shared_snippets():
    rows = [json.loads(line) for line in (DATA / "lang_snippets.jsonl").open()]
    pure = [row for row in rows if row["length"] != "mixed"]
    told = sum(detect(row["text"]) == row["lang"] for row in pure)
    agree = sum(on_target_share(row["text"], row["lang"]) >= THRESHOLD for row in pure)
    assert told / len(pure) >= 0.97
    assert agree / len(pure) >= 0.97
    for row in rows:
        if row["length"] == "mixed":
            assert on_target_share(row["text"], row["lang"][:2]) < THRESHOLD


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_a_foreign_fifth_is_flagged():
    rows = [json.loads(line) for line in (DATA / "lang_snippets.jsonl").open()]
    short = {
        k: [r["text"] for r in rows if (r["lang"], r["length"]) == (k, "short")] for k in LANGUAGES
    }
    rng = random.Random(0)
    flagged = []
    for home, abroad in itertools.permutations(LANGUAGES, 2):
        for _ in range(5):
            sentences = rng.sample(short[home], 4)
            sentences.insert(rng.randrange(5), rng.choice(short[abroad]))
            flagged.append(on_target_share(" ".join(sentences), home) < THRESHOLD)
    assert sum(flagged) / len(flagged) >= 0.9


def test_playground_traces():
    playground = pytest.importorskip("tramontane.data.playground")
    rng = random.Random(0)
    told = {False: [], True: []}
    for problem in itertools.islice(playground.problems("test", 0), 300):
        for switch in (None, rng.choice([x for x in LANGUAGES if x != problem.language])):
            text = playground.trace(problem, rng, playground.Style(switch=switch))
            thoughts, answer = text.removeprefix("<think>").split("</think>")
            same = consistent(problem.problem, thoughts, answer, problem.language)
            told[switch is not None].append(same == (switch is None))
    assert sum(told[False]) / len(told[False]) >= 0.985
    assert sum(told[True]) / len(told[True]) >= 0.95
