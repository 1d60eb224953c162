"""IFEval's 25 kinds: cases of the structure of those that the benchmark publishes for its checker
(arXiv 2311.07911), and its strict and loose criteria."""

import pytest

from tramontane.verifier.instructions import ARGUMENTS, CHECKS, count_sentences, follows, judge

LESS, LEAST = "less than", "at least"


def sentences(relation, number):
    return {"relation": relation, "num_sentences": number}


def letters(letter, relation, number):
    return {"letter": letter, "let_relation": relation, "let_frequency": number}


def capitals(relation, number):
    return {"capital_relation": relation, "capital_frequency": number}


def nth(count, place, word):
    return {"num_paragraphs": count, "nth_paragraph": place, "first_word": word}


CITY = "The romantic river winds past the museum.\nThe Mona Lisa hangs in Paris."
HISTORY = "They came to power in 1933.\nBy 1934 he had become dictator."
STARS = {
    "one": "  paragraph 1\n  ***\n  paragraph 2\n  ***\n  paragraph 3",
    "before": "\n     ***\n  paragraph 1\n   ***\n   paragraph 2\n   ***\n  paragraph 3",
    "after": "\n  paragraph 1\n   ***\n   paragraph 2\n   ***\n   paragraph 3\n   ***",
    "empty": "\n  paragraph 1\n   ***\n  paragraph 2\n   ***\n   ***",
}
FIVE = "Wow, long.\n\nI can't believe it.\n\n{}\n\nI guess I am proof.\n\nHaha, you got that."
WORDS = "L4RGE L4NGU4GE M0DEL: AI syst3m th4t und3rst4nds, g3n3r4tes, or tr4nsforms\n l4ngu4g3 b4s3d on pr3vious l3arning & d4t4."  # noqa: E501

CASES = [
    ("language:response_language", {"language": "en"}, "The response is English", True),
    ("language:response_language", {"language": "es"}, "Desayunamos en McDonald's hoy", True),
    ("language:response_language", {"language": "en"}, "Today we visit the Louvre", True),
    ("language:response_language", {"language": "fr"}, "Today we visit the museum", False),
    ("language:response_language", {"language": "kn"}, "12 + 30 = 42", True),  # no language
    ("length_constraints:number_sentences", sentences(LESS, 4), "xx,x. xx,x! xx/x. x{x}x?", False),
    ("length_constraints:number_sentences", sentences(LESS, 5), "xxxx. xx,x! xxxx. x(x)x?", True),
    ("length_constraints:number_sentences", sentences(LEAST, 4), "xxxx. xx,x! xx|x. x&x x?", True),
    ("length_constraints:number_sentences", sentences(LEAST, 5), "xx-x. xx,x! xx}x. x,xx?", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 5},
     "Fill in:\n[Name]\n[Email]\n[Phone]\n[Address]\n[Site]\nThank you.", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 7},
     "My [a] [b] is [a] [b]. I [c] and [c].", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3},
     "Begin a line with an asterisk (*):\n  * A point.\n  *(no space)Another.\n  * A third.\nEnd.",
     True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     "An asterisk (*), *, in a line:\n    * A point.\n    * Another.\n    . a dot", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3},
     "Three:\n  - One.\n  - Two.\n  -Three.", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1},
     "Part 1\n  ***\nPart 2\n  ***\nPart 3\n  * only one point\n", True),
    ("detectable_format:constrained_response", {}, "\n My answer is no.\n", True),
    ("detectable_format:constrained_response", {}, "My answer is no. I am learning.", True),
    ("detectable_format:constrained_response", {}, "The answer is no.", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     "Write the * character around it: *hello*. Bold is **hello**.", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     "Methods:\n*Finite differences\n*Finite elements*\n*Boundary elements\n", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 4},
     "*two* highlighted *parts in a* line. **So too** for **double marks.**", True),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 3},
     "Mark them, such as:\n  Section 1\n  [text]\n  Section 2\n  [text]", False),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\n  [text]\n  SECTION 2\n  [text]", True),
    *(("length_constraints:number_paragraphs", {"num_paragraphs": 3}, STARS[name], True)
      for name in ("one", "before", "after")),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, STARS["empty"], False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text.\n\nP.S. Hope.", True),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "Text.\n\nP.S. Hope.", False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "A.\n\nP.P.S. Ask me.", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "in a line P.S. a joke", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "One.\np.p.s what if", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "It is.\nP. S. spaces", True),
    ("keywords:existence", {"keywords": ["romantic", "river", "Mona Lisa"]}, CITY, True),
    ("keywords:existence", {"keywords": ["romantic", "river", "Mona Lisa"]}, CITY[:40], False),
    ("keywords:existence", {"keywords": ["C++"]}, "I like C++.", True),
    ("keywords:frequency", {"keyword": "  keyword ", "frequency": 4, "relation": LESS},
     "keyword, Keyword, KEYWORD", True),
    ("keywords:frequency", {"keyword": "  keyword ", "frequency": 3, "relation": LEAST},
     "keyword, Keyword, KEYWORD", True),
    ("keywords:frequency", {"keyword": "KEYWORD", "frequency": 4, "relation": LEAST},
     "*keyword\n*Keyword\n*KEYWORD", False),
    ("length_constraints:number_words", {"num_words": 8, "relation": LESS},
     "d3sCRi7 lArge lAnguagE M0del w1tH 20 w0RdS.", True),
    ("length_constraints:number_words", {"num_words": 16, "relation": LESS}, WORDS, False),
    ("length_constraints:number_words", {"num_words": 16, "relation": LEAST}, WORDS, True),
    ("length_constraints:nth_paragraph_first_word", nth(3, 2, "I"), "p 1\n\n I p 2\n\n p 3", True),
    ("length_constraints:nth_paragraph_first_word", nth(3, 2, "I"), "p 1\n\n  I p 2", False),
    ("length_constraints:nth_paragraph_first_word", nth(3, 2, "I"), "p 1\n\n no p\n\n p 3", False),
    ("length_constraints:nth_paragraph_first_word", nth(5, 5, "haha"), FIVE.format("Yes"), True),
    ("length_constraints:nth_paragraph_first_word", nth(5, 3, "Really"),
     FIVE.format('"Really?! No way!"'), True),
    ("length_constraints:nth_paragraph_first_word", nth(5, 3, "Really"),
     FIVE.format("Rea!lly? No way!"), False),
    ("keywords:forbidden_words", {"forbidden_words": ["HOUSE", "POWER", "BECOME"]}, HISTORY, False),
    ("keywords:forbidden_words", {"forbidden_words": ["GOOGLE", "TEXT"]}, HISTORY, True),
    ("keywords:forbidden_words", {"forbidden_words": ["GENE", "TRANSFORM"]},
     "GPT, or Generative Pre-trained Transformer", True),
    ("combination:two_responses", {}, "Response 1.\n  ******\n  Response 2.\n", True),
    ("combination:two_responses", {}, "Response 1.\n  ******\n  Response 1.\n", False),
    ("combination:two_responses", {}, "R 1.\n ******\n R 2.\n ******\n R 3.\n", False),
    ("combination:two_responses", {}, "******\nR 1.\n******\n******\nR 2.\n******\n", False),
    ("combination:two_responses", {}, "******\nR 1\n******\nR 2\n******\n", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a note."}, "Write a note. Hi!", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a note."}, "Hi. Write it.", False),
    ("startend:end_checker", {"end_phrase": "\n Any more questions?\n"},
     "\n It is 7. Any more questions?\n", True),
    ("startend:end_checker", {"end_phrase": "This is the end."}, "Say that this is the end.", True),
    ("startend:end_checker", {"end_phrase": "This will fail."}, "This will fail. Yes.", False),
    ("detectable_format:title", {}, "<<Song of Joy>>\nLa la.", True),
    ("detectable_format:title", {}, "At the end?\n<<This is the title>>", True),
    ("detectable_format:title", {}, "<< >>\nThere is none.", False),
    ("detectable_format:title", {}, "<<This is not one.\nA paragraph.>>", False),
    ("keywords:letter_frequency", letters("T", LEAST, 4), "There is the T. Four T's.", True),
    ("keywords:letter_frequency", letters("a", LESS, 4), "asdfghjkl!!aA", True),
    ("keywords:letter_frequency", letters("p", LEAST, 4), "asdfghjkl!!aA", False),
    ("keywords:letter_frequency", letters("#", LEAST, 4), "#one #two #three #four", True),
    ("keywords:letter_frequency", letters("#", LEAST, 4), "#one #two #three", False),
    ("change_case:english_capital", {}, "THIS IS AN ENGLISH SENTENCE. ALL OF IT!!! GREAT.", True),
    ("change_case:english_capital", {}, "Every Word Is Capitalized.", False),
    ("change_case:english_lowercase", {}, "every letter is lowercase.", True),
    ("change_case:english_lowercase", {}, "Almost every letter is lowercase.", False),
    ("change_case:capital_word_frequency", capitals(LEAST, 3),
     "HERE there are THREE FUlly CAPITAL words.", True),
    ("change_case:capital_word_frequency", capitals(LESS, 5),
     "THERE are Four FULLY CAPITAL WORDS. Many Are Only Partially So.", True),
    ("change_case:capital_word_frequency", capitals(LESS, 4),
     "THERE are Four FULLY CAPITAL WORDS. Many Are Only Partially So.", False),
    ("punctuation:no_comma", {}, "Every sentence is short.", True),
    ("punctuation:no_comma", {}, "Since the start, people have.", False),
    ("startend:quotation", {}, '\n "This is wrapped." \n', True),
    ("startend:quotation", {}, 'He said "no."', False),
    ("startend:quotation", {}, '"', False),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', True),
    ("detectable_format:json_format", {}, '{"a": 1', False),
    ("detectable_format:json_format", {}, 'Here: {"a": 1}', False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "kwargs", "answer", "expected"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_a_case(kind, kwargs, answer, expected):
    assert follows(answer, kind, kwargs) is expected


@pytest.mark.parametrize(
    ("text", "count"),  # as NLTK counts
    [
        ("BIG NEWS—BUY NOW", 4),
        ("WAIT...WHAT", 2),
        ("THE R&D TEAM", 4),
        ("Q&A WITH AT&T", 5),
        ("I CANNOT GO", 4),
        ("GIMME IT, I'M GONNA STOP.", 8),
        ("DON'T STOP, IT'S A:5", 6),
        ("READ 'THE BOOK' NOW, WELL-KNOWN", 5),
        ("THE U.S.A. AND Cannot", 3),
    ],
)
def test_words_in_capitals_are_counted(text, count):
    kind = "change_case:capital_word_frequency"
    assert follows(text, kind, capitals(LEAST, count))
    assert not follows(text, kind, capitals(LEAST, count + 1))


def test_every_kind_has_cases():
    assert len(CHECKS) == 25
    assert {case[0] for case in CASES} == set(CHECKS)
    for kind, kwargs, *_ in CASES:
        assert set(kwargs) == set(ARGUMENTS.get(kind, "").split())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("xx,x. xx,x! xx/x. x{x}x? x.", 5),
        ("xx,x! xxxx. x(x)x?", 3),
        ("xx-x]xx,x! x{x}xx,x.", 2),
        ("Dr. Smith met Mr. Jones at 5 p.m. yesterday. They talked.", 2),
        ('He said "Go." Then he left... and came back. At last!', 3),
        ("It costs 3.50 dollars, e.g. in the U.S. today.", 1),
        ("He lives in the U.S. He likes it.", 2),
        ("1. apples\n2. pears\n3. plums", 1),
        ("**All is done.** We can go.", 2),
        ("He works at Apple Inc. He likes it.", 2),
        ("He works at Apple Inc. in town.", 1),
        ("She has a Ph.D. She teaches.", 2),
        ("**1. Title**\nText one. Text two.", 2),
        ("I. Intro\nII. Body", 1),
        ("We met at 5 p.m. It was late.", 2),
        ("1) apples\n2) pears", 1),
        ("1. First item.\n2. Second item.", 2),
        ("No. I won't.", 2),
        ("It is -3.5 C. Stay in.", 2),
        ("He threw it 5 m. It broke.", 2),
        ("See No. 5 in the list. It says no. Nobody minds.", 3),
    ],
)
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


def test_the_loose_criterion_ignores_first_and_last_lines_and_asterisks():
    strict = {
        "instruction_id_list": ["change_case:english_lowercase", "startend:quotation"],
        "kwargs": [{}, {"keywords": None}],
    }
    loose = {**strict, "loose": True}
    answer = 'Sure! Here it is:\n"**all of this is in small letters**"'
    assert judge(strict, answer) == (0.0, "change_case:english_lowercase, startend:quotation")
    assert judge(loose, answer) == (1.0, "")
    assert judge(loose, "  ")[0] == 0.0  # an empty answer follows nothing
    assert judge(strict, '"Sure"') == (0.5, "change_case:english_lowercase")


def test_white_space_around_an_answer_is_no_paragraph():
    kind = "length_constraints:nth_paragraph_first_word"
    metadata = {"instruction_id_list": [kind], "kwargs": [nth(2, 1, "weekend")]}
    assert judge(metadata, "\n\nWeekend is near.\n\nSecond one.\n") == (1.0, "")


def test_rows_that_cannot_be_judged():
    for metadata in ({}, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}):
        with pytest.raises(ValueError, match="`kwargs` must have one entry for each"):
            judge(metadata, "a")
    with pytest.raises(ValueError, match="unknown kind of instruction 'a:b'"):
        follows("a", "a:b", {})
    with pytest.raises(ValueError, match="number_words: no argument 'num_words'"):
        follows("a", "length_constraints:number_words", {"relation": LESS, "num_words": None})
    with pytest.raises(ValueError, match="number_words: relation='about' is not valid"):
        follows("a", "length_constraints:number_words", {"relation": "about", "num_words": 3})
