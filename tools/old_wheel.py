"""Install an old version of the library beside this one, and compare their speed in one interleaved run.

python tools/old_wheel.py install 129bebe out/old     # and its wheel in out/old.wheel; PYTHONPATH=out/old imports it
python tools/old_wheel.py compare out/old             # seconds and ratios new / old as JSON; on an idle machine
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT, ROUNDS, SECONDS = Path(__file__).resolve().parents[1], 5, 0.4
MAP, MARKS, CAUSAL, BIAS = {"num_features": 256}, {"num_landmarks": 128}, {"is_causal": True}, {"max_distance": 128}
CASES = {"favor+": ("favor+", MAP, {}), "favor+ causal": ("favor+", MAP, CAUSAL)}  # method, its options, its call
CASES |= {"nprf, bias": ("nprf", MAP, BIAS), "nprf, bias, causal": ("nprf", MAP, BIAS | CAUSAL)}
CASES |= {"near/far, causal": ("favor+", MAP | {"window": 64, "sinks": 4}, CAUSAL)}
CASES |= {"skyformer": ("skyformer", MARKS, {}), "wildcat": ("wildcat", MARKS, {})}
JOBS = [(x, kind, n) for n in (1024, 4096) for x in CASES for kind in ("forward", "forward + backward")]
JOBS += [(x, "decode", n) for n in (1024, 4096) for x in ("favor+ causal", "near/far, causal")]


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

    method, options, how = CASES[name]
    core = kf.build_attention(method, head_dim=64, num_heads=8, **options)
    qkv = [x.requires_grad_("backward" in kind) for x in torch.randn(3, 1, 8, length, 64).unbind()]
    if "max_distance" in how:
        how = how | {"bias": (torch.arange(1 - length, length).clamp(-128, 128) / 128).repeat(8, 1)}
    state = [core(*qkv, is_causal=True, return_state=True)[1]] if kind == "decode" else []

    def call() -> None:
        if kind == "decode":
            state[0] = core.step(*(x[:, :, :1] for x in qkv), state[0])[1]
        elif (out := core(*qkv, **how)).requires_grad:
            torch.autograd.grad(out.sum(), qkv)

    seconds, end = [], time.perf_counter() + SECONDS
    with torch.set_grad_enabled("backward" in kind):
        call()
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
