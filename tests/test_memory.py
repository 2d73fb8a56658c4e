"""Work in stacks that are halved where memory runs out: nothing is left out, and nothing is done twice."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from headprune.memory import free_memory, halving
from tests.support.otherdevice import DEVICE, pretended

SAID = [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
]  # fmt: skip


@mock.patch("headprune.memory.clear_device_cache", new=mock.Mock())  # it looks through all libraries, each time
@given(st.integers(0, 30), st.integers(1, 12), st.data())
def test_every_item_is_done_once_whatever_fits(count: int, size: int, data: st.DataObject) -> None:
    """Memory may get less while the work goes on."""
    done: list[int] = []
    for part in halving(range(count), size):
        with part as items:
            if len(items) > data.draw(st.integers(1, size)):
                raise data.draw(st.sampled_from(SAID))
            done += items
    assert done == list(range(count))


@pytest.mark.parametrize(("error", "told"), [
    (MemoryError(), "Memory ran out even with the smallest stack"), (ZeroDivisionError("by zero"), "^by zero$"),
    (RuntimeError("an illegal memory access was encountered"), "^an illegal memory access"),
])  # fmt: skip
def test_one_item_that_does_not_fit_is_told_and_other_errors_stay(error: Exception, told: str) -> None:
    with pytest.raises((hp.HeadPruneError, type(error)), match=told):  # noqa: PT012
        for part in halving(range(4), 4):
            with part:
                raise error


def test_there_is_memory() -> None:
    """What PyTorch holds unused on a GPU counts as free."""
    assert 1 << 20 < free_memory(torch.device("cpu")) < 1 << 50
    with pretended():
        assert free_memory(DEVICE) == 9 << 30  # 8 by the driver; of 2 that are held, 1 is used
