"""Commands of the laboratory, which the program finds by the entry point ``kernelformer.commands``."""

from __future__ import annotations

from kernelformer.cli.group import (
    ATTENTION,
    DISTILLATION,
    INPUT,
    MEASURE,
    MEASURING,
    MODELS,
    OUTPUT,
    PRETRAINED,
    RUNNING,
    SIZE,
    START,
    TRAINING,
    WRITING,
    CommandSet,
    Entry,
    by_option,
)

_PARTS = {
    INPUT: "baselines column data date images list_ model pattern peers quick random recipe relevances skip_bad "
    "split tasks texts tokenizer add",
    ATTENTION: "bias max_distance norms scale sinks window draw draws first_draw",
    SIZE: "depths deep_lengths dims head_dim image_size lengths median patch size sizes crowded_length chunk "
    "width time_length step_features step_heads shard_tokens validation_share test_share ranks softmax",
    TRAINING: "ceiling context_parallel learning_rate resume seeds sets timeout tuning tuning_learning_rate",
    DISTILLATION: "seconds",
    MEASURING: "backward budget compiled contexts errors generate gradients heap heaps max_seconds memory modes "
    "passes resamples rounds starts",
    WRITING: "beams length_penalty",
    RUNNING: "claim device first_seed hours",
    OUTPUT: "pictures page records save tables",
}
COMMANDS = CommandSet(
    {
        "list": Entry(
            "kernelformer_lab.cli.listing:list_",
            START,
            "Show methods, tasks and recipes, a method's options, a recipe's settings, or the progress of a run.",
            (
                ("", "all methods, tasks and recipes"),
                ("favor+", "the options of a method"),
                ("sky-text", "the settings of a recipe"),
                ("methods --json", "for a script"),
            ),
        ),
        "demo": Entry(
            "kernelformer_lab.cli.training:demo",
            START,
            "Compare kernels on real text, about four minutes: the Python standard library's own source, byte by byte.",
            (("", "four attentions on the source of Python's standard library"),),
        ),
        "prepare": Entry(
            "kernelformer_lab.cli.prepare:prepare",
            MODELS,
            "Tokenize texts once, into shards that `train shards` reads; also corpora larger than the memory.",
            (
                ("my.txt --tokenizer bytes --out corpus", "then: kernelformer train shards --data corpus"),
                ("texts/ --tokenizer tokenizer.json --out corpus", "a folder of texts, with a tokenizer of its own"),
            ),
        ),
        "train": Entry(
            "kernelformer_lab.cli.training:train",
            MODELS,
            "Train a model. Also by `torchrun -m kernelformer train ...` on several processes.",
            (
                ("bytes --attention favor+ --data my.txt", "a language model of bytes, into out/bytes"),
                ("out/bytes --resume", "resume after Ctrl-C or a crash"),
                ("listops --set learning_rate=1e-3 --set model.hidden_size=64", "change any setting"),
            ),
        ),
        "evaluate": Entry(
            "kernelformer_lab.cli.training:evaluate",
            MODELS,
            "Measure a trained model on a split.",
            (("out/bytes --split test", "the scores on the test split"),),
        ),
        "compare": Entry(
            "kernelformer_lab.cli.training:compare",
            MODELS,
            "Train several attentions on the same data in the same order, and write a report.",
            (
                ("listops --attention softmax,favor+,skyformer --seeds 3", "a report into out/listops"),
                ("out/listops --resume", "resume it"),
            ),
        ),
        "translate": Entry(
            "kernelformer_lab.cli.translate:translate",
            MODELS,
            "Translate lines of text with a trained model, one line for each.",
            (("out/rpe-translation --text my.txt", "one line for each"),),
        ),
        "attention": Entry(
            "kernelformer_lab.cli.pictures:attention",
            PRETRAINED,
            "Draw attention matrices of a model and of its converted copy, side by side (Performer, App. C.4).",
            (
                ('MODEL linear --prompt "A sentence."', "out/attention.png"),
                ("MODEL --attention favor+ --layers 0-3 --heads 0,1", "without a converted model"),
            ),
        ),
        "bench": Entry(
            "kernelformer_lab.cli.bench:bench",
            MEASURE,
            "Time and weigh methods against their peers, after checking each against its definition.",
            (
                ("--lengths 1024,4096 --attention favor+,skyformer", "bench.json and bench.png in out"),
                ("--modes causal --passes forward --peers none --json", "a part of it, for a script"),
            ),
        ),
        "reproduce": Entry(
            "kernelformer_lab.cli.reproduce:reproduce",
            MEASURE,
            "Measure what the papers claim, item by item, and write the ledger of claims, figures and verdicts.",
            (
                ("--list", "the items, and how far each is"),
                ("variance --list", "its claims, and what decides on them"),
                ("variance --data data --hours 2", "one of them, for at most two hours"),
                ("cifar --claim 1 --first-seed 100 --data data", "one claim again, with other seeds"),
            ),
        ),
        "results": Entry(
            "kernelformer_lab.cli.results:results",
            MEASURE,
            "Put comparisons on record, and show all that are on record on one page.",
            (("--add out/sky-text", "on record, with a page of all"),),
        ),
        "study": Entry(
            "kernelformer_lab.cli.studies:app", MEASURE, "Small studies of the papers, at a size for a CPU."
        ),
    },
    by_option(_PARTS),
)
