"""Settings: what changes the maths is honoured, or refused by name in one line."""

import dataclasses
import shutil

import pytest
import torch
import yaml

from jax_transformer import convert, porting
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers import TRAINERS, read_trainer
from tests.porting.trainers.programs import (
    PROGRAMS,
    AnnotatedTransformer,
    Fairseq,
    JoeyNMT,
    OpenNMT,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What each program's checkpoint holds."""
    paths = {name: build().save(tmp_path_factory.mktemp(name)) for name, build in PROGRAMS.items()}
    return {name: read_trainer(path)[1] for name, path in paths.items()}


def config_of(trainer, model, **changed):
    """Return the config of a model with other settings; None takes a setting away."""
    values = dict(model.settings.values) | changed
    values = {name: value for name, value in values.items() if value is not None}
    settings = dataclasses.replace(model.settings, values=values)
    return TRAINERS[trainer].config(model._replace(settings=settings))


# Refused where they are on, whatever they are set to.
OFF = {
    "fairseq": (
        "adaptive_input adaptive_softmax_cutoff base_layers char_inputs cross_self_attention "
        "encoder_layerdrop decoder_layerdrop encoder_layers_to_keep decoder_layers_to_keep "
        "encoder_xformers_att_config decoder_xformers_att_config merge_src_tgt_embed "
        "no_cross_attention no_decoder_final_norm quant_noise_pq quant_noise_scalar scale_attn "
        "scale_fc scale_heads scale_resids tie_adaptive_proj tie_adaptive_weights"
    ),
    "opennmt_py": (
        "copy_attn lora_embedding lora_layers quant_layers max_relative_positions n_src_feats "
        "relative_positions_buckets num_experts num_kv parallel_residual shared_layer_norm "
        "sliding_window"
    ),
}
REFUSED = [
    *((trainer, {name: True}, name) for trainer, names in OFF.items() for name in names.split()),
    ("fairseq", {"adaptive_softmax_cutoff": "100,200"}, "adaptive_softmax_cutoff='100,200'"),
    ("fairseq", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
    ("fairseq", {"activation_fn": "tanh"}, "activation_fn='tanh'"),
    ("fairseq", {"activation_fn": "relu_squared"}, "activation_fn='relu_squared'"),
    ("fairseq", {"decoder_embed_dim": 40}, "decoder_embed_dim=40.*encoder_embed_dim=20"),
    ("fairseq", {"decoder_output_dim": 40}, "decoder_output_dim=40.*encoder_embed_dim=20"),
    ("fairseq", {"decoder_input_dim": 40}, "decoder_input_dim=40"),
    ("fairseq", {"decoder_ffn_embed_dim": 40}, "decoder_ffn_embed_dim=40"),
    ("fairseq", {"decoder_attention_heads": 2}, "decoder_attention_heads=2"),
    ("fairseq", {"decoder_normalize_before": True}, "decoder_normalize_before=True"),
    ("fairseq", {"encoder_learned_pos": True}, "decoder_learned_pos=False"),
    ("fairseq", {"encoder_normalize_before": "yes"}, "must be true or false"),
    (
        "fairseq",
        {"encoder_learned_pos": True, "decoder_learned_pos": True, "max_target_positions": 9},
        "max_target_positions=9 .*max_source_positions=23",
    ),
    ("joeynmt", {"encoder.type": "recurrent"}, "encoder.type='recurrent'"),
    ("joeynmt", {"encoder.type": None}, "encoder.type='recurrent'"),
    ("joeynmt", {"encoder.alpha": 2.0}, "encoder.alpha=2.0"),
    ("joeynmt", {"decoder.alpha": 0.5}, "decoder.alpha=0.5"),
    ("joeynmt", {"encoder.activation": "tanh"}, "encoder.activation='tanh'"),
    ("joeynmt", {"decoder.activation": "gelu"}, "decoder.activation='gelu'"),
    ("joeynmt", {"decoder.layer_norm": "post"}, "decoder.layer_norm='post'"),
    ("joeynmt", {"encoder.layer_norm": None}, "model.encoder.layer_norm is absent"),
    ("joeynmt", {"decoder.embeddings.scale": True}, "decoder.embeddings.scale=True"),
    ("joeynmt", {"decoder.num_heads": None}, "decoder.num_heads=8"),
    ("joeynmt", {"decoder.ff_size": 5}, "decoder.ff_size=5"),
    ("joeynmt", {"decoder.hidden_size": 5}, "decoder.hidden_size=5"),
    ("opennmt_py", {"lora_layers": ["linear_values"]}, "lora_layers"),
    ("opennmt_py", {"max_relative_positions": -1}, "max_relative_positions=-1"),
    ("opennmt_py", {"self_attn_type": "average"}, "self_attn_type='average'"),
    ("opennmt_py", {"generator_function": "sparsemax"}, "generator_function='sparsemax'"),
    ("opennmt_py", {"model_task": "lm"}, "model_task='lm'"),
    ("opennmt_py", {"model_type": "audio"}, "model_type='audio'"),
    ("opennmt_py", {"encoder_type": "rnn"}, "encoder_type='rnn'"),
    ("opennmt_py", {"decoder_type": "rnn"}, "decoder_type='rnn'"),
    ("opennmt_py", {"position_encoding": False}, "position_encoding=False"),
    ("opennmt_py", {"layer_norm": "group"}, "layer_norm='group'"),
    ("opennmt_py", {"pos_ffn_activation_fn": "mish"}, "pos_ffn_activation_fn='mish'"),
    ("opennmt_py", {"position_encoding_type": "Rope"}, "position_encoding_type='Rope'"),
    ("opennmt_py", {"dec_hid_size": 40}, "dec_hid_size=40"),
    ("opennmt_py", {"heads": None}, "has no setting 'heads'"),
    ("opennmt_py", {"heads": "4"}, "num_heads='4' must be a whole number"),
    ("opennmt_py", {"dropout": torch.ones(3)}, "dropout is a Tensor, no plain value"),
    ("opennmt_py", {"decoder_start_token": "<2de>"}, "no token '<2de>'"),
]


@pytest.mark.parametrize(
    ("trainer", "changed", "message"), REFUSED, ids=[f"{r[0]} {r[2]}" for r in REFUSED]
)
def test_what_no_config_expresses_is_refused_by_name(models, trainer, changed, message):
    with pytest.raises(InputError, match=message) as refused:
        config_of(trainer, models[trainer], **changed)
    assert "\n" not in str(refused.value)


BOTH_GELU = {f"{stack}.activation": "gelu" for stack in STACKS}
NO_LAYER_NORM = dict.fromkeys([f"{stack}.layer_norm" for stack in STACKS])


@pytest.mark.parametrize(
    ("trainer", "changed", "fields"),
    [
        ("fairseq", {"activation_fn": "gelu"}, {"activation": "gelu"}),
        ("fairseq", {"activation_fn": "gelu_fast"}, {"activation": "gelu_tanh"}),
        ("fairseq", {"relu_dropout": 0.3}, {"activation_dropout": 0.3}),
        ("fairseq", {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "dropout": 0.2}),
        ("fairseq", {"max_source_positions": 50}, {"max_length": 50, "position_offset": 2}),
        # What an older checkpoint lacks has the encoder's value, or that of the architecture.
        ("fairseq", {"decoder_embed_dim": None}, {"d_model": 20}),
        ("fairseq", {"encoder_embed_dim": None, "decoder_embed_dim": None}, {"d_model": 512}),
        ("fairseq", {"adaptive_softmax_cutoff": "", "encoder_layerdrop": 0}, {"d_model": 20}),
        ("fairseq", {}, {"pad_id": 1, "bos_id": 2, "eos_id": 2, "norm_epsilon": 1e-5}),
        ("joeynmt", BOTH_GELU, {"activation": "gelu"}),
        ("joeynmt", {"encoder.freeze": True}, {"norm_epsilon": 1e-6, "pad_id": 1, "eos_id": 3}),
        ("joeynmt", {"special_symbols.bos_id": 0}, {"bos_id": 0}),
        # Before version 2.1 there was no such setting, and norms came first.
        ("joeynmt", NO_LAYER_NORM, {"norm_placement": "pre", "final_norm": True}),
        ("opennmt_py", {"norm_eps": 1e-5}, {"norm_epsilon": 1e-5}),
        ("opennmt_py", {}, {"dropout": 0.2, "attention_dropout": 0.1, "norm_epsilon": 1e-6}),
        ("opennmt_py", {"attention_dropout": None}, {"attention_dropout": None}),
        ("opennmt_py", {"decoder_start_token": "</s>"}, {"bos_id": 3, "eos_id": 3, "pad_id": 1}),
        (
            "annotated_transformer",
            {"num_heads": 5},
            {"num_heads": 5, "d_ff": 28, "num_encoder_layers": 1, "num_decoder_layers": 2},
        ),
    ],
)
def test_settings_are_honoured(models, trainer, changed, fields):
    config = config_of(trainer, models[trainer], **changed).to_dict()
    assert {name: config[name] for name in fields} == fields


def test_nested_settings_of_fairseq_count(models, tmp_path):
    module = Fairseq()
    path = module.save(tmp_path)
    checkpoint = torch.load(path, weights_only=False)
    flat = vars(checkpoint["cfg"]["model"])
    nested = {"dropout": 0.2, "quant_noise": {"pq": 0.1}}
    for stack in ("encoder", "decoder"):
        names = [name for name in flat if name.startswith(f"{stack}_")]
        nested[stack] = {name.removeprefix(f"{stack}_"): flat[name] for name in names}
    checkpoint["cfg"]["model"] = nested
    torch.save(checkpoint, path)
    with pytest.raises(InputError, match=r"quant_noise_pq=0\.1"):
        porting.from_trainer(path)
    nested["quant_noise"]["pq"] = 0
    torch.save(checkpoint, path)
    assert TRAINERS["fairseq"].config(read_trainer(path)[1]) == config_of(
        "fairseq", models["fairseq"], max_source_positions=1024
    )


def test_a_setting_that_contradicts_the_tensors_is_a_fault(tmp_path):
    path = OpenNMT().save(tmp_path, enc_layers=3)
    with pytest.raises(convert.ConversionError, match=r"missing +encoder.transformer.{1..2}"):
        porting.from_trainer(path)


def test_decoders_of_older_fairseq_without_a_final_norm_are_refused(tmp_path):
    module = Fairseq(encoder_normalize_before=True, decoder_normalize_before=True)
    module.decoder.version.fill_(2)
    with pytest.raises(convert.ConversionError, match=r"decoder\.version.*is 2 at .0., computed 3"):
        porting.from_trainer(module.save(tmp_path))


def test_heads_are_asked_for_only_where_they_are_not_recorded(tmp_path):
    path = AnnotatedTransformer().save(tmp_path)
    with pytest.raises(InputError, match="num_heads=8 must divide d_model=20"):
        porting.from_trainer(path)
    assert porting.from_trainer(path, num_heads=4)[0].num_heads == 4
    path = OpenNMT().save(tmp_path)
    with pytest.raises(InputError, match="num_heads=4: opennmt_py records the number"):
        porting.from_trainer(path, num_heads=4)


def test_special_ids_of_joeynmt_come_from_its_settings(tmp_path):
    path = JoeyNMT().save(tmp_path)
    whole = yaml.safe_load((tmp_path / "config.yaml").read_text())
    whole["data"]["special_symbols"] = {"bos_id": 3, "eos_id": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole))
    config = TRAINERS["joeynmt"].config(read_trainer(path)[1])
    assert (config.pad_id, config.bos_id, config.eos_id) == (1, 3, 2)
    for unk_id in (999, "x"):
        whole["data"]["special_symbols"] = {"unk_id": unk_id}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole))
        with pytest.raises(InputError, match=f"unk_id={unk_id!r} is no id of the source vocab"):
            porting.from_trainer(path)


def test_a_checkpoint_of_another_program_is_named(tmp_path):
    path = JoeyNMT().save(tmp_path)
    with pytest.raises(InputError, match="is no checkpoint of fairseq; this library knows annot"):
        porting.from_trainer(path, "fairseq")
    with pytest.raises(InputError, match="trainer='marian' is unknown; choose one of annotated"):
        porting.from_trainer(path, "marian")
    torch.save({"weight": torch.ones(3)}, path)
    with pytest.raises(InputError, match="is no checkpoint of any of them"):
        porting.from_trainer(path)
    shutil.rmtree(tmp_path)
    with pytest.raises(InputError, match=r"best\.ckpt cannot be read"):
        porting.from_trainer(path)
