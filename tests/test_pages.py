"""What a template does with its values: HTML escapes them, Markdown does not."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from tramontane.pages import render, table_cell

HOSTILE = "<script>alert('x')</script> & <b>bold</b>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("page.md.j2", HOSTILE),
        ("page.html.j2", "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &lt;b&gt;bold"),
    ],
)
def test_the_end_of_the_name_decides_what_is_escaped(
    tmp_path: Path, name: str, expected: str
) -> None:
    (tmp_path / name).write_text("value: {{ value }}\n")
    text = render(tmp_path / name, value=HOSTILE)
    assert text.startswith(f"value: {expected}")
    assert text.endswith("\n")


def test_a_page_of_another_package_has_the_style_and_escapes_its_title(tmp_path: Path) -> None:
    template = tmp_path / "own.html.j2"
    template.write_text(
        '{% extends "page.html.j2" %}{% block content %}<p>{{ text }}</p>{% endblock %}'
    )
    page = render(template, title=HOSTILE, text=HOSTILE)
    assert page.count("<script") == 0 and page.count("&lt;script&gt;") == 3
    assert "--accent: light-dark(" in page and "prefers-reduced-motion" not in page


def test_a_value_that_is_not_given_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md.j2").write_text("{{ absent }}")
    with pytest.raises(UndefinedError, match="absent"):
        render(tmp_path / "page.md.j2")


def test_a_cell_of_a_table_stays_in_one_line() -> None:
    assert table_cell("a |\n  b") == "a \\| b"
