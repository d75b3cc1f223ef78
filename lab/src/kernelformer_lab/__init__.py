"""Training, benchmarks and reproductions for kernelformer."""

__version__ = "0.2.0"
