"""The README of a StableHLO folder, with the Python that runs its programs, and its tokenizer.

Text is split and joined by the library of the model's tokenizer alone: `tokenizers`, or
`sentencepiece` beside the ids of its pieces.
"""

import json
import re
import string
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax

from jax_transformer import __version__
from jax_transformer.model.self_over_memory import needs_equal_lengths
from jax_transformer.tokenizers.segmenters import LibrarySegmenter, SentencePieceSegmenter
from jax_transformer.tokenizers.tokenizer import CLEANED, Side, Tokenizer
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.source_batches import usual_target_length

PROGRAM = """\
import sys
from pathlib import Path

import jax
import numpy as np
$imports
from safetensors.numpy import load_file

folder = Path(sys.argv[1])
params = jax.device_put(load_file(folder / "model.safetensors"))

def load(name):
    return jax.jit(jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call)

$tokenizer

search, sources = load(sys.argv[2]), [encode(line.rstrip("\\n")) for line in sys.stdin]
for number, ids in enumerate(sources, start=1):
    if len(ids) > $longest:
        sys.exit(f"line {number} is {len(ids)} tokens long, but the model takes $longest")
texts, blank = [""] * len(sources), encode("")
order = sorted((i for i, ids in enumerate(sources) if ids != blank), key=lambda i: -len(sources[i]))
for start in range(0, len(order), 64):  # lines of similar length, in few shapes
    rows = order[start : start + 64]
    length = min(1 << (max(8, len(sources[rows[0]])) - 1).bit_length(), $longest)
    src = np.full((64, length), $pad, np.int32)
    for row, i in zip(src, rows):
        row[: len(sources[i])] = sources[i]
    prefix = np.full((64, min(2 * length + $extra, $most)), $pad, np.int32)
    limits = np.minimum(2 * (src != $pad).sum(1) + $extra, $most).astype(np.int32)
    tokens, scores, lengths = jax.device_get(search(params, src, prefix, limits))
    for i, ids, count in zip(rows, tokens[:, 0].tolist(), lengths[:, 0]):
        texts[i] = decode(ids[:count])
print("\\n".join(texts))"""
STEPS = """\
encode, init_cache, decode_step = map(load, ("encode", "init_cache", "decode_step"))
memory, size = encode(params, src), $size
cache = init_cache(params, src, memory, np.full((len(src), 1, size), -1, np.int32))
chosen = [np.full((len(src), 1), $start, np.int32)]
for _ in range(size):
    logits, cache = decode_step(params, cache, chosen[-1])
    chosen.append(np.asarray(logits).argmax(-1).astype(np.int32))"""
# How the pieces of sentencepiece become text, by the rule of `SentencePieceSegmenter`.
JOINED = {
    "marian": 'target.decode_pieces(pieces).replace("▁", " ").strip()',
    "m2m_100": "target.decode_pieces(pieces).strip()",
    "mbart": '"".join(pieces).removeprefix("▁").replace("▁", " ")',
}
LANGUAGE_CODE = "^>>.*?<<"  # at the beginning of a source of Marian


def write_readme(
    folder: Path, model: TrainedModel, searches: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the files of a model's tokenizer, and the README.md whose Python reads them.

    Args:
        searches: The options of `generate` for each search by its name.

    Raises:
        InputError: The language of the sources is not known.
    """
    config, tokenizer, generation = model.config, model.tokenizer, model.generation
    contents, imports, code = _tokenizer(tokenizer)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    same = needs_equal_lengths(config)
    numbers = {
        "size": "src.shape[1]" if same else "prefix.shape[1]",
        "pad": config.pad_id,
        "start": generation.get("start_token", config.bos_id),
        "longest": config.max_length,
        "most": generation.get("max_new_tokens", config.max_length),
        "extra": usual_target_length(0) + (generation.get("min_new_tokens") or 0),
    }
    program = _filled(PROGRAM, imports="\n".join(imports), tokenizer=code, **numbers)
    libraries = {"tokenizers", "sentencepiece"} & {line.split()[-1] for line in imports}
    bound = (
        f" S and T are at most {config.max_length}; jax refuses more."
        if config.has_position_table
        else ""
    )
    if same:
        bound += " `init_cache` needs S equal to T."
    compiled_in = {  # the number of tokens is an argument
        name: {key: value for key, value in options.items() if key != "max_new_tokens"}
        for name, options in searches.items()
    }
    text = _filled(
        files(__package__).joinpath("stablehlo_readme.md").read_text("utf-8"),
        version=__version__,
        jax_version=jax.__version__,
        packages=" ".join(sorted(libraries)),
        tokenizer_files=", ".join(f"`{name}`" for name in contents),
        bound=bound,
        searches=json.dumps(compiled_in, indent=2),
        program=program,
        steps=_filled(STEPS, **numbers),
        **numbers,
    )
    (folder / "README.md").write_text(text, "utf-8")


def _filled(text: str, **values: Any) -> str:
    return string.Template(text).substitute(values)


def _tokenizer(tokenizer: Tokenizer) -> tuple[dict[str, bytes], list[str], str]:
    """Return the tokenizer's files, the imports that its Python needs, and this Python."""
    sides = {"source": tokenizer.source, "target": tokenizer.target}
    if tokenizer.source.segmenter is tokenizer.target.segmenter:
        sides = {"source = target": tokenizer.source}
    contents, imports, code = {}, set(), []
    for name, side in sides.items():
        segmenter = side.segmenter
        if isinstance(segmenter, LibrarySegmenter):
            imports.add("import tokenizers")
            file = f"{name}_tokenizer.json" if len(sides) == 2 else "tokenizer.json"
            contents[file] = segmenter.library.to_str().encode()
            code.append(f'{name} = tokenizers.Tokenizer.from_file(str(folder / "{file}"))')
            if segmenter.library.encode_special_tokens:
                code.append(f"{name.split()[0]}.encode_special_tokens = True  # as ordinary text")
            continue
        imports |= {"import json", "import re", "import sentencepiece"}
        model = segmenter.model if name == "source" else segmenter.joiner
        contents[f"{name}.spm"] = model.serialized_model_proto()
        contents[f"{name}_ids.json"] = json.dumps(segmenter.ids, ensure_ascii=False).encode()
        code += [
            f'{name} = sentencepiece.SentencePieceProcessor(str(folder / "{name}.spm"))',
            f'{name}_ids = json.loads((folder / "{name}_ids.json").read_text("utf-8"))',
        ]
    functions = [_encode(tokenizer.source, tokenizer), _decode(tokenizer.target)]
    return contents, sorted(imports), "\n\n".join(["\n".join(code), *functions])


def _encode(side: Side, tokenizer: Tokenizer) -> str:
    """Return the function from a line to the ids of a source."""
    prefix, suffix = side.prefix, side.suffix
    if side.languages is not None:
        prefix, suffix = side.languages.affixes("source", tokenizer.eos_id)
    segmenter, ids = side.segmenter, "source.encode(line, add_special_tokens=False).ids"
    lines = ["def encode(line):"]
    if isinstance(segmenter, SentencePieceSegmenter):
        added = [re.escape(token) for token in sorted(segmenter.added, key=len, reverse=True)]
        codes = [LANGUAGE_CODE] if segmenter.rule == "marian" else []
        pattern, ids = f"({'|'.join([*added, *codes])})", "ids"
        lines += [
            f"    parts = re.split({pattern!r}, line)  # every second one is a special token",
            "    parts[::2] = [source.encode(part, out_type=str) for part in parts[::2]]",
            "    pieces = [p for part in parts for p in (part if type(part) is list else [part])]",
            f"    ids = [source_ids.get(piece, {tokenizer.unk_id}) for piece in pieces]",
        ]
    parts = [str(prefix)] * bool(prefix) + [ids] + [str(suffix)] * bool(suffix)
    return "\n".join([*lines, f"    return {' + '.join(parts)}"])


def _decode(side: Side) -> str:
    """Return the function from the ids of a target to its text."""
    segmenter, left_out = side.segmenter, sorted(side.segmenter.left_out)
    kept = f"[i for i in ids if i not in {left_out}]"
    lines = ["def decode(ids):"]
    if isinstance(segmenter, SentencePieceSegmenter):
        lines += [
            "    tokens = {i: token for token, i in target_ids.items()}",
            f"    pieces = [tokens.get(i, '') for i in {kept}]",
            f"    text = {JOINED[segmenter.rule]}",
        ]
    elif left_out:
        lines.append(f"    text = target.decode({kept}, skip_special_tokens=False)")
    else:
        lines.append("    text = target.decode(ids)")
    if side.clean_up_spaces:
        lines += [
            f"    for spaced in {CLEANED}:",
            "        text = text.replace(spaced, spaced.strip())",
        ]
    return "\n".join([*lines, "    return text"])
