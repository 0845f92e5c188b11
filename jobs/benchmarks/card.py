"""What a card does, measured in minutes by whoever has one: `card`.

Enters: sizes; no text, no Ray. Leaves: a JSON line for each side of a measurement as it comes, on the terminal and in
`card.jsonl`, to which every run adds. Fields name their units: `seconds` of a call or a step, `bytes_per_second`. Sides
take turns; `speed_ratio` is the first side's time by a side's own, the median of the turns'. What fails, or has no time
left, has a line that says so: `error`, `left_out`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.output import describe_commit, describe_machine, describe_versions
from benchmarks.steps import BASES, VOCAB_SIZE, make_model, make_own
from benchmarks.timing import compare, make_batch, synchronize, take_turns
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model import fused
from domext_ray.model.domext import layers_domext
from domext_ray.model.domext.layers_domext import (
    apply_gates,
    apply_rotary_pos_emb,
    attend_sequences,
    to_autocast_dtype,
)
from domext_ray.model.domext.words_domext import compute_losses
from domext_ray.storage import Log, Place
from domext_ray.training.cost import count_flops, find_peak, make_full_batch, time_call
from domext_ray.training.engine import check_compiler, compile_layers, join_alone, leave_alone
from domext_ray.training.losses import MaskedLoss

NUM_TURNS, LOSS_STEPS, PROFILED_STEPS, NUM_KERNELS = 3, 5, 3, 40
"""Turns of sides; steps after which losses are compared; profiled steps; kernels that are told, of a step."""
SIZES = {"T": 32_768, "N": 128, "M": 512, "B": 64, "P": 5120, "V": 30_522, "d": 768, "f": 3072, "h": 12, "e": 64}
SIZES |= {"g": 2304, "c": 32, "1": 1, "2": 2}
"""Tokens of a step, of rows and of longer ones, these, predicted tokens, words; width, FFN, heads, their size; the
width of ModernBERT's FFN with its gates, half the size of a head."""
TINY = SIZES | {
    "T": 64,
    "N": 16,
    "M": 32,
    "B": 2,
    "P": 10,
    "V": 100,
    "d": 48,
    "f": 96,
    "h": 3,
    "e": 16,
    "g": 96,
    "c": 8,
}
BF16, FP32 = torch.bfloat16, torch.float32
Line = dict[str, Any]
Side = tuple[Callable[[], Any], Mapping[str, float], Line]
"""A call, amounts of what it does that become rates, such as `flops`, and what else is told of it."""
Measurements = Iterator[tuple[Line, Mapping[str, Callable[[], Side]]]]
"""What each is of, and what makes the sides that take turns."""


def compare_sides(device: torch.device, makers: Mapping[str, Callable[[], Side]]) -> Iterator[Line]:
    """Make sides, let them take turns, and yield a line of each; one that cannot be made or called stops no other."""
    sides = dict[str, Side]()
    for name, make in makers.items():
        try:
            side = make()
            side[0]()
            sides[name] = side
        except Exception as error:
            yield {"side": name, **describe_error(error)}
    turns = take_turns({name: partial(time_call, call, device) for name, (call, *_) in sides.items()}, NUM_TURNS)
    peak = find_peak(torch.cuda.get_device_name()) if device.type == "cuda" else 0.0
    for name, (_, amounts, figures) in sides.items():
        seconds, ratio = statistics.median(turns[name]), compare(next(iter(turns.values())), turns[name])["ratio"]
        line = {"side": name, "seconds": seconds, "speed_ratio": ratio, **figures}
        line |= {f"{what}_per_second": amount / seconds for what, amount in amounts.items()}
        line |= {"mfu": amounts["flops"] / seconds / peak} if peak and "flops" in amounts else {}
        written = sides.get(f"{name.split(', ')[0]}, as written", sides[name])[2]
        yield line | ({"loss_difference": figures["loss"] - written["loss"]} if "loss" in figures else {})


def describe_error(error: Exception) -> Line:
    """Return why something was not measured: it needs what is not here, or it failed."""
    said = hide_places(str(error).split("\n")[0])
    return {"left_out": said} if isinstance(error, ConfigError) else {"error": f"{type(error).__name__}: {said}"}


def run_passes(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Compute a function and the gradients of its inputs, if they have any; its outputs stand for their gradients."""
    outputs, asked = tree_leaves(function(*inputs)), [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(outputs, asked, outputs) if asked else outputs


# --- products and attention ---


def measure_machine(options: argparse.Namespace) -> Measurements:
    """What figures depend on, and the best that the card does."""
    about: Line = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "sizes": options.sizes}
    about["attention_priorities"] = [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]
    if options.device == "cuda":
        found = torch.cuda.get_device_properties(options.device)
        about |= {"capability": [found.major, found.minor], "memory_bytes": found.total_memory}
        about["driver"] = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    source, size = torch.rand(options.sizes["T"], options.sizes["f"], 2, device=options.device), options.sizes["T"] // 4
    copy = partial(torch.empty_like(source).copy_, source), {"bytes": 2 * source.nbytes}, about
    yield {}, {"copy": lambda: copy, "cube": partial(make_products, options, "forward", size, [(size, size)])}


def measure_products(options: argparse.Namespace) -> Measurements:
    """A linear layer's three products, each alone or joined with others; of weights' gradients also a part in fp32."""
    d, e, f, words = (options.sizes[letter] for letter in "defV")
    layers: dict[str, dict[str, list[tuple[int, int]]]] = {  # outputs and inputs of each that a call computes, by side
        "query, key, value": {"three": [(d, d)] * 3, "joined": [(3 * d, d)]},
        "query, key, value, with a head": {"six": [(d, d), (e, d)] * 3, "joined": [(3 * (d + e), d)]},
        "heads' output": {"two": [(d, d), (d, e)], "joined": [(d, d + e)]},
        "FFN's input": {"two": [(f, d), (f // 3, d)], "joined": [(f + f // 3, d)]},
        "FFN's output": {"two": [(d, f), (d, f // 3)], "joined": [(d, f + f // 3)]},
        "a head": {"one": [(e, d)]},
        "words": {"as they are": [(words, d)], "padded": [(-(-words // 16) * 16, d)]},
    }
    for kind, (name, sides) in product(PRODUCTS, layers.items()):
        rows = options.sizes["P" if name == "words" else "T"]
        makers = {side: partial(make_products, options, kind, rows, sizes) for side, sizes in sides.items()}
        yield {"name": name, "product": kind, "rows": rows}, makers


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda states, weight, gradient: F.linear(states, weight),
    "to inputs": lambda states, weight, gradient: gradient @ weight,
    "to weights": lambda states, weight, gradient: gradient.t() @ states,
    "to weights, strided, fp32": lambda states, weight, gradient: torch.mm(gradient.t(), states, out_dtype=FP32),
}


def make_products(options: argparse.Namespace, kind: str, rows: int, sizes: Sequence[tuple[int, int]]) -> Side:
    """Return products of states [rows, inputs], weights [outputs, inputs] and gradients [rows, outputs], in turn."""
    if (is_strided := "strided" in kind) and options.device == "cpu":
        raise ConfigError("a product of bf16 with fp32 output needs a card.")
    draw = partial(torch.randn, device=options.device, dtype=BF16)
    tensors = [(draw(rows, k), draw(n, k), draw(rows, n * (1 + is_strided))[:, -n:]) for n, k in sizes]
    return (
        lambda: [PRODUCTS[kind](*trio) for trio in tensors],
        {"flops": sum(2 * rows * n * k for n, k in sizes)},
        {},
    )


def attend_by_bounds(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as a run on a card does: rows end to end, with their bounds."""
    rows, _, length, size = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for tensor in (query, key, value))
    bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    layer: Any = argparse.Namespace(is_causal=False)
    return attend_sequences(layer, q, k, v, None, size**-0.5, cu_seq_lens=bounds, max_length=length)[0]


attend = F.scaled_dot_product_attention
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(attend),
    "cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(attend),
    "varlen": attend_by_bounds,
    "masked": lambda q, k, v: attend(q, k, v, q.new_ones(len(q), 1, 1, q.shape[2], dtype=torch.bool)),
}


def measure_attention(options: argparse.Namespace) -> Measurements:
    """Attention of full rows; AF Adapter's extra head attends in a call of its own, or in one with the others."""
    tokens, heads, size = (options.sizes[letter] for letter in "The")

    def make(name: str, length: int, trains: bool, groups: Sequence[int]) -> Side:
        if name in ("cuDNN", "varlen") and options.device == "cpu":
            raise ConfigError(f"{name} needs a card.")
        draw = partial(torch.randn, device=options.device, dtype=BF16, requires_grad=trains)
        inputs = [[draw(tokens // length, length, n, size).transpose(1, 2) for _ in range(3)] for n in groups]
        flops = (12 if trains else 4) * sum(groups) * tokens * length * size
        return lambda: [run_passes(ATTENTION[name], trio) for trio in inputs], {"flops": flops}, {}

    for length, trains in product((options.sizes["N"], options.sizes["M"]), (False, True)):
        yield (
            {"passes": "both" if trains else "forward", "length": length},
            {
                f"{name}, {' + '.join(map(str, groups))} heads": partial(make, name, length, trains, groups)
                for groups, name in product(((heads, 1), (heads + 1,)), ATTENTION)
            },
        )


# --- elementwise ---


def normalize_for_products(normalize: Callable[..., Tensor], x: Tensor, residual: Tensor, *norm: Tensor) -> Any:
    """Return the state that a sublayer leaves, and what products read of it."""
    with torch.autocast(x.device.type, BF16):
        states = normalize([x, residual], *norm, 1e-12)
        return states, to_autocast_dtype(states)


def lose(compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the sum of the losses of scores, of which the first is right."""
    return compute(x, x.new_zeros(len(x), dtype=torch.long)).sum()


ELEMENTWISE: dict[str, dict[str, Callable[..., Any]]] = {
    "add and LayerNorm": {
        "as written": partial(normalize_for_products, layers_domext.normalize_sum),
        "fused": partial(normalize_for_products, fused.normalize_sum),
    },
    "GELU": {"as written": F.gelu},
    "gated GELU": {
        "as written": partial(apply_gates, activation=torch.nn.GELU()),
        "fused": partial(fused.gate_gelu, activation=torch.nn.GELU()),
    },
    "rotary": {"as written": apply_rotary_pos_emb, "fused": fused.rotate},
    "loss": {"as written": partial(lose, compute_losses), "fused": partial(lose, fused.compute_losses_at_once)},
}
"""What is called, by side: first as the model computes it, then other ways; torch's GELU is one kernel a pass."""
INPUTS = {
    "add and LayerNorm": (2, [("Td", BF16), ("Td", FP32), ("d", FP32), ("d", FP32)]),
    "GELU": (2, [("Tf", BF16)]),
    "gated GELU": (2, [("Tg", BF16)]),
    "rotary": (1, [("BhMe", BF16), ("BhMe", BF16), ("12Mc", FP32)]),
    "loss": (2, [("PV", BF16)]),
}
"""Passes that must read the inputs, and these; a base's frozen weights and angles have no gradient."""


def measure_elementwise(options: argparse.Namespace) -> Measurements:
    """Both passes, and the rate of the bytes that must be moved at least."""
    for name, ways in ELEMENTWISE.items():
        yield {"name": name}, {way: partial(make_elementwise, options, name, way) for way in ways}


def make_elementwise(options: argparse.Namespace, name: str, way: str, *, dynamic: bool | None = None) -> Side:
    """Return both passes of one of `ELEMENTWISE`; with `dynamic` it is compiled, for all shapes or for one."""
    (reads, asked), function, draw = INPUTS[name], ELEMENTWISE[name][way], partial(torch.randn, device=options.device)
    shapes = [([options.sizes[letter] for letter in letters], dtype, letters[0] in "TBP") for letters, dtype in asked]
    inputs = [draw(shape, dtype=dtype, requires_grad=trains) for shape, dtype, trains in shapes]
    function = function if dynamic is None else torch.compile(function, dynamic=dynamic)
    read, written = (sum(tensor.nbytes for tensor in of) for of in (inputs, tree_leaves(function(*inputs))))
    # Gradients of inputs are written once; outputs are written, and their gradients read.
    return partial(run_passes, function, inputs), {"bytes": (reads + 1) * read + 2 * written}, {}


# --- steps, and what they launch ---

VARIANTS: dict[str, Any] = {"as written": {"joined": False}, "joined": {"joined": True}}
VARIANTS |= {"joined, fused": {"joined": True, "fused": True}}
VARIANTS |= {"joined, captured": {"joined": True, "fixed_shapes": True, "capture": True}}
"""Ways in which a step computes the same, by the engine's options; losses are compared with the first's."""
ALL = ("full", "af", "lora", "bottleneck", "exbert")
STEPS = (("bert", "N", 1, ALL), ("bert", "M", 1, ALL), ("modernbert", "M", 1, ALL[:2]), ("bert", "N", 4, ALL[:2]))
"""Layout, which length, the part of the tokens that a step has, and the methods that take turns in all variants."""
PROFILED = (("bert", "N", "af"), ("bert", "N", "full"), ("modernbert", "M", "af"))
KINDS = {
    "fused attention": ("_attention", "flash", "fmha", "sdpa"),
    "matrix products": ("aten::mm", "addmm", "bmm", "linear", "gemm", "cutlass", "nvjet", "splitk"),
    "softmax and loss": ("softmax", "nll_loss", "_losses"),
    "GELU": ("gelu", "_gate"),
    "LayerNorm": ("layer_norm", "layernorm", "gammabeta", "normalize_sum", "_normalize", "_differentiate_norm"),
    "dropout": ("dropout", "bernoulli"),
    "copies and casts": ("copy", "clone", "aten::cat", "catarray", "index_select", "aten::index", "gather", "memcpy"),
    "filling zeros": ("fill", "zero_", "zeros", "memset"),
    "AdamW": ("adam",),
    "sums and scaling": ("aten::add", "aten::mul", "aten::sum", "aten::div", "aten::sub", "elementwise", "reduce"),
}
"""Kernels of a card and operations of a CPU by what their names have in them; the first that fits counts."""


def measure_steps(options: argparse.Namespace) -> Measurements:
    """Whole steps of methods beside full training's."""
    for layout, length, part, methods in STEPS:
        about = {"layout": layout, "length": options.sizes[length], "tokens": options.sizes["T"] // part}
        yield (
            about,
            {
                f"{method}, {variant}": partial(make_step, options, method, about, **engine)
                for method, (variant, engine) in product(methods, VARIANTS.items())
            },
        )


def make_step(
    options: argparse.Namespace, method: str, about: Line, *, dynamic: bool | None = None, **engine: Any
) -> Side:
    """Make a model and its engine, whose options may differ; with `dynamic` its layers are compiled."""
    gc.collect()  # engines that are done with are in cycles, which keep their tensors
    join_alone()
    device, length, rows = torch.device(options.device), about["length"], about["tokens"] // about["length"]
    if "fused" in engine and (fault := fused.find_fault(device)):
        raise ConfigError(fault)
    if "capture" in engine and device.type != "cuda":
        raise ConfigError("it captures CUDA graphs, and this is a CPU.")
    base = BASES[f"tiny-{about['layout']}" if options.quick else f"{about['layout']}-base"]
    options = argparse.Namespace(**{**vars(options), **base, "lengths": [length]})
    batch, before = make_batch(rows, length, VOCAB_SIZE, device), torch.cuda.memory_allocated()
    model, counted = make_model(options, method), make_full_batch(PretrainConfig(), VOCAB_SIZE, length, rows)
    cost = count_flops(MaskedLoss(model, device, bf16=True), counted)
    if dynamic is not None:
        compile_layers(model, device, dynamic=dynamic)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, begun = make_own(options, method, batch, model, **engine), time.perf_counter()
    losses = [step()().loss for _ in range(LOSS_STEPS)]
    figures = {"loss": losses[-1], "first_steps_seconds": time.perf_counter() - begun}
    figures |= {"peak_bytes": torch.cuda.max_memory_allocated() - before} if device.type == "cuda" else {}
    return step, {"tokens": about["tokens"], "flops": cost.forward + cost.backward}, figures


def measure_kernels(options: argparse.Namespace) -> Measurements:
    """What a step launches; where it takes longer than its kernels, the card waits."""
    for layout, length, method in PROFILED:
        about = {"layout": layout, "length": options.sizes[length], "tokens": options.sizes["T"]}
        yield about, {method: partial(profile_step, partial(make_step, options, method, about), options.device)}


def profile_step(make: Callable[[], Side], device: str) -> Side:
    """Trace the card alone, for a host that writes down what it does makes it wait; on a CPU torch's operations."""
    step, amounts, _ = make()
    kind, activity = (DeviceType.CUDA, "CUDA") if device == "cuda" else (DeviceType.CPU, "CPU")
    with profile(activities=[getattr(ProfilerActivity, activity)], acc_events=True) as seen:
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(torch.device(device))
    kernels, seconds = list[Line](), Counter[str]()
    for event in seen.key_averages():
        if event.device_type == kind and not event.is_user_annotation:
            own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            kernels.append({"name": event.key, "kind": name_kind(event.key), "calls": event.count / PROFILED_STEPS})
            kernels[-1]["seconds"] = own / 1e6 / PROFILED_STEPS
            seconds[kernels[-1]["kind"]] += kernels[-1]["seconds"]
    most = sorted(kernels, key=lambda each: -each["seconds"])[:NUM_KERNELS]
    calls = sum(kernel["calls"] for kernel in kernels)
    about = {"calls": calls, "kernel_seconds": seconds.total(), "seconds_by_kind": seconds, "kernels": most}
    return step, amounts, about


def name_kind(kernel: str) -> str:
    """Return what kind of work a kernel is."""
    return next((kind for kind, names in KINDS.items() if any(word in kernel.lower() for word in names)), "all else")


def measure_compiled(options: argparse.Namespace) -> Measurements:
    """What torch.compile makes of the same, for fixed shapes and for free ones, in turn with it as written."""

    def compile_anew(make: Callable[..., Side], *, dynamic: bool) -> Side:
        check_compiler(torch.device(options.device))
        torch.compiler.reset()  # code that is there would be taken, whatever its shapes
        return make(dynamic=dynamic)

    step = partial(
        make_step, options, "af", {"layout": "bert", "length": options.sizes["N"], "tokens": options.sizes["T"]}
    )
    parts = [(name, partial(make_elementwise, options, name, "as written")) for name in ELEMENTWISE]
    for (name, make), free in product([*parts, ("af", step)], (False, True)):
        sides = {f"{name}, as written": make, f"{name}, compiled": partial(compile_anew, make, dynamic=free)}
        yield {"shapes": "free" if free else "fixed"}, sides


# --- the verb ---

BLOCKS: dict[str, tuple[int, Callable[[argparse.Namespace], Measurements]]] = {
    "machine": (10, measure_machine),
    "products": (15, measure_products),
    "attention": (15, measure_attention),
    "elementwise": (5, measure_elementwise),
    "steps": (115, measure_steps),
    "kernels": (35, measure_kernels),
    "compile": (75, measure_compiled),
}
"""A block's share of the time and its measurements, in this order; the shares are the default, in seconds."""


def run_card(options: argparse.Namespace) -> None:
    """Measure blocks one after the other, each for its share of the time and what those before have left of theirs.

    A RunError says that a measurement failed; the others were made.
    """
    if options.device == "cpu" and not options.quick:
        raise ConfigError("--device is 'cpu'; the sizes are for a card, so add --quick, which has tiny ones.")
    options.sizes, device = TINY if options.quick else SIZES, torch.device(options.device)
    chosen, begun = [(name, *block) for name, block in BLOCKS.items() if name in options.only], time.time()
    ends, counts = list(accumulate(share for _, share, _ in chosen)), Counter[str]()
    log = Log(Place(f"{options.output}/card.jsonl"))

    def tell(**line: Any) -> None:
        counts.update(line.keys() & {"error", "left_out"})
        log.add(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    about = {"command": options.command, "measured_at": describe_commit(), "versions": describe_versions()}
    tell(block="start", **about, **describe_machine(device))
    for (name, _, measure), end in zip(chosen, ends, strict=True):
        try:
            for of, makers in measure(options):
                is_over = time.time() >= begun + options.seconds * end / ends[-1]
                over = {"left_out": f"{'; '.join(makers)}: the block's time was over; raise --seconds."}
                for line in [over] if is_over else compare_sides(device, makers):
                    tell(block=name, **of, **line)
        except Exception as error:
            tell(block=name, **describe_error(error))
    tell(block="end", seconds=time.time() - begun, num_errors=counts["error"], num_left_out=counts["left_out"])
    leave_alone()
    if counts["error"]:
        raise RunError(f"{counts['error']} measurements failed; {log.place} says in 'error' what went wrong.")
