"""Similarity of amino acids in the attention of a protein language model: Performer (2009.14794), App. C.4, Fig. 13.

As Vig et al. (2006.15222) define it: of each head the share of its attention that goes to each amino acid, over many
sequences; two amino acids are similar if their shares go together over all heads. The paper shows a trained Performer
beside BLOSUM62; here are a pretrained model, the same model with attention replaced and nothing trained, and one with
random weights, each compared with BLOSUM62 by numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Generator, Tensor

from kernelformer.conversion.readers import hash_files
from kernelformer.conversion.texts import order, read_texts
from kernelformer.errors import shape
from kernelformer.hf import convert
from kernelformer.hf.load import Source, load_source
from kernelformer.modules import parse_method
from kernelformer.modules.calibration import evaluating
from kernelformer.settings import MODEL, PICKLE, SEED, Settings, option
from kernelformer_lab.figures import drawing, table
from kernelformer_lab.records import plain
from kernelformer_lab.studies.base import SPECS, Log, Progress, Record, Row, Study
from kernelformer_lab.tasks.sentences import ranks, spearman

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"


def blosum62() -> Tensor:
    """Scores of BLOSUM62 (Henikoff and Henikoff, 1992), (20, 20) in float64, in the order of `AMINO_ACIDS`."""
    matrix = torch.zeros(20, 20, dtype=torch.float64)
    for row, line in enumerate(Path(__file__).with_name("blosum62.txt").read_text().splitlines()):
        matrix[row, : row + 1] = torch.tensor([float(x) for x in line.split()], dtype=torch.float64)
    return matrix + matrix.tril(-1).T


def attention_similarity(received: Tensor) -> Tensor:
    """Similarity of amino acids by the attention that they receive: Pearson correlation over all heads.

        p_ha = received_ha / sum_b received_hb        s_ab = corr_h(p_ha, p_hb)

    Args:
        received: (*, H, A), attention of each head to each amino acid, summed over queries, keys and sequences.

    Returns:
        (*, A, A), from -1 to 1.
    """
    if received.dim() < 2 or received.shape[-2] < 2:
        raise ValueError(f"received must be (heads, amino acids) of at least two heads, got {shape(received)}.")
    share = received.double() / received.double().sum(-1, keepdim=True)
    centred = share - share.mean(-2, keepdim=True)
    unit = centred / centred.norm(dim=-2, keepdim=True).clamp_min(1e-300)
    similarity: Tensor = unit.mT @ unit
    return similarity


def pairs_of(matrix: Tensor) -> Tensor:
    """The entries above the diagonal of symmetric matrices, (*, A, A) -> (*, A (A - 1) / 2)."""
    row, column = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1)
    return matrix[..., row, column]


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension, (*, N) and (*, N) -> (*)."""
    x, y = (z.double() - z.double().mean(-1, keepdim=True) for z in (x, y))
    correlation: Tensor = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp_min(1e-300)
    return correlation


def renamed_correlations(similarity: Tensor, scores: Tensor, count: int, gen: Generator) -> Tensor:
    """Pearson's correlation of the pairs of two matrices after random renamings of one's amino acids, (count).

    Pairs that share an amino acid are not independent, so that chance is told by such renamings (Mantel's test) and not
    by the number of pairs.
    """
    wanted = pairs_of(scores)
    values = []
    for _ in range(count):
        order = torch.randperm(similarity.shape[-1], generator=gen)
        values.append(pearson(pairs_of(similarity[order][:, order]), wanted))
    return torch.stack(values)


GROUPS = "AVILMCFWYHKRDENQSTGP"  # by their chemistry, so that similar ones stand together
COLUMNS = 4


ORIGINAL, INITIALIZED = "original", "random weights"
METHODS = (
    "favor+:num_features=256",
    "favor+:num_features=256:window=16:sinks=1",
    "nystromformer:num_landmarks=32",
    "wildcat:num_landmarks=32:window=16:sinks=1",
)
PAIRS = ("DE", "FY")  # that the paper names as recognized


@dataclass(frozen=True, kw_only=True)
class AminoAcidsSettings(Settings):
    """Settings of this study."""

    model: str = option(help=f"a protein language model: {MODEL}", argument=True, path=True, shown="MODEL")
    text: Path = option(help="sequences, one a line")
    attention: tuple[str, ...] = option((), SPECS)
    sequences: int = option(800, "sequences to measure on, as in the paper", least=2, name="samples")
    length: int = option(128, "residues of a sequence, at most", least=2)
    batch: int = option(8, "sequences at once", least=1)
    resamples: int = option(1000, "of the sequences and of the amino acids' names", least=2)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


def _float64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def models_of(settings: AminoAcidsSettings) -> list[str]:
    """The names of all models, in their order."""
    return list(dict.fromkeys((ORIGINAL, INITIALIZED, *(settings.attention or METHODS))))


def steps(settings: AminoAcidsSettings) -> int:
    """Number of calls of ``progress`` in `run`."""
    return len(models_of(settings))


@torch.no_grad()
def run(record: Record, log: Log, progress: Progress) -> None:
    """Measure every model that the record does not have, of the same settings.

    Raises:
        ValueError: a model that does not read amino acids, too few sequences, or a record of other ones.
    """
    settings = record.settings
    source = load_source(settings.model, allow_pickle=settings.allow_pickle)
    residues = residue_ids(source)
    sequences = chosen_sequences(settings)
    about = {
        "model": Path(settings.model).name,
        "text": hash_files([settings.text]),
        "residues": sum(map(len, sequences)),
    }
    names = models_of(settings)
    same = {name: x for name, x in plain(settings).items() if name != "attention"}
    record.resume({**about, "amino_acids": AMINO_ACIDS}, **same)
    record.figures["rows"] = [x for x in record.rows if x["model"] in names]
    for name in names:
        if not record.where(model=name):
            log(name)
            model = _model(source, name, settings.seed)
            batches = _batches(source, sequences, settings)
            received = torch.cat([received_attention(model, inputs, residues) for inputs in batches])
            record.rows.append(make_row(name, received, settings))
            record.save()
        progress()
    record.rows.sort(key=lambda x: names.index(x["model"]))


def residue_ids(source: Source) -> Tensor:
    """Token ids of the amino acids, (20), in the order of `AMINO_ACIDS`.

    Raises:
        ValueError: the tokenizer has no token for one of them.
    """
    tokenizer = source.tokenizer
    ids = [] if tokenizer is None else tokenizer.convert_tokens_to_ids(list(AMINO_ACIDS))
    if len(set(ids)) < len(AMINO_ACIDS) or tokenizer.unk_token_id in ids:
        raise ValueError(f"{source.path} has no token for each of the amino acids {AMINO_ACIDS}; is it of proteins?")
    return torch.tensor(ids)


def chosen_sequences(settings: AminoAcidsSettings) -> list[str]:
    """Sequences in an order that the seed gives, their first residues, in capitals."""
    texts = [x for x in ("".join(x.split()).upper() for x in read_texts(settings.text)) if len(x) > 1]
    if len(texts) < settings.sequences:
        raise ValueError(
            f"{settings.text} has {len(texts)} sequences of two residues or more, and {settings.sequences} were asked "
            f"for; say --samples {len(texts)}."
        )
    return [texts[i][: settings.length] for i in order(0, settings.sequences, len(texts), settings.seed)]


def _batches(source: Source, sequences: Sequence[str], settings: AminoAcidsSettings) -> Iterator[dict[str, Tensor]]:
    for first in range(0, len(sequences), settings.batch):
        some = [" ".join(x) for x in sequences[first : first + settings.batch]]
        tokens = source.tokenizer(some, padding=True, return_tensors="pt")
        yield {name: tokens[name] for name in ("input_ids", "attention_mask")}


def _model(source: Source, name: str, seed: int) -> Any:
    """The model of a row, which hands out its attention weights."""
    if name == INITIALIZED:
        from transformers import set_seed

        set_seed(seed)
        model = type(source.model)(source.model.config).eval()
    else:
        model = copy.deepcopy(source.model)
    if name in (ORIGINAL, INITIALIZED):
        model.set_attn_implementation("eager")  # others have no weights to hand out
        return model
    method, options = parse_method(name)
    return convert(model, method, **options)


@torch.no_grad()
def received_attention(model: Any, inputs: dict[str, Tensor], residues: Tensor) -> Tensor:
    """Attention of each head to each amino acid, summed over queries and keys that are amino acids.

    Args:
        model: which hands out its weights (B, H, L, L), one for each layer.
        inputs: ``input_ids`` and ``attention_mask``, (B, L).
        residues: token ids of the amino acids, (A).

    Returns:
        (B, all heads of all layers, A) in float64.
    """
    with evaluating(model):
        weights = model(**inputs, output_attentions=True).attentions
    which = (inputs["input_ids"].unsqueeze(-1) == residues).double()  # (B, L, A)
    real = which.sum(-1)
    return torch.cat([torch.einsum("bhij,bi,bja->bha", x.double(), real, which) for x in weights], 1)


def make_row(name: str, received: Tensor, settings: AminoAcidsSettings) -> Row:
    """The similarities of a model, and their correlation with BLOSUM62.

    Args:
        received: (N, H, A), of `received_attention`, for each sequence.

    Returns:
        ``similarity`` (20, 20); ``pearson`` and ``spearman``: correlations with BLOSUM62 over the 190 pairs of
        different amino acids; ``chance``: share of renamings of the amino acids with at least this ``pearson``;
        ``resampled``: Pearson correlations after resampling the sequences, the same resamples for every model;
        ``places`` of `PAIRS` among all pairs, 1 being the most similar one; ``standard_error`` of ``pearson`` over
        resampled sequences.
    """
    scores, gen = blosum62(), torch.Generator().manual_seed(settings.seed)
    similarity = attention_similarity(received.sum(0))
    values, wanted = pairs_of(similarity), pairs_of(scores)
    n = len(received)
    picks = torch.randint(n, (settings.resamples, n), generator=gen)
    counts = torch.zeros(settings.resamples, n, dtype=torch.float64).scatter_add_(
        1, picks, torch.ones_like(picks).double()
    )
    resampled = pearson(pairs_of(attention_similarity(torch.einsum("rn,nha->rha", counts, received))), wanted)
    own = float(pearson(values, wanted))
    renamed = renamed_correlations(similarity, scores, settings.resamples, gen)
    place = (len(values) + 1 - ranks(values.numpy())).round().astype(int)
    rows, columns = torch.triu_indices(len(AMINO_ACIDS), len(AMINO_ACIDS), 1).tolist()
    names = [{AMINO_ACIDS[i], AMINO_ACIDS[j]} for i, j in zip(rows, columns, strict=True)]
    correlations = [round(x, 6) for x in resampled.tolist()]
    return {
        "model": name,
        "similarity": [[round(x, 6) for x in row] for row in similarity.tolist()],
        "pearson": own,
        "spearman": spearman(values.numpy(), wanted.numpy()),
        "chance": float((1 + (renamed >= own).sum()) / (1 + len(renamed))),
        "resampled": correlations,
        "places": {pair: int(place[names.index(set(pair))]) for pair in PAIRS},
        "standard_error": float(_float64(correlations).std()),
    }


def difference(row: Row, first: Row) -> tuple[float, float]:
    """A model's Pearson correlation minus another's, and its standard error over the same resamples."""
    gaps = _float64(row["resampled"]) - _float64(first["resampled"])
    return row["pearson"] - first["pearson"], float(gaps.std())


def likeness(row: Row, first: Row) -> float:
    """Pearson correlation of the similarities of two models."""
    return float(pearson(*(pairs_of(_float64(x["similarity"])) for x in (row, first))))


def tables(record: Record) -> list[Table]:
    """Correlations with BLOSUM62 and with the original."""
    about, first = record.figures, record.rows[0]
    cells = []
    for row in record.rows:
        gap, error = difference(row, first)
        cells.append(
            (
                row["model"],
                f"{row['pearson']:.3f} ± {row['standard_error']:.3f}",
                f"{row['spearman']:.3f}",
                f"{row['chance']:.3f}",
                "" if row is first else f"{gap:+.3f} ± {error:.3f}",
                f"{likeness(row, first):.3f}",
                *(str(row["places"][x]) for x in PAIRS),
            )
        )
    heads = ("Pearson", "Spearman", "chance", "minus original", "with original", *(f"place of {x}" for x in PAIRS))
    return [
        table(
            f"Amino acids in the attention of {about['model']}, {about['residues']} residues, and BLOSUM62",
            ("model", *heads),
            cells,
            caption="± standard error over sequences; chance: share of renamings of the amino acids with at least this "
            "correlation; places among 190 pairs",
        )
    ]


def picture(record: Record, path: Path) -> None:
    """Draw heat maps of all matrices, diagonals left out, each with colours from its smallest to its largest pair."""
    order = [AMINO_ACIDS.index(x) for x in GROUPS]
    panels = [("BLOSUM62", blosum62())]
    for row in record.rows:
        title = f"{row['model']}\nPearson {row['pearson']:.3f} ± {row['standard_error']:.3f}"
        panels.append((title, _float64(row["similarity"])))
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    with drawing(path, (4.2 * columns, 4.3 * lines), lines, columns) as (figure, axes):
        for axis in axes.flat:
            axis.set_axis_off()
        for axis, (title, matrix) in zip(axes.flat, panels, strict=False):
            axis.set_axis_on()
            shown = matrix[order][:, order].fill_diagonal_(math.nan)
            values = pairs_of(matrix)
            image = axis.imshow(shown.numpy(), cmap="Blues", vmin=float(values.min()), vmax=float(values.max()))
            axis.set_title(title, fontsize="medium")
            for set_ticks in (axis.set_xticks, axis.set_yticks):
                set_ticks(range(len(GROUPS)), list(GROUPS), fontsize="x-small")
            figure.colorbar(image, ax=axis, shrink=0.75)


STUDY = Study(
    "amino-acids",
    "Performer (2009.14794), Fig. 13",
    AminoAcidsSettings,
    steps,
    run,
    tables,
    picture,
    resumes=True,
    examples=(("MODEL --text sequences.txt", "of a protein language model"),),
)
