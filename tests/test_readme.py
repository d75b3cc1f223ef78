"""What the README and the pages of docs/ say is true: examples run, commands exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import kernelformer as kf

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
RESULTS = sorted((ROOT / "results").rglob("*.md"))

pytestmark = pytest.mark.skipif(not PAGES, reason="an installed package has no documents beside its tests")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; "" are those that say none, such as commands."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def named(page: str) -> set[str]:
    """All that stands between backticks on a page of docs/."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))


def commands() -> list[str]:
    """Every command of the pages, without the prompt's comment."""
    inline = [x for page in (*TEXTS, *RESULTS) for x in re.findall(r"`(kernelformer [^`\n]+)`", page.read_text())]
    lines = [x for page in TEXTS for block in blocks(page, "") for x in block.splitlines()]
    return [*inline, *(x for x in lines if x.startswith("kernelformer "))]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_the_examples_of_a_page_run_one_after_another(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})


def test_the_readme_has_examples():
    assert len(blocks(ROOT / "README.md", "python")) >= 2


def test_every_command_and_option_that_is_shown_exists():
    typer = pytest.importorskip("typer")
    from kernelformer.cli.app import app

    root = typer.main.get_command(app)
    shown = commands()
    assert len(shown) >= 20
    for line in shown:
        command = root
        for word in shlex.split(line, comments=True)[1:]:
            inner = getattr(command, "commands", {})
            if word in inner:
                command = inner[word]
            elif word.startswith("--"):
                options = {name for x in command.params for name in (*x.opts, *x.secondary_opts)} | {"--help"}
                assert word.partition("=")[0] in options, line
            elif inner and not word.isupper() and "=" not in word:
                pytest.fail(f"{line}: there is no command {word}")


@pytest.mark.parametrize("page", [*TEXTS, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in titles}, target


def test_every_page_is_in_the_index():
    missing = [page.name for page in PAGES if page.name not in (DOCS / "README.md").read_text()]
    assert not [x for x in missing if x != "README.md"]


def test_every_option_of_every_method_is_explained():
    explained = {name for text in named("methods.md") for name in text.split("=")}
    for method in kf.list_methods():
        assert set(kf.method_options(method)) <= explained, method


def test_every_task_recipe_command_study_and_limit_is_named():
    typer = pytest.importorskip("typer")
    from kernelformer.cli.app import app
    from kernelformer.limits import LIMITS
    from kernelformer.recipes.catalogue import RECIPES
    from kernelformer.tasks import TASKS

    all_commands = typer.main.get_command(app).commands
    assert set(TASKS) <= named("tasks.md")
    assert set(RECIPES) <= named("recipes.md")
    assert {*all_commands, *all_commands["study"].commands} <= named("command-line.md")
    assert set(LIMITS) <= named("files-and-safety.md")
