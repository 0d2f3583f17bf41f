"""What several commands share: options, the console, loading. Files whose names begin with `_` hold no command."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..core.methods import offered

if TYPE_CHECKING:
    import torch

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # tables in a log file keep their columns


def say(line: str) -> None:
    """Prints a line as it is: without markup, and not wrapped."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        import torch

        return getattr(torch, self.value)


class Injector(StrEnum):
    path = "path"
    low_rank = "low_rank"
    selector = "selector"


TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct."),
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Hub name or folder; default: the one that comes with the target.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")]
VerificationOption = Annotated[
    str | None,
    typer.Option(
        "--verification",
        help=f"Rule of verification. Lossy ones ({', '.join(offered('verification'))}) take options, as "
        "fly+fly_window=2+ngram_continuation=8. Default: exact.",
    ),
]


def checked_device(device: str) -> str:
    """Returns a device; raises a BadParameter if this PyTorch does not know or find it."""
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


DeviceOption = Annotated[str, typer.Option(help="Device to run on.", callback=checked_device)]


def drafter_of(target: str | None, drafter: str | None) -> str:
    """The drafter that was named, or the target's default."""
    from ..runtime.target_loading import check_target, default_drafter

    if drafter is not None and not drafter.strip():
        raise typer.BadParameter("the name is empty: expected a Hub name or a folder", param_hint="--drafter")
    name = drafter or default_drafter(target)
    if name is None:
        check_target(target)
        raise typer.BadParameter(
            "no drafter comes with this target; train one with `hsdraft train`", param_hint="--drafter"
        )
    return name


def hidden_state_drafter(name: str, needed_by: str, **loading: Any) -> Any:
    """Loads a drafter for a command that needs the hidden-state family; raises a ValueError for another family."""
    from ..generate.by_name import load_drafter

    drafter = load_drafter(name, **loading)
    check_hidden_state(drafter, name, needed_by)
    return drafter


def check_hidden_state(drafter: Any, name: str, needed_by: str) -> None:
    from ..drafters.hidden_state.modeling_hsdraft import HSDrafter

    if not isinstance(drafter, HSDrafter):
        raise ValueError(
            f"{needed_by} needs a hidden-state drafter, as `hsdraft train` makes: {name} is a {type(drafter).__name__}"
        )


def load_pair(target: str | None, drafter: str | None, dtype: Dtype, device: str) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter, in one dtype on one device, checked to fit. The drafter is looked up first."""
    from ..generate.by_name import load_drafter
    from ..runtime.target_loading import load_target

    name = drafter_of(target, drafter)
    loaded = load_drafter(name, dtype.torch, device)
    model, tokenizer = load_target(target, dtype.torch, device)
    check_fit(loaded, model, tokenizer)
    return model, tokenizer, loaded


def check_fit(drafter: Any, target: Any, tokenizer: Any) -> None:
    drafter.check(target)
    drafter.warn_of_misfit(target, tokenizer, all_processes=False)


def verification_options(text: str) -> dict[str, Any]:
    """Parses a verification rule, with options if it is lossy: `walk`, `fly` or `fly+fly_window=2`.

    Raises a ValueError if there is no such rule or option, or the value is out of range.
    """
    from ..verify.lossy_rule import Rule
    from ..verify.registry import VERIFIERS

    rule, further, _ = text.partition("+")
    if rule not in VERIFIERS:
        raise ValueError(f"verification={rule!r} is invalid: expected one of {', '.join(VERIFIERS)}")
    return {"verification": rule, **(Rule.parse(text).options if further else {})}


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
    from ..runtime.target_loading import load_target

    if not plain:
        if verification is not None:
            verification_options(verification)  # reports a misspelt one before anything is loaded
        model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
        if verification is not None:
            set_verification(loaded, verification)
        return model, tokenizer, loaded
    if verification is not None:
        raise typer.BadParameter(
            "--plain has no drafts to verify: leave one of the two out", param_hint="--verification"
        )
    if drafter is not None:
        raise typer.BadParameter("--plain decodes without a drafter: leave one of the two out", param_hint="--drafter")
    return *load_target(target, dtype.torch, device), None
