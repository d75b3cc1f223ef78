"""Tables for choosing a method, and the main figures."""

from __future__ import annotations

from statistics import fmean

from pages import conversion, speed, training
from pages.records import ABSENT, Records, grid, joined, show, table

LONGER = (4096, 8192)


def _encoder(records: Records) -> str:
    ratios = [speed.encoder_ratio(records, "regular", n) for n in LONGER]
    return joined([show(x, "{:.1f}x") for x in ratios])


def _skyformer(records: Records) -> str:
    return records.bench(speed.SKYFORMER).faster("skyformer", "sdpa", "bidirectional", speed.LONG, backward=True)


def _language(records: Records) -> str:
    bits = [training.mean(records, "bytes-stdlib", x) for x in (training.BIASED, "softmax", "favor+:num_features=64")]
    return (
        f"small model of Python source, 300 steps, three seeds: {bits[0]} bits per byte; without relative positions "
        f"`softmax` {bits[1]}, `favor+` {bits[2]}"
    )


def _near(records: Records) -> str:
    def both(label: str) -> str:
        names = (f"2026-11-17-rotary-{x}" for x in training.LANGUAGE.values())
        return joined([training.mean(records, x, training.ROTARY[label]) for x in names], " and ")

    return (
        f"240 steps, three seeds: {both('`favor+` with window 64 and 4 sinks')} bits per byte on the standard library "
        f"and enwik8, without the window {both('`favor+`')}, `softmax` {both('`softmax`')}, the window alone (`local`) "
        f"{both('`local:window=64:sinks=4`')}: so early only what is near is learned"
    )


def _wildcat(records: Records) -> str:
    def mean(attention: str, length: int) -> str:
        some = conversion.wildcat_cosine(records, attention, length)
        return show(fmean(some) if some else None)

    near, long = "wildcat:num_landmarks=64:window=32:sinks=1", conversion.untrained_cosine(records)
    others = {"skyformer": "skyformer:num_landmarks=128:kernel=softmax", "loglinear": "loglinear:num_features=128"}
    others["favor+"] = "favor+:num_features=128"
    cosines = {k: conversion.cosine(records, "minilm-methods", x) for k, x in others.items()}
    rest = ", ".join(f"`{k}` {show(x, '{:.2f}')}" for k, x in cosines.items())
    return (
        f"MiniLM, every layer, three seeds: mean cosine {show(long)} to the original's embeddings at 512 tokens "
        f"(128 landmarks, the default); with 64 {mean(near, 512)}, and {mean(near, 256)} at 256 tokens; there without "
        f"the window {mean('wildcat:num_landmarks=64', 256)} (64) and {mean('wildcat:num_landmarks=128', 256)} (128). "
        f"With 128 features, one seed, 256 tokens: {rest}"
    )


def _encoder_distilled(records: Records) -> str:
    record = records.get("conversion/minilm-window.json")
    if not record:
        return ABSENT
    reports, probe = record["reports"], record["judged"]["probe"]
    minutes = sum(x["seconds"] for x in record["spent"].values()) / 60
    gap = 100 * (probe["converted"] - probe["original"])
    return (
        f"MiniLM, one seed, {record['length']} tokens: {reports['converted']['cosine']:.3f} as converted, "
        f"{reports['distilled']['cosine']:.3f} after {minutes:.0f} minutes of one core; a classifier on the "
        f"embeddings {100 * probe['converted']:.1f}%, with the original {100 * probe['original']:.1f}% "
        f"(difference {gap:.1f} ± {100 * probe['error']:.1f})"
    )


def _decoder(records: Records) -> str:
    name = "smollm2-recall-heads"
    kept, linear = conversion.perplexities(records, name), conversion.perplexities(records, "smollm2-window")
    if not kept or not linear:
        return ABSENT
    models = ("converted", "window and sinks alone", "original")
    own, near, original = (conversion.found(records, name, x) for x in models)
    ratios = [kept[x] / kept["original"] for x in ("as converted", "after LoRA")]
    return (
        f"SmolLM2, 264 of 270 heads linear: {ratios[0]:.2f} times the original's perplexity as converted, "
        f"{ratios[1]:.2f} after distillation; hidden numbers found in 512 to 4096 tokens: {own}, by the original "
        f"{original}, by the exact heads, window and sinks alone {near}. All heads linear: "
        f"{linear['after LoRA'] / linear['original']:.2f} times, hidden numbers "
        f"{conversion.found(records, 'smollm2-window', 'converted')}. One seed each"
    )


def _learned(records: Records) -> str:
    bench, ratios = records.bench(speed.LEARNED), []
    for row in bench.rows:
        ratio = bench.ratio(row["name"], "favor+", **{x: row["case"][x] for x in ("task", "length", "backward")})
        if row["name"] != "favor+" and ratio is not None:
            ratios.append(ratio)
    said = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ABSENT
    return f"time over that of `favor+` at equal features, 16384 tokens: {said}"


def _elu(records: Records) -> str:
    elu, favor = (training.mean(records, "bytes-stdlib", x) for x in ("elu", "favor+:num_features=64"))
    return f"{elu} bits per byte where `favor+` with 64 features has {favor} (standard library, three seeds)"


def _grid(records: Records) -> str:
    names = ("nprf:num_features=32:draw=iid:relative=2d", "nprf:num_features=32:draw=iid", "softmax")
    own, without, exact, both = (
        training.of_item(records, "cifar", x, scale=100) for x in (*names, "softmax:relative=2d")
    )
    return (
        f"CIFAR-10 in 64 patches, 1,000 steps, three seeds: accuracy {own}%, without these positions {without}%; "
        f"`softmax` with them {both}%, without {exact}%"
    )


def _translation(records: Records) -> str:
    bias = ":draw=iid:relative=1d:max_distance=64"
    pair = f"nprf:num_features=16{bias} > nprf:num_features=24{bias}"
    parts = ("softmax to the encoder", "main")
    exact_cross, kernel_cross = (training.of_item(records, "translation", pair, x) for x in parts)
    return (
        f"English-German, 3,000 steps, three seeds: BLEU {exact_cross}, with `favor+` to the encoder {kernel_cross}; "
        f"`softmax` without relative positions {training.of_item(records, 'translation', 'softmax')}"
    )


@table
def choice(records: Records) -> str:
    """A method for each purpose, with its measurements."""
    training_speed = speed.against_sdpa(records, "bidirectional", backward=True)
    bias = joined([speed.bias_training(records, x) for x in ("bidirectional", "causal")])
    rows = [
        [
            "a long encoder, trained from scratch",
            "`favor+`",
            f"how many times faster, forward + backward at 1024 / 4096 / 16384 tokens: {training_speed}; a whole "
            f"encoder of 6 layers at 4096 / 8192: {_encoder(records)}",
        ],
        [
            "the same with landmarks instead of random features",
            "`skyformer`",
            f"forward + backward at 16384 tokens with 128 landmarks: {_skyformer(records)}",
        ],
        [
            "a causal language model, trained from scratch",
            '`nprf` with `relative="1d", max_distance=64`',
            _language(records),
        ],
        [
            "the same by any kernel: [exact nearby](../reference/near-and-far.md), the kernel for the rest",
            "`favor+` with `window=64, sinks=4, rotary=True`",
            _near(records),
        ],
        [
            "to generate long texts in constant memory",
            "`favor+`, or `nprf` as above",
            "how many times faster a token is after 1024 / 4096 / 16384 / 65536 others than with a cache of all keys: "
            f"{speed.decode(records)}",
        ],
        [
            "relative positions at long lengths",
            '`nprf` with `relative="1d", max_distance=128`',
            "forward + backward at 16384 tokens against SDPA with the same positions, bidirectional / causal: " + bias,
        ],
        ["images, tokens on a grid", '`nprf` with `relative="2d", grid=(rows, columns)`', _grid(records)],
        [
            "an encoder-decoder, trained from scratch",
            '`nprf` with `relative="1d", max_distance=64` in both, `cross_attention="softmax"` between them',
            _translation(records),
        ],
        [
            "a pretrained encoder, without any training",
            "`wildcat` with `window=32, sinks=1`",
            _wildcat(records),
        ],
        [
            "a pretrained encoder, with minutes of distillation",
            "`loglinear` with `window=64, sinks=1`",
            _encoder_distilled(records),
        ],
        [
            "a pretrained decoder",
            "`loglinear` with `window=64, sinks=4` and `--recall-heads 6`",
            _decoder(records),
        ],
        ["kernels that are learned", "`gmm-rks`, `fastfood-prf`", _learned(records)],
        ["the smallest change without random numbers", "`elu`", _elu(records)],
        ["exact attention, to compare with", "`softmax`, `gaussian`", "quadratic, by the same interface"],
    ]
    return grid(["You want", "Take", "Measured on two CPU cores, against torch's own attention (SDPA)"], rows)


@table
def choice_brief(records: Records) -> str:
    """A method for each purpose, in a line each; `choice` has more."""
    bench = records.bench(speed.ATTENTION)
    faster = bench.faster("favor+", "sdpa", "bidirectional", speed.LONG, backward=True)
    longest = records.bench(speed.DECODE).faster("favor+", "sdpa", "decode", 65536)
    bits = [training.mean(records, "bytes-stdlib", x) for x in (training.BIASED, "softmax")]
    fitted = records.get("conversion/minilm-window.json")
    kept = conversion.perplexities(records, "smollm2-recall-heads")
    distilled = fitted["reports"]["distilled"]["cosine"] if fitted else None
    ratio = f"{kept['after LoRA'] / kept['original']:.2f} times" if kept else ABSENT
    rows = [
        ["a long encoder, trained from scratch", "`favor+`", f"training step at 16384 tokens: {faster} as fast"],
        [
            "a language model, trained from scratch",
            '`nprf` with `relative="1d", max_distance=64`',
            f"{bits[0]} bits per byte, `softmax` without such positions {bits[1]} (300 steps)",
        ],
        ["long texts in constant memory", "the same, or `favor+`", f"a token after 65536 others: {longest} as fast"],
        [
            "a pretrained encoder, without training",
            "`wildcat` with `window=32, sinks=1`",
            f"MiniLM at 512 tokens: cosine {show(conversion.untrained_cosine(records))} to its own embeddings",
        ],
        [
            "the same, with minutes of distillation",
            "`loglinear` with `window=64, sinks=1`",
            f"MiniLM at 256 tokens: cosine {show(distilled)}",
        ],
        [
            "a pretrained decoder",
            "`loglinear` with `window=64, sinks=4`, `--recall-heads 6`",
            f"SmolLM2: {ratio} its own perplexity",
        ],
    ]
    return grid(["You want", "Take", "Measured on two CPU cores, against torch's SDPA"], rows)


@table
def short(records: Records) -> str:
    """Lengths at which linear attention is not faster yet."""
    both = [speed.against_sdpa(records, x, backward=False) for x in ("bidirectional", "causal")]
    return (
        f"- **Not faster when short.** A forward of `favor+` at 1024 / 4096 / 16384 tokens against SDPA (above 1: "
        f"faster): bidirectional {both[0]}, causal {both[1]}; a token after 1024 / 4096 / 16384 / 65536 others: "
        f"{speed.decode(records)}."
    )


@table
def figures(records: Records) -> str:
    """The main figures."""
    long = records.bench(speed.MEMORY)
    bounds = [speed.encoder_ratio(records, "regular", n, "opt") for n in LONGER]
    tasks = ("bidirectional", "causal")
    rows = {
        "`favor+`, m = 256, against SDPA: bidirectional forward + backward, L = 1024 / 4096 / 16384": (
            speed.against_sdpa(records, "bidirectional", backward=True)
        ),
        "the same, causal": speed.against_sdpa(records, "causal", backward=True),
        "decoding after 1024 / 4096 / 16384 / 65536 tokens against SDPA with a cache": speed.decode(records),
        "memory of a forward beyond inputs and outputs, L = 65536, bidirectional / causal": (
            joined([long.beyond("favor+", x, 65536) for x in tasks])
        ),
        "a whole encoder (6 layers, d = 512), forward + backward, L = 4096 / 8192, against SDPA": _encoder(records),
        "the same: its time over that with attention that returns V, the best that any could do": (
            joined([show(x and 1 / x, "{:.2f}x") for x in bounds])
        ),
        "`skyformer`, 128 landmarks, L = 16384, forward + backward, against SDPA": _skyformer(records),
        "relative bias, `nprf`, window 128, L = 16384, forward + backward, against SDPA, bidirectional / causal": (
            joined([speed.bias_training(records, x) for x in tasks])
        ),
    }
    names = {"`nprf` + bias": training.BIASED, "`softmax`": "softmax", "`elu`": "elu"}
    names["`favor+`"] = "favor+:num_features=64"
    for shown, label in names.items():
        bits = [training.mean(records, f"bytes-{x}", label) for x in training.LANGUAGE.values()]
        rows[f"bits per byte after 300 steps, three seeds, standard library / enwik8: {shown}"] = joined(bits)
    return grid(["what", "measured"], [[*x] for x in rows.items()])
