"""The arguments of `jax-transformer translate`: files, the search, lengths, languages, devices."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jax_transformer.commands.command_line import REQUIRED, Parser, described, show_help
from jax_transformer.config.declared import checked, declarations
from jax_transformer.decoding.generation_config import Count, GenerationConfig, Id, declared_options
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.translation.long_text import check_split
from jax_transformer.translation.source_batches import LARGEST_WINDOW

LENGTHS = ("max_new_tokens", "min_new_tokens", "max_length", "overlong", "split_sentences")
SEARCH = tuple(name for name in declared_options() if name not in LENGTHS)
# The headings of the help, and what stands under each.
GROUPS = {
    "files": ("input", "output", "resume", "overwrite", "bad_lines", "scores", "alignments"),
    "search": ("ignore_generation_config", "seed", *SEARCH),
    "lengths": LENGTHS,
    "languages": ("source_lang", "target_lang"),
    "devices": ("max_tokens", "window", "mesh"),
}
SHORT = {"beam_size": ("beam",), "num_hypotheses": ("nbest",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The model that a command reads, and its languages.

    Attributes:
        model: Folder of a trained model, or a Hugging Face folder of a family that this library
            knows; or the name of such a model on the Hugging Face hub, from which it is downloaded
            if the hub's cache lacks it (the extra [hub]).
        source_lang: Code of the language of the sources; without it, the one that the folder names.
        target_lang: Code of the language to translate into; without it, the one that the folder
            names.
    """

    model: Path
    source_lang: str | None = None
    target_lang: str | None = None


@dataclasses.dataclass(frozen=True)
class Arguments:
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
        folder: Folder of a trained model, or a Hugging Face folder of a family that this library
            knows; or the name of such a model on the Hugging Face hub (the extra [hub]).
        input: Text to translate, plain or gzip, or a FIFO; if None, standard input.
        output: File to write, named .part until it is finished; if None, standard output.
        resume: Go on with the unfinished --output, or begin it where there is none.
        overwrite: Replace an existing output or picture.
        scores: Write the score of each translation; a blank line has the score 0.
        alignments: Picture to write of the attention to the first few lines: .png, .pdf or .svg.
        ignore_generation_config: Ignore the generation defaults of a Hugging Face folder.
        seed: Draw each token at random, by this number and the number of the line, in place of a
            search. The same number gives the same translations.
        max_length: Most tokens of a line, for a model whose positions are relative or computed; if
            None, the model's limit.
        overlong: Cut a line that has more tokens than the model takes, or refuse it: a bad line.
        bad_lines: Refuse the window of a line that is no UTF-8, has a NUL, is above 1 MiB, or is no
            source of the model; or skip the line: it gives blank lines, and is counted at the end.
        split_sentences: Code of the language of the input, for example en: translate each sentence
            by itself, and keep what stands between them (the extra [sentences]). The score of a
            line is the sum of its sentences'. If None, a line is translated as it is.
        source_lang: Code of the language of the input; if None, the one that the folder names.
        target_lang: Code of the language to translate into; if None, the one that the folder names.
        max_tokens: Most tokens, padding included (lines times beam times length), of a batch on a
            device: a higher number needs more memory and fewer batches.
        window: Most lines that are read, sorted by length and translated together: a higher number
            needs more memory and pads less.
        mesh: This machine's devices as axes, such as data=4,fsdp=2; if None, all on data.
        search: Options of `generate` that are named.
    """

    folder: Path
    input: Path | None = None
    output: Path | None = None
    resume: bool = False
    overwrite: bool = False
    scores: bool = False
    alignments: Path | None = None
    ignore_generation_config: bool = False
    seed: Id | None = None
    max_length: Count | None = None
    overlong: Literal["refuse", "cut"] = "refuse"
    bad_lines: Literal["refuse", "skip"] = "refuse"
    split_sentences: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    max_tokens: Count = 4096
    window: Count = LARGEST_WINDOW
    mesh: str | None = None
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def named_arguments(argv: Sequence[str]) -> Arguments:
    """Return what a command line names; with --help it is shown, and the program ends.

    Raises:
        InputError: A value is out of range, or values contradict each other, whatever the model.
    """
    parser, declared = _parser(), declarations(Arguments) | declared_options()
    if {"-h", "--help"} & set(argv):
        show_help(parser)
    values = {
        name: checked(name, value, declared[name], text=True)
        for name, value in parser.parse(argv).items()
    }
    search = {name: values.pop(name) for name in declared_options() if name in values}
    search = {name: value for name, value in search.items() if value is not None}
    arguments = Arguments(**values, search=search)
    # What is not named is left to the model: here it is what contradicts nothing.
    num_hypotheses = search.get("num_hypotheses", 1)
    left = {"max_new_tokens": 1 + search.get("min_new_tokens", 0), "beam_size": num_hypotheses}
    check_sampling(GenerationConfig(**left | search), arguments.seed is not None)
    check_split(arguments.split_sentences, num_hypotheses, arguments.alignments is not None)
    return arguments


def _parser() -> Parser:
    text, helps = described(Arguments)
    helps |= described(GenerationConfig)[1]
    declared = declarations(Arguments) | declared_options()
    parser = Parser("translate", text, ("folder",))
    parser.add("folder", Path, helps["folder"], REQUIRED)
    for heading, names in GROUPS.items():
        parser.heading = parser.add_argument_group(heading)
        for name in names:
            default = getattr(Arguments, name, "the model's")
            parser.add(name, declared[name], helps[name], default, *SHORT.get(name, ()))
    return parser
