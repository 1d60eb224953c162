"""Language consistency: pure texts agree, a foreign fifth is seen."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import DATA
from tests.verifier import processor
from tramontane.config import LANGUAGES
from tramontane.types import PAPER_TAGS
from tramontane.verifier.format import split_thoughts
from tramontane.verifier.language import (
    THRESHOLD,
    _pieces,
    _weight,
    consistent,
    detect,
    on_target_share,
    strip,
)

SHORT = {
    "en": ["So the answer is .", "First I add 3 and 4 to get 7.", "What is 3 + 4?"],
    "fr": ["Donc la réponse est .", "D'abord j'additionne : 3 + 4 = 7.", "Le résultat est 7."],
    "es": ["Primero sumo 3 + 4 = 7. Luego 7 * 2 = 14.", "La respuesta es ."],
    "it": ["La risposta è .", "Poi moltiplico per 3.", "Prima sommo 3 + 4 = 7."],
    "de": ["Zuerst addiere ich: . Also ist das Ergebnis .", "Also lautet die Antwort 7."],
    "zh": ["答案是 7。", "首先，3 + 4 = 7。"],
    "ru": ["Ответ: 7.", "Сначала сложим 3 и 4."],
}


def test_strip_leaves_prose():
    text = (
        r"Let $x = \text{cat}$ and \(y\) be \[z^2\], $$w$$, \frac{ab}{cd}, `code`, "
        r"\boxed{\text{dog}}"
        "\n```python\nprint('bird')\n```\nend of it"
    )
    prose = strip(text)
    assert not any(word in prose for word in ("cat", "dog", "bird", "code", "z^2", "frac"))
    assert all(word in prose for word in ("Let", "and", "be", "end of it"))


def test_dollars_are_not_always_maths():
    assert "and then" in strip("It costs $5 and then $6 more.")


@pytest.mark.parametrize("language", LANGUAGES)
def test_short_formulaic_sentences(language):
    for text in SHORT[language]:
        assert on_target_share(text, language) >= THRESHOLD, text
    for other in set(LANGUAGES) - {language}:
        text = " ".join(SHORT[language])
        assert on_target_share(text, other) < THRESHOLD, (text, other)


def test_a_share_counts_letters_and_a_han_character_twice():
    english = "First we add the two numbers and then we divide the sum by three."
    count = sum(map(str.isalpha, english))
    assert on_target_share(f"{english} 答案是", "en") == pytest.approx(count / (count + 2 * 3))
    assert on_target_share(f"{english} The angle α is less than the angle β.", "en") == 1


def test_short_sentences_are_judged_together():
    assert on_target_share("Bonjour.", "en") == 1  # seven letters: too short to be identified
    text = "Add it. Then go. We see. So two. " * 3
    assert on_target_share(text, "en") == 1
    assert on_target_share(text, "de") == 0


def test_composed_and_decomposed_letters_are_the_same():
    text = SHORT["fr"][0]
    assert _pieces(unicodedata.normalize("NFD", text)) == _pieces(text)


def test_composition():
    de, en = SHORT["de"][0], SHORT["en"][0]
    assert consistent("Was ist $3+4$ genau?", de, de)
    assert not consistent("Was ist $3+4$ genau?", de, en)
    assert not consistent("Was ist $3+4$ genau?", en, de)
    assert not consistent("What is the sum of 3 and 4?", de, de)
    assert consistent("$3+4$", de, de)  # the problem has no words: thoughts and answer must agree
    assert not consistent("$3+4$", de, " ".join(SHORT["ru"]))
    assert not consistent("", en, en, "fr")


@pytest.mark.parametrize(
    "thoughts",
    [
        "",
        "3 + 4 = 7",
        r"$x = \text{pommes}$",
        "```python\nprint('mot')\n```",
        "½ ... 🙂",
        "a + b = α",
    ],
)
def test_thoughts_without_a_word_are_in_no_language(thoughts):
    answer = r"La réponse est donc sept : \boxed{7}."
    assert not consistent("Combien font $3 + 4$ ?", thoughts, answer, "fr")
    assert consistent("Combien font $3 + 4$ ?", "Bon.", answer, "fr")  # too short to tell: neutral
    # The answer may be a formula alone, but the thoughts need words.
    assert consistent("Combien font $3 + 4$ ?", "J'ajoute les deux.", r"\boxed{7}", "fr")


def test_names_and_labels_are_no_language():
    assert on_target_share("Alice、Bob 和 Carlos 分 30 欧元，设 ABCD 中 AB = BC。", "zh") == 1
    assert on_target_share("Пусть ABCD — квадрат, AB = BC, а Bob и Carlos — нет.", "ru") == 1
    assert on_target_share("答案是 7。Now We Add The two numbers.", "zh") < THRESHOLD


def snippets():
    rows = map(json.loads, Path(__file__).with_name("language_snippets.jsonl").open())
    return [(row["lang"], row["text"]) for row in rows]


def test_thoughts_with_names_numbers_code_and_latex():
    """Snippets are short and informal: one in a hundred may be taken for another language."""
    agree = [on_target_share(text, lang) >= THRESHOLD for lang, text in snippets()]
    assert len(agree) == 98
    assert sum(agree) >= 97


def letters(text):
    return sum(_weight(script, words) for script, words in _pieces(strip(text)))


def test_a_foreign_fifth_of_such_thoughts_is_flagged():
    rng = random.Random(1)
    by_language = {k: [text for lang, text in snippets() if lang == k] for k in LANGUAGES}
    flagged = []
    for home, abroad in itertools.permutations(LANGUAGES, 2):
        foreign = rng.choice([text for text in by_language[abroad] if letters(text) > 25])
        sentences, others = [], rng.sample(by_language[home], 14)
        while others and sum(map(letters, sentences)) < 4 * letters(foreign):
            sentences.append(others.pop())
        sentences.insert(rng.randrange(len(sentences) + 1), foreign)
        flagged.append(on_target_share(" ".join(sentences), home) < THRESHOLD)
    assert sum(flagged) / len(flagged) >= 0.9


OFFLINE = """
import socket
def refused(*_, **__):
    raise OSError("no network here")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from tramontane.verifier.language import detect
print(detect("Nous additionnons les deux nombres et la somme est paire."))
"""


def test_detection_needs_no_network(tmp_path):
    """In a separate network namespace where that is allowed, and with empty caches."""
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    allowed = shutil.which("unshare") and subprocess.run([*isolated, "true"]).returncode == 0
    command = [*(isolated if allowed else []), sys.executable, "-c", OFFLINE]
    env = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    env |= {"TMPDIR": str(tmp_path), "FTLANG_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert (done.stdout.strip(), done.returncode) == ("fr", 0), done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "$$a ",
        "$a ",
        "\\[",
        "\\(",
        "`",
        "https://",
        "\\begin{cases}",
        "a.a",
        "a(b,",
        "a[",
        "“a ",
        '"',
        "a. ",
        "a'",
        "字a",
        " \n",
        "```a\nx\n```\n",
        "\\boxed{a} ",
        "e\u0301",
        "; ",
        "word ",
    ],
)
def test_scans_take_linear_time(text):
    text = (text * 100_000)[:100_000]
    with processor.at_most(2, text):
        consistent("What is the sum of the two numbers?", text, text, "en")
        detect(text)


def test_other_languages_are_off_target_where_identified():
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
    detected = sum(detect(row["text"]) == row["lang"] for row in pure)
    agree = sum(on_target_share(row["text"], row["lang"]) >= THRESHOLD for row in pure)
    assert detected / len(pure) >= 0.97
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
    correct = {False: [], True: []}
    for problem in itertools.islice(playground.problems("test", 0), 300):
        for switch in (None, rng.choice([x for x in LANGUAGES if x != problem.language])):
            text = playground.trace(problem, rng, playground.Style(switch=switch))
            thoughts, answer = text.removeprefix("<think>").split("</think>")
            same = consistent(problem.problem, thoughts, answer, problem.language)
            correct[switch is not None].append(same == (switch is None))
    assert sum(correct[False]) / len(correct[False]) >= 0.985
    assert sum(correct[True]) / len(correct[True]) >= 0.95


# ---------------------------------------------------------- texts in no language, or another

ENGLISH_IN_DISGUISE = [
    "Let Me Think About This Problem Carefully And Solve It Step By Step",
    "First Add The Numbers. Then Divide. Finally Check.",
    "Add Numbers. Divide Sum. Check Result. Done.",
    "Let, Me, Think, About, This",
    "We Add Numbers",
]


@pytest.mark.parametrize("text", [*ENGLISH_IN_DISGUISE, *map(str.upper, ENGLISH_IN_DISGUISE)])
@pytest.mark.parametrize(("language", "ending"), [("zh", "答案是五。"), ("ru", "Ответ пять.")])
def test_english_in_capitals_is_not_chinese_or_russian(text, language, ending):
    for thoughts in (text, f"{text} {ending}", f"{ending} {text}"):
        assert not consistent("", thoughts, r"\boxed{5}", language), thoughts


def test_traces_in_and_out_of_their_language():
    lines = Path(__file__).with_name("language_traces.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert len(rows) > 90
    mistaken = [
        row["thoughts"]
        for row in rows
        if consistent("?", row["thoughts"], row["answer"], row["language"]) != row["consistent"]
    ]
    assert mistaken == []


ENGLISH_WORDS = st.sampled_from(
    [
        "triangle",
        "area",
        "formula",
        "gives",
        "twelve",
        "apples",
        "shared",
        "among",
        "friends",
        "equally",
        "compute",
        "derivative",
        "positive",
        "root",
        "fraction",
        "bottom",
        "circle",
        "radius",
        "speed",
        "minutes",
        "train",
        "city",
        "garden",
        "children",
        "books",
        "probability",
        "urn",
        "marbles",
        "sequence",
        "term",
        "ratio",
        "polynomial",
        "integer",
        "modulo",
        "remainder",
        "digits",
        "square",
        "first",
        "add",
        "then",
        "divide",
        "the",
        "number",
        "and",
        "check",
        "result",
    ]
)
CASES = st.sampled_from([str.upper, str.title, str.lower, str.capitalize])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(ENGLISH_WORDS, min_size=5, max_size=14, unique=True),
    CASES,
    st.sampled_from([" ", ". ", ", "]),
)
def test_no_spelling_of_english_is_chinese_or_russian(words, spell, between):
    text = spell(between.join(words))
    for language, ending in (("zh", "答案是五。"), ("ru", "Ответ пять.")):
        assert not consistent("", text, r"\boxed{5}", language)
        assert not consistent("", f"{text}. {ending}", r"\boxed{5}", language)


@pytest.mark.parametrize(
    "text",
    [
        "Първо събираме тези числа. Според условието сумата трябва да бъде равна на пет.",
        "Значи отговорът е пет. Нека проверим още веднъж.",
        "Прво ги собираме овие броеви. Според условот на задачата збирот мора да биде пет.",
        "Алдымен осы сандарды қосамыз. Есептің шарты бойынша қосынды беске тең болуы керек.",
        "Прво саберемо ове бројеве. Збир мора бити једнак пет.",
        "Спочатку додамо ці числа. За умовою задачі сума повинна дорівнювати пяти.",
        "Эхлээд эдгээр тоог нэмнэ. Нийлбэр нь тавтай тэнцүү байх ёстой.",
    ],
)
def test_other_languages_in_cyrillic_are_not_russian(text):
    assert not consistent("Найдите сумму чисел.", text, r"\boxed{5}", "ru")
    assert detect(text) != "ru"


@pytest.mark.parametrize(
    "text",
    [
        "Сперва складываем. Затем делим на два. Ответ семь.",
        "Значит, ответ равен пяти.",
        "Сумма 7. Произведение 12.",
        "Имеем x = 3, y = 2. Проверка: верно.",
        "Так как 12 делится на 3, то остаток 0.",
    ],
)
def test_short_russian_is_russian(text):
    assert consistent("Найдите сумму чисел.", text, r"\boxed{5}", "ru")


@pytest.mark.parametrize(
    "text",
    [
        "blorf snarg wibble quux zonk flimp gnarble trunk vexil pomfret dazzle",
        "asdf qwer zxcv hjkl uiop bnm fghj rtyu cvbn asdf lkjh poiu",
        "Snorkle vimbat dralf punim cresto waldip ronvex timbul gastor felnim",
        "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor",
        "zzzz qqqq xxxx wwww vvvv kkkk jjjj hhhh gggg ffff dddd",
    ],
)
def test_gibberish_is_in_no_language(text):
    assert not consistent("Find the sum.", text, r"\boxed{5}", "en")


@pytest.mark.parametrize(
    "text",
    [
        "Sum: 3+4=7. Double: 14. Minus 2: 12. Done.",
        "Need x. Square both sides. Get quadratic. Discard negative root. Answer 5.",
        "Use Pythagoras. Hypotenuse 5. Area 6.",
        "Factor: (x-1)(x+1). Roots ±1. Sum 0.",
        "Simplify fraction, cancel terms, substitute x=2, evaluate.",
        "Discriminant positive, two real roots, product -6, sum 1",
        "Triangle isosceles. Base angles equal. Vertex angle 40. Base angle 70.",
    ],
)
def test_telegraphic_english_is_english(text):
    assert consistent("Find the sum.", text, r"\boxed{5}", "en")


QUOTED = [
    (
        "de",
        "Die Aufgabe sagt: “Find the sum of all integers.” Wir addieren also alle diese Zahlen.",
    ),
    (
        "zh",
        '题目说："Find the sum of all integers." 我们先找出所有整数，再相加，得到答案。',
    ),
    (
        "ru",
        "Сказано: «Find the sum of the numbers.» Значит, нужно сложить эти числа и записать ответ.",
    ),
    ("en", "The problem says «Найдите сумму всех чисел» so we need to add all the numbers."),
]


@pytest.mark.parametrize(("language", "text"), QUOTED)
def test_a_sentence_may_be_quoted(language, text):
    assert on_target_share(text, language) == 1
    for mark in '“”«»"':
        text = text.replace(mark, " ")
    assert on_target_share(text, language) < THRESHOLD


def test_a_quotation_does_not_hide_thoughts():
    sentence = "Find the sum of all positive integers, and then add three."
    for quoted in (f"“{sentence}” Wir addieren.", f"“{sentence} {sentence}” {QUOTED[0][1] * 2}"):
        assert on_target_share(quoted, "de") < THRESHOLD


ENVIRONMENTS = ["cases", "align*", "aligned", "pmatrix", "bmatrix", "vmatrix", "equation", "gather"]
CODE = [
    "for i in range(n): total += i",
    "print(total)",
    "result = sum(values)",
    "x.append(y)",
    "len(list(set(nums)))",
    "dp[i] = dp[i-1] + dp[i-2]",
    "sorted(arr, key=lambda v: v[0])",
    "while n > 0: n //= 2",
    "def f(x): return x*2",
]
AROUND = {
    "zh": "我们先写出 {} 然后代入已知的数值，再检查一遍计算过程，得到答案。",
    "ru": "Сначала запишем {} и решим методом подстановки, затем проверим ответ ещё раз.",
    "de": "Aus den Angaben folgt {} und damit ist die gesuchte Lösung der Aufgabe gefunden.",
}


@pytest.mark.parametrize("language", AROUND)
def test_formulas_without_dollars_and_code_without_fences_are_no_words(language):
    for name in ENVIRONMENTS:
        formula = rf"\begin{{{name}}} total &= \text{{price}} \\ cost &= value \end{{{name}}}"
        assert on_target_share(AROUND[language].format(formula), language) == 1, name
    for code in CODE:
        assert on_target_share(AROUND[language].format(code), language) >= THRESHOLD, code
    itemized = r"\begin{itemize}\item First add the numbers and then divide.\end{itemize}"
    assert on_target_share(AROUND[language].format(itemized), language) < THRESHOLD


@pytest.mark.skipif(
    not (DATA / "verdict_failures.jsonl").is_file(),
    reason="needs ../shared/data/verdict_failures.jsonl",
)
def test_shared_failures():
    names = ("verdict_failures.jsonl", "verdicts4.jsonl")
    lines = [line for name in names for line in (DATA / name).open(encoding="utf-8")]
    rows = map(json.loads, lines)
    for row in (row for row in rows if row["domain"] == "language"):
        parsed = split_thoughts(row["response"], PAPER_TAGS, required=True)
        agrees = consistent(row["problem"], parsed.thoughts, parsed.answer, row.get("language"))
        assert agrees == row["expected"], row["id"]


ENGLISH = "First I write the equation, and then I compute the number of solutions."
NATIVE = {
    "ar": ("كم عدد الحلول لهذه المعادلة؟", "أولا نكتب المعادلة ثم نحسب عدد الحلول الممكنة لها"),
    "hi": ("इस समीकरण के कितने हल हैं?", "पहले हम समीकरण को लिखते हैं और फिर हलों की संख्या निकालते हैं।"),
    "ja": (
        "この方程式の解はいくつありますか。",
        "まず方程式を整理します。すると二つの解が得られます。",
    ),
    "ko": (
        "이 방정식의 해는 몇 개입니까?",
        "먼저 방정식을 정리합니다. 그러면 두 개의 해를 얻습니다.",
    ),
    "pl": (
        "Ile rozwiązań ma to równanie?",
        "Najpierw zapisuję równanie, a potem obliczam wyróżnik.",
    ),
    "pt": ("Quantas soluções tem esta equação?", "Primeiro escrevo a equação e depois calculo."),
    "tr": ("Bu denklemin kaç çözümü vardır?", "Önce denklemi yazıyorum ve sonra çözümü buluyorum."),
    "uk": ("Скількома способами це можна зробити?", "Спочатку порахую кількість способів."),
    "vi": ("Phương trình này có bao nhiêu nghiệm?", "Đầu tiên ta viết lại phương trình này."),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_language_outside_the_paper_agrees_with_itself_and_not_with_english(name):
    problem, thoughts = NATIVE[name]
    for declared in (name, None):
        assert consistent(problem, thoughts, "", declared)
        assert not consistent(problem, ENGLISH, "", declared)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("zh", "长方形的边长是5 cm和3 cm，质量是7 kg，面积等于15 cm。"),
        ("ru", "Треугольник ABC: AB = 5 cm, BC = 3 cm, CA = 4 cm."),
        ("vi", "Từ đỉnh A ta kẻ đường vuông góc xuống BC. Vì AB = 5 cm nên chiều cao là 3 cm."),
        ("pt", "Como AB = 5 cm, temos a altura pelo teorema, e logo a área é o triplo."),
    ],
)
def test_units_are_not_prose(target, text):
    assert on_target_share(text, target) == 1


# One problem, solved in 23 languages.
NATIVES = [
    json.loads(line)
    for line in (Path(__file__).parent / "language_natives.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", NATIVES, ids=lambda row: row["language"])
def test_a_native_answer_agrees_and_another_does_not(row):
    problem, thoughts, answer = row["problem"], row["thoughts"], row["answer"]
    for language in (row["language"], None):
        assert consistent(problem, thoughts, answer, language)
        for other in NATIVES:
            if other["language"] in ({"en", "es", "zh", "ru", "pt", "ja"} - {row["language"]}):
                assert not consistent(problem, other["thoughts"], other["answer"], language)


@pytest.mark.parametrize(
    "row",
    [
        ("zh", "求速度。", "速度为 60 km/h，时间为 30 min，所以路程是 30 km，功率为 5 kW。"),
        ("zh", "求值。", "我们计算 sin 和 cos 的值，再用 log 函数，最后得到 max 和 min 的结果。"),
        ("ru", "Найдите массу.", "Масса равна 5 kg, объём 3 mL, давление 2 kPa, ответ пять."),
        (
            "ja",
            "速さを求めなさい。",
            "速さは 60 km/h で、時間は 30 min なので、道のりは 30 km です。",
        ),
        ("ko", "속력을 구하시오.", "속력은 60 km/h 이고 시간은 30 min 이므로 30 km 입니다."),
        ("ar", "أوجد السرعة.", "السرعة تساوي 60 km/h والزمن 30 min لذلك المسافة 30 km."),
    ],
)
def test_units_and_functions_are_of_no_language(row):
    language, problem, thoughts = row
    assert consistent(problem, thoughts, r"\boxed{30}", language)
    assert consistent(problem, thoughts, r"\boxed{30}")
