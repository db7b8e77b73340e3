"""What a text becomes: its translations, and how a notebook shows them."""

import html
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jax_transformer.translation.alignment_plot import Alignment
from jax_transformer.translation.translate import Translation


class TranslationResult(NamedTuple):
    """The translations of one text; a notebook shows them as a table, and draws the alignment.

    Attributes:
        hypotheses: `num_hypotheses` translations, best first.
        alignment: How much the model attended to each source token when it chose each token of the
            best translation; None where it was not asked for, and for a blank text.
    """

    hypotheses: list[Translation]
    alignment: Alignment | None = None

    @property
    def text(self) -> str:
        """The best translation; "" for a blank text."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """Log-probability of the best translation, divided by the length penalty."""
        return self.hypotheses[0].score

    @property
    def tokens(self) -> Int32[np.ndarray, " length"]:
        """Token ids of the best translation, EOS included [length]."""
        return self.hypotheses[0].tokens

    def __repr__(self) -> str:
        """Return one line with the best translation, without arrays."""
        more = f", {len(self.hypotheses)} hypotheses" if len(self.hypotheses) > 1 else ""
        return f"TranslationResult({self.text!r}, score={self.score:.4g}{more})"

    def _repr_html_(self) -> str:
        """Return the table of the translations for a notebook, and the picture of the alignment."""
        rows = "".join(
            f"<tr><td>{score:.4g}</td><td>{html.escape(text)}</td></tr>"
            for text, score, _ in self.hypotheses
        )
        table = f"<table><tr><th>score</th><th>translation</th></tr>{rows}</table>"
        return table + (self.alignment._repr_html_() if self.alignment else "")
