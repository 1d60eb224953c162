"""What docs/hooks.py adds to the site."""

import importlib.util

import pytest

from tests.paths import ROOT


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://forge.example/ours/tramontane.git", "https://forge.example/ours/tramontane"),
        ("https://user:secret@forge.example/ours/tramontane", "https://forge.example/ours/tramontane"),
        ("git@forge.example:ours/tramontane.git", "https://forge.example/ours/tramontane"),
        ("ssh://git@forge.example:2222/ours/tramontane/", "https://forge.example/ours/tramontane"),
        ("", ""),
        ("../tramontane", ""),
        ("/srv/git/tramontane.git", ""),
        ("file:///srv/git/tramontane.git", ""),
    ],
)  # fmt: skip
def test_the_header_links_the_page_of_the_remote_and_no_folder(remote: str, page: str) -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec and spec.loader
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.repository(remote) == (page, "ours/tramontane" if page else "")
