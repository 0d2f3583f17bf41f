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
    """Nodes that the first layers have read in a round."""

    batch: TreeBatch  # the m nodes of each row
    states: torch.Tensor  # `[B, m, D]`, hidden states after the first layers
    keys_values: KeysValues
    columns: Sequence[Mapping[Path, int]]  # for each row, the column of a node by its path; idle nodes have none
    kept: Sequence[int]  # where the texts stood, see `TextRows.kept`

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
    ) -> tuple[TreeBatch, list[dict[Path, int]]]:
        """Returns the batch with the unread nodes of trees appended, and the columns of all nodes by their paths.

        Unseen roots pad shorter rows.
        """
        before, most = self.batch.tokens.shape[1], max(map(len, unread))
        tokens, depths, seen, columns = [], [], [], []
        for tree, own, known, rest in zip(trees, paths, self.columns, unread, strict=True):
            places = {**known, **{own[node]: before + index for index, node in enumerate(rest)}}
            nodes = [*rest, *[0] * (most - len(rest))]
            tokens.append([tree.tokens[node] for node in nodes])
            depths.append([tree.depths[node] for node in nodes])
            rows = [{places[own[node][:end]] for end in range(1, len(own[node]) + 1)} for node in rest]
            rows += [{before + index} for index in range(len(rest), most)]
            seen.append([[column in row for column in range(before + most)] for row in rows])
            columns.append(places)
        old, device = self.batch, self.batch.tokens.device
        batch = TreeBatch(
            torch.cat([old.tokens, on_device(tokens, device)], dim=1),
            torch.cat([old.depths, on_device(depths, device)], dim=1),
            torch.cat([pad(old.ancestors, (0, most)), on_device(seen, device, torch.bool)], dim=1),
        )
        return batch, columns

    def places(self, paths: Sequence[Sequence[Path]], width: int) -> torch.Tensor:
        """Returns the column of each node of trees, `[B, width]`; roots pad shorter rows."""
        rows = [[known[path] for path in own] for own, known in zip(paths, self.columns, strict=True)]
        return on_device([[*row, *[row[0]] * (width - len(row))] for row in rows], self.batch.tokens.device)


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
