"""Models exported as StableHLO: the same ids, text without this library, and what is refused."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jax_transformer import (
    GenerationConfig,
    InputError,
    TransformerConfig,
    Translator,
    apply,
    decode_step,
    encode,
    generate,
    init_cache,
    select_hypotheses,
)
from jax_transformer.commands.main import command_call
from jax_transformer.export import programs
from jax_transformer.export.stablehlo_folder import export_stablehlo
from jax_transformer.model.masks import source_mask
from jax_transformer.translation.model_folder import save
from tests.export.models import BLOCKS, OTHER_FUNCTION, refusal, with_preset
from tests.export.readme import run_readme
from tests.models import unchecked
from tests.parity.ladder import ROUNDED, check_errors, error, moved, widen
from tests.tiers import DISTINCT_PRESETS, tiered, tiered_rows

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
LINES = ["abc cab", "", "bead", "xyz uvw dab fed", "a </s> b", " "]
REFUSED = {"torch_nn": "token_embeddings='none'", "whisper": "source_features=80"}
PRESETS = sorted({*TransformerConfig.presets(), *BLOCKS} - REFUSED.keys())
SOUND = {"encoder_max_length": 6}
DISTINCT = [preset for preset in DISTINCT_PRESETS if preset not in REFUSED]
FEW = ("shared_heads", "bart", "umt5")  # no two have the same positions, or the same decoder
RULES = {
    "banned_sequences": ((5, 6),),
    "begin_suppressed_tokens": (8,),
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 3,
    "forced_first_token": 7,
    "forced_last_token": 2,
    "length_normalization": "power",
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 2,
    "num_hypotheses": 2,
    "renormalize": True,
    "repetition_penalty": 1.3,
}
SHOW_STEPS = """
src, tgt = np.array([[5, 6, 2], [7, 2, 0]], np.int32), np.arange(1, 13, dtype=np.int32)
print(json.dumps(likeliest(Path(sys.argv[1]), src, tgt.reshape(2, 6)).tolist()))
"""


@pytest.fixture(autouse=True)
def as_users_call_it():
    with unchecked():  # the types of the code name lengths `int`, which a symbolic one is not
        yield


def exported(model, **searches):
    """Return a model's programs as read back from bytes, and its parameters as they take them."""
    made = programs.export_programs(
        model.params,
        model.config,
        {name: GenerationConfig(9, **options) for name, options in searches.items()},
    )
    for program in made.values():
        assert program.platforms == ("cpu", "cuda", "tpu")
    called = {name: jax.export.deserialize(p.serialize()).call for name, p in made.items()}
    return called, programs.named(model.params)


def sources(config, batch, length):
    if config.source_features is not None:
        shape = batch, 2 * config.encoder_max_length, config.source_features
        return np.random.default_rng(batch).normal(size=shape).astype(np.float32)
    src = np.random.default_rng(batch).integers(4, config.src_vocab_size, (batch, length))
    src[1:, 1 + length // 2 :] = config.pad_id
    return src.astype(np.int32)


@pytest.mark.exhaustive
def test_the_command_and_text_without_this_library(base, tmp_path, capsys):
    save(tmp_path / "model", base)
    command = [str(tmp_path / "model"), str(tmp_path / "out"), "--to", "stablehlo"]
    command_call("export", *command)()
    line = "16 of 16 random sources have the same translation, id for id"
    assert f"out written: greedy: {line}; beam: {line}\n" in capsys.readouterr().out
    translator = Translator(base)
    greedy = [result.text for result in translator(LINES, beam_size=1)]
    *found, steps = run_readme(tmp_path / "out", LINES, "greedy", added=SHOW_STEPS)
    assert found == greedy
    tgt = np.arange(1, 13).reshape(2, 6)
    logits = apply(base.params, base.config, np.array([[5, 6, 2], [7, 2, 0]]), tgt)
    assert json.loads(steps) == logits.argmax(-1).tolist()
    with pytest.raises(InputError, match="out: exists already; name another output"):
        command_call("export", *command)()


@pytest.mark.exhaustive
def test_text_of_the_search_with_beams_and_python_of_the_page(base, tmp_path, monkeypatch):
    export_stablehlo(base, tmp_path / "programs", beam_size=3)
    expected = [result.text for result in Translator(base)(LINES, beam_size=3)]
    assert run_readme(tmp_path / "programs", LINES, "beam") == expected
    section = PAGE.read_text("utf-8").split("## Out to StableHLO")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"jax": jax, "np": np, "safetensors": safetensors}
    exec(snippet, names)  # the page's own
    found = generate(base.params, base.config, names["src"], max_new_tokens=20)
    assert np.array_equal(names["tokens"], found.tokens)


@pytest.mark.parametrize("preset", tiered(PRESETS, [], (*FEW, "windows", "merged", "ssru")))
def test_every_model_that_writes_text_is_exported_and_proven(base, tmp_path, preset):
    line = export_stablehlo(with_preset(base, preset), tmp_path / "out", beam_size=3)
    assert line.count("16 of 16") == 2


@pytest.mark.parametrize(
    ("preset", "options"),
    tiered_rows(
        [("vaswani2017", RULES), *((preset, {}) for preset in (*DISTINCT, "whisper"))],
        is_quick=lambda *_: False,
        is_exhaustive=lambda preset, options: options or preset in (*FEW, "whisper"),
    ),
)
def test_a_search_of_any_size_takes_prefixes_and_limits(base, preset, options):
    model = with_preset(base, preset, **(SOUND if preset == "whisper" else {}))
    config = model.config
    run, params = exported(model, beam={"beam_size": 3, "length_penalty": 0.6, **options})
    for batch, source, target in ((3, 5, 9), (2, 11, 4)):
        src = sources(config, batch, source)
        prefix = np.full((batch, target), config.pad_id, np.int32)
        prefix[0, :2] = 5, 4
        limits = np.arange(target, target - batch, -1, np.int32)
        found = run["beam"](params, src, prefix, limits)
        # A prefix has columns of its own in `generate`, whose limits do not count it.
        start = {"prefix": prefix[:, :2], "length_limits": limits - 2 * (np.arange(batch) == 0)}
        options = {"beam_size": 3, "length_penalty": 0.6, **options}
        expected = generate(model.params, config, src, max_new_tokens=target, **start, **options)
        assert np.array_equal(found[0], expected.tokens[:, :, :target])
        assert np.all(np.asarray(expected.tokens[:, :, target:]) == config.pad_id)
        assert np.array_equal(found[2], expected.lengths)
        assert error(found[1], expected.scores) <= ROUNDED


@pytest.mark.parametrize("preset", tiered([*DISTINCT, "whisper"], [], (*FEW[1:], "whisper")))
def test_steps_of_any_size_go_on_from_other_hypotheses(base, preset):
    model = with_preset(base, preset, **(SOUND if preset == "whisper" else {}))
    run, params = exported(model)
    with jax.enable_x64(True):
        wide = model._replace(params=widen(model.params))
        run_wide, params_wide = exported(wide)
    for count in (1, 3):
        ours = functools.partial(library_steps, config=model.config, count=count)
        theirs = functools.partial(program_steps, config=model.config, count=count)
        found = ours(model.params), theirs(run, params)
        with jax.enable_x64(True):
            exact = ours(wide.params), theirs(run_wide, params_wide)
            near = [ours(numbers) for numbers in moved(wide.params)]
        check_errors(f"{preset} x {count}", found, exact, near, kind="logits")


LENGTH, PARENTS = 6, np.array([[1, 1, 0], [0, 2, 2]], np.int32)


def drawn_tokens(count):
    for step in range(4):
        yield np.random.default_rng(step).integers(4, 30, (2, count)).astype(np.int32)


def library_steps(params, config, count):
    """Return the logits of four steps of this library."""
    src = sources(config, 2, LENGTH)
    mask = source_mask(src, config)
    memory = encode(params, config, src)
    cache = init_cache(params, config, memory, LENGTH, mask, beam_size=count)
    steps = []
    for tokens in drawn_tokens(count):
        logits, cache = decode_step(params, config, cache, tokens)
        cache = select_hypotheses(cache, PARENTS) if count == 3 else cache
        steps.append(logits)
    return np.stack(steps)


def program_steps(run, params, config, count):
    """Return the logits of the same steps of the exported programs."""
    src = sources(config, 2, LENGTH)
    memory = run["encode"](params, src)
    cache = run["init_cache"](params, src, memory, np.full((2, count, LENGTH), -1, np.int32))
    steps = []
    for tokens in drawn_tokens(count):
        logits, cache = run["decode_step"](params, cache, tokens)
        if count == 3:
            rows = np.take_along_axis(np.asarray(cache["ancestors"]), PARENTS[..., None], 1)
            cache |= {"ancestors": rows}
        steps.append(logits)
    return np.stack(steps)


@pytest.mark.parametrize("preset", tiered(["vaswani2017", "modern"], ["vaswani2017"]))
def test_a_length_that_has_no_position_is_refused(base, preset):
    """Beyond a table of positions, or beyond the angles of rotary ones."""
    model = with_preset(base, preset, num_encoder_layers=1, num_decoder_layers=1)
    run, params = exported(model)
    longest = model.config.max_length
    assert np.isfinite(run["encode"](params, sources(model.config, 2, longest))).all()
    with pytest.raises(ValueError, match="Error refining shapes"):
        run["encode"](params, sources(model.config, 2, longest + 1))


@pytest.mark.parametrize("preset", REFUSED)
def test_a_model_that_writes_no_text_is_refused_by_name(base, tmp_path, preset):
    found = refusal(export_stablehlo, with_preset(base, preset), tmp_path)
    assert found.startswith(REFUSED[preset])


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ["encode", "decode_step", "beam"])
def test_another_function_is_not_written(base, tmp_path, monkeypatch, program):
    name = {"beam": "_search"}.get(program, f"_{program}")
    function = getattr(programs, name)
    place = {"encode": 2, "decode_step": 3, "beam": 3}[program]  # of the parameters

    def of_another_model(*given):
        params = jax.tree.map(lambda leaf: leaf[::-1], given[place])
        return function(*given[:place], params, *given[place + 1 :])

    monkeypatch.setattr(programs, name, of_another_model)
    assert OTHER_FUNCTION.search(refusal(export_stablehlo, base, tmp_path))


@pytest.mark.exhaustive
def test_half_precision_stays_and_runs_without_this_library(base, tmp_path):
    half = base._replace(params=jax.tree.map(lambda leaf: leaf.astype("bfloat16"), base.params))
    assert " of 16 random sources" in export_stablehlo(half, tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {jnp.dtype("bfloat16")}
    expected = [result.text for result in Translator(half)(LINES, beam_size=1)]
    assert run_readme(tmp_path / "out", LINES, "greedy") == expected


def test_options_are_refused_before_any_work(base, tmp_path):
    save(tmp_path / "model", base)
    out = [str(tmp_path / "model"), str(tmp_path / "out")]
    for flags, message in (
        (["--to", "stablehlo", "--beam", "0"], "beam_size"),
        (["--to", "stablehlo", "--beam", "29"], "beam_size=29 needs a vocabulary of 58"),
        (["--to", "stablehlo", "--quantization", "int8"], "--quantization int8 is for --to"),
        (["--to", "onnx", "--quantization", "int8"], "--quantization int8 is for --to"),
        (["--to", "torch", "--quantization", "int8"], "--quantization int8 is for --to"),
        (["--to", "ctranslate2", "--beam", "3"], "--beam 3 is for --to stablehlo"),
    ):
        with pytest.raises(InputError, match=message):
            command_call("export", *out, *flags)()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
