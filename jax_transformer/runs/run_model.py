"""The model that a run starts from, and the model that it writes."""

from pathlib import Path

import jax
import numpy as np

from jax_transformer.convert.families import get_family
from jax_transformer.convert.families.family import notes
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.convert.origin import Origin
from jax_transformer.convert.origin import read_origin as read_huggingface_origin
from jax_transformer.convert.report import ConversionError
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.runs.model_settings import SPECIAL_IDS
from jax_transformer.runs.state import RunSettings
from jax_transformer.translation.model_folder import GENERATION, TrainedModel, load, read_origin


def read_initial_model(
    folder: Path,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[TrainedModel, Origin | None, tuple[str, ...]]:
    """Read the model that a run starts from, of this library or of Hugging Face.

    Returns:
        The model, whose parameters are float32 and on the host; the Hugging Face folder that it
        comes from, where it does; and lines for the reader: what was converted, and what is not
        carried over or not applied.
    """
    try:
        model = load(
            folder,
            ignore_generation_config=ignore_generation_config,
            source_lang=source_lang,
            target_lang=target_lang,
        )
    except ConversionError as error:
        fault = error.report.faults[0]
        raise InputError(
            f"{folder}: the weights are not those of config.json: {fault.name}: {fault.kind} "
            f"{fault.detail}".rstrip()
        ) from error
    for name in SPECIAL_IDS:
        of_tokenizer, of_model = getattr(model.tokenizer, name), getattr(model.config, name)
        if of_tokenizer != of_model:
            raise InputError(
                f"{folder}: the tokenizer has {name}={of_tokenizer}, but the model {of_model}"
            )
    report = []
    if is_huggingface(folder):
        origin, left = read_huggingface_origin(folder)
        if left:
            report.append(f"{folder}: not carried over: {', '.join(left)}")
        family = get_family(origin.model_type)
        report += [f"{folder}: {note}" for note in notes(family, origin.config)]
    else:
        origin = read_origin(folder)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} - {"float32"}
    if dtypes:
        names = ", ".join(sorted(dtypes))
        report.append(f"{folder}: parameters converted from {names} to float32")
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), model.params)
    return model._replace(params=params), origin, tuple(report)


def trained_model(settings: RunSettings, params: Params) -> TrainedModel:
    """Return the model of a run with some of its parameters, as a folder holds it."""
    generation = GENERATION if settings.generation is None else settings.generation
    return TrainedModel(settings.config, params, settings.tokenizer, generation)
