"""`Classifier`: texts, or pairs of texts, to labels in one call."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jax_transformer.embedding.batched_model import BatchedModel, check_options
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.transformer import Params, classify
from jax_transformer.storage.hub import local_folder
from jax_transformer.translation import model_folder
from jax_transformer.translation.sources import checked_texts

TEMPLATE = "This example is {}."  # the hypothesis of zero-shot classification in transformers


class Classification(NamedTuple):
    """What a classifier says of a text.

    Attributes:
        label: The label with the highest score.
        score: Its probability; of a regression its number.
        probabilities: Those of all labels. They sum to 1 where one label is right, not where each
            is right or wrong by itself; of a regression these are the numbers.
    """

    label: str
    score: float
    probabilities: dict[str, float]


class Classifier(BatchedModel):
    """A model with a classification head as a function from texts to labels.

        classifier = Classifier("bart-large-mnli")
        (found,) = classifier([("It is raining.", "The ground is dry.")])
        found.label, found.score, found.probabilities

    Args:
        model: A folder, or a name of the hub, as for `Translator`: a BartForSequenceClassification
            and its kind, T5ForTokenClassification, or what `save` wrote of such a model.
        source_lang: Code of the language of the texts, for a model with language codes.
        dtype: Type that the parameters are converted to; None keeps theirs.
        max_length: Most tokens of a text or a pair, special tokens included; longer ones are cut.
            None refuses a text that is longer than the model takes.
        max_tokens: Most tokens of a batch, padding included.
        mesh: The devices, from `make_mesh`; texts are distributed over the axes data and fsdp.

    Raises:
        InputError: As `load`; or the model has no classification head.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        source_lang: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_tokens: int = 2048,
        mesh: Mesh | None = None,
    ) -> None:
        check_options(dtype, max_length, max_tokens)
        read = model_folder.read(local_folder(model), source_lang=source_lang)
        if read.config.head == "none":
            raise InputError(f"{model}: has no classification head; use Translator or Embedder")
        super().__init__(
            read, model, limit=max_length, dtype=dtype, max_tokens=max_tokens, mesh=mesh
        )
        self.labels = self.model.config.labels

        def scores(params: Params, src: Array, lengths: Array) -> Array:
            # Not by the id of padding, which a text may spell.
            mask = (jnp.arange(src.shape[1]) < lengths[:, None])[:, None, None]
            return classify(params, self.model.config, src, mask, execution=self._execution)

        self._function = jax.jit(scores)

    def __call__(self, texts: Iterable[str | tuple[str, str]]) -> list[Classification]:
        """Return what the classifier says of each text, or of each pair of texts.

        Args:
            texts: Texts, or pairs of texts, each of which is one source for the model.

        Raises:
            InputError: What is given is no text or pair, or is too long; or the model classifies
                tokens.
        """
        self._check_head("sequence", "tag")
        return [self._classified(row) for row in self._scores(texts)]

    def tag(self, texts: Iterable[str]) -> list[list[tuple[str, Classification]]]:
        """Return each token of each text, and what a classifier of tokens says of it.

        Args:
            texts: The texts; tokens that the tokenizer puts around them are left out.

        Raises:
            InputError: As a call; or the model classifies whole texts.
        """
        self._check_head("token", "a call")
        texts, tokenizer = [*checked_texts(texts)], self.model.tokenizer
        before, behind = map(len, tokenizer.affixes("source"))
        rows = self._rows(tokenizer.encode_source, texts, 0)
        tagged = []
        for ids, scores in zip(rows, self._compute(rows), strict=True):
            own = slice(before, len(ids) - behind)
            said = [self._classified(row) for row in scores[own]]
            tagged.append([*zip(tokenizer.source_texts(ids[own]), said, strict=True)])
        return tagged

    def zero_shot(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str = TEMPLATE,
        several: bool = False,
    ) -> list[Classification]:
        """Return which of some labels fits each text, by a model of entailment (Yin et al. 2019).

        Args:
            texts: The texts, each a premise.
            labels: The labels, with which the template becomes the hypotheses.
            template: A text with `{}` in the place of a label.
            several: Whether each label fits or not by itself: its probability is then that of
                entailment beside contradiction.

        Raises:
            InputError: As a call; there is no label, the template has no `{}`, or no label of the
                model begins with "entail".
        """
        self._check_head("sequence", "tag")
        labels, texts = [*checked_texts(labels)], [*checked_texts(texts)]
        starts = [label.lower().startswith("entail") for label in self.labels]
        if not labels or "{}" not in template or not any(starts):
            raise InputError(
                f"labels={shorten(labels)} and template={shorten(template)} must name labels and "
                f"where one stands ({{}}), and a label of the model, now {shorten(self.labels)}, "
                'must begin with "entail"'
            )
        entailment = starts.index(True)
        contradiction = -1 if entailment == 0 else 0  # as in transformers
        hypotheses = [template.replace("{}", label) for label in labels]
        pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
        scores = np.reshape(self._scores(pairs), (len(texts), len(labels), -1))
        if several:
            chosen = scores[..., [contradiction, entailment]]
            return [_named(labels, _softmax(rows)[:, 1]) for rows in chosen]
        return [_named(labels, _softmax(rows)) for rows in scores[..., entailment]]

    def _classified(self, scores: Float[np.ndarray, " labels"]) -> Classification:
        scores_are = self.model.config.scores_are
        if scores_are == "single_label_classification":
            scores = _softmax(scores)
        elif scores_are != "regression":
            scores = np.asarray(jax.nn.sigmoid(scores))
        return _named(self.labels, scores)

    def _check_head(self, head: str, other: str) -> None:
        if self.model.config.head != head:
            raise InputError(f"{self.name}: head={self.model.config.head!r} needs {other}")

    def _scores(self, texts: Iterable[str | tuple[str, str]]) -> list[Float[np.ndarray, " labels"]]:
        tokenizer = self.model.tokenizer
        texts = texts if isinstance(texts, str) else [*texts]
        pairs = {isinstance(text, tuple | list) and len(text) == 2 for text in texts}
        if len(pairs) > 1:
            raise InputError("texts and pairs of texts are mixed; give either")
        are_pairs = True in pairs
        parts = [part for text in texts for part in text] if are_pairs else texts
        for _ in checked_texts(parts):  # refuses one text alone, and what is no string
            pass
        encode = tokenizer.encode_pairs if are_pairs else tokenizer.encode_source
        rows = self._rows(encode, texts, 0)
        return self._compute(rows)


def _softmax(scores: Float[np.ndarray, "*batch n"]) -> Float[np.ndarray, "*batch n"]:
    return np.asarray(jax.nn.softmax(scores, axis=-1))


def _named(labels: Sequence[str], values: Float[np.ndarray, " n"]) -> Classification:
    best = int(np.argmax(values))
    probabilities = dict(zip(labels, values.tolist(), strict=True))
    return Classification(labels[best], probabilities[labels[best]], probabilities)
