"""PromQL queries, parsed by a real parser: the series they read, with which labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser


def parse(query: str) -> Any:
    """Return the query's syntax tree, with Grafana's variables replaced by `.*`."""
    return promql_parser.parse(query.replace("$namespace", ".*").replace("$run", ".*"))


def nodes(tree: Any) -> Iterator[Any]:
    """Yield an expression and every expression in it."""
    yield tree
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(tree, name, None)
        if child is not None and not isinstance(child, (str, int, float)):
            yield from nodes(child)
    for argument in getattr(tree, "args", None) or ():
        yield from nodes(argument)


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield name and labels of every series that a query reads."""
    for node in nodes(parse(query)):
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), {matcher.name for matcher in node.matchers.matchers}
