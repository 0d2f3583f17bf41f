"""`hsdraft bench` with drafting of other projects as further variants, and all its options.

    python benchmarks/peers.py --prompts prompts.jsonl --variants default,draft-model=FOLDER,economize-lookup

`draft-model=FOLDER`: transformers' assisted generation with a small model (a folder or Hub name) of the target's own
tokenizer. `mtp`: transformers' multi-token prediction, for targets whose checkpoint has such layers; transformers
reads them from disk in every call, which is part of the time. `dflash=FOLDER`: transformers' DFlash with a DFlash
drafter of the target. `economize-lookup`, `economize-eagle3=FOLDER`, `economize-hybrid=FOLDER`: the package economize
(`pip install --no-deps economize`), its EAGLE-3 trained by `examples/economize_eagle3.py`; `=FOLDER:6:0.4` drafts in
cycles of 6 while above 0.4.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner import options

NAMES = {"draft-model": "draft model", "mtp": "multi-token prediction", "dflash": "DFlash"}
_LOADED = ("draft-model", "dflash")  # these need separate weights
_OF_DFLASH = ("target_layer_ids", "block_size", "mask_token_id", "hidden_size")
ECONOMIZE = {"economize-lookup": "lookup", "economize-eagle3": "EAGLE-3", "economize-hybrid": "hybrid"}
CYCLE = 4  # economize's default: tokens of a cycle, one of them the target's

_ECONOMIZE = re.compile(r"(economize-(?:lookup|eagle3|hybrid))(?:=([^:]+))?(?::(\d+)(?::(0?\.\d+))?)?")


def parse_peer(text: str) -> Callable[[Any], Any]:
    """Parses a variant of transformers' own drafting, such as `mtp` or `dflash=FOLDER`."""
    from hf_hsdraft.bench.systems import System
    from hf_hsdraft.core.checks import public_name

    kind, sign, place = text.partition("=")
    name = place if sign else None
    check_name(kind, name)
    title = f"{NAMES[kind]}{f' {public_name(name)}' if name else ''} (transformers)"

    def system(target: Any) -> Any:
        kwargs = generate_kwargs(kind, target, name)
        return System(title, kwargs, draws_as_plain=False, drafts_later=kind != "draft-model")

    return system


def parse_economize(text: str) -> Callable[[Any], Any]:
    """Parses a variant of economize: `economize-eagle3=FOLDER:6:0.4` drafts in cycles of 6, above probability 0.4."""
    from hf_hsdraft.bench.systems import System

    match = _ECONOMIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"unknown variant {text!r}: expected a name such as economize-eagle3=FOLDER:6:0.4")
    kind, folder, cycle, confidence = match.groups()
    if (folder is None) != (kind == "economize-lookup"):
        raise ValueError(f"variant {text!r}: " + ("a lookup has no folder" if folder else f"write {kind}=FOLDER"))
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"variant {text!r}: no such folder: {folder}")
    check_economize()
    length, stop = int(cycle or CYCLE), None if confidence is None else float(confidence)
    title = f"economize {ECONOMIZE[kind]}, cycle {length}" + ("" if stop is None else f", above {stop}")

    def system(target: Any) -> Any:
        generate = economize_generate(kind, target, Path(folder) if folder else None, length, stop)
        return System(title, generate=generate, draws_as_plain=False)

    return system


def check_name(kind: str, name: str | None) -> None:
    """Raises a ValueError if a peer lacks the weights it needs, or is given weights it does not take.

    `kind` is one of `NAMES`, `name` a folder or Hub name.
    """
    if (not name) if kind in _LOADED else (name is not None):
        raise ValueError(
            f"variant {kind!r}: write {kind}=FOLDER, or the name of a model on the Hub"
            if kind in _LOADED
            else f"variant {kind!r} has no folder: its layers are the target's own"
        )
    if name is not None and not os.path.isdir(name) and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"variant {kind!r}: no such folder: {name}")


def generate_kwargs(kind: str, target: Any, name: str | None) -> dict[str, Any]:
    """Returns the arguments of `generate()` for a peer of `NAMES`; `name` is the folder or Hub name of its weights.

    Raises an OSError if they are missing, a ValueError if they do not fit the target or the target has none for it.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    if kind == "mtp":
        _check_mtp(target)
        return {"use_mtp": True}
    auto = AutoModel if kind == "dflash" else AutoModelForCausalLM
    drafter = auto.from_pretrained(name, dtype=target.dtype).to(target.device).eval()
    if kind == "dflash":
        _check_dflash(target, drafter)
        return {"assistant_model": drafter, "speculation_type": "dflash"}
    own, other = (model.config.get_text_config().vocab_size for model in (target, drafter))
    if own != other:
        raise ValueError(
            f"variant 'draft-model': the model has a vocabulary of {other:,} tokens, the target one of {own:,}; "
            "expected a draft model with the target's own tokenizer"
        )
    return {"assistant_model": drafter}


def _check_mtp(target: Any) -> None:
    """Raises a ValueError if the target's checkpoint has no layers for it (DeepSeek-V3, section 2.2).

    transformers reads them in every call. Here they are read once and dropped, to say what is missing.
    """
    from transformers.modeling_layers import MtpModel

    if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
        raise ValueError(
            "variant 'mtp': the target's configuration has no `num_mtp_layers`, or 0: its checkpoint brings no layers "
            "for multi-token prediction"
        )
    try:
        MtpModel.from_pretrained(target)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"variant 'mtp': the target's layers for it cannot be read: {error}") from error


def _check_dflash(target: Any, drafter: Any) -> None:
    """Raises a ValueError if a model does not fill blocks of tokens from hidden states of this target."""
    config, own = drafter.config, target.config.get_text_config()
    missing = [field for field in _OF_DFLASH if getattr(config, field, None) is None]
    if missing:
        raise ValueError(
            f"variant 'dflash': {type(drafter).__name__} is no DFlash drafter: its configuration has no "
            f"{', '.join(missing)}"
        )
    wrong = []
    if config.hidden_size != own.hidden_size:
        wrong.append(f"hidden_size {config.hidden_size} instead of {own.hidden_size}")
    if max(config.target_layer_ids) >= own.num_hidden_layers:
        wrong.append(f"layer {max(config.target_layer_ids)} of {own.num_hidden_layers}")
    if config.mask_token_id >= own.vocab_size:
        wrong.append(f"mask_token_id {config.mask_token_id} beyond the vocabulary of {own.vocab_size:,}")
    if wrong:
        raise ValueError(f"variant 'dflash': the drafter is for another target: {'; '.join(wrong)}")


def check_economize() -> None:
    if importlib.util.find_spec("economize") is None:
        raise ImportError("the comparison needs economize: pip install --no-deps economize")


def economize_generate(
    kind: str, target: Any, folder: Path | None, cycle_length: int, min_confidence: float | None
) -> Any:
    """Returns what decodes with a target by economize, in place of its `generate()`.

    `folder` was written by `economize.save`, with an EAGLE-3 or, for the hybrid, a hybrid; None for the lookup. A cycle
    includes the target's token. Drafting stops below the probability `min_confidence`. Raises an ImportError if
    economize is not installed, and a ValueError if the folder holds another technique.
    """
    check_economize()
    import economize
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from hf_hsdraft.runtime.prompt_inputs import end_tokens

    model = _economize_model(kind, target, folder)
    ends = end_tokens(target)

    def generate(
        input_ids: Any, attention_mask: Any, streamer: Any, max_new_tokens: int, temperature: float = 0.0, **_: Any
    ) -> SimpleNamespace:
        waiting, forwards, rows = [True], list[None](), len(input_ids)
        streamer.put(input_ids)

        def ends_text(text: Any) -> bool:  # economize calls it after every token
            if waiting:
                waiting.clear()
                streamer.put(torch.zeros(rows))
            return int(text[-1]) in ends

        sampler = economize.TopPSampler(temperature, seed=torch.initial_seed()) if temperature > 0 else None
        options = economize.DecodeConfig(
            cycle_length=cycle_length, min_confidence=min_confidence, verifier="rejection" if sampler else None
        )
        prompts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        layers = getattr(target.base_model, "layers", [target])
        with layers[0].register_forward_pre_hook(lambda *_: forwards.append(None)):
            results = model.decode_batch(prompts, max_new_tokens, decoding=options, selector=sampler, stop=ends_text)
        accepted = [count for each in results for _, count in each.acceptance]
        if rows == 1:  # rounds without a draft, which accepted nothing, are not told
            accepted += [0] * (len(forwards) - 1 - len(accepted))
        end = next(iter(ends), 0)
        new = pad_sequence([torch.as_tensor(each.tokens) for each in results], batch_first=True, padding_value=end)
        return SimpleNamespace(sequences=torch.cat([input_ids, new.to(input_ids)], dim=1), accepted=accepted)

    return generate


def _economize_model(kind: str, target: Any, folder: Path | None) -> Any:
    import economize
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    if kind == "economize-lookup":
        return economize.apply(target, LookupConfig()).eval()
    assert folder is not None
    checkpoint = economize.read_checkpoint(folder)
    config, found = checkpoint.configs[0], checkpoint.configs[0].technique
    if found not in (("eagle3",) if kind == "economize-eagle3" else ("eagle3", "hybrid")):
        raise ValueError(f"{folder} holds {found!r} of economize; {kind} expects an EAGLE-3")
    # The target's dtype, as for our drafter; the default is float32.
    if found == "hybrid":
        config = replace(config, fallback=replace(config.fallback, param_dtype="model"))
    else:
        config = replace(config, param_dtype="model")
        config = HybridConfig(fallback=config) if kind == "economize-hybrid" else config
    model = economize.apply(target, config)
    technique = model.techniques[config.technique]
    (technique.fallback if config.technique != found else technique).load_state_dict(checkpoint.states[found])
    return model.eval()


def register() -> None:
    """Makes the variants known to `hsdraft bench`."""
    from hf_hsdraft.bench.systems import OTHERS

    OTHERS.update(dict.fromkeys(NAMES, parse_peer) | dict.fromkeys(ECONOMIZE, parse_economize))


def main(argv: Sequence[str] | None = None) -> None:
    _, given = options(__doc__).parse_known_args(argv)
    register()
    from hf_hsdraft.cli.main import app

    app(["bench", *given])


if __name__ == "__main__":
    sys.exit(main())
