"""The optional review by a model of problems that the format rules let pass."""

from collections import Counter

from tests.asking.server import Server, status
from tests.curation.test_difficulty import run


def test_most_votes_decide(tmp_path):
    votes = {
        "fine": ["Verdict: ok"] * 3,
        "outvoted": ["**Verdict:** proof", "verdict: OK", "I think so. Verdict: ok."],
        "proof": ["<think>Verdict: ok?</think>Verdict: proof", "Verdict: ok", "Verdict: proof"],
        "reopened": ["<think>Hm.</think>Verdict: ok<think>Or not? Verdict: proof"] * 3,
        "parts": ["Is it proof? Verdict: multi_part"] * 3,
        "divided": ["Verdict: proof", "Verdict: incomplete", "Verdict: ok"],
        "rambling": ["Perhaps.", "Verdict: unknown", "Verdict: proof"],
        "dead": [status(500, "down")],
    }
    count = Counter()

    def mind(asked, before):
        text = asked["messages"][0]["content"]
        name = next(name for name in votes if f"Problem {name}?" in text)
        assert "<answer>\n4\n</answer>" in text
        count[name] += 1
        return votes[name][(count[name] - 1) % len(votes[name])]

    rows = [{"id": name, "problem": f"Problem {name}?", "answer": "4"} for name in votes]
    tests = {"type": "stdio", "cases": [{"input": "", "output": "1"}]}
    rows.append({"id": "code", "problem": "Print 1.", "tests": tests})
    with Server(mind) as server:
        _, decisions, kept = run(tmp_path, rows, server, "review")
    assert {name: (d["decision"], d["reason"]) for name, d in decisions.items()} == {
        "fine": ("kept", ""),
        "outvoted": ("kept", ""),
        "proof": ("dropped", "proof"),
        "reopened": ("kept", ""),
        "parts": ("dropped", "multi_part"),
        "divided": ("kept", ""),
        "rambling": ("kept", "unreviewed"),
        "dead": ("kept", "unreviewed"),
        "code": ("kept", ""),
    }
    assert decisions["proof"]["detail"] == "votes: proof 2, ok 1"
    assert decisions["dead"]["detail"] == "votes: HTTP 500: down (tried 2 times) 3"
    assert set(kept) == {"fine", "outvoted", "reopened", "divided", "rambling", "dead", "code"}
