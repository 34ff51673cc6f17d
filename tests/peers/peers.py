#!/usr/bin/env python3
"""Times other libraries' expert layers where `nvfp4-moe bench --json` was run, for `cargo xtask bench-report --peers`.

    python3 peers.py BENCH.json --out PEERS.json

Shapes and numbers of tokens are those of BENCH.json. Needs torch with CUDA; what else is installed is measured too. Every
time is the median of replays of a CUDA graph in which batches follow each other, each with its own random routing and, as
far as memory goes, its own copy of the weights, so that the L2 does not hold what is read next. A layer is first product,
activation, second product and weighted combine; tables of the routing are given.
"""

import argparse
import importlib.metadata
import json
import math
import os
import random
import statistics
import sys

BENCH_FORMAT = "nvfp4-moe bench 1"
PEERS_FORMAT = "nvfp4-moe peers 1"

REPLAYS = 20
WARM_UP_REPLAYS = 3
# As in nvfp4-moe bench: how often the L2 is filled before a batch's experts are read again, and the most of each.
CACHE_FILLS = 4
MOST_BATCHES = 32
MOST_COPIES = 8
MATMUL_SIZE = 8192


class Unusable(Exception):
    """What cannot be measured, in a sentence."""


# What needs no GPU.


def read_bench(path):
    """The shapes of a measurement of this project, and its GPU's name."""
    try:
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot read {path}: {error}; make it with nvfp4-moe bench --json") from error
    found = bench.get("format") if isinstance(bench, dict) else None
    if found != BENCH_FORMAT:
        raise Unusable(f"{path} has the format {found!r}, expected {BENCH_FORMAT!r}; make it with nvfp4-moe bench --json")
    try:
        shapes = [
            {
                **{name: shape[name] for name in ("shape", "hidden", "intermediate", "experts", "topk")},
                "limit": limit_of(shape["activation"]),
                "tokens": [row["tokens"] for row in shape["rows"]],
            }
            for shape in bench["shapes"]
        ]
        return shapes, bench["machine"]["gpu"]
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{path} is damaged: {error!r}; make it again with nvfp4-moe bench --json") from error


def limit_of(activation):
    """The clamp of `SwiGLU with limit 10`, or None."""
    _, found, limit = activation.partition("with limit ")
    return float(limit) if found else None


def random_routing(tokens, experts, topk, seed):
    """`topk` different experts for each token, one list in the order of (token, k)."""
    source, all_experts = random.Random(seed), range(experts)
    return [expert for _ in range(tokens) for expert in source.sample(all_experts, topk)]


def sorted_entries(ids, experts):
    """Entries sorted by expert, where each entry is then, and where each expert ends."""
    order = sorted(range(len(ids)), key=ids.__getitem__)
    places = [0] * len(ids)
    for place, entry in enumerate(order):
        places[entry] = place
    counts = [0] * experts
    for expert in ids:
        counts[expert] += 1
    ends = []
    for count in counts:
        ends.append((ends[-1] if ends else 0) + count)
    return order, places, ends


def padded_blocks(ids, experts, block):
    """Entries sorted by expert, each expert padded to whole blocks by the number of entries; the expert of each block."""
    order, _, ends = sorted_entries(ids, experts)
    entries, owners, begin = [], [], 0
    for expert, end in enumerate(ends):
        blocks = math.ceil((end - begin) / block)
        entries += order[begin:end] + [len(ids)] * (blocks * block - (end - begin))
        owners += [expert] * blocks
        begin = end
    return entries, owners


def batches_of(l2_bytes, expert_bytes, experts, topk, tokens):
    """Batches that must take turns so that the L2 does not hold what the next one reads."""
    touched = expert_bytes * experts * (1 - max(0.0, 1 - topk / experts) ** tokens)
    return min(max(math.ceil(CACHE_FILLS * l2_bytes / touched), 2), MOST_BATCHES)


# What does.


def graph_times(torch, run):
    """Milliseconds of replays of what `run` queues."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # Compiles whatever has to be.
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for after in events[1:]:
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in zip(events, events[1:])]


def matmul_rate(torch):
    """TFLOP/s of a large dense bf16 product."""
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    times = graph_times(torch, lambda: torch.matmul(left, right, out=out))
    rate = lambda ms: 2 * MATMUL_SIZE**3 / (ms * 1e9)
    return {"best": rate(min(times)), "median": rate(statistics.median(times))}


class Batch:
    """Inputs of one forward."""

    def __init__(self, torch, shape, tokens, seed):
        int32 = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.tokens, self.topk = tokens, shape["topk"]
        self.ids = random_routing(tokens, shape["experts"], self.topk, seed)
        order, places, ends = sorted_entries(self.ids, shape["experts"])
        self.hidden = torch.randn(tokens, shape["hidden"], device="cuda").bfloat16()
        self.weights = torch.rand(tokens, self.topk, device="cuda")
        self.slot_token = int32([entry // self.topk for entry in order])
        self.entry_slot = int32(places).view(tokens, self.topk)
        self.ends = int32(ends)
        self.offsets = torch.tensor([0] + ends, dtype=torch.int64, device="cuda")
        self.tables = {}  # What else a library wants.


def fused(torch, function):
    """One kernel for a few element-wise operations, as libraries have it."""
    return torch.compile(function, dynamic=True)


class Layer:
    """What all peers share: activation, combine."""

    def __init__(self, torch, shape):
        self.torch, self.shape = torch, shape
        limit = shape["limit"]

        def activation(gate_up):
            gate, up = gate_up.float().chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (torch.nn.functional.silu(gate) * up).bfloat16()

        def combine(rows, weights):
            return (rows.view(*weights.shape, -1).float() * weights.unsqueeze(-1)).sum(1).bfloat16()

        def gathered_combine(rows, places, weights):
            return (rows[places].float() * weights.unsqueeze(-1)).sum(1).bfloat16()

        self.activation, self.combine = fused(torch, activation), fused(torch, combine)
        self.gathered_combine = fused(torch, gathered_combine)

    def elements(self):
        """Of one expert."""
        return 3 * self.shape["hidden"] * self.shape["intermediate"]


class TorchGrouped(Layer):
    """torch._grouped_mm on bf16 weights."""

    name, package, bytes_per_element = "torch grouped bf16", "torch", 2

    def copy(self):
        hidden, intermediate, experts = (self.shape[name] for name in ("hidden", "intermediate", "experts"))
        make = lambda rows, k: self.torch.empty(
            experts, rows, k, device="cuda", dtype=self.torch.bfloat16
        ).normal_(std=0.02)
        return make(2 * intermediate, hidden), make(hidden, intermediate)

    def forward(self, weights, batch):
        grouped = self.torch._grouped_mm
        rows = batch.hidden[batch.slot_token]
        rows = grouped(rows, weights[0].transpose(-2, -1), offs=batch.ends)
        rows = grouped(self.activation(rows), weights[1].transpose(-2, -1), offs=batch.ends)
        return self.gathered_combine(rows, batch.entry_slot, batch.weights)


class Humming(Layer):
    """Humming's NVFP4 weights with bf16 activations."""

    package, bytes_per_element = "humming-kernels", 9 / 16

    def __init__(self, torch, shape):
        super().__init__(torch, shape)
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        self.layer_type, self.heuristics = HummingLayer, get_heuristics_config
        self.compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": self.gemm_type}
        self.tuning = [None, None]

    def matrix(self, rows, k):
        with self.torch.device("cuda"):
            layer = self.layer_type(
                shape_n=rows,
                shape_k=k,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                num_experts=self.shape["experts"],
                torch_dtype=self.torch.bfloat16,
            )
        layer = layer.cuda()
        layer.weight.data.random_(0, 256)
        layer.weight_scale.data.copy_(self.torch.rand(layer.weight_scale.shape, device="cuda") + 0.5)
        layer.weight_scale_2.data.fill_(0.01)
        layer.transform()
        return layer

    def copy(self):
        hidden, intermediate = self.shape["hidden"], self.shape["intermediate"]
        layers = self.matrix(2 * intermediate, hidden), self.matrix(hidden, intermediate)
        for at, layer in enumerate(layers):
            if self.tuning[at] is None:
                self.tuning[at] = self.heuristics(layer.humming_config, gemm_type=self.gemm_type)
        return layers

    def product(self, layers, at, rows, batch, **tables):
        entries = batch.tokens * batch.topk
        outputs = self.torch.empty(entries, layers[at].shape_n, device="cuda", dtype=self.torch.bfloat16)
        layers[at].forward(
            rows,
            outputs=outputs,
            valid_shape_m=entries,
            compute_config=self.compute,
            tuning_config=self.tuning[at],
            **tables,
        )
        return outputs


class HummingIndexed(Humming):
    """Gathers rows itself, by a table of padded blocks."""

    name, gemm_type = "Humming indexed", "indexed"

    def tables(self, batch, at):
        entries = len(batch.ids)
        fitting = [config for low, high, config in self.tuning[at] if low < entries <= high]
        if not fitting:
            raise Unusable(f"Humming has no configuration for {entries} rows")
        block = fitting[0]["block_shape"][0]
        if block not in batch.tables:
            rows, owners = padded_blocks(batch.ids, self.shape["experts"], block)
            made = [self.torch.tensor(x, dtype=self.torch.int32, device="cuda") for x in (rows, owners, [len(rows)])]
            batch.tables[block] = dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), made))
        return batch.tables[block]

    def forward(self, layers, batch):
        rows = self.product(layers, 0, batch.hidden, batch, top_k=batch.topk, **self.tables(batch, 0))
        rows = self.product(layers, 1, self.activation(rows), batch, top_k=1, **self.tables(batch, 1))
        return self.combine(rows, batch.weights)


class HummingGrouped(Humming):
    """Rows sorted by expert beforehand."""

    name, gemm_type = "Humming grouped", "grouped_contiguous"

    def forward(self, layers, batch):
        rows = batch.hidden[batch.slot_token]
        rows = self.product(layers, 0, rows, batch, expert_layout=batch.offsets)
        rows = self.product(layers, 1, self.activation(rows), batch, expert_layout=batch.offsets)
        return self.gathered_combine(rows, batch.entry_slot, batch.weights)


PEERS = (TorchGrouped, HummingIndexed, HummingGrouped)


def measure(torch, peer, shape, l2_bytes):
    """The rows of one library and shape."""
    layer, copies, rows = peer(torch, shape), [], []
    expert_bytes = layer.elements() * peer.bytes_per_element
    for tokens in shape["tokens"]:
        try:
            batches = batches_of(l2_bytes, expert_bytes, shape["experts"], shape["topk"], tokens)
            while len(copies) < min(batches, MOST_COPIES):
                free, _ = torch.cuda.mem_get_info()
                if copies and free < 4 * expert_bytes * shape["experts"]:
                    break  # The batches need some too; they have different experts anyway.
                copies.append(layer.copy())
            inputs = [Batch(torch, shape, tokens, seed) for seed in range(batches)]

            def run():
                for at, batch in enumerate(inputs):
                    layer.forward(copies[at % len(copies)], batch)

            with torch.inference_mode():
                times = graph_times(torch, run)
        except Exception as error:  # Whatever a library raises: the others go on.
            say(f"{peer.name} was left out for {shape['shape']} with {tokens} tokens: {error!r}")
            if not copies:
                break
            continue
        us = statistics.median(times) * 1e3 / batches
        say(f"{peer.name}, {shape['shape']}, {tokens} tokens: {us:.1f} us")
        rows.append({"shape": shape["shape"], "tokens": tokens, "layer_us": us})
    return rows


def version_of(package):
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure_all(shapes, gpu, keep):
    """Everything, as PEERS.json has it; `keep` gets what there is after each shape, as this takes minutes."""
    try:
        import torch
    except ImportError as error:
        raise Unusable(f"torch cannot be imported: {error}; install torch with CUDA") from error
    if not torch.cuda.is_available():
        raise Unusable("torch finds no GPU; run this where nvfp4-moe bench ran, with a torch that has CUDA")
    name = torch.cuda.get_device_name()
    if gpu != name:
        raise Unusable(f"BENCH.json is of {gpu!r}, but torch's GPU is {name!r}; measure both on the same GPU")
    l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    found = {"format": PEERS_FORMAT, "gpu": name, "matmul_tflop_per_s": None, "peers": []}
    try:
        found["matmul_tflop_per_s"] = matmul_rate(torch)
    except Exception as error:
        say(f"the dense product was left out: {error!r}")
    for peer in PEERS:
        version = version_of(peer.package)
        if version is None:
            say(f"{peer.name} was left out: {peer.package} is not installed")
            continue
        of_peer = {"name": peer.name, "version": f"{peer.package} {version}", "rows": []}
        for shape in shapes:
            try:
                of_peer["rows"] += measure(torch, peer, shape, l2_bytes)
            except Exception as error:
                say(f"{peer.name} was left out for {shape['shape']}: {error!r}")
            torch.cuda.empty_cache()
            if of_peer["rows"]:
                keep(found | {"peers": found["peers"] + [of_peer]})
        if of_peer["rows"]:
            found["peers"].append(of_peer)
    if found["matmul_tflop_per_s"] is None and not found["peers"]:
        raise Unusable("nothing could be measured; the lines above say why")
    return found


def write(found, path):
    """The whole file or, if that fails, what was there before."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(found, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)


def say(sentence):
    print(sentence, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", metavar="BENCH.json", help="what nvfp4-moe bench --json printed on this GPU")
    parser.add_argument("--out", default="peers.json", metavar="PEERS.json", help="the file to write")
    arguments = parser.parse_args()
    try:
        write(measure_all(*read_bench(arguments.bench), lambda found: write(found, arguments.out)), arguments.out)
    except Unusable as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: cannot write {arguments.out}: {error}")


if __name__ == "__main__":
    main()
