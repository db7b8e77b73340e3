"""The folders of PEFT, both ways, beside PEFT itself on the models of transformers."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import InputError, apply, convert
from jax_transformer.adapters import lora, peft_folder, read_adapter, write_adapter
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.table import flatten, nest
from jax_transformer.storage import weights as weight_files
from jax_transformer.training.freeze import merged, trainable
from tests.adapters.test_lora import EVERY, random_adapter
from tests.convert.families.case import (
    CASES,
    foreign_model,
    foreign_results,
    forward,
    ragged_tokens,
    widened,
)
from tests.convert.families.test_indictrans import write as write_indictrans
from tests.convert.test_family_training import STEPS, batches, train, train_in_torch
from tests.models import random_params, random_tokens, shallow_config, small_config
from tests.parity import measure
from tests.parity.ladder import bound, error
from tests.tiers import tiered
from torch_reference.layers import attach_adapter

peft = pytest.importorskip("peft")

RANKS = {"r": 3, "lora_alpha": 7}
LOGITS = 4 * bound("logits", "float64")  # each product has two more sums


def peft_model(model, **settings):
    """Return a model of torch with a random adapter on every product of its layers."""
    names = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    targets = sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})
    settings = {"target_modules": targets, **RANKS, **settings}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for name, leaf in model.named_parameters():
        if "lora_" in name:
            leaf.data.normal_(0, leaf.shape[1] ** -0.5 / 2, generator=generator)
    return model.eval()


def wide_model(model_type):
    return widened(foreign_model(model_type, [*CASES[model_type].shapes][-1]), model_type)


def tensors_of(folder):
    return weight_files.read(folder / peft_folder.WEIGHTS)


def saved(model, folder, config):
    model.save_pretrained(folder)
    return read_adapter(folder, config)


def compared_logits(params, model, config):
    """Check the logits of parameters with an adapter; return those of PEFT."""
    src, tgt = ragged_tokens(config)
    theirs = foreign_results(model, config, src, tgt)[0].numpy()
    ours = np.asarray(forward(params, config=config, src=src, tgt=tgt))
    valid = tgt != config.pad_id
    assert error(ours[valid], theirs[valid]) <= LOGITS
    return theirs


@pytest.mark.parametrize("model_type", tiered(CASES, [], ["bart", "umt5"]))
def test_gradients_and_twenty_steps_are_those_of_peft(model_type, tmp_path, x64):
    model = wide_model(model_type)
    config, params = from_huggingface(model)
    model = peft_model(model)
    whole = lora.attach(params, saved(model, tmp_path / "begin", config))
    data = batches(config)
    gradients, trained = train(config, whole, *data)
    leaves = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    assert all("lora_" in name for name in leaves)
    expected = train_in_torch(model, leaves, config, *data)
    after = saved(model, tmp_path / "end", config)
    for name, leaf in model.named_parameters():  # PEFT writes gradients under its own names
        if name in expected:
            leaf.data = expected[name]
    expected = trainable(saved(model, tmp_path / "gradients", config), ())
    kinds = {name.rpartition("/")[0].rpartition("/")[2] for name in flatten(expected)}
    assert {"query", "key", "value", "output", "inner", "outer"} <= kinds
    apart = measure.gradient_errors(gradients, expected)
    factors = flatten(trained)
    steps = {
        name: error(factors[name], leaf) for name, leaf in flatten(trainable(after, ())).items()
    }
    worst = measure.worst(apart), measure.worst(steps)
    print(f"\n{model_type}: gradients {worst[0]}, after {STEPS} steps {worst[1]}")
    assert worst[0][1] <= bound("gradient", "float64")
    assert worst[1][1] <= bound("adam", "float64")


@pytest.mark.parametrize("model_type", tiered(CASES, ["t5"]))
def test_a_folder_is_read_and_written_bit_equal_and_computes_what_peft_does(
    model_type, tmp_path, x64
):
    model = widened(foreign_model(model_type), model_type)
    config, params = from_huggingface(model)
    adapted = peft_model(model)
    adapter = saved(adapted, tmp_path / "theirs", config)
    theirs = compared_logits(lora.attach(params, adapter), adapted, config)
    write_adapter(tmp_path / "ours", adapter, config, family=model_type)
    read = {name: tensors_of(tmp_path / name) for name in ("theirs", "ours")}
    assert read["ours"].keys() == read["theirs"].keys()
    assert all(np.array_equal(read["ours"][name], x) for name, x in read["theirs"].items())
    settings = json.loads((tmp_path / "ours" / peft_folder.SETTINGS).read_text())
    assert {name: settings[name] for name in RANKS} == RANKS
    again = peft.PeftModel.from_pretrained(adapted.unload(), tmp_path / "ours").eval()
    assert np.array_equal(compared_logits(lora.attach(params, adapter), again, config), theirs)


SETTINGS = {
    "rslora": {"use_rslora": True},
    "some layers, by a regular expression": {"target_modules": r".*decoder.*\.(q|v)_proj"},
    "some layers by number": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "all products": {"target_modules": "all-linear"},
    "another initialization": {"init_lora_weights": "gaussian", "lora_dropout": 0.3},
    "for another class of layer": {"fan_in_fan_out": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", tiered(SETTINGS, ["rslora"]))
def test_settings_of_peft_are_honoured_and_survive_the_way_back(name, tmp_path, x64):
    model = widened(foreign_model("bart"), "bart")
    config, params = from_huggingface(model)
    model = peft_model(model, **SETTINGS[name])
    adapter = saved(model, tmp_path / "theirs", config)
    for _ in range(2):
        theirs = compared_logits(lora.attach(params, adapter), model, config)
        write_adapter(tmp_path / "ours", adapter, config, family="bart", overwrite=True)
        adapter = read_adapter(tmp_path / "ours", config)
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path / "ours").eval()
    assert error(compared_logits(lora.attach(params, adapter), again, config), theirs) <= LOGITS


WHOLE = {
    "an own output projection": ("mt5", ["lm_head"], {"output_projection/kernel"}),
    "a table that all share": ("bart", ["embed_tokens", "lm_head"], {"token_embedding/embedding"}),
    "norms and a product with its bias": (
        "bart",
        ["fc1", "layernorm_embedding"],
        {"source_embedding_norm/bias", "encoder/layers_0/feed_forward/inner/kernel"},
    ),
    "positions": ("bart", ["embed_positions"], {"source_positions/embedding"}),
}
SHARED = ("embed_tokens", "lm_head")


def with_whole_modules(model_type, modules, shared=SHARED):
    """Return a model of PEFT whose copies of modules have new values, of shared ones the same."""
    model = widened(foreign_model(model_type), model_type)
    targets = ["q", "wi_0"] if model_type == "mt5" else ["q_proj", "fc1"]
    model = peft_model(model, target_modules=targets, modules_to_save=[*modules])
    generator = torch.Generator().manual_seed(2)
    for name, leaf in model.named_parameters():
        if ".modules_to_save." in name:
            same = model_type == "bart" and any(end in name for end in shared)
            drawn = torch.Generator().manual_seed(3) if same else generator
            leaf.data += torch.randn(leaf.shape, generator=drawn, dtype=leaf.dtype) / 4
    return model


@pytest.mark.parametrize("name", tiered(WHOLE, ["a table that all share"]))
def test_modules_that_peft_saves_whole_are_read_trained_and_written(name, tmp_path, x64):
    model_type, modules, paths = WHOLE[name]
    config, params = from_huggingface(widened(foreign_model(model_type), model_type))
    model = with_whole_modules(model_type, modules)
    adapter = saved(model, tmp_path / "theirs", config)
    assert paths <= flatten(adapter).keys()
    whole = lora.attach(params, adapter)
    assert paths <= flatten(trainable(whole, ())).keys()
    for some in (whole, lora.merge(whole)):
        theirs = compared_logits(some, model, config)
    write_adapter(tmp_path / "ours", lora.detach(whole), config, family=model_type)
    base = widened(foreign_model(model_type), model_type)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert np.array_equal(compared_logits(whole, again, config), theirs)
    flat = flatten(read_adapter(tmp_path / "ours", config))
    assert all(np.array_equal(flat[path], leaf) for path, leaf in flatten(adapter).items())


def test_copies_of_a_shared_table_that_differ_are_refused(tmp_path):
    config, _ = from_huggingface(foreign_model("bart"))
    names = ("model.encoder.embed_tokens.weight", "lm_head.weight")
    for number, (modules, shared) in enumerate(
        [(SHARED, ("lm_head",)), (["shared"], ()), (["lm_head"], ())]
    ):
        with pytest.raises(InputError, match="must be equal: this model has one table") as refused:
            saved(with_whole_modules("bart", modules, shared), tmp_path / str(number), config)
        assert all(name in str(refused.value) for name in names)


# The settings, a module that they name, and one that they do not name.
NAMED = {
    "ends": ({"target_modules": ["fc2"]}, "encoder.layers.1.fc2", "encoder.layers.1.fc1"),
    "whole names": (
        {"target_modules": ["model.decoder.layers.2.fc1", "k_proj"]},
        "decoder.layers.2.fc1",
        "decoder.layers.1.fc1",
    ),
    "a regular expression": (
        {"target_modules": r".*decoder.*\.(q|v)_proj"},
        "decoder.layers.0.self_attn.v",
        "encoder.layers.0.self_attn.v",
    ),
    "all": ({"target_modules": "all-linear"}, "encoder.layers.0.fc2", None),
    "layers": (
        {"target_modules": ["fc1"], "layers_to_transform": [1]},
        "encoder.layers.1.fc1",
        "encoder.layers.0.fc1",
    ),
    "layers by a pattern": (
        {"target_modules": ["q", "v"], "layers_to_transform": 0, "layers_pattern": "layer"},
        "decoder.block.0.layer.0.SelfAttention.q",
        "decoder.block.0.layer.1.EncDecAttention.q",
    ),
    "all but some": (
        {"target_modules": ["fc1", "fc2"], "exclude_modules": r".*decoder.*|.*\.1\.fc2"},
        "encoder.layers.0.fc2",
        "encoder.layers.1.fc2",
    ),
    "all but ends": (
        {"target_modules": ["fc1", "fc2"], "exclude_modules": ["0.fc2"]},
        "decoder.layers.1.fc2",
        "decoder.layers.0.fc2",
    ),
    "all but what is saved whole": (
        {"target_modules": ["fc1", "fc2"], "modules_to_save": ["fc2"]},
        "decoder.layers.1.fc1",
        None,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_the_tensors_must_be_those_of_the_modules_that_the_settings_name(name, bare, tmp_path):
    settings, inside, outside = NAMED[name]
    model = foreign_model("t5" if ".block." in inside else "bart")
    config, _ = from_huggingface(model)
    if bare and "model." in str(settings):
        settings = json.loads(json.dumps(settings).replace("model.", ""))
    lists = {name: [*x] if isinstance(x, list) else x for name, x in settings.items()}
    inner = getattr(model, "model", model)
    peft_model(inner if bare else model, **lists).save_pretrained(tmp_path)
    changed_settings(tmp_path, **settings)  # as a person wrote them
    assert read_adapter(tmp_path, config)
    begin = "" if bare or inner is model else "model."
    tensors = tensors_of(tmp_path)
    held = [key for key in tensors if f"base_model.model.{begin}{inside}" in key]
    assert len(held) == 2
    rewritten(tmp_path, **dict.fromkeys(held))
    with pytest.raises(InputError, match=f"do not name the tensors: {begin}{inside}.* differs"):
        read_adapter(tmp_path, config)
    if outside is not None:
        more = {key.replace(f"{begin}{inside}", f"{begin}{outside}"): tensors[key] for key in held}
        rewritten(tmp_path, **more, **{key: tensors[key] for key in held})
        with pytest.raises(InputError, match=f"not name the tensors: {begin}{outside}.* differs"):
            read_adapter(tmp_path, config)


@pytest.mark.exhaustive
def test_an_adapter_of_a_class_outside_of_transformers_is_read(tmp_path, x64):
    model = write_indictrans(tmp_path / "base", shared=False, dtype=torch.float64)
    config, params = from_huggingface(tmp_path / "base")
    model = peft_model(model)
    adapter = saved(model, tmp_path / "adapter", config)
    compared_logits(lora.attach(params, adapter), model, config)
    write_adapter(tmp_path / "ours", adapter, config, family="IndicTrans")
    read = [tensors_of(tmp_path / name) for name in ("adapter", "ours")]
    assert all(np.array_equal(read[1][name], x) for name, x in read[0].items())


def test_an_adapter_of_the_base_class_has_its_shorter_names(tmp_path):
    model = foreign_model("bart")
    config, _ = from_huggingface(model)
    whole = saved(peft_model(model), tmp_path / "whole", config)
    bare = saved(peft_model(foreign_model("bart").model), tmp_path / "bare", config)
    assert flatten(whole).keys() == flatten(bare).keys()
    assert all(np.array_equal(flatten(whole)[name], x) for name, x in flatten(bare).items())


@pytest.mark.parametrize("preset", tiered(["shared_heads", "t5_v1_1"], ["shared_heads"]))
def test_torch_reference_has_the_same_layer(preset, tmp_path, x64):
    config = shallow_config(preset)
    params = random_params(config, dtype=np.float64)
    targets = (*EVERY, "output_projection") if preset == "t5_v1_1" else EVERY
    adapter = random_adapter(config, targets=targets, dtype=np.float64)
    name = "target_embedding" if "target_embedding" in params else "token_embedding"
    adapter |= {name: random_params(config, seed=5, dtype=np.float64)[name]}  # a whole parameter
    module = torch_reference.Transformer(config).double()
    module.load_state_dict(convert.to_torch(params, config), strict=True)
    write_adapter(tmp_path / "adapter", adapter, config)
    tensors = tensors_of(tmp_path / "adapter")
    attach_adapter(module, {name: torch.tensor(x) for name, x in tensors.items()}, scale=1.5)
    src, tgt = random_tokens(config, dtype=np.float64)
    weights = np.random.default_rng(3).normal(size=(*tgt.shape[:2], config.tgt_vocab_size))

    def ours(trained):
        logits = apply(merged(lora.attach(params, adapter), trained), config, src, tgt)
        return (logits * weights).sum(), logits

    start = jax.tree.map(jnp.asarray, trainable(lora.attach(params, adapter), ()))
    gradients, logits = jax.jit(jax.grad(ours, has_aux=True))(start)
    expected = module(torch.tensor(src), torch.tensor(tgt))
    (expected * torch.tensor(weights)).sum().backward()
    assert error(logits, expected) <= LOGITS
    leaves = {name: leaf for name, leaf in module.named_parameters() if leaf.requires_grad}
    assert len(leaves) == len(flatten(start))
    for name, leaf in flatten(gradients).items():
        theirs = name.replace("/layers_", ".layers.").replace("/embedding", ".weight")
        grad = leaves[theirs.replace("/", ".")].grad.numpy()
        grad = grad.T if "lora_" in name else grad
        assert np.abs(grad - leaf).max() <= bound("gradient", "float64") * np.abs(grad).max(), name


CONFIG = shallow_config("bart")
QUERY = "encoder/layers_0/self_attention/query"
NAME = "base_model.model.model.encoder.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    adapter = random_adapter(CONFIG, targets=("encoder/*/query",))
    write_adapter(tmp_path / "adapter", adapter, CONFIG, family="bart")
    return tmp_path / "adapter"


def changed_settings(folder, **changes):
    path = folder / peft_folder.SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


MERGE = "; LoRA is read, and what PEFT has merged into a model (merge_and_unload, not for prompts)"
UNSUPPORTED = {
    "use_dora": True,
    "bias": "all",
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"q_proj": 3},
    "init_lora_weights": "pissa",
    "peft_type": "PROMPT_TUNING",
    "lora_bias": True,
    "trainable_token_indices": [1],
    "layer_replication": [[0, 1]],
    "a setting of tomorrow": 3,
}


REFUSED = {
    f": {name}={value!r} is not supported{MERGE}": {name: value}
    for name, value in UNSUPPORTED.items()
}
REFUSED |= {
    ": r=0 must be a whole number, at least 1": {"r": 0},
    ": lora_alpha='16' must be a finite number": {"lora_alpha": "16"},
    ": lora_alpha=1e+308 must be a finite number": {"lora_alpha": 1e308},
    ": lora_alpha=1e-50 must be a finite number": {"lora_alpha": 1e-50},
    ": lora_alpha=0 must be a finite number": {"lora_alpha": 0},
    ": modules_to_save='lm_head' must be a list": {"modules_to_save": "lm_head"},
    ": target_modules=3 must be a text": {"target_modules": 3},
    " has a damaged regular expression": {"target_modules": "*"},
    ": use_rslora=1 must be True or False": {"use_rslora": 1},
}


@pytest.mark.parametrize(("fault", "setting"), REFUSED.items(), ids=str)
def test_a_setting_that_is_not_supported_or_damaged_is_named(folder, fault, setting):
    changed_settings(folder, **setting)
    with pytest.raises(InputError) as refused:
        read_adapter(folder, CONFIG)
    assert str(refused.value).startswith(f"{folder / peft_folder.SETTINGS}{fault}")
    assert "\n" not in str(refused.value)


def rewritten(folder, **changes):
    path, tensors = folder / peft_folder.WEIGHTS, tensors_of(folder) | changes
    weight_files.write(path, {n: x for n, x in tensors.items() if x is not None}, overwrite=True)


def test_an_adapter_of_another_base_is_refused_in_one_line(folder):
    wider = small_config("bart", d_model=45, num_encoder_layers=1)
    fewer = small_config("t5", num_encoder_layers=1)
    of_another = "use the adapter with the model that it was trained for"
    refusals = {
        wider: f"{folder}: the factors of model.encoder.layers.0.self_attn.q_proj are "
        "[(3, 42), (42, 3)], but r=3 needs [(3, 45), (45, 3)] here; "
        f"{of_another}",
        fewer: f"{folder}: has model.encoder.layers.0.self_attn.q_proj, which is no product or "
        f"parameter of this model; {of_another}{MERGE}",
    }
    for config, message in refusals.items():
        with pytest.raises(InputError) as refused:
            read_adapter(folder, config)
        assert str(refused.value) == message


def test_factors_that_are_absent_or_strange_are_named(folder):
    name = f"{NAME}.lora_A.weight"
    factor = tensors_of(folder)[name]
    changed_settings(folder, r=4)
    with pytest.raises(InputError, match=r"but r=4 needs"):
        read_adapter(folder, CONFIG)
    changed_settings(folder, r=3)
    faults = {
        r"q_proj are \[\(\), \(42, 3\)\]": {name: None},
        "q_proj.lora_A.weight must hold finite numbers": {name: np.full_like(factor, np.inf)},
        "q_proj.lora_A.weight must hold finite numbers.*": {name: factor.astype(np.int32)},
        r"lm_head.weight is \(3, 42\), not \(41, 42\)": {
            name: factor,
            "base_model.model.lm_head.weight": factor,
        },
        "has lm_head.lora_bias, which is no product or parameter": {
            "base_model.model.lm_head.weight": None,
            "base_model.model.lm_head.lora_bias": factor,
        },
        "has no factor of LoRA": dict.fromkeys((name, name.replace("_A", "_B")))
        | {"base_model.model.lm_head.lora_bias": None},
    }
    for message, changes in faults.items():
        rewritten(folder, **changes)
        with pytest.raises(InputError, match=message):
            read_adapter(folder, CONFIG)


def test_nothing_is_overwritten_and_missing_files_are_named(folder, tmp_path):
    adapter, deeper = read_adapter(folder, CONFIG), random_adapter(small_config("bart"))
    with pytest.raises(InputError, match="adapter: exists already"):
        write_adapter(folder, adapter, CONFIG)
    with pytest.raises(InputError, match=r"cross_attention/key/lora_a in the shapes"):
        write_adapter(tmp_path / "new", deeper, shallow_config("t5"), family="t5")
    bias = {"output_projection": {"bias": np.ones(CONFIG.tgt_vocab_size, np.float32)}}
    with pytest.raises(InputError, match="output_projection/bias has no name in layout 'bart'"):
        write_adapter(tmp_path / "new", adapter | bias, CONFIG, family="bart")
    leaves = flatten(random_adapter(CONFIG))
    leaves[f"{QUERY}/lora_scale"] = np.float32(2)[...]
    with pytest.raises(InputError, match=r"one rank and one alpha, not \[\(3, 4.5\), \(3, 6.0\)\]"):
        write_adapter(tmp_path / "new", nest(leaves), CONFIG, family="bart")
    wrong = {
        "q_proj.lora_A.weight must hold finite numbers": {"lora_a": np.full((42, 3), np.nan)},
        r"in the shapes \[\(42, 3\), None, \(\)\]": {"lora_b": None},
        r"in the shapes \[\(42, 3\), \(4, 42\), \(\)\]": {"lora_b": np.ones((4, 42))},
        "lora_alpha=inf must be a finite number": {"lora_scale": np.float32(np.inf)[...]},
        "lora_alpha=0 must be a finite number": {"lora_scale": np.float32(0)[...]},
        "lora_alpha=nan must be a finite number": {"lora_scale": np.float32(np.nan)[...]},
    }
    for message, changes in wrong.items():
        leaves = flatten(adapter) | {f"{QUERY}/{name}": leaf for name, leaf in changes.items()}
        leaves = nest({path: leaf for path, leaf in leaves.items() if leaf is not None})
        with pytest.raises(InputError, match=message):
            write_adapter(tmp_path / "new", leaves, CONFIG, family="bart")
    assert not (tmp_path / "new").exists()
    for name in (peft_folder.WEIGHTS, peft_folder.SETTINGS):
        (folder / name).unlink()
        with pytest.raises(InputError, match=name):
            read_adapter(folder, CONFIG)


def test_files_of_other_versions_and_methods_of_peft_are_read(folder, tmp_path):
    adapter = flatten(read_adapter(folder, CONFIG))
    changed_settings(folder, init_lora_weights="eva", eva_config={"rho": 2.0, "tau": 0.99})
    tensors = {name: torch.tensor(x) for name, x in tensors_of(folder).items()}
    (folder / peft_folder.WEIGHTS).unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    again = flatten(read_adapter(folder, CONFIG))
    assert all(np.array_equal(again[path], leaf) for path, leaf in adapter.items())


def test_a_whole_module_under_the_name_of_its_wrapper_is_read(folder):
    table = np.ones((CONFIG.tgt_vocab_size, CONFIG.d_model), np.float32)
    for end in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        rewritten(folder, **{f"base_model.model.{end}.modules_to_save.weight": table})
    changed_settings(folder, modules_to_save=["embed_tokens", "lm_head"])
    leaves = flatten(read_adapter(folder, CONFIG))
    assert np.array_equal(leaves["token_embedding/embedding"], table)


def test_a_folder_of_several_adapters_names_them(folder, tmp_path):
    for name in ("law", "medicine"):
        shutil.copytree(folder, tmp_path / "all" / name)
    with pytest.raises(InputError) as refused:
        read_adapter(tmp_path / "all", CONFIG)
    several = f"{tmp_path / 'all'}: has several adapters; name one in it: law, medicine"
    assert str(refused.value) == several
