"""T5Gemma and T5Gemma 2 beside transformers, on configurations drawn by a seed.

transformers computes norms, angles and softmax of a float64 model in float32: `set_exact` mends it.
"""

import copy
import dataclasses
import shutil

import jax
import numpy as np
import pytest
import torch

from jax_transformer import TransformerConfig, Translator, encode
from jax_transformer.commands import main as cli
from jax_transformer.convert import adapt, to_params
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_to_json, notes
from jax_transformer.convert.generation_config import generation_options
from jax_transformer.convert.huggingface import from_huggingface, load_folder, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.errors import InputError
from jax_transformer.model.tree import parameter_count
from jax_transformer.text import number_words
from tests.convert.families.case import (
    as_inputs,
    change_values,
    foreign_results,
    forward,
    goes_home,
    memory_and_logits,
    read_values,
    strictly_loaded,
    transformers,
)
from tests.convert.families.gemma_lineage import (
    TYPES,
    model_of,
    random_leaves,
    random_model,
    set_exact,
)
from tests.decoding.float64_torch import Float64Torch
from tests.decoding.plain import quick_generate
from tests.parity.ladder import ROUNDED, bound, error, score_error
from tests.parity.measure import gradient_errors, worst
from tests.tiers import tiered, tiered_rows
from tests.tokenizers.class_folders import write_gemma
from tests.tokenizers.sentencepiece_models import text

NAMES = ("t5gemma", "t5gemma2")
SEEDS = [(name, seed) for name in NAMES for seed in range(12)]
OF_CI = 4  # seeds of each model
TIERED = tiered_rows(
    SEEDS, lambda name, seed: (name, seed) == ("t5gemma2", 0), lambda _, seed: seed < OF_CI
)
EXHAUSTIVE = tiered_rows(SEEDS, lambda *_: False, lambda _, seed: seed < OF_CI)


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setattr(transformers.generation.utils, "torch", Float64Torch())
    with jax.enable_x64(True):
        yield


def ragged(config, seed):
    """Return sources of 14, 9, 5 and 1 tokens, and targets of 12, which no window covers."""
    random = np.random.default_rng(seed)
    src = random.integers(3, config.src_vocab_size - 3, (4, 14)).astype(np.int32)
    tgt = random.integers(3, config.tgt_vocab_size - 3, (4, 12)).astype(np.int32)
    for row, length in enumerate((14, 9, 5, 1)):
        src[row, length - 1] = config.eos_id
        src[row, length:] = config.pad_id
    tgt[:, 0] = config.bos_id
    return src, tgt


@pytest.mark.parametrize(("name", "seed"), TIERED)
def test_the_same_numbers(float64, name, seed):
    model = random_model(name, seed)
    config, params = from_huggingface(model)
    src, tgt = ragged(config, seed)
    logits, states = foreign_results(model, config, src, tgt)
    valid = src != config.pad_id
    memory, found = memory_and_logits(params, config, src, tgt)
    errors = error(memory[valid], states[-1].numpy()[valid]), error(found, logits)
    print(f"\n{name} {seed}: memory {errors[0]:.1e}, logits {errors[1]:.1e}")
    assert max(errors) <= bound("logits", "float64")
    if seed == 0:  # the classes as they are
        plain = type(model)(model.config).double().eval()
        plain.load_state_dict(model.state_dict())
        rounded, _ = foreign_results(plain, config, src, tgt)
        print(f"with float32 inside: {error(rounded, logits):.1e}")
        assert 1e-9 < error(rounded, logits) < 1e-4


@pytest.mark.parametrize(("name", "seed"), EXHAUSTIVE)
def test_the_same_hypotheses(float64, name, seed):
    """Greedy and with beams, beyond every window; the logits end some targets early."""
    model = random_model(name, seed)
    config, params = from_huggingface(model)
    src, _ = ragged(config, seed)
    for beams in (1, 4):
        values = FAMILIES[name].generation(config) | {"num_beams": beams, "max_length": 14}
        values |= {"num_return_sequences": beams, "do_sample": False}
        values["bad_words_ids"] = [[config.pad_id], [config.tgt_vocab_size - 1]]  # ends images
        model.generation_config = transformers.GenerationConfig(**values)
        expected = model.generate(
            **as_inputs(config, src), return_dict_in_generate=True, output_scores=True
        )
        found = quick_generate(params, config, src, **generation_options(values, config))
        tokens = expected.sequences[:, 1:].numpy().reshape(len(src), beams, -1)
        own = np.asarray(found.tokens)[..., : tokens.shape[-1]]
        inside = np.arange(tokens.shape[-1]) < np.asarray(found.lengths)[..., None]
        np.testing.assert_array_equal(own, np.where(inside, tokens, config.pad_id))
        if beams > 1:
            scores = expected.sequences_scores.numpy().reshape(len(src), beams)
            assert score_error(found.scores, scores) <= ROUNDED


@pytest.mark.parametrize(("name", "seed"), TIERED)
def test_a_folder_goes_home_with_every_byte(tmp_path, name, seed):
    model = random_model(name, seed, torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    config, _ = goes_home(tmp_path / "model", tmp_path / "home")
    assert config == from_huggingface(model)[0]
    strictly_loaded(type(model), tmp_path / "home")


@pytest.mark.parametrize("name", NAMES)
def test_without_an_origin_the_text_model_is_written(tmp_path, name):
    model = random_model(name, 1, torch.float32)
    config, params = from_huggingface(model)
    to_huggingface(params, config, tmp_path / "new", family=name)
    assert from_huggingface(tmp_path / "new")[0] == config
    loaded, report = type(model).from_pretrained(tmp_path / "new", output_loading_info=True)
    images = ("vision_tower", "multi_modal_projector", "eoi_embedding")
    missing = report.pop("missing_keys")
    assert all(any(part in key for part in images) for key in missing)
    assert bool(missing) == (name == "t5gemma2")
    assert not any(report.values())
    src, tgt = ragged(config, 1)
    theirs = [foreign_results(one, config, src, tgt)[0] for one in (model, loaded.eval())]
    torch.testing.assert_close(*theirs, rtol=0, atol=0)


def test_tensors_for_images_are_told_and_missed(tmp_path):
    random_model("t5gemma2", 0, torch.float32).save_pretrained(tmp_path / "model")
    config, params = from_huggingface(tmp_path / "model")
    origin, _ = read_origin(tmp_path / "model")
    (line,) = notes(FAMILIES["t5gemma2"], origin.config)
    assert line.startswith("not read, only copied on the way home: *.vision_tower.*, ")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(InputError, match=r"model has tensors that are copied; bring it back"):
        to_huggingface(params, config, tmp_path / "home", origin=origin)
    assert not (tmp_path / "home").exists()


PARTS = {"t5gemma": ("encoder", "decoder"), "t5gemma2": ("encoder.text_config", "decoder")}
YARN = {"rope_type": "yarn", "rope_theta": 1e4}
# In both objects, or in that of the decoder alone, which must agree with the encoder's.
REFUSED = {
    "both": {
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "hidden_activation": "relu6",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window": None,
        "num_key_value_heads": 5,
        "rope_parameters": YARN | {TYPES[0]: YARN, TYPES[1]: YARN | {"rope_type": "default"}},
        "eos_token_id": [],
    },
    "decoder": {
        "head_dim": 2,
        "hidden_activation": "relu",
        "rms_norm_eps": 1e-3,
        "query_pre_attn_scalar": 99,
        "sliding_window": 99,
        "layer_types": [],
        "pad_token_id": 3,
    },
}
NAMED = {
    "rope_parameters": "rope_type",
    "num_key_value_heads": "num_kv_heads",
    "eos_token_id": "eos",
}


@pytest.mark.parametrize("name", NAMES)
def test_values_that_the_model_cannot_have_are_refused_by_name(tmp_path, name):
    random_model(name, 2, torch.float32).save_pretrained(tmp_path)
    whole = read_values(tmp_path)
    for side, refused in REFUSED.items():
        for key, value in refused.items():
            values = copy.deepcopy(whole)
            for path in PARTS[name][side == "decoder" :]:
                part = values
                for inner in path.split("."):
                    part = part[inner]
                part[key] = value
            with pytest.raises(InputError, match=rf"config\.json: .*{NAMED.get(key, key)}"):
                from_huggingface(change_values(tmp_path, **values))


@pytest.mark.parametrize("name", NAMES)
def test_configs_that_the_family_cannot_have_are_refused_by_name(name):
    config = TransformerConfig.preset(name)
    for field, value in {
        "norm": "rms_norm",
        "norm_placement": "pre",
        "attention_scale": "none",
        "rotary_fraction": 0.5,
        "query_key_norm": name == "t5gemma",
    }.items():
        changed = dataclasses.replace(config, **{field: value})
        with pytest.raises(InputError, match=f"no T5Gemma.* has this config: .*{field}="):
            config_to_json(FAMILIES[name], changed)


def test_older_files_and_several_ends_are_read(tmp_path):
    """As transformers 4 wrote T5Gemma: one key for theta; instruction-tuned models end twice."""
    model = random_model("t5gemma", 0, torch.float32)
    model.save_pretrained(tmp_path)
    values = read_values(tmp_path)
    for part in PARTS["t5gemma"]:
        theta = values[part].pop("rope_parameters")["rope_theta"]
        values[part] |= {"rope_theta": theta, "eos_token_id": [1, 7]}
    config, params = from_huggingface(change_values(tmp_path, **values))
    assert (config.rotary_theta, config.rotary_scaling, config.eos_id) == (theta, 1.0, 1)
    to_huggingface(params, config, tmp_path / "home", origin=read_origin(tmp_path)[0])
    assert read_values(tmp_path / "home") == values


# Parameters of the published files, by the metadata of their pages.
PUBLISHED = {
    591_490_560: {  # t5gemma-b-b
        **{"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_kv_heads": 12, "d_kv": 64},
        **{"num_encoder_layers": 12, "num_decoder_layers": 12},
    },
    12_292_375_296: {  # t5gemma-9b-2b
        **{"encoder_d_model": 3584, "encoder_d_ff": 14_336, "encoder_num_heads": 16},
        **{"encoder_num_kv_heads": 8, "num_encoder_layers": 42},
    },
}


@pytest.mark.parametrize(("count", "sizes"), PUBLISHED.items())
def test_published_models_have_as_many_parameters(count, sizes):
    assert parameter_count(TransformerConfig.preset("t5gemma", **sizes)) == count


GEMMAS = {
    "t5gemma": ("Gemma2ForCausalLM", {}),
    "t5gemma2": ("Gemma3ForCausalLM", {"layer_types": [TYPES[1], TYPES[0], TYPES[1]]}),
}


def gemma(name, **others):
    """Return a decoder-only Gemma from which an encoder-decoder of this family is made."""
    class_name, values = GEMMAS[name]
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"sliding_window": 4, "max_position_embeddings": 64, "query_pre_attn_scalar": 24}
    model_class = getattr(transformers, class_name)
    return random_leaves(model_class(model_class.config_class(**sizes | values | others)), 1)


@pytest.mark.parametrize("name", tiered(NAMES, ["t5gemma2"]))
def test_an_adapted_encoder_with_a_causal_mask_is_gemma(float64, tmp_path, name):
    """With the windows of Gemma, which hold the own position."""
    model = gemma(name).double().eval()
    model.save_pretrained(tmp_path)
    config, params = adapt(tmp_path)
    decoder = params["decoder"]["layers_1"]
    if name == "t5gemma":
        for part, leaves in decoder["self_attention"].items():
            np.testing.assert_array_equal(
                decoder["cross_attention"][part]["kernel"], leaves["kernel"]
            )
    src = np.random.default_rng(0).integers(3, 61, (3, 12)).astype(np.int32)
    model.set_attn_implementation("eager")
    set_exact(model)
    with torch.no_grad():
        states = model.model(torch.tensor(src, dtype=torch.int64)).last_hidden_state.numpy()
    windows = {"sliding_window": config.sliding_window - 1, "encoder_window": "each_side"}
    own = dataclasses.replace(config, **windows)
    causal = np.tril(np.ones((12, 12), bool))[None, None]
    found = jax.jit(encode, static_argnums=1)(params, own, src, src_mask=causal)
    assert error(found, states) <= bound("logits", "float64")


def test_the_command_line_adapts_and_refuses_others(tmp_path, capsys):
    folder = tmp_path / "gemma"
    folder.mkdir()
    size = len(write_gemma(folder, add_bos_token=True))
    gemma("t5gemma", vocab_size=size).save_pretrained(folder)
    cli.command_call(
        *("convert", str(folder), str(tmp_path / "new"), "--adapt", "--output-layout", "t5gemma")
    )()
    assert f"{tmp_path / 'new'} written" in capsys.readouterr().out
    loaded = transformers.T5GemmaForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert loaded.config.encoder.hidden_size == 24
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again("tlx 6r5").input_ids[0] == again.bos_token_id
    with pytest.raises(InputError, match="model_type='t5gemma' must be gemma2 or gemma3_text"):
        adapt(tmp_path / "new")


LINES = text(7, 24)


def folder_with_tokenizer(folder, name, lines=None, drawn=True, **changes):
    """Write a model of the class with a tokenizer, as published; its windows hold the lines."""
    folder.mkdir()
    tokenizer = write_gemma(folder, lines, add_bos_token=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "query_pre_attn_scalar": 8, "sliding_window": 256}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 48, "max_position_embeddings": 512}
    sizes |= {"attn_logit_softcapping": None, "final_logit_softcapping": None} | changes
    model = model_of(name, dict(sizes), sizes | {"num_hidden_layers": 3})
    model = random_leaves(model, 3) if drawn else model
    model.generation_config.max_new_tokens = 20 if drawn else 40
    model.save_pretrained(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_ctranslate2_reads_our_folders_and_has_the_same_strings(tmp_path, name):
    """Each line alone: in batches, CTranslate2 4.8.5 attends to the padding of a merged memory."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder_with_tokenizer(tmp_path / "model", name)
    config, params, tokenizer, _ = load_folder(tmp_path / "model")
    origin, _ = read_origin(tmp_path / "model")
    home = tmp_path / "home"
    to_huggingface(params, config, home, origin=origin, tokenizer=tokenizer)
    ctranslate2.converters.TransformersConverter(str(home)).convert(str(tmp_path / "engine"))
    engine = ctranslate2.Translator(str(tmp_path / "engine"), device="cpu")
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    sources = [theirs.convert_ids_to_tokens(ids) for ids in theirs(LINES).input_ids]
    limits = {"beam_size": 1, "max_decoding_length": 20, "max_batch_size": 1}
    ids = [
        theirs.convert_tokens_to_ids(result.hypotheses[0])
        for result in engine.translate_batch(sources, **limits)
    ]
    found = theirs.batch_decode(ids, skip_special_tokens=True)
    assert found == [one.text for one in Translator(home)(LINES)]
    assert len(set(found)) > 4


@pytest.mark.parametrize(
    ("name", "steps"),
    tiered_rows(
        [("t5gemma2", 60), *((name, 400) for name in NAMES)],
        is_quick=lambda *_: False,
        is_exhaustive=lambda _, steps: steps < 400,
    ),
)
def test_number_words_are_learnt_and_go_home(tmp_path, monkeypatch, capsys, name, steps):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(number_words, "NUMBERS", 1000)
    monkeypatch.setattr(number_words, "HELD_OUT", 100)
    learnt, held_out = number_words.corpus(0)
    lines = [*learnt.sources, *learnt.targets]
    torch.manual_seed(0)  # of the weights that training begins with
    changes = {"hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16}
    changes |= {"intermediate_size": 128, "sliding_window": 8, "max_position_embeddings": 64}
    folder_with_tokenizer(tmp_path / "model", name, lines, drawn=False, **changes)
    options = [f"--steps={steps}", f"--evaluation-interval={steps}"]
    cli.command_call("train", "--init=model", "--output=run", "--warmup-steps=50", *options)()
    cli.command_call("convert", "run/model", "home", f"--output-layout={name}")()
    model = strictly_loaded(getattr(transformers, FAMILIES[name].architecture), "home")
    tokenizer = transformers.AutoTokenizer.from_pretrained("home")
    sources = list(held_out.sources)
    batch = tokenizer(sources, padding=True, padding_side="right", return_tensors="pt")
    theirs = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    assert [found.text for found in Translator("run")(held_out.sources)] == theirs
    right = sum(map(str.__eq__, theirs, held_out.targets))
    with capsys.disabled():
        print(f"\n{name}: {right} of {len(theirs)} held-out numbers")
    assert right >= 80 or steps < 400


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients(float64, name):
    model, family = random_model(name, 3), FAMILIES[name]
    config, params = from_huggingface(model)
    src, tgt = ragged(config, 3)
    weights = np.random.default_rng(4).normal(size=(*tgt.shape, config.tgt_vocab_size))
    own = jax.grad(lambda params: (forward(params, config, src, tgt) * weights).sum())(params)
    logits = model(
        **as_inputs(config, src), decoder_input_ids=torch.tensor(tgt, dtype=torch.int64)
    ).logits
    (logits * torch.tensor(weights)).sum().backward()
    theirs = {
        family.full_name(key): leaf.grad
        for key, leaf in model.named_parameters()
        if not family.lacks(key)
    }
    expected, _ = to_params(theirs, config, family.layout, buffers=False)
    leaf, apart = worst(gradient_errors(own, expected))
    assert apart <= bound("gradient", "float64"), leaf
