"""A call names its arguments: no tuple and no dict is built to be unpacked into it.

One's own `*args` and `**kwargs`, what another function returned (fields decoded from a file) and
sequences that are data (a shape, a list that is filled step by step) may be unpacked.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_transformer", "torch_reference")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
FILLED = {"append", "extend", "insert", "update"}  # methods that make a list or a dict data
OF_LIKE_THINGS = ("zip", "reshape")  # functions whose arguments are like things


def is_display(node: ast.AST, built: set[str]) -> bool:
    """Return whether an expression writes down the parts of a tuple, a list or a dict.

    Args:
        built: The names and attributes that are bound to such an expression.
    """
    match node:
        case ast.Name() | ast.Attribute():
            return ast.unparse(node) in built
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(not isinstance(part, ast.Starred) for part in parts)
        case ast.Dict(keys=keys):
            return any(isinstance(key, ast.Constant) for key in keys)
        case ast.Call(func=ast.Name("dict"), keywords=named):
            return any(each.arg is not None for each in named)
        case ast.Call(func=ast.Attribute(ast.Name("dict"), "fromkeys"), args=[keys, *_]):
            return are_constant(keys, built)
        case ast.DictComp(generators=[one]) | ast.ListComp(generators=[one]):
            return are_constant(one.iter, built)
        case ast.GeneratorExp(generators=[one]):
            return are_constant(one.iter, built)
        case ast.IfExp(body=body, orelse=orelse):
            return is_display(body, built) or is_display(orelse, built)
        case ast.BinOp(left=left, op=ast.Add() | ast.BitOr(), right=right):
            return is_display(left, built) or is_display(right, built)
        case ast.Subscript(value=value, slice=ast.Slice()):
            return is_display(value, built)
    return False


def are_constant(node: ast.AST, built: set[str]) -> bool:
    """Return whether an expression writes down texts, which are names, one by one."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            texts = (isinstance(part, ast.Constant) for part in parts)
            return all(texts) and all(isinstance(part.value, str) for part in parts)
        case ast.Call(func=ast.Attribute(ast.Constant(str()), "split")):
            return True
        case ast.Name(name):
            return name in built
    return False


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from own_nodes(node)


def bindings(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what a function binds, and to which expressions."""
    for node in own_nodes(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target, value):
                pairs = [(target, value)]
            case ast.AugAssign(target=target, op=ast.Add() | ast.BitOr(), value=value):
                pairs = [(target, value)]
            case _:
                pairs = []
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=False)
            else:
                yield target, value


def unpacked(tree: ast.AST, built: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each call that unpacks what was built for it.

    Args:
        built: The names that the functions around this one bind to tuples, lists and dicts.
    """
    own = set(built)
    if isinstance(tree, FUNCTIONS):
        own -= {argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)}
        while True:  # a name may be bound to another one
            found = {ast.unparse(to) for to, value in bindings(tree) if is_display(value, own)}
            if found <= own:
                break
            own |= found
        for node in own_nodes(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in FILLED:
                    own.discard(ast.unparse(value))
    for node in own_nodes(tree):
        if isinstance(node, ast.Call) and not ast.unparse(node.func).endswith(OF_LIKE_THINGS):
            stars = [one.value for one in node.args if isinstance(one, ast.Starred)]
            stars += [one.value for one in node.keywords if one.arg is None]
            if any(is_display(value, own) for value in stars):
                yield node.lineno, ast.unparse(node)
    for node in [tree, *own_nodes(tree)]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, FUNCTIONS):
                yield from unpacked(inner, frozenset(own))


def test_no_call_unpacks_what_was_built_for_it():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, call in unpacked(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(["name the arguments, or pass one record:", *found])


PLANTED = [
    "f(*(a, b))",
    "f(**{'x': 1})",
    "f(**dict(x=1))",
    "f(**dict.fromkeys(('x', 'y'), 1))",
    "f(**{name: getattr(a, name) for name in ('x', 'y')})",
    "f(*[getattr(a, name) for name in 'x y'.split()])",
    "f(**{'x': 1} if a else {})",
    "f(*(a,) + b)",
    "f(**a | {'x': 1})",
    "f(*(*a, 1)[:3])",
    "given = a, b\nf(*given)",
    "given: dict = {'x': a}\nf(**given)",
    "x, given = a, {'x': b}\nf(x, **given)",
    "given = a\ngiven |= {'x': b}\nf(**given)",
    "given = (a, b) if a else (b, a)\nf(*given)",
    "given = a, b\nmore = given + (c,)\nf(*more)",
    "names = ('x', 'y')\nf(**{name: getattr(a, name) for name in names})",
    "self.given = a, b\nf(*self.given)",
    "given = a, b\ndef inner():\n    return f(*given)",
    "g(lambda: f(*(a, b)))",
]
ALLOWED = [
    "f(a, x=b)",
    "f(*args, **kwargs)",
    "f(*read(a))",
    "fields = read(a)\nf(**fields)",
    "f(*a.shape)",
    "f(*a[2:], **a.fields)",
    "f(*map(g, a))",
    "f(*(g(each) for each in a))",
    "f(**{name: g(value) for name, value in a.items()})",
    "chain = [a]\nchain.append(b)\nf(*chain)",
    "given = []\nf(*given)",
    "f((a, b), {'x': 1})",
    "given = a, b\nreturn given",
    "given = a, b\nzip(*given)",
    "shape = (2, -1) if b else (4,)\na.reshape(*shape)",
    "given = a, b\ndef inner(given):\n    return f(*given)",
]


def in_a_function(source):
    lines = source.replace("\n", "\n    ")
    return ast.parse(f"def function(a, b, c, *args, **kwargs):\n    {lines}\n")


@pytest.mark.parametrize("source", PLANTED)
def test_a_splat_that_is_planted_is_found(source):
    last = source.splitlines()[-1].removeprefix("    return ").strip()
    ((line, call),) = unpacked(in_a_function(source))
    assert line == 1 + source.count("\n") + 1
    assert call in last


@pytest.mark.parametrize("source", ALLOWED)
def test_what_is_no_splat_is_not_reported(source):
    assert not list(unpacked(in_a_function(source)))
