"""Stages in the ledger: their sizes, their ends, and that no group is lost between two of them."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.driven import DrivenLedger, config, verdict
from tests.paths import ROOT
from tramontane.config import Config, load_config, parse
from tramontane.controller.stages import Stages
from tramontane.data.curriculum import Curriculum
from tramontane.errors import InputError
from tramontane.types import Completion, FilterReason, Group, Problem, Verdict

STAGES = [
    {"name": "short", "until": {"updates": 3}, "temperature": 0.7, "eps_high": 0.3},
    {"name": "long", "l_max": 30, "n_batch": 4, "n_async": 6, "n_minibatch": 2},
]


def test_each_stage_samples_and_batches_by_its_own_sizes(forty: Path) -> None:
    run = DrivenLedger(config(forty, stages=STAGES))
    while len(run.trained) < 12:
        run.hand_out()
        for group in [*run.ledger.outstanding]:
            if run.ledger.outstanding[group].requests:
                run.generate(group, [True, False])
        run.form()
        run.train()
    assert [len(b.groups) for b in run.trained] == [4] * 3 + [2] * 9
    for number, batch in enumerate(run.trained):
        settings = batch.settings
        assert batch.version == number
        names = (settings.stage, settings.temperature, settings.options.eps_high)
        assert names == (("short", 0.7, 0.3) if number < 3 else ("long", 1.0, 0.28))
        assert (settings.l_max, settings.n_minibatch) == ((10, 8) if number < 3 else (30, 2))
        for group in batch.groups:
            stage, sampling = run.handed_out[group.id]
            assert stage == (number >= 3)
            assert (sampling.max_tokens, sampling.temperature) == [(10, 0.7), (30, 1.0)][stage]
    assert run.events == ["stage 'short' ended after update 3 (3 updates); stage 'long' begins"]


@pytest.mark.parametrize(
    ("until", "right", "tokens"),
    [({"solved": 0.75}, [True, True], 3), ({"at_ceiling": 0.5}, [True, False], 8)],
)
def test_a_metric_ends_a_stage_after_whole_batches_of_the_groups_handed_out(
    forty: Path, until: dict[str, Any], right: list[bool], tokens: int
) -> None:
    """One of four groups is plain; `right` and `tokens` describe the other groups. Groups that are
    all right are filtered, and count."""
    stages = [{**STAGES[0], "until": {**until, "window": 2}}, STAGES[1]]
    run = DrivenLedger(config(forty, stages=stages, pipeline={"max_staleness": 8, "n_async": 36}))

    def generate_some(until_ready: int) -> None:
        number = 0
        while len(run.ledger.ready) < until_ready:
            run.hand_out()
            group = next(g for g, o in run.ledger.outstanding.items() if o.requests)
            plain = number % 4 == 0
            run.generate(group, [True, False] if plain else right, 3 if plain else tokens)
            number += 1

    for update in (1, 2):
        generate_some(4)
        run.form()
        run.hand_out()
        run.train()
        # Half the plain groups' completions are right: of all, 7/8 and 1/2.
        assert (run.ledger.stages.end == 12) == (update == 1)
    outstanding, before = len(run.ledger.outstanding), len(run.handed_out)
    batches = -(-outstanding // 4)
    assert outstanding > 8 and run.ledger.stages.end == 2 + batches
    while not run.events:
        for group in [*run.ledger.outstanding]:
            if run.ledger.outstanding[group].requests:
                run.generate(group, [True, False])
        run.hand_out()
        run.form()
        if run.formed:
            run.train()
        run.hand_out()
    assert len(run.trained) == 2 + batches
    short = {g for g, (stage, _) in run.handed_out.items() if stage == 0}
    assert len(short) - before == 4 * batches - outstanding
    trained = [g.id for b in run.trained for g in b.groups]
    assert len(trained) == len(set(trained)) and set(trained) <= short
    assert len(trained) + run.filtered["no diversity"] == len(short)
    metric = "solved" if "solved" in until else "at the ceiling"
    assert f"({metric}: 0." in run.events[0]


def graded(*right: bool) -> Group:
    """A group of finished and graded completions, each shorter than the ceiling."""
    completions = [Completion(0, i, [1], [1], [0.0], [0], "stop") for i in range(len(right))]
    return Group(0, Problem("p", "math", ""), completions, [verdict(r) for r in right])


def test_a_stage_ends_when_its_metric_reaches_the_limit_over_its_window(forty: Path) -> None:
    until = {"solved": 0.5, "window": 2}
    sections = [
        {"name": "a", "until": until},
        {"name": "b", "until": {"updates": 3}},
        {"name": "c"},
    ]
    run_config = config(forty, stages=sections)
    stages, resumed = Stages(run_config), Stages(run_config)
    none, half = [graded(False, False)], [graded(True, False)]
    unjudged = replace(graded(False), verdicts=[Verdict(0.0, {}, "unscorable")])
    half.append(unjudged)  # neither solved nor not
    for version, groups in enumerate((half, none, half), start=1):
        stages.trained(groups, version, outstanding=5)
        assert stages.end == 12  # unknown: at most 1/2 in one update, 1/4 over two
    resumed.load_state(json.loads(json.dumps(stages.state())))
    for current in (stages, resumed):
        current.trained(half, 4, outstanding=5)  # 1/2 over two updates
        assert current.end == 4 + 2  # five groups fill two batches of four
        current.trained(none, 5, outstanding=9)
        assert current.end == 6  # fixed
        assert current.begin_next(6) == (
            "stage 'a' ended after update 6 (solved: 0.500 of 4 completions); stage 'b' begins"
        )
        assert (current.name, current.end, current.last) == ("b", 6 + 3, False)
        current.begin_next(9)
        assert (current.name, current.end, current.last) == ("c", 12, True)


def test_a_stage_does_not_end_by_a_metric_of_no_completions(forty: Path) -> None:
    sections = [
        {"name": "a", "until": {"solved": 0.5, "window": 1}},
        {"name": "b", "until": {"updates": 1}},
        {"name": "c"},
    ]
    stages = Stages(config(forty, stages=sections))
    unjudged = replace(graded(False), verdicts=[Verdict(0.0, {}, "unscorable")])
    for groups in ([], [unjudged]):
        stages.trained(groups, 1, outstanding=0)
        assert stages.end == 12
    stages.trained([unjudged, graded(True)], 2, outstanding=0)
    assert stages.end == 2
    assert stages.begin_next(2).startswith("stage 'a' ended after update 2 (solved: 1.000 of 1 ")
    assert stages.begin_next(3).startswith("stage 'b' ended after update 3 (1 update);")


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    metric=st.sampled_from([None, {"solved": 0.4}, {"at_ceiling": 0.3}]),
    batches=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    flights=st.lists(st.integers(1, 10), min_size=4, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_stages_drain_and_each_keeps_the_staleness_bound(
    forty: Path,
    staleness: int,
    lengths: list[int],
    metric: dict[str, Any] | None,
    batches: list[int],
    flights: list[int],
    seed: int,
) -> None:
    """Any order of completions, any lag of the trainer, and a snapshot restored now and then."""
    rng = random.Random(seed)
    stages = []
    for number, length in enumerate([*lengths, 0]):
        until = (
            {"updates": length} if metric is None or number % 2 else {**metric, "window": length}
        )
        sizes = {"n_batch": 2 * batches[number], "n_async": 2 * flights[number]}
        stages.append({"name": str(number), "until": until if length else None, **sizes})
    run = DrivenLedger(config(forty, stages=stages, pipeline={"max_staleness": staleness}))
    born: dict[int, int] = {}  # group → version that the generator held
    lag = rng.randint(0, 2)
    for _ in range(3000):
        if len(run.trained) == 12:
            break
        ledger = run.ledger
        run.hand_out()
        for group in ledger.outstanding:
            born.setdefault(group, ledger.generator_version)
        flying = [g for g, o in ledger.outstanding.items() if o.requests]
        if flying and rng.random() < 0.8:
            run.generate(
                rng.choice(flying), rng.choice([[True, True], [True, False]]), rng.choice([3, 9])
            )
        run.form()
        if run.formed and (len(run.formed) > lag or not flying or rng.random() < 0.3):
            run.train()
        if run.trained and rng.random() < 0.05:  # killed, and resumed from a snapshot
            state = run.resume()
            # What was drawn after a synchronous round's state is drawn again.
            for group in [g for g in run.handed_out if g >= state.next_group]:
                del run.handed_out[group], born[group]
    assert len(run.trained) == 12
    seen = [g.id for b in run.trained for g in b.groups]
    assert len(seen) == len(set(seen))
    for version, batch in enumerate(run.trained):
        assert batch.version == version
        (stage,) = {run.handed_out[g.id][0] for g in batch.groups}
        assert batch.settings.stage == str(stage)
        assert 2 * len(batch.groups) == stages[stage]["n_batch"]
        assert all(version - born[g.id] <= staleness for g in batch.groups)
    # Every group handed out is trained on, filtered, or still in the ledger.
    left = len(run.ledger.outstanding) + len(run.ledger.filtered)
    assert len(seen) + run.filtered.total() + left == len(run.handed_out)
    assert set(run.filtered) <= {"no diversity"}


def test_a_stage_without_problems_ends_and_its_groups_are_left_over(forty: Path) -> None:
    two = forty.with_name("two.jsonl")
    two.write_text("".join(line + "\n" for line in forty.read_text().splitlines()[:2]))
    curriculum = {"curriculum": {"retire_after": 1}}
    stages = [
        {"name": "few", "until": {"updates": 5}, "data": {"train": str(two)}},
        {"name": "more"},
    ]
    run = DrivenLedger(config(forty, data=curriculum, stages=stages, pipeline={"max_staleness": 0}))
    run.hand_out()
    groups = {g: o.problem.id for g, o in run.ledger.outstanding.items()}
    assert sorted(groups.values()) == ["p0", "p0", "p1", "p1"]
    kept = next(g for g, id in groups.items() if id == "p0")
    later = next(g for g, id in groups.items() if id == "p0" and g != kept)
    run.generate(kept, [True, False])
    for group in groups:
        if group != kept:
            run.generate(group, [True, True])
    assert later > kept  # the newest visit says that it is solved
    assert run.ledger.problems.counts(0, 0)["problems_retired"] == 2
    run.hand_out()
    assert run.ledger.exhausted and run.ledger.stage_is_over
    run.hand_out()
    assert run.events == [
        "stage 'few' ended after update 0 (no problem is left in it); stage 'more' begins"
    ]
    left_over = FilterReason("left over", "too few for a batch, and no problem is left")
    assert {g.id: reason for g, reason in run.ledger.filtered} == {
        g: left_over if g == kept else FilterReason("no diversity") for g in groups
    }
    assert run.ledger.problems.next(1, 0).id not in ("p0", "p1")
    assert len(run.ledger.outstanding) == 4


# --- the config


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [{"name": "a", "until": {"updates": 3}}, {"name": "b", "n_batch": 7}],
            r"stages\.1\.n_batch: group_size 2 does not divide n_batch 7",
        ),
        ([{"name": "a", "n_minibatch": 6}], r"stages\.0\.n_minibatch: .*does not divide n_batch"),
        ([{"name": "a", "l_cache": 11}], r"stages\.0\.l_cache: l_cache 11 is above l_max 10"),
        ([{"name": "a", "n_async": 1}], r"stages\.0\.n_async: n_async 1 is below group_size"),
        ([{"name": "a"}, {"name": "b"}], r"stages\.0\.until: not given"),
        ([{"name": "a", "until": {"updates": 3}}], r"stages\.0\.until: leave it out"),
        (
            [{"name": "a", "until": {"updates": 3, "solved": 0.5}}, {"name": "b"}],
            r"stages\.0\.until: give exactly one of",
        ),
        (
            [{"name": "a", "until": {"updates": 12}}, {"name": "b"}],
            r"stages\.1: stage 'b' would never begin: .* 12 updates",
        ),
        ([{"name": "a", "until": {"updates": 1}}, {"name": "a"}], r"stages\.0\.name: two"),
        (
            [{"name": "a", "until": {"solved": 0.5}}, {"name": "b"}],
            r"stages\.0\.until: all completions are recorded trajectories .* a number of `updates`",
        ),
        ([{"name": "a", "l_maxx": 3}], r"stages\.0\.l_maxx: unknown key; did you mean 'l_max'"),
        ([{"name": "a", "temperature": 0}], r"stages\.0\.temperature: .*greater than 0"),
        (
            [{"name": "a", "data": {"min_pass_rate": 0.5, "max_pass_rate": 0.1}}],
            r"stages\.0\.data\.m.._pass_rate: min_pass_rate 0\.5 is above",
        ),
    ],
)
def test_errors_of_stages_name_their_key(forty: Path, stages: list[Any], message: str) -> None:
    raw = config(forty).model_dump() | {"stages": stages}
    if "trajectories" in message:
        raw["data"]["trajectories"] = {"sources": [str(forty)], "share": 1.0}
    with pytest.raises(InputError, match=message):
        parse(Config, raw, "run.yaml")


@pytest.mark.parametrize(("max_staleness", "repeatable"), [(0, True), (1, False)])
def test_only_synchronous_runs_ask_for_repeatable_updates(
    forty: Path, max_staleness: int, repeatable: bool
) -> None:
    run_config = config(forty, pipeline={"max_staleness": max_staleness})
    assert Stages(run_config).batch_settings.repeatable is repeatable


def test_a_config_without_stages_is_its_own_only_stage(forty: Path) -> None:
    plain = config(forty)
    assert plain.by_stage() == (plain,)
    assert Stages(plain).batch_settings.stage == ""
    first, second = config(forty, stages=STAGES).by_stage()
    assert first.pipeline == plain.pipeline
    assert second.trainer == plain.trainer
    assert (second.pipeline.l_max, second.pipeline.l_cache, second.pipeline.minibatch) == (30, 2, 2)
    assert parse(Config, config(forty, stages=STAGES).model_dump(mode="json"), "dump") == config(
        forty, stages=STAGES
    )


@pytest.mark.parametrize("name", ["medium", "small"])
def test_shipped_configs_have_the_papers_stages(name: str) -> None:
    file = ROOT / f"configs/{name}.yaml"
    stages = load_config(file, ["model=any", "data.train=any.jsonl"]).by_stage()
    sizes = [at.pipeline for at in stages]
    thresholds = {"medium": [16384, 24576, 32768], "small": [32768]}[name]
    assert [p.l_max - p.l_cache for p in sizes] == thresholds
    assert [p.n_batch for p in sizes] == {"medium": [8192, 4096, 2048], "small": [2048]}[name]
    assert all(p.minibatch == p.n_batch and p.n_async <= 2 * p.n_batch for p in sizes)
    assert {at.generator.temperature for at in stages} == {0.7 if name == "medium" else 1.0}
    for at in stages:
        low, high = {"medium": (0.26, 0.28), "small": (0.3, 0.3)}[name]
        assert low <= at.trainer.objective.magistral.eps_high <= high


# --- problems and their records


def test_retired_problems_do_not_come_back_and_those_too_hard_do(forty: Path) -> None:
    rules = {"retire_after": 2, "too_hard": {"after": 2, "return_after": 5}}
    problems = Curriculum(config(forty, data={"limit": 3, "curriculum": rules}).by_stage())
    ids = sorted(p.id for p in problems.streams[0].problems or ())
    easy, hard, between = (Problem(id, "math", "") for id in ids)

    def visit(version: int) -> None:
        problems.note(easy, [verdict(True)] * 2, 0, version)
        problems.note(hard, [verdict(False)] * 2, 0, version)
        problems.note(between, [verdict(True), verdict(False)], 0, version)

    def drawn(version: int) -> set[str]:
        found = [problems.next(0, version) for _ in range(9)]
        return {p.id for p in found if p}

    visit(0)
    assert drawn(0) == set(ids)
    visit(1)
    assert drawn(1) == {between.id}
    assert problems.counts(0, 1) == {
        "problems_visited": 3,
        "problems_retired": 1,
        "problems_resting": 1,
    }
    assert drawn(5) == {between.id}
    assert drawn(6) == {between.id, hard.id}
    problems.note(hard, [verdict(False)] * 2, 0, 6)  # still too hard: it rests again
    assert drawn(7) == {between.id}
    state = json.loads(json.dumps(problems.state()))
    again = Curriculum(config(forty, data={"limit": 3, "curriculum": rules}).by_stage())
    again.load_state(state)
    assert [again.next(0, v).id for v in range(7, 20)] == [
        problems.next(0, v).id for v in range(7, 20)
    ]
    assert [*again.records()] == [*problems.records()]
    row = next(r for r in problems.records() if r["id"] == easy.id)
    assert (row["pass_rate"], row["samples"], row["visits"], row["retired"]) == (1.0, 4, 2, True)


def test_resting_problems_come_back_with_the_stage_or_when_no_other_is_left(forty: Path) -> None:
    rules = {"retire_after": 1, "too_hard": {"after": 1, "return_after": "stage"}}
    stages = [{"name": "a", "until": {"updates": 1}}, {"name": "b"}]
    data = {"limit": 2, "curriculum": rules}
    problems = Curriculum(config(forty, data=data, stages=stages).by_stage())
    ids = sorted(p.id for p in problems.streams[0].problems or ())
    hard, easy = (Problem(id, "math", "") for id in ids)
    problems.note(hard, [verdict(False)], 0, 0)
    assert {problems.next(0, 100).id for _ in range(4)} == {easy.id}
    assert {problems.next(1, 100).id for _ in range(8)} == set(ids)
    problems.note(easy, [verdict(True)], 0, 0)
    assert problems.next(0, 100).id == hard.id  # rather than nothing
    problems.note(hard, [verdict(True)], 0, 0)
    assert problems.next(0, 100) is None
    assert problems.next(1, 100) is None


def test_slices_by_recorded_and_by_running_pass_rates(tmp_path: Path) -> None:
    file, rates = tmp_path / "rated.jsonl", tmp_path / "problems.jsonl"
    rows = [
        {"id": f"p{i}", "problem": f"{i}?", "answer": "1", "pass_rate": i / 4} for i in range(5)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rates.write_text(json.dumps({"id": "p0", "pass_rate": 0.5}) + "\n")

    def ids(problems: Curriculum, stage: int) -> set[str]:
        return {problems.next(stage, 0).id for _ in range(30)}

    stages = [
        {"name": "easy", "until": {"updates": 1}, "data": {"min_pass_rate": 0.5}},
        {"name": "hard", "until": {"updates": 1}, "data": {"max_pass_rate": 0.25}},
        {
            "name": "now",
            "until": {"updates": 1},
            "data": {"max_pass_rate": 0.25, "pass_rate": "running"},
        },
        {"name": "other", "data": {"pass_rates": str(rates), "min_pass_rate": 0.5}},
    ]
    problems = Curriculum(config(file, stages=stages).by_stage())
    problems.note(Problem("p0", "math", ""), [verdict(True)], 0, 0)
    problems.note(Problem("p4", "math", ""), [verdict(False)], 0, 0)
    assert ids(problems, 0) == {"p2", "p3", "p4"}
    assert ids(problems, 1) == {"p0", "p1"}
    assert ids(problems, 2) == {"p1", "p4"}
    assert ids(problems, 3) == {"p0", "p2", "p3", "p4"}


def test_stages_draw_other_generated_problems_and_return_where_they_left_a_source() -> None:
    levels = [[3, 4], None, [3, 4]]
    stages: list[dict[str, Any]] = [
        {"name": name, "until": {"updates": 1}, "data": {"playground": {"levels": found}}}
        for name, found in zip("abc", levels, strict=True)
    ]
    del stages[-1]["until"]
    data = {"train": "playground:", "playground": {"levels": [5, 6], "languages": ["fr"]}}
    problems, same = (
        Curriculum(config("playground:", data=data, stages=stages).by_stage()) for _ in range(2)
    )
    drawn = [[problems.next(stage, 0) for _ in range(30)] for stage in range(3)]
    found = [{p.difficulty for p in group if p} for group in drawn]
    assert found == [{3, 4}, {5, 6}, {3, 4}]
    assert {p.language for group in drawn for p in group if p} == {"fr"}
    assert [same.next(0, 0) for _ in range(60)] == drawn[0] + drawn[2]
    again = Curriculum(config("playground:", data=data, stages=stages).by_stage())
    again.load_state(json.loads(json.dumps(problems.state())))
    assert [again.next(stage, 0) for stage in (0, 1)] == [problems.next(s, 0) for s in (0, 1)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "playground:", "curriculum": {"retire_after": 2}}, r"curriculum: .* no end"),
        ({"train": "playground:", "min_pass_rate": 0.1}, r"^data: 'playground:' has no end"),
        ({"max_pass_rate": 0.5}, r"^data: 40 of 40 problems .* have no pass_rate"),
        ({"pass_rates": "none.jsonl", "max_pass_rate": 0.5}, r"none\.jsonl': no such file"),
    ],
)
def test_missing_pass_rates_and_endless_sources_are_refused(
    forty: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Curriculum(config(forty, data=data).by_stage())


def test_an_empty_slice_is_refused_by_its_stage(tmp_path: Path) -> None:
    file = tmp_path / "rated.jsonl"
    file.write_text(json.dumps({"problem": "1?", "answer": "1", "pass_rate": 0.5}) + "\n")
    stages = [{"name": "a", "until": {"updates": 1}}, {"name": "b", "data": {"min_pass_rate": 0.8}}]
    with pytest.raises(InputError, match=r"^stages\.1\.data: of 1 problems .* from 0\.8 to 1"):
        Curriculum(config(file, stages=stages).by_stage())
