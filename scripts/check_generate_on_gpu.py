"""Generation and load on the GPU at hand: a billion-parameter llama-shaped model, and two image models under load.

Generation (bf16, batch 1, prompt 512): what `redline tune` finds, against transformers' plain `generate` and against a
loop written by hand with a static cache and a CUDA graph. Load: curves of the baseline and of a fast recipe for resnet50
and vit_b_16, with the ratio of the rates they sustain. Every figure is written as soon as it is there; what breaks is
printed and the rest goes on; when --seconds are over the script ends where it is.

    python scripts/check_generate_on_gpu.py --only by-hand --seconds 110
    python scripts/check_generate_on_gpu.py --only recipes --seconds 150
    python scripts/check_generate_on_gpu.py --only tune --seconds 200
    python scripts/check_generate_on_gpu.py --only load --seconds 60
    python scripts/check_generate_on_gpu.py --only fused --seconds 150

`fused` measures the parts of the switch decode-kernels: single products, 4 layers in many variants, and the whole model
with the fastest of them.

All write to the same --out, and compare what is there. The parts share what inductor has compiled and tuned (its cache
folder), so that this order is the quickest: run them on one machine, one after the other. With --device cpu a tiny model
takes the place of the large one, to see that the script runs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raw_records import RawRecords

STARTED = time.perf_counter()
FIELDS = {"hidden_size": 2048, "num_hidden_layers": 16}
"""1.5 billion parameters, of which a token reads 1.4: with llama's own defaults for the rest."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
OTHER_FORMATS = ["fp16", "amp", "amp-bf16", "tf32"]
"""Left out of every search: the question is about bf16."""
SHORT_SPACE = ["bf16", "static-cache", "graphs", "decode-kernels", "compile", "compile:pdl"]
"""Searched where there are less than LONG_S: the whole space has four more kinds of attention and six of compilers."""
LONG_S = 400.0


class Case:
    """The large model on a GPU, or a tiny one on a CPU, where nothing is recorded and no Triton kernel tuned."""

    def __init__(self, device: str, raw: RawRecords) -> None:
        self.is_gpu = device != "cpu"
        self.device, self.raw = device, raw
        self.fields: dict[str, Any] = FIELDS if self.is_gpu else TINY
        self.model = "hf:llama?" + ",".join(f"{name}={value}" for name, value in self.fields.items())
        self.prompt, self.new_tokens = (512, 64) if self.is_gpu else (16, 8)
        if self.is_gpu:
            self.space = SHORT_SPACE
            self.recipes = [
                "bf16+static-cache+sdpa:math+compile:coordinate-descent+graphs",
                "bf16+static-cache+compile:pdl+graphs",
                "bf16+static-cache+sdpa:math+compile:pdl+graphs",
            ]
            self.loads = {
                "resnet50": ("fp16+channels-last+graphs", "500..32000"),
                "vit_b_16": ("fp16+graphs", "250..16000"),
            }
        else:
            self.recipes = ["static-cache", "static-cache+compile:backend=eager"]
            self.space = ["static-cache"]
            self.loads = {"simple_cnn": ("channels-last", "20..640")}

    @property
    def settings(self) -> dict[str, Any]:
        """For Redline."""
        return {
            "task": "generate", "prompt": self.prompt, "new_tokens": self.new_tokens, "batch": 1, "effort": "quick",
            "device": self.device,
        }  # fmt: skip


class Results:
    """Kept in memory and, after every entry, in a file."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit_s = folder, limit_s
        self.file = folder / "generate.json"
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.failed = False

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.perf_counter() - STARTED)

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.file.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"[{time.perf_counter() - STARTED:.0f} s] {name}: {json.dumps(value)[:900]}", flush=True)

    def attempt(self, name: str, needed_s: float, part: Callable[[], Any]) -> Any:
        if self.left_s < needed_s:
            print(f"{name}: left out, {self.left_s:.0f} s are left and it takes about {needed_s:.0f}", flush=True)
            return None
        try:
            value = part()
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.keep(name, {"error": f"{type(error).__name__}: {error}"[:2000]})
            return None
        if value is not None:
            self.keep(name, value)
        return value


class StaticLoop:
    """A prompt read into a static cache, then one token after the other, each in the place of the one before."""

    def __init__(self, case: Case, model: Any, prompt: Any, options: dict[str, Any] | None) -> None:
        import torch
        from transformers import StaticCache

        self.case, self.model, self.prompt, self.options = case, model, prompt, options
        self.token = torch.zeros((1, 1), dtype=torch.long, device=case.device)
        self.place = torch.zeros(1, dtype=torch.long, device=case.device)
        self.held = {"positions": self.place}
        self.takes = inspect.signature(model.forward).parameters
        length = case.prompt + case.new_tokens - 1
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        if "cache_position" not in self.takes:
            self.cache.layers = [placed_layer(self.held, length) for _ in self.cache.layers]
        self._step = self._next if options is None else torch.compile(self._next, dynamic=False, options=options)

    def forward(self, tokens: Any, positions: Any) -> Any:
        self.held["positions"] = positions
        named = {"cache_position": positions} if "cache_position" in self.takes else {}
        found = self.model(
            input_ids=tokens, past_key_values=self.cache, position_ids=positions.unsqueeze(0), use_cache=True,
            logits_to_keep=1, **named,
        )  # fmt: skip
        return found.logits[:, -1]

    def _next(self, tokens: Any, positions: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.options is None:
            logits = self.forward(tokens, positions)
        else:
            with sdpa_kernel([SDPBackend.MATH]):
                logits = self.forward(tokens, positions)
        tokens.copy_(logits.argmax(dim=-1, keepdim=True))
        positions.add_(1)
        return logits

    def read(self) -> None:
        import torch

        self.cache.reset()
        logits = self.forward(self.prompt, torch.arange(self.case.prompt, device=self.case.device))
        self.token.copy_(logits.argmax(dim=-1, keepdim=True))
        self.place.fill_(self.case.prompt)

    def decode(self) -> None:
        self._step(self.token, self.place)

    def read_bytes(self) -> int:
        """Of weights and cache, per token."""
        table = self.model.get_input_embeddings().weight  # a row of it is taken
        weights = sum(each.numel() * each.element_size() for each in self.model.parameters() if each is not table)
        return weights + sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.cache.layers)


def placed_layer(held: dict[str, Any], length: int) -> Any:
    """A layer of a static cache that writes where `held["positions"]` says."""
    from transformers.cache_utils import StaticLayer

    class Placed(StaticLayer):  # type: ignore[misc]
        def update(self, keys: Any, values: Any, *args: Any, **named: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.keys.index_copy_(2, held["positions"], keys)
            self.values.index_copy_(2, held["positions"], values)
            return self.keys, self.values

        def get_seq_length(self) -> Any:
            return held["positions"][0]

    return Placed(max_cache_len=length)


class Hand:
    """What a careful hand writes: the decode step with its choice of the token, compiled and in one CUDA graph."""

    def __init__(self, case: Case) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.case = case
        torch.manual_seed(0)
        with torch.device(case.device):
            self.model = AutoModelForCausalLM.from_config(LlamaConfig(**case.fields)).eval()
        if case.is_gpu:
            self.model = self.model.to(torch.bfloat16)
        shape = (1, case.prompt)
        self.prompt = torch.randint(0, self.model.config.vocab_size, shape, device=case.device)
        self.copied = copy_bytes_per_s(case)

    def wait(self) -> None:
        import torch

        if self.case.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], times: int = 3) -> float:
        taken = []
        for _ in range(times):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def plain(self) -> dict[str, Any]:
        """transformers' own `generate`."""
        count = self.case.new_tokens
        settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
        one = {**settings, "max_new_tokens": 1, "min_new_tokens": 1}
        self.model.generate(self.prompt, **one)
        whole_s = self.seconds(lambda: self.model.generate(self.prompt, **settings), 2)
        one_s = self.seconds(lambda: self.model.generate(self.prompt, **one), 2)
        return {
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "copy_bytes_per_s": self.copied,
            "tokens_per_s": count / whole_s,
            "tpot_s": (whole_s - one_s) / (count - 1),
        }

    def static(self, options: dict[str, Any] | None, *, profile: bool = False) -> dict[str, Any]:
        """A static cache and one graph per token; `options` of inductor, None: not compiled."""
        loop = StaticLoop(self.case, self.model, self.prompt, options)
        loop.read()
        started = time.perf_counter()
        loop.decode()
        self.wait()
        first_s = time.perf_counter() - started
        replay, others = self._recorded(loop.decode), self.case.new_tokens - 1

        def whole() -> None:
            loop.read()
            for _ in range(others):
                replay()

        whole()
        whole_s, read_s = self.seconds(whole, 5), self.seconds(loop.read, 5)
        tpot_s = (whole_s - read_s) / others
        found: dict[str, Any] = {
            "tokens_per_s": self.case.new_tokens / whole_s,
            "ttft_s": read_s,
            "tpot_s": tpot_s,
            "bandwidth_share": loop.read_bytes() / tpot_s / self.copied,
            "first_call_s": first_s,
        }
        loop.read()
        if profile:
            found["kernels"] = self._kernels(replay)
        return found

    def _recorded(self, decode: Callable[[], None]) -> Callable[[], None]:
        import torch

        if not self.case.is_gpu:
            return decode
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                decode()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            decode()
        replay: Callable[[], None] = graph.replay
        return replay

    def _kernels(self, replay: Callable[[], None], times: int = 8) -> list[list[Any]]:
        """Each kernel of a token with its calls and microseconds, the longest first."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CUDA] if self.case.is_gpu else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            for _ in range(times if self.case.is_gpu else 1):
                replay()
            self.wait()
        taken: dict[str, list[float]] = {}
        for event in profiler.events():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu == self.case.is_gpu:
                taken.setdefault(event.name, []).append(event.time_range.elapsed_us())
        rows = [[name[:90], len(each) / times, round(sum(each) / times, 2)] for name, each in taken.items()]
        return sorted(rows, key=lambda row: -row[2])[:32]


def copy_bytes_per_s(case: Case) -> float:
    import torch

    source = torch.ones(2**31 if case.is_gpu else 2**24, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(8):
        if case.is_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            taken_s = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            target.copy_(source)
            taken_s = time.perf_counter() - started
        best = max(best, 2 * source.numel() / taken_s)
    return best


def by_hand(case: Case, results: Results) -> None:
    import torch

    hand = Hand(case)
    tuned = {"coordinate_descent_tuning": True} if case.is_gpu else {"max_fusion_size": 64}
    with torch.no_grad():
        results.attempt("plain", 8.0, hand.plain)
        results.attempt("hand_graph", 5.0, lambda: hand.static(None))
        results.attempt("hand", 45.0, lambda: hand.static(tuned, profile=True))
        if case.is_gpu:
            results.attempt("hand_pdl", 70.0, lambda: hand.static({**tuned, "triton.enable_pdl": True}, profile=True))
    compare(results)


def one_recipe(case: Case, recipe: str) -> dict[str, Any]:
    import redline
    from redline.api.workspace import Workspace

    with Workspace(journal=case.raw.journal) as workspace:
        result = redline.run(case.model, recipes=[recipe], workspace=workspace, **case.settings)
    print(result, flush=True)
    names = ("recipe", "throughput_per_s", "ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    more = ("weight_bytes", "cache_bytes", "bandwidth_share", "energy_per_token_j", "numerics", "failure")
    (row,) = json.loads(result.to_json())["results"]
    return {name: row.get(name) for name in (*names, *more)}


def recipes(case: Case, results: Results) -> None:
    for number, recipe in enumerate(case.recipes):
        # The first finds in inductor's cache what the loop by hand had tuned.
        needed_s = 20.0 if number == 0 else 60.0
        results.attempt(f"recipe {recipe}", needed_s, lambda recipe=recipe: one_recipe(case, recipe))
        compare(results)
    timed = [row for row in rows_of(results) if row["tpot_s"]]
    if timed:
        fastest = min(timed, key=lambda row: row["tpot_s"]["p50"])["recipe"]
        results.attempt("profile", 35.0, lambda: profiled(case, fastest))


def profiled(case: Case, recipe: str) -> dict[str, Any]:
    """Where the time of the decode step goes, kernel by kernel."""
    import redline
    from redline.api.workspace import Workspace

    settings = {name: value for name, value in case.settings.items() if name != "effort"}
    with Workspace(journal=case.raw.journal) as workspace:
        found = redline.profile(case.model, recipe=recipe, workspace=workspace, **settings)
    print(found, flush=True)
    kernels = [{"name": row.short_name, "calls": row.calls, "total_s": row.total_s} for row in found.profile.kernels]
    return {"findings": [row.evidence for row in found.profile.findings], "kernels": kernels[:40]}


def tune(case: Case, results: Results) -> None:
    rows = [row for row in rows_of(results) if "decode-kernels" in row["recipe"]]
    seeds = [min(rows, key=lambda row: row["tpot_s"]["p50"])["recipe"]] if rows else []
    best = results.attempt("tune", 30.0, lambda: tuned(case, results.left_s - 25.0, seeds))
    found = (best or {}).get("recipe")
    if found and f"recipe {found}" not in results.found:
        results.attempt(f"recipe {found}", 20.0, lambda: one_recipe(case, found))
    compare(results)


def tuned(case: Case, budget_s: float, seeds: list[str]) -> dict[str, Any]:
    """`seeds`: recipes of another part that the search tries too."""
    import redline
    from redline.api.workspace import Workspace

    space = {"switches": case.space} if budget_s < LONG_S else {"without": OTHER_FORMATS}
    with Workspace(history=case.raw.history("tune")) as workspace:
        best = redline.tune(
            case.model, budget=budget_s, objective="tpot", replicates=3, recipes=seeds, workspace=workspace, **space,
            **case.settings,
        )  # fmt: skip
    print(best, flush=True)
    leader = best.summary.leader
    return {"recipe": leader.recipe if leader else None, **space, "text": str(best), "snippet": best.snippet}


def load(case: Case, results: Results) -> None:
    for model, (recipe, rates) in case.loads.items():
        part = results.attempt(f"load_{model}", 15.0, lambda m=model, f=recipe, r=rates: loaded(case, m, f, r))
        if part:
            (results.folder / f"load_{model}.txt").write_text(part["text"])


def loaded(case: Case, model: str, recipe: str, rates: str) -> dict[str, Any]:
    import redline
    from redline.api.workspace import Workspace

    with Workspace(journal=case.raw.journal) as workspace:
        result = redline.load(
            model, rate=rates, recipes=["baseline", recipe], max_batch=32, max_wait="2ms", slo_p99="50ms", seconds=0.4,
            effort="quick", device=case.device, workspace=workspace,
        )  # fmt: skip
    print(result, flush=True)
    rows = json.loads(result.to_json())["loads"]
    first, other = (row["sustainable_rate"] for row in rows)
    return {"loads": rows, "ratio": other / first if first and other else None, "text": str(result)}


PDL = {"triton.enable_pdl": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {"linear": False, "attention": False},
    "linear": {"attention": False},
    "attention": {"linear": False},
    "no early launch": {"options": {}},
}
"""Of 4 layers; where nothing else is said, both kinds of kernels, nothing ahead, and small kernels that launch early."""
AHEAD_MIB = (0, 4)
COMBINED = {**PDL, "combo_kernels": True}


def fused(case: Case, results: Results) -> None:
    """Which variant is the fastest on 4 layers, and that one on the whole model."""

    def token_us(name: str, **variant: Any) -> float:
        profile = name in ("0 MiB ahead", "combined")
        found = results.attempt(f"fused {name}", 8.0, lambda: FusedStep(case, **variant).timed(profile=profile))
        return found["token_us"] if found else float("inf")

    results.attempt("products", 12.0, lambda: products(case))
    taken = {ahead: token_us(f"{ahead} MiB ahead", ahead_mib=ahead) for ahead in AHEAD_MIB}
    ahead = min(taken, key=lambda each: taken[each])
    combined = token_us("combined", ahead_mib=ahead, options=COMBINED) < taken[ahead]
    if case.is_gpu:
        compilers = ["compile:pdl,combo_kernels=true", "compile:pdl"] if combined else ["compile:pdl"]
        for compiler in [*compilers, "compile"]:
            recipe = f"bf16+static-cache+decode-kernels:ahead_mib={ahead}+{compiler}+graphs"
            results.attempt(f"recipe {recipe}", 30.0, lambda recipe=recipe: one_recipe(case, recipe))
    compare(results)
    for name, variant in VARIANTS.items():
        token_us(name, **variant)


class FusedStep:
    """The decode step of a few layers, with the kernels of `decode-kernels`, compiled and recorded."""

    def __init__(
        self,
        case: Case,
        *,
        linear: bool = True,
        attention: bool = True,
        ahead_mib: int = 0,
        options: dict[str, Any] | None = None,
        layers: int = 4,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        from redline.bench.recipe import kernels
        from redline.bench.workload.decoder import NextToken
        from redline.bench.workload.hf_decoder import HfDecoder

        torch._dynamo.reset()
        torch.manual_seed(0)
        self.case = case
        with torch.device(case.device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**{**case.fields, "num_hidden_layers": layers})).eval()
            prompt = torch.randint(0, model.config.vocab_size, (1, case.prompt))
            self.token, self.place = torch.zeros((1, 1), dtype=torch.long), torch.zeros(1, dtype=torch.long)
        dtype = torch.bfloat16 if case.is_gpu else torch.float32
        self.decoder = HfDecoder(model, prompt, case.new_tokens).to(dtype).eval()
        self.decoder.is_static = True
        with torch.no_grad():
            self.decoder.begin()
            if linear:
                step = lambda: self.decoder(self.token, self.place)  # noqa: E731
                kernels.use_row_products(self.decoder, step, ahead_mib * 2**20)
            stepped = kernels.WithOneQueryAttention(self.decoder) if attention else self.decoder
            for tensor in (self.token, self.place):
                torch._dynamo.mark_static_address(tensor)
            how = {"options": PDL if options is None else options} if case.is_gpu else {"backend": "eager"}
            self.step = torch.compile(NextToken(stepped), dynamic=False, **how)

    def read(self) -> None:
        import torch

        self.decoder.begin()
        self.decoder.start = 0
        logits = self.decoder(self.decoder.prompt, torch.arange(self.case.prompt, device=self.case.device))
        self.decoder.start = None
        self.token.copy_(logits.argmax(dim=-1, keepdim=True))
        self.place.fill_(self.case.prompt)

    def timed(self, *, profile: bool = False) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            hand = Hand.__new__(Hand)
            hand.case = self.case
            self.read()
            started = time.perf_counter()
            self.step(self.token, self.place)
            hand.wait()
            first_s = time.perf_counter() - started
            self.place.zero_()
            replay = hand._recorded(lambda: self.step(self.token, self.place))
            others = self.case.new_tokens - 2

            def tokens() -> None:
                for _ in range(others):
                    replay()

            taken = []
            for _ in range(7):
                self.read()
                taken.append(hand.seconds(tokens, 1) / others)
            self.read()
            written = []
            for _ in range(min(8, others)):
                replay()
                written.append(int(self.token))
            self.place.fill_(self.case.prompt)
            found: dict[str, Any] = {
                "token_us": 1e6 * statistics.median(taken),
                "first_call_s": first_s,
                "tokens": written,
            }
            if profile:
                found["kernels"] = hand._kernels(replay)
            return found


def products(case: Case) -> dict[str, Any]:
    """Each product of a layer alone, from memory rather than from a cache: bytes per second by torch and by the kernel."""
    import torch

    from redline.bench.recipe import kernels

    hidden = case.fields["hidden_size"]
    inner = case.fields.get("intermediate_size", 11008)
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (2 * inner, hidden), "down": (hidden, inner)}
    found = {}
    for name, (rows, width) in shapes.items():
        copies = max(2, 400 * 2**20 // (rows * width * 2)) if case.is_gpu else 2
        dtype = torch.bfloat16 if case.is_gpu else torch.float32
        weights = [torch.randn(rows, width, dtype=dtype, device=case.device) for _ in range(copies)]
        x = torch.randn(1, width, dtype=dtype, device=case.device)
        size = rows * width * x.element_size()
        row = {"bytes": size}
        ways: dict[str, Callable[[Any], Any]] = {
            "torch": lambda weight, x=x: torch.nn.functional.linear(x, weight),
            "kernel": lambda weight, x=x: kernels.rows_product(x, weight, None, [], 0),
        }
        for way, work in ways.items():
            row[f"{way}_us"] = 1e6 * product_s(case, work, weights)
            row[f"{way}_bytes_per_s"] = size / row[f"{way}_us"] * 1e6
        if case.is_gpu:
            row["chosen"] = str(kernels.tuned_rows_kernel.best_config)
        found[name] = row
    return found


def product_s(case: Case, work: Callable[[Any], Any], weights: list[Any]) -> float:
    """Seconds of one product, over all copies of its weight in one graph."""
    import torch

    hand = Hand.__new__(Hand)
    hand.case = case
    with torch.no_grad():
        replay = hand._recorded(lambda: [work(weight) for weight in weights])
        replay()
        return hand.seconds(replay, 9) / len(weights)


def rows_of(results: Results) -> list[dict[str, Any]]:
    rows = [row for name, row in results.found.items() if name.startswith("recipe ") and "error" not in row]
    return [row for row in rows if row["decode_tokens_per_s"]]


def compare(results: Results) -> None:
    """The fastest of all recipes against plain `generate` and against what was written by hand."""
    rows, plain = rows_of(results), results.found.get("plain", {})
    hands = [results.found.get(name, {}) for name in ("hand_graph", "hand", "hand_pdl")]
    by_hand_s = [hand["tpot_s"] for hand in hands if "tpot_s" in hand]
    if not rows or not by_hand_s or "tokens_per_s" not in plain:
        return
    best = min(rows, key=lambda row: row["tpot_s"]["p50"])
    results.keep(
        "compared",
        {
            "recipe": best["recipe"],
            "tpot_s": best["tpot_s"]["p50"],
            "bandwidth_share": best["bandwidth_share"],
            "over_plain_generate": best["throughput_per_s"] / plain["tokens_per_s"],
            "tpot_over_by_hand": best["tpot_s"]["p50"] / min(by_hand_s),
        },
    )


PARTS = {"by-hand": by_hand, "recipes": recipes, "tune": tune, "load": load, "fused": fused}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("generate-results"))
    arguments.add_argument("--only", choices=tuple(PARTS))
    arguments.add_argument("--seconds", type=float, default=520.0)
    arguments.add_argument("--device", default="cuda")
    given = arguments.parse_args()
    results = Results(given.out, given.seconds - 3)
    with RawRecords(given.out) as raw:
        watch = threading.Timer(given.seconds - 2, stop, [raw])
        watch.daemon = True
        watch.start()
        for name, part in PARTS.items():
            if given.only in (None, name):
                part(Case(given.device, raw), results)
    return 1 if results.failed else 0


def stop(raw: RawRecords) -> None:
    """End where it is: workers end with this process, and what was found is written."""
    print("the time is over", flush=True)
    raw.write()
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
