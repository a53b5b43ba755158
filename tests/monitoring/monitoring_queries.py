"""Queries taken apart by a real parser of PromQL: which series they read, with which labels, in which functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser


def parsed(query: str) -> Any:
    """The query's tree; what Grafana fills in stands for anything."""
    return promql_parser.parse(query.replace("$namespace", ".*").replace("$run", ".*"))


def nodes(tree: Any) -> Iterator[Any]:
    """Every expression within an expression, itself first."""
    yield tree
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        inner = getattr(tree, name, None)
        if inner is not None and not isinstance(inner, (str, int, float)):
            yield from nodes(inner)
    for argument in getattr(tree, "args", None) or ():
        yield from nodes(argument)


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Name and labels of every series that a query reads."""
    for node in nodes(parsed(query)):
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), {matcher.name for matcher in node.matchers.matchers}
