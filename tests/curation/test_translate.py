"""Translations: the selected rows, the parts that must stay the same, and failures."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.asking.server import Server, status
from tests.curation.test_difficulty import run
from tramontane import InputError
from tramontane.asking import Answer
from tramontane.config import parse_settings
from tramontane.config.asking import EndpointModel, ModelConfig
from tramontane.curation.config import CurateConfig, TranslateConfig
from tramontane.curation.translate import Translate, formulas, numbers, read_translation
from tramontane.types import Problem

ENGLISH = "A train travels {} miles in $t = {}$ hours. How many miles does it travel in one hour?"
TRANSLATED = {
    "French": "Un train parcourt {} miles en $t = {}$ heures. Combien de miles parcourt-il en une "
    "heure ?",
    "Spanish": "Un tren recorre {} millas en $t = {}$ horas. ¿Cuántas millas recorre en una hora?",
    "Italian": "Un treno percorre {} miglia in $t = {}$ ore. Quante miglia percorre in un'ora?",
    "German": "Ein Zug legt {} Meilen in $t = {}$ Stunden zurück. Wie viele Meilen legt er in "
    "einer Stunde zurück?",
    "Chinese (simplified)": "一列火车在 $t = {1}$ 小时内行驶了 {0} 英里。它每小时行驶多少英里？",
    "Russian": "Поезд проезжает {} миль за $t = {}$ часов. Сколько миль он проезжает за один час?",
}
CODES = dict(zip(TRANSLATED, ("fr", "es", "it", "de", "zh", "ru"), strict=True))


def trains(count, **more):
    return [
        {"id": f"t{n}", "problem": ENGLISH.format(60 * n + 60, n + 1), "answer": "60", **more}
        for n in range(count)
    ]


def translator(asked, before):
    text = asked["messages"][0]["content"]
    name = re.search(r"below into (.*?)\. Do not", text)[1]
    miles, hours = re.search(r"(\d+) miles in \$t = (\d+)\$", text).groups()
    return f"Sure.\n<translation>\n{TRANSLATED[name].format(miles, hours)}\n</translation>"


def stage(tmp_path, **settings):
    model = ModelConfig(endpoint=EndpointModel(url="http://localhost:1", model="m"))
    return Translate(TranslateConfig(model=model, **settings), tmp_path)


def test_translated_rows_are_rewritten_and_nothing_else_changes(tmp_path):
    rows = trains(40, level=2)
    rows += [{"id": "zug", "problem": "Was ist $1 + 1$, wenn man rechnet?", "answer": "2"}]
    matrix = "\\begin{pmatrix} 60 \\end{pmatrix}"
    rows[0]["answer"] = matrix  # has no English words
    rows += [{"id": "day", "problem": "What day is it on day 8?", "answer": "\\text{Monday}"}]
    with Server(translator) as server:
        summary, decisions, kept = run(tmp_path, rows, server, "translate", translate={"share": 1})
    assert summary["rewrites"] == {"translated": 40}
    assert len(server.requests) == 40  # no German rows, and no answers in words
    languages = Counter()
    for old in rows[:40]:
        new, code = kept[old["id"]], decisions[old["id"]]["detail"].removeprefix("into ")
        languages[code] += 1
        name = next(name for name in CODES if CODES[name] == code)
        miles, hours = re.search(r"(\d+) miles in \$t = (\d+)\$", old["problem"]).groups()
        assert new["problem"] == TRANSLATED[name].format(miles, hours)
        assert new["language"] == code
        assert new["english_problem"] == new["original_problem"] == old["problem"]
        assert (new["answer"], new["difficulty"]) == (old["answer"], 2)
    assert set(languages) == set(CODES.values())
    assert kept["zug"]["problem"] == rows[40]["problem"] and "english_problem" not in kept["zug"]
    assert decisions["day"]["decision"] == "kept"
    report = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "### translated: 40 rewritten by translate" in report


def test_the_seed_alone_draws_the_rows_to_translate(tmp_path):
    problems = [Problem(row["id"], "math", row["problem"], "60") for row in trains(3000)]

    def draw(problems, **settings):
        of = stage(tmp_path, **settings).language
        return {p.id: lang for p in problems if (lang := of(p))}

    drawn = draw(problems)
    assert 300 - 4 * 16.5 < len(drawn) < 300 + 4 * 16.5  # four standard deviations
    languages = Counter(drawn.values())
    assert set(languages) == set(CODES.values()) and min(languages.values()) > 25
    assert draw(problems[::-1]) == drawn
    assert len(draw(problems, seed=1).keys() & drawn.keys()) < 60
    # A larger share contains the smaller one, so that rows can be added.
    assert drawn.items() <= draw(problems, share=0.2).items()


def test_results_do_not_depend_on_the_chunks(tmp_path):
    with Server(translator) as server:
        found = [
            run(tmp_path, trains(30), server, "translate", name=f"{size}", chunk_rows=size,
                translate={"share": 0.5})[2]
            for size in (4, 100)
        ]  # fmt: skip
    assert found[0] == found[1]
    assert 5 < sum("english_problem" in row for row in found[0].values()) < 25


FAULTS = {
    "a formula was changed": lambda text: text.replace("$t =", "$ t="),
    "a formula is gone": lambda text: re.sub(r"\$.*?\$", "", text),
    "a formula came twice": lambda text: re.sub(r"(\$.*?\$)", r"\1 \1", text),
    "a number was changed": lambda text: re.sub(r"(\d+) mi", r"1\1 mi", text),
    "a number was grouped": lambda text: text.replace("600", "6 00"),
    "full width": lambda text: text.replace("600", "６００"),
    "a number more": lambda text: text + " (1)",
    "not translated": lambda text: ENGLISH.format(600, 10),
    "another language": lambda text: TRANSLATED["Spanish"].format(600, 10),
    "half of it": lambda text: f"{text} How many miles does it travel in one hour, then?",
    "empty": lambda text: "  ",
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_of_a_translation_are_found(fault):
    good = TRANSLATED["French"].format(600, 10)

    def read(text):
        wrapped = (
            f"<think>600 <translation>no</translation></think><translation>{text}</translation>"
        )
        return read_translation(ENGLISH.format(600, 10), Answer(wrapped, 9), "fr")

    assert read(good) == (good, "")
    text, why = read(fault(good))
    assert not text and why


def test_formulas_code_and_numbers_are_distinguished():
    text = (
        "At 3.5 km, `x[1]` and $x^2 = 4$ cost \\$5 or $7 and $8.\n```python\nprint(9)\n```\n"
        "\\begin{align*}\na &= 10\n\\end{align*} \\[ 11 \\] \\textbf{12} [asy] draw(13); [/asy] "
        "1,000"
    )
    assert numbers(text) == Counter(["3.5", "5", "7", "8", "12", "1,000"])
    assert formulas(text) == Counter(
        ["`x[1]`", "$x^2 = 4$", "print(9)", "\\begin{align*} a &= 10 \\end{align*}", "\\[ 11 \\]",
         "\\textbf", "[asy] draw(13); [/asy]"]
    )  # fmt: skip
    assert formulas("$a  b$ then\n$c$") == formulas("$c$ $a b$")  # in any order, however spaced


@settings(deadline=None)
@given(st.text("ab1,. $\\{}`[]\n<", max_size=60))
def test_every_digit_is_in_a_number_or_in_a_formula(text):
    inside = "".join([*formulas(text).elements(), *numbers(text).elements()])
    assert inside.count("1") == text.count("1")


def test_a_failed_translation_is_requested_again_then_stays_english(tmp_path):
    rows = trains(3)
    hopeless, second = rows[0]["problem"], rows[1]["problem"]

    def mind(asked, before):
        text = asked["messages"][0]["content"]
        if hopeless in text:
            return "<translation>Il y a 3 pommes.</translation>"
        if second in text and "An earlier translation could not be used" not in text:
            return translator(asked, before).replace("$t = ", "$")
        return translator(asked, before)

    with Server(mind) as server:
        summary, decisions, kept = run(
            tmp_path, rows, server, "translate", translate={"share": 1, "languages": ["fr"]}
        )
    tries = Counter(
        row["id"] for _, asked, *_ in server.requests for row in rows
        if row["problem"] in asked["messages"][0]["content"]
    )  # fmt: skip
    assert tries == {"t0": 3, "t1": 2, "t2": 1}
    retry = next(
        text
        for _, asked, *_ in server.requests
        if second in (text := asked["messages"][0]["content"]) and "An earlier" in text
    )
    assert "its formulas differ (lost: $t = 2$; new: $2$)" in retry
    assert kept["t1"]["language"] == "fr"
    assert kept["t0"]["problem"] == hopeless and "language" not in kept["t0"]
    assert decisions["t0"]["decision"] == "kept" and decisions["t0"]["reason"] == "untranslated"
    assert decisions["t0"]["detail"] == kept["t0"]["untranslated"]
    assert decisions["t0"]["detail"].startswith(
        "fr: its formulas differ (lost: $t = 1$; new: none)"
    )
    assert summary["notes"] == {"untranslated": 1}


def test_a_dead_endpoint_leaves_english_problems(tmp_path):
    with Server(lambda asked, before: status(500, "down")) as server:
        _, decisions, kept = run(
            tmp_path, trains(2), server, "translate", translate={"share": 1, "attempts": 2}
        )
    assert [d["reason"] for d in decisions.values()] == ["untranslated"] * 2
    assert "HTTP 500: down" in decisions["t0"]["detail"]
    assert [row["problem"] for row in kept.values()] == [row["problem"] for row in trains(2)]


def test_multiple_choice_that_was_rewritten_is_translated_and_keeps_its_first_form(tmp_path):
    choice = ENGLISH.format(120, 2) + "\n(A) 60\n(B) 61\n(C) 62"
    rows = [{"id": "c", "problem": choice, "answer": "A"}]
    with Server(translator) as server:
        *_, kept = run(tmp_path, rows, server, "translate", stages=["filter", "translate"],
                       translate={"share": 1, "languages": ["de"]})  # fmt: skip
    assert kept["c"]["problem"] == TRANSLATED["German"].format(120, 2)
    assert (kept["c"]["original_problem"], kept["c"]["original_answer"]) == (choice, "A")
    assert kept["c"]["english_problem"] == ENGLISH.format(120, 2)
    assert kept["c"]["answer"] == "60"


def test_english_as_a_target_language_is_refused():
    with pytest.raises(InputError, match="en is the source language"):
        parse_settings(CurateConfig, {}, ["translate.languages=[fr, en]"], "test")
