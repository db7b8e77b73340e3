"""What `import jax_transformer` offers: each name is documented, checked and short to print."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jax_transformer
from jax_transformer import (
    Batch,
    Execution,
    GenerationConfig,
    InputError,
    TransformerConfig,
    apply,
    convert,
    cross_entropy,
    generate,
    init_params,
    make_train_step,
    pad,
    parameter_shardings,
    parity,
)
from jax_transformer.adapters import lora
from jax_transformer.commands.main import usage
from jax_transformer.convert.layout_file import LayoutFile
from jax_transformer.porting import get_layout
from jax_transformer.runtime import sharding
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from tests.models import shallow_config, tiny_model, unchecked
from tests.programs import run_python

ROOT = Path(__file__).parents[1]
CONFIG = shallow_config("pre_norm")
PARAMS = init_params(jax.random.key(7), CONFIG)
TARGETS = [[9, 4, 2], [6, 2], [3, 8, 8, 2]]
BATCH = Batch(
    pad([[5, 6, 2], [7, 7, 7, 9, 2], [2]], CONFIG.pad_id),
    pad([[CONFIG.bos_id, *ids[:-1]] for ids in TARGETS], CONFIG.pad_id),
    pad(TARGETS, CONFIG.pad_id),
)


def test_a_step_is_that_of_a_loop_written_by_hand():
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_train_step(CONFIG, optimizer, label_smoothing=0.2))

    @jax.jit
    @jax.value_and_grad
    def differentiate(params):
        logits = apply(params, CONFIG, BATCH.src, BATCH.tgt_in)
        total, count = cross_entropy(logits, BATCH.tgt_out, CONFIG.pad_id, 0.2)
        return total / count

    state = optimizer.init(PARAMS)
    params, _, loss = step(PARAMS, state, BATCH)
    expected, gradients = differentiate(PARAMS)
    assert abs(loss - expected) < 1e-5
    for new, old, gradient in zip(*map(jax.tree.leaves, (params, PARAMS, gradients)), strict=True):
        np.testing.assert_allclose(new, np.asarray(old) - 0.1 * np.asarray(gradient), atol=1e-6)
    padding = BATCH._replace(tgt_out=np.full_like(BATCH.tgt_out, CONFIG.pad_id))
    same, _, loss = step(PARAMS, state, padding)
    assert loss == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, same, PARAMS))


def test_parameters_are_split_as_the_table_says_with_and_without_a_config():
    mesh = jax.sharding.AbstractMesh((1, 2, 3), sharding.AXES, axis_types=sharding.AXIS_TYPES)
    for config in (CONFIG, None):
        places = parameter_shardings(mesh, PARAMS, config)
        layer = places["encoder"]["layers_0"]
        assert layer["self_attention"]["query"]["kernel"].spec == PartitionSpec("fsdp", "tensor")
        assert layer["feed_forward"]["inner"]["kernel"].spec == PartitionSpec("fsdp", None)
        assert places["encoder"]["norm"]["scale"].spec == PartitionSpec()
    halves = jax.sharding.AbstractMesh((1, 1, 14), sharding.AXES, axis_types=sharding.AXIS_TYPES)
    found = [
        parameter_shardings(halves, PARAMS, config)["encoder"]["layers_0"]["self_attention"]
        for config in (CONFIG, None)
    ]  # 3 heads of 14 columns: 42 columns can be split, 3 heads cannot
    assert [place["query"]["kernel"].spec[1] for place in found] == [None, "tensor"]


WRONG = {
    "label_smoothing=1.5 must be a finite number, at least 0 and below 1": lambda: make_train_step(
        CONFIG, optax.sgd(1.0), label_smoothing=1.5
    ),
    "optimizer=0.1 must be one of optax": lambda: make_train_step(CONFIG, 0.1),
    "execution={} must be an Execution": lambda: make_train_step(CONFIG, optax.sgd(1.0), {}),
    "config of type str must be": lambda: make_train_step("vaswani2017", optax.sgd(1.0)),
    "targets of shape (3, 3) must be [batch, length] as logits, which are [3, 4, 5]": (
        lambda: cross_entropy(np.zeros((3, 4, 5)), np.zeros((3, 3), int), 0)
    ),
    "targets[0, 1]=-1 is outside the vocabulary": (
        lambda: cross_entropy(np.zeros((1, 2, 5)), np.array([[4, -1]]), 0)
    ),
    "rows=[5, 6, 2] must be rows of ids": lambda: pad([5, 6, 2], 0),
    "rows=[[1], [4294967296]] must be rows of ids": lambda: pad([[1], [2**32]], 0),
    "rows=[['a line']] must be rows of ids": lambda: pad([["a line"]], 0),
    "a row has 3 ids, more than length=2": lambda: pad([[5, 6, 2]], 0, 2),
    "mesh with the axes ('x',)": lambda: parameter_shardings(jax.make_mesh((1,), ("x",)), PARAMS),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_used_is_one_line(message):
    with pytest.raises(InputError) as refusal, unchecked():
        WRONG[message]()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_help_begins_with_an_overview_of_every_public_name():
    shown = pydoc.render_doc(jax_transformer, renderer=pydoc.plaintext)
    overview = shown.partition("PACKAGE CONTENTS")[0]
    assert len(overview.splitlines()) < 60
    for name in jax_transformer.__all__:
        assert re.search(rf"\b{name}\b", overview), name


def test_type_checkers_see_every_public_name():
    (block,) = (
        node
        for node in ast.parse(Path(jax_transformer.__file__).read_text("utf-8")).body
        if isinstance(node, ast.If)
    )
    seen = {f"jax_transformer.{jax_transformer._MODULE_OF[n]}.{n}" for n in jax_transformer.__all__}
    assert {f"{line.module}.{name.asname}" for line in block.body for name in line.names} == seen


def test_printed_signatures_and_models_are_short():
    for name in ("apply", "encode", "decode", "generate", "init_cache", "decode_step"):
        shown = str(inspect.signature(getattr(jax_transformer, name)))
        assert re.search(r" = (Search)?Execution\(\)", shown)
    assert repr(Execution()) == "Execution()"
    fast = Execution.for_platform("tpu", remat="dots")
    assert eval(repr(fast)) == fast
    assert "scan_layers" not in repr(fast)
    model = tiny_model(["a b c", "c b a"], 12)
    shown = repr(model)
    assert len(shown) < 250
    assert "\n" not in shown
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(model.params)):,} parameters" in shown
    assert "config, params, tokenizer, generation" in shown


SHOWN = {
    "config": (CONFIG, r"TransformerConfig\(src_vocab_size=\d+, .*norm_placement='pre'.*\)"),
    "preset": (TransformerConfig(), r"TransformerConfig\(\)"),
    "training": (TrainingConfig(steps=7), r"TrainingConfig\(steps=7\)"),
    "options": (
        GenerationConfig(5, temperature=0.5),
        r"GenerationConfig\(max_new_tokens=5, temperature=0.5\)",
    ),
    "tokenizer": (
        train_byte_pair(["a b c"] * 9, 20),
        r"Tokenizer\('byte_pair': 11 source and 11 target ids, pad_id=0, bos_id=1, .*\)",
    ),
    "layout": (
        LayoutFile(get_layout("torch_nn")),
        r"LayoutFile\(layout=Layout\('torch_nn': \d+ rows, \d+ buffers, masks: .*\), config=None\)",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_objects_print_in_one_line(name):
    shown, expected = SHOWN[name]
    assert re.fullmatch(expected, repr(shown)), repr(shown)
    if "config" in name or name in ("preset", "training"):
        assert eval(repr(shown)) == shown


def test_results_that_are_tables_print_as_tables():
    compared = parity.compare(*[parity.record(None, lambda _: {"y": np.ones(2)})] * 2)
    assert repr(compared) == str(compared)
    assert repr(compared).endswith("a agrees with b")
    assert repr(parity.record(None, lambda _: {"y": np.ones(2)})) == "Record(1 blocks: ['y'])"


def test_an_option_that_is_none_is_named_with_the_nearest():
    src = np.array([[5, 2]])
    with pytest.raises(InputError, match="beam=4 is not a setting; did you mean beam_size"):
        generate(PARAMS, CONFIG, src, max_new_tokens=3, beam=4)
    with pytest.raises(InputError, match="max_new_token=3 is not a setting; did you mean max_new_"):
        generate(PARAMS, CONFIG, src, generation=GenerationConfig(5), max_new_token=3)


@unchecked()
def test_a_text_is_no_list_of_texts():
    with pytest.raises(InputError, match="lines='nine' must be a list of texts"):
        train_byte_pair(["nine"], 20).encode_source("nine")
    with pytest.raises(InputError, match=r"write \['\*/query'\]"):
        lora.init(jax.random.key(0), CONFIG, 2, "*/query")


def test_decode_takes_the_ids_of_generate():
    tokenizer = tiny_model(["a b c", "c b a"], 12).tokenizer
    (row,) = tokenizer.encode_target(["b a"])
    assert tokenizer.decode(jnp.array(row)) == tokenizer.decode(row) == "b a"


def test_a_call_that_needs_an_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("jax_transformer.tokenizers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jax_transformer.translation.model_folder")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for user, call, module, extra in (
        ("jax_transformer.load", lambda: jax_transformer.load, "tokenizers", "train"),
        ("convert.to_torch", lambda: convert.to_torch(PARAMS, CONFIG), "torch", "torch"),
    ):
        with pytest.raises(ModuleNotFoundError) as refusal:
            call()
        assert str(refusal.value) == (
            f'{user} needs {module}, which is not installed: pip install "jax-transformer[{extra}]"'
        )


WITHOUT_EXTRAS = """
import pydoc, sys
from jax_transformer.errors import EXTRA_OF
sys.modules |= dict.fromkeys({*EXTRA_OF} - {"rich", "yaml", "orbax"})  # flax has these
import jax_transformer
of_disk = {"load", "save", "Translator", "Embedder", "Classifier", "Transcriber", "train"}
for name in {*jax_transformer.__all__} - of_disk:
    getattr(jax_transformer, name)
pydoc.render_doc(jax_transformer)
"""


@pytest.mark.exhaustive
def test_all_but_models_on_disk_need_no_extra():
    run_python("-c", WITHOUT_EXTRAS)


def test_the_module_is_the_command():
    assert run_python("-m", "jax_transformer", "--help").stdout == f"{usage()}\n"
    command = [sys.executable, "-m", "jax_transformer", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: command 'trian' is unknown")


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "jax_transformer/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", jax_transformer.__version__)
