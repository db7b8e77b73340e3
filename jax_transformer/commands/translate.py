"""`jax-transformer translate`: lines in, translations out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.convert.generation_config import DEFAULT_NEW_TOKENS, names_length
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.decoding.generation_config import Count, GenerationConfig, Id
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.hub import local_folder
from jax_transformer.translation.model_folder import load
from jax_transformer.translation.sources import LineOptions, check_split
from jax_transformer.translation.text_stream import Files, open_input, translate_text
from jax_transformer.translation.translate import text_search

SHORT = {"beam_size": ("beam",), "num_hypotheses": ("nbest",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The model that a command reads, and its languages.

    Attributes:
        model: Folder of a trained model, or a Hugging Face folder of a family that this library
            knows; or the name of such a model on the Hugging Face hub, from which it is downloaded
            if the hub's cache lacks it (the extra [hub]).
        adapter: Folder of PEFT whose adapter (LoRA) is added to the model.
        source_lang: Code of the language of the sources; without it, the one that the folder names.
        target_lang: Code of the language to translate into; without it, the one that the folder
            names.
    """

    model: Path
    adapter: Path | None = None
    source_lang: str | None = None
    target_lang: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    """Translate lines, from standard input or a file: --nbest lines for each.

    Line i gives the output lines from (i - 1) * nbest + 1 to i * nbest, best first; a blank line
    gives blank lines. With --scores each output line begins with its score and a tab. Lines are
    translated in windows, small ones first, and are written in the order of the input; where a pipe
    pauses, what has come is translated at once. On a terminal, each line is translated when it is
    entered, and Ctrl-D ends. Otherwise progress is shown on standard error if that is a terminal.

    With --output a translation can be killed at any moment: the same command with --resume goes
    on, and ends with the same bytes.

    An option of the search that is not named is the model's; a model that was trained here has
    --beam 1 and --length-penalty 0.6. Without any --max-new-tokens, a translation has at most ten
    tokens more than twice those of the line. A list is written with spaces (--banned-tokens 5 6), a
    list of lists with commas in it (--banned-sequences 5,6 7,8,9).

    Attributes:
        ignore_generation_config: Ignore the generation defaults of a Hugging Face folder.
        max_length: Most tokens of a line, for a model whose positions are relative or computed;
            without it, the model's limit.
        seed: Draw each token at random, by this number and the number of the line, in place of a
            search. The same number gives the same translations.
        mesh: This machine's devices as axes, for example data=4,fsdp=2; without it, all on data.
        dtype: Type to compute in; without it, that of the parameters.
    """

    USUAL = tuple(
        "adapter source_lang target_lang input output resume overwrite scores split_sentences "
        "max_new_tokens beam_size num_hypotheses length_penalty".split()
    )
    ignore_generation_config: bool = False
    max_length: Count | None = None
    seed: Id | None = None
    mesh: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    files: Files = dataclasses.field(default_factory=Files)
    lines: LineOptions = dataclasses.field(default_factory=LineOptions)
    search: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"options": GenerationConfig, "short": SHORT}
    )

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, whatever the model is."""
        # What is not named is left to the model: here it is what contradicts nothing.
        num_hypotheses = self.search.get("num_hypotheses", 1)
        most = 1 + self.search.get("min_new_tokens", 0)
        unnamed = GenerationConfig(max_new_tokens=most, beam_size=num_hypotheses)
        check_sampling(dataclasses.replace(unnamed, **self.search), self.seed is not None)
        has_picture = self.files.alignments is not None
        check_split(self.lines.split_sentences, num_hypotheses, has_picture)


def translate(arguments: Arguments) -> None:
    """Translate a text."""
    arguments.files.check()
    keep_freed_memory()
    keep_compilations()
    mesh = make_mesh(arguments.mesh or "data=-1", jax.local_devices())
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with open_input(arguments.files) as text:
        folder, ignored = local_folder(arguments.model), arguments.ignore_generation_config
        model = load(
            folder,
            ignore_generation_config=ignored,
            source_lang=arguments.source_lang,
            target_lang=arguments.target_lang,
        )
        model = model.for_text(str(folder)).with_max_length(arguments.max_length, str(folder))
        model = model.with_adapter(arguments.adapter).with_dtype(arguments.dtype)
        options = vars(arguments.lines) | arguments.search
        search = text_search([model], mesh, seed=arguments.seed, **options)
        is_limited = ignored or "max_new_tokens" in arguments.search
        if not is_limited and is_huggingface(folder) and not names_length(folder):
            console.print(
                f"{folder} limits no length, so a translation ends after {DEFAULT_NEW_TOKENS} "
                "tokens, as in transformers; --max-new-tokens sets another limit"
            )
        translate_text(search, text, arguments.files, console)
