"""The foreign models under other names: every part of every name is replaced, numbers stay.

A number that counts layers stays, because it is part of how a list is built, not of its name.
"""

import itertools
import os
import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from jax_transformer.porting.names import words
from jax_transformer.porting.record import Record, read_record, snippet
from tests.porting.foreign_models import MODELS, OUTSIDE, vocabularies

KINDS = ("random", "language", "misleading")
# Words of several languages; none tells what a part does.
LANGUAGE = """
    couche schicht слой 层 plongement einbettung вложение tête kopf голова norme регулятор
    valeur wert значение clé schlüssel ключ requête anfrage запрос sortie ausgabe выход entrée
    eingabe вход poids gewicht вес biais versatz смещение réseau netz сеть attention_croisée
    selbst_bezug внимание quelle ziel источник цель codeur kodierer кодер décodeur dekodierer
    декодер mémoire gedächtnis память échelle maßstab масштаб porte tor ворота étage stufe
""".split()
# A name that another part of a Transformer usually has.
OTHERS = dict(
    pair.split(":")
    for pair in """
    encoder:decoder decoder:encoder enc:dec dec:enc encode:decode src:tgt tgt:src trg:src
    source:target target:source decode:encode readers:writers writers:readers up:down down:up
    self:cross cross:self slf:src q:k k:v v:o o:q query:key key:value value:query wq:wk wk:wv
    wv:wo wo:wq attn:ff attention:mlp mha:ffn mlp:attention ff:self pos:tok position:word
    positions:words positional:word wpe:wte pe:lut emb:pos embed:positions lut:pe wte:wpe
    tok:src word:position words:positions table:positions place:word 1:2 2:3 3:1 n1:n2 n2:n3
    n3:n4 n4:n1 a:b b:c c:d d:a e:f f:e u:w w:u kv:qo weight:bias bias:weight gain:shift
    shift:gain out:in head:embedding proj:query generator:embedding output:input input:output
    norm:value ln:key fc:query kqv:ff qkv:ff
    """.split()
)


@cache
def recorded(name: str) -> tuple[dict[str, np.ndarray], Record]:
    """Return a model's weights, and the record that the printed code writes."""
    model = (MODELS | OUTSIDE)[name]
    module = model.module()
    weights = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    return weights, run_snippet(module, model.pad_id, *vocabularies(model))


def run_snippet(module, pad_id, source, target) -> Record:
    """Return the record that the printed code writes of a module."""
    before, dtype = os.getcwd(), torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            torch.manual_seed(0)
            exec(snippet(pad_id, source, target), {"model": module})
            return read_record(Path(folder) / "recorded.safetensors")
        finally:
            os.chdir(before)
            torch.set_default_dtype(dtype)


def renamed(name: str, kind: str, seed: int = 0) -> tuple[dict[str, np.ndarray], Record]:
    """Return a model's weights and record with every part of every name replaced."""
    weights, record = recorded(name)
    modules = {module for batch in record.batches for module in batch.blocks}
    parts = sorted({part for full in (*weights, *modules) for part in full.split(".")})
    random = np.random.default_rng((seed, sum(name.encode())))
    stems = sorted({_stem(part, parts) for part in parts} - {""})
    new = dict(zip(stems, _new_words(stems, kind, random), strict=True))

    def rename(full: str) -> str:
        stem_of = ((part, _stem(part, parts)) for part in full.split("."))
        return ".".join(new.get(stem, "") + part[len(stem) :] for part, stem in stem_of)

    batches = tuple(
        batch._replace(blocks={rename(module): block for module, block in batch.blocks.items()})
        for batch in record.batches
    )
    return {rename(full): tensor for full, tensor in weights.items()}, Record(
        batches, record.pad_id
    )


def _stem(part: str, parts: list[str]) -> str:
    """Return a part of a name without the number of a layer: "layer0" is "layer"."""
    stem, number = re.fullmatch(r"(.*?)(\d*)", part).groups()
    return stem if not stem or (number and f"{stem}0" in parts) else part


def _new_words(stems: list[str], kind: str, random: np.random.Generator) -> list[str]:
    if kind == "random":
        letters = list("abcdefghijklmnopqrstuvwxyz")
        made = ("".join(random.choice(letters, random.integers(4, 9))) for _ in itertools.count())
        return list(itertools.islice(dict.fromkeys(itertools.islice(made, 500)), len(stems)))
    if kind == "language":
        return list(random.permutation(LANGUAGE)[: len(stems)])
    names: list[str] = []
    for stem in stems:
        other = "_".join(OTHERS.get(word, word) for word in words(stem))
        if other == stem:  # the name of another part of the same model
            other = stems[stems.index(stem) - 1]
        while other in names:
            other += "_"
        names.append(other)
    return names
