"""What drafters of published architectures share: configuration, network, and files in the speculators format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig

from ...core.checks import are_ascending, demand, integer, printable, public_name, setting
from ...core.refusals import DraftingRefused
from ...drafters.base.draft_options import default_options
from ...drafters.base.registry import recognise
from ...drafters.base.saved_drafter import Placement, SavedDrafter, take_options
from ...drafters.base.target_weights import TargetWeights, initialise
from ...hub.drafter_files import CONFIG, WEIGHTS, Shape
from ...runtime.target_limits import decoder_layers, text_config
from .checkpoint import AnyCheckpoint
from .decoder_layer import LayerSizes, rotary_of
from .format_table import PublishedFormat
from .readings import match_told, settle, settled_by, told
from .target_copies import before_norm, check_last_state
from .target_sizes import FLAG, MOST_OF_TARGET, TargetSizes, misfit

MOST_LAYERS, MOST_TAPS = 64, 64
TOKEN_MAP = "token_map"  # vLLM's name of a list of drafted tokens among the weights


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(TargetSizes):
    """Configuration of a drafter of a published architecture; as `TargetSizes`."""

    target_tap_layers: Sequence[int] | None = setting(
        "hidden states of the target that are read, ascending, in the order of the columns of `fc`. 0 are the "
        "embeddings, k the output of layer k. `None` means 2, L // 2 and L - 3 of the target's L layers, (-1,) is L",
        None,
    )
    sizes: LayerSizes = setting("of the layers")
    num_hidden_layers: int = setting("number of layers", 1, limit=integer(MOST_LAYERS))
    rope: Mapping[str, Any] = setting(
        "how positions are rotated: `rope_parameters`, or `rope_theta` and `rope_scaling`, and "
        "`max_position_embeddings`, see `rotary_of`",
        default_factory=dict, hash=False
    )  # fmt: skip
    mask_token_id: int | None = setting(
        "the token whose embedding stands for tokens that are not drafted yet", None, integer(2**31, 0), optional=True
    )
    rotates_whole_heads: bool = setting("whether a `partial_rotary_factor` in `rope` is ignored", False, FLAG)
    untold: Sequence[str] = setting(
        "fields of this configuration that the files leave open; a trial on the target decides, see `readings`", ()
    )
    last_tap_is_normed: bool = setting(
        "whether the target's last hidden state is read after its final norm, as transformers gives it", False, FLAG
    )
    target_architectures: Sequence[str] = setting("class names of the target, where they are known", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        taps, most = self.target_tap_layers, self.target_num_hidden_layers or MOST_OF_TARGET
        valid = taps in (None, (-1,)) or (0 < len(taps) <= MOST_TAPS and are_ascending(taps, 0, most))
        wanted = f"expected ascending indices of hidden states from 0 (embeddings) to {most}, each once"
        demand(valid, "target_tap_layers", taps if taps is None else list(taps), wanted)
        self.check_drafted()
        size, mask = self.vocab_size, self.mask_token_id
        valid = mask is None or size is None or mask < self.num_embedded
        demand(valid, "mask_token_id", mask, f"expected a token id below vocab_size={size}")

    @property
    def rotation(self) -> dict[str, Any]:
        """The fields of `rotary_of`."""

        def kept(fields: Mapping[str, Any]) -> dict[str, Any]:
            left = {name: kept(each) if isinstance(each, Mapping) else each for name, each in fields.items()}
            return {name: each for name, each in left.items() if name != "partial_rotary_factor"}

        return kept(self.rope) if self.rotates_whole_heads else dict(self.rope)

    @property
    def padding(self) -> int:
        """The greatest number of rows for tokens beyond the target's vocabulary, by which tables are padded."""
        return 0

    @property
    def num_embedded(self) -> int:
        """The number of tokens that have an embedding, where the vocabulary is known."""
        return self.vocab_size or 0

    @property
    def num_taps(self) -> int:
        return 3 if self.target_tap_layers is None else len(self.target_tap_layers)

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that it reads of a target with so many layers."""
        if self.target_tap_layers is not None:
            return tuple(num_hidden_layers if tap == -1 else tap for tap in self.target_tap_layers)
        return 2, num_hidden_layers // 2, num_hidden_layers - 3


def fields_of_target(target: Any) -> dict[str, Any]:
    """Returns the fields of a fresh drafter that a loaded target decides, with plain rope of its base."""
    config = text_config(target)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "rope": {
            "rope_parameters": {"rope_theta": rope.get("rope_theta") or 10000.0, "rope_type": "default"},
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
        },
        "target_name": public_name(getattr(target, "name_or_path", "")),
        "target_architectures": (type(target).__name__,),
    }


_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "mlp_bias",
)  # fmt: skip


@dataclass(frozen=True)
class SpeculatorsFiles:
    """A drafter's files in the speculators format."""

    document: Mapping[str, Any]  # config.json
    tensors: Mapping[str, torch.Tensor]  # weights by name
    # Tensors stored each in a separate file, by file name; only this package reads them
    loose: Mapping[str, torch.Tensor] = field(default_factory=dict)


class PublishedNetwork(nn.Module, SavedDrafter):
    """A drafter whose network reads hidden states of the target, saved in the speculators format.

    Its configuration is a `PublishedConfig`, or has its fields about the target. Weights, configuration and, in
    `generation_config`, drafting options are all that it holds, but no state of a call, so several threads may share
    it.

    For training, its `forward` reads packed sequences and drafts from many positions at once. All networks take:

    - taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, concatenated;
    - embeds: `[T, D]`, embeddings of the next tokens x_{i+1}, by `borrow(...).embed`;
    - position_ids: `[T]`, int64, position i of each pair, consecutive within a document;
    - starts: `[S]`, int64, pairs at which chains or blocks start; None for the last one only;
    - document_ids: `[T]`, int64; attention stays within a document. None for a single document;
    - num_rolled: number of chains, the first of `starts`, that go beyond the first depth; None for all;
    - labels: for `loss_function(drafter, hidden_states, labels)`; None for no loss.
    """

    saved_as: Sequence[str] = ("speculators",)  # formats of other projects that `save_pretrained` writes
    config_class: Any
    config: Any
    loss_function: Any = None
    takes_tree_builders = True
    can_be_tried = True  # whether `trial_states` works for this configuration
    rows_of_trial = 1  # that `trial_states` drafts after each position
    name_or_path = ""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        # Which reading a trial has taken, and why, by the field of the configuration; and number of trials
        self.tried: dict[str, str] = {}
        self.trials = 0
        self.generation_config = self.default_generation_config()

    @classmethod
    def of_format(cls, form: PublishedFormat, checkpoint: AnyCheckpoint, **kwargs: Any) -> Any:
        """Loads a drafter, as `from_pretrained`: checks file headers before it reads weights, without a second copy."""
        placement = Placement.taken_from(kwargs)
        config = form.read(checkpoint, **{name: kwargs.pop(name) for name in form.given.keys() & kwargs.keys()})
        config = settled_by(config, **{name: kwargs.pop(name) for name in form.open.keys() & kwargs.keys()})
        with torch.device("meta"):
            drafter = cls(config)
        take_options(drafter, checkpoint.folder, kwargs)
        ours, apart = drafter.matched(form, checkpoint)
        maps = {}
        if "d2t" in ours.values():
            ids = drafted_ids(checkpoint, config.vocab_size)
            maps["d2t"] = ids - torch.arange(len(ids))
        state = {ours[theirs]: each for theirs, each in checkpoint.tensors(ours.keys(), placement.dtype)} | maps
        state = form.weights(checkpoint, config, state)
        drafter.load_state_dict({**state, **{name: make(state) for name, make in apart.items()}}, assign=True)
        drafter.to(placement.dtype or drafter.dtype).eval()
        drafter.name_or_path, drafter.loaded_from = checkpoint.name, checkpoint.folder
        return placement.place(drafter)

    def matched(self, form: PublishedFormat, checkpoint: AnyCheckpoint) -> tuple[dict[str, str], Mapping[str, Any]]:
        """Returns our names of tensors by those in the files, and `not_among_weights`; a ValueError for others."""
        apart = self.not_among_weights(checkpoint)
        shapes = {name: tuple(each.shape) for name, each in self.state_dict().items() if name not in apart}
        ours = {form.stored_name(name, checkpoint.shapes): name for name in shapes}
        unread = {**form.unread_shapes(checkpoint), **self.may_hold()}
        self._check_head(ours.keys() - checkpoint.shapes.keys(), checkpoint)
        checkpoint.check_shapes({theirs: shapes[name] for theirs, name in ours.items()}, unread)
        return ours, apart

    def _check_head(self, missing: Collection[str], checkpoint: AnyCheckpoint) -> None:
        drafted, size = self.config.draft_vocab_size, self.config.vocab_size
        if "lm_head.weight" in missing and drafted is not None and drafted != size:
            raise ValueError(
                f"{printable(checkpoint.name)} drafts {drafted:,} of {size:,} tokens (draft_vocab_size, vocab_size in "
                "its config.json), so its files must hold output rows of that number (missing: lm_head.weight): "
                f"download all of its weights, or set draft_vocab_size to {size:,} if it drafts with the target's rows"
            )

    def not_among_weights(self, checkpoint: AnyCheckpoint) -> Mapping[str, Callable[[Mapping[str, Any]], torch.Tensor]]:
        """Returns what makes tensors that are not among the weights of the files; it takes those that are."""
        return {}

    def may_hold(self) -> dict[str, Shape]:
        """Returns the shapes of further tensors, which files may have and this drafter does not read."""
        size, drafted = self.config.vocab_size, self.config.draft_vocab_size
        return {} if size is None else {"t2d": (size,), "d2t": (drafted,)}

    def export(self, form: str, folder: str | os.PathLike[str], target_name: str = "") -> None:
        if not self.saved_as:
            super().export(form, folder, target_name)
        if form not in self.saved_as:
            raise ValueError(
                f"a {type(self).__name__} cannot be written in the format {form!r}: expected "
                f"{' or '.join(self.saved_as)}; save it by save_pretrained, whose files all programs that can run it "
                "read"
            )
        self.save_pretrained(folder, **{"target_name": target_name} if target_name else {})

    @classmethod
    def at_once(cls, config: Any) -> bool:
        """Whether drafters of a configuration draft all depths in one forward."""
        return getattr(config, "mask_token_id", None) is not None

    @classmethod
    def described(cls, config: Any) -> dict[str, str]:
        """Returns lines by title that `hsdraft info` shows of a configuration."""
        return told(config, {}, getattr(config, "untold", ()))

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        if getattr(self.config, "untold", ()):
            settle(self, target, tokens)

    def match_told(self, target: Any, tokenizer: Any, name: str) -> list[str]:
        return match_told(self, target, tokenizer, name)

    def reread(self, **fields: Any) -> None:
        """Reads the same weights in another way, by fields of the configuration."""
        self.config = replace(self.config, **fields)
        self.rotary = rotary_of(self.config.rotation, self.config.sizes)

    def trial_states(
        self, taps: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, depth: int, weights: TargetWeights
    ) -> Sequence[torch.Tensor]:
        """Returns drafted states `[S, D]` of each depth after `starts` `[S]` of a text; depth d drafts start + 2 + d.

        `taps` `[T, ...]` are of `tokens` `[T + 1]` but the last.
        """
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return int(self.config.num_draft_steps)

    def default_generation_config(self) -> GenerationConfig:
        steps = self.num_draft_steps
        return default_options(steps, tree_size=max(24, steps), beam_width=8, own=self.own_options)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialises products and embeddings normally distributed, norms as 1."""
        for module in self.modules():
            initialise(module, std)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        """The hidden states that it reads; raises a ValueError if only `taps_of` a target can tell."""
        if -1 in (self.config.target_tap_layers or (-1,)):
            raise ValueError("which hidden states this drafter reads depends on its target: ask drafter.taps_of(model)")
        return tuple(self.config.target_tap_layers)

    def taps_of(self, target: Any) -> Sequence[int]:
        layers = decoder_layers(text_config(target))
        taps: Sequence[int] = self.config.taps_of(layers)
        return taps if self.config.last_tap_is_normed else before_norm(taps, layers)

    def check(self, target: Any) -> None:
        if wrong := misfit(self.config, target):
            self.refuse(wrong)
        layers = decoder_layers(text_config(target))
        if self.config.taps_of(layers)[-1] == layers and not self.config.last_tap_is_normed:
            check_last_state(target)

    def refuse(self, wrong: str) -> NoReturn:
        made_for = printable(self.config.target_name) or "another target"
        raise DraftingRefused(
            f"{wrong}: this drafter was made for {made_for}. Use a drafter of this target, or train one."
        )

    def add_vocabulary(self) -> None:
        """Adds `d2t` `[V']`, int64, for a reduced vocabulary: the token id of each row of the head minus its number."""
        if self.config.is_reduced:
            self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.int64))

    def draft_vocab_ids(self, vocab_size: int | None = None) -> torch.Tensor:
        """Returns `[V']`, int64, the token id of each row of the head; drafters of any vocabulary need `vocab_size`."""
        ids = torch.arange(self.config.draft_vocab_size or vocab_size or 0, device=self.device)
        return ids + cast(torch.Tensor, self.d2t) if self.config.is_reduced else ids

    def weights_in_files(self) -> dict[str, torch.Tensor]:
        """Returns the weights by name, and the maps of a reduced vocabulary: `d2t`, and `t2d` `[V]`, bool."""
        state = self.state_dict()
        if self.config.is_reduced:
            state["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            state["t2d"][self.draft_vocab_ids().cpu()] = True
        return state

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the contents of its files; raises a ValueError if the format cannot express what it computes."""
        raise NotImplementedError

    @classmethod
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, **kwargs: Any) -> Any:
        """Loads a drafter of this family in any format; checks it before allocating anything large."""
        form, name = recognise(checkpoint), printable(checkpoint.name)
        other = f"{name} is of the format {form.name}, not a {cls.__name__}: load it by AutoDrafter"
        if form.drafter is not None and not issubclass(form.drafter, cls):
            raise ValueError(other)
        drafter = form.load(checkpoint, **kwargs)
        if not isinstance(drafter, cls):  # the format does not name its class
            raise ValueError(other)
        return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], target_name: str = "", **kwargs: Any) -> None:
        """As in `SavedDrafter`, in the speculators format. `target_name` is by default the configuration's.

        Raises a ValueError for an invalid option, or if the format cannot express what the drafter computes.
        """
        super().save_pretrained(save_directory, target_name=target_name, **kwargs)

    def write(self, folder: Path, target_name: str = "", **kwargs: Any) -> None:
        files = self.in_files(target_name)
        weights = {name: tensor.detach().contiguous().cpu() for name, tensor in files.tensors.items()}
        (folder / CONFIG).write_text(json.dumps(files.document, indent=2) + "\n", encoding="utf-8")
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        for name, tensor in files.loose.items():
            torch.save(tensor.detach().cpu(), folder / name)


def drafted_ids(checkpoint: AnyCheckpoint, vocab_size: int) -> torch.Tensor:
    """Returns `[V']`, int64, the token id of each row of the head: the row's number plus `d2t` `[V']`.

    `t2d` `[vocab_size]`, if there, marks the drafted tokens. Raises a ValueError if maps are not integers or contradict
    each other, or ids repeat or exceed the vocabulary.
    """
    name, maps = printable(checkpoint.name), dict(checkpoint.tensors(("d2t", "t2d")))
    for title, tensor in maps.items():
        if tensor.is_floating_point() or (title == "d2t" and tensor.dtype == torch.bool):
            wanted = "integers" if title == "d2t" else "bool or integers"
            raise ValueError(f"{title} of {name} has dtype {tensor.dtype}: expected {wanted}")
    ids = torch.arange(len(maps["d2t"])) + maps["d2t"].long()
    least, most, again = int(ids.min()), int(ids.max()), len(ids) - len(ids.unique())
    if least < 0 or most >= vocab_size or again:
        raise ValueError(
            f"d2t of {name} leads to tokens {least} to {most}, {again} of them twice: expected 0 to {vocab_size - 1}, "
            "each once, as the number of its row plus d2t"
        )
    marked = maps.get("t2d")
    if marked is not None and not torch.equal(ids.sort().values, marked.nonzero().flatten()):
        raise ValueError(f"d2t and t2d of {name} name different tokens: expected each drafted token once, in both")
    return ids


def offsets_listed(checkpoint: AnyCheckpoint, vocab_size: int) -> torch.Tensor:
    """Returns `d2t` `[V']` by the list `TOKEN_MAP`; raises a ValueError unless it has tokens, each once."""
    ids = dict(checkpoint.tensors((TOKEN_MAP,)))[TOKEN_MAP]
    valid = not ids.is_floating_point() and ids.dtype != torch.bool
    demand(valid, TOKEN_MAP, ids.dtype, "expected integers")
    valid = 0 <= int(ids.min()) <= int(ids.max()) < vocab_size and len(ids.unique()) == len(ids)
    demand(valid, TOKEN_MAP, ids.tolist(), f"expected tokens below {vocab_size}, each once")
    return ids.long() - torch.arange(len(ids))


def refuse_unsaid(told: Mapping[str, bool]) -> None:
    """Raises a ValueError for anything, by name, that a drafter has and the format of speculators has no field for."""
    if found := [name for name, is_so in told.items() if is_so]:
        raise ValueError(
            f"this drafter has {' and '.join(found)}, which the format of speculators cannot say: keep the files that "
            "it was loaded from"
        )


def speculators_document(
    config: Any,
    kind: str,  # type of drafter in that format
    architecture: str,  # class name that engines use
    dtype: torch.dtype,
    model_type: str,  # transformers' type of the layers
    windows: Sequence[int | None],  # sliding window of each layer; empty if the files need not tell
    **fields: Any,  # of the type
) -> dict[str, Any]:
    """Returns a drafter's config.json in the speculators format, with all switches: readers have different defaults."""
    sliding = {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
        "use_sliding_window": any(windows),
    }
    sizes: LayerSizes = config.sizes
    layers = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        **{name: getattr(sizes, name) for name in _LAYER_FIELDS},
        "tie_word_embeddings": False,
        **(sliding if windows else {}),
        **{name: value for name, value in config.rope.items() if value is not None},
    }
    steps = config.num_draft_steps
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": steps, "verifier_accept_k": 1, "accept_tolerance": 0.0
    }  # fmt: skip
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": public_name(config.target_name) or None,
                "architectures": list(config.target_architectures),
            },
        },
        "architectures": [architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **fields,
    }
