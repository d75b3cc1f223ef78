"""Options that tasks share stand in one place, and every option has a type by which ``--set`` reads it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kernelformer_lab.tasks import TASKS, make_task, task_options
from kernelformer_lab.tasks import base as shared
from kernelformer_lab.tasks.catalogue import option_types

SHARED = {option.name: option.default for kind in (shared.RowOptions, shared.CacheOption) for option in fields(kind)}


@pytest.mark.parametrize("name", TASKS)
def test_every_option_has_a_type_and_is_an_attribute(name):
    assert sorted(option_types(name)) == task_options(name)
    task = TASKS[name]()
    assert all(hasattr(task, option) for option in task_options(name))


def test_there_are_nine_shared_options_and_a_task_declares_one_only_for_another_default():
    assert len(SHARED) == 9
    for name, task in TASKS.items():
        own = {x.name: x for x in fields(task) if x.name in SHARED}
        assert {"seed", "validation_samples", "test_samples"} <= own.keys(), name
        for declared in task.__mro__:
            for option in SHARED.keys() & vars(declared).get("__annotations__", {}).keys():
                if declared.__module__ != shared.__name__:
                    assert own[option].default != SHARED[option], (name, declared, option)


@pytest.mark.parametrize("name", ["listops", "recall", "sparsity"])
def test_samples_that_are_made_have_a_number(name):
    with pytest.raises(ValueError, match="train_samples must be an integer of at least 1, got None"):
        make_task(name, train_samples=None)


@pytest.mark.parametrize("name", TASKS)
def test_a_bad_seed_and_a_bad_number_of_samples_are_refused_by_every_task(name):
    with pytest.raises(ValueError, match="seed"):
        make_task(name, seed=-1)
    with pytest.raises(ValueError, match="test_samples"):
        make_task(name, test_samples=0)
