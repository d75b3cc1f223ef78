"""Small studies of the papers, at a size for a CPU; `STUDIES` has them by name, without importing what measures."""

from __future__ import annotations

from kernelformer.studies import settings
from kernelformer.studies.base import Study

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
        ),
        Study(
            "normalized",
            "Standard and normalized models made linear without fine-tuning; trained models are kept",
            "NPRF with RPE (2106.12566), Fig. 2",
            settings.NormalizedSettings,
            resumes=True,
            writes="the models",
        ),
        Study(
            "transfer",
            "Weights of a softmax model in models with random features: at once, fine-tuned, and beside a fresh start",
            "Performer (2009.14794), Fig. 5 left",
            settings.TransferSettings,
            resumes=True,
            writes="the models",
        ),
        Study(
            "lengths",
            "From which length on a converted model is faster and leaner than the original",
            "",
            settings.LengthsSettings,
            resumes=True,
        ),
        Study(
            "serving",
            "What a converted decoder saves: prefill, decoding and the cache over the length of the prompt",
            "",
            settings.ServingSettings,
            resumes=True,
        ),
        Study(
            "exported",
            "An encoder and its converted copies, in torch and in onnxruntime with that runtime's own attention",
            "",
            settings.ExportedSettings,
            resumes=True,
        ),
        Study(
            "sparsity",
            "Which kernels learn to ignore: learning curves on sums of relevant values",
            "KL-Transformer (2110.08323), App. E, Fig. 6",
            settings.SparsitySettings,
            resumes=True,
            writes="the runs",
        ),
        Study(
            "redraws",
            "How redraws of random features change the outputs of trained classifiers, and what kernels have learned",
            "KL-Transformer (2110.08323), Fig. 5, 9, 10 and Tables 4, 9-12, 14",
            settings.RedrawsSettings,
            resumes=True,
        ),
        Study(
            "kernels",
            "Where learned kernels start, and what the smoothing of signed ones costs",
            "",
            settings.NoSettings,
        ),
        Study(
            "features",
            "Error of attention by number of features, and time at equal error, for all maps that stand for softmax",
            "",
            settings.FeaturesSettings,
            resumes=True,
            writes="features.md",
        ),
        Study(
            "approximation",
            "Spectral error inside a real encoder, condition numbers and the statistical dimension",
            "Skyformer (2111.00035), Fig. 1, Theorem 2 and App. F",
            settings.ApproximationSettings,
        ),
        Study(
            "estimators",
            "Errors of trigonometric and positive, independent and orthogonal features, and the theorems on them",
            "Performer (2009.14794), Fig. 2 and 4, Theorems 1 to 4",
            settings.EstimatorsSettings,
            resumes=True,
        ),
        Study(
            "depth",
            "How the errors of approximate attention grow over the layers of a pretrained model",
            "Performer (2009.14794), Fig. 14",
            settings.DepthSettings,
            resumes=True,
        ),
        Study(
            "amino-acids",
            "Similarity of amino acids in the attention of a protein model, original and converted, against BLOSUM62",
            "Performer (2009.14794), Fig. 13",
            settings.AminoAcidsSettings,
            resumes=True,
        ),
        Study(
            "positions",
            "Errors over the norm of queries and keys, and the time of a forward with relative positions",
            "NPRF with RPE (2106.12566), Fig. 1",
            settings.PositionsSettings,
        ),
        Study(
            "encoder",
            "Speed and memory of whole encoders against SDPA and the upper bound",
            "Performer (2009.14794), Fig. 3 and 20",
            settings.EncoderSettings,
            resumes=True,
        ),
        Study("overhead", "How much of a training step is outside of tensor operations", "", settings.OverheadSettings),
        Study(
            "twins",
            "Our models beside plain PyTorch ones of the same size: what first weights, pooling and the head cost",
            "",
            settings.TwinsSettings,
            resumes=True,
        ),
        Study(
            "packing",
            "Tokens per second in training on short sequences, padded and packed into rows",
            "",
            settings.PackingSettings,
        ),
        Study(
            "short",
            "Many short sequences and one token at a time: time beside SDPA's, now and by the loop over chunks",
            "",
            settings.ShortSettings,
        ),
        Study(
            "ranks",
            "One sequence over several processes: time against independent ones, bytes exchanged, memory of each",
            "",
            settings.RanksSettings,
        ),
        Study(
            "tour",
            "Two minutes of figures: error by number of features, speed and memory by length, decoding by context",
            "Performer (2009.14794), Fig. 3 and 4",
            settings.NoSettings,
        ),
    )
}
