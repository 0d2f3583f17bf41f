"""Drafts for the vision-language model of tiny_vlm.py: trains drafters on its own answers, and measures them.

    python examples/tiny_vlm_drafting.py train tiny_vlm --family self --draft-layers 8 --out vlm_self8
    python examples/tiny_vlm_drafting.py measure tiny_vlm --drafters vlm_self8 --pictures 200

The trainer is that of `hsdraft train`; only the hidden states differ, which are those of prompts with pictures.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tiny_vlm
import torch

from hf_hsdraft import AutoDrafter
from hf_hsdraft.methods.distillation.lm_training import LMFamily
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.data.vocabulary import choose_draft_vocabulary
from hf_hsdraft.training.families.trainable import TRAINABLE, trainable
from hf_hsdraft.training.loop.arguments import training_arguments
from hf_hsdraft.training.loop.trainer import DrafterTrainer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
NEW_TOKENS = 24
# Language models as drafters read only tokens, so they would not see the picture.
FAMILIES = sorted(name for name, family in TRAINABLE.items() if not isinstance(family, LMFamily))


@torch.inference_mode()
def answered(model: Any, tokenizer: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Returns pixels, token ids and prompt length of questions that the model has answered, 16 at a time."""
    found = []
    for start in range(0, count, 16):
        asked = tiny_vlm.examination(min(16, count - start), seed=5_000_000 + start)
        prompts = [tiny_vlm.encode(tokenizer, ask)[0] for _, ask, _, _ in asked]
        longest = max(map(len, prompts))
        ids = torch.full((len(asked), longest), tokenizer.eos_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        pixels = torch.stack([each for _, _, each, _ in asked]).to(model.dtype)
        output = model.generate(
            input_ids=ids, attention_mask=mask, pixel_values=pixels, max_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        for row, prompt in enumerate(prompts):
            answer = output[row, longest:].tolist()
            end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
            found.append((pixels[row], torch.cat([prompt, torch.tensor(answer[:end])]), len(prompt)))
    return found


def conversation(ids: torch.Tensor, prompt: int) -> TokenizedConversation:
    """Returns an answered question in the form that training takes.

    Args:
        ids: `[length]`, int64, tokens of question and answer.
        prompt: number of tokens of the question.
    """
    return TokenizedConversation(ids, torch.arange(len(ids)) >= prompt)


def train(folder: Path, out: Path, family_name: str, fields: dict[str, Any], pictures: int, minutes: float) -> None:
    """Trains a drafter of a family on the model's own answers, and saves it."""
    model, tokenizer = tiny_vlm.load(folder)
    family = trainable(family_name, fields)
    family.config_for(model, fields)  # wrong fields are errors before any picture is answered
    chats = answered(model, tokenizer, pictures)
    texts = [conversation(ids, prompt) for _, ids, prompt in chats]
    vocabulary = model.config.get_text_config().vocab_size

    def choose() -> list[int]:
        size = fields.get("draft_vocab_size", vocabulary // 4)
        return choose_draft_vocabulary(texts, vocabulary, size, [tokenizer.eos_token_id]).ids

    torch.manual_seed(0)
    drafter = family.fresh(model, fields, 128, choose)
    taps = tuple(family.taps(drafter, model))
    read = [
        read_features(model, taps, [text], inputs={"pixel_values": pixels[None]})[0]
        for text, (pixels, _, _) in zip(texts, chats, strict=True)
    ]
    family.start_from_target(drafter, model, torch.cat([each.final for each in read[:64]]).float())
    held_out = max(8, pictures // 20)
    arguments = {
        **family.arguments, "max_training_minutes": minutes, "per_device_train_batch_size": 16, "eval_steps": 10**6,
        "logging_steps": 20, "load_best_model_at_end": False, "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }  # fmt: skip
    args = training_arguments(out, arguments, "cpu")
    trainer = DrafterTrainer(
        drafter, args, target=model, train_dataset=read[held_out:], eval_dataset=read[:held_out],
        budget=tiny_budget(minutes), report=None,
    )  # fmt: skip
    trainer.train()
    drafter.loss_function = None
    drafter.to(torch.bfloat16).save_pretrained(out)


def tiny_budget(minutes: float) -> Any:
    """Returns the clock that ends training."""
    from hf_hsdraft.training.loop.budget import TimeBudget

    return TimeBudget(minutes)


def measure(folder: Path, names: list[str], pictures: int, options: dict[str, Any]) -> list[Any]:
    """Prints whether answers are those of plain decoding, tau, speed-up, and how many answers are right.

    Returns what was measured of each drafter.
    """
    from layer_reuse import COLUMNS, compare
    from runner import table_head, table_row

    model, tokenizer = tiny_vlm.load(folder)
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    asked = tiny_vlm.examination(pictures)
    inputs = [tiny_vlm.inputs_of(tokenizer, ask, pixels, model.dtype) for _, ask, pixels, _ in asked]
    print(table_head(COLUMNS))
    measured = []
    for name in names:
        drafter = AutoDrafter.from_pretrained(name, dtype=model.dtype).eval()
        found = compare(model, drafter, inputs, NEW_TOKENS, **options)
        measured.append(found)
        print(table_row([name, *found.cells()]), flush=True)
        for way in ("plain", "reuse"):
            right: Counter[str] = Counter()
            for (kind, _, _, words), text in zip(asked, found.texts[way], strict=True):
                right[kind] += words in tokenizer.decode(text, skip_special_tokens=True)
            print("plain decoding:" if way == "plain" else "drafted:")
            tiny_vlm.print_accuracy(Counter(kind for kind, *_ in asked), right)
    return measured


def main() -> None:
    random.seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a drafter on the model's own answers")
    command.add_argument("folder", type=Path)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--family", choices=FAMILIES, default="self")
    command.add_argument("--draft-layers", type=int, help="with --family self: number of first layers that draft")
    command.add_argument("--num-draft-steps", type=int, default=5)
    command.add_argument("--draft-vocab-size", type=int, default=2048)
    command.add_argument("--pictures", type=int, default=600)
    command.add_argument("--max-minutes", type=float, default=4.0)
    command = commands.add_parser("measure", help="measure drafters")
    command.add_argument("folder", type=Path)
    command.add_argument("--drafters", nargs="+", required=True)
    command.add_argument("--pictures", type=int, default=200)
    command.add_argument("--beam-width", type=int, default=1, help="1 drafts chains")
    command.add_argument("--tree-size", type=int)
    given = parser.parse_args()
    if given.command == "train":
        fields = {"num_draft_steps": given.num_draft_steps, "draft_vocab_size": given.draft_vocab_size}
        fields |= {"tree_size": max(16, given.num_draft_steps)}
        fields |= {} if given.draft_layers is None else {"draft_layers": given.draft_layers}
        train(given.folder, given.out, given.family, fields, given.pictures, given.max_minutes)
    else:
        options = {"beam_width": given.beam_width, "tree_sizing": "fixed", "ngram_length": 0}
        options |= {} if given.tree_size is None else {"tree_size": given.tree_size}
        measure(given.folder, given.drafters, given.pictures, options)


if __name__ == "__main__":
    main()
