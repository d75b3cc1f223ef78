"""Small studies of the papers, at a size for a CPU; `STUDIES` has them by name, without importing what measures."""

from __future__ import annotations

from kernelformer_lab.studies import settings
from kernelformer_lab.studies.base import Study

__all__ = ["STUDIES", "Study"]

STUDIES: dict[str, Study] = {
    x.name: x
    for x in (
        Study(
            "conversion",
            "Which method converts a pretrained model best, as it is and after distillation",
            "Performer (2009.14794), Fig. 5, for all methods of this library",
            settings.ConversionSettings,
            resumes=True,
            examples=(("MODEL --distill train.jsonl --text test.jsonl", "all methods, before and after"),),
        ),
        Study(
            "normalized",
            "Standard and normalized models made linear without fine-tuning; trained models are kept",
            "NPRF with RPE (2106.12566), Fig. 2",
            settings.NormalizedSettings,
            resumes=True,
            writes="the models",
            examples=(("--steps 600 --features 16,64,256", "four small models, made linear"),),
        ),
        Study(
            "transfer",
            "Weights of a softmax model in models with random features: at once, fine-tuned, and beside a fresh start",
            "Performer (2009.14794), Fig. 5 left",
            settings.TransferSettings,
            resumes=True,
            writes="the models",
            examples=(("--data enwik8 --steps 800 --tuning 100", "a small model, moved to random features"),),
        ),
        Study(
            "lengths",
            "From which length on a converted model is faster and leaner than the original",
            "",
            settings.LengthsSettings,
            resumes=True,
            examples=(("MODEL --lengths 512,2048,8192", "time and memory of the original and the converted"),),
        ),
        Study(
            "serving",
            "What a converted decoder saves: prefill, decoding and the cache over the length of the prompt",
            "",
            settings.ServingSettings,
            resumes=True,
            examples=(("--model MODEL --lengths 1024,16384", "prefill, decoding and the cache"),),
        ),
        Study(
            "exported",
            "An encoder and its converted copies, in torch and in onnxruntime with that runtime's own attention",
            "",
            settings.ExportedSettings,
            resumes=True,
            examples=(("--model MODEL --lengths 1024,4096", "an encoder and its converted copies in both runtimes"),),
        ),
        Study(
            "sparsity",
            "Which kernels learn to ignore: learning curves on sums of relevant values",
            "KL-Transformer (2110.08323), App. E, Fig. 6",
            settings.SparsitySettings,
            resumes=True,
            writes="the runs",
            examples=(("--attention softmax,gmm-rks --seeds 3", "learning curves of two kernels"),),
        ),
        Study(
            "redraws",
            "How redraws of random features change the outputs of trained classifiers, and what kernels have learned",
            "KL-Transformer (2110.08323), Fig. 5, 9, 10 and Tables 4, 9-12, 14",
            settings.RedrawsSettings,
            resumes=True,
            examples=(("out/sky-text --draws 100", "of all runs of a comparison"),),
        ),
        Study(
            "kernels",
            "Where learned kernels start, and what the smoothing of signed ones costs",
            "",
            settings.NoSettings,
            examples=(("", "a picture and a table"),),
        ),
        Study(
            "features",
            "Error of attention by number of features, and time at equal error, for all maps that stand for softmax",
            "",
            settings.FeaturesSettings,
            resumes=True,
            writes="features.md",
            examples=(
                ("--norms 1,3 --threads 1", "on synthetic queries and keys"),
                ("--model MODEL --text test.jsonl", "and on those of a pretrained model"),
            ),
        ),
        Study(
            "approximation",
            "Spectral error inside a real encoder, condition numbers and the statistical dimension",
            "Skyformer (2111.00035), Fig. 1, Theorem 2 and App. F",
            settings.ApproximationSettings,
            examples=(("--model MODEL --text test.jsonl", "inside a real encoder"),),
        ),
        Study(
            "estimators",
            "Errors of trigonometric and positive, independent and orthogonal features, and the theorems on them",
            "Performer (2009.14794), Fig. 2 and 4, Theorems 1 to 4",
            settings.EstimatorsSettings,
            resumes=True,
            examples=(("--length 1024", "smaller than the paper's"),),
        ),
        Study(
            "depth",
            "How the errors of approximate attention grow over the layers of a pretrained model",
            "Performer (2009.14794), Fig. 14",
            settings.DepthSettings,
            resumes=True,
            examples=(("MODEL --text test.jsonl", "layer by layer"),),
        ),
        Study(
            "amino-acids",
            "Similarity of amino acids in the attention of a protein model, original and converted, against BLOSUM62",
            "Performer (2009.14794), Fig. 13",
            settings.AminoAcidsSettings,
            resumes=True,
            examples=(("MODEL --text sequences.txt", "of a protein language model"),),
        ),
        Study(
            "positions",
            "Errors over the norm of queries and keys, and the time of a forward with relative positions",
            "NPRF with RPE (2106.12566), Fig. 1",
            settings.PositionsSettings,
            examples=(("--lengths 1024,4096", "errors and times"),),
        ),
        Study(
            "encoder",
            "Speed and memory of whole encoders against SDPA and the upper bound",
            "Performer (2009.14794), Fig. 3 and 20",
            settings.EncoderSettings,
            resumes=True,
            examples=(("--sizes small --lengths 1024,4096", "whole encoders against SDPA"),),
        ),
        Study(
            "overhead",
            "How much of a training step is outside of tensor operations",
            "",
            settings.OverheadSettings,
            examples=(("listops", "of a training step of a recipe"),),
        ),
        Study(
            "twins",
            "Our models beside plain PyTorch ones of the same size: what first weights, pooling and the head cost",
            "",
            settings.TwinsSettings,
            resumes=True,
            examples=(("--images cifar10 --image-size 16 --patch 4 --seeds 3", "three pairs of models"),),
        ),
        Study(
            "packing",
            "Tokens per second in training on short sequences, padded and packed into rows",
            "",
            settings.PackingSettings,
            examples=(("--length 1024 --median 290", "padded against packed rows"),),
        ),
        Study(
            "short",
            "Many short sequences and one token at a time: time beside SDPA's, now and by the loop over chunks",
            "",
            settings.ShortSettings,
            examples=(("--features 64 --budget 0.3", "many short sequences, and a step, beside SDPA"),),
        ),
        Study(
            "ranks",
            "One sequence over several processes: time against independent ones, bytes exchanged, memory of each",
            "",
            settings.RanksSettings,
            examples=(("--ranks 2 --length 8192", "two processes of one thread each"),),
        ),
        Study(
            "tour",
            "Two minutes of figures: error by number of features, speed and memory by length, decoding by context",
            "Performer (2009.14794), Fig. 3 and 4",
            settings.NoSettings,
            examples=(("", "two minutes of figures, in out"),),
        ),
    )
}
