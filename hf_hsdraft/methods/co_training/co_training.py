"""Trains a drafter beside its target: while the target learns from its roll-outs, the drafter learns from them too."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from ...core.checks import demand
from ...drafters.base.target_weights import TargetWeights, borrow
from ...training.data.conversations import TokenizedConversation
from ...training.data.features import Features, read_features
from ...training.families.trainable import family_of
from ...training.loss.chains import Pack, sample_chains, true_labels, unroll
from ...training.loss.loss import CHUNK_LOGITS, ChainLoss
from ...training.loss.objectives import OBJECTIVES, only_objective


class CoTraining(TrainerCallback):
    """Updates a drafter on the roll-outs of GRPO or a similar training, every few steps of it.

    Each update uses the target's current hidden states, embeddings and output rows. The target gets no gradients, and
    its mode and the RNG are restored. The roll-outs come from a reward function that `recording` has wrapped. Each
    process updates its own drafter; use it in one process, or the drafters diverge.

    Args:
        target: the trained model, without wrappers other than PEFT's.
        drafter: its drafter in float32, of a family that can be trained; usually the attached one.
        tokenizer: the target's tokenizer, for the prompts.
        every: number of training steps between updates.
        passes: number of passes of an update over its roll-outs.
        learning_rate: of AdamW, whose state is kept between updates.
        batch_size: number of roll-outs of a gradient step.
        objective: name in `objectives.OBJECTIVES`.
        depth_decay: depth d weighs `depth_decay ** d`.
        chains: greatest number of chains of a roll-out, of which half are followed to the last depth.
        chat_template_kwargs: further arguments of the tokenizer's `apply_chat_template`, the same that TRL gets: its
            `chat_template_kwargs`, and `tools` or `chat_template` where the trainer has them.

    `losses` are the mean losses of the updates, in nats. Raises a ValueError for a drafter in another dtype or made for
    another target, and for a number that is too small.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        tokenizer: Any,
        every: int = 4,
        passes: int = 1,
        learning_rate: float = 1e-4,
        batch_size: int = 8,
        objective: str = "forward_kl",
        depth_decay: float = 0.8,
        chains: int = 160,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("every", every), ("passes", passes), ("batch_size", batch_size), ("chains", chains)):
            demand(value >= 1, name, value, "expected 1 or more")
        if drafter.dtype != torch.float32:
            raise ValueError(
                f"the drafter is in {drafter.dtype}, which loses small updates: load it with dtype=torch.float32"
            )
        if only := only_objective(drafter.config):
            raise ValueError(f"this drafter is trained by `hsdraft train --objective {only}` only")
        drafter.check(target)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.every, self.passes, self.batch_size, self.chains = every, passes, batch_size, chains
        self.losses: list[float] = []
        self._template = dict(chat_template_kwargs or {})
        self._objective = OBJECTIVES[objective]
        self._depth_weights = [depth_decay**depth for depth in range(drafter.num_draft_steps)]
        self._optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._fresh: list[TokenizedConversation] = []

    def recording(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a reward function of TRL keep the roll-outs of training steps for the next update.

        The returned function has the same name and the same rewards. It is enough to wrap one of several. A TypeError
        if it is no plain function, but a reward model, a name of one, or an async function.
        """
        if isinstance(reward, str | torch.nn.Module) or inspect.iscoroutinefunction(reward):
            raise TypeError("recording takes a plain reward function: add one that returns [0.0] * len(prompts)")

        @functools.wraps(reward)
        def recorded(prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> Any:
            if self.target.training:  # not an evaluation
                for prompt, completion in zip(prompts, completion_ids, strict=True):
                    self.add(self._prompt_ids(prompt), completion)
            return reward(prompts=prompts, completion_ids=completion_ids, **kwargs)

        return recorded

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> None:
        """Keeps a roll-out, the token ids of prompt and completion, for the next update."""
        answer = [False] * len(prompt_ids) + [True] * len(completion_ids)
        if len(answer) > 2 and any(answer[2:]):  # a chain predicts x_2 at the earliest
            ids = torch.tensor([*prompt_ids, *completion_ids])
            self._fresh.append(TokenizedConversation(ids, torch.tensor(answer)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and self._fresh:
            self.update()

    def update(self) -> float:
        """Trains the drafter on the kept roll-outs and drops them; returns the mean loss of the gradient steps in nats.

        A ValueError if no roll-outs were kept.
        """
        if not self._fresh:
            raise ValueError("there are no roll-outs to learn from: wrap a reward function with `recording`")
        batches = [self._fresh[at : at + self.batch_size] for at in range(0, len(self._fresh), self.batch_size)]
        self._fresh = []
        layers = family_of(self.drafter).taps(self.drafter, self.target)
        modes = {module: module.training for module in self.target.modules()}
        self.target.eval()
        try:
            features = [
                read_features(self.target, layers, batch, self.drafter.device, torch.float32) for batch in batches
            ]
        finally:
            for module, training in modes.items():
                module.training = training
        weights, loss = self._loss()
        self.drafter.loss_function = loss
        self.drafter.train()
        try:
            with torch.enable_grad():
                losses = [self._step(batch, weights, seed) for seed in range(self.passes) for batch in features]
        finally:
            self.drafter.eval()
            self.drafter.loss_function = None
        self.losses.append(sum(losses) / len(losses))
        return self.losses[-1]

    def _loss(self) -> tuple[TargetWeights, ChainLoss]:
        """What the drafter borrows of the target now, and the loss with it."""
        embedding, head = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        device = self.drafter.device
        with torch.no_grad():
            weights = self.drafter.borrow(embedding, head)
            rows = borrow(embedding, head, weights.vocab_ids, device, torch.float32).head
        assert rows is not None
        names = () if device.type == "cpu" else ("chunk_logits", "scored_logits")
        chunks: Any = dict.fromkeys(names, CHUNK_LOGITS["cuda"])
        return weights, ChainLoss(weights, rows, self._objective, self._depth_weights, **chunks)

    def _step(self, batch: Sequence[Features], weights: TargetWeights, seed: int) -> float:
        pack = Pack.of(batch).to(self.drafter.device, torch.float32)
        seeds = [zlib.crc32(text.input_ids.cpu().numpy().tobytes()) + seed for text in batch]
        chains = sample_chains(pack, self.chains, 0.5, seeds)
        labels = true_labels(pack, chains, self.drafter.num_draft_steps)
        predictions = family_of(self.drafter).predictions(self.drafter, weights)
        loss = unroll(self.drafter, predictions, pack, chains, labels.tokens, labels).loss.loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a text, or of a list of messages in the chat template."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **self._template)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


__all__ = ["CoTraining"]
