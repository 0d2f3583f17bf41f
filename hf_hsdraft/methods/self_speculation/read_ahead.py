"""What a target's first layers have read of drafts before the drafts are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ...core.draft_tree import DraftTree
from ...core.tensors import on_device
from ...runtime.tree_reading import TreeBatch

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, `[B, heads, nodes, size]` each
Path = tuple[int, ...]  # the tokens from the root to a node


@dataclass(frozen=True)
class ReadAhead:
    """Nodes that the first layers have read in a round.

    Attributes:
        batch: the m nodes of each row.
        states: `[B, m, D]`, hidden states after the first layers.
        columns: for each row, the column of a node by its path. Idle nodes have none.
        kept: where the texts stood, see `TextRows.kept`.
    """

    batch: TreeBatch
    states: torch.Tensor
    keys_values: KeysValues
    columns: Sequence[Mapping[Path, int]]
    kept: Sequence[int]

    def count(self, trees: Sequence[DraftTree]) -> int:
        return sum(path in known for tree, known in zip(trees, self.columns, strict=True) for path in node_paths(tree))

    def unread(self, paths: Sequence[Sequence[Path]]) -> list[list[int]]:
        """Returns the nodes of each row's tree that were not read, given the paths of all its nodes."""
        return [
            [node for node, path in enumerate(own) if path not in known]
            for own, known in zip(paths, self.columns, strict=True)
        ]

    def with_nodes(
        self, trees: Sequence[DraftTree], paths: Sequence[Sequence[Path]], unread: Sequence[Sequence[int]]
    ) -> TreeBatch:
        """Returns the batch with the unread nodes of trees appended. Unseen roots pad shorter rows."""
        before, most = self.batch.tokens.shape[1], max(map(len, unread))
        tokens, depths, seen = [], [], []
        for tree, own, known, rest in zip(trees, paths, self.columns, unread, strict=True):
            spare = most - len(rest)
            place = {own[node]: before + index for index, node in enumerate(rest)}
            tokens.append([*(tree.tokens[node] for node in rest), *[tree.tokens[0]] * spare])
            depths.append([*(tree.depths[node] for node in rest), *[tree.depths[0]] * spare])
            rows = [_ancestors(own[node], known, place, before + most) for node in rest]
            alone = [[column == before + index for column in range(before + most)] for index in range(len(rest), most)]
            seen.append(rows + alone)
        old, device = self.batch, self.batch.tokens.device
        return TreeBatch(
            torch.cat([old.tokens, on_device(tokens, device)], dim=1),
            torch.cat([old.depths, on_device(depths, device)], dim=1),
            torch.cat([pad(old.ancestors, (0, most)), on_device(seen, device, torch.bool)], dim=1),
        )

    def places(self, paths: Sequence[Sequence[Path]], unread: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
        """Returns the column of each node of trees, `[B, columns]`; the unread ones are at the end."""
        count, places = self.batch.tokens.shape[1], []
        for own, known, rest in zip(paths, self.columns, unread, strict=True):
            new = {node: count + index for index, node in enumerate(rest)}
            row = [new[node] if node in new else known[path] for node, path in enumerate(own)]
            places.append([*row, *[row[0]] * (columns - len(row))])
        return on_device(places, self.batch.tokens.device)


def node_paths(tree: DraftTree) -> list[Path]:
    """Returns the tokens from the root to each node of a tree."""
    paths: list[Path] = [(tree.tokens[0],)]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def columns_of(batch: TreeBatch, parents: Sequence[Sequence[int]]) -> list[dict[Path, int]]:
    """Returns for each row the column of a node by its path, without idle nodes: these were read as something else.

    `parents` are the columns of the nodes' parents; -1 for a root.
    """
    columns: list[dict[Path, int]] = []
    for tokens, depths, above in zip(batch.tokens.tolist(), batch.depths.tolist(), parents, strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, above, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        columns.append({path: column for column, path in enumerate(paths) if depths[column] >= 0})
    return columns


def gathered(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values `[B, heads, n, size]` at some nodes `[B, n]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _ancestors(path: Path, known: Mapping[Path, int], new: Mapping[Path, int], columns: int) -> list[bool]:
    """Returns which columns the last node of a path sees: its ancestors and itself."""
    seen = [False] * columns
    for end in range(1, len(path) + 1):
        part = path[:end]
        seen[known[part] if part in known else new[part]] = True
    return seen
