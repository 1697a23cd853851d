"""Prose that runs: README, docs and docstrings; and the rules of the tree that a tool can check."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import trencadis

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["trencadis", *(m.name for m in pkgutil.walk_packages(trencadis.__path__, "trencadis."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert failed == 0


@pytest.mark.core
def test_every_public_function_has_an_example():
    for name in trencadis.__all__:
        thing = getattr(trencadis, name)
        if callable(thing) and name != "GroupMetadata":
            assert ">>>" in (thing.__doc__ or ""), name


@pytest.mark.parametrize("page", [p for p in ROOT.glob("*.md")] + PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_one_direction():
    """The layers of pyproject.toml: data flows one way."""
    done = subprocess.run(
        [f"{pathlib.Path(sys.executable).parent}/lint-imports"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


WORDS = (
    """group size offset first_group row owned tile visit run form operand format epilogue problem plan target table"""
)


@pytest.mark.parametrize("word", WORDS.split())
def test_words_are_in_the_glossary(word):
    assert re.search(rf"^\*\*{word}\*\*", (ROOT / "GLOSSARY.md").read_text(), re.MULTILINE)
