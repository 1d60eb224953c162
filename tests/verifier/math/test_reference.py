"""References in prose: what is read of them, and which no answer equals."""

import pytest

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import references
from tramontane.verifier.math import judge_answer
from tramontane.verifier.math.reference import bare_answers, stated

STATES_TWO = [
    "2", "2.", "$2$", "$$2$$", "\\[2\\]", "= 2", "≈ 2", "**2**", "*2*", "`2`", '"2"', "« 2 »",
    "# 2",
    "We add them. The answer is \\boxed{2}.", "\\boxed{\\boxed{2}}", "\\boxed 2", "\\fbox{2}",
    "So \\boxed{2}. Again: \\boxed{2}", "The final answer is $\\boxed{2}$.", "#### 2",
    "1 + 1 = 2\n#### 2", "<answer>2</answer>", "<answer> \\boxed{2} </answer>.", "<b>2</b>",
    "I add them. <answer>2</answer>", "Answer: 2", "Ans: 2", "A: 2", "Solution: 2", "Result = 2",
    "1 + 1 = 2, so the final answer is: $2$.", "Two steps.\nFinal Answer: 2", "**Answer:** 2",
    "**Answer: 2**", "The final answer is **2**", "The answer is: **2**.", "Answer - 2",
    "Final Answer: The final answer is $2$. I hope it is correct.", "\\text{The answer is } 2",
    "\\text{The answer is 2}", "\\textbf{Answer:} 2", "The answer to both questions is 2.",
    "Réponse : 2", "La réponse est 2.", "Réponse finale : $2$", "Antwort: 2",
    "Die Antwort lautet 2.",
    "Ergebnis: 2", "Respuesta: 2", "La respuesta es 2", "Risposta: 2", "La risposta è 2.",
    "Resposta: 2", "Ответ: 2.", "Ответ — 2", "Ответ равен 2", "答案：2", "答案是2。", "答案为 2",
    "故答案为：$2$",
    "答え：2", "答えは2です。", "정답: 2", "정답은 2입니다.", "الجواب: 2", "उत्तर: 2",
    "Odpowiedź: 2",
    "Ans. 2", "Ответ 2", "ANSWER 2", "Final answer\n2",
    "Answer → $2$", "2 (two)", "2（二）", "2 \\text{ (two)}", "2 (approximately 2.0)",
    "2 (≈ 2.0)", "2 (about 2)", '{"answer": 2}',
    "\\underline{2}", "\\textcolor{red}{2}", "\\color{red}{2}", "\\color{blue} 2", "{\\bf 2}",
    "\\bbox[red]{2}", "\\answer{2}", "[ANSWER] 2 [/ANSWER]", "[ANS]2", "['2']", '["2"]',
    "\\begin{equation}2\\end{equation}", "\\begin{align*}x&=2\\end{align*}",
    "→ 2", "=> 2", "\\Rightarrow 2", "&nbsp;2", "✅ 2", "2 ✓", "2 QED", "2 ∎", "2 \\blacksquare",
    "2<br>",
    "It equals 2", "Hence 2", "The value is 2", "Therefore x = 2", "so the answer is 2.",
    "So x is 2",
    "The value of $x$ is $2$.", "I add them. Therefore 2.", "1 + 1 = 2. Hence the total is 2",
    "We get 2.", "This gives $2$.", "The total comes to 2", "Then we have x = 2", "In total, 2",
    "It equals \\boxed{2}", "Donc 2", "La valeur est 2", "Somit ist x gleich 2", "Por lo tanto, 2",
    "Quindi il valore è 2", "Portanto, o valor é 2", "Значит, 2", "Значение равно 2", "所以2",
    "因此，x=2", "它等于2", "值为2。", "よって2", "따라서 값은 2입니다.",
]  # fmt: skip


@pytest.mark.parametrize("reference", STATES_TWO)
def test_a_reference_in_prose_states_its_answer(reference: str) -> None:
    assert judge_answer("2", reference).outcome == "right"
    assert judge_answer("3", reference).outcome == "wrong"
    assert bare_answers(stated(reference)) is None


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("1,021 (one thousand twenty-one)", "1021"),
        ("\\frac{1}{3} (approximately 0.33)", "\\frac{1}{3}"),
        ("Réponse : −3", "-3"),
        ("The answer is parallelogram.", "parallelogram"),
        ("Answer: B", "B"),
        ("The correct option is (B)", "B"),
        ("Answer: $x=2$ or $x=3$", "2, 3"),
        ("Area: 5 cm", "5 cm"),
        ("result: [1, 2]", "[1, 2]"),
        ("The probability is \\frac{1}{2}.", "1/2"),
        ("The area is 5 cm", "5 cm"),
        ("Hence $x=2$ or $x=3$.", "2, 3"),
        ("The remainder is 2.", "2"),
    ],
)
def test_the_answer_that_is_stated(reference: str, answer: str) -> None:
    assert judge_answer(answer, reference).outcome == "right"


@pytest.mark.parametrize(
    "reference",
    [
        "\\boxed{1} or \\boxed{2}",  # which one is not said
        "2 (mod 5)", "12 (base 5)", "x = 2", "parallelogram", "1:2", "12:30", "AB : CD = 1:2",
        "x: 2",
        "\\{x : x > 2\\}", "f: R \\to R", "a*b*c", "f'(x)", "(2, 3)", "Monday: 3, Tuesday: 5",
        "10^{-3}", "> 2", "- 2", "less than 2", "\\{2\\}", "\\underline{AB}",
        "['2', '3']", "2 \\to 3", "\\underline{1}\\,\\underline{A}", "a \\square b", "[2]",
        "\\overline{12}", "SO(3)", "So what", "World War 2", "x is even, y is 2",
    ],
)  # fmt: skip
def test_what_is_an_answer_as_it_stands_is_not_taken_apart(reference: str) -> None:
    assert stated(reference) == reference


def test_only_references_are_read_so() -> None:
    assert judge_answer("Answer: 2", "2").outcome == "wrong"
    assert judge_answer("<answer>2</answer>", "2").outcome == "wrong"
    assert judge_answer("Hence 2", "2").outcome == "wrong"


def told(answers: list[str], **config: object) -> list[str]:
    problems = [Problem(f"p{i}", "math", "?", a, where=f"f:{i}") for i, a in enumerate(answers)]
    return references.warnings(VerifierConfig.model_validate(config), problems, "rows")


@pytest.mark.parametrize(
    "reference",
    [
        "He has 2 apples left.", "Es sind 2 Äpfel.", "所以有2个苹果", "So there are 2 apples",
        "Значит, их 2", "It is not 2", "n is 2 or 3 if m is 1", "The value is less than 2",
        "The minimum is 2 and the maximum is 3", "It holds only if x is 2", "не равно 2", "不是2",
        "The answer is 2 because 1 + 1 = 2.", "2 (exactly)", "Step 1: add. Step 2: 2",
        "It is \\frac{1}{2} that we wanted", "Answer:", "\\frac{1}{2",
        "1. 2", "1) 2", "QED 2", "Q1: 2", "1+1 = 2", "3 \\times 4 = 12", "No. 2", "#2", "1\n2",
        "x + 1 = 3 ⇒ x = 2", "$t(0,4]$",
        "N/A", "nan", "?", "-", "x + " * 400 + "1",
        "First add the two numbers, then you will see what comes out of it.",
    ],
)  # fmt: skip
def test_a_reference_that_no_answer_equals_is_told(reference: str) -> None:
    (warning,) = told(["1", reference, "x + 1"])
    assert "1 of 3 reference answers" in warning and "f:1" in warning


def test_references_that_answers_equal_are_not_told() -> None:
    answers = [
        *STATES_TWO, "5 cm", "5 apples" if judge_answer("5",
        "5 apples").outcome == "right" else "5",
        "x=2 or x=3", "6, 8, and 10", "19 \\text{ and } 43", "\\text{odd}", "two",
        "all real numbers",
        "2 \\pmod 5", "\\frac{bx}{h}(h-x)", "\\overline{CD}", "440\\text{ cm}^2",
        "\\sin x + 2\\cos x",
        "(-\\infty, 2) \\cup (3, 4]", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "no solution",
        "50\\%",
    ]  # fmt: skip
    assert told(answers) == []


def equals(problem: Problem, answer: str) -> bool:
    return answer == problem.answer


def ignores(problem: Problem, answer: str) -> bool:
    return answer == problem.metadata.get("label")


@pytest.mark.parametrize(("name", "warns"), [("equals", False), ("ignores", True)])
def test_a_verifier_that_judges_the_reference_wrong_is_told(name: str, warns: bool) -> None:
    path = f"{__name__}.{name}"
    domains = {"math": {"verifier": path, "format": "boxed"}}
    found = told([f"move {i}" for i in range(40)], domains=domains)
    assert len(found) == warns
    assert not warns or "judges the reference itself wrong" in found[0]


@pytest.mark.parametrize(
    "reference",
    [
        "No real solutions as the discriminant is negative",
        "There is no solution; the system is inconsistent",
        "No solution is possible",
        "keine Lösung, da die Diskriminante ist negativ",
        "Il n'y a aucune solution : impossible",
    ],
)
def test_that_there_is_no_answer_is_the_answer(reference: str) -> None:
    assert stated(reference) == reference


def test_references_are_tried_without_other_rewards() -> None:
    """Each would be computed for up to 256 problems before a run."""
    other = {"custom": [{"function": f"{__name__}.fails", "weight": 1}]}
    assert told(["5 apples", "move a"], reward=other) == told(["5 apples", "move a"])


def fails(problem: Problem, text: str, n_tokens: int) -> float:
    raise ValueError("this reward takes a minute")


@pytest.mark.timeout(20)
def test_a_long_numeral_in_an_open_bracket_ends_at_once() -> None:
    reference = "12(" + "一" * 200
    assert stated(reference) == reference


def test_solutions_that_fail_their_own_tests_are_counted() -> None:
    programs = ["print(int(input()) * 2)", "print(int(input()) * 3)", "int main() { return 0; }"]
    tests = {"type": "stdio", "cases": [{"input": "2\n", "output": "4\n"}]}
    rows = [
        Problem(id=str(n), domain="code", problem="?", tests=tests, metadata={"solution": program})
        for n, program in enumerate(programs)
    ]
    (found,) = references.warnings(VerifierConfig(), rows, "rows")
    assert "1 of 2 solutions tried fail their own row's tests, the first at 1:" in found
    assert not references.warnings(VerifierConfig(), [rows[0], rows[2]], "rows")
