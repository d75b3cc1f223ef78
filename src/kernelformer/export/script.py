"""The script beside an exported model, which runs it by onnxruntime and numpy, without torch."""

from __future__ import annotations

from pathlib import Path

BYTES, TOKENIZER, NUMBERS = "bytes", "tokenizer", "numbers"  # what a script makes tokens from

# How tokens are read from the first argument, and written.
_READ = {
    BYTES: ("", "list(sys.argv[1].encode())", "bytes(ids).decode(errors='replace')"),
    TOKENIZER: (
        "from tokenizers import Tokenizer\n",
        'Tokenizer.from_file(str(HERE / "tokenizer.json")).encode(sys.argv[1]).ids',
        'Tokenizer.from_file(str(HERE / "tokenizer.json")).decode(ids)',
    ),
    NUMBERS: ("", "[int(x) for x in sys.argv[1].split()]", "*ids"),
}
_EXAMPLE = {BYTES: "'a text'", TOKENIZER: "'a text'", NUMBERS: "'5 17 3'"}

_GENERATE = '''"""Go on with a text, by onnxruntime and numpy alone: python generate.py {example} 100"""
import sys
from pathlib import Path
{imports}import numpy as np
import onnxruntime as ort

HERE = Path(__file__).parent
prompt, decode = (ort.InferenceSession(str(HERE / name)) for name in ("model.onnx", "decode.onnx"))
ids, states = {read}, [x.name for x in decode.get_inputs()[1:]]
{check}out = prompt.run(None, {{"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}})
for _ in range(int(sys.argv[2])):
    ids.append(int(out[0][0, -1].argmax()))
    out = decode.run(None, {{"input_ids": np.array([ids[-1:]]), **dict(zip(states, out[1:]))}})
print({write})
'''
_READ_WHOLE = '''"""Read a text, by onnxruntime and numpy alone: python run.py {example}"""
import sys
from pathlib import Path
{imports}import numpy as np
import onnxruntime as ort

HERE = Path(__file__).parent
model = ort.InferenceSession(str(HERE / "model.onnx"))
ids = {read}
{check}inputs = {{x.name: np.zeros((1, len(ids)), np.int64) for x in model.get_inputs()}}
inputs |= {{"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}}
np.set_printoptions(suppress=True, threshold=64)
print(model.get_outputs()[0].name, model.run(None, inputs)[0])
'''
_CHECK = 'if {count} > {longest}:\n    sys.exit(f"this model has positions for {longest} tokens, got {{{count}}}.")\n'


def script(generates: bool, tokens: str, longest: int | None) -> tuple[str, str]:
    """The name and the text of a script.

    Args:
        generates: whether it goes on with a text; otherwise it reads one.
        tokens: `BYTES`, `TOKENIZER` or `NUMBERS`.
        longest: tokens that the model has positions for.
    """
    imports, read, write = _READ[tokens]
    # The last token is written and not read again, so it needs no position.
    count = "len(ids) + int(sys.argv[2]) - 1" if generates else "len(ids)"
    check = "" if longest is None else _CHECK.format(count=count, longest=longest)
    text = _GENERATE if generates else _READ_WHOLE
    filled = text.format(imports=imports, read=read, write=write, check=check, example=_EXAMPLE[tokens])
    return "generate.py" if generates else "run.py", filled


def token_kind(folder: Path, vocabulary: int) -> str:
    """What the tokens of a model are: those of its tokenizer, bytes where it has none and 256 tokens, or numbers."""
    if (folder / "tokenizer.json").is_file():
        return TOKENIZER
    return BYTES if vocabulary == 256 else NUMBERS
