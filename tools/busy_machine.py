"""Training steps a second on an idle and on a busy machine, by how long idle OpenMP threads spin.

    python tools/busy_machine.py results/speed/busy

A step is a forward and a backward pass of causal ``favor+`` (B = 8, 4 heads, L = 256, D = 64, m = 64). Settings take
turns, each in a process of its own, alone and beside a process that computes on one core; medians of all rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kernelformer.environment import SPIN_COUNT, SPIN_VARIABLES, environment

ROUNDS = 5
SETTINGS = {
    "torch's default": {"OMP_NUM_THREADS": "2"},
    "GOMP_SPINCOUNT=1000": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=3000": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "3000"},
    f"GOMP_SPINCOUNT={SPIN_COUNT}": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": SPIN_COUNT},
    "GOMP_SPINCOUNT=10000": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEP = """
import time, torch
import kernelformer as kf
core = kf.build_attention("favor+", head_dim=64, num_heads=4, num_features=64)
inputs = [torch.randn(8, 4, 256, 64, requires_grad=True) for _ in range(3)]
def step():
    core(*inputs, is_causal=True).sum().backward()
for _ in range(3):
    step()
begin, count = time.perf_counter(), 0
while time.perf_counter() - begin < 2:
    step()
    count += 1
print(count / (time.perf_counter() - begin))
"""


def steps_a_second(settings: dict[str, str]) -> float:
    """Measure one setting in a fresh process."""
    kept = {name: x for name, x in os.environ.items() if name not in (*SPIN_VARIABLES, "OMP_NUM_THREADS")}
    run = subprocess.run([sys.executable, "-c", STEP], env=kept | settings, capture_output=True, text=True, check=True)
    return float(run.stdout)


def main(out: Path) -> None:
    """Measure all settings, alone and beside a busy process, and write the record."""
    figures: dict[str, dict[str, list[float]]] = {name: {"alone": [], "busy": []} for name in SETTINGS}
    for turn in range(ROUNDS):
        for when in ("alone", "busy"):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if when == "busy" else None
            try:
                for name, settings in SETTINGS.items():
                    figures[name][when].append(steps_a_second(settings))
            finally:
                if other is not None:
                    other.kill()
                    other.wait()
        print(f"round {turn + 1} of {ROUNDS}", file=sys.stderr)
    rows = {name: {when: statistics.median(x) for when, x in both.items()} for name, both in figures.items()}
    record = {"command": "python tools/busy_machine.py results/speed/busy", "environment": environment(2)}
    out.mkdir(parents=True, exist_ok=True)
    (out / "busy.json").write_text(json.dumps({**record, "rounds": figures, "steps_a_second": rows}, indent=2) + "\n")
    write_table(out, rows)


def write_table(out: Path, rows: dict[str, dict[str, float]]) -> None:
    """Write the medians as a page."""
    head = "| Setting | idle machine | one core taken by another process |\n| --- | --- | --- |\n"
    table = "".join(f"| {name} | {row['alone']:.1f} | {row['busy']:.1f} |\n" for name, row in rows.items())
    (out / "README.md").write_text(
        "# Training steps a second, idle and busy\n\n"
        "Causal `favor+` (B = 8, 4 heads, L = 256, D = 64, m = 64), forward and backward, on two cores; two threads "
        f"unless the row says otherwise. Medians of {ROUNDS} rounds in fresh processes that take turns. Commands set "
        f"`GOMP_SPINCOUNT={SPIN_COUNT}`.\n\n"
        f"{head}{table}\n`python tools/busy_machine.py results/speed/busy` measures it; `busy.json` has every round.\n"
    )


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
