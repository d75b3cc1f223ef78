"""The README and the pages of docs/ are true: examples run, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

import kernelformer as kf
from kernelformer.modules import METHODS
from kernelformer_lab.tasks import TASKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *PAGES]
RESULTS = sorted((ROOT / "results").rglob("*.md"))
SCREEN = 45  # lines of a section of the README


def shown(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; "" are those that say none, such as commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def named(page: str) -> set[str]:
    """All that stands between backticks on a page of docs/reference."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / "reference" / page).read_text()))


def lines() -> list[str]:
    """Every line of the blocks of commands."""
    return [x for page in TEXTS for block in blocks(page, "") for x in block.splitlines()]


def commands() -> list[str]:
    """Every command of the pages from its name on, without what starts it (torchrun, accelerate)."""
    inline = [x for page in (*TEXTS, *RESULTS) for x in re.findall(r"`(kernelformer [^`\n]+)`", page.read_text())]
    started = [x.partition(" -m ")[2] or x for x in lines()]
    return [*inline, *(x for x in started if x.startswith("kernelformer "))]


@pytest.mark.parametrize("page", [x for x in TEXTS if blocks(x, "python")], ids=shown)
def test_the_examples_of_a_page_run_one_after_another(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(TASKS), mock.patch.dict(METHODS):  # a page may add a task or a method of its own
        exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})


def test_the_readme_has_examples():
    assert len(blocks(ROOT / "README.md", "python")) >= 2


def test_every_command_and_option_that_is_shown_exists():
    typer = pytest.importorskip("typer")
    from kernelformer.cli.app import app

    root = typer.main.get_command(app)
    listed = commands()
    assert len(listed) >= 60
    for line in listed:
        command = root
        for word in shlex.split(line, comments=True)[1:]:
            inner = command.list_commands(None) if hasattr(command, "list_commands") else []
            if word in inner:
                command = command.load(word)
            elif word.startswith("--"):
                options = {name for x in command.params for name in (*x.opts, *x.secondary_opts)} | {"--help"}
                assert word.partition("=")[0] in options, line
            elif inner and not word.isupper() and "=" not in word:
                pytest.fail(f"{line}: there is no command {word}")


def test_every_target_extra_and_file_of_a_command_exists():
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for line in lines():
        if line.startswith("make "):
            assert line.split()[1] in made, line
        assert set(re.findall(r"\.\[([a-z]+)\]", line)) <= extras, line
        assert all((ROOT / x).is_file() for x in re.findall(r"\bexamples/\S+", line)), line


def test_files_that_a_contributor_is_sent_to_are_there():
    sources = ROOT / "src", ROOT / "lab" / "src"
    folders = [ROOT, ROOT / "lab", *sources, *(x for source in sources for x in source.iterdir())]
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "howto" / "feature-map.md", DOCS / "howto" / "task.md"):
        for path in re.findall(r"`((?:[\w.]+/)+(?:\w+\.py)?)`", page.read_text()):
            assert any((x / path).exists() for x in folders), f"{shown(page)}: {path}"
    record = re.search(r"The record in `(\S+)`", " ".join((ROOT / "CONTRIBUTING.md").read_text().split()))[1]
    assert '"favor#": Method(' in next(x / record for x in folders if (x / record).is_file()).read_text()


@pytest.mark.parametrize("page", [*TEXTS, *RESULTS], ids=shown)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            plain = [re.sub(r"[^\w\- ]", "", x.lower()) for x in titles]
            assert heading in {x.replace(" ", "-") for x in plain}, target  # as the repository's pages have it
            assert heading in {re.sub(r"[-\s]+", "-", x.strip()) for x in plain}, target  # and those of the site


def test_every_page_is_in_the_index_and_in_the_menu_of_the_site():
    index, menu = (DOCS / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        place = page.relative_to(DOCS).as_posix()
        assert place == "README.md" or f"]({place})" in index, place
        assert f": {place}\n" in menu, place
    for place in re.findall(r": (\S+\.md)$", menu, re.MULTILINE):
        assert (DOCS / place).is_file() or (ROOT / place).is_file(), place


def test_no_section_of_the_readme_is_longer_than_a_screen():
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        rendered = sum(1 + len(line) // 120 for line in section.splitlines())
        assert rendered <= SCREEN, section.partition("\n")[0]


def test_every_option_of_every_method_is_explained():
    explained = {name for text in named("methods.md") for name in text.split("=")}
    for method in kf.list_methods():
        assert set(kf.method_options(method)) <= explained, method


def test_every_task_recipe_command_study_and_limit_is_named():
    typer = pytest.importorskip("typer")
    from kernelformer.cli.app import app
    from kernelformer.files import LIMITS
    from kernelformer_lab.recipes.catalogue import RECIPES

    program = typer.main.get_command(app)
    assert set(TASKS) <= named("tasks.md")
    assert set(RECIPES) <= named("recipes.md")
    assert {*program.list_commands(None), *program.load("study").commands} <= named("command-line.md")
    assert set(LIMITS) <= named("files-and-safety.md")
