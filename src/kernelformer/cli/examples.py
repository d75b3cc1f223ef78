"""Examples that stand at the end of each command's help: what follows the command's name, and what it does."""

from __future__ import annotations

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
