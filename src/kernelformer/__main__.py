"""``python -m kernelformer`` is the command ``kernelformer``."""

from kernelformer.cli import main

if __name__ == "__main__":
    main()
