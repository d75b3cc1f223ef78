"""Tables of studies without a model in training: errors of features, landmarks and rows."""

from __future__ import annotations

from pages.records import ABSENT, Records, grid, show, table

FEATURES = "features/features.json"
DATA = {
    "isotropic, norm 0.5": "isotropic, norm 0.5",
    "1": "isotropic, norm 1",
    "2": "isotropic, norm 2",
    "anisotropic, 2": "anisotropic, norm 2",
    "MiniLM": "minilm",
    "AntiBERTy": "antiberty",
    "SmolLM2": "smollm2",
}
LANDMARKS = "skyformer:kernel=softmax:landmarks="
# Name in the table, attention in the record, window, and features or landmarks.
MAPS: list[tuple[str, str, int, int | None]] = [
    ("equal weights", "uniform", 0, None),
    ("`favor+`", "favor+", 0, 128),
    ('the same, `draw="simplex"`', "favor+:draw=simplex", 0, 128),
    ("`favor+hyperbolic` (two features a draw)", "favor+hyperbolic", 0, 128),
    ("`favor+regularized`", "favor+regularized", 0, 128),
    ("`favor++`, calibrated", "favor++", 0, 128),
    ("`favor#`, calibrated", "favor#", 0, 128),
    ("`trigonometric` (two features a draw)", "trigonometric", 0, 128),
    ("`skyformer:kernel=softmax`, uniform", f"{LANDMARKS}uniform", 0, 128),
    ("the same, segments", f"{LANDMARKS}segments", 0, 128),
    ("the same, leverage and aligned", f"{LANDMARKS}leverage:align=True", 0, 128),
    ("the same, pivoted", f"{LANDMARKS}pivoted", 0, 128),
    ("`nystromformer`", "nystromformer", 0, 128),
    ("`wildcat`", "wildcat", 0, 128),
    ("`wildcat`, 64 landmarks", "wildcat", 0, 64),
    ("window 32 and 1 sink alone", "window alone", 32, None),
    ("window and `favor+`", "favor+", 32, 128),
    ("window and `favor#`", "favor#", 32, 128),
    ("window and `wildcat`", "wildcat", 32, 128),
    ("window and `wildcat`, 64 landmarks", "wildcat", 32, 64),
]


@table
def feature_errors(records: Records) -> str:
    """Relative errors of the output by map and data, mean of three draws."""
    rows = records.rows(FEATURES)
    by = {(x["data"], x["attention"], x["window"], x["size"]): x["output_mean"] for x in rows}
    cells = []
    for shown, attention, window, size in MAPS:
        errors = [by.get((x, attention, window, size)) for x in DATA.values()]
        cells.append([shown, *("" if x is None else f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in errors)])
    return grid(["relative error", *DATA], cells)


@table
def simplex(records: Records) -> str:
    """Errors of `favor+` by orthogonal and by simplex draws, over the norm of queries and keys."""
    rows = records.rows(FEATURES)
    by = {(x["data"], x["attention"]): x for x in rows if (x["window"], x["size"]) == (0, 128)}
    shown, norms = [], ("0.5", "1", "2", "4")
    for name, attention in (('`"orthogonal"`', "favor+"), ('`"simplex"`', "favor+:draw=simplex")):
        some = [by.get((f"isotropic, norm {x}", attention)) for x in norms]
        cells = [ABSENT if x is None else f"{x['output_mean']:.3f} ± {x['output_standard_error']:.3f}" for x in some]
        shown.append([name, *cells])
    return grid(["norm", *norms], shown)


APPROXIMATION = "skyformer/approximation.json"


def medians(records: Records, part: str) -> dict[tuple[str | float, ...], float]:
    """Medians of a part of the study of approximation, by what they are of."""
    return {tuple(x[:-3]): x[-2] for x in records.rows(APPROXIMATION, part)}


def _cells(by: dict[tuple[str | float, ...], float], *keys: tuple[str | float, ...]) -> list[str]:
    return [show(by.get(x), "{:.2g}") for x in keys]


@table
def approximation(records: Records) -> str:
    """Median spectral error of the output against softmax attention, at 512 tokens."""
    by, sizes, models = medians(records, "errors"), (16, 64, 256), ("pretrained", "initialized")
    labels = list(dict.fromkeys(str(x[2]) for x in by)) or [""]
    rows = [[x, *_cells(by, *((name, 512, x, m) for name in models for m in sizes))] for x in labels]
    return grid(["median error, 512 tokens", *(f"{name}, {m}" for name in models for m in sizes)], rows)


@table
def conditions(records: Records) -> str:
    """Condition numbers of scores before normalization, medians."""
    by, rows = medians(records, "conditions"), []
    for name, n, kernel, share in by:
        if n == 512 and share == 1:
            rows.append([f"{name}, {kernel}", f"{by[name, n, kernel, share]:.0e}".replace("e+0", "e")])
    return grid(["scores, 512 tokens", "largest singular value over the smallest"], rows or [["", ABSENT]])


@table
def dimensions(records: Records) -> str:
    """Statistical dimension of the completed Gaussian scores of 512 queries and 512 keys, by the ridge."""
    rows = [x for x in records.rows(APPROXIMATION, "dimensions") if x[1] == 512]
    ridges = sorted({x[2] for x in rows}, reverse=True)
    by = {(x[0], x[2]): f"{x[3]:.0f}" for x in rows}  # the mean
    cells = [[name, *(by[name, ridge] for ridge in ridges)] for name in dict.fromkeys(x[0] for x in rows)]
    return grid(["statistical dimension, ridge over the norm", *(f"{x:g}" for x in ridges)], cells or [[ABSENT]])


POSITIONS = "positions/positions.json"


@table
def position_errors(records: Records) -> str:
    """Error of attention rows over the norm of queries and keys."""
    rows = records.rows(POSITIONS, "errors")
    norms, sizes = (sorted({x[i] for x in rows}) for i in (0, 1))
    by = {(x[0], x[1]): f"{x[2]:.3f} ± {x[3]:.3f}" for x in rows}
    cells = [[f"{norm:g}", *(by[norm, m] for m in sizes)] for norm in norms]
    return grid(["norm of q and k", *(f"m = {m}" for m in sizes)], cells or [[ABSENT]])


@table
def smoothing(records: Records) -> str:
    """Error against exact Gaussian attention of signed features, by the constant that is added."""
    rows = records.rows("learned-kernels/kernels.json", "errors")
    by = {(x[0], x[1], x[2]): f"{x[3]:.3f}" for x in rows}
    keys = list(dict.fromkeys((x[0], x[1]) for x in rows))
    sizes = sorted({x[2] for x in rows})
    cells = [[f"{norm:g}", smooth, *(by[norm, smooth, m] for m in sizes)] for norm, smooth in keys]
    return grid(["norm of q and k", "`smoothing`", *(f"m = {m}" for m in sizes)], cells or [[ABSENT]])


@table
def twins(records: Records) -> str:
    """Our models beside plain PyTorch ones: the mean over seeds, with its standard error."""
    rows = [x | {"task": "digits"} for x in records.rows("twins/digits/twins.json", "summary")]
    rows += records.rows("twins/twins.json", "summary")
    by = {(x["task"], x["variant"]): x for x in rows}
    tasks = list(dict.fromkeys(x["task"] for x in rows))
    metrics = {x["task"]: x["metric"] for x in rows}
    cells = []
    for variant in dict.fromkeys(x["variant"] for x in rows):
        found = [by.get((task, variant)) for task in tasks]
        cells.append([variant, *("" if x is None else f"{x['mean']:.2f} ± {x['error']:.2f}" for x in found)])
    head = ["model", *(f"{task}, {metrics[task]}" for task in tasks)]
    return grid(head, cells) if cells else grid(["model"], [[ABSENT]])


ESTIMATORS = {
    "positive": "positive",
    "trigonometric, as printed": "trigonometric",
    "trigonometric, denominators clamped as in this library": "trigonometric, clamped",
}


def _with_deviation(row: dict[str, float]) -> str:
    mean, deviation = row["mean"], row["deviation"]
    return f"{mean:.0f} ± {deviation:.0f}" if mean >= 10 else f"{mean:.2g} ± {deviation:.1g}"


@table
def estimators(records: Records) -> str:
    """Mean squared error of attention's output by orthogonal features, over the norm of queries and keys."""
    some = records.rows("performer/estimators.json", "output")
    by = {(x["estimator"], x["norm"]): x for x in some if (x["draw"], x["num_features"]) == ("orthogonal", 64)}
    norms = sorted({norm for _, norm in by})
    rows = [
        [shown, *(_with_deviation(by[name, norm]) for norm in norms)] for shown, name in ESTIMATORS.items() if norms
    ]
    rows += [["the mean of all values, no attention at all", *(f"{by['positive', x]['uniform']:.2g}" for x in norms)]]
    head = ["mean squared error of the output, orthogonal draws, m = 64", *(f"norm {x:g}" for x in norms)]
    return grid(head, rows if norms else [[ABSENT]])


@table
def packing(records: Records) -> str:
    """Tokens per second of packed rows over padded ones."""
    rates = records.rows("speed/packing/packing.json", "rates")
    rows = [[f"`{x['attention']}`", f"{x['packed'] / x['padded']:.1f}x"] for x in rates]
    return grid(["sequences of 290 tokens in rows of 1024, one thread", "packed over padded"], rows or [["", ABSENT]])
