"""Models of the training programs themselves beside this library, for those that are installed.

    python -m benchmarks.trainers

Each program builds models of several settings, their tensors get random numbers, the program's own
code saves a checkpoint, and `porting.from_trainer` reads it. Printed are the largest errors of the
layers' outputs and of the logits, max|a - b| / max(1, max|b|), on padded sources and targets. A
program that is not installed is named; each needs its own versions of libraries, so there is one
environment for each. The Annotated Transformer is no package: its file
the_annotated_transformer.py must be on the path.
"""

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import tyro
from torch import nn

from jax_transformer import convert, porting
from jax_transformer.convert.table import flatten
from jax_transformer.model.transformer import Transformer
from jax_transformer.storage.weights.arrays import as_numpy

BATCH, SOURCE_LENGTH, TARGET_LENGTH = 3, 13, 11
WIDTH, HEADS, INNER, LAYERS = 24, 4, 40, (2, 3)
WORDS = [f"w{index}" for index in range(36)]
LINE = "w3 w20 unknown-word w1 </s>x <unk> w35"
BOUND = 1e-5

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """A model of a program.

    Attributes:
        name: Its settings in words.
        module: The program's module; its tensors are random.
        path: The checkpoint that the program's code wrote.
        run: Returns its logits [B, T, V], up to a constant for each row where it returns
            log-probabilities, for ids [B, S] and [B, T].
        stacks: The modules of the encoder's layers and of the decoder's.
        encode: Returns the program's ids of a source and of a target; None without a vocabulary.
        time_first: Whether the outputs of its layers are [T, B, D].
    """

    name: str
    module: nn.Module
    path: Path
    run: Run
    stacks: tuple[nn.ModuleList, nn.ModuleList]
    encode: Callable[[str], tuple[list[int], list[int]]] | None = None
    time_first: bool = False


def main() -> None:
    """Print a row for each model of each program that is installed."""
    logging.disable(logging.WARNING)  # fairseq switches every library's messages on
    programs = {
        "annotated_transformer": ("the_annotated_transformer", annotated_transformer),
        "fairseq": ("fairseq", fairseq),
        "joeynmt": ("joeynmt", joeynmt),
        "opennmt_py": ("onmt", opennmt_py),
    }
    for name, (package, cases) in programs.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed here")
            continue
        print(f"{name}: {_versions(package)}")
        for dtype in ("float32", "float64"):
            jax.config.update("jax_enable_x64", dtype == "float64")
            with tempfile.TemporaryDirectory() as folder:
                for case in cases(Path(folder), getattr(torch, dtype)):
                    layers, logits = errors(name, case)
                    check_rest(name, case)
                    print(f"  {dtype}  {case.name:<58} layers {layers:.1e}  logits {logits:.1e}")
                    if not max(layers, logits) <= BOUND:
                        raise SystemExit(f"{case.name}: the bound is {BOUND:.0e}")


def errors(trainer: str, case: Case) -> tuple[float, float]:
    """Return the largest error of a layer's output and that of the logits."""
    config, params, _ = porting.from_trainer(case.path, trainer, **_unrecorded(trainer))
    src, tgt = tokens(config)
    outputs: dict[str, np.ndarray] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden = hidden.transpose(0, 1) if case.time_first else hidden
            outputs.setdefault(name, hidden.detach().numpy())

        return hook

    for stack, layers in zip(("encoder", "decoder"), case.stacks, strict=True):
        for index, layer in enumerate(layers):
            layer.register_forward_hook(keep(f"{stack}/layers_{index}"))
    with torch.no_grad():
        theirs = case.run(torch.from_numpy(src).long(), torch.from_numpy(tgt).long()).numpy()
    model = Transformer(config)
    with jax.default_matmul_precision("highest"):
        ours, state = jax.jit(
            lambda params: model.apply(
                {"params": params},
                src,
                tgt,
                capture_intermediates=True,
                mutable="intermediates",
            )
        )(params)
    own = flatten(state["intermediates"])
    src_real, tgt_real = src != config.pad_id, tgt != config.pad_id
    of_layers = [
        _error(own[f"{name}/__call__"][0], hidden, src_real if "encoder" in name else tgt_real)
        for name, hidden in outputs.items()
    ]
    assert len(of_layers) == sum(LAYERS)
    if trainer == "annotated_transformer":  # its generator returns log-probabilities
        ours = jax.nn.log_softmax(ours)
    return max(of_layers), _error(ours, theirs, tgt_real)


def check_rest(trainer: str, case: Case) -> None:
    """Compare the names and bits that go home, and the ids of known and unknown words."""
    config, params, tokenizer = porting.from_trainer(case.path, trainer, **_unrecorded(trainer))
    home = convert.to_torch(params, config, porting.get_layout(trainer))
    if home.keys() != case.module.state_dict().keys():
        raise SystemExit(
            f"{case.name}: names differ: {home.keys() ^ case.module.state_dict().keys()}"
        )
    for name, parameter in case.module.named_parameters():
        if not torch.equal(home[name], parameter):
            raise SystemExit(f"{case.name}: {name} did not come home")
    if case.encode is None:
        assert tokenizer is None
        return
    ours = tokenizer.encode_source([LINE])[0], tokenizer.encode_target([LINE])[0]
    if ours != case.encode(LINE):
        raise SystemExit(f"{case.name}: ids {ours} differ from {case.encode(LINE)}")


def tokens(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids [B, S] and [B, T] with padding at the end, none of it in the first row."""
    random = np.random.default_rng(1)
    sides = []
    for length, size in (
        (SOURCE_LENGTH, config.src_vocab_size),
        (TARGET_LENGTH, config.tgt_vocab_size),
    ):
        ids = random.integers(4, size, (BATCH, length)).astype(np.int32)
        for row in range(1, BATCH):
            ids[row, length - 2 * row :] = config.pad_id
        sides.append(ids)
    sides[1][:, 0] = config.bos_id
    return sides[0], sides[1]


def randomized(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the module for evaluation, with random numbers in every parameter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                scales = "norm" in name and name.endswith(("weight", "a_2"))
                parameter.normal_(1.0 if scales else 0.0, 0.3)
    return module.to(dtype).eval()


def annotated_transformer(folder: Path, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a model of the notebook's `make_model`."""
    import the_annotated_transformer as program

    encoder_layers, decoder_layers = LAYERS
    module = program.make_model(40, 37, decoder_layers, WIDTH, INNER, HEADS)
    del module.encoder.layers[encoder_layers:]
    randomized(module, dtype)
    path = folder / "multi30k_model_final.pt"
    torch.save(module.state_dict(), path)

    def run(src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        src_mask, tgt_mask = (src != 2)[:, None], program.Batch.make_std_mask(tgt, 2)
        return module.generator(module(src, tgt, src_mask, tgt_mask))

    stacks = module.encoder.layers, module.decoder.layers
    yield Case("pre-norm, relu", module, path, run, stacks)


def fairseq(folder: Path, dtype: torch.dtype) -> Iterator[Case]:
    """Yield models of fairseq's `transformer`, saved by its Trainer."""
    from fairseq import options, tasks
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    words = Dictionary()
    for count, word in enumerate(WORDS):
        words.add_symbol(word, n=100 - count)
    words.finalize()
    sizes = {"embed-dim": WIDTH, "ffn-embed-dim": INNER, "attention-heads": HEADS}
    common = [f"--{s}-{name}={n}" for s in ("encoder", "decoder") for name, n in sizes.items()]
    common += [f"--{s}-layers={n}" for s, n in zip(("encoder", "decoder"), LAYERS, strict=True)]
    pre = ["--encoder-normalize-before", "--decoder-normalize-before"]
    learned = ["--encoder-learned-pos", "--decoder-learned-pos"]
    models = {
        "post-norm, relu": [],
        "pre-norm, gelu, tied output": [
            *pre,
            "--activation-fn=gelu",
            "--share-decoder-input-output-embed",
        ],
        "learned positions, normed embeddings, all tied, unscaled": [
            *learned,
            "--layernorm-embedding",
            "--share-all-embeddings",
            "--no-scale-embedding",
        ],
        "no positions, gelu_accurate": [
            "--no-token-positional-embeddings",
            "--activation-fn=gelu_accurate",
        ],
    }
    for index, (name, given) in enumerate(models.items()):
        own = folder / str(index)
        own.mkdir()
        words.save(str(own / "dict.de.txt"))
        words.save(str(own / "dict.en.txt"))
        arguments = [str(own), "--arch=transformer", "--task=translation", "-s=de", "-t=en"]
        arguments += ["--optimizer=adam", "--lr=0.1", "--max-tokens=99", "--cpu", *common, *given]
        parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
        settings = convert_namespace_to_omegaconf(parsed)
        task = tasks.setup_task(settings.task)
        module = randomized(task.build_model(settings.model), dtype)
        trainer = Trainer(settings, task, module, task.build_criterion(settings.criterion))
        trainer.consolidate_optimizer()
        path = own / "checkpoint_best.pt"
        trainer.save_checkpoint(str(path), {"epoch": 1, "val_loss": 3.0})
        module = module.to(dtype).eval()

        def run(src: torch.Tensor, tgt: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            lengths = (src != 1).sum(1)
            module(src, lengths, tgt)  # for its layers' outputs; its own batches pad on the left:
            shifts = zip(src, src.shape[1] - lengths, strict=True)
            left = torch.stack([row.roll(int(shift)) for row, shift in shifts])
            return module(left, lengths, tgt)[0]

        def encode(line: str) -> tuple[list[int], list[int]]:
            ids = words.encode_line(line, add_if_not_exist=False).tolist()
            return ids, ids

        stacks = module.encoder.layers, module.decoder.layers
        yield Case(name, module, path, run, stacks, encode, time_first=True)


def joeynmt(folder: Path, dtype: torch.dtype) -> Iterator[Case]:
    """Yield models of JoeyNMT's `build_model`, saved with the keys of its `_save_checkpoint`."""
    import yaml
    from joeynmt.config import _check_special_symbols
    from joeynmt.model import build_model
    from joeynmt.tokenizers import build_tokenizer
    from joeynmt.vocabulary import Vocabulary

    symbols = SimpleNamespace(**_check_special_symbols({}))
    models = {
        "pre-norm, relu": ({"layer_norm": "pre"}, False, {}),
        "post-norm, gelu, tied output": (
            {"layer_norm": "post", "activation": "gelu"},
            False,
            {"tied_softmax": True},
        ),
        "pre-norm, swish, all tied, scaled": (
            {"layer_norm": "pre", "activation": "swish"},
            True,
            {"tied_softmax": True, "tied_embeddings": True},
        ),
    }
    for index, (name, (given, scale, tied)) in enumerate(models.items()):
        own = folder / str(index)
        own.mkdir()
        stack = {"type": "transformer", "num_heads": HEADS, "hidden_size": WIDTH, "ff_size": INNER}
        stack |= {"dropout": 0.1, "embeddings": {"embedding_dim": WIDTH, "scale": scale}, **given}
        settings = {"encoder": {**stack, "num_layers": LAYERS[0]}, **tied}
        settings["decoder"] = {**stack, "num_layers": LAYERS[1]}
        text = {"level": "word"}
        data = {"src": {"lang": "de", **text}, "trg": {"lang": "en", **text}}
        whole = {"name": "test", "data": data, "model": settings}
        (own / "config.yaml").write_text(yaml.safe_dump(whole))
        vocabularies = {
            "de": Vocabulary(WORDS, symbols),
            "en": Vocabulary(WORDS[: None if "tied_embeddings" in tied else 30], symbols),
        }
        vocabularies["de"].to_file(own / "src_vocab.txt")
        vocabularies["en"].to_file(own / "trg_vocab.txt")
        module = randomized(build_model(settings, *vocabularies.values()), dtype)
        optimizer = torch.optim.Adam(module.parameters())
        state = {
            "model_state": module.state_dict(),
            "optimizer_state": optimizer.state_dict(),
            "scaler_state": None,
            "scheduler_state": None,
            "train_iter_state": torch.Generator().get_state(),
            "stats_state": {"epochs": 1, "best_ckpt_score": float("inf")},
        }
        torch.save(state, own / "100.ckpt")
        (own / "best.ckpt").symlink_to("100.ckpt")

        def run(src: torch.Tensor, tgt: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            lengths = (src != 1).sum(1)
            masks = {"src_mask": (src != 1)[:, None], "trg_mask": (tgt != 1)[:, None]}
            return module._encode_decode(src, tgt, src_length=lengths, **masks)[0]

        tokenizers = build_tokenizer(data)

        def encode(
            line: str, vocabularies: Mapping[str, Any] = vocabularies, by: Any = tokenizers
        ) -> tuple[list[int], list[int]]:
            ids = []
            for language, vocab in vocabularies.items():
                by[language].set_vocab(vocab)
                tokens = by[language](by[language].pre_process(line))
                ids.append(vocab.sentences_to_ids([tokens], bos=False, eos=True)[0][0])
            return tuple(ids)

        stacks = module.encoder.layers, module.decoder.layers
        yield Case(name, module, own / "best.ckpt", run, stacks, encode)


def opennmt_py(folder: Path, dtype: torch.dtype) -> Iterator[Case]:
    """Yield models of OpenNMT-py's `build_base_model`, saved by its ModelSaver."""
    import pyonmttok
    from onmt.model_builder import build_base_model
    from onmt.models.model_saver import ModelSaver
    from onmt.opts import train_opts
    from onmt.utils.optimizers import Optimizer
    from onmt.utils.parse import ArgumentParser

    models: Mapping[str, list[str]] = {
        "relu": [],
        "biases, gelu, tied output": [
            "-add_qkvbias",
            "-add_ffnbias",
            "-pos_ffn_activation_fn=gelu",
            "-share_decoder_embeddings",
        ],
        "gated silu, rms norm, all tied, concatenated positions": [
            "-pos_ffn_activation_fn=silu",
            "-layer_norm=rms",
            "-norm_eps=1e-5",
            "-share_embeddings",
            "-share_vocab",
            "-share_decoder_embeddings",
            "-position_encoding_type=SinusoidalConcat",
        ],
    }
    specials = ["<unk>", "<blank>", "<s>", "</s>"]
    for index, (name, given) in enumerate(models.items()):
        arguments = ["-data={}", "-src_vocab=x", "-save_model=" + str(folder / f"model{index}")]
        arguments += ["-encoder_type=transformer", "-decoder_type=transformer"]
        arguments += ["-position_encoding", f"-enc_layers={LAYERS[0]}", f"-dec_layers={LAYERS[1]}"]
        arguments += [f"-hidden_size={WIDTH}", f"-word_vec_size={WIDTH}", f"-heads={HEADS}"]
        arguments += [f"-transformer_ff={INNER}", "-self_attn_type=scaled-dot", *given]
        parser = ArgumentParser(conflict_handler="resolve")
        train_opts(parser)
        parsed = parser.parse_args(arguments)
        options = ArgumentParser.ckpt_model_opts(parsed)
        ArgumentParser.update_model_opts(options)
        shared = "-share_vocab" in given
        vocabularies: dict[str, Any] = {"data_task": "seq2seq"}
        for side, words in (("src", WORDS), ("tgt", WORDS if shared else WORDS[:30])):
            vocab = pyonmttok.build_vocab_from_tokens(words, special_tokens=specials)
            vocab.default_id = 0
            vocabularies[side] = vocab
        if shared:
            vocabularies["tgt"] = vocabularies["src"]
        module = randomized(build_base_model(options, vocabularies), dtype)
        optimizer = Optimizer.from_opt(module, parsed)
        saver = ModelSaver(parsed.save_model, module, options, vocabularies, optimizer)
        path = Path(saver._save(7, module)[0])

        def run(src: torch.Tensor, tgt: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            # The program drops the last token of what it is given.
            longer = torch.cat([tgt, tgt[:, :1]], 1)[..., None]
            return module.generator(module(src[..., None], longer, (src != 1).sum(1))[0])

        def encode(line: str, sides: dict[str, Any] = vocabularies) -> tuple[list[int], list[int]]:
            words = line.split(" ")
            return sides["src"](words), [*sides["tgt"](words), sides["tgt"]["</s>"]]

        stacks = module.encoder.transformer, module.decoder.transformer_layers
        yield Case(name, module, path, run, stacks, encode)


def _unrecorded(trainer: str) -> dict[str, Any]:
    return {"num_heads": HEADS} if trainer == "annotated_transformer" else {}


def _error(ours: Any, theirs: np.ndarray, real: np.ndarray) -> float:
    """Return the error at tokens that are not padding [B, L]."""
    ours, theirs = as_numpy(ours)[real], theirs[real]
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


def _versions(package: str) -> str:
    names = {"fairseq": ("fairseq-fixed", "fairseq"), "onmt": ("OpenNMT-py",)}
    for name in names.get(package, (package,)):
        try:
            return f"{name} {version(name)}, torch {torch.__version__}"
        except PackageNotFoundError:
            continue
    return f"{package}, torch {torch.__version__}"


if __name__ == "__main__":
    tyro.cli(main)
