"""README, docs and docstrings run as doctests; and the rules of docs and tree that a tool can check."""

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
# modules that import the native package, which need not be there; no examples
NATIVE = ("trencadis.backends.cpu.bridge", "trencadis.backends.cpu.gated")
FOUND = ["trencadis", *(m.name for m in pkgutil.walk_packages(trencadis.__path__, "trencadis."))]
MODULES = [name for name in FOUND if name not in NATIVE]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *PAGES})
RECORDS = sorted(path.name for path in (ROOT / "docs/adr").glob("0*.md"))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


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


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_one_direction():
    """The layers of pyproject.toml: data flows one way."""
    done = subprocess.run(
        [f"{pathlib.Path(sys.executable).parent}/lint-imports"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The map and the way of a call


def block(page, first):
    """The lines of the fenced block of a page that begins with some line, without that line."""
    text = (ROOT / page).read_text()
    (found,) = re.findall(rf"```text\n{re.escape(first)}\n(.*?)```", text, flags=re.DOTALL)
    return found


def test_the_map_is_the_package():
    """Every file and folder of the package is a line of the map in how-it-works, and every line is there."""
    listed = {line.split()[0] for line in block("docs/how-it-works.md", "src/trencadis/").splitlines()}
    root = ROOT / "src/trencadis"
    folders = tuple(name for name in listed if name.endswith("/"))
    files = {str(path.relative_to(root)) for path in root.rglob("*.py") if not path.name.startswith("__")}
    assert {name for name in files if not name.startswith(folders)} == {n for n in listed if not n.endswith("/")}
    assert all(any(name.startswith(folder) for name in files) for folder in folders)


@pytest.mark.parametrize("folder", [
    "backends/cpu", "backends/gpu", "backends/tpu", "backends/tpu/ragged", "backends/tpu/resident", "backends/triton",
    "gemm", "inspect", "parallel", "quant",
])  # fmt: skip
def test_the_docstring_of_a_folder_names_what_is_in_it(folder):
    path = ROOT / "src/trencadis" / folder
    named = set(re.findall(r"\w+", importlib.import_module(f"trencadis.{folder.replace('/', '.')}").__doc__))
    found = {each.stem for each in path.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert found - {"__init__"} <= named


def test_the_top_of_the_package_is_that_of_the_design():
    names = {path.name for path in (ROOT / "src/trencadis").iterdir() if path.name != "__pycache__"}
    assert names == {
        "__init__.py", "__main__.py", "py.typed", "why.py",
        "api", "backends", "cli", "compat", "core", "gemm", "inspect", "moe", "parallel", "quant", "viz",
    }  # fmt: skip


def test_a_call_passes_each_room_once():
    """The way of a call in how-it-works is the one that calls take; autodiff and plan are entered once each."""
    text = subprocess.run([sys.executable, "scripts/rooms.py"], cwd=ROOT, capture_output=True, text=True).stdout
    first, rest = text.rstrip().split("\n", 1)
    assert block("docs/how-it-works.md", first).rstrip() == rest
    for case in text.strip().split("\n\n"):
        steps = [line.strip() for line in case.splitlines()[1:]]
        assert len(steps) == len(set(steps)), case
        assert sum(step.startswith("api.") for step in steps) == 1, case


# ---------------------------------------------------------------------------------------------------------------------
# Pages that list others


def test_the_readme_has_no_pictures():
    """A package index shows the README without the repository around it, so a relative path to a picture breaks."""
    assert not re.search(r"!\[|<img", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_page_is_listed(page):
    linked = set(re.findall(r"\]\((?:docs/)?([^)#]+)\)", (ROOT / page).read_text()))
    wanted = {str(path.relative_to(ROOT / "docs")) for path in PAGES[1:]} - {f"adr/{name}" for name in RECORDS}
    outside = {"glossary.md", "api/index.md", "index.md"} if page == "README.md" else {"index.md"}  # made by mkdocs
    assert wanted - outside <= linked


def test_the_sidebar_has_every_page_and_one_for_all_decisions():
    sidebar = (ROOT / "mkdocs.yml").read_text()
    for path in PAGES[1:]:
        assert (f": {path.relative_to(ROOT / 'docs')}\n" in sidebar) == (path.name not in RECORDS), path


@pytest.mark.parametrize("name", RECORDS)
def test_the_index_lists_every_decision(name):
    number = name[:4]
    assert (ROOT / "docs/adr/index.md").read_text().count(f"| [{number}]({name}) |") == 1
    assert (ROOT / "docs/adr" / name).read_text().startswith(f"# {number}: ")


# ---------------------------------------------------------------------------------------------------------------------
# Words

WORDS = """group size first_group owned unowned span form problem plan operand offset window tile visit epilogue format
target backend overrides"""


@pytest.mark.parametrize("word", WORDS.split())
def test_words_are_in_the_glossary(word):
    assert re.search(rf"^\*\*{word}\*\*", (ROOT / "GLOSSARY.md").read_text(), re.MULTILINE)


def test_the_glossary_defines_each_word_once():
    words = re.findall(r"^\*\*([^*]+)\*\*", (ROOT / "GLOSSARY.md").read_text(), re.MULTILINE)
    assert len(words) == len(set(words)) > 40


COINED = r"\b(doors?|nobody(?:'s)?|the calculus|few bits|laid as one|what comes out|turned tiles|mail|pins)\b"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_words_of_the_field(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(COINED, text, re.IGNORECASE)
    assert page.name == "CHANGELOG.md" or not found
