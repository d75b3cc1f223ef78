"""Records of evidence: one JSON file an item, with every job that was done for it."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernelformer.files import read_json, write_text
from kernelformer_lab.evidence.base import PAPERS, TRAINING, Claim, Item, Job
from kernelformer_lab.records import portable, readable_json

RULES, COMMIT = "rules", "commit"  # of every job: keys of its item's claims, and the commit, when it was run
NEEDED = {"key", "part", "kind", "name", "seed"}  # of every job on record
SUPERSEDED = "superseded"  # set on jobs of settings that their item no longer has


def record_path(folder: Path, item: Item) -> Path:
    """Path of an item's record."""
    return folder / f"{item.name}.json"


def read_jobs(folder: Path, item: Item) -> list[dict[str, Any]]:
    """The jobs on record of an item, those of settings that it no longer has among them."""
    return read_entries(record_path(folder, item))


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The jobs of a record; none where there is no file."""
    if not path.exists():
        return []
    wrong = "put it right or remove it, and its jobs are run again"
    try:
        record = read_json(path)
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {str(problem).rstrip('.')}; {wrong}.") from None
    entries = record.get("jobs") if isinstance(record, dict) else None
    if not isinstance(entries, list) or not all(isinstance(x, dict) and x.keys() >= NEEDED for x in entries):
        raise ValueError(f"{path} is no record of evidence: it must have a list of jobs with all their parts; {wrong}.")
    shared: dict[str, Any] = record.get("settings", {})
    return [_whole(entry, shared) for entry in entries]


def _whole(entry: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the settings that all of its part share."""
    if entry["kind"] != TRAINING:
        return entry
    return {**entry, "settings": {**shared.get(entry["part"], {}), **entry["settings"]}}


def current(item: Item, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries that are of the item as it is now, in the order of its jobs."""
    by_key = {entry["key"]: entry for entry in entries}
    return [by_key[job.key] for job in item.jobs() if job.key in by_key]


def left(item: Item, folder: Path) -> list[Job]:
    """The jobs of an item that are not on record yet."""
    done = {entry["key"]: entry for entry in read_jobs(folder, item)}
    return [job for job in item.jobs() if job.key not in done or not probed(job, done[job.key])]


def superseded(item: Item, folder: Path) -> int:
    """Count jobs on record of settings that the item no longer has; they stay, and are not judged."""
    known = {job.key for job in item.jobs()}
    return sum(entry["key"] not in known for entry in read_jobs(folder, item))


def damage(item: Item, folder: Path) -> str:
    """The problem of an item's record; empty if there is none."""
    try:
        read_jobs(folder, item)
    except ValueError as problem:
        return str(problem)
    return ""


def probed(job: Job, entry: Mapping[str, Any]) -> bool:
    """True if an entry has all probes of its model; one that diverged has no model."""
    return not job.probes or entry["result"]["diverged"] or set(job.probes) <= entry["probes"].keys()


@cache
def commit() -> str:
    """The commit of this code, with a plus where evidence was changed since; "" outside of a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except OSError:  # git is not installed
        return ""


def rule_key(claim: Claim) -> str:
    """Hash of a claim and its rule: another wording or margin is another rule."""
    return hashlib.sha256(f"{claim.text}\n{claim.rule.text}".encode()).hexdigest()[:8]


def rule_commits(claim: Claim, entries: Sequence[Mapping[str, Any]]) -> set[str] | None:
    """Commits of the runs that a rule judges; None if one of them was made without the rule, or says nothing."""
    if not entries or any(rule_key(claim) not in x.get(RULES, ()) for x in entries):
        return None
    return {x[COMMIT] for x in entries}


def add_job(folder: Path, item: Item, job: Job, outcome: Mapping[str, Any], *, copied: bool = False) -> None:
    """Put a finished job on record, with the commit and the rules that it was run with; all other jobs stay.

    Args:
        folder: of the records.
        item: that the job is of.
        job: that was done.
        outcome: of it.
        copied: True for a job that another item has run, before the rules of this one were known to it.
    """
    head: dict[str, Any] = {"part": job.part, "kind": job.kind, "name": job.name, "seed": job.seed}
    now: dict[str, Any] = {COMMIT: commit(), RULES: [rule_key(claim) for claim in item.claims]}
    head |= {COMMIT: outcome.get(COMMIT, ""), RULES: []} if copied else now
    if job.kind == TRAINING:
        head["settings"] = dict(job.request)  # with "data:" for the folder of data, wherever that is
    entries = [x for x in read_jobs(folder, item) if x["key"] != job.key]
    write_record(folder, item, [*entries, {**outcome, **head}])


def claims_as_json(item: Item) -> list[dict[str, str]]:
    """Claims of an item with the paper's figures and the rules that judge them."""
    return [
        {
            **{"claim": x.text, "printed": x.printed, "rule": x.rule.text, "rule_key": rule_key(x)},
            **({"second_look": x.second_look} if x.second_look else {}),
        }
        for x in item.claims
    ]


def refresh(folder: Path, item: Item) -> None:
    """Write a record again where the item was worded or defined anew: its claims and rules are those of now."""
    write_record(folder, item, read_jobs(folder, item))


def write_record(folder: Path, item: Item, entries: Sequence[dict[str, Any]]) -> None:
    """Write the record of an item: what it claims, how it is judged, and all its jobs."""
    order = {job.key: index for index, job in enumerate(item.jobs())}
    ordered = [_marked(x, x["key"] in order) for x in sorted(entries, key=lambda x: order.get(x["key"], len(order)))]
    shared = _shared_settings(ordered)
    jobs = [
        {**x, "settings": {k: v for k, v in x["settings"].items() if k not in shared[x["part"]]}}
        if x["kind"] == TRAINING
        else x
        for x in ordered
    ]
    number = PAPERS[item.paper]
    record = {
        "item": item.name,
        "paper": f"{item.paper} ({number})" if number else item.paper,
        "where": item.where,
        "about": item.about,
        "differs": item.differs,
        **({"history": item.history} if item.history else {}),
        "command": f"kernelformer reproduce {item.name}",
        "claims": claims_as_json(item),
        "settings": shared,
        "jobs": jobs,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(record_path(folder, item), readable_json(portable(record)) + "\n")


def _marked(entry: dict[str, Any], is_current: bool) -> dict[str, Any]:
    """An entry that says whether its item still has its settings."""
    plain = {name: x for name, x in entry.items() if name != SUPERSEDED}
    return plain if is_current else {**plain, SUPERSEDED: True}


def _shared_settings(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By part, the settings that all its runs have in common."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry["kind"] == TRAINING:
            parts.setdefault(entry["part"], []).append(entry["settings"])
    return {
        part: {k: v for k, v in runs[0].items() if all(k in run and run[k] == v for run in runs)}
        for part, runs in parts.items()
    }


def folder_name(job: Job) -> str:
    """The folder of a job: readable, and different for different jobs."""
    plain = re.sub(r"[^A-Za-z0-9+=.,-]", "_", f"{job.part}-{job.name}")
    return f"{plain[:80]}-{job.key[:6]}-seed{job.seed}"
