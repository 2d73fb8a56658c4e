"""Mutants of a module: cosmic-ray's operators, at a random sample of the places where they apply.

A place is a position in the code and a kind of change (a number, a comparison, an operator, …). One of its variants is drawn, so
that a `+`, which has six, counts no more than a `not`, which has one. What no test can see is left out by rule (`unseen`).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}
BITS = {"BitOr", "BitAnd", "BitXor"}


@dataclass(frozen=True)
class Mutant:
    """One change to one module.

    Attributes:
        key: Names it, also when lines above it change.
        module: Path, relative to the root.
        operator: Cosmic-ray's name.
        occurrence: Which of the operator's positions in the module.
        where: Line (from 1) and column (from 0), in characters.
        function: The function or class around it, dotted; "" at the top.
        before, after: The lines that change, without indentation.
    """

    key: str
    module: str
    operator: str
    occurrence: int
    where: tuple[int, int]
    function: str
    before: str
    after: str


@dataclass(frozen=True)
class Place:
    """Where a kind of change applies.

    Attributes:
        key: Names it, by words and not by numbers of lines.
        variants: Operators, and which of their positions this is.
    """

    key: str
    module: str
    where: tuple[int, int]
    function: str
    variants: tuple[tuple[str, int], ...]


def family(operator: str) -> str:
    """The kind of change: what stands before ``_From_To``."""
    return operator.rpartition("/")[2].partition("_")[0]


def sensible(operator: str) -> bool:
    """Whether a replacement stays among operators of its kind: others fail on the first call, and flatter the tests.

    >>> [sensible(f"core/Replace{o}") for o in ("BinaryOperator_Add_Sub", "BinaryOperator_Add_BitOr", "ComparisonOperator_Eq_Is")]
    [True, False, False]
    """
    kind, *ends = operator.rpartition("/")[2].split("_")
    if kind == "RemoveDecorator":
        return False
    if kind == "ReplaceBinaryOperator":
        return any(set(ends) <= those for those in (ARITHMETIC, BITS))
    if kind == "ReplaceComparisonOperator":  # `==` as `is` says something of CPython's small integers, not of the code
        return set(ends) == {"Is", "IsNot"} or not set(ends) & {"Is", "IsNot"}
    return True


Span = tuple[tuple[int, int], tuple[int, int]]


def unseen(source: str) -> list[Span]:
    """Parts of a module whose change no test can see, or that only say what is true anyway.

    Annotations and names for types, `if TYPE_CHECKING`, `assert`, the first argument of `cast`, `frozen=` of a dataclass, `strict=` of
    a zip (an assert), and numbers from 50 on (a size by taste, of which one more is as right).
    """
    lines = source.splitlines()

    def place(line: int, octets: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:octets].decode())

    def span(node: ast.AST) -> Span:
        n: ast.expr = node  # type: ignore[assignment]
        return place(n.lineno, n.col_offset), place(n.end_lineno or n.lineno, n.end_col_offset or 0)

    def parts(node: ast.AST, top: bool) -> Iterator[ast.AST]:
        match node:
            case ast.Assert() | ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="frozen" | "strict"):
                yield node
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.Assign(value=ast.Subscript(value=ast.Name()) | ast.BinOp(op=ast.BitOr()) as value) if top:
                yield value
            case ast.Call(func=ast.Name(id="cast"), args=[first, *_]):
                yield first
            case ast.Constant(value=int() | float() as value) if abs(value) >= 50:
                yield node
            case ast.FunctionDef(returns=ast.expr() as returned):
                yield returned

    tree = ast.parse(source)
    top = set(map(id, tree.body))
    return [span(part) for node in ast.walk(tree) for part in parts(node, id(node) in top)]


def places(root: Path, module: str) -> list[Place]:
    """Everywhere in a module where something can be changed that a test can see."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (root / module).read_text(encoding="utf-8")
    lines, hidden, scopes = source.splitlines(), unseen(source), _scopes(source)
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[tuple[int, int], str], list[tuple[str, int]]] = {}
    for name in sorted(filter(sensible, cosmic_ray.plugins.operator_names())):
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments():
            continue
        positions = (p for node in nodes for p in operator().mutation_positions(node))
        for occurrence, (where, _) in enumerate(positions):
            if not any(first <= where < last for first, last in hidden):
                found.setdefault((where, family(name)), []).append((name, occurrence))
    made, seen = [], dict[tuple[str, ...], int]()
    for (where, kind), variants in sorted(found.items()):
        function = next((scope for first, last, scope in scopes if first <= where[0] <= last), "")
        words = (module, function, lines[where[0] - 1].strip(), kind)
        seen[words] = seen.get(words, -1) + 1
        key = hashlib.sha256("\n".join([*words, str(seen[words])]).encode()).hexdigest()[:16]
        made.append(Place(key, module, where, function, tuple(variants)))
    return made


def sample(root: Path, among: Iterable[Place], size: int, seed: int) -> list[Mutant]:
    """A random mutant of each of ``size`` random places, in random order: the first few are a random sample too.

    A place's chance depends on its own words alone: a change elsewhere leaves the others in the sample.
    """
    found: list[Mutant] = []
    for place in sorted(among, key=lambda each: Random(f"{seed} {each.key}").random()):
        if len(found) == size:
            break
        source = (root / place.module).read_text(encoding="utf-8")
        variants = sorted(place.variants)
        Random(f"{seed} variant {place.key}").shuffle(variants)
        for operator, occurrence in variants:
            after = mutated(source, operator, occurrence)
            if _valid(after) and after != source:
                words = _changed(source, after)
                key = hashlib.sha256(f"{place.key} {operator} {words}".encode()).hexdigest()[:16]
                found.append(Mutant(key, place.module, operator, occurrence, place.where, place.function, *words))
                break
    return found


def _valid(source: str) -> bool:
    """Whether it is Python at all: `*,` in a signature is not."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def mutated(source: str, operator: str, occurrence: int) -> str:
    """A module's text with one change."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    text: str | None = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
    if text is None:
        raise ValueError(f"{operator} has no occurrence {occurrence}")
    return text


def lines_around(source: str, line: int) -> tuple[set[int], bool]:
    """The lines that tell which tests run a change at ``line``, and whether it happens on import.

    That is the statement around it, without what is indented below; of a function's head, its body; of a name of the module, the statements
    that use it. Decorators, and what stands outside of functions, run on import.
    """
    tree = ast.parse(source)
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]
    around = [n for n in statements if _first(n) <= line <= (n.end_lineno or n.lineno)]
    inner = max(around, key=lambda n: (_first(n), -(n.end_lineno or 0)), default=None)
    if isinstance(inner, ast.FunctionDef):
        return set(range(inner.body[0].lineno, (inner.end_lineno or 0) + 1)), line < inner.lineno
    if inner is not None and any(isinstance(n, ast.FunctionDef) for n in around):
        return _own_lines(inner), False
    if not isinstance(inner, ast.Assign | ast.AnnAssign) or inner not in tree.body:
        return set(), True
    given = {n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    users = {
        n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in given
    }
    return {at for n in statements if (own := _own_lines(n)) & users for at in own}, True


def _own_lines(node: ast.stmt) -> set[int]:
    """A statement without what is indented below it."""
    below = getattr(node, "body", None)
    last = below[0].lineno if below else (node.end_lineno or node.lineno) + 1
    return set(range(node.lineno, max(last, node.lineno + 1)))


def in_body(source: str, line: int) -> bool:
    """Whether a line is run when a function is called: not its head, with the defaults."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    return any(n.body[0].lineno <= line <= (n.end_lineno or 0) and line > n.lineno for n in functions)


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _scopes(source: str) -> list[tuple[int, int, str]]:
    """First line, last line and dotted name of every function and class, the innermost first."""
    found = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".lstrip(".")
                found.append((_first(child), child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(ast.parse(source), "")
    return sorted(found, key=lambda each: each[1] - each[0])


def _changed(old: str, new: str) -> tuple[str, str]:
    """The lines that differ, side by side, without what is equal around them."""
    a, b = old.splitlines(), new.splitlines()
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return " ".join(map(str.strip, a)), " ".join(map(str.strip, b))
