"""What was read of a program so far: values of fields, elements of parameters, and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jax_transformer.convert.buffers import PositionTable
from jax_transformer.errors import InputError
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.probe import Elements, Norm
from jax_transformer.porting.recording import Call
from jax_transformer.porting.sublayers import Attention, Rotary

SIDES = {"encoder": "source", "decoder": "target"}
MOST_CALLS, MOST_PATHS = 3, 6  # that a refusal names
Window = tuple[int | None, int | None]  # earlier and later positions that are seen; None is all


class Findings:
    """What a run says."""

    def __init__(self) -> None:
        # Of a field, or of a field and a stack as "encoder d_ff": the places of each value.
        self.values: dict[str, dict[Any, list[str]]] = {}
        self.elements: dict[str, Elements] = {}  # of each parameter, by its path
        self.refusals: dict[tuple[str, ...], dict[str, None]] = {}  # what no config has, and where
        self.only_masks = True  # whether these are masks alone
        # The first attention of each stack and kind.
        self.attentions: dict[tuple[str, str], Attention] = {}
        self.notes: list[str] = []  # what is told beside the result
        # Of the self-attentions of a stack, in order.
        self.windows: dict[str, list[Window]] = defaultdict(list)
        self.rotary: dict[str, list[Rotary | None]] = defaultdict(list)
        self.window_calls: list[Call] = []  # the operations that make windows
        # The tables of relative positions of a stack, with their layers.
        self.relative: dict[str, list[tuple[str, Elements]]] = defaultdict(list)
        # The least and the largest relative_attention_max_distance that fit.
        self.farthest = (0, 2**31)
        self.tables: dict[str, PositionTable] = {}  # of sinusoids in weights and buffers, by name
        self.first_id: int | None = None  # that the program puts before the targets, if it does

    def say(self, field: str, value: Any, where: object) -> None:
        """Note that a place has a value of a field."""
        self.values.setdefault(field, {}).setdefault(value, []).append(str(where))

    def place(self, path: str, elements: Elements | None) -> None:
        """Note the elements of a parameter, if it has any."""
        if elements is not None:
            self.elements[path] = elements

    def norm(self, path: str, norm: Norm) -> None:
        """Note a norm."""
        self.say("norm", norm.kind, norm.call)
        self.say("norm_epsilon", norm.epsilon, norm.call)
        self.say("norm_bias", norm.bias is not None, norm.call)
        if norm.scale is None:
            self.refuse(Unread("a norm has no weight to multiply with", [norm.call]))
        self.place(f"{path}/scale", norm.scale)
        self.place(f"{path}/bias", norm.bias)

    @contextmanager
    def refusing(self, *, masks: bool = False) -> Iterator[None]:
        """Note what cannot be read inside this context; see `refuse`."""
        try:
            yield
        except Unread as error:
            self.refuse(error, masks=masks)

    def refuse(self, error: Unread, *, masks: bool = False) -> None:
        """Note what no config has: what several places do is one refusal.

        Args:
            masks: Whether it is only which keys are hidden.
        """
        self.only_masks &= masks
        operations = [f"{call.name} ({call.line})" for call in error.calls]
        key = error.message, *list(dict.fromkeys(operations))[:MOST_CALLS]
        paths = self.refusals.setdefault(key, {})
        paths |= {call.path: None for call in error.calls if call.path}

    def one(self, field: str) -> Any:
        """Return the value of a field; raise `InputError` if places differ, or none has it."""
        found = self.values.get(field, {})
        if len(found) != 1:
            texts = [f"{value!r} at {', '.join(places[:2])}" for value, places in found.items()]
            raise InputError(f"{field} is {'; '.join(texts)}: a config has one value for all")
        return next(iter(found))

    def refused(self) -> Iterable[str]:
        """Yield each refusal: what it is, its operations, and the modules that do it."""
        for (message, *operations), found in self.refusals.items():
            paths = [*found]
            more = f" and {len(paths) - MOST_PATHS} more" if len(paths) > MOST_PATHS else ""
            where = f" in {', '.join(paths[:MOST_PATHS])}{more}" if paths else ""
            yield f"{message}: {', '.join(operations)}{where}" if operations else message
