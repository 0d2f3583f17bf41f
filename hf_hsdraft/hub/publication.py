"""The repository that a saved drafter becomes.

    config.json, generation_config.json     sizes, target, digests, the map to the code; drafting options
    model.safetensors                       weights
    refiner/ and others                     files of methods, see `METHOD_FILES`
    custom_generate/                        the code, for use without the package
    training_recipe.json, figures.json      how it was trained, what was measured
    README.md, *.png                        the card, made of those

Nothing else is pushed: no training state, local path or user name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..core.checks import FORMAT_VERSION, public_name
from .code_files import PLACE, former_code, stands_alone, write_code
from .code_files import RECIPE as GENERATE
from .drafter_files import (
    CARD,
    CONFIG,
    DOCUMENTS,
    INDEX,
    METHOD_FILES,
    RECIPE,
    WEIGHTS,
    check_is_drafter,
    digests,
    read_json,
    tensors,
    type_in,
)
from .model_card import is_generated, write_card

logger = logging.get_logger(__name__)

REQUIREMENTS = "transformers>=5.23\ntransformers<5.25\ntorch>=2.6\n"  # of travelling code
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write into; its files replace those in `folder` when all are written, the configuration last.

    A process that has old files open or mapped keeps them. Files of a former drafter, code included, that the new one
    lacks are deleted; all other files stay.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; a drafter is saved into a folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield partial
        written = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for path in written:
            if (folder / path).is_dir() or (folder / path).parent.is_file():
                raise OSError(f"{folder / path} cannot be written: something of that name is in the way")
        former = _is_drafter(folder, type_in(read_json(partial / CONFIG)))
        code = former_code(folder) if former else ()
        for path in sorted(written, key=lambda path: path.name == CONFIG):  # the digests last
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / path, folder / path)
        places = (*folder.iterdir(), *(folder / PLACE).glob("*.py"), *(folder / name for name in METHOD_FILES))
        for path in places if former else ():
            name = path.relative_to(folder)
            if name not in written and is_ours(name.as_posix(), code) and path.is_file():
                path.unlink(missing_ok=True)
                if path.parent != folder and not any(path.parent.iterdir()):
                    path.parent.rmdir()
        for one, other in ((WEIGHTS, INDEX), (INDEX, WEIGHTS)):  # a leftover would be read instead
            if Path(one) in written:
                (folder / other).unlink(missing_ok=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if new and not any(folder.iterdir()):  # nothing was written
            folder.rmdir()


def is_ours(name: str, code: Collection[str]) -> bool:
    """Whether a file of a repository belongs to a drafter: weights, files of methods, documents, or its `code`."""
    ours = (WEIGHTS, INDEX, *METHOD_FILES, *DOCUMENTS)
    return name in ours or name in code or bool(_SHARD.fullmatch(name))


def complete(drafter: Any, partial: Path, folder: Path) -> None:
    """Adds the rest of the repository to configuration, options and weights that were saved in `partial`.

    The recipe of the folder that a drafter was loaded from comes along, and its figures if the weights are the same. A
    hand-written card in `folder`, the destination, stays. The drafter's configuration gets the digests of the weights
    and the names of the code files.
    """
    config, source = drafter.config, drafter.loaded_from
    config.weights_digest = digests(partial)
    config.format_version = FORMAT_VERSION
    config.target_name = public_name(getattr(config, "target_name", ""))
    place = partial / PLACE
    place.mkdir(exist_ok=True)
    for path in partial.glob("*.py"):  # of a derived class, saved by transformers
        path.rename(place / path.name)
    entry = write_code(drafter.family(), place)
    config.auto_map = drafter.code_map(entry)  # replaces another repository's
    if drafter.taps and not hasattr(config, "target_tap_layers"):
        config.reads_states = True  # for the card
    config.code_files = sorted(path.name for path in place.glob("*.py"))
    config.save_pretrained(partial)
    needed = REQUIREMENTS + ("" if stands_alone(config.auto_map) else "hf-hsdraft\n")
    if (place / "generate.py").exists():
        raise ImportError(
            "code that travels with a drafter needs another file name than generate.py: that is a recipe's"
        )
    shutil.copyfile(GENERATE, place / "generate.py")
    (place / "requirements.txt").write_text(needed, encoding="utf-8")
    if source is not None and _is_drafter(source, config.model_type):
        bring_known(source, partial)
    elif _is_drafter(folder, config.model_type) and _same_weights(folder, partial):
        bring_known(folder, partial)
    card = folder / CARD
    if card.is_file() and not is_generated(card):  # a hand-written card stays, whatever the weights
        shutil.copyfile(card, partial / CARD)
    write_card(partial, folder.resolve().name)


def bring_known(source: Path, partial: Path) -> None:
    """Copies a drafter's documents and files of methods.

    After a change of its weights, only the recipe of its documents comes along, and all files of methods: these fit the
    vocabulary, or belong to the target.
    """
    documents = [name for name in DOCUMENTS if (source / name).is_file()]
    if not _same_weights(source, partial):
        if left := [name for name in documents if name not in (CARD, RECIPE)]:
            about = f"its {', '.join(left)} are about others and stay behind"
            logger.warning(f"the weights are not those of {source}: {about}")
        if RECIPE in documents:
            recipe = {**read_json(source / RECIPE), "changed_since": True}
            (partial / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        documents = []
    for name in (*documents, *METHOD_FILES):
        if (source / name).is_file():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, partial / name)


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same values, in any files and dtypes."""
    try:
        first, second = tensors(one), tensors(other)
    except (OSError, ValueError):
        return False
    return first.keys() == second.keys() and all(
        torch.equal(tensor.float(), second[name].float()) for name, tensor in first.items()
    )


def _is_drafter(folder: Path, model_type: str | None) -> bool:
    try:
        check_is_drafter(folder, model_type)
    except (OSError, ValueError):
        return False
    return True
