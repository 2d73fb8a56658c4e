"""Pruned models that a class of transformers can state by itself, without code of ours: found out by trying, never by a list.

A stock class has one number of heads (and of key/value heads) for all layers, out of its config. `statements` looks for a config with which
the class has the pruned model's tensors (`statement`); `stock_instance` makes a model of the class of it and proves it
(`instance`); `Counts` says which numbers of heads the class can have (`counts`).
"""

from headprune.stock.counts import Counts, alike
from headprune.stock.instance import built, prove, stock_instance
from headprune.stock.statement import CannotStateError, Statement, configs_in, dense_class, pattern, statements

__all__ = [
    "CannotStateError",
    "Counts",
    "Statement",
    "alike",
    "built",
    "configs_in",
    "dense_class",
    "pattern",
    "prove",
    "statements",
    "stock_instance",
]
