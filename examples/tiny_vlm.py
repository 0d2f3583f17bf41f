"""Trains a small vision-language model of transformers' LLaVA classes, and measures its accuracy.

The language model is SmolLM2-135M-Instruct; a vision encoder of a few layers and a connector are new. Pictures of
64 x 64 pixels show one to four coloured shapes and digits; the questions are about colours, kinds, places and numbers.
Training has two parts:

1. Encoder and connector learn to make the visual tokens a caption, in the embeddings of the language model: for each
   of four places its row, its column, and the colour and kind of the thing there. The language model is not run, so
   this is quick.
2. The language model learns to answer questions in sentences, by low-rank updates that are merged at the end.

    python examples/tiny_vlm.py train --out tiny_vlm --max-minutes 20
    python examples/tiny_vlm.py measure tiny_vlm

Minutes are processor time: for one thread with a core to itself, wall-clock minutes. The same command resumes an
interrupted run from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_vlm_pictures import (
    COLOURS,
    DIGITS,
    KINDS,
    PLACES,
    SHAPES,
    SIZE,
    Thing,
    draw,
    question,
    questions,
    scene,
)  # fmt: skip
from transformers import AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from hf_hsdraft.runtime.target_loading import load_target

PATCH = 16  # pixels along a side
VISUAL_TOKENS = (SIZE // PATCH) ** 2
IMAGE_TOKEN = "<file_sep>"  # a token of SmolLM2 that these texts do not use
CHANCE = {"colour": 1 / len(COLOURS), "kind": 1 / len(SHAPES), "place": 1 / 4, "count": 1 / 4, "digit": 1 / 10}
NOTHING = "nothing"
SEEING = ("model.vision_tower.", "model.multi_modal_projector.")  # all but the language model
PICTURES, QUESTIONS = 8, 2  # per step; with more questions, earlier answers could give away later ones


# --- the model -------------------------------------------------------------------------------------------------------


def build(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns an untrained vision-language model around SmolLM2-135M-Instruct, and its tokenizer.

    Args:
        dtype: of all its weights.
    """
    language, tokenizer = load_target(None, torch.float32, "cpu")
    vision = SiglipVisionConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=3, image_size=SIZE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=language.config, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=VISUAL_TOKENS, vision_feature_select_strategy="full", vision_feature_layer=-1,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.generation_config = language.generation_config
    return model.to(dtype), tokenizer


def visual_tokens(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Returns the visual tokens of pictures, `[B, 16, D]`.

    Args:
        model: the vision-language model.
        pixels: `[B, 3, 64, 64]`, float, from -1 to 1.
    """
    return torch.stack(list(model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output))


def encode(tokenizer: Any, asked: str) -> torch.Tensor:
    """Returns the token ids of a question about one picture, `[1, length]`, int64; 16 stand for the picture."""
    return torch.tensor([tokenizer.encode(f"{IMAGE_TOKEN * VISUAL_TOKENS}Q: {asked} A:")])


def dialogue(tokenizer: Any, asked: list[tuple[str, str, str]]) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a dialogue about one picture, and a mask of those that are learned, the answers.

    Args:
        tokenizer: of the language model.
        asked: questions with their answers, as `questions` returns them.
    """
    ids, learned = tokenizer.encode(IMAGE_TOKEN * VISUAL_TOKENS), [False] * VISUAL_TOKENS
    for ask, answer, _ in asked:
        prompt, text = tokenizer.encode(f"Q: {ask} A:"), [*tokenizer.encode(f" {answer}"), tokenizer.eos_token_id]
        ids += prompt + text
        learned += [False] * len(prompt) + [True] * len(text)
    return ids, learned


# --- training --------------------------------------------------------------------------------------------------------


class Captions:
    """The words of the visual tokens, four per place: its row, its column, and colour and kind of the thing there.

    The language model reads them like a text, `top left red circle top right nothing nothing ...`. So it answers
    after a few hundred examples. (Tokens that each say all that is at their patch were learned far more slowly.)

    Args:
        tokenizer: of the language model.
        embedding: `[V, D]`, its input embeddings.
    """

    def __init__(self, tokenizer: Any, embedding: torch.Tensor) -> None:
        self.groups = {
            "row": ["top", "bottom"], "column": ["left", "right"], "colour": [*COLOURS, NOTHING],
            "kind": [*SHAPES, *DIGITS, NOTHING],
        }  # fmt: skip
        first = [[tokenizer.encode(f" {word}")[0] for word in group] for group in self.groups.values()]
        self.rows = [embedding[torch.tensor(ids)].float() for ids in first]

    def right(self, things: list[Thing]) -> torch.Tensor:
        """Returns `[4, 4]`, int64: for each place the right word of each group."""
        at = {thing.place: thing for thing in things}
        found = []
        for place, name in enumerate(PLACES):
            thing = at.get(place, Thing(NOTHING, NOTHING, place))
            said = [*name.split(), thing.colour, thing.kind]
            found.append([group.index(word) for group, word in zip(self.groups.values(), said, strict=True)])
        return torch.tensor(found)

    def loss(self, tokens: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns a loss in nats plus a relative squared error, and the share of right words by group, 0 to 1.

        Args:
            tokens: `[B, 16, D]`, float32, visual tokens.
            right: `[B, 4, 4]`, int64, as `right` returns them.
        """
        said, loss, accuracy = tokens.unflatten(1, (len(PLACES), len(self.groups))), tokens.new_zeros(()), {}
        for slot, (name, rows) in enumerate(zip(self.groups, self.rows, strict=True)):
            found, goal = said[:, :, slot].flatten(0, 1), right[:, :, slot].flatten()
            logits = found @ rows.T * (10.0 / rows.square().sum(dim=-1).mean())
            loss = loss + F.cross_entropy(logits, goal) + F.mse_loss(found, rows[goal]) / rows.square().mean()
            accuracy[name] = float((logits.argmax(dim=-1) == goal).float().mean())
        return loss, accuracy


@dataclass
class Clock:
    """Training time of all runs together, and times of the last report and checkpoint.

    Attributes:
        limit: seconds of the processor that training may take. What else runs on the machine changes none of it.
        before: those of earlier runs.
        said, saved: when that was last done, on the wall.
    """

    limit: float
    before: float = 0.0
    said: float = 0.0
    saved: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.process_time()
        self.said = self.saved = time.monotonic()

    @property
    def spent(self) -> float:
        return self.before + time.process_time() - self.began

    def due(self, name: str, every: float) -> bool:
        now = time.monotonic()
        if now - getattr(self, name) < every:
            return False
        setattr(self, name, now)
        return True


@dataclass
class Run:
    """A training run.

    Attributes:
        model, tokenizer: the vision-language model. Its parameters that need gradients are what is trained.
        folder: where checkpoints and the model are written.
        clock: how long it has trained.
        rng: decides the pictures and questions.
        part: 1 while visual tokens learn words, 2 while the language model learns answers.
        step: number of steps of this part.
        optimizer: of this part.
    """

    model: Any
    tokenizer: Any
    folder: Path
    clock: Clock
    rng: random.Random
    part: int = 1
    step: int = 0
    optimizer: Any = None

    def save(self) -> None:
        """Writes a checkpoint atomically."""
        own = self.model.named_parameters()
        kept = {name: value.detach() for name, value in own if value.requires_grad or name.startswith(SEEING)}
        state = {
            "weights": kept, "rng": self.rng.getstate(),
            "optimizer": self.optimizer.state_dict(), "spent": self.clock.spent, "part": self.part, "step": self.step,
        }  # fmt: skip
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.rename(self.folder / "checkpoint.pt")


def train(folder: Path, max_minutes: float, words_share: float, rank: int) -> None:
    """Trains, resuming from the last checkpoint; saves the model.

    Args:
        folder: of the run.
        max_minutes: minutes of the processor, both parts together.
        words_share: share of them for the first part.
        rank: of the updates of the language model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    found = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
    model, tokenizer = build()
    run = Run(model, tokenizer, folder, Clock(60 * max_minutes, found["spent"] if found else 0.0), random.Random(1))
    if found:
        run.part, run.step = found["part"], found["step"]
        run.rng.setstate(found["rng"])
    model.requires_grad_(False)
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(True)
    if run.part == 1:
        learn_words(run, words_share, found)
        found, run.part, run.step = None, 2, 0
    learn_answers(run, rank, found, words_share)
    run.model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"saved in {folder} after {run.clock.spent / 60:.1f} minutes of training", flush=True)


def learn_words(run: Run, words_share: float, found: Any) -> None:
    """The first part: visual tokens are a caption.

    Args:
        run: the run, whose model and step are changed.
        words_share: share of the clock's limit for this part, 0 to 1.
        found: checkpoint of this part to go on from; `None` for none.
    """
    model, rng, clock = run.model, run.rng, run.clock
    captions = Captions(run.tokenizer, model.get_input_embeddings().weight.detach())
    trained = [value for value in model.parameters() if value.requires_grad]
    run.optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    restore(run, found)
    limit = words_share * clock.limit
    while clock.spent < limit:
        set_rate(run.optimizer, 1e-3, clock.spent / limit)
        scenes = [scene(rng) for _ in range(64)]
        pixels = torch.stack([draw(things, rng) for things in scenes])
        right = torch.stack([captions.right(things) for things in scenes])
        with torch.autocast("cpu", torch.bfloat16):
            tokens = visual_tokens(model, pixels)
        loss, accuracy = captions.loss(tokens.float(), right)
        take_step(run, loss, trained)
        if clock.due("said", 20.0):
            shown = ", ".join(f"{name} {share:.0%}" for name, share in accuracy.items())
            say(run, f"words: step {run.step}, {64 * run.step:,} pictures, loss {loss.item():.3f}, {shown}")


def learn_answers(run: Run, rank: int, found: Any, words_share: float) -> None:
    """The second part: the language model answers questions. Its updates are merged at the end.

    Encoder and connector stay as they are: trained on, they forget the words before the language model has used them.

    Args:
        run: the run, whose model and step are changed.
        rank: of the updates of the language model.
        found: checkpoint of this part to go on from; `None` for none.
        words_share: share of the clock's limit that the first part had, 0 to 1.
    """
    from peft import LoraConfig, get_peft_model

    language = run.model.model.language_model
    run.model.requires_grad_(False).to(torch.bfloat16)  # the updates stay in float32
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = get_peft_model(language, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linears))
    run.model.model.language_model = adapted.base_model.model
    trained = [value for value in run.model.parameters() if value.requires_grad]
    for value in trained:
        value.data = value.data.float()
    run.optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.98))
    restore(run, found)
    clock, start, each = run.clock, words_share * run.clock.limit, PICTURES * QUESTIONS
    while clock.spent < clock.limit:
        set_rate(run.optimizer, 1e-3, (clock.spent - start) / (clock.limit - start))
        loss, right = answers_loss(run, PICTURES, QUESTIONS)
        take_step(run, loss, trained)
        if clock.due("said", 20.0):
            say(
                run,
                f"answers: step {run.step}, {each * run.step:,} answers, loss {loss.item():.3f}, tokens {right:.0%}",
            )
    adapted.merge_and_unload()
    run.model.model.language_model = adapted.base_model.model
    run.model.requires_grad_(False)


def answers_loss(run: Run, pictures: int, questions_each: int) -> tuple[torch.Tensor, float]:
    """Returns the loss of dialogues about new pictures, in nats a token, and the share of right tokens, 0 to 1.

    Args:
        run: the run.
        pictures: number of pictures, each with a dialogue.
        questions_each: greatest number of questions of a dialogue.
    """
    model, rng = run.model, run.rng
    scenes = [scene(rng) for _ in range(pictures)]
    pixels = torch.stack([draw(things, rng) for things in scenes])
    pairs = [dialogue(run.tokenizer, questions(things, rng, questions_each)) for things in scenes]
    longest = max(len(ids) for ids, _ in pairs)
    pad = run.tokenizer.eos_token_id
    ids = torch.tensor([[*each, *[pad] * (longest - len(each))] for each, _ in pairs])
    learned = torch.tensor([[*each, *[False] * (longest - len(each))] for _, each in pairs])
    with torch.autocast("cpu", torch.bfloat16):
        embeds = model.get_input_embeddings()(ids)
        embeds = torch.cat([visual_tokens(model, pixels).to(embeds.dtype), embeds[:, VISUAL_TOKENS:]], dim=1)
        states = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, :-1][learned[:, 1:]])
    goals = ids[:, 1:][learned[:, 1:]]
    loss = F.cross_entropy(logits.float(), goals)
    return loss, float((logits.argmax(dim=-1) == goals).float().mean())


def take_step(run: Run, loss: torch.Tensor, trained: list[torch.Tensor]) -> None:
    """Takes a step of the optimizer, with gradients of norm 1 at most, and saves once a minute.

    Args:
        run: the run.
        loss: a scalar.
        trained: the parameters that it changes.
    """
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    if run.clock.due("saved", 60.0):
        run.save()


def restore(run: Run, found: Any) -> None:
    """Restores weights and optimizer from a checkpoint of the same part; the clock is restored already."""
    if found is None:
        run.step = 0
        return
    own = dict(run.model.named_parameters())
    for name, value in found["weights"].items():
        own[name].data.copy_(value)
    run.optimizer.load_state_dict(found["optimizer"])
    say(run, f"goes on from step {run.step} of part {run.part}")


def set_rate(optimizer: Any, most: float, done: float) -> None:
    """Sets a learning rate that rises over the first twentieth of the time, then falls as a cosine.

    Args:
        optimizer: whose rate is set.
        most: the greatest rate.
        done: share of the time that is over, 0 to 1.
    """
    done = min(max(done, 0.0), 1.0)
    rate = most * min(1.0, done / 0.05 + 0.02) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate


def say(run: Run, line: str) -> None:
    """Prints a line with the minutes of training so far."""
    print(f"[{run.clock.spent / 60:5.1f} min] {line}", flush=True)


# --- measuring -------------------------------------------------------------------------------------------------------


def load(folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns a trained model and its tokenizer, as `train` has saved them."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def examination(count: int, seed: int = 9_000_000) -> list[tuple[str, str, torch.Tensor, str]]:
    """Returns questions about unseen pictures: kind, question, pixels, and the words that a right answer holds.

    Args:
        count: number of pictures; the kinds of questions take turns.
        seed: of the first picture; each further one has the next number.
    """
    asked = []
    for index in range(count):
        rng, kind = random.Random(seed + index), KINDS[index % len(KINDS)]
        things = scene(rng)
        while kind == "digit" and not any(thing.kind in DIGITS for thing in things):
            things = scene(rng)
        pixels = draw(things, rng)
        ask, _, words = question(things, kind, rng)
        asked.append((kind, ask, pixels, words))
    return asked


def inputs_of(tokenizer: Any, ask: str, pixels: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the inputs of `generate()`, one text.

    Args:
        tokenizer: of the language model.
        ask: the question.
        pixels: `[3, 64, 64]`, from -1 to 1.
        dtype: of the model.
    """
    ids = encode(tokenizer, ask)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels[None].to(dtype)}


def measure(folder: Path, count: int, show: int) -> None:
    """Prints the accuracy on unseen pictures by kind of question, against chance.

    Args:
        folder: of the model.
        count: number of pictures.
        show: number of answers to print.
    """
    model, tokenizer = load(folder)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for index, (kind, ask, pixels, words) in enumerate(examination(count)):
        inputs = inputs_of(tokenizer, ask, pixels, model.dtype)
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        asked[kind] += 1
        right[kind] += words in answer
        if index < show:
            print(f"{ask} ->{answer} [{'right' if words in answer else f'wrong: {words}'}]", flush=True)
    print_accuracy(asked, right)


def print_accuracy(asked: Counter[str], right: Counter[str]) -> None:
    """Prints a table of the share of right answers, by the numbers of questions and right answers of each kind."""
    print("kind      pictures  right  chance")
    for kind in KINDS:
        if asked[kind]:
            print(f"{kind:8}  {asked[kind]:8}  {right[kind] / asked[kind]:5.0%}  {CHANCE[kind]:6.0%}")
    print(f"{'all':8}  {asked.total():8}  {right.total() / asked.total():5.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a model, or resume a run")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--max-minutes", type=float, default=20.0, help="processor minutes")
    command.add_argument("--words-share", type=float, default=0.4, help="share of the time for the first part")
    command.add_argument("--rank", type=int, default=16, help="rank of the language model's updates")
    command = commands.add_parser("measure", help="accuracy on unseen pictures")
    command.add_argument("folder", type=Path)
    command.add_argument("--pictures", type=int, default=200)
    command.add_argument("--show", type=int, default=5, help="answers to print")
    given = parser.parse_args()
    if given.command == "train":
        train(given.out, given.max_minutes, given.words_share, given.rank)
    else:
        measure(given.folder, given.pictures, given.show)


if __name__ == "__main__":
    main()
