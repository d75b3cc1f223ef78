"""The papers that the methods come from, as the library cites them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """Where a method was published.

    Args:
        name: as the library cites it.
        arxiv: its number on arxiv.org.
    """

    name: str
    arxiv: str

    @property
    def url(self) -> str:
        """Its page on arxiv.org."""
        return f"https://arxiv.org/abs/{self.arxiv}"


TRANSFORMER = Paper("Transformer", "1706.03762")
PERFORMER = Paper("Performer", "2009.14794")
KL_TRANSFORMER = Paper("KL-Transformer", "2110.08323")
SKYFORMER = Paper("Skyformer", "2111.00035")
NPRF = Paper("NPRF with RPE", "2106.12566")
LINEAR_TRANSFORMER = Paper("Linear Transformer", "2006.16236")
NYSTROMFORMER = Paper("Nystromformer", "2102.03902")
LINFORMER = Paper("Linformer", "2006.04768")
RFA = Paper("RFA", "2103.02143")
WILDCAT = Paper("WildCat", "2602.10056")
HEDGEHOG = Paper("Hedgehog", "2402.04347")
FAVOR_PLUS_PLUS = Paper("FAVOR++", "2205.15317")
FAVOR_SHARP = Paper("FAVOR#", "2302.00787")
BIGBIRD = Paper("BigBird", "2007.14062")
LONGFORMER = Paper("Longformer", "2004.05150")
REFORMER = Paper("Reformer", "2001.04451")
INFORMER = Paper("Informer", "2012.07436")
