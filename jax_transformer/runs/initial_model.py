"""What a new run starts from: the model of --init or --teacher, or the tokenizer of --tokenizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.origin import Origin
from jax_transformer.errors import InputError
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.checkpoints import CheckpointFolder, read_step, steps_in
from jax_transformer.runs.model_settings import read_initial_model, read_tokenizer, trained_model
from jax_transformer.storage.folder import CHECKPOINTS
from jax_transformer.tokenizers import Tokenizer, separate
from jax_transformer.translation.model_folder import TrainedModel


class InitialModel(NamedTuple):
    """The model or the tokenizer that a run starts from; the fields are as in `RunSettings`."""

    tokenizer: Tokenizer | None = None  # None trains one on the text
    config: TransformerConfig | None = None  # None leaves it to the arguments
    params: Mapping[str, Any] | None = None  # float32 and on the host; None draws them
    generation: Mapping[str, Any] | None = None
    origin: Origin | None = None
    report: tuple[str, ...] = ()
    teacher: TrainedModel | None = None  # float32 and on the host
    checkpoint: CheckpointFolder | None = None  # of --init, where --init-keeps names parts of it


NO_MODEL = InitialModel()


def initial_model(arguments: Arguments) -> InitialModel:
    """Return what a new run starts from: the model of --init, or the tokenizer of --tokenizer."""
    source, target = arguments.tokenizer, arguments.target_tokenizer
    if target and not source:
        raise InputError(
            f"tokenizer=None: name that of the sources beside target_tokenizer={target}"
        )
    tokenizer = read_tokenizer(source) if source else None
    if target:
        tokenizer = separate(tokenizer, read_tokenizer(target))
    source_lang, target_lang = arguments.source_lang, arguments.target_lang
    if tokenizer is not None:
        tokenizer = tokenizer.with_languages(source_lang, target_lang, str(source))
    elif arguments.init is None and (source_lang or target_lang) is not None:
        raise InputError(
            f"source_lang={source_lang!r} and target_lang={target_lang!r} need a model or a "
            "tokenizer that has language codes: name it by --init or --tokenizer"
        )
    checkpoint = last_checkpoint(arguments) if arguments.init_keeps else None
    if arguments.init is None:
        if arguments.fresh_weights:
            raise InputError("fresh_weights=True needs the folder of a model: name it by --init")
        return InitialModel(tokenizer)
    if checkpoint is None:
        model, origin, report = read_initial_model(
            arguments.init, arguments.ignore_generation_config, source_lang, target_lang
        )
    else:
        model = trained_model(checkpoint.settings, checkpoint.read().state.params)
        origin, report = checkpoint.settings.origin, ()
    if tokenizer is not None and tokenizer.digest() != model.tokenizer.digest():
        raise InputError(
            f"tokenizer={source} is not the tokenizer of the model in {arguments.init}: their "
            f"sha256 are {tokenizer.digest()} and {model.tokenizer.digest()}; leave tokenizer out"
        )
    return InitialModel(
        model.tokenizer,
        model.config,
        params=None if arguments.fresh_weights else model.params,
        generation=model.generation,
        origin=origin,
        report=report,
        checkpoint=checkpoint,
    )


def last_checkpoint(arguments: Arguments) -> CheckpointFolder:
    """Return the last checkpoint of the run in --init, of which --init-keeps names parts."""
    keeps, folder, training = arguments.init_keeps, arguments.init, arguments.training
    named = f"init_keeps={' '.join(keeps)}"
    if folder is None or not (steps := steps_in(folder / CHECKPOINTS)):
        raise InputError(f"{named}: init={folder} is no run with checkpoints; name one by --init")
    saved = read_step(folder / CHECKPOINTS, steps[-1])
    earlier = saved.settings.training_config
    wanted = {"freeze": earlier.freeze, "optimizer": "adam", "lora_rank": None}
    for owner, settings in ((f"{folder}: ", earlier), ("", training)):
        for name, value in wanted.items() if "moments" in keeps else ():
            if (found := getattr(settings, name)) != value:
                raise InputError(f"{named}: {owner}{name}={found!r} must be {value!r}")
    if arguments.fresh_weights:
        raise InputError(f"{named}: fresh_weights=True keeps nothing; leave one of them out")
    if "step" in keeps and training.steps <= steps[-1]:
        raise InputError(f"{named}: steps={training.steps} must be above its step {steps[-1]:,}")
    return saved


def with_teacher(initial: InitialModel, arguments: Arguments) -> InitialModel:
    """Return what a run starts from with the model of --teacher, whose tokenizer it has."""
    if arguments.teacher is None:
        for name in ("teacher_weight", "teacher_temperature"):
            if (value := getattr(arguments, name)) != getattr(Arguments, name):
                raise InputError(f"{name}={value} has no effect without a teacher; name --teacher")
        return initial
    teacher, *_ = read_initial_model(
        arguments.teacher,
        arguments.ignore_generation_config,
        arguments.source_lang,
        arguments.target_lang,
    )
    tokenizer = initial.tokenizer or teacher.tokenizer
    if tokenizer.digest() != teacher.tokenizer.digest():
        fault = f"teacher={arguments.teacher} has another tokenizer than the run"
        raise InputError(f"{fault}; leave out the arguments that name the run's, or the teacher")
    return initial._replace(tokenizer=tokenizer, teacher=teacher)
