"""Install an old version of the library beside this one, and compare their speed in one interleaved run.

python tools/old_wheel.py install 129bebe out/old     # and its wheel in out/old.wheel; PYTHONPATH=out/old imports it
python tools/old_wheel.py compare out/old             # seconds and ratios, a JSON object a line; on an idle machine
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT, ROUNDS, SECONDS = Path(__file__).resolve().parents[1], 4, 0.4
FEATURES, FEW, MARKS, CAUSAL = {"num_features": 256}, {"num_features": 64}, {"num_landmarks": 128}, {"is_causal": True}
NEAR, LEVEL = {"window": 64, "sinks": 4}, {"max_distance": 128}
# Method, its options, its call, and the number of samples; a call's bias is made of its max_distance.
CASES = {
    "favor+": ("favor+", FEATURES, {}, 1),
    "favor+ causal": ("favor+", FEATURES, CAUSAL, 1),
    "nprf, bias": ("nprf", FEATURES, LEVEL, 1),
    "nprf, bias, causal": ("nprf", FEATURES, LEVEL | CAUSAL, 1),
    "near/far, causal": ("favor+", FEATURES | NEAR, CAUSAL, 1),
    "skyformer": ("skyformer", MARKS, {}, 1),
    "wildcat": ("wildcat", MARKS, {}, 1),
    "wildcat, window": ("wildcat", MARKS | {"window": 64, "sinks": 1}, {}, 1),
    "loglinear causal": ("loglinear", FEATURES, CAUSAL, 1),
    "trigonometric": ("trigonometric", FEATURES, {}, 1),
    "trigonometric causal": ("trigonometric", FEATURES, CAUSAL, 1),
    "rfa-gate": ("rfa-gate", FEATURES, CAUSAL, 1),
    "favor+ of 64": ("favor+", FEW, {}, 1),
    "favor+ of 64, causal": ("favor+", FEW, CAUSAL, 1),
    "local": ("local", {"window": 64, "sinks": 0}, {}, 1),
    "near/far of 64": ("favor+", FEW | {"window": 64}, {}, 1),
    "near/far of 64, causal": ("favor+", FEW | {"window": 64}, CAUSAL, 1),
    "favor+, 4 samples": ("favor+", FEATURES, {}, 4),
    "nprf, bias, 4 samples": ("nprf", FEATURES, LEVEL, 4),
    "nprf, whole table": ("nprf", FEATURES, {"max_distance": None}, 1),
    "nprf, whole table, causal": ("nprf", FEATURES, {"max_distance": None} | CAUSAL, 1),
    "layer": ("favor+", FEATURES, {}, 1),
}
BOTH, DECODED = ("forward", "forward + backward"), ("favor+ causal", "near/far, causal", "nprf, bias, causal")
LONG = ("favor+ of 64", "favor+ of 64, causal", "local", "near/far of 64", "near/far of 64, causal")
WIDE, WHOLE = ("favor+, 4 samples", "nprf, bias, 4 samples"), ("nprf, whole table", "nprf, whole table, causal")
USUAL = [x for x in CASES if x not in (*LONG, *WIDE, *WHOLE, "layer")]
JOBS = [(x, kind, n) for n in (1024, 4096) for x in USUAL for kind in BOTH]
JOBS += [(x, kind, 1024) for x in (*WIDE, *WHOLE) for kind in BOTH]
JOBS += [(x, kind, 16384) for x in LONG for kind in BOTH]
JOBS += [(x, "decode", n) for n in (1024, 4096) for x in DECODED] + [("layer", "forward", 64)]


def install(revision: str, folder: Path) -> None:
    """Build the wheel of a revision, and install it alone."""
    pip, wheels = [sys.executable, "-m", "pip", "--quiet"], folder.with_name(f"{folder.name}.wheel")
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), tree], check=True)
    wheel = max(wheels.glob("kernelformer-*.whl"), key=os.path.getmtime)
    subprocess.run([*pip, "install", "--no-deps", "--upgrade", "--target", str(folder), str(wheel)], check=True)


def measure(name: str, kind: str, length: int) -> float:
    """Median seconds of a call of the version that is imported here."""
    import torch

    import kernelformer as kf

    method, options, how, samples = CASES[name]
    if name == "layer":
        layer, x = kf.KernelAttention(512, 8, method, **options), torch.randn(1, length, 512)
        return timed(lambda: layer(x), False)
    core = kf.build_attention(method, head_dim=64, num_heads=8, **options)
    qkv = [x.requires_grad_("backward" in kind) for x in torch.randn(3, samples, 8, length, 64).unbind()]
    more = {}
    if "max_distance" in how:
        reach = how["max_distance"]
        distance = torch.arange(1 - length, length)
        how = {x: y for x, y in how.items() if y is not None}
        how["bias"] = ((distance if reach is None else distance.clamp(-reach, reach)) / length).repeat(8, 1)
        more = {} if reach is None else {"bias": how["bias"][:, length - 1 - reach : length].flip(1)}
    state = []
    if kind == "decode":
        with torch.no_grad():
            state.append(core(*qkv, **how, return_state=True)[1])

    def call() -> None:
        if kind == "decode":
            state[0] = core.step(*(x[:, :, :1] for x in qkv), state[0], **more)[1]
        elif (out := core(*qkv, **how)).requires_grad:
            torch.autograd.grad(out.sum(), qkv)

    return timed(call, "backward" in kind)


def timed(call: Callable[[], object], gradients: bool) -> float:
    """Median seconds of a call, after one that does not count."""
    import torch

    with torch.set_grad_enabled(gradients):
        call()
        seconds, end = [], time.perf_counter() + SECONDS
        while len(seconds) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def compare(folder: Path) -> None:
    """In every round two fresh processes, of which each job asks one after the other, in turns."""
    places, times = {"old": folder.resolve(), "new": ROOT / "src"}, {x: {"old": [], "new": []} for x in JOBS}
    for turn in range(ROUNDS):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        command = [sys.executable, __file__, "serve"]
        workers = {
            x: subprocess.Popen([*command, str(y)], env=os.environ | {"PYTHONPATH": str(y)}, **pipes)
            for x, y in places.items()
        }
        for i, job in enumerate(JOBS):
            for x in sorted(workers, reverse=(turn + i) % 2 == 0):
                workers[x].stdin.write(json.dumps(job) + "\n")
                times[job][x].append(json.loads(workers[x].stdout.readline()))
        for worker in workers.values():
            worker.communicate()
    import torch

    revision = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    sizes = {
        "heads": 8,
        "head_dim": 64,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    rounds = {"rounds": ROUNDS, "seconds": SECONDS, "new": revision.stdout.strip()}
    print(json.dumps({"command": "python tools/old_wheel.py compare OLD", **rounds, **sizes}))
    for (name, kind, length), found in times.items():
        old, new = (statistics.median(found[x]) for x in ("old", "new"))
        ratios = sorted(y / x for x, y in zip(found["old"], found["new"], strict=True))
        row = {"old": old, "new": new, "ratio": statistics.median(ratios), "ratios": [ratios[0], ratios[-1]]}
        print(json.dumps({"case": name, "pass": kind, "length": length, **row}))


def serve(place: Path) -> None:
    """Measure the jobs that stdin asks for."""
    import kernelformer

    assert Path(kernelformer.__file__).is_relative_to(place), kernelformer.__file__
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line))), flush=True)


if __name__ == "__main__":
    action, *_given = sys.argv[1:]
    {"install": install, "compare": compare, "serve": serve}[action](*_given[:-1], Path(_given[-1]))
