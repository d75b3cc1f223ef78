"""Items of evidence: tables and figures of papers, their claims, and the jobs that are measured to judge them.

An item is committed before it is run: its claims have a rule each that says which outcome counts for the paper and
which against it, and its parts say what is trained or studied, at which size and with how many seeds. Every job keeps
the commit and the rules that it was run with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

from kernelformer.settings import Settings
from kernelformer_lab.recipes.catalogue import change, find_recipe
from kernelformer_lab.recipes.papers.base import CPU
from kernelformer_lab.studies import Study, find_study
from kernelformer_lab.training.config import FREE, Run

DATA = "data:"  # before a path below the folder of all data, in settings
TRAINING, STUDY = "training", "study"
MAIN = "main"  # the part of an item that has one
OWN = "this library"
AGAIN = "again"  # the folder of records of claims that are measured again
PAPERS = {
    "Performer": "2009.14794",
    "KL-Transformer": "2110.08323",
    "Skyformer": "2111.00035",
    "NPRF with RPE": "2106.12566",
    OWN: "",
}


@dataclass(frozen=True)
class Job:
    """One run or one study: what a process of the queue does.

    Args:
        part: name of the part of its item.
        kind: "training" or "study".
        name: the attention of a run, or the name of a study.
        seed: of a run; a study has its seeds in its settings.
        request: what the process is told, as JSON: a run, or the settings of a study.
        key: what the result depends on, as a hash; a job with the same key is never done twice, but for probes that
            it did not have.
        data: folders below that of all data that it reads.
        probes: what is measured on a trained model besides.
    """

    part: str
    kind: str
    name: str
    seed: int
    request: Mapping[str, Any]
    key: str
    data: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """Training runs of a recipe: every attention with every seed.

    Args:
        name: of the part, unique in its item.
        recipe: its name.
        attentions: specs, as `kernelformer compare` takes them.
        settings: what differs from the recipe, as ``--set``; texts that begin with "data:" are paths below the folder
            of all data.
        seeds: how many.
        probes: names of `evidence.queue.PROBES`, measured on every trained model.
        by_curve: whether the learning curve is judged, so that the steps between evaluations are part of a job.
        first_seed: the smallest.
    """

    name: str
    recipe: str
    attentions: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    probes: tuple[str, ...] = ()
    by_curve: bool = False
    first_seed: int = 0

    def jobs(self) -> list[Job]:
        """All runs, seed by seed, so that a stopped queue has all attentions of a seed."""
        from kernelformer_lab.comparison import make_plan  # names of items are completed by the shell, without torch

        run = change(find_recipe(self.recipe).run(CPU), {"save_every": None, "keep": 1, **self.settings})
        run = change(run, {"save_every": run.save_every or max(50, run.steps // 4)})
        jobs = []
        for planned in make_plan("", run, self.attentions, self.seeds, Path()).runs:
            each = change(planned, {"seed": planned.seed + self.first_seed})
            request = each.as_json()
            every = {"eval_every": each.eval_every} if self.by_curve or each.select == "best" else {}
            key = _hash(TRAINING, {**_chosen(each), **every})
            jobs.append(Job(self.name, TRAINING, each.label, each.seed, request, key, _data(request), self.probes))
        return jobs


@dataclass(frozen=True)
class StudyPart:
    """One study of `kernelformer_lab.studies` with its settings.

    Args:
        name: of the part, unique in its item.
        study: its name.
        settings: by name; texts that begin with "data:" are paths below the folder of all data.
    """

    name: str
    study: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def jobs(self) -> list[Job]:
        """The study itself."""
        settings = dict(self.settings)
        study_settings(find_study(self.study), settings)  # checked before anything is run
        key = _hash(STUDY, self.study, settings)
        request = {"study": self.study, "settings": settings}
        return [Job(self.name, STUDY, self.study, 0, request, key, _data(settings))]


def study_settings(study: Study, given: Mapping[str, Any]) -> Settings:
    """Settings of a study from plain values: lists become tuples, and texts paths where it takes paths."""
    hints = get_type_hints(study.settings)

    def fit(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(value)
        takes_path = Path in (hints.get(name), *get_args(hints.get(name)))
        return Path(value) if isinstance(value, str) and takes_path else value

    return study.settings(**{name: fit(name, x) for name, x in given.items()})


class Rule(Protocol):
    """Rule that decides on a claim; `text` is the rule in words, for the page, written before anything was run."""

    @property
    def text(self) -> str:
        """The rule in words: outcomes that count for the claim, and against it."""
        ...

    def __call__(self, entries: Sequence[Mapping[str, Any]]) -> Finding:
        """Judge the claim by the jobs on record."""
        ...


SUPPORTED, NOT_SEEN, OPEN, MISSING_RESULT = "supported", "not seen at this size", "open", "not run"
CONTRADICTED = "contradicted at the paper's own setting"  # what "not seen" becomes where an item has that setting


@dataclass(frozen=True)
class Finding:
    """Verdict of the record on a claim.

    Args:
        verdict: "supported", "not seen at this size" (the opposite is measured), "open" (measured, and it cannot be
            told) or "not run".
        ours: the figures with their spread.
        p: p-value of the hypothesis at the border between verdicts; 1 where nothing was tested.
        gap: difference of the two sides and its standard error, where the rule is about one.
    """

    verdict: str
    ours: str
    p: float = 1.0
    gap: tuple[float, float] | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, or a question of our own, that a measurement can support or not.

    Args:
        text: the claim; a margin of its rule stands in it ("within 4 points").
        printed: the paper's figures.
        rule: what decides.
        second_look: what of the claim, its rule or its runs was changed after results were known; "": nothing.
        ours: True if no paper makes the claim.
    """

    text: str
    printed: str
    rule: Rule
    second_look: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Args:
        name: what it shows, in a word: "variance", "stability".
        paper: a key of `PAPERS`.
        where: table, figure or section.
        about: one sentence on what is measured.
        differs: how it differs from the paper: length, steps, features, rate, data.
        parts: what is trained and studied.
        claims: what is judged by it.
        hours: of one core, roughly.
        value: what its picture shows of a run, as a path into the entry of a job (see `evidence.rules`).
        unit: of that value, in words.
        study_values: what its picture shows of the record of a study, by name.
        paper_setting: True if it has the paper's own setting, where the opposite of a claim contradicts the paper.
        history: what was changed or repeated after results were known.
    """

    name: str
    paper: str
    where: str
    about: str
    differs: str
    parts: Sequence[Training | StudyPart]
    claims: Sequence[Claim]
    hours: float
    value: str = "result.value"
    unit: str = ""
    study_values: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None
    paper_setting: bool = False
    history: str = ""

    def again(self, number: int, first_seed: int) -> Item:
        """The item with one of its claims (from 1 on) and what that needs, with seeds that begin elsewhere."""
        if not 1 <= number <= len(self.claims):
            raise ValueError(f"item {self.name!r} has claims 1 to {len(self.claims)}, got {number}.")
        claim = self.claims[number - 1]
        sides: Sequence[tuple[str, str]] = getattr(claim.rule, "sides", ())
        if not sides and any(isinstance(x, Training) for x in self.parts):
            raise ValueError(
                f"claim {number} of item {self.name!r} is no comparison of two attentions; repeat one that is."
            )
        parts: list[Training | StudyPart] = []
        for part in self.parts:
            if isinstance(part, StudyPart):
                settings = {**part.settings, "seed": part.settings.get("seed", 0) + first_seed}
                parts.append(replace(part, settings=settings))
            elif mine := [x for x in part.attentions if (part.name, x) in sides]:
                parts.append(replace(part, attentions=mine, first_seed=first_seed))
        return replace(self, claims=(claim,), parts=parts)

    def jobs(self) -> list[Job]:
        """All jobs of all parts: one seed of every part, then the next one."""
        return sorted((job for part in self.parts for job in part.jobs()), key=lambda job: job.seed)


def _chosen(run: Run) -> dict[str, Any]:
    """The settings of a run that change its result and are not the defaults: new settings change no old hash."""
    values = run.as_json()
    defaults = {x.name: x.default_factory() if x.default_factory is not MISSING else x.default for x in fields(Run)}
    return {name: x for name, x in values.items() if name not in FREE and x != defaults[name]}


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _data(value: Any) -> tuple[str, ...]:
    """The folders of data that settings name."""
    if isinstance(value, Mapping):
        return tuple(dict.fromkeys(x for y in value.values() for x in _data(y)))
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(x for y in value for x in _data(y)))
    return (value.removeprefix(DATA).split("/")[0],) if isinstance(value, str) and value.startswith(DATA) else ()


def located(value: Any, data: Path) -> Any:
    """Settings in which ``data:NAME`` is the path of NAME below the folder of all data."""
    if isinstance(value, Mapping):
        return {key: located(x, data) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [located(x, data) for x in value]
    return str(data / value.removeprefix(DATA)) if isinstance(value, str) and value.startswith(DATA) else value
