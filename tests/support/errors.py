"""Errors that a call must end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headprune as hp


def refuses(told: str, work: Callable[..., Any], *arguments: Any, **more: Any) -> hp.HeadPruneError:
    """The error of a call that is refused, which says ``told`` (a regular expression)."""
    with pytest.raises(hp.HeadPruneError, match=told) as caught:
        work(*arguments, **more)
    return caught.value
