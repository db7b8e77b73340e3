"""Hostile configs for every way by which a config reaches this library, and what becomes of them.

    python -m tests.hostile_configs COUNT SEED

reads COUNT of them in this process and prints a JSON object of the counts. A config is refused (an
`InputError`), or accepted with the numbers of the weights and nothing else: it is then another
reading of the same tensors, as with another number of heads. Anything else fell.
"""

import copy
import dataclasses
import itertools
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_transformer import TransformerConfig, convert, porting
from jax_transformer.commands.convert import Weights, read_source
from jax_transformer.config.presets import PRESETS
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.layout_file import read_layout, write_layout
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.convert.report import ConversionError
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers import TRAINERS, read_trainer
from jax_transformer.runs.checkpoints import read_step
from jax_transformer.storage import weights as files
from jax_transformer.storage.reading import json_digest
from jax_transformer.translation import model_folder
from tests.convert.marian.rebuild import Marian
from tests.fuzz.outcomes import memory
from tests.models import random_params, small_config, tiny_model
from tests.porting.trainers.programs import AnnotatedTransformer, Fairseq, JoeyNMT, OpenNMT
from tests.runs.runs import make_settings, save

SECONDS, BYTES = 2.0, 200e6  # that reading a hostile config may take
PROGRAMS = (AnnotatedTransformer, Fairseq, JoeyNMT, OpenNMT)
PRESET_OF = {"reference": "vaswani2017", "torch_nn_encoder": "torch_nn"}
PRESET_OF |= {"torch_nn_decoder": "torch_nn", "torch_nn_attention": "torch_nn"}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}
NUMBERS = (0, -1, 1, 2, 3, 4, 7, 8, 14, 64, 1000, 10**4, 10**5, 10**6, 10**7, 10**9, 2**20, 2**24)
NUMBERS += (2**30, 2**31 - 1, 2**31, 2**32, 2**40, 10**12, 2**53, 2**63, 10**23, -(2**31), 10**400)
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.5, 1e-320, 1e-30, 1e30, 1e308)
FLOATS += (float("inf"), float("-inf"), float("nan"))
OTHERS = (None, True, False, "", "8", "relu", "learned", "none", "tied", "x" * 10**5, [], {}, [8])
OTHERS += ({"d_model": 8}, [[[[]]]], "\u0000", "١٢")


class Door(NamedTuple):
    """A way by which a config reaches the library, with a tiny model behind it.

    Attributes:
        name: The way and the layout.
        fields: The sound values, as JSON has them.
        read: Reads the weights with other values; returns the config and the parameters.
        layout: The layout that they can be written in again.
    """

    name: str
    fields: Mapping[str, Any]
    read: Callable[[dict[str, Any]], tuple[TransformerConfig, Mapping[str, Any]]]
    layout: str = "reference"


def doors(folder: Path) -> list[Door]:
    """Return every door; the files of the tiny models are written into the folder."""
    found = [*_recorded(folder), *_families(folder), *_trainers(folder)]
    return [*found, _own_folder(folder), _layout_file(folder), _run(folder), _marian(folder)]


def hostile_configs(seed: int, found: list[Door]) -> Iterator[tuple[Door, dict[str, Any]]]:
    """Yield doors in turn, with hostile values: huge, negative, of other types, alone or paired."""
    choose = random.Random(seed)
    for door in itertools.cycle(found):
        fields = copy.deepcopy(dict(door.fields))
        count = min(len(fields), choose.choice((1, 1, 1, 2, 2, 3)))
        for name in choose.sample(sorted(fields), count):
            fields[name] = _hostile(choose, fields[name])
        if choose.random() < 0.05:
            fields[choose.choice(("width", "", "x" * 10**5))] = 1
        if choose.random() < 0.05:
            del fields[choose.choice(sorted(fields))]
        yield door, fields


def _hostile(choose: random.Random, value: Any) -> Any:
    """Return another value: mostly of the same type, so that it is not refused by its type."""
    kind = choose.random()
    if type(value) is bool and kind < 0.6:
        return not value
    if type(value) is int and kind < 0.2:
        return value * choose.choice((2, 3, 10**3, 10**6))
    if type(value) is int and kind < 0.8:
        return choose.choice(NUMBERS)
    if type(value) is float and kind < 0.7:
        return choose.choice(FLOATS)
    if type(value) is str and kind < 0.7:
        return choose.choice([word for word in _words() if isinstance(word, str)])
    return choose.choice(NUMBERS + FLOATS + OTHERS)


def _words() -> list[Any]:
    return sorted({value for fields in PRESETS.values() for value in fields.values()}, key=str)


def attempt(door: Door, fields: dict[str, Any], numbers: np.ndarray) -> str:
    """Return what becomes of a config: "refused", "accepted", or how it fell.

    Args:
        numbers: The parameters of the sound model, sorted.
    """
    try:
        config, params = door.read(fields)
    except InputError as error:
        listed = isinstance(error, ConversionError)  # its report has a line for each fault
        return "refused" if listed or "\n" not in str(error) else f"several lines: {error}"
    except BaseException as error:  # whatever else there is, a user saw a traceback
        return f"{type(error).__name__}: {str(error)[:300]}"
    if not np.array_equal(sorted_numbers(params), numbers):
        return "accepted with other numbers than those of the weights"
    try:  # and back: what was accepted may claim no more there
        convert.to_tensors(params, config, porting.get_layout(door.layout), copy=False)
    except InputError:
        pass
    except BaseException as error:
        return f"writing: {type(error).__name__}: {str(error)[:300]}"
    return "accepted"


def sorted_numbers(params: Mapping[str, Any]) -> np.ndarray:
    """Return all numbers of parameters in ascending order."""
    leaves = jax.tree.leaves(params)
    return np.sort(np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves]))


def _params_of(layout: str, config: TransformerConfig) -> Mapping[str, Any]:
    """Return the part of random parameters that a layout converts."""
    params = random_params(config)
    for key in filter(None, porting.get_layout(layout).scope.split("/")):
        params = params[key]
    return params


def _recorded(folder: Path) -> Iterator[Door]:
    """Yield a .safetensors file that records its config, and one with --config, by layout."""
    for layout in LAYOUTS:
        preset = PRESET_OF.get(layout, layout)
        config = small_config(preset, **LAYERS)
        params = _params_of(layout, config)
        tensors, _ = convert.to_tensors(params, config, porting.get_layout(layout))
        bare, path, other = (folder / f"{layout}{end}" for end in (".pt", ".json", ".safetensors"))
        files.write(bare, tensors)

        def named(fields, bare=bare, path=path, layout=layout):
            path.write_text(json.dumps(fields), "utf-8")
            source = read_source(Weights(source=bare, layout=layout, config=path))
            return source.config, source.params

        def recorded(fields, tensors=tensors, other=other, layout=layout):
            files.write(other, tensors, overwrite=True, metadata={"config": json.dumps(fields)})
            source = read_source(Weights(source=other, layout=layout))
            return source.config, source.params

        yield Door(f"--config {layout}", config.to_dict(), named, layout)
        yield Door(f"recorded {layout}", config.to_dict(), recorded, layout)


def _families(folder: Path) -> Iterator[Door]:
    for name, family in FAMILIES.items():
        if name == "marian_npz":
            continue  # its options stand in the weights: `_marian`
        others = {"token_embeddings": "separate"} if name == "IndicTrans" else {}
        if name == "t5gemma2":  # the list of a single layer is that of the usual six
            others = {"sliding_window_pattern": 6}
        config = small_config(family.preset, **LAYERS, **others)
        home, params = folder / name, random_params(config)
        convert.to_huggingface(params, config, home, family=name)
        values = json.loads((home / "config.json").read_text("utf-8"))

        def read(fields, home=home):
            (home / "config.json").write_text(json.dumps(fields), "utf-8")
            return convert.from_huggingface(home)

        yield Door(f"folder {name}", values, read, name)


def _marian(folder: Path) -> Door:
    marian = Marian()
    home = marian.save(folder / "marian_npz")

    def read(fields):
        options = np.frombuffer(json.dumps(fields).encode(), np.int8)
        np.savez(home / "model.npz", **marian.params, **{"special:model.yml": options})
        return convert.from_huggingface(home)

    return Door("folder of Marian", marian.options, read, "marian_npz")


def _trainers(folder: Path) -> Iterator[Door]:
    for program in PROGRAMS:
        home = folder / program.__name__
        home.mkdir()
        trainer, model = read_trainer(program().save(home))

        def read(fields, trainer=trainer, model=model):
            settings = dataclasses.replace(model.settings, values=fields)
            config = trainer.config(model._replace(settings=settings))
            return config, convert.to_params(model.tensors, config, trainer.layout)[0]

        heads = {} if trainer.records_heads else {"num_heads": 4}
        values = {**model.settings.values, **heads}
        yield Door(f"checkpoint {trainer.name}", values, read, trainer.name)
    assert {program.name for program in TRAINERS.values()} <= set(porting.layouts())


def _own_folder(folder: Path) -> Door:
    home = folder / "own"
    model_folder.save(home, tiny_model(["one two", "eins zwei"] * 9, 30))
    description = json.loads((home / "config.json").read_text("utf-8"))
    del description["config_sha256"]

    def read(fields):
        changed = description | {"config": fields}
        changed["config_sha256"] = json_digest(changed)
        (home / "config.json").write_text(json.dumps(changed), "utf-8")
        model = model_folder.load(home)
        return model.config, model.params

    return Door("own folder", description["config"], read)


def _layout_file(folder: Path) -> Door:
    import tomli_w

    config = small_config("pre_norm", **LAYERS)
    layout, path = porting.get_layout("pre_norm"), folder / "layout.toml"
    tensors, _ = convert.to_tensors(random_params(config), config, layout)
    write_layout(path, layout)
    rows = path.read_text("utf-8")
    name, rest = rows.split("\n", 1)

    def read(fields):
        plain = {field: value for field, value in fields.items() if value is not None}
        try:
            described = tomli_w.dumps({"config": plain})
        except (ValueError, TypeError) as error:  # TOML cannot say it
            raise InputError(str(error)) from error
        path.write_text(f"{name}\n{described}\n{rest}", "utf-8")
        found = read_layout(path)
        return found.config, convert.to_params(tensors, found.config, found.layout)[0]

    return Door("layout file", config.to_dict(), read, "pre_norm")


def _run(folder: Path) -> Door:
    steps = folder / "steps"
    save(steps, make_settings(), [8])
    path = steps / "8" / "run.json"
    sound = json.loads(path.read_text("utf-8"))

    def read(fields):
        content = copy.deepcopy(sound["content"])
        content["settings"]["config"] = fields
        path.write_text(json.dumps({"content": content, "sha256": json_digest(content)}), "utf-8")
        restored = read_step(steps, 8)
        return restored.settings.config, restored.read().state.params

    return Door("checkpoint of a run", sound["content"]["settings"]["config"], read)


def run(count: int, seed: int) -> dict[str, Any]:
    """Read hostile configs; return the counts, what fell, the slowest and the largest.

    The slowest is in seconds of the processor, the largest in bytes by which the memory grew, each
    with its config. The process may take no more memory than 8 times `BYTES` beyond what it has.
    """
    fell, outcomes, slowest, largest = [], Counter(), (0.0, ""), (0, "")
    with tempfile.TemporaryDirectory() as folder:
        found = doors(Path(folder))
        numbers = {}
        for door in found:
            _, params = door.read(dict(door.fields))  # everything is traced and imported once
            numbers[door.name] = sorted_numbers(params)
        limit = memory("VmSize") + 8 * int(BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        for door, fields in itertools.islice(hostile_configs(seed, found), count):
            Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
            before = memory("VmRSS")
            start = time.process_time()  # others may use the machine as well
            outcome = attempt(door, fields, numbers[door.name])
            seconds, grown = time.process_time() - start, memory("VmHWM") - before
            changed = {k: v for k, v in fields.items() if door.fields.get(k, ...) != v}
            shown = f"{door.name}: { {str(k)[:40]: repr_of(v) for k, v in changed.items()}!a}"
            slowest, largest = max(slowest, (seconds, shown)), max(largest, (grown, shown))
            outcomes[outcome if outcome in ("refused", "accepted") else "fell"] += 1
            if outcome not in ("refused", "accepted"):
                fell.append(f"{shown}: {outcome}")
    counts = {"doors": len(found), "tried": count, **outcomes, "slowest": slowest}
    return counts | {"largest": largest, "fell": fell}


def repr_of(value: Any) -> str:
    """Return a value for a report, whatever its length."""
    return f"10**{len(hex(value)) // 1.2:.0f}" if _is_huge(value) else repr(value)[:40]


def _is_huge(value: Any) -> bool:
    return type(value) is int and abs(value) > 10**30


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
