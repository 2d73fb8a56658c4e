"""Work in stacks that are halved where memory runs out: nothing is left out, and nothing is done twice."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from headprune.memory import free_memory, halving


@mock.patch("headprune.memory.clear_device_cache", new=mock.Mock())  # it looks through all libraries, each time
@given(st.integers(0, 30), st.integers(1, 12), st.data())
def test_every_item_is_done_once_whatever_fits(count: int, size: int, data: st.DataObject) -> None:
    """Memory may get less while the work goes on."""
    done: list[int] = []
    for part in halving(range(count), size):
        with part as items:
            if len(items) > data.draw(st.integers(1, size)):
                raise data.draw(st.sampled_from([MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]))
            done += items
    assert done == list(range(count))


def fail(error: BaseException) -> None:
    """Work on four items, all of which raise."""
    for part in halving(range(4), 4):
        with part:
            raise error


def test_one_item_that_does_not_fit_is_told() -> None:
    with pytest.raises(hp.HeadPruneError, match="Memory ran out even with the smallest stack"):
        fail(MemoryError())


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())


def test_there_is_memory() -> None:
    assert 1 << 20 < free_memory(torch.device("cpu")) < 1 << 50
