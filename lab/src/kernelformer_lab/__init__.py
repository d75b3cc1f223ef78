"""Training, benchmarks and reproductions for kernelformer.

Importing it registers sparse layers of transformers, to compare with, for the encoders of `kernelformer.models`.
"""

from kernelformer.lazy import LAYERS, Layer

__version__ = "0.2.0"

_HOME = f"{__name__}.sparse_layers:"
_KIND = "; a layer of transformers, in encoders only"
LAYERS |= {
    "bigbird": Layer(
        f"{_HOME}BigBirdLayer",
        f"blocks nearby, random ones, and the first and the last one (BigBird){_KIND}",
        ("block_size", "num_random_blocks", "seed"),
    ),
    "longformer": Layer(
        f"{_HOME}LongformerLayer",
        f"a sliding window, and first tokens that see all (Longformer){_KIND}",
        ("window", "num_global"),
    ),
    "reformer": Layer(
        f"{_HOME}ReformerLayer",
        f"tokens of one bucket of a hash; queries are the keys (Reformer){_KIND}",
        ("chunk_length", "num_hashes", "seed"),
    ),
    "informer": Layer(
        f"{_HOME}InformerLayer",
        f"the queries that stand out attend to all, the others take the mean (Informer){_KIND}",
        ("sampling_factor", "seed"),
    ),
}
