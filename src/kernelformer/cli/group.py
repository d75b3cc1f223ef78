"""Commands and groups as typer builds them, with help in parts, examples, and errors of one or two lines."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption

from kernelformer.cli.common import console, errors, fail
from kernelformer.commands import program
from kernelformer.errors import unknown

INPUT = "Input"
ATTENTION = "Attention"
SIZE = "Size"
TRAINING = "Training"
DISTILLATION = "Distillation"
MEASURING = "Measuring"
WRITING = "Writing text"
RUNNING = "Running"
OUTPUT = "Output"

_PARTS: dict[str, str] = {
    INPUT: "allow_pickle baselines column data date encoder held_out images list_ model original pattern peers prompt "
    "quick random recipe relevances samples sequence sequences skip_bad split task tasks text texts tokenizer add",
    ATTENTION: "attention bias features gamma heads_exact keep keep_heads layers max_distance norms recall_heads "
    "scale sinks window draw draws first_draw",
    SIZE: "batch depths deep_lengths dims head_dim heads image_size length lengths median patch size sizes "
    "crowded_length chunk width time_length step_features step_heads use_length shard_tokens validation_share "
    "test_share ranks softmax",
    TRAINING: "context_parallel learning_rate resume seeds set sets steps timeout tuning tuning_learning_rate",
    DISTILLATION: "distill lora lora_layers minutes repeats seconds tune window_dropout",
    MEASURING: "backward budget check compiled contexts errors generate gradients heap heaps judge_minutes max_seconds "
    "memory modes no_judge passes passkey_lengths passkeys probe resamples rounds sample_tokens tolerance",
    WRITING: "beams length_penalty temperature tokens top_k",
    RUNNING: "device follow_links hours limits seed threads",
    OUTPUT: "as_json force growing logits pictures prompt_only help out page records save tables version",
}
PANELS: dict[str, str] = {name: part for part, names in _PARTS.items() for name in names.split()}


EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "list": (
        ("", "all methods, tasks and recipes"),
        ("favor+", "the options of a method"),
        ("sky-text", "the settings of a recipe"),
        ("methods --json", "for a script"),
    ),
    "doctor": (("", "versions, what is missing, threads, devices and a quick self-check"), ("--json", "for a report")),
    "demo": (("", "four attentions on the source of Python's standard library"),),
    "prepare": (
        ("my.txt --tokenizer bytes --out corpus", "then: kernelformer train shards --data corpus"),
        ("texts/ --tokenizer tokenizer.json --out corpus", "a folder of texts, with a tokenizer of its own"),
    ),
    "train": (
        ("bytes --attention favor+ --data my.txt", "a language model of bytes, into out/bytes"),
        ("out/bytes --resume", "go on after Ctrl-C or a crash"),
        ("listops --set learning_rate=1e-3 --set model.hidden_size=64", "change any setting"),
    ),
    "evaluate": (("out/bytes --split test", "the scores on the test split"),),
    "compare": (
        ("listops --attention softmax,favor+,skyformer --seeds 3", "a report into out/listops"),
        ("out/listops --resume", "go on with it"),
    ),
    "generate": (('out/bytes --prompt "def " --tokens 2000', "in constant memory"),),
    "translate": (("out/rpe-translation --text my.txt", "one line for each"),),
    "advise": (("MODEL --text test.jsonl --out out/advice", "what the model can be converted to, as a page too"),),
    "convert": (
        ("MODEL linear --text test.jsonl", "without training, and measured"),
        ("MODEL linear --distill train.jsonl --minutes 30", "distilled for half an hour"),
        ("MODEL linear --attention favor+:window=64 --layers 0-3", "another attention, in some layers"),
    ),
    "judge": (("linear --original MODEL --text test.jsonl", "parts, recall and samples, beside the original"),),
    "export": (("out/bytes exported", "a finished run as ONNX, with a script that generates without torch"),),
    "continue": (('linear --prompt "Once upon a time" --tokens 200', "with a converted decoder"),),
    "attention": (
        ('MODEL linear --prompt "A sentence."', "out/attention.png"),
        ("MODEL --attention favor+ --layers 0-3 --heads 0,1", "without a converted model"),
    ),
    "bench": (
        ("--lengths 1024,4096 --attention favor+,skyformer", "bench.json and bench.png in out"),
        ("--modes causal --passes forward --peers none --json", "a part of it, for a script"),
    ),
    "reproduce": (
        ("--list", "the items, and how far each is"),
        ("variance --list", "its claims, and what decides on them"),
        ("variance --data data --hours 2", "one of them, for at most two hours"),
    ),
    "results": (
        ("--add out/sky-text", "on record, with a page of all"),
        ("--tables", "the tables of README.md and docs from the records"),
    ),
    "study conversion": (("MODEL --distill train.jsonl --text test.jsonl", "all methods, before and after"),),
    "study transfer": (("--data enwik8 --steps 800 --tuning 100", "a small model, moved to random features"),),
    "study normalized": (("--steps 600 --features 16,64,256", "four small models, made linear"),),
    "study lengths": (("MODEL --lengths 512,2048,8192", "time and memory of the original and the converted"),),
    "study serving": (("--model MODEL --lengths 1024,16384", "prefill, decoding and the cache"),),
    "study sparsity": (("--attention softmax,gmm-rks --seeds 3", "learning curves of two kernels"),),
    "study redraws": (("out/sky-text --draws 100", "of all runs of a comparison"),),
    "study kernels": (("", "a picture and a table"),),
    "study features": (
        ("--norms 1,3 --threads 1", "on synthetic queries and keys"),
        ("--model MODEL --text test.jsonl", "and on those of a pretrained model"),
    ),
    "study approximation": (("--model MODEL --text test.jsonl", "inside a real encoder"),),
    "study estimators": (("--length 1024", "smaller than the paper's"),),
    "study depth": (("MODEL --text test.jsonl", "layer by layer"),),
    "study amino-acids": (("MODEL --text sequences.txt", "of a protein language model"),),
    "study positions": (("--lengths 1024,4096", "errors and times"),),
    "study encoder": (("--sizes small --lengths 1024,4096", "whole encoders against SDPA"),),
    "study overhead": (("listops", "of a training step of a recipe"),),
    "study packing": (("--length 1024 --median 290", "padded against packed rows"),),
    "study ranks": (("--ranks 2 --length 8192", "two processes of one thread each"),),
    "study exported": (("--model MODEL --lengths 1024,4096", "an encoder and its converted copies in both runtimes"),),
    "study short": (("--features 64 --budget 0.3", "many short sequences, and a step, beside SDPA"),),
    "study twins": (("--images cifar10 --image-size 16 --patch 4 --seeds 3", "three pairs of models"),),
    "study tour": (("", "two minutes of figures, in out"),),
}


# typer carries its own copy of click from some version on; the class of its usage errors is the base of this one.
UsageError: Any = typer.BadParameter.__mro__[1]
ORDER = list(dict.fromkeys(PANELS.values()))


class Command(TyperCommand):
    """A command whose options stand in the parts of the help that `PANELS` names, with examples at the end."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, those of one part of the help after another."""
        params = _switches_alone(super().get_params(ctx))
        for option in params:  # that for the help is there only now
            if isinstance(option, TyperOption) and option.rich_help_panel is None:
                option.rich_help_panel = PANELS.get(str(option.name))
        return sorted(params, key=lambda x: _place(getattr(x, "rich_help_panel", None)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the examples of this command."""
        super().format_help(ctx, formatter)
        lines = examples(_path(ctx))
        if lines:
            console.print(Text.assemble((" Examples\n", "bold"), *(x for line in lines for x in line)), soft_wrap=True)


class Group(TyperGroup):
    """A group of commands that names the nearest one, and says what is wrong with a call in one or two lines."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters."""
        return _switches_alone(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named, or an error with the nearest name, of the studies too."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [x for x in self.commands if not self.commands[x].hidden]
            for name, other in self.commands.items():
                if isinstance(other, TyperGroup):
                    known += [f"{name} {x}" for x in other.commands]
                    if args[0] in other.commands:
                        ctx.fail(f"{args[0]!r} is a command of {name!r}; say `{program()} {name} {args[0]}`.")
            ctx.fail(str(unknown("command", args[0], known)))
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, prog_name: Any = None, standalone_mode: bool = True, **settings: Any) -> Any:  # type: ignore[override]
        """Run a command; a call that it does not understand ends without a traceback and without a frame."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **settings)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **settings)
        except UsageError as problem:
            _end(problem)
        except typer.Abort:
            errors.print("stopped")
            sys.exit(130)
        finally:
            console.stderr = False  # a command with --json has changed that, and there may be a next one
        sys.exit(code if isinstance(code, int) else 0)


def examples(path: str) -> list[tuple[str, tuple[str, str]]]:
    """Examples of a command for the end of its help: each with what it does, which is printed dimly."""
    return [
        (f"   kernelformer {path} {words}".rstrip(), (f"   # {about}\n", "dim"))
        for words, about in EXAMPLES.get(path, ())
    ]


def _path(ctx: Any) -> str:
    """Words of a command after the program's name, which may be ``python -m kernelformer``."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(words)


def _switches_alone(params: list[Any]) -> list[Any]:
    """Let the help show switches without a type: they take no value."""
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return params


def _place(panel: str | None) -> int:
    return ORDER.index(panel) if panel in ORDER else -1


def _end(problem: Any) -> NoReturn:
    """Say what is wrong with a call, in one wording, and end with code 2."""
    if type(problem).__name__ == "NoArgsIsHelpError":  # the help has been printed
        sys.exit(2)
    path = "" if problem.ctx is None else _path(problem.ctx)
    name = getattr(problem, "option_name", None)
    text = str(problem.format_message()).rstrip(".")
    if type(problem).__name__ == "NoSuchOption":
        known = [
            x for option in problem.ctx.command.params if not getattr(option, "hidden", False) for x in option.opts
        ]
        options = [x for x in known if x.startswith("--")] + ["--help"]
        text = str(unknown("option", name, options)).rstrip(".")
    try:
        fail(
            ValueError(f"{_plain(text)}.\n{' '.join(filter(None, (program(), path)))} --help shows what can be given.")
        )
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _plain(text: str) -> str:
    """A sentence of typer as the others are: without capitals at its start, and an option by its name alone."""
    for before, after in (
        ("Invalid value for ", ""),
        ("Input should be ", "it must be "),
        (", unable to parse string as an integer", ""),
        (", unable to parse string as a number", ""),
    ):
        text = text.replace(before, after)
    return text[:1].lower() + text[1:]
