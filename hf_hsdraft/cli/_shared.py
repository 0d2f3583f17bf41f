"""What several commands share: options, the console, loading. Files whose names begin with `_` hold no command."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from ..core.checks import is_path
from ..core.methods import offered
from ..core.progress import tell, working

if TYPE_CHECKING:
    import torch

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # tables in a log file keep their columns
_Number = TypeVar("_Number", int, float)
QUESTION = "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell altogether?"


def say(line: str) -> None:
    """Prints a line as it is, without markup, colours and line breaks."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def in_bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} KB"


def present(names: Any) -> Any:
    """Returns one or several names; raises a BadParameter, before anything is loaded, for a path with nothing there."""
    for name in [names] if isinstance(names, str) else names or ():
        if is_path(name) and not os.path.exists(name):
            raise typer.BadParameter(f"there is no folder or file {os.path.abspath(name)}")
        if os.path.isdir(name) and not any(file.endswith((".json", ".gguf")) for file in os.listdir(name)):
            raise typer.BadParameter(f"{name} holds no model: expected a folder with config.json, or a .gguf file")
    return names


def option(sentence: str, *names: str, **limits: Any) -> Any:
    """A `typer.Option` whose help is `sentence`."""
    return typer.Option(*names, help=sentence, **limits)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        import torch

        return getattr(torch, self.value)


_TARGET = "Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct."
TargetOption = Annotated[str | None, option(_TARGET, "--target", callback=present)]
TargetArgument = Annotated[str | None, typer.Argument(help=_TARGET, callback=present)]
_DRAFTER = "Hub name or folder of a drafter"
_OR_MADE = f"{_DRAFTER}, mtp for the target's layers, or ngrams for n-grams of the text"
DrafterOption = Annotated[
    str | None, option(f"{_OR_MADE}; default: the target's, or ngrams.", "--drafter", callback=present)
]
DraftersOption = Annotated[
    list[str] | None, option(f"{_OR_MADE}; repeat to compare several.", "--drafter", callback=present)
]
DrafterArgument = Annotated[str, typer.Argument(help=f"{_OR_MADE}.", callback=present)]
# Of commands that write beside a drafter's weights, or load no target
SavedDrafterOption = Annotated[str | None, option(f"{_DRAFTER}; default: the target's.", "--drafter", callback=present)]
SavedDrafterArgument = Annotated[str, typer.Argument(help=f"{_DRAFTER}.", callback=present)]
DrafterFolderArgument = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a drafter.")]
DtypeOption = Annotated[Dtype, option("Dtype of the target and the drafter.")]
PromptFileOption = Annotated[
    Path | None, option("JSONL with `turns`; default: three short prompts.", "--prompts", exists=True, dir_okay=False)
]
LimitOption = Annotated[int | None, option("Maximum number of prompts, taken evenly from all categories.", min=1)]
NewTokensOption = Annotated[int, option("Maximum number of new tokens per prompt.", min=1)]
ShortTextOption = Annotated[int | None, option("Maximum number of new tokens per prompt; default: 24 to 64.", min=1)]
OutOption = Annotated[Path, option("New folder to write.")]
JsonOption = Annotated[Path | None, option("File for all figures, as JSON.", "--json")]
TemperatureOption = Annotated[float, option("Sampling temperature; 0 decodes greedily.", min=0.0)]
PlainOption = Annotated[bool, option("Decode without a drafter.", "--plain")]
SystemOption = Annotated[str | None, option("System prompt.")]
HostOption = Annotated[str, option("Host name or address to listen on.")]
PortOption = Annotated[int, option("Port to listen on; 0 takes any free port.", min=0, max=65535)]
AllowedHostOption = Annotated[
    list[str] | None,
    option("Further name that clients may call this server by, as in *.example.org; * for any. Repeat."),
]
VerificationOption = Annotated[
    str | None,
    option(
        f"Rule of verification: walk, {', '.join(offered('verification'))}. Lossy rules take options, for example "
        "fly+fly_window=2+ngram_continuation=8. Default: walk, which is exact.",
        "--verification",
    ),
]


def checked_device(device: str) -> str:
    """Returns a device; raises a BadParameter if this PyTorch does not know or find it."""
    if device == "cpu":  # which needs no PyTorch, so that wrong options are reported before it is loaded
        return device
    import torch

    try:
        asked = torch.device(device)
        module = torch.get_device_module(asked)
    except (RuntimeError, AttributeError):
        raise typer.BadParameter(f"{device!r} is no device: expected one such as cpu, cuda, cuda:1 or mps") from None
    count = module.device_count() if module.is_available() else 0
    if asked.type != "cpu" and (asked.index or 0) >= count:
        raise typer.BadParameter(
            f"{device} is not here: PyTorch {torch.__version__} finds {count} {asked.type} devices; cpu always works"
        )
    return device


DeviceOption = Annotated[str, option("Device to run on.", callback=checked_device)]


def drafter_of(target: str | None, drafter: str | None, trained: bool = False) -> str:
    """Returns the drafter that was named, or the target's default, or n-grams, which it says.

    Raises a BadParameter if the name is empty, or, with `trained`, if no drafter comes with the target.
    """
    from ..generate.by_name import NGRAMS
    from ..runtime.target_loading import DEFAULT_TARGET, check_target, default_drafter

    if drafter is not None and not drafter.strip():
        raise typer.BadParameter("the name is empty: expected a Hub name or a folder", param_hint="--drafter")
    name = drafter or default_drafter(target)
    if name is None:
        check_target(target)
        given = shlex.quote(target or DEFAULT_TARGET)
        advice = f"`hsdraft find {given}` looks for drafters, and `hsdraft train --target {given}` trains one"
        if trained:
            raise typer.BadParameter(f"no drafter comes with this target; {advice}", param_hint="--drafter")
        tell(f"no drafter comes with this target: drafting with n-grams of the text; {advice}")
    return name or NGRAMS


def numbers(text: str, option: str, like: str, kind: Callable[[str], _Number] = int) -> list[_Number]:
    """Returns the numbers of a comma-separated list; a BadParameter for anything else or none."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise typer.BadParameter(f"expected numbers such as {like}, found {text!r}", param_hint=option)
    return found


def prompt_texts(file: Path | None) -> list[str]:
    """Returns the first user turn of each prompt of a file, or of a few of the package.

    Raises a BadParameter if the file holds none.
    """
    from ..training.data.conversations import read_prompts
    from ..training.evaluate.parity import PROMPTS

    texts = list(PROMPTS) if file is None else [prompt.turns[0] for prompt in read_prompts(file)]
    if not texts:
        raise typer.BadParameter(f"no prompts: {file} holds no line with `turns`", param_hint="--prompts")
    return texts


def check_empty(folder: Path, option: str) -> None:
    """Raises a BadParameter if a folder is there and holds something."""
    if folder.is_dir() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty: name a new folder", param_hint=option)


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds a port before anything is loaded, any free one for port 0; raises an OSError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host} port {port} ({error}): choose another --host or --port") from None
    return taken


def loaded_target(target: str | None, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """Target and tokenizer by `load_target`, which may take long; says so."""
    from ..runtime.target_loading import DEFAULT_TARGET, load_target

    with working(f"loading {target or DEFAULT_TARGET}"):
        return load_target(target, dtype, device)


def load_pair(target: str | None, drafter: str | None, dtype: Dtype, device: str) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter, in one dtype on one device, checked to fit. The drafter is looked up first."""
    from ..generate.by_name import found_for_targets

    named = found_for_targets(drafter_of(target, drafter), dtype.torch, device)
    model, tokenizer = loaded_target(target, dtype.torch, device)
    loaded = named(model)
    check_fit(loaded, model, tokenizer)
    return model, tokenizer, loaded


def check_fit(drafter: Any, target: Any, tokenizer: Any) -> None:
    drafter.check(target)
    drafter.warn_of_misfit(target, tokenizer, all_processes=False)


def verification_options(text: str) -> dict[str, Any]:
    """Parses a verification rule, with options if it is lossy: `walk`, `fly` or `fly+fly_window=2`.

    Raises a ValueError if there is no such rule or option, or the value is out of range.
    """
    from ..core.methods import load
    from ..verify.registry import VERIFIERS

    rule, further, _ = text.partition("+")
    if rule not in VERIFIERS:
        raise ValueError(f"verification={rule!r} is invalid: expected one of {', '.join(VERIFIERS)}")
    return {"verification": rule, **(load("parsing", "lossy rule").lossy_rule(text)[1] if further else {})}


def set_verification(drafter: Any, text: str) -> None:
    """Sets a drafter's verification rule, see `verification_options`, and prints a note if it is lossy.

    Raises a ValueError if there is no such rule, or it does not go with the drafter's other options.
    """
    from ..drafters.base.draft_options import DraftOptions
    from ..verify.registry import is_lossy

    options = verification_options(text)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    drafter.verifier(DraftOptions.of(drafter))
    rule = options["verification"]
    if is_lossy(rule):
        console.print(f"verification={rule!r} is lossy: texts may differ from the model's own", highlight=False)


def load_plain_or_pair(
    target: str | None, drafter: str | None, dtype: Dtype, device: str, plain: bool, verification: str | None = None
) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter; `None` as the drafter for plain decoding.

    `verification` is a rule that the user confirms by naming it; `None` for the drafter's own, which is exact.
    """
    if plain:
        if verification is not None:
            raise typer.BadParameter(
                "--plain has no drafts to verify: leave one of the two out", param_hint="--verification"
            )
        if drafter is not None:
            raise typer.BadParameter(
                "--plain decodes without a drafter: leave one of the two out", param_hint="--drafter"
            )
        return *loaded_target(target, dtype.torch, device), None
    if verification is not None:
        verification_options(verification)  # reports a misspelt one before anything is loaded
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    if verification is not None:
        set_verification(loaded, verification)
    return model, tokenizer, loaded


def need_extra(command: str, extra: str, modules: Sequence[str]) -> None:
    """Raises an ImportError that names the extra of the package if a command lacks a module, before any work."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise ImportError(f"`hsdraft {command}` needs {', '.join(missing)}: pip install -e '.[{extra}]' in a checkout")
