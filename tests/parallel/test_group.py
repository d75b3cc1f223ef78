"""Processes that are started again find nothing of those that are gone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from kernelformer.parallel import start_group
from rank_processes import free_port


@pytest.fixture(autouse=True)
def _ended():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def store():
    return dist.distributed_c10d._get_default_store()


def limit():
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout


def test_a_process_that_is_alone_is_a_group_of_one_whose_time_can_be_changed(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    start_group(7, "gloo")
    assert (dist.get_world_size(), limit()) == (1, timedelta(seconds=7))
    start_group(9)
    assert limit() == timedelta(seconds=9)
    with pytest.raises(ValueError, match=r"timeout must be an integer of at least 1, got 0"):
        start_group(0)


def test_every_start_of_torchrun_has_a_store_of_its_own(monkeypatch):
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True)  # torchrun keeps it for all starts
    about = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**about, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        start_group(30, "gloo")
        assert not store().check(["address"])
        before = agent.num_keys()
        store().set("address", start)
        assert store().get("address") == start.encode()  # which waits for it: set alone does not
        assert agent.num_keys() == before + 1
        dist.destroy_process_group()
