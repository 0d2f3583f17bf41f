"""Compiles a decoder layer, in a process for this alone: a compiler in a thread would stop the others for seconds.

    python -m hf_hsdraft.cpu.layer_compiler < request

`layer_programs` makes the request and loads the package that this writes.

The program keeps products and attention as operators, which the process that runs it provides: products that read the
same input are joined, and attention updates the cache. So what is compiled are the norms, activations, rotations and
sums between them, for any number of texts and tokens.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import pickle
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from .grouped_attention import attention_by
from .layer_form import CannotCompile, Form, arguments_of
from .layer_operators import ATTEND, PRODUCT
from .layer_programs import METADATA, Needs

_OPTIONS = {"size_asserts": False, "alignment_asserts": False}
_TEXTS, _TOKENS = 2, 9  # what is compiled is chosen for these numbers, and runs for others


class _Index:
    """Stands for the index of a layer, which nothing but its cache may read."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def _read(self, *_: object) -> Any:
        raise CannotCompile("a layer reads its index")

    __eq__ = __bool__ = __hash__ = _read


class _Product(nn.Module):
    def __init__(self, place: int, size: int) -> None:
        super().__init__()
        self.place, self.size = place, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return PRODUCT(x, self.place, self.size)


class _Recorder:
    """Stands for the cache and its attention while a layer is traced."""

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask, self._given = mask, list[tuple[Any, Any]]()
        self.owners = list[str]()  # names of the modules whose index the cache was given
        self.attended = 0

    def update(self, keys: Any, values: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not isinstance(layer_idx, _Index) or args or kwargs.keys() - {"kwargs"}:  # which no cache of keys reads
            raise CannotCompile("the cache is given more than keys, values and the layer's index")
        self._given.append((keys, values))
        self.owners.append(layer_idx.owner)
        return keys, values

    def attend(self, query: Any, key: Any, value: Any, mask: Any, scaling: float | None) -> Any:
        if not any(key is keys and value is values for keys, values in self._given) or mask is not self._mask:
            raise CannotCompile("attention does not read the cache as it is, under the given mask")
        self.attended += 1
        return ATTEND(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)


def traced(layer: nn.Module, form: Form) -> tuple[fx.GraphModule, list[torch.Tensor], Needs]:
    """A layer as a graph, its example inputs, and what runs it has to know. Replaces parts of the layer."""
    linears = [(name, module) for name, module in layer.named_modules() if type(module) is nn.Linear]
    for place, (name, module) in enumerate(linears):
        layer.set_submodule(name, _Product(place, len(module.weight)))
    for name, module in layer.named_modules():
        if "layer_idx" in vars(module):
            module.layer_idx = _Index(name)
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    # Numbers that are no size of something else: equal ones would be taken for the same variable.
    fixed = {size for weight in weights.values() for size in weight.shape}
    fixed |= {size for each in form for size in each.sizes}
    texts = next(count for count in itertools.count(_TEXTS) if count not in fixed)
    tokens = next(count for count in itertools.count(_TOKENS) if count not in fixed)
    mask = torch.zeros(texts, 1, tokens, tokens)
    recorder, tuples = _Recorder(mask), list[bool]()

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = dict(zip(weights, inputs[: len(weights)], strict=True))
        hidden_states, kwargs = arguments_of(form, inputs[len(held) :], mask, recorder)
        with attention_by(recorder.attend):
            outputs = torch.func.functional_call(layer, held, (hidden_states,), kwargs)
        tuples.append(isinstance(outputs, tuple))
        outputs = outputs if tuples[-1] else (outputs,)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise CannotCompile("a layer returns something else than tensors")
        return outputs

    inputs = [torch.zeros(weight.shape, dtype=weight.dtype) for weight in weights.values()]
    for each in form:
        if each.dtype is not None:
            inputs.append(torch.zeros((1 if each.shared else texts), tokens, *each.sizes, dtype=each.dtype))
    graph = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    _check_sizes(graph, len(weights))
    if recorder.attended != 1 or len(recorder.owners) != 1:
        raise CannotCompile("a layer attends several times, or not by sdpa")
    products = [[linears[place][0] for place in group] for group in _join(graph)]
    return graph, inputs, Needs(list(weights), products, recorder.owners[0], tuples[-1])


def _check_sizes(graph: fx.GraphModule, count: int) -> None:
    """Refuses a graph that holds for some numbers of texts or tokens only. `count` inputs are weights."""
    placeholders = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    sizes = [size for value in placeholders[count:] for size in value.shape[:2] if isinstance(size, torch.SymInt)]
    free = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    guards = placeholders[-1].fake_mode.shape_env.guards
    if not free or any(guard.expr.free_symbols & free for guard in guards):
        raise CannotCompile("it depends on the number of texts or tokens")


def _join(graph: fx.GraphModule) -> list[list[int]]:
    """Replaces products of one input by a single one, and numbers these; returns what each joins."""
    nodes, groups = graph.graph, defaultdict[Any, list[fx.Node]](list)
    for node in nodes.find_nodes(op="call_function", target=PRODUCT):
        groups[node.args[0]].append(node)
    for place, (x, parts) in enumerate(groups.items()):
        sizes: list[Any] = [part.args[2] for part in parts]
        with nodes.inserting_before(parts[0]):
            whole = nodes.call_function(PRODUCT, (x, place, sum(sizes)))
            pieces = nodes.call_function(torch.ops.aten.split_with_sizes.default, (whole, sizes, -1))
            for index, part in enumerate(parts):
                part.replace_all_uses_with(nodes.call_function(operator.getitem, (pieces, index)))
    joined: list[list[Any]] = [[part.args[1] for part in parts] for parts in groups.values()]
    for part in [part for parts in groups.values() for part in parts]:
        nodes.erase_node(part)
    graph.recompile()
    return joined


def compile_layer(layer: nn.Module, form: Form, package: Path) -> None:
    """Writes the program of a layer, whose weights are empty, as `package`."""
    with torch.no_grad():
        graph, inputs, needs = traced(layer, form)
        texts, tokens = torch.export.Dim("texts", min=2), torch.export.Dim("tokens", min=2)
        axes = [{1: tokens} if each.shared else {0: texts, 1: tokens} for each in form if each.dtype is not None]
        shapes = [*([None] * (len(inputs) - len(axes))), *axes]
        exported = torch.export.export(graph, tuple(inputs), dynamic_shapes=tuple(shapes))
        options = {**_OPTIONS, "aot_inductor.metadata": {METADATA: json.dumps(asdict(needs))}}
        partial = package.with_name(f"{package.stem}.{os.getpid()}.pt2")
        try:
            torch._inductor.aoti_compile_and_package(exported, package_path=str(partial), inductor_configs=options)
            os.replace(partial, package)
        finally:
            partial.unlink(missing_ok=True)


def main() -> None:
    """Compiles what the standard input asks for; notes beside the package why a layer cannot be compiled."""
    name, threads, form, layer = pickle.load(sys.stdin.buffer)
    package = Path(name)
    os.umask(0o077)  # others write nothing of it
    torch.set_num_threads(threads)
    try:
        compile_layer(layer, form, package)
    except (OSError, MemoryError):  # the next process may have more room
        sys.exit(1)
    except Exception as error:  # whatever a layer does when it is traced
        package.with_suffix(".failed").write_text(f"{type(error).__name__}: {error}"[:2000], encoding="utf-8")
        sys.exit(1)


if __name__ == "__main__":
    main()
