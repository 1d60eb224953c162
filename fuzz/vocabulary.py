r"""The tokens that the parsers know, and texts to start from.

The fuzzer's dictionary, mutations and seeds, and the strategies of the property tests, are made
from them.
"""

import json

_LATEX, _NUMBERS, _WORDS = map(str.split, (r"""
    \boxed{ \boxed \fbox{ { } \{ \} ( ) [ ] \left( \right) \left. \right| \langle \rangle | \| \\ \
    \frac{ \frac12 \dfrac{ \binom{ \sqrt \sqrt{ \sqrt[3]{ \overline{ \bar{ \dot{ ^ ^{ _ _{ ! !!
    \times \cdot \div / * ** + - = == != < > <= >= \le \ge \neq \approx \equiv \pm \mp \in \cup
    \cap \setminus \emptyset \infty \pi \sin \log \ln \sum_{ \prod_{ \int_{ \lim_{ \to \mathbb{R}
    \begin{pmatrix} \end{pmatrix} \begin{cases} \end{cases} \begin{array}{cc} & \text{ \textbf{
    \bmod \pmod \lfloor \rfloor \lceil \rceil \gcd( \max( \gamma \Gamma( \equiv \not \neg \lg \tan
    \mathrm{ \operatorname{ \mbox{ \text{and} \text{cm} \% % \$ $ $$ \( \) \[ \] \, \! \; \: ~
    \quad ^\circ ^{\circ} \degree \ldots \phantom{ \displaystyle {,} , ; : . ' " ` inf oo nan e i
    """, """
    0 1 2 3 5 7 9 10 42 100 000 1000 1,000 1.5 0.5 .5 5. 0.333333 0.(3) 1e5 6.02e23 1e999 1/2 1/0
    -1 +3 3:4 12:30 204_5 10^3 2^{10} 9^{9^{9}} 170! 99999999999999999999 ½ ² ³ ⁻¹ ₂ ４２ ٣ 三
    """, """
    x y n A B (C) a=1 or and not und ou 或 cm m km² m/s kg s hours apples dollars USD € £ ° ℃ √ ∛ ∞
    π × ÷ − – ≤ ≠ ± ∪ ∈ ∅ ⟨ ′ … the is of der die und nicht les est une que los las per che della
    это не и для 我们 的 因此 答案 かな ελλ
    """))  # fmt: skip
_MARKDOWN = [
    "<think>", "</think>", "<think", "think>", "```", "```python\n", "```cpp\n", "```\n", "~~~",
    "~~~\n", "````", "`", "\n", "\r\n", "\r", "\t", " ", "    ", "   ```", "**", "__", "# ", "- ",
    "> ", "https://a.b/c", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u00a0", "\u200b", "\ufeff",
    "\u0301", "\U0001f600", "\x00",
]  # fmt: skip
_JSON = [
    '{"', '": ', "{}", "[]", "null", "true", "NaN", "Infinity", "-1", "1e999", '"\\ud800"', "[[[[",
    '"id"', '"domain"', '"math"', '"code"', '"problem"', '"answer"', '"tests"', '"response"',
    '"language"', '"response_tokens"', '"type"', '"stdio"', '"python_assert"', '"cases"', '"code"',
    '"input"', '"output"', '"checker"', '"float"', '"difficulty"', '"Level 3"', '"question"',
]  # fmt: skip
_CALLS = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "search"', '"arguments": ',
    '"parameters": ', '"function": {', "search", "; ",
]  # fmt: skip
TOKENS = [*_LATEX, *_NUMBERS, *_WORDS, *_MARKDOWN, *_JSON, *_CALLS]
FORMS = ("hermes", "qwen_xml", "llama", "mistral", "code")  # of calls
CALLS = [
    '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call> and',
    "<tool_call><function=search><parameter=query>\nx\n</parameter></function></tool_call>",
    '{"name": "search", "parameters": {"query": 1}}; {"name": "search", "parameters": {}}',
    '[TOOL_CALLS][{"name": "search", "arguments": {}}][TOOL_CALLS]search[CALL_ID]a1[ARGS]{"a": 1}',
    "<|python_tag|>print(1)", "```python\nprint(1)\n```", "<think>a</think>" * 2000,
    '<tool_call>{"name": "search", "arguments": ' + '{"a":' * 2000, "<tool_call>" * 500,
]  # fmt: skip
PART = "\x1f"  # separates the texts of a target that takes several

ANSWERS = [
    "42", "-5", "1,000", "x = 5", r"\frac{1}{2}", "0.5", r"1\frac{1}{2}", r"0.\overline{3}",
    r"6.02\times 10^{23}", r"\sqrt{2}", "2\\pi", "15 cm", r"12\text{ cm}^2", r"28\%", "45°", "$10",
    "(C)", "C) 12", r"\text{odd}", "1, 2", r"\{1, 2\}", "(1, 2)", "[0, 1)", r"(-\infty, 3)",
    "x < 3", r"0 \le x \le 1", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "3:4", "12:30",
    "204_5", r"x^2 + 2x + 1", r"(x+1)^2", r"\sin^2 x + \cos^2 x", r"\binom{5}{2}", "5!", "1 + i",
    r"2 \pm \sqrt{3}", r"x \in \{1, 2\}", r"[0, 2] \cap (1, 3)", "a = 1, b = 2", r"y = mx + b",
    r"\sum_{k=1}^{n} k", r"\log_2 8", r"\frac{\sqrt{3}}{3}", r"\infty", "5 or 6", "1 = 2 = 5",
    "=", "9^{9^{9}}", "C(5,2)", "{}_5C_2", "C_5^2", r"120^\circ", r"\frac{2\pi}{3}",
    r"\overline{AB}", r"\{x : x^2 < 4\}", r"0.333\ldots", r"17 \bmod 7", r"3 \pmod 7",
    r"7\bmod\infty", r"\lfloor\sqrt{n+1}\rfloor", r"\gcd(n,12)", r"\binom{2014}{2}",
]  # fmt: skip
_PROBLEM = {"id": "a", "problem": "What is 1+1?", "response": r"<think>t</think>\boxed{2}"}
_TESTS = {"type": "stdio", "cases": [{"input": "1", "output": "2"}], "checker": "float"}
ROWS = [
    json.dumps(row)
    for row in (
        _PROBLEM | {"domain": "math", "answer": "2", "language": "en", "response_tokens": 9},
        _PROBLEM | {"domain": "math", "answer": 2},
        _PROBLEM | {"domain": "code", "tests": _TESTS},
        {"domain": "code", "problem": "Add.", "tests": {"type": "python_assert", "code": "f()"}},
        {"question": "1+1?", "final_answer": "#### 2", "level": "Level 3", "language": "it"},
        {"problem": "1+1?", "answer": 2.0, "difficulty": 3.0, "id": [1], "tests": "{}"},
    )
]
ROWS += ['{"id": ' + "[" * 1200, '{"id": ' + "9" * 5000 + "}", '"\\ud800"']
RESPONSES = [
    r"<think>One and one are two, so the answer is $1+1=2$.</think>The answer is \boxed{2}.",
    "<think>t</think>Here:\n```python\nprint(input())\n```\nDone.\n~~~~cpp\nint main(){}\n~~~~\n",
    r"<think></think>\boxed{\text{a {b} \} c} \boxed{\frac{1}{2}} \boxed{",
    "Wir rechnen: \\[x = \\frac{1}{2}\\] und `code`. Also lautet die Antwort \\boxed{x}.",
    "Считаем 2+2. 所以答案是四。 Entonces la respuesta es cuatro. https://a.b/c $5 and $6",
]
ODD_VALUES = [
    None, True, False, 0, 5, -1, 1.5, 1e300, "", " ", "x", "2", "\ud800", "9" * 5000, "en", [], [1],
    {}, {"input": "1", "output": "2"}, [{"input": "1", "output": "2"}], [{"input": 1}], [[[]]],
    "tokens", "float", float("nan"), float("inf"), "nan", 10**300, "code", {"a": "\ud800"},
]  # fmt: skip
