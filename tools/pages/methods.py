"""The table of methods, from their records."""

from __future__ import annotations

from kernelformer.modules.methods import METHODS, Fact, Method
from pages.records import Records, table


@table
def methods(_: Records) -> str:
    """Names, papers and facts of all methods."""
    head = ("name", "paper, equation", "phi", "cost", "causal", "decoding", "bias", "window")
    rows = [head, tuple("---" for _ in head), *(_row(name, method) for name, method in METHODS.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, method: Method) -> tuple[str, ...]:
    paper = "this library"
    if method.paper is not None:
        paper = f"[{method.paper.name}]({method.paper.url})" + (f", {method.equation}" if method.equation else "")
    causal = _cell(method.causal) if method.cross else "only"
    decoding = "keeps all keys" if method.quadratic else _cell(method.causal)
    return f"`{name}`", paper, method.phi, method.cost, causal, decoding, _cell(method.bias), _cell(method.window)


def _cell(fact: Fact) -> str:
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return ", ".join(f'`{name}="{value}"`' for name, value in fact.items())
