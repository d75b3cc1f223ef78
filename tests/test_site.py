"""The site of docs/: its links, as the hook of mkdocs makes them, and its pages of the API; without mkdocs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOK = ROOT / "tools" / "docs_site.py"
PUBLIC = ("kernelformer", "kernelformer.hf", "kernelformer.models", "kernelformer.parallel", "kernelformer_lab.tasks")
PUBLIC += ("kernelformer_lab.training", "kernelformer.feature_maps", "kernelformer.modules")


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("docs_site", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(site) -> list[Path]:
    """All files that are in the site."""
    beside = [ROOT / name for name in site.BESIDE]
    folders = [ROOT / "docs", *(x for x in beside if x.is_dir())]
    return [x for folder in folders for x in folder.rglob("*") if x.is_file()] + [x for x in beside if x.is_file()]


def test_every_link_of_the_site_leads_to_a_file_of_the_site(site):
    pages = [x.relative_to(ROOT).as_posix() for x in sources(site)]
    places = {site.site_path(x) for x in pages}
    assert len(places) == len(pages)  # no two files at one place
    for page in (x for x in pages if x.endswith(".md")):
        here = os.path.dirname(site.site_path(page))
        for target in re.findall(r"\]\(([^)\s#]+)", site.site_links((ROOT / page).read_text(), page)):
            if ":" not in target:
                assert os.path.normpath(os.path.join(here, target)) in places, f"{page}: {target}"


def test_links_within_docs_stay_and_those_out_of_it_lose_a_level(site):
    text = "[a](near-and-far.md#cost) [b](../../results/README.md) [c](https://arxiv.org) [d](#here)"
    assert site.site_links(text, "docs/reference/methods.md") == text.replace("../../results", "../results")
    assert site.site_links("[a](../docs/faq.md)", "results/README.md") == "[a](../faq.md)"
    assert site.site_links("[a](index.html)", "results/comparisons/README.md") == "[a](all.html)"


def test_the_pages_of_the_api_have_every_public_name_and_no_other():
    shown = {x for page in (ROOT / "docs/api").glob("*.md") for x in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    by_object = set()
    for name in shown:
        package, _, last = name.rpartition(".")
        by_object.add(id(getattr(importlib.import_module(package), last)))
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            if name != "__version__":
                assert id(getattr(module, name)) in by_object, f"{package}.{name}"
