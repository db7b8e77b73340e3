"""Language codes: which a tokenizer knows, which it is set to, and where they stand."""

import dataclasses
import difflib
from typing import Any, Literal

from jax_transformer.errors import InputError

Side = Literal["source", "target"]
SHOWN = 6  # codes in a message


@dataclasses.dataclass(frozen=True)
class Languages:
    """The language codes of a tokenizer."""

    ids: dict[str, int]  # of each code, for example {"de_DE": 250003}
    # Where the code of a line's language is: "before" the text, which EOS ends (mBART-50, M2M100,
    # NLLB), or "after" the EOS (mBART, legacy NLLB).
    placement: Literal["before", "after"]
    # Whether the code of the target is the first decoder input (mBART); otherwise it is the first
    # token that the decoder must generate.
    starts: bool = False
    source: str | None = None  # the code of the sources, if it is known
    target: str | None = None

    def __post_init__(self) -> None:
        if not {self.source, self.target} - {None} <= self.ids.keys():
            raise ValueError("a language has no code")

    def changed(self, source: Any, target: Any) -> "Languages":
        """Return these languages with other codes of sources and targets; None keeps a code."""
        # A JSON file may have a number or a list in the place of a code.
        source = self.source if source is None else str(source)
        target = self.target if target is None else str(target)
        for side, code in (("source", source), ("target", target)):
            if code is not None and code not in self.ids:
                near = difflib.get_close_matches(code, self.ids, SHOWN, cutoff=0.4)
                shown = ", ".join(near or list(self.ids)[:SHOWN])
                raise InputError(
                    f"{side}_lang={code!r:.40} is none of the model's {len(self.ids)} "
                    f"language codes, such as {shown}"
                )
        return dataclasses.replace(self, source=source, target=target)

    def affixes(self, side: Side, eos_id: int) -> tuple[list[int], list[int]]:
        """Return the ids before and after the text of a line."""
        code = self.ids[self.known(side)]
        return ([code], [eos_id]) if self.placement == "before" else ([], [eos_id, code])

    def known(self, side: Side) -> str:
        """Return the code of a side; refuse a side whose code is not known."""
        code = getattr(self, side)
        if code is None:
            raise InputError(
                f"the model needs the language of its {side}s: name its code by --{side}-lang (in "
                f"Python {side}_lang), such as {', '.join(list(self.ids)[:SHOWN])}"
            )
        return code

    @property
    def start_id(self) -> int | None:
        """Id that the decoder reads first, where the code of the target is this id."""
        return self.ids[self.target] if self.starts and self.target is not None else None

    @property
    def forced_id(self) -> int | None:
        """Id that the decoder must generate first; None where it is free."""
        return None if self.starts or self.target is None else self.ids[self.target]
