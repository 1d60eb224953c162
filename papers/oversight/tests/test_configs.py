"""The shipped configs, the keys' descriptions, and faults that need no model."""

from pathlib import Path

import pytest

from tests.runs import begun, small_config
from tests.test_first_checks import check, check_refused
from tramontane.config import Config, Section, load_section
from tramontane.config.asking import CheckpointModel
from tramontane.config.reference import Entry, walk
from tramontane.config.section import descriptions
from tramontane.config.sft import SFTConfig
from tramontane_oversight.config import LocalModel, OversightConfig
from tramontane_oversight.reward import JudgedConfig

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS: dict[str, type[Section]] = {
    "judged": Config,
    "judged_answers": JudgedConfig,
    "simulated": OversightConfig,
    "smollm2": OversightConfig,
    "tiny": OversightConfig,
    "tiny_drills": SFTConfig,
    "tiny_lessons": SFTConfig,
}
SECTIONS = {
    entry.section for root in (OversightConfig, JudgedConfig) for entry in walk(Entry("", "", root))
}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_config_is_valid(file: Path) -> None:
    load_section(KINDS[file.stem], file)


@pytest.mark.parametrize("section", sorted(SECTIONS, key=str))
def test_every_section_and_every_key_has_a_description(section: type[Section]) -> None:
    assert section.__doc__
    assert all(descriptions(section).values())


def test_a_checkpoint_is_named_as_in_a_curation() -> None:
    fields = (cls.model_fields["path"] for cls in (LocalModel, CheckpointModel))
    assert len({str(field.metadata) for field in fields}) == 1


def test_faults_that_need_no_model_are_reported_before_heavy_imports(tmp_path: Path) -> None:
    cases = [
        ("no such config file", "oversight", "missing.yaml"),
        ("missing", "judge-errors", "missing"),
    ]
    check(cases, tmp_path)


def test_every_command_that_writes_is_refused_where_another_process_works(tmp_path: Path) -> None:
    run, new = str(begun(small_config(tmp_path / "run")).path), tmp_path / "new"
    simulated, tiny = (str(CONFIGS / name) for name in ("simulated.yaml", "tiny.yaml"))
    new.mkdir()
    commands = [
        (f"{new}/o", "compared", "oversight", simulated, f"out={new}/o"),
        (f"{new}/data", "written", "oversight-data", f"{new}/data", tiny),
        (f"{run}/judge_errors.md", "written", "judge-errors", run),
    ]
    check_refused(commands, tmp_path)
