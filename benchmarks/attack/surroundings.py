"""Tries that leave the input as it is and change what is around it: neighbours, environments."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jax_transformer
from benchmarks.attack import stock
from benchmarks.attack.mutations import choose, mutate_file
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult, command, tree_digest
from jax_transformer import InputError
from jax_transformer.translation import model_folder

LINES = b"one hundred and two\n\nseven\n"
SECONDS = 50  # of a command
STRANGER = 54321  # a user without an entry in the system's list
JOURNALS = (
    *('{"created": []}', '{"created": ["thesis.tex"]}', '{"old": "../../victim"}', "[]", "\0"),
    '{"created": ["../../victim/thesis.tex", "\\u0000"]}',
)
STATE = b'{"lines": NUMBER, "bytes": 0, "input_sha256": "", "replaces": true, "facts": {}}'


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try; arguments as for the files."""
    makers = [_neighbours, _unfinished_output]
    if not quick:
        makers.append(_environment)
    return choose(draw, makers)(draw, folder, stock_folder)


def _victim(folder: Path) -> Path:
    """Write files of the user that no command may touch."""
    victim = folder / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    (victim / "config.json").write_text("{}")
    return victim


def _checked(victim: Path, run: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Return a function that runs another one and fails if it changed the files of the user."""
    before = tree_digest(victim)

    def checked() -> Outcome:
        try:
            return run()
        finally:
            if tree_digest(victim) != before:
                raise WrongResult("files of the user were changed")

    return checked


def _journal(draw: np.random.Generator, hidden: Path, victim: Path) -> None:
    hidden.mkdir()
    (hidden / "journal.json").write_text(choose(draw, JOURNALS))
    (hidden / "old").symlink_to(victim)


def _links(draw: np.random.Generator, hidden: Path, victim: Path) -> None:
    hidden.mkdir()
    for name in ("old", "new", "config.json"):
        (hidden / name).symlink_to(choose(draw, (victim, victim / "config.json", "nothing", "/")))


def _folders(draw: np.random.Generator, hidden: Path, victim: Path) -> None:
    for name in ("old", "new/inner", "else"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "link").symlink_to(victim)


NEIGHBOURS: dict[str, Callable[[np.random.Generator, Path, Path], object]] = {
    "a journal": _journal,
    "links": _links,
    "folders": _folders,
    "a link to the user's folder": lambda draw, hidden, victim: hidden.symlink_to(victim),
    "a link to the user's file": lambda draw, hidden, victim: hidden.symlink_to(
        victim / "thesis.tex"
    ),
    "a link to nothing": lambda draw, hidden, victim: hidden.symlink_to("nothing"),
    "a FIFO": lambda draw, hidden, victim: os.mkfifo(hidden),
    "a file": lambda draw, hidden, victim: hidden.write_text("x"),
}


def _neighbours(draw: np.random.Generator, folder: Path, stock_folder: Path) -> Attempt:
    """Put something beside a model, or into its folder, and read or overwrite the model."""
    victim, model = _victim(folder), folder / "models" / "model"
    shutil.copytree(stock.stocked(stock_folder, "own-model", stock.own_folder), model)
    done = []
    for place in (
        *(model.with_name(".writing.model"), model / ".writing.config.json"),
        *(model / ".writing.model.safetensors", model / "notes"),
    ):
        if draw.random() < 0.5:
            name = choose(draw, list(NEIGHBOURS))
            NEIGHBOURS[name](draw, place, victim)
            done.append(f"{place.name}: {name}")
    if draw.random() < 0.5:
        expected = model_folder.model_digest(stock.model())

        def run() -> Outcome:
            before = tree_digest(model.parent)
            found = model_folder.model_digest(model_folder.load(model))
            if tree_digest(model.parent) != before:
                raise WrongResult("reading a model changed files")
            if found != expected:
                raise WrongResult("another model was read")
            return Outcome.SAME

        return Attempt(f"read a model beside {done}", _checked(victim, run), (folder,))

    def run() -> Outcome:
        model_folder.save(model, stock.model(1), overwrite=True)
        if model_folder.model_digest(model_folder.load(model)) != model_folder.model_digest(
            stock.model(1)
        ):
            raise WrongResult("another model was written")
        return Outcome.SAME

    return Attempt(f"overwrite a model beside {done}", _checked(victim, run), (model, victim))


def _unfinished_output(draw: np.random.Generator, folder: Path, stock_folder: Path) -> Attempt:
    """Translate a file beside files that have the names of an unfinished output."""
    victim = _victim(folder)
    model = stock.stocked(stock_folder, "own-model", stock.own_folder)
    output = folder / "news"
    part, state = folder / "news.part", folder / "news.part.json"
    source = choose(draw, (folder / "text", folder / "text", part, output, state))
    contents = [LINES, b"", b"{}", b'{"lines": 2}', b"x" * 100, b"\0"]
    number = choose(draw, (-1, 2**63, 10**30, "1.5", "null"))
    contents.append(STATE.replace(b"NUMBER", str(number).encode()))
    done = [f"input {source.name}"]
    for path in (output, part, state):
        how = draw.random()
        if path != source and how < 0.3:
            path.write_bytes(choose(draw, contents))
            done.append(f"{path.name}: a file")
        elif path != source and how < 0.6:
            name = choose(draw, list(NEIGHBOURS))
            NEIGHBOURS[name](draw, path, victim)
            done.append(f"{path.name}: {name}")
    if not os.path.lexists(source):
        source.write_bytes(LINES)
    flag = choose(draw, ("--resume", "--overwrite", "--resume", None))
    flags = [f"--input={source}", f"--output={output}", *([flag] if flag else [])]

    def run() -> Outcome:
        command(["translate", str(model), *flags])
        if output.is_symlink() or output.read_bytes().count(b"\n") != LINES.count(b"\n"):
            raise WrongResult("the output is not that of the input")
        if source.read_bytes() != LINES:
            raise WrongResult("the input was changed")
        return Outcome.OTHER

    return Attempt(f"translate, {flag}; {', '.join(done)}", _checked(victim, run), (folder,))


class Environment(NamedTuple):
    """How a command is started.

    Attributes:
        variables: Of the environment.
        prefix: What stands before the command.
        begin: Runs in the new process.
        streams: Arguments of `subprocess.run` for the standard streams.
    """

    variables: dict[str, str]
    prefix: list[str]
    begin: list[Callable[[], object]]
    streams: dict[str, Any]


def _cache_is(make: Callable[[Path], object]) -> Callable[[Environment, Path], None]:
    def change(environment: Environment, folder: Path) -> None:
        path = folder / "cache"
        shutil.rmtree(path)
        make(path)

    return change


def _as_stranger(environment: Environment, folder: Path) -> None:
    """Run as a user whom the system's list lacks, with the rights of the present one."""
    environment.variables.clear()
    if shutil.which("unshare"):
        environment.prefix.extend(["unshare", "--user", f"--map-user={STRANGER}"])


def _set(**variables: str | None) -> Callable[[Environment, Path], None]:
    def change(environment: Environment, folder: Path) -> None:
        for name, value in variables.items():
            environment.variables.pop(name, None)
            if value is not None:
                environment.variables[name] = value

    return change


def _stream(descriptor: int, name: str, path: str | None) -> Callable[[Environment, Path], None]:
    def change(environment: Environment, folder: Path) -> None:
        if path is None:
            environment.begin.append(lambda: os.close(descriptor))
        else:
            environment.streams[name] = open(path, "wb")  # noqa: SIM115

    return change


def _begin(function: Callable[..., object], *arguments: Any) -> Callable[[Environment, Path], None]:
    return lambda environment, folder: environment.begin.append(lambda: function(*arguments))


def _cut_files() -> None:
    """Let every file end after 4 kB; Python ignores the signal, so that the write fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _without_folder(environment: Environment, folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    environment.begin.extend([lambda: os.chdir(gone), gone.rmdir])


def _owned_by_another(environment: Environment, folder: Path) -> None:
    if os.getuid() == 0:
        for path in (folder / "cache").rglob("*"):
            os.chown(path, STRANGER, STRANGER)


ENVIRONMENTS: dict[str, Callable[[Environment, Path], object]] = {
    "no home": _set(HOME=None, XDG_CACHE_HOME=None),
    "a relative home": _set(HOME="here", XDG_CACHE_HOME=None),
    "a missing home": _set(HOME="/nothing/here", XDG_CACHE_HOME=None),
    "a relative cache": _set(XDG_CACHE_HOME="cache"),
    "a file as cache": _cache_is(lambda path: path.write_text("x")),
    "a FIFO as cache": _cache_is(os.mkfifo),
    "a link to nothing as cache": _cache_is(lambda path: path.symlink_to("nothing")),
    "a cache that all may write": lambda environment, folder: [
        path.chmod(0o777) for path in (folder / "cache").rglob("*") if path.is_dir()
    ],
    "a closed cache": lambda environment, folder: (folder / "cache").chmod(0),
    "a cache of another user": _owned_by_another,
    "a user without an entry": _as_stranger,
    "a missing TMPDIR": _set(TMPDIR="/nothing/here"),
    "the C locale": _set(LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "a terminal without columns": _set(COLUMNS="0", LINES="0", TERM="dumb"),
    "no buffer": _set(PYTHONUNBUFFERED="1"),
    "standard input closed": _stream(0, "stdin", None),
    "standard output closed": _stream(1, "stdout", None),
    "standard error closed": _stream(2, "stderr", None),
    "standard output full": _stream(1, "stdout", "/dev/full"),
    "standard error full": _stream(2, "stderr", "/dev/full"),
    "files of 4 kB": _begin(_cut_files),
    "a umask of 777": _begin(os.umask, 0o777),
    "a folder that is gone": _without_folder,
}


def _warm_cache(path: Path) -> None:
    """Keep the compiled programs of a translation."""
    path.mkdir()
    stock.own_folder(path / "model")
    environment = {"XDG_CACHE_HOME": str(path / "cache")}
    done = _run(["translate", str(path / "model")], Environment(environment, [], [], {}))
    (path / "expected").write_bytes(done.stdout)


def _run(arguments: list[str], environment: Environment) -> subprocess.CompletedProcess[bytes]:
    root = str(Path(jax_transformer.__file__).parents[1])
    kept = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # every program, for the damage
    variables = {**os.environ, "PYTHONPATH": root, **kept, **environment.variables}
    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        if name not in environment.variables:
            variables.pop(name, None)

    def begin() -> None:
        for function in environment.begin:
            function()

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **environment.streams}
    with contextlib.ExitStack() as opened:
        for stream in environment.streams.values():
            opened.callback(stream.close)
        return subprocess.run(
            [*environment.prefix, sys.executable, "-m", "jax_transformer", *arguments],
            input=LINES,
            env=variables,
            preexec_fn=begin,
            timeout=SECONDS,
            check=False,
            **streams,
        )


def _environment(draw: np.random.Generator, folder: Path, stock_folder: Path) -> Attempt:
    """Translate by a process of its own in a hostile environment, or with a damaged cache."""
    kept = stock.stocked(stock_folder, "warm", _warm_cache)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    environment = Environment(
        {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}, [], [], {}
    )
    expected, output = (folder / "expected").read_bytes(), folder / "output"
    entries = [path for path in sorted((folder / "cache").rglob("*")) if path.is_file()]
    if draw.random() < 0.5:
        done = "damaged cache"
        order = draw.permutation(len(entries))
        chosen, others = np.split(np.asarray(entries)[order], [int(choose(draw, (1, 1, 2)))])
        for path in chosen:  # each once: a change may have made it too large to be read
            done += f", {path.name[:20]}: {mutate_file(draw, path, list(others))}"
    else:
        done = choose(draw, list(ENVIRONMENTS))
        ENVIRONMENTS[done](environment, folder)
    to_file = bool(draw.random() < 0.3)
    arguments = ["translate", str(folder / "model"), *([f"--output={output}"] * to_file)]

    def run() -> Outcome:
        ended = _run(arguments, environment)
        message = (ended.stderr or b"").decode(errors="replace")
        if ended.returncode == 1 and "Traceback" not in message:
            shown = message[message.rfind("error: ") :].strip()
            raise InputError(*(shown or "nothing is shown").split("\n"))
        if ended.returncode != 0 or "Traceback" in message:
            raise WrongResult(f"exit code {ended.returncode}: {message[-2000:]}")
        if "umask" in done and to_file:
            output.chmod(0o600)
        found = output.read_bytes() if to_file else ended.stdout
        if found not in (None, expected):
            raise WrongResult("another translation")
        return Outcome.SAME

    victims = (folder / "model", output)
    return Attempt(f"{arguments[0]}{', to a file' * to_file}; {done}", run, victims)
