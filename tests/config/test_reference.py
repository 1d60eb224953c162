"""The configuration reference: every key is described, in the terminal and in the docs."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from markdown.extensions.toc import slugify
from mkdocs.config import load_config as load_mkdocs
from mkdocs.structure.files import Files
from pydantic import Field
from typer.testing import CliRunner

from tests.paths import ROOT
from tramontane.cli import app
from tramontane.config import Config, Section
from tramontane.config.reference import Entry, find, markdown, walk
from tramontane.config.section import descriptions
from tramontane.config.sft import SFTConfig
from tramontane.curation.config import CurateConfig
from tramontane.errors import InputError
from tramontane.planning.config import PlanConfig
from tramontane.recipes.config import HarvestConfig, MediumRecipe, SmallRecipe
from tramontane.studies.study import Study

ROOTS: dict[str, type[Section]] = {
    "": Config,
    "sft": SFTConfig,
    "curate": CurateConfig,
    "harvest": HarvestConfig,
    "medium": MediumRecipe,
    "small": SmallRecipe,
    "plan": PlanConfig,
    "study": Study,
}


def sections(cls: type[Section] = Section) -> Iterator[type[Section]]:
    for subclass in cls.__subclasses__():
        if subclass.__module__.startswith("tramontane."):
            yield subclass
            yield from sections(subclass)


@pytest.mark.parametrize("section", sorted(set(sections()), key=str))
def test_every_section_and_every_key_has_a_description(section: type[Section]) -> None:
    assert section.__doc__, section
    assert all(descriptions(section).values())


def test_a_section_typed_at_a_prompt_has_keys_without_descriptions() -> None:
    scope: dict[str, Any] = {"Section": Section, "__name__": "__main__"}
    exec("class Typed(Section):\n    key: int = 1\n    'Its key.'", scope)
    assert descriptions(scope["Typed"]) == {"key": ""}


def test_all_sections_are_reached_from_the_configs() -> None:
    reached = {e.section for root in ROOTS for e in walk(Entry(root, "", ROOTS[root]))}
    shared = {base for section in reached for base in section.__mro__}
    assert reached <= set(sections()) <= reached | shared


class Inner(Section):
    """Inner section."""

    flag: bool = False
    """A flag; see docs/pipeline.md."""


class Outer(Section):
    """Outer section."""

    share: float | None = Field(None, gt=0, le=1)
    """A share."""
    kind: Literal["a", "b"] = "a"
    """A kind."""
    count: int = Field(ge=2)
    """A count."""
    pair: tuple[int, float] = (1, 2.5)
    """A pair."""
    rate: float = 2.0
    """A rate."""
    inner: Inner = Field(default_factory=Inner)
    """One inner section."""
    many: tuple[Inner, ...] = (Inner(flag=True),)
    """Several inner sections."""


def test_types_ranges_and_defaults_of_keys() -> None:
    assert [(key.path, key.summary) for key in Entry("", "x", Outer).keys] == [
        ("x.share", "number > 0 and ≤ 1 | null; default null"),
        ("x.kind", 'a | b; default "a"'),
        ("x.count", "integer ≥ 2; required"),
        ("x.pair", "list of 2: integer, number; default [1, 2.5]"),
        ("x.rate", "number; default 2"),
        ("x.inner", "section"),
        ("x.many", 'list of section; default [{"flag": true}]'),
    ]


def test_a_section_in_two_places_is_described_once_and_linked_from_both() -> None:
    page = markdown({"": Outer})
    assert page.count("**`inner.flag`**") == 1 and "many.N.flag" not in page
    assert page.count("See [inner](#inner).") == 2
    assert "see [pipeline](pipeline.md)" in page


@pytest.mark.slow
def test_every_section_is_found_by_its_title() -> None:
    for root in ROOTS:
        for entry in walk(Entry(root, "", ROOTS[root])):
            assert find(ROOTS, entry.title) == entry
    assert find(ROOTS, "stages.1.until") == find(ROOTS, "stages.until")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pipelin", "no section 'pipelin'; did you mean 'pipeline'"),
        ("curat", "no section 'curat'; did you mean 'curate'"),
        ("trainer.objectiv", "no section 'objectiv' in trainer; did you mean 'objective'"),
        ("pipeline.xyz", "no section 'xyz' in pipeline; choose from updates, n_async"),
        ("group_size", "no section 'group_size'; here it is pipeline.group_size"),
        ("num_generations", "a key of TRL; here it is pipeline.group_size"),
        ("curate.xyz", "no section 'xyz' in curate; choose from deduplicate, "),
    ],
)
def test_an_unknown_section_is_refused_with_the_nearest_name(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(ROOTS, path)


def test_config_prints_a_single_key() -> None:
    shown = CliRunner().invoke(app, ["config", "curate.code.inputs"]).stdout
    assert "code.inputs  list of" in shown and "code.model" not in shown


def test_config_prints_a_section_within_80_columns() -> None:
    result = CliRunner().invoke(
        app, ["config", "trainer.objective.magistral"], env={"COLUMNS": "80"}
    )
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "trainer.objective.magistral.eps_low  number ≥ 0 and ≤ 1; default 0.2" in result.stdout
    description = "ε_low: ratios π_θ/π_old below 1 − ε_low are clipped. The paper does not give it;"
    assert description in " ".join(result.stdout.split())


def test_config_without_a_section_lists_sections_and_top_level_keys() -> None:
    result = CliRunner().invoke(app, ["config"])
    for name in Config.model_fields:
        assert f"\n{name}  " in result.stdout
    assert "tramontane config data" in result.stdout


def test_the_site_gets_a_page_whose_links_lead_somewhere() -> None:
    config = load_mkdocs(str(ROOT / "mkdocs.yml"))
    files = config.plugins.run_event("files", Files([]), config=config)
    page = files.get_file_from_path("configuration.md").content_string
    head, page = page.split("---\n", 2)[1:]  # for the site's search
    assert head.startswith("search:")
    assert page == CliRunner().invoke(app, ["config", "--markdown"]).stdout
    assert max(map(len, page.splitlines())) <= 100
    headings = re.findall(r"^#+ (.+)$", page, re.M)
    anchors = {slugify(heading, "-") for heading in headings}
    assert len(headings) == len(anchors) > 50
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert "#tramontane-harvest" in links
    for link in links:
        found = link[1:] in anchors if link[0] == "#" else (ROOT / "docs" / link).is_file()
        assert found, link
