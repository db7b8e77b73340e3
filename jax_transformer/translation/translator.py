"""`Translator`: text to text in one call."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from jax.sharding import Mesh

from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.hub import local_folder
from jax_transformer.text.text_files import is_blank
from jax_transformer.translation import model_folder
from jax_transformer.translation.alignment_plot import Alignment, alignments
from jax_transformer.translation.executor import TranslationExecutor
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.result import TranslationResult
from jax_transformer.translation.sources import check_split, checked_texts, windows
from jax_transformer.translation.translate import (
    TextSearch,
    place,
    text_search,
    translate_windows,
)


class Translator:
    """A trained model as a function from text to text: translations, summaries, answers.

        translator = Translator("runs/0")
        translator("nine").text
        for result in translator(lines, beam_size=4, num_hypotheses=2):
            print(result.text, result.score, [other.text for other in result.hypotheses])

    A call changes nothing in it, so threads may share it; the iterator that a call returns is for
    one thread at a time. The results are those of `jax-transformer translate`, and do not depend on
    the other texts of a call.

    Args:
        model: The folder of a model of this library, of a run, or of a Hugging Face family that
            this library knows; the name of a model on the Hugging Face hub, for example
            "Helsinki-NLP/opus-mt-en-de", which is read from the hub's cache, or downloaded where
            the cache lacks it (the extra [hub]); or a model that `load` returned. A list of models
            with equal tokenizers is an ensemble: it chooses tokens by the mean of the models'
            log-probabilities, and has the generation defaults of the first one.
        adapter: Folder of PEFT whose adapter (LoRA) is added to the model. Several translators of
            one model that `load` returned, each with an adapter, hold its parameters once.
        source_lang: Code of the language of the texts, for a model with language codes; None is
            the one that the folder names.
        target_lang: Code of the language of the results; None is the one that the folder names.
        ignore_generation_config: Whether the generation defaults of a Hugging Face folder are
            ignored.
        dtype: Type that the parameters are converted to; None keeps theirs.
        max_length: Most tokens of a text, special tokens included, for a model whose positions are
            relative or computed; None is the limit of the model. A learned table has no other.
        mesh: The devices, from `make_mesh`; texts are distributed over the axes data and fsdp.
            None is one device.
        execution: How the model is executed; None is what suits the device.

    Raises:
        InputError: As `load`; the hub does not give the model; the models of an ensemble differ
            in their tokenizers or in `max_length`; or a model or its memory has another limit.
    """

    def __init__(
        self,
        model: str | Path | TrainedModel | Sequence[str | Path | TrainedModel],
        *,
        adapter: str | Path | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        ignore_generation_config: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
        max_length: int | None = None,
        mesh: Mesh | None = None,
        execution: SearchExecution | None = None,
    ) -> None:
        model_folder.check_dtype(dtype)
        self.mesh, self.execution = mesh or make_mesh(), execution
        several = isinstance(model, Sequence) and not isinstance(model, str | TrainedModel)
        sources = model if several else [model]
        if not sources:
            raise InputError("model is an empty list; name a model")
        self.name = ", ".join(
            "a loaded model" if isinstance(source, TrainedModel) else str(source)
            for source in sources
        )
        models = [
            _read(
                source,
                ignore_generation_config=ignore_generation_config,
                source_lang=source_lang,
                target_lang=target_lang,
            )
            for source in sources
        ]
        models = [each.with_max_length(max_length, self.name) for each in models]
        if adapter is not None and len(models) > 1:
            raise InputError(
                f"adapter={shorten(str(adapter))} is for one model; give each its own: "
                "load(folder).with_adapter(adapter)"
            )
        models[0] = models[0].with_adapter(adapter)
        for each in models[1:]:
            if each.tokenizer.digest() != models[0].tokenizer.digest():
                raise InputError(f"{self.name}: an ensemble needs one tokenizer, but theirs differ")
            lengths = [one.config.max_length for one in (models[0], each)]
            if lengths[0] != lengths[1]:
                fault = f"an ensemble needs one max_length, but theirs are {lengths}"
                raise InputError(f"{self.name}: {fault}")
        self.model, *self.ensemble = (place(each.with_dtype(dtype), self.mesh) for each in models)

    def __repr__(self) -> str:
        """Return one line with the model's name and sizes."""
        return f"Translator({self.name!r}: {self.model!r})"

    @overload
    def __call__(self, text: str, **options: Any) -> TranslationResult: ...

    @overload
    def __call__(self, text: Iterable[str], **options: Any) -> Iterator[TranslationResult]: ...

    def __call__(
        self,
        text: str | Iterable[str],
        *,
        prefix: str = "",
        source_lang: str | None = None,
        target_lang: str | None = None,
        alignments: bool = False,
        **options: Any,
    ) -> TranslationResult | Iterator[TranslationResult]:
        """Return the result of one text, or an iterator over those of several, in their order.

        An iterable is read and translated in windows, 128 texts first and then 16 times as many in
        each, up to `window`: the first results are there soon, and no more than a window is in
        memory. An error that it raises ends the iterator; the texts of its window are not
        translated then.

        Args:
            text: One text, or an iterable of texts.
            prefix: Put before every text, or sentence, for example "summarize: " for a T5.
            source_lang: Code of the language of the texts; None is what `Translator` has.
            target_lang: Code of the language of the results; None is what `Translator` has.
            alignments: Whether each result has the alignment of its best translation, by the
                first model of an ensemble.
            **options: `overlong` ("refuse" or "cut"), for a text with more tokens than the model
                takes; `split_sentences`, the code of the language of texts, for example "en", whose
                sentences are translated by themselves, and the white space between them stays
                (extra [sentences]); `window` (8,192); `max_tokens`, the most tokens that a
                device translates at a time, padding included (8,192); `seed`, a number that
                switches sampling on; and the fields of `GenerationConfig`, for example `beam_size`:
                one that is absent has the model's default. Without any `max_new_tokens`, a result
                has at most ten tokens more than twice those of the text.

        Raises:
            TypeError: An option is unknown.
            InputError: An option is out of range; the model has no such language, or needs one.
                While the iterator runs: a text is too long, or no source of this model (the message
                names it by its number, from 1).
        """
        search = self._search(source_lang, target_lang, options)
        check_split(search.lines.split_sentences, alignments=alignments)
        if not isinstance(text, str | Iterable):
            raise InputError(f"text={shorten(text)} must be a string or an iterable of strings")
        texts = [text] if isinstance(text, str) else text
        results = _results(search, texts, prefix, alignments)
        return next(results) if isinstance(text, str) else results

    def executor(
        self,
        *,
        prefix: str = "",
        source_lang: str | None = None,
        target_lang: str | None = None,
        alignments: bool = False,
        **options: Any,
    ) -> TranslationExecutor:
        """Return an executor, for a server: a text that is submitted enters a search that runs.

            with translator.executor() as executor:
                future = executor.submit("a text")
                print(future.result().text)

        Args:
            prefix: As for a call, and so are `source_lang` and `target_lang`.
            alignments: Whether each result has the alignment of its best translation, numbered
                in the order in which the texts were submitted. The thread of the search computes
                it when the search of the text has ended.
            **options: As for a call, without `split_sentences`; `window` has no effect.

        Raises:
            TypeError: An option is unknown.
            InputError: An option is out of range; the model has no such language, or needs one.
        """
        search = self._search(source_lang, target_lang, options)
        if search.lines.split_sentences is not None:
            raise InputError("split_sentences is for a call; submit each sentence as a text")
        return TranslationExecutor(search, prefix, alignments)

    def _search(
        self, source_lang: str | None, target_lang: str | None, options: Mapping[str, Any]
    ) -> TextSearch:
        models = [
            each.with_languages(source_lang, target_lang, self.name)
            for each in (self.model, *self.ensemble)
        ]
        return text_search(models, self.mesh, self.execution, **options)


def _read(source: str | Path | TrainedModel, **options: Any) -> TrainedModel:
    if not isinstance(source, TrainedModel):
        return model_folder.read(local_folder(source), **options).for_text(str(source))
    name, tokenizer = "a loaded model", source.for_text("a loaded model").tokenizer
    return source._replace(
        tokenizer=tokenizer.with_languages(options["source_lang"], options["target_lang"], name)
    )


def _results(
    search: TextSearch, texts: Iterable[str], prefix: str, with_alignments: bool
) -> Iterator[TranslationResult]:
    done = 0
    for window in windows(checked_texts(texts), search.lines.window):
        (found,) = translate_windows(search, [window], skip=done, prefix=prefix)
        aligned: Sequence[Alignment | None] = [None] * len(found)
        if with_alignments:
            lines = [line if is_blank(line) else prefix + line for line in window]
            aligned = alignments(search.models[0], lines, found, skip=done)
        yield from map(TranslationResult, found, aligned)
        done += len(window)
