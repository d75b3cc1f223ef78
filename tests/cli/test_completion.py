"""Names that the shell completes; commands and their options without torch."""

from __future__ import annotations

import subprocess
import sys

import kernelformer as kf
from kernelformer.cli import options as completion
from kernelformer.lazy import LAYERS
from kernelformer_lab.cli.listing import listed
from kernelformer_lab.cli.reproduce import item_names
from kernelformer_lab.cli.training import recipes
from kernelformer_lab.evidence.items import ITEMS
from kernelformer_lab.tasks import TASKS


def test_every_name_is_known():
    assert set(completion.method_names()) == {*kf.list_methods(), *LAYERS}
    assert set(TASKS) & set(recipes("")) >= {"bytes", "listops"}
    assert set(item_names("")) == set(ITEMS)
    assert {"methods", "favor+", "sky-text"} <= set(listed(""))


def test_the_last_of_a_list_is_completed():
    assert completion.attentions("gmm") == ["gmm-prf", "gmm-rks"]
    assert completion.attentions("softmax,gmm-p") == ["softmax,gmm-prf"]
    assert completion.one_of("forward", "train")("forward,t") == ["forward,train"]
    assert recipes("no such") == []


def test_a_shell_gets_commands_options_and_names_without_torch():
    code = """
import os, subprocess, sys
from io import StringIO
from contextlib import redirect_stdout
from kernelformer.cli.app import app
for words in ("kernelformer tra", "kernelformer convert --atte", "kernelformer reproduce var", "torch",
              "kernelformer study est", "kernelformer train list", "kernelformer bench --attention softmax,gmm-r"):
    if words == "torch":
        print("torch" in sys.modules)
        continue
    os.environ.update(_KERNELFORMER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    out = StringIO()
    try:
        with redirect_stdout(out):
            app(prog_name="kernelformer")
    except SystemExit:
        pass
    print(" ".join(out.getvalue().split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "train translate",
        "--attention",
        "variance",
        "False",
        "estimators",
        "listops",
        "softmax,gmm-rks",
    ]
