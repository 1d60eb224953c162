"""All shipped studies: their plans, their page, and their smoke test."""

import inspect
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify

import tramontane
from tests.paths import ROOT
from tests.studies.test_studies import WALKS
from tramontane.cli import app
from tramontane.cli.studies import study as study_commands
from tramontane.config import DataConfig
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.studies.measures import MEASURES
from tramontane.studies.plan import (
    GROUP_SHARE,
    Plan,
    finished_runs,
    other_runs,
)
from tramontane.studies.registry import register, registered, registration
from tramontane.studies.reproduction import (
    DEFAULT_SEEDS,
    default_plans,
    page_texts,
    plan_all,
    smoke_plans,
    undecided,
    verified,
    write_report,
)
from tramontane.studies.runner import run_all, run_smoke
from tramontane.studies.study import LOOKS, Claim, config_of, load_study, names, names_in
from tramontane.studies.verdicts import judge
from tramontane.sweeps.settings import settings_file, write_settings


def test_no_study_has_the_name_of_a_command_on_runs():
    """`tramontane study NAME` would mean the command."""
    registered = study_commands.registered_commands
    commands = {command.name or command.callback.__name__ for command in registered}
    assert {"run", "landscape", "length", "curve"} <= commands
    assert not commands & set(names())


@pytest.mark.parametrize("chosen", ["magistral", "siblings"])
def test_the_default_budgets_of_a_set_take_at_most_six_and_a_half_hours(chosen, tmp_path):
    planned = plan_all(tmp_path, seeds=3, chosen=chosen)
    assert {plan.study.set for plan in planned.values()} == {chosen}
    assert sum(plan.minutes for plan in planned.values()) <= 390
    assert {plan.finished for plan in planned.values()} == {0}
    assert all(len([*p.runs()]) == 3 * len(p.study.arms) for p in planned.values())


def test_a_budget_is_shared_by_all_studies(tmp_path):
    planned = plan_all(tmp_path, seeds=2, budget=250)
    checkpoints = {"eight_bit_smollm2", "restore_smollm2", "smollm2"}
    assert {*names()} - {*planned} == {*names_in("checkpoints")} == checkpoints
    assert sum(plan.minutes for plan in planned.values()) == pytest.approx(250)
    shares = {plan.share for plan in planned.values()}
    assert len(shares) == 1 and 0 < shares.pop() < 1


def test_the_page_says_what_has_not_been_run(tmp_path):
    page = tmp_path / "docs/reproduction.md"
    page.parent.mkdir()
    assert write_report(default_plans(tmp_path / "studies"), page) == {}
    text = page.read_text()
    claims = [claim for name in names() for claim in load_study(name).claims]
    assert text.count("| not run yet |") == len(claims)
    assert f"not been run yet: {len(claims)}" in text
    assert all(f"`tramontane study {name}`" in text for name in names())
    assert all(row["paper"] in text for row in page_texts()["further"])
    # Each row of the first table leads to the heading of its study.
    headings = {slugify(heading, "-") for heading in re.findall("^### (.*)$", text, re.M)}
    links = re.findall(r"\(#(.*?)\)", text)
    assert len(links) == len(claims) and set(links) == headings


@pytest.fixture
def page(tmp_path):
    """A copy of the page that is shipped, and of its data."""
    copied = tmp_path / "docs/reproduction.md"
    shutil.copytree(ROOT / "docs/reproduction", copied.with_suffix(""))
    return copied


@pytest.fixture(scope="module")
def studies_undecided(tmp_path_factory):
    """By the data that are shipped, without runs."""
    return undecided(tmp_path_factory.mktemp("studies"), ROOT / "docs/reproduction.md")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of all studies, written once from the data that are shipped, and its results."""
    copied = tmp_path_factory.mktemp("written") / "docs/reproduction.md"
    shutil.copytree(ROOT / "docs/reproduction", copied.with_suffix(""))
    for plot in copied.with_suffix("").glob("*.svg"):
        plot.unlink()
    return copied, write_report(default_plans(copied.parent / "studies"), copied)


@pytest.mark.slow
def test_results_of_runs_made_elsewhere_stay_on_the_page(written):
    page, results = written
    shipped = {file.stem for file in page.with_suffix("").glob("*.json")}
    assert results.keys() == shipped and "weight_plane" in shipped
    assert page.read_text() == (ROOT / "docs/reproduction.md").read_text()
    for file in (ROOT / "docs/reproduction").iterdir():
        assert (page.with_suffix("") / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_command_on_the_page_makes_as_many_seeds_as_its_result(written):
    page, results = written
    default = inspect.signature(tramontane.study).parameters["seeds"].default
    assert default == DEFAULT_SEEDS
    assert {result.seeds for result in results.values()} > {default}
    for name, result in results.items():
        seeds = "" if result.seeds == default else f" --seeds {result.seeds}"
        assert f"`tramontane study {name}{seeds}`" in page.read_text()


@pytest.mark.slow
def test_the_page_counts_updates_and_no_lines_of_a_function(written):
    sizes = re.findall(r"^`.*?`: \d+ seeds?(.*) for each arm", written[0].read_text(), re.M)
    assert "" in sizes and all(re.fullmatch(r"( of [\d to]+ updates)?", size) for size in sizes)


def write_one(name, page, tmp_path):
    """Write the page of one study, which leaves the data of the others; its results."""
    return write_report(default_plans(tmp_path / "studies", [name]), page)


@pytest.mark.slow
def test_results_of_other_arms_leave_the_page(page, tmp_path):
    file = page.with_suffix("") / "weight_plane.json"
    found = json.loads(file.read_text())
    next(iter(found["study"]["arms"].values()))["steps"] = 1
    file.write_text(json.dumps(found))
    assert write_one("weight_plane", page, tmp_path) == {}
    assert not list(page.with_suffix("").glob("weight_plane*"))
    assert "`tramontane study weight_plane`: not run yet." in page.read_text()


@pytest.mark.slow
def test_results_with_another_base_do_not_stay_on_the_page(page, tmp_path):
    file = page.with_suffix("") / "advantage_normalization.json"
    found = json.loads(file.read_text())
    assert "advantage_normalization" in write_one("advantage_normalization", page, tmp_path)
    found["config"]["pipeline"]["updates"] += 1
    file.write_text(json.dumps(found))
    assert write_one("advantage_normalization", page, tmp_path) == {}


def finish_runs(out, seeds):
    """Finished runs of `weight_plane`, all figures of seed n 0.25 + n."""
    study = load_study("weight_plane")
    plan = Plan(study, out / "weight_plane", seeds.stop)
    for arm in study.arms:
        for seed in seeds:
            folder = plan.folder(arm, seed)
            folder.mkdir(parents=True)
            write_settings(folder, plan.settings(arm, seed, folder))
            measures = dict.fromkeys(study.measures, 0.25 + seed)
            folder.joinpath("summary.json").write_text(
                json.dumps({"measures": measures, "minutes": 1})
            )
            row = {study.over: 1} | dict.fromkeys(study.plots, 0.5)
            folder.joinpath("metrics.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("seeds", "counts"), [(2, False), (3, False), (5, False), (6, True), (7, True)]
)
@pytest.mark.slow
def test_other_runs_of_as_many_seeds_do_not_count(seeds, counts, page, tmp_path):
    recorded = json.loads((page.with_suffix("") / "weight_plane.json").read_text())
    assert recorded["seeds"] == 3
    finish_runs(tmp_path / "studies", range(seeds))
    result = write_one("weight_plane", page, tmp_path)["weight_plane"]
    assert result.seeds == (6 if counts else 3)
    measured = [0.25 + n for n in range(6)]
    for name, arms in result.values.items():
        for arm, values in arms.items():
            assert values == (measured if counts else recorded["values"][name][arm])


@pytest.mark.slow
def test_edited_figures_are_not_sealed_anew(page, tmp_path):
    file = page.with_suffix("") / "weight_plane.json"
    data = json.loads(file.read_text())
    next(iter(data["values"]["slope"].values()))[0] += 0.01
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="weight_plane.json: arm .* seed 0: the figures"):
        write_one("weight_plane", page, tmp_path)
    assert json.loads(file.read_text()) == data


@pytest.mark.slow
def test_later_seeds_extend_results_made_elsewhere(page, tmp_path):
    file = page.with_suffix("") / "weight_plane.json"
    before = json.loads(file.read_text())["values"]
    finish_runs(tmp_path / "studies", range(3, 5))
    result = write_one("weight_plane", page, tmp_path)["weight_plane"]
    assert result.seeds == 3  # seeds between two looks do not count yet
    finish_runs(tmp_path / "studies", range(5, 6))
    for _ in range(2):  # a second time changes nothing
        result = write_one("weight_plane", page, tmp_path)["weight_plane"]
        assert result.seeds == 6
        for name, arms in result.values.items():
            for arm, values in arms.items():
                assert values == before[name][arm] + [3.25, 4.25, 5.25]
        assert all(verdict.seeds == 6 for _, verdict in result.verdicts)
        assert verified("weight_plane", page)[1] == []


def test_runs_of_other_settings_are_left_out(page, tmp_path):
    study = load_study("weight_plane")
    out = tmp_path / "studies/weight_plane"
    small = Plan(study, out, 1, share=0.5)
    for arm, seed, folder in small.runs():
        folder.mkdir(parents=True)
        write_settings(folder, small.settings(arm, seed, folder))
        measures = dict.fromkeys(study.measures, 0.25)
        folder.joinpath("summary.json").write_text(json.dumps({"measures": measures, "minutes": 1}))
        row = {study.over: 1} | dict.fromkeys(study.plots, 0.5)
        folder.joinpath("metrics.jsonl").write_text(json.dumps(row) + "\n")
    default = Plan(study, out, 1)
    assert other_runs(default) == [folder for _, _, folder in default.runs()]
    assert not any(finished_runs(default).values()) and other_runs(small) == []
    published = page.with_suffix("") / "weight_plane.json"
    before = published.read_bytes()
    write_report({"weight_plane": default}, page)
    assert published.read_bytes() == before
    # The recorded result, of the whole budget, stays when a part of it is reported too.
    assert write_report({"weight_plane": small}, page)["weight_plane"].share == 1
    # Without it, the page says of which part of the budget the figures are.
    published.unlink()
    assert write_report({"weight_plane": small}, page)["weight_plane"].share == 0.5
    assert "0.5 of the study's own budget" in page.read_text()
    assert json.loads(published.read_text())["verdicts"][0]["low"] is None  # one seed
    assert verified("weight_plane", page)[1] == []  # which decides nothing


def test_a_run_may_be_moved_but_its_keys_not_changed(tmp_path):
    study = load_study("agro_offline")
    there, here = Plan(study, tmp_path / "there", 1), Plan(study, tmp_path / "here", 1)
    for (arm, seed, old), (_, _, new) in zip(there.runs(), here.runs(), strict=True):
        new.mkdir(parents=True)
        (new / "summary.json").touch()
        write_settings(new, there.settings(arm, seed, old))
    assert other_runs(here) == []
    folder = here.folder("on-policy", 0)
    settings = yaml.safe_load(settings_file(folder).read_text())
    settings["trainer"]["learning_rate"] = 1.0
    write_settings(folder, settings)
    assert other_runs(here) == [folder]


def test_a_claim_may_compare_an_arm_with_a_number():
    claim = Claim(text="", arm="a", against=0.9, expect="higher", margin=0.01)
    found = judge({"a": [0.98, 1.0, 0.99]}, claim, MEASURES["mismatch"])
    assert found.difference == pytest.approx(0.09)
    # Student's interval of one mean: the number has no error.
    assert found.high - found.difference == pytest.approx(6.964557 * 0.01 / 3**0.5, rel=1e-5)
    assert found.outcome == "holds"


def edited(page, change):
    """The faults of the data of the study of staleness after a change."""
    file = page.with_suffix("") / "staleness.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return verified("staleness", page)[1]


def swap_arms(data):
    values = data["values"]["pass_at_1"]
    values["4 batches"], values["16 batches"] = values["16 batches"], values["4 batches"]


def add_a_claim(data):
    dropped = data["study"]["claims"][0] | {"margin": 0.5}
    data["study"]["claims"].append(dropped)
    data["verdicts"].append(data["verdicts"][0] | {"claim": dropped})


def add_a_seed(data):
    data["seeds"] = 4
    for runs in data["values"]["pass_at_1"].values():
        runs.append(0.9)


def test_the_data_that_are_shipped_verify(page):
    shipped = [file.stem for file in page.with_suffix("").glob("*.json")]
    assert {name: verified(name, page)[1] for name in shipped} == {name: [] for name in shipped}
    assert len((ROOT / "docs/reproduction.md").read_text().splitlines()) < 550


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["registered"].pop(), "changed after its data had been seen"),
        (add_a_claim, "the study no longer has it"),
        (swap_arms, "not those of the run that was recorded"),
        (add_a_seed, "do not count before the next"),
        (lambda data: data["verdicts"][1].update(outcome="holds"), "its data say 'undecided'"),
    ],
)
def test_who_tries_to_fool_the_rule_is_told(page, change, told):
    assert any(told in fault for fault in edited(page, change))


def test_a_claim_that_is_changed_after_its_runs_is_not_judged(tmp_path):
    study = load_study("staleness")
    register(tmp_path, study, config_of(study))
    stricter = study.model_copy(deep=True)
    stricter.claims[1] = stricter.claims[1].model_copy(update={"margin": 0.01})
    reworded = study.claims[0].model_copy(update={"text": "In other words."})
    stricter.claims[0] = reworded
    register(tmp_path, stricter, config_of(study))  # the first registration stays
    known = registered(tmp_path)
    marks = [registration(stricter, claim, config_of(study)) in known for claim in stricter.claims]
    assert marks == [True, False]
    slower = study.model_copy(update={"base": study.base | {"pipeline.updates": 73}})
    assert registration(slower, slower.claims[0], config_of(study)) not in known


def test_an_undecided_claim_says_what_would_decide_it(studies_undecided):
    text = (ROOT / "docs/reproduction.md").read_text()
    needs = dict(re.findall(r"\(#(.*?)\) \|.*\| undecided \((.*)\) \|$", text, re.M))
    assert "| undecided (" in text and "| undecided |" not in text
    single = {s.name: s for s in studies_undecided if s.claims == 1}
    assert len(single) > 3
    for name, study in single.items():
        needed = needs[slugify(load_study(name).title, "-")].replace(",", "")
        seeds, hours = re.fullmatch(r"no effect above .*; (\d+) seeds (.*) h", needed).groups()
        assert int(seeds) in LOOKS or int(seeds) > max(LOOKS)
        if int(seeds) in LOOKS and study.plan.first:
            assert float(hours) == pytest.approx(study.decided, abs=0.06)


def test_the_most_decidable_studies_come_first(studies_undecided):
    found, page = studies_undecided, ROOT / "docs/reproduction.md"
    hours = [study.decided for study in found]
    assert hours == sorted(hours) and len(found) > 10
    assert all(study.plan.seeds in LOOKS and study.hours > 0 for study in found)
    # Recorded seeds are not run again, unless runs are compared at equal time.
    assert {study.name for study in found if not study.plan.first} == {"asynchrony"}
    shipped = [file.stem for file in page.with_suffix("").glob("*.json")]
    decided = {
        name
        for name in shipped
        if all(v.outcome != "undecided" for _, v in verified(name, page)[0].verdicts)
    }
    assert decided.isdisjoint(study.name for study in found)


@cache
def configs_of(name):
    """The plan of a study, and the configs of its arms, none of a study with a function."""
    plan = Plan(load_study(name), Path("studies"), seeds=1)
    return plan, [] if plan.study.runner else [plan.arm_config(*run) for run in plan.runs()]


@pytest.mark.parametrize("name", names())
def test_all_arms_are_measured_by_the_same_problems(name):
    plan, configs = configs_of(name)
    if plan.study.runner or plan.study.shown.keys() <= {"maths", "code", "maths_gain", "code_gain"}:
        return  # cross_domain's figures are of sets of their own
    measured = []
    for config in configs:
        data = config.data
        longest = config.by_stage()[-1].pipeline.l_max
        measured.append((data.eval, data.playground, data.domain, config.evaluation, longest))
    assert all(found == measured[0] for found in measured)


@cache
def loaded(playground, count):
    """How many of `count` problems there are, by the playground's keys as JSON, which most studies
    have in common."""
    data = DataConfig(train="playground:", playground=json.loads(playground))
    return len(load_problems("playground:", data, split="test", limit=count, seed=0))


@pytest.mark.parametrize("name", names())
def test_there_are_as_many_problems_as_an_evaluation_takes(name):
    _, configs = configs_of(name)
    sets = []
    for config in configs:
        sets.append((config.data.playground, config.evaluation.problems))
        sets += [(also.playground, also.problems) for also in config.evaluation.also.values()]
    for playground, count in sets:
        assert loaded(playground.model_dump_json(), count) == count


@pytest.mark.parametrize("name", names())
def test_every_arm_can_be_shrunk_for_the_smoke_test(name, tmp_path):
    plan = Plan(load_study(name), tmp_path, seeds=1)
    if plan.study.runner:
        return
    for arm, seed, folder in plan.runs():
        size = plan.settings(arm, seed, folder)["pipeline"]["group_size"]
        small = replace(plan, small=True).settings(arm, seed, folder)
        assert small["pipeline"]["group_size"] == max(2, size // GROUP_SHARE)
        assert small["pipeline"]["updates"] <= 3 and small["evaluation"]["problems"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_studies_run_on_after_a_failure_and_the_smoke_test_finds_it(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(WALKS))
    arms = {"none": {"drift": 0}, "right": {"drift": "far"}}
    bad.write_text(yaml.safe_dump(WALKS | {"arms": arms}))
    failed = run_smoke(smoke_plans(tmp_path / "smoke", [str(bad), str(good)]), tmp_path / "smoke")
    assert list(failed) == [str(bad)]
    assert re.match(r"right, seed 0: see .*smoke_0.log", failed[str(bad)])
    logs = "".join(log.read_text() for log in (tmp_path / "smoke").glob("*.log"))
    assert "unsupported operand" in logs
    page = (tmp_path / "smoke/good/study.md").read_text()
    assert "without an interval" in page and "Undecided" in page

    plans = {
        path.stem: Plan(load_study(str(path)), tmp_path / path.stem, 1) for path in (bad, good)
    }
    finished = []
    failed = run_all(plans, lambda *facts: finished.append(facts))
    assert list(failed) == ["bad"] and "unsupported operand" in failed["bad"]
    assert [facts[0] for facts in finished].count("good") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one study .* or give --all"),
        (["kv_cache", "--all"], "name one study .* or give --all"),
        (["--all", "--base", "x.yaml"], "--base belongs to a single study"),
        (["kv_cache", "--dry-run"], "--dry-run and --set belong to --all"),
        (["kv_cache", "--set", "siblings"], "--dry-run and --set belong to --all"),
        (["kv_cache", "--budget", "nan"], "--budget nan: give a number"),
        (["collation", "--budget", "5"], "no key that it could change"),
    ],
)
def test_a_study_or_all_of_them_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        app(["study", "run", *arguments], standalone_mode=False)
