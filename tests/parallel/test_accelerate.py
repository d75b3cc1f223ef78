"""The documented configuration of accelerate starts two processes that learn what one learns, sharded or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

PROGRAM = """
import json, sys
from accelerate.state import PartialState
from train_processes import train
losses = [train(sharded) for sharded in (False, True)]
if PartialState().process_index == 0:
    json.dump({"processes": PartialState().num_processes, "losses": losses}, open(sys.argv[1], "w"))
"""


def one_process():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_processes
    finally:
        sys.path.remove(str(EXAMPLES))
    model = train_processes.make_model()
    train_processes.kf.redraw(model, every=5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for ids in torch.stack(train_processes.make_samples()).split(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_two_processes_of_accelerate_learn_what_one_learns_sharded_and_not(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(EXAMPLES / "accelerate-cpu.yaml"),
    ]
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += [str(tmp_path / "program.py"), str(tmp_path / "losses.json")]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "losses.json").read_text())
    assert record["processes"] == 2
    plain, sharded = record["losses"]
    assert plain == pytest.approx(one_process(), rel=1e-4)
    assert sharded == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]
