"""Converted models of transformers with a sequence over two ranks."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernelformer.hf import convert
from kernelformer.parallel import context_parallel, next_token_loss, sum_gradients
from rank_processes import on_ranks


def _compare():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).double()
    convert(model, "favor+", num_features=16)
    ids = torch.randint(0, 50, (2, 31))
    whole = model(ids, labels=ids)
    whole.loss.backward()
    wanted = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    with context_parallel() as ranks:
        mine = ranks.part(ids)
        start = ranks.starts(mine.shape[1])[ranks.rank]
        places = torch.arange(start, start + mine.shape[1])[None]
        logits = model(mine, position_ids=places, use_cache=False).logits
        loss = next_token_loss(logits, mine)
        loss.backward()
        differences = [(logits - ranks.part(whole.logits)).abs().max(), (loss - whole.loss).abs()]
        try:
            model(mine, use_cache=False)
            said = ""
        except ValueError as error:
            said = str(error)
    sum_gradients(model)
    differences += [(x.grad - wanted[name]).abs().max() for name, x in model.named_parameters()]
    return float(max(differences).detach()), said


def test_positions_have_to_be_given_and_the_loss_counts_all_ranks():
    (first, waits), (second, says) = on_ranks(2, _compare)
    assert max(first, second) < 2e-6  # losses are in float32
    assert "rank 1 of 2 cannot make this call" in waits
    assert "stand at 15 to 30 of their sequence" in says
